"""Content: bytes of the version asked for, or a refusal; never a mixture, never new under an old name."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.hub.hub_tools import Exported, assemble, settle

from farside.errors import FarsideError
from farside.hub.content import ContentReader, check_read
from farside.protocol.attributes import attr_of
from farside.protocol.messages import CHUNK, MAX_PART, MAX_READ, FileRanges


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes of which no two chunks are alike."""
    return b"".join(
        xxhash.xxh3_128_digest(b"%d-%d" % (seed, at)) for at in range(0, size + 15, 16)
    )[:size]  # fmt: skip


def test_a_whole_file_in_parts_with_its_checksums(tmp_path: Path) -> None:
    data = noise(2 * MAX_PART + CHUNK + 123)
    (tmp_path / "f").write_bytes(data)
    exported = Exported(tmp_path)
    parts = exported.read(exported.ranges(b"f"))
    assert assemble(parts) == {0: data}
    assert len(parts) == 3 and all(len(payload) <= MAX_PART for _, payload in parts)
    version = exported.attr(b"f").version
    for message, payload in parts:
        (block,) = message.blocks
        assert (block.path, block.version, block.length) == (b"f", version, len(payload))
        expected = [xxhash.xxh3_128_digest(payload[i : i + CHUNK]) for i in range(0, len(payload), CHUNK)]
        assert block.checksums == b"".join(expected)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(0, 5 * CHUNK),
    ranges=st.lists(
        st.tuples(st.integers(0, 5).map(lambda n: n * CHUNK), st.integers(0, 6 * CHUNK)), max_size=5
    ),
)
def test_any_ranges(tmp_path: Path, size: int, ranges: list[tuple[int, int]]) -> None:
    data = noise(size)
    (tmp_path / "f").write_bytes(data)
    exported = Exported(tmp_path)
    parts = exported.read(exported.ranges(b"f", *ranges) if ranges else FileRanges(b"f", b"", ()))
    got: list[tuple[int, bytes]] = []
    failures = [failure for message, _ in parts for failure in message.failures]
    for message, payload in parts:
        at = 0
        for block in message.blocks:
            got.append((block.offset, payload[at : at + block.length]))
            at += block.length
    inside = []
    for offset, length in ranges:
        if offset > size:
            break
        inside.append(data[offset : offset + length])
    assert b"".join(inside) == b"".join(piece for _, piece in got)
    assert all(data[offset : offset + len(piece)] == piece for offset, piece in got)
    assert [f.errno for f in failures] == ([errno.EINVAL] if len(inside) < len(ranges) else [])


def test_many_small_files_share_a_part(tmp_path: Path) -> None:
    contents = {b"%03d" % number: noise(4096 if number % 3 else 0, number) for number in range(300)}
    for name, data in contents.items():
        (tmp_path / name.decode()).write_bytes(data)
    settle(*tmp_path.iterdir())
    exported = Exported(tmp_path)
    parts = exported.read(*[exported.ranges(name) for name in contents])
    assert len(parts) <= 4, "300 small files in one or two parts, not in 300"
    for number, (_name, data) in enumerate(contents.items()):
        assert assemble(parts, number) == {0: data}


def test_holes_and_offsets_beyond_4_gib(tmp_path: Path) -> None:
    end = (5 << 30) + 777
    with open(tmp_path / "f", "wb") as file:
        file.seek(end - 5)
        file.write(b"hello")
    exported = Exported(tmp_path)
    last = (end - 5) - (end - 5) % CHUNK
    parts = exported.read(exported.ranges(b"f", (0, CHUNK), (3 << 30, CHUNK), (last, CHUNK)))
    assert assemble(parts) == {
        0: bytes(CHUNK),
        3 << 30: bytes(CHUNK),
        last: bytes(end - 5 - last) + b"hello",
    }


def test_another_version_is_refused_with_the_value_that_holds(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    exported = Exported(tmp_path)
    request = exported.ranges(b"f")
    (tmp_path / "f").write_bytes(b"new")
    ((message, payload),) = exported.read(request)
    (failure,) = message.failures
    assert payload == b"" and message.blocks == ()
    assert failure.stale and failure.errno == errno.ESTALE and failure.path == b"f"
    assert failure.value == exported.tree.value(b"f")


def test_what_is_gone_or_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"data")
    exported = Exported(tmp_path)
    request = exported.ranges(b"f")

    def refusal() -> tuple[int, bool, bytes]:
        ((message, _),) = exported.read(request)
        assert not message.blocks
        (failure,) = message.failures
        return failure.errno, failure.stale, failure.value

    (tmp_path / "f").unlink()
    assert refusal() == (errno.ENOENT, True, b"")
    (tmp_path / "f").mkdir()
    assert refusal() == (errno.ESTALE, True, exported.tree.value(b"f"))
    (tmp_path / "f").rmdir()
    (tmp_path / "f").symlink_to("/etc/passwd")
    assert refusal() == (errno.ELOOP, True, exported.tree.value(b"f"))
    (tmp_path / "f").unlink()
    os.mkfifo(tmp_path / "f")
    assert refusal()[1:] == (True, exported.tree.value(b"f"))


