"""One handle, one version: which version a handle is bound to, and until when."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest
from tests.mount.conftest import Fabric

from farside.cli.control_client import call
from farside.config import control_socket

pytestmark = pytest.mark.mount

SIZE = 8 << 20
FAR = 4 << 20


def overwrite(fabric: Fabric, content: bytes) -> None:
    """In place, of the same size, with the old time of change."""
    path = fabric.data / "f"
    before = os.stat(path)
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, content, 0)
        os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
    finally:
        os.close(fd)


@pytest.fixture
def quiet(make_fabric: Callable[..., Fabric]) -> Fabric:
    """A fabric that fetches nothing but what is read, with a file of one letter."""
    fabric = make_fabric()
    (fabric.data / "f").write_bytes(b"1" * SIZE)
    fabric.mount("--read-ahead", "0")
    return fabric


@pytest.mark.parametrize("drop_pages", [False, True], ids=["pages of the kernel", "chunks of the cache"])
def test_a_handle_that_was_read_from_the_cache_keeps_its_version(quiet: Fabric, drop_pages: bool) -> None:
    with open(quiet.mnt / "f", "rb", buffering=0) as first:
        assert first.read(4096) == b"1" * 4096
    fd = os.open(quiet.mnt / "f", os.O_RDONLY)
    try:
        if drop_pages:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(fd, 4096, 0) == b"1" * 4096
        call(control_socket(quiet.mnt), "evict", {"path": "f"})
        overwrite(quiet, b"2" * SIZE)
        with pytest.raises(OSError) as told:
            os.pread(fd, 4096, FAR)
        assert told.value.errno == errno.ESTALE
    finally:
        os.close(fd)


def test_a_handle_that_was_not_read_follows_its_file_once(quiet: Fabric) -> None:
    fd = os.open(quiet.mnt / "f", os.O_RDONLY)
    try:
        overwrite(quiet, b"2" * SIZE)
        assert os.pread(fd, 4096, FAR) == b"2" * 4096
        overwrite(quiet, b"3" * SIZE)
        with pytest.raises(OSError) as told:
            os.pread(fd, 4096, 0)
        assert told.value.errno == errno.ESTALE
    finally:
        os.close(fd)
