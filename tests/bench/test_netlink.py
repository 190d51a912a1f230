"""The emulated link: its parts over plain sockets, then the real thing between namespaces."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farside.bench import netlink
from farside.bench.link import NamespaceLink
from farside.bench.netlink import Direction, Emulator, Shape, wire_size
from farside.errors import FarsideError, UsageError

PLAIN = bytes(10)  # the virtio header of a packet that is not segmented
PACKET = PLAIN + b"x" * 1000


class Wire:
    """A direction between two datagram sockets, in the place of TUN devices."""

    def __init__(self) -> None:
        self.sender, source = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        target, self.receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        source.setblocking(False)
        self.receiver.setblocking(False)
        self._kept = (source, target)
        self.direction = Direction(source.fileno(), target.fileno())

    def carry(self, shape: Shape, packets: int) -> tuple[int, float]:
        """Send packets at once and deliver them all; returns how many came and the seconds it took."""
        for _ in range(packets):
            self.sender.send(PACKET)
        began = time.monotonic()
        self.direction.take(shape)
        while (wait := self.direction.deliver()) is not None:
            time.sleep(wait)
        came = 0
        while True:
            try:
                assert self.receiver.recv(2000) == PACKET
                came += 1
            except BlockingIOError:
                return came, time.monotonic() - began


@pytest.fixture
def wire() -> Wire:
    return Wire()


def test_a_packet_takes_half_a_round_trip(wire: Wire) -> None:
    came, seconds = wire.carry(Shape(rtt=40), 1)
    assert came == 1
    assert 0.02 <= seconds < 0.5
    assert wire.direction.counters.bytes == 1000


def test_the_rate_is_kept(wire: Wire) -> None:
    came, seconds = wire.carry(Shape(rtt=0, rate=1), 10)  # 10 kB at 125 kB/s
    assert came == 10
    assert seconds >= 0.08


def test_what_does_not_fit_into_the_queue_is_dropped(wire: Wire) -> None:
    came, _ = wire.carry(Shape(rtt=0, rate=8, queue=0.003), 10)
    assert 3 <= came <= 5
    assert wire.direction.counters.overflow == 10 - came


def test_loss_drops_and_is_counted(wire: Wire) -> None:
    came, _ = wire.carry(Shape(rtt=0, loss=100), 5)
    assert came == 0
    assert wire.direction.counters.lost == 5


def test_a_cut_direction_swallows_what_is_sent_and_what_is_under_way(wire: Wire) -> None:
    wire.sender.send(PACKET)
    wire.direction.take(Shape(rtt=1000))
    wire.direction.cut()
    assert wire.carry(Shape(rtt=0), 1)[0] == 0
    assert wire.direction.counters.cut == 2
    wire.direction.restore()
    assert wire.carry(Shape(rtt=0), 1)[0] == 1


def test_jitter_never_reorders(wire: Wire) -> None:
    for number in range(20):
        wire.sender.send(PLAIN + bytes([number]))
    wire.direction.take(Shape(rtt=0, jitter=5))
    while (wait := wire.direction.deliver()) is not None:
        time.sleep(wait)
    assert [wire.receiver.recv(100)[-1] for _ in range(20)] == list(range(20))


def test_a_large_segment_counts_the_headers_of_its_parts() -> None:
    header = struct.pack("<BBHHHH", 0, 1, 52, 1448, 0, 0)
    assert wire_size(PACKET) == 1000
    assert wire_size(header + bytes(1448 * 3)) == 1448 * 3 + 2 * 52


def test_commands_are_checked() -> None:
    emulator = Emulator(Shape(), 0, 0)
    assert emulator.command(["set", "rtt=80", "loss=0.5"]) == "ok"
    assert (emulator.shape.rtt, emulator.shape.loss) == (80, 0.5)
    assert emulator.command(["cut", "to-spoke"]) == "ok"
    assert json.loads(emulator.command(["stats"]))["to-spoke"]["is_cut"] is True
    assert json.loads(emulator.command(["stats"]))["to-hub"]["is_cut"] is False
    for wrong in (["cut", "sideways"], ["set", "speed=1"], ["set", "rtt=fast"], ["set", "rtt"], ["fly"], []):
        assert emulator.command(wrong).startswith("error: ")


def test_no_link_no_answer() -> None:
    with pytest.raises(FarsideError, match="no link runs between"):
        netlink.send_command("farside-nobody", "farside-nowhere", "stats")


@pytest.fixture
def link(tmp_path: Path) -> Iterator[NamespaceLink]:
    if obstacle := NamespaceLink.obstacle():
        pytest.skip(obstacle)
    link = NamespaceLink(Shape(rtt=60), tmp_path)
    yield link
    link.close()


def connect_seconds(link: NamespaceLink, port: int, timeout: float) -> float | None:
    """What a TCP handshake from the spoke to the hub takes, None if it does not come about in time."""
    script = (
        "import socket, time; began = time.monotonic(); "
        f"socket.create_connection(({link.hub_host!r}, {port}), {timeout}); print(time.monotonic() - began)"
    )
    command = [*link.spoke_prefix, sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return float(result.stdout) if result.returncode == 0 else None


@pytest.fixture
def listening(link: NamespaceLink) -> Iterator[int]:
    """A port at the hub's end that accepts connections."""
    script = (
        "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); input()"
    )
    server = subprocess.Popen(
        [*link.hub_prefix, sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert server.stdout
    assert server.stdin
    yield int(server.stdout.readline())
    server.kill()
    server.wait()
    server.stdout.close()
    server.stdin.close()


@pytest.mark.link
def test_round_trip_cut_and_restore(link: NamespaceLink, listening: int) -> None:
    seconds = connect_seconds(link, listening, 5)
    assert seconds is not None
    assert 0.06 <= seconds < 1
    link.command("cut", "to-spoke")
    assert connect_seconds(link, listening, 0.5) is None
    link.command("restore")
    assert connect_seconds(link, listening, 10) is not None
    traffic = link.traffic()
    assert traffic.to_hub > 0
    assert traffic.to_spoke > 0
    with pytest.raises(UsageError):
        link.command("set", "colour=red")


@pytest.mark.link
def test_nothing_is_left_behind(link: NamespaceLink) -> None:
    names = [path.name for path in netlink.NAMESPACES.glob(f"farside-{os.getpid()}-*")]
    assert len(names) == 2
    link.close()
    assert not list(netlink.NAMESPACES.glob(f"farside-{os.getpid()}-*"))
    assert not list(Path("/run").glob(f"farside-netlink-farside-{os.getpid()}-*"))


@pytest.mark.link
def test_leftovers_of_a_killed_run_are_removed(link: NamespaceLink) -> None:
    finished = subprocess.Popen(["true"])
    finished.wait()
    stale = f"farside-{finished.pid}-hub"
    netlink.run_ip("netns", "add", stale)
    assert netlink.remove_stale("farside") == [stale]
    assert len(list(netlink.NAMESPACES.glob(f"farside-{os.getpid()}-*"))) == 2
