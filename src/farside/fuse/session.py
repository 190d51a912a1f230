"""A mount: negotiation with the kernel, the threads that serve it, and its end."""

from __future__ import annotations

import atexit
import errno
import itertools
import logging
import os
import select
import struct
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future

from farside.fuse import abi, mounting
from farside.fuse.abi import Capability
from farside.fuse.backing import BackingFiles, has_sys_admin
from farside.fuse.device import Device
from farside.fuse.dispatch import Dispatcher
from farside.fuse.mounting import MountOptions
from farside.fuse.notify import Notifier
from farside.fuse.operations import Operations
from farside.fuse.reader import REQUEST_ROOM, Reader
from farside.fuse.records import InitInfo
from farside.fuse.request import Request
from farside.fuse.signals import waiter_should_go

_log = logging.getLogger(__name__)

_INIT_TIMEOUT_S = 10.0
_MAX_WRITE = 1 << 20
_MAX_BACKGROUND = 256  # readahead requests that the kernel may have under way
_STACK_DEPTH = 1  # files of a plain file system may back ours, and ours may still be a layer of an overlay
_TICK_S = 0.5  # how often stuck threads are looked for
_WATCH_S = 0.05  # how often a waiter that had a harmless signal is looked at again
_MAX_THREADS = 32

_WANTED = (
    Capability.ASYNC_READ
    | Capability.EXPORT_SUPPORT
    | Capability.BIG_WRITES
    | Capability.DO_READDIRPLUS
    | Capability.READDIRPLUS_AUTO
    | Capability.ASYNC_DIO
    | Capability.PARALLEL_DIROPS
    | Capability.MAX_PAGES
    | Capability.CACHE_SYMLINKS
    | Capability.EXPLICIT_INVAL_DATA
    | Capability.INIT_EXT
    | Capability.DIRECT_IO_ALLOW_MMAP
    | Capability.PASSTHROUGH
)


