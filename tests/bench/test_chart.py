"""Charts: well-formed, inside their frame, with round ticks."""

from __future__ import annotations

import re
from xml.dom import minidom

from hypothesis import given
from hypothesis import strategies as st

from farside.bench.chart import Curve, line_chart, log_ticks, ticks

values = st.floats(min_value=0, max_value=1e12, allow_nan=False)


@given(values, values)
def test_ticks_cover_the_range_and_are_few(one: float, other: float) -> None:
    low, high = sorted((one, other))
    made = ticks(low, high)
    assert 2 <= len(made) <= 9
    assert made[0] <= low + 1e-6 * max(1.0, high)
    assert made[-1] >= high * (1 - 1e-6)


@given(st.floats(min_value=1e-6, max_value=1e9), st.floats(min_value=1e-6, max_value=1e9))
def test_log_ticks_are_powers_of_ten_up_to_the_highest_value(one: float, other: float) -> None:
    low, high = sorted((one, other))
    made = log_ticks(low, high)
    assert 2 <= len(made) <= 8
    assert made[-1] >= high * (1 - 1e-9)


@given(st.lists(st.tuples(values, values), max_size=30), st.booleans())
def test_any_points_make_a_well_formed_picture_inside_its_frame(
    points: list[tuple[float, float]], log: bool
) -> None:
    svg = line_chart('a "title" <&>', "x", [Curve("hub", points)], log=log)
    if svg:
        minidom.parseString(svg.encode())
        for path in re.findall(r'class="line hub" d="M([^"]+)"', svg):
            for point in path.split("L"):
                x, y = map(float, point.split())
                assert 0 <= x <= 720
                assert 0 <= y <= 240


def test_nothing_to_draw_draws_nothing() -> None:
    assert line_chart("t", "x", []) == ""
    assert line_chart("t", "x", [Curve("hub", [(1, 0)])], log=True) == ""
