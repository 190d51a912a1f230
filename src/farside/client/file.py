"""A file of a portal that a program has open through the library."""

from __future__ import annotations

import errno
import threading
import time
from typing import TYPE_CHECKING

from farside.errors import StaleVersion, UsageError
from farside.protocol.attributes import Attr, attr_of
from farside.spoke.openfile import OpenFile

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from farside.client.library import Library


class File:
    """One version of one file; made by ``Library.open``. Reads by offset, from any number of threads.

    The methods raise, beside what ``Library`` names:

        StaleVersion: the file changed at the hub, and not all that was asked is cached: open it again.
        ChecksumMismatch, ProtocolError: what came was wrong twice.

    Attributes:
        path: relative to the portal's root, without symlinks.
        size: bytes.
    """

    def __init__(self, library: Library, path: bytes, attr: Attr) -> None:
        """[loop] Open it."""
        self.path = path
        self.size = attr.size
        self._library = library
        self._attr = attr
        self._handle = library.handle(path, attr)
        self._lock = threading.Lock()
        self._served = False  # bytes of this version were handed out: it stays this one
        self._closed = False

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of it; may be called again."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._library.let_go(self._handle)

    def pread(self, size: int, offset: int) -> bytes:
        """The ``size`` bytes from ``offset`` on; fewer only at the end of the file.

        Raises:
            OSError: EINVAL, a negative size or offset; else as the class says.
        """
        if size < 0 or offset < 0:
            raise OSError(errno.EINVAL, "neither size nor offset can be negative", self.path)
        buffer = bytearray(max(0, min(size, self.size - offset)))
        got = self.readinto(buffer, offset)
        return bytes(memoryview(buffer)[:got])

    def readinto(self, buffer: WriteableBuffer, offset: int) -> int:
        """Fill ``buffer`` with the bytes from ``offset`` on; fewer only at the end of the file.

        ``buffer`` is anything writable and contiguous; after an error it holds anything.

        Returns:
            the number of bytes.
        """
        if offset < 0:
            raise OSError(errno.EINVAL, "the offset cannot be negative", self.path)
        view = memoryview(buffer)
        if view.nbytes == 0 or offset >= self.size:
            self._check()
            return 0
        view = view.cast("B")[: self.size - offset]
        begun = time.perf_counter_ns()
        handle = self._handle
        got = handle.cached.try_read(offset, view)
        self._check()
        hit = got >= 0 and self._vouch(handle)
        if hit:
            if handle.wants_attention(offset, got):
                self._library.attend(handle, offset, got)
        else:
            data = self._library.call(self.path, self._fetch, offset, len(view))
            got = len(data)
            view[:got] = data
        self._library.reads.add(time.perf_counter_ns() - begun, got, hit=hit)
        return got

    def _check(self) -> None:
        if self._closed:
            raise UsageError("the file is closed", errno=errno.EBADF, path=self.path)
        self._library.check()

    def _vouch(self, handle: OpenFile) -> bool:
        """[any thread] Whether bytes of ``handle`` may be handed out; then no other version will be."""
        if not self._served:
            with self._lock:
                if handle is self._handle:
                    self._served = True
        return handle is self._handle

    async def _fetch(self, offset: int, size: int) -> bytes | bytearray | memoryview:
        """[loop] Bytes that were not ready in the cache.

        A file that changed between the look-up and the first read is read in its new version, if it kept its
        size: nobody has seen a byte of the old one.
        """
        for last_try in (False, False, True):
            handle = self._handle
            try:
                data = await handle.read(offset, size)
            except StaleVersion:
                if last_try or not await self._renew(handle):
                    raise
                continue
            if self._vouch(handle):
                return data
        raise StaleVersion("the file keeps changing at the hub", path=self.path)

    async def _renew(self, handle: OpenFile) -> bool:
        """[loop] Bind to the version that is there now; False when that cannot be done any more."""
        value = await self._library.value(self.path)
        if value is None:
            return False
        attr, before = attr_of(value), self._attr
        if (attr.fileid, attr.size, attr.mode) != (before.fileid, before.size, before.mode):
            return False
        renewed = self._library.handle(self.path, attr)
        with self._lock:
            if self._handle is handle and not self._served and not self._closed:
                self._handle, renewed = renewed, handle
        renewed.cached.release()  # the one that is not kept
        return self._handle is not handle
