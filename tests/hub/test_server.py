"""The hub over real connections on loopback."""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
import time
from pathlib import Path
from typing import Any

import pytest
from tests.hub.hub_tools import HELLO, Spoke, assemble, names, serving, spoke_at

from farside.errors import AuthError, FarsideError, HubUnreachable, RemoteError, UsageError
from farside.hub import Hub, PortalSpec, state
from farside.hub import server as server_module
from farside.protocol.attributes import attr_of, digest_of, iter_listing
from farside.protocol.connection import connect
from farside.protocol.join import join
from farside.protocol.messages import (
    CHUNK,
    MAX_READ,
    Attach,
    Attached,
    Data,
    FileRanges,
    GetXattrs,
    ListDir,
    ListTree,
    Read,
    Stat,
    Statfs,
    TreeDone,
    TreePart,
    pack_known,
)
from farside.protocol.tls import spoke_context, stranger_context
from farside.protocol.tokens import parse_token


async def ranges(spoke: Spoke, path: bytes, *wanted: tuple[int, int]) -> FileRanges:
    reply, _ = await spoke.call(Stat("p", (path,)))
    ((code, value),) = reply.results
    assert code == 0
    attr = attr_of(value)
    return FileRanges(path, attr.version, wanted or ((0, attr.size),))


def test_attach_list_and_read(tmp_path: Path) -> None:
    data = os.urandom(3 * CHUNK + 7)
    (tmp_path / "f").write_bytes(data)

    async def main() -> None:
        async with serving(tmp_path) as (hub, spoke):
            attached = await spoke.attach()
            assert len(attached.portal_id) == 16 and attached.watched and not attached.writable
            assert attr_of(attached.root).fileid == tmp_path.stat().st_ino
            reply, listing = await spoke.call(ListDir("p", b""))
            assert reply.path == b"" and reply.watched and reply.digest == digest_of(listing)
            entries = dict(iter_listing(listing))
            request = FileRanges(b"f", attr_of(entries[b"f"]).version, ((0, len(data)),))
            assert assemble(await spoke.read("p", request)) == {0: data}
            again, payload = await spoke.call(ListDir("p", b"", reply.digest))
            assert again.same and payload == b""
            status = hub.status()
            assert status["bytes"]["demand"] == len(data) and status["requests"]["Read"] == 1
            assert status["connections"][0]["portals"] == ["p"]

    asyncio.run(main())


def test_requests_that_cannot_be_served(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"data")

    async def main() -> None:
        async with serving(tmp_path) as (_, spoke):
            for message, code in (
                (Attach("q"), errno.ENODEV),
                (ListDir("q", b""), errno.ENODEV),
                (Read("q", (), "demand"), errno.ENODEV),
                (ListDir("p", b"none"), errno.ENOENT),
                (ListDir("p", b"f"), errno.ENOTDIR),
                (ListDir("p", b"../.."), errno.EINVAL),
                (ListTree("p", b"none", 10), errno.ENOENT),
                (Read("p", (FileRanges(b"f", b"", ((1, 1),)),), "demand"), errno.EINVAL),
                (Read("p", (), "curiosity"), errno.EINVAL),
                (Stat("p", (b"x",) * 20_001), errno.E2BIG),
            ):
                with pytest.raises(RemoteError) as caught:
                    await spoke.call(message)
                assert caught.value.errno == code, message
            reply, _ = await spoke.call(GetXattrs("p", (b"f", b"none")))
            assert [code for code, _ in reply.results] == [0, errno.ENOENT]
            reply, _ = await spoke.call(Statfs("p"))
            assert reply.blocks == os.statvfs(tmp_path).f_blocks

    asyncio.run(main())


def test_a_tree_by_difference(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"d{number:02}").mkdir()
        for name in range(30):
            (tmp_path / f"d{number:02}" / f"{name}").touch()

    async def tree(spoke: Spoke, known: dict[bytes, bytes]) -> tuple[dict[bytes, bytes], TreeDone, int]:
        found: dict[bytes, bytes] = {}
        sent = 0
        message = ListTree("p", b"", 10_000)
        async for reply in spoke.connection.stream(message, pack_known(known), timeout=10):
            if isinstance(reply.message, TreeDone):
                return found, reply.message, sent
            assert isinstance(reply.message, TreePart)
            at = 0
            for entry in reply.message.dirs:
                assert entry.watched and entry.same == (entry.length == 0)
                if not entry.same:
                    listing = bytes(reply.payload[at : at + entry.length])
                    assert digest_of(listing) == entry.digest
                found[entry.path] = entry.digest
                at += entry.length
            assert at == len(reply.payload)
            sent += at
        raise AssertionError("no TreeDone")

    async def main() -> None:
        async with serving(tmp_path) as (_, spoke):
            known, done, sent = await tree(spoke, {})
            assert len(known) == 41 == done.dirs and done.entries == 40 * 31 and not done.truncated
            again, done, resent = await tree(spoke, known)
            assert again == known and resent == 0 and done.dirs == 41
            (tmp_path / "d07" / "new").touch()
            changed, _, resent = await tree(spoke, known)
            assert {path for path in changed if changed[path] != known[path]} == {b"", b"d07"}
            assert 0 < resent < sent / 5

    asyncio.run(main())


