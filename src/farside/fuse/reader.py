"""The threads that read requests from the kernel. The hot path of the whole mount is ``Reader._serve``."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable

from farside.fuse import abi
from farside.fuse.abi import Opcode
from farside.fuse.device import Device
from farside.fuse.dispatch import Dispatcher
from farside.fuse.operations import Operations
from farside.fuse.request import DEFERRED, Request, errno_of

_log = logging.getLogger(__name__)

REQUEST_ROOM = 1 << 12  # beyond max_write: headers and names
_PAGE = mmap.PAGESIZE
_GONE = frozenset({errno.ENODEV, errno.EBADF, errno.ECONNABORTED, errno.EPERM})
_AGAIN = frozenset({errno.ENOENT, errno.EINTR, errno.EAGAIN})  # ENOENT: the waiter left first


class Reader:
    """One thread that reads requests and handles them one after the other.

    Attributes:
        counts: requests by opcode.
        busy: a request is being handled right now.
        served: number of requests taken so far.
    """

    def __init__(
        self,
        device: Device,
        ops: Operations,
        dispatcher: Dispatcher,
        *,
        max_read: int,
        max_write: int,
        interrupted: Callable[[Request], None],
        gone: Callable[[], None],
        name: str,
    ) -> None:
        self.counts = [0] * abi.OPCODES
        self.busy = False
        self.served = 0
        self._device = device
        self._ops = ops
        self._table = dispatcher.table
        self._interrupted = interrupted
        self._gone = gone
        # Anonymous maps: page aligned, and only what is used takes memory.
        self._in = memoryview(mmap.mmap(-1, max_write + REQUEST_ROOM))
        self._out = memoryview(mmap.mmap(-1, _PAGE + max_read))
        # Daemon: a thread that hangs in a handler must not keep the process from ending.
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin reading."""
        self.thread.start()

    def _run(self) -> None:
        while True:
            try:
                self._serve()
                break
            except Exception:
                _log.exception("a FUSE thread failed and goes on")
        self._gone()

    def _serve(self) -> None:
        """Read and handle requests until the mount is gone."""
        device = self._device
        fd, inflight, ops, table, counts = device.fd, device.inflight, self._ops, self._table, self.counts
        buffer, out, data = self._in, self._out, self._out[_PAGE:]
        buffers = [buffer]
        head = _PAGE - abi.OUT_HEADER.size  # the answer's header ends where the page-aligned data begin
        readv, write = os.readv, os.write
        unpack_header, unpack_read = abi.IN_HEADER.unpack_from, abi.READ_IN.unpack_from
        pack_header = abi.OUT_HEADER.pack_into
        in_size, out_size = abi.IN_HEADER.size, abi.OUT_HEADER.size
        read_op, forget_ops = int(Opcode.READ), (Opcode.FORGET, Opcode.BATCH_FORGET)
        interrupt_op = int(Opcode.INTERRUPT)
        while True:
            try:
                got = readv(fd, buffers)
            except OSError as failure:
                if failure.errno in _AGAIN:
                    continue
                if failure.errno not in _GONE:
                    _log.error("reading from the kernel failed: %s", failure)
                    time.sleep(0.01)  # memory shortage, for instance; do not spin
                    continue
                return
            if got < in_size:  # /dev/null has taken the place of the device: the session is closed
                return
            self.busy = True
            self.served += 1
            length, opcode, unique, nodeid, uid, gid, pid, extra, _ = unpack_header(buffer)
            if opcode == read_op:
                counts[read_op] += 1
                fh, offset, size, _, _, _, _ = unpack_read(buffer, in_size)
                req = Request(device, unique, nodeid, opcode, uid, gid, pid)
                inflight[unique] = req
                try:
                    result = ops.read(req, nodeid, fh, offset, size, data)
                    if type(result) is int:
                        if not 0 <= result <= size:
                            raise ValueError(f"read returned {result} for {size} bytes")
                        if inflight.pop(unique, None) is not None:
                            pack_header(out, head, out_size + result, 0, unique)
                            try:
                                write(fd, out[head : _PAGE + result])
                            except OSError as failure:
                                req.rejected(failure)
                    elif result is not DEFERRED:
                        req.reply(result)  # type: ignore[arg-type]  # an int was handled above
                except Exception as failure:
                    req.error(errno_of(failure))
            elif opcode in forget_ops:
                counts[opcode] += 1
                self._forget(opcode, nodeid, buffer)
            elif opcode == interrupt_op:
                counts[opcode] += 1
                self._interrupt(unique, abi.INTERRUPT_IN.unpack_from(buffer, in_size)[0])
            else:
                req = Request(device, unique, nodeid, opcode, uid, gid, pid)
                inflight[unique] = req
                if opcode < abi.OPCODES:
                    counts[opcode] += 1
                    try:
                        # Extensions (security contexts, supplementary groups) lie behind the body.
                        table[opcode](req, buffer[in_size : length - 8 * extra])
                    except Exception as failure:
                        req.error(errno_of(failure))
                else:
                    req.error(errno.ENOSYS)
            self.busy = False

    def _forget(self, opcode: int, nodeid: int, buffer: memoryview) -> None:
        """FORGET and BATCH_FORGET have no answer."""
        start = abi.IN_HEADER.size
        if opcode == Opcode.FORGET:
            self._device.forget(nodeid, abi.FORGET_IN.unpack_from(buffer, start)[0])
            return
        count, _ = abi.BATCH_FORGET_IN.unpack_from(buffer, start)
        start += abi.BATCH_FORGET_IN.size
        for place in range(start, start + count * abi.FORGET_ONE.size, abi.FORGET_ONE.size):
            self._device.forget(*abi.FORGET_ONE.unpack_from(buffer, place))

    def _interrupt(self, unique: int, target: int) -> None:
        """Somebody who waits for request ``target`` got a signal."""
        req = self._device.inflight.get(target)
        if req is not None:
            self._interrupted(req)
            return
        # Either it has just been answered (then the kernel refuses this with ENOENT), or another thread
        # has read it and not noted it down yet: EAGAIN has the kernel tell us once more.
        try:
            os.write(self._device.fd, abi.OUT_HEADER.pack(abi.OUT_HEADER.size, -errno.EAGAIN, unique))
        except OSError:
            pass
