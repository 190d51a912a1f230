"""Hard links made while their files are served: a change by one name is told for all of them."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.hub.hub_tools import Told, serving, watching

from farside.hub.tree import Tree
from farside.protocol.attributes import attr_of
from farside.protocol.messages import ListDir

DIRECTORIES = ("a", "b", "c")


def case(test: Callable[[Path], Awaitable[None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        for name in DIRECTORIES:
            (tmp_path / name).mkdir()
        asyncio.run(asyncio.wait_for(test(tmp_path), 30))  # type: ignore[arg-type]

    run.__name__ = test.__name__  # type: ignore[attr-defined]
    run.__doc__ = test.__doc__
    return run


def list_all(tree: Tree) -> None:
    for path in (b"", *map(str.encode, DIRECTORIES)):
        tree.listing(path)


def stat_of(tree: Tree, path: bytes) -> int:
    """The link count that a spoke is told."""
    ((code, value),) = tree.stat((path,))
    assert code == 0
    return attr_of(value).nlink


async def linked(root: Path, told: Told) -> None:
    """Links a/one to b/two, and waits until both are told."""
    (root / "b" / "two").hardlink_to(root / "a" / "one")
    await told.until(lambda: told.tells_of(b"b", b"two") and told.tells_of(b"a", b"one"))
    told.changes.clear()


@case
async def test_a_link_made_after_its_file_was_listed(tmp_path: Path) -> None:
    """Nobody asks about the new name: it is found by its event, the old one by a search."""
    (tmp_path / "a" / "one").write_bytes(b"1")
    async with watching(tmp_path) as (tree, _, _, told):
        list_all(tree)
        await linked(tmp_path, told)
        for writer, other in ((b"b", b"two"), (b"a", b"one")), ((b"a", b"one"), (b"b", b"two")):
            with open(tmp_path / os.fsdecode(b"/".join(writer)), "ab") as file:
                file.write(b"x")
            await told.until(lambda other=other: told.tells_of(*other))
            told.changes.clear()
        (tmp_path / "b" / "two").chmod(0o600)
        await told.until(lambda: told.tells_of(b"a", b"one"))


@case
async def test_a_write_at_once_after_the_link(tmp_path: Path) -> None:
    (tmp_path / "a" / "one").write_bytes(b"1")
    async with watching(tmp_path) as (tree, _, _, told):
        list_all(tree)
        (tmp_path / "b" / "two").hardlink_to(tmp_path / "a" / "one")
        (tmp_path / "b" / "two").write_bytes(b"22")
        await told.until(lambda: told.tells_of(b"a", b"one"))


@case
async def test_the_first_name_was_only_asked_for(tmp_path: Path) -> None:
    """Its directory was never listed, but is watched."""
    (tmp_path / "a" / "one").write_bytes(b"1")
    async with watching(tmp_path) as (tree, _, _, told):
        assert stat_of(tree, b"a/one") == 1
        tree.listing(b"b")
        await linked(tmp_path, told)
        (tmp_path / "b" / "two").write_bytes(b"22")
        await told.until(lambda: told.tells_of(b"a", b"one"))


@case
async def test_the_second_name_was_only_asked_for(tmp_path: Path) -> None:
    """It was made where nobody watched."""
    (tmp_path / "a" / "one").write_bytes(b"1")
    async with watching(tmp_path) as (tree, _, _, told):
        tree.listing(b"a")
        (tmp_path / "b" / "two").hardlink_to(tmp_path / "a" / "one")
        assert stat_of(tree, b"b/two") == 2
        await told.until(lambda: told.tells_of(b"a", b"one"))
        told.changes.clear()
        (tmp_path / "b" / "two").write_bytes(b"22")
        await told.until(lambda: told.tells_of(b"a", b"one"))


@case
async def test_a_link_that_goes_before_the_search_ends(tmp_path: Path) -> None:
    """Once the hub has seen the link, its file is looked for, although no name of it is known any more."""
    (tmp_path / "a" / "one").write_bytes(b"1")
    async with watching(tmp_path) as (tree, _, _, told):
        list_all(tree)
        (tmp_path / "b" / "two").hardlink_to(tmp_path / "a" / "one")
        (tmp_path / "b" / "two").write_bytes(b"22")
        assert stat_of(tree, b"b/two") == 2
        (tmp_path / "b" / "two").unlink()
        await told.until(lambda: told.tells_of(b"a", b"one"))


@case
async def test_a_name_that_goes_is_told_to_the_others(tmp_path: Path) -> None:
    (tmp_path / "a" / "one").write_bytes(b"1")
    (tmp_path / "a" / "plain").write_bytes(b"1")
    async with watching(tmp_path) as (tree, _, _, told):
        list_all(tree)
        await linked(tmp_path, told)
        (tmp_path / "c" / "three").hardlink_to(tmp_path / "a" / "one")
        await told.until(lambda: told.tells_of(b"a", b"one") and told.tells_of(b"b", b"two"))
        told.changes.clear()
        (tmp_path / "b" / "two").unlink()
        await told.until(lambda: told.tells_of(b"a", b"one") and told.tells_of(b"c", b"three"))
        assert stat_of(tree, b"a/one") == 2
        told.changes.clear()
        (tmp_path / "a" / "plain").rename(tmp_path / "c" / "three")  # replaces a link
        assert stat_of(tree, b"c/three") == 1  # before the event is read
        await told.until(lambda: told.tells_of(b"a", b"one"))
        assert stat_of(tree, b"a/one") == 1


@case
async def test_a_link_that_is_renamed_is_told_by_its_new_name(tmp_path: Path) -> None:
    (tmp_path / "a" / "one").write_bytes(b"1")
    async with watching(tmp_path) as (tree, _, _, told):
        list_all(tree)
        await linked(tmp_path, told)
        (tmp_path / "b" / "two").rename(tmp_path / "c" / "three")
        await told.until(lambda: told.tells_of(b"a", b"one") and told.tells_of(b"c", b"three"))
        told.changes.clear()
        (tmp_path / "a" / "one").write_bytes(b"22")
        await told.until(lambda: told.tells_of(b"c", b"three"))
        assert not told.tells_of(b"b", b"two")


@case
async def test_a_change_where_nobody_watched_is_told_as_soon_as_it_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a" / "one").write_bytes(b"1")
    (tmp_path / "b" / "two").hardlink_to(tmp_path / "a" / "one")
    async with watching(tmp_path) as (tree, _, _, told):
        tree.listing(b"a")
        (tmp_path / "b" / "two").write_bytes(b"22")
        tree.listing(b"b")
        await told.until(lambda: told.tells_of(b"a", b"one"))


@case
async def test_very_many_links(tmp_path: Path) -> None:
    (tmp_path / "a" / "one").write_bytes(b"1")
    places = [(directory, f"l{number}") for directory in DIRECTORIES for number in range(1500)]
    async with watching(tmp_path) as (tree, _, _, told):
        list_all(tree)
        for directory, name in places:
            (tmp_path / directory / name).hardlink_to(tmp_path / "a" / "one")
        await told.until(lambda: told.tells_of(b"a", b"one"))
        list_all(tree)
        told.changes.clear()
        (tmp_path / "c" / "l7").write_bytes(b"22")
        await told.until(lambda: all(told.tells_of(d.encode(), n.encode()) for d, n in places))
        assert len(told.changes) < 50


def test_links_that_lie_elsewhere_are_looked_for_once(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for name in ("f", "g"):
        (root / name).write_bytes(b"1")
        (tmp_path / name).hardlink_to(root / name)
        (tmp_path / f"{name}-too").hardlink_to(root / name)

    async def main() -> None:
        async with serving(root) as (hub, spoke):

            async def searches(count: int) -> int:
                """Waits until there were so many."""
                async with asyncio.timeout(5):
                    while (done := hub.status()["portals"][0]["link_searches"]) < count:
                        await asyncio.sleep(0.005)
                return int(done)

            await spoke.attach()
            await spoke.call(ListDir("p", b""))
            await searches(1)  # linked not long before the hub's start: both are looked for
            for _ in range(3):
                spoke.told.changes.clear()
                (root / "f").write_bytes(b"x")
                await spoke.told.until(lambda: spoke.told.tells_of(b"", b"f"))
                await spoke.call(ListDir("p", b""))
            (root / "h").hardlink_to(root / "f")  # another name, but no more of them elsewhere
            await spoke.told.until(lambda: spoke.told.tells_of(b"", b"h"))
            await spoke.call(ListDir("p", b""))
            (tmp_path / "more").hardlink_to(root / "g")  # one more elsewhere
            await spoke.call(ListDir("p", b""))
            assert await searches(2) == 2

    asyncio.run(asyncio.wait_for(main(), 30))


def test_old_links_are_not_looked_for(tmp_path: Path) -> None:
    """They were links before anything was handed out, so all names that were are known."""
    (tmp_path / "f").write_bytes(b"1")
    (tmp_path / "g").hardlink_to(tmp_path / "f")

    async def main() -> None:
        async with watching(tmp_path) as (tree, watch, _, _):
            watch._links._since_ns += 10**10
            for _ in range(2):
                tree.stat((b"f",))
            assert not watch.take_wanted()

    asyncio.run(main())


def test_no_name_that_was_told_stays_older_than_its_file(tmp_path: Path) -> None:
    """A model of a spoke that believes what it was told, against random edits of linked files."""
    rng = random.Random(11)
    names = [f"{directory}/{letter}" for directory in DIRECTORIES for letter in "xyz"]
    for name in DIRECTORIES:
        (tmp_path / name).mkdir()

    def edit(fresh: set[str]) -> str:
        """One change; a link that was made in this round is not taken away in it (see semantics.md)."""
        one, two = rng.sample(names, 2)
        source, target = tmp_path / one, tmp_path / two
        kind = rng.choice(("create", "link", "link", "link", "write", "write", "chmod", "unlink", "rename"))
        try:
            match kind:
                case "create":
                    os.close(os.open(source, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
                case "link":
                    target.hardlink_to(source)
                    fresh.add(two)
                case "write":
                    with open(source, "r+b") as file:
                        file.write(rng.randbytes(8))
                case "chmod":
                    source.chmod(0o600 | rng.randrange(0o77))
                case "unlink" if one not in fresh:
                    source.unlink()
                case "rename" if not fresh & {one, two}:
                    source.rename(target)
        except OSError:
            return ""
        return f"{kind} {one} {two}"

    async def main() -> None:
        async with watching(tmp_path) as (tree, _, _, told):
            list_all(tree)
            believed: dict[str, bytes | None] = {name: None for name in names}

            def is_true() -> bool:
                """Takes in what was told, and whether all is now as believed."""
                changes, told.changes = told.changes, []
                for change in changes:
                    for name in names:
                        directory, _, last = name.encode().partition(b"/")
                        covered = change.path == directory and (not change.names or last in change.names)
                        if change.tree or covered:
                            believed[name] = tree.stat((name.encode(),))[0][1] or None
                for name, value in believed.items():
                    try:
                        info = os.stat(tmp_path / name)
                    except FileNotFoundError:
                        if value is not None:
                            return False
                        continue
                    if value is None or attr_of(value) != tree._versions.attr(info):
                        return False
                return True

            for _ in range(80):
                fresh: set[str] = set()
                done = [edit(fresh) for _ in range(rng.randrange(1, 5))]
                try:
                    await told.until(is_true, 3)
                except TimeoutError:
                    raise AssertionError(f"not told after {done}") from None

    asyncio.run(asyncio.wait_for(main(), 60))
