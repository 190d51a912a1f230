"""A TCP proxy that adds the delay and the rate of a wide-area link (no root needed).

Client → proxy → server. Bytes are held for half a round trip each way; a connection is accepted at once but
its first bytes meet a server dialled one round trip later, as a handshake would take. All connections share
one link of `--rate`. There is no loss and no congestion control: for those use `farside.bench.netlink`.

Command line::

    python -m farside.bench.delayproxy --listen 127.0.0.1:0 --to 127.0.0.1:7420 --control wan.sock
    echo cut | python -m farside.bench.delayproxy --send wan.sock

Commands: `cut` (black-hole: connections hang, as in a partition), `reset` (abort every connection now),
`refuse` (cut, reset, and refuse new connections), `restore`, `set rtt=80 rate=1000 window=8192`, `stats`.

In a test::

    proxy = DelayProxy(rtt=60)
    port = await proxy.start("127.0.0.1", 0, host, server_port)
    …
    await proxy.close()
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import click

from farside.errors import FarsideError, UsageError

TO_SERVER, TO_CLIENT = "to-server", "to-client"
_SOON_S = 0.0002  # a timer is not finer than this; what is due sooner goes at once


class Leg(asyncio.Protocol):
    """One leg of a proxied connection: what it receives goes to `peer` after the delay."""

    def __init__(self, proxy: DelayProxy, way: str) -> None:
        self.peer: Leg | None = None
        self.dialling: asyncio.Task[None] | None = None
        self._proxy = proxy
        self._way = way
        self._transport: asyncio.Transport | None = None
        self._queue: collections.deque[tuple[float, bytes | None]] = collections.deque()  # None: end
        self._held = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False
        self._writable = True
        self._opens_at = proxy.now() + 2 * proxy.one_way_s  # when the handshake has crossed the link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._socket().setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport.set_write_buffer_limits(1 << 20)
        self._proxy.legs.add(self)

    def data_received(self, data: bytes) -> None:
        self._enqueue(data, self._proxy.departure(self._way, len(data), self._opens_at))

    def eof_received(self) -> bool:
        self._enqueue(None, self._proxy.departure(self._way, 0, self._opens_at))
        return True  # half-closed: the other way goes on

    def connection_lost(self, exc: Exception | None) -> None:
        self._proxy.legs.discard(self)
        self._transport = None
        if exc and self.peer:  # a reset travels at once
            self.peer.abort()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        if self.peer:
            self.peer.pump()

    def abort(self) -> None:
        self._queue.clear()
        if self._transport:
            self._socket().setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()

    def pump(self) -> None:
        """Hand on what is due, and set a timer for what is not."""
        proxy, out = self._proxy, self.peer
        if self._timer:
            self._timer.cancel()
            self._timer = None
        while self._queue and not proxy.is_cut and out and out._transport and out._writable:
            wait = self._queue[0][0] - proxy.now()
            if wait > _SOON_S:
                self._timer = proxy.later(wait, self.pump)
                break
            data = self._queue.popleft()[1]
            if data is None:
                self._end(out)
            else:
                self._held -= len(data)
                proxy.delivered[self._way] += len(data)
                out._transport.write(data)
        self._flow()

    def _end(self, out: Leg) -> None:
        self._ended = True
        transport = out._transport
        if transport and not transport.is_closing():
            transport.write_eof()
        if out._ended:  # both ways are done
            if transport:
                transport.close()
            if self._transport:
                self._transport.close()

    def _enqueue(self, data: bytes | None, due: float) -> None:
        self._queue.append((due, data))
        self._held += len(data or b"")
        self.pump()

    def _flow(self) -> None:
        """Read on while less than a window is held, as a sender's TCP would."""
        transport = self._transport
        if transport and not transport.is_closing() and not self._ended:
            wanted = not self._proxy.is_cut and self._held < self._proxy.held_limit
            if wanted != transport.is_reading():
                (transport.resume_reading if wanted else transport.pause_reading)()

    def _socket(self) -> socket.socket:
        assert self._transport is not None
        return cast(socket.socket, self._transport.get_extra_info("socket"))


