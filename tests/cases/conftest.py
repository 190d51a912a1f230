"""Fixtures of the reported cases: one mounted fabric for each module, small disks, damage, real kills."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.mount.conftest import Fabric, pytest_collection_modifyitems, wait_until

from farside.bench.stack import run_farside
from farside.cli.control_client import call
from farside.config import control_socket

__all__ = ["Site", "pytest_collection_modifyitems"]

SEEN_S = 2.0 + 0.5
"""Promise 2: a change behind the hub's back is seen within 2 s and one round trip. The half second is what a
busy test machine adds."""


class Site(Fabric):
    """A fabric with what the cases need on top of it."""

    @property
    def cache(self) -> Path:
        return self.stack.cache

    def status(self) -> dict[str, Any]:
        """Asked at the mount's socket, without the cost of a process."""
        return self.ask("status")

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        return call(control_socket(self.mnt), op, arguments)

    def fetched(self) -> int:
        """File bytes that crossed the link since the mount, for whatever reason."""
        counts = self.status()["link_bytes"]
        return int(sum(counts[reason] for reason in ("demand", "planned", "readahead", "fill")))

    def put_all(self, files: dict[str, bytes]) -> None:
        """Write files at the hub and wait until the mount shows all of them."""
        for name, content in files.items():
            path = self.data / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for name, content in files.items():
            wait_until(partial(self.shows, name, len(content)), f"{name} seen", 5)

    def data_files(self) -> list[Path]:
        return sorted(self.cache.glob("data/*/*.data"))

    def stored(self, content: bytes) -> Path:
        """The cache's data file that holds this content."""
        (found,) = [
            p for p in self.data_files() if p.stat().st_size == len(content) and p.read_bytes() == content
        ]
        return found

    def kill(self) -> None:
        """kill -9 of the process that serves the mount."""
        pid = int(self.status()["pid"])
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "the process is gone")

    def warnings(self) -> list[str]:
        log = (self.work / "mount.log").read_text()
        return [line for line in log.splitlines() if "WARNING" in line or "ERROR" in line]

    @contextlib.contextmanager
    def second_mount(self) -> Iterator[Path]:
        """The same portal mounted once more, by another spoke with a cache of its own."""
        other = self.work / "mnt2"
        other.mkdir()
        run_farside(
            *("mount", self.stack.hub_address, str(other), "--insecure", "--insecure-link-is-trusted"),
            *("--cache-dir", str(self.work / "cache2"), "--cache-size", str(1 << 28)),
            *("--log-file", str(self.work / "mount2.log"), "--timeout", self.timeout, "--name", "second"),
        )
        try:
            yield other
        finally:
            run_farside("unmount", str(other))

    @contextlib.contextmanager
    def small_disk(self, size: int) -> Iterator[Path]:
        """A tmpfs of that many bytes in the place of the cache directory; mount inside the block."""
        self.cache.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", self.cache], check=True)
        try:
            yield self.cache
        finally:
            self.stack.close()
            subprocess.run(["umount", self.cache], check=True)


@contextlib.contextmanager
def loop_disk(image: Path, where: Path, size: int, *mkfs: str) -> Iterator[None]:
    """An ext4 file system in a file, mounted; the test is skipped where there are no loop devices."""
    with image.open("wb") as file:
        file.truncate(size)
    subprocess.run(["mkfs.ext4", "-q", *mkfs, image], check=True, capture_output=True)
    where.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-o", "loop", image, where], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no loop device: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", where], check=True)


def errno_of(action: Callable[[], object]) -> int:
    try:
        action()
    except OSError as e:
        return e.errno or 0
    return 0


def drop_pages(*paths: Path) -> None:
    """Have the kernel forget the pages of files, so that the next read asks the file system."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def within(seconds: float, condition: Callable[[], bool], what: str) -> float:
    """Wait for a condition; returns the seconds it took."""
    begun = time.monotonic()
    wait_until(condition, what, seconds)
    return time.monotonic() - begun


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """``make_site(rtt=…, timeout=…)``: a hub and its link of the test's own, not mounted yet."""
    made: list[Site] = []

    def make(**options: Any) -> Site:
        made.append(Site(tmp_path / f"site{len(made)}", **options))
        return made[-1]

    yield make
    for site in made:
        site.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One mounted fabric for all tests of a module; each test uses names of its own."""
    made = Site(tmp_path_factory.mktemp("site"), timeout="2s")
    try:
        made.mount()
        yield made
    finally:
        made.close()
