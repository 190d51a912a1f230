"""Helpers of the protocol tests: a hub with a scripted handler, a proxy that damages bytes, certificates."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization

from farside.protocol import tls
from farside.protocol.connection import Connection, Responder, Server, ServerConnection, connect, serve
from farside.protocol.frames import OLDEST, PROTOCOL
from farside.protocol.messages import AnyMessage, Hello, Ping, Pong, Welcome

HELLO = Hello(PROTOCOL, OLDEST, "farside test", "spoke")

Answer = Callable[[ServerConnection, Any, Any, Responder], Awaitable[None]]


class Hub:
    """A ServerHandler: pings are answered, everything else goes to ``answer``."""

    def __init__(self, answer: Answer | None = None, *, ca_pem: bytes = b"", skew_s: float = 0.0) -> None:
        self.answer = answer
        self.ca_pem = ca_pem
        self.skew_ns = int(skew_s * 1e9)
        self.connections: list[ServerConnection] = []
        self.closed_connections: list[ServerConnection] = []
        self.cancelled = 0
        self.seen: list[AnyMessage] = []
        self.refuse: Exception | None = None

    async def hello(self, conn: ServerConnection, hello: Hello) -> Welcome:
        if self.refuse is not None:
            raise self.refuse
        self.connections.append(conn)
        return Welcome(0, "farside test", "hub", time.time_ns() + self.skew_ns, self.ca_pem)

    async def handle(self, conn: ServerConnection, message: Any, payload: Any, respond: Responder) -> None:
        self.seen.append(message)
        if isinstance(message, Ping):
            await respond.finish(Pong(message.sent_ns))
            return
        assert self.answer is not None
        try:
            await self.answer(conn, message, payload, respond)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def closed(self, conn: ServerConnection) -> None:
        self.closed_connections.append(conn)


@contextlib.asynccontextmanager
async def served(hub: Hub, context: ssl.SSLContext | None = None, **options: Any) -> AsyncIterator[Server]:
    server = await serve("127.0.0.1", 0, tls=context, handler=hub, **options)
    try:
        yield server
    finally:
        await server.close()


async def connected(port: int, context: ssl.SSLContext | None = None, **options: Any) -> Connection:
    settings: dict[str, Any] = {"hello": HELLO, "timeout": 5.0, **options}
    return await connect("127.0.0.1", port, tls=context, **settings)


@contextlib.asynccontextmanager
async def pair(answer: Answer | None = None, **options: Any) -> AsyncIterator[tuple[Hub, Connection]]:
    """A hub and one spoke connected to it, without TLS."""
    hub = Hub(answer)
    async with served(hub, **options) as server:
        connection = await connected(server.port)
        try:
            yield hub, connection
        finally:
            await connection.close()


async def until(condition: Callable[[], bool], timeout: float = 5.0) -> None:
    """Waits for a condition; fails the test when it does not come."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come in time"
        await asyncio.sleep(0.002)


def run(work: Coroutine[Any, Any, None], timeout: float = 20.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(timeout):
            await work

    asyncio.run(bounded())


Damage = Callable[[bytes, int], bytes | None]
"""Called with bytes and their position in the stream; returns what to pass on, None to close."""


@contextlib.asynccontextmanager
async def proxied(
    port: int, to_spoke: Damage | None = None, to_hub: Damage | None = None
) -> AsyncIterator[int]:
    """A TCP proxy before ``port`` whose two directions may be damaged; yields its own port."""
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, damage: Damage | None) -> None:
        at = 0
        try:
            while data := await reader.read(65536):
                passed: bytes | None = data if damage is None else damage(data, at)
                at += len(data)
                if passed is None:
                    break
                writer.write(passed)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        for work in (pump(reader, far_writer, to_hub), pump(far_reader, writer, to_spoke)):
            task = asyncio.create_task(work)
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield proxy.sockets[0].getsockname()[1]
    finally:
        proxy.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def identity(
    authority: tls.CertificateAuthority, directory: Path, name: str = "spoke", **options: Any
) -> Path:
    """An identity directory of a spoke that has joined, without the joining."""
    key = tls.new_key()
    certificate = authority.sign_spoke(tls.signing_request(key, name), name, **options)
    directory.mkdir(parents=True)
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    tls.write_private(directory / tls.IDENTITY_FILE, tls.key_pem(key) + pem + authority.pem)
    return directory
