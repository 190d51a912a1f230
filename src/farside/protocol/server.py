"""The hub's end: accepts connections and runs one task for each request."""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from collections.abc import Coroutine
from typing import Any, Protocol

import msgspec

from ..errors import AuthError, FarsideError, HubUnreachable, ProtocolError, VersionMismatch
from .endpoint import BACKLOG, Endpoint
from .failures import failure_of
from .frames import (
    MAGIC,
    MAX_REPLY_PAYLOAD,
    MAX_REQUEST_PAYLOAD,
    OLDEST,
    PAYLOAD_CHECKED,
    PREFIX_SIZE,
    PROTOCOL,
    SPOKE_SENDS,
    STRANGER_SENDS,
    WINDOW,
    Kind,
    Payload,
    Received,
    buffers_of,
    credit_of,
    frame_head,
)
from .messages import AnyMessage, Data, Failure, Goodbye, Hello, Join, Ping, Welcome, decode, encode
from .sockets import check_congestion
from .tls import PeerCertificate, peer_certificate

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
LINGER_S = 1.0


class ServerHandler(Protocol):
    """What a hub does with connections. All methods are called in the loop's thread."""

    async def hello(self, conn: ServerConnection, hello: Hello) -> Welcome:
        """Admits a peer; raise AuthError to refuse it. ``Welcome.protocol`` is filled in by the caller."""
        ...

    async def handle(
        self, conn: ServerConnection, message: AnyMessage, payload: Received, respond: Responder
    ) -> None:
        """Answers one request, in a task of its own.

        FarsideError and OSError become a Failure; CancelledError means that the spoke gave up.
        """
        ...

    def closed(self, conn: ServerConnection) -> None:
        """The connection is gone; called once for each that ``hello`` admitted."""
        ...


class Responder:
    """Where the answer to one request goes.

    Attributes:
        sent: bytes sent so far, prefixes and headers included.
        finished: the last reply is out, or nobody waits for it any more.
    """

    def __init__(self, connection: ServerConnection, stream: int) -> None:
        self._connection = connection
        self._stream = stream
        self._credit = WINDOW
        self._more: asyncio.Future[None] | None = None
        self.sent = 0
        self.finished = False

    async def part(self, message: AnyMessage, payload: Payload = b"") -> None:
        """Sends one of several replies; waits while the spoke is behind by more than the stream's window.

        The buffers are no longer used when it returns. Data are sent without a payload checksum.

        Raises:
            HubUnreachable: the connection is lost.
            ValueError: the payload is larger than a frame may be (MAX_REPLY_PAYLOAD).
        """
        await self._send(Kind.PART, message, payload)

    async def finish(self, message: AnyMessage, payload: Payload = b"") -> None:
        """Sends the only or last reply; a Failure goes out as an error. Raises as ``part``."""
        if self.finished:
            raise RuntimeError("a request was answered twice")
        await self._send(Kind.ERROR if isinstance(message, Failure) else Kind.FINAL, message, payload)
        self.finished = True

    def _grant(self, count: int) -> None:
        self._credit += count
        if self._more is not None and self._credit > 0 and not self._more.done():
            self._more.set_result(None)

    async def _send(self, kind: Kind, message: AnyMessage, payload: Payload) -> None:
        buffers = buffers_of(payload)
        size = sum(map(len, buffers))
        if size > MAX_REPLY_PAYLOAD:
            raise ValueError(f"a payload of {size} bytes; a frame holds at most {MAX_REPLY_PAYLOAD}")
        while kind == Kind.PART and self._credit <= 0:
            self._more = asyncio.get_running_loop().create_future()
            await self._more
        header = encode(message)
        head = frame_head(kind, self._stream, header, buffers, checked=not isinstance(message, Data))
        size += PREFIX_SIZE + len(header)
        self._credit -= size
        await self._connection.writer.send(head, buffers)
        self.sent += size


