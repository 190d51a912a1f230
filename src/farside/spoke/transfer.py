"""Runs of chunks on their way: requests to the hub, acceptance of what it answers, writing to the cache.

A block is used only if it is exactly what was asked for and matches its checksums. It serves the readers
that wait before it is on disk; the disk write happens in the I/O pool. What a reply did not bring, or
brought wrong, is asked for once more; what a dead link did not bring waits for the link for as long as a
reader waits for it.

Invariant, between turns of the loop: a segment that misses chunks is streaming or stranded.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from farside.errors import (
    ChecksumMismatch,
    FarsideError,
    HubUnreachable,
    ProtocolError,
    RemoteError,
    StaleVersion,
)
from farside.protocol.messages import Data, FileFailure, FileRanges
from farside.spoke.flight import Arrived, FileFetch, Reason, Request, Segment
from farside.spoke.wants import Wants
from farside.spoke.window import Window

if TYPE_CHECKING:
    from farside.spoke.cache import ChunkCache
    from farside.spoke.cachedfile import CachedFile

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0


class Source(Protocol):
    """The link as the scheduler sees it."""

    @property
    def up(self) -> bool: ...

    @property
    def rtt_s(self) -> float:
        """Smallest recent round trip in seconds, 0.0 while unknown."""
        ...

    def read(
        self, files: tuple[FileRanges, ...], reason: str, *, urgent: bool, timeout_s: float
    ) -> AsyncIterator[tuple[Data, memoryview]]:
        """The parts of the reply. Raises HubUnreachable, ProtocolError and other FarsideErrors."""
        ...


@dataclass
class FetchStats:
    """Counts since the start; bytes are payload received, by reason."""

    bytes: dict[str, int] = field(default_factory=lambda: {r.label: 0 for r in Reason})
    requests: dict[str, int] = field(default_factory=lambda: {r.label: 0 for r in Reason})
    coalesced: int = 0
    """Readers that joined a fetch already on its way."""
    checksum_failures: int = 0
    """Runs whose bytes did not match their checksums; never served."""
    unexpected_blocks: int = 0
    """Blocks and failures that nobody had asked for; never served."""
    stale: int = 0
    retries: int = 0
    dropped: int = 0
    """Prefetches given up because the cache had no room."""
    write_failures: int = 0
    inflight_bytes: int = 0
    unwritten_bytes: int = 0


class Transfers:
    """Everything that is on its way, for all files.

    Attributes:
        files: what is queued or on its way, by cache key.
        on_stale: called with (file, value that now holds or b"") when the hub says that a version is gone.
        limited: set by the scheduler while only the window holds requests back.
        paused: the link failed a moment ago; prefetch waits until it is tried again.
    """

    def __init__(
        self,
        cache: ChunkCache,
        source: Source,
        pool: Executor,
        wants: Wants,
        *,
        timeout_s: float,
        loop: asyncio.AbstractEventLoop,
        on_room: Callable[[], None],
        on_stale: Callable[[CachedFile, bytes], None] | None,
        window: Window,
    ) -> None:
        self.stats = FetchStats()
        self.window = window
        self.files: dict[Any, FileFetch] = {}
        self.on_stale = on_stale
        self.limited = False
        self.closed = False
        self._cache, self._source, self._pool, self._wants = cache, source, pool, wants
        self._timeout, self._loop, self._on_room = timeout_s, loop, on_room
        self._stranded: list[Segment] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry_timer: asyncio.TimerHandle | None = None
        self._retry_delay = FIRST_RETRY_S

    # -- registry ---------------------------------------------------------------------------------

    def file(self, file: CachedFile) -> FileFetch:
        """The state of a file; made, and the file held open, on first need."""
        files = self.files.get(file.key)
        if files is None:
            files = self.files[file.key] = FileFetch(file)
            file.acquire()
        return files

    def forget_if_idle(self, files: FileFetch) -> None:
        """Let go of a file for which nothing is queued or on its way any more."""
        if files.flying or files.queued:
            return
        settled, files.settled = files.settled, []
        for future in settled:
            if not future.done():
                future.set_result(None)
        if not files.verifying and self.files.get(files.file.key) is files:
            del self.files[files.file.key]
            files.file.release()

    @property
    def idle(self) -> bool:
        return not (self.files or self._tasks)

    @property
    def paused(self) -> bool:
        return self._retry_timer is not None

    # -- sending ----------------------------------------------------------------------------------

    def fly(self, files: FileFetch, first: int, last: int, reason: Reason) -> Segment:
        """A segment for chunks that are neither queued nor on their way; space on disk is reserved."""
        segment = Segment(files, first, last, reason)
        segment.reservation = self._cache.reserve(
            files.file, first, last - 1, may_evict=reason is not Reason.FILL
        )
        segment.missing = segment.mask(first, last)
        segment.unsettled = last - first
        for chunk in range(first, last):
            files.flying[chunk] = segment
        return segment

    def send(self, segments: list[Segment], reason: Reason, *, urgent: bool) -> None:
        """Ask for what segments miss, in one request; without a link they wait for it."""
        if not self._source.up:
            self._stranded += segments
            self.arm_retry()
            return
        request = Request(segments, reason, urgent)
        for segment in segments:
            segment.streaming = True
        self.stats.inflight_bytes += request.left
        self.stats.requests[reason.label] += 1
        self.spawn(self._run(request))

    async def _run(self, request: Request) -> None:
        error: FarsideError | None = None
        begun, waiting = self._loop.time(), True
        stream = self._source.read(
            request.ranges, request.reason.label, urgent=request.urgent, timeout_s=self._timeout
        )
        try:
            async for data, payload in stream:
                if waiting:
                    waiting = False
                    now = self._loop.time()
                    self.window.sample_rtt(now, now - begun)
                self._receive(request, data, payload)
        except FarsideError as e:
            error = e
        except asyncio.CancelledError:
            error = HubUnreachable("the mount is being closed")
            raise
        except Exception as e:  # a bug; readers must get an error all the same
            log.exception("a fetch failed")
            error = FarsideError(f"the fetch failed: {e!r}")
        finally:
            self._ended(request, error)
            close = getattr(stream, "aclose", None)
            if error is not None and close is not None:
                await close()

    # -- receiving --------------------------------------------------------------------------------

    def _receive(self, request: Request, data: Data, payload: memoryview) -> None:
        """One part of a reply.

        Raises:
            ProtocolError: the blocks do not add up to the payload.
        """
        size = len(payload)
        counted = min(size, request.left)
        request.left -= counted
        self.stats.inflight_bytes -= counted
        self.stats.bytes[request.reason.label] += size
        self._retry_delay = FIRST_RETRY_S
        if sum(block.length for block in data.blocks) != size:
            raise ProtocolError(f"{size} bytes came where the blocks add up to another length")
        writes: list[tuple[Segment, Arrived]] = []
        at = 0
        for block in data.blocks:
            view = payload[at : at + block.length]
            at += block.length
            accepted = request.accept(block)
            if accepted is None:
                self.stats.unexpected_blocks += 1
                continue
            segment, first, last = accepted
            arrived = Arrived(first, last, view, block.checksums)
            if segment.waiters and not arrived.verify():
                self.stats.checksum_failures += 1
                continue
            segment.missing &= ~segment.mask(first, last)
            for waiter in segment.waiters:
                waiter.take(arrived)
            if segment.reservation is None:
                self.settle(segment, first, last)
            else:
                segment.arrived.append(arrived)
                writes.append((segment, arrived))
        for failure in data.failures:
            self._failed(request, failure)
        if writes:
            self.stats.unwritten_bytes += size
            self._pool.submit(self._write, writes, size)
        self.window.delivered(self._loop.time(), size, limited=self.limited)
        if not self.stats.inflight_bytes:
            self.window.idle()
        self._on_room()

    def _write(self, writes: list[tuple[Segment, Arrived]], size: int) -> None:
        """In the pool: put received runs on disk."""
        outcomes: list[Exception | None] = []
        for segment, arrived in writes:
            try:
                reservation = segment.reservation
                assert reservation is not None
                segment.files.file.write(reservation, arrived.first, arrived.view, arrived.checksums)
                outcomes.append(None)
            except Exception as e:
                outcomes.append(e)
        try:
            self._loop.call_soon_threadsafe(self._written, writes, outcomes, size)
        except RuntimeError:
            pass  # the loop was closed meanwhile: nobody is left to tell

    def _written(
        self, writes: list[tuple[Segment, Arrived]], outcomes: list[Exception | None], size: int
    ) -> None:
        self.stats.unwritten_bytes -= size
        for (segment, arrived), outcome in zip(writes, outcomes, strict=True):
            if arrived not in segment.arrived:
                continue  # a reader verified it in the meantime, and it was refused
            if isinstance(outcome, ChecksumMismatch):
                self.refuse(segment, arrived)
                self.mend(segment)
                continue
            if outcome is not None:
                self.stats.write_failures += 1
            segment.arrived.remove(arrived)
            self.settle(segment, arrived.first, arrived.last)
        self._on_room()

    def refuse(self, segment: Segment, arrived: Arrived) -> None:
        """Bytes that do not match their checksums were never received."""
        self.stats.checksum_failures += 1
        segment.arrived.remove(arrived)
        segment.missing |= segment.mask(arrived.first, arrived.last)

    def mend(self, segment: Segment) -> None:
        """Ask again for what was refused after the reply had ended, or was left stranded by a dead link.

        While a reply runs, its end sees to what is missing.
        """
        if segment.missing and not segment.streaming:
            if segment not in self._stranded:
                self._again(segment, None)
            elif self._source.up:
                self._retry()

    def settle(self, segment: Segment, first: int, last: int) -> None:
        """Chunks [first, last) are on disk, or will not be: the segment has no part in them any more."""
        files = segment.files
        for chunk in range(first, last):
            del files.flying[chunk]
        segment.unsettled -= last - first
        if not segment.unsettled:
            if segment.reservation is not None:
                segment.reservation.release()
            segment.waiters.clear()
            self.forget_if_idle(files)

    # -- failing ----------------------------------------------------------------------------------

    def _failed(self, request: Request, failure: FileFailure) -> None:
        """The hub could not serve a file of a request."""
        if not 0 <= failure.file < len(request.groups) or failure.path != request.ranges[failure.file].path:
            self.stats.unexpected_blocks += 1
            return
        group = request.groups[failure.file]
        file = group[0].files.file
        error: FarsideError
        if failure.stale:
            self.stats.stale += 1
            error = StaleVersion("the file changed at the hub", path=file.path, hint="open it again")
            for queued in list(group[0].files.queued):
                self._wants.remove(queued)
            if self.on_stale is not None:
                self.on_stale(file, failure.value)
        else:
            message = failure.message or "the hub could not read the file"
            error = RemoteError(message, errno=failure.errno or None, path=file.path)
        for segment in group:
            self._give_up(segment, error)
        self.forget_if_idle(group[0].files)

    def _give_up(self, segment: Segment, error: FarsideError) -> None:
        """Fail who waits for chunks that have not arrived."""
        runs = segment.missing_runs()
        segment.missing = 0
        for waiter in segment.waiters:
            if not waiter.future.done():
                waiter.future.set_exception(_copy(error))
        for first, last in runs:
            self.settle(segment, first, last)

    def _ended(self, request: Request, error: FarsideError | None) -> None:
        """The reply is over: whatever it did not bring is asked for again, or given up."""
        self.stats.inflight_bytes -= request.left
        request.left = 0
        if not self.stats.inflight_bytes:
            self.window.idle()
        for group in request.groups:
            for segment in group:
                segment.streaming = False
                if segment.missing:
                    self._again(segment, error)
        self._on_room()

    def _again(self, segment: Segment, error: FarsideError | None) -> None:
        files, wanted = segment.files, segment.wanted
        if self.closed:
            self._give_up(segment, error or HubUnreachable("the mount is being closed"))
        elif isinstance(error, HubUnreachable):
            self.arm_retry()
            if wanted:
                self._stranded.append(segment)
                return
            if segment.reason is not Reason.DEMAND:
                for first, last in segment.missing_runs():
                    self._wants.add(files, first, last, segment.reason, front=True)
            self._give_up(segment, error)
        else:
            segment.attempts += 1
            if segment.attempts > 1:
                wrong = ChecksumMismatch("the hub sent wrong bytes twice", path=files.file.path)
                self._give_up(segment, error or wrong)
            else:
                self.stats.retries += 1
                self.send([segment], Reason.DEMAND if wanted else segment.reason, urgent=wanted)

    # -- the link comes back ----------------------------------------------------------------------

    def arm_retry(self) -> None:
        """Look again a little later whether the link is back; ``link_up`` cuts the wait short."""
        if self._retry_timer is None and not self.closed:
            delay = self._retry_delay * random.uniform(0.75, 1.25)
            self._retry_timer = self._loop.call_later(delay, self._retry)
            self._retry_delay = min(2 * self._retry_delay, LAST_RETRY_S)

    def link_up(self) -> None:
        """The link was made anew, maybe over another path."""
        self.window.reset()
        self._retry_delay = FIRST_RETRY_S
        self._retry()

    def _retry(self) -> None:
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
        stranded, self._stranded = self._stranded, []
        for segment in stranded:
            if not segment.wanted:
                self._give_up(segment, HubUnreachable("nobody waits any more"))
            elif self._source.up:
                self.stats.retries += 1
                self.send([segment], Reason.DEMAND, urgent=True)
            else:
                self._stranded.append(segment)
        if self._stranded:
            self.arm_retry()
        self._on_room()

    # -- life -------------------------------------------------------------------------------------

    def spawn(self, coro: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel everything on its way; whoever waits gets HubUnreachable."""
        self.closed = True
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        stranded, self._stranded = self._stranded, []
        for segment in stranded:
            self._give_up(segment, HubUnreachable("the mount is being closed"))


def _copy(error: FarsideError) -> FarsideError:
    """The same error as an object of its own: each waiter adds its own traceback."""
    return type(error)(
        error.message, errno=error.errno, path=error.path, hub=error.hub, retry=error.retry, hint=error.hint
    )
