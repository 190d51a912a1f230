"""The namespace: what it says at once, what it asks, and what it never says."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.spoke.fakehub import FakeHub

from farside.errors import HubUnreachable, ProtocolError, RemoteError
from farside.protocol.attributes import attr_of
from farside.protocol.messages import DirChange, ListDirReply
from farside.spoke import directory as directory_module
from farside.spoke.namespace import UNKNOWN, Invalidated, Namespace
from farside.spoke.store import Row, Store

PORTAL = b"p" * 16


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 20))


def small_hub() -> FakeHub:
    hub = FakeHub()
    hub.mkdir(b"a")
    hub.mkdir(b"a/b")
    hub.write(b"a/x")
    hub.write(b"a/b/y")
    hub.write(b"top")
    hub.pushes.clear()
    return hub


def attached(hub: FakeHub, store: Store | None = None, **options: Any) -> Namespace:
    names = Namespace(store, PORTAL, hub, **{"timeout_s": 0.3, **options})
    names.attached(hub.values[b""], True, False)
    return names


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        await asyncio.sleep(0.002)


async def turns(count: int = 12) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def deliver(hub: FakeHub, names: Namespace) -> list[Invalidated]:
    return names.invalidate(hub.take_pushes())


# -- trusted ----------------------------------------------------------------------------------------


def test_lookup_asks_once_then_peek_knows_names_and_absence() -> None:
    async def main() -> None:
        hub = small_hub()
        names = attached(hub)
        assert names.peek(b"a", b"x") is UNKNOWN
        assert await names.lookup(b"a", b"x") == hub.values[b"a/x"]
        assert names.peek(b"a", b"x") == hub.values[b"a/x"]
        assert names.peek(b"a", b"none") is None
        assert await names.lookup(b"a", b"none") is None
        assert names.watched(b"a")
        assert hub.calls == [("list", b"a")]
        await names.close()

    run(main)


def test_concurrent_demands_share_one_listing() -> None:
    async def main() -> None:
        hub = small_hub()
        names = attached(hub)
        got = await asyncio.gather(*(names.lookup(b"a", b"x") for _ in range(50)), names.directory(b"a"))
        assert got[0] == hub.values[b"a/x"]
        assert hub.calls == [("list", b"a")]
        await names.close()

    run(main)


def test_names_asked_together_travel_together() -> None:
    async def main() -> None:
        hub = FakeHub()
        for n in range(300):
            hub.write(b"f%03d" % n)
        hub.pushes.clear()
        names = attached(hub)
        await names.directory(b"")
        for n in range(300):
            hub.write(b"f%03d" % n)
        deliver(hub, names)
        values = await asyncio.gather(*(names.lookup(b"", b"f%03d" % n) for n in range(300)))
        assert values == [hub.values[b"f%03d" % n] for n in range(300)]
        assert names.stats()["stat_batches"] <= 2
        await names.close()

    run(main)


def test_peek_never_trusts_beyond_the_lease_even_if_the_loop_is_stuck() -> None:
    async def main() -> None:
        hub = small_hub()
        names = attached(hub)
        await names.directory(b"a")
        names.renew(time.monotonic() - 0.001)
        assert names.peek(b"a", b"none") is UNKNOWN
        assert names.peek(b"a", b"x") == hub.values[b"a/x"]  # away: known to exist
        assert not names.watched(b"a")
        names.renew(time.monotonic() + 60)
        assert names.peek(b"a", b"none") is None
        await names.close()

    run(main)


# -- invalidations ----------------------------------------------------------------------------------


def test_only_changed_names_are_asked_again() -> None:
    """awslabs/mountpoint-s3#1830: size and version change together."""

    async def main() -> None:
        hub = small_hub()
        names = attached(hub)
        await names.directory(b"a")
        hub.calls.clear()
        hub.write(b"a/x", size=99)
        assert deliver(hub, names) == [Invalidated(b"a", b"x")]
        assert names.peek(b"a", b"x") is UNKNOWN
        assert names.peek(b"a", b"b") == hub.values[b"a/b"]
        value = await names.lookup(b"a", b"x")
        assert value is not None and attr_of(value).size == 99
        assert ("list", b"a") not in hub.calls
        await names.close()

    run(main)


