"""A wide-area link between two network namespaces of one machine (root, Linux).

Two namespaces, hub (first address of the subnet) and spoke (second), are joined by a pair of TUN devices
through a delay queue in this process: a true round trip time and true TCP dynamics, with an optional rate
limit (tail-drop buffer), loss, jitter, and cutting and restoring while it runs. It needs /dev/net/tun and
the programs `ip` and `nsenter`, and neither netem nor kernel modules.

Command line::

    python -m farside.bench.netlink up --rtt 60 --rate 1000    # foreground; prints "ready …" when usable
    nsenter --net=/run/netns/farside-spoke ping 10.99.0.1      # keeps the mount namespace of the host
    python -m farside.bench.netlink ctl cut to-spoke           # or: restore, set rtt=80 loss=0.1, stats
    python -m farside.bench.netlink down                       # stop it; also clears up after a kill -9

`late_ms` in the stats is the worst lateness of a delivery since the last stats. Where it is more than a few
milliseconds, this machine could not keep up and the run means nothing.

Large segments (TSO) are on for speed, so up to 64 KiB travel as one packet and are lost as one; with loss
the default is real packets of the size of the MTU, at a lower top speed.
"""

from __future__ import annotations

import collections
import errno
import fcntl
import ipaddress
import json
import os
import random
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import click

from farside.errors import FarsideError, UsageError

NAMESPACES = Path("/run/netns")
TO_HUB, TO_SPOKE = "to-hub", "to-spoke"

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x1, 0x1000, 0x4000
_OFFLOADS_GSO = (0x67, 0x07)  # CSUM, TSO4, TSO6 and, on newer kernels, USO4 and USO6
_OFFLOADS_PLAIN = (0x01,)
_VNET = struct.Struct("<BBHHHH")  # virtio_net_hdr: flags, gso type, header length, gso size, …
_MAX_PACKET = 66_000
_BATCH = 64  # packets taken from one device before the other one gets its turn
_MIN_QUEUE = 200_000  # bytes; a smaller bottleneck buffer cannot hold one burst
# Windows that fill 300 ms at several Gbit/s; what `farside doctor` recommends for a real machine.
_SYSCTLS = {
    "net/ipv4/tcp_rmem": "4096 131072 67108864",
    "net/ipv4/tcp_wmem": "4096 65536 67108864",
    "net/ipv4/tcp_slow_start_after_idle": "0",
}


@dataclass
class Shape:
    """What the link is like. `rtt` and `jitter` in ms per round trip, `rate` in Mbit/s each way (0: no
    limit), `loss` in percent each way, `queue` in MB (0: one bandwidth × delay product)."""

    rtt: float = 60.0
    rate: float = 0.0
    loss: float = 0.0
    jitter: float = 0.0
    queue: float = 0.0

    @property
    def one_way_s(self) -> float:
        return self.rtt / 2e3

    @property
    def bytes_per_s(self) -> float | None:
        return self.rate * 125e3 or None

    @property
    def queue_bytes(self) -> float:
        return self.queue * 1e6 or max(_MIN_QUEUE, self.rate * 125e3 * self.rtt / 1e3)

    def changed(self, words: list[str]) -> Shape:
        """A copy with `name=value` words applied; raises ValueError for anything else."""
        values = asdict(self)
        for word in words:
            name, separator, value = word.partition("=")
            if not separator or name not in values:
                raise ValueError(f"can set {', '.join(values)}, not {word!r}")
            values[name] = float(value)
        return Shape(**values)


@dataclass
class Counters:
    """Packets and bytes (headers included) that entered one direction, and packets dropped, by cause."""

    packets: int = 0
    bytes: int = 0
    lost: int = 0
    overflow: int = 0
    cut: int = 0


