"""The chunk cache against a plain model: any order of fills, reads, evictions, restarts, crashes and damage.

The model is the true contents. A read is right or unanswered, limits hold on the disk itself, and after a
clean restart nothing that was there is gone.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.spoke.cache_kit import (
    content,
    crash,
    data_file,
    fill,
    flip_bit,
    key,
    meta_file,
    on_disk,
    read,
    wait_until,
)

from farside.spoke.cache import ChunkCache
from farside.spoke.cachedfile import CachedFile, Reservation
from farside.spoke.eviction import SEGMENT

CHUNK = 512 * 1024
PER = SEGMENT // CHUNK
LIMIT = 24 << 20
SIZES = (0, 1, CHUNK, 3 * CHUNK + 5, SEGMENT, 2 * SEGMENT + 4097)
FILES = st.integers(0, len(SIZES) - 1)


class CacheModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="farside-model-"))
        self.damaged = False
        self.held: list[CachedFile] = []
        self.reservations: list[Reservation] = []
        self.mapped: list[tuple[int, int]] = []  # descriptors that stand for a job's mappings, and their file
        self.open()

    def open(self, limit: int = LIMIT) -> None:
        self.cache = ChunkCache.open(self.directory, size_limit=limit, chunk=CHUNK)
        self.held, self.reservations = [], []

    def file(self, number: int) -> CachedFile:
        file = self.cache.file(key(number, SIZES[number]), b"f%d" % number)
        file.load()
        self.held.append(file)
        del self.held[:-3]
        return file

    @rule(number=FILES, start=st.integers(0, 2 * PER), count=st.integers(1, 6), evict=st.booleans())
    def fill(self, number: int, start: int, count: int, evict: bool) -> None:
        file = self.file(number)
        if file.chunks:
            first = start % file.chunks
            last = min(file.chunks - 1, first + count - 1)
            file.verify(first, last)
            reservation = self.cache.reserve(file, first, last, may_evict=evict)
            if reservation is not None:
                reservation.release()
                fill(self.cache, file, content(number, file.size), first, last)
                if not file.active:
                    assert not file.absent(first, last)

    @rule(number=FILES, offset=st.integers(0, 3 * SEGMENT), size=st.integers(1, 2 * CHUNK))
    def read(self, number: int, offset: int, size: int) -> None:
        file = self.file(number)
        if file.size:
            offset %= file.size
            file.verify(offset // CHUNK, min(file.chunks - 1, (offset + size) // CHUNK))
        got = read(file, offset, size)
        assert got in (None, content(number, file.size)[offset : offset + size])
        if got is None:
            assert file.absent(offset // CHUNK, min(file.chunks - 1, (offset + size - 1) // CHUNK))

    @rule(number=FILES)
    def keep_reservation(self, number: int) -> None:
        file = self.file(number)
        if file.chunks:
            reservation = self.cache.reserve(file, 0, file.chunks - 1)
            if reservation is not None:
                self.reservations.append(reservation)

    @rule()
    def release_reservations(self) -> None:
        while self.reservations:
            self.reservations.pop().release()

    @rule(number=FILES)
    def evict(self, number: int) -> None:
        file = self.file(number)
        pinned = file.digest in self.cache.pins
        present = file.present
        freed = self.cache.evict(file)
        assert (freed == 0 and file.present == present) if pinned else file.present == 0

    @rule(number=FILES)
    def pin(self, number: int) -> None:
        self.cache.pin(self.file(number))

    @rule(number=FILES)
    def unpin(self, number: int) -> None:
        self.cache.unpin(self.file(number))

    @rule(number=FILES, keep=st.booleans())
    def passthrough(self, number: int, keep: bool) -> None:
        file = self.file(number)
        self.cache.flush()
        fd = file.passthrough_fd()
        assert fd < 0 or file.complete
        if fd >= 0:
            file.passthrough_release()
            if keep and len(self.mapped) < 4:
                self.mapped.append((fd, number))
            else:
                os.close(fd)

    @rule()
    def flush(self) -> None:
        assert self.cache.flush()
        assert not self.cache.dirty

    @rule(scan=st.booleans())
    def restart(self, scan: bool) -> None:
        self.release_reservations()
        before = {
            number: (self.file(number).present, self.file(number).digest) for number in range(len(SIZES))
        }
        self.cache.close()
        self.open()
        if scan:
            wait_until(lambda: self.cache.scanned)
        if not self.damaged:
            for number, (present, _) in before.items():
                assert self.file(number).present == present

    @rule()
    def crash(self) -> None:
        crash(self.cache)
        self.open()

    @rule(number=FILES, what=st.sampled_from(["bit", "meta", "swap", "lose"]), seed=st.integers(0, 1000))
    def damage(self, number: int, what: str, seed: int) -> None:
        self.release_reservations()
        file = self.file(number)
        path, meta = data_file(self.directory, file), meta_file(self.directory, file)
        self.cache.close()
        rng = random.Random(seed)
        if path.exists() and file.digest not in self.sealed_digests():
            self.damaged = True
            if what == "bit":
                flip_bit(path, rng.randrange(file.size))
            elif what == "lose":
                path.unlink()
            elif what == "meta" and meta.exists():
                os.truncate(meta, rng.randrange(meta.stat().st_size))
            elif what == "swap":
                others = [p for p in self.directory.glob("data/*/*.data") if p != path]
                if others:
                    other = rng.choice(others)
                    path.rename(self.directory / "aside")
                    other.rename(path)
                    (self.directory / "aside").rename(other)
        self.open()

    def sealed_digests(self) -> set[bytes]:
        """Files of which a descriptor is held: damage to them would show through it, and rightly so."""
        return {self.cache.file(key(number, SIZES[number]), b"").digest for _, number in self.mapped}

    @invariant()
    def limits_hold(self) -> None:
        assert self.cache.used <= LIMIT
        assert on_disk(self.directory) <= LIMIT + sum(SIZES[number] for _, number in self.mapped)

    @invariant()
    def mappings_never_change(self) -> None:
        for fd, number in self.mapped:
            size = SIZES[number]
            offset = max(0, size // 2 - 50)
            assert os.pread(fd, 100, offset) == content(number, size)[offset : offset + 100]
            assert os.pread(fd, 100, size - 1) == content(number, size)[-1:]

    def teardown(self) -> None:
        self.release_reservations()
        for number in range(len(SIZES)):
            file = self.file(number)
            if file.chunks:
                file.verify(0, file.chunks - 1)
            for at in range(0, file.size, CHUNK):
                assert read(file, at, CHUNK) in (None, content(number, file.size)[at : at + CHUNK])
        self.cache.close()
        for fd, _ in self.mapped:
            os.close(fd)
        shutil.rmtree(self.directory)


CacheModel.TestCase.settings = settings(
    max_examples=int(os.environ.get("FARSIDE_EXAMPLES", "12")),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestCacheModel = CacheModel.TestCase
