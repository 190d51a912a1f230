"""Starts ``farside mount`` again as a process of its own and waits until it is mounted or has failed."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from farside.cli.process import READY_FD, open_log
from farside.errors import MountError

_KILL_GRACE_S = 5.0


class BackgroundFailure(MountError):
    """The background process failed; its own message and exit status."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_in_background(argv: Sequence[str], log_file: Path, timeout_s: float) -> int:
    """Runs ``farside`` with the same arguments in a new session; returns its pid once it is ready.

    Raises:
        UsageError: the log file cannot be written.
        BackgroundFailure: the process failed before it was ready.
        MountError: it was not ready within ``timeout_s``; it has been ended.
    """
    log = open_log(log_file)
    reader, writer = os.pipe()
    try:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "farside.cli", *argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(writer,),
            env={**os.environ, READY_FD: str(writer)},
            start_new_session=True,
        )
    finally:
        os.close(log)
        os.close(writer)
    try:
        answer = _read_line(reader, timeout_s)
    except BaseException:  # ^C included: nobody wants half a mount
        _end(child)
        raise
    finally:
        os.close(reader)
    if answer is None:
        _end(child)
        raise MountError(
            f"the mount was not ready within {timeout_s:.0f} s and was ended", hint=f"see {log_file}"
        )
    if not answer:
        status = child.wait(_KILL_GRACE_S)
        raise MountError(f"the mount process ended with status {status}", hint=f"see {log_file}")
    message = json.loads(answer)
    if "error" in message:
        child.wait(_KILL_GRACE_S)
        raise BackgroundFailure(message["error"], message["exit_code"])
    return int(message["pid"])


def _read_line(fd: int, timeout_s: float) -> bytes | None:
    """What the child wrote until it closed its end; None when it took too long."""
    deadline = time.monotonic() + timeout_s
    data = b""
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            return None
        piece = os.read(fd, 65536)
        if not piece:
            break
        data += piece
    return data


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(_KILL_GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(_KILL_GRACE_S)
