"""The whole fabric over a true 60 ms link between network namespaces, with mutual TLS."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.mount.conftest import wait_until

from farside.bench.link import NamespaceLink
from farside.bench.netlink import Shape
from farside.bench.stack import Stack
from farside.fuse import cleanup_stale

pytestmark = [pytest.mark.link, pytest.mark.timeout(180)]

FILES, DIRS = 2_000, 20
BIG = 48 << 20
REASONS = ("demand", "planned", "readahead", "fill")


class Far:
    def __init__(self, work: Path) -> None:
        self.data = work / "data"
        self.data.mkdir()
        for d in range(DIRS):
            directory = self.data / f"d{d:02}"
            directory.mkdir()
            for f in range(FILES // DIRS):
                (directory / f"f{f:03}").write_bytes(self.small(d, f))
        self.big = os.urandom(BIG)
        (self.data / "big").write_bytes(self.big)
        self.link = NamespaceLink(Shape(rtt=60, rate=1000), work)
        self.stack = Stack(work, self.data, self.link)
        self.mnt = self.stack.mountpoint

    @staticmethod
    def small(d: int, f: int) -> bytes:
        return f"{d} {f} ".encode() * 400

    def mount(self, *options: str) -> None:
        self.stack.mount(1 << 30, "--timeout", "4s", *options, fresh=True)

    def wait_synced(self) -> None:
        """Wait until all names are here: only what is known can be listed while the hub is away."""
        wait_until(lambda: self.stack.status()["namespace"]["synced"], "all names are here")

    def crossed(self) -> int:
        return sum(self.stack.status()["link_bytes"][r] for r in REASONS)

    def requests(self) -> int:
        return sum(self.stack.status()["fetch"]["requests"].values())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    obstacle = NamespaceLink.obstacle()
    if obstacle:
        pytest.skip(f"no link between namespaces here: {obstacle}")
    found = Far(tmp_path_factory.mktemp("far"))
    yield found
    found.stack.close()
    found.link.close()
    cleanup_stale(str(found.mnt))


@pytest.fixture
def far(world: Far) -> Iterator[Far]:
    world.mount()
    yield world
    world.link.command("restore")
    world.link.command("set", "loss=0")
    world.stack.unmount()


def test_the_whole_tree_comes_in_a_few_round_trips(far: Far) -> None:
    count = 0
    for _, dirs, files in os.walk(far.mnt):
        count += len(dirs) + len(files)
    assert count == FILES + DIRS + 1
    names = far.stack.status()["namespace"]
    assert names["list_pages"] + names["stat_batches"] <= 12, "a round trip for each directory would be 20"


def test_a_large_file_crosses_once_and_is_right(far: Far) -> None:
    assert (far.mnt / "big").read_bytes() == far.big
    assert far.crossed() <= BIG * 1.01
    assert (far.mnt / "big").read_bytes() == far.big
    assert far.crossed() <= BIG * 1.01


def test_small_files_cost_few_requests(far: Far) -> None:
    for d in range(DIRS):
        for f in range(FILES // DIRS):
            assert (far.mnt / f"d{d:02}" / f"f{f:03}").read_bytes() == far.small(d, f)
    assert far.requests() <= 80, "2,000 files, one request each, would be two minutes at 60 ms"


def test_a_lossy_link_gives_right_bytes(far: Far) -> None:
    far.link.command("set", "loss=1")
    with open(far.mnt / "big", "rb") as f:
        f.seek(20 << 20)
        assert f.read(4 << 20) == far.big[20 << 20 : 24 << 20]


def test_a_black_hole_is_survived_and_left_at_any_time(far: Far) -> None:
    assert (far.mnt / "d00" / "f000").read_bytes() == far.small(0, 0)
    far.wait_synced()
    far.link.command("cut")
    begun = time.monotonic()
    with open(far.mnt / "big", "rb", buffering=0) as f, pytest.raises(OSError):
        os.pread(f.fileno(), 4096, 30 << 20)
    assert time.monotonic() - begun < 12, "--timeout is 4 s"
    wait_until(lambda: far.stack.status()["state"] == "away", "away")
    assert (far.mnt / "d00" / "f000").read_bytes() == far.small(0, 0)
    assert len(os.listdir(far.mnt / "d01")) == FILES // DIRS
    reader = subprocess.Popen(
        ["cat", str(far.mnt / "big")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    reader.kill()
    assert reader.wait(5) == -9
    far.link.command("restore")
    begun = time.monotonic()
    wait_until(lambda: far.stack.status()["state"] == "up", "up")
    assert time.monotonic() - begun < 10
    with open(far.mnt / "big", "rb", buffering=0) as f:
        assert os.pread(f.fileno(), 4096, 30 << 20) == far.big[30 << 20 : (30 << 20) + 4096]


def test_one_way_silence_is_away_too(far: Far) -> None:
    assert len(os.listdir(far.mnt / "d02")) == FILES // DIRS
    far.wait_synced()
    far.link.command("cut", "to-spoke")
    wait_until(lambda: far.stack.status()["state"] == "away", "away")
    assert len(os.listdir(far.mnt / "d02")) == FILES // DIRS
    far.link.command("restore")
    wait_until(lambda: far.stack.status()["state"] == "up", "up")