class Direction:
    """One direction of the link: takes packets from one device, holds them, writes them to the other."""

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self.counters = Counters()
        self.is_cut = False
        self.late_s = 0.0
        self._target = target
        self._queue: collections.deque[tuple[float, bytes]] = collections.deque()
        self._link_free_at = 0.0
        self._last_due = 0.0

    @property
    def queued(self) -> int:
        return len(self._queue)

    def cut(self) -> None:
        """Black-hole it; what is in flight dies with the link."""
        self.is_cut = True
        self.counters.cut += len(self._queue)
        self._queue.clear()

    def restore(self) -> None:
        self.is_cut = False

    def take(self, shape: Shape) -> None:
        """Take what the sender has put out and give each packet its time of delivery."""
        now, counters = time.monotonic(), self.counters
        one_way, rate, loss = shape.one_way_s, shape.bytes_per_s, shape.loss / 100
        queue_bytes, jitter = shape.queue_bytes, shape.jitter / 2e3
        for _ in range(_BATCH):
            try:
                packet = os.read(self.source, _MAX_PACKET)
            except BlockingIOError:
                return
            counters.packets += 1
            counters.bytes += len(packet) - _VNET.size
            if self.is_cut:
                counters.cut += 1
                continue
            if loss and random.random() < loss:
                counters.lost += 1
                continue
            due = now
            if rate:
                if (self._link_free_at - now) * rate > queue_bytes:
                    counters.overflow += 1
                    continue
                self._link_free_at = max(now, self._link_free_at) + wire_size(packet) / rate
                due = self._link_free_at
            due += one_way
            if jitter:  # never reorders: a packet waits for the one before it
                due = self._last_due = max(self._last_due, due + abs(random.gauss(0, jitter)))
            self._queue.append((due, packet))

    def deliver(self) -> float | None:
        """Deliver what is due; returns the seconds until the next packet is, or None."""
        queue = self._queue
        while queue:
            wait = queue[0][0] - time.monotonic()
            if wait > 0:
                return wait
            self.late_s = max(self.late_s, -wait)
            try:
                os.write(self._target, queue.popleft()[1])
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EIO, errno.EINVAL, errno.ENOBUFS):
                    raise
        return None


def wire_size(packet: bytes) -> int:
    """Bytes that a packet with its virtio header takes on the wire once cut into segments."""
    size = len(packet) - _VNET.size
    _, gso, header, segment, _, _ = _VNET.unpack_from(packet)
    if gso and segment:
        size += (size - 1) // segment * (header or 52)
    return size


class Emulator:
    """The running link: moves packets until told to stop."""

    def __init__(self, shape: Shape, hub_fd: int, spoke_fd: int) -> None:
        self.shape = shape
        self.stopped = False
        self.directions = {TO_SPOKE: Direction(hub_fd, spoke_fd), TO_HUB: Direction(spoke_fd, hub_fd)}
        self._started = time.monotonic()

    def command(self, words: list[str]) -> str:
        """Carry out one control command; the answer begins with "error" where it is wrong."""
        verb, arguments = (words[0], words[1:]) if words else ("", [])
        try:
            if verb in ("cut", "restore"):
                self._cut_or_restore(verb, arguments)
            elif verb == "set":
                self.shape = self.shape.changed(arguments)
            elif verb == "stats":
                return json.dumps(self.stats())
            elif verb == "stop":
                self.stopped = True
            else:
                raise ValueError("commands: cut|restore [to-hub|to-spoke], set NAME=VALUE…, stats, stop")
        except ValueError as error:
            return f"error: {error}"
        return "ok"

    def _cut_or_restore(self, verb: str, names: list[str]) -> None:
        if set(names) - set(self.directions):
            raise ValueError(f"{verb} {' and '.join(self.directions)}, or nothing for both")
        for name, direction in self.directions.items():
            if not names or name in names:
                (direction.cut if verb == "cut" else direction.restore)()

    def stats(self) -> dict[str, object]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        result: dict[str, object] = {
            **asdict(self.shape),
            "uptime_s": round(time.monotonic() - self._started, 2),
            "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
            "pid": os.getpid(),
        }
        for name, direction in self.directions.items():
            result[name] = {
                **asdict(direction.counters),
                "queued": direction.queued,
                "is_cut": direction.is_cut,
                "late_ms": round(direction.late_s * 1e3, 2),
            }
            direction.late_s = 0.0
        return result

    def run(self, control: socket.socket, *, until_eof: bool) -> None:
        """Move packets until `stop` is commanded or, with `until_eof`, standard input is closed."""
        by_fd = {direction.source: direction for direction in self.directions.values()}
        waiting = [*by_fd, control.fileno(), *([0] if until_eof else [])]
        while not self.stopped:
            waits = [wait for d in by_fd.values() if (wait := d.deliver()) is not None]
            for fd in select.select(waiting, [], [], min(waits, default=None))[0]:
                if fd in by_fd:
                    by_fd[fd].take(self.shape)
                elif fd == 0:
                    self.stopped = self.stopped or not os.read(0, 4096)
                else:
                    self._answer(control)

    def _answer(self, control: socket.socket) -> None:
        connection, _ = control.accept()
        with connection:
            try:
                connection.settimeout(1)
                connection.sendall(self.command(connection.recv(4096).decode().split()).encode())
            except (OSError, UnicodeDecodeError) as error:
                print(f"control: {error}", file=sys.stderr)


