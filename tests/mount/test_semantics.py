"""The promises of docs/semantics.md, one test each; its docstring is the promise, word for word."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.mount.conftest import Fabric, wait_until

pytestmark = pytest.mark.mount

DOC = Path(__file__).parents[2] / "docs" / "semantics.md"
SIZE = 3 << 20


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fabric]:
    fabric = Fabric(tmp_path_factory.mktemp("semantics"))
    fabric.mount()
    yield fabric
    fabric.close()


def content(seed: int, size: int = SIZE) -> bytes:
    """Bytes that differ from seed to seed in every chunk."""
    return (seed.to_bytes(8, "little") * (size // 8 + 1))[:size]


def test_one_version(shared: Fabric) -> None:
    """A read returns bytes of one version of the file, or fails."""
    shared.put("one", content(1))
    path = shared.data / "one"
    deadline = time.monotonic() + 3
    generation, reads, failed = 1, 0, 0
    while time.monotonic() < deadline:
        generation += 1
        with open(path, "r+b", buffering=0) as f:  # in place, the same size
            f.write(content(generation))
        for _ in range(3):
            try:
                seen = (shared.mnt / "one").read_bytes()
            except OSError as e:
                assert e.errno in (errno.ESTALE, errno.EIO)
                failed += 1
                continue
            reads += 1
            assert len(seen) == SIZE
            first = int.from_bytes(seen[:8], "little")
            assert seen == content(first), "two versions in one read"
            assert 1 <= first <= generation
    assert reads, f"all {failed} reads failed"


def test_old_handle(shared: Fabric) -> None:
    """A handle that is open on an old version keeps it."""
    shared.put("held", content(1, 16 << 20))
    with open(shared.mnt / "held", "rb", buffering=0) as held:
        begun = os.pread(held.fileno(), 100_000, 0)
        assert begun == content(1, 100_000)
        replacement = shared.data / "held.new"
        replacement.write_bytes(content(2, 1 << 20))
        os.rename(replacement, shared.data / "held")
        wait_until(lambda: shared.shows("held", 1 << 20), "the new version is seen", 5)
        assert os.pread(held.fileno(), 100_000, 0) == content(1, 100_000)
        assert os.fstat(held.fileno()).st_size == 16 << 20
        try:
            rest = os.pread(held.fileno(), 1 << 20, 12 << 20)
        except OSError as e:
            assert e.errno in (errno.ESTALE, errno.EIO)
        else:
            assert rest == content(1, 1 << 20)
    assert (shared.mnt / "held").read_bytes() == content(2, 1 << 20)


def test_open_sees_what_was_announced(shared: Fabric) -> None:
    """An open sees the newest content that the hub had announced."""
    shared.put("announced", b"0")
    for n in range(1, 20):
        (shared.data / "announced").write_bytes(str(n).encode() * n)
        wait_until(lambda n=n: shared.shows("announced", len(str(n)) * n), "announced", 5)
        assert (shared.mnt / "announced").read_bytes() == str(n).encode() * n


def test_bounded_staleness(shared: Fabric) -> None:
    """A change made behind the hub's back is seen within 2 seconds plus one round trip"""
    shared.put("behind", b"a")
    slowest = 0.0
    for n in range(10):
        text = f"version {n}".encode()
        (shared.data / "behind").write_bytes(text)
        begun = time.monotonic()
        wait_until(lambda text=text: read_if_there(shared.mnt / "behind") == text, "the change", 5)
        slowest = max(slowest, time.monotonic() - begun)
        os.unlink(shared.data / "behind")
        begun = time.monotonic()
        wait_until(lambda: not (shared.mnt / "behind").exists(), "the deletion", 5)
        slowest = max(slowest, time.monotonic() - begun)
    assert slowest < 2.5


