from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.wire import HELLO, Hub, connected, pair, run, served, until

from farside.errors import (
    AuthError,
    FarsideError,
    HubUnreachable,
    ProtocolError,
    RemoteError,
    StaleVersion,
    UsageError,
    VersionMismatch,
)
from farside.protocol.connection import Connection, Responder, ServerConnection, connect, serve
from farside.protocol.frames import MAX_REPLY_PAYLOAD, WINDOW
from farside.protocol.messages import (
    Data,
    DirChange,
    Failure,
    Goodbye,
    Hello,
    Invalidate,
    ListTree,
    Read,
    ReadDone,
    Stat,
    StatReply,
    Welcome,
)

MIB = 1024 * 1024


def stat(*paths: bytes) -> Stat:
    return Stat("p", paths)


def reply(*values: bytes) -> StatReply:
    return StatReply(tuple((0, value) for value in values))


async def echo(conn: ServerConnection, message: Any, payload: Any, respond: Responder) -> None:
    await respond.finish(reply(*message.paths), payload)


def test_many_requests_are_in_flight_and_answered_in_any_order() -> None:
    async def main() -> None:
        gates: dict[bytes, asyncio.Event] = {b"%d" % n: asyncio.Event() for n in range(100)}

        async def answer(conn: Any, message: Any, payload: Any, respond: Responder) -> None:
            await gates[message.paths[0]].wait()
            await respond.finish(reply(*message.paths))

        async with pair(answer) as (hub, spoke):
            calls = {name: asyncio.create_task(spoke.call(stat(name), timeout=5)) for name in gates}
            await until(lambda: len(hub.seen) == 100)
            assert spoke.inflight == 100
            order = list(gates)
            random.Random(1).shuffle(order)
            for name in order:
                gates[name].set()
                assert (await calls[name]).message == reply(name)
            assert spoke.inflight == 0

    run(main())


@pytest.mark.parametrize("size", [0, 1, 1000, 65536, 1_000_000, MAX_REPLY_PAYLOAD])
def test_payloads_travel_both_ways(size: int) -> None:
    async def main() -> None:
        payload = random.Random(size).randbytes(size)
        async with pair(echo) as (_, spoke):
            answer = await spoke.call(stat(b"a"), payload, timeout=10, expect=size)
            assert answer.payload == payload
            assert spoke.expected_bytes == 0
            assert spoke.bytes_in > size and spoke.bytes_out > size

    run(main())


def test_parts_then_the_final_reply() -> None:
    async def answer(conn: Any, message: Any, payload: Any, respond: Responder) -> None:
        for n in range(20):
            await respond.part(Data(()), [bytes([n]) * 100_000, memoryview(b"tail")])
        await respond.finish(ReadDone(7))

    async def main() -> None:
        async with pair(answer) as (_, spoke):
            replies = [r async for r in spoke.stream(Read("p", (), "fill"), timeout=5, expect=20 * 100_004)]
            assert [bytes(r.payload) for r in replies[:-1]] == [
                bytes([n]) * 100_000 + b"tail" for n in range(20)
            ]
            assert replies[-1].message == ReadDone(7)
            assert spoke.expected_bytes == 0 and spoke.inflight == 0

    run(main())


def test_expected_bytes_shrink_as_payload_comes() -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def answer(conn: Any, message: Any, payload: Any, respond: Responder) -> None:
            await respond.part(Data(()), bytes(600))
            await go.wait()
            await respond.finish(ReadDone(0))

        async with pair(answer) as (_, spoke):
            async with spoke.stream(Read("p", (), "fill"), timeout=5, expect=1000) as replies:
                assert spoke.expected_bytes == 1000
                await anext(replies)
                assert spoke.expected_bytes == 400
                go.set()
                await anext(replies)
                assert spoke.expected_bytes == 0

    run(main())


@pytest.mark.parametrize(
    ("raised", "kind", "number"),
    [
        (FileNotFoundError(errno.ENOENT, "gone", "/secret/a"), RemoteError, errno.ENOENT),
        (RemoteError("no", errno=errno.EACCES, path=b"a"), RemoteError, errno.EACCES),
        (StaleVersion("changed", path=b"a"), StaleVersion, errno.ESTALE),
        (AuthError("not yours"), AuthError, errno.EACCES),
        (ProtocolError("bad range"), ProtocolError, errno.EPROTO),
        (KeyError("bug"), RemoteError, errno.EIO),
    ],
)
def test_errors_at_the_hub_are_raised_at_the_spoke(
    raised: Exception, kind: type[FarsideError], number: int
) -> None:
    async def answer(conn: Any, message: Any, payload: Any, respond: Responder) -> None:
        raise raised

    async def main() -> None:
        async with pair(answer) as (_, spoke):
            with pytest.raises(kind) as caught:
                await spoke.call(stat(b"a"), timeout=5)
            assert type(caught.value) is kind and caught.value.errno == number
            assert caught.value.hub == spoke.address
            assert "bug" not in str(caught.value)
            await spoke.ping(0, timeout=5)  # the connection has not suffered

    run(main())


