"""A slow, silent recheck of everything that spokes were told, for changes that no event tells of.

Such are: a write by a hard link whose name the hub never saw, a bind mount that came or went, a remote file
system, events that got lost. With it, whatever changed behind the hub's back is seen within a stated time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

SWEEP_S = 600.0
"""One round takes this long, or longer where it would take more than SHARE of a core."""

SHARE = 0.03
"""Of the time that listing a directory takes, so much of a core may be spent on rechecks."""

MAX_KNOWN = 1_000_000
"""Directories that are rechecked, at most; 150 bytes each."""


class _Lister(Protocol):
    def digest(self, path: bytes) -> bytes: ...


class Sweep:
    """Rechecks listed directories one after the other, all of them once in ``round_s`` seconds.

    Args:
        differs: called in the loop's thread with the path of a directory that is not as it was told.

    Attributes:
        done, found: directories rechecked, and those of them that had changed.
    """

    def __init__(self, differs: Callable[[bytes], None], round_s: float = SWEEP_S) -> None:
        self._differs = differs
        self._round_s = round_s
        self._told: dict[bytes, bytes] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "farside-sweep")
        self._task: asyncio.Task[None] | None = None
        self._busy = False
        self.done = 0
        self.found = 0

    def start(self, lister: _Lister) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(lister))

    async def stop(self) -> bool:
        """Returns whether its thread is out of the file system."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._pool.shutdown(wait=False, cancel_futures=True)
        return not self._busy

    def listed(self, path: bytes, digest: bytes) -> None:
        """A directory was listed for a spoke. Any thread."""
        if len(self._told) < MAX_KNOWN or path in self._told:
            with self._lock:
                self._told[path] = digest

    async def _run(self, lister: _Lister) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                paths = list(self._told)
            if not paths:
                await asyncio.sleep(min(1.0, self._round_s))
                continue
            pause_s = self._round_s / len(paths)
            for path in paths:
                begun = time.monotonic()
                differs = await loop.run_in_executor(self._pool, self._check, lister, path)
                self.done += 1
                if differs:
                    self.found += 1
                    self._differs(path)
                await asyncio.sleep(max(pause_s, (time.monotonic() - begun) / SHARE))

    def _check(self, lister: _Lister, path: bytes) -> bool:
        """Whether the directory differs from what was told of it last; it will be told again then."""
        told = self._told.get(path)
        self._busy = True
        try:
            now = lister.digest(path)
        except OSError:
            now = b""  # gone, or no longer readable
        finally:
            self._busy = False
        with self._lock:
            if self._told.get(path) != told:
                return False  # listed anew in the meantime
            if now == told:
                return False
            # The next listing for a spoke notes it again.
            self._told.pop(path, None)
        return True
