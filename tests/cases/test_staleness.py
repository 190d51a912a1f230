"""Cases of stale names, sizes and contents. Promise 2: close-to-open; one open file is one version."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cases.conftest import SEEN_S, Site, errno_of, loop_disk, within
from tests.mount.conftest import wait_until

pytestmark = pytest.mark.mount

MB = 1 << 20


def data_of(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def test_a_file_that_was_deleted_at_the_hub_is_gone_within_the_promised_time(site: Site) -> None:
    # rclone/rclone#4446
    names = [f"deleted/{n}" for n in range(5)]
    site.put_all({name: data_of(1, 100_000) for name in names})
    assert len(site.cached(names[0])) == 100_000  # cached or not, open or not, listed or only looked up
    held = (site.mnt / names[1]).open("rb", buffering=0)
    assert held.read() == data_of(1, 100_000)
    assert len(os.listdir(site.mnt / "deleted")) == 5
    for name in names[:3]:
        os.unlink(site.data / name)
    within(SEEN_S, lambda: not any((site.mnt / name).exists() for name in names[:3]), "deletions seen")
    assert sorted(os.listdir(site.mnt / "deleted")) == ["3", "4"]
    assert errno_of((site.mnt / names[0]).read_bytes) == errno.ENOENT
    held.seek(0)
    assert held.readall() == data_of(1, 100_000), "what is cached of it stays readable through a handle"
    held.close()
    (site.data / "deleted" / "3").unlink()
    (site.data / "deleted" / "4").unlink()
    (site.data / "deleted").rmdir()
    within(SEEN_S, lambda: not (site.mnt / "deleted").exists(), "the directory's end seen")


def test_a_rewrite_under_an_open_handle_gives_old_bytes_or_estale_there_and_new_ones_to_who_opens(
    site: Site,
) -> None:
    # awslabs/mountpoint-s3#785
    old, new = data_of(2, 24 * MB), data_of(3, 24 * MB)
    site.put("rewritten", old)
    fd = os.open(site.mnt / "rewritten", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    assert os.pread(fd, 65536, 0) == old[:65536]
    (site.data / "rewritten.new").write_bytes(new)
    os.rename(site.data / "rewritten.new", site.data / "rewritten")
    within(SEEN_S, lambda: read_or_stale(site.mnt / "rewritten") == new, "new content seen")
    assert os.pread(fd, 65536, 0) == old[:65536], "cached of the old version"
    failed = 0
    for at in range(0, len(old), MB):
        try:
            got = os.pread(fd, MB, at)
            assert got and got == old[at : at + len(got)], "a short answer is allowed, another one is not"
            failed += len(got) < MB
        except OSError as e:
            assert e.errno == errno.ESTALE
            failed += 1
    assert failed > 12, "most of it never crossed the link and is gone at the hub"
    os.close(fd)
    assert (site.mnt / "rewritten").read_bytes() == new


@pytest.mark.parametrize("size", [5 * MB, 100, 0], ids=["grown", "shrunk", "emptied"])
def test_size_and_bytes_of_an_open_handle_are_of_one_version(site: Site, size: int) -> None:
    # awslabs/mountpoint-s3#1830
    old, new = data_of(4, MB), data_of(5, size)
    name = f"resized{size}"
    site.put(name, old)
    fd = os.open(site.mnt / name, os.O_RDONLY)
    head = os.pread(fd, 1000, 0)
    (site.data / name).write_bytes(new)
    within(SEEN_S, lambda: (site.mnt / name).stat().st_size == size, "new size seen")
    assert head == old[:1000]
    assert os.fstat(fd).st_size == len(old)
    for at in (0, 90_000, MB - 100, MB):
        try:
            assert os.pread(fd, 1000, at) == old[at : at + 1000]
        except OSError as e:
            assert e.errno == errno.ESTALE
    os.close(fd)
    with (site.mnt / name).open("rb") as file:
        assert os.fstat(file.fileno()).st_size == size
        assert file.read() == new


def test_a_name_that_was_asked_for_in_vain_appears_when_it_is_made(site: Site) -> None:
    # awslabs/mountpoint-s3#831
    for n in range(6):
        name = f"late{n}" if n < 3 else f"late-dir{n}/below"
        for _ in range(3):
            assert errno_of((site.mnt / name).stat) == errno.ENOENT
        target = site.data / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(b"here")
        within(SEEN_S, (site.mnt / name).exists, "new name seen")
        assert (site.mnt / name).read_bytes() == b"here"


def test_who_opens_after_a_rewrite_never_gets_the_old_blocks(site: Site) -> None:
    # juicedata/juicefs#5192
    rng = random.Random(6)
    content = b""
    site.put("again", content)
    for n in range(15):
        previous, content = content, data_of(100 + n, rng.choice([0, 1, 4096, 65_536, 65_537, 300_000]))
        (site.data / "again").write_bytes(content)
        end = time.monotonic() + SEEN_S
        while (got := read_or_stale(site.mnt / "again")) != content:
            assert got is None or got == previous or content.startswith(got), "a mixture"
            assert time.monotonic() < end, f"rewrite {n} was not seen in time"


def read_or_stale(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError as e:
        assert e.errno == errno.ESTALE
        return None


def test_a_change_that_whole_second_time_stamps_do_not_show_is_seen(
    make_site: Callable[..., Site], tmp_path: Path
) -> None:
    # ziglang/zig#2045: the hub's file system keeps whole seconds only; same size, same second, same inode
    with loop_disk(tmp_path / "image", tmp_path / "coarse", 16 * MB, "-I", "128"):
        target = tmp_path / "coarse" / "f"
        target.write_bytes(b"%08d" % 0)
        assert target.stat().st_mtime_ns % 10**9 == 0, "this was to be a coarse file system"
        site = make_site()
        (site.data / "coarse").mkdir()
        subprocess.run(["mount", "--bind", target.parent, site.data / "coarse"], check=True)
        try:
            site.mount()
            see_bursts_of_changes(target, site.mnt / "coarse" / "f")
        finally:
            site.close()
            subprocess.run(["umount", "-l", site.data / "coarse"], check=True)


def see_bursts_of_changes(target: Path, name: Path) -> None:
    written = 0

    def write() -> None:
        nonlocal written
        written += 1
        with target.open("r+b", buffering=0) as file:
            file.write(b"%08d" % written)

    for _ in range(5):
        write()
    within(SEEN_S, lambda: read_or_stale(name) == b"%08d" % written, "last change seen")
    write()  # right behind the read: what was read must not stand for what is there now
    within(SEEN_S, lambda: read_or_stale(name) == b"%08d" % written, "last change seen")


def test_a_file_that_is_replaced_all_the_time_is_always_there_and_always_whole(site: Site) -> None:
    # rclone/rclone#4293, the reading half: a checkpoint is written beside the old one and renamed over it
    def checkpoint(n: int) -> bytes:
        return n.to_bytes(4, "big") * (20_000 + 1000 * (n % 7))

    site.put("checkpoint", checkpoint(0))
    stop, written = threading.Event(), [0]

    def write() -> None:
        while not stop.wait(0.04):
            (site.data / "checkpoint.tmp").write_bytes(checkpoint(written[0] + 1))
            os.rename(site.data / "checkpoint.tmp", site.data / "checkpoint")
            written[0] += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen: set[int] = set()
        end = time.monotonic() + 20
        while len(seen) < 30:
            assert time.monotonic() < end, f"only {len(seen)} different ones were seen"
            got = read_or_stale(site.mnt / "checkpoint")  # any other error, ENOENT above all, fails the test
            if got is not None:
                n = int.from_bytes(got[:4], "big")
                assert got == checkpoint(n)
                seen.add(n)
    finally:
        stop.set()
        writer.join()
    wait_until(lambda: read_or_stale(site.mnt / "checkpoint") == checkpoint(written[0]), "the last", SEEN_S)