def test_a_failure_with_a_code_of_its_own() -> None:
    async def answer(conn: Any, message: Any, payload: Any, respond: Responder) -> None:
        code = message.paths[0].decode()
        await respond.finish(Failure(errno.ENOENT, code, "says the hub", b"x", True))

    async def main() -> None:
        async with pair(answer) as (_, spoke):
            with pytest.raises(AuthError, match="says the hub"):
                await spoke.call(stat(b"bad_token"), timeout=5)
            with pytest.raises(RemoteError) as caught:
                await spoke.call(stat(b"no_portal"), timeout=5)
            assert caught.value.errno == errno.ENODEV, "a missing portal must not look like a missing file"
            assert caught.value.retry and caught.value.path == b"x"

    run(main())


def test_a_handler_that_does_not_answer_is_an_error_not_a_hang() -> None:
    async def answer(conn: Any, message: Any, payload: Any, respond: Responder) -> None:
        return

    async def main() -> None:
        async with pair(answer) as (_, spoke):
            with pytest.raises(RemoteError, match="RuntimeError"):
                await spoke.call(stat(b"a"), timeout=5)

    run(main())


async def never(conn: Any, message: Any, payload: Any, respond: Responder) -> None:
    await asyncio.Event().wait()


def test_a_call_that_is_not_answered_ends_at_its_deadline_and_the_hub_is_told() -> None:
    async def main() -> None:
        async with pair(never) as (hub, spoke):
            with pytest.raises(HubUnreachable, match=r"no answer to Stat within 0\.05 s"):
                await spoke.call(stat(b"a"), timeout=0.05, expect=10)
            assert spoke.inflight == 0 and spoke.expected_bytes == 0
            await until(lambda: hub.cancelled == 1)

    run(main())


def test_a_silent_stream_ends_but_a_talking_one_may_last() -> None:
    async def main() -> None:
        async def answer(conn: Any, message: Any, payload: Any, respond: Responder) -> None:
            for _ in range(10):
                await respond.part(Data(()), b"x")
                await asyncio.sleep(0.03)
            await asyncio.Event().wait()

        async with pair(answer) as (hub, spoke):
            count = 0
            started = time.monotonic()
            with pytest.raises(HubUnreachable, match="no answer to Read"):
                async for _ in spoke.stream(Read("p", (), "fill"), timeout=0.15):
                    count += 1
            assert count == 10 and time.monotonic() - started > 0.4
            await until(lambda: hub.cancelled == 1)

    run(main())


@pytest.mark.parametrize("how", ["aclose", "context", "drop", "cancel"])
def test_leaving_a_stream_early_stops_the_hub(how: str) -> None:
    async def main() -> None:
        async def answer(conn: Any, message: Any, payload: Any, respond: Responder) -> None:
            while True:
                await respond.part(Data(()), bytes(100_000))
                await asyncio.sleep(0)

        async with pair(answer) as (hub, spoke):
            stream = spoke.stream(Read("p", (), "fill"), timeout=5, expect=10**9)
            await anext(stream)
            if how == "aclose":
                await stream.aclose()
            elif how == "context":
                async with stream:
                    pass
            elif how == "drop":
                del stream
                gc.collect()
            else:

                async def read() -> None:
                    async for _ in stream:
                        pass

                task = asyncio.create_task(read())
                await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await until(lambda: hub.cancelled == 1)
            assert spoke.expected_bytes == 0 and spoke.inflight == 0
            await spoke.ping(0, timeout=5)  # what came late was read and dropped

    run(main())


def test_a_cancelled_call_tells_the_hub() -> None:
    async def main() -> None:
        async with pair(never) as (hub, spoke):
            task = asyncio.create_task(spoke.call(stat(b"a"), timeout=5))
            await until(lambda: len(hub.seen) == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: hub.cancelled == 1)
            await spoke.ping(0, timeout=5)

    run(main())


