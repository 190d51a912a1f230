"""The cache directory: its lock, format file, ledger, pins, and where files lie in it.

    farside-cache.json      format number, chunk size, id
    lock                    flock of the process that owns the directory; dies with it
    ledger                  an upper bound of the bytes under data/, written before they are used
    pins                    keys of the files that must not be evicted
    data/xx/<32 hex>.data   sparse, the original's size and offsets
    data/xx/<32 hex>.meta   side-car

Names that are not of this pattern are never touched.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import struct

import xxhash

from farside.errors import CacheError
from farside.spoke.disk import DiskIO, read_all, write_atomically

FORMAT = 1
FORMAT_FILE = "farside-cache.json"
NAMESPACE_DB = "namespace.db"
SEALED = 0o100
"""Mode bit of a data file that the kernel may have mapped (passthrough): it is unlinked, never punched.

It lies in the mode so that it outlives a kill -9: a mapping made through passthrough holds the data file
itself, also after its last close and after the spoke's death.
"""

_NAME = re.compile(r"([0-9a-f]{32})\.(data|meta|meta\.tmp)")
_LEDGER = struct.Struct("<8sQ")
_LEDGER_MAGIC = b"FARSIDEL"
_DIGEST = 16
_UNUSABLE_HINT = "choose another --cache-dir or mend this one"


class CacheDirectory:
    """An opened, locked cache directory. Only names and small files; contents belong to the cache.

    Attributes:
        chunk: chunk size in bytes, fixed when the directory was made.
        fresh: it was made just now.
    """

    def __init__(self, path: str, disk: DiskIO, lock_fd: int, chunk: int, fresh: bool) -> None:
        self.path = path
        self.disk = disk
        self.chunk = chunk
        self.fresh = fresh
        self._lock_fd = lock_fd
        self._data = os.path.join(path, "data")

    @classmethod
    def open(
        cls, path: str, *, chunk: int | None, disk: DiskIO | None = None, any_format: bool = False
    ) -> CacheDirectory:
        """Makes the directory where it is missing, locks it, and checks its format.

        Args:
            chunk: chunk size in bytes that the caller needs; None takes what an existing directory has.
            any_format: open it although its format is unknown or damaged, to clear it.

        Raises:
            CacheError: not a directory, unwritable, locked by another process, of another format or chunk
                size, or not a farside cache although it has a ``data`` directory.
        """
        disk = disk or DiskIO()
        path = os.path.abspath(path)
        try:
            if chunk is not None:
                os.makedirs(path, mode=0o700, exist_ok=True)
            elif not os.path.lexists(os.path.join(path, FORMAT_FILE)):
                raise _no_cache(path)
            lock_fd = _lock(path)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            if any_format and os.path.lexists(os.path.join(path, FORMAT_FILE)):
                return cls(path, disk, lock_fd, 0, False)
            found_chunk, fresh = _format(path, chunk, disk)
            for number in range(256):
                os.makedirs(os.path.join(path, "data", f"{number:02x}"), mode=0o700, exist_ok=True)
        except OSError as error:
            os.close(lock_fd)
            raise _unusable(path, error) from error
        except BaseException:
            os.close(lock_fd)
            raise
        return cls(path, disk, lock_fd, found_chunk, fresh)

    def close(self) -> None:
        """Gives the lock back."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # -- names ------------------------------------------------------------------------------------

    def data_path(self, digest: bytes) -> str:
        name = digest.hex()
        return f"{self._data}/{name[:2]}/{name}.data"

    def meta_path(self, digest: bytes) -> str:
        name = digest.hex()
        return f"{self._data}/{name[:2]}/{name}.meta"

    def prefixes(self) -> list[str]:
        """Names of the directories under data/ that exist, at most 256."""
        try:
            return sorted(name for name in self.disk.listdir(self._data) if re.fullmatch("[0-9a-f]{2}", name))
        except FileNotFoundError:
            return []

    def listing(self, prefix: str) -> dict[bytes, set[str]]:
        """Key digest → kinds of files ("data", "meta", "meta.tmp") that exist for it under one prefix."""
        found: dict[bytes, set[str]] = {}
        try:
            names = self.disk.listdir(f"{self._data}/{prefix}")
        except FileNotFoundError:
            return found
        for name in names:
            match = _NAME.fullmatch(name)
            if match is not None and name.startswith(prefix):
                found.setdefault(bytes.fromhex(match[1]), set()).add(match[2])
        return found

    def remove(self, digest: bytes, *, temporary_only: bool = False) -> None:
        """Deletes what lies on disk for a key; the side-car goes first, so that a crash leaves an orphan
        at most.

        Raises:
            OSError: something could not be deleted (a missing file is no error).
        """
        meta = self.meta_path(digest)
        temporary = f"{meta}.tmp"
        for path in (temporary,) if temporary_only else (meta, temporary, self.data_path(digest)):
            try:
                self.disk.unlink(path)
            except FileNotFoundError:
                pass

    def forget(self) -> None:
        """Deletes small files and empty directories of a cache whose contents are gone; the lock stays."""
        names = [f"{name}{end}" for name in ("ledger", "pins", FORMAT_FILE) for end in ("", ".tmp")]
        names += [f"{NAMESPACE_DB}{end}" for end in ("", "-wal", "-shm", "-journal")]
        for name in names:
            try:
                self.disk.unlink(os.path.join(self.path, name))
            except FileNotFoundError:
                pass
        for directory in (*(f"{self._data}/{prefix}" for prefix in self.prefixes()), self._data):
            try:
                os.rmdir(directory)
            except OSError:
                pass  # it holds something that is not ours

    # -- ledger and pins --------------------------------------------------------------------------

    def read_ledger(self) -> int | None:
        """The persisted upper bound in bytes; None when there is none that can be trusted."""
        try:
            data = read_all(self.disk, os.path.join(self.path, "ledger"), 64)
        except OSError:
            return None
        body, own = data[: _LEDGER.size], data[_LEDGER.size :]
        if len(body) != _LEDGER.size or xxhash.xxh3_64_digest(body) != own:
            return None
        magic, bound = _LEDGER.unpack(body)
        return int(bound) if magic == _LEDGER_MAGIC else None

    def write_ledger(self, bound: int) -> None:
        body = _LEDGER.pack(_LEDGER_MAGIC, bound)
        write_atomically(self.disk, os.path.join(self.path, "ledger"), body + xxhash.xxh3_64_digest(body))

    def read_pins(self) -> set[bytes]:
        """Keys of pinned files; a damaged list counts as empty."""
        try:
            data = read_all(self.disk, os.path.join(self.path, "pins"), 1 << 30)
        except OSError:
            return set()
        body, own = data[:-8], data[-8:]
        if len(body) % _DIGEST or xxhash.xxh3_64_digest(body) != own:
            return set()
        return {body[at : at + _DIGEST] for at in range(0, len(body), _DIGEST)}

    def write_pins(self, pins: set[bytes]) -> None:
        body = b"".join(sorted(pins))
        write_atomically(self.disk, os.path.join(self.path, "pins"), body + xxhash.xxh3_64_digest(body))


