"""The fetch scheduler when something goes wrong: wrong bytes, dead links, changed files, bad disks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.spoke.scripted_source import Bench, Call, Part, run, start

from farside.errors import (
    ChecksumMismatch,
    FarsideError,
    HubUnreachable,
    ProtocolError,
    RemoteError,
    StaleVersion,
)
from farside.protocol.messages import CHUNK, Block, Data
from farside.spoke.fetch import Reason

K = CHUNK
MB = 1 << 20


def test_stale_version_reaches_every_waiter_and_drops_the_queue(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        b.source.auto = None
        file = b.file(b"a", 40 * MB)
        first = start(b.fetcher.read(file, 0, 10))
        second = start(b.fetcher.read(file, 20, 10))
        b.fetcher.want(file, 100, file.chunks - 1, Reason.READAHEAD)
        await b.source.call(1)
        b.source.add(b"a", 40 * MB, seed=1)
        for call in b.source.calls:
            call.answer()
        for reader in (first, second):
            with pytest.raises(StaleVersion) as caught:
                await reader
            assert caught.value.path == b"a"
        await b.settled()
        assert (b"a", b"value1") in b.stale
        assert not any(file.state)
        new = b.file(b"a")
        b.source.auto = Call.answer
        assert bytes(await b.fetcher.read(new, 0, 9)) == b.source.contents[b"a"].data[:9]

    run(tmp_path, scenario)


def test_errno_of_the_hub_reaches_the_reader(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        file, other = b.file(b"a", K), b.file(b"b", K)
        del b.source.contents[b"a"]
        with pytest.raises(RemoteError) as caught:
            await b.fetcher.read(file, 0, 1)
        assert caught.value.errno == 2
        b.fetcher.want(file, 0, 0, Reason.READAHEAD)  # of a batch, only the file that failed fails
        b.fetcher.want(other, 0, 0, Reason.READAHEAD)
        await b.settled()
        assert other.complete and not file.complete

    run(tmp_path, scenario)


def _twisted(kind: str, b: Bench) -> Callable[[Call], list[Part]]:
    """Answers that are wrong in one way each."""

    def twist(call: Call) -> list[Part]:
        parts: list[Part] = []
        for data, payload in call.blocks():
            (block,) = data.blocks
            fields = {
                f: getattr(block, f) for f in ("file", "path", "version", "offset", "length", "checksums")
            }
            if kind == "flipped bit":
                payload = payload[:-1] + bytes([payload[-1] ^ 1])
            elif kind == "other file's bytes":
                payload = b.source.contents[b"other"].data[: len(payload)]
            elif kind == "other file's block":
                payload = b.source.contents[b"other"].data[: len(payload)]
                fields |= {"path": b"other", "version": b.source.contents[b"other"].version}
            elif kind == "old version":
                fields["version"] = bytes(16)
            elif kind == "shifted by a page":
                payload = b.source.contents[b"a"].data[4096 : 4096 + len(payload)]
            elif kind == "other offset":
                fields["offset"] = block.offset + 2 * K
            elif kind == "odd offset":
                fields["offset"] = block.offset + 1
            elif kind == "file out of range":
                fields["file"] = 7
            elif kind == "negative file":
                fields["file"] = -1
            elif kind == "no checksums":
                fields["checksums"] = b""
            elif kind == "checksums missing":
                fields["checksums"] = block.checksums[:16]
            elif kind == "short block":
                payload = payload[:-1]
                fields["length"] = len(payload)
            elif kind == "length lies":
                fields["length"] = block.length - 1
            elif kind == "nothing":
                continue
            parts.append((Data((Block(**fields),)), payload))
        return parts

    return twist


WRONG = (
    "flipped bit",
    "other file's bytes",
    "other file's block",
    "old version",
    "shifted by a page",
    "other offset",
    "odd offset",
    "file out of range",
    "negative file",
    "no checksums",
    "checksums missing",
    "short block",
    "length lies",
    "nothing",
)


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("reason", ["demand", "readahead"])
def test_wrong_bytes_are_refetched_once_and_never_served(tmp_path: Path, kind: str, reason: str) -> None:
    # juicedata/juicefs#7499, xrootd/xrootd#1420, huggingface/huggingface_hub#3047
    async def scenario(b: Bench) -> None:
        b.source.add(b"other", 64 * K)
        file = b.file(b"a", 64 * K)
        data = b.source.contents[b"a"].data
        twist = _twisted(kind, b)
        wrong = 1

        def answer(call: Call) -> None:
            nonlocal wrong
            if wrong:
                wrong -= 1
                call.send(*twist(call))
                call.end()
            else:
                call.answer()

        b.source.auto = answer
        if reason == "readahead":
            b.fetcher.want(file, 2, 3, Reason.READAHEAD)
            await b.settled()
        assert bytes(await b.fetcher.read(file, 2 * K, 2 * K)) == data[2 * K : 4 * K]
        await b.settled()
        assert len(b.source.calls) == 2 and b.fetcher.stats.retries == 1
        for chunk in (2, 3):
            view = memoryview(bytearray(K))
            assert file.try_read(chunk * K, view) == K
            assert view == data[chunk * K : (chunk + 1) * K]
        assert sum(file.state) == 2
        wrong = 2
        with pytest.raises((ChecksumMismatch, ProtocolError)):
            await b.fetcher.read(file, 10 * K, 1)
        await b.settled()
        assert sum(file.state) == 2
        assert bytes(await b.fetcher.read(file, 10 * K, 1)) == data[10 * K : 10 * K + 1]

    run(tmp_path, scenario)


def test_reader_that_joins_a_bad_run_before_it_is_written_gets_right_bytes(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        file = b.file(b"a", 4 * K)
        data = b.source.contents[b"a"].data
        b.source.auto = None
        with b.cache.structure:
            b.fetcher.want(file, 0, 3, Reason.READAHEAD)
            call = await b.source.call(0)
            ((head, payload),) = call.blocks()
            call.send((head, payload[:-1] + b"!"))
            call.end()
            async with asyncio.timeout(5):
                while not b.fetcher.stats.unwritten_bytes:
                    await asyncio.sleep(0)
            reader = start(b.fetcher.read(file, 3 * K, K))
            (await b.source.call(1)).answer()
            assert await reader == data[3 * K :]
        await b.settled()
        assert file.complete and b.fetcher.stats.checksum_failures == 1

    run(tmp_path, scenario)


def test_link_that_drops_in_the_middle_and_comes_back(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        b.source.auto = None
        file = b.file(b"a", 16 * K)
        data = b.source.contents[b"a"].data
        reader = start(b.fetcher.read(file, 0, 2 * K))  # one request
        call = await b.source.call(0)
        call.send(call.blocks(K)[0])
        b.source.up = False
        call.fail(HubUnreachable("cut"))
        late = start(b.fetcher.read(file, 15 * K, 10))
        b.fetcher.want(b.file(b"b", K), 0, 0, Reason.READAHEAD)
        await asyncio.sleep(0.1)
        assert not reader.done() and len(b.source.calls) == 1
        b.source.up = True
        b.source.auto = Call.answer
        b.fetcher.link_up()
        assert await reader == data[: 2 * K]
        assert await late == data[15 * K : 15 * K + 10]
        assert b.source.calls[1].ranges() == [(b"a", 1, 2)]  # what had arrived is not asked again
        await b.settled()
        assert not file.absent(0, 1) and b.file(b"b").complete

    run(tmp_path, scenario)


def test_dead_link_fails_readers_in_bounded_time_and_heals_by_itself(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        file = b.file(b"a", 16 * K)
        await b.fetcher.read(file, 0, K)
        await b.settled()
        b.source.up = False
        loop = asyncio.get_running_loop()
        begun = loop.time()
        with pytest.raises(HubUnreachable) as caught:
            await b.fetcher.read(file, 8 * K, K)
        assert 0.2 < loop.time() - begun < 2.0
        assert caught.value.errno in (5, 110) and caught.value.path == b"a"
        assert bytes(await b.fetcher.read(file, 0, K)) == b.source.contents[b"a"].data[:K]
        b.source.up = True  # nobody calls link_up
        assert len(await b.fetcher.read(file, 8 * K, K)) == K

    run(tmp_path, scenario, timeout_s=0.3)


def test_link_that_says_up_but_fails_is_not_asked_in_a_tight_loop(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        b.source.auto = lambda call: call.fail(HubUnreachable("reset"))
        file = b.file(b"a", 16 * K)
        b.fetcher.want(file, 0, 15, Reason.READAHEAD)
        with pytest.raises(HubUnreachable):
            await b.fetcher.read(b.file(b"b", K), 0, 1)
        assert len(b.source.calls) < 20
        b.source.auto = Call.answer
        await b.settled()
        assert file.complete

    run(tmp_path, scenario, timeout_s=0.5)


def test_no_room_means_reading_through(tmp_path: Path) -> None:
    # rclone/rclone#4442
    async def scenario(b: Bench) -> None:
        file = b.file(b"a", 4 * MB)
        data = b.source.contents[b"a"].data
        for at in range(0, 4 * MB, 128 * K // 16):
            got = await b.fetcher.read(file, at, 8 * K)
            assert bytes(got) == data[at : at + 8 * K]
        b.fetcher.want(file, 0, 63, Reason.FILL)
        await b.settled()
        assert b.cache.used <= b.cache.limit

    run(tmp_path, scenario, size_limit=400 * 1024)


def test_after_a_restart_chunks_are_verified_not_fetched(tmp_path: Path) -> None:
    data = b""

    async def before(b: Bench) -> None:
        nonlocal data
        file = b.file(b"a", 2 * MB)
        data = b.source.contents[b"a"].data
        await b.fetcher.read(file, 0, 2 * MB)
        await b.settled()

    async def after(b: Bench) -> None:
        file = b.file(b"a", 2 * MB)
        readers = [start(b.fetcher.read(file, n * K, K)) for n in range(32)]
        assert b"".join([await r for r in readers]) == data
        assert not b.source.calls
        await b.settled()
        assert file.complete

    run(tmp_path, before)
    run(tmp_path, after)


def test_whole_file_is_verified_on_request(tmp_path: Path) -> None:
    async def before(b: Bench) -> None:
        await b.fetcher.complete(b.file(b"a", 9 * MB + 1), 0, 200)

    async def after(b: Bench) -> None:
        file = b.file(b"a", 9 * MB + 1)
        assert not file.complete
        await b.fetcher.verify(file)
        assert file.complete and not b.source.calls
        assert not b.fetcher.coming(file) and b.fetcher.idle
        fresh = b.file(b"b", MB)
        await b.fetcher.verify(fresh)
        assert b.fetcher.idle and not fresh.opens

    run(tmp_path, before)
    run(tmp_path, after)


def test_chunk_that_was_damaged_on_disk_is_fetched_again(tmp_path: Path) -> None:
    # juicedata/juicefs#5981
    async def before(b: Bench) -> None:
        await b.fetcher.read(b.file(b"a", 2 * MB), 0, 2 * MB)
        await b.settled()

    async def after(b: Bench) -> None:
        file = b.file(b"a", 2 * MB)
        assert bytes(await b.fetcher.read(file, 0, 2 * MB)) == b.source.contents[b"a"].data
        assert b.source.calls[0].ranges() == [(b"a", 5, 6)]
        assert b.cache.counters.corrupt_chunks == 1

    run(tmp_path, before)
    (path,) = (tmp_path / "cache").rglob("*.data")
    with path.open("r+b") as f:
        f.seek(5 * K + 17)
        old = f.read(1)
        f.seek(5 * K + 17)
        f.write(bytes([old[0] ^ 4]))
    run(tmp_path, after)


def test_close_fails_whoever_waits(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        b.source.auto = None
        file = b.file(b"a", 16 * MB)
        b.fetcher.want(file, 32, file.chunks - 1, Reason.READAHEAD)
        reader = start(b.fetcher.read(file, 0, 10))
        await b.source.call(1)
        b.source.up = False
        stranded = start(b.fetcher.read(b.file(b"b", K), 0, 1))
        await asyncio.sleep(0)
        await b.fetcher.close()
        for task in (reader, stranded):
            with pytest.raises(FarsideError):
                await task
        assert b.fetcher.idle

    run(tmp_path, scenario)


@pytest.fixture(autouse=True)
def _no_unexpected_log_lines(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    bad = [r for r in caplog.records if r.name in ("asyncio", "farside.spoke.transfer")]
    assert not bad, [r.getMessage() for r in bad]