def test_the_hub_sends_no_further_than_the_window_of_a_stream() -> None:
    async def main() -> None:
        sent = 0

        async def answer(conn: Any, message: Any, payload: Any, respond: Responder) -> None:
            nonlocal sent
            for _ in range(60):
                await respond.part(Data(()), bytes(MIB))
                sent += 1
            await respond.finish(ReadDone(0))

        async with pair(answer) as (_, spoke):
            stream = spoke.stream(Read("p", (), "fill"), timeout=5)
            await until(lambda: sent >= WINDOW // MIB)
            for _ in range(20):
                await spoke.ping(0, timeout=5)  # other streams go on meanwhile
            assert sent <= WINDOW // MIB + 1
            assert len([r async for r in stream]) == 61

    run(main())


def test_a_slow_reader_is_not_taken_for_a_silent_hub() -> None:
    async def answer(conn: Any, message: Any, payload: Any, respond: Responder) -> None:
        for _ in range(40):
            await respond.part(Data(()), bytes(MIB))
        await respond.finish(ReadDone(0))

    async def main() -> None:
        async with pair(answer) as (_, spoke):
            stream = spoke.stream(Read("p", (), "fill"), timeout=0.1)
            await anext(stream)
            await asyncio.sleep(0.4)
            assert len([r async for r in stream]) == 40

    run(main())


def test_a_small_frame_is_not_stuck_behind_many_bulk_ones() -> None:
    async def main() -> None:
        async def answer(conn: Any, message: Any, payload: Any, respond: Responder) -> None:
            for _ in range(30):
                await respond.part(Data(()), bytes(MIB))
            await respond.finish(ReadDone(0))

        async with pair(answer) as (_, spoke):
            order: list[str] = []

            async def bulk() -> None:
                async for _ in spoke.stream(Read("p", (), "fill"), timeout=5):
                    order.append("bulk")

            async def ping() -> None:
                await spoke.ping(0, timeout=5)
                order.append("ping")

            tasks = [asyncio.create_task(bulk()) for _ in range(8)]
            await until(lambda: len(order) > 5)
            before = len(order)
            await ping()
            # 240 MiB are waiting; a few MiB of them may already be in the sockets' buffers.
            assert order.index("ping") - before < 60
            await asyncio.gather(*tasks)

    run(main())


def test_a_large_request_is_finished_although_its_caller_was_cancelled() -> None:
    async def main() -> None:
        async with pair(echo) as (_, spoke):
            task = asyncio.create_task(spoke.call(stat(b"big"), bytes(30 * MIB), timeout=5))
            while spoke.bytes_out < MIB:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await spoke.ping(0, timeout=5)
            assert not spoke.closed

    run(main())


def test_too_many_requests_are_refused_as_busy_but_pings_pass() -> None:
    async def main() -> None:
        async with pair(never, max_streams=4) as (hub, spoke):
            tasks = [asyncio.create_task(spoke.call(stat(b"a"), timeout=5)) for _ in range(4)]
            await until(lambda: len(hub.seen) == 4)
            with pytest.raises(RemoteError) as caught:
                await spoke.call(stat(b"b"), timeout=5)
            assert caught.value.errno == errno.EAGAIN and caught.value.retry
            await spoke.ping(0, timeout=5)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: hub.cancelled == 4)

    run(main())


def test_too_many_connections_are_refused() -> None:
    async def main() -> None:
        hub = Hub(echo)
        async with served(hub, max_connections=2) as server:
            first, second = await connected(server.port), await connected(server.port)
            with pytest.raises(RemoteError, match="too many connections"):
                await connected(server.port)
            await first.close()
            await until(lambda: len(server.connections) == 1)
            third = await connected(server.port)
            await third.close()
            await second.close()

    run(main())


def test_ping_measures_and_acknowledges() -> None:
    async def main() -> None:
        async with pair() as (hub, spoke):
            assert spoke.rtt_s is None
            times = [await spoke.ping(n, timeout=5) for n in range(5)]
            assert spoke.rtt_s == min(times) > 0
            assert [message.ack for message in hub.seen] == [0, 1, 2, 3, 4]  # type: ignore[union-attr]
            assert spoke.last_pong is not None

    run(main())


