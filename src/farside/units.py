"""Sizes, durations and fractions as people write them, and back.

Sizes: K, M, G, T and P are powers of 1024, with or without "iB" or "B" behind them; a bare number is bytes.
Durations: ms, s, m, h, d, w, also joined ("1h30m"); a bare number is seconds.
"""

from __future__ import annotations

import math
import re

from farside.errors import UsageError

_SIZE_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(I?B)?", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)\s*", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """A size in bytes: ``2T``, ``500M``, ``64KiB``, ``1.5g``, ``4096``.

    Raises:
        UsageError: it is no size.
    """
    match = _SIZE.fullmatch(str(text).strip())
    if match is None or (match[3] and match[3].upper() == "IB" and not match[2]):
        raise UsageError(
            f"{str(text)!r} is not a size", hint="write it like 2T, 500M or 64K (powers of 1024)"
        )
    return int(float(match[1]) * 1024 ** _SIZE_POWERS[match[2].upper()])


def parse_duration(text: str | int | float) -> float:
    """A duration in seconds: ``90s``, ``500ms``, ``1h30m``, ``7d``, ``30``.

    Raises:
        UsageError: it is no duration.
    """
    word = str(text).strip()
    if re.fullmatch(r"\d+(\.\d+)?", word):
        return float(word)
    total, at = 0.0, 0
    while match := _DURATION_PART.match(word, at):
        total += float(match[1]) * _SECONDS[match[2].lower()]
        at = match.end()
    if not word or at != len(word):
        raise UsageError(f"{word!r} is not a duration", hint="write it like 90s, 500ms, 1h30m or 7d")
    return total


def parse_fraction(text: str | int | float) -> float:
    """A share between 0 and 1: ``5%`` or ``0.05``.

    Raises:
        UsageError: it is no share, or not in [0, 1).
    """
    word = str(text).strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", word)
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value < 1:
        raise UsageError(f"{word!r} is not a share below 100 %", hint="write it like 5% or 0.05")
    return value


def format_size(count: float) -> str:
    """``1.5 GiB``: three figures, powers of 1024."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1000:
            break
        value, unit = value / 1024, larger
    if unit == "B" or abs(value) >= 100:
        return f"{value:.0f} {unit}"
    return f"{value:.2f} {unit}" if abs(value) < 10 else f"{value:.1f} {unit}"


def format_count(count: int, noun: str) -> str:
    """``1 file``, ``1,234 files``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_rate(bytes_per_s: float) -> str:
    """A rate of bytes, ``118 MiB/s``."""
    return f"{format_size(bytes_per_s)}/s"


def format_duration(seconds: float) -> str:
    """``850 ms``, ``12.5 s``, ``3m20s``, ``2h05m``, ``4d02h``; "–" for infinity and NaN."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
