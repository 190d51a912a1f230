"""What the fetch scheduler keeps about runs of chunks that are queued or on their way, without any I/O."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from enum import IntEnum
from typing import TYPE_CHECKING

import xxhash

from farside.protocol.messages import CHUNK, Block, FileRanges

if TYPE_CHECKING:
    from farside.spoke.cachedfile import CachedFile, Reservation

DIGEST = 16
"""Bytes of one chunk's checksum."""


class Reason(IntEnum):
    """Why a fetch is made, in order of priority."""

    DEMAND = 0
    PLANNED = 1
    READAHEAD = 2
    FILL = 3

    @property
    def label(self) -> str:
        """The word on the wire and in metrics."""
        return _LABELS[self]


_LABELS = ("demand", "planned", "readahead", "fill")


class Arrived:
    """A received run of chunks [first, last): its bytes stay here until they are on disk."""

    __slots__ = ("checksums", "first", "last", "verified", "view")

    def __init__(self, first: int, last: int, view: memoryview, checksums: bytes) -> None:
        self.first, self.last, self.view, self.checksums = first, last, view, checksums
        self.verified = False

    def verify(self) -> bool:
        """Whether every chunk matches its checksum; computed once."""
        if not self.verified:
            view, sums = self.view, self.checksums
            for n in range(self.last - self.first):
                chunk = view[n * CHUNK : (n + 1) * CHUNK]
                if xxhash.xxh3_128_digest(chunk) != sums[n * DIGEST : (n + 1) * DIGEST]:
                    return False
            self.verified = True
        return self.verified


class Waiter:
    """A reader that waits until chunks of [first, last) have arrived, in whatever pieces.

    ``future`` is done when ``missing`` is 0, or has the error. Bit n of it: chunk first + n has to arrive;
    which chunks matters, for a run that arrives may hold others of the range, which are on disk.
    """

    __slots__ = ("first", "future", "last", "missing", "pieces")

    def __init__(self, first: int, last: int, future: asyncio.Future[None]) -> None:
        self.first, self.last, self.future = first, last, future
        self.missing = 0
        self.pieces: list[Arrived] = []

    def mask(self, first: int, last: int) -> int:
        """The bits of chunks [first, last), which are inside the range."""
        return ((1 << (last - first)) - 1) << (first - self.first) if first < last else 0

    def take(self, arrived: Arrived) -> None:
        """Hand over a verified run, if it holds chunks which this reader is missing."""
        got = self.missing & self.mask(max(arrived.first, self.first), min(arrived.last, self.last))
        if not got or self.future.done():
            return
        self.pieces.append(arrived)
        self.missing &= ~got
        if not self.missing:
            self.future.set_result(None)


class Segment:
    """A run of chunks [first, last) of one file that is queued, or on its way.

    Attributes:
        missing: bit n is set while chunk first + n has not arrived (on its way only).
        unsettled: chunks that are not yet on disk, dropped or failed (on its way only).
        arrived: runs received but not yet on disk.
        attempts: how often its bytes were refused.
        streaming: a request for it is running.
    """

    __slots__ = (
        "arrived",
        "attempts",
        "files",
        "first",
        "last",
        "missing",
        "reason",
        "reservation",
        "streaming",
        "unsettled",
        "waiters",
    )

    def __init__(self, files: FileFetch, first: int, last: int, reason: Reason) -> None:
        self.files, self.first, self.last, self.reason = files, first, last, reason
        self.reservation: Reservation | None = None
        self.missing = 0
        self.unsettled = 0
        self.waiters: list[Waiter] = []
        self.arrived: list[Arrived] = []
        self.attempts = 0
        self.streaming = False

    @property
    def bytes(self) -> int:
        return min(self.last * CHUNK, self.files.file.size) - self.first * CHUNK

    def mask(self, first: int, last: int) -> int:
        """The bits of chunks [first, last)."""
        return ((1 << (last - first)) - 1) << (first - self.first)

    def missing_runs(self) -> list[tuple[int, int]]:
        """Runs of chunks that have not arrived."""
        runs: list[tuple[int, int]] = []
        bits, at = self.missing, self.first
        while bits:
            skip = (bits & -bits).bit_length() - 1
            bits >>= skip
            at += skip
            length = (~bits & (bits + 1)).bit_length() - 1
            runs.append((at, at + length))
            bits >>= length
            at += length
        return runs

    def holding(self, chunk: int) -> Arrived | None:
        for run in self.arrived:
            if run.first <= chunk < run.last:
                return run
        return None

    @property
    def wanted(self) -> bool:
        """Some reader still waits for it."""
        return any(not w.future.done() for w in self.waiters)


