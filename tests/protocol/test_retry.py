from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from farside.protocol.retry import backoff


@given(st.floats(0, 1, exclude_max=True))
def test_delays_grow_to_the_bound_and_stay_jittered(rand: float) -> None:
    delays = list(itertools.islice(backoff(0.1, 5.0, rand=lambda: rand), 12))
    bounds = [min(5.0, 0.1 * 2**n) for n in range(12)]
    assert all(b / 2 <= d <= b for d, b in zip(delays, bounds, strict=True))


def test_two_spokes_do_not_come_back_in_step() -> None:
    assert list(itertools.islice(backoff(), 8)) != list(itertools.islice(backoff(), 8))
