"""A link whose every reply the test decides: the Source of the fetch scheduler over files in memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from farside.errors import FarsideError
from farside.protocol.messages import CHUNK, MAX_PART, Block, Data, FileFailure, FileRanges
from farside.spoke.cache import ChunkCache
from farside.spoke.cachedfile import CachedFile
from farside.spoke.fetch import Fetcher
from farside.spoke.sidecar import CacheKey
from farside.spoke.window import Window

PORTAL = b"p" * 16
Part = tuple[Data, bytes]


def checksums_of(data: bytes) -> bytes:
    return b"".join(xxhash.xxh3_128_digest(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK))


def joined(ranges: list[tuple[bytes, int, int]]) -> list[tuple[bytes, int, int]]:
    """(path, first, behind the last) runs with adjacent ones joined, sorted."""
    result: list[tuple[bytes, int, int]] = []
    for path, first, last in sorted(ranges):
        if result and result[-1][0] == path and result[-1][2] == first:
            result[-1] = (path, result[-1][1], last)
        else:
            result.append((path, first, last))
    return result


@dataclass
class HubFile:
    version: bytes
    data: bytes
    value: bytes = b""


@dataclass
class Call:
    """One Read that the scheduler sent; the test answers it, whole or in parts."""

    source: ScriptedSource
    files: tuple[FileRanges, ...]
    reason: str
    urgent: bool
    parts: asyncio.Queue[Part | FarsideError | None] = field(default_factory=asyncio.Queue)
    closed: bool = False

    def ranges(self) -> list[tuple[bytes, int, int]]:
        """(path, first chunk, chunk behind the last) of everything that was asked."""
        return [
            (f.path, offset // CHUNK, -(-(offset + length) // CHUNK))
            for f in self.files
            for offset, length in f.ranges
        ]

    def runs(self) -> list[tuple[bytes, int, int]]:
        """``ranges`` with adjacent ones joined."""
        return joined(self.ranges())

    def blocks(self, part: int = MAX_PART) -> list[Part]:
        """What the hub would answer, in parts of at most ``part`` bytes."""
        answer: list[Part] = []
        for n, asked in enumerate(self.files):
            held = self.source.contents.get(asked.path)
            if held is None:
                answer.append((Data((), (FileFailure(n, asked.path, 2, False),)), b""))
                continue
            if held.version != asked.version:
                answer.append((Data((), (FileFailure(n, asked.path, 116, True, held.value),)), b""))
                continue
            for offset, length in asked.ranges:
                for at in range(offset, offset + length, part):
                    data = held.data[at : min(at + part, offset + length)]
                    block = Block(n, asked.path, asked.version, at, len(data), checksums_of(data))
                    answer.append((Data((block,)), data))
        return answer

    def send(self, *parts: Part) -> None:
        for item in parts:
            self.parts.put_nowait(item)

    def end(self) -> None:
        self.parts.put_nowait(None)

    def fail(self, error: FarsideError) -> None:
        self.parts.put_nowait(error)

    def answer(self) -> None:
        """All that was asked, rightly."""
        self.send(*self.blocks())
        self.end()


class ScriptedSource:
    """Calls queue up in ``calls``; with ``auto`` set they are answered by it at once."""

    def __init__(self) -> None:
        self.up = True
        self.rtt_s = 0.06
        self.contents: dict[bytes, HubFile] = {}
        self.calls: list[Call] = []
        self.auto: Callable[[Call], None] | None = Call.answer
        self._arrived = asyncio.Event()

    def add(self, path: bytes, size: int, seed: int = 0) -> HubFile:
        data = random.Random(f"{path!r}{seed}").randbytes(size)
        held = HubFile(xxhash.xxh3_128_digest(path + b"%d" % seed), data, b"value%d" % seed)
        self.contents[path] = held
        return held

    async def call(self, index: int, deadline_s: float = 5.0) -> Call:
        """The call with that index, as soon as it has been made."""
        async with asyncio.timeout(deadline_s):
            while len(self.calls) <= index:
                self._arrived.clear()
                await self._arrived.wait()
        return self.calls[index]

    async def read(
        self, files: tuple[FileRanges, ...], reason: str, *, urgent: bool, timeout_s: float
    ) -> AsyncIterator[tuple[Data, memoryview]]:
        call = Call(self, files, reason, urgent)
        self.calls.append(call)
        self._arrived.set()
        if self.auto is not None:
            self.auto(call)
        try:
            while (item := await call.parts.get()) is not None:
                if isinstance(item, FarsideError):
                    raise item
                data, payload = item
                yield data, memoryview(bytearray(payload))
        finally:
            call.closed = True


class Bench:
    """A fetcher over a real cache and a scripted link."""

    def __init__(
        self,
        directory: Path,
        *,
        size_limit: int = 512 << 20,
        timeout_s: float = 5.0,
        window: Window | None = None,
    ) -> None:
        self.cache = ChunkCache.open(directory, size_limit=size_limit, reserve=0.0)
        self.source = ScriptedSource()
        self.pool = ThreadPoolExecutor(4)
        self.stale: list[tuple[bytes, bytes]] = []
        self.fetcher = Fetcher(
            self.cache,
            self.source,
            self.pool,
            timeout_s=timeout_s,
            window=window,
            on_stale=lambda file, value: self.stale.append((file.path, value)),
        )

    def file(self, path: bytes, size: int = -1, seed: int = 0) -> CachedFile:
        """A file that the hub has; made there with that size unless it is there already."""
        if size >= 0:
            self.source.add(path, size, seed)
        held = self.source.contents[path]
        return self.cache.file(CacheKey(PORTAL, held.version, len(held.data)), path)

    async def settled(self, deadline_s: float = 10.0) -> None:
        """Wait until nothing is queued, on its way or being written."""
        async with asyncio.timeout(deadline_s):
            while not self.fetcher.idle:
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        await self.fetcher.close()
        self.pool.shutdown()
        self.cache.close()


def run(tmp_path: Path, scenario: Callable[[Bench], Awaitable[None]], **options: Any) -> None:
    """Run a scenario on a bench; ``options`` are Bench's."""

    async def main() -> None:
        bench = Bench(tmp_path / "cache", **options)
        try:
            async with asyncio.timeout(20):
                await scenario(bench)
        finally:
            await bench.close()

    asyncio.run(main())


def start(coro: Awaitable[bytes | bytearray | memoryview]) -> asyncio.Task[bytes]:
    """A read as a task that gives bytes."""

    async def as_bytes() -> bytes:
        return bytes(await coro)

    return asyncio.get_running_loop().create_task(as_bytes())
