"""The hub: listens, admits spokes, answers their requests and pushes what changes."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import ssl
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes, serialization

import farside
from farside.errors import AuthError, HubUnreachable, UsageError
from farside.hub.export import Export
from farside.hub.leases import Lease
from farside.hub.portal import PortalSpec
from farside.hub.requests import Requests
from farside.hub.session import Counters, Session
from farside.hub.state import HubState, Spoke
from farside.hub.sweep import SWEEP_S
from farside.memory import keep_freed_memory
from farside.protocol.messages import AnyMessage, DirChange, Hello, Join, Joined, Welcome
from farside.protocol.server import Responder, Server, ServerConnection, serve
from farside.protocol.sockets import choose_congestion
from farside.protocol.tls import CertificateAuthority, hub_context

log = logging.getLogger(__name__)

POLL_S = 0.5
"""How often the state is looked at for revocations by the command line, and leases for spokes that died."""

SEEN_S = 60.0
"""How often it is noted down that a connected spoke is alive."""


class Hub:
    """Serves portals to spokes.

    Args:
        state_dir: made by ``state.init``; None keeps nothing between runs (then ``insecure`` only).
        insecure: no TLS, every portal open to everybody who can connect. For loopback.
        lease_s: how long a spoke may trust what it was told without a heartbeat, seconds.
        name: the hub's name; by default the one of its certificate authority, or of the machine.
        max_watches: limit of watched directories for each portal, besides the kernel's.
        sweep_s: seconds within which changes are found of which no event tells.

    Raises:
        UsageError: no portal, two of one name, or neither a state directory nor ``insecure``.
    """

    def __init__(
        self,
        state_dir: Path | None,
        portals: Sequence[PortalSpec],
        *,
        insecure: bool = False,
        lease_s: float = 10.0,
        name: str | None = None,
        max_watches: int | None = None,
        sweep_s: float = SWEEP_S,
        congestion: str = "auto",
    ) -> None:
        if not portals:
            raise UsageError("there is no portal to serve", hint="give at least one: --portal NAME=DIR")
        for number, spec in enumerate(portals):
            if not spec.name or "/" in spec.name:
                raise UsageError(f"{spec.name!r} cannot name a portal", hint="use a name without '/'")
            if any(other.name == spec.name for other in portals[:number]):
                raise UsageError(f"portal {spec.name!r} is given twice", hint="give each portal its own name")
        if state_dir is None and not insecure:
            raise UsageError("a hub needs a state directory", hint="run `farside hub init`")
        self._state_dir = state_dir
        self._specs = tuple(portals)
        self._insecure = insecure
        self._lease_s = lease_s
        self._name = name
        self._max_watches = max_watches
        self._sweep_s = sweep_s
        self._congestion = choose_congestion(congestion)
        self._state: HubState | None = None
        self._authority: CertificateAuthority | None = None
        self._spokes: dict[str, Spoke] = {}
        self._exports: dict[str, Export] = {}
        self._connections: set[ServerConnection] = set()
        self._server: Server | None = None
        # One thread for the state: waiting for its lock or disk must stop neither the loop nor requests.
        self._records = ThreadPoolExecutor(1, "farside-state")
        self._mark = 0
        self._keeper: asyncio.Task[None] | None = None
        self._started = time.time()
        self.counters = Counters()
        self._requests = Requests(self._exports, self.counters, insecure=insecure, lease_s=lease_s)

    # -- life -------------------------------------------------------------------------------------

    async def start(self, host: str | None, port: int) -> int:
        """Opens the portals and listens; returns the port.

        Raises:
            UsageError: a portal's root cannot be served.
            AuthError: the state directory has no certificate authority.
            FarsideError: the state or the address cannot be used.
        """
        keep_freed_memory()
        try:
            self._open_state()
            for spec in self._specs:
                export = self._exports[spec.name] = Export(
                    spec,
                    self._opened_state,
                    self._requests.metadata,
                    self._tell,
                    max_watches=self._max_watches,
                    sweep_s=self._sweep_s,
                )
                export.start()
            tls: ssl.SSLContext | None = None
            if not self._insecure:
                assert self._state_dir is not None
                tls = hub_context(self._state_dir)
            self._server = await serve(host, port, tls=tls, handler=self, congestion=self._congestion)
        except BaseException:
            await self.stop()
            raise
        self._keeper = asyncio.get_running_loop().create_task(self._keep())
        return self._server.port

    def _open_state(self) -> None:
        if not self._insecure:
            assert self._state_dir is not None
            self._authority = CertificateAuthority.load(self._state_dir)
        self._state = HubState(self._state_dir)
        self._mark = self._state.foreign_changes()
        self._spokes = _by_fingerprint(self._state.spokes())
        if self._name is None:
            self._name = self._authority.hub_name if self._authority is not None else os.uname().nodename

    @property
    def _opened_state(self) -> HubState:
        assert self._state is not None
        return self._state

    async def stop(self) -> None:
        """Says goodbye to the spokes and closes everything."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        if self._server is not None:
            await self._server.close()
            self._server = None
        idle = await self._requests.stop()
        for export in self._exports.values():
            await export.stop(idle)
        self._exports.clear()
        self._records.shutdown(wait=True, cancel_futures=True)
        if self._state is not None:
            self._state.close()
            self._state = None

    def status(self) -> dict[str, Any]:
        """What ``farside hub`` and its metrics show, as JSON can hold it."""
        now = time.monotonic()
        spokes = []
        for conn in self._connections:
            session: Session = conn.state
            lease = session.lease
            spokes.append(
                {
                    "name": conn.peer_name or (conn.peer.name if conn.peer else ""),
                    "address": conn.address,
                    "portals": list(lease.portals) if lease else [],
                    "heard_s": round(now - lease.heard, 3) if lease else None,
                    "live": lease.live(now) if lease else None,
                    "unacknowledged": lease.seq - lease.acknowledged if lease else 0,
                    "bytes_in": conn.bytes_in,
                    "bytes_out": conn.bytes_out,
                }
            )
        return {
            "name": self._name,
            "version": farside.__version__,
            "pid": os.getpid(),
            "uptime_s": round(time.time() - self._started, 3),
            "port": self._server.port if self._server is not None else None,
            "insecure": self._insecure,
            "lease_s": self._lease_s,
            "portals": [export.status() for export in self._exports.values()],
            "connections": spokes,
            "requests": dict(self.counters.requests),
            "bytes": {**self.counters.bytes_by_reason, "metadata": self.counters.metadata_bytes},
            "stale_refusals": self.counters.stale_refusals,
            "invalidations": self.counters.invalidations,
            "joined": self.counters.joined,
            "refused": self.counters.refused,
        }

    # -- spokes -----------------------------------------------------------------------------------

    async def hello(self, conn: ServerConnection, hello: Hello) -> Welcome:
        """Raises AuthError for a certificate that is revoked, or that this hub never gave out."""
        spoke: Spoke | None = None
        if conn.peer_fingerprint is not None:
            spoke = self._spokes.get(conn.peer_fingerprint)
            if spoke is None or spoke.revoked is not None:
                self.counters.refused += 1
                log.warning("refused spoke %s from %s", conn.peer_name, conn.address)
                raise _shut_out(conn.peer_name, revoked=spoke is not None)
        conn.state = Session(spoke)
        self._connections.add(conn)
        return Welcome(
            protocol=0,
            software=f"farside {farside.__version__}",
            name=self._name or "",
            clock_ns=time.time_ns(),
            ca_pem=self._authority.pem if self._authority is not None else b"",
        )

    def closed(self, conn: ServerConnection) -> None:
        self._connections.discard(conn)

    async def _keep(self) -> None:
        """Revocations by the command line take effect; spokes that died are let go."""
        state = self._opened_state
        loop = asyncio.get_running_loop()
        seen = 0.0
        while True:
            await asyncio.sleep(POLL_S)
            self._end_silent(time.monotonic())
            try:
                mark = await loop.run_in_executor(self._records, state.foreign_changes)
                if mark != self._mark:
                    self._mark = mark
                    self._spokes = _by_fingerprint(await loop.run_in_executor(self._records, state.spokes))
                    self._end_revoked()
                if time.monotonic() - seen > SEEN_S:
                    seen = time.monotonic()
                    here = {conn.peer_fingerprint for conn in self._connections if conn.peer_fingerprint}
                    if here:
                        await loop.run_in_executor(self._records, state.seen, here)
            except Exception:
                log.exception("the hub's state could not be read; trying again")

    def _end_revoked(self) -> None:
        for conn in list(self._connections):
            if conn.peer_fingerprint is None:
                continue
            spoke = self._spokes.get(conn.peer_fingerprint)
            if spoke is None or spoke.revoked is not None:
                log.warning("spoke %s is revoked; its connection from %s ends", conn.peer_name, conn.address)
                conn.abort(_shut_out(conn.peer_name, revoked=True))
            else:
                conn.state.spoke = spoke

    def _end_silent(self, now: float) -> None:
        for conn in list(self._connections):
            lease: Lease | None = conn.state.lease
            if lease is None:
                continue
            if now - lease.heard > 3 * self._lease_s:
                conn.abort(HubUnreachable("no heartbeat came for three leases"))
            elif lease.overdue_s(now) > 3 * self._lease_s:
                # It beats but does not apply what it is told: attached anew, it rechecks everything.
                conn.abort(HubUnreachable("invalidations were not acknowledged for three leases"))

    def _tell(self, portal: str, changes: list[DirChange]) -> None:
        """Something changed: tells every spoke that attached the portal."""
        self._requests.tell(list(self._connections), portal, changes)

    # -- requests ---------------------------------------------------------------------------------

    async def handle(
        self, conn: ServerConnection, message: AnyMessage, payload: bytes | bytearray, respond: Responder
    ) -> None:
        name = type(message).__name__
        self.counters.requests[name] = self.counters.requests.get(name, 0) + 1
        if isinstance(message, Join):
            await self._join(conn, message, respond)
        else:
            await self._requests.handle(conn, message, payload, respond)

    async def _join(self, conn: ServerConnection, message: Join, respond: Responder) -> None:
        authority = self._authority
        if authority is None:
            raise AuthError("this hub is served without TLS: there is nothing to join", errno=errno.EPROTO)
        session: Session = conn.state
        rights = dict(session.spoke.rights) if session.spoke is not None else {}
        pem = b""

        def issue() -> tuple[str, int, str]:
            nonlocal pem
            certificate = authority.sign_spoke(message.csr, message.name)
            pem = certificate.public_bytes(serialization.Encoding.PEM)
            return message.name, certificate.serial_number, certificate.fingerprint(hashes.SHA256()).hex()

        loop = asyncio.get_running_loop()
        join = self._opened_state.join
        try:
            spoke = await loop.run_in_executor(self._records, join, message.secret, rights, issue)
        except AuthError as error:
            self.counters.refused += 1
            log.warning("spoke %r from %s may not join: %s", message.name, conn.address, error.message)
            raise
        self._spokes[spoke.fingerprint] = spoke
        self.counters.joined += 1
        log.info("spoke %s joined from %s", spoke.name, conn.address)
        await respond.finish(Joined(pem, authority.pem, spoke.name, spoke.portals))


def _by_fingerprint(spokes: list[Spoke]) -> dict[str, Spoke]:
    return {spoke.fingerprint: spoke for spoke in spokes}


def _shut_out(name: str | None, *, revoked: bool) -> AuthError:
    if revoked:
        return AuthError(f"spoke {name!r} was revoked at the hub", hint="join again with a new token")
    return AuthError(f"the hub does not know spoke {name!r}", hint="join again with a new token")
