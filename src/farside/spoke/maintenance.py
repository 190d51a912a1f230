"""``farside cache verify`` and ``farside cache clear``: work on a cache directory that no spoke is using."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from farside.spoke import sidecar
from farside.spoke.cachedir import SEALED, CacheDirectory
from farside.spoke.disk import DiskIO, read_into, write_atomically
from farside.spoke.sidecar import DIGEST, SideCar

MAX_NAMED = 100


@dataclass
class CheckReport:
    """What ``verify_directory`` found. ``damaged`` names at most 100 files, by their path in the portal."""

    files: int = 0
    chunks: int = 0
    read_bytes: int = 0
    corrupt_chunks: int = 0
    left_overs: int = 0
    damaged: list[bytes] = field(default_factory=list)


def verify_directory(
    directory: str | os.PathLike[str],
    progress: Callable[[int, int], None] | None = None,
    *,
    disk: DiskIO | None = None,
) -> CheckReport:
    """Reads every cached chunk and compares it with its checksum; what does not match is dropped.

    Args:
        progress: called with (prefixes done, prefixes in all) now and then.

    Raises:
        CacheError: not a cache of this format, or in use.
        OSError: the disk cannot be written.
    """
    opened = CacheDirectory.open(os.fspath(directory), chunk=None, disk=disk)
    report = CheckReport()
    try:
        prefixes = opened.prefixes()
        for done, prefix in enumerate(prefixes):
            if progress is not None:
                progress(done, len(prefixes))
            for digest in opened.listing(prefix):
                _check(opened, digest, report)
        if progress is not None:
            progress(len(prefixes), len(prefixes))
    finally:
        opened.close()
    return report


def clear_directory(directory: str | os.PathLike[str]) -> int:
    """Deletes all that the cache wrote, of this format or another; returns the bytes that were freed.

    Raises:
        CacheError: not a cache, or in use.
        OSError: something could not be deleted.
    """
    opened = CacheDirectory.open(os.fspath(directory), chunk=None, any_format=True)
    freed = 0
    try:
        for prefix in opened.prefixes():
            for digest in opened.listing(prefix):
                for path in (opened.data_path(digest), opened.meta_path(digest)):
                    try:
                        freed += opened.disk.stat(path).st_blocks * 512
                    except FileNotFoundError:
                        pass
                opened.remove(digest)
        opened.forget()
    finally:
        opened.close()
    return freed


def _check(directory: CacheDirectory, digest: bytes, report: CheckReport) -> None:
    found, stat = sidecar.read(directory, digest)
    if found is None or stat is None:
        directory.remove(digest)
        report.left_overs += 1
        return
    report.files += 1
    bad = _bad_chunks(directory, digest, found, report)
    if not bad:
        return
    report.corrupt_chunks += len(bad)
    if len(report.damaged) < MAX_NAMED:
        report.damaged.append(found.path)
    for chunk in bad:
        found.state[chunk] = 0
    if found.state.count(0) == len(found.state):
        directory.remove(digest)
        return
    packed = sidecar.pack(found.key, found.chunk, found.path, found.state, found.checksums)
    write_atomically(directory.disk, directory.meta_path(digest), packed)
    if (
        not stat.st_mode & SEALED
    ):  # a sealed file may be mapped by somebody: its bytes stay till they are replaced
        fd = directory.disk.open(directory.data_path(digest), os.O_RDWR)
        try:
            for chunk in bad:
                directory.disk.punch(fd, chunk * found.chunk, found.chunk)
        finally:
            os.close(fd)


def _bad_chunks(directory: CacheDirectory, digest: bytes, found: SideCar, report: CheckReport) -> list[int]:
    bad: list[int] = []
    buffer = memoryview(bytearray(found.chunk))
    fd = directory.disk.open(directory.data_path(digest), os.O_RDONLY)
    try:
        for first, last in sidecar.runs_present(found.state):
            for chunk in range(first, last + 1):
                offset = chunk * found.chunk
                view = buffer[: min(found.chunk, found.key.size - offset)]
                try:
                    whole = read_into(directory.disk, fd, view, offset) == len(view)
                except OSError:
                    whole = False
                report.chunks += 1
                report.read_bytes += len(view)
                own = found.checksums[chunk * DIGEST : (chunk + 1) * DIGEST]
                if not whole or xxhash.xxh3_128_digest(view) != own:
                    bad.append(chunk)
    finally:
        os.close(fd)
    return bad
