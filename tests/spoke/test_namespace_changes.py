"""The change log against a list of all invalidations that ever were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farside.spoke import changes
from farside.spoke.changes import Ask, ChangeLog, ancestors

PATHS = st.sampled_from([b"", b"a", b"a/b", b"a/b/c", b"ab"])
NAMES = st.lists(st.sampled_from([b"x", b"y", b"z"]), max_size=2, unique=True)
MARK = st.tuples(st.just("mark"), PATHS, NAMES, st.booleans())
OPS = st.lists(st.one_of(MARK, st.tuples(st.just("begin")), st.tuples(st.just("end"), st.integers(0, 5))))


@given(OPS)
def test_every_question_learns_all_that_changed_since(ops: list[tuple[object, ...]]) -> None:
    log = ChangeLog()
    history: list[tuple[bytes, list[bytes], bool]] = []
    asks: list[tuple[Ask, int]] = []
    for op in ops:
        match op:
            case ("mark", bytes() as path, list() as names, bool() as tree):
                log.mark(path, names, tree=tree)
                history.append((path, names, tree))
            case ("begin",):
                asks.append((log.begin(), len(history)))
            case ("end", int() as n) if asks:
                log.end(asks.pop(n % len(asks))[0])
        for ask, since in asks:
            for path in (b"", b"a", b"a/b", b"a/b/c", b"ab"):
                found = log.since(ask, path)
                later = history[since:]
                assert found.tree == any(tree and p in ancestors(path) for p, _, tree in later)
                assert found.whole == any(not tree and not n and p == path for p, n, tree in later)
                assert found.names == {n for p, ns, tree in later if p == path and not tree for n in ns}


def test_more_than_fits_means_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MAX_RECORDS", 100)
    log = ChangeLog()
    ask = log.begin()
    log.mark(b"a", [b"n%d" % n for n in range(101)])
    assert log.since(ask, b"elsewhere").tree
    later = log.begin()
    assert not any(log.since(later, b"a"))
    assert log.since(ask, b"a").touches(b"whatever")
