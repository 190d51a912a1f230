"""The spoke: one attached portal with its link, namespace, chunk cache and fetch scheduler, wired together.

Everything here runs in the event loop's thread unless it says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from farside import __version__
from farside.config import SpokeConfig
from farside.errors import CacheError, FarsideError, HubUnreachable, RemoteError
from farside.memory import keep_freed_memory
from farside.protocol.attributes import Attr
from farside.protocol.frames import OLDEST, PROTOCOL
from farside.protocol.messages import Attached, DirChange, Hello
from farside.protocol.retry import backoff
from farside.protocol.sockets import choose_congestion
from farside.protocol.tls import spoke_context
from farside.spoke.cache import ChunkCache
from farside.spoke.cachedfile import CachedFile
from farside.spoke.cachedir import NAMESPACE_DB
from farside.spoke.directory import split
from farside.spoke.fetch import Fetcher
from farside.spoke.link import Link
from farside.spoke.namespace import Invalidated, Namespace
from farside.spoke.sidecar import CacheKey
from farside.spoke.store import Store

SLOW_DISK_S = 3.0
"""A cache disk that does not answer for so long is read through."""

KERNEL_NOTIFY_S = 2.0
"""How long an acknowledgement waits for the kernel to drop what changed (a read may hold its pages)."""

ASK_AGAIN_S = 0.25
"""Pause before the hub is asked for extended attributes once more."""

MAX_XATTRS = 4096
"""Files whose extended attributes are remembered."""


class Spoke:
    """One attached portal.

    Attributes:
        namespace: names and attributes; there after ``start``.
        on_invalidated: called with what the kernel must forget; returns something to wait for, or None.
    """

    namespace: Namespace

    def __init__(self, config: SpokeConfig, cache: ChunkCache) -> None:
        self.config = config
        self.cache = cache
        self.log = logging.getLogger("farside.spoke")
        self.errors: Counter[str] = Counter()
        self.started = time.monotonic()
        self.on_invalidated: Callable[[list[Invalidated]], asyncio.Future[None] | None] | None = None
        self.pool = ThreadPoolExecutor(config.io_threads, thread_name_prefix="farside-io")
        hub = config.hub
        self.link = Link(
            hub.host,
            hub.port,
            hub.portal,
            hello=Hello(PROTOCOL, OLDEST, f"farside {__version__}", config.name),
            tls=None if config.insecure else spoke_context(config.identity_dir),
            connections=config.connections,
            congestion=choose_congestion(config.congestion),
            on_attached=self._attached,
            on_renewed=lambda until: self.namespace.renew(until),
            on_away=self._away,
            on_changes=self._changed,
        )
        self.fetcher = Fetcher(cache, self.link, self.pool, timeout_s=config.timeout_s, on_stale=self._stale)
        self._store: Store | None = None
        self._sync: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._xattrs: OrderedDict[bytes, dict[bytes, bytes]] = OrderedDict()

    async def start(self) -> None:
        """Attach; the namespace goes on coming in the background.

        Raises:
            HubUnreachable, AuthError, VersionMismatch, ProtocolError, RemoteError: it cannot be attached.
        """
        keep_freed_memory()
        await self.link.start(self.config.timeout_s)

    async def close(self) -> None:
        """Stop everything; what is cached and known is on disk afterwards. Bounded in time."""
        await self.link.close()
        tasks = {*self._tasks, *((self._sync,) if self._sync else ())}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.fetcher.close()
        if hasattr(self, "namespace"):
            await self.namespace.close()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)
        await asyncio.to_thread(self.cache.close)
        self.pool.shutdown(wait=False, cancel_futures=True)

    # -- files ------------------------------------------------------------------------------------

    def cached_file(self, path: bytes, attr: Attr) -> CachedFile:
        """The cache's view of one version of a file."""
        attached = self.link.attached
        assert attached is not None
        return self.cache.file(CacheKey(attached.portal_id, attr.version, attr.size), path)

    async def load(self, file: CachedFile) -> None:
        """Have the side-car read, off the loop; not waited for once the disk is known to hang."""
        await self.fetcher.load(file)

    async def xattrs(self, path: bytes, version: bytes) -> dict[bytes, bytes]:
        """Extended attributes of a file, remembered for its version.

        Raises:
            HubUnreachable: they are not known and the hub did not answer in time.
            RemoteError: the hub refused.
        """
        found = self._xattrs.get(version)
        if found is None:
            deadline = time.monotonic() + self.config.timeout_s
            while True:
                await self.link.wait_up(deadline - time.monotonic())
                try:
                    number, found = (await self.link.xattrs([path]))[0]
                    break
                except HubUnreachable:
                    if time.monotonic() >= deadline:
                        raise
                    await asyncio.sleep(ASK_AGAIN_S)  # it may count as up for a moment after it broke
            if number:
                raise RemoteError("the hub cannot read extended attributes", errno=number, path=path)
            self._xattrs[version] = found
            if len(self._xattrs) > MAX_XATTRS:
                self._xattrs.popitem(last=False)
        return found

    def count_error(self, error: FarsideError) -> None:
        """Count what a reader was told, for ``farside status``."""
        self.errors[type(error).__name__] += 1

    def status(self, reads: dict[str, Any]) -> dict[str, Any]:
        """What is to be said of it: ``farside status --json`` without what concerns the mount.

        Args:
            reads: see ``farside.metrics.read_figures``; whoever hands the data out counts them.
        """
        link, fetch = self.link, self.fetcher.stats
        data = dict(link.totals.data)
        return {
            "hub": str(self.config.hub.endpoint),
            "portal": self.config.hub.portal,
            "state": "up" if link.up else "away",
            "reason": "" if link.up else link.totals.last_error,
            "since_s": round(time.monotonic() - link.since, 3),
            "link": {
                "rtt_ms": round(link.rtt_s * 1e3, 3) if link.rtt_s else None,
                "bandwidth_bps": round(self.fetcher.window.bandwidth * 8),
                "window_bytes": self.fetcher.window.size,
                "inflight_bytes": link.inflight_bytes,
                "connections": link.connections,
                "reconnects": link.totals.reconnects,
                "tls": link.tls is not None,
            },
            "cache": {"dir": str(self.config.cache_dir), **self.cache.status()},
            "reads": reads,
            "link_bytes": {
                **data,
                "metadata": max(0, link.received - sum(data.values())),
                "total": link.received,
                "sent": link.sent,
            },
            "namespace": self.namespace.stats(),
            "fetch": {
                "requests": dict(fetch.requests),
                "coalesced": fetch.coalesced,
                "checksum_failures": fetch.checksum_failures,
                "stale": fetch.stale,
                "retries": fetch.retries,
                "dropped": fetch.dropped,
            },
            "write_mode": "read-only",
            "errors": dict(self.errors),
            "uptime_s": round(time.monotonic() - self.started, 3),
            "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "version": __version__,
            "pid": os.getpid(),
        }

    # -- told by the link -------------------------------------------------------------------------

    def _attached(self, attached: Attached, lease_until: float) -> None:
        if not hasattr(self, "namespace"):
            try:
                self._store = Store(self.config.cache_dir / NAMESPACE_DB)
            except CacheError as e:
                self.log.warning("names are not kept on disk: %s", e)
            self.namespace = Namespace(
                self._store,
                attached.portal_id,
                self.link,
                max_entries=self.config.metadata_limit,
                timeout_s=self.config.timeout_s,
                on_change=self._forgotten,
            )
        self.log.info("attached %s/%s", self.link.address, self.link.portal)
        # Pushes were missed while away: what is known is confirmed anew, by difference.
        self.namespace.attached(attached.root, attached.watched, False, lease_until)
        self._spawn(self._resume())

    async def _resume(self) -> None:
        """What a new attach sets going, once the link counts as up."""
        self.fetcher.link_up()
        while (running := self._sync) is not None:  # one at a time, also when attaches follow each other
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            if self._sync is running:
                self._sync = None
        self._sync = asyncio.get_running_loop().create_task(self._sync_names())

    async def _sync_names(self) -> None:
        """Stream the list of names; again when that breaks off on a live link. A new attach begins anew."""
        delays = backoff(first=1.0, last=30.0)
        while True:
            try:
                await self.namespace.sync()
                return
            except FarsideError as e:
                self.log.info("the list of names broke off: %s", e)
            if not self.link.up:
                return
            await asyncio.sleep(next(delays))

    def _away(self) -> None:
        self.log.warning("%s is away: %s", self.link.address, self.link.totals.last_error)
        self.namespace.link_down()

    def _changed(self, seq: int, changes: Sequence[DirChange]) -> None:
        found = self.namespace.invalidate(changes)
        self._spawn(self._acknowledge(seq, found, self.link.attached))

    async def _acknowledge(self, seq: int, found: list[Invalidated], attached: Attached | None) -> None:
        """Tell the hub that a push is applied, once the kernel has dropped what it knew.

        Numbers belong to one attach: one that came meanwhile must not take this for its own.
        """
        forgotten = self._forget(found)
        if forgotten is not None:
            with contextlib.suppress(TimeoutError, OSError):
                await asyncio.wait_for(asyncio.shield(forgotten), KERNEL_NOTIFY_S)
        if self.link.attached is attached:
            self.link.acknowledge(seq)

    def _forget(self, found: list[Invalidated]) -> asyncio.Future[None] | None:
        return self.on_invalidated(found) if found and self.on_invalidated is not None else None

    def _forgotten(self, found: list[Invalidated]) -> None:
        self._forget(found)

    def _stale(self, file: CachedFile, value: bytes) -> None:
        """The hub refused a read because the file changed: what is known of its name is out of date."""
        directory, name = split(file.path)
        self._forgotten(self.namespace.invalidate((DirChange(directory, (name,)),)))

    def _spawn(self, coro: Any) -> None:
        task = asyncio.get_running_loop().create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
