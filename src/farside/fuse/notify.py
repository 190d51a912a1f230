"""Telling the kernel that what it remembers is out of date.

Such a message may block in the kernel: until a running lookup in the same directory is answered, or a
running read of the same pages. Whoever has to answer those must therefore never send it, so threads that
do nothing else do. Several, because one that is blocked must not delay the others.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from concurrent.futures import Future

from farside.fuse.device import Device

_log = logging.getLogger(__name__)
_THREADS = 4
_UNIMPORTANT = frozenset({errno.ENOENT, errno.ENODEV, errno.EPERM, errno.EBUSY, errno.ENOTDIR})


class _Batch:
    """Messages between two calls of ``flushed``."""

    __slots__ = ("future", "left")

    def __init__(self) -> None:
        self.left = 0
        self.future: Future[None] | None = None


def _resolve(futures: list[Future[None]]) -> None:
    for future in futures:
        if future.set_running_or_notify_cancel():
            future.set_result(None)


class Notifier:
    """A queue of messages and the threads that write them, started when first needed."""

    def __init__(self, device: Device, name: str) -> None:
        self._device = device
        self._name = name
        self._queue: deque[tuple[bytes, _Batch]] = deque()
        self._batches: deque[_Batch] = deque([_Batch()])
        self._changed = threading.Condition()
        self._threads = 0
        self._idle = 0
        self._closed = False

    def send(self, message: bytes) -> None:
        """Queue one message; returns at once."""
        with self._changed:
            if self._closed:
                return
            batch = self._batches[-1]
            batch.left += 1
            self._queue.append((message, batch))
            if self._idle:
                self._changed.notify()
            elif self._threads < _THREADS:
                self._threads += 1
                name = f"{self._name}-notify-{self._threads}"
                threading.Thread(target=self._run, name=name, daemon=True).start()

    def flushed(self) -> Future[None]:
        """Done when the kernel has taken everything that was queued before this call."""
        future: Future[None] = Future()
        with self._changed:
            self._batches[-1].future = future
            self._batches.append(_Batch())
            done = self._settle()
        _resolve(done)
        return future

    def close(self) -> None:
        """The mount is gone: nothing is remembered any more, so everything counts as told."""
        with self._changed:
            self._closed = True
            for _, batch in self._queue:
                batch.left -= 1
            self._queue.clear()
            done = self._settle()
            self._changed.notify_all()
        _resolve(done)

    def _settle(self) -> list[Future[None]]:
        """[locked] Take out the futures of all batches that are done, oldest first."""
        done = []
        while self._batches[0].left == 0 and (future := self._batches[0].future) is not None:
            self._batches.popleft()
            done.append(future)
        return done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._queue and not self._closed:
                    self._changed.wait()
                self._idle -= 1
                if self._closed:
                    return
                message, batch = self._queue.popleft()
            try:
                os.write(self._device.fd, message)
            except OSError as failure:
                if failure.errno not in _UNIMPORTANT:
                    _log.warning("the kernel refused an invalidation: %s", failure)
            with self._changed:
                batch.left -= 1
                done = self._settle()
            _resolve(done)
