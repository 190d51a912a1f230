"""What people do to the contents of the cache: warm, pin, unpin and evict files or whole directories."""

from __future__ import annotations

import asyncio
import fnmatch
import os
import stat
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from farside.errors import RemoteError
from farside.protocol.attributes import Attr, attr_of
from farside.spoke.cachedfile import CachedFile
from farside.spoke.directory import join, split
from farside.spoke.flight import Reason
from farside.spoke.spoke import Spoke

IN_WORK_BYTES = 256 * 1024 * 1024
IN_WORK_FILES = 2048
"""Files that are warmed at the same time: enough to keep the link full, few enough to stop at once."""

PROGRESS_S = 0.2

Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Selection:
    """Which files below a path: globs against the path below it and against the file's name."""

    path: bytes
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def takes(self, path: bytes) -> bool:
        below = os.fsdecode(path[len(self.path) :].lstrip(b"/") or path.rpartition(b"/")[2])
        name = below.rpartition("/")[2]

        def matches(globs: tuple[str, ...]) -> bool:
            return any(fnmatch.fnmatchcase(below, g) or fnmatch.fnmatchcase(name, g) for g in globs)

        return (not self.include or matches(self.include)) and not matches(self.exclude)


async def files_below(spoke: Spoke, selection: Selection) -> AsyncIterator[tuple[bytes, Attr]]:
    """The regular files at or below a path, each directory sorted by name. Symlinks are not followed.

    Raises:
        RemoteError: ENOENT when there is nothing at that path.
        HubUnreachable: a directory is not known and the hub does not answer.
    """
    path = selection.path
    if path:
        value = await spoke.namespace.lookup(*split(path))
        if value is None:
            raise RemoteError("no such file or directory", errno=2, path=path)
        attr = attr_of(value)
        if not stat.S_ISDIR(attr.mode):
            if stat.S_ISREG(attr.mode) and selection.takes(path):
                yield path, attr
            return
    todo = [path]
    while todo:
        directory = todo.pop()
        below: list[bytes] = []
        for name, value in (await spoke.namespace.directory(directory)).snapshot():
            attr, child = attr_of(value), join(directory, name)
            if stat.S_ISDIR(attr.mode):
                below.append(child)
            elif stat.S_ISREG(attr.mode) and selection.takes(child):
                yield child, attr
        todo += reversed(below)


async def _missing_bytes(spoke: Spoke, file: CachedFile) -> int:
    await spoke.load(file)
    if file.size == 0:
        return 0
    return sum(file.span(first, last)[1] for first, last in file.absent(0, file.chunks - 1))


async def warm(
    spoke: Spoke, selection: Selection, limit: int | None, dry_run: bool, progress: Progress
) -> dict[str, Any]:
    """Bring files into the cache.

    Args:
        limit: stop before more than so many bytes would have crossed the link; None for what the cache holds.
        dry_run: only count.

    Returns:
        ``files`` and ``bytes`` (that crossed, or would), ``bytes_total`` of the selection, ``seconds``
        (taken, or estimated; None when the link's rate is not known yet), ``skipped`` files.
    """
    begun = time.monotonic()
    room = spoke.cache.limit if limit is None else min(limit, spoke.cache.limit)  # or it would evict itself
    todo: list[tuple[CachedFile, int]] = []
    total = missing_total = 0
    async for path, attr in files_below(spoke, selection):
        file = spoke.cached_file(path, attr)
        missing = await _missing_bytes(spoke, file)
        if missing_total + missing > room:
            break
        total += file.size
        missing_total += missing
        todo.append((file, missing))
    if dry_run:
        rate = spoke.fetcher.window.bandwidth
        return {
            "files": len(todo),
            "bytes": missing_total,
            "bytes_total": total,
            "seconds": missing_total / rate if rate else None,
            "skipped": 0,
        }
    state = _Warming(spoke, len(todo), missing_total)
    ticker = asyncio.get_running_loop().create_task(state.report(progress))
    try:
        await state.run(todo)
    finally:
        ticker.cancel()
    return {
        "files": state.files - state.skipped,
        "bytes": state.bytes,
        "bytes_total": total,
        "seconds": time.monotonic() - begun,
        "skipped": state.skipped,
    }


