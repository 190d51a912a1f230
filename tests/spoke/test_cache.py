"""The chunk cache in good weather: filling, reading, limits, eviction, restarts, passthrough."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.spoke.cache_kit import (
    checksums,
    content,
    crash,
    data_file,
    fill,
    key,
    load_and_verify,
    meta_file,
    on_disk,
    read,
    read_all,
    wait_until,
)

from farside.errors import ChecksumMismatch
from farside.spoke.cache import ChunkCache
from farside.spoke.cachedir import SEALED
from farside.spoke.eviction import SEGMENT

CHUNK = 65536
LIMIT = 64 << 20


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ChunkCache]:
    opened = ChunkCache.open(tmp_path / "cache", size_limit=LIMIT)
    yield opened
    opened.close()


@pytest.mark.parametrize("size", [1, 100, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 200 * CHUNK + 17])
def test_what_was_written_is_read(cache: ChunkCache, size: int) -> None:
    file = cache.file(key(1, size), b"f")
    data = content(1, size)
    assert read(file, 0, 10) is None and file.absent(0, file.chunks - 1) == [(0, file.chunks - 1)]
    assert fill(cache, file, data) == size
    assert file.complete and read_all(file) == data
    assert read(file, size - 1, 100) == data[-1:] and read(file, size, 100) == b"" == read(file, size + 9, 1)


def test_empty_file_needs_no_disk(cache: ChunkCache) -> None:
    file = cache.file(key(1, 0), b"f")
    assert file.complete and file.loaded and file.chunks == 0 and read(file, 0, 10) == b""
    assert not data_file(Path(cache.directory.path), file).exists()


def test_partial_file_serves_what_it_has(cache: ChunkCache) -> None:
    size = 10 * CHUNK
    file, data = cache.file(key(1, size), b"f"), content(1, size)
    fill(cache, file, data, 2, 3)
    fill(cache, file, data, 7, 7)
    assert file.absent(0, 9) == [(0, 1), (4, 6), (8, 9)] and not file.complete
    assert read(file, 2 * CHUNK + 5, 2 * CHUNK - 5) == data[2 * CHUNK + 5 : 4 * CHUNK]
    assert read(file, 2 * CHUNK, 2 * CHUNK + 1) is None and read(file, 2 * CHUNK - 1, 2) is None


def test_wrong_bytes_are_refused_and_nothing_is_marked(cache: ChunkCache) -> None:
    size = 3 * CHUNK
    file, data = cache.file(key(1, size), b"f"), content(1, size)
    reservation = cache.reserve(file, 0, 2)
    assert reservation is not None
    bad = bytearray(data)
    bad[CHUNK + 9] ^= 1
    with pytest.raises(ChecksumMismatch):
        file.write(reservation, 0, bytes(bad), checksums(data, CHUNK))
    with pytest.raises(ValueError):
        file.write(reservation, 0, data[:-1], checksums(data, CHUNK))
    with pytest.raises(ValueError):
        file.write(reservation, 1, data, checksums(data, CHUNK))
    assert file.present == 0 and read(file, 0, 1) is None
    assert file.write(reservation, 0, data, checksums(data, CHUNK)) == size
    with pytest.raises(ChecksumMismatch, match="two contents"):
        file.write(reservation, 0, bytes(bad), checksums(bytes(bad), CHUNK))
    reservation.release()
    assert read_all(file) == data


def test_one_object_per_key(cache: ChunkCache) -> None:
    file = cache.file(key(1, 100), b"f")
    assert cache.file(key(1, 100), b"hard link") is file
    assert cache.file(key(2, 100), b"f") is not file and cache.file(key(1, 101), b"f") is not file


def test_reservations_are_hard(cache: ChunkCache) -> None:
    # kind of rclone/rclone#5573: many large files open and fetching at once
    granted = []
    for seed in range(100):
        file = cache.file(key(seed, 2 << 20), b"f")
        reservation = cache.reserve(file, 0, file.chunks - 1)
        if reservation is not None:
            granted.append(reservation)
        assert cache.used <= LIMIT
    assert 25 <= len(granted) < 32
    for reservation in granted:
        reservation.release()
        reservation.release()
    assert cache.used == 0


def test_limit_holds_on_disk_while_everything_is_read(cache: ChunkCache, tmp_path: Path) -> None:
    rng = random.Random(5)
    for seed in range(60):
        size = rng.choice([1000, CHUNK, 3 << 20, 12 << 20])
        file = cache.file(key(seed, size), b"f")
        file.load()
        assert fill(cache, file, content(seed, size)) >= 0
        assert cache.used <= LIMIT and on_disk(tmp_path / "cache") <= LIMIT
    assert cache.counters.evicted_bytes > 0
    assert cache.flush() and on_disk(tmp_path / "cache") <= LIMIT


def test_fill_does_not_evict(cache: ChunkCache) -> None:
    size = 60 << 20
    fill(cache, cache.file(key(1, size), b"f"), content(1, size))
    other = cache.file(key(2, 8 << 20), b"g")
    assert cache.reserve(other, 0, other.chunks - 1, may_evict=False) is None
    reservation = cache.reserve(other, 0, other.chunks - 1)
    assert reservation is not None
    reservation.release()


def test_a_file_larger_than_the_cache_streams_through(cache: ChunkCache, tmp_path: Path) -> None:
    size = 100 << 20
    file, data = cache.file(key(1, size), b"f"), content(1, size)
    step = 2 << 20
    for at in range(0, size, step):
        first, last = at // CHUNK, (at + step) // CHUNK - 1
        assert fill(cache, file, data, first, last) == step
        assert read(file, at, step) == data[at : at + step]
        assert cache.used <= LIMIT
    assert on_disk(tmp_path / "cache") <= LIMIT
    for at in range(0, size, CHUNK):  # what is left is right, what was punched out is not served
        assert read(file, at, CHUNK) in (None, data[at : at + CHUNK])
    assert file.absent(0, file.chunks - 1)


def test_segment_of_an_idle_file_is_punched_and_its_side_car_corrected(
    cache: ChunkCache, tmp_path: Path
) -> None:
    size = 3 * SEGMENT
    file, data = cache.file(key(1, size), b"f"), content(1, size)
    fill(cache, file, data)
    assert cache.flush()
    cache.close()
    again = ChunkCache.open(tmp_path / "cache", size_limit=LIMIT)
    wait_until(lambda: again.scanned)
    with again.lock:
        assert again.evictor.evict(file.digest, 1) > 0
    file = load_and_verify(again, 1, size)
    per = SEGMENT // CHUNK
    assert file.absent(0, file.chunks - 1) == [(per, 2 * per - 1)] and again.counters.corrupt_chunks == 0
    assert on_disk(tmp_path / "cache") < 2 * SEGMENT + (1 << 20)
    assert (
        read(file, 0, SEGMENT) == data[:SEGMENT] and read(file, 2 * SEGMENT, SEGMENT) == data[2 * SEGMENT :]
    )
    again.close()


def test_restart_refetches_nothing(cache: ChunkCache, tmp_path: Path) -> None:
    # kind of fsspec/filesystem_spec#553
    sizes = {1: 10, 2: CHUNK, 3: 20 << 20}
    for seed, size in sizes.items():
        fill(cache, cache.file(key(seed, size), b"f"), content(seed, size))
    used = cache.used
    cache.close()
    again = ChunkCache.open(tmp_path / "cache", size_limit=LIMIT)
    for seed, size in sizes.items():
        file = again.file(key(seed, size), b"f")
        file.load()
        assert file.fully_on_disk and not file.complete and read(file, 0, 1) is None
        file.verify(0, file.chunks - 1)
        assert file.complete and read_all(file) == content(seed, size)
    wait_until(lambda: again.scanned)
    assert used - 1000 < again.used <= used and again.counters.corrupt_chunks == 0
    again.close()


def test_crash_keeps_what_was_flushed(cache: ChunkCache, tmp_path: Path) -> None:
    size = 1 << 20
    fill(cache, cache.file(key(1, size), b"f"), content(1, size))
    assert cache.flush()
    unflushed = cache.file(key(2, size), b"f")
    fill(cache, unflushed, content(2, size))
    crash(cache)
    again = ChunkCache.open(tmp_path / "cache", size_limit=LIMIT)
    assert again.used >= on_disk(tmp_path / "cache")  # by the ledger, before the scan has seen anything
    wait_until(lambda: again.scanned)
    assert read_all(load_and_verify(again, 1, size)) == content(1, size)
    file = load_and_verify(again, 2, size)
    assert file.complete or file.absent(0, file.chunks - 1)
    assert again.used >= on_disk(tmp_path / "cache")
    again.close()


def test_left_overs_of_a_crash_are_removed(cache: ChunkCache, tmp_path: Path) -> None:
    # kind of Lightning-AI/litData#398 and xrootd/xrootd#2825
    cache.close()
    base = tmp_path / "cache" / "data"
    for name in ("aa" * 16 + ".data", "ab" * 16 + ".meta", "ac" * 16 + ".meta.tmp"):
        (base / name[:2] / name).write_bytes(b"x" * 5000)
    again = ChunkCache.open(tmp_path / "cache", size_limit=LIMIT)
    wait_until(lambda: again.scanned)
    assert on_disk(tmp_path / "cache") == 0 and again.used == 0 and again.counters.orphans_removed == 3
    again.close()


def test_missing_ledger_means_full_until_the_scan_ends(cache: ChunkCache, tmp_path: Path) -> None:
    size = 1 << 20
    fill(cache, cache.file(key(1, size), b"f"), content(1, size))
    cache.close()
    (tmp_path / "cache" / "ledger").unlink()
    again = ChunkCache.open(tmp_path / "cache", size_limit=LIMIT)
    wait_until(lambda: again.scanned)
    assert size < again.used < size + 100_000
    again.close()


def test_lowered_limit_is_reached_in_the_background(cache: ChunkCache, tmp_path: Path) -> None:
    for seed in range(50):
        fill(cache, cache.file(key(seed, 1 << 20), b"f"), content(seed, 1 << 20))
    cache.close()
    again = ChunkCache.open(tmp_path / "cache", size_limit=10 << 20)
    wait_until(lambda: again.scanned and again.used <= 10 << 20 and not again.removals)
    wait_until(lambda: on_disk(tmp_path / "cache") <= 10 << 20)
    again.close()


def test_pins_are_honoured_and_kept(cache: ChunkCache, tmp_path: Path) -> None:
    size = 4 << 20
    pinned = cache.file(key(0, size), b"f")
    fill(cache, pinned, content(0, size))
    cache.pin(pinned)
    for seed in range(1, 40):
        fill(cache, cache.file(key(seed, size), b"f"), content(seed, size))
    assert pinned.complete and cache.evict(pinned) == 0
    cache.close()
    again = ChunkCache.open(tmp_path / "cache", size_limit=LIMIT)
    wait_until(lambda: again.scanned)
    for seed in range(50, 90):
        fill(again, again.file(key(seed, size), b"f"), content(seed, size))
    file = load_and_verify(again, 0, size)
    assert read_all(file) == content(0, size)
    again.unpin(file)
    assert again.evict(file) > 0 and read(file, 0, 1) is None
    again.close()


def test_reader_of_an_evicted_file_never_sees_another(cache: ChunkCache) -> None:
    """Eight readers, an evictor and a filler: every answer is right or none."""
    size = 2 * SEGMENT
    files = [(cache.file(key(seed, size), b"f"), content(seed, size)) for seed in range(3)]
    stop, wrong, answers = threading.Event(), [], [0]

    def reader(seed: int) -> None:
        rng, buffer = random.Random(seed), memoryview(bytearray(3 * CHUNK))
        while not stop.is_set():
            file, data = rng.choice(files)
            at = rng.randrange(size - len(buffer))
            got = file.try_read(at, buffer)
            if got >= 0:
                answers[0] += 1
                if buffer != data[at : at + got]:
                    wrong.append((file, at))

    def changer(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            file, data = rng.choice(files)
            first = rng.randrange(0, file.chunks, 16)
            for run_first, run_last in file.absent(first, first + 15):
                fill(cache, file, data, run_first, run_last)
            if rng.random() < 0.1:
                cache.evict(file)
            elif rng.random() < 0.4:
                with cache.lock:
                    for digest, segment, _ in list(cache.sieve.candidates())[:2]:
                        if not cache.evictor._in_use(digest, segment, False):
                            cache.evictor.evict(digest, segment)

    threads = [threading.Thread(target=reader, args=(n,)) for n in range(8)]
    threads += [threading.Thread(target=changer, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    threading.Event().wait(2.0)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong and answers[0] > 100
    assert cache.space.reserved == 0
    assert cache.removals or not any(file.busy for file, _ in files)


def test_many_fill_the_same_file_at_once(cache: ChunkCache) -> None:
    # kind of fsspec/filesystem_spec#639: 80 readers, one cold file
    size = 4 << 20
    file, data = cache.file(key(1, size), b"f"), content(1, size)
    barrier, wrong = threading.Barrier(80), []

    def go() -> None:
        barrier.wait()
        fill(cache, file, data)
        if read_all(file) not in (None, data):
            wrong.append(1)

    threads = [threading.Thread(target=go) for _ in range(80)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and read_all(file) == data
    assert size <= cache.used < size + 200_000 and cache.counters.written_bytes == size


class TestPassthrough:
    def test_only_when_whole_verified_and_on_disk(self, cache: ChunkCache) -> None:
        size = 3 * CHUNK
        file, data = cache.file(key(1, size), b"f"), content(1, size)
        fill(cache, file, data, 0, 1)
        assert file.passthrough_fd() == -1
        fill(cache, file, data)
        assert file.complete and file.passthrough_fd() == -1  # write-back has not been confirmed
        assert cache.flush()
        fd = file.passthrough_fd()
        assert os.pread(fd, size, 0) == data
        os.close(fd)
        file.passthrough_release()

    def test_not_evicted_for_room_while_held(self, cache: ChunkCache) -> None:
        size = 4 << 20
        file, data = cache.file(key(0, size), b"f"), content(0, size)
        fill(cache, file, data)
        assert cache.flush()
        fd = file.passthrough_fd()
        for seed in range(1, 40):
            fill(cache, cache.file(key(seed, size), b"f"), content(seed, size))
        assert file.complete and os.pread(fd, size, 0) == data
        # asked to go: unlinked, and counted until the kernel lets go of it
        used = cache.used
        assert cache.evict(file) > 0 and cache.used == used
        assert not file.complete and os.pread(fd, size, 0) == data
        assert fill(cache, file, data) >= 0
        assert os.pread(fd, size, 0) == data
        used = cache.used
        file.passthrough_release()
        assert cache.used < used
        os.close(fd)

    def test_never_punched_again_also_after_a_crash(self, cache: ChunkCache, tmp_path: Path) -> None:
        size = 3 * SEGMENT
        file, data = cache.file(key(0, size), b"f"), content(0, size)
        fill(cache, file, data)
        assert cache.flush()
        fd = file.passthrough_fd()  # stands for a mapping that the job keeps after its close
        file.passthrough_release()
        assert data_file(tmp_path / "cache", file).stat().st_mode & SEALED
        crash(cache)
        again = ChunkCache.open(tmp_path / "cache", size_limit=LIMIT)
        wait_until(lambda: again.scanned)
        for seed in range(1, 20):
            fill(again, again.file(key(seed, 4 << 20), b"f"), content(seed, 4 << 20))
        again.flush()
        assert os.pread(fd, size, 0) == data
        assert not data_file(tmp_path / "cache", file).exists()
        assert not meta_file(tmp_path / "cache", file).exists()
        os.close(fd)
        again.close()
