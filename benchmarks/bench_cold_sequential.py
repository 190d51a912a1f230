"""Cold sequential read of 1 GiB ÷ link rate: 60 ms, 300 ms, and 60 ms with 0.1 % loss, at 1 Gbit/s."""

from __future__ import annotations

from benchmarks.harness import LINK_BYTES_PER_S, WORK, Figure, far_mount, record
from benchmarks.iperf import throughput
from benchmarks.probes import make_file, sequential
from farside.bench.netlink import Shape

_REPEATS = 3
_CASES = (
    ("cold_sequential_60ms", 0.93, Shape(rtt=60, rate=1000)),
    ("cold_sequential_300ms", 0.85, Shape(rtt=300, rate=1000)),
    ("cold_sequential_loss", 0.80, Shape(rtt=60, rate=1000, loss=0.1)),
)


def main() -> None:
    native = make_file(WORK / "data-1024" / "file.bin", 1 << 30)
    for name, target, shape in _CASES:
        with far_mount(name, native.parent, shape) as far:
            values = []
            late_ms = 0.0
            for _ in range(_REPEATS):
                far.link.traffic()
                with far.mounted() as root:
                    values.append(sequential(root / native.name) / LINK_BYTES_PER_S)
                late_ms = max(late_ms, far.link.traffic().late_ms)
            peer = throughput(far.link, streams=16) / LINK_BYTES_PER_S
            record(
                Figure(name, "÷ link rate", target, "more"),
                values,
                f"125 MB/s link; iperf3 with 16 streams in the same run: {peer:.2f}; peers 0.40–0.65",
                late_ms=round(late_ms, 1),
            )


if __name__ == "__main__":
    main()
