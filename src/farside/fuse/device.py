"""The open `/dev/fuse` of one mount: its file descriptor and the requests that wait for an answer."""

from __future__ import annotations

import fcntl
import logging
import os
from typing import TYPE_CHECKING

from farside.fuse.abi import Opcode

if TYPE_CHECKING:
    from farside.fuse.operations import Operations
    from farside.fuse.request import Request

_log = logging.getLogger(__name__)


class Device:
    """Shared by the session, its threads and every request that is still to be answered.

    The number ``fd`` stays valid as long as anybody holds the device: ``close`` puts `/dev/null` in its
    place, so that an answer that comes late from another thread can never land in somebody else's file.
    """

    def __init__(self, fd: int, ops: Operations) -> None:
        self.fd = fd
        self.inflight: dict[int, Request] = {}
        self.closed = False
        self._ops = ops

    def close(self) -> None:
        """Let the kernel drop the connection. Answers that come later go nowhere."""
        self.closed = True
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.dup2(null, self.fd, inheritable=False)
        finally:
            os.close(null)
        self.inflight.clear()

    def ioctl(self, number: int, argument: bytes) -> int:
        """ioctl on the device; returns what the call returned. Raises OSError."""
        result: int = fcntl.ioctl(self.fd, number, bytearray(argument))
        return result

    def forget(self, nodeid: int, nlookup: int) -> None:
        """Give lookups back to the file system, whoever noticed that the kernel no longer holds them."""
        try:
            self._ops.forget(nodeid, nlookup)
        except Exception:
            _log.exception("forget of node %d failed", nodeid)

    def release(self, req: Request, fh: int) -> None:
        """Release a handle whose open never reached the kernel."""
        try:
            if req.opcode == Opcode.OPENDIR:
                self._ops.releasedir(req, req.nodeid, fh)
            else:
                self._ops.release(req, req.nodeid, fh)
        except Exception:
            _log.exception("release of node %d failed", req.nodeid)

    def __del__(self) -> None:
        try:
            os.close(self.fd)
        except OSError:
            pass
