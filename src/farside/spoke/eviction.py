"""Which segments to evict: SIEVE with a trial queue, as state machines without I/O or clock.

A *segment* is an 8 MiB run of one cached file (a smaller file is one segment). Segments stand in a
queue in order of arrival. A read sets its segment's ``visited`` byte. A hand walks from the oldest to
the newest: where it finds ``visited`` it clears it and spares the segment, else it offers the segment
for eviction. Unlike the published SIEVE it turns back where the queue ended when it set out: else it
chases newcomers that were not read again yet, and what the last job left behind stays for good.

A data set larger than the cache that is read over and over defeats every such queue: what is evicted is
what is needed next. ``Regret`` notices (what is missed was evicted not long ago); then most newcomers
only go to a small first-in-first-out trial queue and the rest of the cache stays as it is. Simulated,
12 epochs, cache = half of the data: shuffled 40 % hits (without regret 14, LRU 14, pinning by an oracle
46), in order 40 % (0, 0, 46).

The columns are arrays, since a cache holds a million small files: about 150 bytes a file, all told.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

SEGMENT = 8 * 1024 * 1024
"""Unit of eviction, bytes; a multiple of every allowed chunk size."""

MAX_STEPS = 20_000
"""The hand passes at most so many visited segments in one choice, so that a choice takes bounded time."""

TRIAL_SHARE = 16
"""The trial queue has at most one part in so many of the cache."""

ADMIT_ONE_IN = 16
"""While regret is high, one newcomer in so many goes to the main queue: the cache follows the job."""

# Anchors of the two rings: next = oldest, previous = newest. Slot 0 also absorbs stray touches.
_HEAD, _TRIAL = 0, 1


class Sieve:
    """Segments by (file key, segment index), with their sizes in bytes and their place in the queue.

    ``visited[slot]`` may be set to 1 from any thread; all else is for one thread at a time.
    """

    def __init__(self) -> None:
        self.visited = bytearray(2)
        self.total = 0
        """Bytes of all segments, parked ones too."""
        self.trial_total = 0
        """Bytes of the segments in the trial queue."""
        self._sizes = array("q", [0, 0])
        self._segments = array("I", [0, 0])
        self._keys: list[bytes] = [b"", b""]
        self._next = array("i", [_HEAD, _TRIAL])
        self._previous = array("i", [_HEAD, _TRIAL])
        self._on_trial = bytearray(2)
        self._in_main = bytearray(2)
        self._free: list[int] = []
        self._slots: dict[bytes, int | dict[int, int]] = {}  # most files have one segment: a bare int
        self._hand = _HEAD
        self._lap_end = _HEAD  # the newest segment when the hand set out; there it turns back
        self._queued = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        """Number of files."""
        return len(self._slots)

    def slot(self, key: bytes, segment: int) -> int:
        """Where ``visited`` is set for a segment; 0 when it is not here (setting ``visited[0]`` is
        harmless)."""
        found = self._slots.get(key)
        if found is None:
            return 0
        if isinstance(found, dict):
            return found.get(segment, 0)
        return found if self._segments[found] == segment else 0

    def segments(self, key: bytes) -> list[tuple[int, int]]:
        """(segment index, size) of every segment of a file."""
        found = self._slots.get(key)
        if found is None:
            return []
        slots = found.values() if isinstance(found, dict) else (found,)
        return [(self._segments[slot], self._sizes[slot]) for slot in slots]

    def size_of(self, key: bytes) -> int:
        """Bytes of all segments of a file."""
        return sum(size for _, size in self.segments(key))

    def grow(self, key: bytes, segment: int, by: int, *, parked: bool = False, trial: bool = False) -> int:
        """Adds ``by`` bytes (may be negative) to a segment.

        A new one is put at the end of the main queue, or of the trial queue, or with ``parked`` in none.

        Returns:
            its slot.
        """
        slot = self.slot(key, segment)
        if not slot:
            slot = self._new_slot(key, segment)
            if not parked:
                self._link(slot, _TRIAL if trial else _HEAD)
        self._sizes[slot] += by
        self.total += by
        if self._on_trial[slot]:
            self.trial_total += by
        return slot

    def remove(self, key: bytes, segment: int) -> int:
        """Forgets a segment; returns its size, 0 when it was not here."""
        slot = self.slot(key, segment)
        if not slot:
            return 0
        self._unlink(slot)
        size = self._sizes[slot]
        self.total -= size
        self._sizes[slot] = 0
        self._keys[slot] = b""
        self._free.append(slot)
        found = self._slots[key]
        if isinstance(found, dict):
            del found[segment]
        if not isinstance(found, dict) or not found:
            del self._slots[key]
        return size

    def park(self, key: bytes) -> None:
        """Takes a file out of the queue (pinned, or in use by the kernel); it stays counted."""
        for segment, _ in self.segments(key):
            self._unlink(self.slot(key, segment))

    def unpark(self, key: bytes) -> None:
        """Puts a parked file back at the queue's new end, as just read."""
        for segment, _ in self.segments(key):
            slot = self.slot(key, segment)
            if self._next[slot] < 0:
                self._link(slot, _HEAD)
                self.visited[slot] = 1

    def age(self) -> float:
        """The share of the main queue that was read since the last call; then none of it counts as read."""
        read = int.from_bytes(self.visited, "little") & int.from_bytes(self._in_main, "little")
        self.visited[:] = bytes(len(self.visited))
        return read.bit_count() / max(1, self._queued)

    def candidates(self, *, thrashing: bool = False) -> Iterator[tuple[bytes, int, int]]:
        """(key, segment, size) in the order in which they should go, each at most once.

        The trial queue goes first, unless more of the cache shall be given to it. The queues must not change
        while this runs; remove the chosen ones afterwards.
        """
        trial_first = not thrashing or self.trial_total * TRIAL_SHARE >= self.total
        if trial_first:
            yield from self._trial()
        yield from self._main()
        if not trial_first:
            yield from self._trial()

    def _trial(self) -> Iterator[tuple[bytes, int, int]]:
        slot = self._next[_TRIAL]
        while slot != _TRIAL:
            yield self._keys[slot], self._segments[slot], self._sizes[slot]
            slot = self._next[slot]

    def _main(self) -> Iterator[tuple[bytes, int, int]]:
        steps = 0
        offered: set[int] = set()
        while len(offered) < self._queued:
            slot = self._hand
            if slot == _HEAD:
                slot = self._next[_HEAD]
                self._lap_end = self._previous[_HEAD]
            self._hand = _HEAD if slot == self._lap_end else self._next[slot]
            if slot in offered:
                continue
            if self.visited[slot] and steps < MAX_STEPS:
                self.visited[slot] = 0
                steps += 1
                continue
            offered.add(slot)
            yield self._keys[slot], self._segments[slot], self._sizes[slot]

    # -- queue ------------------------------------------------------------------------------------

    def _new_slot(self, key: bytes, segment: int) -> int:
        if self._free:
            slot = self._free.pop()
            self._keys[slot], self._segments[slot], self._next[slot] = key, segment, -1
            self.visited[slot] = 0
        else:
            slot = len(self._sizes)
            self._sizes.append(0)
            self._segments.append(segment)
            self._keys.append(key)
            self._next.append(-1)
            self._previous.append(-1)
            self._on_trial.append(0)
            self._in_main.append(0)
            self.visited.append(0)
        found = self._slots.get(key)
        if found is None:
            self._slots[key] = slot
        elif isinstance(found, dict):
            found[segment] = slot
        else:
            self._slots[key] = {self._segments[found]: found, segment: slot}
        return slot

    def _link(self, slot: int, anchor: int) -> None:
        newest = self._previous[anchor]
        self._next[newest] = slot
        self._previous[slot] = newest
        self._next[slot] = anchor
        self._previous[anchor] = slot
        if anchor == _TRIAL:
            self._on_trial[slot] = 1
            self.trial_total += self._sizes[slot]
        else:
            self._in_main[slot] = 1
            self._queued += 1

    def _unlink(self, slot: int) -> None:
        after, before = self._next[slot], self._previous[slot]
        if after < 0:
            return
        if self._hand == slot:
            self._hand = _HEAD if slot == self._lap_end else after
        if self._lap_end == slot:
            self._lap_end = before
        self._next[before] = after
        self._previous[after] = before
        self._next[slot] = self._previous[slot] = -1
        if self._on_trial[slot]:
            self._on_trial[slot] = 0
            self.trial_total -= self._sizes[slot]
        else:
            self._in_main[slot] = 0
            self._queued -= 1


