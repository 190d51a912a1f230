"""One directory as the spoke knows it, and the sentinel for what it does not know."""

from __future__ import annotations

import enum
import stat
from typing import Final

from farside.protocol.attributes import ENTRY_HEAD, RECORD, VALUE_MIN, iter_listing

UNWATCHED_TTL = 1.0
"""Seconds for which an answer about a directory that the hub does not watch is believed."""

DIRECTORY_COST = 4
"""What a directory itself counts for in the limit of entries kept in memory."""


class Unknown(enum.Enum):
    """Type of ``UNKNOWN``: nothing can be said here and now; ask the event loop."""

    UNKNOWN = "unknown"


UNKNOWN: Final = Unknown.UNKNOWN

_MODE_AT = RECORD.size - 40
"""Offset of the mode in a record: mode, nlink, uid, gid (u32 each), rdev (u64), version (16 bytes) end it."""


def join(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name


def split(path: bytes) -> tuple[bytes, bytes]:
    """(directory, name) of a path that is not the root."""
    parent, _, name = path.rpartition(b"/")
    return parent, name


def is_directory(value: bytes) -> bool:
    return stat.S_ISDIR(int.from_bytes(value[_MODE_AT : _MODE_AT + 4], "little"))


def same_directory(old: bytes, new: bytes | None) -> bool:
    """Whether both values are directories with the same file id."""
    return new is not None and is_directory(old) and is_directory(new) and old[:8] == new[:8]


def count_listing(listing: bytes, after: bytes = b"") -> tuple[int, bytes]:
    """(number of entries, last name) of a listing whose names must ascend from behind ``after``.

    Raises:
        ValueError: the listing is truncated, damaged or out of order.
    """
    unpack, head, at, end, count, last = ENTRY_HEAD.unpack_from, ENTRY_HEAD.size, 0, len(listing), 0, after
    while at < end:
        if at + head > end:
            raise ValueError("listing is truncated")
        name_size, value_size = unpack(listing, at)
        at += head
        name = listing[at : at + name_size]
        at += name_size + value_size
        if at > end or value_size < VALUE_MIN or name <= last:
            raise ValueError("listing is damaged or out of order")
        count, last = count + 1, name
    return count, last


class Directory:
    """A directory's names and values, complete as of one listing and kept up to date since.

    The event loop alone changes it; other threads may read ``entries`` and call ``snapshot``.

    Attributes:
        path: relative to the portal's root; b"" is the root.
        value: the directory's own value (see ``protocol/attributes.py``).
        watched: the hub pushes changes of it.
        dirty: names that were invalidated and not asked about again yet. Of these, hand no attributes
            to anybody; ``Namespace.peek`` decides.
        lost: the whole directory was invalidated and not listed again yet.
        session: the session in which the hub confirmed it; 0 means no session.
        checked: when that was (monotonic seconds); what counts for directories that are not watched.
    """

    __slots__ = (
        "asof",
        "checked",
        "count",
        "digest",
        "dirty",
        "edits",
        "lost",
        "ordered",
        "packed",
        "path",
        "saved",
        "session",
        "table",
        "value",
        "visited",
        "watched",
    )

    def __init__(
        self, path: bytes, value: bytes, packed: bytes, count: int, digest: bytes, *, watched: bool
    ) -> None:
        self.path = path
        self.value = value
        self.watched = watched
        self.packed: bytes | None = packed
        """The listing as it came; None as soon as an entry was changed or the store has it."""
        self.table: dict[bytes, bytes] | None = None
        """The listing unpacked; None until somebody asks, which saves half of the memory."""
        self.count = count
        self.digest = digest
        """Digest of the listing; b"" after an entry was changed."""
        self.edits = 0
        """Counts changed entries."""
        self.dirty: set[bytes] = set()
        self.lost = False
        self.session = 0
        self.checked = float("-inf")
        self.asof = 0
        """The change log's time of the question that was answered by this listing."""
        self.saved = False
        """The store holds this listing."""
        self.visited = True
        """Read since the eviction's hand last passed."""
        self.ordered = True

    @property
    def entries(self) -> dict[bytes, bytes]:
        """name → value. Unpacked at first use, which only the event loop may do."""
        table = self.table
        if table is None:
            assert self.packed is not None, "a directory is packed or unpacked"
            table = self.table = dict(iter_listing(self.packed))
            if self.saved:
                self.packed = None
        return table

    def snapshot(self) -> list[tuple[bytes, bytes]]:
        """(name, value) of every entry, sorted by name; safe in any thread."""
        table = self.entries
        while True:
            try:
                items = list(table.items())
            except RuntimeError:  # the loop added a name at this very moment
                continue
            if not self.ordered:
                items.sort()
            return items

    def set_entry(self, name: bytes, value: bytes | None) -> bool:
        """Puts one value in place, or removes the name; True when that changed anything."""
        table = self.entries
        old = table.get(name)
        if old == value:
            return False
        if value is None:
            del table[name]
        else:
            if old is None:
                self.ordered = False
            table[name] = value
        self.count = len(table)
        self.edits += 1
        self.packed = None
        self.digest = b""
        self.saved = False
        return True

    def memory(self) -> int:
        """About what it takes in memory, bytes: measured on names of 10 to 40 bytes."""
        size = 400 + len(self.packed or b"")
        return size + 220 * self.count if self.table is not None else size

    @property
    def cost(self) -> int:
        return self.count + DIRECTORY_COST
