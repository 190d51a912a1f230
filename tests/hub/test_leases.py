"""Leases: nothing that changed is forgotten, whatever the order of changes and acknowledgements."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farside.hub.leases import MAX_HELD_NAMES, MAX_UNACKNOWLEDGED, Lease
from farside.protocol.messages import DirChange


def attached(lease_s: float = 10.0) -> Lease:
    lease = Lease(lease_s, 0.0)
    lease.attach("p")
    assert lease.opened("p", 0.0) is None
    return lease


def change(name: bytes, path: bytes = b"d") -> list[DirChange]:
    return [DirChange(path, (name,))]


def test_changes_get_numbers_in_order() -> None:
    lease = attached()
    sent = [lease.change("p", change(b"%d" % number), 1.0) for number in range(3)]
    assert [message.seq for message in sent if message] == [1, 2, 3]
    assert lease.change("other", change(b"x"), 1.0) is None, "not attached"


def test_nothing_is_told_before_the_answer_to_attach() -> None:
    lease = Lease(10.0, 0.0)
    lease.attach("p")
    assert lease.change("p", change(b"a"), 0.1) is None
    assert lease.heartbeat(0, 0.2) == []
    told = lease.opened("p", 0.3)
    assert told is not None and told.changes == (DirChange(b"d", (b"a",)),)
    lease.attach("p")
    assert lease.change("p", change(b"b"), 0.4) is not None, "attaching again holds nothing back"


def test_a_spoke_that_falls_behind_is_told_later_and_merged() -> None:
    lease = attached()
    sent = [lease.change("p", change(b"%d" % number), 1.0) for number in range(MAX_UNACKNOWLEDGED + 50)]
    assert sum(message is not None for message in sent) == MAX_UNACKNOWLEDGED
    assert lease.heartbeat(0, 2.0) == []
    (message,) = lease.heartbeat(1, 3.0)
    assert message.seq == MAX_UNACKNOWLEDGED + 1
    assert set(message.changes[0].names) == {
        b"%d" % n for n in range(MAX_UNACKNOWLEDGED, MAX_UNACKNOWLEDGED + 50)
    }


def test_what_is_held_back_is_bounded() -> None:
    lease = attached()
    for number in range(MAX_UNACKNOWLEDGED):
        lease.change("p", change(b"%d" % number), 1.0)
    for number in range(MAX_HELD_NAMES + 2):
        lease.change("p", change(b"%d" % number), 1.0)
    (message,) = lease.heartbeat(MAX_UNACKNOWLEDGED, 2.0)
    assert DirChange(b"", (), True) in message.changes and len(message.changes) <= 2


def test_the_lease_runs_out_without_heartbeats() -> None:
    lease = attached(10.0)
    message = lease.change("p", change(b"a"), 1.0)
    assert message is not None
    assert lease.live(9.9) and not lease.covers(message.seq, 9.9)
    assert not lease.live(10.0) and lease.covers(message.seq, 10.0)
    lease.heartbeat(0, 12.0)
    assert lease.live(21.9) and not lease.covers(message.seq, 21.9)
    assert lease.overdue_s(12.0) == 11.0
    lease.heartbeat(1, 13.0)
    assert lease.covers(message.seq, 13.0) and lease.overdue_s(13.0) == 0.0


def test_an_acknowledgement_from_the_future_covers_no_later_change() -> None:
    lease = attached()
    lease.change("p", change(b"a"), 1.0)
    lease.heartbeat(1000, 1.0)
    message = lease.change("p", change(b"b"), 1.0)
    assert message is not None and not lease.covers(message.seq, 1.0)


NAMES = st.sampled_from([b"a", b"b", b"c"])
PATHS = st.sampled_from([b"", b"d", b"d/e"])
CHANGE = st.one_of(
    st.builds(lambda p, n: DirChange(p, tuple(n)), PATHS, st.lists(NAMES, min_size=1, max_size=3)),
    st.builds(lambda p: DirChange(p), PATHS),
    st.builds(lambda p: DirChange(p, (), True), PATHS),
)


def covered(changes: list[DirChange], wanted: DirChange) -> bool:
    """Whether somebody who heeds ``changes`` distrusts everything that ``wanted`` names."""
    trees = {c.path for c in changes if c.tree}
    whole = {c.path for c in changes if not c.tree and not c.names}
    names = {(c.path, name) for c in changes for name in c.names}
    if wanted.tree:
        return wanted.path in trees
    if not wanted.names:
        return wanted.path in whole or wanted.path in trees
    return all(
        (wanted.path, name) in names or wanted.path in whole or wanted.path in trees for name in wanted.names
    )


@given(st.lists(st.one_of(st.lists(CHANGE, min_size=1, max_size=3), st.integers(0, 200)), max_size=150))
def test_every_change_is_told_in_the_end(steps: list[list[DirChange] | int]) -> None:
    lease = attached()
    told: list[DirChange] = []
    made: list[DirChange] = []
    last = 0
    for step in steps:
        if isinstance(step, int):
            messages = lease.heartbeat(step, 1.0)
        else:
            made += step
            message = lease.change("p", step, 1.0)
            messages = [message] if message else []
        for message in messages:
            assert message.seq == last + 1
            last = message.seq
            told += message.changes
    for message in lease.heartbeat(lease.seq, 2.0):
        told += message.changes
    assert all(covered(told, wanted) for wanted in made)