def test_what_changed_is_asked_about_in_the_background_and_reported() -> None:
    """awslabs/mountpoint-s3#831: absence that was known is no obstacle to a new file."""

    async def main() -> None:
        hub = small_hub()
        seen: list[Invalidated] = []
        names = attached(hub, on_change=seen.extend)
        await names.directory(b"a")
        hub.write(b"a/new")
        deliver(hub, names)
        await until(lambda: names.peek(b"a", b"new") == hub.values[b"a/new"])
        assert Invalidated(b"a", b"new") in seen
        await until(lambda: names.root == hub.values[b""])
        await names.close()

    run(main)


@pytest.mark.parametrize("change", [DirChange(b"a", (b"x",)), DirChange(b"a"), DirChange(b"", (), True)])
def test_an_invalidation_that_overtakes_a_listing_is_not_lost(change: DirChange) -> None:
    async def main() -> None:
        hub = small_hub()
        names = attached(hub, timeout_s=5)
        hub.held = []
        old = asyncio.ensure_future(names.lookup(b"a", b"x"))
        await turns()
        assert len(hub.held) == 1  # the listing was read at the hub, its reply is on its way
        hub.write(b"a/x", size=77)
        hub.pushes.clear()
        names.invalidate([change])
        hub.release()
        await turns()
        assert names.peek(b"a", b"x") is UNKNOWN
        held, hub.held = hub.held, None
        for turn in held:
            turn.set_result(None)
        value = await old
        assert value is not None and attr_of(value).size == 77
        await names.close()

    run(main)


def test_an_invalidation_that_overtakes_a_stat_is_not_lost() -> None:
    async def main() -> None:
        hub = small_hub()
        names = attached(hub, timeout_s=5)
        await names.directory(b"a")
        hub.write(b"a/x", size=50)
        deliver(hub, names)
        hub.held = []
        first = asyncio.ensure_future(names.lookup(b"a", b"x"))
        await turns()
        hub.write(b"a/x", size=51)
        deliver(hub, names)
        second = asyncio.ensure_future(names.lookup(b"a", b"x"))
        await turns()
        hub.release()
        await turns()
        assert not second.done()
        held, hub.held = hub.held, None
        for turn in held:
            turn.set_result(None)
        for task in (first, second):
            value = await task
            assert value is not None and attr_of(value).size == 51
        await names.close()

    run(main)


def test_a_name_that_changes_all_the_time_is_answered_all_the_same() -> None:
    async def main() -> None:
        hub = small_hub()
        names = attached(hub, timeout_s=5)
        await names.directory(b"a")
        hub.held = []
        hub.write(b"a/x")
        deliver(hub, names)
        task = asyncio.ensure_future(names.lookup(b"a", b"x"))
        for _ in range(20):
            await turns()
            hub.write(b"a/x")
            deliver(hub, names)
            while hub.held:
                hub.release()
        await turns()
        assert task.done() and task.result() is not None
        hub.held = None
        await names.close()

    run(main)


def test_a_directory_replaced_by_another_takes_all_below_with_it() -> None:
    async def main() -> None:
        hub = small_hub()
        names = attached(hub)
        for path in (b"", b"a", b"a/b"):
            await names.directory(path)
        hub.remove(b"a/b")
        hub.mkdir(b"a/b")
        hub.pushes.clear()
        names.invalidate([DirChange(b"a", (b"b",))])  # nothing is said of what was below
        assert names.peek(b"a/b", b"y") is UNKNOWN
        assert await names.lookup(b"a/b", b"y") is None
        assert await names.lookup(b"a", b"b") == hub.values[b"a/b"]
        await names.close()

    run(main)


def test_a_directory_that_only_got_new_times_keeps_what_is_below() -> None:
    async def main() -> None:
        hub = small_hub()
        names = attached(hub)
        for path in (b"", b"a", b"a/b"):
            await names.directory(path)
        hub.calls.clear()
        names.invalidate([DirChange(b"a", (b"b",))])
        assert await names.lookup(b"a/b", b"y") == hub.values[b"a/b/y"]
        assert not [c for c in hub.calls if c[0] == "list"]
        await names.close()

    run(main)


