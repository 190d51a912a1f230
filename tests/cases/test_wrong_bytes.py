"""Cases of wrong bytes that were returned as success. Promise 1: right bytes or an error."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from tests.cases.conftest import SEEN_S, Site, drop_pages, errno_of
from tests.cases.lying_hub import block, checksums_of, honestly, spoke_of, version_of
from tests.mount.conftest import wait_until
from tests.protocol.wire import run, until

from farside.errors import FarsideError
from farside.protocol.connection import Responder
from farside.protocol.messages import CHUNK, Block, Data, Read, ReadDone

MB = 1 << 20


def letters(seed: int, size: int) -> bytes:
    """Bytes without a single zero, no two pages alike."""
    block = random.Random(seed).randbytes(4093).replace(b"\0", b"\1")
    return (block * (size // len(block) + 1))[:size]


def has_size(path: Path, size: int) -> bool:
    return path.stat().st_size == size


# -- files that change while they are read -----------------------------------------------------------------


@pytest.mark.mount
def test_the_tail_of_a_growing_file_never_shows_bytes_that_nobody_wrote(site: Site) -> None:
    # juicedata/juicefs#5038
    line, lines = MB, 16
    whole = letters(1, line * lines)
    site.put("growing", b"")
    target, name = site.data / "growing", site.mnt / "growing"
    turn = threading.Semaphore(2)  # the writer is at most two lines ahead of what the reader has seen

    def write() -> None:
        with target.open("ab", buffering=0) as file:
            for at in range(0, len(whole), line):
                turn.acquire(timeout=5)
                for part in range(at, at + line, 100_000):  # a line is seen half written, too
                    file.write(whole[part : min(part + 100_000, at + line)])
                os.fsync(file.fileno())

    writer = threading.Thread(target=write)
    writer.start()
    seen, lengths = 0, set()
    end = time.monotonic() + 30
    while seen < len(whole):
        assert time.monotonic() < end, f"only {seen} bytes were seen"
        try:
            with name.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, seen - 10_000))
                at = file.tell()
                while data := file.read(300_000):
                    assert data == whole[at : at + len(data)], f"wrong bytes at {at}"
                    at += len(data)
                assert at == size, "the size of an open file must be that of its bytes"
                lengths.add(size)
                if at > seen:
                    turn.release(at // line - seen // line or 1)
                    seen = at
        except OSError as e:
            assert e.errno == errno.ESTALE, e  # it grew between open and read, and says so
    writer.join()
    assert len(lengths) > 3, "the reader was to see the file grow"


@pytest.mark.mount
def test_two_spokes_agree_on_the_tail_after_each_append(site: Site) -> None:
    # juicedata/juicefs#6309, with the appends at the hub (a spoke cannot write yet)
    content = b""
    site.put("log", b"")
    with site.second_mount() as other:
        for n in range(8):
            content += letters(n, 70_001 + n)
            with (site.data / "log").open("ab") as file:
                file.write(content[file.tell() :])
                file.flush()
                os.fsync(file.fileno())
            for log in (site.mnt / "log", other / "log"):
                wait_until(partial(has_size, log, len(content)), "tail seen", SEEN_S)
                assert hashlib.sha256(log.read_bytes()).digest() == hashlib.sha256(content).digest()


@pytest.mark.mount
def test_same_size_overwrites_in_the_same_second_are_seen_whole_and_in_time(site: Site) -> None:
    # rclone/rclone#6053
    second = 1_700_000_000
    site.put("eight", b"\0" * 8)
    target, name = site.data / "eight", site.mnt / "eight"
    written = [time.monotonic()]  # by value: when it was completely there
    stop = threading.Event()

    def write() -> None:
        fd = os.open(target, os.O_WRONLY)
        while not stop.wait(0.05):
            os.pwrite(fd, len(written).to_bytes(4, "big") * 2, 0)
            os.utime(fd, (second, second))
            written.append(time.monotonic())
        os.close(fd)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen: set[int] = set()
        last = 0
        end = time.monotonic() + 20
        while len(seen) < 25:
            assert time.monotonic() < end
            begun = time.monotonic()
            due = sum(at < begun - SEEN_S for at in written) - 1
            try:
                data = name.read_bytes()
            except OSError as e:
                assert e.errno == errno.ESTALE
                continue
            value = int.from_bytes(data[:4], "big")
            assert data == value.to_bytes(4, "big") * 2, "two versions mixed"
            assert value >= max(last, due), "older than promised"
            last = value
            seen.add(value)
    finally:
        stop.set()
        writer.join()
    wait_until(lambda: name.read_bytes() == (len(written) - 1).to_bytes(4, "big") * 2, "the last", SEEN_S)


@pytest.mark.mount
def test_a_hub_that_goes_away_between_open_and_read_is_an_error_not_an_empty_file(site: Site) -> None:
    # rclone/rclone#9530
    data = letters(3, MB)
    site.put("away", data)
    with (site.mnt / "away").open("rb", buffering=0) as file:
        site.cut()
        try:
            assert errno_of(lambda: file.read(4096)) in (errno.EIO, errno.ETIMEDOUT)
            assert (site.mnt / "away").stat().st_size == MB
        finally:
            site.restore()
        wait_until(lambda: site.status()["state"] == "up", "up")
        file.seek(0)
        assert file.readall() == data, "the handle heals with the link"


# -- a cache disk that does not keep what was written ------------------------------------------------------


def flip(path: Path, other: Path) -> None:
    with path.open("r+b") as file:
        file.seek(3 * CHUNK + 777)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))


def shift(path: Path, other: Path) -> None:
    """One 512 KiB run moves up by a page, its last page twice."""
    data = path.read_bytes()
    run = data[: 512 << 10]
    path.write_bytes(run[4096:] + run[-4096:] + data[len(run) :])


def swap(path: Path, other: Path) -> None:
    path.rename(path.with_suffix(".tmp"))
    other.rename(path)
    path.with_suffix(".tmp").rename(other)


def swap_with_side_cars(path: Path, other: Path) -> None:
    swap(path, other)
    swap(path.with_suffix(".meta"), other.with_suffix(".meta"))


def swap_side_cars(path: Path, other: Path) -> None:
    swap(path.with_suffix(".meta"), other.with_suffix(".meta"))


def zeros(path: Path, other: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def lose_data(path: Path, other: Path) -> None:
    path.unlink()


def lose_state(path: Path, other: Path) -> None:
    path.with_suffix(".meta").unlink()


def empty_data(path: Path, other: Path) -> None:
    os.truncate(path, 0)


def longer(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size + 4096)


FLIPPED = {"flip": 1, "shift": 8, "swap": 16, "zeros": 16}  # damaged chunks, where that is a matter of chunks

DAMAGES = [
    # juicedata/juicefs#5981, four times xrootd/xrootd#1420, a lost write, then xrootd/xrootd#2825
    flip,
    *(shift, swap, swap_with_side_cars, swap_side_cars),
    zeros,
    *(lose_data, lose_state, empty_data, longer),
]
SIZE = MB


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two cached files for each kind of damage, damaged while nothing was mounted; mounted again."""
    site = Site(tmp_path_factory.mktemp("damaged"))
    try:
        files = {
            f"{d.__name__}/{n}": letters(10 * i + n, SIZE) for i, d in enumerate(DAMAGES) for n in (0, 1)
        }
        for name, data in files.items():
            (site.data / name).parent.mkdir(exist_ok=True)
            (site.data / name).write_bytes(data)
        site.mount("--read-ahead", "0")
        for name, data in files.items():
            assert site.cached(name) == data
        site.settled()
        site.stack.unmount()
        stored = {path.read_bytes(): path for path in site.data_files()}
        for damage in DAMAGES:
            damage(stored[files[f"{damage.__name__}/0"]], stored[files[f"{damage.__name__}/1"]])
        site.mount("--read-ahead", "0")
        yield site
    finally:
        site.close()


