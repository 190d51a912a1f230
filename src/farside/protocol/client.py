"""The spoke's end of a connection: many requests in flight, replies in any order."""

from __future__ import annotations

import asyncio
import collections
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple, Self

import msgspec

from ..errors import FarsideError, HubUnreachable, ProtocolError, VersionMismatch
from .endpoint import JOINED, Endpoint
from .failures import copy_of, error_of
from .frames import (
    CREDIT_STEP,
    HUB_SENDS,
    MAGIC,
    OLDEST,
    PAYLOAD_CHECKED,
    PREFIX_SIZE,
    PROTOCOL,
    Kind,
    Payload,
    Received,
    buffers_of,
    credit_head,
    frame_head,
)
from .messages import AnyMessage, Data, Failure, Goodbye, Hello, Ping, Pong, Welcome, decode, encode
from .tls import tls_error

RTT_WINDOW_S = 60.0

OnPush = Callable[[AnyMessage], None]


class Reply(NamedTuple):
    """One reply: its message and its payload, a buffer of its own that nobody else holds."""

    message: AnyMessage
    payload: Received


class _Exchange:
    """One request in flight. ``timeout`` is the longest silence of a stream, the whole time of a call."""

    def __init__(self, what: str, stream: int, timeout: float, expect: int, single: bool, now: float) -> None:
        self.what = what
        self.stream = stream
        self.timeout = timeout
        self.expect = expect
        self.single = single
        self.heard = now
        self.replies: collections.deque[tuple[Reply, int]] = collections.deque()
        self.ended = False
        self.error: FarsideError | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.sending: asyncio.Task[None] | None = None
        self.consumed = 0

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def next(self, loop: asyncio.AbstractEventLoop) -> tuple[Reply, int] | None:
        """The next reply and its size on the wire; None behind the last."""
        while not self.replies:
            if self.error is not None:
                raise copy_of(self.error)
            if self.ended:
                return None
            self.waiter = loop.create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None
        return self.replies.popleft()


class ReplyStream(AsyncIterator[Reply]):
    """The replies to one request: parts as they come, then the final one.

    Leaving it early (``aclose``, the end of ``async with``, cancelling the reader, or dropping the last
    reference) tells the hub to stop. One task reads it at a time.
    """

    def __init__(self, connection: Connection, exchange: _Exchange) -> None:
        self._connection = connection
        self._exchange = exchange

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Reply:
        try:
            item = await self._exchange.next(self._connection._loop)
        except asyncio.CancelledError:
            self._connection._cancel(self._exchange)
            raise
        if item is None:
            raise StopAsyncIteration
        reply, size = item
        self._connection._consumed(self._exchange, size)
        return reply

    async def aclose(self) -> None:
        self._connection._cancel(self._exchange)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._exchange.ended and not self._connection._loop.is_closed():
            # The collector may run in any thread; the connection belongs to the loop's.
            self._connection._loop.call_soon_threadsafe(self._connection._cancel, self._exchange)