# -- away -------------------------------------------------------------------------------------------


def test_away_is_not_gone() -> None:
    """rclone/rclone#9530, s3ql/s3ql#100."""

    async def main() -> None:
        hub = small_hub()
        names = attached(hub)
        await names.directory(b"a")
        hub.cut()
        names.link_down()
        assert names.peek(b"a", b"x") == hub.values[b"a/x"]
        assert names.peek(b"a", b"none") is UNKNOWN
        assert (await names.directory(b"a")).entries[b"x"] == hub.values[b"a/x"]
        assert await names.refresh(b"a/x") == hub.values[b"a/x"]
        for work in (names.lookup(b"a", b"none"), names.lookup(b"a/b", b"y"), names.refresh(b"a/none")):
            begun = time.monotonic()
            with pytest.raises(HubUnreachable) as caught:
                await work
            assert caught.value.errno == errno.ETIMEDOUT and 0.2 < time.monotonic() - begun < 1.5
        with pytest.raises(HubUnreachable):
            await names.directory(b"a/b")
        assert not names.watched(b"a")
        await names.close()

    run(main)


def test_what_is_known_to_have_changed_is_not_given_while_away() -> None:
    async def main() -> None:
        hub = small_hub()
        names = attached(hub)
        for path in (b"", b"a", b"a/b"):
            await names.directory(path)
        hub.write(b"a/x")
        hub.write(b"a/b/z")
        deliver(hub, names)
        hub.cut()
        names.link_down()
        with pytest.raises(HubUnreachable):
            await names.lookup(b"a", b"x")
        # The directories above changed their times, too, but without them nothing could be reached.
        assert await names.lookup(b"", b"a") is not None
        assert await names.lookup(b"a/b", b"y") == hub.values[b"a/b/y"]
        assert (await names.directory(b"a")).dirty >= {b"x"}
        await names.close()

    run(main)


def test_who_waits_for_the_link_goes_on_when_it_is_back() -> None:
    async def main() -> None:
        hub = small_hub()
        names = attached(hub, timeout_s=10)
        hub.cut()
        names.link_down()
        task = asyncio.ensure_future(names.lookup(b"a", b"x"))
        await turns()
        assert not task.done()
        hub.up = True
        begun = time.monotonic()
        names.attached(hub.values[b""], True, False)
        assert await task == hub.values[b"a/x"]
        assert time.monotonic() - begun < 0.2
        await names.close()

    run(main)


def test_a_link_that_dies_while_a_known_name_is_confirmed_gives_what_is_known() -> None:
    async def main() -> None:
        hub = small_hub()
        names = attached(hub, timeout_s=10)
        await names.directory(b"a")
        names.attached(hub.values[b""], True, False)
        hub.held = []
        task = asyncio.ensure_future(names.lookup(b"a", b"x"))
        await turns()
        assert not task.done()
        hub.cut()
        names.link_down()
        assert await task == hub.values[b"a/x"]
        await names.close()

    run(main)


def test_the_same_session_keeps_trust_and_a_new_one_does_not() -> None:
    """rclone/rclone#4446, awslabs/mountpoint-s3#785."""

    async def main() -> None:
        hub = small_hub()
        names = attached(hub)
        await names.directory(b"a")
        names.link_down()
        names.attached(hub.values[b""], True, True)
        assert names.peek(b"a", b"none") is None
        names.link_down()
        hub.write(b"a/x", size=123)
        hub.pushes.clear()  # lost with the session
        names.attached(hub.values[b""], True, False)
        assert names.peek(b"a", b"x") is UNKNOWN
        value = await names.lookup(b"a", b"x")
        assert value is not None and attr_of(value).size == 123
        await names.close()

    run(main)


# -- the hub's errors -------------------------------------------------------------------------------


