"""Answers the requests of admitted spokes: attach, metadata, content, heartbeats."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

from farside.errors import FarsideError
from farside.hub.content import ContentReader, Part, check_read
from farside.hub.export import Export
from farside.hub.leases import Lease
from farside.hub.session import Counters, Session
from farside.hub.tree import TreePartOut
from farside.protocol.messages import (
    AnyMessage,
    Attach,
    Attached,
    DirChange,
    Failure,
    GetXattrs,
    Invalidate,
    ListDir,
    ListDirReply,
    ListTree,
    Ping,
    Pong,
    Read,
    ReadDone,
    Stat,
    Statfs,
    StatfsReply,
    StatReply,
    TreeDone,
    TreePart,
    XattrsReply,
    unpack_known,
)
from farside.protocol.server import Responder, ServerConnection

METADATA_THREADS, WALK_THREADS, DEMAND_THREADS, BULK_THREADS = 3, 2, 4, 4

STOP_S = 2.0

MAX_PATHS = 20_000
"""Paths in one Stat or GetXattrs."""

MAX_REPLY = 12 * 1024 * 1024
"""Bytes of values in one StatReply or XattrsReply."""

MAX_PAGE = 50_000
"""Entries in one page of a listing."""

T = TypeVar("T")


class _NoPortal(Exception):
    """There is no such portal, or not for this spoke: it cannot tell which."""


class Requests:
    """The requests of all connections.

    Args:
        exports: the portals by name.
        counters: where work is counted.
        insecure: every portal is open to everybody.
        lease_s: how long a heartbeat is good for, seconds.
    """

    def __init__(
        self, exports: Mapping[str, Export], counters: Counters, *, insecure: bool, lease_s: float
    ) -> None:
        self._exports = exports
        self._counters = counters
        self._insecure = insecure
        self._lease_s = lease_s
        self.metadata = ThreadPoolExecutor(METADATA_THREADS, "farside-metadata")
        self._walks = ThreadPoolExecutor(WALK_THREADS, "farside-walk")
        self._demand = ThreadPoolExecutor(DEMAND_THREADS, "farside-demand")
        self._bulk = ThreadPoolExecutor(BULK_THREADS, "farside-bulk")

    async def stop(self) -> bool:
        """Waits for the threads, STOP_S at most; False when one hangs (on a dead disk, say)."""
        pools = (self.metadata, self._walks, self._demand, self._bulk)
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        waiting = asyncio.gather(*(asyncio.to_thread(pool.shutdown, True) for pool in pools))
        try:
            await asyncio.wait_for(waiting, STOP_S)
        except TimeoutError:
            return False
        return True

    async def handle(
        self, conn: ServerConnection, message: AnyMessage, payload: bytes | bytearray, respond: Responder
    ) -> None:
        """Answers one request.

        Raises:
            FarsideError, OSError: the request cannot be served.
        """
        if isinstance(message, Ping):
            await self._ping(conn, message, respond)
            return
        try:
            if isinstance(message, Read):
                await self._read(conn, message, respond)
                return
            await self._metadata_request(conn, message, payload, respond)
        except _NoPortal as error:
            text = (
                f"the hub has no portal {error.args[0]!r} for this spoke; see the name given to "
                "`farside hub serve --portal`, or ask for an invite to it"
            )
            await respond.finish(Failure(errno.ENODEV, "no_portal", text))
        self._counters.metadata_bytes += respond.sent

    async def _metadata_request(
        self, conn: ServerConnection, message: AnyMessage, payload: bytes | bytearray, respond: Responder
    ) -> None:
        match message:
            case Attach():
                await self._attach(conn, message, respond)
            case Stat():
                await self._stat(conn, message, respond)
            case ListDir():
                await self._list_dir(conn, message, respond)
            case ListTree():
                await self._list_tree(conn, message, payload, respond)
            case GetXattrs():
                await self._xattrs(conn, message, respond)
            case Statfs():
                await self._statfs(conn, message, respond)
            case _:
                what = type(message).__name__
                await respond.finish(Failure(errno.EPROTO, "bad_request", f"a hub does not answer {what}"))

    async def _in(self, pool: Executor, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *args)

    def _export(self, conn: ServerConnection, portal: str) -> Export:
        """The portal, if this spoke may see it. One that it may not see is like one that is not there."""
        export = self._exports.get(portal)
        session: Session = conn.state
        spoke = session.spoke
        allowed = self._insecure or (spoke is not None and portal in spoke.rights)
        if export is None or not allowed:
            raise _NoPortal(portal)
        return export

    async def _ping(self, conn: ServerConnection, message: Ping, respond: Responder) -> None:
        lease: Lease | None = conn.state.lease
        if lease is None:
            await respond.finish(Pong(message.sent_ns))
            return
        # What was held back goes out before the Pong that renews the lease.
        self._push(conn, *lease.heartbeat(message.ack, time.monotonic()))
        await respond.finish(Pong(message.sent_ns, lease.seq))

    def _push(self, conn: ServerConnection, *messages: Invalidate | None) -> None:
        for message in messages:
            if message is not None:
                self._counters.invalidations += 1
                conn.push(message)

    def tell(self, conns: Iterable[ServerConnection], portal: str, changes: Sequence[DirChange]) -> None:
        """Something changed: tells every connection that attached the portal."""
        now = time.monotonic()
        for conn in conns:
            lease: Lease | None = conn.state.lease
            if lease is not None:
                self._push(conn, lease.change(portal, changes, now))

    async def _attach(self, conn: ServerConnection, message: Attach, respond: Responder) -> None:
        export = self._export(conn, message.portal)
        session: Session = conn.state
        lease = session.lease
        if lease is None:
            lease = session.lease = Lease(self._lease_s, time.monotonic())
        # Changes are noted from here on, before the root is looked at, and told after the answer.
        lease.attach(message.portal)
        root = await self._in(self.metadata, export.tree.root)
        await respond.finish(
            Attached(
                portal=message.portal,
                portal_id=export.portal_id,
                writable=export.portal.writable and self._may_write(session, message.portal),
                root=root,
                lease_s=self._lease_s,
                seq=lease.seq,
                watched=export.watch.available,
            )
        )
        self._push(conn, lease.opened(message.portal, time.monotonic()))

    def _may_write(self, session: Session, portal: str) -> bool:
        return self._insecure or (session.spoke is not None and session.spoke.rights.get(portal, False))

    async def _stat(self, conn: ServerConnection, message: Stat, respond: Responder) -> None:
        export = self._export(conn, message.portal)
        _limit_paths(message.paths)
        results = await self._in(self.metadata, export.tree.stat, message.paths)
        if sum(len(value) for _, value in results) > MAX_REPLY:
            raise FarsideError("the answer would be too large; ask for fewer paths", errno=errno.E2BIG)
        await respond.finish(StatReply(tuple(results)))

    async def _list_dir(self, conn: ServerConnection, message: ListDir, respond: Responder) -> None:
        export = self._export(conn, message.portal)
        limit = min(max(1, message.limit), MAX_PAGE)
        page = await self._in(
            self.metadata, export.tree.page, message.path, message.digest, message.after, limit
        )
        reply = ListDirReply(message.path, page.value, page.digest, page.same, page.more, page.watched)
        await respond.finish(reply, page.data)

    async def _list_tree(
        self, conn: ServerConnection, message: ListTree, payload: bytes | bytearray, respond: Responder
    ) -> None:
        export = self._export(conn, message.portal)
        known = await self._in(self._walks, unpack_known, payload)
        walk = export.tree.walk(message.path, message.limit, known)
        parts = walk.parts()

        def next_part() -> TreePartOut | None:
            return next(parts, None)

        async def send(part: TreePartOut) -> None:
            await respond.part(TreePart(part.dirs), part.buffers)

        await _stream(self._walks, next_part, send, parts.close)
        await respond.finish(TreeDone(walk.dirs, walk.entries, walk.truncated))

    async def _xattrs(self, conn: ServerConnection, message: GetXattrs, respond: Responder) -> None:
        export = self._export(conn, message.portal)
        _limit_paths(message.paths)

        def collect() -> list[tuple[int, dict[bytes, bytes]]]:
            results: list[tuple[int, dict[bytes, bytes]]] = []
            room = MAX_REPLY
            for path in message.paths:
                try:
                    found = export.tree.xattrs(path)
                except OSError as error:
                    results.append((error.errno or errno.EIO, {}))
                    continue
                size = sum(len(name) + len(value) for name, value in found.items())
                if size > room:
                    results.append((errno.E2BIG, {}))
                    continue
                room -= size
                results.append((0, found))
            return results

        await respond.finish(XattrsReply(tuple(await self._in(self.metadata, collect))))

    async def _statfs(self, conn: ServerConnection, message: Statfs, respond: Responder) -> None:
        export = self._export(conn, message.portal)
        s = await self._in(self.metadata, os.fstatvfs, export.portal.fd)
        await respond.finish(
            StatfsReply(
                s.f_bsize, s.f_frsize, s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_namemax
            )
        )

    async def _read(self, conn: ServerConnection, message: Read, respond: Responder) -> None:
        export = self._export(conn, message.portal)
        if message.reason not in self._counters.bytes_by_reason:
            raise FarsideError(f"a read cannot be made for {message.reason!r}", errno=errno.EINVAL)
        check_read(message.files)
        reader = ContentReader(export.portal, export.versions, export.tree, message.files)

        async def send(part: Part) -> None:
            await respond.part(part.message, part.buffers)
            self._counters.bytes_by_reason[message.reason] += part.size

        if message.reason == "demand":
            await _stream(self._demand, reader.next_part, send, reader.close)
        else:
            session: Session = conn.state
            async with session.bulk:
                await _stream(self._bulk, reader.next_part, send, reader.close)
        self._counters.stale_refusals += reader.stale
        await respond.finish(ReadDone(reader.bytes))


async def _stream(
    pool: ThreadPoolExecutor,
    produce: Callable[[], T | None],
    send: Callable[[T], Awaitable[None]],
    close: Callable[[], None],
) -> None:
    """Sends what ``produce`` makes until it makes None; the next is made while one is being sent.

    ``close`` is called at the end, when no thread is inside ``produce`` any more.
    """
    ahead = pool.submit(produce)
    try:
        while True:
            part = await asyncio.wrap_future(ahead)
            if part is None:
                return
            ahead = pool.submit(produce)
            await send(part)
    finally:
        ahead.cancel()
        ahead.add_done_callback(lambda _: close())


def _limit_paths(paths: Sequence[bytes]) -> None:
    if len(paths) > MAX_PATHS:
        raise FarsideError(f"more than {MAX_PATHS} paths at once", errno=errno.E2BIG)
