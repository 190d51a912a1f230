"""The directories that are in memory, which of them to drop, and what of them the store must be told.

Owned by the event loop; other threads only read ``dirs``. Memory is bounded by entries: a clock hand drops
directories that nobody read since it last passed (the store keeps them).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable

from farside.spoke.changes import ChangeLog
from farside.spoke.directory import Directory, count_listing
from farside.spoke.store import Row, Store

STORE_PATIENCE = 2.0
"""Seconds to wait for the store before the hub is asked instead."""

SAVE_DELAY = 0.5
"""Seconds after which a new listing is written; an edited one waits longer, by its size."""

SAVE_BYTES = 2 << 20
"""About so many bytes of listings in one transaction."""

MAX_QUEUE = 8
"""Jobs that may wait for the store while the tree streams in."""


class DirectoryTable:
    """Directories by path, at most about ``max_entries`` names (or one directory, however large)."""

    def __init__(self, store: Store | None, portal: bytes, max_entries: int, log: ChangeLog) -> None:
        self.dirs: dict[bytes, Directory] = {}
        self.cost = 0
        self.entries = 0
        self.evicted = 0
        self._store = store
        self._portal = portal
        self._max = max_entries
        self._log = log
        self._unsaved: dict[bytes, float] = {}
        self._marks: dict[bytes, set[bytes] | None] = {}
        self._below: dict[bytes, int] = {}
        self._confirmed: dict[bytes, tuple[int, bytes, bool]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def store(self) -> Store | None:
        """The store, while it works."""
        return None if self._store is None or self._store.broken else self._store

    # -- in memory --------------------------------------------------------------------------------

    def put(self, node: Directory) -> None:
        """Takes a directory in, in place of what was known of it, and makes room."""
        self.drop(node.path)
        self.dirs[node.path] = node
        self.cost += node.cost
        self.entries += node.count
        self._count_below(node.path, 1)
        if not node.saved:
            self._save_later(node, 0.0)
        self._make_room()

    def drop(self, path: bytes) -> None:
        node = self.dirs.pop(path, None)
        if node is not None:
            self.cost -= node.cost
            self.entries -= node.count
            self._count_below(path, -1)
            self._unsaved.pop(path, None)

    def set_entry(self, node: Directory, name: bytes, value: bytes | None) -> bool:
        """``Directory.set_entry`` for a directory of this table."""
        before = node.count
        changed = node.set_entry(name, value)
        if changed and self.dirs.get(node.path) is node:
            self.cost += node.count - before
            self.entries += node.count - before
            self._save_later(node, max(1.0, node.count / 2000))
        return changed

    def below(self, path: bytes) -> list[Directory]:
        """The directory and all below it that are in memory."""
        if not path:
            return list(self.dirs.values())
        prefix = path + b"/"
        return [d for p, d in self.dirs.items() if p == path or p.startswith(prefix)]

    def holds(self, path: bytes) -> bool:
        """Whether ``path`` or anything below it is in memory as a directory."""
        return path in self.dirs or path in self._below

    def children(self, path: bytes) -> set[bytes]:
        """The directories right below ``path`` of which something is in memory."""
        prefix = path + b"/" if path else b""
        if path not in self._below:
            return set()
        cut = len(prefix)
        return {
            prefix + p[cut:].split(b"/", 1)[0] for p in self.dirs if p.startswith(prefix) and len(p) > cut
        }

    def _count_below(self, path: bytes, step: int) -> None:
        while path:
            path = path.rpartition(b"/")[0]
            count = self._below.get(path, 0) + step
            if count:
                self._below[path] = count
            else:
                del self._below[path]

    def _make_room(self) -> None:
        late: list[Directory] = []
        while self.cost > self._max and len(self.dirs) > 1:
            path = next(iter(self.dirs))
            node = self.dirs[path]
            if node.visited:
                node.visited = False
                self.dirs[path] = self.dirs.pop(path)
                continue
            if not node.saved:
                late.append(node)
            self.drop(path)
            self.evicted += 1
        if late:
            self._save(late)

    # -- in the store -----------------------------------------------------------------------------

    async def load(self, path: bytes) -> Directory | None:
        """The directory from memory or, if the store has it and answers in time, from there."""
        if (node := self.dirs.get(path)) is not None:
            return node
        store = self.store
        if store is None:
            return None
        ask = self._log.begin()
        try:
            self.flush_marks()
            job = asyncio.wrap_future(store.submit(store.load, self._portal, path))
            await asyncio.wait({job}, timeout=STORE_PATIENCE)
            if (node := self.dirs.get(path)) is not None:
                return node
            row = job.result() if job.done() else None
            if row is None:
                return None
            listing = row.listing if isinstance(row.listing, bytes) else b""
            try:
                count, _ = count_listing(listing)
            except ValueError:
                return None
            changed = self._log.since(ask, path)
        finally:
            self._log.end(ask)
        node = Directory(path, row.value, listing, count, row.digest, watched=row.watched)
        node.saved = True
        node.dirty = set(row.dirty) | changed.names
        node.lost = row.lost or changed.whole
        node.session = 0 if changed.whole or changed.tree else row.session
        self.put(node)
        return node

    def mark(self, path: bytes, names: Iterable[bytes] | None) -> None:
        """The store must know that names (None: all) of a directory were invalidated."""
        if self._store is None:
            return
        if names is None:
            self._marks[path] = None
        elif (known := self._marks.setdefault(path, set())) is not None:
            known.update(names)
        self._wake(0.05)

    def confirm(self, node: Directory) -> None:
        """The hub confirmed the listing of a directory that is in memory."""
        if node.saved and node.digest and node.session:
            self.confirm_stored(node.path, node.digest, node.session, node.watched, node.dirty)

    def confirm_stored(
        self, path: bytes, digest: bytes, session: int, watched: bool, dirty: Collection[bytes]
    ) -> None:
        """The hub confirmed the listing that the store holds, but for the names in ``dirty``."""
        if self._store is None:
            return
        self._confirmed[path] = (session, digest, watched)
        # In the store the confirmation clears the row's marks; those that still count go behind it.
        if dirty:
            self.mark(path, dirty)
        if len(self._confirmed) >= 5_000:
            self.flush_marks()
        self._wake(SAVE_DELAY)

    def unconfirm_tree(self, path: bytes) -> None:
        if (store := self.store) is not None:
            self.flush_marks()
            store.submit(store.unconfirm_tree, self._portal, path)

    def edited(self, node: Directory) -> None:
        """Something of the directory but its entries changed and must be kept."""
        node.saved = False
        if self.dirs.get(node.path) is node:
            self._save_later(node, 1.0)

    def delete_tree(self, path: bytes) -> None:
        for node in self.below(path):
            self.drop(node.path)
        if (store := self.store) is not None:
            self.flush_marks()
            store.submit(store.delete_tree, self._portal, path)

    def flush_marks(self) -> None:
        """Hands marks and confirmations to the store, so that whatever is submitted next sees them."""
        store = self.store
        marks, self._marks = self._marks, {}
        confirmed, self._confirmed = self._confirmed, {}
        if store is None:
            return
        by_session: dict[int, dict[bytes, tuple[bytes, bool]]] = {}
        for path, (session, digest, watched) in confirmed.items():
            by_session.setdefault(session, {})[path] = (digest, watched)
        for session, held in by_session.items():
            store.submit(store.confirm, self._portal, session, held)
        if marks:
            store.submit(
                store.mark, self._portal, {p: None if n is None else list(n) for p, n in marks.items()}
            )

    def _save_later(self, node: Directory, delay: float) -> None:
        if self._store is not None:
            self._unsaved.setdefault(node.path, time.monotonic() + delay)
            self._wake(SAVE_DELAY)

    def _wake(self, delay: float) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._timer = loop.call_later(delay, self._on_timer)
        elif self._timer.when() > loop.time() + delay:
            self._timer.cancel()
            self._timer = loop.call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.flush(only_due=True)
        if self._unsaved:
            self._wake(SAVE_DELAY)

    def flush(self, *, only_due: bool = False) -> None:
        """Hands marks and unsaved listings to the store."""
        self.flush_marks()
        now = time.monotonic()
        due = [path for path, at in self._unsaved.items() if at <= now or not only_due]
        batch: list[Directory] = []
        size = 0
        for path in due:
            node = self.dirs[path]
            batch.append(node)
            size += 120 * node.count + 200
            if size >= SAVE_BYTES:
                self._save(batch)
                batch, size = [], 0
        if batch:
            self._save(batch)

    def _save(self, nodes: list[Directory]) -> None:
        store = self.store
        for node in nodes:
            self._unsaved.pop(node.path, None)
        if store is None:
            return
        self.flush_marks()
        rows = []
        undigested = []
        for node in nodes:
            listing = node.snapshot() if node.packed is None else node.packed
            dirty = tuple(node.dirty)
            rows.append(
                Row(node.path, node.value, node.digest, node.session, node.watched, node.lost, dirty, listing)
            )
            node.saved = True  # jobs are done in order: a load behind this one finds the row
            if node.table is not None:
                node.packed = None
            if not node.digest:
                undigested.append((node, node.edits))
        job = asyncio.wrap_future(store.submit(store.save, self._portal, rows))
        job.add_done_callback(_digests_into(undigested))

    async def drain(self) -> None:
        """Waits (bounded) until the store has caught up; called while the tree streams in."""
        until = time.monotonic() + STORE_PATIENCE
        while (store := self.store) is not None and store.pending > MAX_QUEUE and time.monotonic() < until:
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        """Writes what is not written, for at most ``STORE_PATIENCE`` seconds."""
        self.flush()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (store := self.store) is not None:
            await asyncio.wait({asyncio.wrap_future(store.submit(int))}, timeout=STORE_PATIENCE)


def _digests_into(
    nodes: list[tuple[Directory, int]],
) -> Callable[[asyncio.Future[dict[bytes, bytes] | None]], None]:
    """When a save is done: digests that it made go to the directories that were not edited since."""

    def done(job: asyncio.Future[dict[bytes, bytes] | None]) -> None:
        made = None if job.cancelled() or job.exception() else job.result()
        for node, edits in nodes:
            if made and node.edits == edits:
                node.digest = made.get(node.path, b"")

    return done
