from __future__ import annotations

import json
import logging
import os
import resource
import socket
from pathlib import Path

import pytest

from farside.cli.process import (
    READY_FD,
    Readiness,
    notify_systemd,
    open_log,
    raise_file_limit,
    set_up_logging,
)
from farside.errors import HubUnreachable, UsageError


def test_the_parent_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv(READY_FD, str(writer))
    readiness = Readiness()
    assert readiness.has_parent
    assert READY_FD not in os.environ
    assert not os.get_inheritable(writer)
    readiness.ready()
    readiness.failed(HubUnreachable("too late"))
    assert json.loads(os.read(reader, 1000)) == {"pid": os.getpid()}
    assert os.read(reader, 1000) == b""
    os.close(reader)


def test_a_failure_carries_message_and_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv(READY_FD, str(writer))
    Readiness().failed(HubUnreachable("no answer", hint="try"))
    assert json.loads(os.read(reader, 1000)) == {"error": "no answer; try", "exit_code": 3}
    os.close(reader)


def test_a_parent_that_has_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setenv(READY_FD, str(writer))
    Readiness().ready()


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    name = f"@farside-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if abstract else name)
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        Readiness().ready()
        assert manager.recv(100) == b"READY=1"
    notify_systemd("STOPPING=1")  # nobody listens any more: a warning, no error


def test_a_log_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    os.close(open_log(tmp_path / "new" / "a.log"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write the log file.*--log-file"):
        open_log(tmp_path / "file" / "a.log")


def test_log_lines_carry_utc_times(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        set_up_logging(debug=False)
        logging.getLogger("farside.x").info("hello")
        assert capsys.readouterr().err.rstrip().endswith("Z INFO farside.x: hello")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def test_the_file_limit_is_raised_to_the_hard_one() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
