"""The cache's own thread: writes side-cars, looks through the directory after a start, keeps ledger and
limits.

Everything here may wait for the disk; nobody waits for it except ``flush`` and ``close``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from farside.spoke import sidecar
from farside.spoke.disk import write_all
from farside.spoke.scan import Scan

if TYPE_CHECKING:
    from farside.spoke.cache import ChunkCache
    from farside.spoke.cachedfile import CachedFile

log = logging.getLogger("farside.cache")

FLUSH_AGE_S = 1.0
"""A side-car is written about so long after the first change it does not know of."""

FLUSH_RATE = 8 * 1024 * 1024
"""Larger side-cars (of files beyond 30 GB) wait longer: at most so many bytes of them a second and file."""

BATCH = 64
"""Side-cars that are synced together; they exist twice meanwhile."""

TICK_S = 0.25
LEDGER_S = 10.0
RETRY_DELETE_S = 30.0


class _Flushed(NamedTuple):
    """A file whose side-car is being written, and its ``epoch`` and ``writes`` when that was packed."""

    file: CachedFile
    epoch: int
    writes: int
    packed: bytes
    fd: int


class Keeper:
    """Background work of one ChunkCache.

    Attributes:
        bound: the ledger as it stands on disk: the cache never holds more than that.
    """

    def __init__(self, cache: ChunkCache) -> None:
        self._cache = cache
        self.bound = cache.space.unscanned
        self._wake = threading.Event()
        self._stopping = False
        self._pins_changed = False
        self._flushing = threading.Lock()
        self._scan = Scan(cache)
        self._thread = threading.Thread(target=self._run, name="farside-cache-keeper", daemon=True)
        self._ledger_at = self._delete_at = monotonic()
        self._flush_at = 0.0

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def pins_changed(self) -> None:
        self._pins_changed = True
        self.wake()

    def stop(self, deadline_s: float) -> None:
        """Ends the thread and flushes; gives up after about ``deadline_s`` seconds on a disk that hangs."""
        end = monotonic() + deadline_s
        self._stopping = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(deadline_s)
            if self._thread.is_alive():
                log.warning("cache closed while its disk hangs; what was cached last is fetched again")
                return
        last = threading.Thread(target=self._finish, args=(end,), name="farside-cache-close", daemon=True)
        last.start()
        last.join(max(0.1, end - monotonic()))

    def _finish(self, end: float) -> None:
        cache = self._cache
        try:
            self.flush(end - monotonic(), everything=True)
            with cache.structure:
                cache.evictor.drain()
                if self._pins_changed:
                    cache.directory.write_pins(set(cache.pins))
                self._write_ledger(cache.space.used)
        except OSError as error:
            log.warning("cache could not be closed cleanly: %s", error)

    # -- ledger ---------------------------------------------------------------------------------------

    def raise_ledger(self) -> None:
        """Called before bytes are written: the ledger must cover them. Structure lock held.

        Raises:
            OSError: it could not be written, so the bytes must not be either.
        """
        used = self._cache.space.used
        if used > self.bound:
            most = self._cache.space.limit - self._cache.space.slack
            self._write_ledger(max(used, min(most, used + self._step())))

    def _step(self) -> int:
        return max(1 << 20, min(1 << 30, self._cache.space.limit // 16))

    def _write_ledger(self, bound: int) -> None:
        if bound != self.bound:
            self._cache.directory.write_ledger(bound)
            self.bound = bound

    # -- side-cars ------------------------------------------------------------------------------------

    def flush(self, deadline_s: float, *, everything: bool) -> bool:
        """Writes side-cars that are due, or all; False when the time was too short or the disk failed."""
        end = monotonic() + deadline_s
        if not self._flushing.acquire(timeout=max(0.0, deadline_s)):
            return False
        try:
            for batch in self._batches(everything):
                if not self._flush(batch):
                    return False
                if monotonic() > end:
                    return not (everything and self._cache.dirty)
            return True
        finally:
            self._flushing.release()

    def _batches(self, everything: bool) -> Iterator[list[CachedFile]]:
        cache = self._cache
        now = monotonic()
        with cache.lock:
            hurry = everything or len(cache.dirty) >= BATCH
            due = [
                file
                for file, since in cache.dirty.items()
                if hurry
                or now - since >= FLUSH_AGE_S + sidecar.size_of(file.chunks, file.present) / FLUSH_RATE
            ]
        batch: list[CachedFile] = []
        size = 0
        for file in due:
            length = sidecar.size_of(file.chunks, file.present)
            if batch and (len(batch) >= BATCH or size + length > cache.space.slack // 2):
                yield batch
                batch, size = [], 0
            batch.append(file)
            size += length
        if batch:
            yield batch

    def _flush(self, batch: list[CachedFile]) -> bool:
        """Data first, then the side-car that vouches for them: a failed write-back is noticed before.

        One fsync at the end serves the batch: it commits the journal, which holds the metadata of all.
        Should a power cut find a file system where that is not so, checksums tell, and the chunks are
        fetched again.
        """
        cache = self._cache
        data: list[_Flushed] = []
        side_cars: list[_Flushed] = []
        try:
            for file in batch:
                with cache.lock:
                    if file not in cache.dirty:
                        continue
                    epoch, writes = file.epoch, file.writes
                    state, sums = bytes(file.state), bytes(file.checksums)
                packed = sidecar.pack(file.key, cache.chunk, file.path, state, sums)
                try:
                    fd = cache.disk.open(cache.directory.data_path(file.digest), os.O_RDONLY)
                    data.append(_Flushed(file, epoch, writes, packed, fd))
                    cache.disk.start_writeback(fd)
                except OSError as error:
                    self._lost(file, epoch, error)
                    return False
            for flushed in data:
                try:
                    cache.disk.wait_writeback(flushed.fd)
                except OSError as error:
                    self._lost(flushed.file, flushed.epoch, error)
                    return False
                temporary = f"{cache.directory.meta_path(flushed.file.digest)}.tmp"
                fd = cache.disk.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                side_cars.append(flushed._replace(fd=fd))
                write_all(cache.disk, fd, memoryview(flushed.packed), 0)
                cache.disk.start_writeback(fd)
            for flushed in side_cars:
                cache.disk.wait_writeback(flushed.fd)
            if side_cars:
                cache.disk.fsync(side_cars[-1].fd)
            for flushed in side_cars:
                self._publish(flushed.file, flushed.epoch, flushed.writes)
        except OSError as error:
            cache.health.failed("writing to the cache", error)
            return False
        finally:
            for flushed in (*data, *side_cars):
                os.close(flushed.fd)
        return True

    def _publish(self, file: CachedFile, epoch: int, writes: int) -> None:
        cache = self._cache
        meta = cache.directory.meta_path(file.digest)
        with cache.structure:
            if file.epoch == epoch:
                cache.disk.rename(f"{meta}.tmp", meta)
            else:
                cache.disk.unlink(f"{meta}.tmp")
            with cache.lock:
                if file.epoch == epoch and file.writes == writes:
                    cache.dirty.pop(file, None)
                elif file in cache.dirty:
                    cache.dirty[file] = monotonic()

    def _lost(self, file: CachedFile, epoch: int, error: OSError) -> None:
        """Bytes that are served from memory did not reach the disk: give the file up, not zeros out."""
        cache = self._cache
        with cache.lock:
            if file.epoch == epoch:
                cache.evictor.evict(file.digest, None)
        cache.health.failed("writing back to the cache", error)

    # -- thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        scan = self._scan.run()
        while not self._stopping:
            try:
                self._tick()
            except OSError as error:
                self._cache.health.failed("keeping the cache", error)
            until = monotonic() + TICK_S
            if not self._cache.scanned:
                while monotonic() < until and not self._stopping and next(scan, None) is not None:
                    self._wake.wait(0.001)  # leave the interpreter to those who serve reads
                self._wake.clear()
                continue
            self._wake.wait(TICK_S)
            self._wake.clear()

    def _tick(self) -> None:
        cache = self._cache
        self.sample()
        if cache.removals:
            with cache.structure:
                cache.evictor.drain()
        self._trim()
        now = monotonic()
        if cache.dirty and now >= self._flush_at and not self.flush(30.0, everything=False):
            self._flush_at = now + cache.health.retry_s
        if now - self._delete_at > RETRY_DELETE_S and cache.evictor.undeletable:
            self._delete_at = now
            with cache.structure:
                cache.evictor.retry_undeletable()
        if self._pins_changed:
            self._pins_changed = False
            with cache.structure:
                cache.directory.write_pins(set(cache.pins))
        if now - self._ledger_at > LEDGER_S and cache.scanned:
            self._ledger_at = now
            with cache.structure:
                if self.bound > cache.space.used + 2 * self._step():
                    self._write_ledger(cache.space.used + self._step())

    def sample(self) -> None:
        """Looks how much the file system has left."""
        cache = self._cache
        with cache.lock:
            pending, reserved, files = cache.pending_bytes, cache.space.reserved, cache.space.files
        stat = cache.disk.statvfs(cache.directory.path)
        with cache.lock:
            cache.space.sample(stat, min(pending, cache.pending_bytes), reserved, files)

    def _trim(self) -> None:
        """Gives space back when others need it, or when the limit was lowered."""
        cache = self._cache
        if not cache.scanned:
            return  # what is used is only known by an upper bound yet
        with cache.lock:
            short = cache.space.shortage(0)
            if short > 0:
                cache.evictor.make_room(short, 0, None, 0, -1)
