"""warm, pin, unpin and evict, over the control socket of a real mount."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.mount.conftest import Fabric, wait_until

from farside.cli.control_client import RequestFailed, call
from farside.config import control_socket

pytestmark = pytest.mark.mount

SIZES = {f"d{d}/f{f}.{'bin' if f % 2 else 'txt'}": 1000 * (d + 1) + f for d in range(3) for f in range(40)}
REASONS = ("demand", "planned", "readahead", "fill")


@pytest.fixture
def filled(make_fabric: Callable[..., Fabric]) -> Fabric:
    fabric = make_fabric()
    for name, size in SIZES.items():
        fabric.put(name, os.urandom(size))
    fabric.put("large", os.urandom(5 << 20))
    fabric.mount()
    return fabric


def ask(fabric: Fabric, op: str, path: str = "", **arguments: Any) -> dict[str, Any]:
    return call(control_socket(fabric.mnt), op, {"path": path, **arguments})


def crossed(fabric: Fabric) -> int:
    counts = fabric.status()["link_bytes"]
    return sum(counts[reason] for reason in REASONS)


def test_warm_brings_what_is_chosen_and_only_once(filled: Fabric) -> None:
    chosen = {n: s for n, s in SIZES.items() if n.startswith("d1/") and n.endswith(".bin")}
    planned = ask(filled, "warm", "d1", include=["*.bin"], dry_run=True)
    assert (planned["files"], planned["bytes"]) == (len(chosen), sum(chosen.values()))
    assert crossed(filled) == 0, "a dry run moves nothing"
    for again in (False, True):
        done = ask(filled, "warm", "d1", include=["*.bin"])
        assert done["files"] == len(chosen) and done["skipped"] == 0
        assert done["bytes"] == (0 if again else sum(chosen.values()))
    assert crossed(filled) == sum(chosen.values())
    rest = ask(filled, "warm", "", exclude=["large"])
    assert rest["files"] == len(SIZES)
    assert crossed(filled) == sum(SIZES.values())
    for name in SIZES:
        assert (filled.mnt / name).read_bytes() == (filled.data / name).read_bytes()
    assert crossed(filled) == sum(SIZES.values())


def test_warm_stops_at_its_limit(filled: Fabric) -> None:
    done = ask(filled, "warm", "d0", limit=10_000)
    assert 0 < done["bytes"] <= 10_000
    assert crossed(filled) == done["bytes"]

    assert (done["stopped"], done["left"]) == ("limit", 40 - done["files"])


def test_warm_stops_where_it_would_evict_what_it_brought(make_fabric: Callable[..., Fabric]) -> None:
    fabric = make_fabric()
    for number in range(6):
        fabric.put(f"f{number}", os.urandom(4 << 20))
    fabric.mount(cache_size=16 << 20)
    first, again = ask(fabric, "warm"), ask(fabric, "warm")
    assert first["stopped"] == again["stopped"] == "cache"
    assert first["left"] == 6 - first["files"] - first["skipped"] >= 2
    assert crossed(fabric) <= 20 << 20, "the second time brings at most what the first could not keep"


def test_names_of_one_file_are_warmed_once(filled: Fabric) -> None:
    for name in ("again", "d2/again"):
        os.link(filled.data / "large", filled.data / name)
    wait_until(lambda: filled.shows("d2/again", 5 << 20) and filled.shows("again", 5 << 20), "links seen", 5)
    done = ask(filled, "warm")
    assert (done["files"], done["bytes"]) == (len(SIZES) + 1, sum(SIZES.values()) + (5 << 20))
    assert (filled.mnt / "d2" / "again").read_bytes() == (filled.data / "large").read_bytes()


def test_warm_that_is_given_up_moves_nothing_more(make_fabric: Callable[..., Fabric]) -> None:
    fabric = make_fabric(rtt=60.0)
    fabric.put("huge", os.urandom(192 << 20))
    fabric.mount()
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as client:
        client.connect(str(control_socket(fabric.mnt)))
        client.sendall(b'{"op": "warm", "path": ""}\n')
        wait_until(lambda: crossed(fabric) > 0, "it began", 10)
    time.sleep(1)
    stopped = crossed(fabric)
    time.sleep(1)
    assert crossed(fabric) == stopped < 192 << 20


def test_warm_waits_for_the_hub_no_longer_than_a_read(filled: Fabric) -> None:
    filled.cut()
    begun = time.monotonic()
    with pytest.raises(RequestFailed) as failed:
        ask(filled, "warm")
    assert failed.value.exit_code == 3
    assert time.monotonic() - begun < 30
    filled.restore()
    filled.wait_state("up")
    assert ask(filled, "warm")["files"] == len(SIZES) + 1


def test_what_is_not_there_is_said(filled: Fabric) -> None:
    with pytest.raises(RequestFailed) as failed:
        ask(filled, "warm", "nothing/here")
    assert failed.value.errno == 2


def test_evict_frees_and_a_pin_holds(filled: Fabric) -> None:
    ask(filled, "warm")
    assert ask(filled, "pin", "d0")["files"] == 40
    used = filled.status()["cache"]["used"]
    gone = ask(filled, "evict", "large")
    assert gone["bytes"] >= 5 << 20
    wait_until(lambda: filled.status()["cache"]["used"] <= used - (5 << 20), "space is free")
    before = crossed(filled)
    kept = ask(filled, "evict", "d0")
    assert (kept["files"], kept["pinned"]) == (0, 40)
    for name in SIZES:
        if name.startswith("d0/"):
            assert (filled.mnt / name).read_bytes() == (filled.data / name).read_bytes()
    assert crossed(filled) == before, "pinned files were still there"
    ask(filled, "unpin", "d0")
    assert ask(filled, "evict", "d0")["bytes"] > 0
    assert (filled.mnt / "large").read_bytes() == (filled.data / "large").read_bytes()
