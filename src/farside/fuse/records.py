"""What a file system answers: attributes, entries, open files, directories, and how they are encoded."""

from __future__ import annotations

from typing import NamedTuple

from farside.fuse import abi

_BILLION = 1_000_000_000


class FuseAttr(NamedTuple):
    """Attributes of one node. Times in nanoseconds since 1970 (may be negative), blocks of 512 bytes."""

    ino: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int = 0
    blksize: int = 4096


class EntryOut(NamedTuple):
    """Answer to a lookup.

    ``nodeid`` 0 says "there is no such name" and lets the kernel remember that for ``entry_ttl``.
    ``nodeid`` and ``generation`` together must never be used again for another file while mounted.
    Each one with a ``nodeid`` counts as one lookup, which the kernel gives back with forget.
    Times to live in seconds.
    """

    nodeid: int
    generation: int
    attr: FuseAttr
    entry_ttl: float
    attr_ttl: float


NO_ATTR = FuseAttr(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def negative_entry(ttl: float) -> EntryOut:
    """ "No such name", remembered by the kernel for ``ttl`` seconds."""
    return EntryOut(0, 0, NO_ATTR, ttl, 0.0)


class AttrOut(NamedTuple):
    """Answer to getattr; ``attr_ttl`` in seconds."""

    attr: FuseAttr
    attr_ttl: float


class OpenOut(NamedTuple):
    """Answer to open and opendir: a handle number, ``abi.FOPEN_*`` flags, and the backing id that
    ``Session.backing_open`` gave when ``FOPEN_PASSTHROUGH`` is among them."""

    fh: int = 0
    flags: int = 0
    backing_id: int = 0


class StatfsOut(NamedTuple):
    """Answer to statfs; ``blocks``, ``bfree`` and ``bavail`` count units of ``frsize`` bytes."""

    blocks: int
    bfree: int
    bavail: int
    files: int
    ffree: int
    bsize: int = 4096
    namelen: int = 255
    frsize: int = 4096


class InitInfo(NamedTuple):
    """What kernel and session agreed on."""

    minor: int
    max_readahead: int
    offered: abi.Capability
    agreed: abi.Capability
    passthrough: bool


def _ttl(seconds: float) -> tuple[int, int]:
    """Split into whole seconds and nanoseconds, as the kernel wants them."""
    if seconds <= 0:
        return 0, 0
    whole = int(seconds)
    return whole, int((seconds - whole) * _BILLION)


def encode_attr(attr: FuseAttr) -> bytes:
    """88 bytes."""
    ino, size, blocks, atime, mtime, ctime, mode, nlink, uid, gid, rdev, blksize = attr
    atime, atime_ns = divmod(atime, _BILLION)
    mtime, mtime_ns = divmod(mtime, _BILLION)
    ctime, ctime_ns = divmod(ctime, _BILLION)
    return abi.ATTR.pack(
        *(ino, size, blocks, atime, mtime, ctime, atime_ns, mtime_ns, ctime_ns),
        *(mode, nlink, uid, gid, rdev, blksize, 0),
    )


def encode_entry(entry: EntryOut) -> bytes:
    """128 bytes."""
    nodeid, generation, attr, entry_ttl, attr_ttl = entry
    ino, size, blocks, atime, mtime, ctime, mode, nlink, uid, gid, rdev, blksize = attr
    atime, atime_ns = divmod(atime, _BILLION)
    mtime, mtime_ns = divmod(mtime, _BILLION)
    ctime, ctime_ns = divmod(ctime, _BILLION)
    entry_s, entry_ns = _ttl(entry_ttl)
    attr_s, attr_ns = _ttl(attr_ttl)
    return abi.ENTRY_ATTR.pack(
        *(nodeid, generation, entry_s, attr_s, entry_ns, attr_ns),
        *(ino, size, blocks, atime, mtime, ctime, atime_ns, mtime_ns, ctime_ns),
        *(mode, nlink, uid, gid, rdev, blksize, 0),
    )


def encode_attr_out(out: AttrOut) -> bytes:
    """104 bytes."""
    seconds, nanoseconds = _ttl(out.attr_ttl)
    return abi.ATTR_OUT.pack(seconds, nanoseconds, 0) + encode_attr(out.attr)


def encode_open(out: OpenOut) -> bytes:
    """16 bytes."""
    return abi.OPEN_OUT.pack(out.fh, out.flags, out.backing_id)


def encode_statfs(out: StatfsOut) -> bytes:
    """80 bytes."""
    return abi.STATFS_OUT.pack(*out, 0)


class DirBuffer:
    """Collects directory entries for one readdir or readdirplus answer of at most ``size`` bytes.

    ``offset`` of an entry is the position that the kernel gives to the next readdir to go on *behind*
    that entry: with entries numbered from 0, the entry ``i`` has offset ``i + 1``.
    """

    __slots__ = ("_left", "_parts", "nodeids")

    def __init__(self, size: int) -> None:
        self._left = size
        self._parts: list[bytes] = []
        self.nodeids: list[int] = []

    def add(self, name: bytes, ino: int, kind: int, offset: int) -> bool:
        """Append one entry; ``kind`` is ``st_mode >> 12`` (DT_*). False when it does not fit: stop there."""
        length = len(name)
        padding = -length & 7
        need = 24 + length + padding
        if need > self._left:
            return False
        self._left -= need
        self._parts.append(abi.DIRENT.pack(ino, offset, length, kind) + name + bytes(padding))
        return True

    def add_plus(self, entry: EntryOut, name: bytes, offset: int) -> bool:
        """Append one entry with its attributes. False when it does not fit.

        Counts as a lookup of ``entry.nodeid``, except for ``.`` and ``..``, which the kernel does not
        count (their node id is left out here, so that nobody can get that wrong). A ``nodeid`` of 0
        gives the name without attributes.
        """
        length = len(name)
        padding = -length & 7
        need = 152 + length + padding
        if need > self._left:
            return False
        self._left -= need
        if name == b"." or name == b"..":
            entry = entry._replace(nodeid=0)
        elif entry.nodeid:
            self.nodeids.append(entry.nodeid)
        attr = entry.attr
        self._parts.append(
            encode_entry(entry)
            + abi.DIRENT.pack(attr.ino, offset, length, attr.mode >> 12)
            + name
            + bytes(padding)
        )
        return True

    def __len__(self) -> int:
        """Entries so far."""
        return len(self._parts)

    def __bytes__(self) -> bytes:
        return b"".join(self._parts)
