"""Talks to running mounts over their control sockets.

One request per connection: a line of JSON ``{"op": NAME, …}``. The answer is any number of
``{"progress": {…}}`` lines, then one ``{"result": {…}}`` or
``{"error": {"message", "errno", "exit_code", "hint"}}``. Paths in it are relative to the mount, as
``os.fsdecode`` writes them (JSON escapes keep bytes that are not UTF-8). Closing the connection early
cancels what was asked for.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from farside.cli.mounttable import farside_mounts
from farside.config import control_socket, runtime_dir
from farside.errors import EXIT_FAILED, MountError, ProtocolError

Progress = Callable[[dict[str, Any]], None]


class RequestFailed(MountError):
    """The mount refused or failed a request; message, errno, hint and exit status are the mount's."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(
            str(error.get("message", "failed")), errno=error.get("errno"), hint=str(error.get("hint") or "")
        )
        self.exit_code = int(error.get("exit_code") or EXIT_FAILED)


class Place(NamedTuple):
    """A path inside a running mount: the mount's control socket and root, and the path relative to it."""

    socket: Path
    mountpoint: Path
    relative: str


def find(path: Path) -> Place:
    """The running mount that contains ``path``.

    The path is first taken as it is written; its symlinks are resolved only when no mount is found that
    way, since resolving asks the mount.

    Raises:
        MountError: the path is in no running farside mount.
    """
    for candidate in (path, Path(os.path.realpath(path.parent)) / path.name, Path(os.path.realpath(path))):
        for directory in (candidate, *candidate.parents):
            address = control_socket(directory)
            if address.exists():
                relative = os.path.relpath(candidate, directory)
                return Place(address, directory, "" if relative == "." else relative)
    for mountpoint in farside_mounts():
        if path.is_relative_to(mountpoint):
            raise MountError(
                "this mount cannot be talked to: it belongs to another user, or its process is gone",
                path=str(mountpoint),
                hint="be the user who mounted it; `farside unmount` clears what a crash left",
            )
    raise MountError("not inside a running farside mount", path=str(path), hint="`farside status` lists them")


def sockets() -> list[Path]:
    """The control sockets that exist, of running mounts and of crashed ones."""
    return sorted(runtime_dir().glob("*.sock"))


def owner_pid(address: Path, timeout_s: float = 5.0) -> int | None:
    """The process that listens at a control socket, None when nobody does."""
    try:
        with _connect(address, timeout_s) as sock:
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return None
    return int(struct.unpack("3i", credentials)[0])


def call(
    address: Path,
    op: str,
    arguments: dict[str, Any] | None = None,
    *,
    on_progress: Progress | None = None,
    silence_s: float = 30.0,
) -> dict[str, Any]:
    """Sends one request and returns its result; ``silence_s`` bounds the wait for each line.

    Raises:
        RequestFailed: the mount's own answer.
        MountError: no process answers at the socket, or it is silent for too long.
        ProtocolError: the answer is not what this version expects.
    """
    try:
        with _connect(address, silence_s) as sock:
            sock.sendall(json.dumps({"op": op, **(arguments or {})}).encode() + b"\n")
            with sock.makefile("rb") as answers:
                for line in answers:
                    answer = json.loads(line)
                    if "result" in answer:
                        return dict(answer["result"])
                    if "error" in answer:
                        raise RequestFailed(answer["error"])
                    if on_progress is not None and "progress" in answer:
                        on_progress(answer["progress"])
    except TimeoutError:
        raise MountError(f"the mount process did not answer within {silence_s:.0f} s") from None
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise MountError(
            "the mount process is gone", hint="clear what it left with `farside unmount`, then mount again"
        ) from error
    except PermissionError as error:
        raise MountError("the mount belongs to another user", hint="be that user") from error
    except (ConnectionError, ValueError) as error:
        raise ProtocolError(f"the mount process answered nonsense or broke off: {error}") from error
    raise ProtocolError("the mount process broke off before it answered")


def _connect(address: Path, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout_s)
        sock.connect(str(address))
    except BaseException:
        sock.close()
        raise
    return sock
