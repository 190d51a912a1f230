"""The commands of the README against real processes: hub, join, mount, read, status, warm, unmount.

Hub and mount are processes of their own; the short commands run in this one, which is quicker.
"""

from __future__ import annotations

import http.server
import json
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Ran
from tests.cli.test_hub import serving

pytest.importorskip("farside.mount.run")
pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]

CONTENT = {"a": b"a" * 100_000, "train/b": os.urandom(300_000), "train/c": b"", "train/d.txt": b"text"}


@dataclass
class World:
    """A hub with one portal, and what the spoke's commands need."""

    root: Path
    data: Path
    mountpoint: Path
    port: int
    state_dir: Path
    farside: Callable[..., Ran]

    def run(self, *argv: str | Path, code: int = 0) -> Ran:
        ran = self.farside(*argv)
        assert ran.code == code, (argv, ran)
        assert "Traceback" not in ran.err
        return ran

    def invite(self, *argv: str, state_dir: Path | None = None) -> Path:
        token = self.run("hub", "invite", "--portal", "c4", "--state-dir", state_dir or self.state_dir, *argv)
        file = self.root / f"token-{time.monotonic_ns()}"
        file.write_text(token.out)
        return file

    def mount(self, *argv: str | Path, port: int = 0, code: int = 0) -> Ran:
        """Mounts; flags that are given again win, as click takes the last one."""
        return self.run(
            "mount", f"127.0.0.1:{port or self.port}/c4", self.mountpoint,
            "--cache-dir", self.root / "cache", "--cache-size", "64M",
            "--state-dir", self.root / "spoke", "--log-file", self.root / "log", "--timeout", "5s",
            *argv, code=code,
        )  # fmt: skip

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("status", self.mountpoint, "--json").out)
        return found


@pytest.fixture
def world(tmp_path: Path, runtime: Path, farside: Callable[..., Ran]) -> Iterator[World]:
    data, mountpoint, state_dir = tmp_path / "data", tmp_path / "mnt", tmp_path / "hub"
    mountpoint.mkdir()
    for name, content in CONTENT.items():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_bytes(content)
    assert farside("hub", "init", "--state-dir", state_dir).code == 0
    argv = [f"--portal=c4={data}", "--listen=127.0.0.1:0", f"--state-dir={state_dir}"]
    with serving(*argv) as (_, line):
        yield World(tmp_path, data, mountpoint, line["port"], state_dir, farside)
        farside("unmount", mountpoint)
        subprocess.run(["umount", "-l", str(mountpoint)], capture_output=True)


def _read_all(world: World) -> None:
    for name, content in CONTENT.items():
        assert (world.mountpoint / name).read_bytes() == content


def _end(world: World, number: signal.Signals) -> None:
    """Sends a signal to the mount's process and waits until it has ended."""
    process = os.pidfd_open(world.status()["pid"])
    signal.pidfd_send_signal(process, number)
    assert select.select([process], [], [], 15)[0], "still running"
    os.close(process)


def test_from_the_invitation_to_the_unmount(world: World) -> None:
    done = world.mount("--token-file", world.invite())
    assert f"is mounted at {world.mountpoint} (pid " in done.out
    _read_all(world)
    status = world.status()
    assert (status["state"], status["link"]["tls"]) == ("up", True)
    assert status["link_bytes"]["total"] >= 400_000
    text = world.run("status").out
    assert f"127.0.0.1:{world.port}/c4" in text and "up" in text
    spokes = json.loads(world.run("hub", "spokes", "--json", "--state-dir", world.state_dir).out)
    assert [s["portals"] for s in spokes] == [["c4"]]
    with pytest.raises(OSError, match="Read-only file system"):
        (world.mountpoint / "new").write_bytes(b"")
    world.mount(code=1)  # already mounted
    world.run("unmount", world.mountpoint)
    assert not os.path.ismount(world.mountpoint)
    # The second time needs no token, and what was read needs no link.
    world.mount()
    _read_all(world)
    assert world.status()["link_bytes"]["demand"] == 0
    world.run("unmount", world.mountpoint)


def test_warm_pin_and_evict(world: World) -> None:
    world.mount("--token-file", world.invite())
    dry = json.loads(world.run("warm", world.mountpoint, "--dry-run", "--json").out)
    assert dry["bytes"] == sum(map(len, CONTENT.values()))
    world.run("warm", world.mountpoint / "train", "--include", "*.txt")
    dry = json.loads(world.run("warm", world.mountpoint, "--dry-run", "--json").out)
    assert dry["bytes"] == 400_000
    world.run("warm", world.mountpoint)
    assert "0 B would cross the link" in world.run("warm", world.mountpoint, "--dry-run").out
    world.run("pin", world.mountpoint / "a")
    world.run("unpin", world.mountpoint / "a")
    world.run("evict", world.mountpoint / "train")
    dry = json.loads(world.run("warm", world.mountpoint, "--dry-run", "--json").out)
    assert dry["bytes"] == 300_004
    world.run("warm", world.mountpoint / "none", code=1)
    assert json.loads(world.run("cache", "status", world.root / "cache", "--json").out)["owner_pid"]
    world.run("unmount", world.mountpoint)
    report = world.run("cache", "verify", world.root / "cache", "--json")
    assert json.loads(report.out)
    world.run("cache", "clear", world.root / "cache", "--yes")
    assert not list((world.root / "cache").glob("data/*/*.data"))
    world.mount()
    _read_all(world)


