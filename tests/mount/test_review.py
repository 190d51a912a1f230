"""What a hostile review of the read path found: each test is one fault that was there."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.mount.conftest import Fabric, wait_until
from tests.spoke.scripted_source import Bench, run, start

from farside.cli.control_client import call
from farside.config import control_socket
from farside.errors import FarsideError
from farside.mount.nodes import Nodes
from farside.protocol.attributes import Attr, pack_value
from farside.protocol.frames import OLDEST, PROTOCOL
from farside.protocol.messages import CHUNK, Hello
from farside.spoke.control import ControlServer, Progress
from farside.spoke.fetch import Reason
from farside.spoke.link import Link

SIZE = 3 << 20


def content(seed: int, size: int = SIZE) -> bytes:
    return (seed.to_bytes(8, "little") * (size // 8 + 1))[:size]


@pytest.mark.mount
def test_a_partly_cached_file_is_read_at_its_new_path(fabric: Fabric) -> None:
    """Renaming a directory leaves the versions below it as they are, so the cache knows them by old paths."""
    fabric.put("before/big", content(1, 32 << 20))
    with open(fabric.mnt / "before" / "big", "rb", buffering=0) as held:
        assert os.pread(held.fileno(), 4096, 0) == content(1, 4096)
    os.rename(fabric.data / "before", fabric.data / "after")
    wait_until(lambda: fabric.shows("after/big", 32 << 20), "the new name", 5)
    assert fabric.cached("after/big") == content(1, 32 << 20)


@pytest.mark.mount
def test_one_open_never_mixes_versions_though_the_first_was_evicted(fabric: Fabric) -> None:
    """Bytes that were served as hits count as seen, also when nothing of them is cached any more."""
    fabric.put("alone/f", content(1, 32 << 20))
    path = fabric.mnt / "alone" / "f"
    with open(path, "rb", buffering=0) as first:
        os.pread(first.fileno(), 4096, 0)
    with open(path, "rb", buffering=0) as held:
        assert os.pread(held.fileno(), 4096, 4096) == content(1, 4096)
        assert fabric.stack.wait_quiet()
        freed = call(control_socket(fabric.mnt), "evict", {"path": "alone/f"})
        assert freed["bytes"] and not fabric.status()["cache"]["files"]
        with open(fabric.data / "alone" / "f", "r+b", buffering=0) as f:
            f.write(content(2, 32 << 20))
        try:
            seen = os.pread(held.fileno(), 4096, 24 << 20)
        except OSError as e:
            assert e.errno in (errno.ESTALE, errno.EIO)
        else:
            assert seen == content(1, 4096), "two versions in one open"


@pytest.mark.mount
def test_a_directory_in_place_of_another_shows_nothing_of_it(fabric: Fabric) -> None:
    """The kernel moves a directory's known names along with its node."""
    fabric.put("d/x", content(1))
    fabric.put("d/y", b"y")
    with open(fabric.mnt / "d" / "x", "rb"):
        os.stat(fabric.mnt / "d" / "x")
        os.rename(fabric.data / "d", fabric.work / "gone")
        (fabric.data / "new").mkdir()
        (fabric.data / "new" / "z").write_bytes(b"z")
        os.rename(fabric.data / "new", fabric.data / "d")
        wait_until(lambda: (fabric.mnt / "d" / "z").exists(), "the new directory", 5)
        for name in "xy":
            wait_until(lambda name=name: not (fabric.mnt / "d" / name).exists(), f"{name} is gone", 3)


@pytest.mark.mount
def test_attributes_asked_for_while_the_hub_dies_do_not_stop_the_mount(
    make_fabric: Callable[..., Fabric],
) -> None:
    fabric = make_fabric(timeout="15s")
    fabric.mount()
    path = fabric.data / "f"
    path.write_bytes(b"x")
    os.setxattr(path, "user.colour", b"red")
    wait_until(lambda: fabric.shows("f", 1), "f seen", 5)
    assert fabric.status()["state"] == "up"
    os.kill(fabric.stack.hub_pid, signal.SIGKILL)
    begun = time.monotonic()
    asking = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, sys; os.getxattr(sys.argv[1], 'user.colour')",
            str(fabric.mnt / "f"),
        ],
        stderr=subprocess.DEVNULL,
    )
    fabric.wait_state("away")
    assert time.monotonic() - begun < 6, "the loop must go on"
    asking.kill()
    asking.wait(5)


