"""Versions: what makes two contents of one file two different things.

A version is the digest of (device, inode, size, mtime, ctime, change counter). The first five come
from the file system. They miss a change in two cases, and each has its answer here:

* Two changes within one tick of the file system's clock leave the same time stamps. A version is
  therefore handed out *by a read* only once it is *settled*: its ctime lies further back than the
  clock's grain, so that every later change must get another one.
* A change that began before the read and goes on during it (a long ``write``, a store through a
  shared mapping) stamped the file before it moved the bytes. Reads wait for a running ``write``
  (``content.py``); what was read from a file that changed not long ago is remembered as *suspect*, and when a
  modification event arrives for it although nothing in its ``stat`` differs, its change counter,
  which is kept in the hub's state, is raised.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

import xxhash

from farside.protocol.attributes import Attr

log = logging.getLogger(__name__)

GRAIN_NS = 20_000_000
"""No kernel stamps files more coarsely than 10 ms by its clock; doubled, for ticks that come late."""

COARSE_GRAIN_NS = 2_050_000_000
"""For ctimes without a sub-second part: file systems that keep whole (ext3) or even (FAT) seconds."""

SKEW_NS = 5_000_000_000
"""On a remote file system ctime is another machine's clock, off by up to this much."""

SUSPECT_NS = 300_000_000_000
"""What was read within this time after its ctime may still be in the hands of a writer: dirty mapped
pages are written back, and so stamped anew at the next store, every half minute at the latest."""

MAX_SUSPECTS = 200_000
"""Remembered reads of recent files; beyond it the oldest is forgotten. 300 bytes each."""

_PACK = struct.Struct("<QQQqqQ").pack
_digest = xxhash.xxh3_128_digest


class Identity(NamedTuple):
    """All that a version is made of, as one comparable value."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    counter: int


class Versions:
    """The versions of one portal. Any thread may call it.

    Args:
        root_device: st_dev of the portal's root; files on it do not carry it in their version, so that
            a disk that gets another number at the next boot does not look changed.
        counters: (device, inode) -> change counter, as the hub's state has them.
        persist: called with (device, inode, counter) before a raised counter is used.
        is_local: tells by st_dev whether this machine's clock stamps the files.
        unstamped: tells by st_dev whether stores through a mapping leave no stamp at all (tmpfs).
    """

    def __init__(
        self,
        root_device: int,
        counters: dict[tuple[int, int], int],
        persist: Callable[[int, int, int], None],
        is_local: Callable[[int], bool] = lambda device: True,
        unstamped: Callable[[int], bool] = lambda device: False,
    ) -> None:
        self._root = root_device
        self._counters = counters
        self._persist = persist
        self._is_local = is_local
        self._unstamped = unstamped
        self._suspects: dict[tuple[int, int], Identity] = {}
        self._lock = threading.Lock()
        self.bumps = 0

    def identity(self, info: os.stat_result) -> Identity:
        device, inode = info.st_dev, info.st_ino
        if device == self._root:
            device = 0
        counter = self._counters.get((device, inode), 0) if self._counters else 0
        return Identity(device, inode, info.st_size, info.st_mtime_ns, info.st_ctime_ns, counter)

    def of(self, info: os.stat_result) -> bytes:
        """The 16-byte version of what this ``stat`` shows."""
        return _digest(_PACK(*self.identity(info)))

    def attr(self, info: os.stat_result) -> Attr:
        """Attributes for the link; the file id is the inode, mixed with the device off the root's."""
        device, inode = info.st_dev, info.st_ino
        fileid = inode
        if device == self._root:
            device = 0
        else:
            fileid = xxhash.xxh3_64_intdigest(struct.pack("<QQ", device, inode)) >> 1
        counter = self._counters.get((device, inode), 0) if self._counters else 0
        size, mtime, ctime = info.st_size, info.st_mtime_ns, info.st_ctime_ns
        return Attr(
            fileid,
            size,
            info.st_blocks,
            mtime,
            ctime,
            info.st_mode,
            info.st_nlink,
            info.st_uid,
            info.st_gid,
            info.st_rdev,
            _digest(_PACK(device, inode, size, mtime, ctime, counter)),
        )

    def unsettled_s(self, info: os.stat_result, looked_ns: int) -> float:
        """Seconds to wait before this ``stat`` can stand for one content; 0.0 when it is settled.

        Args:
            looked_ns: the wall clock, ns, *before* the file was looked at.
        """
        ctime = info.st_ctime_ns
        grain = COARSE_GRAIN_NS if ctime % 1_000_000_000 == 0 else GRAIN_NS
        age = looked_ns - ctime
        if age > grain + (0 if self._is_local(info.st_dev) else SKEW_NS):
            return 0.0
        # A stamp from the future (a clock set back, another machine's) says nothing: one grain is waited.
        return (grain - age if 0 <= age < grain else grain) / 1e9 + 0.001

    def remember(self, info: os.stat_result, looked_ns: int) -> None:
        """Notes that content is about to be read under this ``stat``, if a writer may still be at it."""
        if not self._unstamped(info.st_dev) and looked_ns - info.st_ctime_ns > SUSPECT_NS:
            return
        identity = self.identity(info)
        key = identity[:2]
        with self._lock:
            self._suspects.pop(key, None)
            self._suspects[key] = identity
            if len(self._suspects) > MAX_SUSPECTS:
                del self._suspects[next(iter(self._suspects))]

    @property
    def has_suspects(self) -> bool:
        return bool(self._suspects)

    def modified(self, info: os.stat_result) -> bool:
        """A modification event came for this file, ``stat`` taken after it: raise its counter if need be.

        Returns True when the counter was raised. Blocks on the state database then.
        """
        identity = self.identity(info)
        key = identity[:2]
        with self._lock:
            if self._suspects.pop(key, None) != identity:
                return False
            self._raise(key, identity.counter + 1)
        return True

    def distrust(self) -> None:
        """Modification events were lost: raises the counter of every suspect. Blocks on the database."""
        with self._lock:
            for key, identity in self._suspects.items():
                self._raise(key, identity.counter + 1)
            self._suspects.clear()

    def _raise(self, key: tuple[int, int], counter: int) -> None:
        try:
            self._persist(*key, counter)
        except Exception:
            # It holds at least until the next start; to keep the old version would be wrong at once.
            log.exception("a change counter could not be kept")
        self._counters[key] = counter
        self.bumps += 1
