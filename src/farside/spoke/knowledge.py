"""What the spoke believes of names, and how replies and invalidations change that. No I/O, no waiting.

Invariants (all in the event loop):

* An invalidation is applied before it is acknowledged, to what is in memory, to what the store keeps and,
  through the change log, to every reply that is still on its way.
* A reply is never laid over a newer one (``asof``), and confirms only what was not invalidated since.
* A new session (or lost events) confirms nothing: what was known stays known, until a digest proves it.
* When a name that was a directory is invalidated, everything below it is *suspect* until that name was
  asked about: it may be another directory now.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from farside.protocol.messages import DirChange
from farside.spoke.asker import GONE, Answer
from farside.spoke.changes import Ask, Changed, ChangeLog, ancestors
from farside.spoke.directory import UNWATCHED_TTL, Directory, is_directory, join, same_directory, split
from farside.spoke.table import DirectoryTable

MAX_REPORTED = 1_000
"""Differences in one directory that are reported by name; beyond, the directory is."""

MAX_SUSPECTS = 10_000
"""Suspect directories kept one by one; beyond, the whole tree must be confirmed again."""


class Invalidated(NamedTuple):
    """What the kernel must forget: a name of directory ``path``, or (None) all of its names.

    The directory's own attributes and any listing of it that is kept changed as well. ``tree``: whatever
    lies below ``path`` is to be forgotten, too.
    """

    path: bytes
    name: bytes | None
    tree: bool = False


class Knowledge:
    """``report(changes)`` is called when a reply showed other values than those known."""

    def __init__(
        self, table: DirectoryTable, log: ChangeLog, report: Callable[[list[Invalidated]], None]
    ) -> None:
        self.table = table
        self.log = log
        self.root = b""
        self.root_dirty = False
        self.session = _new_session()
        self.live = False
        self.lease_until = float("inf")
        self.watched = False
        self.suspects: set[bytes] = set()
        self.unsettled: set[bytes] = set()
        """Directories that have names to ask about, or are to be listed again."""
        self.resync: set[bytes] = set()
        """Trees that lost their confirmation within a session."""
        self._report = report

    # -- may it be said? (any thread) -------------------------------------------------------------

    def leased(self) -> bool:
        return self.live and time.monotonic() < self.lease_until

    def confirmed(self, node: Directory) -> bool:
        """The hub stands behind the directory as a whole; single names may still be dirty."""
        if node.session != self.session or node.lost or not self.leased():
            return False
        if self.suspects and self.suspected(node.path) is not None:
            return False
        return (node.watched and self.watched) or time.monotonic() - node.checked <= UNWATCHED_TTL

    def suspected(self, path: bytes) -> bytes | None:
        """The topmost directory, ``path`` or above, that may be another one by now."""
        suspects = self.suspects
        for above in reversed(ancestors(path)):
            if above in suspects:
                return above
        return None

    # -- the link ---------------------------------------------------------------------------------

    def attached(self, root: bytes, watched: bool, same_session: bool) -> None:
        if not same_session:
            self.session = _new_session()
            self.suspects.clear()
            self.log.mark(b"", tree=True)
            self.resync.clear()
            if self.root and self.root != root:
                self._report([Invalidated(b"", None)])
        self.root = root
        self.root_dirty = False
        self.watched = watched
        self.live = True

    # -- invalidations ----------------------------------------------------------------------------

    def invalidate(self, changes: Sequence[DirChange]) -> list[Invalidated]:
        found: list[Invalidated] = []
        for change in changes:
            path, names = change.path, change.names
            if change.tree:
                self.unconfirm(path)
                self.resync.add(path)
                found.append(Invalidated(path, None, True))
            elif not names:
                self._lose(path)
                found.append(Invalidated(path, None))
            if names:
                self._mark_names(path, names)
                self._suspect(path, names)
                found += [Invalidated(path, name) for name in names]
            # Whatever changes in a directory changes its own time stamps: an entry of its parent.
            if path:
                parent, name = split(path)
                self._mark_names(parent, (name,))
            else:
                self.root_dirty = True
        self.log.applied()
        return found

    def _mark_names(self, path: bytes, names: Sequence[bytes]) -> None:
        self.log.mark(path, names)
        node = self.table.dirs.get(path)
        if node is not None:
            node.dirty.update(names)
            self.unsettled.add(path)
        self.table.mark(path, names)

    def _suspect(self, path: bytes, names: Iterable[bytes]) -> None:
        node = self.table.dirs.get(path)
        known = None if node is None else node.table
        for name in names:
            child = join(path, name)
            value = None if known is None else known.get(name)
            if value is not None and not is_directory(value):
                continue
            self.log.mark(child, tree=True)  # a listing of it may be on its way
            if self.table.holds(child):
                self.suspects.add(child)
                self.unsettled.add(path)
            if value is not None or known is None:
                self.table.unconfirm_tree(child)
        if len(self.suspects) > MAX_SUSPECTS:
            self.suspects.clear()
            self.unconfirm(b"")
            self.resync.add(b"")

    def _lose(self, path: bytes) -> None:
        self.log.mark(path)
        node = self.table.dirs.get(path)
        if node is not None:
            node.lost = True
            node.session = 0
            self.unsettled.add(path)
        self.table.mark(path, None)
        self.log.mark(path, tree=True)
        self.suspects |= self.table.children(path)
        self.table.unconfirm_tree(path)

    def unconfirm(self, path: bytes) -> None:
        """A directory and all below it stay known, but must be confirmed again."""
        self.log.mark(path, tree=True)
        for node in self.table.below(path):
            node.session = 0
        self.table.unconfirm_tree(path)

    def forget(self, path: bytes) -> None:
        """The hub said that ``path`` is not the directory it was: nothing below it is known any more."""
        self.log.mark(path, tree=True)
        self.table.delete_tree(path)
        if self.suspects:
            prefix = path + b"/"
            self.suspects = {s for s in self.suspects if s != path and not s.startswith(prefix)}

    # -- replies ----------------------------------------------------------------------------------

    def apply_answer(self, path: bytes, answer: Answer) -> None:
        """One result of a Stat."""
        if answer.errno and answer.errno not in GONE:
            return
        value = None if answer.errno else answer.value
        fresh = answer.fresh
        if not path:
            self._apply_root(value, fresh)
            return
        parent, name = split(path)
        node = self.table.dirs.get(parent)
        old: bytes | None = None
        # An outdated answer for a name that is not dirty any more came behind a newer one.
        if node is not None and answer.ask.start >= node.asof and (fresh or name in node.dirty):
            old = node.entries.get(name)
            if self.table.set_entry(node, name, value):
                self._report([Invalidated(parent, name)])
            if fresh:
                node.dirty.discard(name)
        child = self.table.dirs.get(path)
        replaced = old is not None and is_directory(old) and not same_directory(old, value)
        if replaced or self._is_other(path, value):
            self.forget(path)
        elif path in self.suspects:
            if child is None:
                self.unconfirm(path)  # what is known below it may belong to another directory
            if fresh:
                self.suspects.discard(path)
        if child is not None and value is not None:
            child.value = value

    def _is_other(self, path: bytes, value: bytes | None) -> bool:
        """Whether ``value`` shows that what is known below ``path`` is not below it any more."""
        if not self.table.holds(path):
            return False
        child = self.table.dirs.get(path)
        return (
            value is None or not is_directory(value) or (child is not None and child.value[:8] != value[:8])
        )

    def _apply_root(self, value: bytes | None, fresh: bool) -> None:
        if value is None:
            return
        if self.root != value:
            self.root = value
            self._report([Invalidated(b"", None)])
        if fresh:
            self.root_dirty = False

    def apply_listing(self, node: Directory, ask: Ask) -> Directory:
        """A whole listing, just received, as a new Directory; returns the one that holds now."""
        path = node.path
        old = self.table.dirs.get(path)
        if old is not None and ask.start < old.asof:
            return old
        changed = self.log.since(ask, path)
        self._identify(path, old, node.value, ask)
        if old is not None and old.digest and old.digest == node.digest and path in self.table.dirs:
            self._confirm(old, ask, changed, node.value, node.watched)
            return old
        differing = [] if old is None else _differences(old, node)
        for name in differing:
            before = old.entries.get(name) if old is not None else None
            if before is not None and is_directory(before):
                now = node.entries.get(name)
                if not same_directory(before, now):
                    self.forget(join(path, name))
        if old is None:  # nothing to compare with, but its subdirectories may be known
            for child in self.table.children(path):
                if self._is_other(child, node.entries.get(split(child)[1])):
                    self.forget(child)
        self._confirm(node, ask, changed, node.value, node.watched)
        self.table.put(node)
        if len(differing) > MAX_REPORTED:
            self._report([Invalidated(path, None)])
        elif differing:
            self._report([Invalidated(path, name) for name in differing])
        return node

    def confirm(self, node: Directory, ask: Ask, value: bytes, watched: bool) -> None:
        """The hub said that the listing, as it is in ``node``, holds."""
        if ask.start < node.asof or self.table.dirs.get(node.path) is not node:
            return
        changed = self.log.since(ask, node.path)
        self._identify(node.path, node, value, ask)
        if self.table.dirs.get(node.path) is node:
            self._confirm(node, ask, changed, value, watched)
            self.table.confirm(node)

    def confirm_stored(self, path: bytes, digest: bytes, ask: Ask, watched: bool) -> None:
        """As ``confirm``, for a listing that is in the store only."""
        changed = self.log.since(ask, path)
        if not changed.whole and not changed.tree:
            self.table.confirm_stored(path, digest, self.session, watched, changed.names)

    def _confirm(self, node: Directory, ask: Ask, changed: Changed, value: bytes, watched: bool) -> None:
        node.asof = ask.start
        node.checked = ask.at
        node.dirty = set(changed.names)
        node.lost = changed.whole
        node.session = 0 if changed.whole or changed.tree else self.session
        if node.dirty or node.lost:
            self.unsettled.add(node.path)
        if node.saved and (node.value != value or node.watched != watched):
            self.table.edited(node)
        node.value, node.watched = value, watched
        if not node.path and value != self.root and not any(changed):
            self._apply_root(value, True)

    def _identify(self, path: bytes, old: Directory | None, value: bytes, ask: Ask) -> None:
        """The hub described the directory at ``path``: is it the one whose contents are known?"""
        if old is not None and not same_directory(old.value, value):
            self.forget(path)
        elif path in self.suspects:
            if old is None:
                self.unconfirm(path)
            if path and not self.log.outdated(ask, path):
                self.suspects.discard(path)

    def gone(self, path: bytes) -> None:
        """The hub said that there is no directory at ``path``."""
        self.forget(path)
        if path:
            parent, name = split(path)
            self._mark_names(parent, (name,))


def _differences(old: Directory, new: Directory) -> list[bytes]:
    return sorted({name for name, _ in old.entries.items() ^ new.entries.items()})


def _new_session() -> int:
    """Never 0; as good as unique over all processes that ever used one store."""
    return random.getrandbits(62) + 1
