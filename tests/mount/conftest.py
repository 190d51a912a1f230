"""Whole fabrics for tests: a real hub, a link through a delay proxy, a real mount, each its own process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farside.bench.link import ProxyLink
from farside.bench.netlink import Shape
from farside.bench.stack import Stack, is_mounted
from farside.fuse import cleanup_stale

DEADLINE_S = 20.0


def obstacle() -> str:
    """Why nothing can be mounted here, or ""."""
    if not os.path.exists("/dev/fuse"):
        return "no /dev/fuse"
    return "" if os.geteuid() == 0 else "not root"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = obstacle()
    for item in items:
        if reason and item.get_closest_marker("mount"):
            item.add_marker(pytest.mark.skip(reason=reason))


class Fabric:
    """A hub that exports ``data``, mounted at ``mnt`` over a link with a round trip of a few ms."""

    def __init__(self, work: Path, *, rtt: float = 4.0, timeout: str = "3s") -> None:
        self.work = work
        self.data = work / "data"
        self.data.mkdir(parents=True)
        self.timeout = timeout
        self.link = ProxyLink(Shape(rtt=rtt), work)
        self.stack = Stack(work, self.data, self.link, tls=False)
        self.mnt = self.stack.mountpoint

    def mount(self, *options: str, cache_size: int = 1 << 30) -> None:
        self.stack.mount(cache_size, "--timeout", self.timeout, *options)

    def remount(self, *options: str) -> None:
        self.stack.unmount()
        self.mount(*options)

    def status(self) -> dict:  # type: ignore[type-arg]
        return self.stack.status()

    def cut(self) -> None:
        self.link.command("cut")

    def restore(self) -> None:
        self.link.command("restore")

    def wait_state(self, state: str) -> None:
        wait_until(lambda: self.status()["state"] == state, f"state {state}")

    def put(self, name: str, content: bytes) -> None:
        """Write a file at the hub, behind the fabric's back, and wait until the mount shows it."""
        path = self.data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        if is_mounted(self.mnt):
            wait_until(lambda: self.shows(name, len(content)), f"{name} seen", 5)

    def shows(self, name: str, size: int) -> bool:
        try:
            return (self.mnt / name).stat().st_size == size
        except FileNotFoundError:
            return False

    def cached(self, name: str) -> bytes:
        """Read a file through the mount, so that it is cached."""
        return (self.mnt / name).read_bytes()

    def settled(self) -> None:
        """Wait until everything that was fetched is on the cache's disk, side-cars too."""
        wait_until(lambda: self.status()["cache"]["unflushed_files"] == 0, "side-cars written")

    def close(self) -> None:
        self.stack.close()
        self.link.close()
        cleanup_stale(str(self.mnt))


def wait_until(
    condition: Callable[[], bool], what: str = "condition", deadline_s: float = DEADLINE_S
) -> None:
    """Poll with a deadline, for what cannot be waited on in another way."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} not reached within {deadline_s} s"
        threading.Event().wait(0.02)


def run_python(
    code: str, *arguments: object, timeout: float = DEADLINE_S
) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own: what maps files must not do so in a process that tests."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def make_fabric(tmp_path: Path) -> Iterator[Callable[..., Fabric]]:
    """``make_fabric(rtt=…, timeout=…)``: a hub and its link; mount it with ``mount()``."""
    made: list[Fabric] = []

    def make(**options: object) -> Fabric:
        fabric = Fabric(tmp_path / f"fabric{len(made)}", **options)  # type: ignore[arg-type]
        made.append(fabric)
        return fabric

    yield make
    for fabric in made:
        fabric.close()


@pytest.fixture
def fabric(make_fabric: Callable[..., Fabric]) -> Fabric:
    """One that is mounted already; its data directory is empty."""
    found = make_fabric()
    found.mount()
    return found
