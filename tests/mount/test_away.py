"""Promise 4: away is not gone. The link is really cut (black hole), the processes are really killed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from tests.mount.conftest import Fabric, wait_until

pytestmark = pytest.mark.mount

BIG = 4 << 20


def errno_of(action: Callable[[], object]) -> int:
    try:
        action()
    except OSError as e:
        return e.errno or 0
    return 0


def test_what_is_cached_stays_and_the_rest_fails_in_bounded_time(fabric: Fabric) -> None:
    old, other = os.urandom(BIG), os.urandom(BIG)
    fabric.put("sub/cached", old)
    fabric.put("elsewhere/other", other)  # not next to the other, or it would be read ahead
    assert fabric.cached("sub/cached") == old
    assert sorted(os.listdir(fabric.mnt / "sub")) == ["cached"]
    assert os.listdir(fabric.mnt / "elsewhere") == ["other"]
    fabric.cut()

    begun = time.monotonic()
    assert (fabric.mnt / "sub" / "cached").read_bytes() == old
    assert time.monotonic() - begun < 2, "cached data must not wait for the hub"
    assert errno_of((fabric.mnt / "elsewhere" / "other").read_bytes) in (errno.EIO, errno.ETIMEDOUT)
    assert time.monotonic() - begun < 3 + 6, "--timeout is 3 s"

    fabric.wait_state("away")
    assert (fabric.mnt / "sub" / "cached").read_bytes() == old
    assert sorted(os.listdir(fabric.mnt / "sub")) == ["cached"]
    assert (fabric.mnt / "elsewhere" / "other").stat().st_size == BIG
    begun = time.monotonic()
    assert errno_of((fabric.mnt / "sub" / "never").stat) in (errno.EIO, errno.ETIMEDOUT)
    assert errno_of((fabric.mnt / "never").stat) in (errno.EIO, errno.ETIMEDOUT)
    assert time.monotonic() - begun < 2 * (3 + 2)

    fabric.restore()
    begun = time.monotonic()
    fabric.wait_state("up")
    assert time.monotonic() - begun < 10
    assert (fabric.mnt / "elsewhere" / "other").read_bytes() == other
    assert errno_of((fabric.mnt / "sub" / "never").stat) == errno.ENOENT


def test_a_change_that_was_missed_is_seen_after_healing(fabric: Fabric) -> None:
    fabric.put("f", b"old")
    assert fabric.cached("f") == b"old"
    fabric.cut()
    fabric.wait_state("away")
    (fabric.data / "f").write_bytes(b"new content")
    (fabric.data / "g").write_bytes(b"g")
    assert (fabric.mnt / "f").read_bytes() == b"old"
    fabric.restore()
    fabric.wait_state("up")
    assert (fabric.mnt / "f").read_bytes() == b"new content"
    assert (fabric.mnt / "g").read_bytes() == b"g"
    os.unlink(fabric.data / "g")
    wait_until(lambda: not (fabric.mnt / "g").exists(), "the deletion is seen", 5)


def test_a_read_that_waits_for_the_hub_can_be_killed(make_fabric: Callable[..., Fabric]) -> None:
    fabric = make_fabric(timeout="10m")
    (fabric.data / "f").write_bytes(os.urandom(BIG))
    fabric.mount()
    assert os.listdir(fabric.mnt) == ["f"]
    fabric.cut()
    reader = subprocess.Popen(
        [sys.executable, "-c", "import sys; f = open(sys.argv[1], 'rb'); print(flush=True); f.read()",
         str(fabric.mnt / "f")],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert reader.stdout is not None
    reader.stdout.readline()
    wait_until(lambda: fabric.status()["link"]["inflight_bytes"] > 0, "the read is on its way")
    reader.kill()
    assert reader.wait(5) == -signal.SIGKILL
    reader.stdout.close()


@pytest.mark.parametrize("way", ["unmount", "term"])
def test_unmounting_works_while_the_hub_is_away(make_fabric: Callable[..., Fabric], way: str) -> None:
    fabric = make_fabric(timeout="10m")
    (fabric.data / "f").write_bytes(os.urandom(BIG))
    fabric.mount()
    pid = fabric.status()["pid"]
    held = os.open(fabric.mnt, os.O_RDONLY)
    fabric.cut()
    reader = subprocess.Popen(
        ["cat", str(fabric.mnt / "f")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    begun = time.monotonic()
    if way == "unmount":
        fabric.stack.unmount()
    else:
        os.kill(pid, signal.SIGTERM)
    wait_until(
        lambda: not os.path.ismount(fabric.mnt) and not os.path.exists(f"/proc/{pid}"), "unmounted", 15
    )
    assert time.monotonic() - begun < 15
    assert reader.wait(10) != 0, "the reader must get an error, not hang"
    os.close(held)


def test_the_hub_restarts_and_the_mount_goes_on(fabric: Fabric) -> None:
    fabric.put("f", b"x" * 100_000)
    assert len(fabric.cached("f")) == 100_000
    fabric.settled()
    before = fabric.status()["link_bytes"]["demand"]
    fabric.stack.restart_hub()
    wait_until(lambda: fabric.status()["link"]["reconnects"] >= 1, "reconnected")
    (fabric.data / "g").write_bytes(b"g")
    wait_until(lambda: (fabric.mnt / "g").exists(), "the new file is seen", 5)
    assert fabric.cached("f") == b"x" * 100_000
    assert fabric.status()["link_bytes"]["demand"] - before < 1000, "only g crosses the link"
