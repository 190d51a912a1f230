"""Reads that the kernel does by itself, and the rules that callers must keep."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fuse.processes import Mount, run_python
from tests.fuse.treefs import TreeFs

from farside.fuse import OpenOut, Request, Session, abi

pytestmark = pytest.mark.mount


class Choosing(TreeFs):
    """Opens in the mode that the test has chosen."""

    mode = OpenOut()

    def open(self, req: Request, nodeid: int, flags: int) -> OpenOut:
        self.handles[nodeid] += 1
        return self.mode


def start(fs: TreeFs, mount: Mount, **options: object) -> Session:
    session = mount(fs, **options)
    if not session.passthrough:
        pytest.skip(f"no passthrough: {session.passthrough_reason}")
    return session


def a_file(tmp_path: Path) -> tuple[Path, bytes]:
    real = tmp_path / "real"
    content = random.Random(3).randbytes(3_000_000)
    real.write_bytes(content)
    return real, content


def register(session: Session, path: Path) -> int:
    with path.open("rb") as file:
        return session.backing_open(file.fileno())


def test_reads_and_mappings_bypass_the_handler(tmp_path: Path, mount: Mount) -> None:
    real, content = a_file(tmp_path)
    fs = TreeFs()
    fs.passthrough = True
    fs.add("file", backing=str(real))
    session = start(fs, mount)
    path = tmp_path / "mnt" / "file"
    assert path.read_bytes() == content
    script = """
import hashlib, mmap, sys
with open(sys.argv[1], "rb") as one, open(sys.argv[2], "rb") as two:
    assert mmap.mmap(one.fileno(), 0, prot=mmap.PROT_READ)[:] == two.read()
"""
    run_python(script, path, real)
    assert "read" not in session.stats
    assert session.passthrough_reason == ""


def test_unlinked_backing_file_stays_readable(tmp_path: Path, mount: Mount) -> None:
    real, content = a_file(tmp_path)
    fs = Choosing()
    fs.add("file", b"x" * len(content))
    session = start(fs, mount)
    number = register(session, real)
    fs.mode = OpenOut(1, abi.FOPEN_PASSTHROUGH, number)
    with open(tmp_path / "mnt" / "file", "rb") as file:
        real.unlink()
        session.backing_close(number)  # the open file keeps it
        assert file.read() == content


Opens = Callable[[Path], int | None]


@pytest.fixture
def opens() -> Iterator[Opens]:
    """``opens(path)`` opens for the rest of the test; the errno when that fails."""
    descriptors: list[int] = []

    def attempt(path: Path) -> int | None:
        try:
            descriptors.append(os.open(path, os.O_RDONLY))
        except OSError as failure:
            return failure.errno
        return None

    yield attempt
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("passthrough", "cached"),
        ("cached", "passthrough"),
        ("passthrough", "other id"),
        ("passthrough", "direct"),
        (None, "passthrough with keep_cache"),
    ],
)
def test_modes_that_the_kernel_refuses(
    tmp_path: Path, mount: Mount, opens: Opens, first: str | None, second: str
) -> None:
    real, _ = a_file(tmp_path)
    fs = Choosing()
    fs.add("file", backing=str(real))
    session = start(fs, mount)
    one, two = register(session, real), register(session, real)
    modes = {
        "passthrough": OpenOut(1, abi.FOPEN_PASSTHROUGH, one),
        "other id": OpenOut(1, abi.FOPEN_PASSTHROUGH, two),
        "cached": OpenOut(1, abi.FOPEN_KEEP_CACHE),
        "direct": OpenOut(1, abi.FOPEN_DIRECT_IO),
        "passthrough with keep_cache": OpenOut(1, abi.FOPEN_PASSTHROUGH | abi.FOPEN_KEEP_CACHE, one),
    }
    path = tmp_path / "mnt" / "file"
    if first:
        fs.mode = modes[first]
        assert opens(path) is None
    fs.mode = modes[second]
    assert opens(path) == errno.EIO


def test_bounded_and_given_back(tmp_path: Path, mount: Mount) -> None:
    real, _ = a_file(tmp_path)
    session = start(TreeFs(), mount, max_backing=2)
    numbers = [register(session, real) for _ in range(2)]
    assert len(set(numbers)) == 2 and all(number > 0 for number in numbers)
    with pytest.raises(OSError) as caught:
        register(session, real)
    assert caught.value.errno == errno.ENOSPC
    assert session.passthrough  # a full set is no reason to give up
    session.backing_close(numbers[0])
    session.backing_close(numbers[0])  # twice does no harm
    session.backing_close(12345)
    register(session, real)


def test_a_refused_file_does_not_switch_it_off(tmp_path: Path, mount: Mount) -> None:
    session = start(TreeFs(), mount)
    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError) as caught:
        session.backing_open(fd)
    os.close(fd)
    assert caught.value.errno in (errno.EISDIR, errno.EINVAL)
    assert session.passthrough


def test_a_stacked_cache_directory_switches_it_off_with_a_reason(tmp_path: Path, mount: Mount) -> None:
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    (tmp_path / "lower" / "file").write_bytes(b"data")
    over = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    if os.system(f"mount -t overlay overlay -o {over} {tmp_path}/merged 2>/dev/null") != 0:
        pytest.skip("no overlayfs here")
    try:
        session = start(TreeFs(), mount)
        with pytest.raises(OSError) as caught:
            register(session, tmp_path / "merged" / "file")
        assert caught.value.errno == errno.ELOOP
        assert not session.passthrough and "stacked" in session.passthrough_reason
    finally:
        os.system(f"umount {tmp_path}/merged")


def test_switched_off(tmp_path: Path, mount: Mount) -> None:
    real, _ = a_file(tmp_path)
    session = mount(TreeFs(), passthrough=False)
    assert not session.passthrough and session.passthrough_reason == "switched off"
    with pytest.raises(OSError) as caught:
        register(session, real)
    assert caught.value.errno == errno.EOPNOTSUPP
