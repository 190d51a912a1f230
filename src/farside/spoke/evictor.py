"""Evicting for room: choosing by ``eviction.Sieve``, declaring absent, and the disk work that follows.

A file of one segment, a sealed file and a file's last segment go whole, by unlink. Other segments are
punched out of the sparse file. A sealed file was once in passthrough: mappings of it hold the data file
itself, so punching would put zeros under them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farside.spoke import sidecar
from farside.spoke.disk import write_atomically
from farside.spoke.eviction import SEGMENT, Regret

if TYPE_CHECKING:
    from farside.spoke.cache import ChunkCache
    from farside.spoke.cachedfile import CachedFile

EVICT_STEP = 256 * 1024 * 1024
"""One choice evicts at most so many bytes beyond its own need (a lowered limit is reached in steps)."""


@dataclass
class Removal:
    """Disk work that an eviction left: a whole file (segment None) or one segment of it.

    ``file`` with chunks ``first`` … ``last`` is there when a loaded CachedFile knows of it already;
    otherwise the side-car on disk still lists the segment.
    """

    digest: bytes
    segment: int | None
    size: int
    file: CachedFile | None = None
    first: int = 0
    last: int = -1


class Evictor:
    """Evicts for a ChunkCache. Methods say which lock they need held."""

    def __init__(self, cache: ChunkCache) -> None:
        self._cache = cache
        self.undeletable: list[Removal] = []
        self.regret = Regret()

    def make_room(self, short: int, need: int, file: CachedFile | None, first: int, last: int) -> bool:
        """Evicts ``short`` bytes, nothing of what chunks ``first`` … ``last`` of ``file`` touch. Lock held.

        Returns:
            False when that is not possible, or takes more steps than one.
        """
        cache = self._cache
        goal = min(short, need + EVICT_STEP)
        own = range(first * cache.chunk // SEGMENT, last * cache.chunk // SEGMENT + 1)
        chosen: dict[tuple[bytes, int | None], None] = {}
        found = 0
        if file is not None and not cache.sieve.slot(file.digest, own.start):
            self.regret.missed(file.digest, own.start, cache.sieve)
        for digest, segment, size in cache.sieve.candidates(thrashing=self.regret.thrashing):
            sealed = digest in cache.sealed
            if file is not None and digest == file.digest and (segment in own or sealed):
                continue
            if self._in_use(digest, segment, sealed):
                continue
            if not sealed:
                chosen[digest, segment] = None
                found += size
            elif (digest, None) not in chosen:
                chosen[digest, None] = None
                found += cache.sieve.size_of(digest) + cache.base.get(digest, 0)
            if found >= goal:
                break
        if found < goal:
            return False
        held = len(cache.sieve)
        for digest, victim in chosen:
            for segment, _ in cache.sieve.segments(digest) if victim is None else ((victim, 0),):
                self.regret.evicted(digest, segment, held)
            self.evict(digest, victim)
        return goal == short

    def evict(self, digest: bytes, segment: int | None) -> int:
        """Declares a segment, or with None a whole file, absent, and queues the disk work. Lock held.

        Returns:
            bytes that are given up.
        """
        cache = self._cache
        segments = cache.sieve.segments(digest)
        whole = segment is None or len(segments) <= 1
        if whole or segment is None:
            freed = sum(cache.sieve.remove(digest, index) for index, _ in segments) + cache.base.pop(
                digest, 0
            )
            cache.sealed.discard(digest)
            cache.trusted.discard(digest)
            removal = Removal(digest, None, freed)
        else:
            freed = cache.sieve.remove(digest, segment)
            removal = Removal(digest, segment, freed)
        file = cache.known(digest)
        if file is not None and file.loaded:
            if removal.segment is None:
                self._take_all(file)
            else:
                self._take_segment(file, removal, removal.segment)
        self.queue(removal)
        if file is not None and file.passthroughs and whole:
            file.limbo += freed
            cache.space.files -= freed
            cache.space.limbo += freed
        else:
            cache.space.freed(freed)
        cache.counters.evicted_bytes += freed
        return freed

    def queue(self, removal: Removal) -> None:
        """Leaves disk work for the next ``drain``. Lock held."""
        cache = self._cache
        cache.removals.append(removal)
        cache.removing[removal.digest] = cache.removing.get(removal.digest, 0) + 1
        cache.pending_bytes += removal.size

    def drain(self) -> None:
        """Does the queued disk work. Structure lock held. Failures are counted and bypass the cache, not
        raised."""
        cache = self._cache
        while cache.removals:
            removal = cache.removals.popleft()
            failed: OSError | None = None
            try:
                self._remove(removal)
            except OSError as error:
                failed = error
            with cache.lock:
                cache.pending_bytes -= removal.size
                cache.removing[removal.digest] -= 1
                if not cache.removing[removal.digest]:
                    del cache.removing[removal.digest]
                if removal.file is not None:
                    removal.file.busy.difference_update(range(removal.first, removal.last + 1))
                if failed is not None:
                    cache.space.undeletable(removal.size)
                    self.undeletable.append(removal)
            if failed is not None:
                cache.health.failed("deleting from the cache", failed)

    def retry_undeletable(self) -> None:
        """Tries again to delete what could not be deleted. Structure lock held."""
        cache = self._cache
        again, self.undeletable = self.undeletable, []
        for removal in again:
            try:
                with cache.lock:
                    in_use_again = removal.digest in cache.sieve
                if not in_use_again:  # else the data file serves again, and is counted again
                    self._remove(removal)
            except OSError:
                self.undeletable.append(removal)
                continue
            with cache.lock:
                cache.space.stuck -= removal.size

    def _in_use(self, digest: bytes, segment: int, sealed: bool) -> bool:
        """Whether a fetch or a write touches this segment, or anything of a file that only goes whole."""
        file = self._cache.known(digest)
        if file is None or not (file.active or file.busy):
            return False
        if sealed or len(file.slots) == 1:
            return True
        per = SEGMENT // self._cache.chunk
        low, high = segment * per, (segment + 1) * per
        if any(r.first < high and r.last >= low for r in file.active):
            return True
        return not file.busy.isdisjoint(range(low, high))

    def _take_all(self, file: CachedFile) -> None:
        file.evictions += 1
        file.epoch += 1
        file.state[:] = bytes(file.chunks)
        file.present = file.verified = 0
        file.slots = [0] * len(file.slots)
        self._cache.forget_handle(file)
        self._cache.dirty.pop(file, None)

    def _take_segment(self, file: CachedFile, removal: Removal, segment: int) -> None:
        per = SEGMENT // self._cache.chunk
        low, high = segment * per, min(file.chunks, (segment + 1) * per)
        taken = file.state[low:high]
        file.evictions += 1
        file.state[low:high] = bytes(high - low)
        file.present -= len(taken) - taken.count(0)
        file.verified -= taken.count(1)
        file.slots[segment] = 0
        file.busy.update(range(low, high))
        removal.file, removal.first, removal.last = file, low, high - 1
        self._cache.mark_dirty(file)

    def _remove(self, removal: Removal) -> None:
        directory = self._cache.directory
        if removal.segment is None:
            directory.remove(removal.digest)
            return
        if removal.file is None:  # nobody has the side-car in memory: correct it on disk
            found, _ = sidecar.read(directory, removal.digest)
            if found is None:
                return
            per = SEGMENT // directory.chunk
            low, high = removal.segment * per, min(len(found.state), (removal.segment + 1) * per)
            found.state[low:high] = bytes(high - low)
            packed = sidecar.pack(found.key, found.chunk, found.path, found.state, found.checksums)
            write_atomically(directory.disk, directory.meta_path(removal.digest), packed)
        try:
            fd = directory.disk.open(directory.data_path(removal.digest), os.O_RDWR)
        except FileNotFoundError:
            return
        try:
            directory.disk.punch(fd, removal.segment * SEGMENT, SEGMENT)
        finally:
            os.close(fd)
