from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import click
import pytest

from farside.cli import status as status_module
from farside.cli.status import render

STATUS: dict[str, Any] = {
    "mountpoint": "/mnt/c4",
    "hub": "hub.example:7420",
    "portal": "c4",
    "state": "up",
    "since_s": 3700,
    "link": {
        "rtt_ms": 60.4,
        "bandwidth_bps": 8 * 117 * 1024**2,
        "window_bytes": 16 * 1024**2,
        "inflight_bytes": 4 * 1024**2,
        "connections": 16,
        "tls": True,
    },
    "cache": {"dir": "/nvme", "used": 3 * 1024**3, "limit": 6 * 1024**3, "files": 1234, "bypass": None},
    "reads": {"count": 1000, "local": 990, "remote": 10, "bytes": 2**24,
              "local_share": 0.99, "p50_ms": 0.02, "p99_ms": 61.0},
    "link_bytes": {"demand": 2**20, "planned": 0, "readahead": 2**21, "fill": 0,
                   "metadata": 900, "total": 3146728},
    "namespace": {"dirs": 10, "entries": 100_000, "synced": True},
    "mount": {"passthrough": False, "passthrough_reason": "no CAP_SYS_ADMIN", "threads": 2},
    "write_mode": "read-only",
    "errors": {"checksum": 0, "stale": 2},
    "uptime_s": 3700.0,
    "version": "0.1.0",
    "pid": 77,
}  # fmt: skip


def test_everything_that_matters_is_shown() -> None:
    text = click.unstyle(render(STATUS))
    for part in (
        "/mnt/c4  hub.example:7420/c4  up for 1h01m",
        "RTT 60.4 ms, best 117 MiB/s, in flight 4.00 MiB of 16.0 MiB, 16 connections, TLS",
        "3.00 MiB (demand 1.00 MiB, readahead 2.00 MiB, metadata 900 B)",
        "99.0 % local, p50 20 µs, p99 61.0 ms",
        "3.00 GiB of 6.00 GiB (50.0 %), 1,234 files in /nvme",
        "100,000 names in 10 directories, complete",
        "reads handled by this process (no CAP_SYS_ADMIN), pid 77",
        "stale 2",
    ):
        assert part in text
    assert "checksum" not in text


def test_away_and_bypass_are_said_loudly() -> None:
    away = copy.deepcopy(STATUS) | {"state": "away"}
    away["cache"]["bypass"] = "No space left on device"
    text = render(away)
    assert "AWAY" in text
    assert "what is cached can be read" in text
    assert "NOT USED: No space left on device" in text


def test_rates_are_those_since_the_last_look() -> None:
    later = copy.deepcopy(STATUS)
    later["uptime_s"] += 2
    later["link_bytes"]["total"] += 20 * 1024**2
    assert "now 10.0 MiB/s" in render(later, STATUS)


def test_a_status_with_nothing_in_it_yet_can_be_shown() -> None:
    text = render({"mountpoint": "/m", "state": "away"})
    assert "none seen yet" in text


def test_json_is_what_the_mount_reports(mounted: Any, farside: Callable[..., Any]) -> None:
    mounted.answers["status"] = [{"result": STATUS}]
    ran = farside("status", mounted.mountpoint / "train", "--json")
    assert ran.code == 0
    assert json.loads(ran.out) == STATUS
    assert json.loads(farside("status", "--json").out) == [STATUS]
    assert "/mnt/c4" in farside("status").out


def test_no_mounts(runtime: Any, farside: Callable[..., Any], tmp_path: Any) -> None:
    assert farside("status").out == "nothing is mounted\n"
    assert farside("status", "--json").out == "[]\n"
    ran = farside("status", tmp_path)
    assert ran.code == 1
    assert "not inside a running farside mount" in ran.err


def test_a_crashed_mount_is_named_and_the_others_are_shown(mounted: Any, farside: Callable[..., Any]) -> None:
    mounted.close()
    ran = farside("status")
    assert (ran.code, ran.out) == (0, "nothing is mounted\n")
    assert "the mount process is gone" in ran.err


def test_watch_repeats_until_interrupted(
    mounted: Any, farside: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted.answers["status"] = [{"result": STATUS}]
    pauses = iter([None, None])

    def pause(_: float) -> None:
        try:
            next(pauses)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(status_module.time, "sleep", pause)
    ran = farside("status", mounted.mountpoint, "--watch", "--json")
    assert ran.code == 130
    assert [json.loads(line) for line in ran.out.splitlines()] == [STATUS] * 3