def test_a_reader_waits_for_the_very_chunks_that_it_misses(tmp_path: Path) -> None:
    """While the disk hangs all is fetched. Who comes just after takes some chunks from the disk: when those
    arrive, too, they must not be counted as the ones that are still to come."""

    async def scenario(b: Bench) -> None:
        file = b.file(b"a", 2 * CHUNK)
        data = b.source.contents[b"a"].data
        b.fetcher.want(file, 0, 0, Reason.READAHEAD)
        await b.settled()
        b.source.auto = None
        b.cache.health.reads_off = True
        first = start(b.fetcher.read(file, 0, 2 * CHUNK))
        call = await b.source.call(1)
        b.cache.health.reads_off = False
        second = start(b.fetcher.read(file, 0, 2 * CHUNK))
        await asyncio.sleep(0)
        parts = call.blocks(CHUNK)
        assert len(parts) == 2
        call.send(parts[0])
        await asyncio.sleep(0.05)
        call.send(parts[1])
        call.end()
        assert await first == data
        assert await second == data

    run(tmp_path, scenario)


def test_a_connection_made_while_the_link_breaks_is_not_forgotten() -> None:
    """The lanes come up together; when the link goes away in between, those that are up must be closed."""

    class Quick:
        closed, expected_bytes, bytes_in, bytes_out, aborted = False, 0, 0, 0, False

        def abort(self, reason: FarsideError) -> None:
            self.aborted = True

    async def scenario() -> None:
        link = Link(
            "hub",
            1,
            "p",
            hello=Hello(PROTOCOL, OLDEST, "test", "test"),
            tls=None,
            connections=4,
            on_attached=lambda *_: None,
            on_renewed=lambda *_: None,
            on_away=lambda: None,
            on_changes=lambda *_: None,
        )
        made: list[Quick] = []

        async def connect(timeout: float, on_push: object = None) -> object:
            if made:
                await asyncio.sleep(60)
            made.append(Quick())
            return made[-1]

        link._connect = connect  # type: ignore[method-assign,assignment]
        filler = asyncio.create_task(link._fill_lanes())
        await asyncio.sleep(0.05)
        filler.cancel()
        await asyncio.gather(filler, return_exceptions=True)
        link._drop_all()
        assert [c.aborted for c in made] == [True]

    asyncio.run(scenario())


def test_a_large_tree_is_forgotten_in_one_walk() -> None:
    """Events lost at the hub concern everything; the loop must not walk all nodes once for each directory."""

    def value(number: int, mode: int) -> bytes:
        return pack_value(Attr(number, 1, 1, 1, 1, mode, 1, 0, 0, 0, number.to_bytes(16, "big")))

    nodes = Nodes(value(1, stat.S_IFDIR))
    number = 1
    for d in range(1000):
        number += 1
        directory = nodes.intern(nodes.find(1), b"d%d" % d, value(number, stat.S_IFDIR))
        for f in range(50):
            number += 1
            nodes.intern(directory, b"f%d" % f, value(number, stat.S_IFREG))
    begun = time.monotonic()
    assert len(nodes.below(b"")) == 51_000
    assert time.monotonic() - begun < 1
    assert len(nodes.below(b"d7")) == 50
    assert len(nodes.children(nodes.find(1))) == 1000


def test_the_control_socket_of_the_next_mount_is_left_alone(tmp_path: Path) -> None:
    """An unmounted mount's process may end after a new one has taken its place. What it worked on ends."""

    async def scenario() -> None:
        ended = asyncio.Event()

        async def work(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()
            return {}

        path = tmp_path / "run" / "a.sock"
        old, new = ControlServer(path, {"work": work}), ControlServer(path, {"work": work})
        await old.start()
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(b'{"op": "work"}\n')
        await asyncio.sleep(0.05)
        await new.start()
        old.close()
        await asyncio.wait_for(ended.wait(), 2)
        assert path.exists()
        new.close()
        assert not path.exists()
        writer.close()

    asyncio.run(scenario())
