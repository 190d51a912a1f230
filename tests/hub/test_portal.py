"""The portal: nothing outside its root is ever reached."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farside.errors import UsageError
from farside.hub.portal import Portal, check_path


@pytest.fixture(params=["openat2", "walk"])
def portal(request: pytest.FixtureRequest, tmp_path: Path) -> Portal:
    root = tmp_path / "root"
    (root / "dir" / "sub").mkdir(parents=True)
    (root / "dir" / "file").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    (root / "out").symlink_to(tmp_path)
    (root / "dir" / "up").symlink_to("../../secret")
    (root / "absolute").symlink_to("/etc")
    (root / "in").symlink_to("dir")
    (root / "loop").symlink_to("loop")
    made = Portal("p", root)
    if request.param == "walk":
        made._kernel_walk = False
    else:
        assert made._kernel_walk, "this kernel has openat2"
    return made


def reads(portal: Portal, path: bytes) -> bytes:
    fd = portal.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 100)
    finally:
        os.close(fd)


def test_opens_what_is_inside(portal: Portal) -> None:
    assert reads(portal, b"dir/file") == b"inside"
    os.close(portal.open_directory(b""))
    os.close(portal.open_directory(b"dir/sub"))


@pytest.mark.parametrize(
    "path", [b"out/secret", b"dir/up", b"absolute/passwd", b"in/file", b"loop", b"out", b"loop/x"]
)
def test_symlinks_are_never_followed(portal: Portal, path: bytes) -> None:
    with pytest.raises(OSError) as caught:
        portal.open(path, os.O_RDONLY)
    assert caught.value.errno == errno.ELOOP


@pytest.mark.parametrize(
    "path",
    [b"..", b"../secret", b"dir/../../secret", b"/etc/passwd", b"dir//file", b"./dir", b"dir/", b"a\0b"],
)
def test_impossible_paths_are_refused(portal: Portal, path: bytes) -> None:
    with pytest.raises(OSError) as caught:
        portal.open(path, os.O_RDONLY)
    assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize(
    ("path", "code"),
    [(b"none", errno.ENOENT), (b"dir/file/x", errno.ENOTDIR), (b"n" * 256, errno.ENAMETOOLONG)],
)
def test_errno_is_that_of_open(portal: Portal, path: bytes, code: int) -> None:
    with pytest.raises(OSError) as caught:
        portal.open(path, os.O_RDONLY)
    assert caught.value.errno == code


def test_a_directory_swapped_for_a_symlink_is_not_followed(portal: Portal, tmp_path: Path) -> None:
    fd, name = portal.open_parent(b"dir/file")
    root = tmp_path / "root"
    (root / "dir").rename(root / "moved")
    (root / "dir").symlink_to(tmp_path)
    try:
        assert os.stat(name, dir_fd=fd).st_size == len(b"inside")
    finally:
        os.close(fd)
    with pytest.raises(OSError):
        portal.open(b"dir/secret", os.O_RDONLY)


def test_paths_longer_than_the_kernel_takes(tmp_path: Path) -> None:
    portal = Portal("p", tmp_path)
    parts = [b"d" * 200] * 30
    fd = os.open(tmp_path, os.O_RDONLY)
    for part in parts:
        os.mkdir(part, dir_fd=fd)
        below = os.open(part, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open(b"end", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)
    os.close(portal.open(b"/".join([*parts, b"end"]), os.O_RDONLY))


@pytest.mark.parametrize(
    ("make", "says"),
    [(lambda p: None, "does not exist"), (lambda p: p.write_bytes(b""), "not a directory")],
)
def test_a_bad_root_is_a_clear_error(tmp_path: Path, make: object, says: str) -> None:
    root = tmp_path / "root"
    make(root)  # type: ignore[operator]
    with pytest.raises(UsageError, match=says) as caught:
        Portal("c4", root)
    assert "c4" in str(caught.value) and caught.value.exit_code == 2


def test_closing_leaves_no_descriptor(portal: Portal) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for path in (b"dir/file", b"none/x", b"out/secret", b"dir/sub/none/x"):
        try:
            os.close(portal.open(path, os.O_RDONLY))
        except OSError:
            pass
    assert len(os.listdir("/proc/self/fd")) == before


@given(st.lists(st.sampled_from([b"", b".", b"..", b"a", b"a\0", b"..."]), min_size=1, max_size=4))
def test_check_path_knows_only_plain_components(parts: list[bytes]) -> None:
    path = b"/".join(parts)
    bad = path != b"" and any(part in (b"", b".", b"..") or b"\0" in part for part in parts)
    if bad:
        with pytest.raises(OSError):
            check_path(path)
    else:
        check_path(path)


def test_knows_local_file_systems(tmp_path: Path) -> None:
    portal = Portal("p", tmp_path)
    assert portal.is_local(portal.device), "tests run on a local disk"
    memory = Portal("m", "/dev/shm")
    assert memory.filesystem == "tmpfs" and memory.is_local(memory.device)
    assert not Portal("proc", "/proc").filesystem
    assert not portal.is_local(0xFFFF), "what was never looked at is not trusted"
