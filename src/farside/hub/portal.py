"""A portal: one directory tree of the hub, reached only through the descriptor of its root.

Every path that a spoke names is resolved beneath that descriptor and never through a symlink, so that
neither ``..`` nor a link that somebody plants can lead out of the tree. The kernel does it (openat2);
where it cannot, the path is walked one component at a time with O_NOFOLLOW.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from pathlib import Path
from typing import NamedTuple

from farside.errors import UsageError

_SYS_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_RESOLVE = _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH
_PATH_MAX = 4000
"""Longest path handed to the kernel at once, bytes; its own limit is 4,096 with the final NUL."""

_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC

_FILESYSTEMS = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xCA451A4E: "bcachefs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0x3153464A: "jfs",
    0x52654973: "reiserfs",
    0x3434: "nilfs2",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlay",
    0x4D44: "vfat",
    0x2011BAB0: "exfat",
    0x7366746E: "ntfs3",
    0x73717368: "squashfs",
    0xE0F5E1E2: "erofs",
    0x9660: "iso9660",
    0x15013346: "udf",
}
"""File systems (by the magic number of statfs) whose files only this kernel changes, and their names."""


class PortalSpec(NamedTuple):
    """What the operator exports: a name, a directory, and whether spokes may write to it."""

    name: str
    root: Path
    writable: bool = False


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)
_hows: dict[int, _OpenHow] = {}


def _openat2(directory: int, path: bytes, flags: int) -> int:
    """openat2(2) beneath ``directory`` without following any symlink; raises OSError."""
    how = _hows.get(flags)
    if how is None:
        how = _hows[flags] = _OpenHow(flags, 0, _RESOLVE)
    while True:
        fd = int(_libc.syscall(_SYS_OPENAT2, directory, path, ctypes.byref(how), ctypes.sizeof(how)))
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code not in (errno.EINTR, errno.EAGAIN):
            raise OSError(code, os.strerror(code), path)


def check_path(path: bytes) -> None:
    """Refuses what is not a path of the link: absolute, with empty, ``.`` or ``..`` components, or NUL.

    Raises:
        OSError: EINVAL.
    """
    if path and (b"\0" in path or any(part in (b"", b".", b"..") for part in path.split(b"/"))):
        raise OSError(errno.EINVAL, "not a path inside the portal", path)


class Portal:
    """The open root of one exported tree.

    Attributes:
        name, writable: as given; ``root``: the resolved directory, bytes.
        fd: descriptor of the root; every access starts there.
        device, inode: of the root; ``fsid``: identity of its file system that survives a reboot
            where the file system has one.
        filesystem: its type, such as ``ext4``, or "" for one that other machines may change.

    Raises:
        UsageError: the root is missing, no directory or cannot be read.
    """

    def __init__(self, name: str, root: Path | str, writable: bool = False) -> None:
        self.name = name
        self.writable = writable
        hint = f"give the portal an existing directory: --portal {name}=/path/to/data"
        try:
            self.root = os.path.realpath(os.fsencode(root))
            self.fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise UsageError(
                f"the root of portal {name!r} does not exist", errno=errno.ENOENT, path=str(root), hint=hint
            ) from None
        except NotADirectoryError:
            raise UsageError(
                f"the root of portal {name!r} is not a directory",
                errno=errno.ENOTDIR,
                path=str(root),
                hint=hint,
            ) from None
        except OSError as error:
            raise UsageError(
                f"the root of portal {name!r} cannot be opened: {error.strerror}",
                errno=error.errno,
                path=str(root),
                hint="run the hub as a user who may read it",
            ) from None
        info = os.fstat(self.fd)
        self.device, self.inode = info.st_dev, info.st_ino
        self.fsid = os.fstatvfs(self.fd).f_fsid
        self._types: dict[int, str] = {}
        self.learn(self.fd, self.device)
        self.filesystem = self.filesystem_of(self.device)
        self._kernel_walk = True
        try:
            os.close(_openat2(self.fd, b".", _PLACE))
        except OSError:
            self._kernel_walk = False  # an old kernel, or a sandbox that filters the call

    def open(self, path: bytes, flags: int) -> int:
        """A descriptor (close-on-exec) for what ``path`` names; a symlink anywhere in it is ELOOP.

        With O_PATH | O_NOFOLLOW a symlink at the end is opened itself.

        Raises:
            OSError: EINVAL for an impossible path, ELOOP for a symlink, and as open(2).
        """
        check_path(path)
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        if self._kernel_walk and len(path) <= _PATH_MAX:
            return _openat2(self.fd, path or b".", flags)
        return self._walk(path, flags)

    def open_directory(self, path: bytes) -> int:
        """A readable descriptor of a directory; raises OSError (ENOTDIR, ELOOP for a symlink, …)."""
        return self.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK)

    def open_parent(self, path: bytes) -> tuple[int, bytes]:
        """(descriptor of the directory that holds ``path``, last component). Not for the root itself.

        The descriptor is O_PATH: good for calls that take a directory descriptor, not for reading.
        """
        parent, _, name = path.rpartition(b"/")
        return self.open(parent, os.O_PATH | os.O_DIRECTORY), name

    def _walk(self, path: bytes, flags: int) -> int:
        parts = path.split(b"/") if path else [b"."]
        fd = self.fd
        try:
            for part in parts[:-1]:
                try:
                    below = os.open(part, _PLACE | os.O_NOFOLLOW, dir_fd=fd)
                except NotADirectoryError:
                    if stat.S_ISLNK(os.stat(part, dir_fd=fd, follow_symlinks=False).st_mode):
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path) from None
                    raise
                if fd != self.fd:
                    os.close(fd)
                fd = below
            return os.open(parts[-1], flags, dir_fd=fd)
        finally:
            if fd != self.fd:
                os.close(fd)

    def learn(self, fd: int, device: int) -> None:
        """Finds out of what type the file system with this st_dev is; ``fd`` is open on it."""
        if device not in self._types:
            answer = ctypes.create_string_buffer(512)
            failed = _libc.fstatfs(fd, answer)
            magic = int.from_bytes(answer.raw[:4], sys.byteorder)  # the first field, 32 bits of it used
            self._types[device] = "" if failed else _FILESYSTEMS.get(magic, "")

    def filesystem_of(self, device: int) -> str:
        """Type of the file system with this st_dev; "" when it is remote, or nothing was opened on it yet."""
        return self._types.get(device, "")

    def is_local(self, device: int) -> bool:
        """Whether changes to it are made by this kernel alone: its clock stamps them, inotify sees them."""
        return bool(self.filesystem_of(device))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