def run_ip(*arguments: str, namespace: str | None = None, check: bool = True) -> None:
    """Run `ip`, in a namespace if given; raises FarsideError with what it printed."""
    command = ["ip", *(["-n", namespace] if namespace else []), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        raise FarsideError("the program `ip` is missing", hint="install iproute2") from None
    if check and result.returncode:
        raise FarsideError(f"`{' '.join(command)}` failed: {result.stderr.strip()}")


def open_tun(namespace: str, device: str, address: str, mtu: int, *, gso: bool) -> int:
    """Make a TUN device and move it into the namespace; the returned descriptor stays here.

    `address` is address/prefix length.
    """
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    temporary = f"fs{os.getpid()}-{fd}"[:15]
    request = struct.pack("16sH22x", temporary.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
    fcntl.ioctl(fd, _TUNSETIFF, request)
    for offloads in _OFFLOADS_GSO if gso else _OFFLOADS_PLAIN:
        try:
            fcntl.ioctl(fd, _TUNSETOFFLOAD, offloads)
            break
        except OSError:
            continue  # an older kernel knows fewer of them
    run_ip("link", "set", temporary, "netns", namespace, "name", device)
    queue = "4000" if gso else "20000"
    run_ip("link", "set", device, "mtu", str(mtu), "txqueuelen", queue, namespace=namespace)
    run_ip("addr", "add", address, "dev", device, namespace=namespace)
    run_ip("link", "set", device, "up", namespace=namespace)
    return fd


def make_namespace(name: str) -> None:
    """A network namespace with its loopback up and large TCP windows."""
    if not (NAMESPACES / name).exists():
        run_ip("netns", "add", name)
    run_ip("link", "set", "lo", "up", namespace=name)
    script = "; ".join(f"echo '{value}' > /proc/sys/{key}" for key, value in _SYSCTLS.items())
    subprocess.run(["nsenter", f"--net={NAMESPACES / name}", "sh", "-c", script], check=True, timeout=20)


def remove_namespace(name: str) -> None:
    run_ip("netns", "del", name, check=False)


def remove_stale(prefix: str) -> list[str]:
    """Remove namespaces named `prefix`-PID-… whose process PID is gone; returns their names."""
    removed = []
    for path in sorted(NAMESPACES.glob(f"{prefix}-*")):
        match = re.fullmatch(rf"{re.escape(prefix)}-(\d+)-\w+", path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            remove_namespace(path.name)
            removed.append(path.name)
    return removed


def control_path(hub: str, spoke: str) -> Path:
    return Path(f"/run/farside-netlink-{hub}-{spoke}.sock")


def send_command(hub: str, spoke: str, *words: str, timeout: float = 5.0) -> str:
    """Send one control command to a running link; raises FarsideError if it is refused or nobody answers."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout)
            connection.connect(os.fspath(control_path(hub, spoke)))
            connection.sendall(" ".join(words).encode())
            connection.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    except OSError as error:
        raise FarsideError(f"no link runs between {hub} and {spoke}: {error}") from error
    if answer.startswith("error"):
        raise UsageError(answer.removeprefix("error: "))
    return answer


@contextmanager
def _control_socket(path: Path) -> Iterator[socket.socket]:
    if path.exists():
        raise FarsideError(f"{path} exists: is the link up already?", hint="`down` removes what is left over")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(path))
        try:
            server.listen(8)
            yield server
        finally:
            path.unlink(missing_ok=True)


@click.group(context_settings={"max_content_width": 110})
def main() -> None:
    """A wide-area link between two network namespaces of one machine (root)."""


_hub = click.option("--hub", default="farside-hub", show_default=True, help="Namespace of the hub.")
_spoke = click.option("--spoke", default="farside-spoke", show_default=True, help="Namespace of the spoke.")
_number = click.FloatRange(min=0)


@main.command()
@_hub
@_spoke
@click.option("--rtt", type=_number, default=60.0, show_default=True, help="Round trip, ms.")
@click.option("--rate", type=_number, default=0.0, help="Mbit/s each way; 0 is no limit.")
@click.option("--loss", type=_number, default=0.0, help="Percent of packets, each way.")
@click.option("--jitter", type=_number, default=0.0, help="Added delay per round trip, ms, half-normal.")
@click.option("--queue", type=_number, default=0.0, help="Bottleneck buffer, MB; 0 is one BDP.")
@click.option("--subnet", default="10.99.0.0/30", show_default=True, help="Hub first, spoke second.")
@click.option("--device", default="wan0", show_default=True, help="Interface name in both namespaces.")
@click.option("--mtu", type=click.IntRange(576, 65520), default=9000, show_default=True)
@click.option("--gso/--no-gso", default=None, help="Large segments [on unless there is loss].")
@click.option("--join", is_flag=True, help="Use namespaces that exist and leave them: one hub, many spokes.")
@click.option("--until-eof", is_flag=True, help="Also end when standard input closes (the parent is gone).")
def up(
    hub: str,
    spoke: str,
    subnet: str,
    device: str,
    mtu: int,
    gso: bool | None,
    join: bool,
    until_eof: bool,
    **shape_options: float,
) -> None:
    """Run the link in the foreground until it is told to stop."""
    shape = Shape(**{field.name: shape_options[field.name] for field in fields(Shape)})
    network = ipaddress.ip_network(subnet)
    large = gso if gso is not None else not shape.loss
    made: list[str] = []

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    try:
        with _control_socket(control_path(hub, spoke)) as control:
            ends = []
            for namespace, address in ((hub, network[1]), (spoke, network[2])):
                if not (join and (NAMESPACES / namespace).exists()):
                    made.append(namespace)
                make_namespace(namespace)
                ends.append(open_tun(namespace, device, f"{address}/{network.prefixlen}", mtu, gso=large))
            print(f"ready hub={network[1]} spoke={network[2]} pid={os.getpid()}", flush=True)
            Emulator(shape, *ends).run(control, until_eof=until_eof)
    except (FarsideError, OSError) as error:
        raise click.ClickException(str(error)) from error
    finally:
        for namespace in made:
            remove_namespace(namespace)


@main.command()
@_hub
@_spoke
@click.argument("words", nargs=-1, required=True)
def ctl(hub: str, spoke: str, words: tuple[str, ...]) -> None:
    """Control a running link: cut, restore, set NAME=VALUE…, stats, stop."""
    try:
        print(send_command(hub, spoke, *words))
    except FarsideError as error:
        raise click.ClickException(str(error)) from error


@main.command()
@_hub
@_spoke
def down(hub: str, spoke: str) -> None:
    """Stop a link and remove its namespaces, also those that a killed one has left."""
    path = control_path(hub, spoke)
    deadline = time.monotonic() + 5
    try:
        send_command(hub, spoke, "stop")
        while path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    except FarsideError:
        pass  # nobody runs it: what is left over is removed below
    path.unlink(missing_ok=True)
    for namespace in (hub, spoke):
        remove_namespace(namespace)


if __name__ == "__main__":
    main()
