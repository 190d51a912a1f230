"""Loading side-cars, storing what was fetched, and applying the results of verification."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import xxhash

from farside.errors import ChecksumMismatch
from farside.spoke import sidecar
from farside.spoke.cachedfile import ABSENT, UNVERIFIED, VERIFIED, CachedFile, Reservation
from farside.spoke.cachedir import SEALED, CacheDirectory
from farside.spoke.disk import Handle, write_all
from farside.spoke.eviction import SEGMENT
from farside.spoke.evictor import Removal
from farside.spoke.sidecar import DIGEST, SideCar
from farside.spoke.space import chunk_cost, file_cost

if TYPE_CHECKING:
    from farside.spoke.cache import ChunkCache


class Filler:
    """Brings chunks into a ChunkCache; used through CachedFile and Reservation. Blocks; for the io pool."""

    def __init__(self, cache: ChunkCache) -> None:
        self._cache = cache

    # -- side-cars ----------------------------------------------------------------------------------

    def load(self, file: CachedFile) -> None:
        cache = self._cache
        with cache.health.call(), cache.structure:
            self._load(file)

    def _load(self, file: CachedFile) -> None:
        """Reads the side-car if that was not done yet, once no removal of this file is queued. Structure
        held."""
        cache = self._cache
        while True:
            cache.evictor.drain()
            if file.loaded:
                if not file.checksums:
                    file.checksums = bytearray(file.chunks * DIGEST)
                with cache.lock:
                    if file.digest not in cache.removing:
                        return
                continue
            found, stat, failed = None, None, False
            try:
                found, stat = sidecar.read(cache.directory, file.digest)
            except OSError as error:
                failed = True
                cache.health.failed("reading the cache", error)
            on_disk = release_unlisted(cache.directory, file.digest, found, stat) if found and stat else 0
            with cache.lock:
                if file.digest in cache.removing:
                    continue  # it was evicted while we read
                if found is not None and stat is not None and found.key == file.key:
                    self._adopt(file, found, bool(stat.st_mode & SEALED), on_disk)
                elif not failed:
                    if file.digest in cache.sieve or stat is not None:
                        cache.counters.orphans_removed += 1
                    if file.digest in cache.sieve:
                        cache.evictor.evict(file.digest, None)
                    else:
                        cache.evictor.queue(Removal(file.digest, None, 0))
                file.loaded = True

    def _adopt(self, file: CachedFile, found: SideCar, sealed: bool, on_disk: int) -> None:
        """Takes a side-car over. Lock held."""
        cache = self._cache
        trusted = file.digest in cache.trusted
        file.state = found.state.replace(b"\2", b"\1") if trusted else found.state
        file.checksums = found.checksums
        file.present = file.chunks - file.state.count(ABSENT)
        file.verified = file.state.count(VERIFIED)
        if sealed and len(file.slots) > 1:
            cache.sealed.add(file.digest)
        if file.digest in cache.sieve:
            for segment, _ in cache.sieve.segments(file.digest):
                file.slots[segment] = cache.sieve.slot(file.digest, segment)
            return
        for segment, size in segment_costs(found, on_disk):
            file.slots[segment], charged = cache.charge(
                file.digest, file.chunks, segment, size, parked=cache.is_parked(file)
            )
            cache.space.indexed(charged)

    # -- checks -------------------------------------------------------------------------------------

    def suspect(self, file: CachedFile, first: int, last: int) -> None:
        """A verified run could not be read as expected: it must be verified again."""
        cache = self._cache
        cache.counters.read_errors += 1
        with cache.lock:
            cache.forget_handle(file)
            cache.trusted.discard(file.digest)
            for chunk in range(first, last + 1):
                if file.state[chunk] == VERIFIED:
                    file.state[chunk] = UNVERIFIED
                    file.verified -= 1

    def checked(self, file: CachedFile, chunk: int, checksum: bytes, good: bool, lost: bool) -> bool:
        """One chunk was compared with ``checksum``. Void if it was taken away or replaced since.

        Args:
            lost: there is a hole in its place: the side-car is older than a crash or a power cut, no damage.

        Returns:
            whether damage was found.
        """
        cache = self._cache
        with cache.lock:
            at = chunk * DIGEST
            if file.state[chunk] != UNVERIFIED or file.checksums[at : at + DIGEST] != checksum:
                return False
            if good:
                file.state[chunk] = VERIFIED
                file.verified += 1
                return False
            file.state[chunk] = ABSENT
            file.present -= 1
            if not lost:
                cache.counters.corrupt_chunks += 1
            # It stays charged: bad bytes lie on disk until the refetched ones replace them.
            cache.mark_dirty(file)
        return not lost

    # -- storing ------------------------------------------------------------------------------------

    def write(
        self, file: CachedFile, reservation: Reservation, first: int, data: memoryview, checksums: bytes
    ) -> int:
        """See CachedFile.write."""
        cache = self._cache
        count = len(checksums) // DIGEST
        last = first + count - 1
        if reservation.file is not file or first < reservation.first or last > reservation.last or count < 1:
            raise ValueError(f"chunks {first}…{last} are not covered by the reservation")
        _, length = file.span(first, last)
        if len(data) != length or len(checksums) % DIGEST:
            raise ValueError(f"{len(data)} bytes are not the chunks {first}…{last}, which have {length}")
        for at in range(count):
            piece = data[at * cache.chunk : (at + 1) * cache.chunk]
            if xxhash.xxh3_128_digest(piece) != checksums[at * DIGEST : (at + 1) * DIGEST]:
                raise ChecksumMismatch("received bytes do not match their checksum", path=file.path)
        if cache.health.reads_off:
            return 0
        try:
            with cache.health.call():
                written = self._store(file, reservation, first, last, data, checksums)
        except OSError as error:
            cache.health.failed("writing to the cache", error)
            raise
        if written:
            cache.health.worked()
        return written

    def _store(
        self,
        file: CachedFile,
        reservation: Reservation,
        first: int,
        last: int,
        data: memoryview,
        checksums: bytes,
    ) -> int:
        cache = self._cache
        with cache.structure:
            self._load(file)
            with cache.lock:
                epoch, evictions = file.epoch, file.evictions
                if reservation.released:
                    return 0
                if cache.space.stuck and cache.space.used > cache.space.limit:
                    raise OSError(errno.ENOSPC, "no room: evicted files could not be deleted")
            cache.keeper.raise_ledger()
            handle = self._writable(file, evictions)
        with cache.lock:
            chunks, cost = self._claim(file, reservation, first, last, checksums)
        stored = 0
        try:
            for low, high in _runs(chunks):
                offset, length = file.span(low, high)
                start = offset - first * cache.chunk
                write_all(cache.disk, handle.fd, data[start : start + length], offset)
            with cache.lock:
                if file.epoch == epoch and chunks:
                    stored = self._commit(file, chunks, first, checksums, cost)
                    cost = 0
        finally:
            with cache.lock:
                file.busy.difference_update(chunks)
                cache.space.give_back(cost)
                if cost and file.digest not in cache.sieve:
                    # nothing of it is cached: leave no half-written file behind
                    cache.evictor.evict(file.digest, None)
        return stored

    def _claim(
        self, file: CachedFile, reservation: Reservation, first: int, last: int, checksums: bytes
    ) -> tuple[list[int], int]:
        """The chunks of a run that this caller shall write, and what it takes from the reservation for them.

        Unverified chunks are left to ``verify``, chunks that are being written or punched to whoever does
        so. Lock held.
        """
        chunks: list[int] = []
        total = 0
        if not reservation.released:
            # The first write pays for the file itself; one that is under way has paid already.
            paid = file.digest in self._cache.sieve or bool(file.busy)
            base = 0 if paid else file_cost(file.chunks)
            for chunk in range(first, last + 1):
                own = checksums[(chunk - first) * DIGEST : (chunk - first + 1) * DIGEST]
                if (
                    file.state[chunk] == VERIFIED
                    and file.checksums[chunk * DIGEST : (chunk + 1) * DIGEST] != own
                ):
                    raise ChecksumMismatch("two contents under one version", path=file.path)
                if file.state[chunk] != ABSENT or chunk in file.busy:
                    continue
                cost = chunk_cost(file.span(chunk, chunk)[1])
                if base + total + cost > reservation.remaining:
                    break
                total += cost
                chunks.append(chunk)
            total += base if chunks else 0
            reservation.remaining -= total
            file.busy.update(chunks)
        return chunks, total

    def _commit(
        self, file: CachedFile, chunks: list[int], first: int, checksums: bytes, reserved: int
    ) -> int:
        """Marks written chunks verified; returns their bytes. Lock held."""
        cache = self._cache
        charged = stored = 0
        parked = cache.is_parked(file)
        for chunk in chunks:
            offset, length = file.span(chunk, chunk)
            own = checksums[(chunk - first) * DIGEST : (chunk - first + 1) * DIGEST]
            file.checksums[chunk * DIGEST : (chunk + 1) * DIGEST] = own
            segment = offset // SEGMENT
            file.slots[segment], more = cache.charge(
                file.digest, file.chunks, segment, chunk_cost(length), parked=parked
            )
            charged += more
            stored += length
            file.state[chunk] = VERIFIED
        file.present += len(chunks)
        file.verified += len(chunks)
        cache.space.commit(reserved, charged)
        cache.counters.written_bytes += stored
        cache.mark_dirty(file)
        return stored

    def _writable(self, file: CachedFile, evictions: int) -> Handle:
        """The data file, made where it is missing. Structure lock held.

        Raises:
            OSError: it cannot be opened, or somebody else changed its size (the file is then given up).
        """
        cache = self._cache
        handle = file.handle
        if handle is not None and handle.writable:
            return handle
        flags = os.O_RDWR | os.O_CREAT
        handle = Handle(cache.disk.open(cache.directory.data_path(file.digest), flags), True)
        if os.fstat(handle.fd).st_size != file.size:
            if file.present:
                with cache.lock:
                    cache.counters.corrupt_chunks += file.present
                    cache.evictor.evict(file.digest, None)
                raise OSError(errno.EIO, "a data file of the cache was changed by somebody else")
            cache.disk.ftruncate(handle.fd, file.size)
        cache.remember_handle(file, handle, evictions)
        return handle


def release_unlisted(directory: CacheDirectory, digest: bytes, found: SideCar, stat: os.stat_result) -> int:
    """Gives back what lies in a data file beyond its side-car's chunks: fills that a crash cut off.

    Structure lock held, and nobody has the file loaded.

    Returns:
        the bytes that the data file takes now.
    """
    on_disk = stat.st_blocks * 512
    present = len(found.state) - found.state.count(ABSENT)
    if stat.st_mode & SEALED or on_disk <= (present + 1) * found.chunk:
        return on_disk
    try:
        fd = directory.disk.open(directory.data_path(digest), os.O_RDWR)
        try:
            at = 0
            for first, last in [*sidecar.runs_present(found.state), (len(found.state), 0)]:
                if first > at:
                    directory.disk.punch(fd, at * found.chunk, (first - at) * found.chunk)
                at = last + 1
            return os.fstat(fd).st_blocks * 512
        finally:
            os.close(fd)
    except OSError:
        return on_disk  # it stays counted


def segment_costs(found: SideCar, on_disk: int) -> list[tuple[int, int]]:
    """(segment, bytes charged) for each segment that has chunks; the first bears what else is on disk."""
    state, chunk = found.state, found.chunk
    per = SEGMENT // chunk
    costs = []
    for segment in range(-(-len(state) // per)):
        low, high = segment * per, min(len(state), (segment + 1) * per)
        present = high - low - state.count(ABSENT, low, high)
        if present:
            cost = present * chunk_cost(chunk)
            if high == len(state) and state[-1] != ABSENT:
                cost += chunk_cost(found.key.size - (high - 1) * chunk) - chunk_cost(chunk)
            costs.append((segment, cost))
    costs = costs or [(0, 0)]
    excess = max(0, on_disk - sum(size for _, size in costs))
    return [(costs[0][0], costs[0][1] + excess), *costs[1:]]


def _runs(chunks: list[int]) -> list[tuple[int, int]]:
    """Sorted chunk numbers as runs (first, last)."""
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        if runs and runs[-1][1] == chunk - 1:
            runs[-1] = (runs[-1][0], chunk)
        else:
            runs.append((chunk, chunk))
    return runs
