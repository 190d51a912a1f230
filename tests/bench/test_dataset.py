"""The token data set."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from farside.bench import dataset


@given(st.integers(min_value=1, max_value=1 << 42))
def test_a_plan_comes_close_to_the_size_asked_for(size: int) -> None:
    manifest = dataset.plan(size)
    smallest = 4 * manifest.window_bytes
    assert abs(manifest.bytes - size) <= max(smallest, len(manifest.shards) * manifest.window_bytes)
    assert manifest.bytes // len(manifest.shards) <= (256 << 20) + manifest.window_bytes


def test_what_is_made_is_what_the_manifest_says(tmp_path: Path) -> None:
    manifest = dataset.plan(3 << 20, seed=7)
    written: list[int] = []
    dataset.make(tmp_path, manifest, written.append)
    assert sum(written) == manifest.bytes
    assert dataset.load_manifest(tmp_path) == manifest
    checksums = dataset.load_checksums(tmp_path)
    assert len(checksums) == manifest.windows
    data = b"".join((tmp_path / name).read_bytes() for name in manifest.shards)
    assert len(data) == manifest.bytes
    size = manifest.window_bytes
    assert [zlib.crc32(data[i * size :][:size]) for i in range(manifest.windows)] == checksums.tolist()
    assert int(np.frombuffer(data, dataset.TOKEN).max()) < dataset.VOCABULARY


def test_the_same_seed_makes_the_same_tokens_and_another_does_not(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        dataset.make(tmp_path / name, dataset.plan(1 << 20, seed))
    first = [(tmp_path / name / "shard_00000.bin").read_bytes() for name in "abc"]
    assert first[0] == first[1] != first[2]


def test_a_directory_without_a_whole_data_set_has_no_manifest(tmp_path: Path) -> None:
    assert dataset.load_manifest(tmp_path) is None
    (tmp_path / "manifest.json").write_text('{"shards": [')
    assert dataset.load_manifest(tmp_path) is None
