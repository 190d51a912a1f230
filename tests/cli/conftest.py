"""A control server that answers as scripted, and runs of the program inside the test's process."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from farside.cli.main import main
from farside.config import control_socket

Answer = list[dict[str, Any]]


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def farside(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs one command in this process."""

    def run(*argv: str | Path) -> Ran:
        code = main([str(word) for word in argv])
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    return run


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory of this test's own."""
    directory = tmp_path / "run"
    directory.mkdir()
    monkeypatch.setenv("FARSIDE_RUNTIME_DIR", str(directory))
    return directory


class ControlServer:
    """Speaks the control protocol on a real socket; ``answers`` maps an op to the lines of its answer."""

    def __init__(self, mountpoint: Path) -> None:
        self.mountpoint = mountpoint
        self.socket = control_socket(mountpoint)
        self.answers: dict[str, Answer | bytes] = {}
        self.requests: list[dict[str, Any]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.socket))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                conn, _ = self._listener.accept()
            except OSError:
                return
            with conn, conn.makefile("rwb") as stream:
                line = stream.readline()
                if not line:
                    continue
                request = json.loads(line)
                self.requests.append(request)
                answer = self.answers.get(request["op"], [{"result": {}}])
                if isinstance(answer, bytes):
                    stream.write(answer)
                else:
                    stream.writelines(json.dumps(part).encode() + b"\n" for part in answer)

    def close(self) -> None:
        """As at a crash: the socket's file stays."""
        if self._listener.fileno() < 0:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


@pytest.fixture
def mounted(tmp_path: Path, runtime: Path) -> Iterator[ControlServer]:
    """What looks like a running mount at tmp_path/mnt."""
    mountpoint = tmp_path / "mnt"
    (mountpoint / "train").mkdir(parents=True)
    server = ControlServer(mountpoint)
    yield server
    server.close()
