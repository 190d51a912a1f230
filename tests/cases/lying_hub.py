"""A spoke's link, fetcher and cache over real sockets, against a hub that answers reads as the test says."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from tests.protocol.wire import HELLO, Damage, Hub, proxied, served

from farside.protocol.connection import Responder
from farside.protocol.messages import CHUNK, Attach, Attached, Block, Data, FileRanges, Read, ReadDone
from farside.spoke.cache import ChunkCache
from farside.spoke.cachedfile import CachedFile
from farside.spoke.fetch import Fetcher
from farside.spoke.link import Link
from farside.spoke.sidecar import CacheKey

PORTAL = b"p" * 16

Answer = Callable[[int, Read, Responder], Awaitable[None]]
"""Called with the number of the read (0, 1, …), the request, and where to answer it."""


def checksums_of(data: bytes) -> bytes:
    return b"".join(xxhash.xxh3_128_digest(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK))


def block(asked: FileRanges, number: int, offset: int, data: bytes) -> Block:
    return Block(number, asked.path, asked.version, offset, len(data), checksums_of(data))


@dataclass
class Spoke:
    """The reading half of a spoke."""

    cache: ChunkCache
    link: Link
    fetcher: Fetcher
    contents: dict[bytes, bytes]
    reads: list[Read] = field(default_factory=list)

    def file(self, path: bytes) -> CachedFile:
        return self.cache.file(CacheKey(PORTAL, version_of(path), len(self.contents[path])), path)

    async def read(self, path: bytes) -> bytes:
        """The whole file, in reads as large as the kernel's."""
        file, size = self.file(path), len(self.contents[path])
        return b"".join([bytes(await self.fetcher.read(file, at, 1 << 20)) for at in range(0, size, 1 << 20)])

    def kept(self, path: bytes) -> bytes:
        """What the cache itself would serve: all of it must be on disk and verified."""
        view = memoryview(bytearray(len(self.contents[path])))
        assert self.file(path).try_read(0, view) == len(view)
        return bytes(view)


def version_of(path: bytes) -> bytes:
    return xxhash.xxh3_128_digest(path)


async def honestly(contents: dict[bytes, bytes], read: Read, respond: Responder) -> None:
    total = 0
    for number, asked in enumerate(read.files):
        for offset, length in asked.ranges:
            data = contents[asked.path][offset : offset + length]
            total += len(data)
            await respond.part(Data((block(asked, number, offset, data),)), data)
    await respond.finish(ReadDone(total))


@contextlib.asynccontextmanager
async def spoke_of(
    directory: Path,
    contents: dict[bytes, bytes],
    answer: Answer,
    *,
    timeout_s: float = 5.0,
    to_spoke: Damage | None = None,
) -> AsyncIterator[Spoke]:
    """A spoke that is attached to a hub with these files; ``to_spoke`` damages the bytes under way."""
    reads: list[Read] = []

    async def handle(conn: Any, message: Any, payload: Any, respond: Responder) -> None:
        if isinstance(message, Attach):
            await respond.finish(Attached(message.portal, PORTAL, False, b"", 10.0, 0, True))
            return
        reads.append(message)
        await answer(len(reads) - 1, message, respond)

    with ThreadPoolExecutor(4) as pool:
        async with served(Hub(handle)) as server, proxied(server.port, to_spoke) as port:
            cache = ChunkCache.open(directory, size_limit=256 << 20, reserve=0.0)
            link = Link(
                *("127.0.0.1", port, "p"),
                hello=HELLO,
                tls=None,
                connections=4,
                on_attached=lambda *_: None,
                on_renewed=lambda *_: None,
                on_away=lambda: None,
                on_changes=lambda *_: None,
            )
            await link.start(5.0)
            fetcher = Fetcher(cache, link, pool, timeout_s=timeout_s)
            try:
                yield Spoke(cache, link, fetcher, contents, reads)
            finally:
                await link.close()
                await fetcher.close()
                cache.close()
