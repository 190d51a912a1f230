"""One portal as it is being served: its tree, versions, watch, and the spokes that attached it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from farside.hub.portal import Portal, PortalSpec
from farside.hub.seek import Seek
from farside.hub.state import HubState
from farside.hub.sweep import Sweep
from farside.hub.tree import Tree
from farside.hub.versions import Versions
from farside.hub.watch import Watch
from farside.protocol.messages import DirChange

_UNSTAMPED = ("tmpfs", "ramfs")
"""File systems on which a store through a shared mapping leaves no time stamp."""


class Export:
    """Opens the portal and ties its parts together.

    Args:
        tell: called in the loop's thread with (portal's name, changes).
        pool: where the blocking checks of the watch run.
        sweep_s: how long one silent recheck of everything that was listed takes, seconds.

    Attributes:
        portal, portal_id, versions, tree, watch: the parts.

    Raises:
        UsageError: the root cannot be served.
    """

    def __init__(
        self,
        spec: PortalSpec,
        state: HubState,
        pool: Executor,
        tell: Callable[[str, list[DirChange]], None],
        *,
        max_watches: int | None,
        sweep_s: float,
    ) -> None:
        portal = self.portal = Portal(spec.name, spec.root, spec.writable)
        self._tell = tell
        portal_id = self.portal_id = state.portal_id(portal.name, portal.fsid, portal.inode)
        self.versions = Versions(
            portal.device,
            state.counters(portal_id),
            lambda device, inode, counter: state.set_counter(portal_id, device, inode, counter),
            portal.is_local,
            lambda device: portal.filesystem_of(device) in _UNSTAMPED,
        )
        self.watch = Watch(portal, self.versions, self._changed, pool, max_watches=max_watches)
        self.seek = Seek(portal, self.watch)
        self.sweep = Sweep(self._swept, sweep_s)
        self.tree = Tree(portal, self.versions, self.watch, self.sweep.listed)

    def start(self) -> None:
        self.watch.start()
        self.seek.start()
        self.sweep.start(self.tree)

    async def stop(self, idle: bool) -> None:
        """``idle``: no thread uses the portal any more; else its descriptor is left open."""
        swept = await self.sweep.stop()
        sought = await self.seek.stop()
        await self.watch.stop()
        if idle and swept and sought:
            self.portal.close()

    def status(self) -> dict[str, Any]:
        return {
            "name": self.portal.name,
            "root": self.portal.root.decode("utf-8", "backslashreplace"),
            "filesystem": self.portal.filesystem,
            "writable": self.portal.writable,
            "watched": self.watch.complete,
            "watches": self.watch.count,
            "events": self.watch.events,
            "overflows": self.watch.overflows,
            "raised_counters": self.versions.bumps,
            "link_searches": self.seek.searches,
            "swept": self.sweep.done,
            "found_by_sweep": self.sweep.found,
        }

    def _changed(self, changes: list[DirChange]) -> None:
        for change in changes:
            self.tree.forget(None if change.tree else change.path)
        self._tell(self.portal.name, changes)

    def _swept(self, path: bytes) -> None:
        self._changed([DirChange(path)])
