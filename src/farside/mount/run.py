"""Runs one mount from start to end: ``farside mount`` calls it in the process that serves the mount."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from farside import __version__
from farside.config import MountConfig, control_socket
from farside.errors import AuthError, CacheError, MountError, UsageError
from farside.fuse import MountOptions, Session
from farside.metrics import quantile_ns
from farside.mount.filesystem import Filesystem
from farside.protocol.join import join
from farside.protocol.tls import has_identity
from farside.protocol.tokens import parse_token
from farside.spoke import contents
from farside.spoke.cache import ChunkCache
from farside.spoke.control import ControlServer, Operation, Progress
from farside.spoke.spoke import SLOW_DISK_S, Spoke

log = logging.getLogger("farside.mount")

RESCUE_S = 0.5
SWITCH_INTERVAL_S = 0.0005
"""A FUSE thread waits at most about this long for the loop to let go of the interpreter."""


def run_mount(config: MountConfig, ready: Callable[[], None]) -> int:
    """Mount, serve until unmounted or told to stop, clean up; returns the exit status.

    ``ready`` is called once the mount can be used.

    Raises:
        FarsideError: it could not be mounted; nothing is left behind.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return asyncio.run(_run(config, ready))


async def _run(config: MountConfig, ready: Callable[[], None]) -> int:
    if not config.insecure:
        await _ensure_joined(config)
    try:
        cache = ChunkCache.open(
            config.cache_dir, size_limit=config.cache_size, reserve=config.reserve, slow_s=SLOW_DISK_S
        )
    except OSError as error:
        raise CacheError(
            f"cannot use the cache directory: {error.strerror}", path=str(config.cache_dir)
        ) from error
    try:
        spoke = Spoke(config, cache)
    except BaseException:
        cache.close()
        raise
    try:
        await spoke.start()
        return await Mount(config, spoke).serve(ready)
    finally:
        await spoke.close()


async def _ensure_joined(config: MountConfig) -> None:
    """Exchange the join token for an identity, the first time."""
    identity = config.identity_dir
    if has_identity(identity):
        return
    if config.token_file is None:
        raise UsageError(
            "this machine has not joined that hub yet",
            hub=str(config.hub.endpoint),
            hint="get a token with `farside hub invite` at the hub and give it with --token-file",
        )
    try:
        text = config.token_file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the join token: {error}", path=str(config.token_file)) from error
    token = parse_token(text)
    if token.portal != config.hub.portal:
        raise AuthError(
            f"the join token is for portal {token.portal}, not {config.hub.portal}",
            hub=str(config.hub.endpoint),
        )
    try:
        await join(config.hub.host, config.hub.port, token, identity, config.name, timeout=config.timeout_s)
    except OSError as error:
        raise UsageError(f"cannot keep the identity: {error.strerror}", path=str(identity)) from error
    log.info("joined hub %s as %s", config.hub.endpoint, config.name)


