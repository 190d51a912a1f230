"""Content of files: ranges of one version, or a refusal, never a mixture.

What is sent of a file is bound to the version asked for like this:

1. open beneath the portal, regular files only;
2. *barrier*: wait for a ``write`` that is running at this moment. It has stamped the file already but is
   still moving its bytes. SEEK_DATA takes the inode's lock, which a running ``write`` holds (``read`` does
   not take it on ext4);
3. ``stat``: the version must be the one asked for, and settled (``versions.py``), else wait and go to 2;
4. read one part;
5. ``stat`` again: everything that a version is made of must be as in 3. Any ``write``, truncation or
   punched hole that began after 2 has changed the ctime before it touched a byte.

Bytes leave only after 5. Stores through shared mappings are what this does not see at once: they are told
by the watch when the writer closes (``versions.py``).
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from farside.errors import FarsideError
from farside.hub.portal import Portal
from farside.hub.tree import Tree
from farside.hub.versions import Identity, Versions
from farside.protocol.messages import CHUNK, MAX_PART, MAX_READ, Block, Data, FileFailure, FileRanges

MAX_BLOCKS = 1024
"""Blocks and failures in one Data part, at most."""

LATENCY_S = 0.02
"""A part that is not full yet leaves after this time: a slow disk must not hold back what is there."""

_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
_digest = xxhash.xxh3_128_digest


class Part(NamedTuple):
    """One Data message and its payload; ``size`` is the payload's length in bytes."""

    message: Data
    buffers: list[bytes]
    size: int


def check_read(files: Sequence[FileRanges]) -> None:
    """Refuses ranges that no spoke may ask for: unaligned, negative, longer than MAX_READ.

    Raises:
        FarsideError: EINVAL, naming the file.
    """
    for file in files:
        for offset, length in file.ranges:
            if offset < 0 or offset % CHUNK or not 0 <= length <= MAX_READ or offset + length >= 1 << 63:
                raise FarsideError(
                    f"a range of {length} bytes at {offset} cannot be read: offsets are multiples of "
                    f"{CHUNK}, lengths at most {MAX_READ}",
                    errno=errno.EINVAL,
                    path=file.path,
                )


class _Changed(Exception):
    """The file is not, or no longer, of the version asked for."""


class _OpenFile:
    """A regular file, open, with the identity that its bytes are bound to."""

    def __init__(self, fd: int, identity: Identity) -> None:
        self.fd = fd
        self.identity = identity
        self.size = identity.size


