"""Open files of the mount: handles, and the choice between kernel passthrough and handled reads.

The kernel allows one mode for all handles that are open on a node at the same time (see
farside/fuse/README.md), so the mode is chosen when the first of them opens and kept until the last closes.
"""

from __future__ import annotations

import asyncio
import os
import threading

from farside.errors import StaleVersion
from farside.fuse import OpenOut, Session
from farside.fuse.abi import FOPEN_KEEP_CACHE, FOPEN_NOFLUSH, FOPEN_PASSTHROUGH
from farside.mount.nodes import Node, path_of
from farside.protocol.attributes import attr_of
from farside.spoke.cachedfile import CachedFile
from farside.spoke.openfile import OpenFile, Prefetcher
from farside.spoke.spoke import Spoke

PASSTHROUGH_MIN = 128 * 1024
"""Smaller files are handed out by this process: one read of them costs less than setting up passthrough."""

DISK_POLL_S = 0.25

VERIFY_AT_OPEN = 1 << 30
"""A whole file that was cached before the start of the spoke is verified at its first open if it is no
larger (bytes; about a second of disk reads), so that it can be passed through from the first read on."""


class Shared:
    """What all handles on one node share.

    Attributes:
        backing: the backing id of passthrough; 0 for handled reads.
    """

    __slots__ = ("backing", "cached", "count", "node")

    def __init__(self, node: Node, cached: CachedFile, backing: int) -> None:
        self.node = node
        self.cached = cached
        self.backing = backing
        self.count = 0