def test_one_bad_file_does_not_spoil_the_others(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 10)
    exported = Exported(tmp_path)
    requests = [exported.ranges(name) for name in (b"a", b"b", b"c")]
    (tmp_path / "b").write_bytes(b"changed")
    parts = exported.read(*requests)
    assert assemble(parts, 0) == {0: b"a" * 10} and assemble(parts, 2) == {0: b"c" * 10}
    assert assemble(parts, 1) == {} and [f.file for m, _ in parts for f in m.failures] == [1]


def hooked(action: Callable[[int, int], None]) -> type[ContentReader]:
    """A reader that does something else right after each pread, before the second stat."""

    class Hooked(ContentReader):
        def _pread(self, fd: int, size: int, offset: int) -> bytes:
            data = super()._pread(fd, size, offset)
            action(fd, offset)
            return data

    return Hooked


@pytest.mark.parametrize("change", ["overwrite", "grow", "shrink", "replace", "chmod", "remove"])
def test_a_change_while_it_is_read_lets_no_byte_out(tmp_path: Path, change: str) -> None:
    path = tmp_path / "f"
    data = noise(3 * MAX_PART)
    path.write_bytes(data)
    exported = Exported(tmp_path)

    def act(fd: int, offset: int) -> None:
        if offset != MAX_PART:
            return
        if change == "overwrite":
            with open(path, "r+b") as file:
                file.write(b"x")
        elif change == "grow":
            with open(path, "ab") as file:
                file.write(b"x")
        elif change == "shrink":
            os.truncate(path, 100)
        elif change == "replace":
            (tmp_path / "new").write_bytes(bytes(len(data)))
            (tmp_path / "new").rename(path)
        elif change == "chmod":
            path.chmod(0o600)
        else:
            path.unlink()

    parts = exported.read(exported.ranges(b"f"), reader=hooked(act))
    assert assemble(parts) == {0: data[:MAX_PART]}, "the first part was sent before the change"
    (failure,) = [f for m, _ in parts for f in m.failures]
    assert failure.stale
    assert failure.value == (exported.tree.value(b"f") if change != "remove" else b"")


def test_a_raised_counter_while_it_is_read_lets_no_byte_out(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(noise(MAX_PART))
    exported = Exported(tmp_path)
    reader = hooked(lambda fd, offset: exported.versions.distrust())
    parts = exported.read(exported.ranges(b"f"), reader=reader)
    assert assemble(parts) == {} and exported.raised
    assert exported.read(exported.ranges(b"f")), "by its new version it can be read"


def test_io_errors_keep_their_number(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"data")
    exported = Exported(tmp_path)

    def fail(fd: int, offset: int) -> None:
        raise OSError(errno.EIO, "bad disk")

    ((message, _),) = exported.read(exported.ranges(b"f"), reader=hooked(fail))
    assert [(f.errno, f.stale) for f in message.failures] == [(errno.EIO, False)]


def test_a_file_shorter_than_it_says_is_an_error_not_zeros(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"data" * 100)

    class Short(ContentReader):
        def _pread(self, fd: int, size: int, offset: int) -> bytes:
            return super()._pread(fd, size, offset)[:-1]

    exported = Exported(tmp_path)
    ((message, payload),) = exported.read(exported.ranges(b"f"), reader=Short)
    assert payload == b"" and [f.errno for f in message.failures] == [errno.EIO]


def test_reads_that_return_little_at_a_time_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = noise(CHUNK + 5)
    (tmp_path / "f").write_bytes(data)
    exported = Exported(tmp_path)
    request = exported.ranges(b"f")
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: real(fd, min(size, 1000), offset))
    assert assemble(exported.read(request)) == {0: data}


def test_a_fresh_file_is_read_once_its_version_is_settled(tmp_path: Path) -> None:
    exported = Exported(tmp_path)
    (tmp_path / "f").write_bytes(b"data")
    changed = (tmp_path / "f").stat().st_ctime_ns
    assert assemble(exported.read(exported.ranges(b"f"))) == {0: b"data"}
    assert time.time_ns() - changed >= 20_000_000


