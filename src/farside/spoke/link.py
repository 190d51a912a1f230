"""The link as the spoke sees it: a pool of connections to one hub, a heartbeat, and one attached portal.

One *control* connection carries the attach, metadata, pushes and the heartbeat. A few *urgent* connections
carry demand reads alone, so that a demand never queues behind prefetched bytes inside a socket; the rest
carry everything else. While the heartbeat is acknowledged the lease is live and the namespace may be
trusted (volume lease, Yin et al. 1999); when it runs out the link is *away* and a reconnect loop runs until
the hub answers again.

All methods run in the loop thread. Every wait is bounded by the caller's timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from farside.errors import AuthError, FarsideError, HubUnreachable, ProtocolError
from farside.protocol import connection as wire
from farside.protocol.messages import (
    AnyMessage,
    Attach,
    Attached,
    Data,
    DirChange,
    FileRanges,
    GetXattrs,
    Goodbye,
    Hello,
    Invalidate,
    ListDir,
    ListDirReply,
    ListTree,
    Read,
    ReadDone,
    Stat,
    Statfs,
    StatfsReply,
    StatReply,
    TreeDone,
    TreePart,
    XattrsReply,
    pack_known,
)
from farside.protocol.retry import backoff

log = logging.getLogger("farside.spoke")

CONNECT_TIMEOUT = 4.0
CONNECT_TRIPS = 12
"""One attempt to connect may take so many seconds, or round trips where that is longer; short, so that a
healed link is found within seconds."""

MAX_BACKOFF = 2.0
BEAT_S = 2.0
"""Seconds between heartbeats, or a fifth of the lease where that is shorter."""

SILENT_S = 3.0
"""A hub that has not acknowledged a heartbeat for so long is on its way to be away."""

LAST_TRY_S = 1.0
"""What a request may still wait for a hub that has been silent for longer than the whole timeout."""

METADATA_TIMEOUT = 20.0
"""Longest silence, in seconds, of a metadata request on a live link."""


@dataclass
class LinkTotals:
    """Bytes over the link since the start; ``data`` counts payload of reads by reason."""

    received: int = 0
    sent: int = 0
    data: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("demand", "planned", "readahead", "fill"), 0)
    )
    reconnects: int = 0
    last_error: str = ""


class Link:
    """One hub, one portal.

    Attributes:
        up: the portal is attached and the lease is live.
        since: time.monotonic() of the last change of ``up``.
        attached: the hub's answer to the latest attach, or None before the first.
        totals: what crossed the link.

    ``on_attached(answer, lease_until)`` and ``on_renewed(lease_until)`` are called in the loop, times in
    monotonic seconds; ``on_away()`` when the link is lost; ``on_changes(seq, changes)`` for every push, to
    be answered by ``acknowledge``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        portal: str,
        *,
        hello: Hello,
        tls: ssl.SSLContext | None,
        connections: int = 16,
        congestion: str | None = None,
        on_attached: Callable[[Attached, float], None],
        on_renewed: Callable[[float], None],
        on_away: Callable[[], None],
        on_changes: Callable[[int, Sequence[DirChange]], None],
    ) -> None:
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.host, self.port, self.portal = host, port, portal
        self.hello, self.tls, self.congestion = hello, tls, congestion
        self.up = False
        self.since = time.monotonic()
        self.attached: Attached | None = None
        self.totals = LinkTotals()
        self._on_attached, self._on_renewed = on_attached, on_renewed
        self._on_away, self._on_changes = on_away, on_changes
        urgent = max(1, connections // 8) if connections > 1 else 0
        self._lane_sizes = {"urgent": urgent, "bulk": max(1, connections - urgent - 1)}
        self._control: wire.Connection | None = None
        self._lanes: dict[str, list[wire.Connection]] = {"urgent": [], "bulk": []}
        self._up_event = asyncio.Event()
        self._ack = 0
        self._heard = time.monotonic()
        self._slowest_trip = 0.0
        self._ping_now = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    # -- life ---------------------------------------------------------------------------------

    async def start(self, timeout: float) -> Attached:
        """Connect and attach once; afterwards the link keeps itself alive in the background.

        Raises:
            HubUnreachable, AuthError, VersionMismatch, ProtocolError, RemoteError: the first attach failed.
        """
        self._spawn(self._fill_lanes())
        attached = await self._open_control(timeout)
        self._spawn(self._keep_alive())
        return attached

    async def close(self) -> None:
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        connections = self._all()
        for conn in connections:
            self._forget(conn)
        await asyncio.gather(*(conn.close() for conn in connections), return_exceptions=True)
        self._set_up(False)

    async def wait_up(self, timeout: float) -> None:
        """Wait until the link is up.

        Raises:
            HubUnreachable: it was not within ``timeout`` seconds.
        """
        if self.up:
            return
        try:
            await asyncio.wait_for(self._up_event.wait(), max(0.0, timeout))
        except TimeoutError:
            raise self.unreachable() from None

    def patience(self, timeout: float) -> float:
        """Seconds that a request made now should wait for the hub, at most ``timeout``.

        Less while the hub is silent: the kernel retries a read that failed, page by page, and the sum of
        all tries should stay near ``timeout``.
        """
        silence = time.monotonic() - self._heard
        if silence < SILENT_S:
            return timeout
        return min(timeout, max(LAST_TRY_S, timeout - silence))

    def unreachable(self) -> HubUnreachable:
        since = time.monotonic() - self.since
        why = f": {self.totals.last_error}" if self.totals.last_error else ""
        return HubUnreachable(
            f"the hub has not answered for {since:.0f} s{why}",
            hub=self.address,
            hint="what is cached stays readable; the link heals by itself",
        )

    @property
    def rtt_s(self) -> float:
        rtts = [c.rtt_s for c in self._all() if c.rtt_s]
        return min(rtts) if rtts else 0.0

    @property
    def connections(self) -> int:
        return len(self._all())

    @property
    def received(self) -> int:
        return self.totals.received + sum(c.bytes_in for c in self._all())

    @property
    def sent(self) -> int:
        return self.totals.sent + sum(c.bytes_out for c in self._all())

    @property
    def inflight_bytes(self) -> int:
        return sum(c.expected_bytes for c in self._all())

    def acknowledge(self, seq: int) -> None:
        """Everything up to this Invalidate has been applied, in the kernel too; tell the hub at once."""
        if seq > self._ack:
            self._ack = seq
            self._ping_now.set()

    # -- metadata (the Remote of farside.spoke.namespace) -----------------------------------------

    async def list_dir(self, path: bytes, digest: bytes, after: bytes) -> tuple[ListDirReply, bytes]:
        reply = await self._call(ListDir(self.portal, path, digest, after))
        if not isinstance(reply.message, ListDirReply) or reply.message.path != path:
            raise self._nonsense(reply.message)
        return reply.message, bytes(reply.payload)

    async def stat(self, paths: Sequence[bytes]) -> list[tuple[int, bytes]]:
        reply = await self._call(Stat(self.portal, tuple(paths)))
        if not isinstance(reply.message, StatReply) or len(reply.message.results) != len(paths):
            raise self._nonsense(reply.message)
        return list(reply.message.results)

    async def list_tree(
        self, path: bytes, known: dict[bytes, bytes], limit: int
    ) -> AsyncIterator[tuple[TreePart | TreeDone, bytes]]:
        conn = self._pick("bulk")
        request = ListTree(self.portal, path, limit)
        async with conn.stream(request, pack_known(known), timeout=METADATA_TIMEOUT) as replies:
            async for reply in replies:
                if not isinstance(reply.message, TreePart | TreeDone):
                    raise self._nonsense(reply.message)
                yield reply.message, bytes(reply.payload)

    async def xattrs(self, paths: Sequence[bytes]) -> list[tuple[int, dict[bytes, bytes]]]:
        reply = await self._call(GetXattrs(self.portal, tuple(paths)))
        if not isinstance(reply.message, XattrsReply) or len(reply.message.results) != len(paths):
            raise self._nonsense(reply.message)
        return list(reply.message.results)

    async def statfs(self) -> StatfsReply:
        reply = await self._call(Statfs(self.portal))
        if not isinstance(reply.message, StatfsReply):
            raise self._nonsense(reply.message)
        return reply.message

    # -- content (the Source of farside.spoke.fetch) ----------------------------------------------

    async def read(
        self, files: tuple[FileRanges, ...], reason: str, *, urgent: bool, timeout_s: float
    ) -> AsyncIterator[tuple[Data, memoryview]]:
        """Ranges of files, as they arrive, in any order.

        Raises:
            HubUnreachable: the link is down, or nothing came for ``timeout_s`` seconds.
        """
        conn = self._pick("urgent" if urgent else "bulk")
        expect = sum(length for f in files for _, length in f.ranges)
        request = Read(self.portal, files, reason)
        async with conn.stream(request, timeout=timeout_s, expect=expect) as replies:
            async for reply in replies:
                if isinstance(reply.message, Data):
                    self.totals.data[reason] += len(reply.payload)
                    yield reply.message, memoryview(reply.payload)
                elif not isinstance(reply.message, ReadDone):
                    raise self._nonsense(reply.message)

    # -- inside -----------------------------------------------------------------------------------

    def _all(self) -> list[wire.Connection]:
        control = [self._control] if self._control is not None else []
        return control + self._lanes["urgent"] + self._lanes["bulk"]

    def _nonsense(self, message: object) -> ProtocolError:
        return ProtocolError(
            f"the hub answered with {type(message).__name__}, out of place", hub=self.address
        )

    async def _call(self, message: Any, payload: bytes = b"") -> wire.Reply:
        if not self.up or self._control is None:
            raise self.unreachable()
        if self._control.closed:
            self._ping_now.set()  # have it noticed now, not at the next heartbeat
            raise self.unreachable()
        return await self._control.call(message, payload, timeout=METADATA_TIMEOUT)

    def _pick(self, lane: str) -> wire.Connection:
        """The connection of a lane with the fewest bytes still to come. Urgent requests use idle ones of the
        other lane too when their own are busy."""
        if not self.up:
            raise self.unreachable()
        live = [c for c in self._lanes[lane] if not c.closed]
        if lane == "urgent" and all(c.expected_bytes for c in live):
            live += [c for c in self._lanes["bulk"] if not c.closed and not c.expected_bytes]
        if not live:  # they come up one by one behind the control connection
            live = [c for c in self._all() if not c.closed]
        if not live:
            raise self.unreachable()
        return min(live, key=lambda c: c.expected_bytes)

    def _spawn(self, coro: Any) -> None:
        task = asyncio.get_running_loop().create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _set_up(self, up: bool) -> None:
        if up == self.up:
            return
        self.up, self.since = up, time.monotonic()
        if up:
            self._up_event.set()
        else:
            self._up_event.clear()
            if not self._closing:
                self._on_away()

    def _forget(self, conn: wire.Connection) -> None:
        """Count a connection's bytes before it goes."""
        self.totals.received += conn.bytes_in
        self.totals.sent += conn.bytes_out
        if conn is self._control:
            self._control = None
        for lane in self._lanes.values():
            if conn in lane:
                lane.remove(conn)

    async def _connect(self, timeout: float, on_push: Any = None) -> wire.Connection:
        return await wire.connect(
            self.host,
            self.port,
            tls=self.tls,
            hello=self.hello,
            timeout=timeout,
            on_push=on_push,
            congestion=self.congestion,
        )

    async def _open_control(self, timeout: float) -> Attached:
        begun = time.monotonic()
        # A push may come in one packet with the answer, before that was looked at: it is handed on after it.
        early: list[AnyMessage] = []
        hand_on: Callable[[AnyMessage], None] = early.append
        conn = await self._connect(timeout, lambda message: hand_on(message))
        try:
            asked = time.monotonic()
            reply = await conn.call(Attach(self.portal), timeout=max(1.0, timeout - (asked - begun)))
            attached = reply.message
            if not isinstance(attached, Attached):
                raise self._nonsense(attached)
            if self.attached is not None and self.attached.portal_id != attached.portal_id:
                raise AuthError(
                    f"portal {self.portal} is now another directory than the one that was mounted",
                    hub=self.address,
                    hint="unmount and mount again to use the new one",
                )
        except BaseException:
            conn.abort(ProtocolError("attach failed", hub=self.address))
            raise
        self._control, self.attached = conn, attached
        self._ack = attached.seq
        self._heard = time.monotonic()
        self._on_attached(attached, asked + attached.lease_s)
        self.totals.last_error = ""
        self._set_up(True)
        hand_on = self._pushed
        for message in early:
            self._pushed(message)
        return attached

    def _pushed(self, message: AnyMessage) -> None:
        if isinstance(message, Invalidate) and message.portal == self.portal:
            self._on_changes(message.seq, message.changes)
        elif isinstance(message, Goodbye):
            self.totals.last_error = f"the hub closed the connection: {message.reason}"

    async def _keep_alive(self) -> None:
        """Heartbeat while up, reconnect while away, until closed."""
        delays = backoff(last=MAX_BACKOFF)
        while True:
            if self._control is not None:
                await self._beat(self._control)
                delays = backoff(last=MAX_BACKOFF)
                self._drop_all()
            try:
                await self._open_control(self._connect_timeout)
                self.totals.reconnects += 1
            except (FarsideError, OSError) as e:
                self.totals.last_error = e.message if isinstance(e, FarsideError) else str(e)
                await asyncio.sleep(next(delays))
            except Exception as e:  # a bug; without this task the mount would be away for ever
                log.exception("an attach failed")
                self.totals.last_error = repr(e)
                self._drop_all()
                await asyncio.sleep(next(delays))

    def _drop_all(self) -> None:
        gone = HubUnreachable("the link is away", hub=self.address)
        for conn in self._all():
            self._forget(conn)
            conn.abort(gone)
        self._set_up(False)

    async def _beat(self, control: wire.Connection) -> None:
        """Ping until the control connection dies or the lease runs out unacknowledged."""
        assert self.attached is not None
        lease = self.attached.lease_s
        every = min(BEAT_S, lease / 5)
        pinger: asyncio.Task[float] | None = None
        renewed = time.monotonic()  # when the ping that was last acknowledged had been sent
        sent = renewed
        try:
            while not control.closed:
                if pinger is None:
                    sent = time.monotonic()
                    self._ping_now.clear()
                    pinger = asyncio.create_task(control.ping(self._ack, timeout=lease))
                await asyncio.wait({pinger}, timeout=every)
                if pinger.done():
                    if pinger.exception() is not None:
                        self.totals.last_error = str(pinger.exception())
                        return
                    self._slowest_trip = max(self._slowest_trip, pinger.result())
                    renewed, pinger = sent, None
                    self._heard = time.monotonic()
                    self._on_renewed(sent + lease)
                    rest = sent + every - time.monotonic()
                    if rest > 0 and not self._ping_now.is_set():
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(self._ping_now.wait(), rest)
                elif time.monotonic() - renewed > lease / 2:
                    # Half a lease of silence: the path is dead. What is cached goes on being served.
                    self.totals.last_error = f"no answer for {time.monotonic() - renewed:.0f} s"
                    return
            self.totals.last_error = str(control.close_reason or "connection closed")
        finally:
            if pinger is not None:
                pinger.cancel()
                await asyncio.gather(pinger, return_exceptions=True)

    @property
    def _connect_timeout(self) -> float:
        return max(CONNECT_TIMEOUT, CONNECT_TRIPS * self._slowest_trip)

    async def _widen(self, lane: str) -> None:
        """One more connection in a lane, known at once: whoever drops all must find it."""
        self._lanes[lane].append(await self._connect(self._connect_timeout))

    async def _fill_lanes(self) -> None:
        """Keep each lane at its size, all connections at once; those that die are replaced.

        It begins together with the first control connection: on a long path it takes four round trips until a
        connection can be used.
        """
        delays = backoff(last=MAX_BACKOFF)
        while True:
            for lane in self._lanes.values():
                for conn in [c for c in lane if c.closed]:
                    self._forget(conn)
            missing = [n for n, size in self._lane_sizes.items() for _ in range(size - len(self._lanes[n]))]
            if not missing:
                await asyncio.sleep(0.5)
                continue
            made = await asyncio.gather(*map(self._widen, missing), return_exceptions=True)
            for error in made:
                if error is not None and not isinstance(error, FarsideError | OSError):
                    log.error("a connection could not be added", exc_info=error)
            if any(made):
                await asyncio.sleep(next(delays))
            else:
                delays = backoff(last=MAX_BACKOFF)
            await self._up_event.wait()
