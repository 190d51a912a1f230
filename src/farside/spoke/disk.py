"""The system calls that the cache makes, in one place, so that tests can put a faulty disk in their stead.

Every method may block and may raise OSError; none retries.
"""

from __future__ import annotations

import ctypes
import errno
import os

_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_SYNC_FILE_RANGE_WRITE = 2
_SYNC_FILE_RANGE_WAIT = 1 | 2 | 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class DiskIO:
    """The real disk. Symlinks are never followed at the last component; descriptors close on exec."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        """Reads at most len(view) bytes at ``offset`` into ``view``; returns how many."""
        return os.preadv(fd, (view,), offset)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def ftruncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def start_writeback(self, fd: int) -> None:
        """Asks the kernel to start writing the file's dirty pages, without waiting for them."""
        _check(_libc.sync_file_range(fd, 0, 0, _SYNC_FILE_RANGE_WRITE))

    def wait_writeback(self, fd: int) -> None:
        """Waits until the file's pages have been written; raises what writing them met since the last look.

        Unlike fsync it leaves metadata and the device's own cache alone, so that hundreds of files cost
        little and one fsync at the end serves them all.
        """
        _check(_libc.sync_file_range(fd, 0, 0, _SYNC_FILE_RANGE_WAIT))

    def punch(self, fd: int, offset: int, length: int) -> None:
        """Gives the blocks of a range back to the file system; the file's size stays."""
        _check(_libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, offset, length))

    def fchmod(self, fd: int, mode: int) -> None:
        os.fchmod(fd, mode)

    def stat(self, path: str) -> os.stat_result:
        return os.stat(path, follow_symlinks=False)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def listdir(self, path: str) -> list[str]:
        return os.listdir(path)

    def statvfs(self, path: str) -> os.statvfs_result:
        return os.statvfs(path)


class Handle:
    """An open data file. It closes when the last reference goes.

    A reader keeps a reference while it is in ``preadv``, so that evicting the file cannot close the
    descriptor under it and let another file's descriptor take the number.
    """

    __slots__ = ("fd", "writable")

    def __init__(self, fd: int, writable: bool) -> None:
        self.fd = fd
        self.writable = writable

    def __del__(self) -> None:
        try:
            os.close(self.fd)
        except OSError:
            pass  # close-time errors of data were reported by fsync already


def read_all(disk: DiskIO, path: str, limit: int) -> bytes:
    """The whole of a small file.

    Raises:
        OSError: it cannot be read, or is larger than ``limit`` bytes (EFBIG).
    """
    fd = disk.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        data = bytearray(size)
        got = read_into(disk, fd, memoryview(data), 0)
        return bytes(data[:got])
    finally:
        os.close(fd)


def read_into(disk: DiskIO, fd: int, view: memoryview, offset: int) -> int:
    """Fills ``view`` from ``offset``; returns fewer bytes than its length only at the end of the file."""
    got = disk.preadv(fd, view, offset)
    while 0 < got < len(view):
        more = disk.preadv(fd, view[got:], offset + got)
        if more == 0:
            break
        got += more
    return got


def is_hole(fd: int, offset: int, length: int) -> bool:
    """Whether nothing was ever written to a range of a file, or all of it was punched out."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) >= offset + length
    except OSError as error:
        return error.errno == errno.ENXIO  # no data up to the end


def write_all(disk: DiskIO, fd: int, data: memoryview, offset: int) -> None:
    """Writes all of ``data`` at ``offset``."""
    done = 0
    while done < len(data):
        done += disk.pwrite(fd, data[done:], offset + done)


def write_atomically(disk: DiskIO, path: str, data: bytes) -> None:
    """Replaces a small file: temporary name, fsync, rename. A crash leaves the old or the new content."""
    temporary = f"{path}.tmp"
    fd = disk.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(disk, fd, memoryview(data), 0)
        disk.fsync(fd)
    finally:
        os.close(fd)
    disk.rename(temporary, path)