@pytest.mark.mount
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_a_damaged_cache_is_noticed_counted_and_fetched_again(
    damaged: Site, damage: Callable[[Path, Path], None]
) -> None:
    corrupt, fetched = damaged.status()["cache"]["corrupt_chunks"], damaged.fetched()
    for n in (0, 1):
        name = f"{damage.__name__}/{n}"
        data = (damaged.data / name).read_bytes()
        assert damaged.cached(name) == data
        drop_pages(damaged.mnt / name)
        assert damaged.cached(name) == data, "the second read, maybe through the kernel alone"
    corrupt = damaged.status()["cache"]["corrupt_chunks"] - corrupt
    fetched = damaged.fetched() - fetched
    assert fetched > 0
    if damage.__name__ in FLIPPED:
        both = 2 if damage is swap else 1
        assert corrupt == FLIPPED[damage.__name__] * both
        assert fetched == corrupt * CHUNK, "only what was damaged crosses the link again"


@pytest.mark.mount
def test_a_disk_that_fills_up_in_the_middle_of_a_fill_leaves_nothing_bad_behind(
    make_site: Callable[..., Site],
) -> None:
    # xrootd/xrootd#663, rclone/rclone#4442
    site = make_site()
    files = {f"f{n}": letters(n, 4 * MB) for n in range(6)}
    for name, data in files.items():
        (site.data / name).write_bytes(data)
    with site.small_disk(64 * MB) as disk:
        site.mount("--reserve", "0%", cache_size=48 * MB)
        with (site.mnt / "f0").open("rb") as reader:
            head = reader.read(100_000)
            with (disk / "hog").open("wb", buffering=0) as hog:  # somebody else fills the disk under it
                while not errno_of(lambda: hog.write(bytes(MB))):
                    pass
            assert head + reader.read() == files["f0"]
        for name, data in files.items():
            assert site.cached(name) == data, "read through, although nothing can be kept"
        assert len(site.warnings()) == 1, "the trouble is said once, not for every read"
        (disk / "hog").unlink()
        site.kill()
        site.mount("--reserve", "0%", cache_size=48 * MB)
        for name, data in files.items():
            assert site.cached(name) == data
        site.settled()
        before = site.fetched()
        for name, data in files.items():
            drop_pages(site.mnt / name)
            assert site.cached(name) == data
        assert site.fetched() == before, "with room again it is kept"


