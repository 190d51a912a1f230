"""The side-car of a cached file: what lies on disk beside the sparse data file.

Layout, little-endian: ``HEAD``, portal id, version, path hint, presence bitmap (bit 0 of byte 0 is chunk 0),
one 16-byte xxh3_128 for each chunk that is present, in order, and the xxh3_128 of all that, 16 bytes.
The path hint is for people who look into a cache; nothing depends on it.
"""

from __future__ import annotations

import os
import struct
from stat import S_ISREG
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from farside.spoke.disk import read_all

if TYPE_CHECKING:
    from farside.spoke.cachedir import CacheDirectory

MAGIC = b"FARSIDEM"
FORMAT = 1
HEAD = struct.Struct("<8sHHIQIIHHH")
"""magic, format, flags (0), chunk size, file size, chunks, chunks present, lengths of portal id, version,
path."""

DIGEST = 16
MAX_PATH_HINT = 1024

_TO_BIT = bytes(0x30 if value == 0 else 0x31 for value in range(256))
_FROM_BIT = bytes(2 if value == 0x31 else 0 for value in range(256))


class CacheKey(NamedTuple):
    """One content of one file: its portal, its version, and its size in bytes."""

    portal_id: bytes
    version: bytes
    size: int


class SideCar(NamedTuple):
    """A parsed side-car. ``state`` has one byte a chunk (0 absent, 2 on disk but not yet verified);
    ``checksums`` has 16 bytes a chunk, zeros where absent."""

    key: CacheKey
    chunk: int
    path: bytes
    state: bytearray
    checksums: bytearray


class SideCarError(Exception):
    """The bytes are no whole side-car of this format."""


def digest_of_key(key: CacheKey, chunk: int) -> bytes:
    """The 16 bytes by which a cached file is known on disk; never derived from a name."""
    head = struct.pack("<HHQI", len(key.portal_id), len(key.version), key.size, chunk)
    return xxhash.xxh3_128_digest(head + key.portal_id + key.version)


def chunks_of(size: int, chunk: int) -> int:
    return -(-size // chunk)


def size_of(chunks: int, present: int) -> int:
    """The most bytes that a side-car with these counts can have."""
    return HEAD.size + 64 + MAX_PATH_HINT + (chunks + 7) // 8 + DIGEST * (present + 1)


def pack(
    key: CacheKey, chunk: int, path: bytes, state: bytes | bytearray, checksums: bytes | bytearray
) -> bytes:
    """A side-car's bytes. ``state`` is not 0 where a chunk is present; ``checksums`` has 16 bytes a
    chunk."""
    chunks = len(state)
    present = chunks - state.count(0)
    path = path[-MAX_PATH_HINT:]
    bits = int(state.translate(_TO_BIT)[::-1], 2) if chunks else 0
    if present == chunks:
        sums = bytes(checksums)
    else:
        runs = runs_present(state)
        sums = b"".join(checksums[first * DIGEST : (last + 1) * DIGEST] for first, last in runs)
    body = b"".join(
        (
            HEAD.pack(
                MAGIC,
                FORMAT,
                0,
                chunk,
                key.size,
                chunks,
                present,
                len(key.portal_id),
                len(key.version),
                len(path),
            ),
            key.portal_id,
            key.version,
            path,
            bits.to_bytes((chunks + 7) // 8, "little"),
            sums,
        )
    )
    return body + xxhash.xxh3_128_digest(body)


def runs_present(state: bytes | bytearray) -> list[tuple[int, int]]:
    """Runs (first, last) of chunks whose state is not 0."""
    found: list[tuple[int, int]] = []
    bits = state.translate(_TO_BIT)
    at = bits.find(b"1")
    while at >= 0:
        end = bits.find(b"0", at)
        end = len(bits) if end < 0 else end
        found.append((at, end - 1))
        at = bits.find(b"1", end)
    return found


def parse(data: bytes) -> SideCar:
    """Raises SideCarError when the bytes are torn, damaged, empty, or of another format."""
    if len(data) < HEAD.size + DIGEST:
        raise SideCarError("side-car is truncated")
    body, own = memoryview(data)[:-DIGEST], data[-DIGEST:]
    magic, number, _flags, chunk, size, chunks, present, id_len, version_len, path_len = HEAD.unpack_from(
        data
    )
    if magic != MAGIC or number != FORMAT:
        raise SideCarError("side-car has another format")
    if xxhash.xxh3_128_digest(body) != own:
        raise SideCarError("side-car is damaged")
    if not chunk or chunks != chunks_of(size, chunk):
        raise SideCarError("side-car contradicts itself")
    at = HEAD.size
    portal_id, at = data[at : at + id_len], at + id_len
    version, at = data[at : at + version_len], at + version_len
    path, at = data[at : at + path_len], at + path_len
    bitmap, at = data[at : at + (chunks + 7) // 8], at + (chunks + 7) // 8
    sums = data[at:-DIGEST]
    text = bin(int.from_bytes(bitmap, "little"))[2:].zfill(chunks)[::-1].encode()
    state = bytearray(text.translate(_FROM_BIT))
    if len(state) != chunks or len(sums) != present * DIGEST or state.count(2) != present:
        raise SideCarError("side-car contradicts itself")
    if present == chunks:
        checksums = bytearray(sums)
    else:
        checksums, at = bytearray(chunks * DIGEST), 0
        for first, last in runs_present(state):
            length = (last - first + 1) * DIGEST
            checksums[first * DIGEST : first * DIGEST + length] = sums[at : at + length]
            at += length
    return SideCar(CacheKey(portal_id, version, size), chunk, path, state, checksums)


def read(directory: CacheDirectory, digest: bytes) -> tuple[SideCar | None, os.stat_result | None]:
    """The side-car of a key and the stat of its data file, or (None, …) when the pair is not whole and
    sound.

    Raises:
        OSError: the disk failed; a missing file is no failure.
    """
    try:
        data = read_all(directory.disk, directory.meta_path(digest), 1 << 34)
        stat = directory.disk.stat(directory.data_path(digest))
    except FileNotFoundError:
        return None, None
    try:
        found = parse(data)
    except SideCarError:
        return None, stat
    sound = S_ISREG(stat.st_mode) and stat.st_size == found.key.size and found.chunk == directory.chunk
    if not sound or digest_of_key(found.key, found.chunk) != digest:
        return None, stat
    return found, stat
