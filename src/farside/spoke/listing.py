"""Listing one directory at the hub: all its pages, once for all who wait for it."""

from __future__ import annotations

import asyncio

from farside.errors import ProtocolError, RemoteError
from farside.protocol.attributes import VALUE_MIN, digest_of
from farside.protocol.messages import ListDirReply
from farside.spoke.asker import GONE, Remote
from farside.spoke.changes import Ask
from farside.spoke.directory import Directory, count_listing
from farside.spoke.knowledge import Knowledge


class Listing:
    """One directory being listed. ``large`` is done when its first page came and there are more."""

    __slots__ = ("large", "task")

    def __init__(self, task: asyncio.Task[Directory], large: asyncio.Future[None]) -> None:
        self.task = task
        self.large = large


class Lister:
    """Lists directories, each at most once at a time."""

    def __init__(self, remote: Remote, known: Knowledge) -> None:
        self._remote = remote
        self._known = known
        self._running: dict[bytes, Listing] = {}
        self.pages = 0

    def list(self, path: bytes) -> Listing:
        """Starts, or joins, the listing of ``path``. The task is shared: wait for it, never cancel it.

        It raises what the link raises; RemoteError with ENOENT or ENOTDIR when the directory is gone.
        """
        listing = self._running.get(path)
        if listing is None:
            loop = asyncio.get_running_loop()
            large: asyncio.Future[None] = loop.create_future()
            listing = Listing(loop.create_task(self._list(path, large)), large)
            self._running[path] = listing
            listing.task.add_done_callback(lambda task: self._finished(path, task))
        return listing

    def close(self) -> None:
        for listing in self._running.values():
            listing.task.cancel()

    def _finished(self, path: bytes, task: asyncio.Task[Directory]) -> None:
        listing = self._running.pop(path)
        listing.large.cancel()
        if not task.cancelled():
            task.exception()  # nobody may be waiting any more

    async def _list(self, path: bytes, large: asyncio.Future[None]) -> Directory:
        node = await self._known.table.load(path)
        digest = b"" if node is None else node.digest
        log = self._known.log
        ask = log.begin()
        try:
            reply, payload = await self._page(path, digest, b"")
            if reply.same:
                if not digest:
                    raise ProtocolError("the hub confirmed a listing that was not offered", path=path)
                if node is not None and node.digest == digest and self._known.table.dirs.get(path) is node:
                    self._known.confirm(node, ask, reply.value, reply.watched)
                    return node
                # It was changed or dropped while the hub compared: take the listing itself.
                log.end(ask)
                ask = log.begin()
                reply, payload = await self._page(path, b"", b"")
            return await self._gather(path, reply, payload, ask, large)
        except RemoteError as error:
            if error.errno in GONE and not log.outdated(ask, path):
                self._known.gone(path)
            raise
        finally:
            log.end(ask)

    async def _gather(
        self, path: bytes, reply: ListDirReply, payload: bytes, ask: Ask, large: asyncio.Future[None]
    ) -> Directory:
        first, parts, total, last = reply, [], 0, b""
        while True:
            try:
                count, last = count_listing(payload, last)
            except ValueError as error:
                raise ProtocolError(f"a listing from the hub is wrong: {error}", path=path) from error
            parts.append(payload)
            total += count
            if not reply.more:
                break
            if not count:
                raise ProtocolError("the hub sent an empty page and says that there is more", path=path)
            if not large.done():
                large.set_result(None)
            reply, payload = await self._page(path, b"", last)
        whole = parts[0] if len(parts) == 1 else b"".join(parts)
        digest = digest_of(whole)
        if len(parts) == 1 and reply.digest and reply.digest != digest:
            raise ProtocolError("a listing does not match its digest", path=path, retry=True)
        watched = first.watched and reply.watched
        node = Directory(path, reply.value, whole, total, digest, watched=watched)
        return self._known.apply_listing(node, ask)

    async def _page(self, path: bytes, digest: bytes, after: bytes) -> tuple[ListDirReply, bytes]:
        self.pages += 1
        reply, payload = await self._remote.list_dir(path, digest, after)
        if reply.path != path or len(reply.value) < VALUE_MIN or (reply.same and after):
            raise ProtocolError("the hub's answer to ListDir does not fit the question", path=path)
        return reply, bytes(payload)
