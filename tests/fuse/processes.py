"""Processes of their own for what maps a file or may hang: a page fault holds the GIL of the process that
serves the mount."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

from farside.fuse import Session

DEADLINE_S = 20.0

Mount = Callable[..., Session]

_children: list[subprocess.Popen[str]] = []


def wait_until(condition: Callable[[], bool], what: str = "condition") -> None:
    """Poll with a deadline; for what cannot be waited on in another way (kernel state)."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} not reached within {DEADLINE_S} s"
        threading.Event().wait(0.005)


def run_python(code: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own; its arguments are in ``sys.argv[1:]``."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def start_python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a script and return once it has printed a line."""
    child = subprocess.Popen(
        [sys.executable, "-u", "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    _children.append(child)
    assert child.stdout is not None
    assert child.stdout.readline(), "the script ended early"
    return child


def end_children() -> None:
    """Ends what a failed test has left running."""
    while _children:
        child = _children.pop()
        if child.poll() is None:
            child.kill()
            child.wait(DEADLINE_S)
        if child.stdout is not None:
            child.stdout.close()
