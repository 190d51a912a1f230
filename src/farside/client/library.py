"""A portal read from Python, without a mount: the same spoke, in an event loop in a thread of its own.

What is cached is read in the thread that asks; everything else is handed to the loop, and the thread waits
for it, never for longer than the configured timeout and a little. All methods may be called from any thread
but the loop's own. A process that forks must make its libraries after it did.

What the mount does and this does not: check modes and owners (the hub's own rights decide alone), map files
into memory, and answer over the link a read that is already hanging in the cache's disk (later ones are).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import stat
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, AnyStr, ParamSpec, TypeVar

from farside.client.file import File
from farside.client.resolve import parts_of, resolve
from farside.config import SpokeConfig
from farside.errors import FarsideError, HubUnreachable, RemoteError, UsageError
from farside.metrics import ReadCounts
from farside.protocol.attributes import Attr, attr_of
from farside.spoke.directory import UNKNOWN, is_directory, split
from farside.spoke.openfile import OpenFile, Prefetcher
from farside.spoke.spoke import Spoke
from farside.spoke.start import start_spoke

__all__ = ["Library"]

T = TypeVar("T")
P = ParamSpec("P")

START_S = 60.0
"""What joining and opening the cache may take on top of the wait for the hub."""

MARGIN_S = 5.0
"""What a caller waits on top of the timeout, for a loop that is busy."""

CLOSE_S = 30.0

log = logging.getLogger("farside.client")


class Library:
    """One attached portal. Close it, or use it as a context manager; a cache directory has one owner.

    Paths are relative to the portal's root, ``str`` or ``bytes``; a leading slash means nothing. Symlinks
    are followed as long as they stay within the portal. Every method raises, beside what it names:

        HubUnreachable: something is not known or cached, and the hub did not answer within ``timeout_s``.
        OSError: as the file system at the hub would (ENOENT, ENOTDIR, EACCES, ELOOP …); EXDEV for a path
            that leads out of the portal.
        UsageError: it is closed (EBADF), or this is a fork of the process that made it.

    Switches of threads in the interpreter take up to 5 ms while other threads compute; a program that reads
    in several threads may want ``sys.setswitchinterval(0.0005)``, as the mount's own process has it.
    """

    def __init__(self, config: SpokeConfig) -> None:
        """Join if need be, open the cache, attach; all bounded in time.

        Raises:
            FarsideError: that did not work; nothing is left behind.
        """
        self.config = config
        self.reads = ReadCounts()
        self._spoke: Spoke
        self._prefetcher: Prefetcher
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._calls: set[asyncio.Task[Any]] = set()
        self._begun, self._ready = threading.Event(), Future[None]()
        self._thread = threading.Thread(target=self._run, name="farside-library", daemon=True)
        self._thread.start()
        try:
            self._ready.result(config.timeout_s + START_S)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise HubUnreachable("it did not start in time", hub=str(config.hub.endpoint)) from None
            raise

    def __enter__(self) -> Library:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of portal and cache; what is cached is on disk afterwards. Calls that wait fail.

        Bounded in time; may be called again.
        """
        with self._lock:
            first, self._closed = not self._closed, True
        if os.getpid() != self._pid:
            return
        if first and self._begun.wait(1.0):
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself: it could not start
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("the library's thread did not end within %g s", CLOSE_S)

    # -- what there is to read ---------------------------------------------------------------------

    def listdir(self, path: AnyStr) -> list[AnyStr]:
        """The names in a directory, sorted by their bytes, in the type of ``path``."""
        names = self.call(path, self._listdir, os.fsencode(path))
        return names if isinstance(path, bytes) else [os.fsdecode(name) for name in names]

    def stat(self, path: str | bytes, *, follow_symlinks: bool = True) -> os.stat_result:
        """Attributes as ``os.stat`` gives them; ``st_dev`` is 0, and access counts as modification."""
        parts = parts_of(os.fsencode(path))
        if parts and b".." not in parts:  # what is known for sure is said at once
            value = self._spoke.namespace.peek(*split(b"/".join(parts)))
            if value is not None and value is not UNKNOWN:
                attr = attr_of(value)
                if not (follow_symlinks and stat.S_ISLNK(attr.mode)):
                    self.check()
                    return _stat_result(attr)
        _, value = self.call(path, self._resolve, os.fsencode(path), follow_symlinks)
        return _stat_result(attr_of(value))

    def open(self, path: str | bytes) -> File:
        """A regular file for reading: the version of it that is the hub's at this moment."""
        return self.call(path, self._open, os.fsencode(path))

    def status(self) -> dict[str, Any]:
        """What ``farside status --json`` shows, without the mount; see docs/operating.md."""
        return self.call(b"", self._status)

    # -- for open files ----------------------------------------------------------------------------

    def check(self) -> None:
        """[any thread] Raises UsageError if nothing may be read any more.

        Called after a read of the cache, so that bytes count only if the cache was still ours.
        """
        if self._closed:
            raise UsageError("the library is closed", errno=errno.EBADF)
        if os.getpid() != self._pid:
            raise UsageError(
                "a library cannot be used in a fork of the process that made it",
                hint="make one in each process, each with a cache directory of its own, or use threads",
            )

    def attend(self, handle: OpenFile, offset: int, size: int) -> None:
        """[any thread] A hit that moves readahead on."""
        with contextlib.suppress(RuntimeError):  # the loop has ended; nothing is read ahead any more
            self._loop.call_soon_threadsafe(handle.advance, offset, size, True)

    def call(
        self, path: str | bytes, work: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """[any thread but the loop's] The result of ``work``, done in the loop; errors name ``path``."""
        self.check()
        answer = self._answer(work, *args, **kwargs)
        try:
            future = asyncio.run_coroutine_threadsafe(answer, self._loop)
        except RuntimeError:
            answer.close()
            raise UsageError("the library is closed", errno=errno.EBADF) from None
        try:
            return future.result(self.config.timeout_s + MARGIN_S)
        except CancelledError:
            self.check()
            raise UsageError("the library is closed", errno=errno.EBADF) from None
        except TimeoutError:
            future.cancel()
            raise HubUnreachable(
                f"no answer within {self.config.timeout_s:g} s",
                path=path,
                hub=str(self.config.hub.endpoint),
                hint="what is cached stays readable; the link heals by itself",
            ) from None
        except RemoteError as error:
            raise OSError(error.errno, error.message, path) from error
        except OSError as error:
            raise OSError(error.errno or errno.EIO, error.strerror or str(error), path) from error
        except BaseException:
            future.cancel()  # ^C: nobody waits for it any more
            raise

    def let_go(self, handle: OpenFile) -> None:
        """[any thread] A file was closed."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the cache with it
            self._loop.call_soon_threadsafe(handle.cached.release)

    async def value(self, path: bytes) -> bytes | None:
        """[loop] The value of a path without symlinks now; None when there is none."""
        return await self._spoke.namespace.lookup(*split(path))

    def handle(self, path: bytes, attr: Attr) -> OpenFile:
        """[loop] One version of a file, opened."""
        cached = self._spoke.cached_file(path, attr)
        cached.acquire()
        if self._prefetcher.awaits(path):
            self._prefetcher.opened(path)
        return self._prefetcher.open(path, cached)

    # -- inside the loop ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            if self._ready.done():
                log.exception("the library's thread failed")
            else:
                self._ready.set_exception(error)

    async def _serve(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._loop, self._task = asyncio.get_running_loop(), task
        self._begun.set()
        spoke = await start_spoke(self.config)
        try:
            self._spoke, self._prefetcher = spoke, Prefetcher(spoke)
            self._ready.set_result(None)
            await self._loop.create_future()  # until `close` cancels it
        finally:
            for call in list(self._calls):
                call.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)
            await spoke.close()

    async def _resolve(self, path: bytes, follow: bool) -> tuple[bytes, bytes]:
        return await resolve(self._spoke.namespace, path, follow_last=follow)

    async def _listdir(self, path: bytes) -> list[bytes]:
        found, value = await self._resolve(path, True)
        if not is_directory(value):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return [name for name, _ in (await self._spoke.namespace.directory(found)).snapshot()]

    async def _open(self, path: bytes) -> File:
        found, value = await self._resolve(path, True)
        attr = attr_of(value)
        if is_directory(value):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(attr.mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return File(self, found, attr)

    async def _status(self) -> dict[str, Any]:
        return self._spoke.status(self.reads.figures())

    async def _answer(self, work: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            async with asyncio.timeout(self.config.timeout_s):
                return await work(*args, **kwargs)
        except FarsideError as error:
            self._spoke.count_error(error)
            raise
        except TimeoutError:
            self._spoke.errors["timeout"] += 1
            raise
        finally:
            self._calls.discard(task)


def _stat_result(attr: Attr) -> os.stat_result:
    seconds = [ns // 1_000_000_000 for ns in (attr.mtime_ns, attr.mtime_ns, attr.ctime_ns)]
    more = {
        "st_atime": attr.mtime_ns / 1e9,
        "st_mtime": attr.mtime_ns / 1e9,
        "st_ctime": attr.ctime_ns / 1e9,
        "st_atime_ns": attr.mtime_ns,
        "st_mtime_ns": attr.mtime_ns,
        "st_ctime_ns": attr.ctime_ns,
        "st_blksize": 65536,
        "st_blocks": attr.blocks,
        "st_rdev": attr.rdev,
    }
    owners = (attr.mode, attr.fileid, 0, attr.nlink, attr.uid, attr.gid, attr.size)
    return os.stat_result((*owners, *seconds), more)
