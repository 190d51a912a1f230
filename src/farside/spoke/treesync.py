"""The whole tree, streamed from the hub in the background, by difference with what the spoke has."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncGenerator

from farside.errors import ProtocolError
from farside.protocol.attributes import VALUE_MIN, digest_of
from farside.protocol.messages import TreeDir, TreeDone
from farside.spoke.asker import Remote
from farside.spoke.changes import Ask
from farside.spoke.directory import Directory, count_listing
from farside.spoke.knowledge import Knowledge
from farside.spoke.table import STORE_PATIENCE

KNOWN_BYTES = 24 << 20
"""At most about so many bytes of known digests are sent along."""

STORE_LIMIT = 20_000_000
"""Entries walked when the store takes what memory does not hold; without one, memory is the limit."""


class TreeSync:
    """Applies ListTree streams. Demands do not wait for it: they ask for their own directory.

    Attributes:
        synced: the last whole walk ended, and nothing was left out.
        wanted: a whole walk was asked for; trees that lose their confirmation are walked again.
        dirs, entries: what the last whole walk saw.
    """

    def __init__(self, portal: bytes, remote: Remote, known: Knowledge, max_entries: int) -> None:
        self._portal = portal
        self._remote = remote
        self._known = known
        self._max = max_entries
        self._turn = asyncio.Lock()
        self.synced = False
        self.wanted = False
        self.large: list[bytes] = []
        """Directories that are too large for the stream, to be listed page by page."""
        self.dirs = 0
        self.entries = 0

    async def sync(self, path: bytes, limit: int | None = None) -> None:
        """Walks the tree below ``path`` until ``limit`` entries were seen; one walk at a time.

        Raises:
            HubUnreachable, ProtocolError: what came until then is kept.
        """
        async with self._turn:
            whole = not path
            if whole:
                self.wanted = True
                self.synced = False
            known = await self._digests(path)
            if limit is None:
                limit = self._max if self._known.table.store is None else STORE_LIMIT
            log = self._known.log
            ask = log.begin()
            self.large.clear()
            session = self._known.session
            try:
                done = await self._stream(path, known, limit, ask)
                untouched = session == self._known.session and not log.since(ask, b"").tree
            finally:
                log.end(ask)
            if whole:
                self.dirs, self.entries = done.dirs, done.entries
                self.synced = not done.truncated
                if self.synced and untouched:
                    self._forget_unseen(session)

    async def _stream(self, path: bytes, known: dict[bytes, bytes], limit: int, ask: Ask) -> TreeDone:
        stream = self._remote.list_tree(path, known, limit)
        done: TreeDone | None = None
        try:
            async for message, payload in stream:
                if done is not None:
                    raise ProtocolError("a tree goes on behind its last message", path=path)
                if isinstance(message, TreeDone):
                    done = message
                    continue
                at = 0
                for entry in message.dirs:
                    listing = bytes(payload[at : at + entry.length])
                    at += entry.length
                    if len(listing) != entry.length:
                        raise ProtocolError("a part of a tree is shorter than it says", path=entry.path)
                    self._apply(entry, listing, known, ask)
                await self._known.table.drain()
        finally:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()  # ends the hub's work at once when this is cancelled
        if done is None:
            raise ProtocolError("a tree ended without its last message", path=path, retry=True)
        return done

    def _apply(self, entry: TreeDir, listing: bytes, known: dict[bytes, bytes], ask: Ask) -> None:
        if entry.errno == errno.EFBIG:
            self.large.append(entry.path)
            return
        if entry.errno or len(entry.value) < VALUE_MIN:
            return  # not listable for the hub: whoever wants it gets the hub's errno
        node = self._known.table.dirs.get(entry.path)
        if entry.same:
            if node is not None:
                if node.digest == known.get(entry.path):
                    self._known.confirm(node, ask, entry.value, entry.watched)
            elif entry.path in known:
                self._known.confirm_stored(entry.path, known[entry.path], ask, entry.watched)
            return
        if digest_of(listing) != entry.digest:
            raise ProtocolError("a listing does not match its digest", path=entry.path, retry=True)
        try:
            count, _ = count_listing(listing)
        except ValueError as error:
            raise ProtocolError(f"a listing from the hub is wrong: {error}", path=entry.path) from error
        found = Directory(entry.path, entry.value, listing, count, entry.digest, watched=entry.watched)
        found.visited = False
        self._known.apply_listing(found, ask)

    async def _digests(self, path: bytes) -> dict[bytes, bytes]:
        """What is known, so that only differences are sent: from the store, and over it from memory."""
        known: dict[bytes, bytes] = {}
        store = self._known.table.store
        if store is not None:
            self._known.table.flush()
            job = asyncio.wrap_future(store.submit(store.digests, self._portal))
            await asyncio.wait({job}, timeout=5 * STORE_PATIENCE)
            known = (job.result() if job.done() else None) or {}
        for node in self._known.table.dirs.values():
            if node.digest:
                known[node.path] = node.digest
            else:
                known.pop(node.path, None)
        prefix = path + b"/"
        size = 0
        kept: dict[bytes, bytes] = {}
        for at, digest in known.items():
            if path and at != path and not at.startswith(prefix):
                continue
            size += len(at) + 24
            if size > KNOWN_BYTES:
                break
            kept[at] = digest
        return kept

    def _forget_unseen(self, session: int) -> None:
        """Directories that a whole walk did not show do not exist any more."""
        store = self._known.table.store
        if store is None:
            return
        self._known.table.flush()
        store.submit(store.delete_unconfirmed, self._portal, session)
