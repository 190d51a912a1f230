"""Whether the cache's disk can be used at the moment. A sick disk means reading through, not errors.

Two degrees: after a failed write nothing new is cached for a while (what is there is still read); while a
    call is
stuck in the disk nothing is read from it either. One warning per kind of trouble, then silence until it
heals.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("farside.cache")

RETRY_S = 10.0
"""After a failed write the next one is tried so many seconds later."""


class DiskHealth:
    """Watches calls into the disk and remembers failures. All methods may be called from any thread.

    Args:
        slow_s: a call that takes longer than this many seconds means that the disk hangs.
        on_change: called with the new ``reason`` (None: healed) from whatever thread noticed.
    """

    def __init__(self, slow_s: float, on_change: Callable[[str | None], None]) -> None:
        self.ops: dict[int, float] = {}
        """Thread id → monotonic second at which its call into the disk began; 0.0 when it is in none."""
        self.reads_off = False
        self.reason: str | None = None
        self.failures = 0
        self.stalls = 0
        self.slow_s = slow_s
        self.retry_s = RETRY_S
        self._on_change = on_change
        self._retry_at = 0.0
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="farside-cache-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2.0)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around calls into the disk that somebody waits for; nested ones count as one."""
        thread = threading.get_ident()
        outer = self.ops.get(thread, 0.0)
        if not outer:
            self.ops[thread] = time.monotonic()
        try:
            yield
        finally:
            if not outer:
                self.ops[thread] = 0.0

    def stuck_s(self) -> float:
        """How long the longest call that is in the disk now has taken, seconds; 0.0 when none is."""
        started = [at for at in list(self.ops.values()) if at]
        return time.monotonic() - min(started) if started else 0.0

    def may_write(self) -> bool:
        """Whether a new write may be tried. In bypass only one caller in ``RETRY_S`` is let through."""
        if self.reason is None:
            return True
        if self.reads_off:
            return False
        with self._lock:
            now = time.monotonic()
            if now < self._retry_at:
                return False
            self._retry_at = now + self.retry_s
            return True

    def failed(self, what: str, error: OSError) -> None:
        """A call failed: bypass until a later write works."""
        self.failures += 1
        self._set(f"{what}: {error.strerror or error}", kind=f"{what} {error.errno}")

    def worked(self) -> None:
        """A write went through: the disk is well again."""
        if self.reason is not None and not self.reads_off:
            self._set(None)

    def check(self) -> None:
        """Turns reading off while a call hangs, and on again when no call does."""
        stuck = self.stuck_s()
        if stuck > self.slow_s:
            if not self.reads_off:
                self.stalls += 1
                self.reads_off = True
                self._set(f"the disk does not answer (a call hangs for {stuck:.1f} s)", kind="stall")
        elif self.reads_off:
            self.reads_off = False
            self._set(None)

    def _set(self, reason: str | None, kind: str = "") -> None:
        with self._lock:
            changed = (reason is None) != (self.reason is None)
            self.reason = reason
            self._retry_at = time.monotonic() + self.retry_s
            warn = bool(reason) and kind not in self._warned
            if warn:
                self._warned.add(kind)
        if warn:
            log.warning("cache bypassed, reading through: %s", reason)
        elif changed and reason is None:
            log.info("cache in use again")
        if changed:
            self._on_change(reason)

    def _watch(self) -> None:
        while not self._stop.wait(min(0.5, self.slow_s / 4)):
            self.check()
