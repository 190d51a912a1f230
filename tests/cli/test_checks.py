from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farside.cli import checks
from farside.cli.checks import Finding, State


def test_every_finding_that_is_not_ok_says_what_to_do() -> None:
    findings = checks.run_all([Path("/tmp/farside-not-there")])
    assert {f.check for f in findings} >= {
        "kernel",
        "/dev/fuse",
        "fusermount3",
        "tcp_rmem",
        "clock",
        "open files",
    }
    assert all(f.advice for f in findings if f.state is not State.OK)


def test_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for release, state in (("3.10.0", "broken"), ("5.15.0-91", "warn"), ("6.8.9", "warn"), ("6.18.1", "ok")):
        name = os.uname_result(("Linux", "h", release, "v", "x86_64"))
        monkeypatch.setattr(os, "uname", lambda name=name: name)
        assert checks.kernel().state == state


def test_fuse_device(tmp_path: Path) -> None:
    assert checks.fuse_device(str(tmp_path / "none")) == Finding(
        "/dev/fuse", State.BROKEN, "missing", "modprobe fuse; in a container give it --device /dev/fuse"
    )


def test_fusermount_is_needed_without_root_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert checks.fusermount(euid=0).state is State.OK
    assert checks.fusermount(euid=1000).state is State.BROKEN


def test_tcp_limits(tmp_path: Path) -> None:
    (tmp_path / "tcp_rmem").write_text("4096\t131072\t6291456\n")
    (tmp_path / "tcp_wmem").write_text("4096\t16384\t67108864\n")
    small, enough = checks.tcp_buffers(tmp_path)
    assert (small.state, enough.state) == (State.WARN, State.OK)
    assert small.advice == "sysctl -w net.ipv4.tcp_rmem='4096 131072 67108864'"
    assert [f.state for f in checks.tcp_buffers(tmp_path / "none")] == [State.WARN, State.WARN]


def test_congestion_and_watches(tmp_path: Path) -> None:
    (tmp_path / "tcp_available_congestion_control").write_text("reno cubic\n")
    assert "modprobe tcp_bbr" in checks.congestion(tmp_path).advice
    (tmp_path / "tcp_available_congestion_control").write_text("reno cubic bbr\n")
    assert checks.congestion(tmp_path).state is State.OK
    (tmp_path / "max_user_watches").write_text("8192\n")
    assert "8,192 watches" in checks.watches(tmp_path).found
    (tmp_path / "max_user_watches").write_text("1048576\n")
    assert checks.watches(tmp_path).state is State.OK


def test_a_clock_of_the_past_is_broken() -> None:
    assert checks.clock(now=0).state is State.BROKEN
    assert checks.clock().state is not State.BROKEN


def test_cache_directories(tmp_path: Path) -> None:
    assert checks.cache_directory(tmp_path / "not" / "yet").state is State.OK
    (tmp_path / "file").write_text("")
    assert checks.cache_directory(tmp_path / "file").state is State.BROKEN
    assert checks.cache_directory(Path("/proc/x")).state is not State.OK


def test_left_over_mounts_and_sockets(tmp_path: Path, mounted: Any) -> None:
    table = tmp_path / "mountinfo"
    living = str(mounted.mountpoint)
    table.write_text(
        f"90 1 0:50 / {living} ro - fuse.farside hub:7420/c4 ro\n"
        r"91 1 0:51 / /mnt/with\040space ro shared:1 - fuse.farside hub:7420/x ro" + "\n"
        "92 1 0:52 / /proc rw - proc proc rw\n"
    )
    found = {f.check: f for f in checks.leftovers(str(table))}
    assert found[f"mount {living}"].state is State.OK
    assert found["mount /mnt/with space"].advice == "farside unmount /mnt/with space"
    table.write_text(
        table.read_text() + "93 1 0:53 / /mnt/his ro - fuse.farside hub:7420/x ro,user_id=4711,max_read=9\n"
    )
    found = {f.check: f for f in checks.leftovers(str(table))}
    assert found["mount /mnt/his"] == Finding("mount /mnt/his", State.OK, "user 4711 looks after it")
    mounted.close()
    states = {f.check: f.state for f in checks.leftovers(str(table))}
    assert states[f"mount {living}"] is State.BROKEN
    table.write_text("")
    (leftover,) = checks.leftovers(str(table))
    assert leftover.advice == f"rm {mounted.socket}"


def test_doctor_exits_with_1_only_when_something_is_broken(
    farside: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from farside.cli import doctor

    good, slow = Finding("a", State.OK, "fine"), Finding("b", State.WARN, "slow", "do this")
    monkeypatch.setattr(doctor, "run_all", lambda _: [good, slow])
    ran = farside("doctor")
    assert (ran.code, ran.out) == (0, "ok     a: fine\nwarn   b: slow\n         → do this\n")
    monkeypatch.setattr(doctor, "run_all", lambda _: [good, slow, Finding("c", State.BROKEN, "no", "help")])
    ran = farside("doctor", "--json")
    assert ran.code == 1
    assert [f["state"] for f in json.loads(ran.out)] == ["ok", "warn", "broken"]
