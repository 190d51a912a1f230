"""A portal read without a mount: right bytes, errors as a file system gives them, bounded waits."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.client.conftest import Portal, wait_until

from farside.bench.link import free_port
from farside.client import File, Library, spoke_config
from farside.errors import CacheError, HubUnreachable, StaleVersion, UsageError

pytestmark = pytest.mark.process

BIG = 4 << 20


def errno_of(action: Callable[[], object]) -> int:
    try:
        action()
    except OSError as error:
        return error.errno or 0
    return 0


def read_all(library: Library, path: str | bytes) -> bytes:
    with library.open(path) as file:
        return file.pread(file.size, 0)


def shows(library: Library, path: str, content: bytes) -> bool:
    """Whether an open now gives this content; right after a change it may still be about to be seen."""
    try:
        return read_all(library, path) == content
    except StaleVersion:
        return False


# -- reading ---------------------------------------------------------------------------------------


def test_the_first_read_crosses_the_link_and_the_next_does_not(portal: Portal) -> None:
    content = os.urandom(BIG + 123)
    portal.put("a/b/file", content)
    library, crossed = portal.attach(), portal.link_bytes()
    assert read_all(library, "a/b/file") == content
    before, now = library.status(), portal.link_bytes()
    assert now - crossed >= BIG
    with library.open(b"/a/b/file") as file:
        assert file.size == len(content)
        assert (file.pread(100, 70_000), file.pread(0, 5)) == (content[70_000:70_100], b"")
        assert file.pread(1000, BIG) == content[BIG:]
        assert file.pread(10, len(content)) == file.pread(10, 1 << 40) == b""
    after = library.status()
    assert after["reads"]["local"] - before["reads"]["local"] == 2
    assert after["reads"]["remote"] == before["reads"]["remote"]
    assert portal.link_bytes() - now < 10_000
    assert after["state"] == "up" and after["hub"] == str(library.config.hub.endpoint)
    assert "mount" not in after and "mountpoint" not in after


def test_it_reads_into_any_writable_buffer(portal: Portal) -> None:
    content = os.urandom(300_000)
    portal.put("f", content)
    library = portal.attach()
    with library.open("f") as file:
        words = np.zeros((100, 100), dtype=np.uint32)
        assert file.readinto(words.data, 4) == words.nbytes
        assert words.tobytes() == content[4 : 4 + words.nbytes]
        tail = bytearray(b"x" * 100)
        assert file.readinto(tail, len(content) - 60) == 60
        assert tail == content[-60:] + b"x" * 40
        assert file.readinto(bytearray(), 0) == 0
        assert errno_of(lambda: file.pread(-1, 0)) == errno_of(lambda: file.pread(1, -1)) == errno.EINVAL


def test_empty_and_sparse_files(portal: Portal) -> None:
    portal.put("empty", b"")
    with open(portal.data / "sparse", "wb") as made:
        made.truncate(1 << 20)
        made.seek(500_000)
        made.write(b"here")
    library = portal.attach()
    assert read_all(library, "empty") == b""
    assert read_all(library, "sparse") == (portal.data / "sparse").read_bytes()


def test_many_threads_read_the_same_files_at_once(portal: Portal) -> None:
    contents = {f"d/{i}": os.urandom(400_000 + i) for i in range(6)}
    for name, content in contents.items():
        portal.put(name, content)
    crossed = portal.link_bytes()
    library = portal.attach()
    files = {name: library.open(name) for name in contents}

    def work(seed: int) -> int:
        random = np.random.default_rng(seed)
        wrong = 0
        for _ in range(200):
            name = f"d/{random.integers(6)}"
            offset, size = int(random.integers(400_000)), int(random.integers(1, 70_000))
            wrong += files[name].pread(size, offset) != contents[name][offset : offset + size]
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) == 0
    assert library.status()["reads"]["count"] == 8 * 200
    assert portal.link_bytes() - crossed < 1.5 * sum(map(len, contents.values()))


def test_a_second_library_finds_the_cache_of_the_first(portal: Portal) -> None:
    content = os.urandom(BIG)
    portal.put("f", content)
    with portal.attach() as first:
        assert read_all(first, "f") == content
    crossed = portal.link_bytes()
    assert read_all(portal.attach(), "f") == content
    assert portal.link_bytes() - crossed < 200_000


# -- names -----------------------------------------------------------------------------------------


def test_names_and_attributes_are_those_of_the_hub(portal: Portal) -> None:
    odd = b"not utf-8 \xff \xc3"
    portal.put("d/f", b"12345")
    (portal.data / "d" / "sub").mkdir()
    Path(os.fsdecode(os.path.join(os.fsencode(portal.data / "d"), odd))).write_bytes(b"odd")
    os.chmod(portal.data / "d" / "f", 0o640)
    os.utime(portal.data / "d" / "f", ns=(1, 1_234_567_890_123_456_789))
    library = portal.attach()
    assert library.listdir(b"d") == sorted([b"f", b"sub", odd])
    assert library.listdir("/d/") == sorted(["f", "sub", os.fsdecode(odd)])
    assert library.listdir("") == library.listdir(".") == ["d"]
    assert read_all(library, b"d/" + odd) == b"odd"
    for path in ("d/f", "d", ""):
        there, here = os.stat(portal.data / path), library.stat(path)
        for name in ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_mtime_ns"):
            assert getattr(there, name) == getattr(here, name), (path, name)
    assert library.stat("d/f").st_mtime == os.stat(portal.data / "d" / "f").st_mtime
    assert library.stat("d/f").st_blocks == os.stat(portal.data / "d" / "f").st_blocks


def test_what_is_not_there_fails_as_in_a_file_system(portal: Portal) -> None:
    portal.put("d/f", b"x")
    os.mkfifo(portal.data / "d" / "fifo")
    library = portal.attach()
    with pytest.raises(FileNotFoundError) as caught:
        library.open("d/none")
    assert caught.value.filename == "d/none"
    with pytest.raises(FileNotFoundError):
        library.stat(b"none/none")
    with pytest.raises(NotADirectoryError):
        library.listdir("d/f")
    with pytest.raises(NotADirectoryError):
        library.stat("d/f/g")
    with pytest.raises(IsADirectoryError):
        library.open("d")
    assert errno_of(lambda: library.open("d/fifo")) == errno.EINVAL
    assert errno_of(lambda: library.stat("d\0f")) == errno.EINVAL
    assert errno_of(lambda: library.stat("d/" + "n" * 300)) in (errno.ENOENT, errno.ENAMETOOLONG)


def test_symlinks_are_followed_within_the_portal_only(portal: Portal) -> None:
    portal.put("d/e/f", b"content")
    for name, target in {
        "to-file": "d/e/f",
        "to-dir": "d/e",
        "d/up": "../d/e/./f",
        "out": "../../etc/passwd",
        "absolute": "/etc/passwd",
        "loop": "loop",
        "dangling": "d/none",
    }.items():
        os.symlink(target, portal.data / name)
    library = portal.attach()
    for path in ("to-file", "to-dir/f", "d/up", "to-dir/../e/f", "d/../to-dir/f"):
        assert read_all(library, path) == b"content", path
    assert library.listdir("to-dir") == ["f"]
    assert stat.S_ISREG(library.stat("to-file").st_mode)
    assert stat.S_ISLNK(library.stat("to-file", follow_symlinks=False).st_mode)
    assert errno_of(lambda: library.open("dangling")) == errno.ENOENT
    assert errno_of(lambda: library.open("loop")) == errno.ELOOP
    for path in ("out", "absolute", "..", "d/../../data/d/e/f"):
        assert errno_of(lambda path=path: library.open(path)) == errno.EXDEV, path  # type: ignore[misc]


# -- changes at the hub ----------------------------------------------------------------------------


def test_an_open_that_starts_after_a_change_sees_it(portal: Portal) -> None:
    portal.put("f", b"old")
    library = portal.attach()
    assert read_all(library, "f") == b"old"
    portal.put("f", b"new content")
    wait_until(lambda: shows(library, "f", b"new content"), "the change is seen", 5)
    os.unlink(portal.data / "f")
    wait_until(lambda: errno_of(lambda: library.stat("f")) == errno.ENOENT, "the deletion is seen", 5)


def test_an_open_file_never_mixes_versions(portal: Portal) -> None:
    old, new = os.urandom(BIG), os.urandom(BIG)
    portal.put("f", old)
    library = portal.attach(read_ahead=0)
    file = library.open("f")
    assert file.pread(1000, 0) == old[:1000]
    portal.put("f", new)
    wait_until(lambda: shows(library, "f", new), "the change is seen", 5)
    assert file.pread(1000, 0) == old[:1000]
    with pytest.raises(StaleVersion) as caught:
        file.pread(1000, BIG - 1000)
    assert caught.value.errno == errno.ESTALE


def test_a_file_that_changed_before_its_first_read_is_read_anew(portal: Portal) -> None:
    old, new = os.urandom(BIG), os.urandom(BIG)
    portal.put("same-size", old)
    portal.put("shorter", old)
    library = portal.attach(read_ahead=0)
    same, shorter = library.open("same-size"), library.open("shorter")
    portal.put("same-size", new)
    portal.put("shorter", new[:100])
    wait_until(lambda: shows(library, "same-size", new), "the change is seen", 5)

    def part(offset: int) -> bytes:
        return same.pread(50_000, offset)

    with ThreadPoolExecutor(4) as pool:
        for offset, data in zip(
            range(0, BIG, BIG // 8), pool.map(part, range(0, BIG, BIG // 8)), strict=True
        ):
            assert data == new[offset : offset + 50_000]
    with pytest.raises(StaleVersion):
        shorter.pread(10, 0)


# -- away is not gone ------------------------------------------------------------------------------


def test_what_is_cached_stays_readable_and_the_rest_fails_in_time(portal: Portal) -> None:
    old, other = os.urandom(BIG), os.urandom(BIG)
    portal.put("sub/cached", old)
    portal.put("elsewhere/other", other)
    library = portal.attach(timeout_s="2s")
    assert read_all(library, "sub/cached") == old
    assert library.listdir("elsewhere") == ["other"]
    file = library.open("elsewhere/other")
    portal.link.command("cut")
    wait_until(lambda: library.status()["state"] == "away", "the link is away")
    assert read_all(library, "sub/cached") == old
    assert library.stat("elsewhere/other").st_size == BIG
    begun = time.monotonic()
    with pytest.raises(HubUnreachable) as caught:
        file.pread(10, 0)
    assert caught.value.errno == errno.ETIMEDOUT
    with pytest.raises(HubUnreachable):
        library.stat("sub/never")
    assert time.monotonic() - begun < 2 * (2 + 2)
    portal.link.command("restore")
    wait_until(lambda: library.status()["state"] == "up", "it heals")
    assert file.pread(BIG, 0) == other
    with pytest.raises(FileNotFoundError):
        library.stat("sub/never")


# -- beginning and end -----------------------------------------------------------------------------


def test_closing_ends_what_waits_and_gives_the_cache_back(portal: Portal) -> None:
    portal.put("f", os.urandom(BIG))
    library = portal.attach(timeout_s="1m")
    file = library.open("f")
    assert len(file.pread(1000, 0)) == 1000
    portal.link.command("cut")
    met: list[BaseException] = []
    waiting = threading.Event()

    def read() -> None:
        waiting.set()
        try:
            file.pread(1000, BIG - 1000)
        except BaseException as error:
            met.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    waiting.wait(5)
    begun = time.monotonic()
    library.close()
    thread.join(10)
    assert time.monotonic() - begun < 10
    assert isinstance(met[0], UsageError) and met[0].errno == errno.EBADF
    for action in (
        lambda: file.pread(1000, 0),
        lambda: library.stat("f"),
        lambda: library.open("f"),
        library.status,
    ):
        with pytest.raises(UsageError, match="closed"):
            action()
    file.close()
    library.close()
    portal.link.command("restore")
    portal.attach()


def test_a_closed_file_is_not_read(portal: Portal) -> None:
    portal.put("f", b"content")
    library = portal.attach()
    with library.open("f") as file:
        assert file.pread(7, 0) == b"content"
    with pytest.raises(UsageError, match="the file is closed"):
        file.pread(7, 0)


def test_a_cache_directory_has_one_owner(portal: Portal, library: Library) -> None:
    with pytest.raises(CacheError):
        portal.attach()
    assert library.listdir("") == []


def test_a_hub_that_is_not_there_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    config = spoke_config(
        hub=f"127.0.0.1:{free_port()}/c4", cache_dir=tmp_path, cache_size="64M", insecure=True, timeout_s="2s"
    )
    threads = threading.active_count()
    for _ in range(2):  # the cache is free again
        with pytest.raises(HubUnreachable):
            Library(config)
    assert threading.active_count() == threads


def test_it_joins_by_a_token_over_tls(tmp_path: Path) -> None:
    portal = Portal(tmp_path, tls=True)
    try:
        portal.put("f", b"content")
        with pytest.raises(UsageError, match="has not joined"):
            portal.attach(insecure=False)
        token = portal.stack.invite()
        with portal.attach(insecure=False, token_file=token) as library:
            assert read_all(library, "f") == b"content"
            assert library.status()["link"]["tls"] is True
        with portal.attach(insecure=False) as again:
            assert read_all(again, "f") == b"content"
    finally:
        portal.close()


FORK = """
import os, sys
from farside.client import Library, spoke_config
from farside.errors import UsageError

