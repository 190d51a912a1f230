"""What the spoke knows of names and attributes, and when it may say so.

Three states of an answer:

* **trusted**: the lease is live, and the hub confirmed the directory in this session (and watches it, or
  confirmed it within ``UNWATCHED_TTL``), and the name was not invalidated since. Only then is "there is no
  such name" said, and only then may the kernel keep the answer.
* **away**: the hub cannot be asked. What is known to exist is answered; what is not known, or known to have
  changed, waits for the link and then fails with HubUnreachable. Absence is never concluded.
* otherwise the hub is asked, and the reply counts only for names that were not invalidated on its way.

The event loop owns everything; ``peek``, ``peek_dir`` and ``watched`` may be called in any thread.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from farside.errors import HubUnreachable, RemoteError
from farside.protocol.messages import DirChange
from farside.spoke.asker import GONE, Answer, Asker, Remote
from farside.spoke.changes import ChangeLog
from farside.spoke.directory import UNKNOWN, UNWATCHED_TTL, Directory, Unknown, is_directory, join, split
from farside.spoke.knowledge import Invalidated, Knowledge
from farside.spoke.listing import Lister
from farside.spoke.settle import Settler
from farside.spoke.store import Store
from farside.spoke.table import DirectoryTable
from farside.spoke.treesync import TreeSync

__all__ = ["UNKNOWN", "Directory", "Invalidated", "Namespace", "Remote", "Unknown"]

POLL = 0.25
"""Seconds after which a question that failed for want of a link is tried again, without other news."""

PATIENT_TRIES = 3
"""A name that is invalidated faster than the hub can be asked is answered after so many questions."""

LIST_LIMIT = 20_000
"""An unwatched directory with more entries is not listed again for one name; the name is asked about."""

MEMO_LIMIT = 10_000
"""Rechecked names of unwatched directories that are remembered (for a second)."""

_NO_LIST = (errno.EACCES, errno.EPERM)


class Namespace:
    """The names of one portal.

    ``timeout_s`` bounds every ``lookup``, ``directory`` and ``refresh``. ``on_change`` (settable) is called
    in the loop with what the kernel must forget because a reply showed other values than were known.
    """

    def __init__(
        self,
        store: Store | None,
        portal_id: bytes,
        remote: Remote,
        *,
        max_entries: int = 2_000_000,
        timeout_s: float = 30.0,
        on_change: Callable[[list[Invalidated]], None] | None = None,
    ) -> None:
        self.on_change = on_change
        self.timeout_s = timeout_s
        self._remote = remote
        self._log = ChangeLog()
        self._table = DirectoryTable(store, portal_id, max_entries, self._log)
        self._known = Knowledge(self._table, self._log, self._report)
        self._dirs = self._table.dirs
        self._asker = Asker(remote, self._log, self._known.apply_answer)
        self._lister = Lister(remote, self._known)
        self._tree = TreeSync(portal_id, remote, self._known, max_entries)
        self._settler = Settler(remote, self._known, self._asker, self._lister, self._tree)
        self._memo: dict[bytes, Answer] = {}
        self._news: asyncio.Future[None] | None = None

    # -- any thread -------------------------------------------------------------------------------

    def peek(self, directory: bytes, name: bytes) -> bytes | Unknown | None:
        """The value of a name at once; None: there is surely no such name; UNKNOWN: use ``lookup``."""
        node = self._dirs.get(directory)
        if node is None or (table := node.table) is None:
            return UNKNOWN
        node.visited = True
        if self._known.confirmed(node):
            if name in node.dirty:
                return UNKNOWN
            return table.get(name)
        return UNKNOWN if self._can_ask() else self._away(node, name)

    def peek_dir(self, directory: bytes) -> Directory | Unknown:
        """The directory at once if it is trusted, or known while the hub cannot be asked.

        In the second case its ``dirty`` names may have other attributes by now: hand out none for them.
        """
        node = self._dirs.get(directory)
        if node is None or node.table is None:
            return UNKNOWN
        node.visited = True
        if self._known.confirmed(node):
            return UNKNOWN if node.dirty else node
        return UNKNOWN if self._can_ask() or node.lost else node

    def resident(self, path: bytes) -> Directory | Unknown:
        """[loop] As ``peek_dir``, also for a directory that nobody has looked into yet."""
        node = self._dirs.get(path)
        if node is not None:
            node.entries  # noqa: B018 - unpacks
        return self.peek_dir(path)

    def watched(self, directory: bytes) -> bool:
        """Whether answers about the directory may be kept by the kernel until they are invalidated."""
        node = self._dirs.get(directory)
        return node is not None and node.watched and self._known.watched and self._known.confirmed(node)

    @property
    def changes(self) -> int:
        """Counts invalidations. Who answers the kernel in another thread compares it before ``peek`` and
        after the answer: if it moved, the kernel may have got the answer after the invalidation and must
        be told again."""
        return self._log.marks

    def _can_ask(self) -> bool:
        return self._remote.up and self._known.leased()

    def _away(self, node: Directory, name: bytes) -> bytes | Unknown:
        """What is said of a name while the hub cannot be asked: that it exists, or nothing.

        A file that was invalidated is known to have changed, so its old value is not given. A directory
        is: names within have marks of their own, and without it nothing below could be reached.
        """
        table = node.table
        value = None if table is None else table.get(name)
        if value is None or ((node.lost or name in node.dirty) and not is_directory(value)):
            return UNKNOWN
        return value

    # -- the loop ---------------------------------------------------------------------------------

    @property
    def root(self) -> bytes:
        """Value of the root directory; b"" when it was never known."""
        node = self._dirs.get(b"")
        return self._known.root or (b"" if node is None else node.value)

    async def lookup(self, directory: bytes, name: bytes) -> bytes | None:
        """The value of a name, or None when the hub says that there is none.

        Raises:
            HubUnreachable: nothing is known, or what is known is out of date, and the hub did not answer
                within ``timeout_s``.
            RemoteError: the hub refused (EACCES, EIO …); ENOENT only for a directory that is gone.
        """
        deadline = time.monotonic() + self.timeout_s
        path = join(directory, name)
        begun = self._log.now
        tries = 0
        while True:
            await self._table_of(directory)
            value = self.peek(directory, name)
            if value is not UNKNOWN:
                return value
            if time.monotonic() >= deadline:
                return self._last_resort(directory, name)
            if not self._can_ask():
                await self._pause(deadline)
                continue
            tries += 1
            try:
                if tries <= PATIENT_TRIES and await self._improve(directory, deadline):
                    node = self._dirs.get(directory)
                    if node is not None and self._listed_since(node, begun) and name not in node.dirty:
                        return node.entries.get(name)
                    continue
                answer = await self._answer(path, deadline)
                if answer is not None and (
                    self._holds(answer) or (answer.ask.start > begun and tries > PATIENT_TRIES)
                ):
                    return _value_of(answer, path)
            except HubUnreachable:
                await self._pause(deadline)
            except RemoteError as error:
                if error.errno not in GONE:
                    raise
                if await self._is_gone(directory, deadline):
                    return None

    async def directory(self, path: bytes) -> Directory:
        """The whole of a directory: as the hub confirmed it, or as it is known while away.

        Raises:
            HubUnreachable: as in ``lookup``.
            RemoteError: the hub refused, or (ENOENT, ENOTDIR) says that there is no such directory.
        """
        deadline = time.monotonic() + self.timeout_s
        begun = self._log.now
        tries = 0
        while True:
            await self._table_of(path)
            found = self.peek_dir(path)
            if found is not UNKNOWN:
                return found
            node = self._dirs.get(path)
            if time.monotonic() >= deadline:
                if node is not None and not node.lost:
                    node.entries  # noqa: B018 - unpacks
                    return node
                raise self._unreachable(path)
            if not self._can_ask():
                await self._pause(deadline)
                continue
            tries += 1
            patient = tries <= PATIENT_TRIES
            if node is not None and self._listed_since(node, begun) and not (node.dirty and patient):
                return node
            try:
                if not patient or not await self._improve(path, deadline, whole=True):
                    await self._wait(self._lister.list(path).task, deadline=deadline)
            except HubUnreachable:
                await self._pause(deadline)
            except RemoteError as error:
                if error.errno not in GONE or not patient or await self._is_gone(path, deadline):
                    raise

    async def refresh(self, path: bytes, *, force: bool = False) -> bytes:
        """The value of one path as of now: what is trusted, else the hub's word (for an unwatched
        directory at most one question a second). ``force`` asks in any case.

        Raises:
            RemoteError: ENOENT when the hub says that it is gone; others as the hub answered.
            HubUnreachable: as in ``lookup``.
        """
        deadline = time.monotonic() + self.timeout_s
        begun = self._log.now
        while True:
            known = self._peek_path(path)
            if known is not UNKNOWN and not (force and self._can_ask()):
                if known is None:
                    raise _no_entry(path)
                return known
            if not self._can_ask() or time.monotonic() >= deadline:
                value = await self._known_to_exist(path)
                if value is not UNKNOWN:
                    return value
                if time.monotonic() >= deadline:
                    raise self._unreachable(path)
                await self._pause(deadline)
                continue
            try:
                answer = None if force else self._remembered(path)
                answer = answer or await self._answer(path, deadline)
            except HubUnreachable:
                await self._pause(deadline)
                continue
            if answer is not None and (answer.ask.start > begun or (self._holds(answer) and not force)):
                value_now = _value_of(answer, path)
                if value_now is None:
                    raise _no_entry(path)
                return value_now

    # -- told by the link -------------------------------------------------------------------------

    def attached(
        self, root_value: bytes, watched: bool, same_session: bool, lease_until: float = float("inf")
    ) -> None:
        """The link is up. ``same_session``: every invalidation since the last time has been received.

        ``lease_until``: monotonic seconds; see ``renew``.
        """
        self._known.lease_until = lease_until
        self._known.attached(root_value, watched, same_session)
        self._settler.wake()
        self._announce()

    def renew(self, until: float) -> None:
        """The hub acknowledged a heartbeat: what is confirmed may be trusted until then (monotonic s)."""
        self._known.lease_until = until

    def link_down(self) -> None:
        """The lease ran out: trusted becomes away."""
        self._known.live = False
        self._announce()

    def invalidate(self, changes: Sequence[DirChange]) -> list[Invalidated]:
        """Applies a push of the hub; when it returns, the push may be acknowledged.

        Returns what the kernel must forget. Changed names are asked about soon, in batches.
        """
        found = self._known.invalidate(changes)
        self._settler.wake()
        return found

    async def sync(self, limit: int | None = None) -> None:
        """Streams the whole tree, by difference with what is known, until ``limit`` entries were seen.

        Call it after each ``attached``.

        Raises:
            HubUnreachable: the link went down; what came so far is kept.
        """
        await self._tree.sync(b"", limit)
        for path in list(self._tree.large):
            try:
                await self.directory(path)
            except RemoteError:
                pass  # gone or forbidden by now: whoever wants it is told so

    async def close(self) -> None:
        """Stops background work and writes to the store what is not there yet (bounded)."""
        self._settler.close()
        self._asker.close()
        self._lister.close()
        await self._table.close()

    def stats(self) -> dict[str, int | bool]:
        """For ``status``: what is known, how much of it is in memory and confirmed, questions asked."""
        nodes = list(self._dirs.values())
        return {
            "dirs": max(len(nodes), self._tree.dirs),
            "entries": max(self._table.entries, self._tree.entries),
            "resident_dirs": len(nodes),
            "resident_entries": self._table.entries,
            "memory": sum(n.memory() for n in nodes),
            "synced": self._tree.synced,
            "confirmed": sum(n.session == self._known.session for n in nodes),
            "dirty": sum(len(n.dirty) for n in nodes),
            "stat_batches": self._asker.batches,
            "list_pages": self._lister.pages,
            "evicted_dirs": self._table.evicted,
            "store_dropped": 0 if self._table.store is None else self._table.store.dropped,
        }

    # -- steps ------------------------------------------------------------------------------------

    async def _table_of(self, path: bytes) -> Directory | None:
        """The directory in memory and unpacked, from the store if need be."""
        node = self._dirs.get(path) or await self._table.load(path)
        if node is not None:
            node.entries  # noqa: B018 - unpacks
        return node

    async def _improve(self, path: bytes, deadline: float, *, whole: bool = False) -> bool:
        """One step towards a trusted directory; False when single names are what is left to ask.

        ``whole``: the caller wants every name.
        """
        if (suspect := self._known.suspected(path)) is not None and suspect:
            await self._answer(suspect, deadline)
            return True
        node = self._dirs.get(path)
        if node is not None and self._known.confirmed(node):
            if not whole:
                return False
            names = list(node.dirty)
            if not names or len(names) > LIST_LIMIT // 4:
                return False
            await self._wait(
                *(self._asker.ask(join(path, n)) for n in names), deadline=deadline, everyone=True
            )
            return True
        expired = node is not None and node.session == self._known.session and not node.lost
        if not whole and expired and node is not None and node.count > LIST_LIMIT:
            return False
        listing = self._lister.list(path)
        try:
            done = await self._wait(listing.task, *(() if whole else (listing.large,)), deadline=deadline)
        except RemoteError as error:
            if not whole and error.errno in _NO_LIST:
                return False
            raise
        return whole or listing.task in done or listing.large not in done

    async def _answer(self, path: bytes, deadline: float) -> Answer | None:
        """The hub's word on one path; None when there was none in time."""
        future = self._asker.ask(path)
        await self._wait(future, deadline=deadline)
        if not future.done() or future.cancelled():
            return None
        answer = future.result()
        if len(self._memo) >= MEMO_LIMIT:
            self._memo.clear()
        self._memo[path] = answer
        return answer

    def _remembered(self, path: bytes) -> Answer | None:
        """The answer of the last second, if nothing was invalidated since."""
        answer = self._memo.get(path)
        if answer is None or time.monotonic() - answer.ask.at > UNWATCHED_TTL:
            return None
        return answer if self._holds(answer) else None

    def _holds(self, answer: Answer) -> bool:
        return answer.fresh and answer.marks == self._log.marks

    def _listed_since(self, node: Directory, begun: int) -> bool:
        """The hub listed it after the caller began to ask: good enough, even if it changed meanwhile."""
        return node.asof > begun and node.session == self._known.session and not node.lost

    async def _is_gone(self, directory: bytes, deadline: float) -> bool:
        """A listing said so, but it may be older than the question: ask about the directory itself."""
        answer = await self._answer(directory, deadline)
        if answer is None or not answer.fresh:
            return False
        return answer.errno in GONE or (not answer.errno and not is_directory(answer.value))

    def _peek_path(self, path: bytes) -> bytes | Unknown | None:
        if path:
            return self.peek(*split(path))
        root = self._dirs.get(b"")
        if root is None or self._known.root_dirty or not self._known.confirmed(root):
            return UNKNOWN
        return self.root

    def _exists(self, directory: bytes, name: bytes) -> bytes | Unknown:
        node = self._dirs.get(directory)
        return UNKNOWN if node is None else self._away(node, name)

    async def _known_to_exist(self, path: bytes) -> bytes | Unknown:
        """What is known of a path without the hub's help."""
        parent, name = split(path)
        await self._table_of(parent)
        if not path:
            return self.root or UNKNOWN
        return self._exists(parent, name)

    def _last_resort(self, directory: bytes, name: bytes) -> bytes:
        """Time is up: what is known to exist, else the error."""
        value = self._exists(directory, name)
        if value is UNKNOWN:
            raise self._unreachable(join(directory, name))
        return value

    def _unreachable(self, path: bytes) -> HubUnreachable:
        return HubUnreachable(
            f"the hub did not answer within {self.timeout_s:g} s",
            path=path,
            hint="it heals by itself when the link is back; `farside status` shows its state",
        )

    # -- waiting ----------------------------------------------------------------------------------

    async def _wait(
        self, *futures: asyncio.Future[Any], deadline: float, everyone: bool = False
    ) -> set[asyncio.Future[Any]]:
        """Waits for the first (or all) of shared futures, news of the link, or the deadline.

        Returns those that are done, after raising what one of them raised.
        """
        waiting = set(futures)
        while True:
            news = self._next_news()
            left = deadline - time.monotonic()
            await asyncio.wait({*waiting, news}, timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED)
            done = {future for future in futures if future.done()}
            for future in done:
                if not future.cancelled():
                    future.result()
            waiting = {future for future in futures if not future.done()}
            if not waiting or (done and not everyone) or news.done() or left <= 0:
                return done

    async def _pause(self, deadline: float) -> None:
        """Until there is news of the link, for at most ``POLL`` seconds."""
        await self._wait(deadline=min(deadline, time.monotonic() + POLL))

    def _next_news(self) -> asyncio.Future[None]:
        if self._news is None or self._news.done():
            self._news = asyncio.get_running_loop().create_future()
        return self._news

    def _announce(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _report(self, changes: list[Invalidated]) -> None:
        if self.on_change is not None:
            self.on_change(changes)


def _value_of(answer: Answer, path: bytes) -> bytes | None:
    """Raises RemoteError for an errno that does not mean "no such name"."""
    if not answer.errno:
        return answer.value
    if answer.errno in GONE:
        return None
    raise RemoteError(f"the hub answers: {os.strerror(answer.errno)}", errno=answer.errno, path=path)


def _no_entry(path: bytes) -> RemoteError:
    return RemoteError("no such file or directory at the hub", errno=errno.ENOENT, path=path)