class OpenFiles:
    """The handles of one mount. ``session`` is set when the mount is there.

    Attributes:
        handles: handle number → open file; read by FUSE threads.
        unread: handles for which ``begin`` must be asked before anything is read from the cache.
    """

    session: Session

    def __init__(self, spoke: Spoke, loop: asyncio.AbstractEventLoop) -> None:
        self.spoke = spoke
        self.handles: dict[int, OpenFile] = {}
        self.unread: set[int] = set()
        self.passthrough_opens = 0
        self.handled_opens = 0
        self._loop = loop
        self._prefetcher = Prefetcher(spoke)
        self._lock = threading.Lock()
        self._shared: dict[int, Shared] = {}
        self._of_handle: dict[int, Shared] = {}
        self._opening: dict[int, asyncio.Future[None]] = {}
        self._next = 1

    def open_again(self, node: Node) -> OpenOut | None:
        """[any thread] One more handle on a node that is open already; None when it is not."""
        with self._lock:
            shared = self._shared.get(node.id)
            if shared is None:
                return None
            shared.count += 1
            fh = self._next
            self._next += 1
            self._of_handle[fh] = shared
            path = path_of(node)
            self.handles[fh] = self._prefetcher.open(path, shared.cached)
            self.unread.add(fh)
        if self._prefetcher.awaits(path):
            self._loop.call_soon_threadsafe(self._prefetcher.opened, path)
        if shared.backing:
            self.passthrough_opens += 1
            return OpenOut(fh, FOPEN_PASSTHROUGH | FOPEN_NOFLUSH, shared.backing)
        self.handled_opens += 1
        return OpenOut(fh, FOPEN_KEEP_CACHE | FOPEN_NOFLUSH)

    async def open(self, node: Node) -> OpenOut:
        """[loop] A handle on a node, the first one or one more."""
        while (opened := self.open_again(node)) is None:
            first = self._opening.get(node.id)
            if first is not None:
                await asyncio.wait({first})
                continue
            done = self._opening[node.id] = self._loop.create_future()
            try:
                shared = await self._first(node)
                with self._lock:
                    self._shared[node.id] = shared
            finally:
                del self._opening[node.id]
                done.set_result(None)
        return opened

    async def _first(self, node: Node) -> Shared:
        cached = self.spoke.cached_file(path_of(node), node.attr)
        cached.acquire()
        try:
            big = cached.size >= PASSTHROUGH_MIN
            backing = await self._back(cached) if big and self.session.passthrough else 0
        except BaseException:
            cached.release()
            raise
        return Shared(node, cached, backing)

    async def _back(self, cached: CachedFile) -> int:
        """A backing id for a file that is wholly cached and verified; 0 when it is not, or cannot be."""
        await self.spoke.load(cached)
        if cached.fully_on_disk and not cached.complete and cached.size <= VERIFY_AT_OPEN:
            await self.spoke.fetcher.verify(cached)
        if not cached.passthrough_ready:
            return 0
        fd = await self._passthrough_fd(cached)
        if fd < 0:
            return 0
        try:
            return self.session.backing_open(fd)
        except OSError:
            cached.passthrough_release()  # all ids in use, or not here at all: `status` says so
            return 0
        finally:
            os.close(fd)

    async def _passthrough_fd(self, cached: CachedFile) -> int:
        """``CachedFile.passthrough_fd`` off the loop; -1 also when the disk is found to hang meanwhile."""
        job = self._loop.run_in_executor(self.spoke.pool, cached.passthrough_fd)

        def give_back(late: asyncio.Future[int]) -> None:
            if not late.cancelled() and late.exception() is None and late.result() >= 0:
                os.close(late.result())
                cached.passthrough_release()

        try:
            while not job.done() and not self.spoke.cache.health.reads_off:
                await asyncio.wait({job}, timeout=DISK_POLL_S)
        except BaseException:
            job.add_done_callback(give_back)
            raise
        if job.done():
            return job.result()
        job.add_done_callback(give_back)
        return -1

    def begin(self, fh: int) -> bool:
        """[any thread] May the cache be read for this handle? From then on its version is fixed.

        False while nothing of it is cached and nothing was handed out: then ``read`` decides.
        """
        with self._lock:
            shared = self._of_handle.get(fh)
            if shared is None or not (shared.node.served or shared.cached.present):
                return False
            shared.node.served = True
            self.unread.discard(fh)
        return True

    async def read(self, fh: int, offset: int, size: int) -> bytes | bytearray | memoryview:
        """[loop] Bytes that were not ready in the cache.

        A file that changed between the look-up and the first read is read in its new version, if it kept
        its size: nobody has seen a byte of the old one. Raises as ``OpenFile.read``.

        Two reads may be under way when one of them binds the handle anew: what the other has got of the old
        version is dropped.
        """
        for last_try in (False, False, True):
            file, shared = self.handles[fh], self._of_handle[fh]
            cached = file.cached
            try:
                data = await file.read(offset, size)
            except StaleVersion:
                if last_try or (file.cached is cached and not await self._renew(shared)):
                    raise
                continue
            if file.cached is cached:
                shared.node.served = True
                return data
        raise StaleVersion("the file keeps changing at the hub", path=file.path, hint="open it again")

    async def _renew(self, shared: Shared) -> bool:
        """Bind handles of which no byte was read to the version that is there now; False when one was."""
        node, old = shared.node, shared.cached
        assert node.parent is not None
        value = await self.spoke.namespace.lookup(node.parent.path or b"", node.name)
        if value is None or shared.cached is not old:
            return shared.cached is not old
        attr, before = attr_of(value), node.attr
        if (attr.fileid, attr.size, attr.mode) != (before.fileid, before.size, before.mode):
            return False
        new = self.spoke.cached_file(path_of(node), attr)
        with self._lock:  # against ``begin``: a FUSE thread takes bytes of the one or of the other version
            if node.served or shared.backing or old.present:
                return False
            node.value = value
            shared.cached = new
            new.acquire()
            for fh, other in self._of_handle.items():
                if other is shared and (handle := self.handles.get(fh)) is not None:
                    handle.cached = new
        old.release()
        return True

    def release(self, fh: int) -> None:
        """[any thread] A handle was closed; with the last one the file's mode may change again."""
        with self._lock:
            self.handles.pop(fh, None)
            self.unread.discard(fh)
            shared = self._of_handle.pop(fh, None)
            if shared is None:
                return
            shared.count -= 1
            if shared.count:
                return
            if self._shared.get(shared.node.id) is shared:
                del self._shared[shared.node.id]
        try:
            self._loop.call_soon_threadsafe(self._drop, shared)
        except RuntimeError:
            pass  # the loop has ended: the cache is closed, and the kernel took its ids with the mount

    def _drop(self, shared: Shared) -> None:
        if shared.backing:
            self.session.backing_close(shared.backing)
            shared.cached.passthrough_release()
        shared.cached.release()

    def close(self) -> None:
        """[loop] The mount is gone: whatever was open is not any more."""
        for fh in list(self._of_handle):
            self.release(fh)