class ServerConnection(Endpoint):
    """One spoke's connection.

    Attributes:
        peer: the Hello, once it came.
        insecure: the connection is without TLS.
        peer_name, peer_serial, peer_fingerprint: common name, serial number and SHA-256 (hex) of the
            client certificate; None without one (a spoke that joins, or no TLS).
        state: the handler's own.
    """

    def __init__(self, server: Server) -> None:
        super().__init__(STRANGER_SENDS, tls=server.tls is not None, congestion=server.congestion)
        self.insecure = server.tls is None
        self.peer: Hello | None = None
        self.peer_name: str | None = None
        self.peer_serial: int | None = None
        self.peer_fingerprint: str | None = None
        self.state: Any = None
        self._server = server
        self._admitted = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._responders: dict[int, Responder] = {}
        self._held = 0
        self._timer: asyncio.TimerHandle | None = None

    def push(self, message: AnyMessage) -> None:
        """Sends a message that nobody asked for. A spoke that does not read is cut off."""
        if self.closed:
            return
        self.writer.post(frame_head(Kind.PUSH, 0, encode(message)))
        self._check_backlog()

    def abort(self, reason: FarsideError) -> None:
        """Says goodbye with the reason, cancels the requests and closes."""
        if self._transport is None or self.closed:
            super().abort(reason)
            return
        if self._admitted:
            self.writer.post(frame_head(Kind.PUSH, 0, encode(Goodbye(reason.message, reason.retry))))
        elif self.peer is None:
            self.writer.post(MAGIC)  # whoever is at the wrong port shall see what answers there
        self._close_soon(reason)

    # -- inside ---------------------------------------------------------------------------------

    @property
    def _trusted(self) -> bool:
        return self.insecure or self.peer_name is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        ssl_object = transport.get_extra_info("ssl_object")
        certificate: PeerCertificate | None = None
        if ssl_object is not None:
            certificate = peer_certificate(ssl_object.getpeercert(binary_form=True))
        if certificate is not None:
            self.peer_name, self.peer_serial, self.peer_fingerprint = certificate
        self._server.connections.add(self)
        self._timer = self._loop.call_later(HELLO_TIMEOUT_S, self._no_hello)

    def _no_hello(self) -> None:
        Endpoint.abort(self, HubUnreachable("the peer did not say hello in time", hub=None))

    def _close_soon(self, reason: FarsideError) -> None:
        """Closes when what was posted is out, or after LINGER_S."""
        if self._writer is not None and self._writer.unfinished:
            Endpoint.abort(self, reason)  # inside a bulk frame: nothing behind it could be understood
            return
        self._shut(reason)
        if self._transport is not None:
            self._transport.close()
            self._loop.call_later(LINGER_S, self._transport.abort)

    def _on_frame(self, kind: int, flags: int, stream: int, header: bytes, payload: Received) -> None:
        if self.closed:
            return
        if kind == Kind.CANCEL:
            task = self._tasks.get(stream)
            if task is not None:
                task.cancel()
            return
        if kind == Kind.CREDIT:
            responder = self._responders.get(stream)
            if responder is not None:
                responder._grant(credit_of(header))
            return
        if payload and not flags & PAYLOAD_CHECKED:
            raise ProtocolError("a payload came without checksum", hub=None)
        try:
            message = decode(header)
        except msgspec.MsgspecError as error:
            if not self._admitted:
                raise ProtocolError(f"a message cannot be read: {error}", hub=None) from error
            self._refuse(stream, Failure(errno.EPROTO, "bad_request", f"the hub cannot read it: {error}"))
            return
        if self.peer is None:
            if stream != 0 or not isinstance(message, Hello):
                raise ProtocolError(f"{type(message).__name__} came before Hello", hub=None)
            self.peer = message
            self._run(0, self._greet(message))
        elif not self._admitted or stream == 0 or stream in self._tasks:
            raise ProtocolError(f"{type(message).__name__} came on a stream that is in use", hub=None)
        elif not self._trusted and not isinstance(message, (Join, Ping)):
            text = "without a certificate a spoke can only join"
            self._refuse(stream, Failure(errno.EACCES, "forbidden", text))
        elif len(self._tasks) >= self._server.max_streams and not isinstance(message, Ping):
            text = f"more than {self._server.max_streams} requests at once on one connection"
            self._refuse(stream, Failure(errno.EAGAIN, "busy", text, retry=True))
        elif self._held + len(payload) > 2 * MAX_REQUEST_PAYLOAD:
            text = "too many large requests at once on one connection"
            self._refuse(stream, Failure(errno.EAGAIN, "busy", text, retry=True))
        else:
            responder = Responder(self, stream)
            self._responders[stream] = responder
            self._held += len(payload)
            self._run(stream, self._serve(message, payload, responder))

    def _refuse(self, stream: int, failure: Failure) -> None:
        self.writer.post(frame_head(Kind.ERROR, stream, encode(failure)))
        self._check_backlog()

    def _check_backlog(self) -> None:
        if self.writer.backlog > BACKLOG:
            Endpoint.abort(self, HubUnreachable("the spoke does not read what it is sent", hub=None))

    def _run(self, stream: int, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[stream] = self._loop.create_task(work)

    async def _greet(self, hello: Hello) -> None:
        try:
            self.writer.post(MAGIC)
            if len(self._server.connections) > self._server.max_connections:
                raise FarsideError("the hub has too many connections", errno=errno.EAGAIN, retry=True)
            if hello.protocol < OLDEST or hello.oldest > PROTOCOL:
                raise VersionMismatch(
                    f"the spoke ({hello.software}) speaks protocol {hello.oldest} to {hello.protocol}, "
                    f"the hub speaks {OLDEST} to {PROTOCOL}",
                    hint="install the same version of farside at both ends",
                )
            welcome = await self._server.handler.hello(self, hello)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._note(error, "Hello")
            self._refuse(0, failure_of(error))
            reason = error if isinstance(error, FarsideError) else AuthError("refused")
            self._close_soon(reason)
            return
        finally:
            self._tasks.pop(0, None)
            if self._timer is not None:
                self._timer.cancel()
        if self.closed:
            return
        chosen = min(hello.protocol, PROTOCOL)
        welcome = msgspec.structs.replace(welcome, protocol=chosen)
        self._admitted = True
        if self._trusted:
            self._reader.limits = SPOKE_SENDS
        self.writer.post(frame_head(Kind.FINAL, 0, encode(welcome)))

    async def _serve(self, message: AnyMessage, payload: Received, respond: Responder) -> None:
        stream, size = respond._stream, len(payload)
        what = type(message).__name__
        try:
            await self._server.handler.handle(self, message, payload, respond)
            if not respond.finished:
                raise RuntimeError("the request was not answered")
        except asyncio.CancelledError:
            # The spoke gave up, or the connection is gone. Nothing is answered; the task ends here.
            pass
        except Exception as error:
            self._note(error, what)
            if not respond.finished and not self.closed:
                self._refuse(stream, failure_of(error))
        finally:
            respond.finished = True
            self._held -= size
            self._tasks.pop(stream, None)
            self._responders.pop(stream, None)

    def _note(self, error: Exception, what: str) -> None:
        """Only what nobody foresaw is logged with a traceback."""
        if isinstance(error, (FarsideError, OSError)):
            log.debug("%s of %s failed: %s", what, self.peer_name or self.address, error)
        else:
            log.error("%s of %s failed", what, self.peer_name or self.address, exc_info=error)

    def _on_shut(self, reason: FarsideError) -> None:
        self._server.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks.values()):
            task.cancel()
        if isinstance(reason, ProtocolError):
            log.debug("connection of %s closed: %s", self.peer_name or self.address, reason)
        if self._admitted:
            self._server.handler.closed(self)


