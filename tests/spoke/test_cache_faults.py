"""The chunk cache on a bad disk: the right bytes or none, a bypass instead of errors, limits that hold."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.spoke.cache_kit import (
    FaultyDisk,
    content,
    data_file,
    fill,
    flip_bit,
    key,
    load_and_verify,
    meta_file,
    on_disk,
    read,
    read_all,
    wait_until,
)

from farside.spoke.cache import ChunkCache
from farside.spoke.cachedfile import CachedFile

CHUNK = 65536
LIMIT = 64 << 20
SIZE = 20 * CHUNK + 777


def stored(directory: Path, *seeds: int, size: int = SIZE) -> list[CachedFile]:
    """A closed cache that holds whole files."""
    cache = ChunkCache.open(directory, size_limit=LIMIT)
    files = []
    for seed in seeds:
        files.append(cache.file(key(seed, size), b"file-%d" % seed))
        files[-1].load()
        assert fill(cache, files[-1], content(seed, size)) == size
    cache.close()
    return files


# -- damage while nobody looks ----------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 5 * CHUNK - 1, SIZE - 1])
def test_flipped_bit_is_dropped_and_counted(tmp_path: Path, offset: int) -> None:
    # kind of juicedata/juicefs#5981
    (file,) = stored(tmp_path, 1)
    flip_bit(data_file(tmp_path, file), offset, 3)
    cache = ChunkCache.open(tmp_path, size_limit=LIMIT)
    file = load_and_verify(cache, 1, SIZE)
    bad = offset // CHUNK
    assert file.absent(0, file.chunks - 1) == [(bad, bad)] and cache.counters.corrupt_chunks == 1
    assert read(file, bad * CHUNK, 1) is None and file.passthrough_fd() == -1
    fill(cache, file, content(1, SIZE))
    assert read_all(file) == content(1, SIZE)
    cache.close()


def shift_a_page(files: list[CachedFile], directory: Path) -> None:
    path = data_file(directory, files[0])
    data = path.read_bytes()[:SIZE]
    path.write_bytes(data[:CHUNK] + data[CHUNK - 4096 : -4096])


def swap_data(files: list[CachedFile], directory: Path) -> None:
    one, two = (data_file(directory, file) for file in files)
    one.rename(two.with_suffix(".swap"))
    two.rename(one)
    two.with_suffix(".swap").rename(two)


def swap_both(files: list[CachedFile], directory: Path) -> None:
    swap_data(files, directory)
    one, two = (meta_file(directory, file) for file in files)
    one.rename(two.with_suffix(".swap"))
    two.rename(one)
    two.with_suffix(".swap").rename(two)


def zero_a_page(files: list[CachedFile], directory: Path) -> None:
    with data_file(directory, files[0]).open("r+b") as file:
        os.pwrite(file.fileno(), bytes(4096), 3 * CHUNK)


def truncate_data(files: list[CachedFile], directory: Path) -> None:
    os.truncate(data_file(directory, files[0]), SIZE - 5000)


def truncate_and_extend(files: list[CachedFile], directory: Path) -> None:
    truncate_data(files, directory)
    os.truncate(data_file(directory, files[0]), SIZE)


def empty_data(files: list[CachedFile], directory: Path) -> None:
    os.truncate(data_file(directory, files[0]), 0)


def delete_data(files: list[CachedFile], directory: Path) -> None:
    data_file(directory, files[0]).unlink()


def delete_side_car(files: list[CachedFile], directory: Path) -> None:
    meta_file(directory, files[0]).unlink()


def empty_side_car(files: list[CachedFile], directory: Path) -> None:
    meta_file(directory, files[0]).write_bytes(b"")


def truncate_side_car(files: list[CachedFile], directory: Path) -> None:
    os.truncate(meta_file(directory, files[0]), 100)


def flip_in_side_car(files: list[CachedFile], directory: Path) -> None:
    flip_bit(meta_file(directory, files[0]), 150)


def data_is_a_directory(files: list[CachedFile], directory: Path) -> None:
    delete_data(files, directory)
    data_file(directory, files[0]).mkdir()


def data_is_a_symlink(files: list[CachedFile], directory: Path) -> None:
    other = directory / "other"
    shutil.copy(data_file(directory, files[1]), other)
    delete_data(files, directory)
    data_file(directory, files[0]).symlink_to(other)


DAMAGES = [
    shift_a_page,  # xrootd/xrootd#1420
    swap_data,
    swap_both,
    zero_a_page,
    truncate_data,  # cvmfs/cvmfs#3728
    truncate_and_extend,
    empty_data,
    delete_data,  # xrootd/xrootd#2825
    delete_side_car,
    empty_side_car,
    truncate_side_car,
    flip_in_side_car,
    data_is_a_symlink,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda function: function.__name__)
@pytest.mark.parametrize("scan_first", [False, True])
def test_damage_found_after_a_restart(
    tmp_path: Path, damage: Callable[[list[CachedFile], Path], None], scan_first: bool
) -> None:
    damage(stored(tmp_path, 1, 2), tmp_path)
    cache = ChunkCache.open(tmp_path, size_limit=LIMIT)
    if scan_first:
        wait_until(lambda: cache.scanned)
    for seed in (1, 2):
        file = load_and_verify(cache, seed, SIZE)
        for at in range(0, SIZE, CHUNK):
            assert read(file, at, CHUNK) in (None, content(seed, SIZE)[at : at + CHUNK])
        for first, last in file.absent(0, file.chunks - 1):
            assert fill(cache, file, content(seed, SIZE), first, last) > 0
        assert read_all(file) == content(seed, SIZE)
    cache.close()


@pytest.mark.parametrize("damage", [truncate_data, empty_data, delete_data], ids=lambda f: f.__name__)
def test_damage_under_a_running_spoke(
    tmp_path: Path, damage: Callable[[list[CachedFile], Path], None]
) -> None:
    """Somebody meddles with the directory: holes that a later extension leaves must never be served."""
    stored(tmp_path, 1, 2)
    cache = ChunkCache.open(tmp_path, size_limit=LIMIT)
    file = load_and_verify(cache, 1, SIZE)
    fill(cache, file, content(1, SIZE))
    damage([file], tmp_path)
    data = content(1, SIZE)
    for _ in range(3):
        for at in range(0, SIZE, CHUNK):
            assert read(file, at, CHUNK) in (None, data[at : at + CHUNK])
        file.verify(0, file.chunks - 1)
        try:
            for first, last in file.absent(0, file.chunks - 1):
                fill(cache, file, data, first, last)
        except OSError:
            cache.health.worked()
    assert read_all(file) == data
    cache.close()


# -- a disk that fails -------------------------------------------------------------------------------------


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[tuple[ChunkCache, FaultyDisk]]:
    disk = FaultyDisk()
    cache = ChunkCache.open(tmp_path / "cache", size_limit=LIMIT, disk=disk, slow_s=0.2)
    cache.health.retry_s = 0.1
    yield cache, disk
    disk.faults.clear()
    disk.hang.clear()
    disk.awake.set()
    cache.close()


@pytest.mark.parametrize("fault", ["pwrite", "open"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_failed_write_marks_nothing_and_bypasses_with_one_warning(
    faulty: tuple[ChunkCache, FaultyDisk], caplog: pytest.LogCaptureFixture, fault: str, number: int
) -> None:
    # kinds of xrootd/xrootd#663 and rclone/rclone#4442
    cache, disk = faulty
    cache.health.retry_s = 60
    file = cache.file(key(1, SIZE), b"f")
    disk.faults[fault] = number
    with pytest.raises(OSError) as caught, caplog.at_level(logging.WARNING):
        fill(cache, file, content(1, SIZE))
    assert caught.value.errno == number
    assert file.present == 0 and read(file, 0, 1) is None and cache.space.reserved == 0
    assert cache.bypass_reason is not None and fill(cache, file, content(1, SIZE)) == -1
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    del disk.faults[fault]
    cache.health.retry_s = 0.01
    cache.health._retry_at = 0.0
    assert fill(cache, file, content(1, SIZE)) == SIZE
    assert cache.bypass_reason is None and read_all(file) == content(1, SIZE)


def test_torn_write_is_not_served_after_a_restart(tmp_path: Path) -> None:
    disk = FaultyDisk()
    cache = ChunkCache.open(tmp_path, size_limit=LIMIT, disk=disk)
    cache.health.retry_s = 0
    file, data = cache.file(key(1, SIZE), b"f"), content(1, SIZE)
    fill(cache, file, data, 0, 3)
    disk.faults["pwrite"] = errno.ENOSPC
    with pytest.raises(OSError):
        fill(cache, file, data, 4, 10)
    disk.faults.clear()
    cache.close()
    cache = ChunkCache.open(tmp_path, size_limit=LIMIT)
    file = load_and_verify(cache, 1, SIZE)
    assert file.absent(0, file.chunks - 1) == [(4, file.chunks - 1)]
    assert read(file, 0, 4 * CHUNK) == data[: 4 * CHUNK]
    cache.close()


def test_io_error_on_read_is_no_answer_then_refetched(faulty: tuple[ChunkCache, FaultyDisk]) -> None:
    cache, disk = faulty
    file = cache.file(key(1, SIZE), b"f")
    fill(cache, file, content(1, SIZE))
    disk.faults["preadv"] = errno.EIO
    assert read(file, 0, 100) is None
    assert file.unverified(0, file.chunks - 1) == [(0, 0)]
    file.verify(0, file.chunks - 1)
    assert file.absent(0, file.chunks - 1) == [(0, 0)]
    disk.faults.clear()
    assert fill(cache, file, content(1, SIZE), 0, 0) == CHUNK
    assert read_all(file) == content(1, SIZE)


def test_failed_write_back_gives_the_file_up(faulty: tuple[ChunkCache, FaultyDisk]) -> None:
    """Pages that could not be written may come back as zeros: nothing of them may be served, or mapped."""
    cache, disk = faulty
    file = cache.file(key(1, SIZE), b"f")
    fill(cache, file, content(1, SIZE))
    assert file.passthrough_fd() == -1
    disk.faults["wait_writeback"] = errno.EIO
    cache.flush()
    assert file.present == 0 and read(file, 0, 1) is None and file.passthrough_fd() == -1
    assert cache.bypass_reason is not None


def test_what_cannot_be_deleted_stays_counted_and_filling_stops(
    faulty: tuple[ChunkCache, FaultyDisk], tmp_path: Path
) -> None:
    # kind of awslabs/mountpoint-s3#1389
    cache, disk = faulty
    for seed in range(14):
        fill(cache, cache.file(key(seed, 4 << 20), b"f"), content(seed, 4 << 20))
    disk.faults["unlink"] = errno.EPERM
    for seed in range(20, 40):
        try:
            fill(cache, cache.file(key(seed, 4 << 20), b"f"), content(seed, 4 << 20))
        except OSError:
            pass
        assert on_disk(tmp_path / "cache") <= LIMIT
    assert cache.status()["undeletable"] and cache.bypass_reason is not None
    disk.faults.clear()
    with cache.structure:
        cache.evictor.retry_undeletable()
    assert cache.status()["undeletable"] == 0
    assert on_disk(tmp_path / "cache") <= cache.used


def test_sleeping_disk_is_read_through_and_comes_back(faulty: tuple[ChunkCache, FaultyDisk]) -> None:
    # kind of juicedata/juicefs#4782
    cache, disk = faulty
    changes: list[str | None] = []
    cache.on_bypass = changes.append
    file, data = cache.file(key(1, SIZE), b"f"), content(1, SIZE)
    fill(cache, file, data)
    assert cache.flush()
    disk.hang.add("preadv")
    answers: list[bytes | None] = []
    stuck = threading.Thread(target=lambda: answers.append(read(file, 0, 100)))
    stuck.start()
    wait_until(lambda: cache.health.reads_off)
    begun = time.monotonic()
    assert read(file, 0, 100) is None  # not stuck in the disk behind the other
    assert file.absent(0, 3) == [(0, 3)] and file.unverified(0, 3) == []
    assert cache.reserve(file, 0, 3) is None and file.passthrough_fd() == -1
    file.verify(0, 3)
    assert time.monotonic() - begun < 1
    assert changes and changes[0] is not None and "does not answer" in changes[0]
    disk.hang.clear()
    disk.awake.set()
    stuck.join(10)
    wait_until(lambda: not cache.health.reads_off)
    assert answers in ([data[:100]], [None]) and changes[-1] is None
    assert read_all(file) == data


def test_close_on_a_hanging_disk_is_bounded(tmp_path: Path) -> None:
    disk = FaultyDisk()
    cache = ChunkCache.open(tmp_path, size_limit=LIMIT, disk=disk, slow_s=0.2)
    fill(cache, cache.file(key(1, SIZE), b"f"), content(1, SIZE))
    disk.hang.add("fsync")
    begun = time.monotonic()
    cache.close(0.5)
    assert time.monotonic() - begun < 5
    disk.hang.clear()
    disk.awake.set()


def vfs(real: os.statvfs_result, **changes: int) -> os.statvfs_result:
    names = [
        "f_bsize",
        "f_frsize",
        "f_blocks",
        "f_bfree",
        "f_bavail",
        "f_files",
        "f_ffree",
        "f_favail",
        "f_flag",
        "f_namemax",
    ]
    fields = dict(zip(names, real, strict=True))
    return os.statvfs_result(tuple((fields | changes).values()))


def test_no_inode_count_is_not_a_full_disk(faulty: tuple[ChunkCache, FaultyDisk], tmp_path: Path) -> None:
    # kind of juicedata/juicefs#6247
    cache, disk = faulty
    disk.statvfs_result = vfs(os.statvfs(tmp_path), f_files=0, f_ffree=0, f_favail=0)
    cache.keeper.sample()
    assert fill(cache, cache.file(key(1, SIZE), b"f"), content(1, SIZE)) == SIZE
    disk.statvfs_result = vfs(os.statvfs(tmp_path), f_files=1_000_000, f_favail=10)
    cache.keeper.sample()
    assert fill(cache, cache.file(key(2, SIZE), b"f"), content(2, SIZE)) == -1
    assert cache.reserve(cache.file(key(1, SIZE), b"f"), 0, 0) is not None


def test_free_space_reserve_makes_room_for_others(
    faulty: tuple[ChunkCache, FaultyDisk], tmp_path: Path
) -> None:
    cache, disk = faulty
    for seed in range(10):
        fill(cache, cache.file(key(seed, 1 << 20), b"f"), content(seed, 1 << 20))
    real = os.statvfs(tmp_path)
    kept = real.f_blocks * 5 // 100
    disk.statvfs_result = vfs(real, f_bavail=kept - (4 << 20) // real.f_frsize)  # 4 MiB too little
    wait_until(lambda: cache.used <= 6 << 20)
    disk.statvfs_result = vfs(real, f_bavail=kept + (1 << 20) // real.f_frsize)
    cache.keeper.sample()
    big = cache.file(key(99, 8 << 20), b"g")
    assert cache.reserve(big, 0, big.chunks - 1, may_evict=False) is None


# -- real kernel faults ------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 16 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    where = tmp_path / "small"
    where.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", where], capture_output=True)
    if made.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {made.stderr.decode()}")
    yield where
    subprocess.run(["umount", "-l", where], check=True)


@pytest.mark.mount
def test_disk_filled_by_others_reads_through(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = ChunkCache.open(small_disk / "cache", size_limit=14 << 20)
    cache.health.retry_s = 60
    kept, data = cache.file(key(1, SIZE), b"f"), content(1, SIZE)
    fill(cache, kept, data)
    cache.keeper._stopping = True  # no fresh look at the free space: the kernel itself must say no
    cache.keeper.wake()
    cache.keeper._thread.join()
    (small_disk / "others").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096 - (200 << 10)))
    with caplog.at_level(logging.WARNING), pytest.raises(OSError):
        for seed in range(2, 9):
            fill(cache, cache.file(key(seed, SIZE), b"g"), content(seed, SIZE))
    assert read_all(kept) == data  # what is there is still served
    assert cache.bypass_reason is not None
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    cache.close()


@pytest.mark.mount
def test_cache_as_large_as_the_disk_keeps_the_reserve(small_disk: Path) -> None:
    cache = ChunkCache.open(small_disk / "cache", size_limit=16 << 20, reserve=0.1)
    for seed in range(30):
        assert fill(cache, cache.file(key(seed, SIZE), b"f"), content(seed, SIZE)) > 0
        stat = os.statvfs(small_disk)
        assert stat.f_bavail >= stat.f_blocks // 10
    assert cache.bypass_reason is None
    cache.close()


# -- kill -9 -----------------------------------------------------------------------------------------------

KILLED = """
import os, random, sys, time
from farside.spoke.cache import ChunkCache
from tests.spoke.cache_kit import content, fill, key
cache = ChunkCache.open(sys.argv[1], size_limit=48 << 20)
rng = random.Random(int(sys.argv[2]))
print("ready", flush=True)
while True:
    seed = rng.randrange(12)
    size = [5000, 3 << 20, 17 << 20][seed % 3]
    file = cache.file(key(seed, size), b"f%d" % seed)
    file.load()
    file.verify(0, file.chunks - 1)
    first = rng.randrange(0, file.chunks, 16)
    for run in file.absent(first, min(file.chunks - 1, first + 15)):
        fill(cache, file, content(seed, size), *run)
    if rng.random() < 0.001:
        cache.evict(file)
    if rng.random() < 0.01 and (fd := file.passthrough_fd()) >= 0:
        os.close(fd)
        file.passthrough_release()
    time.sleep(0.002)  # a fetch takes its time
"""


@pytest.mark.process
def test_killed_while_filling(tmp_path: Path) -> None:
    for attempt in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path / "cache"), str(attempt)],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([".", *filter(None, sys.path)])},
        )
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        wait_until(lambda: any((tmp_path / "cache").glob("data/*/*.meta")))
        threading.Event().wait(random.random() / 2)  # any moment will do
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert on_disk(tmp_path / "cache") <= 48 << 20
        cache = ChunkCache.open(tmp_path / "cache", size_limit=48 << 20)
        found = 0
        for seed in range(12):
            size = [5000, 3 << 20, 17 << 20][seed % 3]
            file = load_and_verify(cache, seed, size)
            data = content(seed, size)
            for at in range(0, size, CHUNK):
                got = read(file, at, CHUNK)
                assert got in (None, data[at : at + CHUNK])
                found += got is not None
        wait_until(lambda opened=cache: opened.scanned)  # type: ignore[misc]
        assert cache.used >= on_disk(tmp_path / "cache") and cache.used <= 48 << 20
        assert found
        cache.close()
