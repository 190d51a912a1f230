"""The fetch scheduler over a real cache: coalescing, priorities, batching, back-pressure."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.spoke.scripted_source import Bench, Call, joined, run, start

from farside.protocol.messages import CHUNK
from farside.spoke.fetch import MAX_UNWRITTEN, Reason
from farside.spoke.window import Window

K = CHUNK
MB = 1 << 20


def test_demand_is_widened_and_answered_and_cached(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        file = b.file(b"d/a", 10 * K + 5)
        data = b.source.contents[b"d/a"].data
        assert bytes(await b.fetcher.read(file, 3 * K + 7, 100)) == data[3 * K + 7 : 3 * K + 107]
        assert b.source.calls[0].ranges() == [(b"d/a", 2, 4)]
        assert b.source.calls[0].urgent and b.source.calls[0].reason == "demand"
        await b.settled()
        assert [i for i in range(11) if file.state[i]] == [2, 3]
        # The end of the file, the rest of a chunk, and beyond the end.
        assert bytes(await b.fetcher.read(file, 10 * K, 4096)) == data[10 * K :]
        assert bytes(await b.fetcher.read(file, 10 * K + 5, 10)) == b""
        assert bytes(await b.fetcher.read(file, 0, 11 * K)) == data
        await b.settled()
        assert file.complete
        calls = len(b.source.calls)
        assert bytes(await b.fetcher.read(file, 0, 11 * K)) == data
        assert len(b.source.calls) == calls
        assert b.fetcher.stats.bytes["demand"] == len(data)  # no byte twice

    run(tmp_path, scenario)


def test_readers_of_the_same_chunks_share_one_fetch(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        b.source.auto = None
        file = b.file(b"a", 8 * K)
        data = b.source.contents[b"a"].data
        readers = [start(b.fetcher.read(file, n * 1000, 1000)) for n in range(80)]
        call = await b.source.call(0)
        await asyncio.sleep(0)
        call.answer()
        for n, reader in enumerate(readers):
            assert await reader == data[n * 1000 : (n + 1) * 1000]
        assert len(b.source.calls) == 1
        assert b.fetcher.stats.coalesced == 79

    run(tmp_path, scenario)


def test_reader_gets_its_chunk_before_the_rest_of_the_fetch(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        b.source.auto = None
        file = b.file(b"a", 4 * MB)
        data = b.source.contents[b"a"].data
        b.fetcher.want(file, 0, file.chunks - 1, Reason.READAHEAD)
        call = await b.source.call(0)
        parts = call.blocks(4 * K)
        reader = start(b.fetcher.read(file, 0, K))
        await asyncio.sleep(0)
        call.send(parts[0])
        assert await reader == data[:K]
        assert b.fetcher.stats.inflight_bytes > 0
        for other in b.source.calls:
            other.answer()

    run(tmp_path, scenario)


def test_answered_from_memory_while_the_disk_write_waits(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        file = b.file(b"a", 4 * K)
        data = b.source.contents[b"a"].data
        with b.cache.structure:  # nothing can be written while it is held
            assert bytes(await b.fetcher.read(file, 0, K)) == data[:K]
            assert bytes(await b.fetcher.read(file, K, 10)) == data[K : K + 10]
            assert bytes(file.state) == bytes(4) and len(b.source.calls) == 1
            assert b.fetcher.stats.unwritten_bytes == 2 * K
        await b.settled()
        assert bytes(file.state) == b"\1\1\0\0" and b.fetcher.stats.unwritten_bytes == 0

    run(tmp_path, scenario)


def test_prefetch_waits_for_a_disk_that_is_slower_than_the_link(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        file = b.file(b"a", 4 * K)
        big = b.file(b"big", 96 * MB)
        with b.cache.structure:
            b.fetcher.want(big, 0, big.chunks - 1, Reason.READAHEAD)
            async with asyncio.timeout(10):
                while b.fetcher.stats.unwritten_bytes < MAX_UNWRITTEN or b.fetcher.stats.inflight_bytes:
                    await asyncio.sleep(0.001)
            assert b.fetcher.stats.unwritten_bytes <= MAX_UNWRITTEN + 9 * MB
            assert b.fetcher.queued_bytes > 0
            await b.fetcher.read(file, 0, 10)  # a demand is not held back
        await b.settled()
        assert big.complete

    run(tmp_path, scenario, window=Window(ceiling=8 * MB))


def test_demand_is_not_stuck_behind_queued_fill_and_promotes_it(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        b.source.auto = None
        file = b.file(b"a", 100 * MB)
        data = b.source.contents[b"a"].data
        b.fetcher.want(file, 0, file.chunks - 1, Reason.FILL)
        await b.source.call(0)
        await asyncio.sleep(0)
        sent = len(b.source.calls)
        assert sum(b1 - a for c in b.source.calls for _, a, b1 in c.ranges()) * K <= b.fetcher.window.size
        reader = start(b.fetcher.read(file, 50 * MB + 5, 10))
        call = await b.source.call(sent)
        assert call.urgent and call.ranges() == [(b"a", 800, 802)]
        call.answer()
        assert await reader == data[50 * MB + 5 : 50 * MB + 15]
        assert b.fetcher.promoted == 1
        b.source.auto = Call.answer
        for other in b.source.calls[:sent]:
            other.answer()
        await b.settled()
        assert file.complete
        assert sum(b.fetcher.stats.bytes.values()) == 100 * MB  # no chunk twice

    run(tmp_path, scenario)


def test_priorities_among_prefetches(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        order: list[str] = []

        def answer(call: Call) -> None:
            order.append(call.reason)
            call.answer()

        b.source.auto = answer
        files = {r: b.file(r.label.encode(), 8 * MB) for r in (Reason.FILL, Reason.READAHEAD, Reason.PLANNED)}
        for reason, file in files.items():
            b.fetcher.want(file, 0, file.chunks - 1, reason)
        await b.settled()
        assert order == sorted(order, key=["planned", "readahead", "fill"].index)
        assert all(f.complete for f in files.values())

    run(tmp_path, scenario)


def test_better_reason_takes_over_and_worse_one_changes_nothing(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        file = b.file(b"a", 64 * K)
        b.fetcher.want(file, 0, 63, Reason.FILL)
        b.fetcher.want(file, 16, 31, Reason.PLANNED)
        b.fetcher.want(file, 0, 40, Reason.READAHEAD)
        b.fetcher.want(file, 0, 63, Reason.FILL)
        await b.settled()
        got = {
            reason: joined([r for call in b.source.calls if call.reason == reason for r in call.ranges()])
            for reason in ("planned", "readahead", "fill")
        }
        assert got == {
            "planned": [(b"a", 16, 32)],
            "readahead": [(b"a", 0, 16), (b"a", 32, 41)],
            "fill": [(b"a", 41, 64)],
        }

    run(tmp_path, scenario)


def test_neighbours_are_merged_and_small_files_batched(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        file = b.file(b"a", 16 * K)
        for chunk in (0, 1, 2, 3, 7, 6, 5, 4):
            b.fetcher.want(file, chunk, chunk, Reason.READAHEAD)
        small = [b.file(b"s%03d" % n, 100 + n) for n in range(600)]
        for f in small:
            b.fetcher.want(f, 0, 0, Reason.READAHEAD)
        await b.settled()
        runs = [r for call in b.source.calls for r in call.ranges() if r[0] == b"a"]
        assert joined(runs) == [(b"a", 0, 8)]
        assert len(runs) <= 2, "neighbours are one run, cut by the size of a request at most"
        assert len(b.source.calls) <= 5
        assert all(f.complete for f in small)

    run(tmp_path, scenario)


def test_cancelled_reader_does_not_take_the_fetch_from_others(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        b.source.auto = None
        file = b.file(b"a", 4 * K)
        first = start(b.fetcher.read(file, 0, 10))
        second = start(b.fetcher.read(file, 5, 10))
        call = await b.source.call(0)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        call.answer()
        assert await second == b.source.contents[b"a"].data[5:15]
        await b.settled()
        assert file.state[0] == 1 and len(b.source.calls) == 1

    run(tmp_path, scenario)


def test_fill_never_evicts(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        kept = b.file(b"kept", 2 * MB)
        await b.fetcher.read(kept, 0, 2 * MB)
        await b.settled()
        b.fetcher.want(b.file(b"big", 16 * MB), 0, 255, Reason.FILL)
        await b.settled()
        assert kept.complete and b.fetcher.stats.dropped
        await b.fetcher.complete(b.file(b"more", 4 * MB), 0, 63)

    run(tmp_path, scenario, size_limit=8 * MB)


def test_complete_waits_and_counts_what_is_missing(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        file = b.file(b"a", 20 * MB + 1)
        assert await b.fetcher.complete(file, 0, file.chunks - 1) == 0
        assert file.complete
        gone = b.file(b"gone", MB)
        del b.source.contents[b"gone"]
        assert await b.fetcher.complete(gone, 0, 15) == 16

    run(tmp_path, scenario)


def test_cancel_prefetch_empties_the_queue_of_one_file(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        b.source.auto = None
        one, two = b.file(b"one", 64 * MB), b.file(b"two", MB)
        b.fetcher.want(one, 0, one.chunks - 1, Reason.FILL)
        b.fetcher.want(two, 0, 15, Reason.FILL)
        await b.source.call(0)
        b.fetcher.cancel_prefetch(one)
        assert b.fetcher.queued_bytes == MB
        b.source.auto = Call.answer
        for call in list(b.source.calls):
            call.answer()
        await b.settled()
        assert two.complete and not one.complete

    run(tmp_path, scenario)
