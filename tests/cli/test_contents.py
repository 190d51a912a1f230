from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

MIB = 1024 * 1024


def test_warm_passes_everything_on_and_says_what_it_did(mounted: Any, farside: Callable[..., Any]) -> None:
    mounted.answers["warm"] = [
        {"progress": {"files": 1, "files_total": 2, "bytes": MIB, "bytes_total": 2 * MIB, "rate": 1e6}},
        {"result": {"files": 2, "bytes": 2 * MIB, "seconds": 2.0}},
    ]
    root = mounted.mountpoint
    ran = farside(
        "warm", root / "train", "--include", "*.bin", "--exclude", "a", "--exclude", "b", "--limit", "500M"
    )
    assert ran.code == 0
    assert ran.out == "2 files are cached; 2.00 MiB crossed the link in 2.0 s (1.00 MiB/s)\n"
    assert mounted.requests == [
        {
            "op": "warm",
            "path": "train",
            "include": ["*.bin"],
            "exclude": ["a", "b"],
            "limit": 500 * MIB,
            "dry_run": False,
        }
    ]


def test_a_dry_run_says_bytes_and_time(mounted: Any, farside: Callable[..., Any]) -> None:
    result = {"files": 3, "bytes": MIB, "bytes_total": 4 * MIB, "seconds": 90}
    mounted.answers["warm"] = [{"result": result}]
    ran = farside("warm", mounted.mountpoint, "--dry-run")
    assert (
        "3 files, 1.00 MiB would cross the link, in about 1m30s (3.00 MiB of 4.00 MiB are cached)" in ran.out
    )
    assert mounted.requests[0]["dry_run"] is True
    assert json.loads(farside("warm", mounted.mountpoint, "--dry-run", "--json").out) == result


def test_wrong_sizes_name_the_flag(mounted: Any, farside: Callable[..., Any]) -> None:
    ran = farside("warm", mounted.mountpoint, "--limit", "2X")
    assert ran.code == 2
    assert "--limit" in ran.err
    assert "'2X' is not a size" in ran.err


def test_pin_unpin_evict(mounted: Any, farside: Callable[..., Any]) -> None:
    root = mounted.mountpoint
    for op, done in (("pin", "pinned"), ("unpin", "unpinned"), ("evict", "evicted")):
        mounted.answers[op] = [{"result": {"files": 2, "bytes": MIB}}]
        ran = farside(op, root / "train", root / "x")
        assert ran.code == 0
        assert ran.out.splitlines()[0] == f"{root}/train: 2 files, 1.00 MiB {done}"
        assert [r["path"] for r in mounted.requests[-2:]] == ["train", "x"]
        assert json.loads(farside(op, root, "--json").out) == {str(root): {"files": 2, "bytes": MIB}}


def test_what_stopped_it_and_what_is_pinned_is_said(mounted: Any, farside: Callable[..., Any]) -> None:
    result = {"files": 1, "bytes": MIB, "seconds": 1.0, "stopped": "limit", "left": 3}
    mounted.answers["warm"] = [{"result": result}]
    ran = farside("warm", mounted.mountpoint)
    assert ran.out.startswith("1 file is cached; 1.00 MiB crossed the link in 1.0 s")
    assert ran.out.endswith("; the limit is reached, 3 files not looked at\n")
    mounted.answers["evict"] = [{"result": {"files": 0, "bytes": 0, "pinned": 2}}]
    assert "2 pinned, kept" in farside("evict", mounted.mountpoint).out


def test_nothing_is_done_when_one_path_is_in_no_mount(mounted: Any, farside: Callable[..., Any]) -> None:
    ran = farside("evict", mounted.mountpoint, "/nowhere/at/all")
    assert ran.code == 1
    assert mounted.requests == []
