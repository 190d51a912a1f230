"""The cache directory: who owns it, which format it has, and what is never touched."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.spoke.cache_kit import content, fill, key

from farside.errors import CacheError
from farside.spoke.cache import ChunkCache
from farside.spoke.cachedir import CacheDirectory

LIMIT = 64 << 20


def test_made_where_missing_and_opened_again(tmp_path: Path) -> None:
    for _ in range(2):
        ChunkCache.open(tmp_path / "a" / "b", size_limit=LIMIT).close()
    found = json.loads((tmp_path / "a" / "b" / "farside-cache.json").read_text())
    assert found["format"] == 1 and found["chunk"] == 65536


def test_locked_by_another_process_names_its_pid(tmp_path: Path) -> None:
    code = (
        "import sys; from farside.spoke.cache import ChunkCache;"
        "c = ChunkCache.open(sys.argv[1], size_limit=1 << 26); print('open', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "c")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"open\n"
        with pytest.raises(CacheError, match=f"in use by process {child.pid}") as caught:
            ChunkCache.open(tmp_path / "c", size_limit=LIMIT)
        assert caught.value.errno == errno.EBUSY
    finally:
        child.kill()  # the lock must die with its owner
        child.communicate()
    ChunkCache.open(tmp_path / "c", size_limit=LIMIT).close()


def test_other_format_version_is_refused_with_both_numbers(tmp_path: Path) -> None:
    ChunkCache.open(tmp_path / "c", size_limit=LIMIT).close()
    (tmp_path / "c" / "farside-cache.json").write_text('{"format": 7, "chunk": 65536, "id": "x"}')
    with pytest.raises(CacheError, match="format 7, this farside reads format 1"):
        ChunkCache.open(tmp_path / "c", size_limit=LIMIT)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "x"}'])
def test_damaged_format_file_is_refused(tmp_path: Path, text: str) -> None:
    ChunkCache.open(tmp_path / "c", size_limit=LIMIT).close()
    (tmp_path / "c" / "farside-cache.json").write_text(text)
    with pytest.raises(CacheError, match="damaged"):
        ChunkCache.open(tmp_path / "c", size_limit=LIMIT)


def test_other_chunk_size_is_refused(tmp_path: Path) -> None:
    ChunkCache.open(tmp_path / "c", size_limit=LIMIT).close()
    with pytest.raises(CacheError, match="chunks of 65536 bytes, 131072 are asked for"):
        ChunkCache.open(tmp_path / "c", size_limit=LIMIT, chunk=131072)


def test_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheError):
        ChunkCache.open(tmp_path / "file", size_limit=LIMIT)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc as an unwritable place")
def test_unwritable(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="cannot be used"):
        ChunkCache.open("/proc/self/farside", size_limit=LIMIT)


def test_somebody_elses_data_directory_is_left_alone(tmp_path: Path) -> None:
    # kind of mosaicml/streaming#988: never delete what the fabric did not fetch
    (tmp_path / "data" / "ab").mkdir(parents=True)
    precious = tmp_path / "data" / "ab" / ("ab" * 16 + ".data")
    precious.write_text("mine")
    with pytest.raises(CacheError, match="not a farside cache"):
        ChunkCache.open(tmp_path, size_limit=LIMIT)
    assert precious.read_text() == "mine"


def test_names_that_are_not_ours_survive_scan_and_eviction(tmp_path: Path) -> None:
    cache = ChunkCache.open(tmp_path, size_limit=LIMIT)
    cache.close()
    ours = [tmp_path / "notes.txt", tmp_path / "data" / "x", tmp_path / "data" / "ab" / "shard.data"]
    for path in ours:
        path.write_text("mine")
    cache = ChunkCache.open(tmp_path, size_limit=LIMIT)
    assert cache.flush()
    file = cache.file(key(1, 5), b"f")
    file.load()
    fill(cache, file, content(1, 5))
    cache.evict(file)
    cache.close()
    assert [path.read_text() for path in ours] == ["mine"] * 3


def test_limit_smaller_than_a_chunk_names_what_is_needed(tmp_path: Path) -> None:
    # kind of mosaicml/streaming#417 and #475
    with pytest.raises(CacheError, match="smaller than one chunk") as caught:
        ChunkCache.open(tmp_path / "c", size_limit=60_000)
    needed = int("".join(c for c in caught.value.hint if c.isdigit()))
    cache = ChunkCache.open(tmp_path / "c", size_limit=needed)
    file = cache.file(key(1, 65536), b"f")
    assert fill(cache, file, content(1, 65536)) == 65536
    cache.close()


def test_limit_larger_than_the_disk(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="larger than the disk") as caught:
        ChunkCache.open(tmp_path / "c", size_limit=1 << 60)
    assert "M or less" in caught.value.hint


def test_ledger_and_pins_distrust_damage(tmp_path: Path) -> None:
    directory = CacheDirectory.open(str(tmp_path / "c"), chunk=65536)
    directory.write_ledger(12345)
    directory.write_pins({b"a" * 16, b"b" * 16})
    assert directory.read_ledger() == 12345
    assert directory.read_pins() == {b"a" * 16, b"b" * 16}
    for name in ("ledger", "pins"):
        path = tmp_path / "c" / name
        data = bytearray(path.read_bytes())
        data[10] ^= 1
        path.write_bytes(data)
    assert directory.read_ledger() is None and directory.read_pins() == set()
    for name in ("ledger", "pins"):
        (tmp_path / "c" / name).write_bytes(b"")
    assert directory.read_ledger() is None and directory.read_pins() == set()
    directory.close()
