"""The whole demo, small: hub, link, mount, load, and nothing left at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from farside.bench import netlink
from farside.bench.child import Child
from farside.bench.link import NamespaceLink
from farside.bench.stack import is_mounted

pytestmark = [pytest.mark.link, pytest.mark.mount]


@pytest.fixture(autouse=True)
def _needs_namespaces_and_fuse() -> None:
    if obstacle := NamespaceLink.obstacle():
        pytest.skip(obstacle)
    if not os.path.exists("/dev/fuse"):
        pytest.skip("/dev/fuse is missing")


def command(work: Path) -> list[str]:
    options = ["--size", "16M", "--io", "pread", "--rtt", "20", "--work", str(work)]
    return [sys.executable, "-m", "farside.bench.demo", *options]


def nothing_is_left(work: Path, pid: int) -> bool:
    return not is_mounted(work / "mnt") and not list(netlink.NAMESPACES.glob(f"farside-{pid}-*"))


def test_it_compares_hub_and_spoke_and_takes_everything_down(tmp_path: Path) -> None:
    process = subprocess.Popen(command(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    assert "every window of every run had the right bytes" in output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["runs"]["spoke_warm"]["local_share"] == 1.0
    assert report["runs"]["spoke_warm"]["link_bytes"] < 1 << 20
    assert 0.9 < report["runs"]["spoke_cold"]["link_bytes"] / report["dataset_bytes"] < 1.3
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert nothing_is_left(tmp_path, process.pid)


def test_an_interrupt_takes_everything_down(tmp_path: Path) -> None:
    child = Child(command(tmp_path), tmp_path.parent / "demo.log")
    child.wait_ready("link:", timeout=60)  # hub and link are up
    os.kill(child.pid, signal.SIGINT)
    for _ in child.lines(1.0):
        pass
    child.close(timeout=30)
    assert nothing_is_left(tmp_path, child.pid)
