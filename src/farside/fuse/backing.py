"""Backing ids: files that the kernel reads by itself for a passthrough open (kernel 6.9 and newer)."""

from __future__ import annotations

import errno
import os
import threading

from farside.fuse import abi
from farside.fuse.device import Device

_CAP_SYS_ADMIN = 21

_REASONS = {
    errno.EPERM: "no privilege (CAP_SYS_ADMIN)",
    errno.ENOTTY: "the kernel does not know it",
    errno.ELOOP: "the cache directory is on a stacked file system (overlay)",
    errno.EOPNOTSUPP: "the cache directory's file system cannot do it",
}


def has_sys_admin() -> bool:
    """Whether this process has CAP_SYS_ADMIN, without which the kernel gives no backing ids."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("CapEff:"):
                    return bool(int(line[7:], 16) >> _CAP_SYS_ADMIN & 1)
    except OSError:
        pass
    return False


class BackingFiles:
    """The bounded set of backing ids of one mount. May be used from any thread.

    Attributes:
        reason: why there is no passthrough, or "" when there is.
    """

    def __init__(self, device: Device, limit: int, reason: str) -> None:
        self.reason = reason
        self._device = device
        self._limit = limit
        self._ids: set[int] = set()
        self._reserved = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._ids)

    def open(self, fd: int) -> int:
        """Register an open regular file; returns its backing id, a number greater than 0.

        Raises OSError: ENOSPC when the set is full (read through the handler this time), EOPNOTSUPP when
        there is no passthrough at all; others as the kernel gave them. Refusals that would be the same
        for every file are remembered in ``reason``.
        """
        with self._lock:
            if self.reason:
                raise OSError(errno.EOPNOTSUPP, f"no passthrough: {self.reason}")
            if len(self._ids) + self._reserved >= self._limit:
                raise OSError(errno.ENOSPC, f"all {self._limit} backing files are in use")
            self._reserved += 1
        try:
            number = self._device.ioctl(abi.IOC_BACKING_OPEN, abi.BACKING_MAP.pack(fd, 0, 0))
        except OSError as failure:
            with self._lock:
                self._reserved -= 1
                if failure.errno in _REASONS and not self._device.closed:
                    self.reason = _REASONS[failure.errno]
            raise OSError(failure.errno, f"no backing file: {os.strerror(failure.errno or 0)}") from None
        with self._lock:
            self._reserved -= 1
            self._ids.add(number)
        return number

    def close(self, number: int) -> None:
        """Give an id back; open files that use it go on working. An unknown id is ignored."""
        with self._lock:
            if number not in self._ids:
                return
            self._ids.discard(number)
        try:
            self._device.ioctl(abi.IOC_BACKING_CLOSE, abi.BACKING_ID.pack(number))
        except OSError:
            pass  # the mount is gone, and its ids with it