def test_directories_that_are_gone_or_refused() -> None:
    async def main() -> None:
        hub = small_hub()
        names = attached(hub)
        assert await names.lookup(b"nowhere", b"x") is None
        assert await names.lookup(b"top", b"x") is None
        with pytest.raises(RemoteError) as caught:
            await names.directory(b"nowhere")
        assert caught.value.errno == errno.ENOENT
        with pytest.raises(RemoteError) as caught:
            await names.directory(b"top")
        assert caught.value.errno == errno.ENOTDIR
        hub.refuse[b"a"] = errno.EACCES
        with pytest.raises(RemoteError) as caught:
            await names.directory(b"a")
        assert caught.value.errno == errno.EACCES
        assert await names.lookup(b"a", b"x") == hub.values[b"a/x"]  # may be passed, not listed
        hub.refuse[b"top"] = errno.EIO
        with pytest.raises(RemoteError) as caught:
            await names.refresh(b"top", force=True)
        assert caught.value.errno == errno.EIO
        with pytest.raises(RemoteError) as caught:
            await names.refresh(b"a/none")
        assert caught.value.errno == errno.ENOENT
        assert await names.refresh(b"") == hub.values[b""]
        await names.close()

    run(main)


# -- directories that are not watched ---------------------------------------------------------------


def test_unwatched_directories_are_believed_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("farside.spoke.knowledge.time.monotonic", lambda: now[0])

    async def main() -> None:
        hub = small_hub()
        hub.watched = False
        names = attached(hub)
        assert await names.lookup(b"a", b"none") is None
        assert names.peek(b"a", b"none") is None and not names.watched(b"a")
        assert await names.refresh(b"a/x") == hub.values[b"a/x"]
        assert len(hub.calls) == 1
        hub.write(b"a/none")
        now[0] += directory_module.UNWATCHED_TTL + 0.1
        assert names.peek(b"a", b"none") is UNKNOWN
        assert await names.lookup(b"a", b"none") == hub.values[b"a/none"]
        hub.write(b"a/x", size=3)
        now[0] += directory_module.UNWATCHED_TTL + 0.1
        assert attr_of(await names.refresh(b"a/x")).size == 3
        await names.close()

    run(main)


# -- large directories ------------------------------------------------------------------------------


def test_pages_are_gathered_and_single_names_do_not_wait_for_them() -> None:
    async def main() -> None:
        hub = FakeHub(page=100)
        for n in range(1050):
            hub.write(b"f%05d" % n)
        hub.pushes.clear()
        names = attached(hub, timeout_s=5)
        hub.held = []
        whole = asyncio.ensure_future(names.directory(b""))
        one = asyncio.ensure_future(names.lookup(b"", b"f01049"))
        await turns()
        hub.release()  # the first page
        await turns()
        hub.release(-1)  # the Stat that was sent when it turned out to be large
        await turns()
        assert one.done() and one.result() == hub.values[b"f01049"]
        assert not whole.done() and names.peek(b"", b"f00001") is UNKNOWN
        held, hub.held = hub.held, None
        for turn in held:
            turn.set_result(None)
        found = await whole
        assert found.snapshot() == hub.listing(b"")
        await names.close()

    run(main)


# -- memory and store -------------------------------------------------------------------------------


def wide_hub(dirs: int, files: int) -> FakeHub:
    hub = FakeHub()
    for d in range(dirs):
        hub.mkdir(b"d%03d" % d)
        for f in range(files):
            hub.write(b"d%03d/f%03d" % (d, f))
    hub.pushes.clear()
    return hub


@pytest.mark.parametrize("with_store", [False, True])
def test_memory_is_bounded_and_what_was_dropped_comes_back(tmp_path: Path, with_store: bool) -> None:
    async def main() -> None:
        hub = wide_hub(50, 40)
        store = Store(tmp_path / "names.db") if with_store else None
        names = attached(hub, store, max_entries=500)
        await names.sync()
        for d in range(50):
            assert await names.lookup(b"d%03d" % d, b"f007") == hub.values[b"d%03d/f007" % d]
            assert int(names.stats()["resident_entries"]) <= 500
        assert int(names.stats()["evicted_dirs"]) > 0
        if store is not None:
            assert [c[0] for c in hub.calls] == ["tree"]  # the rest came from the store, still confirmed
        await names.close()
        if store is not None:
            store.close()

    run(main)


