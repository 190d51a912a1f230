"""The queues and the bookkeeping of runs, against plain dictionaries."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from farside.protocol.messages import CHUNK
from farside.spoke.cachedfile import CachedFile
from farside.spoke.flight import FileFetch, Reason, Segment
from farside.spoke.wants import PREFETCHES, Wants

N = 60


class _File:
    """What the queues know of a file: its size."""

    size = N * CHUNK - 5


def files() -> FileFetch:
    return FileFetch(cast(CachedFile, _File()))


_run = st.tuples(st.integers(0, N - 1), st.integers(1, 12))
_op = st.tuples(
    st.sampled_from(["add", "front", "take over", "pop", "drop"]), _run, st.sampled_from(PREFETCHES)
)


@given(st.lists(_op, max_size=50))
def test_every_chunk_is_queued_once_for_its_best_reason(
    ops: list[tuple[str, tuple[int, int], Reason]],
) -> None:
    wants, one = Wants(), files()
    model: dict[int, Reason] = {}
    for name, (first, length), reason in ops:
        last = min(N, first + length)
        if name in ("add", "front"):
            wants.add(one, first, last, reason, front=name == "front")
            for chunk in range(first, last):
                model[chunk] = min(reason, model.get(chunk, reason))
        elif name == "take over":
            wants.take_over(one, first, last)
            for chunk in range(first, last):
                model.pop(chunk, None)
        elif name == "pop":
            best = wants.best()
            assert best == min(model.values(), default=None)
            if best is not None:
                head = wants.head(best)
                assert head is not None
                a, b = head.first, min(head.last, head.first + 3)
                wants.cut(head, a, b)
                for chunk in range(a, b):
                    assert model.pop(chunk) is best
        else:
            wants.remove_all(reason)
            model = {c: r for c, r in model.items() if r is not reason}
        queued = {c: s.reason for s in one.queued for c in range(s.first, s.last)}
        assert queued == model
        assert sum(s.last - s.first for s in one.queued) == len(model)
        assert [s.first for s in one.queued] == sorted(s.first for s in one.queued)
        assert wants.count == len(one.queued)


def test_first_in_first_out_and_merged_with_neighbours() -> None:
    wants, one, two = Wants(), files(), files()
    wants.add(one, 0, 2, Reason.READAHEAD)
    wants.add(two, 0, 2, Reason.READAHEAD)
    wants.add(one, 4, 6, Reason.READAHEAD)
    wants.add(one, 2, 4, Reason.READAHEAD)
    head = wants.head(Reason.READAHEAD)
    assert head is not None and (head.files, head.first, head.last) == (one, 0, 6)
    wants.remove(head)
    head = wants.head(Reason.READAHEAD)
    assert head is not None and head.files is two
    assert wants.count == 1


@given(st.integers(0, 2**128 - 1))
def test_missing_runs(bits: int) -> None:
    segment = Segment(files(), 7, 7 + 128, Reason.DEMAND)
    segment.missing = bits
    runs = segment.missing_runs()
    assert sum(segment.mask(a, b) for a, b in runs) == bits
    assert all(b < c for (_, b), (c, _) in pairwise(runs))
