from __future__ import annotations

import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from farside.hub.state import HubState
from farside.protocol.tokens import parse_token

FARSIDE = [sys.executable, "-P", "-m", "farside.cli"]


@pytest.fixture
def state_dir(tmp_path: Path, farside: Callable[..., Any]) -> Path:
    directory = tmp_path / "state"
    assert farside("hub", "init", "--name", "ohio", "--state-dir", directory).code == 0
    return directory


@pytest.fixture
def data(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir()
    (directory / "a").write_bytes(b"a" * 1000)
    return directory


@contextmanager
def serving(*argv: str | Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A hub in a process of its own and its line of JSON; ended by SIGTERM."""
    words = [*FARSIDE, "hub", "serve", "--json", *map(str, argv)]
    hub = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert hub.stdout is not None and hub.stderr is not None
        ready = select.select([hub.stdout], [], [], 20)[0]
        line = hub.stdout.readline() if ready else ""
        if not line:
            hub.kill()
            pytest.fail(f"hub did not start: {hub.stderr.read()}")
        yield hub, json.loads(line)
    finally:
        if hub.poll() is None:
            hub.terminate()
            try:
                hub.wait(10)
            except subprocess.TimeoutExpired:
                hub.kill()
        hub.communicate()


def test_init_makes_a_private_directory_and_leaves_what_exists(
    state_dir: Path, farside: Callable[..., Any]
) -> None:
    assert stat.S_IMODE(state_dir.stat().st_mode) == 0o700
    first = json.loads(farside("hub", "init", "--state-dir", state_dir, "--json").out)
    assert first["name"] == "ohio"
    assert len(first["ca_sha256"]) == 64
    assert json.loads(farside("hub", "init", "--state-dir", state_dir, "--json").out) == first
    ran = farside("hub", "init", "--name", "oregon", "--state-dir", state_dir)
    assert ran.code == 2
    assert "its name is 'ohio'" in ran.err


def test_init_where_nothing_can_be_written(tmp_path: Path, farside: Callable[..., Any]) -> None:
    (tmp_path / "file").write_text("")
    ran = farside("hub", "init", "--state-dir", tmp_path / "file" / "x")
    assert ran.code == 1
    assert "cannot be written" in ran.err


def test_invite_prints_the_token_alone_on_stdout(state_dir: Path, farside: Callable[..., Any]) -> None:
    ran = farside(
        "hub", "invite", "--portal", "c4", "--read-only", "--expires", "15m", "--state-dir", state_dir
    )
    assert ran.code == 0
    token = parse_token(ran.out.strip())
    assert (token.hub, token.portal, token.writable) == ("ohio", "c4", False)
    assert token.expires == pytest.approx(time.time() + 900, abs=20)
    assert token.address.endswith(":7420")
    assert "--token-file" in ran.err
    ran = farside(
        "hub", "invite", "--portal", "c4", "--address", "[::1]:1", "--state-dir", state_dir, "--json"
    )
    assert parse_token(json.loads(ran.out)["token"]).address == "[::1]:1"
    assert (
        "loopback"
        in farside("hub", "invite", "--portal", "c4", "--address", "127.0.0.1", "--state-dir", state_dir).err
    )


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--portal", "a/b"], 2, "not a portal name"),
        (["--portal", "c4", "--expires", "soon"], 2, "'soon' is not a duration"),
        (["--portal", "c4", "--expires", "0s"], 2, "must be longer than 0"),
        (["--portal", "c4", "--address", "http://hub"], 2, "has a scheme"),
        ([], 2, "--portal"),
    ],
)
def test_wrong_invites(
    argv: list[str], code: int, message: str, state_dir: Path, farside: Callable[..., Any]
) -> None:
    ran = farside("hub", "invite", "--state-dir", state_dir, *argv)
    assert (ran.code, ran.out) == (code, "")
    assert message in ran.err


@pytest.mark.parametrize("argv", [["invite", "--portal", "c4"], ["spokes"], ["revoke", "x"]])
def test_without_a_hub_the_commands_say_hub_init(
    argv: list[str], tmp_path: Path, farside: Callable[..., Any]
) -> None:
    ran = farside("hub", *argv, "--state-dir", tmp_path)
    assert ran.code == 1
    assert "farside hub init" in ran.err
    assert os.listdir(tmp_path) == []


def test_spokes_are_listed_and_revoked(state_dir: Path, farside: Callable[..., Any]) -> None:
    assert "no spoke has joined" in farside("hub", "spokes", "--state-dir", state_dir).out
    state = HubState(state_dir)
    state.add_invite("secret", "c4", False, time.time() + 60)
    state.join("secret", {}, lambda: ("gpu-17", 2**90, "ab" * 32))
    state.close()
    out = farside("hub", "spokes", "--state-dir", state_dir).out
    assert out.splitlines()[1].split()[:2] == ["gpu-17", "c4"]
    assert "may attach" in out
    (row,) = json.loads(farside("hub", "spokes", "--json", "--state-dir", state_dir).out)
    assert (row["name"], row["serial"], row["portals"], row["revoked"]) == (
        "gpu-17",
        str(2**90),
        ["c4"],
        False,
    )
    assert farside("hub", "revoke", "gpu-17", "--state-dir", state_dir).out == "gpu-17 is revoked\n"
    assert "revoked" in farside("hub", "spokes", "--state-dir", state_dir).out
    ran = farside("hub", "revoke", "gpu-18", "--state-dir", state_dir)
    assert ran.code == 2
    assert "no spoke 'gpu-18'" in ran.err


@pytest.mark.parametrize(
    ("portals", "message"),
    [
        (
            ["c4=/farside/does/not/exist"],
            "the directory of portal 'c4' does not exist [/farside/does/not/exist]",
        ),
        (["c4=/etc/passwd"], "portal 'c4' is not a directory"),
        (["c4=/tmp", "c4=/etc"], "portal 'c4' is given twice"),
        ([], "no portal to serve"),
    ],
)
def test_wrong_portals(portals: list[str], message: str, farside: Callable[..., Any]) -> None:
    ran = farside("hub", "serve", "--insecure", *(f"--portal={portal}" for portal in portals))
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


def test_insecure_beyond_loopback_is_refused(data: Path, farside: Callable[..., Any]) -> None:
    ran = farside("hub", "serve", f"--portal=c4={data}", "--insecure", "--listen", "0.0.0.0:0")
    assert ran.code == 2
    assert "--insecure-link-is-trusted" in ran.err


@pytest.mark.process
def test_a_hub_without_state_says_hub_init(data: Path, tmp_path: Path) -> None:
    argv = [
        "hub",
        "serve",
        f"--portal=c4={data}",
        "--listen",
        "127.0.0.1:0",
        "--state-dir",
        str(tmp_path / "no"),
    ]
    done = subprocess.run([*FARSIDE, *argv], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert "farside hub init" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.process
def test_serve_until_sigterm(data: Path) -> None:
    argv = (f"--portal=c4={data}", "--insecure", "--listen", "127.0.0.1:0", f"--state-dir={data}.state")
    with serving(*argv) as (hub, line):
        assert line["portals"] == {"c4": str(data)}
        assert line["tls"] is False
        socket.create_connection((line["host"], line["port"]), 5).close()
        hub.send_signal(signal.SIGTERM)
        _, err = hub.communicate(timeout=10)
    assert hub.returncode == 0
    assert "WARNING: --insecure" in err
    assert "Traceback" not in err


@pytest.mark.process
def test_a_port_that_is_taken(data: Path, state_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        argv = [
            "hub",
            "serve",
            f"--portal=c4={data}",
            f"--listen=127.0.0.1:{port}",
            f"--state-dir={state_dir}",
        ]
        done = subprocess.run([*FARSIDE, *argv], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}: the port is taken; choose another address by --listen" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.process
def test_a_hub_says_ready_to_systemd_and_takes_its_options_from_a_file(
    data: Path, tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hub.toml"
    file.write_text(f'listen = "127.0.0.1:0"\nstate-dir = "state"\n[portals]\nc4 = "{data}"\n')
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with serving("--config", file) as (_, line):
            assert manager.recv(100) == b"READY=1"
            assert line["tls"] is True