class Session:
    """One mount and its threads.

    ``mount``, then ``start``; ``unmount`` at the end, from any thread, any number of times. A mount that
    the process forgot is unmounted when the interpreter ends; after a kill -9 it stays as a dead mount
    for ``cleanup_stale``.

    Attributes:
        on_closed: called once, in a FUSE thread, when the mount is gone, whoever unmounted it.
        info: what was agreed with the kernel; None before ``mount``.
    """

    def __init__(self, mountpoint: str, ops: Operations, *, options: MountOptions, threads: int = 2) -> None:
        if options.max_read % 4096 or not 4096 <= options.max_read <= 1 << 20:
            raise ValueError("max_read must be a multiple of 4096, at most 1 MiB")
        self.on_closed: Callable[[], None] | None = None
        self.info: InitInfo | None = None
        self._mountpoint = mounting.resolve(mountpoint)
        self._ops = ops
        self._options = options
        self._initial_threads = max(1, threads)
        self._lock = threading.Lock()
        self._readers: list[Reader] = []
        self._numbers = itertools.count()
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._watched: dict[int, Request] = {}
        self._device: Device | None = None
        self._notifier: Notifier | None = None
        self._backing: BackingFiles | None = None
        self._device_number = ""
        self._dispatcher = Dispatcher(ops)

    # ------------------------------------------------------------------ begin

    def mount(self) -> None:
        """Mount and agree with the kernel. Requests wait until ``start``.

        Raises OSError: see ``mounting.open_mount``; EPROTO when the kernel is too old; ETIMEDOUT when it
        does not say hello within 10 s.
        """
        fd, _ = mounting.open_mount(self._mountpoint, self._options)
        device = self._device = Device(fd, self._ops)
        try:
            self.info = self._negotiate(fd)
            entry = mounting.mount_entry(self._mountpoint)
            if entry is not None:
                self._device_number = entry.device
                mounting.set_readahead(entry.device, self._options.readahead_kb)
            self._notifier = Notifier(device, "fuse")
            self._backing = BackingFiles(device, self._options.max_backing, self._no_passthrough(self.info))
            self._ops.init(self, self.info)
        except BaseException:
            self._closed.set()
            device.close()
            mounting.unmount(self._mountpoint, lazy=True)
            raise
        _register_for_exit(self)

    def _negotiate(self, fd: int) -> InitInfo:
        """Answer INIT."""
        buffer = bytearray(_MAX_WRITE + REQUEST_ROOM)
        deadline = time.monotonic() + _INIT_TIMEOUT_S
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                raise TimeoutError(errno.ETIMEDOUT, "the kernel does not begin to talk", self._mountpoint)
            length = os.readv(fd, [buffer])
            _, opcode, unique, *_ = abi.IN_HEADER.unpack_from(buffer)
            if opcode != abi.Opcode.INIT:
                raise OSError(
                    errno.EPROTO, "the kernel began with something else than INIT", self._mountpoint
                )
            major, minor, max_readahead, flags = abi.INIT_IN.unpack_from(buffer, abi.IN_HEADER.size)
            if major > abi.KERNEL_MAJOR:  # say what we speak; the kernel asks again in that version
                payload = abi.INIT_OUT.pack(abi.KERNEL_MAJOR, *[0] * 12)
                os.write(fd, abi.OUT_HEADER.pack(16 + len(payload), 0, unique) + payload)
                continue
            break
        if (major, minor) < (abi.KERNEL_MAJOR, abi.MINOR_NEEDED):
            os.write(fd, abi.OUT_HEADER.pack(16, -errno.EPROTO, unique))
            raise OSError(
                errno.EPROTO,
                f"the kernel speaks FUSE {major}.{minor}; {abi.KERNEL_MAJOR}.{abi.MINOR_NEEDED} is needed"
                " (kernel 5.4 or newer)",
                self._mountpoint,
            )
        offered = Capability(flags)
        flags2_at = abi.IN_HEADER.size + abi.INIT_IN.size
        if offered & Capability.INIT_EXT and length >= flags2_at + 4:
            offered = Capability(flags | struct.unpack_from("<I", buffer, flags2_at)[0] << 32)
        wanted = _WANTED
        if not self._options.passthrough:
            wanted &= ~Capability.PASSTHROUGH
        if type(self._ops).readdirplus is Operations.readdirplus:
            wanted &= ~(Capability.DO_READDIRPLUS | Capability.READDIRPLUS_AUTO)
        agreed = offered & wanted
        passthrough = bool(agreed & Capability.PASSTHROUGH)
        payload = abi.INIT_OUT.pack(
            *(abi.KERNEL_MAJOR, min(minor, abi.MINOR_SPOKEN), max_readahead, agreed & 0xFFFFFFFF),
            *(_MAX_BACKGROUND, _MAX_BACKGROUND * 3 // 4, _MAX_WRITE, 1),
            *(max(self._options.max_read, _MAX_WRITE) // 4096, 0, agreed >> 32),
            *(_STACK_DEPTH if passthrough else 0, 0),
        )
        os.write(fd, abi.OUT_HEADER.pack(16 + len(payload), 0, unique) + payload)
        return InitInfo(minor, max_readahead, offered, agreed, passthrough)

    def _no_passthrough(self, info: InitInfo) -> str:
        if info.passthrough:
            return "" if has_sys_admin() else "no privilege (CAP_SYS_ADMIN)"
        if not self._options.passthrough:
            return "switched off"
        if info.minor < abi.MINOR_PASSTHROUGH:
            return f"the kernel is older than 6.9 (FUSE {abi.KERNEL_MAJOR}.{info.minor})"
        return "the kernel was built without it"

    def start(self) -> None:
        """Start the threads."""
        for _ in range(self._initial_threads):
            self.add_thread()
        threading.Thread(target=self._watch, name="fuse-watch", daemon=True).start()

    def add_thread(self) -> None:
        """One more thread that reads requests. The session does this by itself when all are stuck."""
        reader = Reader(
            self._mounted(),
            self._ops,
            self._dispatcher,
            max_read=self._options.max_read,
            max_write=_MAX_WRITE,
            interrupted=self._interrupted,
            gone=self._finish,
            name=f"fuse-{next(self._numbers)}",
        )
        with self._lock:
            self._readers.append(reader)
        reader.start()

    def _mounted(self) -> Device:
        if self._device is None:
            raise OSError(errno.ENOTCONN, "not mounted", self._mountpoint)
        return self._device

    # ------------------------------------------------------------------ while it runs

    def _interrupted(self, req: Request) -> None:
        """Somebody who waits for ``req`` got a signal. The kernel says so only once per request, so a
        waiter that stays is looked at again until it is answered: the next signal may be the kill."""
        if waiter_should_go(req.pid, reading=req.opcode == abi.Opcode.READ):
            req.interrupt()
        else:
            self._watched[req.unique] = req
            self._wake.set()

    def _watch(self) -> None:
        """Look after waiters that had a signal, and after threads that hang in a handler."""
        last: list[int] = []
        next_tick = time.monotonic() + _TICK_S
        while not self._closed.is_set():
            if self._watched:
                self._closed.wait(_WATCH_S)
            else:
                self._wake.wait(max(0.0, next_tick - time.monotonic()))
            self._wake.clear()
            for unique, req in list(self._watched.items()):
                if req.answered:
                    del self._watched[unique]
                elif waiter_should_go(req.pid, reading=req.opcode == abi.Opcode.READ):
                    del self._watched[unique]
                    req.interrupt()
            if time.monotonic() < next_tick:
                continue
            next_tick = time.monotonic() + _TICK_S
            readers = self._readers
            served = [reader.served for reader in readers]
            if served == last and all(reader.busy for reader in readers) and len(readers) < _MAX_THREADS:
                _log.warning("all %d FUSE threads hang in a handler; starting one more", len(readers))
                self.add_thread()
            last = served

    def invalidate_inode(self, nodeid: int, offset: int = 0, length: int = 0) -> None:
        """Have the kernel forget attributes and cached pages of a node (``length`` 0: to the end; a
        negative ``offset``: attributes only). Returns at once; see ``invalidated``."""
        payload = abi.INVAL_INODE_OUT.pack(nodeid, offset, length)
        self._notify(abi.NOTIFY_INVAL_INODE, payload)

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        """Have the kernel forget a name, known or known not to exist. Returns at once."""
        payload = abi.INVAL_ENTRY_OUT.pack(parent, len(name), 0) + name + b"\0"
        self._notify(abi.NOTIFY_INVAL_ENTRY, payload)

    def _notify(self, code: int, payload: bytes) -> None:
        if self._notifier is not None:
            self._notifier.send(abi.OUT_HEADER.pack(16 + len(payload), code, 0) + payload)

    def invalidated(self) -> Future[None]:
        """Done when the kernel has carried out every invalidation asked for so far.

        It may have to wait for a running read of the same pages or a lookup in the same directory to be
        answered: never wait for this in a place that such an answer depends on, and bound the wait.
        """
        if self._notifier is None:
            raise OSError(errno.ENOTCONN, "not mounted", self._mountpoint)
        return self._notifier.flushed()

    def backing_open(self, fd: int) -> int:
        """Register an open regular file for passthrough; see ``BackingFiles.open``."""
        if self._backing is None:
            raise OSError(errno.ENOTCONN, "not mounted", self._mountpoint)
        return self._backing.open(fd)

    def backing_close(self, backing_id: int) -> None:
        """Give a backing id back."""
        if self._backing is not None:
            self._backing.close(backing_id)

    @property
    def passthrough(self) -> bool:
        """Whether files can be opened in passthrough, as far as is known by now."""
        return self._backing is not None and not self._backing.reason

    @property
    def passthrough_reason(self) -> str:
        """Why not, or ""."""
        return self._backing.reason if self._backing is not None else "not mounted"

    @property
    def threads(self) -> int:
        """Threads that read requests."""
        return len(self._readers)

    @property
    def stats(self) -> dict[str, int]:
        """Requests so far, by opcode name in lower case; only those that occurred."""
        readers = self._readers
        totals = {op.name.lower(): sum(reader.counts[op] for reader in readers) for op in abi.Opcode}
        return {name: count for name, count in totals.items() if count}

    # ------------------------------------------------------------------ end

    @property
    def closed(self) -> bool:
        """Whether the mount is gone (or never came up)."""
        return self._closed.is_set()

    def unmount(self, *, lazy: bool = True) -> None:
        """Take the mount away. ``lazy`` works also while it is in use: programs that have files open keep
        them until they close them, as long as this process serves them. Done before: nothing happens.

        Raises OSError: EBUSY when in use and not ``lazy``.
        """
        if self._device is None or self.closed:
            return
        entry = mounting.mount_entry(self._mountpoint)
        if entry is None or entry.device != self._device_number:
            return  # unmounted already; what is there now belongs to somebody else
        mounting.unmount(self._mountpoint, lazy=lazy)

    def join(self, timeout: float) -> bool:
        """Wait for the end of the mount and its threads, at most ``timeout`` seconds. False: not over."""
        deadline = time.monotonic() + timeout
        if not self._closed.wait(timeout):
            return False
        for reader in list(self._readers):
            if reader.thread is not threading.current_thread():
                reader.thread.join(max(0.0, deadline - time.monotonic()))
        return not any(
            reader.thread.is_alive()
            for reader in self._readers
            if reader.thread is not threading.current_thread()
        )

    def _finish(self) -> None:
        """[FUSE thread] The kernel says that the mount is gone; the first thread to hear it cleans up."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        self._wake.set()
        assert self._device is not None and self._notifier is not None
        self._device.close()
        self._notifier.close()
        try:
            self._ops.destroy()
        except Exception:
            _log.exception("destroy failed")
        if self.on_closed is not None:
            try:
                self.on_closed()
            except Exception:
                _log.exception("on_closed failed")


_at_exit: weakref.WeakSet[Session] = weakref.WeakSet()


def _register_for_exit(session: Session) -> None:
    if not _at_exit:
        atexit.register(_unmount_all)
    _at_exit.add(session)


def _unmount_all() -> None:
    for session in list(_at_exit):
        try:
            session.unmount(lazy=True)
        except OSError as failure:
            _log.warning("%s", failure)
