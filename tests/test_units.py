from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farside.errors import UsageError
from farside.units import (
    format_duration,
    format_rate,
    format_size,
    parse_duration,
    parse_fraction,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        (4096, 4096),
        ("500M", 500 * 1024**2),
        ("2T", 2 * 1024**4),
        ("64KiB", 65536),
        ("64kb", 65536),
        ("1.5G", 1536 * 1024**2),
        (" 10 G ", 10 * 1024**3),
        ("7B", 7),
    ],
)
def test_sizes_read_as_people_write_them(text: str | int, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "G", "2X", "-1", "1,5G", "1e9", "10 iB", "nan"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("1h", 3600),
        ("500ms", 0.5),
        ("1h30m", 5400),
        ("7d", 604800),
        ("30", 30),
        (2.5, 2.5),
        ("1 m 5 s", 65),
    ],
)
def test_durations_read_as_people_write_them(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "1x", "-5s", "1h30", "soon"])
def test_what_is_no_duration_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="is not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "share"), [("5%", 0.05), ("0.25", 0.25), ("0", 0), (0.1, 0.1), ("12.5 %", 0.125)]
)
def test_shares(text: str | float, share: float) -> None:
    assert parse_fraction(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["100%", "5", "-1%", "", "half"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a share"):
        parse_fraction(text)


@given(st.integers(0, 2**60))
def test_a_size_that_was_written_reads_as_nearly_the_same(count: int) -> None:
    assert parse_size(format_size(count)) == pytest.approx(count, rel=0.006, abs=0.5)


def test_formats() -> None:
    assert format_size(0) == "0 B"
    assert format_size(999) == "999 B"
    assert format_size(1536) == "1.50 KiB"
    assert format_rate(125_000_000) == "119 MiB/s"
    assert format_duration(0.0123) == "12 ms"
    assert format_duration(200) == "3m20s"
    assert format_duration(7500) == "2h05m"
    assert format_duration(93_600) == "1d02h"
    assert format_duration(math.inf) == "–"
