"""Mounts for the tests of farside.fuse."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fuse.processes import DEADLINE_S, Mount, end_children

from farside.fuse import MountOptions, Operations, Session, cleanup_stale


def can_mount() -> str:
    """Why a mount cannot be made here, or ""."""
    if not os.path.exists("/dev/fuse"):
        return "no /dev/fuse"
    return "" if os.geteuid() == 0 else "not root"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = can_mount()
    for item in items:
        if reason and item.get_closest_marker("mount"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def nothing_survives(tmp_path: Path) -> Iterator[None]:
    """Ends what a failed test has left running or mounted."""
    yield
    end_children()
    cleanup_stale(str(tmp_path))


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """``mount(ops, threads=2, **options)``: a started session on ``tmp_path/mnt``; unmounted at the end."""
    sessions: list[Session] = []

    def make(ops: Operations, *, threads: int = 2, **options: object) -> Session:
        point = tmp_path / "mnt"
        point.mkdir(exist_ok=True)
        session = Session(str(point), ops, options=MountOptions(**options), threads=threads)  # type: ignore[arg-type]
        session.mount()
        session.start()
        sessions.append(session)
        return session

    yield make
    for session in sessions:
        session.unmount(lazy=True)
        assert session.join(DEADLINE_S), "the mount did not end"
