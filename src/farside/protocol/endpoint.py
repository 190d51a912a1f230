"""What both ends of a connection share: receiving frames, and writing them with back-pressure."""

from __future__ import annotations

import asyncio
import collections
import socket
from collections.abc import Sequence
from typing import cast

from ..errors import FarsideError, HubUnreachable, ProtocolError
from .failures import copy_of, unreachable
from .frames import KIB, MIB, FrameReader, Limits, Received
from .sockets import address_text, tune

SLICE = 256 * KIB
"""asyncio copies what the socket does not take at once, so large payloads are written in slices of this."""

JOINED = 64 * KIB
"""Frames up to this size are written as one piece and do not wait for bulk frames in turn."""

BACKLOG = 16 * MIB
"""A peer that lets this many bytes of small frames pile up does not read, and is cut off."""

LOWAT = MIB


class FrameWriter:
    """Writes whole frames to a transport. Used in the loop's thread only.

    A bulk frame is written in slices with back-pressure; other bulk frames queue for their turn. Small
    frames go out at once, or right behind the bulk frame that is being written.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._paused = False
        self._busy = False
        self._lost: FarsideError | None = None
        self._behind: list[bytes] = []
        self._behind_bytes = 0
        self._drained: list[asyncio.Future[None]] = []
        self._turns: collections.deque[asyncio.Future[None]] = collections.deque()
        self.bytes_out = 0
        transport.set_write_buffer_limits(high=SLICE, low=SLICE // 4)

    @property
    def backlog(self) -> int:
        """Bytes accepted and not yet given to the kernel."""
        return self._behind_bytes + self._transport.get_write_buffer_size()

    @property
    def unfinished(self) -> bool:
        """A bulk frame is being written."""
        return self._busy

    def post(self, frame: bytes) -> None:
        """Writes a small frame without ever waiting. Silently drops it when the connection is gone."""
        if self._lost is not None:
            return
        if self._busy:
            self._behind.append(frame)
            self._behind_bytes += len(frame)
        else:
            self._write(frame)

    async def send(self, head: bytes, payload: Sequence[memoryview]) -> None:
        """Writes one frame; returns when the transport has taken it all and is not overfull.

        A frame once begun is always finished, also when the calling task is cancelled meanwhile
        (CancelledError follows then); half a frame would break the connection for everybody.

        Raises:
            HubUnreachable: the connection is, or gets, lost.
        """
        self._check()
        if len(head) + sum(map(len, payload)) <= JOINED:
            if self._paused:
                await self._drain()
            self.post(b"".join((head, *payload)) if payload else head)
            return
        await self._take_turn()
        cancelled: asyncio.CancelledError | None = None
        try:
            self._write(head)
            for part in payload:
                for at in range(0, len(part), SLICE):
                    while self._paused:
                        try:
                            await self._drain()
                        except asyncio.CancelledError as error:
                            cancelled = error
                    self._check()
                    self._write(part[at : at + SLICE])
        finally:
            self._end_turn()
        if cancelled is not None:
            raise cancelled

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        waiting, self._drained = self._drained, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def lose(self, reason: FarsideError) -> None:
        """The connection is gone: everybody who waits to write gets the error."""
        self._lost = reason
        self._behind.clear()
        self._behind_bytes = 0
        self.resume()
        turns, self._turns = self._turns, collections.deque()
        for future in turns:
            if not future.done():
                future.set_result(None)

    def _check(self) -> None:
        if self._lost is not None:
            raise copy_of(self._lost)

    def _write(self, data: bytes | memoryview) -> None:
        self.bytes_out += len(data)
        self._transport.write(data)

    async def _drain(self) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self._drained.append(future)
        await future
        self._check()

    async def _take_turn(self) -> None:
        if not self._busy:
            self._busy = True
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._turns.append(future)
        try:
            await future
        except asyncio.CancelledError:
            # The turn may have been given in the same moment; then it has to be passed on.
            if future.done() and not future.cancelled() and self._lost is None:
                self._end_turn()
            raise
        self._check()

    def _end_turn(self) -> None:
        """Small frames that came meanwhile go out, then the next bulk frame has its turn (stays busy)."""
        if self._lost is None and self._behind:
            behind, self._behind, self._behind_bytes = self._behind, [], 0
            self._write(b"".join(behind))
        while self._turns:
            future = self._turns.popleft()
            if not future.done():
                future.set_result(None)
                return
        self._busy = False


class Endpoint(asyncio.BufferedProtocol):
    """One end of a connection: receives frames, keeps counts, knows why it closed.

    Attributes:
        address: ``host:port`` of the peer.
        closed: nothing can be sent any more.
        close_reason: why, once closed.
        bytes_in, bytes_out: bytes that crossed the link (before encryption), frames' prefixes included.
    """

    def __init__(
        self, limits: Limits, *, tls: bool, address: str = "", congestion: str | None = None
    ) -> None:
        self.address = address
        self.closed = False
        self.close_reason: FarsideError | None = None
        self.bytes_in = 0
        self._tls = tls
        self._congestion = congestion
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(self._on_frame, limits, address or None)
        self._transport: asyncio.Transport | None = None
        self._writer: FrameWriter | None = None
        self._socket: socket.socket | None = None
        self._lowat = 1
        self._gone: asyncio.Future[None] = self._loop.create_future()

    @property
    def bytes_out(self) -> int:
        return 0 if self._writer is None else self._writer.bytes_out

    @property
    def writer(self) -> FrameWriter:
        """Raises HubUnreachable before the connection is made."""
        if self._writer is None:
            raise HubUnreachable("the connection is not made yet", hub=self.address or None)
        return self._writer

    async def wait_closed(self) -> None:
        """Returns once the socket is closed."""
        await asyncio.shield(self._gone)

    def abort(self, reason: FarsideError) -> None:
        """Closes at once; whatever is in flight fails with ``reason``."""
        self._shut(reason)
        if self._transport is not None:
            self._transport.abort()

    # -- called by asyncio ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._writer = FrameWriter(self._transport)
        self._socket = transport.get_extra_info("socket")
        if self._socket is not None:
            tune(self._socket, self._congestion)
        if not self.address:
            self.address = address_text(transport.get_extra_info("peername"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.bytes_in += nbytes
        if self.closed:
            return
        try:
            self._reader.received(nbytes)
        except ProtocolError as error:
            self.abort(error)
            return
        if not self._tls:
            self._set_lowat()

    def eof_received(self) -> None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._shut(self._lost_reason(exc))
        if not self._gone.done():
            self._gone.set_result(None)

    def pause_writing(self) -> None:
        self.writer.pause()

    def resume_writing(self) -> None:
        self.writer.resume()

    # -- for the two ends -----------------------------------------------------------------------

    def _on_frame(self, kind: int, flags: int, stream: int, header: bytes, payload: Received) -> None:
        raise NotImplementedError

    def _on_shut(self, reason: FarsideError) -> None:
        """Called once, when the connection stops being usable."""
        raise NotImplementedError

    def _lost_reason(self, exc: Exception | None) -> FarsideError:
        return unreachable(exc, self.address or None)

    def _shut(self, reason: FarsideError) -> None:
        if self.closed:
            return
        self.closed = True
        self.close_reason = reason
        if self._writer is not None:
            self._writer.lose(reason)
        self._on_shut(reason)

    def _set_lowat(self) -> None:
        """Asks the kernel to wake us once per large piece, not once per packet (a third of the CPU time)."""
        missing = self._reader.missing
        wanted = min(LOWAT, missing) if missing >= SLICE // 2 else 1
        if wanted != self._lowat and self._socket is not None:
            self._lowat = wanted
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
            except OSError:
                self._lowat = 1  # the socket is closing; there is nothing left to tune