class Mount:
    """One mount that is being served."""

    def __init__(self, config: MountConfig, spoke: Spoke) -> None:
        self.config, self.spoke = config, spoke
        self.loop = asyncio.get_running_loop()
        self.filesystem = Filesystem(spoke, self.loop)
        self.session = Session(
            str(config.mountpoint),
            self.filesystem,
            options=MountOptions(
                read_only=True,
                allow_other=config.allow_other,
                default_permissions=True,
                fsname=str(config.hub),
                subtype="farside",
                passthrough=config.passthrough,
            ),
        )
        self._stop = asyncio.Event()

    async def serve(self, ready: Callable[[], None]) -> int:
        control = ControlServer(control_socket(self.config.mountpoint), self._operations())
        try:
            await asyncio.to_thread(self.session.mount)
        except OSError as error:
            raise MountError(
                error.strerror or str(error), errno=error.errno, path=str(self.config.mountpoint)
            ) from error
        rescuer = self.loop.create_task(self._rescue())
        try:
            self.session.on_closed = self._closed
            self.spoke.on_invalidated = self.filesystem.forget_changed
            self.session.start()
            await control.start()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                self.loop.add_signal_handler(number, self._stop.set)
            log.info(
                "mounted %s at %s (%s)",
                self.config.hub,
                self.config.mountpoint,
                "kernel passthrough"
                if self.session.passthrough
                else f"no passthrough: {self.session.passthrough_reason}",
            )
            ready()
            await self._stop.wait()
        finally:
            rescuer.cancel()
            control.close()
            self.spoke.on_invalidated = None
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self.session.unmount, lazy=True)
            await self.filesystem.close()
            await asyncio.to_thread(self.session.join, 5.0)
            log.info("unmounted %s", self.config.mountpoint)
        return 0

    def _closed(self) -> None:
        """[FUSE thread] Somebody unmounted it."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, too
            self.loop.call_soon_threadsafe(self._stop.set)

    async def _rescue(self) -> None:
        """Answer over the link what hangs on the cache's disk."""
        while True:
            await asyncio.sleep(RESCUE_S)
            if self.spoke.cache.health.reads_off:
                self.filesystem.rescue(SLOW_DISK_S)

    # -- the control socket -----------------------------------------------------------------------

    def _operations(self) -> dict[str, Operation]:
        spoke = self.spoke

        def path_of(request: dict[str, Any]) -> bytes:
            return os.fsencode(str(request.get("path", ""))).strip(b"/")

        async def ping(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
            return {"pid": os.getpid()}

        async def status(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
            return self.status()

        async def warm(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
            selection = contents.Selection(
                path_of(request), tuple(request.get("include") or ()), tuple(request.get("exclude") or ())
            )
            return await contents.warm(
                spoke, selection, request.get("limit"), bool(request.get("dry_run")), progress
            )

        async def pin(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
            return await contents.pin(spoke, path_of(request))

        async def unpin(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
            return await contents.unpin(spoke, path_of(request))

        async def evict(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
            return await contents.evict(spoke, path_of(request))

        async def unmount(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
            self.loop.call_later(0.05, self._stop.set)  # let the answer leave first
            return {"pid": os.getpid()}

        return {
            "ping": ping,
            "status": status,
            "warm": warm,
            "pin": pin,
            "unpin": unpin,
            "evict": evict,
            "unmount": unmount,
        }

    def status(self) -> dict[str, Any]:
        """What ``farside status --json`` shows."""
        spoke, link, fs = self.spoke, self.spoke.link, self.filesystem
        hits = sum(h.count for h in fs.hits)
        reads = hits + fs.misses.count
        parts = [*fs.hits, fs.misses]
        p50, p99 = quantile_ns(parts, 0.5), quantile_ns(parts, 0.99)
        data = dict(link.totals.data)
        names = spoke.namespace.stats()
        cache = spoke.cache.status()
        fetch = spoke.fetcher.stats
        return {
            "mountpoint": str(self.config.mountpoint),
            "hub": str(self.config.hub.endpoint),
            "portal": self.config.hub.portal,
            "state": "up" if link.up else "away",
            "reason": "" if link.up else link.totals.last_error,
            "since_s": round(time.monotonic() - link.since, 3),
            "link": {
                "rtt_ms": round(link.rtt_s * 1e3, 3) if link.rtt_s else None,
                "bandwidth_bps": round(spoke.fetcher.window.bandwidth * 8),
                "window_bytes": spoke.fetcher.window.size,
                "inflight_bytes": link.inflight_bytes,
                "connections": link.connections,
                "reconnects": link.totals.reconnects,
                "tls": link.tls is not None,
            },
            "cache": {"dir": str(self.config.cache_dir), **cache},
            "reads": {
                "count": reads,
                "local": hits,
                "remote": fs.misses.count,
                "bytes": sum(fs.hit_bytes.values()) + fs.miss_bytes,
                "local_share": hits / reads if reads else None,
                "p50_ms": p50 / 1e6 if p50 is not None else None,
                "p99_ms": p99 / 1e6 if p99 is not None else None,
            },
            "link_bytes": {
                **data,
                "metadata": max(0, link.received - sum(data.values())),
                "total": link.received,
                "sent": link.sent,
            },
            "namespace": names,
            "fetch": {
                "requests": dict(fetch.requests),
                "coalesced": fetch.coalesced,
                "checksum_failures": fetch.checksum_failures,
                "stale": fetch.stale,
                "retries": fetch.retries,
                "dropped": fetch.dropped,
            },
            "mount": {
                "passthrough": self.session.passthrough,
                "passthrough_reason": self.session.passthrough_reason,
                "passthrough_opens": fs.files.passthrough_opens,
                "handled_opens": fs.files.handled_opens,
                "threads": self.session.threads,
                "nodes": len(fs.nodes),
                "operations": self.session.stats,
            },
            "write_mode": "read-only",
            "errors": dict(spoke.errors),
            "uptime_s": round(time.monotonic() - spoke.started, 3),
            "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "version": __version__,
            "pid": os.getpid(),
        }
