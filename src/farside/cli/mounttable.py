"""The kernel's table of mounts. Reading it asks no mount, so that a stuck one does no harm."""

from __future__ import annotations

import os
import re
from pathlib import Path

MOUNT_TABLE = "/proc/self/mountinfo"


def farside_mounts(table: str = MOUNT_TABLE) -> list[Path]:
    """Where farside mounts are."""
    return [Path(point) for point, kind in _mounts(table) if kind == "fuse.farside"]


def filesystem_of(path: Path, table: str = MOUNT_TABLE) -> str:
    """The type of the file system that holds ``path``; "unknown" when the table hides it."""
    real = os.path.realpath(path)
    best, kind = "", "unknown"
    for point, its_kind in _mounts(table):
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, its_kind
    return kind


def mounted_by(mountpoint: Path, table: str = MOUNT_TABLE) -> int | None:
    """The user who made the topmost FUSE mount of that place; None when the table does not say."""
    found = None
    with open(table, encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            if _unescape(line.split()[4]) == str(mountpoint):
                match = re.search(r"[ ,]user_id=(\d+)", line.partition(" - ")[2])
                found = int(match[1]) if match else None
    return found


def _mounts(table: str) -> list[tuple[str, str]]:
    """(mount point, file system type) in the order of mounting; spaces and the like unescaped."""
    found = []
    with open(table, encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            left, _, right = line.partition(" - ")
            found.append((_unescape(left.split()[4]), right.split()[0]))
    return found


def _unescape(point: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), point)
