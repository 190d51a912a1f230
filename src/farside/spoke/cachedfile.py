"""One version of one file in the chunk cache, and the reservation of space for filling it.

Who may do what: readers (FUSE threads) take no lock. They look at ``state``, read, and then look at
    ``evictions``
again; whoever takes chunks away clears their state and raises ``evictions`` *before* the bytes go. Every
change of state happens under the cache's lock, held for microseconds and never during a call into the
disk.
"""

from __future__ import annotations

import logging
import os
import re
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING

import xxhash

from farside.spoke.cachedir import SEALED
from farside.spoke.disk import Handle, is_hole, read_into
from farside.spoke.eviction import SEGMENT
from farside.spoke.sidecar import DIGEST, CacheKey, chunks_of

if TYPE_CHECKING:
    from farside.spoke.cache import ChunkCache

log = logging.getLogger("farside.cache")

ABSENT, VERIFIED, UNVERIFIED = 0, 1, 2

_ABSENT_RUN = re.compile(rb"\x00+")
_UNVERIFIED_RUN = re.compile(rb"\x02+")


class CachedFile:
    """The cached chunks of one file. Made by ``ChunkCache.file`` only; there is one object per key at a
    time.

    Attributes:
        key, path, size: as given; size in bytes.
        chunks: number of chunks.
        state: one byte a chunk: 0 absent, 1 verified (may be served), 2 on disk, unverified since the start.
        loaded: whether the side-car has been looked at; until then all chunks count as absent.
        evictions: raised before any chunk is taken away.
    """

    __slots__ = (
        "__weakref__",
        "_cache",
        "_shift",
        "active",
        "busy",
        "checksums",
        "chunks",
        "digest",
        "epoch",
        "evictions",
        "handle",
        "key",
        "limbo",
        "loaded",
        "opens",
        "passthroughs",
        "path",
        "present",
        "size",
        "slots",
        "state",
        "verified",
        "writes",
    )

    def __init__(self, cache: ChunkCache, key: CacheKey, digest: bytes, path: bytes) -> None:
        self._cache = cache
        self._shift = cache.chunk.bit_length() - 1  # chunks are powers of two
        self.key = key
        self.digest = digest
        self.path = path
        self.size = key.size
        self.chunks = chunks_of(key.size, cache.chunk)
        self.state = bytearray(self.chunks)
        self.checksums = bytearray()  # 16 bytes a chunk from the first write or load on
        self.loaded = False
        self.evictions = 0
        self.epoch = 0  # raised when the data file is given up; a write that began before does not count
        self.present = 0
        self.verified = 0
        self.writes = 0  # raised by every change that the side-car must learn of
        self.busy: set[int] = set()  # chunks with a write or a punch under way; others keep off
        self.active: list[Reservation] = []
        self.handle: Handle | None = None
        self.slots: list[int] = [0] * max(
            1, -(-self.size // SEGMENT)
        )  # places of its segments' visited bytes
        self.opens = 0
        self.passthroughs = 0
        self.limbo = 0  # bytes unlinked while the kernel had them in passthrough

    def __repr__(self) -> str:
        return f"<CachedFile {self.digest.hex()} {self.present}/{self.chunks} chunks>"

    # -- questions, any thread --------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Every chunk is on disk and verified."""
        return self.verified == self.chunks

    @property
    def fully_on_disk(self) -> bool:
        """Every chunk is on disk, verified or not."""
        return self.present == self.chunks

    def absent(self, first: int, last: int) -> list[tuple[int, int]]:
        """Runs (first, last) of chunks that must be fetched. All of them while the disk hangs."""
        if self._cache.health.reads_off:
            return [(first, last)]
        return [(m.start(), m.end() - 1) for m in _ABSENT_RUN.finditer(self.state, first, last + 1)]

    def unverified(self, first: int, last: int) -> list[tuple[int, int]]:
        """Runs (first, last) of chunks for which ``verify`` must be called before they can be read."""
        if self._cache.health.reads_off:
            return []
        return [(m.start(), m.end() - 1) for m in _UNVERIFIED_RUN.finditer(self.state, first, last + 1)]

    def span(self, first: int, last: int) -> tuple[int, int]:
        """(offset, length) in bytes of a run of chunks; the file's end cuts the last one."""
        offset = first << self._shift
        return offset, min(self.size, (last + 1) << self._shift) - offset

    def try_read(self, offset: int, view: memoryview) -> int:
        """Fills ``view`` with the file's bytes from ``offset``, cut at the end of the file.

        Returns:
            the number of bytes; -1 when any chunk of the range cannot be served (then ``view`` holds
            anything): fetch what is ``absent``, ``verify`` what is ``unverified``, and come again.
        """
        want = len(view)
        if offset + want > self.size:
            want = max(0, self.size - offset)
            view = view[:want]
        if want == 0:
            return 0
        health = self._cache.health
        if health.reads_off:
            return -1
        evictions = self.evictions
        first = offset >> self._shift
        last = (offset + want - 1) >> self._shift
        if self.state.count(VERIFIED, first, last + 1) <= last - first:
            return -1
        thread = get_ident()
        health.ops[thread] = monotonic()
        try:
            handle = self.handle or self._cache.open_for_reading(self, evictions)
            got = read_into(self._cache.disk, handle.fd, view, offset) if handle is not None else -1
        except OSError:
            got = -1
        finally:
            health.ops[thread] = 0.0
        if self.evictions != evictions:
            return -1
        if got != want:  # an I/O error, or somebody shortened the file: look again before it is served
            self._cache.filler.suspect(self, first, last)
            return -1
        self._cache.sieve.visited[self.slots[offset // SEGMENT]] = 1
        return want

    # -- filling and checking, io pool ------------------------------------------------------------

    def load(self) -> None:
        """Reads the side-car, once. Damaged or orphaned files are removed: the chunks are absent then."""
        if not self.loaded:
            self._cache.filler.load(self)

    def verify(self, first: int, last: int) -> None:
        """Re-reads the chunks whose state is 2: they become 1, or 0 when they do not match their
        checksum."""
        self.load()
        cache = self._cache
        buffer = memoryview(bytearray(cache.chunk))
        damaged = 0
        for run_first, run_last in self.unverified(first, last):
            for chunk in range(run_first, run_last + 1):
                if cache.health.reads_off:
                    return
                # In this order: a handle is only remembered if nothing was evicted since before the state
                # was seen.
                evictions = self.evictions
                if self.state[chunk] != UNVERIFIED:
                    continue
                offset, length = self.span(chunk, chunk)
                expected = bytes(self.checksums[chunk * DIGEST : (chunk + 1) * DIGEST])
                good = lost = False
                with cache.health.call():
                    try:
                        handle = self.handle or cache.open_for_reading(self, evictions)
                        if handle is not None:
                            got = read_into(cache.disk, handle.fd, buffer[:length], offset)
                            good = got == length and xxhash.xxh3_128_digest(buffer[:length]) == expected
                            lost = not good and is_hole(handle.fd, offset, length)
                    except OSError:
                        cache.counters.read_errors += 1
                damaged += cache.filler.checked(self, chunk, expected, good, lost)
        if damaged:
            log.warning("%d damaged chunks of %r in the cache; they are fetched again", damaged, self.path)

    def write(self, reservation: Reservation, first: int, data: memoryview | bytes, checksums: bytes) -> int:
        """Stores a run of whole chunks, starting with chunk ``first``; they can be read as soon as it
        returns.

        Args:
            reservation: granted by ``ChunkCache.reserve`` for a range that includes this run.
            checksums: xxh3_128 of each chunk, 16 bytes each, as the hub sent them.

        Returns:
            bytes that are newly cached: 0 when others had stored them or the reservation was given back.

        Raises:
            ChecksumMismatch: data and checksums disagree; nothing was written.
            OSError: the disk failed or is full; nothing was marked, the cache is bypassed for a while.
            ValueError: the run is outside the reservation, or not whole chunks.
        """
        return self._cache.filler.write(self, reservation, first, memoryview(data).cast("B"), checksums)

    # -- use by the kernel, loop ------------------------------------------------------------------

    def acquire(self) -> None:
        """The file was opened once more."""
        self.opens += 1

    def release(self) -> None:
        self.opens -= 1

    @property
    def passthrough_ready(self) -> bool:
        """Complete, and its bytes are known to have reached the disk (about a second after the last
        write)."""
        return self.complete and self.size > 0 and not self._cache.is_dirty(self)

    def passthrough_fd(self) -> int:
        """A read-only descriptor for BACKING_OPEN, which the caller closes; -1 when not
        ``passthrough_ready``.

        From now until as many ``passthrough_release`` calls the file is not evicted for room. Its data
        file is
        sealed for good: mappings may outlive the release, so it is only ever unlinked, never punched.
        """
        cache = self._cache
        evictions = self.evictions
        if not self.passthrough_ready or cache.health.reads_off:
            return -1
        try:
            fd = cache.disk.open(cache.directory.data_path(self.digest), os.O_RDONLY)
        except OSError:
            cache.filler.suspect(self, 0, self.chunks - 1)
            return -1
        try:
            found = os.fstat(fd)
            if found.st_size != self.size:
                cache.filler.suspect(self, 0, self.chunks - 1)
            elif (len(self.slots) == 1 or self._seal(fd, found.st_mode)) and cache.enter_passthrough(
                self, evictions
            ):
                fd, result = -1, fd
                return result
        finally:
            if fd >= 0:
                os.close(fd)
        return -1

    def passthrough_release(self) -> None:
        """The kernel gave one backing id of this file back."""
        self._cache.leave_passthrough(self)

    def _seal(self, fd: int, mode: int) -> bool:
        if not mode & SEALED:
            try:
                self._cache.disk.fchmod(fd, 0o600 | SEALED)
            except OSError:
                return False
        return True


class Reservation:
    """Space that is set aside for a run of chunks of one file. Give it back with ``release`` when the
    fetch ends.

    Attributes:
        remaining: bytes not yet turned into cached chunks.
    """

    __slots__ = ("_cache", "file", "first", "last", "released", "remaining")

    def __init__(self, cache: ChunkCache, file: CachedFile, first: int, last: int, size: int) -> None:
        self._cache = cache
        self.file = file
        self.first = first
        self.last = last
        self.remaining = size
        self.released = False

    def release(self) -> None:
        """Gives back what was not used; may be called twice and from any thread."""
        if not self.released:
            self._cache.release(self)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
