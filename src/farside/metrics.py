"""Counters that cost next to nothing on the hot path.

A :class:`Latencies` is written by one thread and read by any: no lock, and a reader that races with a
writer is off by at most the one sample being written.
"""

from __future__ import annotations

from collections.abc import Iterable

SUB = 8
"""Buckets per power of two: a quantile is right to within 1/8."""


class Latencies:
    """A log-linear histogram of durations in nanoseconds, as HdrHistogram lays it out.

    Attributes:
        count: samples so far.
        total_ns: their sum.
    """

    __slots__ = ("buckets", "count", "total_ns")

    def __init__(self) -> None:
        self.buckets = [0] * (48 * SUB)
        self.count = 0
        self.total_ns = 0

    def add(self, ns: int) -> None:
        """One sample, by the thread that owns this object."""
        self.buckets[_bucket(ns)] += 1
        self.count += 1
        self.total_ns += ns


def _bucket(ns: int) -> int:
    if ns < SUB:
        return max(ns, 0)
    exponent = ns.bit_length() - SUB.bit_length() + 1
    return min(48 * SUB - 1, exponent * SUB + (ns >> (exponent - 1)) - SUB)


def _upper(bucket: int) -> int:
    if bucket < SUB:
        return bucket
    exponent, sub = divmod(bucket, SUB)
    return ((SUB + sub + 1) << (exponent - 1)) - 1


def quantile_ns(parts: Iterable[Latencies], q: float) -> int | None:
    """The ``q`` quantile (0…1) over several histograms, as the upper edge of its bucket; None if empty."""
    merged = [0] * (48 * SUB)
    for part in parts:
        for i, n in enumerate(part.buckets):
            merged[i] += n
    total = sum(merged)
    if not total:
        return None
    rank, seen = q * total, 0
    for i, n in enumerate(merged):
        seen += n
        if n and seen >= rank:
            return _upper(i)
    return _upper(len(merged) - 1)