def _unusable(path: str, error: OSError) -> CacheError:
    return CacheError(
        f"cache directory cannot be used: {error.strerror or error}",
        errno=error.errno or errno.EIO,
        path=path,
        hint=_UNUSABLE_HINT,
    )


def _no_cache(path: str) -> CacheError:
    return CacheError(
        f"directory is not a farside cache (it has no {FORMAT_FILE})",
        errno=errno.ENOENT,
        path=path,
        hint="nothing was changed in it",
    )


def _lock(path: str) -> int:
    """An flock on ``lock``, which the kernel drops when the process dies. The file holds the owner's pid."""
    fd = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise CacheError(
            f"cache directory is in use by process {owner}",
            errno=errno.EBUSY,
            path=path,
            retry=True,
            hint="one process owns a cache directory: unmount that one, or give this one another --cache-dir",
        ) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _format(path: str, chunk: int | None, disk: DiskIO) -> tuple[int, bool]:
    """Chunk size of the directory, and whether it is new; then the format file is written."""
    name = os.path.join(path, FORMAT_FILE)
    try:
        text = read_all(disk, name, 65536)
    except FileNotFoundError:
        return _create(path, chunk, disk)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        found = json.loads(text)
        number, found_chunk = int(found["format"]), int(found["chunk"])
    except (ValueError, KeyError, TypeError) as error:
        raise CacheError(
            f"{FORMAT_FILE} of the cache directory is damaged",
            path=path,
            hint="run `farside cache clear` on it",
        ) from error
    if number != FORMAT:
        raise CacheError(
            f"cache directory has format {number}, this farside reads format {FORMAT}",
            path=path,
            hint="use the farside that made it, or run `farside cache clear` on it",
        )
    if chunk is not None and found_chunk != chunk:
        raise CacheError(
            f"cache directory has chunks of {found_chunk} bytes, {chunk} are asked for",
            path=path,
            hint="the chunk size of a cache is fixed; use another --cache-dir",
        )
    return found_chunk, False


def _create(path: str, chunk: int | None, disk: DiskIO) -> tuple[int, bool]:
    if chunk is None or os.path.lexists(os.path.join(path, "data")):
        raise _no_cache(path)
    text = json.dumps({"format": FORMAT, "chunk": chunk, "id": secrets.token_hex(8)}) + "\n"
    write_atomically(disk, os.path.join(path, FORMAT_FILE), text.encode())
    return chunk, True
