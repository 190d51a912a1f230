"""Parts of a hub put together for tests, without a network."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from farside.hub import Hub, PortalSpec
from farside.hub.content import ContentReader
from farside.hub.portal import Portal
from farside.hub.seek import Seek
from farside.hub.tree import Tree
from farside.hub.versions import Versions
from farside.hub.watch import Watch
from farside.protocol.attributes import Attr, attr_of, iter_listing
from farside.protocol.connection import Connection, connect
from farside.protocol.messages import CHUNK, Attach, Attached, Data, DirChange, FileRanges, Hello, Invalidate

HELLO = Hello(1, 1, "test", "spoke")


class Unwatched:
    """A watcher for tests of listings alone; remembers what it was asked."""

    def __init__(self) -> None:
        self.paths: list[bytes] = []
        self.links: list[tuple[bytes, bytes]] = []

    def watch(self, path: bytes, fd: int) -> bool:
        self.paths.append(path)
        return True

    def linked(self, directory: bytes, name: bytes, info: os.stat_result) -> bool:
        self.links.append((directory, name))
        return False


class Exported:
    """A portal with its versions and tree."""

    def __init__(self, root: Path, **versions: Any) -> None:
        self.root = root
        self.portal = Portal("p", root)
        self.raised: list[tuple[int, int, int]] = []
        self.versions = Versions(self.portal.device, {}, lambda *row: self.raised.append(row), **versions)
        self.watcher = Unwatched()
        self.tree = Tree(self.portal, self.versions, self.watcher)

    def attr(self, path: bytes) -> Attr:
        return attr_of(self.tree.value(path))

    def ranges(self, path: bytes, *ranges: tuple[int, int]) -> FileRanges:
        """A request for these ranges, or the whole file, of the version that holds now."""
        attr = self.attr(path)
        return FileRanges(path, attr.version, ranges or ((0, attr.size),))

    def read(
        self, *files: FileRanges, reader: type[ContentReader] = ContentReader
    ) -> list[tuple[Data, bytes]]:
        content = reader(self.portal, self.versions, self.tree, files)
        parts = []
        while (part := content.next_part()) is not None:
            parts.append((part.message, b"".join(part.buffers)))
        return parts


def settle(*paths: Path) -> None:
    """Waits until the files' time stamps are old enough for their versions to be handed out at once."""
    for path in paths:
        while time.time_ns() - path.lstat().st_ctime_ns < 30_000_000:
            time.sleep(0.005)


def assemble(parts: list[tuple[Data, bytes]], number: int = 0) -> dict[int, bytes]:
    """{offset: bytes} of one file of a reply, joined where they touch."""
    runs: dict[int, bytes] = {}
    end = -1
    start = -1
    for message, payload in parts:
        at = 0
        for block in message.blocks:
            data = payload[at : at + block.length]
            at += block.length
            if block.file != number:
                continue
            assert len(data) == block.length and block.offset % CHUNK == 0
            assert len(block.checksums) == 16 * -(-block.length // CHUNK)
            if block.offset == end:
                runs[start] += data
            else:
                start = block.offset
                runs[start] = data
            end = block.offset + block.length
        assert at == len(payload)
    return runs


def names(listing: bytes | bytearray) -> list[bytes]:
    return [name for name, _ in iter_listing(bytes(listing))]


class Told:
    """Collects what a watch tells, and waits for it."""

    def __init__(self) -> None:
        self.changes: list[DirChange] = []
        self._news = asyncio.Event()

    def __call__(self, changes: list[DirChange]) -> None:
        self.changes += changes
        self._news.set()

    def tells_of(self, path: bytes, name: bytes | None = None) -> bool:
        """Whether something told says that this name (or anything in this directory) changed."""
        return any(_covers(change, path, name) for change in self.changes)

    async def until(self, condition: Callable[[], bool], timeout: float = 5.0) -> None:
        async with asyncio.timeout(timeout):
            while not condition():
                self._news.clear()
                await self._news.wait()


def _covers(change: DirChange, path: bytes, name: bytes | None) -> bool:
    if change.tree:
        return not change.path or path == change.path or path.startswith(change.path + b"/")
    return change.path == path and (not change.names or name is None or name in change.names)


@asynccontextmanager
async def watching(root: Path, **options: Any) -> AsyncIterator[tuple[Tree, Watch, Versions, Told]]:
    """A tree under a real watch."""
    portal = Portal("p", root)
    versions = Versions(portal.device, {}, lambda *row: None)
    told = Told()
    with ThreadPoolExecutor(1) as pool:
        watch = Watch(portal, versions, told, pool, **options)
        seek = Seek(portal, watch)
        watch.start()
        seek.start()
        try:
            yield Tree(portal, versions, watch), watch, versions, told
        finally:
            await seek.stop()
            await watch.stop()
            portal.close()


class Spoke:
    """A connection to a hub with its pushes."""

    def __init__(self, connection: Connection, told: Told, seqs: list[int]) -> None:
        self.connection = connection
        self.told = told
        self.seqs = seqs

    async def attach(self, portal: str = "p") -> Attached:
        reply = (await self.connection.call(Attach(portal), timeout=5)).message
        assert isinstance(reply, Attached)
        return reply

    async def call(self, message: Any, payload: bytes = b"") -> tuple[Any, bytes]:
        reply = await self.connection.call(message, payload, timeout=10)
        return reply.message, bytes(reply.payload)

    async def read(self, portal: str, *files: FileRanges, reason: str = "demand") -> list[tuple[Data, bytes]]:
        from farside.protocol.messages import Read

        parts: list[tuple[Data, bytes]] = []
        async for reply in self.connection.stream(Read(portal, files, reason), timeout=10):
            if isinstance(reply.message, Data):
                parts.append((reply.message, bytes(reply.payload)))
        return parts


async def spoke_at(port: int, tls: Any = None) -> Spoke:
    told, seqs = Told(), []

    def pushed(message: Any) -> None:
        if isinstance(message, Invalidate):
            seqs.append(message.seq)
            told(list(message.changes))

    return Spoke(
        await connect("127.0.0.1", port, tls=tls, hello=HELLO, timeout=5, on_push=pushed), told, seqs
    )


@asynccontextmanager
async def serving(root: Path, **options: Any) -> AsyncIterator[tuple[Hub, Spoke]]:
    """A hub without TLS on loopback, and one spoke connected to it."""
    hub = Hub(None, [PortalSpec("p", root)], insecure=True, **options)
    port = await hub.start("127.0.0.1", 0)
    spoke = await spoke_at(port)
    try:
        yield hub, spoke
    finally:
        await spoke.connection.close()
        await hub.stop()
