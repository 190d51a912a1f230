"""The namespace against a plain model: edits, late replies, late pushes, link cuts, restarts, evictions.

The model keeps every state that the hub ever had. What is checked of every answer: it was true at the hub
at some moment that is not older than the last invalidation that the spoke had applied when the question
was put (for ``peek``: when it was answered). Absence is said only on the hub's word; away gives an error.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.spoke.fakehub import FakeHub

from farside.errors import HubUnreachable, RemoteError
from farside.spoke import settle
from farside.spoke.namespace import UNKNOWN, Namespace
from farside.spoke.store import Store

PORTAL = b"m" * 16
DIRS = (b"", b"a", b"a/c", b"b")
NAMES = (b"a", b"b", b"c", b"x")
TIMEOUT = 60.0
EXAMPLES = int(os.environ.get("FARSIDE_EXAMPLES", "50"))


class Run:
    """One history. ``states[i]`` is {path: value} at the hub after edit i."""

    def __init__(self, directory: Path, max_entries: int, with_store: bool, quiet: bool) -> None:
        self.path = directory / "names.db" if with_store else None
        self.max_entries = max_entries
        self.hub = FakeHub(page=3)
        self.hub.quiet = quiet
        self.hub.mkdir(b"a")
        self.hub.mkdir(b"a/c")
        self.hub.write(b"a/x")
        self.hub.write(b"a/c/x")
        self.hub.write(b"x")
        self.hub.pushes.clear()
        self.states = [dict(self.hub.values)]
        self.push_state: list[int] = []  # for each push that waits: the state it tells of
        self.applied = 0  # state up to which the spoke has applied every invalidation
        self.tasks: list[asyncio.Task[None]] = []
        self.store: Store | None = None
        self.names: Namespace
        self.checked = 0

    def open(self) -> None:
        self.store = Store(self.path) if self.path else None
        self.names = Namespace(self.store, PORTAL, self.hub, max_entries=self.max_entries, timeout_s=TIMEOUT)

    def attach(self) -> None:
        """A new session: what was not delivered is lost with the old one."""
        self.hub.up = True
        self.hub.pushes.clear()
        self.push_state.clear()
        self.applied = len(self.states) - 1
        self.names.attached(self.hub.values[b""], True, False)

    # -- what may happen --------------------------------------------------------------------------

    def edit(self, kind: int, directory: bytes, name: bytes) -> None:
        hub = self.hub
        if directory not in hub.children:
            return
        path = directory + b"/" + name if directory else name
        if kind <= 1 and path not in hub.children:
            hub.write(path, size=len(self.states))
        elif kind == 2 and path not in hub.values and path.count(b"/") < 3:
            hub.mkdir(path)
        elif kind == 3 and path in hub.values:
            hub.remove(path)
        elif kind == 4 and path in hub.values:
            target = b"b" if path != b"b" else b"y"
            if target not in hub.values:
                hub.rename(path, target)
        self.states.append(dict(hub.values))
        while len(self.push_state) < len(hub.pushes):
            self.push_state.append(len(self.states) - 1)
        if not hub.up:  # nobody is there to be told
            hub.pushes.clear()
            self.push_state.clear()

    def deliver(self, count: int) -> None:
        """Pushes in their order; all of one edit in one Invalidate."""
        if not self.push_state:
            return
        upto = self.push_state[min(count, len(self.push_state)) - 1]
        count = sum(1 for s in self.push_state if s <= upto)
        self.names.invalidate(self.hub.take_pushes(count))
        del self.push_state[:count]
        self.applied = upto

    def peek(self, directory: bytes, name: bytes) -> None:
        value = self.names.peek(directory, name)
        if value is not UNKNOWN:
            self.check(directory, name, value, self.applied, away=not self.hub.up)

    def peek_dir(self, directory: bytes) -> None:
        found = self.names.peek_dir(directory)
        if found is UNKNOWN or not self.hub.up:
            return
        entries = dict(found.snapshot())
        for name in NAMES:
            self.check(directory, name, entries.get(name), self.applied, away=False)

    def check(self, directory: bytes, name: bytes, value: bytes | None, since: int, *, away: bool) -> None:
        path = directory + b"/" + name if directory else name
        self.checked += 1
        if away:
            assert value is not None, f"{path!r} said to be absent while away"
            if value[40:44] != b"\xed\x41\0\0":  # not a directory
                assert any(s.get(path) == value for s in self.states), "never true"
            return
        held = [i for i, state in enumerate(self.states) if state.get(path) == value]
        assert held and held[-1] >= since, f"{path!r}: true in states {held}, applied {since}"

    async def lookup(self, directory: bytes, name: bytes) -> None:
        since, up = self.applied, self.hub.up
        sessions = self.session
        try:
            value = await self.names.lookup(directory, name)
        except HubUnreachable:
            return
        away = not up or not self.hub.up or sessions != self.session
        if away and value is None:  # said after the link was back
            assert self.hub.up
            away = False
        self.check(directory, name, value, since, away=away)

    async def listing(self, directory: bytes) -> None:
        since, up, session = self.applied, self.hub.up, self.session
        try:
            found = await self.names.directory(directory)
        except (HubUnreachable, RemoteError):
            return
        if not up or not self.hub.up or session != self.session:
            return
        entries = dict(found.snapshot())
        dirty = set(found.dirty)
        for name in NAMES:
            if name not in dirty:
                self.check(directory, name, entries.get(name), since, away=False)

    session = 0

    async def end_tasks(self) -> None:
        end = time.monotonic() + 10
        while any(not t.done() for t in self.tasks):
            assert time.monotonic() < end, "a question was never answered"
            while self.hub.held:
                self.hub.release()
            await asyncio.sleep(0.001)
        for task in self.tasks:
            task.result()
        self.tasks.clear()

    async def restart(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()
        await self.close()
        self.session += 1
        self.open()
        if self.hub.up:
            self.attach()

    async def close(self) -> None:
        await self.names.close()
        if self.store is not None:
            self.store.close()
        self.hub.held = []

    async def step(self, op: tuple[int, ...]) -> None:
        kind, a, b, c = op
        directory, name = DIRS[a % len(DIRS)], NAMES[b % len(NAMES)]
        if kind <= 4:
            self.edit(c % 5, directory, name)
            if kind <= 1:
                self.deliver(99)
        elif kind <= 6:
            self.deliver(1 + c)
        elif kind <= 10:
            self.tasks.append(asyncio.ensure_future(self.lookup(directory, name)))
        elif kind == 11:
            self.tasks.append(asyncio.ensure_future(self.listing(directory)))
        elif kind <= 14:
            for _ in range(1 + c):
                if self.hub.held:
                    self.hub.release(a % len(self.hub.held))
                await self.let_run()
        elif kind == 15:
            self.tasks.append(asyncio.ensure_future(self.sync()))
        elif kind == 16:
            await self.quiesce()
        elif kind == 17 and c <= 1:
            if self.hub.up:
                self.hub.cut()
                self.names.link_down()
                self.session += 1
            else:
                self.attach()
        elif kind == 17 and c == 2:
            await self.restart()
        await self.let_run()
        self.look()

    def look(self) -> None:
        for directory in DIRS:
            for name in NAMES:
                self.peek(directory, name)
            self.peek_dir(directory)

    async def let_run(self) -> None:
        """Until the store has answered and what waits for it has gone on."""
        for _ in range(6):
            await asyncio.sleep(0)
        if self.store is not None:
            end = time.monotonic() + 5
            while self.store.pending and time.monotonic() < end:
                await asyncio.sleep(0)
            for _ in range(6):
                await asyncio.sleep(0)

    async def quiesce(self) -> None:
        """Everything on its way arrives."""
        for _ in range(40):
            if not self.hub.held:
                break
            self.hub.release()
            await self.let_run()

    async def sync(self) -> None:
        try:
            await self.names.sync()
        except (HubUnreachable, RemoteError):
            pass

    async def final(self) -> None:
        """With the link up, everything delivered and nothing held, the spoke knows the truth."""
        if not self.hub.up:
            self.attach()
        self.deliver(len(self.push_state))
        await self.end_tasks()
        held, self.hub.held = self.hub.held or [], None
        for turn in held:
            turn.set_result(None)
        for directory in DIRS:
            for name in NAMES:
                path = directory + b"/" + name if directory else name
                assert await self.names.lookup(directory, name) == self.hub.values.get(path)
            if directory in self.hub.children:
                assert (await self.names.directory(directory)).snapshot() == self.hub.listing(directory)


OPS = st.tuples(st.integers(0, 17), st.integers(0, 11), st.integers(0, 7), st.integers(0, 4))


@pytest.mark.parametrize(
    ("max_entries", "with_store"), [(1_000_000, False), (1_000_000, True), (12, False), (12, True)]
)
@given(ops=st.lists(OPS, min_size=20, max_size=80), quiet=st.booleans())
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_answer_is_older_than_the_last_invalidation(
    monkeypatch: pytest.MonkeyPatch,
    max_entries: int,
    with_store: bool,
    ops: list[tuple[int, ...]],
    quiet: bool,
) -> None:
    monkeypatch.setattr(settle, "DELAY", 0.0)
    monkeypatch.setattr(settle, "AGAIN", 0.001)

    async def main(directory: Path) -> None:
        history = Run(directory, max_entries, with_store, quiet)
        history.open()
        history.hub.held = []
        history.attach()
        for op in ops:
            await history.step(op)
        await history.final()
        await history.close()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(asyncio.wait_for(main(Path(directory)), 30))
