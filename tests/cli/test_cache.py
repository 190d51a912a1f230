from __future__ import annotations

import fcntl
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from farside.protocol.messages import CHUNK
from farside.spoke.cache import CacheKey, ChunkCache


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A cache with one file of two chunks in it, closed."""
    path = tmp_path / "cache"
    cache = ChunkCache.open(path, size_limit=64 * 1024 * 1024, reserve=0.0)
    data = os.urandom(2 * CHUNK)
    file = cache.file(CacheKey(b"p" * 16, b"v" * 16, len(data)), b"train/x")
    file.load()
    reservation = cache.reserve(file, 0, 1)
    assert reservation is not None
    sums = b"".join(xxhash.xxh3_128_digest(data[at : at + CHUNK]) for at in (0, CHUNK))
    file.write(reservation, 0, memoryview(data), sums)
    cache.close()
    return path


def test_status_changes_nothing_and_names_the_owner(directory: Path, farside: Callable[..., Any]) -> None:
    found = json.loads(farside("cache", "status", directory, "--json").out)
    assert (found["format"], found["chunk"], found["files"], found["owner_pid"]) == (1, CHUNK, 1, None)
    assert found["bytes"] >= 2 * CHUNK
    assert "1 file," in farside("cache", "status", directory).out
    with open(directory / "lock", "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = json.loads(farside("cache", "status", directory, "--json").out)
        assert found["owner_pid"] == os.getpid()
        ran = farside("cache", "verify", directory)
        assert ran.code == 1
        assert "in use by process" in ran.err


def test_verify_finds_flipped_bits_and_exits_with_1(directory: Path, farside: Callable[..., Any]) -> None:
    ran = farside("cache", "verify", directory, "--json")
    assert ran.code == 0
    assert json.loads(ran.out)["chunks"] == 2
    (data,) = directory.glob("data/*/*.data")
    with open(data, "r+b") as file:
        file.seek(CHUNK + 5)
        file.write(b"!!")
    ran = farside("cache", "verify", directory)
    assert ran.code == 1
    assert "1 damaged chunk and" in ran.out
    assert "damaged: train/x" in ran.out
    assert farside("cache", "verify", directory).code == 0


def test_clear_deletes_what_is_farsides_and_nothing_else(
    directory: Path, farside: Callable[..., Any]
) -> None:
    (directory / "data" / "mine.txt").write_text("keep")
    ran = farside("cache", "clear", directory, "--yes", "--json")
    assert ran.code == 0
    assert json.loads(ran.out)["bytes"] >= 2 * CHUNK
    assert (directory / "data" / "mine.txt").read_text() == "keep"
    assert not list(directory.glob("data/*/*.data"))


def test_clear_asks_first(
    directory: Path, farside: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert farside("cache", "clear", directory).code == 130
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    ran = farside("cache", "clear", directory)
    assert (ran.code, "nothing was deleted" in ran.err) == (1, True)
    assert list(directory.glob("data/*/*.data"))


def test_a_damaged_format_file_can_be_cleared(directory: Path, farside: Callable[..., Any]) -> None:
    (directory / "farside-cache.json").write_text("{")
    ran = farside("cache", "status", directory)
    assert ran.code == 1
    assert "farside cache clear" in ran.err
    assert farside("cache", "clear", directory, "--yes").code == 0
    assert not list(directory.glob("data/*/*.data"))


@pytest.mark.parametrize("command", [["status"], ["verify"], ["clear", "--yes"]])
def test_a_directory_that_is_no_cache_is_left_alone(
    command: list[str], tmp_path: Path, farside: Callable[..., Any]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("precious")
    ran = farside("cache", *command, tmp_path)
    assert ran.code == 1
    assert "not a farside cache" in ran.err
    assert os.listdir(tmp_path) == ["data"]
