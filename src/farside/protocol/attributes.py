"""Attributes and directory entries as they cross the link and lie in the spoke's namespace store.

A *record* is the fixed 80-byte part (``RECORD``); a *value* is ``record + u32 flags + symlink target``
and is what the namespace keeps for each name; an *entry* is ``ENTRY_HEAD + name + value``; a *listing* is
the concatenation of a directory's entries, sorted by name (bytes order). A directory's *digest* is the
xxh3_128 of its listing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import xxhash

RECORD = struct.Struct("<QQQqqIIIIQ16s")
"""fileid, size, blocks (512 B), mtime ns, ctime ns, mode, nlink, uid, gid, rdev, version."""

ENTRY_HEAD = struct.Struct("<HI")
"""length of the name, length of the value."""

FLAG_XATTR = 1
"""The file has extended attributes; without it the spoke answers ENODATA without asking."""

_FLAGS = struct.Struct("<I")
VALUE_MIN = RECORD.size + _FLAGS.size


class Attr(NamedTuple):
    """What ``stat`` shows of one file, and the version of its content (16 opaque bytes)."""

    fileid: int
    size: int
    blocks: int
    mtime_ns: int
    ctime_ns: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    version: bytes


def pack_value(attr: Attr, flags: int = 0, target: bytes = b"") -> bytes:
    """Record, flags and symlink target in one bytes object."""
    return RECORD.pack(*attr) + _FLAGS.pack(flags) + target


def attr_of(value: bytes) -> Attr:
    """The attributes in a value or record.

    Raises:
        struct.error: the value is shorter than a record.
    """
    return Attr._make(RECORD.unpack_from(value))


def flags_of(value: bytes) -> int:
    return int(_FLAGS.unpack_from(value, RECORD.size)[0])


def target_of(value: bytes) -> bytes:
    """The symlink target in a value; empty for anything but a symlink."""
    return value[VALUE_MIN:]


def pack_listing(entries: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A listing of (name, value) pairs, which are sorted by name here."""
    parts: list[bytes] = []
    for name, value in sorted(entries):
        parts += (ENTRY_HEAD.pack(len(name), len(value)), name, value)
    return b"".join(parts)


def iter_listing(listing: bytes | memoryview) -> Iterator[tuple[bytes, bytes]]:
    """The (name, value) pairs of a listing.

    Raises:
        ValueError: the listing is truncated or an entry is impossible.
    """
    data = bytes(listing)
    at, end = 0, len(data)
    unpack, head = ENTRY_HEAD.unpack_from, ENTRY_HEAD.size
    while at < end:
        if at + head > end:
            raise ValueError("listing is truncated")
        n, v = unpack(data, at)
        at += head
        stop = at + n + v
        if stop > end or v < VALUE_MIN or not n:
            raise ValueError("listing is damaged")
        yield data[at : at + n], data[at + n : stop]
        at = stop


def digest_of(listing: bytes | memoryview) -> bytes:
    """The 16-byte digest of a listing."""
    return xxhash.xxh3_128_digest(listing)
