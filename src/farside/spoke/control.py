"""The control socket of a running mount: what ``farside status``, ``warm``, ``pin`` and ``unmount`` talk to.

Newline-delimited JSON over a Unix socket that only its owner (and root) can open; one request a connection:
``{"op": NAME, …}``, answered by ``{"progress": …}`` lines and one ``{"result": …}`` or ``{"error": …}``. When
the client goes away, or closes its sending side, what it asked for is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from farside.errors import EXIT_FAILED, FarsideError, MountError, UsageError

log = logging.getLogger("farside.control")

MAX_REQUEST = 1 << 20
Progress = Callable[[dict[str, Any]], None]
Operation = Callable[[dict[str, Any], Progress], Awaitable[dict[str, Any]]]


class ControlServer:
    """Serves named operations at a socket."""

    def __init__(self, path: Path, operations: dict[str, Operation]) -> None:
        self._path = path
        self._operations = operations
        self._server: asyncio.Server | None = None
        self._inode = 0
        self._work: set[asyncio.Future[dict[str, Any]]] = set()

    async def start(self) -> None:
        """Raises MountError: the runtime directory belongs to somebody else or cannot be written."""
        directory = self._path.parent
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = os.lstat(directory)
            if owner.st_uid != os.geteuid() or owner.st_mode & 0o022:
                raise MountError("the runtime directory can be written by others", path=str(directory))
            self._path.unlink(missing_ok=True)  # left over from a crash: the mount point is ours by now
            self._server = await asyncio.start_unix_server(self._serve, self._path, limit=MAX_REQUEST)
            os.chmod(self._path, 0o600)
            self._inode = os.lstat(self._path).st_ino
        except OSError as error:
            raise MountError(
                f"cannot make the control socket: {error.strerror}", path=str(self._path)
            ) from error

    def close(self) -> None:
        """Take no more requests, and cancel those under way."""
        if self._server is None:
            return
        self._server.close()
        for work in self._work:
            work.cancel()
        with contextlib.suppress(OSError):
            if os.lstat(self._path).st_ino == self._inode:  # else the next mount is here already
                self._path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def say(line: dict[str, Any]) -> None:
            if not writer.is_closing():
                writer.write(json.dumps(line).encode() + b"\n")

        try:
            line = await asyncio.wait_for(reader.readline(), 10.0)
            if line:
                work = asyncio.ensure_future(self._run(line, lambda p: say({"progress": p})))
                self._work.add(work)
                work.add_done_callback(self._work.discard)
                gone = asyncio.ensure_future(reader.read(1))
                try:
                    await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                    if work.done() and not work.cancelled():
                        say(work.result())
                finally:
                    gone.cancel()
                    work.cancel()
                    await asyncio.gather(work, gone, return_exceptions=True)
            await asyncio.wait_for(writer.drain(), 5.0)
        except (OSError, ValueError, TimeoutError):
            pass  # the client is gone or talks nonsense
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), 1.0)

    async def _run(self, line: bytes, progress: Progress) -> dict[str, Any]:
        try:
            request = json.loads(line)
            name = request.get("op") if isinstance(request, dict) else None
            operation = self._operations.get(str(name))
            if operation is None:
                raise UsageError(f"no such operation: {name!r}", hint="is the mount of an older version?")
            return {"result": await operation(request, progress)}
        except FarsideError as e:
            return _error(str(e), e.errno, e.exit_code, "")
        except OSError as e:
            return _error(e.strerror or str(e), e.errno or errno.EIO, EXIT_FAILED, "")
        except (ValueError, KeyError, TypeError) as e:
            return _error(f"the request is malformed: {e}", errno.EINVAL, EXIT_FAILED, "")
        except Exception as e:
            log.exception("a request at the control socket failed")
            return _error(f"the mount failed to do it: {e!r}", errno.EIO, EXIT_FAILED, "")


def _error(message: str, number: int, exit_code: int, hint: str) -> dict[str, Any]:
    return {"error": {"message": message, "errno": number, "exit_code": exit_code, "hint": hint}}
