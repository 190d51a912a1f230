"""How much of the disk the cache holds, and whether more may be taken. Nothing here does I/O.

``used`` never exceeds the limit once a reservation has been granted, since bytes are counted before they are
fetched: present bytes, reserved bytes, what the start-up scan has not looked at yet (by its persisted upper
bound), and what could not be deleted. The caller holds the cache's lock around every call.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

BLOCK = 4096
CHUNK_OVERHEAD = 96
"""Charged per chunk beside its bytes: checksum in the side-car and extent records of the file system."""

FILE_OVERHEAD = BLOCK + 512
"""Charged per file beside its chunks: the side-car's first block, and directory entries."""


def chunk_cost(length: int) -> int:
    """Bytes of disk that one chunk of ``length`` bytes is charged for."""
    return -(-length // BLOCK) * BLOCK + CHUNK_OVERHEAD


def file_cost(chunks: int) -> int:
    """Bytes of disk that a file is charged for beside its chunks."""
    return FILE_OVERHEAD + chunks // 8


@dataclass
class Space:
    """Counters in bytes. ``slack`` of the limit is kept for side-cars that exist twice while they are
    replaced."""

    limit: int
    slack: int
    reserve: float
    """Share of the file system that must stay free for others, 0 … 1."""

    files: int = 0
    """Charged for what is on disk and indexed."""
    unscanned: int = 0
    """Upper bound of what lies on disk and is not indexed yet."""
    reserved: int = 0
    stuck: int = 0
    """Evicted, but deleting it failed."""
    limbo: int = 0
    """Evicted and unlinked, but still held open by the kernel."""
    free: int | None = None
    """Bytes that may still be taken before the free-space reserve is touched; None = not known yet."""
    inodes_low: bool = False

    @property
    def used(self) -> int:
        return self.files + self.unscanned + self.reserved + self.stuck + self.limbo

    def shortage(self, need: int) -> int:
        """Bytes that must be evicted before ``need`` more may be taken; ≤ 0 when there is room."""
        short = self.used + need - (self.limit - self.slack)
        if self.free is not None:
            short = max(short, need - self.free)
        return short

    def take(self, need: int) -> None:
        self.reserved += need
        if self.free is not None:
            self.free -= need

    def give_back(self, unused: int) -> None:
        self.reserved -= unused
        if self.free is not None:
            self.free += unused

    def commit(self, reserved: int, charged: int) -> None:
        """``reserved`` bytes of a reservation became ``charged`` bytes on disk."""
        self.reserved -= reserved
        self.files += charged
        if self.free is not None:
            self.free += reserved - charged

    def freed(self, count: int) -> None:
        """``count`` bytes were evicted; they leave the disk before anything new is written."""
        self.files -= count
        if self.free is not None:
            self.free += count

    def undeletable(self, count: int) -> None:
        """``count`` bytes that were evicted could not be deleted."""
        self.stuck += count
        if self.free is not None:
            self.free -= count

    def indexed(self, count: int) -> None:
        """``count`` bytes that lay on disk before the start are now in the index."""
        self.files += count
        self.unscanned = max(0, self.unscanned - count)

    def sample(self, stat: os.statvfs_result, pending: int, reserved: int, files: int) -> None:
        """Takes over what statvfs says; ``pending`` bytes are evicted but not deleted yet.

        ``reserved`` and ``files`` are as before statvfs was asked: what came since is not in its answer.
        """
        since = max(0, self.files + self.reserved - files - reserved)
        total = stat.f_blocks * stat.f_frsize
        if total == 0:
            self.free = None  # some file systems do not say; the limit still holds
        else:
            kept = int(total * self.reserve)
            self.free = stat.f_bavail * stat.f_frsize + pending - kept - reserved - since
        # 0 inodes in total means "not limited" (btrfs and others), not "full"
        self.inodes_low = stat.f_files > 0 and stat.f_favail < max(8, stat.f_files // 200)