def test_changes_are_pushed_to_all_that_attached(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")

    async def main() -> None:
        async with serving(tmp_path) as (hub, one):
            two = await spoke_at(hub.status()["port"])
            three = await spoke_at(hub.status()["port"])
            for spoke in (one, two):
                await spoke.attach()
            await one.call(ListDir("p", b""))
            request = await ranges(one, b"f")
            begun = time.monotonic()
            (tmp_path / "f").write_bytes(b"new")
            for spoke in (one, two):
                await spoke.told.until(lambda spoke=spoke: spoke.told.tells_of(b"", b"f"))
            assert time.monotonic() - begun < 1.0
            assert three.seqs == [], "it attached nothing"
            ((message, _),) = await one.read("p", request)
            assert message.failures[0].stale
            last = one.seqs[-1]
            await one.connection.ping(last, timeout=5)
            states = {c["address"]: c["unacknowledged"] for c in hub.status()["connections"]}
            assert sorted(states.values()) == [0, 0, two.seqs[-1]]
            await two.connection.close()
            await three.connection.close()

    asyncio.run(main())


def test_a_change_during_attach_is_not_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (hub, spoke):
            export = hub._exports["p"]
            root = export.tree.root

            def slowly() -> bytes:
                value = root()
                (tmp_path / "f").touch()
                while not export.watch.events:
                    time.sleep(0.001)
                time.sleep(0.05)
                return value

            export.tree.root = slowly  # type: ignore[method-assign]
            attached = await spoke.attach()
            assert attached.seq == 0
            await spoke.told.until(lambda: spoke.told.tells_of(b"", b"f"))
            assert spoke.seqs[0] == 1

    asyncio.run(main())


def test_demands_are_answered_while_bulk_reads_are_stuck(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"b" * (4 * MAX_READ))
    (tmp_path / "small").write_bytes(b"s" * 100)

    async def main() -> None:
        async with serving(tmp_path) as (_, spoke):
            big = await ranges(spoke, b"big", *[(at * MAX_READ, MAX_READ) for at in range(4)])
            small = await ranges(spoke, b"small")
            twice = FileRanges(b"big", big.version, big.ranges * 2)
            stuck = [spoke.connection.stream(Read("p", (twice,), "fill"), timeout=30) for _ in range(12)]
            for stream in stuck[:4]:
                await anext(stream)
            begun = time.monotonic()
            assert assemble(await spoke.read("p", small)) == {0: b"s" * 100}
            assert time.monotonic() - begun < 2.0
            for stream in stuck:
                await stream.aclose()

    asyncio.run(main())


def test_cancelled_reads_leave_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"b" * (4 * MAX_READ))

    def open_files() -> int:
        base = "/proc/self/fd"
        count = 0
        for number in os.listdir(base):
            try:
                count += os.readlink(f"{base}/{number}") == str(tmp_path / "big")
            except OSError:
                pass
        return count

    async def main() -> None:
        async with serving(tmp_path) as (hub, spoke):
            big = await ranges(spoke, b"big", *[(at * MAX_READ, MAX_READ) for at in range(4)])
            streams = [spoke.connection.stream(Read("p", (big,), "fill"), timeout=30) for _ in range(6)]
            await anext(streams[0])
            for stream in streams:
                await stream.aclose()
            async with asyncio.timeout(5):
                while open_files():
                    await spoke.connection.ping(0, timeout=5)
            other = await spoke_at(hub.status()["port"])
            stream = other.connection.stream(Read("p", (big,), "demand"), timeout=30)
            await anext(stream)
            other.connection.abort(HubUnreachable("test"))
            async with asyncio.timeout(5):
                while open_files():
                    await spoke.connection.ping(0, timeout=5)

    asyncio.run(main())


