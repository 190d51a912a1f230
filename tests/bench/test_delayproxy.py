"""The delay proxy: round trips, rate, and every kind of cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from farside.bench.delayproxy import DelayProxy, send_command
from farside.bench.link import ProxyLink
from farside.bench.netlink import Shape
from farside.errors import FarsideError, UsageError

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def proxied(**shape: float) -> AsyncIterator[tuple[DelayProxy, Callable[[], Awaitable[Streams]]]]:
    """A proxy in front of an echo server, and a function that connects through it."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.close()
        except ConnectionError:
            pass

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = DelayProxy(**shape)
    port = await proxy.start("127.0.0.1", 0, "127.0.0.1", server.sockets[0].getsockname()[1])
    try:
        yield proxy, lambda: asyncio.open_connection("127.0.0.1", port)
    finally:
        await proxy.close()
        server.close()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


async def ask(streams: Streams, data: bytes) -> bytes:
    reader, writer = streams
    writer.write(data)
    return await reader.readexactly(len(data))


def test_a_reply_takes_a_round_trip_and_the_first_one_a_handshake_more() -> None:
    async def test() -> None:
        async with proxied(rtt=40) as (_, connect):
            now = asyncio.get_running_loop().time
            streams = await connect()
            began = now()
            assert await ask(streams, b"first") == b"first"
            middle = now()
            assert await ask(streams, b"second") == b"second"
            assert middle - began >= 0.079
            assert 0.039 <= now() - middle < 0.5

    run(test())


def test_bytes_come_whole_and_in_order_at_the_rate() -> None:
    async def test() -> None:
        async with proxied(rtt=2, rate=80) as (proxy, connect):  # 10 MB/s
            data = bytes(range(256)) * 8192  # 2 MiB
            streams = await connect()
            now = asyncio.get_running_loop().time
            began = now()
            assert await ask(streams, data) == data
            assert now() - began >= 0.2
            assert proxy.delivered["to-client"] == len(data)

    run(test())


def test_cut_holds_bytes_and_restore_delivers_them() -> None:
    async def test() -> None:
        async with proxied(rtt=2) as (proxy, connect):
            streams = await connect()
            assert await ask(streams, b"a") == b"a"
            assert await proxy.command("cut") == "ok"
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ask(streams, b"b"), 0.2)
            await proxy.command("restore")
            assert await streams[0].readexactly(1) == b"b"

    run(test())


def test_reset_aborts_what_is_connected() -> None:
    async def test() -> None:
        async with proxied(rtt=2) as (proxy, connect):
            streams = await connect()
            assert await ask(streams, b"a") == b"a"
            await proxy.command("reset")
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await ask(streams, b"b")
            assert await ask(await connect(), b"again") == b"again"

    run(test())


def test_refuse_turns_new_connections_away_until_restored() -> None:
    async def test() -> None:
        async with proxied(rtt=2) as (proxy, connect):
            await proxy.command("refuse")
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await ask(await connect(), b"x")
            await proxy.command("restore")
            assert await ask(await connect(), b"y") == b"y"

    run(test())


def test_half_close_goes_through() -> None:
    async def test() -> None:
        async with proxied(rtt=2) as (_, connect):
            reader, writer = await connect()
            writer.write(b"all of it")
            writer.write_eof()
            assert await reader.read() == b"all of it"

    run(test())


def test_commands_are_checked() -> None:
    async def test() -> None:
        async with proxied(rtt=2) as (proxy, _):
            assert await proxy.command("set rtt=80 rate=1000") == "ok"
            assert json.loads(await proxy.command("stats"))["rtt"] == 80
            for wrong in ("set speed=1", "set rtt=fast", "fly", ""):
                assert (await proxy.command(wrong)).startswith("error: ")

    run(test())


@pytest.mark.process
def test_as_a_program_it_is_controlled_by_a_socket(tmp_path: Path) -> None:
    link = ProxyLink(Shape(rtt=5), tmp_path)
    try:
        assert link.command("cut") == "ok"
        assert link.traffic().to_spoke == 0
        with pytest.raises(UsageError):
            link.command("set", "colour=1")
    finally:
        link.close()
    with pytest.raises(FarsideError, match="no proxy answers"):
        send_command(tmp_path / "link.sock", "stats")
