"""The watch: whatever changes behind the hub's back is told, soon, under its right path."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import random
import stat
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.hub.hub_tools import Told, settle, watching

from farside.hub import watch as watch_module
from farside.hub.content import ContentReader
from farside.hub.portal import Portal
from farside.hub.tree import Tree
from farside.hub.versions import Versions
from farside.protocol.attributes import attr_of
from farside.protocol.messages import DirChange, FileRanges


def case(test: Callable[[Path], Awaitable[None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        asyncio.run(asyncio.wait_for(test(tmp_path), 30))  # type: ignore[arg-type]

    run.__name__ = test.__name__  # type: ignore[attr-defined]
    run.__doc__ = test.__doc__
    return run


CHANGES: dict[str, Callable[[Path], object]] = {
    "create": lambda root: (root / "d" / "new").touch(),
    "mkdir": lambda root: (root / "d" / "new").mkdir(),
    "write": lambda root: (root / "d" / "f").write_bytes(b"other"),
    "append": lambda root: os.write(os.open(root / "d" / "f", os.O_WRONLY | os.O_APPEND), b"x"),
    "truncate": lambda root: os.truncate(root / "d" / "f", 0),
    "chmod": lambda root: (root / "d" / "f").chmod(0o600),
    "utime": lambda root: os.utime(root / "d" / "f", ns=(1, 1)),
    "remove": lambda root: (root / "d" / "f").unlink(),
    "rename": lambda root: (root / "d" / "f").rename(root / "d" / "g"),
    "replace": lambda root: (root / "d" / "g").rename(root / "d" / "f"),
    "link": lambda root: (root / "d" / "new").hardlink_to(root / "d" / "f"),
    "symlink": lambda root: (root / "d" / "new").symlink_to("f"),
    "rmdir": lambda root: (root / "d" / "sub").rmdir(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_kind_of_change_is_told(tmp_path: Path, change: str) -> None:
    async def main() -> None:
        (tmp_path / "d" / "sub").mkdir(parents=True)
        (tmp_path / "d" / "f").write_bytes(b"data")
        (tmp_path / "d" / "g").write_bytes(b"other")
        async with watching(tmp_path) as (tree, _, _, told):
            before = {name: value for name, value in tree.listing(b"d").entries}
            tree.listing(b"")
            begun = time.monotonic()
            CHANGES[change](tmp_path)
            after = {name: value for name, value in tree.listing(b"d").entries}
            differing = {name for name in before | after if before.get(name) != after.get(name)}
            assert differing
            await told.until(lambda: all(told.tells_of(b"d", name) for name in differing))
            assert time.monotonic() - begun < 2.0
            if change not in ("write", "append", "truncate", "chmod", "utime"):
                await told.until(lambda: told.tells_of(b"", b"d"))  # the directory's own stamps

    asyncio.run(main())


@case
async def test_bursts_are_told_together(tmp_path: Path) -> None:
    async with watching(tmp_path) as (tree, _, _, told):
        tree.listing(b"")
        for number in range(300):
            (tmp_path / f"{number}").touch()
        await told.until(lambda: all(told.tells_of(b"", b"%d" % n) for n in range(300)))
        assert len(told.changes) < 30


@case
async def test_very_many_names_become_one_directory(tmp_path: Path) -> None:
    async with watching(tmp_path) as (tree, _, _, told):
        tree.listing(b"")
        for number in range(watch_module.MAX_NAMES + 100):
            (tmp_path / f"{number}").touch()
        await told.until(lambda: told.tells_of(b"", b"any other name"))


@case
async def test_a_moved_directory_is_known_by_its_new_path(tmp_path: Path) -> None:
    (tmp_path / "a" / "sub").mkdir(parents=True)
    (tmp_path / "a" / "sub" / "f").touch()
    async with watching(tmp_path) as (tree, watch, _, told):
        for path in (b"", b"a", b"a/sub"):
            tree.listing(path)
        assert watch.count == 3
        (tmp_path / "a").rename(tmp_path / "b")
        await told.until(lambda: DirChange(b"a", (), True) in told.changes)
        assert told.tells_of(b"b/sub") and told.tells_of(b"", b"a") and told.tells_of(b"", b"b")
        tree.listing(b"b/sub")
        told.changes.clear()
        (tmp_path / "b" / "sub" / "f").write_bytes(b"x")
        await told.until(lambda: told.tells_of(b"b/sub", b"f"))
        assert not told.tells_of(b"a/sub")


@case
async def test_a_directory_listed_anew_before_its_move_was_noticed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    async with watching(tmp_path) as (tree, _, _, told):
        tree.listing(b"")
        tree.listing(b"a")
        (tmp_path / "a").rename(tmp_path / "b")
        (tmp_path / "a").mkdir()
        tree.listing(b"b")  # the loop has not run: the move is not known yet
        tree.listing(b"a")
        await told.until(lambda: told.tells_of(b"b") and told.tells_of(b"a"))
        tree.listing(b"b")
        tree.listing(b"a")
        told.changes.clear()
        (tmp_path / "b" / "x").touch()
        (tmp_path / "a" / "y").touch()
        await told.until(lambda: told.tells_of(b"b", b"x") and told.tells_of(b"a", b"y"))


@case
async def test_a_move_under_an_unwatched_parent_is_noticed_by_the_directory_itself(tmp_path: Path) -> None:
    (tmp_path / "p" / "a").mkdir(parents=True)
    async with watching(tmp_path) as (tree, watch, _, told):
        tree.listing(b"p/a")
        (tmp_path / "p" / "a").rename(tmp_path / "elsewhere")
        await told.until(lambda: told.tells_of(b"p/a") and told.tells_of(b"p", b"a"))
        assert watch.count == 0


@case
async def test_removed_directories_cost_no_watch(tmp_path: Path) -> None:
    async with watching(tmp_path) as (tree, watch, _, told):
        tree.listing(b"")
        for number in range(20):
            (tmp_path / f"{number}").mkdir()
            tree.listing(b"%d" % number)
        for number in range(20):
            (tmp_path / f"{number}").rmdir()
        await told.until(lambda: watch.count == 1)


@case
async def test_hard_links(tmp_path: Path) -> None:
    """A change by one name is told for all names that were listed."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "one").write_bytes(b"1")
    (tmp_path / "b" / "two").hardlink_to(tmp_path / "a" / "one")
    async with watching(tmp_path) as (tree, _, _, told):
        for path in (b"", b"a", b"b"):
            tree.listing(path)
        (tmp_path / "b" / "two").write_bytes(b"22")
        await told.until(lambda: told.tells_of(b"a", b"one") and told.tells_of(b"b", b"two"))
        told.changes.clear()
        (tmp_path / "b" / "two").unlink()
        await told.until(lambda: told.tells_of(b"a", b"one"))


