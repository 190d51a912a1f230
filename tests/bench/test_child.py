"""Helper processes: ready in time or an error that says why, and gone at the end."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from farside.bench.child import Child, tail
from farside.errors import FarsideError

pytestmark = pytest.mark.process


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def test_the_ready_line_is_returned(tmp_path: Path) -> None:
    script = "import time; print('hello'); print('ready at 5', flush=True); time.sleep(60)"
    child = Child(python(script), tmp_path / "log")
    assert child.wait_ready("ready") == "ready at 5"
    assert child.running
    child.close()
    assert not child.running
    child.close()


def test_one_that_dies_says_why(tmp_path: Path) -> None:
    child = Child(python("raise SystemExit('no such luck')"), tmp_path / "log")
    with pytest.raises(FarsideError, match="no such luck"):
        child.wait_ready("ready")


def test_one_that_never_gets_ready_is_ended(tmp_path: Path) -> None:
    child = Child(python("import time; time.sleep(60)"), tmp_path / "log")
    with pytest.raises(FarsideError, match="did not get ready"):
        child.wait_ready("ready", timeout=0.3)
    assert not child.running


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); "
        "time.sleep(60)"
    )
    child = Child(python(script), tmp_path / "log")
    child.wait_ready("ready")
    child.close(timeout=0.2)
    assert not child.running


def test_lines_tick_while_nothing_comes(tmp_path: Path) -> None:
    child = Child(python("print('a', flush=True); input()"), tmp_path / "log")
    seen = []
    for line in child.lines(0.05):
        seen.append(line)
        if line is None and "a" in seen:
            break
    child.close()
    assert "a" in seen


def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from farside.bench.child import Child; "
        f"log = Path({str(tmp_path / 'log')!r}); "
        "c = Child([sys.executable, '-c', 'import sys; sys.stdin.read()'], log); "
        "print('ready', c.pid, flush=True); time.sleep(60)"
    )
    parent = Child(python(script), tmp_path / "parent.log")
    pid = int(parent.wait_ready("ready").split()[1])
    os.kill(parent.pid, 9)
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)
    parent.close()


def alive(pid: int) -> bool:
    """Whether it runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_the_tail_of_a_log_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert tail(tmp_path / "nothing") == ""
