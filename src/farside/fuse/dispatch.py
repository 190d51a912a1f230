"""From a raw request to the method of ``Operations`` and back: one small function per opcode."""

from __future__ import annotations

import errno
from collections.abc import Callable

from farside.fuse import abi
from farside.fuse.abi import Opcode
from farside.fuse.operations import Operations
from farside.fuse.records import DirBuffer
from farside.fuse.request import (
    DEFERRED,
    Deferred,
    Request,
    reply_attr,
    reply_directory,
    reply_entry,
    reply_lseek,
    reply_open,
    reply_statfs,
    reply_xattr,
)

Handler = Callable[[Request, memoryview], None]


class Dispatcher:
    """Decodes requests (``body``: the bytes behind the header), calls ``ops``, encodes and answers.

    READ, FORGET and INTERRUPT are not here: the reading threads treat them on their own.
    """

    def __init__(self, ops: Operations) -> None:
        self._ops = ops
        table: list[Handler] = [self._unknown] * abi.OPCODES
        for opcode, handler in {
            Opcode.LOOKUP: self._lookup,
            Opcode.GETATTR: self._getattr,
            Opcode.READLINK: self._readlink,
            Opcode.OPEN: self._open,
            Opcode.STATFS: self._statfs,
            Opcode.RELEASE: self._release,
            Opcode.FSYNC: self._fsync,
            Opcode.FSYNCDIR: self._fsync,
            Opcode.GETXATTR: self._getxattr,
            Opcode.LISTXATTR: self._listxattr,
            Opcode.FLUSH: self._flush,
            Opcode.OPENDIR: self._opendir,
            Opcode.READDIR: self._readdir,
            Opcode.READDIRPLUS: self._readdirplus,
            Opcode.RELEASEDIR: self._releasedir,
            Opcode.ACCESS: self._access,
            Opcode.LSEEK: self._lseek,
            Opcode.DESTROY: self._destroy,
            Opcode.IOCTL: self._ioctl,
        }.items():
            table[opcode] = handler
        for opcode in abi.MODIFYING:
            table[opcode] = self._modify
        self.table = table

    @staticmethod
    def _unknown(req: Request, body: memoryview) -> None:
        req.error(errno.ENOSYS)

    @staticmethod
    def _destroy(req: Request, body: memoryview) -> None:
        req.reply()

    @staticmethod
    def _ioctl(req: Request, body: memoryview) -> None:
        req.error(errno.ENOTTY)  # isatty(), which Python asks at every open

    @staticmethod
    def _done(req: Request, result: Deferred | None) -> None:
        if result is not DEFERRED:
            req.reply()

    def _lookup(self, req: Request, body: memoryview) -> None:
        entry = self._ops.lookup(req, req.nodeid, bytes(body[:-1]))
        if entry is not DEFERRED:
            reply_entry(req, entry)

    def _getattr(self, req: Request, body: memoryview) -> None:
        flags, _, fh = abi.GETATTR_IN.unpack_from(body)
        out = self._ops.getattr(req, req.nodeid, fh if flags & abi.GETATTR_FH else None)
        if out is not DEFERRED:
            reply_attr(req, out)

    def _readlink(self, req: Request, body: memoryview) -> None:
        target = self._ops.readlink(req, req.nodeid)
        if target is not DEFERRED:
            req.reply(target)

    def _open(self, req: Request, body: memoryview) -> None:
        flags, _ = abi.OPEN_IN.unpack_from(body)
        out = self._ops.open(req, req.nodeid, flags)
        if out is not DEFERRED:
            reply_open(req, out)

    def _opendir(self, req: Request, body: memoryview) -> None:
        flags, _ = abi.OPEN_IN.unpack_from(body)
        out = self._ops.opendir(req, req.nodeid, flags)
        if out is not DEFERRED:
            reply_open(req, out)

    def _release(self, req: Request, body: memoryview) -> None:
        fh = abi.RELEASE_IN.unpack_from(body)[0]
        self._done(req, self._ops.release(req, req.nodeid, fh))

    def _releasedir(self, req: Request, body: memoryview) -> None:
        fh = abi.RELEASE_IN.unpack_from(body)[0]
        self._done(req, self._ops.releasedir(req, req.nodeid, fh))

    def _flush(self, req: Request, body: memoryview) -> None:
        fh = abi.FLUSH_IN.unpack_from(body)[0]
        self._done(req, self._ops.flush(req, req.nodeid, fh))

    def _fsync(self, req: Request, body: memoryview) -> None:
        fh, flags, _ = abi.FSYNC_IN.unpack_from(body)
        self._done(req, self._ops.fsync(req, req.nodeid, fh, bool(flags & 1)))

    def _access(self, req: Request, body: memoryview) -> None:
        mask, _ = abi.ACCESS_IN.unpack_from(body)
        self._done(req, self._ops.access(req, req.nodeid, mask))

    @staticmethod
    def _listed(req: Request, entries: DirBuffer | bytes | Deferred) -> None:
        if isinstance(entries, DirBuffer):
            reply_directory(req, entries)
        elif entries is not DEFERRED:
            req.reply(entries)

    def _readdir(self, req: Request, body: memoryview) -> None:
        fh, offset, size, *_ = abi.READ_IN.unpack_from(body)
        self._listed(req, self._ops.readdir(req, req.nodeid, fh, offset, size))

    def _readdirplus(self, req: Request, body: memoryview) -> None:
        fh, offset, size, *_ = abi.READ_IN.unpack_from(body)
        self._listed(req, self._ops.readdirplus(req, req.nodeid, fh, offset, size))

    def _statfs(self, req: Request, body: memoryview) -> None:
        out = self._ops.statfs(req, req.nodeid)
        if out is not DEFERRED:
            reply_statfs(req, out)

    def _getxattr(self, req: Request, body: memoryview) -> None:
        size, _ = abi.GETXATTR_IN.unpack_from(body)
        value = self._ops.getxattr(req, req.nodeid, bytes(body[abi.GETXATTR_IN.size : -1]), size)
        if value is not DEFERRED:
            reply_xattr(req, value, size)

    def _listxattr(self, req: Request, body: memoryview) -> None:
        size, _ = abi.GETXATTR_IN.unpack_from(body)
        names = self._ops.listxattr(req, req.nodeid, size)
        if names is not DEFERRED:
            reply_xattr(req, names, size)

    def _lseek(self, req: Request, body: memoryview) -> None:
        fh, offset, whence, _ = abi.LSEEK_IN.unpack_from(body)
        position = self._ops.lseek(req, req.nodeid, fh, offset, whence)
        if position is not DEFERRED:
            reply_lseek(req, position)

    def _modify(self, req: Request, body: memoryview) -> None:
        payload = self._ops.modify(req, req.nodeid, req.opcode, body)
        if payload is not DEFERRED:
            req.reply(payload)