@pytest.mark.parametrize("bad", [(1, 10), (-CHUNK, 10), (0, -1), (0, MAX_READ + 1), (1 << 62, 1 << 62)])
def test_impossible_ranges_are_refused(bad: tuple[int, int]) -> None:
    with pytest.raises(FarsideError) as caught:
        check_read([FileRanges(b"f", b"v", (bad,))])
    assert caught.value.errno == errno.EINVAL


def test_a_slow_file_does_not_hold_back_the_others(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(b"data")
    settle(*tmp_path.iterdir())
    exported = Exported(tmp_path)
    reader = hooked(lambda fd, offset: time.sleep(0.03))
    parts = exported.read(exported.ranges(b"a"), exported.ranges(b"b"), reader=reader)
    assert [len(message.blocks) for message, _ in parts] == [1, 1]


def test_closing_early_leaves_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(noise(3 * MAX_PART))
    exported = Exported(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    reader = ContentReader(exported.portal, exported.versions, exported.tree, [exported.ranges(b"f")])
    assert reader.next_part() is not None
    assert len(os.listdir("/proc/self/fd")) == before + 1
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_running_write_is_waited_for(tmp_path: Path) -> None:
    """It has stamped the file long before it has moved its last byte."""
    size = 192 << 20
    path = tmp_path / "f"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(fd, bytes(size), 0)
        settle(path)
        exported = Exported(tmp_path)
        before = exported.attr(b"f").version
        data = b"\x01" * size
        running = threading.Thread(target=os.pwrite, args=(fd, data, 0))
        running.start()
        while (version := exported.attr(b"f").version) == before:
            time.sleep(0.001)
        during = running.is_alive()
        parts = exported.read(FileRanges(b"f", version, ((size - CHUNK, CHUNK),)))
        running.join()
    finally:
        os.close(fd)
    assert assemble(parts) == {size - CHUNK: b"\x01" * CHUNK}
    if not during:
        pytest.skip("the write was over too soon for this test to say anything")


class Writer(threading.Thread):
    """Overwrites a file again and again: each content is one byte value, repeated."""

    def __init__(self, path: Path, size: int, pause_s: float, replace: bool = False) -> None:
        super().__init__(daemon=True)
        self.path, self.size, self.pause_s, self.replace = path, size, pause_s, replace
        self.ended = threading.Event()
        self.count = 0
        self._write(0)

    def _write(self, number: int) -> None:
        data = bytes([number % 251]) * self.size
        if self.replace:
            temp = self.path.with_suffix(".tmp")
            temp.write_bytes(data)
            temp.rename(self.path)
            return
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT)
        try:
            assert os.pwrite(fd, data, 0) == self.size
        finally:
            os.close(fd)
        os.utime(self.path, ns=(10**18, 10**18))  # the same mtime each time

    def run(self) -> None:
        while not self.ended.wait(self.pause_s):
            self.count += 1
            self._write(self.count)


@pytest.mark.parametrize(
    ("size", "pause_s", "replace"),
    [(8, 0.004, False), (8, 0.05, False), (8, 0.03, True), (4 << 20, 0.0, False), (8 << 20, 0.06, False)],
)
def test_overwrites_of_the_same_size_are_never_mixed_or_mislabelled(
    tmp_path: Path, size: int, pause_s: float, replace: bool
) -> None:
    """rclone/rclone#6053: same size, same mtime, over and over, while it is read."""
    path = tmp_path / "f"
    writer = Writer(path, size, pause_s, replace)
    exported = Exported(tmp_path)
    seen: dict[bytes, int] = {}
    served = refused = 0
    writer.start()
    try:
        end = time.monotonic() + 0.8
        while time.monotonic() < end:
            try:
                request = exported.ranges(b"f")
                whole = FileRanges(
                    b"f", request.version, tuple((o, MAX_READ) for o in range(0, size, MAX_READ))
                )
                parts = exported.read(whole)
            except FileNotFoundError:
                continue
            for message, payload in parts:
                at = 0
                for block in message.blocks:
                    data = payload[at : at + block.length]
                    at += block.length
                    assert data.count(data[0]) == len(data), "two contents in one block"
                    assert seen.setdefault(block.version, data[0]) == data[0], "one version, two contents"
                    served += 1
                for failure in message.failures:
                    refused += 1
                    assert failure.stale
                    assert not failure.value or attr_of(failure.value).version != request.version
    finally:
        writer.ended.set()
        writer.join()
    assert writer.count > 2
    if pause_s >= 0.03:
        assert served, "a file that rests for longer than the clock's grain can be read"
    assert served or refused