def test_what_a_crash_leaves_is_cleared_and_said(world: World) -> None:
    world.mount("--token-file", world.invite())
    _end(world, signal.SIGKILL)
    assert "its process is gone" in world.run("doctor", "--json", code=1).out
    done = world.mount()
    assert "cleared what a crashed mount had left" in done.err
    _read_all(world)
    world.run("unmount", world.mountpoint)


def test_sigterm_unmounts(world: World) -> None:
    world.mount("--token-file", world.invite())
    _end(world, signal.SIGTERM)
    assert not os.path.ismount(world.mountpoint)
    assert "nothing is mounted" in world.run("status").out


def test_tokens_that_do_not_open(world: World) -> None:
    token = world.invite()
    other = world.root / "other"
    world.run("hub", "init", "--state-dir", other)
    wrong = world.mount("--token-file", world.invite(state_dir=other), code=1)
    assert "fingerprint" in wrong.err
    mangled = world.root / "mangled"
    mangled.write_text(token.read_text().strip()[:-3] + "\n")
    assert "token" in world.mount("--token-file", mangled, code=1).err
    assert "expired" in world.mount("--token-file", world.invite("--expires", "1ms"), code=1).err
    assert "none" in world.mount("--token-file", world.root / "none", code=2).err
    world.mount("--token-file", token)
    world.run("unmount", world.mountpoint)
    shutil.rmtree(world.root / "spoke")
    assert "used" in world.mount("--token-file", token, code=1).err
    assert "has not joined" in world.mount(code=2).err
    assert not os.path.ismount(world.mountpoint)


def test_a_revoked_spoke_comes_back_with_a_new_token(world: World) -> None:
    token = world.invite()
    world.mount("--token-file", token)
    world.run("unmount", world.mountpoint)
    (spoke,) = json.loads(world.run("hub", "spokes", "--json", "--state-dir", world.state_dir).out)
    world.run("hub", "revoke", spoke["name"], "--state-dir", world.state_dir)
    time.sleep(1.5)
    assert "revoked" in world.mount(code=1).err
    used = world.mount("--token-file", token, code=1)
    assert "revoked" in used.err and "was used" in used.err
    world.mount("--token-file", world.invite())
    _read_all(world)


def test_hubs_that_do_not_answer(world: World) -> None:
    token = world.invite()
    assert world.mount("--token-file", token, port=1, code=3).err.count("\n") == 1

    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Quiet) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        done = world.mount("--token-file", token, port=web.server_address[1], code=1)
        web.shutdown()
    assert "does not speak" in done.err
    world.mount("--token-file", token)  # the token is still good


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cache-size", "1K"], "chunk"),
        (["--cache-size", "900P"], "larger"),
        (["--cache-dir", "/proc/nothing"], "cache directory"),
        (["--cache-dir", "{root}/format"], "format"),
    ],
)
def test_caches_that_cannot_be_used(world: World, flags: list[str], message: str) -> None:
    (world.root / "format").mkdir()
    (world.root / "format" / "farside-cache.json").write_text('{"format": 99, "chunk": 65536, "id": "x"}\n')
    token = world.invite()
    done = world.mount("--token-file", token, *(flag.format(root=world.root) for flag in flags), code=1)
    assert message in done.err
    assert not os.path.ismount(world.mountpoint)


def test_a_cache_directory_has_one_owner(world: World) -> None:
    world.mount("--token-file", world.invite())
    second = world.root / "second"
    second.mkdir()
    done = world.run(
        "mount", f"127.0.0.1:{world.port}/c4", second, "--state-dir", world.root / "spoke",
        "--cache-dir", world.root / "cache", "--cache-size", "64M", "--log-file", world.root / "log2", code=1,
    )  # fmt: skip
    assert f"in use by process {world.status()['pid']}" in done.err


def test_a_portal_that_the_hub_does_not_have(world: World) -> None:
    token = world.invite()
    done = world.run(
        "mount", f"127.0.0.1:{world.port}/nope", world.mountpoint, "--state-dir", world.root / "spoke",
        "--cache-dir", world.root / "cache", "--cache-size", "64M", "--log-file", world.root / "log",
        "--token-file", token, code=1,
    )  # fmt: skip
    assert "nope" in done.err