@case
async def test_a_watch_limit_is_said_once_and_leaves_the_rest_unwatched(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}").mkdir()
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("farside.hub.watch").addHandler(handler)
    try:
        async with watching(tmp_path, max_watches=3) as (tree, watch, _, told):
            watched = [tree.listing(path).watched for path in (b"", b"0", b"1", b"2", b"3", b"1")]
            assert watched == [True, True, True, False, False, True]
            assert watch.limited and watch.available and not watch.complete
            (tmp_path / "1" / "x").touch()
            await told.until(lambda: told.tells_of(b"1", b"x"))
    finally:
        logging.getLogger("farside.hub.watch").removeHandler(handler)
    assert len(records) == 1


@case
async def test_lost_events_distrust_everything(tmp_path: Path) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 100_000:
        pytest.skip("the queue is too long to overflow in a test")
    async with watching(tmp_path) as (tree, watch, _, told):
        tree.listing(b"")
        descriptor = os.open(tmp_path, os.O_RDONLY)
        for number in range(limit // 2 + 100):  # without giving the loop a chance to read
            name = f"{number % 100}-{number}"
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
            os.unlink(name, dir_fd=descriptor)
        os.close(descriptor)
        await told.until(lambda: DirChange(b"", (), True) in told.changes)
        assert watch.overflows == 1
        told.changes.clear()
        (tmp_path / "after").touch()
        await told.until(lambda: told.tells_of(b"", b"after"))


@case
async def test_the_root_itself(tmp_path: Path) -> None:
    async with watching(tmp_path) as (tree, _, _, told):
        tree.listing(b"")
        tmp_path.chmod(0o700)
        await told.until(lambda: DirChange(b"", (), False) in told.changes)


def read_all(portal: Portal, versions: Versions, tree: Tree, path: bytes) -> tuple[bytes, bytes]:
    """(version, content) of a small file."""
    ((code, value),) = tree.stat((path,))
    assert code == 0
    version = attr_of(value).version
    part = ContentReader(portal, versions, tree, [FileRanges(path, version, ((0, 8192),))]).next_part()
    assert part is not None and not part.message.failures
    return version, b"".join(part.buffers)


@pytest.mark.parametrize("place", ["/dev/shm", "disk"])
def test_stores_through_a_mapping_change_the_version(tmp_path: Path, place: str) -> None:
    """They leave no stamp (tmpfs), or one stamp for many stores: the counter tells them apart."""
    if place == "disk":
        root = tmp_path
    else:
        root = Path(place) / f"farside-test-{os.getpid()}"
        root.mkdir()

    async def main() -> None:
        path = root / "f"
        path.write_bytes(b"a" * 4096)
        settle(path)
        portal = Portal("p", root)
        unstamped = portal.filesystem in ("tmpfs", "ramfs")
        told = Told()
        async with watching(root) as (tree, watch, _, _):
            versions = Versions(portal.device, {}, lambda *r: None, unstamped=lambda device: unstamped)
            tree._versions = watch._versions = versions
            watch._tell = told
            tree.listing(b"")
            with open(path, "r+b") as file:
                mapped = mmap.mmap(file.fileno(), 4096)
            mapped[0:4] = b"bbbb"
            settle(path)
            seen = {}
            version, data = read_all(portal, versions, tree, b"f")
            seen[version] = data
            before = path.stat().st_ctime_ns
            mapped[0:4] = b"cccc"
            assert path.stat().st_ctime_ns == before, "a second store leaves no stamp"
            mapped.close()
            await told.until(lambda: versions.bumps == 1 and told.tells_of(b"", b"f"))
            later, data = read_all(portal, versions, tree, b"f")
            assert later != version and data[:4] == b"cccc"
        portal.close()

    try:
        asyncio.run(main())
    finally:
        if place != "disk":
            (root / "f").unlink(missing_ok=True)
            root.rmdir()


def test_nothing_that_was_told_is_ever_older_than_the_last_change(tmp_path: Path) -> None:
    """A model of a spoke that believes listings until it is told otherwise, against random edits."""
    rng = random.Random(7)
    names = [f"n{i}" for i in range(4)]

    def edit() -> None:
        paths = [tmp_path / a for a in names] + [tmp_path / a / b for a in names for b in names]
        one, two = rng.sample(paths, 2)
        try:
            match rng.randrange(6):
                case 0:
                    one.mkdir()
                case 1:
                    one.write_bytes(rng.randbytes(rng.randrange(9)))
                case 2:
                    one.rename(two)
                case 3:
                    one.unlink() if not one.is_dir() else one.rmdir()
                case 4:
                    one.chmod(0o700 | rng.randrange(0o77))
                case 5:
                    one.symlink_to(two)
        except OSError:
            pass

    async def main() -> None:
        believed: dict[bytes, dict[bytes, bytes]] = {}
        async with watching(tmp_path) as (tree, _, _, told):

            def apply() -> None:
                for change in told.changes:
                    for path in list(believed):
                        if change.tree and (
                            not change.path or path == change.path or path.startswith(change.path + b"/")
                        ):
                            believed.pop(path)
                    entries = believed.get(change.path)
                    if change.tree or entries is None:
                        continue
                    if not change.names:
                        believed.pop(change.path)
                    for name in change.names:
                        path = change.path + b"/" + name if change.path else name
                        ((code, value),) = tree.stat((path,))
                        if code:
                            entries.pop(name, None)
                        else:
                            entries[name] = value
                told.changes.clear()

            def explore() -> None:
                for path in [b"", *[n.encode() for n in names]]:
                    if path not in believed and rng.random() < 0.7:
                        try:
                            believed[path] = dict(tree.listing(path).entries)
                        except OSError:
                            pass

            for number in range(60):
                explore()
                for _ in range(rng.randrange(1, 8)):
                    edit()
                    if rng.random() < 0.3:
                        explore()
                mark = b"mark%d" % number  # events are told in order: behind it, all of this round is told
                (tmp_path / mark.decode()).touch()
                tree.listing(b"")
                (tmp_path / mark.decode()).unlink()
                await told.until(lambda mark=mark: told.tells_of(b"", mark))
                apply()
                for path, entries in believed.items():
                    try:
                        now = dict(tree.listing(path).entries)
                    except OSError:
                        parent = believed.get(b"", {})
                        held = parent.get(path)
                        assert held is None or not stat.S_ISDIR(attr_of(held).mode), path
                        continue
                    plain = {name: value for name, value in entries.items() if name[:4] != b"mark"}
                    assert {n: v for n, v in now.items() if n[:4] != b"mark"} == plain, path

    asyncio.run(asyncio.wait_for(main(), 60))
