"""Cases of a cache that outgrows its limit, of crashes, and of disks that are full, slow or damaged."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cases.conftest import Site, drop_pages, loop_disk
from tests.mount.conftest import wait_until
from tests.spoke.cache_kit import FaultyDisk, content, fill, key, on_disk, read_all

from farside.bench.stack import run_farside
from farside.cli.control_client import call
from farside.config import control_socket
from farside.errors import FarsideError
from farside.spoke.cache import ChunkCache

MB = 1 << 20


def data_of(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def fill_hub(site: Site, count: int, size: int) -> dict[str, bytes]:
    files = {f"f{n:03}": data_of(n, size) for n in range(count)}
    for name, data in files.items():
        (site.data / name).write_bytes(data)
    return files


def used_of(disk: Path) -> int:
    stat = os.statvfs(disk)
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


@contextlib.contextmanager
def watched(measure: Callable[[], int]) -> Iterator[list[int]]:
    """Measure all the time inside the block; the list gets the maximum as its only item."""
    most, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            most[0] = max(most[0], measure())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        stop.set()
        watcher.join()


# -- space -------------------------------------------------------------------------------------------------


@pytest.mark.mount
def test_much_more_than_fits_is_read_within_the_limit_also_with_all_files_open(
    make_site: Callable[..., Site],
) -> None:
    # rclone/rclone#4442 (a disk that the cache outgrows) and rclone/rclone#5573 (open files that count for
    # nothing). Sizes: 160 MiB through a cache of 24 MiB on a disk of 32 MiB.
    limit, disk_size = 24 * MB, 32 * MB
    site = make_site()
    files = fill_hub(site, 20, 8 * MB)
    with site.small_disk(disk_size) as disk:
        site.mount(cache_size=limit)
        before = used_of(disk) - site.status()["cache"]["used"]  # the data base of names, and what is empty
        with watched(lambda: used_of(disk)) as most, contextlib.ExitStack() as stack:
            for name, data in files.items():  # each is read whole and stays open, in passthrough or not
                reader = stack.enter_context((site.mnt / name).open("rb", buffering=0))
                assert reader.readall() == data
            rng = random.Random(1)
            readers = {name: stack.enter_context((site.mnt / name).open("rb", buffering=0)) for name in files}
            for _ in range(60):
                name, at = rng.choice(sorted(files)), rng.randrange(8 * MB - 100_000)
                readers[name].seek(at)
                assert readers[name].read(100_000) == files[name][at : at + 100_000]
                drop_pages(site.mnt / name)
        assert most[0] <= limit + before + 2 * MB, "the limit holds at every moment"
        status = site.status()["cache"]
        assert status["used"] <= limit and status["evicted_bytes"] > 40 * MB
        assert not site.warnings(), "evicting is no trouble"


@pytest.mark.mount
def test_what_cannot_be_deleted_counts_and_filling_stops_at_the_limit(make_site: Callable[..., Site]) -> None:
    # awslabs/mountpoint-s3#1389: everything that could be evicted is immutable
    limit = 16 * MB
    site = make_site()
    files = fill_hub(site, 20, 2 * MB)
    names = sorted(files)
    with loop_disk(site.work / "image", site.cache, 64 * MB):
        try:
            site.mount("--reserve", "0%", cache_size=limit)
            for name in names[:7]:
                assert site.cached(name) == files[name]
            site.settled()
            stuck = [*site.cache.glob("data/*/*.data"), *site.cache.glob("data/*/*.meta")]
            subprocess.run(["chattr", "+i", *stuck], check=True)
            with watched(lambda: on_disk(site.cache)) as most:
                for name in names:
                    assert site.cached(name) == files[name]
            assert most[0] <= limit
            status = site.status()["cache"]
            assert status["undeletable"] > 0 and status["bypass"]
            assert {p for p in stuck if p.exists()} == set(stuck)
            subprocess.run(["chattr", "-i", *stuck], check=True)
            for name in names:
                drop_pages(site.mnt / name)
                assert site.cached(name) == files[name]
        finally:
            site.close()
            subprocess.run(["chattr", "-R", "-i", site.cache / "data"], capture_output=True)


@pytest.mark.mount
def test_a_file_larger_than_the_cache_is_read_and_a_limit_without_sense_is_refused_with_what_is_needed(
    make_site: Callable[..., Site],
) -> None:
    # mosaicml/streaming#417 and mosaicml/streaming#475
    site = make_site()
    data = data_of(1, 12 * MB)
    (site.data / "large").write_bytes(data)
    with pytest.raises(FarsideError) as refused:
        site.mount(cache_size=10_000)
    message = str(refused.value)
    assert "10000" in message and "smaller than one chunk" in message and "or more" in message
    needed = next(int(word) for word in message.split() if word.isdigit() and int(word) > 65536)
    site.mount(cache_size=needed)  # what it asked for is enough to start
    assert site.cached("large") == data
    site.stack.unmount()
    site.mount(cache_size=5 * MB)
    for _ in range(2):
        drop_pages(site.mnt / "large")
        assert site.cached("large") == data
    assert site.status()["cache"]["used"] <= 5 * MB


@pytest.mark.mount
def test_shuffled_epochs_over_a_cache_that_holds_half_still_profit_from_it(
    make_site: Callable[..., Site],
) -> None:
    # mosaicml/streaming#339: the floor is a link that carries what the cache cannot hold
    site = make_site()
    files = fill_hub(site, 48, 256 << 10)
    total = sum(map(len, files.values()))
    site.mount("--read-ahead", "0", cache_size=total // 2)
    epochs = []
    for epoch in range(4):
        before = site.fetched()
        for name in random.Random(epoch).sample(sorted(files), len(files)):
            assert site.cached(name) == files[name]
            drop_pages(site.mnt / name)
        epochs.append(site.fetched() - before)
    shares = [round(fetched / total, 2) for fetched in epochs]
    assert shares[0] <= 2.0, f"most of what is fetched ahead must be read before it is thrown out: {shares}"
    assert max(shares[1:]) <= 0.95, f"a cache that keeps half saves some of the link: {shares}"


@pytest.mark.mount
def test_files_that_the_fabric_did_not_fetch_are_never_deleted(make_site: Callable[..., Site]) -> None:
    # mosaicml/streaming#988: the cache is put into the very directory that is exported
    site = make_site()
    files = fill_hub(site, 16, MB)
    (site.data / "data" / "ab").mkdir(parents=True)
    lookalike = site.data / "data" / "ab" / ("ab" + "0" * 30 + ".data")
    lookalike.write_bytes(b"mine")
    site.stack.cache = site.data
    with pytest.raises(FarsideError, match="not a farside cache"):
        site.mount(cache_size=4 * MB)
    lookalike.unlink()
    lookalike.parent.rmdir()
    (site.data / "data").rmdir()
    site.mount(cache_size=4 * MB)  # a directory with files of others, but nothing that could be mistaken
    for name, data in files.items():
        assert site.cached(name) == data
    site.ask("evict", path="")
    site.stack.unmount()
    run_farside("cache", "clear", "--yes", str(site.data))
    for name, data in files.items():
        assert (site.data / name).read_bytes() == data


# -- what lies in the cache directory at the start ---------------------------------------------------------


@pytest.mark.mount
def test_a_huge_left_over_cache_does_not_hold_up_the_mount_and_is_cleaned(
    make_site: Callable[..., Site],
) -> None:
    # awslabs/mountpoint-s3#1251, with 30,000 left-over files instead of a million
    count = 30_000
    site = make_site()
    (site.data / "f").write_bytes(b"here")
    site.mount()
    site.stack.unmount()
    for n in range(count):
        name = f"{n % 256:02x}{n:030x}"
        path = site.cache / "data" / name[:2] / f"{name}.{('data', 'meta', 'meta.tmp')[n % 3]}"
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    began = time.monotonic()
    site.mount()
    assert site.cached("f") == b"here"
    assert not site.status()["cache"]["scanned"], "the clean-up was to be still under way"
    assert time.monotonic() - began < 5
    wait_until(lambda: site.status()["cache"]["scanned"], "scanned", 60)
    assert site.status()["cache"]["orphans_removed"] == count
    wait_until(lambda: len(list(site.cache.glob("data/*/*"))) <= 2, "cleaned", 60)
    assert site.cached("f") == b"here"


@pytest.mark.mount
@pytest.mark.parametrize("damage", ["cut in half", "other bytes", "page of zeros"])
def test_a_damaged_data_base_of_names_is_dropped_and_fetched_again(restarted: Site, damage: str) -> None:
    # cvmfs/cvmfs#3659
    site = restarted
    site.stack.unmount()
    path = site.cache / "namespace.db"
    whole = path.read_bytes()
    assert len(whole) > 8192
    bad = {
        "cut in half": whole[: len(whole) // 2 - 100],
        "other bytes": data_of(9, len(whole)),
        "page of zeros": whole[:4096] + bytes(4096) + whole[8192:],
    }
    path.write_bytes(bad[damage])
    site.mount()
    assert sorted(os.listdir(site.mnt)) == sorted(os.listdir(site.data))
    assert len(os.listdir(site.mnt / "names")) == 300
    for name in ("f000", "f001", "names/17"):
        assert site.cached(name) == (site.data / name).read_bytes()
    site.stack.unmount()
    site.mount()  # and what took its place is good
    assert len(os.listdir(site.mnt / "names")) == 300


@pytest.mark.mount
@pytest.mark.parametrize("ending", ["data", "meta"])
def test_files_that_a_power_cut_left_empty_are_no_content(restarted: Site, ending: str) -> None:
    # cvmfs/cvmfs#3728
    site = restarted
    for name in sorted(os.listdir(site.data)):
        if name.startswith("f"):
            assert len(site.cached(name)) == MB
    site.settled()
    site.kill()
    last = sorted(site.cache.glob(f"data/*/*.{ending}"), key=lambda p: p.stat().st_mtime_ns)[-6:]
    assert len(last) == 6
    for path in last:
        os.truncate(path, 0)
    site.mount()
    for name in sorted(os.listdir(site.data)):
        if name.startswith("f"):
            assert site.cached(name) == (site.data / name).read_bytes()


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One fabric that is mounted anew by each test that uses it."""
    site = Site(tmp_path_factory.mktemp("restarted"))
    try:
        fill_hub(site, 8, MB)
        (site.data / "names").mkdir()
        for n in range(300):
            (site.data / "names" / str(n)).write_bytes(b"%d" % n)
        site.mount()
        wait_until(lambda: site.status()["namespace"]["synced"], "names synced")
        yield site
    finally:
        site.close()


