"""The chunk cache: verified pieces of remote files on the spoke's own disk.

One sparse data file per (portal, version, size) with a side-car of presence and checksums. Right bytes or
none: a chunk is checked against the hub's checksum when it arrives and again before its first use after a
start, and is dropped, counted and fetched anew where it does not match. Space is reserved before it is
fetched.

Locks, in this order, both private to the package:

- ``structure``: data files and side-cars come into being, are renamed, punched and deleted under it. Held
  across calls into the disk, so only pool threads and the keeper take it; never the loop, never a FUSE
  thread.
- ``lock``: states, index, space. Held for microseconds, never across a call into the disk.

An eviction has two halves: under ``lock`` the chunks are declared absent and counted as free; the disk
    work is
queued and is done, under ``structure``, before anything more is written.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from farside.errors import CacheError
from farside.protocol.messages import CHUNK
from farside.spoke.cachedfile import ABSENT, CachedFile, Reservation
from farside.spoke.cachedir import CacheDirectory
from farside.spoke.disk import DiskIO, Handle
from farside.spoke.eviction import SEGMENT, Sieve
from farside.spoke.evictor import Evictor, Removal
from farside.spoke.filling import Filler
from farside.spoke.health import DiskHealth
from farside.spoke.keeper import Keeper
from farside.spoke.sidecar import CacheKey, digest_of_key
from farside.spoke.space import Space, chunk_cost, file_cost
from farside.units import format_size

MAX_HANDLES = 2048
"""Data files kept open at most; also at most a quarter of RLIMIT_NOFILE."""

MAX_RECENT = 32_768
"""Idle CachedFile objects kept, so that a file that is opened again need not be loaded again."""

MAX_DIRTY = 256
"""Side-cars are written before their time when so many wait."""


@dataclass
class CacheCounters:
    """Since the start. Bytes unless named otherwise."""

    written_bytes: int = 0
    evicted_bytes: int = 0
    corrupt_chunks: int = 0
    read_errors: int = 0
    orphans_removed: int = 0
    refused_reservations: int = 0


class ChunkCache:
    """See the module. Made by ``open``; ``close`` when done.

    Attributes:
        chunk: bytes per chunk.
        counters: what happened since the start.
        on_bypass: called with the reason when the disk is given up for a while, with None when it is
            back; from any thread.
    """

    def __init__(self, directory: CacheDirectory, space: Space, disk: DiskIO, *, slow_s: float) -> None:
        self.directory = directory
        self.disk = disk
        self.chunk = directory.chunk
        self.counters = CacheCounters()
        self.on_bypass: Callable[[str | None], None] | None = None
        self.health = DiskHealth(slow_s, self._bypass_changed)
        self.lock = threading.Lock()
        self.structure = threading.Lock()
        self.space = space
        self.sieve = Sieve()
        self.scanned = directory.fresh  # whether the index knows all that is on disk
        self.pins = directory.read_pins()
        self.dirty: OrderedDict[CachedFile, float] = OrderedDict()
        self.removals: deque[Removal] = deque()
        self.removing: dict[bytes, int] = {}  # keys with removals in the queue → how many
        self.pending_bytes = 0
        self.base: dict[bytes, int] = {}  # files of several segments → what they are charged beside chunks
        self.sealed: set[bytes] = set()  # of those, the ones that may be mapped by somebody
        self.trusted: set[bytes] = set()  # of those, the ones of which all that is present was verified
        self._files: weakref.WeakValueDictionary[bytes, CachedFile] = weakref.WeakValueDictionary()
        self._recent: OrderedDict[CachedFile, None] = OrderedDict()
        self._handles: OrderedDict[CachedFile, None] = OrderedDict()
        self._max_handles = max(16, min(MAX_HANDLES, os.sysconf("SC_OPEN_MAX") // 4))
        self.evictor = Evictor(self)
        self.filler = Filler(self)
        self.keeper = Keeper(self)

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        size_limit: int,
        reserve: float = 0.05,
        chunk: int = CHUNK,
        disk: DiskIO | None = None,
        slow_s: float = 5.0,
    ) -> ChunkCache:
        """Opens or makes a cache directory; takes well under a second however much it holds.

        Args:
            size_limit: bytes on disk that are never exceeded.
            reserve: share of the file system's size that stays free for others.
            chunk: bytes per chunk, a power of two from 4096 to 8 MiB; fixed when the directory is made.
            slow_s: a disk that does not answer for so many seconds is read through.

        Raises:
            CacheError: the directory is unwritable, locked by another process, of another format, not a
                cache, or the limit is smaller than one chunk or larger than the disk.
        """
        if chunk & (chunk - 1) or not 4096 <= chunk <= SEGMENT:
            raise CacheError(f"chunk size {chunk} is not a power of two from 4096 to {SEGMENT}")
        disk = disk or DiskIO()
        smallest = chunk_cost(chunk) + file_cost(1)
        slack = min(size_limit // 32, 16 * 1024 * 1024)
        if size_limit - slack < smallest:
            raise CacheError(
                f"cache size of {size_limit} bytes is smaller than one chunk with its book-keeping",
                path=os.fspath(directory),
                errno=errno.EINVAL,
                hint=f"give it {smallest * 32 // 31 + 1} bytes or more",
            )
        opened = CacheDirectory.open(os.fspath(directory), chunk=chunk, disk=disk)
        try:
            stat = disk.statvfs(opened.path)
            total = stat.f_blocks * stat.f_frsize
            if total and size_limit > total:
                raise CacheError(
                    f"cache size of {format_size(size_limit)} is larger than the disk, "
                    f"which has {format_size(total)}",
                    path=opened.path,
                    errno=errno.ENOSPC,
                    hint=f"give it {int(total * (1 - reserve)) >> 20}M or less",
                )
            space = Space(size_limit, slack, reserve)
            if opened.fresh:
                opened.write_ledger(0)
            bound = opened.read_ledger()
            space.unscanned = size_limit if bound is None else bound
            space.sample(stat, 0, space.reserved, space.files)
            cache = cls(opened, space, disk, slow_s=slow_s)
        except OSError as error:
            opened.close()
            raise CacheError(
                f"cache directory cannot be used: {error.strerror}", path=opened.path, errno=error.errno
            ) from error
        except BaseException:
            opened.close()
            raise
        cache.health.start()
        cache.keeper.start()
        return cache

    # -- files and reservations, loop ---------------------------------------------------------------

    def file(self, key: CacheKey, path: bytes) -> CachedFile:
        """The cached file of a key; no I/O. ``load`` it in the pool when ``loaded`` is False."""
        digest = digest_of_key(key, self.chunk)
        with self.lock:
            file = self._files.get(digest)
            if file is None:
                file = CachedFile(self, key, digest, path)
                file.loaded = key.size == 0 or (self.scanned and digest not in self.sieve)
                self._files[digest] = file
            file.path = path  # the newest: a directory above may have been renamed, which changes no version
            self._recent[file] = None
            self._recent.move_to_end(file)
            while len(self._recent) > MAX_RECENT:
                idle, _ = self._recent.popitem(last=False)
                if len(idle.slots) > 1 and idle.loaded and idle.verified == idle.present:
                    self.trusted.add(idle.digest)
        return file

    def reserve(
        self, file: CachedFile, first: int, last: int, *, may_evict: bool = True
    ) -> Reservation | None:
        """Sets space aside for the absent chunks of a run before they are fetched; evicts for it where
        allowed.

        Returns:
            None when there is no room or the disk is bypassed: then read through, without caching.
        """
        if not self.health.may_write():
            self.counters.refused_reservations += 1
            return None
        with self.lock:
            need = self._need(file, first, last)
            short = self.space.shortage(need) if need else 0
            new = file.digest not in self.sieve
            if (new and self.space.inodes_low) or (
                short > 0 and not (may_evict and self.evictor.make_room(short, need, file, first, last))
            ):
                self.counters.refused_reservations += 1
                return None
            self.space.take(need)
            reservation = Reservation(self, file, first, last, need)
            file.active.append(reservation)
        return reservation

    def pin(self, file: CachedFile) -> None:
        """Never evict this file for room; kept over a restart."""
        with self.lock:
            self.pins.add(file.digest)
            self.sieve.park(file.digest)
        self.keeper.pins_changed()

    def unpin(self, file: CachedFile) -> None:
        with self.lock:
            self.pins.discard(file.digest)
            if not file.passthroughs:
                self.sieve.unpark(file.digest)
        self.keeper.pins_changed()

    def is_pinned(self, file: CachedFile) -> bool:
        return file.digest in self.pins

    def evict(self, file: CachedFile) -> int:
        """Drops all of a file that is not pinned, even while it is open; returns the bytes given up."""
        with self.lock:
            if file.digest in self.pins:
                return 0
            freed = self.evictor.evict(file.digest, None)
        self.keeper.wake()
        return freed

    # -- state of the whole, any thread -------------------------------------------------------------

    @property
    def used(self) -> int:
        """Bytes taken or promised; never more than ``limit`` from the first reservation on."""
        return self.space.used

    @property
    def limit(self) -> int:
        return self.space.limit

    @property
    def bypass_reason(self) -> str | None:
        """Why nothing is cached at the moment; None when all is well."""
        return self.health.reason

    def status(self) -> dict[str, object]:
        """Figures for ``farside status``: sizes in bytes."""
        return {
            "dir": self.directory.path,
            "used": self.used,
            "limit": self.limit,
            "free": self.space.free,
            "reserved": self.space.reserved,
            "files": len(self.sieve),
            "pinned_files": len(self.pins),
            "scanned": self.scanned,
            "bypass": self.bypass_reason,
            "disk_failures": self.health.failures,
            "disk_stalls": self.health.stalls,
            "undeletable": self.space.stuck,
            "unflushed_files": len(self.dirty),
            **vars(self.counters),
        }

    def is_dirty(self, file: CachedFile) -> bool:
        return file in self.dirty

    def flush(self, deadline_s: float = 30.0) -> bool:
        """Writes all side-cars that are due or not; False when some were not written in time. Blocks."""
        return self.keeper.flush(deadline_s, everything=True)

    def flush_due(self) -> bool:
        """Writes the side-cars that are due by age. The keeper does so by itself; this is for those who
        test."""
        return self.keeper.flush(30.0, everything=False)

    def close(self, deadline_s: float = 10.0) -> None:
        """Flushes, writes the exact ledger, gives the directory back. Bounded, also on a disk that hangs."""
        self.keeper.stop(deadline_s)
        self.health.stop()
        with self.lock:
            self._handles.clear()
            for file in list(self._files.values()):
                file.handle = None
        self.directory.close()

    # -- for the other halves of the cache ------------------------------------------------------------

    def known(self, digest: bytes) -> CachedFile | None:
        """The live CachedFile of a key, if there is one. Lock held."""
        return self._files.get(digest)

    def open_for_reading(self, file: CachedFile, evictions: int) -> Handle | None:
        """A handle of the data file, remembered if nothing was evicted since ``evictions`` was read.

        Returns:
            None when the data file is missing or has another size.
        """
        try:
            handle = Handle(self.disk.open(self.directory.data_path(file.digest), os.O_RDONLY), False)
        except FileNotFoundError:
            return None
        if os.fstat(handle.fd).st_size != file.size:
            return None
        self.remember_handle(file, handle, evictions)
        return handle

    def remember_handle(self, file: CachedFile, handle: Handle, evictions: int) -> None:
        with self.lock:
            if file.evictions == evictions:
                file.handle = handle
                self._handles[file] = None
                if len(self._handles) > self._max_handles:
                    oldest, _ = self._handles.popitem(last=False)
                    oldest.handle = None

    def forget_handle(self, file: CachedFile) -> None:
        """Lock held. The descriptor closes once no reader is in it."""
        file.handle = None
        self._handles.pop(file, None)

    def charge(
        self, digest: bytes, chunks: int, segment: int, count: int, *, parked: bool = False
    ) -> tuple[int, int]:
        """Adds ``count`` bytes to a segment in the index. Lock held.

        Returns:
            the segment's slot, and ``count`` plus the file's book-keeping if it was not in the index yet.
        """
        total = count
        if digest not in self.sieve:
            total += file_cost(chunks)
            if chunks * self.chunk > SEGMENT:
                self.base[digest] = file_cost(chunks)
            else:
                count = total
        trial = self.evictor.regret.thrashing and not self.sieve.slot(digest, segment)
        trial = trial and self.evictor.regret.trial()
        return self.sieve.grow(digest, segment, count, parked=parked, trial=trial), total

    def is_parked(self, file: CachedFile) -> bool:
        """Whether the file is not up for eviction: pinned, or in passthrough."""
        return file.passthroughs > 0 or file.digest in self.pins

    def mark_dirty(self, file: CachedFile) -> None:
        """The side-car must be written. Lock held."""
        file.writes += 1
        if file not in self.dirty:
            self.dirty[file] = monotonic()
            if len(self.dirty) >= MAX_DIRTY:
                self.keeper.wake()

    def enter_passthrough(self, file: CachedFile, evictions: int) -> bool:
        """False when something was evicted since ``evictions`` was read."""
        with self.lock:
            if file.evictions != evictions or not file.complete or file.digest not in self.sieve:
                return False
            file.passthroughs += 1
            if len(file.slots) > 1:
                self.sealed.add(file.digest)
            self.sieve.park(file.digest)
        return True

    def leave_passthrough(self, file: CachedFile) -> None:
        with self.lock:
            file.passthroughs -= 1
            if not file.passthroughs:
                self.space.limbo -= file.limbo
                file.limbo = 0
                if file.digest not in self.pins:
                    self.sieve.unpark(file.digest)

    def release(self, reservation: Reservation) -> None:
        """What ``Reservation.release`` calls."""
        with self.lock:
            if not reservation.released:
                reservation.released = True
                reservation.file.active.remove(reservation)
                self.space.give_back(reservation.remaining)
                reservation.remaining = 0

    def _need(self, file: CachedFile, first: int, last: int) -> int:
        """Bytes to reserve for the absent chunks of a run. Lock held."""
        absent = file.state.count(ABSENT, first, last + 1)
        if not absent:
            return 0
        need = absent * chunk_cost(self.chunk)
        if last == file.chunks - 1 and file.state[last] == ABSENT:
            need += chunk_cost(file.span(last, last)[1]) - chunk_cost(self.chunk)
        return need if file.digest in self.sieve else need + file_cost(file.chunks)

    def _bypass_changed(self, reason: str | None) -> None:
        if self.on_bypass is not None:
            self.on_bypass(reason)