def test_pushes_arrive_in_order_and_a_goodbye_gives_the_reason() -> None:
    async def main() -> None:
        pushed: list[Any] = []
        hub = Hub(never)
        async with served(hub) as server:
            spoke = await connected(server.port, on_push=pushed.append)
            call = asyncio.create_task(spoke.call(stat(b"a"), timeout=5))
            await until(lambda: len(hub.seen) == 1)
            changes = [Invalidate("p", seq, (DirChange(b"d", (b"n",)),)) for seq in range(50)]
            for change in changes:
                hub.connections[0].push(change)
            hub.connections[0].abort(AuthError("revoked", retry=False))
            with pytest.raises(HubUnreachable, match="said goodbye: revoked") as caught:
                await call
            assert not caught.value.retry
            assert pushed == [*changes, Goodbye("revoked", False)]
            await spoke.wait_closed()
            assert hub.closed_connections == hub.connections and hub.cancelled == 1
            with pytest.raises(HubUnreachable):
                await spoke.call(stat(b"a"), timeout=5)

    run(main())


def test_stopping_the_hub_fails_what_is_in_flight_and_a_new_hub_is_found_at_the_same_port() -> None:
    async def main() -> None:
        async with served(Hub(never)) as server:
            spoke = await connected(server.port)
            call = asyncio.create_task(spoke.call(stat(b"a"), timeout=5))
            await spoke.ping(0, timeout=5)
            await server.close()
            with pytest.raises(HubUnreachable, match="the hub is stopping") as caught:
                await call
            assert caught.value.retry
            with pytest.raises(HubUnreachable, match="nothing listens"):
                await connected(server.port)
            again = await serve("127.0.0.1", server.port, tls=None, handler=Hub(echo))
            spoke = await connected(server.port)
            assert (await spoke.call(stat(b"b"), timeout=5)).message == reply(b"b")
            await spoke.close()
            await again.close()

    run(main())


def test_closing_fails_what_is_in_flight() -> None:
    async def main() -> None:
        async with pair(never) as (hub, spoke):
            call = asyncio.create_task(spoke.call(stat(b"a"), timeout=5))
            await until(lambda: len(hub.seen) == 1)
            await spoke.close()
            with pytest.raises(HubUnreachable, match="closed by this side"):
                await call
            await until(lambda: hub.cancelled == 1 and len(hub.closed_connections) == 1)

    run(main())


def test_a_spoke_that_does_not_read_is_cut_off() -> None:
    async def main() -> None:
        async with pair() as (hub, spoke):
            assert spoke._transport is not None
            spoke._transport.pause_reading()
            conn = hub.connections[0]
            push = Invalidate("p", 1, (DirChange(b"x" * 250, tuple(b"n%d" % n for n in range(10_000))),))
            for _ in range(2000):
                conn.push(push)
                if conn.closed:
                    break
            assert conn.closed and "does not read" in str(conn.close_reason)

    run(main())


# -- greetings ------------------------------------------------------------------------------------


def test_a_refused_hello() -> None:
    async def main() -> None:
        hub = Hub()
        hub.refuse = AuthError("this spoke was revoked", hint="ask for a new token")
        async with served(hub) as server:
            with pytest.raises(AuthError, match=r"revoked.*ask for a new token"):
                await connected(server.port)
            await until(lambda: not server.connections)
        assert hub.closed_connections == []

    run(main())


@pytest.mark.parametrize(("newest", "oldest"), [(0, 0), (9, 7)])
def test_a_spoke_without_a_common_version_is_told_both(newest: int, oldest: int) -> None:
    async def main() -> None:
        async with served(Hub()) as server:
            with pytest.raises(
                VersionMismatch, match=rf"old 0\) speaks protocol {oldest} to {newest}, the hub speaks 1 to 1"
            ):
                await connected(server.port, hello=Hello(newest, oldest, "old 0", "spoke"))

    run(main())


def test_a_newer_spoke_that_knows_the_old_version_is_admitted() -> None:
    async def main() -> None:
        async with served(Hub()) as server:
            spoke = await connected(server.port, hello=Hello(5, 1, "new", "spoke"))
            assert spoke.peer.protocol == 1
            await spoke.close()

    run(main())


def test_a_hub_of_another_version_is_named() -> None:
    async def main() -> None:
        connection: Connection | None = None
        async with served(Hub()) as server:
            connection = await connected(server.port)
            connection.welcomed = asyncio.get_running_loop().create_future()
            with pytest.raises(VersionMismatch, match=r"farside 9\) speaks protocol 9, this spoke speaks 1"):
                connection._take_welcome(Welcome(9, "farside 9", "hub", 0))
            await connection.close()

    run(main())


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it answered: HTTP/1.1 400 Bad Request"),
        (b"FARSIDE2", "another farside framing"),
        (b"\x15\x03\x03\x00\x02\x02\x32", "speaks TLS"),
    ],
)
def test_the_wrong_port_is_explained(first: bytes, says: str) -> None:
    async def main() -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(100)
            writer.write(first)
            writer.close()

        other = await asyncio.start_server(accept, "127.0.0.1", 0)
        with pytest.raises(ProtocolError, match=says):
            await connected(other.sockets[0].getsockname()[1])
        other.close()

    run(main())


