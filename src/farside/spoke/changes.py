"""Which names were invalidated while a question to the hub was under way.

A reply that left the hub before a change may reach the spoke after the invalidation of that change. So
each question takes a *mark in time* before it is sent, and its reply is believed only for names that were
not invalidated since. The log remembers no more than the open questions need.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import NamedTuple

MAX_RECORDS = 200_000
"""Beyond so many records the log says "everything changed" to the questions that are open."""


class Ask:
    """One open question: the log's time and the monotonic time (s) when it was asked."""

    __slots__ = ("at", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.at = time.monotonic()


class Changed(NamedTuple):
    """What was invalidated in one directory: all of it for sure, perhaps (``tree``), or some names."""

    whole: bool
    tree: bool
    names: frozenset[bytes]

    def touches(self, name: bytes) -> bool:
        return self.whole or self.tree or name in self.names


_NOTHING = Changed(False, False, frozenset())
_EVERYTHING = Changed(False, True, frozenset())


def ancestors(path: bytes) -> list[bytes]:
    """``path`` and every directory above it, the root (b"") last."""
    found = [path]
    while path:
        path = path.rpartition(b"/")[0]
        found.append(path)
    return found


class ChangeLog:
    """Invalidations in order, for as long as some question that is older than them is open."""

    def __init__(self) -> None:
        self.now = 0
        """Counts questions and invalidations: what is later has the larger number."""
        self.marks = 0
        """Counts invalidations only."""
        self._open: set[Ask] = set()
        self._names: dict[bytes, dict[bytes, int]] = {}
        self._whole: dict[bytes, int] = {}
        self._trees: dict[bytes, int] = {}
        self._everything = 0
        self._records = 0

    def begin(self) -> Ask:
        """A question is about to be sent."""
        self.now += 1
        ask = Ask(self.now)
        self._open.add(ask)
        return ask

    def end(self, ask: Ask) -> None:
        """Its reply was applied, or will never be. May be called twice."""
        self._open.discard(ask)
        if not self._open and self._records:
            self._forget()

    def mark(self, path: bytes, names: Collection[bytes] = (), *, tree: bool = False) -> None:
        """An invalidation as in ``messages.DirChange``: no name and no tree means the whole directory."""
        self.now += 1
        self.marks += 1
        if not self._open:
            return
        if tree:
            self._trees[path] = self.now
            self._records += 1
        elif not names:
            self._whole[path] = self.now
            self._records += 1
        else:
            named = self._names.setdefault(path, {})
            before = len(named)
            for name in names:
                named[name] = self.now
            self._records += len(named) - before
        if self._records > MAX_RECORDS:
            self._forget()
            self._everything = self.now

    def applied(self) -> None:
        """What was marked is to be seen by now: who looked in between, in another thread, looks again."""
        self.marks += 1

    def since(self, ask: Ask, path: bytes) -> Changed:
        """What was invalidated in directory ``path`` after ``ask`` began."""
        start = ask.start
        if not self._records and self._everything <= start:
            return _NOTHING
        if self._everything > start:
            return _EVERYTHING
        whole = self._whole.get(path, 0) > start
        tree = bool(self._trees) and any(self._trees.get(a, 0) > start for a in ancestors(path))
        named = self._names.get(path)
        names = frozenset(n for n, at in named.items() if at > start) if named else _NOTHING.names
        return Changed(whole, tree, names) if whole or tree or names else _NOTHING

    def outdated(self, ask: Ask, path: bytes) -> bool:
        """Whether the value of ``path`` itself was invalidated after ``ask`` began."""
        if not path:
            return any(self.since(ask, b""))
        parent, _, name = path.rpartition(b"/")
        return self.since(ask, parent).touches(name)

    def _forget(self) -> None:
        self._names.clear()
        self._whole.clear()
        self._trees.clear()
        self._records = 0
