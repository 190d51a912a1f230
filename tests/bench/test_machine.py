"""The description of the machine, and the state of its mount table."""

from __future__ import annotations

from pathlib import Path

from farside.bench import machine
from farside.bench.stack import is_mounted


def test_a_machine_is_described_in_one_line(tmp_path: Path) -> None:
    described = machine.describe(tmp_path)
    assert described["cores"] >= 1
    line = machine.one_line(described)
    assert "kernel" in line
    assert "\n" not in line


def test_mounted_is_told_from_the_kernels_table(tmp_path: Path) -> None:
    assert is_mounted(Path("/proc"))
    assert not is_mounted(tmp_path)
