"""In the background: what was invalidated is asked about again, in batches, before anybody waits for it."""

from __future__ import annotations

import asyncio
import logging

from farside.errors import FarsideError
from farside.spoke.asker import MAX_BATCH, Asker, Remote
from farside.spoke.directory import join
from farside.spoke.knowledge import Knowledge
from farside.spoke.listing import Lister
from farside.spoke.treesync import TreeSync

DELAY = 0.05
"""Seconds to gather invalidations before the hub is asked."""

AGAIN = 0.5
"""Seconds before what changed once more meanwhile, or failed, is asked about again …"""

AGAIN_AT_MOST = 30.0
"""… doubled up to this while nothing is settled."""

MAX_LISTINGS = 8
"""Directories listed at a time."""

RELIST = 2_000
"""With more names than this to ask about, a directory is listed instead."""

_log = logging.getLogger(__name__)


class Settler:
    """One task at most; it ends when nothing is left or the lease has run out."""

    def __init__(
        self, remote: Remote, known: Knowledge, asker: Asker, lister: Lister, tree: TreeSync
    ) -> None:
        self._remote = remote
        self._known = known
        self._asker = asker
        self._lister = lister
        self._tree = tree
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._closed = False

    def wake(self) -> None:
        """There is something to settle, or the link is back."""
        self._woken.set()
        if not self._closed and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()

    def _can_ask(self) -> bool:
        return self._remote.up and self._known.leased()

    def _left(self) -> int:
        names, listings = self._work()
        return len(names) + len(listings) + len(self._known.resync)

    async def _run(self) -> None:
        pause = AGAIN
        await asyncio.sleep(DELAY)
        while self._known.live:
            before = self._left()
            self._woken.clear()
            if self._can_ask():
                try:
                    await self._round()
                except FarsideError as error:
                    _log.debug("settling pauses: %s", error)
            left = self._left()
            if not left:
                return
            pause = AGAIN if left < before else min(2 * pause, AGAIN_AT_MOST)
            try:
                await asyncio.wait_for(self._woken.wait(), pause)
                await asyncio.sleep(DELAY)
            except TimeoutError:
                pass

    async def _round(self) -> None:
        names, listings = self._work()
        for at in range(0, len(names), MAX_BATCH):
            await asyncio.wait([self._asker.ask(path) for path in names[at : at + MAX_BATCH]])
        for at in range(0, len(listings), MAX_LISTINGS):
            await asyncio.wait([self._lister.list(path).task for path in listings[at : at + MAX_LISTINGS]])
        while self._known.resync and self._can_ask():
            path = min(self._known.resync, key=len)
            self._known.resync.discard(path)
            if self._tree.wanted:
                try:
                    await self._tree.sync(path)
                except FarsideError:
                    self._known.resync.add(path)
                    raise

    def _work(self) -> tuple[list[bytes], list[bytes]]:
        """Paths to ask about and directories to list; what is settled leaves the set."""
        names: list[bytes] = []
        listings: list[bytes] = []
        for path in list(self._known.unsettled):
            node = self._known.table.dirs.get(path)
            if node is not None and (node.lost or len(node.dirty) > RELIST):
                listings.append(path)
            elif node is not None and node.dirty:
                names += [join(path, name) for name in node.dirty]
            else:
                self._known.unsettled.discard(path)
        names += self._known.suspects
        if self._known.root_dirty:
            names.append(b"")
        return list(dict.fromkeys(names)), listings