class Connection(Endpoint):
    """A connection to a hub; made by ``connect``. To be used in the loop's thread only.

    Attributes:
        peer: the hub's Welcome.
        clock_skew_s: this machine's clock minus the hub's, seconds (exact to about the RTT).
        last_pong: the newest answer to ``ping``.
        expected_bytes: payload bytes that callers still expect of the requests in flight.
    """

    peer: Welcome

    def __init__(
        self, hello: Hello, *, tls: bool, address: str, on_push: OnPush | None, congestion: str | None
    ) -> None:
        super().__init__(HUB_SENDS, tls=tls, address=address, congestion=congestion)
        self.clock_skew_s = 0.0
        self.last_pong: Pong | None = None
        self.expected_bytes = 0
        self.certificate: bytes | None = None
        self.welcomed: asyncio.Future[Welcome] = self._loop.create_future()
        # Retrieved here once, so that a failure nobody waits for is not logged as one nobody saw.
        self.welcomed.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._hello = hello
        self._on_push = on_push
        self._exchanges: dict[int, _Exchange] = {}
        self._last_stream = 0
        self._rtts: collections.deque[tuple[float, float]] = collections.deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._goodbye: Goodbye | None = None

    # -- requests -------------------------------------------------------------------------------

    async def call(
        self, message: AnyMessage, payload: Payload = b"", *, timeout: float, expect: int = 0
    ) -> Reply:
        """Sends a request and returns its one reply.

        ``timeout``: seconds until HubUnreachable, all told. ``expect``: payload bytes that the reply is
        expected to have, for ``expected_bytes``.

        Raises:
            HubUnreachable: no answer in time, or the connection is lost.
            RemoteError, StaleVersion, AuthError: what the hub answered.
            ProtocolError: the hub sent nonsense.
        """
        exchange = self._start(message, payload, timeout, expect, single=True)
        try:
            item = await exchange.next(self._loop)
        finally:
            self._cancel(exchange)
        if item is None:
            raise HubUnreachable("the reply was dropped", hub=self.address)
        return item[0]

    def stream(
        self, message: AnyMessage, payload: Payload = b"", *, timeout: float, expect: int = 0
    ) -> ReplyStream:
        """Sends a request and iterates over its replies; errors as ``call``.

        ``timeout``: longest silence in seconds. The request is sent at once, not at the first ``next``.
        """
        return ReplyStream(self, self._start(message, payload, timeout, expect, single=False))

    async def ping(self, ack: int, timeout: float) -> float:
        """Round-trip time in seconds of one Ping, which acknowledges Invalidates up to ``ack``."""
        sent = time.monotonic_ns()
        reply = (await self.call(Ping(sent, ack), timeout=timeout)).message
        if not isinstance(reply, Pong) or reply.sent_ns != sent:
            raise ProtocolError(f"a Ping was answered by {type(reply).__name__}", hub=self.address)
        self.last_pong = reply
        now = time.monotonic_ns()
        rtt = (now - sent) / 1e9
        self._rtts.append((now / 1e9, rtt))
        return rtt

    @property
    def rtt_s(self) -> float | None:
        """Smallest round-trip time of the last minute's pings, seconds; None without any."""
        oldest = time.monotonic() - RTT_WINDOW_S
        while self._rtts and self._rtts[0][0] < oldest:
            self._rtts.popleft()
        return min((rtt for _, rtt in self._rtts), default=None)

    @property
    def inflight(self) -> int:
        """Requests that wait for their (last) reply."""
        return len(self._exchanges)

    async def close(self) -> None:
        """Closes the connection; requests in flight fail with HubUnreachable."""
        self._shut(HubUnreachable("the connection was closed by this side", hub=self.address))
        if self._transport is not None:
            self._transport.close()
            try:
                async with asyncio.timeout(1.0):
                    await self.wait_closed()
            except TimeoutError:
                self._transport.abort()
                await self.wait_closed()

    # -- inside ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        ssl_object = transport.get_extra_info("ssl_object")
        if ssl_object is not None:
            self.certificate = ssl_object.getpeercert(binary_form=True)
        self.writer.post(MAGIC + frame_head(Kind.REQUEST, 0, encode(self._hello)))

    def _start(
        self, message: AnyMessage, payload: Payload, timeout: float, expect: int, *, single: bool
    ) -> _Exchange:
        if self.closed:
            assert self.close_reason is not None
            raise copy_of(self.close_reason)
        stream = self._last_stream + 1
        while stream in self._exchanges or stream > 0xFFFF_FFFF:
            stream = 1 if stream > 0xFFFF_FFFF else stream + 1
        self._last_stream = stream
        now = self._loop.time()
        exchange = _Exchange(type(message).__name__, stream, timeout, expect, single, now)
        buffers = buffers_of(payload)
        head = frame_head(Kind.REQUEST, stream, encode(message), buffers)
        self._exchanges[stream] = exchange
        self.expected_bytes += expect
        exchange.timer = self._loop.call_later(timeout, self._on_timer, exchange)
        if len(head) + sum(map(len, buffers)) <= JOINED:
            self.writer.post(b"".join((head, *buffers)) if buffers else head)
        else:
            exchange.sending = self._spawn(self._send(exchange, head, buffers))
        return exchange

    async def _send(self, exchange: _Exchange, head: bytes, buffers: list[memoryview]) -> None:
        try:
            await self.writer.send(head, buffers)
        except FarsideError as error:
            self._end(exchange, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _on_timer(self, exchange: _Exchange) -> None:
        if exchange.ended:
            return
        if not exchange.single:
            if self._reader.stream == exchange.stream or exchange.replies:
                # Its payload is arriving, or its reader is the slow one: that is no silence.
                exchange.heard = max(exchange.heard, self._loop.time() - exchange.timeout / 2)
            left = exchange.heard + exchange.timeout - self._loop.time()
            if left > 0:
                exchange.timer = self._loop.call_later(left, self._on_timer, exchange)
                return
        error = HubUnreachable(
            f"no answer to {exchange.what} within {exchange.timeout:g} s", hub=self.address
        )
        self._cancel(exchange, error)

    def _cancel(self, exchange: _Exchange, error: FarsideError | None = None) -> None:
        """Ends an exchange from this side; the hub is told. Does nothing when it has ended already."""
        if exchange.ended:
            return
        self._end(exchange, error)
        if not self.closed:
            if exchange.sending is not None:
                exchange.sending.cancel()
            self.writer.post(frame_head(Kind.CANCEL, exchange.stream))

    def _end(self, exchange: _Exchange, error: FarsideError | None) -> None:
        if exchange.ended:
            return
        exchange.ended = True
        exchange.error = error
        self.expected_bytes -= exchange.expect
        exchange.expect = 0
        self._exchanges.pop(exchange.stream, None)
        if exchange.timer is not None:
            exchange.timer.cancel()
        exchange.wake()

    def _consumed(self, exchange: _Exchange, size: int) -> None:
        """The reader took a reply: once in a while the hub is granted as much credit again."""
        exchange.consumed += size
        if exchange.consumed >= CREDIT_STEP and not exchange.ended and not self.closed:
            self.writer.post(credit_head(exchange.stream, exchange.consumed))
            exchange.consumed = 0

    def _on_frame(self, kind: int, flags: int, stream: int, header: bytes, payload: Received) -> None:
        if self.closed:
            return
        if kind != Kind.PUSH and stream != 0 and stream not in self._exchanges:
            return  # late, for a request that was cancelled or timed out
        try:
            message = decode(header)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a message cannot be read: {error}", hub=self.address) from error
        if payload and not flags & PAYLOAD_CHECKED and not isinstance(message, Data):
            raise ProtocolError("a payload came without checksum", hub=self.address)
        if kind == Kind.PUSH:
            self._take_push(message)
        elif stream == 0:
            self._take_welcome(message)
        else:
            self._take_reply(self._exchanges[stream], kind, message, header, payload)

    def _take_reply(
        self, exchange: _Exchange, kind: int, message: AnyMessage, header: bytes, payload: Received
    ) -> None:
        exchange.heard = self._loop.time()
        came = min(len(payload), exchange.expect)
        exchange.expect -= came
        self.expected_bytes -= came
        if kind == Kind.ERROR:
            if not isinstance(message, Failure):
                raise ProtocolError("an error frame without a Failure", hub=self.address)
            self._end(exchange, error_of(message, self.address))
            return
        if kind == Kind.PART and exchange.single:
            raise ProtocolError(f"{exchange.what} was answered in parts", hub=self.address)
        exchange.replies.append((Reply(message, payload), PREFIX_SIZE + len(header) + len(payload)))
        if kind == Kind.FINAL:
            self._end(exchange, None)
        else:
            exchange.wake()

    def _take_welcome(self, message: AnyMessage) -> None:
        if self.welcomed.done():
            raise ProtocolError("a second answer to Hello", hub=self.address)
        if isinstance(message, Failure):
            self.abort(error_of(message, self.address))
        elif not isinstance(message, Welcome):
            raise ProtocolError(f"Hello was answered by {type(message).__name__}", hub=self.address)
        elif not OLDEST <= message.protocol <= PROTOCOL:
            raise VersionMismatch(
                f"the hub ({message.software}) speaks protocol {message.protocol}, "
                f"this spoke speaks {OLDEST} to {PROTOCOL}",
                hub=self.address,
            )
        else:
            self.peer = message
            self.clock_skew_s = (time.time_ns() - message.clock_ns) / 1e9
            self.welcomed.set_result(message)

    def _take_push(self, message: AnyMessage) -> None:
        if isinstance(message, Goodbye):
            self._goodbye = message
        if self._on_push is not None:
            self._on_push(message)

    def _lost_reason(self, exc: Exception | None) -> FarsideError:
        if isinstance(exc, ssl.SSLError):
            return tls_error(exc, self.address)  # TLS 1.3: a refused client hears of it only afterwards
        if self._goodbye is None:
            return super()._lost_reason(exc)
        return HubUnreachable(
            f"the hub said goodbye: {self._goodbye.reason}", hub=self.address, retry=self._goodbye.retry
        )

    def _on_shut(self, reason: FarsideError) -> None:
        for exchange in list(self._exchanges.values()):
            self._end(exchange, copy_of(reason))
        if not self.welcomed.done():
            self.welcomed.set_exception(copy_of(reason))
