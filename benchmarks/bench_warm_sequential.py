"""Warm sequential read through the mount ÷ native read of the same bytes, page cache warm and dropped."""

from __future__ import annotations

import statistics

from benchmarks.harness import WORK, Figure, far_mount, record
from benchmarks.probes import make_file, sequential
from farside.bench.machine import drop_page_cache

_SIZE = 512 << 20
_REPEATS = 7


def main() -> None:
    native = make_file(WORK / "data-512" / "file.bin", _SIZE)
    with far_mount("warm_sequential", native.parent) as far, far.mounted() as root:
        remote = root / native.name
        sequential(remote)
        far.stack.wait_quiet()
        for name, target, dropped in (
            ("warm_sequential", 0.95, False),
            ("warm_sequential_dropped", 0.9, True),
        ):
            for path in (native, remote):
                sequential(path)
            ratios, rates = [], []
            for turn in range(_REPEATS):
                pair = {}
                for path in (native, remote) if turn % 2 else (remote, native):  # no one always goes first
                    if dropped:
                        drop_page_cache()
                    pair[path] = sequential(path)
                ratios.append(pair[remote] / pair[native])
                rates.append(pair[native] / 1e6)
            native_rate = statistics.median(rates)
            record(
                Figure(name, "÷ native", target, "more"),
                ratios,
                f"native read of the same bytes, in turns in the same run: {native_rate:,.0f} MB/s",
                passthrough=far.stack.status()["mount"]["passthrough"],
            )


if __name__ == "__main__":
    main()
