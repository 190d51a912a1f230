"""Names and attributes of a portal: listings, pages of listings, walks of whole subtrees.

A directory is put under watch *before* it is read, so that a change is either in the listing or in an
invalidation that follows it, or in both, but never in neither.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import NamedTuple, Protocol

from farside.hub.portal import Portal
from farside.hub.versions import Versions
from farside.protocol.attributes import ENTRY_HEAD, FLAG_XATTR, digest_of, pack_value
from farside.protocol.messages import TreeDir

PAGE_BYTES = 4 * 1024 * 1024
"""A page of a listing ends here even when fewer entries than asked for are in it."""

TREE_PART_BYTES = 512 * 1024
"""A part of a tree reply is sent when it has grown to this size, or to TREE_PART_DIRS directories."""

TREE_PART_DIRS = 4000

TREE_LISTING_MAX = 8 * 1024 * 1024
"""A directory whose listing is larger is left out of a tree reply: it is listed by pages, on demand."""

SNAPSHOT_S = 30.0
"""How long the rest of a listing is kept for the pages that follow the first."""

SNAPSHOT_UNWATCHED_S = 2.0
SNAPSHOTS = 4

_USER_XATTR = "user."

_LOOKS = 5
"""A name that is given to another file at each look is not waited for any longer."""


class Watcher(Protocol):
    """Puts directories under watch. Any thread."""

    def watch(self, path: bytes, fd: int) -> bool:
        """Watches the directory open as ``fd``; False when its changes will not be pushed."""

    def linked(self, directory: bytes, name: bytes, info: os.stat_result) -> bool:
        """A regular file with more than one link was looked at; True: look at it again."""


class Listing(NamedTuple):
    """One directory at one moment; ``entries`` are (name, value), sorted by name."""

    value: bytes
    entries: list[tuple[bytes, bytes]]
    data: bytes
    digest: bytes
    watched: bool
    subdirectories: list[bytes]


class Page(NamedTuple):
    value: bytes
    data: bytes
    digest: bytes
    same: bool
    more: bool
    watched: bool


class TreePartOut(NamedTuple):
    """Directories of one part and their listings, in order."""

    dirs: tuple[TreeDir, ...]
    buffers: list[bytes]


class Tree:
    """Metadata of one portal. All methods block on the file system: call them in a worker thread.

    ``listed`` is called with the path and digest of each directory that was listed, in that thread.
    """

    def __init__(
        self,
        portal: Portal,
        versions: Versions,
        watcher: Watcher,
        listed: Callable[[bytes, bytes], None] = lambda path, digest: None,
    ) -> None:
        self._portal = portal
        self._versions = versions
        self._watcher = watcher
        self._listed = listed
        self._xattrs = _supports_xattrs(portal.fd)
        self._snapshots: dict[bytes, tuple[float, Listing]] = {}
        self._lock = threading.Lock()

    # -- single paths -----------------------------------------------------------------------------

    def root(self) -> bytes:
        """The value of the root, which comes under watch."""
        self._watcher.watch(b"", self._portal.fd)
        return self._own_value(self._portal.fd)

    def value(self, path: bytes) -> bytes:
        """The value of one path, not following a symlink at its end.

        Raises:
            OSError: as lstat(2).
        """
        if not path:
            return self._own_value(self._portal.fd)
        parent, name = self._portal.open_parent(path)
        try:
            return self._value_at(path.rpartition(b"/")[0], parent, os.fsdecode(name))
        finally:
            os.close(parent)

    def stat(self, paths: tuple[bytes, ...]) -> list[tuple[int, bytes]]:
        """(errno, value) for each path, in order. The directories that hold them come under watch."""
        results: list[tuple[int, bytes]] = []
        held: bytes | None = None
        fd = -1
        try:
            for path in paths:
                parent, _, name = path.rpartition(b"/")
                try:
                    if not path:
                        results.append((0, self._own_value(self._portal.fd)))
                        continue
                    if name in (b".", b"..", b"") or b"\0" in name:
                        raise OSError(errno.EINVAL, "not a path inside the portal", path)
                    if parent != held:
                        if fd >= 0:
                            os.close(fd)
                            fd = -1
                        held = None
                        fd = self._portal.open(parent, os.O_PATH | os.O_DIRECTORY)
                        held = parent
                        self._watcher.watch(parent, fd)
                    results.append((0, self._value_at(parent, fd, os.fsdecode(name))))
                except OSError as error:
                    results.append((error.errno or errno.EIO, b""))
        finally:
            if fd >= 0:
                os.close(fd)
        return results

    def xattrs(self, path: bytes) -> dict[bytes, bytes]:
        """The ``user.`` attributes of one path; the others mean something to the hub's kernel only.

        Raises:
            OSError: as lgetxattr(2).
        """
        if not path:
            place = f"/proc/self/fd/{self._portal.fd}"
            return _read_xattrs(place, follow=True)
        parent, name = self._portal.open_parent(path)
        try:
            return _read_xattrs(f"/proc/self/fd/{parent}/{os.fsdecode(name)}", follow=False)
        finally:
            os.close(parent)

    # -- directories ------------------------------------------------------------------------------

    def listing(self, path: bytes) -> Listing:
        """The whole of one directory, now.

        Raises:
            OSError: as open(2) of a directory; also when an entry's attributes cannot be read, because a
                listing without that name would say that it does not exist.
        """
        listing = self._list(path)
        self._listed(path, listing.digest)
        return listing

    def digest(self, path: bytes) -> bytes:
        """The digest that a listing would have now; raises as ``listing``."""
        return self._list(path).digest

    def _list(self, path: bytes) -> Listing:
        fd = self._portal.open_directory(path)
        try:
            watched = self._watcher.watch(path, fd)
            value = self._own_value(fd)
            entries, subdirectories = self._scan(path, fd)
        finally:
            os.close(fd)
        entries.sort()
        head = ENTRY_HEAD.pack
        parts: list[bytes] = []
        extend = parts.extend
        for name, entry in entries:
            extend((head(len(name), len(entry)), name, entry))
        data = b"".join(parts)
        return Listing(value, entries, data, digest_of(data), watched, subdirectories)

    def page(self, path: bytes, digest: bytes, after: bytes, limit: int) -> Page:
        """The part of a listing behind the name ``after``, at most ``limit`` entries and PAGE_BYTES.

        The first page reads the directory; those that follow come from the same reading, unless it was
        changed since. ``digest`` names the whole listing where the whole is in the page, else empty.

        Raises:
            OSError: as ``listing``.
        """
        if after:
            listing = self._snapshot(path) or self.listing(path)
        else:
            listing = self.listing(path)
            if digest == listing.digest:
                return Page(listing.value, b"", listing.digest, True, False, listing.watched)
            if len(listing.entries) <= limit and len(listing.data) <= PAGE_BYTES:
                return Page(listing.value, listing.data, listing.digest, False, False, listing.watched)
        self._keep(path, listing)
        entries = listing.entries
        first = _behind(entries, after) if after else 0
        last, size = first, 0
        stop = min(len(entries), first + max(1, limit))
        parts: list[bytes] = []
        while last < stop and (size < PAGE_BYTES):
            name, value = entries[last]
            parts += (ENTRY_HEAD.pack(len(name), len(value)), name, value)
            size += ENTRY_HEAD.size + len(name) + len(value)
            last += 1
        more = last < len(entries)
        if not more:
            self.forget(path)
        return Page(listing.value, b"".join(parts), b"", False, more, listing.watched)

    def walk(self, path: bytes, limit: int, known: dict[bytes, bytes]) -> Walk:
        """A walk of the subtree, breadth first, until ``limit`` entries have been seen."""
        return Walk(self, path, limit, known)

    def forget(self, path: bytes | None) -> None:
        """Drops what is kept for later pages of a directory that changed; None drops all."""
        with self._lock:
            if path is None:
                self._snapshots.clear()
            else:
                self._snapshots.pop(path, None)

    def _snapshot(self, path: bytes) -> Listing | None:
        with self._lock:
            kept = self._snapshots.get(path)
        if kept is None:
            return None
        since, listing = kept
        bound = SNAPSHOT_S if listing.watched else SNAPSHOT_UNWATCHED_S
        return listing if time.monotonic() - since < bound else None

    def _keep(self, path: bytes, listing: Listing) -> None:
        with self._lock:
            since, held = self._snapshots.pop(path, (0.0, None))
            self._snapshots[path] = (since if held is listing else time.monotonic(), listing)
            while len(self._snapshots) > SNAPSHOTS:
                del self._snapshots[next(iter(self._snapshots))]

    # -- one value --------------------------------------------------------------------------------

    def _own_value(self, fd: int) -> bytes:
        """The value of an open directory."""
        flags = FLAG_XATTR if self._xattrs and _has_user_xattr(f"/proc/self/fd/{fd}", True) else 0
        return pack_value(self._versions.attr(os.fstat(fd)), flags)

    def _value_at(self, directory: bytes, fd: int, name: str) -> bytes:
        """The value of a name in ``directory``, open as ``fd``; raises OSError."""
        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if info.st_nlink > 1 and stat.S_ISREG(info.st_mode):
            info = self._link(directory, fd, name, info)
        flags, target = 0, b""
        if stat.S_ISLNK(info.st_mode):
            target = os.fsencode(os.readlink(name, dir_fd=fd))
        elif self._xattrs and (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
            flags = FLAG_XATTR if _has_user_xattr(f"/proc/self/fd/{fd}/{name}", False) else 0
        return pack_value(self._versions.attr(info), flags, target)

    def _link(self, directory: bytes, fd: int, name: str, info: os.stat_result) -> os.stat_result:
        """The ``stat`` of one of several links to a file, which changes by the others will be told of."""
        encoded = os.fsencode(name)
        for _ in range(_LOOKS):
            if not self._watcher.linked(directory, encoded, info):
                break
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        return info

    def _scan(self, path: bytes, fd: int) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
        """((name, value) of each entry, unsorted; names of those that are directories)."""
        entries: list[tuple[bytes, bytes]] = []
        subdirectories: list[bytes] = []
        attr, encode = self._versions.attr, os.fsencode
        prefix = f"/proc/self/fd/{fd}/"
        with os.scandir(fd) as scan:
            for entry in scan:
                text = entry.name
                try:
                    info = entry.stat(follow_symlinks=False)
                    name = encode(text)
                    flags, target = 0, b""
                    kind = info.st_mode & 0o170000
                    if info.st_nlink > 1 and kind == stat.S_IFREG:
                        info = self._link(path, fd, text, info)
                        kind = info.st_mode & 0o170000
                    if kind == stat.S_IFLNK:
                        target = encode(os.readlink(text, dir_fd=fd))
                    elif kind == stat.S_IFREG or kind == stat.S_IFDIR:
                        if self._xattrs and _has_user_xattr(prefix + text, False):
                            flags = FLAG_XATTR
                        if kind == stat.S_IFDIR:
                            subdirectories.append(name)
                except FileNotFoundError:
                    continue  # removed since its name was read
                entries.append((name, pack_value(attr(info), flags, target)))
        return entries, subdirectories


class Walk:
    """A breadth-first walk, taken one part at a time so that the caller sets the pace.

    Attributes:
        dirs, entries: how many were sent or found unchanged so far.
        truncated: the limit was reached.
    """

    def __init__(self, tree: Tree, path: bytes, limit: int, known: dict[bytes, bytes]) -> None:
        self._tree = tree
        self._limit = limit
        self._known = known
        self._queue = deque([path])
        self.dirs = 0
        self.entries = 0
        self.truncated = False

    def parts(self) -> Generator[TreePartOut]:
        """The parts, one after the other; blocks on the file system.

        Raises:
            OSError: the directory where the walk starts cannot be listed; the failure of one further
                below is told in its TreeDir.
        """
        while self._queue:
            part = self._next()
            if part.dirs:
                yield part

    def _next(self) -> TreePartOut:
        dirs: list[TreeDir] = []
        buffers: list[bytes] = []
        size = 0
        queue = self._queue
        while queue and size < TREE_PART_BYTES and len(dirs) < TREE_PART_DIRS:
            if self.entries >= self._limit:
                self.truncated = True
                queue.clear()
                break
            path = queue.popleft()
            try:
                listing = self._tree.listing(path)
            except OSError as error:
                if not self.dirs:
                    raise
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    dirs.append(TreeDir(path, b"", b"", 0, False, False, error.errno or errno.EIO))
                continue  # gone or replaced since its parent was listed: the watch there tells of it
            self.dirs += 1
            self.entries += len(listing.entries)
            prefix = path + b"/" if path else b""
            queue.extend(prefix + name for name in sorted(listing.subdirectories))
            same = self._known.get(path) == listing.digest
            if not same and len(listing.data) > TREE_LISTING_MAX:
                # Too large for a part: the spoke asks for it page by page.
                dirs.append(TreeDir(path, listing.value, b"", 0, False, listing.watched, errno.EFBIG))
                continue
            length = 0 if same else len(listing.data)
            dirs.append(TreeDir(path, listing.value, listing.digest, length, same, listing.watched))
            if length:
                buffers.append(listing.data)
                size += length
            size += len(path) + 128
        return TreePartOut(tuple(dirs), buffers)


def _behind(entries: list[tuple[bytes, bytes]], after: bytes) -> int:
    """Index of the first entry whose name sorts behind ``after``."""
    low, high = 0, len(entries)
    while low < high:
        middle = (low + high) // 2
        if entries[middle][0] <= after:
            low = middle + 1
        else:
            high = middle
    return low


def _supports_xattrs(fd: int) -> bool:
    try:
        os.listxattr(fd)
    except OSError as error:
        return error.errno not in (errno.ENOTSUP, errno.ENOSYS)
    return True


def _has_user_xattr(path: str, follow: bool) -> bool:
    try:
        names = os.listxattr(path, follow_symlinks=follow)
    except FileNotFoundError:
        raise
    except OSError:
        return True  # unknown: the spoke will ask, and get the error
    return bool(names) and any(name.startswith(_USER_XATTR) for name in names)


def _read_xattrs(path: str, *, follow: bool) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    try:
        names = os.listxattr(path, follow_symlinks=follow)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return found
        raise
    for name in names:
        if name.startswith(_USER_XATTR):
            try:
                found[os.fsencode(name)] = os.getxattr(path, name, follow_symlinks=follow)
            except OSError as error:
                if error.errno != errno.ENODATA:  # removed since it was listed
                    raise
    return found