def test_read_only(shared: Fabric) -> None:
    """read-only"""
    shared.put("ro", b"x")
    for act in (
        lambda: open(shared.mnt / "ro", "r+b"),  # noqa: SIM115
        lambda: open(shared.mnt / "new", "wb"),  # noqa: SIM115
        lambda: os.unlink(shared.mnt / "ro"),
        lambda: os.mkdir(shared.mnt / "d"),
        lambda: os.rename(shared.mnt / "ro", shared.mnt / "rw"),
        lambda: os.chmod(shared.mnt / "ro", 0o600),
        lambda: os.utime(shared.mnt / "ro"),
        lambda: os.symlink("ro", shared.mnt / "link"),
        lambda: os.link(shared.mnt / "ro", shared.mnt / "hard"),
        lambda: os.truncate(shared.mnt / "ro", 0),
        lambda: os.setxattr(shared.mnt / "ro", "user.a", b"b"),
    ):
        with pytest.raises(OSError) as raised:
            act()
        assert raised.value.errno == errno.EROFS


def test_never_absent_for_want_of_a_link(shared: Fabric) -> None:
    """A hub that cannot be reached is never read as "no such file" or as an empty file."""
    shared.put("there", content(5))
    shared.cut()
    try:
        shared.wait_state("away")  # until then the lease is live, and what it vouches for is so
        for path in (shared.mnt / "there", shared.mnt / "unknown"):
            try:
                seen = path.read_bytes()
            except OSError as e:
                assert e.errno in (errno.EIO, errno.ETIMEDOUT), path
            else:
                assert seen == content(5)
        assert (shared.mnt / "there").stat().st_size == SIZE
    finally:
        shared.restore()
    shared.wait_state("up")
    assert (shared.mnt / "there").read_bytes() == content(5)


def test_uncached_fails_in_time(shared: Fabric) -> None:
    """An uncached read fails within `--timeout` (default 30 s)"""
    shared.put("far", content(6))
    fd = os.open(shared.mnt / "far", os.O_RDONLY)
    shared.cut()
    begun = time.monotonic()
    try:
        with pytest.raises(OSError) as raised:
            os.pread(fd, 4096, 2 << 20)
        assert raised.value.errno in (errno.EIO, errno.ETIMEDOUT)
    finally:
        shared.restore()
        os.close(fd)
    assert time.monotonic() - begun < 3 + 4, "--timeout is 3 s here; the kernel tries again for single pages"
    shared.wait_state("up")


def test_heals(shared: Fabric) -> None:
    """The mount heals by itself"""
    shared.put("heal", content(7))
    shared.cut()
    shared.wait_state("away")
    shared.restore()
    begun = time.monotonic()
    wait_until(lambda: read_if_there(shared.mnt / "heal") == content(7), "healed", 15)
    assert time.monotonic() - begun < 10


def test_crosses_once(shared: Fabric) -> None:
    """While there is room to keep it, a byte crosses the link once"""
    shared.put("alone/once", os.urandom(SIZE))
    shared.wait_state("up")
    before = shared.status()["link_bytes"]
    for _ in range(3):
        assert len(shared.cached("alone/once")) == SIZE
    shared.settled()
    after = shared.status()["link_bytes"]
    crossed = sum(after[r] - before[r] for r in ("demand", "planned", "readahead", "fill"))
    assert SIZE <= crossed < SIZE * 1.01
    shared.remount()
    assert len(shared.cached("alone/once")) == SIZE
    status = shared.status()["link_bytes"]
    assert sum(status[r] for r in ("demand", "planned", "readahead", "fill")) == 0, "restart: zero refetch"


@pytest.mark.parametrize("way", ["command", "signal"])
def test_unmounting(make_fabric: Callable[..., Fabric], way: str) -> None:
    """Unmounting always works"""
    fabric = make_fabric()
    fabric.put("f", b"x")
    fabric.mount()
    pid = fabric.status()["pid"]
    held = open(fabric.mnt / "f", "rb")  # noqa: SIM115 - in use while it is unmounted
    if way == "command":
        fabric.stack.unmount()
    else:
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "the process ended", 15)
    assert not os.path.ismount(fabric.mnt)
    held.close()


def test_every_promise_has_its_test() -> None:
    """The bold sentences between "## Promises" and "## Choices", and the docstrings above."""
    text = DOC.read_text().split("## Promises")[1].split("## Choices")[0]
    promises = {re.sub(r"\s+", " ", p) for p in re.findall(r"\*\*(.+?)\*\*", text, re.S)}
    module = sys.modules[__name__]
    quoted = {f.__doc__ for name, f in vars(module).items() if name.startswith("test_")}
    assert promises <= quoted, promises - quoted


def read_if_there(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
