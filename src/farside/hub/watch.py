"""Watches a portal for changes made behind the hub's back, and tells of them in batches.

One inotify watch for each directory that a spoke has been told about. Events are read at once, but told at
most every LATENCY_S, merged. What cannot be watched (a remote file system, the kernel's watch limit) is
said once, and such directories are listed as unwatched: the spoke rechecks there at each open.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import suppress

from inotify_simple import Event, INotify, flags  # type: ignore[import-untyped]

from farside.errors import printable
from farside.hub.links import File, Links, file_of
from farside.hub.portal import Portal
from farside.hub.versions import Versions
from farside.protocol.messages import DirChange

log = logging.getLogger(__name__)

LATENCY_S = 0.02
"""Events that come within this time are told together."""

MEET_S = 0.2
"""What is to be told waits so long for a look at the names that came, which a slow disk may hold up."""

MAX_NAMES = 1000
"""More changed names than this in one directory: the whole directory is distrusted instead."""

MAX_DIRECTORIES = 5000
"""More changed directories than this at once: the whole tree is distrusted instead."""

_EXCL_UNLINK = 0x04000000
_CAME = flags.CREATE | flags.MOVED_TO
_WENT = flags.DELETE | flags.MOVED_FROM
_ENTRIES = _CAME | _WENT
_CONTENT = flags.MODIFY | flags.CLOSE_WRITE
_SELF = flags.DELETE_SELF | flags.MOVE_SELF
_MASK = int(_ENTRIES | _CONTENT | flags.ATTRIB | _SELF | flags.ONLYDIR) | _EXCL_UNLINK
_GONE = flags.DELETE_SELF | flags.IGNORED | flags.UNMOUNT


class Watch:
    """The watch over one portal.

    What stands under "any thread" may be called there, all else in the loop's thread.

    Args:
        tell: called in the loop's thread with each batch of changes. Before, the change counters of files
            that need it have been raised, so that whoever asks afterwards gets the new version.
        pool: where blocking checks run.
        max_watches: our own limit, besides the kernel's; None for the kernel's only.

    Attributes:
        limited: some directory could not be watched for want of watches.
        events, overflows: how many came so far.
        seeking: set when a file is wanted whose names are not all known (see ``seek.py``).
    """

    def __init__(
        self,
        portal: Portal,
        versions: Versions,
        tell: Callable[[list[DirChange]], None],
        pool: Executor,
        *,
        max_watches: int | None = None,
    ) -> None:
        self._portal = portal
        self._versions = versions
        self._tell = tell
        self._pool = pool
        self._max = max_watches
        self._lock = threading.Lock()
        self._paths: dict[int, list[bytes]] = {}  # by watch; more than one path only behind bind mounts
        self._watches: dict[bytes, int] = {}
        self._links = Links(time.time_ns())
        self._names: dict[bytes, set[bytes] | None] = {}
        self._trees: set[bytes] = set()
        self._modified: set[tuple[bytes, bytes]] = set()
        self._newcomers: set[tuple[bytes, bytes]] = set()
        self._meeting: asyncio.Future[None] | None = None
        self._lost = False
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.seeking = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._inotify: INotify | None = None
        self.limited = False
        self.events = 0
        self.overflows = 0

    # -- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to listen; without inotify it says so and everything is unwatched."""
        loop = self._loop = asyncio.get_running_loop()
        try:
            self._inotify = INotify(nonblocking=True)
        except OSError as error:
            log.warning(
                "portal %s: no inotify (%s), so spokes recheck at every open; "
                "raise fs.inotify.max_user_instances",
                self._portal.name,
                error.strerror,
            )
        else:
            loop.add_reader(self._inotify.fileno(), self._readable)
        if not self._portal.is_local(self._portal.device):
            log.warning(
                "portal %s lies on a file system that other machines may change unseen; "
                "spokes recheck at every open",
                self._portal.name,
            )
        self._task = loop.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._loop = None
        if self._inotify is not None:
            asyncio.get_running_loop().remove_reader(self._inotify.fileno())
            with self._lock:
                self._inotify.close()
                self._inotify = None

    @property
    def available(self) -> bool:
        """Whether directories of this portal can be watched at all; each listing says whether its own is."""
        return self._inotify is not None and self._portal.is_local(self._portal.device)

    @property
    def complete(self) -> bool:
        """Whether every directory listed so far is watched."""
        return self.available and not self.limited

    @property
    def count(self) -> int:
        """Directories under watch."""
        return len(self._paths)

    # -- any thread -------------------------------------------------------------------------------

    def watch(self, path: bytes, fd: int) -> bool:
        """Puts the directory open as ``fd`` under watch as ``path``. False: its changes are not told."""
        device = os.fstat(fd).st_dev
        self._portal.learn(fd, device)
        if not self._portal.is_local(device):
            return False
        # The lock is held over the system call: an event of the new watch must find its path.
        with self._lock:
            if self._inotify is None:
                return False
            if self._max is not None and path not in self._watches and len(self._paths) >= self._max:
                self._no_room("its own limit")
                return False
            try:
                wd = self._inotify.add_watch(f"/proc/self/fd/{fd}", _MASK)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    self._no_room("fs.inotify.max_user_watches")
                elif error.errno not in (errno.ENOENT, errno.ENOTDIR):
                    log.warning(
                        "portal %s: %s cannot be watched: %s", self._portal.name, printable(path), error
                    )
                return False
            known = self._watches.get(path)
            if known == wd:
                return True
            if known is not None:
                self._unname(path)  # another directory has taken this path
            self._watches[path] = wd
            self._paths.setdefault(wd, []).append(path)
            return True

    def linked(self, directory: bytes, name: bytes, info: os.stat_result) -> bool:
        """A name of a regular file that may have several was looked at, and is about to be handed out.

        Returns True when it has only now become known as a name of this file: what changed by another name
        between that look and now was not told for it, so look again.
        """
        if self._links.current(directory, name, info):
            return False
        with self._lock:
            new = self._links.seen(directory, name, info)
        self._rouse()
        return new

    def directories(self) -> list[bytes]:
        """All directories under watch."""
        with self._lock:
            return list(self._watches)

    def take_wanted(self) -> set[File]:
        """The files that are to be looked for in all ``directories``."""
        with self._lock:
            return self._links.take_wanted()

    def found(self, directory: bytes, name: bytes, info: os.stat_result) -> None:
        """A name of a wanted file. It was handed out before it was known: it is told as changed."""
        with self._lock:
            if self._links.file(directory, name) != file_of(info):
                self._links.seen(directory, name, info)
                self._changed(directory, name)
        self._rouse(told=True)

    def sought(self, files: set[File]) -> None:
        """The search for these has ended."""
        with self._lock:
            self._links.sought(files)

    def _rouse(self, told: bool = False) -> None:
        """Has the loop do what has come up in another thread."""
        loop = self._loop
        if loop is None:
            return
        for event, needed in (
            (self._wake, told or self._links.stirred),
            (self.seeking, self._links.wanted),
        ):
            if needed and not event.is_set():
                with suppress(RuntimeError):  # the loop has been closed
                    loop.call_soon_threadsafe(event.set)

    def _no_room(self, limit: str) -> None:
        if not self.limited:
            self.limited = True
            log.warning(
                "portal %s: %d directories are watched and %s allows no more; in the others spokes "
                "recheck at every open",
                self._portal.name,
                len(self._paths),
                limit,
            )

    def _unname(self, path: bytes) -> None:
        """A path no longer belongs to its watch; the last one takes the watch with it. Lock held."""
        wd = self._watches.pop(path, None)
        if wd is None:
            return
        paths = self._paths[wd]
        paths.remove(path)
        if not paths:
            del self._paths[wd]
            if self._inotify is not None:
                try:
                    self._inotify.rm_watch(wd)
                except OSError:
                    pass  # the kernel has removed it: the directory is gone

    # -- events -----------------------------------------------------------------------------------

    def _readable(self) -> None:
        if self._inotify is None:
            return
        try:
            events = list(self._inotify.read(timeout=0))
        except BlockingIOError:
            return
        except OSError as error:
            log.error("portal %s: inotify failed: %s", self._portal.name, error)
            self._overflow()
            return
        self.events += len(events)
        with self._lock:
            for event in events:
                self._take(event)
        self._wake.set()

    def _take(self, event: Event) -> None:
        """Sorts one event into what is to be told. Lock held."""
        mask = event.mask
        if mask & flags.Q_OVERFLOW:
            self._overflow()
            return
        paths = self._paths.get(event.wd)
        if paths is None:
            return
        name = os.fsencode(event.name)
        for path in tuple(paths):
            if name:
                self._entry(path, name, mask)
            else:
                self._own(path, event.wd, mask)

    def _overflow(self) -> None:
        self.overflows += 1
        self._lost = True
        self._wake.set()
        log.warning("portal %s: events were lost; spokes recheck the whole tree", self._portal.name)

    def _entry(self, path: bytes, name: bytes, mask: int) -> None:
        """An event for a name in a watched directory."""
        self._changed(path, name)
        file = self._links.file(path, name)
        if file is not None:
            self._links.stirred.add(file)
        if mask & _ENTRIES:
            self._changed_self(path)  # its time stamps, its link count
            if mask & flags.ISDIR:
                self._moved(path + b"/" + name if path else name)
            elif mask & _CAME:
                self._newcomers.add((path, name))
            else:
                self._links.drop(path, name)
        elif mask & _CONTENT and self._versions.has_suspects:
            self._modified.add((path, name))

    def _own(self, path: bytes, wd: int, mask: int) -> None:
        """An event for a watched directory itself."""
        if not path:
            self._names[b""] = None  # no directory of the portal holds the root's value
        if mask & _GONE:
            self._trees.add(path)
            self._links.drop_directory(path)
            self._changed_self(path)
            if self._watches.get(path) == wd:
                self._unname(path)
        elif mask & flags.MOVE_SELF:
            # Told by the parent too, unless that is not watched; by now it may be named anew already.
            if not self._is_at(path, wd):
                self._moved(path)
                self._changed_self(path)
        else:
            self._changed_self(path)

    def _is_at(self, path: bytes, wd: int) -> bool:
        """Whether the watch ``wd`` is that of the directory which now has this path."""
        try:
            fd = self._portal.open(path, os.O_PATH | os.O_DIRECTORY)
        except OSError:
            return False
        try:
            assert self._inotify is not None
            now = self._inotify.add_watch(f"/proc/self/fd/{fd}", _MASK)
            if now != wd and now not in self._paths:
                self._inotify.rm_watch(now)
            return bool(now == wd)
        except OSError:
            return False
        finally:
            os.close(fd)

    def _moved(self, path: bytes) -> None:
        """A directory came, went or changed its place: nothing below this path holds any more."""
        self._trees.add(path)
        self._links.drop_tree(path)
        below = path + b"/"
        for known in [p for p in self._watches if p == path or p.startswith(below)]:
            self._unname(known)

    def _changed(self, directory: bytes, name: bytes) -> None:
        names = self._names.get(directory, _NOTHING)
        if names is _NOTHING:
            self._names[directory] = {name}
        elif names is not None:
            names.add(name)
            if len(names) > MAX_NAMES:
                self._names[directory] = None

    def _changed_self(self, path: bytes) -> None:
        if path:
            parent, _, name = path.rpartition(b"/")
            self._changed(parent, name)

    # -- telling ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            await asyncio.sleep(LATENCY_S)
            self._wake.clear()
            try:
                if self._newcomers and self._meeting is None:
                    self._meeting = loop.run_in_executor(self._pool, self._meet)
                    self._meeting.add_done_callback(self._met)
                if self._meeting is not None:
                    await asyncio.wait({self._meeting}, timeout=MEET_S)
                with self._lock:
                    for directory, name in self._links.take_stirred():
                        self._changed(directory, name)
                    names, self._names = self._names, {}
                    trees, self._trees = self._trees, set()
                    modified, self._modified = self._modified, set()
                    lost, self._lost = self._lost, False
                if lost or modified:
                    await loop.run_in_executor(self._pool, self._raise_counters, modified, lost)
                changes = [DirChange(b"", (), True)] if lost else _merged(names, trees)
            except Exception:
                log.exception("portal %s: changes could not be worked out", self._portal.name)
                changes = [DirChange(b"", (), True)]
            if changes:
                self._tell(changes)

    def _raise_counters(self, modified: Iterable[tuple[bytes, bytes]], lost: bool) -> None:
        """Raises the counters of files that were modified without any change in their ``stat``."""
        if lost:
            self._versions.distrust()
            return
        for _, _, info in self._looked_at(modified):
            self._versions.modified(info)

    def _meet(self) -> None:
        """Finds out which of the names that came are further links to a file, or took a link's place."""
        with self._lock:
            newcomers, self._newcomers = self._newcomers, set()
        for directory, name, info in self._looked_at(newcomers):
            with self._lock:
                self._links.seen(directory, name, info)
                file = self._links.file(directory, name)
                if file is not None:
                    # Its other names show one link more now; and this one may have been unknown for a moment,
                    # when it was listed before the event that its predecessor went.
                    self._links.stirred.add(file)
        self._rouse()

    def _met(self, meeting: asyncio.Future[None]) -> None:
        self._meeting = None
        if not meeting.cancelled() and meeting.exception() is not None:
            log.error(
                "portal %s: new names could not be looked at", self._portal.name, exc_info=meeting.exception()
            )
            self._lost = True
        if self._newcomers or self._links.stirred or self._lost:
            self._wake.set()

    def _looked_at(
        self, places: Iterable[tuple[bytes, bytes]]
    ) -> Iterator[tuple[bytes, bytes, os.stat_result]]:
        """(directory, name, stat) of those that are there; what is gone or moved has an event of its own."""
        by_directory: dict[bytes, list[bytes]] = {}
        for directory, name in places:
            by_directory.setdefault(directory, []).append(name)
        for directory, names in by_directory.items():
            try:
                fd = self._portal.open(directory, os.O_PATH | os.O_DIRECTORY)
            except OSError:
                continue
            try:
                for name in names:
                    try:
                        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    except OSError:
                        continue
                    yield directory, name, info
            finally:
                os.close(fd)


_NOTHING: set[bytes] = set()


def _merged(names: dict[bytes, set[bytes] | None], trees: set[bytes]) -> list[DirChange]:
    """The changes as they are told: what lies inside a distrusted tree is left out."""
    if b"" in trees or len(names) + len(trees) > MAX_DIRECTORIES:
        return [DirChange(b"", (), True)]

    def inside(path: bytes) -> bool:
        while path:
            path = path.rpartition(b"/")[0]
            if path in trees:
                return True
        return False

    changes = [DirChange(path, (), True) for path in sorted(trees) if not inside(path)]
    for path, changed in names.items():
        if path not in trees and not (trees and inside(path)):
            changes.append(DirChange(path, tuple(sorted(changed)) if changed else ()))
    return changes
