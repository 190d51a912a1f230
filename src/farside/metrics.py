"""Counters that cost next to nothing on the hot path.

A :class:`Latencies` is written by one thread and read by any: no lock, and a reader that races with a
writer is off by at most the one sample being written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

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


def read_figures(hits: Sequence[Latencies], misses: Latencies, size: int) -> dict[str, Any]:
    """The ``reads`` of a status: ``size`` bytes were read by ``hits`` in the cache and by ``misses``."""
    local = sum(h.count for h in hits)
    count = local + misses.count
    parts = [*hits, misses]
    p50, p99 = quantile_ns(parts, 0.5), quantile_ns(parts, 0.99)
    return {
        "count": count,
        "local": local,
        "remote": misses.count,
        "bytes": size,
        "local_share": local / count if count else None,
        "p50_ms": p50 / 1e6 if p50 is not None else None,
        "p99_ms": p99 / 1e6 if p99 is not None else None,
    }


class ReadCounts:
    """Reads by threads that come and go, so under a lock instead of a histogram for each thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hits, self._misses = Latencies(), Latencies()
        self._bytes = 0

    def add(self, ns: int, size: int, *, hit: bool) -> None:
        """One read of ``size`` bytes, answered from the cache or not."""
        with self._lock:
            (self._hits if hit else self._misses).add(ns)
            self._bytes += size

    def figures(self) -> dict[str, Any]:
        with self._lock:
            return read_figures([self._hits], self._misses, self._bytes)
