from __future__ import annotations

import time
from pathlib import Path

import pytest

from farside.cli.background import BackgroundFailure, run_in_background
from farside.errors import MountError

pytestmark = pytest.mark.process


def test_the_childs_error_and_exit_status_come_back(tmp_path: Path) -> None:
    argv = ["mount", "hub/c4", str(tmp_path / "none"), "--cache-size", "2X"]
    with pytest.raises(BackgroundFailure, match="--cache-size: '2X' is not a size") as caught:
        run_in_background(argv, tmp_path / "log", 20)
    assert caught.value.exit_code == 2


def test_a_child_that_ends_without_a_word_is_told_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(MountError, match=f"ended with status 0; see {tmp_path}/log"):
        run_in_background(["--version"], tmp_path / "log", 20)
    assert (tmp_path / "log").read_text().startswith("farside ")


def test_a_child_that_is_never_ready_is_ended_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARSIDE_RUNTIME_DIR", str(tmp_path))
    began = time.monotonic()
    with pytest.raises(MountError, match="was not ready within 1 s and was ended"):
        run_in_background(["status", "--watch", "--interval", "1h"], tmp_path / "log", 1)
    assert time.monotonic() - began < 8
