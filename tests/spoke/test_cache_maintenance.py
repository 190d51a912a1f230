"""`farside cache verify` and `farside cache clear`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.spoke.cache_kit import content, data_file, fill, flip_bit, key, load_and_verify, meta_file, on_disk

from farside.errors import CacheError
from farside.spoke.cache import ChunkCache
from farside.spoke.maintenance import clear_directory, verify_directory

CHUNK = 65536
LIMIT = 64 << 20


def make(directory: Path, sizes: dict[int, int]) -> ChunkCache:
    cache = ChunkCache.open(directory, size_limit=LIMIT)
    for seed, size in sizes.items():
        file = cache.file(key(seed, size), b"dir/file-%d" % seed)
        file.load()
        fill(cache, file, content(seed, size))
    cache.close()
    return cache


def test_verify_finds_and_drops_what_is_damaged(tmp_path: Path) -> None:
    sizes = {1: 10 * CHUNK, 2: 5000, 3: 3 * CHUNK, 4: 100}
    cache = make(tmp_path, sizes)
    files = {seed: cache.file(key(seed, size), b"") for seed, size in sizes.items()}
    flip_bit(data_file(tmp_path, files[1]), 7 * CHUNK + 3)
    flip_bit(data_file(tmp_path, files[2]), 4999)
    meta_file(tmp_path, files[3]).write_bytes(b"")
    seen: list[tuple[int, int]] = []
    report = verify_directory(tmp_path, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (256, 256)
    assert (report.files, report.corrupt_chunks, report.left_overs) == (3, 2, 1)
    assert sorted(report.damaged) == [b"dir/file-1", b"dir/file-2"]
    again = ChunkCache.open(tmp_path, size_limit=LIMIT)
    assert load_and_verify(again, 1, sizes[1]).absent(0, 9) == [(7, 7)]
    assert load_and_verify(again, 4, 100).complete and not load_and_verify(again, 2, 5000).present
    assert again.counters.corrupt_chunks == 0
    again.close()
    assert verify_directory(tmp_path).corrupt_chunks == 0


def test_clear_leaves_what_is_not_ours(tmp_path: Path) -> None:
    make(tmp_path, {1: 10 * CHUNK, 2: 5000})
    (tmp_path / "data" / "aa" / "mine").write_text("x")
    (tmp_path / "namespace.db").write_text("names of the portal are ours too")
    assert clear_directory(tmp_path) > 10 * CHUNK
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "lock"]
    assert (tmp_path / "data" / "aa" / "mine").read_text() == "x"
    assert on_disk(tmp_path) == 4096


def test_clear_works_on_a_damaged_or_foreign_format(tmp_path: Path) -> None:
    make(tmp_path, {1: CHUNK})
    (tmp_path / "farside-cache.json").write_text('{"format": 99}')
    assert clear_directory(tmp_path) > CHUNK
    make(tmp_path, {1: CHUNK})


def test_neither_touches_a_directory_that_is_in_use_or_no_cache(tmp_path: Path) -> None:
    cache = ChunkCache.open(tmp_path / "c", size_limit=LIMIT)
    for function in (verify_directory, clear_directory):
        with pytest.raises(CacheError, match="in use by process"):
            function(tmp_path / "c")
        with pytest.raises(CacheError, match="not a farside cache"):
            function(tmp_path)
        with pytest.raises(CacheError):
            function(tmp_path / "missing")
    cache.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]
