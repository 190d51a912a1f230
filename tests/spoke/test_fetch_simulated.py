"""Scheduler, window, readahead and siblings together on simulated links: the issue's figures, in link time.

Computing takes no time here, so these are upper bounds: what the policies alone would make of the link.
"""

from __future__ import annotations

import asyncio
import stat
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.spoke.simulated_link import InlineExecutor, SimulatedLoop, SimulatedSource

from farside.prefetch.readahead import Readahead
from farside.prefetch.siblings import Listing, Sibling, Siblings
from farside.protocol.attributes import Attr, attr_of, pack_value
from farside.spoke.cache import ChunkCache
from farside.spoke.cachedfile import CachedFile
from farside.spoke.fetch import Fetcher, Reason
from farside.spoke.sidecar import CacheKey

MB = 1 << 20
GBIT = 1e9 / 8


class Spoke:
    """Cache, scheduler and policies, wired as the mount wires them."""

    def __init__(self, directory: Path, rate: float, rtt: float, size_limit: int) -> None:
        loop = asyncio.get_running_loop()
        self.cache = ChunkCache.open(directory, size_limit=size_limit, reserve=0.0)
        self.source = SimulatedSource(loop, rate, rtt)
        self.fetcher = Fetcher(self.cache, self.source, InlineExecutor())
        self.buffer = memoryview(bytearray(MB))

    def file(self, path: bytes, size: int) -> CachedFile:
        return self.cache.file(
            CacheKey(b"p" * 16, b"v" * 16 if size > MB else path[-16:].rjust(16), size), path
        )

    async def read(self, file: CachedFile, readahead: Readahead, offset: int, size: int) -> int:
        limit = 2 * self.fetcher.window.size
        here = file.try_read(offset, self.buffer[:size]) >= 0
        if not here or readahead.moves(offset, size):
            for first, last in readahead.read(offset, size, limit).runs:
                self.fetcher.want(file, first, last, Reason.READAHEAD)
        if here:
            return 1
        assert len(await self.fetcher.read(file, offset, size)) == min(size, file.size - offset)
        return 0


def simulate(
    scenario: Callable[[Spoke], Awaitable[float]], *, rate: float, rtt: float, size_limit: int = 192 * MB
) -> float:
    async def main(directory: Path) -> float:
        spoke = Spoke(directory, rate, rtt, size_limit)
        try:
            return await scenario(spoke)
        finally:
            await spoke.fetcher.close()
            spoke.cache.close()

    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            return runner.run(main(Path(directory) / "cache"))


@pytest.mark.parametrize(("rtt", "share"), [(0.060, 0.93), (0.300, 0.85)])
def test_cold_sequential_gibibyte(rtt: float, share: float) -> None:
    size, rate = 1024 * MB, 1 * GBIT

    async def scenario(s: Spoke) -> float:
        file, readahead = s.file(b"a", size), Readahead(size)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for at in range(0, size, MB):
            await s.read(file, readahead, at, MB)
        assert s.fetcher.stats.bytes["demand"] <= 8 * MB
        assert sum(s.fetcher.stats.bytes.values()) == size  # no byte twice
        return size / (loop.time() - begun) / rate

    assert simulate(scenario, rate=rate, rtt=rtt) >= share


def test_demand_among_fill_waits_about_a_round_trip() -> None:
    async def scenario(s: Spoke) -> float:
        big, other = s.file(b"big", 160 * MB), s.file(b"other", 64 * MB)
        loop = asyncio.get_running_loop()
        s.fetcher.want(big, 0, big.chunks - 1, Reason.FILL)
        worst = 0.0
        for n in range(12):
            await asyncio.sleep(0.08)
            begun = loop.time()
            await s.fetcher.read(other, n * 4 * MB, 16 * 1024)
            worst = max(worst, loop.time() - begun)
        assert s.fetcher.stats.bytes["fill"] > 50 * MB
        return worst

    assert simulate(scenario, rate=GBIT, rtt=0.060, size_limit=400 * MB) <= 0.12


@pytest.mark.parametrize(("dirs", "each"), [(100, 40), (1, 4000)])
def test_small_files_in_order_take_few_round_trips(dirs: int, each: int) -> None:
    """4,000 files of 4 KiB, 0.5 ms of the reader's own time for each (its system calls)."""
    version = bytes(16)
    regular = pack_value(Attr(1, 4096, 8, 0, 0, stat.S_IFREG | 0o644, 1, 0, 0, 0, version))
    folder = pack_value(Attr(1, 4096, 8, 0, 0, stat.S_IFDIR | 0o755, 2, 0, 0, 0, version))
    tree: dict[bytes, Listing] = {b"": [(b"d%04d" % d, folder) for d in range(dirs)]}
    for d in range(dirs):
        tree[b"d%04d" % d] = [(b"f%05d" % n, regular) for n in range(each)]

    async def scenario(s: Spoke) -> float:
        def is_here(path: bytes, value: bytes) -> bool:
            file = s.file(path, attr_of(value).size)
            return file.complete or s.fetcher.coming(file)

        siblings = Siblings(tree.get, is_here)

        def want(batch: list[Sibling]) -> None:
            for sibling in batch:
                s.fetcher.want(s.file(sibling.path, sibling.size), 0, 0, Reason.READAHEAD)

        loop = asyncio.get_running_loop()
        begun = loop.time()
        for directory in sorted(tree)[1:]:
            for name, _ in tree[directory]:
                path = directory + b"/" + name
                file = s.file(path, 4096)
                if path in siblings.markers:
                    want(siblings.opened(path))
                if file.try_read(0, s.buffer[:4096]) < 0:
                    want(siblings.demanded(path))
                    assert len(await s.fetcher.read(file, 0, 4096)) == 4096
                await asyncio.sleep(0.0005)
        assert sum(s.fetcher.stats.bytes.values()) == dirs * each * 4096
        assert s.source.requests <= dirs * each // 32
        return loop.time() - begun

    assert simulate(scenario, rate=GBIT, rtt=0.060) <= dirs * each * 0.0005 + 15 * 0.060
