"""Warm random 16 KiB reads: median latency through the mount ÷ native."""

from __future__ import annotations

import statistics

from benchmarks.harness import WORK, Figure, far_mount, record
from benchmarks.probes import make_file, random_p50, sequential

_REPEATS = 7


def main() -> None:
    native = make_file(WORK / "data-512" / "file.bin", 512 << 20)
    with far_mount("warm_random", native.parent) as far, far.mounted() as root:
        remote = root / native.name
        sequential(remote)
        far.stack.wait_quiet()
        for path in (native, remote):
            sequential(path)
        pairs = [(random_p50(remote, seed=i), random_p50(native, seed=i)) for i in range(_REPEATS)]
        native_us = statistics.median(ours for _, ours in pairs) * 1e6
        record(
            Figure("warm_random_16k", "÷ native", 1.2, "less"),
            [through / direct for through, direct in pairs],
            f"native p50 in the same run: {native_us:.2f} µs",
        )


if __name__ == "__main__":
    main()