def test_invalidations_reach_directories_that_are_on_disk_only(tmp_path: Path) -> None:
    async def main() -> None:
        hub = wide_hub(50, 40)
        store = Store(tmp_path / "names.db")
        names = attached(hub, store, max_entries=500)
        await names.sync()
        for d in range(50):
            hub.write(b"d%03d/f007" % d, size=5000 + d)
        deliver(hub, names)
        for d in range(50):
            value = await names.lookup(b"d%03d" % d, b"f007")
            assert value is not None and attr_of(value).size == 5000 + d
        await names.close()
        store.close()

    run(main)


def test_a_restart_knows_everything_without_the_link_and_confirms_by_difference(tmp_path: Path) -> None:
    async def main() -> None:
        hub = wide_hub(20, 30)
        store = Store(tmp_path / "names.db")
        names = attached(hub, store)
        await names.sync()
        assert names.stats()["synced"] and names.stats()["entries"] == 20 * 31
        await names.close()
        store.close()

        hub.up = False
        store = Store(tmp_path / "names.db")
        names = Namespace(store, PORTAL, hub, timeout_s=0.2)
        assert await names.lookup(b"d003", b"f001") == hub.values[b"d003/f001"]
        assert len((await names.directory(b"")).entries) == 20
        assert names.root == hub.values[b""]
        with pytest.raises(HubUnreachable):
            await names.lookup(b"d003", b"none")

        hub.write(b"d005/f001", size=4321)
        hub.remove(b"d006")
        hub.mkdir(b"new")
        hub.pushes.clear()
        hub.up = True
        names.attached(hub.values[b""], True, False)
        seen: list[Invalidated] = []
        names.on_change = seen.extend
        await names.sync()
        assert Invalidated(b"", b"d006") in seen and Invalidated(b"", b"new") in seen
        hub.calls.clear()
        value = await names.lookup(b"d005", b"f001")
        assert value is not None and attr_of(value).size == 4321
        assert await names.lookup(b"", b"d006") is None
        assert await names.lookup(b"d007", b"f001") == hub.values[b"d007/f001"]
        assert hub.calls == []  # the walk confirmed all of it
        await names.close()
        assert b"d006" not in store.digests(PORTAL)
        store.close()

    run(main)


def test_marks_survive_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        hub = small_hub()
        store = Store(tmp_path / "names.db")
        names = attached(hub, store)
        await names.sync()
        hub.write(b"a/x")
        hub.cut()
        names.invalidate(hub.take_pushes())
        names.link_down()
        await names.close()
        store.close()

        store = Store(tmp_path / "names.db")
        names = Namespace(store, PORTAL, hub, timeout_s=0.2)
        with pytest.raises(HubUnreachable):
            await names.lookup(b"a", b"x")
        assert await names.lookup(b"a/b", b"y") == hub.values[b"a/b/y"]
        await names.close()
        store.close()

    run(main)


def test_demands_do_not_wait_for_the_stream() -> None:
    async def main() -> None:
        hub = wide_hub(20, 3)
        names = attached(hub)
        hub.held = []
        stream = asyncio.ensure_future(names.sync())
        await turns()
        task = asyncio.ensure_future(names.lookup(b"d019", b"f001"))
        await turns()
        hub.release(-1)
        await turns()
        assert task.done() and task.result() == hub.values[b"d019/f001"] and not stream.done()
        held, hub.held = hub.held, None
        for turn in held:
            turn.set_result(None)
        await stream
        await names.close()

    run(main)


def test_lost_events_make_the_tree_walked_again() -> None:
    async def main() -> None:
        hub = wide_hub(5, 3)
        names = attached(hub)
        await names.sync()
        hub.write(b"d001/f001", size=999)
        hub.pushes.clear()
        assert names.invalidate([DirChange(b"", (), True)]) == [Invalidated(b"", None, True)]
        assert names.peek(b"d001", b"f001") is UNKNOWN
        await until(lambda: names.stats()["confirmed"] == 6)
        value = await names.lookup(b"d001", b"f001")
        assert value is not None and attr_of(value).size == 999
        await names.close()

    run(main)


