"""iperf3 over a link, as the measure of what TCP can carry there."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

from farside.bench.link import NamespaceLink

_PORT = "5301"


def throughput(link: NamespaceLink, streams: int, seconds: int = 8, congestion: str = "bbr") -> float:
    """Bytes per second from hub to spoke with that many streams, first seconds of ramp-up included.

    Raises RuntimeError if iperf3 is missing or does not connect in five seconds.
    """
    server = subprocess.Popen(
        [*link.hub_prefix, "iperf3", "-s", "-1", "-p", _PORT],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        client = [*link.spoke_prefix, "iperf3", "-J", "-R", "-c", link.hub_host, "-p", _PORT]
        client += ["-t", str(seconds), "-P", str(streams), "-C", congestion]
        deadline = time.monotonic() + 5
        while True:
            result = subprocess.run(client, capture_output=True, text=True, timeout=seconds + 30)
            if result.returncode == 0:
                answer: dict[str, Any] = json.loads(result.stdout)
                return float(answer["end"]["sum_received"]["bits_per_second"]) / 8
            if time.monotonic() > deadline:
                raise RuntimeError(f"iperf3 failed: {result.stdout[-300:]} {result.stderr[-300:]}")
            time.sleep(0.2)
    finally:
        server.kill()
        server.wait()
