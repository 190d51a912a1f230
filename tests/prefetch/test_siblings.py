"""Small files and their neighbours: everything is asked once, ahead of the reader, in few batches."""

from __future__ import annotations

import random
import stat

import pytest

from farside.prefetch.siblings import (
    FIRST_FILES,
    MAX_BYTES,
    MAX_FILES,
    MAX_RUNS,
    SMALL,
    Listing,
    Siblings,
    next_file,
)
from farside.protocol.attributes import Attr, pack_value


def value(size: int, kind: int = stat.S_IFREG) -> bytes:
    return pack_value(Attr(1, size, 8, 0, 0, kind | 0o644, 1, 0, 0, 0, bytes(16)))


class Tree:
    """Directories in memory, a cache that gets what is asked after a delay of so many opens, and a reader."""

    def __init__(self, dirs: dict[bytes, dict[bytes, bytes]]) -> None:
        self.dirs: dict[bytes, Listing] = {d: sorted(e.items()) for d, e in dirs.items()}
        self.here: set[bytes] = set()
        self.asked: list[bytes] = []
        self.wanted: set[bytes] = set()
        self.coming: list[tuple[int, bytes]] = []
        self.batches: list[int] = []
        self.demands = 0
        self.opens = 0
        self.siblings = Siblings(self.dirs.get, lambda path, _: path in self.here or path in self.wanted)

    def open(self, path: bytes, delay: int) -> None:
        self.opens += 1
        while self.coming and self.coming[0][0] <= self.opens:
            self.here.add(self.coming.pop(0)[1])
        batch = []
        if path not in self.here:
            self.demands += 1
            batch = self.siblings.demanded(path)
            self.here.add(path)
            self.opens += delay  # the reader waits for a round trip
        elif path in self.siblings.markers:
            batch = self.siblings.opened(path)
        if batch:
            self.batches.append(len(batch))
            assert len(batch) <= MAX_FILES and sum(s.size for s in batch) <= MAX_BYTES + SMALL
        for s in batch:
            assert s.path not in self.here
            self.asked.append(s.path)
            self.wanted.add(s.path)
            self.coming.append((self.opens + delay, s.path))


def tree_of(dirs: int, files: int, size: int = 4096) -> Tree:
    made: dict[bytes, dict[bytes, bytes]] = {b"": {}, b"top": {}}
    made[b""][b"top"] = value(4096, stat.S_IFDIR)
    for d in range(dirs):
        made[b"top"][b"d%03d" % d] = value(4096, stat.S_IFDIR)
        made[b"top/d%03d" % d] = {b"f%05d" % f: value(size) for f in range(files)}
    return Tree(made)


def in_order(tree: Tree) -> list[bytes]:
    return [d + b"/" + n for d in sorted(tree.dirs) if d.startswith(b"top/") for n, _ in tree.dirs[d]]


@pytest.mark.parametrize(("dirs", "files"), [(100, 100), (1, 10_000), (1000, 10)])
def test_reader_in_order_waits_for_few_round_trips(dirs: int, files: int) -> None:
    tree = tree_of(dirs, files)
    for path in in_order(tree):
        tree.open(path, delay=200)  # a round trip takes as long as 200 opens
    assert len(tree.asked) == len(set(tree.asked)) >= 9_990
    assert tree.demands <= 40  # of 10,000
    assert len(tree.batches) <= 60


def test_single_read_costs_one_small_batch() -> None:
    tree = tree_of(3, 1000)
    tree.open(b"top/d001/f00500", delay=10)
    assert len(tree.asked) == FIRST_FILES
    assert tree.asked[0] == b"top/d001/f00501"


def test_wraps_to_those_before_and_then_goes_on_to_the_next_directory() -> None:
    tree = tree_of(2, 20)
    tree.open(b"top/d000/f00010", delay=0)
    assert tree.asked[:19] == [b"top/d000/f%05d" % n for n in (*range(11, 20), *range(10))]
    assert tree.asked[19] == b"top/d001/f00000"


def test_large_files_links_and_what_is_here_are_left_out() -> None:
    tree = Tree(
        {
            b"": {
                b"a": value(10),
                b"b": value(SMALL + 1),
                b"c": value(0),
                b"d": value(10, stat.S_IFLNK),
                b"f": value(5),
                b"g": value(6),
                b"h": value(SMALL),
            }
        }
    )
    tree.here.add(b"f")
    tree.open(b"a", delay=0)
    assert tree.asked == [b"g", b"h"]


def test_readers_in_any_order_ask_for_nothing_twice() -> None:
    tree = tree_of(10, 300)
    paths = in_order(tree)
    random.Random(5).shuffle(paths)
    for path in paths:
        tree.open(path, delay=3)
    assert len(tree.asked) == len(set(tree.asked))
    assert tree.demands + len(tree.asked) >= 3000


def test_unknown_listing_and_huge_directories_are_bounded() -> None:
    tree = tree_of(1, 5)
    del tree.dirs[b"top/d000"]
    tree.open(b"top/d000/f00000", delay=0)
    assert tree.asked == []
    large = Tree(
        {b"": {b"%06d" % n: value(SMALL + 1) for n in range(100_000)} | {b"x": value(1), b"y": value(1)}}
    )
    large.open(b"x", delay=0)
    assert large.asked == [b"y"]


def test_many_directories_forget_the_oldest() -> None:
    tree = tree_of(5 * MAX_RUNS, 200)
    for d in range(5 * MAX_RUNS):
        tree.open(b"top/d%03d/f00000" % d, delay=0)
    assert len(tree.siblings._runs) <= MAX_RUNS
    assert len(tree.siblings.markers) <= 8 * MAX_RUNS


def test_deep_chain_does_not_end_in_recursion() -> None:
    dirs: dict[bytes, dict[bytes, bytes]] = {b"": {b"a": value(1), b"z": value(1, stat.S_IFDIR)}}
    path = b"z"
    for _ in range(1500):
        dirs[path] = {b"z": value(1, stat.S_IFDIR)}
        path += b"/z"
    dirs[b"q"] = {b"f": value(1)}
    dirs[b""][b"q"] = value(1, stat.S_IFDIR)
    tree = Tree(dirs)
    tree.open(b"q/f", delay=0)
    assert tree.asked == []


def test_next_file() -> None:
    listing = sorted({b"a": value(1), b"b": value(1, stat.S_IFDIR), b"c": value(9), b"d": value(1)}.items())
    assert next_file(listing, b"a") == (b"c", value(9))
    assert next_file(listing, b"bb") == (b"c", value(9))
    assert next_file(listing, b"d") is None
