"""Looks for the unknown names of files that have been linked while they were served (see ``links.py``).

It goes through all watched directories once, for all files that are wanted by then. It compares the inode
numbers that the directories hold, which is some twenty times cheaper than listing them, and spends little of
a core over time, but a burst at once: a portal of some hundred thousand names is searched without a pause.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from farside.hub.links import File, file_of
from farside.hub.portal import Portal

log = logging.getLogger(__name__)

SHARE = 0.03
"""So much of a core is spent on searches over time."""

BURST_S = 0.5
"""Seconds of a core that may be spent without a pause after an idle time."""

_SLICE_S = 0.02
_GATHER_S = 0.05


class _Watch(Protocol):
    seeking: asyncio.Event

    def directories(self) -> list[bytes]: ...
    def take_wanted(self) -> set[File]: ...
    def found(self, directory: bytes, name: bytes, info: os.stat_result) -> None: ...
    def sought(self, files: set[File]) -> None: ...


class Seek:
    """The searches of one portal.

    Attributes:
        searches: passes through the watched directories so far.
    """

    def __init__(self, portal: Portal, watch: _Watch) -> None:
        self._portal = portal
        self._watch = watch
        self._pool = ThreadPoolExecutor(1, "farside-seek")
        self._task: asyncio.Task[None] | None = None
        self._busy = False
        self.searches = 0

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> bool:
        """Returns whether its thread is out of the file system."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._pool.shutdown(wait=False, cancel_futures=True)
        return not self._busy

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        left_s, at = BURST_S, time.monotonic()
        while True:
            await self._watch.seeking.wait()
            await asyncio.sleep(_GATHER_S)
            self._watch.seeking.clear()
            files = self._watch.take_wanted()
            if not files:
                continue
            paths = iter(self._watch.directories())
            inodes = {inode for _, inode in files}
            more = True
            while more:
                begun = time.monotonic()
                left_s = min(BURST_S, left_s + (begun - at) * SHARE)
                more = await loop.run_in_executor(self._pool, self._slice, paths, files, inodes)
                at = time.monotonic()
                left_s -= at - begun
                if left_s < 0:
                    await asyncio.sleep(-left_s / SHARE)
            self._watch.sought(files)
            self.searches += 1

    def _slice(self, paths: Iterator[bytes], files: set[File], inodes: set[int]) -> bool:
        """Looks through some directories; False when these were the last."""
        self._busy = True
        try:
            end = time.monotonic() + _SLICE_S
            for path in paths:
                try:
                    self._look(path, files, inodes)
                except OSError as error:
                    log.debug("%r was not searched for links: %s", path, error)  # gone: its names are told
                except Exception:
                    log.exception("%r was not searched for links", path)
                if time.monotonic() >= end:
                    return True
            return False
        finally:
            self._busy = False

    def _look(self, path: bytes, files: set[File], inodes: set[int]) -> None:
        fd = self._portal.open_directory(path)
        try:
            with os.scandir(fd) as scan:
                for entry in scan:
                    if entry.inode() not in inodes:
                        continue
                    try:
                        info = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if file_of(info) in files:
                        self._watch.found(path, os.fsencode(entry.name), info)
        finally:
            os.close(fd)
