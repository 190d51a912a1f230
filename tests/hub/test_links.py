"""The table of links, by itself: what is known, told and wanted."""

from __future__ import annotations

import os

from farside.hub import links as links_module
from farside.hub.links import Links

SINCE = 10**18


def info(inode: int, nlink: int, ctime_ns: int = SINCE, mode: int = 0o100644) -> os.stat_result:
    seconds = ctime_ns // 10**9
    times = (seconds, seconds, seconds, 0.0, 0.0, float(seconds), ctime_ns, ctime_ns, ctime_ns)
    return os.stat_result((mode, inode, 1, nlink, 0, 0, 0, *times))


def test_single_files_and_directories_are_not_remembered() -> None:
    links = Links(SINCE)
    assert not links.seen(b"a", b"f", info(1, 1))
    assert not links.seen(b"a", b"d", info(2, 5, mode=0o40755))
    assert links.file(b"a", b"f") is links.file(b"a", b"d") is None and not links.wanted


def test_a_name_is_new_once() -> None:
    links = Links(SINCE)
    assert links.seen(b"a", b"f", info(1, 2)) and not links.seen(b"a", b"f", info(1, 2))
    assert links.current(b"a", b"f", info(1, 2)) and links.file(b"a", b"f") == (1, 1)
    assert not links.current(b"a", b"f", info(1, 3)) and not links.current(b"a", b"g", info(1, 2))
    assert not links.stirred


def test_a_change_without_an_event_is_told_for_all_names_once() -> None:
    links = Links(SINCE)
    for directory in (b"a", b"b"):
        links.seen(directory, b"f", info(1, 2))
    assert not set(links.take_stirred())
    links.seen(b"a", b"f", info(1, 2, SINCE + 5))
    assert set(links.take_stirred()) == {(b"a", b"f"), (b"b", b"f")}
    links.seen(b"b", b"f", info(1, 2, SINCE + 6))
    assert not set(links.take_stirred()), "told as changed, and not looked at since"
    links.seen(b"a", b"f", info(1, 2, SINCE + 7))
    assert len(set(links.take_stirred())) == 2


def test_a_name_that_is_given_to_another_file_stirs_the_old_one() -> None:
    links = Links(SINCE)
    for directory in (b"a", b"b"):
        links.seen(directory, b"f", info(1, 2))
    assert links.seen(b"a", b"f", info(2, 2))
    assert set(links.take_stirred()) == {(b"b", b"f")}
    assert not links.seen(b"a", b"f", info(3, 1))
    assert links.file(b"a", b"f") is None


def test_wanted_while_names_are_missing_and_not_once_they_lie_elsewhere() -> None:
    links = Links(SINCE)
    links.seen(b"a", b"f", info(1, 3))
    assert links.take_wanted() == {(1, 1)}
    links.seen(b"b", b"f", info(1, 3))
    links.sought({(1, 1)})
    for name in (b"f", b"g"):
        links.seen(b"c", name, info(1, 4 + (name == b"g")))
        assert not links.take_wanted(), "one lies elsewhere, all others are known"
    links.seen(b"a", b"f", info(1, 6))
    assert links.take_wanted() == {(1, 1)}


def test_not_wanted_when_found_complete_in_the_meantime_but_when_lost() -> None:
    links = Links(SINCE)
    links.seen(b"a", b"f", info(1, 2))
    links.stirred.add((1, 1))
    set(links.take_stirred())
    links.seen(b"a", b"g", info(2, 2))
    links.seen(b"a", b"h", info(2, 2))
    links.drop(b"a", b"f")
    assert links.take_wanted() == {(1, 1)}


def test_what_was_linked_before_the_first_name_was_handed_out_is_not_wanted() -> None:
    links = Links(SINCE)
    links.seen(b"a", b"f", info(1, 2, SINCE - 10**10))
    assert links.file(b"a", b"f") == (1, 1) and not links.wanted


def test_directories_that_go_take_their_names_along() -> None:
    links = Links(SINCE)
    for directory in (b"a", b"a/x", b"ab", b""):
        links.seen(directory, b"f", info(1, 4))
    links.drop_tree(b"a")
    links.stirred.add((1, 1))
    assert set(links.take_stirred()) == {(b"ab", b"f"), (b"", b"f")}
    links.drop_directory(b"")
    links.drop_tree(b"")
    links.drop(b"a", b"f")
    links.stirred.add((1, 1))
    assert not set(links.take_stirred()) and links.file(b"ab", b"f") is None


def test_the_table_is_bounded(monkeypatch: object) -> None:
    links = Links(SINCE)
    held, links_module.MAX_LINKS = links_module.MAX_LINKS, 2
    try:
        assert [links.seen(b"a", b"%d" % n, info(n, 2)) for n in range(1, 5)] == [True, True, False, False]
        links.drop(b"a", b"1")
        assert links.seen(b"a", b"3", info(3, 2))
    finally:
        links_module.MAX_LINKS = held