class Server:
    """A listening hub; made by ``serve``."""

    def __init__(
        self,
        handler: ServerHandler,
        tls: ssl.SSLContext | None,
        max_streams: int,
        max_connections: int,
        congestion: str | None,
    ) -> None:
        self.handler = handler
        self.tls = tls
        self.max_streams = max_streams
        self.max_connections = max_connections
        self.congestion = congestion
        self.connections: set[ServerConnection] = set()
        self.port = 0
        self._listener: asyncio.Server | None = None

    async def _listen(self, host: str | None, port: int) -> None:
        loop = asyncio.get_running_loop()
        extra: dict[str, Any] = {}
        if self.tls is not None:
            extra = {
                "ssl": self.tls,
                "ssl_handshake_timeout": HELLO_TIMEOUT_S,
                "ssl_shutdown_timeout": LINGER_S,
            }
        self._listener = await loop.create_server(
            lambda: ServerConnection(self), host, port, backlog=512, **extra
        )
        self.port = int(self._listener.sockets[0].getsockname()[1])

    async def close(self, reason: str = "the hub is stopping") -> None:
        """Stops listening, says goodbye to every spoke and waits until they are gone, at most 2 s."""
        if self._listener is not None:
            self._listener.close()
        connections = list(self.connections)
        for connection in connections:
            connection.abort(HubUnreachable(reason))
        if connections:
            waits = [asyncio.ensure_future(connection.wait_closed()) for connection in connections]
            _, late = await asyncio.wait(waits, timeout=2 * LINGER_S)
            for task in late:
                task.cancel()


async def serve(
    host: str | None,
    port: int,
    *,
    tls: ssl.SSLContext | None,
    handler: ServerHandler,
    max_streams: int = 256,
    max_connections: int = 1024,
    congestion: str | None = None,
) -> Server:
    """Listens on ``host`` (None: everywhere) and ``port`` (0: any free one, see ``Server.port``).

    ``max_streams``: requests at once on one connection. ``congestion``: TCP congestion control of what
    the hub sends, e.g. ``bbr``.

    Raises:
        FarsideError: the address cannot be used (port taken, not ours, not allowed).
        UsageError: the kernel does not have that congestion control.
    """
    check_congestion(congestion)
    server = Server(handler, tls, max_streams, max_connections, congestion)
    try:
        await server._listen(host, port)
    except OSError as error:
        why = {
            errno.EADDRINUSE: "the port is taken",
            errno.EACCES: "ports below 1024 need privileges",
            errno.EADDRNOTAVAIL: "this machine does not have that address",
        }.get(error.errno or 0, error.strerror or str(error))
        raise FarsideError(
            f"cannot listen on {host or '*'}:{port}: {why}",
            errno=error.errno or errno.EIO,
            hint="choose another address by --listen",
        ) from error
    return server
