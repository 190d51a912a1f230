"""The whole demo, small: hub, link, mount or none, load, and nothing left at the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from farside.bench import netlink
from farside.bench.child import Child
from farside.bench.link import NamespaceLink
from farside.bench.stack import is_mounted


@pytest.fixture
def _needs_namespaces_and_fuse() -> None:
    if obstacle := NamespaceLink.obstacle():
        pytest.skip(obstacle)
    if not os.path.exists("/dev/fuse"):
        pytest.skip("/dev/fuse is missing")


def command(work: Path, *more: str) -> list[str]:
    options = ["--size", "16M", "--rtt", "20", "--work", str(work), *more]
    return [sys.executable, "-m", "farside.bench.demo", *options]


def nothing_is_left(work: Path, pid: int) -> bool:
    return not is_mounted(work / "mnt") and not list(netlink.NAMESPACES.glob(f"farside-{pid}-*"))


def run_demo(work: Path, *more: str) -> tuple[str, dict[str, Any]]:
    """Runs it to its end; returns what it printed, and its report."""
    process = subprocess.Popen(
        command(work, *more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    assert nothing_is_left(work, process.pid)
    return output, json.loads((work / "report.json").read_text())


def check_figures(work: Path, output: str, report: dict[str, Any]) -> None:
    """What holds however the spoke is read."""
    assert "every window of every run had the right bytes" in output
    assert report["runs"]["spoke_warm"]["local_share"] == 1.0
    assert report["runs"]["spoke_warm"]["link_bytes"] < 1 << 20
    assert 0.9 < report["runs"]["spoke_cold"]["link_bytes"] / report["dataset_bytes"] < 1.3
    assert report["runs"]["spoke_cold"]["link_bytes_by_reason"]["demand"] > 0
    assert (work / "report.html").stat().st_size > 10_000


@pytest.mark.link
@pytest.mark.mount
@pytest.mark.usefixtures("_needs_namespaces_and_fuse")
def test_it_compares_hub_and_spoke_and_takes_everything_down(tmp_path: Path) -> None:
    output, report = run_demo(tmp_path, "--io", "pread")
    check_figures(tmp_path, output, report)
    assert (report["spoke_read_through"], report["without_mount"]) == ("mount", None)
    assert "library" not in output


@pytest.mark.process
def test_without_a_mount_the_library_is_read_and_that_is_said(tmp_path: Path) -> None:
    output, report = run_demo(tmp_path, "--no-fuse")
    check_figures(tmp_path, output, report)
    assert "NO MOUNT HERE: --no-fuse was given." in output.splitlines()[0]
    assert "no mount, the spoke is read through the library" in output
    assert (report["spoke_read_through"], report["without_mount"]) == ("library", "--no-fuse was given")
    assert report["notes"][0].startswith("no mount: --no-fuse was given")
    assert list(report["runs_by_io"]) == ["pread"]
    assert report["runs"]["spoke_warm"]["passthrough"] is False


@pytest.mark.process
def test_mmap_alone_is_refused_without_a_mount(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path, "--no-fuse", "--io", "mmap"), capture_output=True, text=True)
    assert done.returncode == 1
    assert "mmap needs a mount" in done.stdout


@pytest.mark.process
def test_a_container_that_may_not_mount_is_noticed() -> None:
    if os.geteuid() != 0 or not shutil.which("setpriv") or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root, setpriv and /dev/fuse")
    code = "from farside.bench.stack import mount_obstacle; print(mount_obstacle())"
    here = [sys.executable, "-c", code]
    confined = ["setpriv", "--bounding-set", "-sys_admin", *here]
    assert "CAP_SYS_ADMIN" in subprocess.run(confined, capture_output=True, text=True).stdout


@pytest.mark.link
@pytest.mark.mount
@pytest.mark.usefixtures("_needs_namespaces_and_fuse")
def test_an_interrupt_takes_everything_down(tmp_path: Path) -> None:
    child = Child(command(tmp_path, "--io", "pread"), tmp_path.parent / "demo.log")
    child.wait_ready("link:", timeout=60)  # hub and link are up
    os.kill(child.pid, signal.SIGINT)
    for _ in child.lines(1.0):
        pass
    child.close(timeout=30)
    assert nothing_is_left(tmp_path, child.pid)
