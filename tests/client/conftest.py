"""A real hub on loopback behind a delay proxy, and libraries that read from it; nothing is mounted."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farside.bench.link import ProxyLink
from farside.bench.netlink import Shape
from farside.bench.stack import Stack
from farside.client import Library, spoke_config

DEADLINE_S = 20.0


class Portal:
    """A hub that exports ``data`` over a link with a round trip of a few ms."""

    def __init__(self, work: Path, *, tls: bool = False) -> None:
        self.data = work / "data"
        self.data.mkdir(parents=True)
        self.link = ProxyLink(Shape(rtt=4.0), work)
        self.stack = Stack(work, self.data, self.link, tls=tls)
        self.cache = work / "cache"
        self.libraries: list[Library] = []

    def attach(self, **options: object) -> Library:
        given = {
            "hub": self.stack.hub_address,
            "cache_dir": self.cache,
            "cache_size": "1G",
            "state_dir": self.stack.work / "spoke",
            "timeout_s": "3s",
            "insecure": True,
        }
        library = Library(spoke_config(**{**given, **options}))
        self.libraries.append(library)
        return library

    def put(self, name: str, content: bytes) -> None:
        """Write a file at the hub."""
        path = self.data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def link_bytes(self) -> int:
        return self.link.traffic().to_spoke

    def clear(self) -> None:
        """As at the beginning: an empty portal, a link, no cache, nobody attached."""
        for library in self.libraries:
            library.close()
        self.libraries.clear()
        self.link.command("restore")
        for path in self.data.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        shutil.rmtree(self.cache, ignore_errors=True)

    def close(self) -> None:
        self.clear()
        self.stack.close()
        self.link.close()


def wait_until(
    condition: Callable[[], bool], what: str = "condition", deadline_s: float = DEADLINE_S
) -> None:
    """Poll with a deadline, for what cannot be waited on in another way."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} not reached within {deadline_s} s"
        threading.Event().wait(0.02)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Portal]:
    made = Portal(tmp_path_factory.mktemp("portal"))
    yield made
    made.close()


@pytest.fixture
def portal(running: Portal) -> Iterator[Portal]:
    """One that is empty."""
    yield running
    running.clear()


@pytest.fixture
def library(portal: Portal) -> Library:
    """Attached to the portal, whose data directory is empty."""
    return portal.attach()