def test_a_spoke_without_heartbeat_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "POLL_S", 0.05)

    async def main() -> None:
        async with serving(tmp_path, lease_s=0.2) as (hub, spoke):
            beating = await spoke_at(hub.status()["port"])
            await beating.attach()
            await spoke.attach()
            gone = asyncio.create_task(spoke.connection.wait_closed())
            async with asyncio.timeout(5):
                while not gone.done():
                    await beating.connection.ping(beating.seqs[-1] if beating.seqs else 0, timeout=1)
                    await asyncio.sleep(0.05)
            assert not beating.connection.closed
            assert len(hub.status()["connections"]) == 1
            await beating.connection.close()

    asyncio.run(main())


def test_many_edits_while_reading_give_right_bytes_or_stale(tmp_path: Path) -> None:
    """Eight bytes, overwritten again and again, read over the wire by the version that was listed."""
    path = tmp_path / "f"
    path.write_bytes(bytes(8))

    async def main() -> None:
        seen: dict[bytes, bytes] = {}
        async with serving(tmp_path) as (_, spoke):
            stop = asyncio.Event()

            async def write() -> None:
                number = 0
                while not stop.is_set():
                    number += 1
                    with open(path, "r+b") as file:
                        file.write(bytes([number % 256]) * 8)
                    await asyncio.sleep(0.03 if number % 3 else 0.001)

            writing = asyncio.create_task(write())
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                request = await ranges(spoke, b"f")
                for message, payload in await spoke.read("p", request):
                    for block in message.blocks:
                        assert block.version == request.version
                        assert payload == payload[:1] * 8
                        assert seen.setdefault(block.version, payload) == payload
            stop.set()
            await writing
        assert len(seen) > 3

    asyncio.run(main())


# -- TLS, joining, rights ---------------------------------------------------------------------------


