"""How a demo's load reads: native files, a mount, or the library where nothing can be mounted."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from farside.bench.child import Child, tail
from farside.bench.stack import Stack
from farside.errors import FarsideError

_ANSWER_S = 30.0


class Spoke(Protocol):
    """One spoke, whose cache was empty when it began. `ready_s`: seconds that it took to get ready."""

    ready_s: float

    def status(self) -> dict[str, Any]:
        """What `farside status --json` says, in a mount with the mount's own part."""
        ...

    def job(self, io: str, ideal: float, log: Path) -> AbstractContextManager[Child]:
        """An epoch of the load that has begun; its child prints what `farside.bench.load` prints."""
        ...

    def close(self) -> None: ...


@contextmanager
def native_job(root: Path, io: str, ideal: float | None, log: Path) -> Iterator[Child]:
    """An epoch over ordinary files in `root`, in a process of its own."""
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "farside.bench.load", str(root), "--io", io]
    child = Child([*command, "--ideal", str(ideal)] if ideal else command, log)
    try:
        yield child
    finally:
        child.close(timeout=1.0)


class MountedSpoke:
    """A mount; the load knows nothing of it."""

    def __init__(self, stack: Stack, cache_size: int) -> None:
        self._stack = stack
        self.ready_s = stack.mount(cache_size, fresh=True)

    def status(self) -> dict[str, Any]:
        return self._stack.status()

    def job(self, io: str, ideal: float, log: Path) -> AbstractContextManager[Child]:
        return native_job(self._stack.mountpoint, io, ideal, log)

    def close(self) -> None:
        self._stack.unmount()


class LibrarySpoke:
    """A process that holds the library and runs the load in its threads; `io` is "pread" alone."""

    def __init__(self, stack: Stack, cache_size: int) -> None:
        self._child, self.ready_s = stack.start_library(cache_size, fresh=True)

    def status(self) -> dict[str, Any]:
        self._child.send(json.dumps({"status": {}}))
        for line in self._child.lines(_ANSWER_S):
            message = json.loads(line) if line else {}
            if "status" in message:
                status: dict[str, Any] = message["status"]
                return status
            break
        raise FarsideError(f"the library's process does not answer: {tail(self._child.log)}")

    @contextmanager
    def job(self, io: str, ideal: float, log: Path) -> Iterator[Child]:
        self._child.send(json.dumps({"run": {"ideal": ideal}}))
        yield self._child

    def close(self) -> None:
        self._child.close()
