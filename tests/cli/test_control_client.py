from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from farside.cli.control_client import RequestFailed, call, find, owner_pid, sockets
from farside.errors import MountError, ProtocolError


def test_progress_then_result(mounted: Any) -> None:
    mounted.answers["warm"] = [
        {"progress": {"bytes": 1}},
        {"progress": {"bytes": 2}},
        {"result": {"files": 3}},
    ]
    seen: list[dict[str, Any]] = []
    assert call(mounted.socket, "warm", {"path": "train"}, on_progress=seen.append) == {"files": 3}
    assert seen == [{"bytes": 1}, {"bytes": 2}]
    assert mounted.requests == [{"op": "warm", "path": "train"}]


def test_the_mounts_error_keeps_its_exit_status_errno_and_hint(mounted: Any) -> None:
    error = {"message": "no such file", "errno": 2, "exit_code": 3, "hint": "look again"}
    mounted.answers["pin"] = [{"error": error}]
    with pytest.raises(RequestFailed, match="no such file; look again") as caught:
        call(mounted.socket, "pin")
    assert (caught.value.exit_code, caught.value.errno) == (3, 2)


@pytest.mark.parametrize("answer", [b"", b"not json\n", b'{"progress": {}}\n'])
def test_nonsense_and_broken_off_answers_are_errors(mounted: Any, answer: bytes) -> None:
    mounted.answers["ping"] = answer
    with pytest.raises(ProtocolError):
        call(mounted.socket, "ping")


def test_a_silent_process_is_given_up_in_bounded_time(mounted: Any, tmp_path: Path) -> None:
    import socket

    silent = tmp_path / "silent.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(silent))
        listener.listen()
        with pytest.raises(MountError, match="did not answer within"):
            call(silent, "ping", silence_s=0.05)


def test_a_crashed_mount_is_told_as_such(mounted: Any) -> None:
    assert owner_pid(mounted.socket) == os.getpid()
    mounted.close()
    with pytest.raises(MountError, match="the mount process is gone"):
        call(mounted.socket, "ping")
    assert owner_pid(mounted.socket) is None
    assert sockets() == [mounted.socket]


def test_the_mount_that_holds_a_path_is_found_without_asking_it(mounted: Any, tmp_path: Path) -> None:
    root = mounted.mountpoint
    assert find(root) == (mounted.socket, root, "")
    assert find(root / "train" / "does-not-exist").relative == "train/does-not-exist"
    (tmp_path / "link").symlink_to(root / "train")
    assert find(tmp_path / "link" / "x").relative == "train/x"
    with pytest.raises(MountError, match="not inside a running farside mount"):
        find(tmp_path / "elsewhere")


def test_names_that_are_not_utf8_survive(mounted: Any) -> None:
    name = os.fsdecode(b"caf\xe9")
    call(mounted.socket, "pin", {"path": find(mounted.mountpoint / name).relative})
    assert os.fsencode(mounted.requests[0]["path"]) == b"caf\xe9"
