"""Small files are fetched with their neighbours: whole, many at a time, in directory order. Pure.

A demand for one small file starts a *run* behind it in its directory. The run asks for a batch of the files
that follow; one of the batch is its marker, and when that is opened the next batch, four times as large, is
asked for. So a reader that goes through a directory finds everything there after two or three round trips,
and one that reads a single file costs one small batch. Behind the last file the run goes on with those before
the first demand, and then, if the reader has shown that it reads in order, with the next directories.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from stat import S_ISDIR, S_ISREG
from typing import NamedTuple

from farside.protocol.attributes import attr_of

SMALL = 1 << 20
"""Files up to this size, bytes, are fetched whole."""

FIRST_FILES, MAX_FILES = 32, 512
FIRST_BYTES, MAX_BYTES = 1 << 20, 8 << 20
GROWTH = 4

MAX_RUNS = 64
"""Directories that are read at the same time, for which the place is remembered."""

MAX_LOOKED_AT = 8 * MAX_FILES
"""Entries that one batch may pass over because they are here already, large, or no files."""

MAX_CLIMB = 3
"""How many levels up the next directory is looked for."""

Listing = Sequence[tuple[bytes, bytes]]
"""(name, value) of a directory, sorted by name."""


class Sibling(NamedTuple):
    """A file to fetch whole: its path, its value (attributes) and its size in bytes."""

    path: bytes
    value: bytes
    size: int


MAX_DEPTH = 64
"""How many levels down a next directory is gone through."""

MARKERS = 4
"""Files of a batch whose opening asks for the next one: the first, and some more for who skips names."""


@dataclass(slots=True, eq=False)
class _Run:
    files: Iterator[Sibling | None]
    last: bytes = b""
    """Name of the file whose demand began the run."""
    markers: list[bytes] = field(default_factory=list)
    latest: set[bytes] = field(default_factory=set)
    """Paths of the last batch, and of the one before: asked for already."""
    before: set[bytes] = field(default_factory=set)
    batch_files: int = FIRST_FILES
    batch_bytes: int = FIRST_BYTES
    over: bool = False


@dataclass(slots=True)
class Siblings:
    """The runs over the small files of one portal.

    Attributes:
        listing: the listing of a directory, or None when it is not known without asking the hub.
        is_here: whether a file (path, value) needs no fetch.
        markers: paths whose opening must be reported with ``opened``; any thread may look.
    """

    listing: Callable[[bytes], Listing | None]
    is_here: Callable[[bytes, bytes], bool]
    markers: dict[bytes, _Run] = field(default_factory=dict)
    _runs: OrderedDict[bytes, _Run] = field(default_factory=OrderedDict)

    def demanded(self, path: bytes, *, room: bool = True) -> list[Sibling]:
        """A small file is being fetched for a reader: what to fetch with it.

        A demand for what no batch has asked for is a jump: a new run begins there, small again. Without
        ``room`` in the cache a jump gets nothing, since the neighbours would push out what is more likely
        to be read; only a reader that goes on with the very next file does.
        """
        directory, _, name = path.rpartition(b"/")
        run = self._runs.get(directory)
        if run is not None and (path in run.latest or path in run.before):
            return self.opened(path)
        if not room and not self._is_next(directory, run, name):
            self._remember(directory, _Run(iter(()), last=name))
            return []
        run = _Run(self._follow(directory, name), last=name)
        self._remember(directory, run)
        return self._batch(run, path)

    def _is_next(self, directory: bytes, run: _Run | None, name: bytes) -> bool:
        """Whether ``name`` is the file behind the one that was demanded last in its directory."""
        listing = self.listing(directory) if run is not None else None
        if run is None or listing is None:
            return False
        following = next_file(listing, run.last)
        return following is not None and following[0] == name

    def opened(self, path: bytes) -> list[Sibling]:
        """A file was opened, whether here or not: the next batch, if it is a marker."""
        run = self.markers.get(path)
        return self._batch(run, path) if run is not None else []

    def _batch(self, run: _Run, path: bytes) -> list[Sibling]:
        batch: list[Sibling] = []
        total, directory = 0, path.rpartition(b"/")[0]
        for looked, sibling in enumerate(run.files, 1):
            if sibling is not None and sibling.path != path and not self.is_here(sibling.path, sibling.value):
                batch.append(sibling)
                total += sibling.size
                parent = sibling.path.rpartition(b"/")[0]
                if parent != directory:  # a reader that gets there goes on with this run
                    directory = parent
                    self._remember(directory, run)
            if len(batch) >= run.batch_files or total >= run.batch_bytes or looked >= MAX_LOOKED_AT:
                break
        else:
            run.over = True
        self._drop_markers(run)
        if not run.over:
            run.markers = [s.path for s in batch[:: max(1, len(batch) // MARKERS)]]
            self.markers.update(dict.fromkeys(run.markers, run))
        run.before, run.latest = run.latest, {s.path for s in batch}
        run.batch_files = min(run.batch_files * GROWTH, MAX_FILES)
        run.batch_bytes = min(run.batch_bytes * GROWTH, MAX_BYTES)
        return batch

    def _remember(self, directory: bytes, run: _Run) -> None:
        self._runs[directory] = run
        self._runs.move_to_end(directory)
        while len(self._runs) > MAX_RUNS:
            _, oldest = self._runs.popitem(last=False)
            if oldest not in self._runs.values():
                self._drop_markers(oldest)

    def _drop_markers(self, run: _Run) -> None:
        for path in run.markers:
            if self.markers.get(path) is run:
                del self.markers[path]
        run.markers = []

    def _follow(self, directory: bytes, name: bytes) -> Iterator[Sibling | None]:
        """Small files behind ``name``, then those before it, then those of the next directories in order.

        None stands for an entry that is not a small file, so that the caller can bound its work.
        """
        listing = self.listing(directory)
        if listing is None:
            return
        at = bisect_right(listing, name, key=_name)
        yield from _small_files(directory, listing, at, len(listing))
        yield from _small_files(directory, listing, 0, at)
        for _ in range(MAX_CLIMB):
            if not directory:
                return
            parent, _, name = directory.rpartition(b"/")
            listing = self.listing(parent)
            if listing is None:
                return
            at = bisect_right(listing, name, key=_name)
            for entry, value in listing[at:]:
                if S_ISDIR(attr_of(value).mode):
                    yield from self._tree(_join(parent, entry), MAX_DEPTH)
                else:
                    yield None
            directory = parent

    def _tree(self, directory: bytes, depth: int) -> Iterator[Sibling | None]:
        """The small files of a directory, then those of the directories in it."""
        listing = self.listing(directory)
        if listing is None or not depth:
            yield None
            return
        yield from _small_files(directory, listing, 0, len(listing))
        for entry, value in listing:
            if S_ISDIR(attr_of(value).mode):
                yield from self._tree(_join(directory, entry), depth - 1)


def next_file(listing: Listing, name: bytes) -> tuple[bytes, bytes] | None:
    """The regular file behind ``name`` in a directory, as (name, value); None behind the last one."""
    for at in range(bisect_right(listing, name, key=_name), len(listing)):
        if S_ISREG(attr_of(listing[at][1]).mode):
            return listing[at]
    return None


def _small_files(directory: bytes, listing: Listing, begin: int, end: int) -> Iterator[Sibling | None]:
    for at in range(begin, end):
        name, value = listing[at]
        attr = attr_of(value)
        if S_ISREG(attr.mode) and 0 < attr.size <= SMALL:
            yield Sibling(_join(directory, name), value, attr.size)
        else:
            yield None


def _name(entry: tuple[bytes, bytes]) -> bytes:
    return entry[0]


def _join(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name
