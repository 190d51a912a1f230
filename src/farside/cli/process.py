"""What a long-running farside process sets up: its log, its limit of open files, and how it says "ready"."""

from __future__ import annotations

import json
import logging
import os
import resource
import socket
import sys
import time
from pathlib import Path

import click

from farside.cli.main import explain
from farside.errors import UsageError

READY_FD = "FARSIDE_READY_FD"
"""Environment of a background child: the pipe on which it says once that it is ready, or why not."""


class _Utc(logging.Formatter):
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def converter(self, seconds: float | None = None) -> time.struct_time:
        return time.gmtime(seconds)


def set_up_logging(debug: bool) -> None:
    """Log lines go to stderr, with UTC time stamps."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Utc("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if debug else logging.INFO)


def open_log(path: Path) -> int:
    """A file descriptor to append log lines to; the directory is made.

    Raises:
        UsageError: the file cannot be opened for writing.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise UsageError(
            f"cannot write the log file: {error.strerror}", path=str(path), hint="choose another --log-file"
        ) from error


def raise_file_limit() -> None:
    """As many open files as the hard limit allows: every cached file that is open needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def warn_insecure(where: str) -> None:
    """Says loudly on stderr that the link is open."""
    click.secho(
        f"farside: WARNING: --insecure: no encryption and no check of who is who at {where}; "
        "whoever reaches that port can read the data, and whoever is in between can change them",
        err=True,
        fg="red",
        bold=True,
    )


class Readiness:
    """Says once that this process is ready, or why it failed: to the waiting parent and to systemd."""

    def __init__(self) -> None:
        fd = os.environ.pop(READY_FD, "")
        self._fd = int(fd) if fd else -1
        if self._fd >= 0:
            os.set_inheritable(self._fd, False)

    @property
    def has_parent(self) -> bool:
        """Whether this process is the background child of a ``farside mount`` that waits for it."""
        return self._fd >= 0

    def ready(self) -> None:
        self._tell({"pid": os.getpid()})
        notify_systemd("READY=1")

    def failed(self, error: Exception) -> None:
        """Tells the parent; does nothing once ready was said."""
        text, code = explain(error)
        self._tell({"error": text, "exit_code": code})

    def _tell(self, message: dict[str, object]) -> None:
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            os.write(fd, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            pass  # the parent was interrupted; the mount is there all the same
        finally:
            os.close(fd)


def notify_systemd(state: str) -> None:
    """Sends a state to the service manager; does nothing when it did not ask for it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)
        except OSError as error:
            logging.getLogger(__name__).warning("cannot notify the service manager: %s", error)
