"""One kernel request and the ways to answer it, now or later, from any thread, exactly once."""

from __future__ import annotations

import enum
import errno as _errno
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from farside.fuse import abi
from farside.fuse.records import (
    AttrOut,
    DirBuffer,
    EntryOut,
    OpenOut,
    StatfsOut,
    encode_attr_out,
    encode_entry,
    encode_open,
    encode_statfs,
)

if TYPE_CHECKING:
    from farside.fuse.device import Device

_log = logging.getLogger(__name__)


class Deferred(enum.Enum):
    """Type of ``DEFERRED``."""

    DEFERRED = 0


DEFERRED: Final = Deferred.DEFERRED
"""A handler returns this when it keeps the request and answers it later."""


class Request:
    """One kernel request.

    Attributes:
        unique: the kernel's number of this request.
        nodeid: the node it is about (the parent directory for a lookup).
        opcode: ``abi.Opcode`` as a plain int.
        uid, gid: who asks.
        pid: the thread that waits, or 0 when it lives in a pid namespace that is not visible here.
        interrupted: whoever waits for the answer should not be kept waiting (see ``on_interrupt``).
    """

    __slots__ = ("_callbacks", "_device", "gid", "interrupted", "nodeid", "opcode", "pid", "uid", "unique")

    def __init__(
        self, device: Device, unique: int, nodeid: int, opcode: int, uid: int, gid: int, pid: int
    ) -> None:
        self._device = device
        self.unique = unique
        self.nodeid = nodeid
        self.opcode = opcode
        self.uid = uid
        self.gid = gid
        self.pid = pid
        self.interrupted = False
        self._callbacks: list[Callable[[], None]] | None = None

    @property
    def answered(self) -> bool:
        """Whether somebody has already answered (or the mount is gone)."""
        return self.unique not in self._device.inflight

    def reply(self, payload: bytes | bytearray | memoryview = b"") -> bool:
        """Answer with success. False when it was answered before or the kernel no longer waits."""
        # The pop is atomic, so that handlers, interrupts and deadlines may race for the answer.
        # Everything that may raise comes before the claim, or the process would wait for ever.
        size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
        if self._device.inflight.pop(self.unique, None) is None:
            return False
        header = abi.OUT_HEADER.pack(16 + size, 0, self.unique)
        try:
            if size <= 4096:
                os.write(self._device.fd, b"".join((header, payload)))
            else:
                os.writev(self._device.fd, (header, payload))
        except OSError as failure:
            self.rejected(failure)
            return False
        return True

    def error(self, errno: int) -> bool:
        """Answer with a positive errno. False when it was answered before or nobody waits."""
        if self._device.inflight.pop(self.unique, None) is None:
            return False
        if not 0 < errno < 512:  # the kernel refuses anything else and the process would wait for ever
            errno = _errno.EIO
        try:
            os.write(self._device.fd, abi.OUT_HEADER.pack(16, -errno, self.unique))
        except OSError as failure:
            if failure.errno not in (_errno.ENOENT, _errno.ENODEV, _errno.EPERM):
                _log.error("the kernel refused an error answer to opcode %d: %s", self.opcode, failure)
            return False
        return True

    def rejected(self, failure: OSError) -> None:
        """The kernel did not take the answer of this (claimed) request: see that nobody waits for ever."""
        # ENOENT: it gave up on the request. ENODEV, EPERM: the mount is gone.
        if failure.errno in (_errno.ENOENT, _errno.ENODEV, _errno.EPERM):
            return
        _log.error("the kernel refused the answer to opcode %d: %s", self.opcode, failure)
        try:
            os.write(self._device.fd, abi.OUT_HEADER.pack(16, -_errno.EIO, self.unique))
        except OSError:
            pass  # the first write has ended the request already

    def on_interrupt(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called in a FUSE thread when the waiting process should be let go: it is
        being killed, or (for anything but reads) somebody asked it to stop with SIGINT, SIGTERM,
        SIGHUP or SIGQUIT. Called at once when that has happened already.

        Other signals, which programs handle and forget (timers, children, the Go scheduler), do not
        count, as on a local file system. After the callback the request is answered with EINTR unless
        the callback has answered it, so that a process can always be killed; the callback is the place
        to stop the work that was done for it. It must be short and must not block.
        """
        self._callbacks = [callback]
        if self.interrupted:
            self._call_back()

    def interrupt(self) -> None:
        """[session] Let the waiting process go."""
        self.interrupted = True
        self._call_back()
        self.error(_errno.EINTR)

    def _call_back(self) -> None:
        if self._callbacks is None:
            return
        try:
            callback = self._callbacks.pop()  # atomic: interrupt and on_interrupt may meet
        except IndexError:
            return
        try:
            callback()
        except Exception:
            _log.exception("interrupt callback of opcode %d failed", self.opcode)


def reply_entry(req: Request, entry: EntryOut) -> bool:
    """Answer a lookup. When the answer does not reach the kernel (False), the count of the node is given
    back through ``Operations.forget``, so callers count before they call this and do nothing after."""
    if req.reply(encode_entry(entry)):
        return True
    if entry.nodeid:
        req._device.forget(entry.nodeid, 1)
    return False


def reply_attr(req: Request, out: AttrOut) -> bool:
    """Answer a getattr."""
    return req.reply(encode_attr_out(out))


def reply_open(req: Request, out: OpenOut) -> bool:
    """Answer an open or opendir. When the answer does not reach the kernel (False), which will then never
    release the handle, ``Operations.release`` (or ``releasedir``) is called in its place, so callers count
    before they call this and do nothing after."""
    if req.reply(encode_open(out)):
        return True
    req._device.release(req, out.fh)
    return False


def reply_data(req: Request, data: bytes | bytearray | memoryview) -> bool:
    """Answer a read, readlink or readdir with bytes."""
    return req.reply(data)


def reply_directory(req: Request, entries: DirBuffer) -> bool:
    """Answer a readdir or readdirplus; lookups that did not reach the kernel are given back."""
    if req.reply(bytes(entries)):
        return True
    for nodeid in entries.nodeids:
        req._device.forget(nodeid, 1)
    return False


def reply_xattr(req: Request, value: bytes, size: int) -> bool:
    """Answer a getxattr or listxattr whose request said ``size``: 0 asks for the length only."""
    if size == 0:
        return req.reply(abi.GETXATTR_OUT.pack(len(value), 0))
    if len(value) > size:
        return req.error(_errno.ERANGE)
    return req.reply(value)


def reply_statfs(req: Request, out: StatfsOut) -> bool:
    """Answer a statfs."""
    return req.reply(encode_statfs(out))


def reply_lseek(req: Request, offset: int) -> bool:
    """Answer an lseek."""
    return req.reply(abi.LSEEK_OUT.pack(offset))


def errno_of(failure: BaseException) -> int:
    """The errno that a failed handler is answered with: its ``errno`` attribute, else EIO (and logged)."""
    number = getattr(failure, "errno", None)
    if isinstance(number, int) and number > 0:
        return number
    _log.error("a handler failed", exc_info=failure)
    return _errno.EIO
