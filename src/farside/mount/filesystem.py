"""The mount: what the kernel asks through FUSE, answered from the namespace and the chunk cache.

What is known is answered in the FUSE thread, without waiting: names that the namespace vouches for,
attributes, reads of verified chunks. Everything else becomes one coroutine in the event loop, which answers
the request when it can; an interrupt of the waiting process cancels it. See docs/concurrency.md.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Coroutine, Iterable
from typing import Any

from farside.errors import FarsideError
from farside.fuse import (
    DEFERRED,
    AttrOut,
    Deferred,
    DirBuffer,
    EntryOut,
    InitInfo,
    OpenOut,
    Operations,
    Request,
    Session,
    StatfsOut,
    negative_entry,
    reply_attr,
    reply_data,
    reply_directory,
    reply_entry,
    reply_open,
    reply_statfs,
    reply_xattr,
)
from farside.metrics import Latencies
from farside.mount.nodes import Node, Nodes, fuse_attr, path_of
from farside.mount.openfiles import OpenFiles
from farside.protocol.attributes import Attr, attr_of, flags_of, target_of
from farside.protocol.messages import StatfsReply
from farside.spoke.directory import UNKNOWN
from farside.spoke.namespace import Invalidated
from farside.spoke.openfile import OpenFile
from farside.spoke.spoke import Spoke

TRUSTED_TTL = 60.0
"""Seconds for which the kernel may keep names and attributes; pushes invalidate them earlier."""

DOUBTFUL_TTL = 1.0
"""The same while the hub is away, and in directories that the hub does not watch."""

STATFS_TTL = 5.0
NAME_MAX = 255
SEEK_DATA, SEEK_HOLE = 3, 4


class DirHandle:
    """An open directory: one snapshot of it, so that offsets stay true however it changes."""

    __slots__ = ("entries", "node", "parent_ino", "started")

    def __init__(self, node: Node, parent_ino: int, entries: list[tuple[bytes, bytes]]) -> None:
        self.node = node
        self.parent_ino = parent_ino
        self.entries = entries
        self.started = False


class _Local(threading.local):
    latencies: Latencies | None = None


class Filesystem(Operations):
    """FUSE operations over one spoke. The methods run in FUSE threads, the coroutines in the loop."""

    def __init__(self, spoke: Spoke, loop: asyncio.AbstractEventLoop) -> None:
        self.spoke = spoke
        self.names = spoke.namespace
        self.loop = loop
        self.nodes = Nodes(spoke.namespace.root)
        self.files = OpenFiles(spoke, loop)
        self.hits: list[Latencies] = []  # one for each FUSE thread
        self.misses = Latencies()
        self.hit_bytes: dict[int, int] = {}  # by thread
        self.miss_bytes = 0
        self.reading: dict[int, tuple[Request, int, int, int, float]] = {}
        """By FUSE thread: the hit being read from the cache's disk, since when (monotonic)."""
        self._local = _Local()
        self._dirs: dict[int, DirHandle] = {}
        self._next_dir = 1
        self._dir_lock = threading.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._statfs: tuple[float, StatfsReply] | None = None

    def init(self, session: Session, info: InitInfo) -> None:
        self.files.session = session

    # -- leaving the FUSE thread ------------------------------------------------------------------

    def _later(self, req: Request, work: Coroutine[Any, Any, None]) -> Deferred:
        """Have the loop do ``work``, which answers the request; a failure answers with its errno."""
        try:
            self.loop.call_soon_threadsafe(self._begin, req, work)
        except RuntimeError:  # the loop has ended: the mount is going away
            work.close()
            raise OSError(errno.EIO, "the mount is closing") from None
        return DEFERRED

    def _begin(self, req: Request, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(self._answer(req, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        req.on_interrupt(lambda: self._cancel(task))

    def _cancel(self, task: asyncio.Task[None]) -> None:
        try:
            self.loop.call_soon_threadsafe(task.cancel)
        except RuntimeError:
            pass  # the loop has ended, and the task with it

    def _patience(self) -> asyncio.Timeout:
        """Bounds what waits for the hub; more tightly while it is silent, for the kernel tries again."""
        return asyncio.timeout(self.spoke.link.patience(self.spoke.config.timeout_s))

    async def _answer(self, req: Request, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            req.error(errno.EINTR)
            raise
        except TimeoutError:
            self.spoke.errors["timeout"] += 1
            req.error(errno.ETIMEDOUT)
        except FarsideError as e:
            self.spoke.count_error(e)
            req.error(e.errno)
        except OSError as e:
            req.error(e.errno or errno.EIO)
        except Exception:
            req.error(errno.EIO)
            self.spoke.log.exception("a request of the kernel failed (opcode %d)", req.opcode)

    # -- names ------------------------------------------------------------------------------------

    def lookup(self, req: Request, parent: int, name: bytes) -> EntryOut | Deferred:
        if len(name) > NAME_MAX:
            raise OSError(errno.ENAMETOOLONG, "a name has at most 255 bytes")
        node = self._directory(parent)
        before = self.names.changes
        value = self.names.peek(node.path or b"", name)
        if value is UNKNOWN:
            return self._later(req, self._lookup(req, node, name))
        reply_entry(req, self._entry(node, name, value))
        if self.names.changes != before:  # the kernel may have got this behind the invalidation of it
            self.files.session.invalidate_entry(parent, name)
        return DEFERRED

    async def _lookup(self, req: Request, node: Node, name: bytes) -> None:
        async with self._patience():
            value = await self.names.lookup(node.path or b"", name)
        reply_entry(req, self._entry(node, name, value))

    def _directory(self, node_id: int) -> Node:
        node = self.nodes.find(node_id)
        if node.path is None:
            raise OSError(errno.ENOTDIR, "not a directory")
        return node

    def _ttl(self, directory: bytes) -> float:
        return TRUSTED_TTL if self.names.watched(directory) else DOUBTFUL_TTL

    def _entry(self, parent: Node, name: bytes, value: bytes | None) -> EntryOut:
        if value is None:
            return negative_entry(DOUBTFUL_TTL)  # cheap to ask again, and no list of them need be kept
        ttl = self._ttl(parent.path or b"")
        node = self.nodes.intern(parent, name, value)
        return _entry_out(node, attr_of(value), ttl)

    def forget(self, nodeid: int, nlookup: int) -> None:
        self.nodes.forget(nodeid, nlookup)

    def getattr(self, req: Request, nodeid: int, fh: int | None) -> AttrOut | Deferred:
        node = self.nodes.find(nodeid)
        if node.path is None:  # a node is one version of a file: its attributes never change
            return AttrOut(fuse_attr(node.attr), TRUSTED_TTL)
        if node.parent is None:
            return AttrOut(fuse_attr(attr_of(self.names.root)), self._ttl(b""))
        value = self.names.peek(node.parent.path or b"", node.name)
        if value is UNKNOWN:
            return self._later(req, self._getattr(req, node))
        return self._dir_attr(node, value)

    async def _getattr(self, req: Request, node: Node) -> None:
        assert node.parent is not None
        async with self._patience():
            value = await self.names.lookup(node.parent.path or b"", node.name)
        reply_attr(req, self._dir_attr(node, value))

    def _dir_attr(self, node: Node, value: bytes | None) -> AttrOut:
        if value is None or attr_of(value).fileid != node.attr.fileid:
            raise OSError(errno.ESTALE, "the directory is gone at the hub")
        node.value = value
        assert node.parent is not None
        return AttrOut(fuse_attr(attr_of(value)), self._ttl(node.parent.path or b""))

    def readlink(self, req: Request, nodeid: int) -> bytes:
        target = target_of(self.nodes.find(nodeid).value)
        if not target:
            raise OSError(errno.EINVAL, "not a symlink")
        return target

    # -- directories ------------------------------------------------------------------------------

    def opendir(self, req: Request, nodeid: int, flags: int) -> OpenOut | Deferred:
        return self._later(req, self._opendir(req, self._directory(nodeid)))

    async def _opendir(self, req: Request, node: Node) -> None:
        handle = DirHandle(node, 0, [])
        await self._snapshot(handle)
        with self._dir_lock:
            fh = self._next_dir
            self._next_dir += 1
            self._dirs[fh] = handle
        reply_open(req, OpenOut(fh))

    async def _snapshot(self, handle: DirHandle) -> None:
        node = handle.node
        async with self._patience():
            directory = await self.names.directory(node.path or b"")
        handle.entries = directory.snapshot()
        handle.parent_ino = node.parent.attr.fileid if node.parent else node.attr.fileid
        handle.started = False

    def readdir(self, req: Request, nodeid: int, fh: int, offset: int, size: int) -> bytes | Deferred:
        return self._readdir(req, fh, offset, size, plus=False)

    def readdirplus(self, req: Request, nodeid: int, fh: int, offset: int, size: int) -> bytes | Deferred:
        return self._readdir(req, fh, offset, size, plus=True)

    def _readdir(self, req: Request, fh: int, offset: int, size: int, *, plus: bool) -> bytes | Deferred:
        handle = self._dirs[fh]
        if offset == 0 and handle.started:  # rewinddir: what is there now
            return self._later(req, self._reread(req, handle, size, plus))
        handle.started = True
        before = self.names.changes
        page = self._page(handle, offset, size, plus)
        reply_directory(req, page)
        if self.names.changes != before:
            for at in range(offset, offset + len(page)):
                if at >= 2:  # behind . and ..
                    self.files.session.invalidate_entry(handle.node.id, handle.entries[at - 2][0])
        return DEFERRED

    async def _reread(self, req: Request, handle: DirHandle, size: int, plus: bool) -> None:
        await self._snapshot(handle)
        handle.started = True
        reply_directory(req, self._page(handle, 0, size, plus))

    def _page(self, handle: DirHandle, offset: int, size: int, plus: bool) -> DirBuffer:
        """Entries from ``offset`` on. Offset 1 is behind ``.``, 2 behind ``..``, 3 behind the first name."""
        page = DirBuffer(size)
        node = handle.node
        for at, (name, ino) in enumerate(((b".", node.attr.fileid), (b"..", handle.parent_ino))):
            if offset > at:
                continue
            dot = EntryOut(0, 0, fuse_attr(node.attr)._replace(ino=ino), 0, 0)
            if not (page.add_plus(dot, name, at + 1) if plus else page.add(name, ino, 4, at + 1)):
                return page
        path = node.path or b""
        ttl = self._ttl(path)
        entries = handle.entries
        for i in range(max(0, offset - 2), len(entries)):
            name, value = entries[i]
            attr = attr_of(value)
            if not plus:
                if not page.add(name, attr.fileid, attr.mode >> 12, i + 3):
                    break
                continue
            now = self.names.peek(path, name)
            if isinstance(now, bytes):
                child = self.nodes.intern(node, name, now)
                if not page.add_plus(_entry_out(child, attr_of(now), ttl), name, i + 3):
                    self.nodes.forget(child.id, 1)
                    break
            elif not page.add_plus(EntryOut(0, 0, fuse_attr(attr), 0, 0), name, i + 3):
                break  # (changed since the snapshot: the name alone, so that its attributes are asked for)
        return page

    def releasedir(self, req: Request, nodeid: int, fh: int) -> None:
        self._dirs.pop(fh, None)

    # -- what the kernel must forget --------------------------------------------------------------

    def forget_changed(self, changes: list[Invalidated]) -> asyncio.Future[None]:
        """[loop] Have the kernel forget what changed; done when it has."""
        session = self.files.session
        for path, name, tree in changes:
            node = self.nodes.directory(path)
            if node is not None:
                session.invalidate_inode(node.id, -1)
                if name is not None:
                    session.invalidate_entry(node.id, name)
                elif not tree:
                    self._forget_names(self.nodes.children(node))
            if tree:
                below = self.nodes.below(path)
                self._forget_names(below)
                for child in below:
                    if child.path is not None:
                        session.invalidate_inode(child.id, -1)
        return asyncio.wrap_future(session.invalidated(), loop=self.loop)

    def _forget_names(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.parent is not None:
                self.files.session.invalidate_entry(node.parent.id, node.name)

    # -- files ------------------------------------------------------------------------------------

    def open(self, req: Request, nodeid: int, flags: int) -> OpenOut | Deferred:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, "the portal is mounted read-only")
        node = self.nodes.find(nodeid)
        if node.path is not None:
            raise OSError(errno.EISDIR, "is a directory")
        assert node.parent is not None
        value = self.names.peek(node.parent.path or b"", node.name)
        if value is not UNKNOWN:
            self._check_current(node, value)
            opened = self.files.open_again(node)
            if opened is not None:
                return opened
        return self._later(req, self._open(req, node))

    async def _open(self, req: Request, node: Node) -> None:
        assert node.parent is not None
        async with self._patience():
            value = await self.names.lookup(node.parent.path or b"", node.name)
        self._check_current(node, value)
        reply_open(req, await self.files.open(node))

    @staticmethod
    def _check_current(node: Node, value: bytes | None) -> None:
        """Close-to-open: a node of an older version is not opened any more. The kernel looks the name up
        again when it is told ESTALE, finds the new version's node (or none), and opens that."""
        if value is None or attr_of(value).version != node.attr.version:
            raise OSError(errno.ESTALE, "the file changed at the hub")

    def read(
        self, req: Request, nodeid: int, fh: int, offset: int, size: int, buffer: memoryview
    ) -> int | Deferred:
        begun = time.perf_counter_ns()
        file = self.files.handles.get(fh)
        if file is None:  # only while the mount goes away: every handle is closed then
            raise OSError(errno.EIO, "the mount is closing")
        want = min(size, file.size - offset)
        if want <= 0:
            return 0
        me = threading.get_ident()
        self.reading[me] = (req, fh, offset, want, time.monotonic())
        if fh in self.files.unread and not self.files.begin(fh):
            got = -1
        else:
            got = file.cached.try_read(offset, buffer[:want])
        self.reading.pop(me, None)  # the loop may have taken it over, see rescue
        if got < 0:
            return self._later(req, self._read(req, fh, offset, want, begun))
        if file.wants_attention(offset, got):
            self._attend(file, offset, got)
        latencies = self._local.latencies
        if latencies is None:
            latencies = self._local.latencies = Latencies()
            self.hits.append(latencies)
        latencies.add(time.perf_counter_ns() - begun)
        self.hit_bytes[me] = self.hit_bytes.get(me, 0) + got
        return got

    def _attend(self, file: OpenFile, offset: int, size: int) -> None:
        try:
            self.loop.call_soon_threadsafe(file.advance, offset, size, True)
        except RuntimeError:
            pass  # the loop has ended; nothing is read ahead any more

    async def _read(self, req: Request, fh: int, offset: int, size: int, begun: int) -> None:
        async with self._patience():
            data = await self.files.read(fh, offset, size)
        reply_data(req, data)
        self.misses.add(time.perf_counter_ns() - begun)
        self.miss_bytes += len(data)

    def rescue(self, older_than_s: float) -> int:
        """[loop] Answer over the link what has hung on the cache's disk for too long; returns how many."""
        stuck = 0
        for me, (req, fh, offset, size, since) in list(self.reading.items()):
            if time.monotonic() - since > older_than_s and not req.answered:
                self.reading.pop(me, None)
                stuck += 1
                self._begin(req, self._read(req, fh, offset, size, time.perf_counter_ns()))
        return stuck

    def release(self, req: Request, nodeid: int, fh: int) -> None:
        self.files.release(fh)

    def flush(self, req: Request, nodeid: int, fh: int) -> None:
        return None

    def fsync(self, req: Request, nodeid: int, fh: int, datasync: bool) -> None:
        return None

    def lseek(self, req: Request, nodeid: int, fh: int, offset: int, whence: int) -> int:
        """Holes are not told apart from data: all is data, with the hole at the end that POSIX asks for."""
        size = self.nodes.find(nodeid).attr.size
        if whence not in (SEEK_DATA, SEEK_HOLE):
            raise OSError(errno.EINVAL, "only SEEK_DATA and SEEK_HOLE get here")
        if offset >= size:
            raise OSError(errno.ENXIO, "beyond the end")
        return offset if whence == SEEK_DATA else size

    # -- extended attributes, space ---------------------------------------------------------------

    def getxattr(self, req: Request, nodeid: int, name: bytes, size: int) -> bytes | Deferred:
        node = self.nodes.find(nodeid)
        if not flags_of(node.value):
            raise OSError(errno.ENODATA, "no such attribute")
        return self._later(req, self._getxattr(req, node, name, size))

    def listxattr(self, req: Request, nodeid: int, size: int) -> bytes | Deferred:
        node = self.nodes.find(nodeid)
        if not flags_of(node.value):
            return b""
        return self._later(req, self._listxattr(req, node, size))

    async def _getxattr(self, req: Request, node: Node, name: bytes, size: int) -> None:
        found = await self.spoke.xattrs(path_of(node), node.attr.version)
        if name not in found:
            raise OSError(errno.ENODATA, "no such attribute")
        reply_xattr(req, found[name], size)

    async def _listxattr(self, req: Request, node: Node, size: int) -> None:
        found = await self.spoke.xattrs(path_of(node), node.attr.version)
        reply_xattr(req, b"".join(name + b"\0" for name in found), size)

    def statfs(self, req: Request, nodeid: int) -> StatfsOut | Deferred:
        known = self._statfs
        if known is not None and time.monotonic() - known[0] < STATFS_TTL:
            return _statfs_out(known[1])
        return self._later(req, self._ask_statfs(req))

    async def _ask_statfs(self, req: Request) -> None:
        try:
            reply = await self.spoke.link.statfs()
        except FarsideError:
            if self._statfs is None:
                raise
            reply = self._statfs[1]  # the hub is away: what it last said
        self._statfs = (time.monotonic(), reply)
        reply_statfs(req, _statfs_out(reply))

    async def close(self) -> None:
        """[loop] Let everything that still waits fail, after the kernel has let go of the mount."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.files.close()


def _entry_out(node: Node, attr: Attr, ttl: float) -> EntryOut:
    linked = node.path is None and attr.nlink > 1  # by its other names it cannot be told to be forgotten
    return EntryOut(node.id, 0, fuse_attr(attr), min(ttl, DOUBTFUL_TTL) if linked else ttl, ttl)


def _statfs_out(reply: StatfsReply) -> StatfsOut:
    return StatfsOut(
        blocks=reply.blocks,
        bfree=reply.bfree,
        bavail=reply.bavail,
        files=reply.files,
        ffree=reply.ffree,
        bsize=reply.bsize,
        namelen=reply.namemax,
        frsize=reply.frsize,
    )
