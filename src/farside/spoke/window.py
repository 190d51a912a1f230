"""How many bytes may be in flight on the link: about 2 × bandwidth × round trip, found while running.

A pure state machine: the caller passes the time. It follows the idea of BBR (Cardwell et al., 2016): the
product of the largest delivery rate of the last seconds and the smallest recent round trip is what the
path holds; twice that keeps the path full in spite of bursts, and finds a faster path by itself, since up
to twice the known rate can be delivered. Before anything is known it doubles for as long as that delivers
more. The smallest round trip can only be seen with little in flight, so the window is made small for a
moment when the last such sample has grown old.
"""

from __future__ import annotations

from collections import deque
from math import inf

FLOOR = 1 << 20
CEILING = 256 << 20
START = 4 << 20

START_RATE = 128 << 20
"""Bytes/s that any link is taken to carry at first: long paths begin with a larger window than START."""

GAIN = 1.8
RATE_MEMORY_S = 10.0
RTT_PERIOD_S = 15.0
RTT_PERIOD_TRIPS = 100
"""The smallest round trip of this period and the one before counts: the longer of 15 s and 100 round trips,
since looking for it costs about one and a half of them."""

START_GAIN = 2.5
"""While starting, at most so many times what the path was seen to hold: connections that are still getting
up to speed may do so unhindered, and a slow link does not get a queue of many seconds."""

ROUND_S = 0.05
LONG_ROUND_S = 0.4
"""Shortest round once the rate is known. Behind a lost packet a whole window may come at once; a round must
be long enough to hold the pause as well, or that burst would be taken for the rate of the link."""

"""Shortest round in seconds: below it one delayed wake-up of the loop would look like a change of rate."""

SERVICE_S = 0.01
"""Added to the round trip: the hub's disk needs time too, and on short links that is most of it."""

GROWTH = 1.25
"""A round in start-up that delivers less than this times the best one before did not gain by doubling."""


class Window:
    """Budget of bytes in flight.

    Attributes:
        size: bytes that may be in flight now.
        bandwidth: delivery rate of the link in bytes/s, 0.0 while unknown.
        rtt: smallest recent round trip in seconds, 0.0 while unknown.
        starting: still looking for the rate by doubling.
    """

    def __init__(self, *, floor: int = FLOOR, ceiling: int = CEILING, start: int = START) -> None:
        self._floor, self._ceiling, self._start = floor, ceiling, start
        self.reset()

    def reset(self) -> None:
        """Forget the path: the link was made anew."""
        self.size = self._start
        self.bandwidth = 0.0
        self.rtt = 0.0
        self.starting = True
        self._rtt_before = inf  # smallest of the last period
        self._rtt_now = inf  # smallest of this one
        self._period_at = 0.0
        self._probe_until = 0.0
        self._rates: deque[tuple[float, float]] = deque()
        self._flat_rounds = 0
        self._round_at: float | None = None
        self._round_bytes = 0
        self._round_limited = False

    def sample_rtt(self, now: float, seconds: float, *, ping: bool = False) -> None:
        """A round trip of ``seconds`` ended at ``now``: a ping, or a request until its first bytes came."""
        if seconds <= 0.0:
            return
        if not self.rtt:
            self._period_at = now
            if ping:
                likely = int(GAIN * START_RATE * seconds)
                self.size = self._clamp(max(self._start, min(likely, 16 * self._start)))
        self._rtt_now = min(self._rtt_now, seconds)
        self.rtt = min(self._rtt_now, self._rtt_before)

    def delivered(self, now: float, nbytes: int, *, limited: bool) -> None:
        """``nbytes`` arrived at ``now``. ``limited``: the window alone held further requests back."""
        if self._round_at is None:
            self._round_at = now
            if now - self._period_at > self._period():  # what was sampled since the pause met no queue
                self._turn_period(now)
            return  # what arrives first began before the round: it says nothing of the rate
        self._round_bytes += nbytes
        self._round_limited |= limited
        if self.starting and limited:
            most = max(self._start, START_GAIN * self.bandwidth * (self.rtt + SERVICE_S))
            self.size = self._clamp(max(self.size, min(self.size + nbytes, int(most))))
        took = now - self._round_at
        if took >= (max(ROUND_S, self.rtt) if self.starting else min(max(LONG_ROUND_S, 4 * self.rtt), 4.0)):
            self._end_round(now, self._round_bytes / took)

    def idle(self) -> None:
        """Nothing is in flight any more: the pause until the next byte belongs to no round."""
        self._round_at, self._round_bytes, self._round_limited = None, 0, False

    def _end_round(self, now: float, rate: float) -> None:
        limited, best = self._round_limited, self.bandwidth
        self._round_at, self._round_bytes, self._round_limited = now, 0, False
        # A round that lacked requests tells of the reader, not of the link, unless it was faster still.
        if rate > best or (limited and not self._probe_until):
            self._rates.append((now, rate))
            while self._rates[0][0] < now - RATE_MEMORY_S:
                self._rates.popleft()
            self.bandwidth = self._robust_maximum()
        if self.starting and limited:
            self._flat_rounds = 0 if rate > GROWTH * best else self._flat_rounds + 1
            self.starting = self._flat_rounds < 3
            if not self.starting:
                self._rates.clear()  # the rounds of the start were too short to be right: the next one counts
        if not self.starting and self.rtt:
            self._settle(now)

    def _robust_maximum(self) -> float:
        """The largest rate of the memory, without the top quarter: bursts behind a stall look too fast."""
        rates = sorted((r for _, r in self._rates), reverse=True)
        return rates[0 if self.starting else len(rates) // 4]

    def _settle(self, now: float) -> None:
        if self._probe_until and now >= self._probe_until:
            self._turn_period(now)
        elif not self._probe_until and now - self._period_at > self._period():
            self._probe_until = now + max(3 * self.rtt, 0.2)
        gain = 0.5 if self._probe_until else GAIN
        self.size = self._clamp(int(gain * self.bandwidth * (self.rtt + SERVICE_S)))

    def _period(self) -> float:
        return max(RTT_PERIOD_S, RTT_PERIOD_TRIPS * self.rtt)

    def _turn_period(self, now: float) -> None:
        self._probe_until, self._period_at = 0.0, now
        if self._rtt_now < inf:
            self._rtt_before, self._rtt_now = self._rtt_now, inf
            self.rtt = self._rtt_before

    def _clamp(self, size: int) -> int:
        return max(self._floor, min(self._ceiling, size))
