"""Cold sequential read at 60 ms without a rate limit ÷ iperf3 with as many streams, TLS off and on."""

from __future__ import annotations

import statistics

from benchmarks.harness import WORK, Figure, far_mount, record
from benchmarks.iperf import throughput
from benchmarks.probes import make_file, sequential
from farside.bench.netlink import Shape

_REPEATS = 3
_STREAMS = 16  # what a mount opens by default


def main() -> None:
    native = make_file(WORK / "data-2048" / "file.bin", 2 << 30)
    for name, target, tls in (("unlimited_plain", 0.8, False), ("unlimited_tls", 0.4, True)):
        with far_mount(name, native.parent, Shape(rtt=60), tls=tls) as far:
            values, rates = [], []
            for _ in range(_REPEATS):
                peer = throughput(far.link, _STREAMS)
                with far.mounted() as root:
                    values.append(sequential(root / native.name) / peer)
                rates.append(peer / 1e6)
            peer_rate = statistics.median(rates)
            record(
                Figure(name, "÷ iperf3", target, "more"),
                values,
                f"iperf3 with {_STREAMS} streams in the same run, in turns: {peer_rate:,.0f} MB/s",
            )


if __name__ == "__main__":
    main()
