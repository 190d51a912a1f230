"""Readahead for one open file: what to fetch next, given what was read so far. Pure: no clock, no I/O.

A file may be read by several streams at once (threads that share a descriptor, an index at the end and data
at the front), so a few are told apart. A stream is sequential, or strided (the same step between reads of
the same size); everything else is random and gets nothing. The distance grows fourfold each time that the
reader gets as far as the marker, a quarter of the distance on. So it is at the link's window after four or
five steps, most of a window is still to come when more is asked for, and a reader that stops early has cost
little.

Misses are always reported, hits only where they carry a pattern on: ``moves`` says so, from any thread and
without a lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from farside.protocol.messages import CHUNK

FIRST = 2 << 20
"""Readahead behind the first read at offset 0, bytes: programs that look only at a header cost no more."""

LARGE_READ = 512 * 1024
FIRST_LARGE = 8 << 20
"""The same behind a first read of at least LARGE_READ, or half of the limit where that is more: who asks for
so much wants the whole file, and growing step by step would cost a round trip each."""

SMALLEST = 256 * 1024
"""Readahead of a stream that begins in the middle of a file, bytes."""

GROWTH = 4
STREAMS = 4
TOLERANCE = 2 << 20
"""The kernel sends its own readahead in up to this many bytes at once and out of order; reads of a
sequential stream may lie so far behind or ahead of each other."""

MAX_STRIDES = 64
"""Strided reads that are fetched ahead, at most."""

Run = tuple[int, int]
"""First and last chunk, both included."""


class Advice(NamedTuple):
    """What to do after a read.

    Attributes:
        runs: chunks to want, nearest first.
        next_file: bytes to want from the beginning of the file that follows in the directory.
        random: the read belonged to no pattern.
    """

    runs: tuple[Run, ...] = ()
    next_file: int = 0
    random: bool = False


NOTHING = Advice()


@dataclass(slots=True)
class Stream:
    """One sequence of reads.

    Attributes:
        begin: where it began, or where the last read of a strided one began.
        end: end of what was read furthest.
        marker: a read that ends at or before it changes nothing.
        ahead: end of what was asked for, bytes.
        distance: how far to ask beyond the reader, bytes; 0 until it has shown a pattern.
        stride: step between reads of a strided stream; 0 when it is not one.
        size: size of the last read.
        used: turn of the last read, for choosing which stream to replace.
    """

    begin: int
    end: int
    marker: int
    ahead: int
    distance: int = 0
    stride: int = 0
    size: int = 0
    used: int = 0


@dataclass(slots=True)
class Readahead:
    """The streams of one open file of ``size`` bytes.

    Attributes:
        inherited: distance in bytes that the file before it in the directory had reached, when this one is
            read next in a row; its first read at offset 0 goes on from there.
    """

    size: int
    inherited: int = 0
    _streams: list[Stream] = field(default_factory=list)
    _turn: int = 0

    @property
    def distance(self) -> int:
        """The furthest distance of any stream, bytes; hand it to the next file as ``inherited``."""
        return max((s.distance for s in self._streams), default=0)

    def moves(self, offset: int, size: int) -> bool:
        """Whether a read that was in the cache carries a known pattern past its marker. Any thread.

        A hit that belongs to no pattern need not be told: where a new one runs into what is absent, a miss
        begins it.
        """
        end = offset + size
        for stream in self._streams:
            if not stream.distance:
                continue
            if stream.stride:
                if offset == stream.begin + stream.stride:
                    return True
            elif end > stream.marker and stream.end - TOLERANCE <= offset <= stream.ahead + TOLERANCE:
                return True
        return False

    def read(self, offset: int, size: int, limit: int) -> Advice:
        """Note a read of [offset, offset + size).

        Args:
            limit: furthest distance worth asking ahead, bytes: about twice the link's window.
        """
        self._turn += 1
        size = min(size, self.size - offset)
        if size <= 0:
            return NOTHING
        end = offset + size
        stream = self._match(offset, end)
        if stream is not None:
            stream.used = self._turn
            stream.size = size
            stream.stride = 0
            stream.end = max(stream.end, end)
            if stream.end <= stream.marker:
                return NOTHING
            if not stream.distance:
                stream.distance = SMALLEST
            else:
                stream.distance = min(stream.distance * GROWTH, max(limit, SMALLEST))
            return self._extend(stream)
        stream = self._match_stride(offset, size)
        if stream is not None:
            return self._stride(stream, offset, size, limit)
        return self._begin(offset, end, limit)

    # -- sequential -------------------------------------------------------------------------------

    def _match(self, offset: int, end: int) -> Stream | None:
        """The stream that a read continues."""
        for stream in self._streams:
            if stream.stride and stream.distance:
                continue
            slack = TOLERANCE if stream.distance else 0
            # Within what was asked ahead, a jump forward is still the same stream in a hurry.
            if stream.end - slack <= offset <= max(stream.end, stream.ahead) + slack and end > stream.begin:
                return stream
        return None

    def _extend(self, stream: Stream) -> Advice:
        """Ask from where was asked last to ``distance`` beyond the reader, in the next file if need be."""
        goal = stream.end + stream.distance
        stream.marker = min(self.size, stream.end + stream.distance // 4)
        runs: tuple[Run, ...] = ()
        begin, target = max(stream.ahead, stream.end), min(self.size, goal)
        if target > begin:
            stream.ahead = target
            runs = ((begin // CHUNK, (target - 1) // CHUNK),)
        next_file = 0
        if goal > self.size:
            if self.inherited or stream.end - stream.begin > self.size // 2:
                next_file = goal - self.size
            else:  # not read far enough to say that the next file will be read as well; look again halfway
                stream.marker = min(stream.marker, max(stream.end, stream.begin + self.size // 2))
        return Advice(runs, next_file)

    # -- strided ----------------------------------------------------------------------------------

    def _match_stride(self, offset: int, size: int) -> Stream | None:
        """The latest stream, when its step or, before it has one, its size says that this may be its next."""
        for stream in self._streams:
            if stream.stride:
                if offset == stream.begin + stream.stride:
                    return stream
            elif stream.size == size and not stream.distance and stream.used == self._turn - 1:
                return stream
        return None

    def _stride(self, stream: Stream, offset: int, size: int, limit: int) -> Advice:
        step = offset - stream.begin
        stream.used, stream.size = self._turn, size
        if not step:
            return NOTHING
        if not stream.stride:
            # The second read only makes a step known; the third must confirm it.
            stream.begin, stream.end, stream.stride = offset, offset + size, step
            stream.marker = stream.ahead = offset
            return Advice(random=True)
        stream.begin, stream.end = offset, offset + size
        if not stream.distance:
            stream.distance, stream.ahead = 4, offset
        elif (stream.ahead - offset) // step * 2 > stream.distance:
            return NOTHING
        else:
            stream.distance = min(2 * stream.distance, MAX_STRIDES, max(1, limit // max(size, CHUNK)))
        runs: list[Run] = []
        at, stop = stream.ahead + step, offset + stream.distance * step
        while 0 <= at < self.size and (at <= stop if step > 0 else at >= stop):
            run = (at // CHUNK, (min(at + size, self.size) - 1) // CHUNK)
            if not runs or runs[-1] != run:
                runs.append(run)
            stream.ahead = at
            at += step
        return Advice(tuple(runs))

    # -- beginning --------------------------------------------------------------------------------

    def _begin(self, offset: int, end: int, limit: int) -> Advice:
        stream = Stream(offset, end, end, end, size=end - offset, used=self._turn)
        if len(self._streams) >= STREAMS:
            self._streams.remove(min(self._streams, key=lambda s: s.used))
        self._streams.append(stream)
        if offset == 0:
            first = max(FIRST_LARGE, limit // 2) if end >= LARGE_READ else FIRST
            stream.distance = max(min(self.inherited, limit), min(first, max(limit, SMALLEST)))
            return self._extend(stream)
        return Advice(random=True)