config = spoke_config(hub=sys.argv[1], cache_dir=sys.argv[2], cache_size="64M", insecure=True)
with Library(config) as library:
    file = library.open("f")
    assert file.pread(7, 0) == b"content"
    child = os.fork()
    if not child:
        for action in (lambda: file.pread(7, 0), lambda: library.open("f"), lambda: library.stat("f")):
            try:
                action()
            except UsageError as error:
                assert "fork" in str(error)
            else:
                os._exit(1)
        library.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert file.pread(7, 0) == b"content"
"""


def test_a_fork_is_refused_and_harms_nothing(portal: Portal) -> None:
    portal.put("f", b"content")
    command = [sys.executable, "-c", FORK, portal.stack.hub_address, str(portal.cache)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_options_are_read_as_people_write_them() -> None:
    config = spoke_config(hub="hub.example/c4", cache_size="2T", timeout_s="90s")
    assert (config.cache_size, config.timeout_s, config.hub.port) == (2 << 40, 90, 7420)
    with pytest.raises(UsageError, match="did you mean 'cache_size'"):
        spoke_config(hub="hub.example/c4", cache_szie="2T")
    with pytest.raises(UsageError, match="no hub is given"):
        spoke_config()
    with pytest.raises(UsageError, match="not loopback"):
        spoke_config(hub="hub.example/c4", insecure=True)


def test_a_file_says_its_path_without_symlinks(portal: Portal) -> None:
    portal.put("d/f", b"x")
    os.symlink("d", portal.data / "l")
    file = portal.attach().open("l/f")
    assert isinstance(file, File)
    assert (file.path, file.size) == (b"d/f", 1)
