from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farside.config import control_socket

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    directory = tmp_path / "empty"
    directory.mkdir()
    return directory


@pytest.fixture
def occupied(empty: Path) -> Iterator[Path]:
    """Something else is mounted there."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(empty)], capture_output=True)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.decode()}")
    yield empty
    subprocess.run(["umount", "-l", str(empty)], check=False)


def test_a_mount_point_that_is_missing(tmp_path: Path, farside: Callable[..., Any]) -> None:
    ran = farside("mount", "127.0.0.1:1/c4", tmp_path / "none")
    assert (ran.code, ran.out) == (1, "")
    assert f"the mount point does not exist [{tmp_path}/none]; mkdir -p {tmp_path}/none" in ran.err


def test_a_mount_point_that_is_no_directory(tmp_path: Path, farside: Callable[..., Any]) -> None:
    (tmp_path / "file").write_text("")
    ran = farside("mount", "127.0.0.1:1/c4", tmp_path / "file")
    assert ran.code == 1
    assert "not a directory" in ran.err


def test_a_mount_point_that_is_not_empty(empty: Path, farside: Callable[..., Any]) -> None:
    (empty / "precious").write_text("x")
    ran = farside("mount", "127.0.0.1:1/c4", empty)
    assert ran.code == 1
    assert "the mount point is not empty" in ran.err
    assert (empty / "precious").read_text() == "x"


@pytest.mark.mount
@needs_root
def test_a_mount_point_that_is_taken(occupied: Path, farside: Callable[..., Any]) -> None:
    ran = farside("mount", "127.0.0.1:1/c4", occupied)
    assert ran.code == 1
    assert "something is mounted there already (tmpfs)" in ran.err
    assert os.path.ismount(occupied)


@pytest.mark.mount
@needs_root
def test_unmount_leaves_what_is_not_farside(
    occupied: Path, runtime: Path, farside: Callable[..., Any]
) -> None:
    ran = farside("unmount", occupied)
    assert ran.code == 1
    assert "nothing of farside is mounted there" in ran.err
    assert os.path.ismount(occupied)


def test_unmount_of_nothing(empty: Path, runtime: Path, farside: Callable[..., Any]) -> None:
    ran = farside("unmount", empty)
    assert ran.code == 1
    assert "nothing of farside is mounted there" in ran.err


def test_unmount_clears_the_socket_of_a_crashed_process(mounted: Any, farside: Callable[..., Any]) -> None:
    mounted.close()
    ran = farside("unmount", mounted.mountpoint)
    assert (ran.code, ran.out) == (0, f"{mounted.mountpoint} is unmounted\n")
    assert not control_socket(mounted.mountpoint).exists()


def test_a_process_that_does_not_end_is_named(mounted: Any, farside: Callable[..., Any]) -> None:
    ran = farside("unmount", mounted.mountpoint, "--timeout", "100ms")
    assert ran.code == 0
    assert mounted.requests == [{"op": "unmount"}]
    assert f"process {os.getpid()} still runs" in ran.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no hub is given"),
        (["hub.example/c4"], "no mountpoint is given"),
        (["hub.example", "/mnt"], "names no portal"),
        (["http://hub/c4", "/mnt"], "scheme"),
        (["hub.example/c4", "/mnt", "--insecure"], "--insecure-link-is-trusted"),
        (["hub.example/c4", "/mnt", "--cache-size", "lots"], "--cache-size: 'lots' is not a size"),
        (["hub.example/c4", "/mnt", "--timeout", "0"], "--timeout: it must be longer than 0"),
        (
            ["hub.example/c4", "/mnt", "--config", "/does/not/exist.toml"],
            "cannot read the configuration file",
        ),
    ],
)
def test_wrong_usage(argv: list[str], message: str, farside: Callable[..., Any]) -> None:
    ran = farside("mount", *argv)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert len(ran.err.strip().splitlines()) == 1


def test_a_log_file_that_cannot_be_written(empty: Path, tmp_path: Path, farside: Callable[..., Any]) -> None:
    (tmp_path / "file").write_text("")
    ran = farside("mount", "127.0.0.1:1/c4", empty, "--log-file", tmp_path / "file" / "log")
    assert ran.code == 2
    assert "cannot write the log file" in ran.err
