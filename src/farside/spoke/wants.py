"""The queues of the fetch scheduler: runs of chunks that are wanted ahead of need, by reason, without I/O.

A chunk is queued at most once, for the best reason that anybody gave.
"""

from __future__ import annotations

from collections import deque

from farside.spoke.flight import FileFetch, Reason, Segment

PREFETCHES = (Reason.PLANNED, Reason.READAHEAD, Reason.FILL)

MAX_QUEUED = 100_000
"""Runs in the queues; a want beyond it is dropped."""


class Wants:
    """Queues of segments, first in first out within a reason.

    Attributes:
        count: segments that are queued.
        promoted: how often a queued run was taken over for a better reason.
        dropped: wants that found the queues full.
    """

    def __init__(self) -> None:
        self.count = 0
        self.promoted = 0
        self.dropped = 0
        self._queues: dict[Reason, deque[Segment]] = {r: deque() for r in PREFETCHES}

    def add(self, files: FileFetch, first: int, last: int, reason: Reason, *, front: bool = False) -> None:
        """Queue a run that is not on its way, but for what is queued with as good a reason already.

        It is merged with a queued neighbour of the same reason; whoever takes from the queue cuts runs to
        the size of a request.
        """
        for queued in files.overlapping(first, last):
            if queued.reason <= reason:
                begin, first = first, max(first, queued.last)  # before it may be merged away
                if begin < queued.first:
                    self._insert(files, begin, queued.first, reason, front)
            else:
                self.promoted += 1
                self.cut(queued, first, last)
        if first < last:
            self._insert(files, first, last, reason, front)

    def _insert(self, files: FileFetch, first: int, last: int, reason: Reason, front: bool) -> None:
        before, behind = files.neighbours(first, last)
        if before is not None and before.reason is reason:
            before.last = last
            if behind is not None and behind.reason is reason:
                before.last = behind.last
                self.remove(behind)
            return
        if behind is not None and behind.reason is reason:
            behind.first = first
            return
        if self.count >= MAX_QUEUED:
            self.dropped += 1
            return
        segment = Segment(files, first, last, reason)
        files.add_queued(segment)
        self.count += 1
        queue = self._queues[reason]
        if front:
            queue.appendleft(segment)
        else:
            queue.append(segment)

    def take_over(self, files: FileFetch, first: int, last: int) -> None:
        """Take [first, last) out of the queues: a demand fetches it now."""
        for queued in files.overlapping(first, last):
            self.promoted += 1
            self.cut(queued, first, last)

    def cut(self, segment: Segment, first: int, last: int) -> None:
        """Take the chunks [first, last) out of a queued segment."""
        files, end = segment.files, segment.last
        if segment.first >= first:
            if last < end:
                segment.first = last  # the order among disjoint runs stays
            else:
                self.remove(segment)
            return
        segment.last = first
        if last < end:
            rest = Segment(files, last, end, segment.reason)
            files.add_queued(rest)
            self.count += 1
            self._queues[segment.reason].appendleft(rest)

    def remove(self, segment: Segment) -> None:
        """Out of its file's runs at once; its queue drops it as an empty run when it comes up."""
        segment.files.remove_queued(segment)
        segment.last = segment.first
        self.count -= 1

    def remove_all(self, reason: Reason) -> list[FileFetch]:
        """Empty one queue; the files that had something in it."""
        queue = self._queues[reason]
        live = [segment for segment in queue if segment.first < segment.last]
        for segment in live:
            self.remove(segment)
        queue.clear()
        return [segment.files for segment in live]

    def head(self, reason: Reason) -> Segment | None:
        """The segment that is next within a reason."""
        queue = self._queues[reason]
        while queue and queue[0].first >= queue[0].last:
            queue.popleft()
        return queue[0] if queue else None

    def best(self) -> Reason | None:
        """The best reason for which something is queued."""
        if self.count:
            for reason in PREFETCHES:
                if self.head(reason) is not None:
                    return reason
        return None
