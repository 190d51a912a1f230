"""A loop whose clock jumps over every wait, and a link of a given rate and round trip on that clock."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from typing import Any

import xxhash

from farside.protocol.messages import CHUNK, MAX_PART, Block, Data, FileRanges

_PATTERN = bytes(range(256)) * (CHUNK // 256)
_SUM = xxhash.xxh3_128_digest(_PATTERN)


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting for a timeout, moves the clock on."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout:
            self.now += timeout
        return list(ready)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Seconds of waiting take no time; computing takes none on this clock."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class InlineExecutor(Executor):
    """A pool that has done the work by the time that it is asked for."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as e:
            future.set_exception(e)
        return future


class SimulatedSource:
    """A hub whose files all consist of one repeated chunk, behind a bottleneck that serves bulk in order.

    Urgent requests share the bottleneck fairly: they are served next, as if from a queue of their own.
    """

    up = True

    def __init__(self, loop: asyncio.AbstractEventLoop, rate: float, rtt_s: float) -> None:
        self._loop, self.rate, self.rtt_s = loop, rate, rtt_s
        self._free_at = 0.0
        self.requests = 0

    async def read(
        self, files: tuple[FileRanges, ...], reason: str, *, urgent: bool, timeout_s: float
    ) -> AsyncIterator[tuple[Data, memoryview]]:
        self.requests += 1
        arriving: list[tuple[float, Data, memoryview]] = []
        at_hub = self._loop.time() + self.rtt_s / 2
        sent = at_hub if urgent else max(self._free_at, at_hub)
        for data, payload in _parts(files):
            took = (len(payload) + 64 * len(data.blocks)) / self.rate
            self._free_at = max(self._free_at, at_hub) + took
            sent += took
            arriving.append((sent + self.rtt_s / 2, data, payload))
        for arrives, data, payload in arriving:
            await asyncio.sleep(arrives - self._loop.time())
            yield data, payload


def _parts(files: tuple[FileRanges, ...]) -> list[tuple[Data, memoryview]]:
    parts: list[tuple[Data, memoryview]] = []
    blocks: list[Block] = []
    payload = bytearray()

    def flush() -> None:
        nonlocal blocks, payload
        if blocks:
            parts.append((Data(tuple(blocks)), memoryview(payload)))
            blocks, payload = [], bytearray()

    for n, asked in enumerate(files):
        for offset, length in asked.ranges:
            for at in range(offset, offset + length, MAX_PART):
                size = min(MAX_PART, offset + length - at)
                whole, rest = divmod(size, CHUNK)
                data = _PATTERN * whole + _PATTERN[:rest]
                sums = _SUM * whole + (xxhash.xxh3_128_digest(_PATTERN[:rest]) if rest else b"")
                if len(payload) + size > MAX_PART:
                    flush()
                blocks.append(Block(n, asked.path, asked.version, at, size, sums))
                payload += data
    flush()
    return parts
