"""Runs one mount from start to end: ``farside mount`` calls it in the process that serves the mount."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from farside.config import MountConfig, control_socket
from farside.errors import MountError
from farside.fuse import MountOptions, Session
from farside.metrics import read_figures
from farside.mount.filesystem import Filesystem
from farside.spoke import contents
from farside.spoke.control import ControlServer, Operation, Progress
from farside.spoke.spoke import SLOW_DISK_S, Spoke
from farside.spoke.start import start_spoke

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
    status = asyncio.run(_run(config, ready))
    deadline = time.monotonic() + 1.0
    for thread in threading.enumerate():
        if thread is threading.current_thread() or thread.daemon:
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():  # it hangs in the cache's disk and would keep the process for ever
            log.warning("%s is left behind in a disk that does not answer", thread.name)
            logging.shutdown()
            os._exit(status)
    return status


async def _run(config: MountConfig, ready: Callable[[], None]) -> int:
    spoke = await start_spoke(config)
    try:
        return await Mount(config, spoke).serve(ready)
    finally:
        await spoke.close()


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
        # Before there is a mount that could be left behind.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self.loop.add_signal_handler(number, self._stop.set)
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
        fs = self.filesystem
        size = sum(fs.hit_bytes.values()) + fs.miss_bytes
        return {
            "mountpoint": str(self.config.mountpoint),
            **self.spoke.status(read_figures(fs.hits, fs.misses, size)),
            "mount": {
                "passthrough": self.session.passthrough,
                "passthrough_reason": self.session.passthrough_reason,
                "passthrough_opens": fs.files.passthrough_opens,
                "handled_opens": fs.files.handled_opens,
                "threads": self.session.threads,
                "nodes": len(fs.nodes),
                "operations": self.session.stats,
            },
        }