class FileFetch:
    """Everything queued or on its way for one version of one file.

    A chunk is in at most one of ``flying`` (by chunk) and ``queued`` (sorted, disjoint runs).
    """

    __slots__ = ("file", "flying", "queued", "settled", "verifying")

    def __init__(self, file: CachedFile) -> None:
        self.file = file
        self.flying: dict[int, Segment] = {}
        self.queued: list[Segment] = []
        self.verifying: dict[int, asyncio.Future[None]] = {}
        self.settled: list[asyncio.Future[None]] = []

    @property
    def busy(self) -> bool:
        return bool(self.flying or self.queued or self.verifying or self.settled)

    def not_flying(self, first: int, last: int) -> list[tuple[int, int]]:
        """The parts of [first, last) that are not on their way."""
        flying = self.flying
        if not flying:
            return [(first, last)]
        runs: list[tuple[int, int]] = []
        begin = -1
        for chunk in range(first, last):
            if chunk in flying:
                if begin >= 0:
                    runs.append((begin, chunk))
                    begin = -1
            elif begin < 0:
                begin = chunk
        if begin >= 0:
            runs.append((begin, last))
        return runs

    def add_queued(self, segment: Segment) -> None:
        insort(self.queued, segment, key=_first)

    def remove_queued(self, segment: Segment) -> None:
        del self.queued[bisect_left(self.queued, segment.first, key=_first)]

    def overlapping(self, first: int, last: int) -> list[Segment]:
        """Queued runs that share chunks with [first, last), in order."""
        queued = self.queued
        if not queued:
            return []
        return queued[bisect_right(queued, first, key=_last) : bisect_left(queued, last, key=_first)]

    def neighbours(self, first: int, last: int) -> tuple[Segment | None, Segment | None]:
        """Queued runs that end at ``first`` and begin at ``last``; nothing between is queued."""
        queued = self.queued
        if not queued:
            return None, None
        at = bisect_left(queued, last, key=_first)
        before = queued[at - 1] if at and queued[at - 1].last == first else None
        behind = queued[at] if at < len(queued) and queued[at].first == last else None
        return before, behind


def _first(segment: Segment) -> int:
    return segment.first


def _last(segment: Segment) -> int:
    return segment.last


class Request:
    """One Read on the link: segments, grouped by file in the order of ``ranges``."""

    __slots__ = ("groups", "left", "ranges", "reason", "urgent")

    def __init__(self, segments: list[Segment], reason: Reason, urgent: bool) -> None:
        grouped: dict[int, list[Segment]] = {}
        for segment in segments:
            grouped.setdefault(id(segment.files), []).append(segment)
        self.groups = list(grouped.values())
        self.reason, self.urgent = reason, urgent
        self.left = 0
        ranges: list[FileRanges] = []
        for group in self.groups:
            file = group[0].files.file
            spans: list[tuple[int, int]] = []
            for segment in group:
                for first, last in segment.missing_runs():
                    length = min(last * CHUNK, file.size) - first * CHUNK
                    spans.append((first * CHUNK, length))
                    self.left += length
            ranges.append(FileRanges(file.path, file.key.version, tuple(spans)))
        self.ranges = tuple(ranges)

    def accept(self, block: Block) -> tuple[Segment, int, int] | None:
        """The segment and chunks [first, last) that a block answers; None when nobody asked for it.

        Only whole chunks of the very file and version asked for, not received before, and with a
        checksum for each are an answer.
        """
        if not 0 <= block.file < len(self.groups):
            return None
        asked = self.ranges[block.file]
        if block.path != asked.path or block.version != asked.version:
            return None
        first, rest = divmod(block.offset, CHUNK)
        last = first + len(block.checksums) // DIGEST
        if rest or last <= first or len(block.checksums) % DIGEST:
            return None
        for segment in self.groups[block.file]:
            if segment.first <= first and last <= segment.last:
                mask = segment.mask(first, last)
                size = min(last * CHUNK, segment.files.file.size) - first * CHUNK
                if segment.missing & mask != mask or block.length != size:
                    return None
                return segment, first, last
        return None