class _Warming:
    """One run of ``warm``: bounded work in flight, counted as it completes."""

    def __init__(self, spoke: Spoke, files_total: int, bytes_total: int) -> None:
        self.spoke = spoke
        self.files_total, self.bytes_total = files_total, bytes_total
        self.files = self.bytes = self.skipped = 0
        self._in_work = 0
        self._active: dict[CachedFile, int] = {}

    async def run(self, todo: Sequence[tuple[CachedFile, int]]) -> None:
        running: set[asyncio.Task[None]] = set()
        try:
            for file, missing in todo:
                while running and (self._in_work + missing > IN_WORK_BYTES or len(running) >= IN_WORK_FILES):
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                self._in_work += missing
                running.add(asyncio.get_running_loop().create_task(self._one(file, missing)))
            if running:
                await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()

    async def _one(self, file: CachedFile, missing: int) -> None:
        self._active[file] = missing
        try:
            left = await self._fill(file) if missing else 0
            if left:
                self.skipped += 1
                self.spoke.log.warning("not all of a file could be warmed: %r", file.path)
            self.bytes += missing if not left else max(0, missing - left)
            self.files += 1
        finally:
            del self._active[file]
            self._in_work -= missing

    async def _fill(self, file: CachedFile) -> int:
        """Fetch what is missing of a file; the bytes that are still missing when nothing more will come.
        A link that went away is waited for as long as a read would wait."""
        while True:
            await self.spoke.fetcher.complete(file, 0, file.chunks - 1, Reason.PLANNED)
            left = await _missing_bytes(self.spoke, file)
            if not left or self.spoke.link.up:
                return left
            await self.spoke.link.wait_up(self.spoke.config.timeout_s)

    async def report(self, progress: Progress) -> None:
        begun = time.monotonic()
        while True:
            await asyncio.sleep(PROGRESS_S)
            part = 0
            for file, missing in list(self._active.items()):
                absent = (
                    sum(file.span(a, b)[1] for a, b in file.absent(0, file.chunks - 1)) if file.size else 0
                )
                part += max(0, missing - absent)
            done = self.bytes + part
            progress(
                {
                    "files": self.files,
                    "files_total": self.files_total,
                    "bytes": done,
                    "bytes_total": self.bytes_total,
                    "rate": done / max(1e-3, time.monotonic() - begun),
                }
            )


async def pin(spoke: Spoke, path: bytes) -> dict[str, Any]:
    """Keep files in the cache; their present versions, whether they are there already or come later."""
    return await _each(spoke, path, lambda file: spoke.cache.pin(file))


async def unpin(spoke: Spoke, path: bytes) -> dict[str, Any]:
    """Let files be evicted again."""
    return await _each(spoke, path, lambda file: spoke.cache.unpin(file))


async def _each(spoke: Spoke, path: bytes, act: Callable[[CachedFile], None]) -> dict[str, Any]:
    files = size = 0
    async for child, attr in files_below(spoke, Selection(path)):
        act(spoke.cached_file(child, attr))
        files += 1
        size += attr.size
        if files % 512 == 0:
            await asyncio.sleep(0)  # others have their turn
    return {"files": files, "bytes": size}


async def evict(spoke: Spoke, path: bytes) -> dict[str, Any]:
    """Drop files from the cache now. ``bytes`` is what became free; files in passthrough stay till closed."""
    files = freed = 0
    async for child, attr in files_below(spoke, Selection(path)):
        file = spoke.cached_file(child, attr)
        await spoke.load(file)
        if file.present:
            spoke.fetcher.cancel_prefetch(file)
            freed += spoke.cache.evict(file)
            files += 1
    return {"files": files, "bytes": freed}
