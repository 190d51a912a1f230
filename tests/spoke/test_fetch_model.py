"""Property test: whatever readers, prefetch, faults and evictions do, a read is right or an error."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.spoke.scripted_source import Bench, Call

from farside.errors import FarsideError, HubUnreachable
from farside.protocol.messages import CHUNK, Block, Data
from farside.spoke.fetch import Reason

SIZES = (1, CHUNK - 1, CHUNK, 5 * CHUNK + 77, 40 * CHUNK + 3)

_file = st.integers(0, len(SIZES) - 1)
_where = st.floats(0, 1)
_op = st.one_of(
    st.tuples(st.just("read"), _file, _where, st.integers(1, 12 * CHUNK)),
    st.tuples(st.just("read"), _file, _where, st.integers(1, 4096)),
    st.tuples(st.just("cancel"), _file, _where, st.integers(1, CHUNK)),
    st.tuples(st.just("want"), _file, _where, st.integers(1, 3)),
    st.tuples(st.just("answer"), st.integers(0, 7), st.integers(0, 2**32), st.just(0)),
    st.tuples(st.just("wrong"), st.integers(0, 7), st.integers(0, 2**32), st.just(0)),
    st.tuples(st.just("cut"), st.just(0), st.just(0), st.just(0)),
    st.tuples(st.just("heal"), st.just(0), st.just(0), st.just(0)),
    st.tuples(st.just("evict"), _file, st.just(0), st.just(0)),
    st.tuples(st.just("overwrite"), _file, st.just(0), st.just(0)),
    st.tuples(st.just("yield"), st.just(0), st.just(0), st.integers(1, 5)),
)


class Model:
    """Drives a bench by a list of operations; replies are given out of order, in small parts, or wrong."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.generation = [0] * len(SIZES)
        for n, size in enumerate(SIZES):
            bench.source.add(b"f%d" % n, size)
        self.open: list[Call] = []
        self.readers: list[asyncio.Task[None]] = []
        self.faults = False
        bench.source.auto = self.open.append

    async def read(self, n: int, at: float, size: int) -> None:
        held = self.bench.source.contents[b"f%d" % n]
        file = self.bench.file(b"f%d" % n)
        offset = int(at * SIZES[n])
        try:
            got = bytes(await self.bench.fetcher.read(file, offset, size))
        except FarsideError:
            assert self.faults
            return
        assert got == held.data[offset : offset + size]

    def reply(self, index: int, seed: int, *, wrong: bool) -> None:
        if not self.open:
            return
        call, rng = self.open.pop(index % len(self.open)), random.Random(seed)
        parts = call.blocks(CHUNK * rng.randint(1, 16))
        rng.shuffle(parts)
        if wrong:
            self.faults = True
            parts = [self.spoil(data, payload, rng) for data, payload in parts if rng.random() < 0.8]
            if rng.random() < 0.3:
                call.send(*parts)
                call.fail(HubUnreachable("cut"))
                return
        call.send(*parts)
        call.end()

    def spoil(self, data: Data, payload: bytes, rng: random.Random) -> tuple[Data, bytes]:
        if not payload or rng.random() < 0.5:
            return data, payload
        (block,) = data.blocks
        kind = rng.randrange(4)
        if kind == 0:
            at = rng.randrange(len(payload))
            return data, payload[:at] + bytes([payload[at] ^ 1 << rng.randrange(8)]) + payload[at + 1 :]
        if kind == 1:
            return data, payload[:-1]
        offset = block.offset + (CHUNK if kind == 2 else 0)
        index = block.file + (1 if kind == 3 else 0)
        return Data(
            (Block(index, block.path, block.version, offset, block.length, block.checksums),)
        ), payload

    async def apply(self, name: str, a: int, b: float, c: int) -> None:
        bench, loop = self.bench, asyncio.get_running_loop()
        if name == "read":
            self.readers.append(loop.create_task(self.read(a, b, c)))
        elif name == "cancel":
            task = loop.create_task(self.read(a, b, c))
            await asyncio.sleep(0)
            task.cancel()
        elif name == "want":
            file = bench.file(b"f%d" % a)
            bench.fetcher.want(file, int(b * file.chunks), int(b * file.chunks) + 8, Reason(c))
        elif name in ("answer", "wrong"):
            self.reply(a, int(b), wrong=name == "wrong")
        elif name == "cut":
            self.faults, bench.source.up = True, False
            for call in self.open:
                call.fail(HubUnreachable("cut"))
            self.open.clear()
        elif name == "heal":
            bench.source.up = True
            bench.fetcher.link_up()
        elif name == "evict":
            file = bench.file(b"f%d" % a)
            bench.cache.evict(file)
        elif name == "overwrite":
            self.faults = True
            self.generation[a] += 1
            bench.source.add(b"f%d" % a, SIZES[a], self.generation[a])
        for _ in range(c if name == "yield" else 1):
            await asyncio.sleep(0)

    async def finish(self) -> None:
        """Everything is answered rightly from now on: every reader ends, what is left is consistent."""
        bench = self.bench
        bench.source.auto = Call.answer
        bench.source.up = True
        for call in self.open:
            call.answer()
        bench.fetcher.link_up()
        await asyncio.gather(*self.readers)
        await bench.settled()
        for n, size in enumerate(SIZES):
            file, data = bench.file(b"f%d" % n), bench.source.contents[b"f%d" % n].data
            assert bytes(await bench.fetcher.read(file, 0, size)) == data
            await bench.settled()
            buffer = memoryview(bytearray(size))
            if file.try_read(0, buffer) == size:
                assert buffer == data
        stats = bench.fetcher.stats
        assert stats.inflight_bytes == 0 and stats.unwritten_bytes == 0
        assert bench.fetcher.queued_bytes == 0
        assert bench.cache.space.reserved == 0
        assert not any(bench.file(b"f%d" % n).opens for n in range(len(SIZES)))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ops=st.lists(_op, max_size=40), roomy=st.booleans())
def test_right_bytes_or_an_error(ops: list[tuple[str, int, float, int]], roomy: bool) -> None:
    async def main(directory: Path) -> None:
        bench = Bench(directory, size_limit=(256 << 20) if roomy else 12 * CHUNK)
        try:
            async with asyncio.timeout(20):
                model = Model(bench)
                for op in ops:
                    await model.apply(*op)
                await model.finish()
        finally:
            await bench.close()

    memory = Path("/dev/shm")  # the cache syncs to disk when it closes, and there are many
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        asyncio.run(main(Path(directory) / "cache"))