def test_peeks_from_other_threads_while_the_loop_edits() -> None:
    async def main() -> None:
        hub = wide_hub(1, 200)
        names = attached(hub, timeout_s=5)
        await names.directory(b"d000")
        stop = threading.Event()
        wrong: list[object] = []

        def reader() -> None:
            while not stop.is_set():
                for f in range(200):
                    value = names.peek(b"d000", b"f%03d" % f)
                    if value is None or (value is not UNKNOWN and len(value) < 84):
                        wrong.append(value)
                found = names.peek_dir(b"d000")
                if found is not UNKNOWN and len(found.snapshot()) < 200:
                    wrong.append(len(found.snapshot()))

        threads = [threading.Thread(target=reader) for _ in range(2)]
        for thread in threads:
            thread.start()
        for n in range(60):
            hub.write(b"d000/f%03d" % n)
            hub.write(b"d000/g%03d" % n)
            deliver(hub, names)
            await names.lookup(b"d000", b"f%03d" % n)
        stop.set()
        for thread in threads:
            thread.join(5)
        assert not wrong
        await names.close()

    run(main)


def test_a_damaged_listing_is_refused_not_believed() -> None:
    async def main() -> None:
        hub = small_hub()
        names = attached(hub)
        whole = hub.list_dir

        async def damaged(path: bytes, digest: bytes, after: bytes) -> tuple[ListDirReply, bytes]:
            reply, payload = await whole(path, digest, after)
            return reply, payload[:-10]

        hub.list_dir = damaged  # type: ignore[method-assign]
        with pytest.raises(ProtocolError):
            await names.lookup(b"a", b"x")
        hub.list_dir = whole  # type: ignore[method-assign]
        assert await names.lookup(b"a", b"x") == hub.values[b"a/x"]
        await names.close()

    run(main)


def test_a_tree_cut_in_the_middle_keeps_what_came_and_a_cancelled_one_ends(tmp_path: Path) -> None:
    async def main() -> None:
        hub = wide_hub(10, 3)
        store = Store(tmp_path / "names.db")
        names = attached(hub, store)
        hub.held = []
        stream = asyncio.ensure_future(names.sync())
        await until(lambda: bool(hub.held))
        for _ in range(5):
            hub.release()
            await until(lambda: bool(hub.held))
        hub.cut()
        with pytest.raises(HubUnreachable):
            await stream
        names.link_down()
        assert len((await names.directory(b"")).entries) == 10
        assert await names.lookup(b"d000", b"f001") == hub.values[b"d000/f001"]
        assert not names.stats()["synced"]
        hub.up = True
        names.attached(hub.values[b""], True, False)
        stream = asyncio.ensure_future(names.sync())
        await until(lambda: bool(hub.held))
        stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stream
        hub.held = None
        await names.sync()
        assert names.stats()["synced"]
        await names.close()
        store.close()

    run(main)


def test_an_invalidation_that_overtakes_a_load_from_the_store_is_not_lost(tmp_path: Path) -> None:
    async def main() -> None:
        hub = wide_hub(20, 10)
        store = Store(tmp_path / "names.db")
        names = attached(hub, store, max_entries=100, timeout_s=5)
        await names.sync()
        await until(lambda: not store.pending)
        go_on = threading.Event()
        loads: list[bytes] = []
        load = store.load

        def slow(portal: bytes, path: bytes) -> Row | None:
            found = load(portal, path)
            loads.append(path)
            go_on.wait(1.5)  # the row was read, its way back takes long
            return found

        store.load = slow  # type: ignore[method-assign]
        task = asyncio.ensure_future(names.lookup(b"d002", b"f001"))
        await until(lambda: bool(loads))
        hub.write(b"d002/f001", size=31)
        deliver(hub, names)
        go_on.set()
        value = await task
        assert value is not None and attr_of(value).size == 31
        await names.close()
        store.close()

    run(main)


