"""Warm mmap throughput through the mount ÷ native."""

from __future__ import annotations

import statistics

from benchmarks.harness import WORK, Figure, far_mount, record
from benchmarks.probes import make_file, mapped, sequential

_REPEATS = 7


def main() -> None:
    native = make_file(WORK / "data-512" / "file.bin", 512 << 20)
    with far_mount("warm_mmap", native.parent) as far, far.mounted() as root:
        remote = root / native.name
        sequential(remote)
        far.stack.wait_quiet()
        for path in (native, remote):
            mapped(path)
        pairs = []
        for turn in range(_REPEATS):
            order = (native, remote) if turn % 2 else (remote, native)
            rates = {path: mapped(path) for path in order}
            pairs.append((rates[remote], rates[native]))
        native_rate = statistics.median(direct for _, direct in pairs) / 1e6
        record(
            Figure("warm_mmap", "÷ native", 0.9, "more"),
            [through / direct for through, direct in pairs],
            f"native mapping of the same bytes, in turns in the same run: {native_rate:,.0f} MB/s",
        )


if __name__ == "__main__":
    main()
