"""What people do to the contents of the cache: warm, pin, unpin and evict files or whole directories."""

from __future__ import annotations

import asyncio
import fnmatch
import os
import stat
import time
from collections.abc import AsyncIterator, Callable
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

BATCH = 64
"""Files whose side-cars are looked at together."""

PROGRESS_S = 0.2
AWAY_S = 1.0
"""How often ``warm`` looks whether the hub is away."""

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
        ``files`` that are cached (or would be) and ``bytes`` that crossed for it (or would),
        ``bytes_total`` of the selection, ``seconds`` (taken, or estimated; None when the link's rate is not
        known yet), ``skipped`` files; ``stopped`` before the end by "limit" or "cache", else "", and
        ``left``, the files behind that end. A file with several names counts once.

    Raises:
        HubUnreachable: the hub is away for longer than a read would wait.
    """
    begun = time.monotonic()
    state = _Warming(spoke, selection, limit, dry_run)
    await state.count()
    ticker = asyncio.get_running_loop().create_task(state.report(progress))
    try:
        await state.run()
    finally:
        ticker.cancel()
    if state.skipped:
        spoke.log.warning("%d files could not be warmed, or not wholly", state.skipped)
    rate = spoke.fetcher.window.bandwidth
    estimate = state.crossed / rate if rate else None
    return {
        "files": state.files - state.skipped,
        "bytes": state.crossed,
        "bytes_total": state.bytes if dry_run else state.bytes_total,
        "seconds": estimate if dry_run else time.monotonic() - begun,
        "skipped": state.skipped,
        "stopped": state.stopped,
        "left": state.files_total - state.files if state.stopped else 0,
    }


async def _once(spoke: Spoke, selection: Selection) -> AsyncIterator[tuple[bytes, Attr]]:
    """``files_below``, but each file under the first of its names only."""
    linked: set[bytes] = set()
    async for path, attr in files_below(spoke, selection):
        if attr.nlink > 1:
            if attr.version in linked:
                continue
            linked.add(attr.version)
        yield path, attr


class _Warming:
    """One run of ``warm``: files are taken up as they are walked, and forgotten when they are done.

    Attributes:
        files, bytes: done so far, whether they had to be fetched or not; of ``files_total``, ``bytes_total``.
        crossed: bytes that crossed the link for it; with ``dry_run``, that would.
        skipped: files that are not wholly cached although nothing more will come of them.
        stopped: why it ended before the last file: "limit" or "cache".
    """

    def __init__(self, spoke: Spoke, selection: Selection, limit: int | None, dry_run: bool) -> None:
        self.spoke, self.selection, self.dry_run = spoke, selection, dry_run
        self.files_total = self.bytes_total = 0
        self.files = self.bytes = self.crossed = self.skipped = 0
        self.stopped = ""
        self._limit = limit
        self._cache_left = spoke.cache.limit
        self._in_work = 0
        self._active: dict[CachedFile, int] = {}
        self._freed = asyncio.Event()

    async def count(self) -> None:
        """How much there is, from what is known of the names alone."""
        async for _, attr in _once(self.spoke, self.selection):
            self.files_total += 1
            self.bytes_total += attr.size
            if self.files_total % 1024 == 0:
                await asyncio.sleep(0)  # others have their turn

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                guard = group.create_task(self._guard())
                await self._walk(group)
                while self._active:
                    self._freed.clear()
                    await self._freed.wait()
                guard.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _guard(self) -> None:
        """A hub that is away is waited for as long as a read would wait.

        Raises:
            HubUnreachable: it stays away.
        """
        while True:
            await asyncio.sleep(AWAY_S)
            await self.spoke.link.wait_up(self.spoke.config.timeout_s)

    async def _walk(self, group: asyncio.TaskGroup) -> None:
        batch: list[CachedFile] = []
        async for path, attr in _once(self.spoke, self.selection):
            batch.append(self.spoke.cached_file(path, attr))
            if len(batch) == BATCH:
                if not await self._take_up(batch, group):
                    return
                batch = []
        await self._take_up(batch, group)

    async def _take_up(self, batch: list[CachedFile], group: asyncio.TaskGroup) -> bool:
        """Begin to fetch what is missing of some files; False when there is no room for more."""
        missing_of = await asyncio.gather(*(_missing_bytes(self.spoke, file) for file in batch))
        for file, missing in zip(batch, missing_of, strict=True):
            if self._limit is not None and missing > self._limit:
                self.stopped = "limit"
            elif file.size > self._cache_left:  # or it would evict what it has just brought
                self.stopped = "cache"
            if self.stopped:
                return False
            if self._limit is not None:
                self._limit -= missing
            self._cache_left -= file.size
            if self.dry_run or not missing:
                self.files += 1
                self.bytes += file.size
                self.crossed += missing
                continue
            while self._active and (
                self._in_work + missing > IN_WORK_BYTES or len(self._active) >= IN_WORK_FILES
            ):
                self._freed.clear()
                await self._freed.wait()
            self._active[file] = missing
            self._in_work += missing
            group.create_task(self._one(file, missing))
        return True

    async def _one(self, file: CachedFile, missing: int) -> None:
        try:
            left = await self._fill(file)
            self.skipped += bool(left)
            self.crossed += max(0, missing - left)
            self.bytes += file.size - left
            self.files += 1
        except asyncio.CancelledError:
            self.spoke.fetcher.cancel_prefetch(file)  # or all of it would still come
            raise
        finally:
            del self._active[file]
            self._in_work -= missing
            self._freed.set()

    async def _fill(self, file: CachedFile) -> int:
        """Fetch what is missing of a file; the bytes that are still missing when nothing more will come."""
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
            come = 0
            for file, missing in list(self._active.items()):
                absent = sum(file.span(a, b)[1] for a, b in file.absent(0, file.chunks - 1))
                come += max(0, missing - absent)
            progress(
                {
                    "files": self.files,
                    "files_total": self.files_total,
                    "bytes": self.bytes + come,
                    "bytes_total": self.bytes_total,
                    "rate": (self.crossed + come) / max(1e-3, time.monotonic() - begun),
                    "away": not self.spoke.link.up,
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
    """Drop files from the cache now. ``bytes`` is what became free; files in passthrough stay till closed.
    ``pinned`` files are kept, and not among ``files``."""
    files = freed = pinned = 0
    async for child, attr in files_below(spoke, Selection(path)):
        file = spoke.cached_file(child, attr)
        await spoke.load(file)
        if spoke.cache.is_pinned(file):
            pinned += 1
        elif file.present:
            spoke.fetcher.cancel_prefetch(file)
            freed += spoke.cache.evict(file)
            files += 1
    return {"files": files, "bytes": freed, "pinned": pinned}
