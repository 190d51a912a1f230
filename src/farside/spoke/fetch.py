"""The fetch scheduler: which bytes are asked of the hub, when, and who gets them.

A *demand* (some reader waits) is sent at once on the urgent lane. Everything else is queued by reason and
sent as the window allows: planned before readahead before fill. A chunk is asked for once however many want
it: who comes later joins the fetch that is queued or on its way, and a queued one is promoted.

All state belongs to the loop thread, so nothing here is locked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from farside.errors import CacheError, HubUnreachable
from farside.protocol.messages import CHUNK, MAX_READ
from farside.spoke.flight import Arrived, FileFetch, Reason, Segment, Waiter
from farside.spoke.transfer import FetchStats, Source, Transfers
from farside.spoke.wants import Wants
from farside.spoke.window import Window

if TYPE_CHECKING:
    from farside.spoke.cache import ChunkCache
    from farside.spoke.cachedfile import CachedFile

__all__ = ["FetchStats", "Fetcher", "Reason", "Source"]

T = TypeVar("T")

WIDEN = 2
"""A demand fetches aligned groups of this many chunks: 128 KiB."""

MAX_CHUNKS = MAX_READ // CHUNK
DEMAND_CHUNKS = 2
"""A demand is asked for in requests of at most 128 KiB, each on the connection with the least to do: what one
connection that is still in slow start would carry in five round trips, many carry in two."""

MIN_REQUEST = 256 * 1024
MAX_FILES = 512
"""Files in one request."""

REQUESTS_IN_WINDOW = 32
"""Prefetch is cut so that about this many requests fill the window: two on each of 16 connections."""

FILL_SHARE = 0.75
"""Part of the window that fill may use: enough to keep the link busy (1.5 × bandwidth × round trip), with
a shorter queue in front of demands."""

MAX_UNWRITTEN = 32 << 20
"""Received bytes that may wait for the disk; beyond it there are so many fewer in flight."""

MAX_UNFLUSHED = 16_384
"""Files whose side-cars wait for the disk; beyond it prefetch waits as well. Each holds about a kilobyte, and
would be fetched again after a crash."""

UNFLUSHED_POLL_S = 0.05

VERIFY_CHUNKS = 16
"""Chunks on disk are verified after a start in aligned groups of this many."""

VERIFY_AHEAD = 4 * VERIFY_CHUNKS

DISK_POLL_S = 0.25
"""While a reader waits for the disk, this often it is looked whether the disk has been found to hang."""

MAX_ROUNDS = 8
"""How often a read starts over because chunks were evicted between two of its steps."""


class Fetcher:
    """Fetches chunks of cached files over one link.

    Call ``link_up`` whenever the link has come back; without it the scheduler notices within a second.
    """

    def __init__(
        self,
        cache: ChunkCache,
        source: Source,
        pool: Executor,
        *,
        timeout_s: float = 30.0,
        loop: asyncio.AbstractEventLoop | None = None,
        on_stale: Callable[[CachedFile, bytes], None] | None = None,
        window: Window | None = None,
    ) -> None:
        """``on_stale`` is called with (file, value that now holds or b"") when a version is gone."""
        if cache.chunk != CHUNK:
            raise ValueError(f"the cache's chunks have {cache.chunk} bytes, those of the link {CHUNK}")
        self._cache, self._source, self._pool, self._timeout = cache, source, pool, timeout_s
        self._loop = loop or asyncio.get_running_loop()
        self._wants = Wants()
        self._moves = Transfers(
            cache,
            source,
            pool,
            self._wants,
            timeout_s=timeout_s,
            loop=self._loop,
            on_room=self._schedule_pump,
            on_stale=on_stale,
            window=window or Window(),
        )
        self._pump_scheduled = False

    # -- demands ----------------------------------------------------------------------------------

    async def read(self, file: CachedFile, offset: int, size: int) -> bytes | bytearray | memoryview:
        """The bytes [offset, offset + size) of a file, shorter only at its end, from disk or link.

        Raises:
            StaleVersion: the hub no longer has this version, and not all of it was here.
            RemoteError: the hub could not read the file.
            HubUnreachable: the bytes were not there within ``timeout_s``.
            ChecksumMismatch, ProtocolError: what came was wrong twice.
            CacheError: the bytes were evicted over and over before they could be read.
        """
        size = min(size, file.size - offset)
        if size <= 0:
            return b""
        deadline = self._loop.time() + self._timeout
        await self.load(file)
        first, last = offset // CHUNK, -(-(offset + size) // CHUNK)
        for _ in range(MAX_ROUNDS):
            if file.unverified(first, last - 1):
                for future in self._verify(file, first, last):
                    await self._from_disk(future)
            waiter, on_disk = self._join(file, first, last)
            if waiter.missing:
                try:
                    async with asyncio.timeout_at(deadline):
                        await waiter.future
                except TimeoutError:
                    raise self._unreachable(file) from None
            if len(waiter.pieces) == 1 and not on_disk:
                begin = offset - waiter.pieces[0].first * CHUNK
                return waiter.pieces[0].view[begin : begin + size]
            result = bytearray(size)
            if await self._assemble(file, offset, result, waiter.pieces, on_disk):
                return result
        raise CacheError("chunks were evicted again before they could be read", path=file.path)

    def _join(self, file: CachedFile, first: int, last: int) -> tuple[Waiter, list[tuple[int, int]]]:
        """Make sure that all of [first, last) is here or on its way; returns the runs that are on disk."""
        waiter = Waiter(first, last, self._loop.create_future())
        files = self._moves.files.get(file.key)
        runs = [(a, b + 1) for a, b in file.absent(first, last - 1)]
        if files is not None and files.flying:
            absent: list[tuple[int, int]] = []
            for begin, stop in runs:
                absent += files.not_flying(begin, stop)
            self._join_flying(waiter, files, runs)
        else:
            absent = runs
        if absent:
            self._demand(file, absent, waiter)
        on_disk: list[tuple[int, int]] = []
        at = first
        for begin, stop in runs:
            if at < begin:
                on_disk.append((at, begin))
            at = stop
        if at < last:
            on_disk.append((at, last))
        return waiter, on_disk

    def _join_flying(self, waiter: Waiter, files: FileFetch, runs: list[tuple[int, int]]) -> None:
        """Take what segments on their way already have of absent runs, and wait for the rest."""
        joined: dict[int, Segment] = {}
        for first, last in runs:
            at = first
            while at < last:
                segment = files.flying.get(at)
                if segment is None:
                    at += 1
                elif segment.missing >> (at - segment.first) & 1:
                    joined[id(segment)] = segment
                    waiter.missing |= waiter.mask(at, at + 1)
                    at += 1
                elif (held := segment.holding(at)) is not None and held.verify():
                    waiter.pieces.append(held)
                    at = min(last, held.last)
                elif held is not None:
                    self._moves.refuse(segment, held)  # it is missing again
        for segment in joined.values():
            self._moves.stats.coalesced += 1
            segment.waiters.append(waiter)
            self._moves.mend(segment)

    def _demand(self, file: CachedFile, absent: list[tuple[int, int]], waiter: Waiter) -> None:
        """Send for absent runs at once, widened, taking over what prefetch has queued of them."""
        files = self._moves.file(file)
        segments: list[Segment] = []
        for begin, stop in absent:
            first, last = begin, stop
            if first % WIDEN and self._is_absent(files, first - 1):
                first -= 1
            if last % WIDEN and last < file.chunks and self._is_absent(files, last):
                last += 1
            self._wants.take_over(files, first, last)
            for a in range(first, last, DEMAND_CHUNKS):
                segment = self._moves.fly(files, a, min(a + DEMAND_CHUNKS, last), Reason.DEMAND)
                segment.waiters.append(waiter)
                segments.append(segment)
            waiter.missing |= waiter.mask(begin, stop)
        for segment in segments:
            self._moves.send([segment], Reason.DEMAND, urgent=True)

    def _is_absent(self, files: FileFetch, chunk: int) -> bool:
        return not files.file.state[chunk] and chunk not in files.flying

    async def _assemble(
        self,
        file: CachedFile,
        offset: int,
        result: bytearray,
        pieces: list[Arrived],
        on_disk: list[tuple[int, int]],
    ) -> bool:
        """Fill ``result``; False when a run on disk was evicted in the meantime."""
        view, stop = memoryview(result), offset + len(result)
        for piece in pieces:
            begin = piece.first * CHUNK
            a, b = max(begin, offset), min(begin + len(piece.view), stop)
            view[a - offset : b - offset] = piece.view[a - begin : b - begin]
        for first, last in on_disk:
            a, b = max(first * CHUNK, offset), min(last * CHUNK, stop)
            got = await self._from_disk(self._in_pool(file.try_read, a, view[a - offset : b - offset]))
            if got != b - a:
                return False
        return True

    async def _from_disk(self, future: asyncio.Future[T]) -> T | None:
        """The result of work in the pool; None, and no further wait, once the disk is known to hang."""
        while not future.done():
            await asyncio.wait((future,), timeout=DISK_POLL_S)
            if not future.done() and self._cache.health.reads_off:
                return None
        return future.result()

    async def load(self, file: CachedFile) -> None:
        """Have the side-car read; without it, on a disk that hangs, all chunks count as absent."""
        if not file.loaded:
            await self._from_disk(self._in_pool(file.load))

    async def verify(self, file: CachedFile) -> None:
        """Verify all of a file that is on disk from before the start; what fails becomes absent."""
        await self.load(file)
        for first in range(0, file.chunks, VERIFY_AHEAD):  # in steps, or others would queue behind it all
            for future in self._verify(file, first, min(first + VERIFY_AHEAD, file.chunks)):
                await self._from_disk(future)

    def _verify(self, file: CachedFile, first: int, last: int) -> list[asyncio.Future[None]]:
        """Start verifying chunks [first, last) in the pool, unless that is under way."""
        files = self._moves.file(file)
        waits: list[asyncio.Future[None]] = []
        for group in range(first // VERIFY_CHUNKS, -(-last // VERIFY_CHUNKS)):
            a, b = group * VERIFY_CHUNKS, min((group + 1) * VERIFY_CHUNKS, file.chunks)
            if not file.unverified(a, b - 1):
                continue
            future = files.verifying.get(group)
            if future is None:  # one at a time, or a slow loser could unmark what was fetched anew
                future = self._in_pool(file.verify, a, b - 1)
                files.verifying[group] = future
                future.add_done_callback(partial(self._verified, files, group))
            waits.append(future)
        self._moves.forget_if_idle(files)
        return waits

    def _verified(self, files: FileFetch, group: int, _: asyncio.Future[None]) -> None:
        files.verifying.pop(group, None)
        self._moves.forget_if_idle(files)

    # -- prefetch ---------------------------------------------------------------------------------

    def want(self, file: CachedFile, first: int, last: int, reason: Reason) -> None:
        """Queue the absent ones of chunks first … last (included) as prefetch.

        What goes beyond the file's end is ignored; what finds no room in the cache is dropped silently.
        """
        last = min(last, file.chunks - 1)
        if self._moves.closed or first > last or file.complete:
            return
        if not file.loaded:
            self._moves.spawn(self._load_and_want(file, first, last, reason))
            return
        if self._cache.bypass_reason is not None:
            self._moves.stats.dropped += 1
            return
        if reason is not Reason.FILL and file.unverified(first, last):
            self._verify(file, first, last + 1)
        files = self._moves.file(file)
        for begin, end in file.absent(first, last):
            for a, b in files.not_flying(begin, end + 1):
                self._wants.add(files, a, b, reason)
        self._moves.forget_if_idle(files)
        self._schedule_pump()

    async def complete(self, file: CachedFile, first: int, last: int, reason: Reason = Reason.FILL) -> int:
        """Want chunks first … last and wait until nothing of the file is queued or on its way.

        Returns the number of them that are still not here: no room, or a stale version. The wait lasts for
        as long as the link is away; cancel it when enough is enough.
        """
        await self.load(file)
        self.want(file, first, last, reason)
        files = self._moves.files.get(file.key)
        if files is not None and (files.flying or files.queued):
            settled = self._loop.create_future()
            files.settled.append(settled)
            await settled
        return sum(b - a + 1 for a, b in file.absent(first, min(last, file.chunks - 1)))

    async def _load_and_want(self, file: CachedFile, first: int, last: int, reason: Reason) -> None:
        await self._in_pool(file.load)
        self.want(file, first, last, reason)

    def cancel_prefetch(self, file: CachedFile) -> None:
        """Take what is queued for a file out of the queues; what is on its way arrives."""
        files = self._moves.files.get(file.key)
        if files is not None:
            for segment in list(files.queued):
                self._wants.remove(segment)
            self._moves.forget_if_idle(files)

    def _schedule_pump(self) -> None:
        """Send what the window allows at the end of this turn of the loop, so that wants are batched."""
        if self._wants.count and not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_scheduled = False
        moves, stats, window = self._moves, self._moves.stats, self._moves.window
        moves.limited = False
        if moves.closed or moves.paused:
            return
        if len(self._cache.dirty) > MAX_UNFLUSHED:
            self._loop.call_later(UNFLUSHED_POLL_S, self._schedule_pump)
            return
        if not self._source.up:
            moves.arm_retry()
            return
        window.sample_rtt(self._loop.time(), self._source.rtt_s, ping=True)
        while (reason := self._wants.best()) is not None:
            budget = window.size if reason is not Reason.FILL else int(window.size * FILL_SHARE)
            room = max(MIN_REQUEST, min(MAX_READ, window.size // REQUESTS_IN_WINDOW))
            if stats.unwritten_bytes + stats.inflight_bytes > budget + MAX_UNWRITTEN:
                return  # the disk is slower than the link: memory must not fill
            if stats.inflight_bytes and stats.inflight_bytes + room > budget:
                moves.limited = True
                return
            segments = self._take(reason, room)
            if segments:
                moves.send(segments, reason, urgent=False)

    def _take(self, reason: Reason, room: int) -> list[Segment]:
        """Segments off a queue for one request of about ``room`` bytes, space on disk reserved."""
        taken: list[Segment] = []
        while room > 0 and len(taken) < MAX_FILES and (head := self._wants.head(reason)) is not None:
            files, first = head.files, head.first
            last = min(head.last, first + max(1, room // CHUNK))
            if taken and last < head.last:
                break  # a run that must be cut begins a request of its own
            self._wants.cut(head, first, last)
            segment = self._moves.fly(files, first, last, reason)
            if segment.reservation is not None:
                taken.append(segment)
                room -= segment.bytes
                continue
            segment.missing = 0  # no room on disk and nobody waits for it
            self._moves.settle(segment, first, last)
            self._moves.stats.dropped += 1
            if reason is Reason.FILL:
                for other in self._wants.remove_all(reason):
                    self._moves.forget_if_idle(other)
        return taken

    # -- life -------------------------------------------------------------------------------------

    def link_up(self) -> None:
        """The link came back: send again what readers wait for, then go on prefetching."""
        self._moves.link_up()

    async def close(self) -> None:
        """Cancel everything; whoever waits gets HubUnreachable."""
        for files in list(self._moves.files.values()):
            self.cancel_prefetch(files.file)
        await self._moves.close()

    @property
    def stats(self) -> FetchStats:
        return self._moves.stats

    @property
    def window(self) -> Window:
        return self._moves.window

    @property
    def promoted(self) -> int:
        """How often a queued run was taken over for a better reason."""
        return self._wants.promoted

    @property
    def idle(self) -> bool:
        """Nothing is queued, on its way or waiting for the disk."""
        return self._moves.idle

    def coming(self, file: CachedFile) -> bool:
        """Something of the file is queued or on its way."""
        return file.key in self._moves.files

    @property
    def queued_bytes(self) -> int:
        return sum(s.bytes for files in self._moves.files.values() for s in files.queued)

    def _unreachable(self, file: CachedFile) -> HubUnreachable:
        return HubUnreachable(
            f"no answer within {self._timeout:g} s",
            path=file.path,
            hint="what is cached stays readable; the link heals by itself",
        )

    def _in_pool(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return self._loop.run_in_executor(self._pool, function, *args)
