"""What the wire may do to a connection: right bytes or an error, and always in bounded time."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from tests.protocol.wire import Damage, Hub, connected, proxied, run, served, until

from farside.errors import FarsideError, HubUnreachable, ProtocolError
from farside.protocol.connection import Connection, Responder
from farside.protocol.messages import Data, ListDir, ListDirReply, Read, ReadDone

LISTING = random.Random(5).randbytes(150)
PART = random.Random(6).randbytes(200_000)


async def answer(conn: Any, message: Any, payload: Any, respond: Responder) -> None:
    if isinstance(message, ListDir):
        await respond.finish(
            ListDirReply(message.path, b"value", b"digest", False, False, True), message.path + LISTING
        )
        return
    for _ in range(8):
        await respond.part(Data(()), PART)
    await respond.finish(ReadDone(8 * len(PART)))


async def list_dir(spoke: Connection, path: bytes, timeout: float = 0.5) -> None:
    """One request; anything but exactly the right answer or a FarsideError fails the test."""
    reply = await spoke.call(ListDir("p", path), timeout=timeout)
    assert reply.message == ListDirReply(path, b"value", b"digest", False, False, True)
    assert reply.payload == path + LISTING


def flip(position: int, bits: int) -> Damage:
    def damage(data: bytes, at: int) -> bytes:
        if at <= position < at + len(data):
            changed = bytearray(data)
            changed[position - at] ^= bits
            return bytes(changed)
        return data

    return damage


def count_bytes(totals: list[int]) -> Damage:
    def damage(data: bytes, at: int) -> bytes:
        totals[0] = at + len(data)
        return data

    return damage


@pytest.mark.parametrize("direction", ["to_spoke", "to_hub"])
def test_every_byte_of_a_conversation_may_be_damaged(direction: str) -> None:
    """Greeting, request and reply, each byte in turn: an error, never a wrong answer."""

    async def main() -> None:
        async with served(Hub(answer)) as server:
            totals = [0]
            async with proxied(server.port, **{direction: count_bytes(totals)}) as port:
                spoke = await connected(port)
                await list_dir(spoke, b"dir")
                conversation = totals[0]
                await spoke.close()
            assert conversation > 130

            async def damaged(position: int) -> None:
                async with proxied(server.port, **{direction: flip(position, 1 << position % 8)}) as port:
                    spoke: Connection | None = None
                    with pytest.raises((ProtocolError, HubUnreachable)):
                        spoke = await connected(port, timeout=0.5)
                        await list_dir(spoke, b"dir")
                    if spoke is not None:
                        await spoke.close()

            for first in range(0, conversation, 40):
                await asyncio.gather(*map(damaged, range(first, min(first + 40, conversation))))

    run(main())


@pytest.mark.parametrize("end", ["cut", "silence"])
def test_a_conversation_may_end_at_every_byte(end: str) -> None:
    async def main() -> None:
        async with served(Hub(answer)) as server:

            def limit(most: int) -> Damage:
                def damage(data: bytes, at: int) -> bytes | None:
                    if at >= most:
                        return None if end == "cut" else b""
                    return data[: most - at]

                return damage

            async def shortened(most: int) -> None:
                async with proxied(server.port, to_spoke=limit(most)) as port:
                    spoke: Connection | None = None
                    with pytest.raises(HubUnreachable):
                        spoke = await connected(port, timeout=0.2)
                        # A second request makes the proxy cut when only the first was passed on.
                        await list_dir(spoke, b"dir", timeout=0.2)
                        await list_dir(spoke, b"dir", timeout=0.2)
                    if spoke is not None:
                        await spoke.close()

            for first in range(0, 240, 40):
                await asyncio.gather(*map(shortened, range(first, first + 40, 3)))

    run(main())


@pytest.mark.parametrize("what", ["drop", "duplicate", "swap", "insert"])
def test_pieces_of_the_stream_lost_repeated_or_out_of_order(what: str) -> None:
    async def main() -> None:
        async with served(Hub(answer)) as server:
            for seed in range(12):
                rng = random.Random(seed)
                hit = rng.randint(200, 1_500_000)
                done = False

                def damage(data: bytes, at: int, hit: int = hit) -> bytes:
                    nonlocal done
                    if done or at + len(data) <= hit or len(data) < 400:
                        return data
                    done = True
                    a, b, c = data[:100], data[100:300], data[300:]
                    return {
                        "drop": a + c,
                        "duplicate": a + b + b + c,
                        "swap": b + a + c,
                        "insert": a + b"\x00" * 7 + b + c,
                    }[what]

                async with proxied(server.port, to_spoke=damage) as port:
                    spoke = await connected(port)
                    parts: list[Any] = []
                    try:
                        async for reply in spoke.stream(Read("p", (), "fill"), timeout=0.3):
                            parts.append(reply)
                        await list_dir(spoke, b"after", timeout=0.3)
                        ended_well = True
                    except FarsideError:
                        ended_well = False
                    await spoke.close()
                    # Data payloads carry their chunks' checksums, which are above this layer; here no
                    # frame may be lost or made up, and none may have another length.
                    assert all(len(r.payload) == len(PART) for r in parts if isinstance(r.message, Data))
                    assert not (ended_well and len(parts) != 9)
                    assert done and (not ended_well or what == "swap")
                    done = False

    run(main())


def test_a_dead_link_fails_requests_at_their_deadline_and_a_new_connection_works() -> None:
    async def main() -> None:
        async with served(Hub(answer)) as server:
            dead = False
            async with proxied(server.port, to_spoke=lambda data, at: b"" if dead else data) as port:
                spoke = await connected(port)
                await list_dir(spoke, b"a")
                dead = True
                with pytest.raises(HubUnreachable, match=r"no answer to ListDir within 0\.1 s"):
                    await list_dir(spoke, b"b", timeout=0.1)
                with pytest.raises(HubUnreachable, match="no answer to Ping"):
                    await spoke.ping(0, timeout=0.1)
                spoke.abort(HubUnreachable("the heartbeat was not answered"))
                with pytest.raises(HubUnreachable, match="heartbeat"):
                    await list_dir(spoke, b"c")
                dead = False
                again = await connected(port)
                await list_dir(again, b"d")
                await again.close()

    run(main())


def test_a_delayed_reply_after_the_deadline_is_dropped() -> None:
    async def main() -> None:
        gate = asyncio.Event()

        async def late(conn: Any, message: Any, payload: Any, respond: Responder) -> None:
            try:
                await gate.wait()
            except asyncio.CancelledError:
                # A hub that is too far on to stop: the answer to the cancelled request goes out all the same.
                pass
            await answer(conn, message, payload, respond)

        hub = Hub(late)
        async with served(hub) as server:
            spoke = await connected(server.port)
            with pytest.raises(HubUnreachable):
                await list_dir(spoke, b"a", timeout=0.05)
            await until(lambda: spoke.bytes_in > 300)
            gate.set()
            await list_dir(spoke, b"b")
            await spoke.close()

    run(main())


def test_garbage_from_a_spoke_closes_only_its_own_connection() -> None:
    async def main() -> None:
        async with served(Hub(answer)) as server:
            good = await connected(server.port)
            rng = random.Random(1)
            for garbage in (b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(5000), b"FARSIDE1" + rng.randbytes(500)):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(garbage)
                try:
                    while await asyncio.wait_for(reader.read(1000), 5):
                        pass
                except ConnectionError:
                    pass
                writer.close()
            await list_dir(good, b"a")
            await good.close()
            await until(lambda: not server.connections)

    run(main())