class Regret:
    """Whether what is evicted is soon missed again.

    Remembers evictions in two bitmaps, about 16 bytes for each segment of the cache. A cache that keeps what
    it has must have use of it: where next to nothing of it is read any more, the job has moved on, and
    regret ends.

    Attributes:
        thrashing: most misses are of what was evicted not long ago.
    """

    ENTER, LEAVE, WEIGHT = 0.6, 0.3, 1 / 64
    STALE = 0.03
    PATIENCE = 3  # misses, in times what the cache holds, before it is asked whether it is still of use

    def __init__(self) -> None:
        self.thrashing = False
        self._share = 0.0
        self._turn = 0
        self._misses = 0
        self._forget(0)

    def _forget(self, held: int) -> None:
        self._noted = 0
        self._older = bytearray(1024)
        self._recent = bytearray(max(1024, 8 * held))

    def evicted(self, key: bytes, segment: int, held: int) -> None:
        """A segment was evicted for room from a cache that holds ``held`` segments."""
        at = hash((key, segment)) % (len(self._recent) * 8)
        self._recent[at >> 3] |= 1 << (at & 7)
        self._noted += 1
        if self._noted > max(1024, 8 * held):
            older = self._recent
            self._forget(held)
            self._older = older

    def missed(self, key: bytes, segment: int, sieve: Sieve) -> None:
        """Something of ``sieve`` must be evicted because this segment is not there."""
        number = hash((key, segment))
        known = any(
            bits[(number % (len(bits) * 8)) >> 3] >> (number % (len(bits) * 8) & 7) & 1
            for bits in (self._recent, self._older)
        )
        self._share += (known - self._share) * self.WEIGHT
        before, self.thrashing = self.thrashing, self._share > (self.LEAVE if self.thrashing else self.ENTER)
        self._misses += 1
        if self.thrashing and (not before or self._misses > self.PATIENCE * len(sieve)):
            self._misses = 0
            if sieve.age() < self.STALE and before:
                self.thrashing, self._share = False, 0.0
                self._forget(len(sieve))

    def trial(self) -> bool:
        """Whether a newcomer goes to the trial queue."""
        self._turn += 1
        return self.thrashing and self._turn % ADMIT_ONE_IN != 0
