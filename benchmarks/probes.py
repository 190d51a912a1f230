"""How reads are timed, the same for a native file and for one on the mount."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from pathlib import Path

import numpy as np

_BLOCK = 1 << 20
_WINDOW = 16 << 10


def make_file(path: Path, size: int, seed: int = 1) -> Path:
    """A file of `size` bytes that do not compress; kept if it is there already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.stat().st_size != size:
        random = np.random.default_rng(seed)
        with open(path, "wb") as file:
            for at in range(0, size, 16 << 20):
                file.write(random.bytes(min(16 << 20, size - at)))
            file.flush()
            os.fsync(file.fileno())
    return path


def make_tree(root: Path, files: int, per_directory: int, size: int) -> Path:
    """A tree of `files` small files of `size` bytes; kept if it is there already."""
    done = root.with_name(f"{root.name}.{files}x{size}")
    if not done.exists():
        content = os.urandom(size)
        for number in range(files):
            directory = root / f"d{number // per_directory:05d}"
            if number % per_directory == 0:
                directory.mkdir(parents=True, exist_ok=True)
            tag = number.to_bytes(8, "little")[:size]
            (directory / f"f{number:07d}.dat").write_bytes(tag + content[len(tag) :])
        os.sync()
        done.touch()
    return root


def sequential(path: Path) -> float:
    """Bytes per second of one pass over a file in 1 MiB reads into one buffer."""
    buffer = memoryview(bytearray(_BLOCK))
    total, began = 0, time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    try:
        while count := os.readv(fd, [buffer]):
            total += count
    finally:
        os.close(fd)
    return total / (time.perf_counter() - began)


def random_p50(path: Path, reads: int = 4000, *, end: int | None = None, seed: int = 1) -> float:
    """Median seconds of 16 KiB reads at random, distinct, aligned places below `end`."""
    size = end or path.stat().st_size
    places = np.random.default_rng(seed).permutation(size // _WINDOW)[:reads] * _WINDOW
    buffer = memoryview(bytearray(_WINDOW))
    took = []
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for place in places.tolist():
            began = time.perf_counter()
            count = os.preadv(fd, [buffer], place)
            took.append(time.perf_counter() - began)
            if count != _WINDOW:
                raise OSError(f"short read at {place}")
    finally:
        os.close(fd)
    return statistics.median(took)


def mapped(path: Path) -> float:
    """Bytes per second of one pass over a mapping, copied out in 1 MiB pieces."""
    target = bytearray(_BLOCK)
    size = path.stat().st_size
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        began = time.perf_counter()
        source = memoryview(view)
        for at in range(0, size - _BLOCK + 1, _BLOCK):
            target[:] = source[at : at + _BLOCK]
        seconds = time.perf_counter() - began
        source.release()
    return size / seconds


def walk(root: Path) -> int:
    """Visit every entry and take its attributes, as `find -ls` does; returns the number of files."""
    files, todo = 0, [os.fspath(root)]
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
                else:
                    files += 1
    return files