class ContentReader:
    """Serves one Read, one part at a time. Blocks on the file system; used by one thread at a time.

    Attributes:
        bytes: payload bytes handed out so far.
        stale: files refused because they had changed.
    """

    def __init__(self, portal: Portal, versions: Versions, tree: Tree, files: Sequence[FileRanges]) -> None:
        self._portal = portal
        self._versions = versions
        self._tree = tree
        self._files = files
        self._number = 0  # of the file that is being served
        self._range = 0  # of its ranges, and how much of that range is out
        self._done = 0
        self._open: _OpenFile | None = None
        self.bytes = 0
        self.stale = 0

    def next_part(self) -> Part | None:
        """The next part, with at most MAX_PART bytes; None when everything has been handed out."""
        blocks: list[Block] = []
        failures: list[FileFailure] = []
        buffers: list[bytes] = []
        size = 0
        begun = time.monotonic()
        while self._number < len(self._files):
            if size >= MAX_PART or len(blocks) + len(failures) >= MAX_BLOCKS:
                break
            if (blocks or failures) and time.monotonic() - begun > LATENCY_S:
                break
            file = self._files[self._number]
            if self._range >= len(file.ranges):
                self._next_file()
                continue
            try:
                block, data = self._read(file, MAX_PART - size)
            except _Changed:
                failures.append(self._refuse(file))
                self._next_file()
                continue
            except OSError as error:
                failures.append(self._failure(file, error))
                self._next_file()
                continue
            if block is None:
                break  # it does not fit into what is left of this part
            blocks.append(block)
            buffers.append(data)
            size += len(data)
        self.bytes += size
        if not blocks and not failures:
            self.close()
            return None
        return Part(Data(tuple(blocks), tuple(failures)), buffers, size)

    def close(self) -> None:
        if self._open is not None:
            os.close(self._open.fd)
            self._open = None

    # -- one file ---------------------------------------------------------------------------------

    def _next_file(self) -> None:
        self.close()
        self._number += 1
        self._range = 0
        self._done = 0

    def _read(self, file: FileRanges, room: int) -> tuple[Block | None, bytes]:
        """The next run of bytes of the current file, cut at a chunk; (None, b"") when ``room`` is too small.

        Raises:
            _Changed: the file is of another version.
            OSError: as open(2) and read(2); EINVAL for a range behind the end; EIO for a file that is
                shorter than it says.
        """
        held = self._open
        if held is None:
            held = self._open = self._bind(file)
            self._advise(held.fd, file)
        first, length = file.ranges[self._range]
        if first > held.size:
            raise OSError(errno.EINVAL, "the range begins behind the end of the file")
        offset = first + self._done
        want = min(first + length, held.size) - offset
        if want > room:
            want = room - room % CHUNK
            if not want:
                return None, b""
        data = self._pread(held.fd, want, offset) if want else b""
        self._still(file, held)
        if len(data) != want:
            raise OSError(errno.EIO, "the file is shorter than its size says")
        self._done += want
        if offset + want >= min(first + length, held.size):
            self._range += 1
            self._done = 0
        return Block(self._number, file.path, file.version, offset, want, _checksums(data)), data

    def _bind(self, file: FileRanges) -> _OpenFile:
        """Opens the file and ties it to the version asked for; raises _Changed or OSError."""
        fd = self._portal.open(file.path, _OPEN)
        try:
            held: _OpenFile | None = None
            waited = False
            while held is None:
                looked_ns = time.time_ns()
                self._barrier(fd)
                info = os.fstat(fd)
                if not stat.S_ISREG(info.st_mode) or self._versions.of(info) != file.version:
                    raise _Changed
                self._portal.learn(fd, info.st_dev)
                wait_s = 0.0 if waited else self._versions.unsettled_s(info, looked_ns)
                if wait_s > 0.0:
                    # A version that is still the same after one whole grain of the clock is settled.
                    time.sleep(wait_s)
                    waited = True
                    continue
                self._versions.remember(info, looked_ns)
                held = _OpenFile(fd, self._versions.identity(info))
            return held
        except BaseException:
            os.close(fd)
            raise

    def _still(self, file: FileRanges, held: _OpenFile) -> None:
        """Raises _Changed when anything that the version is made of differs from when it was bound."""
        if self._versions.identity(os.fstat(held.fd)) != held.identity:
            raise _Changed

    def _barrier(self, fd: int) -> None:
        try:
            os.lseek(fd, 0, os.SEEK_DATA)
        except OSError:
            pass  # no data at all (ENXIO), or a file system without SEEK_DATA: nothing to wait for

    def _pread(self, fd: int, size: int, offset: int) -> bytes:
        """``size`` bytes at ``offset``, fewer at the end of the file. Always in a fresh buffer."""
        data = os.pread(fd, size, offset)
        while data and len(data) < size:  # a signal, or a file system that reads in pieces
            more = os.pread(fd, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def _advise(self, fd: int, file: FileRanges) -> None:
        """Lets the kernel read ahead what this request will want."""
        if len(file.ranges) == 1 and file.ranges[0][1] <= 2 * CHUNK:
            return
        for offset, length in file.ranges:
            try:
                os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
            except OSError:
                return

    # -- refusals ---------------------------------------------------------------------------------

    def _refuse(self, file: FileRanges) -> FileFailure:
        """The file changed: tells which value holds now, if the path still names anything."""
        self.stale += 1
        try:
            value = self._tree.value(file.path)
        except OSError as error:
            return self._failure(file, error)
        return FileFailure(self._number, file.path, errno.ESTALE, True, value, "the file changed at the hub")

    def _failure(self, file: FileRanges, error: OSError) -> FileFailure:
        """A file that cannot be opened or read; one that is gone or no regular file any more is stale."""
        code = error.errno or errno.EIO
        value = b""
        stale = code in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO)
        if stale:
            self.stale += 1
            try:
                value = self._tree.value(file.path)
            except OSError:
                pass  # nothing is there: the empty value says so
        return FileFailure(self._number, file.path, code, stale, value, error.strerror or os.strerror(code))


def _checksums(data: bytes) -> bytes:
    """xxh3_128 of each chunk, one behind the other."""
    if len(data) <= CHUNK:
        return _digest(data) if data else b""
    view = memoryview(data)
    return b"".join(_digest(view[at : at + CHUNK]) for at in range(0, len(data), CHUNK))
