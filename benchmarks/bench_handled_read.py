"""A handled read: 16 KiB of a cached chunk of a file that is not whole in the cache yet."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

from benchmarks.harness import WORK, Figure, far_mount, record
from benchmarks.probes import make_file, random_p50

_CACHED = 32 << 20
_REPEATS = 5
_SLOW = "rate=1"  # Mbit/s: prefetching cannot make the file whole meanwhile


def main() -> None:
    native = make_file(WORK / "data-1024" / "file.bin", 1 << 30)
    with far_mount("handled_read", native.parent) as far, far.mounted() as root:
        remote = root / native.name
        with open(remote, "rb", buffering=0) as file:
            for _ in range(_CACHED >> 20):
                file.read(1 << 20)
            far.link.command("set", _SLOW)
            values, before = [], far.stack.status()["reads"]
            for turn in range(_REPEATS):
                _drop_mount_pages(remote)
                values.append(random_p50(remote, 1500, end=_CACHED, seed=turn) * 1e6)
            after = far.stack.status()["reads"]
        native_us = statistics.median(random_p50(native, 1500, end=_CACHED, seed=i) for i in range(3)) * 1e6
        handled = after["count"] - before["count"]
        if handled < 1500 * _REPEATS * 0.9:
            raise SystemExit(f"only {handled} reads were handled by the spoke: this measured something else")
        record(
            Figure("handled_read_16k", "µs", 40, "less"),
            values,
            "the mount's own pages dropped, those of the cache file not; usual bindings 50–80 µs; "
            f"native from the page cache in the same run: {native_us:.1f} µs",
        )


def _drop_mount_pages(remote: Path) -> None:
    """Have the kernel ask the mount again; what it would read its answers from stays in memory."""
    fd = os.open(remote, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


if __name__ == "__main__":
    main()