# -- replies that are late, cut off, or not what was asked for ---------------------------------------------


def test_an_answer_after_the_deadline_touches_nothing_of_later_reads(tmp_path: Path) -> None:
    # juicedata/juicefs#7499
    contents = {b"slow": letters(1, 4 * CHUNK), b"other": letters(2, 4 * CHUNK)}

    async def main() -> None:
        late, answered = asyncio.Event(), asyncio.Event()

        async def answer(number: int, read: Read, respond: Responder) -> None:
            if read.files[0].path == b"slow" and not late.is_set():
                with contextlib.suppress(asyncio.CancelledError):  # it is too far on to stop
                    await asyncio.shield(late.wait())
                await late.wait()
                wrong = contents[b"other"]  # the late answer carries another file's bytes, claimed as its own
                for n, asked in enumerate(read.files):
                    for offset, length in asked.ranges:
                        data = wrong[offset : offset + length]
                        await respond.part(Data((block(asked, n, offset, data),)), data)
                await respond.finish(ReadDone(0))
                answered.set()
                return
            late.set()
            if not answered.is_set():
                await asyncio.wait_for(answered.wait(), 5)  # the late one first, then this one
            await honestly(contents, read, respond)

        async with spoke_of(tmp_path, contents, answer, timeout_s=0.3) as spoke:
            with pytest.raises(FarsideError):
                await spoke.read(b"slow")
            assert not any(spoke.file(b"slow").state), "nothing came, nothing is there"
            assert await spoke.read(b"other") == contents[b"other"]
            assert answered.is_set()
            assert await spoke.read(b"slow") == contents[b"slow"]
            await until(lambda: spoke.fetcher.idle)
            for path, data in contents.items():
                assert spoke.kept(path) == data

    run(main())


def test_a_clean_end_at_nine_tenths_is_not_the_end_of_the_file(tmp_path: Path) -> None:
    # huggingface/huggingface_hub#3047
    contents = {b"f": letters(1, MB)}
    ends, complete = 0, []

    def end_early(data: bytes, at: int) -> bytes | None:
        nonlocal ends
        if ends or at + len(data) < 0.9 * 128 * 1024:  # one reply, of the several that bring the file
            return data
        ends += 1
        return None  # closes in good order, as if that had been all

    async def main() -> None:
        async def answer(number: int, read: Read, respond: Responder) -> None:
            if number:
                complete.append(spoke.file(b"f").complete)
            await honestly(contents, read, respond)

        async with spoke_of(tmp_path, contents, answer, to_spoke=end_early) as spoke:
            assert await spoke.read(b"f") == contents[b"f"]
            assert ends == 1 and complete and not any(complete)
            await until(lambda: spoke.fetcher.idle)
            assert spoke.kept(b"f") == contents[b"f"]

    run(main())


