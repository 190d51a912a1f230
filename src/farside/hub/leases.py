"""What one spoke has been told and has acknowledged. Pure: no I/O, no clock of its own.

Each connection that attached portals has one lease. It is live while heartbeats come; every Invalidate gets
the next sequence number of the connection and is acknowledged by a later heartbeat. A spoke that does
not keep up is not sent more and more: what it still has to be told is merged until it acknowledges.
"""

from __future__ import annotations

from collections.abc import Iterable

from farside.protocol.messages import DirChange, Invalidate

MAX_UNACKNOWLEDGED = 64
"""Invalidates on the way to one spoke; further changes are merged and held back."""

MAX_HELD_NAMES = 20_000
"""Names held back for one portal; beyond it the spoke is told to distrust the whole tree."""


class Backlog:
    """Changes of one portal that wait to be told, merged as they come."""

    def __init__(self) -> None:
        self._names: dict[bytes, set[bytes]] = {}
        self._whole: set[bytes] = set()
        self._trees: set[bytes] = set()
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._names or self._whole or self._trees)

    def add(self, changes: Iterable[DirChange]) -> None:
        for change in changes:
            if change.tree:
                self._trees.add(change.path)
                self._count += 1
            elif not change.names:
                self._whole.add(change.path)
                self._count += 1
            elif change.path not in self._whole:
                names = self._names.setdefault(change.path, set())
                before = len(names)
                names.update(change.names)
                self._count += len(names) - before
        if self._count > MAX_HELD_NAMES:
            self._clear()
            self._trees.add(b"")
            self._count = 1

    def take(self) -> tuple[DirChange, ...]:
        """All of it; the backlog is empty afterwards."""
        changes = [DirChange(path, (), True) for path in sorted(self._trees)]
        changes += [DirChange(path) for path in sorted(self._whole - self._trees)]
        for path, names in self._names.items():
            if path not in self._whole and path not in self._trees:
                changes.append(DirChange(path, tuple(sorted(names))))
        self._clear()
        return tuple(changes)

    def _clear(self) -> None:
        self._names, self._whole, self._trees, self._count = {}, set(), set(), 0


class Lease:
    """The lease of one connection, over all portals that it attached.

    Args:
        lease_s: how long a heartbeat is good for, seconds.
        now: the time in seconds, of the same clock as in every later call.

    Attributes:
        seq: of the last Invalidate sent; ``acknowledged``: of the last that the spoke has applied.
        heard: when the last heartbeat came.
    """

    def __init__(self, lease_s: float, now: float) -> None:
        self.lease_s = lease_s
        self.heard = now
        self.seq = 0
        self.acknowledged = 0
        self._sent: dict[int, float] = {}  # when the unacknowledged were sent, oldest first
        self._held: dict[str, Backlog] = {}
        self._opening: set[str] = set()

    def attach(self, portal: str) -> None:
        """Changes of this portal are noted from here on, and told from ``opened`` on."""
        if portal not in self._held:
            self._held[portal] = Backlog()
            self._opening.add(portal)

    def opened(self, portal: str, now: float) -> Invalidate | None:
        """The spoke has its answer to Attach: what to push at once."""
        self._opening.discard(portal)
        return self._release(portal, self._held[portal], now)

    @property
    def portals(self) -> tuple[str, ...]:
        return tuple(self._held)

    def change(self, portal: str, changes: Iterable[DirChange], now: float) -> Invalidate | None:
        """Something changed: what to push now; None when not attached, or the spoke is too far behind."""
        held = self._held.get(portal)
        if held is None:
            return None
        held.add(changes)
        return self._release(portal, held, now)

    def heartbeat(self, ack: int, now: float) -> list[Invalidate]:
        """A heartbeat came: what may now be pushed. An ``ack`` from the future is taken as the last sent."""
        self.heard = now
        self.acknowledged = max(self.acknowledged, min(ack, self.seq))
        for seq in [s for s in self._sent if s <= self.acknowledged]:
            del self._sent[seq]
        released = (self._release(portal, held, now) for portal, held in self._held.items())
        return [message for message in released if message is not None]

    def live(self, now: float) -> bool:
        """Whether the spoke may still trust what it was told."""
        return now - self.heard < self.lease_s

    def covers(self, seq: int, now: float) -> bool:
        """Whether the change with this number can be relied on: acknowledged, or the lease has run out."""
        return self.acknowledged >= seq or not self.live(now)

    def overdue_s(self, now: float) -> float:
        """For how long the oldest Invalidate has been waiting to be acknowledged, seconds."""
        return now - next(iter(self._sent.values())) if self._sent else 0.0

    def _release(self, portal: str, held: Backlog, now: float) -> Invalidate | None:
        if not held or portal in self._opening or len(self._sent) >= MAX_UNACKNOWLEDGED:
            return None
        self.seq += 1
        self._sent[self.seq] = now
        return Invalidate(portal, self.seq, held.take())