class DelayProxy:
    """The link: `rtt` in ms, `rate` in Mbit/s each way (0: no limit), `window` in KB in flight per
    connection and direction (what TCP buffers allow on a real link; 8192 KB is 133 MB/s at 60 ms)."""

    def __init__(self, rtt: float = 60.0, rate: float = 0.0, window: float = 8192.0) -> None:
        self.shape = {"rtt": rtt, "rate": rate, "window": window}
        self.legs: set[Leg] = set()
        self.delivered = {TO_SERVER: 0, TO_CLIENT: 0}
        self.is_cut = False
        self._refusing = False
        self._servers: list[asyncio.Server] = []
        self._link_free_at = {TO_SERVER: 0.0, TO_CLIENT: 0.0}
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def one_way_s(self) -> float:
        return self.shape["rtt"] / 2e3

    @property
    def held_limit(self) -> float:
        return self.shape["window"] * 512  # bytes are held for half a round trip: half a window

    def now(self) -> float:
        return self._running_loop().time()

    def later(self, seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self._running_loop().call_later(seconds, callback)

    def departure(self, way: str, size: int, opens_at: float) -> float:
        """When `size` bytes that came now are to be handed on (loop time). None leaves before the
        connection is open, at `opens_at`."""
        at = max(self.now(), opens_at)
        if self.shape["rate"]:
            at = max(at, self._link_free_at[way]) + size / (self.shape["rate"] * 125e3)
            self._link_free_at[way] = at
        return at + self.one_way_s

    async def start(self, host: str, port: int, to_host: str, to_port: int) -> int:
        """Proxy one address; returns the port it listens on (`port` 0 picks one)."""
        self._loop = asyncio.get_running_loop()

        def accept() -> Leg:
            client, server = Leg(self, TO_SERVER), Leg(self, TO_CLIENT)
            client.peer, server.peer = server, client
            client.dialling = self._running_loop().create_task(self._dial(client, server, to_host, to_port))
            return client

        listener = await self._loop.create_server(accept, host, port)
        self._servers.append(listener)
        return int(listener.sockets[0].getsockname()[1])

    async def _dial(self, client: Leg, server: Leg, host: str, port: int) -> None:
        await asyncio.sleep(2 * self.one_way_s)  # the handshake crosses the link
        while self.is_cut and not self._refusing:
            await asyncio.sleep(0.01)
        try:
            if self._refusing:
                raise ConnectionRefusedError
            await self._running_loop().create_connection(lambda: server, host, port)
            client.pump()
        except OSError:
            client.abort()

    async def command(self, line: str) -> str:
        """Carry out one control command; the answer begins with "error" where it is wrong."""
        verb, *arguments = line.split() or [""]
        if verb == "stats":
            return json.dumps(
                {**self.shape, "connections": len(self.legs), "is_cut": self.is_cut, **self.delivered}
            )
        if verb not in ("cut", "refuse", "restore", "reset", "set"):
            return "error: commands: cut, reset, refuse, restore, set NAME=VALUE…, stats"
        if verb in ("cut", "refuse", "restore"):
            self.is_cut, self._refusing = verb != "restore", verb == "refuse"
        if verb in ("reset", "refuse"):
            for leg in list(self.legs):
                leg.abort()
        if verb == "set":
            try:
                new = {name: float(value) for name, value in (word.split("=", 1) for word in arguments)}
            except ValueError:
                return "error: set takes NAME=NUMBER"
            if set(new) - set(self.shape):
                return f"error: can set {', '.join(self.shape)}"
            self.shape.update(new)
        for leg in list(self.legs):
            leg.pump()
        return "ok"

    async def close(self) -> None:
        """Stop listening and abort what is connected."""
        for server in self._servers:
            server.close()
        await self.command("refuse")

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "start() comes first"
        return self._loop


def send_command(path: str | os.PathLike[str], line: str, timeout: float = 5.0) -> str:
    """Send one command to a control socket; raises FarsideError if it is refused or nobody answers."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout)
            connection.connect(os.fspath(path))
            connection.sendall(line.strip().encode() + b"\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    except OSError as error:
        raise FarsideError(f"no proxy answers at {os.fspath(path)}: {error}") from error
    if answer.startswith("error"):
        raise UsageError(answer.removeprefix("error: "))
    return answer


async def _watch_stdin(stop: asyncio.Event) -> None:
    """Set `stop` once standard input ends: the parent is gone."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(4096):
        pass
    stop.set()


async def _serve(
    proxy: DelayProxy, pairs: list[tuple[str, str]], control: str | None, *, until_eof: bool
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    async def on_control(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await proxy.command((await reader.readline()).decode())).encode())
        await writer.drain()
        writer.close()

    ports = []
    for listen, to in pairs:
        (host, port), (to_host, to_port) = listen.rsplit(":", 1), to.rsplit(":", 1)
        ports.append(f"{host}:{await proxy.start(host, int(port), to_host, int(to_port))}")
    server = await asyncio.start_unix_server(on_control, control) if control else None
    watcher = asyncio.create_task(_watch_stdin(stop)) if until_eof else None
    print("ready", *ports, flush=True)
    try:
        await stop.wait()
        await proxy.close()
    finally:
        if watcher:
            watcher.cancel()
        if server and control:
            server.close()
            Path(control).unlink(missing_ok=True)


@click.command(context_settings={"max_content_width": 110})
@click.option("--listen", multiple=True, metavar="HOST:PORT", help="Port 0 picks one. Repeatable.")
@click.option("--to", multiple=True, metavar="HOST:PORT", help="Server for the --listen of the same rank.")
@click.option("--rtt", type=click.FloatRange(min=0), default=60.0, show_default=True, help="ms")
@click.option("--rate", type=click.FloatRange(min=0), default=0.0, help="Mbit/s each way; 0 is no limit.")
@click.option("--window", type=click.FloatRange(min=1), default=8192.0, show_default=True, help="KB")
@click.option("--control", metavar="PATH", help="Unix socket for commands.")
@click.option("--send", metavar="PATH", help="Send a line from standard input to a running proxy's socket.")
@click.option("--until-eof", is_flag=True, help="Also end when standard input closes (the parent is gone).")
def main(
    listen: tuple[str, ...],
    to: tuple[str, ...],
    rtt: float,
    rate: float,
    window: float,
    control: str | None,
    send: str | None,
    until_eof: bool,
) -> None:
    """A TCP proxy that adds the delay and the rate of a wide-area link."""
    try:
        if send:
            print(send_command(send, sys.stdin.readline()))
            return
        if not listen or len(listen) != len(to):
            raise click.UsageError("give as many --to as --listen")
        proxy = DelayProxy(rtt, rate, window)
        asyncio.run(_serve(proxy, list(zip(listen, to, strict=True)), control, until_eof=until_eof))
    except (FarsideError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