@pytest.mark.parametrize("claim", ["from the start", "from where it was asked"])
def test_a_whole_file_in_answer_to_the_missing_range_is_not_put_behind_the_first_part(
    tmp_path: Path, claim: str
) -> None:
    # huggingface/huggingface_hub#3778
    contents = {b"f": letters(1, 16 * CHUNK)}
    first = 10 * CHUNK

    async def main() -> None:
        async def answer(number: int, read: Read, respond: Responder) -> None:
            (asked,), data = read.files, contents[b"f"]
            if number == 0:  # a part of it, and that was all
                assert asked.ranges == ((0, len(data)),)
                part = Data((block(asked, 0, 0, data[:first]),))
                await respond.part(part, data[:first])
                await respond.finish(ReadDone(first))
            elif number == 1:  # the range that is missing is ignored
                assert asked.ranges == ((first, len(data) - first),)
                at = 0 if claim == "from the start" else first
                await respond.part(Data((block(asked, 0, at, data),)), data)
                await respond.finish(ReadDone(len(data)))
            else:
                await honestly(contents, read, respond)

        async with spoke_of(tmp_path, contents, answer) as spoke:
            file = spoke.file(b"f")
            try:
                assert bytes(await spoke.fetcher.read(file, 0, 16 * CHUNK)) == contents[b"f"]
            except FarsideError:
                await until(lambda: spoke.fetcher.idle)
                assert not any(file.state[10:]) and not file.complete
            assert await spoke.read(b"f") == contents[b"f"]
            await until(lambda: spoke.fetcher.idle)
            assert spoke.kept(b"f") == contents[b"f"]

    run(main())


@pytest.mark.parametrize("lie", ["bytes of another file", "block of another file", "block of another place"])
def test_another_chunk_than_the_one_that_was_asked_for_is_never_served(tmp_path: Path, lie: str) -> None:
    # juicedata/juicefs#7499, xrootd/xrootd#1420
    contents = {b"f": letters(1, 8 * CHUNK), b"g": letters(2, 8 * CHUNK)}

    async def main() -> None:
        async def answer(number: int, read: Read, respond: Responder) -> None:
            if number:
                await honestly(contents, read, respond)
                return
            (asked,), data = read.files, contents[b"f"]
            other = contents[b"g"]
            wrong = block(asked, 0, 0, data)
            if lie == "bytes of another file":
                data = other  # (under the checksums of the right ones)
            elif lie == "block of another file":
                data = other
                wrong = Block(0, b"g", version_of(b"g"), 0, len(other), checksums_of(other))
            else:
                data = data[4 * CHUNK :] + data[: 4 * CHUNK]
            await respond.part(Data((wrong,)), data)
            await respond.finish(ReadDone(len(data)))

        async with spoke_of(tmp_path, contents, answer) as spoke:
            assert await spoke.read(b"f") == contents[b"f"]
            assert await spoke.read(b"g") == contents[b"g"]
            await until(lambda: spoke.fetcher.idle)
            for path, data in contents.items():
                assert spoke.kept(path) == data

    run(main())


# -- many at once ------------------------------------------------------------------------------------------

_READ_TOGETHER = """
import hashlib, os, sys
path, count = sys.argv[1], int(sys.argv[2])
gate, start = os.pipe()
results, out = os.pipe()
for n in range(count):
    if os.fork() == 0:
        os.close(start)
        os.read(gate, 1)  # returns for all of them when the parent closes its end
        with open(path, "rb", buffering=0) as file:
            digest = hashlib.sha256(file.readall()).hexdigest()
        os.write(out, digest.encode() + b" ")
        os._exit(0)
os.close(start)
os.close(out)
while data := os.read(results, 65536):
    os.write(1, data)
"""


@pytest.mark.mount
def test_eighty_processes_that_open_one_cold_file_get_the_same_right_bytes(site: Site) -> None:
    # fsspec/filesystem_spec#639
    data = letters(5, 3 * MB + 17)
    site.put("cold", data)
    before = site.fetched()
    done = subprocess.run(
        [sys.executable, "-c", _READ_TOGETHER, str(site.mnt / "cold"), "80"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == [hashlib.sha256(data).hexdigest()] * 80, done.stderr
    assert site.fetched() - before == len(data), "no byte crosses the link twice"


@pytest.mark.mount
def test_many_hashers_of_many_files_agree_while_files_leave_and_come_back(site: Site) -> None:
    # leil-io/leilfs#179
    files = {f"many/{n}": letters(100 + n, MB + n) for n in range(12)}
    site.put_all(files)
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}

    def hash_all(seed: int) -> None:
        order = random.Random(seed).sample(sorted(files), len(files))
        for name in order:
            path = site.mnt / name
            assert hashlib.sha256(path.read_bytes()).hexdigest() == sums[name], name
            drop_pages(path)
            if seed % 4 == 0:
                site.ask("evict", path=name)

    with ThreadPoolExecutor(8) as pool:
        for outcome in [pool.submit(hash_all, seed) for seed in range(16)]:
            outcome.result(60)
    assert site.status()["cache"]["corrupt_chunks"] == 0