def test_a_port_that_never_answers_or_closes_at_once() -> None:
    async def main() -> None:
        held: list[Any] = []

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            held.append(writer)

        async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        for accept, says in ((silent, "no answer within 0.1 s"), (closing, "closed by the other|lost")):
            other = await asyncio.start_server(accept, "127.0.0.1", 0)
            with pytest.raises(HubUnreachable, match=says):
                await connected(other.sockets[0].getsockname()[1], timeout=0.1)
            other.close()
        for writer in held:
            writer.close()

    run(main())


def test_addresses_that_cannot_work() -> None:
    async def main() -> None:
        with pytest.raises(HubUnreachable, match="cannot be resolved"):
            await connect("no-such-host.invalid", 1, tls=None, hello=HELLO, timeout=5)
        async with served(Hub()) as server:
            with pytest.raises(FarsideError, match="the port is taken") as caught:
                await serve("127.0.0.1", server.port, tls=None, handler=Hub())
            assert caught.value.errno == errno.EADDRINUSE
            with pytest.raises(FarsideError, match="does not have that address"):
                await serve("192.0.2.1", 0, tls=None, handler=Hub())
            with pytest.raises(UsageError, match="congestion control 'nonsense'"):
                await connected(server.port, congestion="nonsense")
            with pytest.raises(UsageError, match="congestion control 'nonsense'"):
                await serve("127.0.0.1", 0, tls=None, handler=Hub(), congestion="nonsense")
            spoke = await connected(server.port, congestion="reno", local=("127.0.0.1", 0))
            await spoke.close()

    run(main())


def test_a_peer_that_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farside.protocol.server.HELLO_TIMEOUT_S", 0.05)

    async def main() -> None:
        async with served(Hub()) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()

    run(main())


# -- state machine against a model ------------------------------------------------------------------

steps = st.lists(
    st.tuples(
        st.sampled_from(["call", "stream", "cancel", "leave", "ping"]),
        st.integers(0, 300_000),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=25, deadline=None)
@given(steps, st.integers(0, 2**32))
def test_each_request_gets_its_own_bytes_whatever_the_others_do(
    plan: list[tuple[str, int, int]], seed: int
) -> None:
    rng = random.Random(seed)

    def body(name: bytes, part: int, size: int) -> bytes:
        return (b"%s/%d;" % (name, part) * (size // 4 + 1))[:size]

    async def answer(conn: Any, message: Any, payload: Any, respond: Responder) -> None:
        name, parts, size = message.path.split(b":")
        for part in range(int(parts)):
            await respond.part(Data(()), body(name, part, int(size)))
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)
        await respond.finish(ReadDone(int(parts)), body(name, -1, int(size)))

    async def main() -> None:
        async with pair(answer) as (hub, spoke):

            async def one(what: str, number: int, size: int, parts: int) -> None:
                name = b"r%d" % number
                parts = 0 if what == "call" else parts
                request = ListTree("p", b"%s:%d:%d" % (name, parts, size), 0)
                if what == "ping":
                    await spoke.ping(0, timeout=10)
                elif what == "call":
                    got = await spoke.call(request, timeout=10)
                    assert got.payload == body(name, -1, size)
                elif what == "cancel":
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(rng.random() * 0.01):
                            await spoke.call(
                                ListTree("p", b"%s:0:%d" % (name, size), 0), bytes(size), timeout=10
                            )
                else:
                    async with spoke.stream(request, bytes(size), timeout=10, expect=size * parts) as replies:
                        part = 0
                        async for got in replies:
                            last = isinstance(got.message, ReadDone)
                            assert got.payload == body(name, -1 if last else part, size)
                            part += 1
                            if what == "leave" and part > parts // 2:
                                return
                        assert part == parts + 1

            await asyncio.gather(*(one(w, n, s, p) for n, (w, s, p) in enumerate(plan)))
            await spoke.ping(0, timeout=10)
            assert spoke.inflight == 0 and spoke.expected_bytes == 0
            conn = hub.connections[0]
            await until(lambda: not conn._tasks and not conn._responders and conn._held == 0)

    run(main())