@pytest.mark.mount
def test_kill_nine_in_the_middle_of_a_fill_hinders_no_later_run(make_site: Callable[..., Site]) -> None:
    # Lightning-AI/litData#398 (files and locks that were left) and mosaicml/streaming#767 (named state)
    site = make_site()
    data = data_of(1, 32 * MB)
    (site.data / "f").write_bytes(data)
    shared_memory = set(os.listdir("/dev/shm"))
    for _ in range(2):
        site.mount()  # the same mount point, the same cache directory, nothing cleaned by hand
        reader = subprocess.Popen(["cat", site.mnt / "f"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        wait_until(lambda: site.fetched() > MB, "the fill is under way")
        site.kill()
        _, said = reader.communicate(timeout=10)
        assert reader.returncode != 0 and said, "the reader must not take this for the end of the file"
    site.mount()
    assert site.cached("f") == data
    assert set(os.listdir("/dev/shm")) <= shared_memory
    site.stack.unmount()


# -- a disk that is slow or strange ------------------------------------------------------------------------


@pytest.mark.mount
def test_a_cache_disk_that_stops_answering_is_read_around_and_taken_back(
    make_site: Callable[..., Site],
) -> None:
    # juicedata/juicefs#4782: the disk takes nothing more (a frozen file system), for as long as it likes
    site = make_site()
    files = fill_hub(site, 12, 2 * MB)
    names = sorted(files)
    with loop_disk(site.work / "image", site.cache, 96 * MB):
        frozen = False
        try:
            site.mount("--reserve", "0%", cache_size=64 * MB)
            assert site.cached(names[0]) == files[names[0]]
            site.settled()
            subprocess.run(["fsfreeze", "-f", site.cache], check=True)
            frozen = True
            begun = time.monotonic()
            for name in names[1:]:
                assert site.cached(name) == files[name]
            assert site.cached(names[0]) == files[names[0]]
            assert time.monotonic() - begun < 20, "readers do not wait for the disk"
            wait_until(lambda: site.status()["cache"]["bypass"] is not None, "bypass is shown")
            drop_pages(site.mnt / names[0])
            assert site.cached(names[0]) == files[names[0]]
            assert len(site.warnings()) == 1
            subprocess.run(["fsfreeze", "-u", site.cache], check=True)
            frozen = False
            wait_until(lambda: site.status()["cache"]["bypass"] is None, "the disk is taken back", 30)
            for name in names:
                drop_pages(site.mnt / name)
                assert site.cached(name) == files[name]
            site.settled()
            before = site.fetched()
            for name in names:
                drop_pages(site.mnt / name)
                assert site.cached(name) == files[name]
            assert site.fetched() == before, "it keeps again"
        finally:
            if frozen:
                subprocess.run(["fsfreeze", "-u", site.cache], check=False)
            site.close()


def test_a_file_system_that_counts_no_inodes_is_not_full(tmp_path: Path) -> None:
    # juicedata/juicefs#6247
    disk = FaultyDisk()
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[5] = fields[6] = fields[7] = 0  # f_files, f_ffree, f_favail
    disk.statvfs_result = os.statvfs_result(fields)
    cache = ChunkCache.open(tmp_path / "cache", size_limit=64 * MB, disk=disk)
    try:
        file, data = cache.file(key(1, MB), b"f"), content(1, MB)
        assert fill(cache, file, data) == MB
        assert read_all(file) == data and cache.bypass_reason is None
    finally:
        cache.close()


# -- counting ----------------------------------------------------------------------------------------------


@pytest.mark.mount
def test_warming_counts_what_is_done_not_what_was_begun(make_site: Callable[..., Site]) -> None:
    # juicedata/juicefs#5539, with 2,500 files instead of 200,000: more than are warmed at once
    site = make_site()
    count, size = 2500, 300
    for n in range(count):
        (site.data / f"{n}").write_bytes(b"%08d" % n * 37 + b"last")
    site.mount()
    lines: list[dict[str, int]] = []
    result = call(control_socket(site.mnt), "warm", {"path": ""}, on_progress=lines.append, silence_s=60)
    assert (result["files"], result["bytes"], result["skipped"]) == (count, count * size, 0)
    for line in lines:
        assert line["files"] <= line["files_total"] == count and line["bytes"] <= count * size
        assert line["files"] * size <= line["bytes"] + size
    assert [line["files"] for line in lines] == sorted(line["files"] for line in lines)
    assert site.status()["cache"]["files"] == count
    before = site.fetched()
    assert before == count * size
    again = site.ask("warm", path="")
    assert (again["files"], again["bytes"]) == (count, 0) and site.fetched() == before
    for n in random.Random(1).sample(range(count), 50):
        assert site.cached(str(n)) == b"%08d" % n * 37 + b"last"
    assert site.fetched() == before
