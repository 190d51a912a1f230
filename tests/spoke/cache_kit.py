"""Helpers of the cache's tests: known contents, filling, a disk that fails on demand, a crash, a deadline."""

from __future__ import annotations

import errno
import functools
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import xxhash

from farside.spoke.cache import ChunkCache
from farside.spoke.cachedfile import CachedFile
from farside.spoke.disk import DiskIO
from farside.spoke.sidecar import CacheKey

PORTAL = b"P" * 16


@functools.lru_cache(maxsize=16)
def content(seed: int, size: int) -> bytes:
    """Bytes that differ from file to file and from place to place, without zero pages."""
    block = random.Random(seed).randbytes(4093)  # a prime, so that no two pages are alike
    return (block * (size // len(block) + 1))[:size]


def key(seed: int, size: int) -> CacheKey:
    return CacheKey(PORTAL, seed.to_bytes(16, "big"), size)


def checksums(data: bytes | memoryview, chunk: int) -> bytes:
    return b"".join(xxhash.xxh3_128_digest(data[at : at + chunk]) for at in range(0, len(data), chunk))


def fill(cache: ChunkCache, file: CachedFile, data: bytes, first: int = 0, last: int | None = None) -> int:
    """Reserves and writes chunks first…last as the fetcher does; returns bytes stored, -1 without room."""
    last = file.chunks - 1 if last is None else last
    reservation = cache.reserve(file, first, last)
    if reservation is None:
        return -1
    with reservation:
        offset, length = file.span(first, last)
        piece = memoryview(data)[offset : offset + length]
        return file.write(reservation, first, piece, checksums(piece, cache.chunk))


def read(file: CachedFile, offset: int, size: int) -> bytes | None:
    """What a FUSE thread would answer at once; None when it cannot."""
    buffer = memoryview(bytearray(size))
    got = file.try_read(offset, buffer)
    return None if got < 0 else bytes(buffer[:got])


def read_all(file: CachedFile) -> bytes | None:
    return read(file, 0, file.size)


def load_and_verify(cache: ChunkCache, seed: int, size: int) -> CachedFile:
    file = cache.file(key(seed, size), b"file-%d" % seed)
    file.load()
    if file.chunks:
        file.verify(0, file.chunks - 1)
    return file


def crash(cache: ChunkCache) -> None:
    """As kill -9 leaves things: no flush, no ledger; the lock goes with the process."""
    cache.keeper._stopping = True
    cache.keeper.wake()
    cache.keeper._thread.join(10)
    cache.health.stop()
    cache.directory.close()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "condition did not come true in time"
        threading.Event().wait(0.005)


def on_disk(directory: Path) -> int:
    """Bytes that the cached files really take."""
    total = 0
    for root, _, names in os.walk(directory / "data"):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except FileNotFoundError:
                pass
    return total


def data_file(directory: Path, file: CachedFile) -> Path:
    name = file.digest.hex()
    return directory / "data" / name[:2] / f"{name}.data"


def meta_file(directory: Path, file: CachedFile) -> Path:
    return data_file(directory, file).with_suffix(".meta")


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), offset)


class FaultyDisk(DiskIO):
    """A disk whose calls fail or hang when told so.

    ``faults`` maps a method's name to an errno. While ``hang`` holds a method's name that method waits for
    ``awake``.
    """

    def __init__(self) -> None:
        self.faults: dict[str, int] = {}
        self.hang: set[str] = set()
        self.awake = threading.Event()
        self.calls: dict[str, int] = {}
        self.statvfs_result: os.statvfs_result | None = None

    def _maybe(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if name in self.hang:
            self.awake.wait(30)
        number = self.faults.get(name)
        if number is not None:
            raise OSError(number, os.strerror(number))

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        self._maybe("preadv")
        return super().preadv(fd, view, offset)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if self.faults.get("pwrite") == errno.ENOSPC and len(data) > 4096:  # a torn write, as full disks do
            super().pwrite(fd, data[:4096], offset)
        self._maybe("pwrite")
        return super().pwrite(fd, data, offset)

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        self._maybe("open")
        return super().open(path, flags, mode)

    def fsync(self, fd: int) -> None:
        self._maybe("fsync")
        super().fsync(fd)

    def wait_writeback(self, fd: int) -> None:
        self._maybe("wait_writeback")
        super().wait_writeback(fd)

    def unlink(self, path: str) -> None:
        self._maybe("unlink")
        super().unlink(path)

    def rename(self, old: str, new: str) -> None:
        self._maybe("rename")
        super().rename(old, new)

    def punch(self, fd: int, offset: int, length: int) -> None:
        self._maybe("punch")
        super().punch(fd, offset, length)

    def statvfs(self, path: str) -> os.statvfs_result:
        return self.statvfs_result or super().statvfs(path)