class Fabric:
    """A hub with TLS and two portals, and what it takes to join it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.directory = base / "hub"
        for name in ("one", "two"):
            (base / name).mkdir()
            (base / name / f"in-{name}").touch()
        state.init(self.directory, "ohio")
        self.hub = self.make()
        self.port = 0

    def make(self) -> Hub:
        specs = [PortalSpec(name, self.base / name) for name in ("one", "two")]
        return Hub(self.directory, specs)

    async def __aenter__(self) -> Fabric:
        self.port = await self.hub.start("127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.hub.stop()

    def token(self, portal: str, expires_s: float = 60) -> str:
        return state.invite(self.directory, portal, expires_s=expires_s, address=f"127.0.0.1:{self.port}")

    async def join(self, token: str, name: str = "gpu-1") -> ssl.SSLContext:
        identity = self.base / name
        await join("127.0.0.1", self.port, parse_token(token), identity, name, timeout=5)
        return spoke_context(identity)

    async def spoke(self, tls: ssl.SSLContext) -> Spoke:
        return await spoke_at(self.port, tls)


def test_a_spoke_sees_only_its_portals(tmp_path: Path) -> None:
    async def main() -> None:
        async with Fabric(tmp_path) as fabric:
            spoke = await fabric.spoke(await fabric.join(fabric.token("one")))
            attached = await spoke.attach("one")
            assert isinstance(attached, Attached)
            _, listing = await spoke.call(ListDir("one", b""))
            assert names(listing) == [b"in-one"]
            for message in (
                Attach("two"),
                ListDir("two", b""),
                ListTree("two", b"", 9),
                Stat("two", (b"",)),
                Read("two", (), "demand"),
                GetXattrs("two", (b"",)),
                Statfs("two"),
            ):
                with pytest.raises(RemoteError) as caught:
                    await spoke.call(message)
                assert caught.value.errno == errno.ENODEV
            await spoke.connection.close()

    asyncio.run(main())


def test_a_stranger_may_only_join(tmp_path: Path) -> None:
    async def main() -> None:
        async with Fabric(tmp_path) as fabric:
            connection = await connect(
                "127.0.0.1", fabric.port, tls=stranger_context(), hello=HELLO, timeout=5
            )
            for message in (Attach("one"), ListDir("one", b""), Read("one", (), "demand")):
                with pytest.raises(AuthError):
                    await connection.call(message, timeout=5)
            await connection.close()

    asyncio.run(main())


def test_tokens_that_do_not_work(tmp_path: Path) -> None:
    async def main() -> None:
        async with Fabric(tmp_path) as fabric:
            token = fabric.token("one")
            await fabric.join(token)
            with pytest.raises(AuthError, match="was used"):
                await fabric.join(token, "gpu-2")
            with pytest.raises(AuthError, match="expired"):
                await fabric.join(fabric.token("one", expires_s=-10), "gpu-3")
            assert [spoke.name for spoke in state.spokes(fabric.directory)] == ["gpu-1"]
            assert fabric.hub.status()["joined"] == 1

    asyncio.run(main())


def test_revoking_ends_live_connections_and_lets_nobody_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with Fabric(tmp_path) as fabric:
            tls = await fabric.join(fabric.token("one"))
            other = await fabric.spoke(await fabric.join(fabric.token("one"), "gpu-2"))
            spoke = await fabric.spoke(tls)
            await spoke.attach("one")
            await other.attach("one")
            begun = time.monotonic()
            state.revoke(fabric.directory, "gpu-1")
            await asyncio.wait_for(spoke.connection.wait_closed(), 5)
            assert time.monotonic() - begun < 2.0
            assert "revoked" in str(spoke.connection.close_reason)
            with pytest.raises(AuthError, match="revoked"):
                await fabric.spoke(tls)
            await other.call(ListDir("one", b""))
            again = await fabric.spoke(await fabric.join(fabric.token("one")))
            await again.attach("one")
            await again.connection.close()
            await other.connection.close()

    asyncio.run(main())


def test_a_restart_keeps_spokes_and_portals(tmp_path: Path) -> None:
    async def main() -> None:
        async with Fabric(tmp_path) as fabric:
            tls = await fabric.join(fabric.token("one"))
            spoke = await fabric.spoke(tls)
            before = await spoke.attach("one")
            await fabric.hub.stop()
            await asyncio.wait_for(spoke.connection.wait_closed(), 5)
            fabric.hub = fabric.make()
            fabric.port = await fabric.hub.start("127.0.0.1", 0)
            spoke = await fabric.spoke(tls)
            after = await spoke.attach("one")
            assert after.portal_id == before.portal_id and after.root == before.root
            await spoke.connection.close()

    asyncio.run(main())


def test_a_certificate_that_the_state_does_not_know(tmp_path: Path) -> None:
    async def main() -> None:
        async with Fabric(tmp_path) as fabric:
            tls = await fabric.join(fabric.token("one"))
            await fabric.hub.stop()
            for path in fabric.directory.glob("hub.db*"):
                path.unlink()
            fabric.hub = fabric.make()
            fabric.port = await fabric.hub.start("127.0.0.1", 0)
            with pytest.raises(AuthError, match="does not know"):
                await fabric.spoke(tls)

    asyncio.run(main())


# -- starting ---------------------------------------------------------------------------------------


def test_impossible_hubs(tmp_path: Path) -> None:
    spec = PortalSpec("p", tmp_path)
    with pytest.raises(UsageError, match="no portal"):
        Hub(None, [], insecure=True)
    with pytest.raises(UsageError, match="twice"):
        Hub(None, [spec, PortalSpec("p", tmp_path / "other")], insecure=True)
    with pytest.raises(UsageError, match="state directory"):
        Hub(None, [spec])


def test_a_start_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (hub, _):
            before = len(os.listdir("/proc/self/fd"))
            taken = Hub(None, [PortalSpec("p", tmp_path)], insecure=True)
            with pytest.raises(FarsideError, match="taken") as caught:
                await taken.start("127.0.0.1", hub.status()["port"])
            assert caught.value.errno == errno.EADDRINUSE
            missing = Hub(
                None, [PortalSpec("p", tmp_path), PortalSpec("q", tmp_path / "none")], insecure=True
            )
            with pytest.raises(UsageError, match="does not exist"):
                await missing.start("127.0.0.1", 0)
            with pytest.raises(AuthError, match="hub init"):
                await Hub(tmp_path / "none", [PortalSpec("p", tmp_path)]).start("127.0.0.1", 0)
            assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(main())


def test_stopping_in_the_middle_of_reads(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"b" * (4 * MAX_READ))

    async def main() -> None:
        async with serving(tmp_path) as (hub, spoke):
            big = await ranges(spoke, b"big", *[(at * MAX_READ, MAX_READ) for at in range(4)])
            stream = spoke.connection.stream(Read("p", (big, big, big), "demand"), timeout=30)
            assert isinstance((await anext(stream)).message, Data)
            begun = time.monotonic()
            await hub.stop()
            assert time.monotonic() - begun < 5.0
            with pytest.raises(HubUnreachable):
                async for _ in stream:
                    pass

    asyncio.run(main())
