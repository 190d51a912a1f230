"""The training-like load over native files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from farside.bench import dataset
from farside.bench.load import Load, Order, batches

SIZE = 12 << 20  # 16 batches of 48 windows


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokens")
    dataset.make(root, dataset.plan(SIZE))
    return root


def run_load(root: Path, *options: str) -> tuple[int, list[dict[str, dict[str, object]]]]:
    """Run it as a program; returns its exit status and its JSON lines."""
    command = [sys.executable, "-m", "farside.bench.load", str(root), "--compute-ms", "2", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return result.returncode, [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("order", ["shuffle", "shards"])
def test_an_epoch_reads_every_window_at_most_once(order: Order) -> None:
    manifest = dataset.plan(SIZE)
    plan = batches(Load(order=order), manifest)
    windows = np.concatenate(plan)
    assert len(set(windows.tolist())) == len(windows)
    assert manifest.windows - len(windows) < 48 * 4
    assert all(len(batch) == 48 for batch in plan)


def test_shards_are_read_from_start_to_end_by_their_worker() -> None:
    plan = batches(Load(order="shards"), dataset.plan(SIZE))
    own = np.concatenate(plan[1::4])
    assert (np.diff(own) == 1).all()


def test_the_seed_decides_the_order() -> None:
    manifest = dataset.plan(SIZE)
    first, again, other = (batches(Load(seed=seed), manifest)[0].tolist() for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.process
@pytest.mark.parametrize("io", ["pread", "mmap"])
def test_right_bytes_give_a_full_result(root: Path, io: str) -> None:
    status, lines = run_load(root, "--io", io)
    assert status == 0
    result = lines[-1]["result"]
    assert result["batches"] == result["batches_planned"] == 16
    assert (result["wrong_windows"], result["errors"]) == (0, 0)
    assert result["application_bytes"] == SIZE
    assert "progress" in lines[0]


@pytest.mark.process
def test_one_flipped_bit_is_found(tmp_path: Path) -> None:
    dataset.make(tmp_path, dataset.plan(SIZE))
    shard = tmp_path / "shard_00002.bin"
    data = bytearray(shard.read_bytes())
    data[1234567] ^= 1
    shard.write_bytes(data)
    _, lines = run_load(tmp_path)
    assert lines[-1]["result"]["wrong_windows"] == 1


@pytest.mark.process
def test_failing_reads_are_counted_and_named(tmp_path: Path) -> None:
    dataset.make(tmp_path, dataset.plan(SIZE))
    (tmp_path / "shard_00001.bin").unlink()
    _, lines = run_load(tmp_path)
    result = lines[-1]["result"]
    assert result["errors"]
    assert "FileNotFoundError" in str(result["first_errors"])


@pytest.mark.process
def test_a_mapping_that_fails_is_an_error_not_a_hang(tmp_path: Path) -> None:
    dataset.make(tmp_path, dataset.plan(SIZE))
    with open(tmp_path / "shard_00003.bin", "r+b") as file:
        file.truncate(4096)  # reading beyond the end of a mapping is SIGBUS
    status, lines = run_load(tmp_path, "--io", "mmap")
    assert status == 1
    assert "a worker died" in str(lines[-1]["error"]["message"])


@pytest.mark.process
def test_no_data_set_is_said(tmp_path: Path) -> None:
    status, lines = run_load(tmp_path)
    assert status == 1
    assert "no token data set" in str(lines[-1]["error"]["message"])
