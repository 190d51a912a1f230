"""Which names of a portal are links to one and the same file.

The kernel tells of a change only under the name by which it was made. So that the other names are told as
well, every name of a multiply linked file is remembered when it is handed out. A name handed out while it
was the only one is not; when the file then turns out to have more links than there are known names, the file
is *wanted*: ``seek.py`` looks for the rest.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator

MAX_LINKS = 1_000_000
"""Names that are remembered, at most; about 400 bytes each."""

_MARGIN_NS = 3_000_000_000
"""File systems stamp files up to two seconds before the time that the clock shows."""

File = tuple[int, int]
"""A file behind its names: (st_dev, st_ino)."""


def file_of(info: os.stat_result) -> File:
    return info.st_dev, info.st_ino


class _Known:
    """What is known of one file: its names, its ``stat`` when one was last looked at, links not found."""

    __slots__ = ("ctime_ns", "nlink", "outside", "places")

    def __init__(self) -> None:
        self.places: set[tuple[bytes, bytes]] = set()
        self.nlink = 0
        self.ctime_ns = 0  # 0: told as changed, not looked at since
        self.outside = 0


class Links:
    """The names of multiply linked files, by (directory, name). The caller locks all but ``current``.

    Args:
        since_ns: the wall clock, ns, before the first name was handed out. A file whose links are older had
            all of them then, so every name of it that was handed out is remembered.

    Attributes:
        stirred: files that changed, all of whose names are to be told.
        wanted: files that may have names which were handed out and are not known here.
    """

    def __init__(self, since_ns: int) -> None:
        self._since_ns = since_ns - _MARGIN_NS
        self._files: dict[File, _Known] = {}
        self._names: dict[bytes, dict[bytes, File]] = {}
        self._count = 0
        self.stirred: set[File] = set()
        self.wanted: set[File] = set()

    def current(self, directory: bytes, name: bytes, info: os.stat_result) -> bool:
        """Whether the name is known to be this file, and the file is as it was. Any thread, no lock."""
        names = self._names.get(directory)
        file = file_of(info)
        if names is None or names.get(name) != file:
            return False
        known = self._files.get(file)
        return known is not None and known.nlink == info.st_nlink and known.ctime_ns == info.st_ctime_ns

    def file(self, directory: bytes, name: bytes) -> File | None:
        """The file that this name is known to be a link of."""
        names = self._names.get(directory)
        return names.get(name) if names is not None else None

    def seen(self, directory: bytes, name: bytes, info: os.stat_result) -> bool:
        """A name was looked at. True: it has become known just now as a name of this file.

        Changes by other names are told for it from then on, which may be later than ``info``.
        """
        file = file_of(info)
        before = self.file(directory, name)
        if before is not None and before != file:
            self.stirred.add(before)  # has lost this name, and the event of that may find it gone
            self.drop(directory, name)
        if info.st_nlink < 2 or not stat.S_ISREG(info.st_mode):
            return False
        new = before != file
        if new:
            if self._count >= MAX_LINKS:
                return False
            self._count += 1
            self._names.setdefault(directory, {})[name] = file
            self._files.setdefault(file, _Known()).places.add((directory, name))
        known = self._files[file]
        if known.ctime_ns and (known.nlink != info.st_nlink or known.ctime_ns != info.st_ctime_ns):
            self.stirred.add(file)  # changed without an event, by a name that is not known or not watched
        known.nlink, known.ctime_ns = info.st_nlink, info.st_ctime_ns
        if _lacks(known) and info.st_ctime_ns >= self._since_ns:
            self.wanted.add(file)
        return new

    def drop(self, directory: bytes, name: bytes) -> None:
        """A name is no longer what it was."""
        names = self._names.get(directory)
        file = names.pop(name, None) if names is not None else None
        if names is None or file is None:
            return
        if not names:
            del self._names[directory]
        self._forget(file, directory, name)

    def drop_directory(self, path: bytes) -> None:
        """A directory is gone, and with it the names in it."""
        for name, file in self._names.pop(path, {}).items():
            self._forget(file, path, name)

    def drop_tree(self, path: bytes) -> None:
        """A directory is no longer where it was: so are the names in it and below it."""
        below = path + b"/"
        for directory in [d for d in self._names if not path or d == path or d.startswith(below)]:
            self.drop_directory(directory)

    def _forget(self, file: File, directory: bytes, name: bytes) -> None:
        self._count -= 1
        known = self._files[file]
        known.places.discard((directory, name))
        if not known.places:
            del self._files[file]

    def take_stirred(self) -> Iterator[tuple[bytes, bytes]]:
        """The names of all files that changed; whoever is told of them will look at them anew."""
        stirred, self.stirred = self.stirred, set()
        for file in stirred:
            known = self._files.get(file)
            if known is not None:
                known.ctime_ns = 0
                yield from known.places

    def take_wanted(self) -> set[File]:
        """The files that are wanted and lack names still, or have lost those that were known."""
        wanted, self.wanted = self.wanted, set()
        return {f for f in wanted if f not in self._files or _lacks(self._files[f])}

    def sought(self, files: Iterable[File]) -> None:
        """These were looked for in every watched directory: what they lack lies elsewhere."""
        for file in files:
            known = self._files.get(file)
            if known is not None:
                known.outside = max(0, known.nlink - len(known.places))


def _lacks(known: _Known) -> bool:
    return known.nlink - len(known.places) > known.outside
