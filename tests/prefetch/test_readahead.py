"""Readahead as a pure state machine: what is asked for is ahead of the reader, once, and bounded."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from farside.prefetch.readahead import FIRST, STREAMS, Advice, Readahead
from farside.protocol.messages import CHUNK

MB = 1 << 20
LIMIT = 64 * MB


def quiet(ra: Readahead, offset: int, size: int) -> bool:
    """Whether a read lies in front of every marker, so that it cannot change anything."""
    return any(t.begin <= offset and offset + size <= t.marker and not t.stride for t in ra._streams)


def chunks(advice: Advice) -> set[int]:
    return {c for first, last in advice.runs for c in range(first, last + 1)}


def read_through(
    ra: Readahead, size: int, step: int, begin: int = 0, limit: int = LIMIT
) -> tuple[set[int], int]:
    """Read a file in steps as the mount does; the chunks asked for and how often ``read`` was called."""
    asked: set[int] = set()
    calls = 0
    for at in range(begin, size, step):
        if not quiet(ra, at, step):
            asked |= chunks(ra.read(at, step, limit))
            calls += 1
    return asked, calls


def test_sequential_reader_has_all_asked_ahead_in_few_calls() -> None:
    size = 1024 * MB
    asked, calls = read_through(Readahead(size), size, 128 * 1024)
    assert asked == set(range(2, size // CHUNK))
    assert calls < 100


def test_distance_reaches_the_limit_within_a_few_round_trips() -> None:
    ra = Readahead(1024 * MB)
    at, trips = 0, 0
    while ra.distance < LIMIT:  # the reader eats what is there and waits for the rest
        trips += 1
        ra.read(at, 128 * 1024, LIMIT)
        at = ra._streams[0].ahead
    assert trips <= 4


def test_header_reader_costs_little() -> None:
    ra = Readahead(1024 * MB)
    assert len(chunks(ra.read(0, 4096, LIMIT))) * CHUNK <= FIRST + CHUNK
    assert quiet(ra, 4096, 4096) and quiet(ra, 0, 4096)


def test_marker_leaves_time() -> None:
    """When a marker is passed, most of the distance is still ahead of the reader."""
    ra = Readahead(1024 * MB)
    at = 0
    while at < 900 * MB:
        if not quiet(ra, at, 128 * 1024):
            if ra.distance == LIMIT:
                assert ra._streams[0].ahead - at >= LIMIT * 3 // 4 - MB
            ra.read(at, 128 * 1024, LIMIT)
        at += 128 * 1024


def test_kernel_order_is_still_one_stream() -> None:
    rng = random.Random(1)
    size = 256 * MB
    ra = Readahead(size)
    reads = list(range(0, size, 128 * 1024))
    for at in range(1, len(reads) - 8, 8):  # a few readahead requests of the kernel in any order
        part = reads[at : at + 8]
        rng.shuffle(part)
        reads[at : at + 8] = part
    asked: set[int] = set()
    for offset in reads:
        if not quiet(ra, offset, 128 * 1024):
            asked |= chunks(ra.read(offset, 128 * 1024, LIMIT))
    assert len(asked) > 0.95 * size / CHUNK
    assert len(ra._streams) <= 2


def test_two_threads_with_one_descriptor() -> None:
    size = 256 * MB
    ra = Readahead(size)
    asked: set[int] = set()
    for n in range(1024):
        for begin in (0, size // 2):
            at = begin + n * 128 * 1024
            if not quiet(ra, at, 128 * 1024):
                asked |= chunks(ra.read(at, 128 * 1024, LIMIT))
    assert len(asked) > 0.95 * size / CHUNK


def test_strided_reader() -> None:
    ra = Readahead(1024 * MB)
    step, size = 5 * MB, 64 * 1024
    asked: set[int] = set()
    missed = 0
    for n in range(100):
        at = 3 * MB + n * step
        if at // CHUNK not in asked:
            missed += 1
        if not quiet(ra, at, size):
            asked |= chunks(ra.read(at, size, LIMIT))
    assert missed <= 4
    assert len(asked) <= 200


def test_strided_backwards_and_standing_still() -> None:
    ra = Readahead(1024 * MB)
    asked: set[int] = set()
    for n in range(50):
        asked |= chunks(ra.read(900 * MB - n * 4 * MB, CHUNK, LIMIT))
    assert (900 * MB - 60 * 4 * MB) // CHUNK in asked
    ra = Readahead(1024 * MB)
    for _ in range(50):
        assert not ra.read(500 * MB, CHUNK, LIMIT).runs


def test_random_reader_gets_nothing() -> None:
    rng = random.Random(2)
    ra = Readahead(64 << 30)
    asked, said_random = 0, 0
    for _ in range(2000):
        advice = ra.read(rng.randrange(1, (64 << 30) - MB), 16 * 1024, LIMIT)
        asked += len(chunks(advice))
        said_random += advice.random
    assert asked * CHUNK < 100 * MB
    assert said_random > 1900


def test_next_file_is_asked_near_the_end_and_inherits() -> None:
    size = 40 * MB
    ra = Readahead(size)
    told = 0
    for at in range(0, size, 128 * 1024):
        if not quiet(ra, at, 128 * 1024):
            told = max(told, ra.read(at, 128 * 1024, LIMIT).next_file)
    assert 16 * MB <= told <= LIMIT
    following = Readahead(size, inherited=ra.distance)
    advice = following.read(0, 128 * 1024, LIMIT)
    assert len(chunks(advice)) * CHUNK >= size - 128 * 1024
    assert advice.next_file > 0


def test_one_read_at_the_start_does_not_ask_for_the_next_file() -> None:
    assert Readahead(1500 * 1024).read(0, 128 * 1024, LIMIT).next_file == 0
    zip_index = Readahead(100 * MB)
    zip_index.read(100 * MB - 4096, 4096, LIMIT)
    assert zip_index.read(100 * MB - 8192, 4096, LIMIT).next_file == 0


@given(
    size=st.integers(1, 300 * MB),
    reads=st.lists(st.tuples(st.integers(0, 400 * MB), st.integers(0, 2 * MB)), max_size=60),
    limit=st.integers(0, 256 * MB),
)
def test_any_reads_give_runs_inside_the_file_and_bounded(
    size: int, reads: list[tuple[int, int]], limit: int
) -> None:
    ra = Readahead(size)
    last_chunk = (size - 1) // CHUNK
    for offset, length in reads:
        advice = ra.read(offset, length, limit)
        for first, last in advice.runs:
            assert 0 <= first <= last <= last_chunk
        assert (
            sum(last - first + 1 for first, last in advice.runs) * CHUNK
            <= 2 * max(limit, FIRST) + 130 * CHUNK
        )
        assert 0 <= advice.next_file <= max(limit, FIRST) + 2 * MB
        assert len(ra._streams) <= STREAMS


def test_hits_are_told_of_only_where_they_carry_a_pattern_on() -> None:
    ra = Readahead(1 << 30)
    advice = ra.read(0, 128 * 1024, LIMIT)
    ahead = (advice.runs[-1][1] + 1) * CHUNK
    assert not ra.moves(128 * 1024, 128 * 1024), "in front of the marker"
    assert ra.moves(ahead - 128 * 1024, 128 * 1024), "behind it"
    assert not ra.moves(512 << 20, 16 * 1024), "elsewhere"
    for n in range(4):
        ra.read((256 << 20) + n * (1 << 20), 16 * 1024, LIMIT)
    assert ra.moves((256 << 20) + 4 * (1 << 20), 16 * 1024), "the next stride"
    assert not ra.moves((300 << 20) + 7, 16 * 1024)
