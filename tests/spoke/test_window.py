"""The window against simulated links: it finds the rate, keeps the path full, and does not run away."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

import pytest

from farside.spoke.window import CEILING, FLOOR, Window

MB = 1 << 20
GBIT = 1e9 / 8


@dataclass
class Result:
    bytes: int
    seconds: float
    largest_queue: float

    def share(self, rate: float) -> float:
        return self.bytes / self.seconds / rate


class SimulatedLink:
    """A bottleneck of ``rate`` bytes/s behind half a round trip; requests of a reader with endless demand.

    Time is simulated. Each request is answered in parts of up to 1 MiB; the link serves one byte after
    another, so what waits in front of it is the standing queue that demands would meet.
    """

    def __init__(self, window: Window, rate: float, rtt: float) -> None:
        self.window, self.rate, self.rtt = window, rate, rtt
        self.now = 0.0
        self._free_at = 0.0  # when the bottleneck has sent what was asked so far
        self._inflight = 0
        self._arrivals: list[tuple[float, int, float, bool]] = []

    def _fill(self) -> None:
        while True:
            size = max(256 * 1024, min(8 * MB, self.window.size // 32))
            if self._inflight and self._inflight + size > self.window.size:
                return
            self._inflight += size
            sent, first = self.now, True
            at_hub = self.now + self.rtt / 2
            for begin in range(0, size, MB):
                part = min(MB, size - begin)
                self._free_at = max(self._free_at, at_hub) + part / self.rate
                heapq.heappush(self._arrivals, (self._free_at + self.rtt / 2, part, sent, first))
                first = False

    def run(self, seconds: float, *, ping: bool = True, jitter: random.Random | None = None) -> Result:
        begun, total, queue = self.now, 0, 0.0
        if ping:
            self.window.sample_rtt(self.now, self.rtt, ping=True)
        while self.now < begun + seconds:
            self._fill()
            when, part, sent, first = heapq.heappop(self._arrivals)
            self.now = max(self.now, when)
            if jitter is not None and jitter.random() < 0.002:
                self.now += 0.2  # the loop was held up: what comes next comes as a burst
            self._inflight -= part
            total += part
            if first:
                self.window.sample_rtt(self.now, self.now - sent)
            self.window.delivered(self.now, part, limited=True)
            if self.now > begun + seconds / 2:
                queue = max(queue, self._free_at - self.now)
        return Result(total, self.now - begun, queue)


@pytest.mark.parametrize(
    ("rate", "rtt", "seconds", "share"),
    [
        (1 * GBIT, 0.060, 8.6, 0.93),  # 1 GiB, from nothing
        (1 * GBIT, 0.300, 8.6, 0.85),
        (10 * GBIT, 0.060, 10.0, 0.90),
        (10 * GBIT, 0.002, 5.0, 0.95),
        (0.01 * GBIT, 0.060, 60.0, 0.93),
        (0.1 * GBIT, 0.600, 60.0, 0.93),
    ],
)
@pytest.mark.parametrize("ping", [True, False])
def test_reaches_the_rate_of_the_link(
    rate: float, rtt: float, seconds: float, share: float, ping: bool
) -> None:
    window = Window()
    link = SimulatedLink(window, rate, rtt)
    assert link.run(seconds, ping=ping).share(rate) >= share - (0 if ping else 0.03)
    if rate * rtt < CEILING / 4:
        assert window.size <= max(2.2 * FLOOR, 4.5 * rate * (rtt + 0.02))


def test_stays_full_and_bounded_for_minutes() -> None:
    window, rate, rtt = Window(), 1 * GBIT, 0.060
    link = SimulatedLink(window, rate, rtt)
    link.run(10)
    for _ in range(12):
        result = link.run(10)
        assert result.share(rate) >= 0.95
        assert (
            result.largest_queue <= 2.5 * rtt
        )  # seconds that a demand would wait in front of the bottleneck
        assert window.bandwidth == pytest.approx(rate, rel=0.15)


def test_late_wakeups_do_not_blow_it_up() -> None:
    window, rate, rtt = Window(), 1 * GBIT, 0.060
    link = SimulatedLink(window, rate, rtt)
    for _ in range(6):
        link.run(10, jitter=random.Random(7))
        assert window.size <= 5 * rate * rtt


def test_finds_a_faster_and_a_slower_and_a_longer_path() -> None:
    window = Window()
    link = SimulatedLink(window, 0.1 * GBIT, 0.060)
    link.run(10)
    link.rate = 1 * GBIT
    link.run(8)
    assert link.run(5).share(link.rate) >= 0.95
    link.rate = 0.05 * GBIT
    link.run(30)
    assert window.size <= max(2.2 * FLOOR, 5 * link.rate * link.rtt)
    link.rate, link.rtt = 1 * GBIT, 0.300  # the route changed and no connection broke
    link.run(60, ping=False)
    assert link.run(20, ping=False).share(link.rate) >= 0.80


def test_reader_that_is_slow_does_not_make_the_link_look_slow() -> None:
    window = Window()
    link = SimulatedLink(window, 1 * GBIT, 0.060)
    link.run(5)
    size, now = window.size, link.now
    for _ in range(2000):  # 20 s at 1 MB/s
        now += 0.01
        window.delivered(now, 10_000, limited=False)
    window.idle()
    assert window.size == pytest.approx(size, rel=0.2)


def test_reset_and_limits() -> None:
    window = Window(floor=1 * MB, ceiling=8 * MB, start=2 * MB)
    SimulatedLink(window, 10 * GBIT, 0.060).run(5)
    assert window.size == 8 * MB
    window.reset()
    assert window.size == 2 * MB and window.bandwidth == 0.0 and window.starting
    window.sample_rtt(0.0, 0.0)
    window.sample_rtt(0.0, -1.0)
    assert window.rtt == 0.0
    SimulatedLink(window, 1e4, 0.060).run(600)
    assert window.size <= 1.1 * MB