def test_a_walk_does_not_confirm_what_changed_while_it_was_under_way(tmp_path: Path) -> None:
    async def main() -> None:
        hub = wide_hub(20, 10)
        store = Store(tmp_path / "names.db")
        names = attached(hub, store, max_entries=100, timeout_s=5)
        await names.sync()
        for n in range(12):  # the last directories of the walk are on disk only
            await names.directory(b"d%03d" % n)
        names.attached(hub.values[b""], True, False)
        hub.held = []
        stream = asyncio.ensure_future(names.sync())
        for _ in range(20):  # the hub has compared all but the last directory, whose part is on its way
            await until(lambda: bool(hub.held))
            hub.release()
        await until(lambda: bool(hub.held))
        hub.write(b"d019/f001", size=32)
        hub.write(b"d003/f001", size=33)
        deliver(hub, names)

        def marked() -> bool:
            row = store.submit(store.load, PORTAL, b"d019").result(5)
            return row is not None and row.dirty == [b"f001"]

        await until(marked)
        held, hub.held = hub.held, None
        for turn in held:
            turn.set_result(None)
        await stream
        for directory, size in ((b"d019", 32), (b"d003", 33)):
            value = await names.lookup(directory, b"f001")
            assert value is not None and attr_of(value).size == size
        await names.close()
        store.close()

    run(main)


def test_what_lay_in_a_replaced_directory_is_not_given_while_away() -> None:
    async def main() -> None:
        hub = small_hub()
        names = attached(hub)
        await names.directory(b"a")
        await names.directory(b"a/b")
        names.link_down()
        hub.remove(b"a/b")
        hub.mkdir(b"a/b")
        hub.pushes.clear()
        names.attached(hub.values[b""], True, False)
        await names.directory(b"a")
        hub.cut()
        names.link_down()
        with pytest.raises(HubUnreachable):
            await names.lookup(b"a/b", b"y")
        await names.close()

    run(main)


def test_a_reply_of_an_earlier_session_confirms_nothing() -> None:
    async def main() -> None:
        hub = small_hub()
        names = attached(hub, timeout_s=5)
        hub.held = []
        task = asyncio.ensure_future(names.lookup(b"a", b"x"))
        await until(lambda: bool(hub.held))
        hub.write(b"a/x", size=44)
        hub.pushes.clear()  # lost with the session
        names.attached(hub.values[b""], True, False)
        hub.release()
        await turns()
        assert names.peek(b"a", b"x") is UNKNOWN
        held, hub.held = hub.held, None
        for turn in held:
            turn.set_result(None)
        value = await task
        assert value is not None and attr_of(value).size == 44
        await names.close()

    run(main)


@pytest.mark.parametrize("list_the_parent", [False, True])
def test_a_directory_that_became_a_file_while_its_parent_was_not_known(list_the_parent: bool) -> None:
    async def main() -> None:
        hub = small_hub()
        names = attached(hub)
        await names.directory(b"a")
        await names.directory(b"a/b")
        hub.remove(b"a")
        hub.write(b"a")
        hub.pushes.clear()
        names.invalidate([DirChange(b"", (b"a",))])
        if list_the_parent:
            await names.directory(b"")
        assert await names.lookup(b"a/b", b"y") is None
        assert await names.lookup(b"a", b"x") is None
        assert await names.lookup(b"", b"a") == hub.values[b"a"]
        await names.close()

    run(main)


def test_a_listing_that_went_there_and_back_is_not_confirmed_by_an_old_digest(tmp_path: Path) -> None:
    """The digest of an edited listing is made in the store's thread: it must not outlive the next edit."""

    async def main() -> None:
        hub = small_hub()
        store = Store(tmp_path / "names.db")
        names = attached(hub, store)
        held, wait = threading.Event(), threading.Event()
        save = store.save

        def slow(portal: bytes, rows: Iterable[Row]) -> dict[bytes, bytes]:
            made = save(portal, rows)
            if made:
                held.set()
                wait.wait(2)
            return made

        store.save = slow  # type: ignore[method-assign]
        await names.directory(b"a")
        hub.write(b"a/x", size=21)
        deliver(hub, names)
        assert await names.lookup(b"a", b"x") == hub.values[b"a/x"]
        await until(held.is_set)  # the digest of the listing with 21 is on its way
        hub.write(b"a/new")
        deliver(hub, names)
        assert await names.lookup(b"a", b"new") == hub.values[b"a/new"]
        names._table.flush()  # as its timer would: the next save is under way before the last is done
        wait.set()
        await until(lambda: not store.pending)
        await turns()
        hub.remove(b"a/new")
        hub.pushes.clear()
        names.attached(hub.values[b""], True, False)
        assert await names.lookup(b"a", b"new") is None
        await names.close()
        store.close()

    run(main)
