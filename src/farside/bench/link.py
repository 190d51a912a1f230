"""The emulated link of a run: between network namespaces where that is allowed, else a delay proxy.

All links look the same to their user: commands run "at the hub" and "at the spoke", an address to listen
at and one to connect to, traffic counters, and cut/restore.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from farside.bench import delayproxy, netlink
from farside.bench.child import Child
from farside.errors import FarsideError

_NAMESPACE_PREFIX = "farside"
_PORT = 7420


@dataclass(frozen=True)
class Traffic:
    """Bytes carried so far in each direction (in namespaces: with headers) and the worst lateness of a
    delivery since the last time it was asked, ms (0 where it is not known)."""

    to_hub: int
    to_spoke: int
    late_ms: float = 0.0


class Link(Protocol):
    """What a run needs of its link. `hub_prefix` and `spoke_prefix` go before the argument vector of a
    command that is to run at that end."""

    description: str
    hub_prefix: list[str]
    spoke_prefix: list[str]
    listen_address: str
    hub_address: str

    def traffic(self) -> Traffic: ...
    def command(self, *words: str) -> str: ...
    def close(self) -> None: ...


class NamespaceLink:
    """The link of `farside.bench.netlink`: needs root."""

    def __init__(self, shape: netlink.Shape, work: Path) -> None:
        name = f"{_NAMESPACE_PREFIX}-{os.getpid()}"
        self._hub, self._spoke = f"{name}-hub", f"{name}-spoke"
        self.description = f"{_describe(shape.rtt, shape.rate, shape.loss)}, between network namespaces"
        self.hub_prefix = ["nsenter", f"--net={netlink.NAMESPACES / self._hub}"]
        self.spoke_prefix = ["nsenter", f"--net={netlink.NAMESPACES / self._spoke}"]
        netlink.remove_stale(_NAMESPACE_PREFIX)
        command = [sys.executable, "-m", "farside.bench.netlink", "up", "--until-eof"]
        command += ["--hub", self._hub, "--spoke", self._spoke, "--rtt", str(shape.rtt)]
        command += ["--rate", str(shape.rate), "--loss", str(shape.loss), "--jitter", str(shape.jitter)]
        self._child = Child(command, work / "link.log")
        ready = dict(word.split("=") for word in self._child.wait_ready("ready").split()[1:])
        self.listen_address = self.hub_address = f"{ready['hub']}:{_PORT}"
        self.hub_host = ready["hub"]

    @staticmethod
    def obstacle() -> str | None:
        """Why this machine cannot have it, or None if it can."""
        if os.geteuid() != 0:
            return "not root"
        for program in ("ip", "nsenter"):
            if not shutil.which(program):
                return f"the program `{program}` is missing"
        if not os.path.exists("/dev/net/tun"):
            return "/dev/net/tun is missing"
        probe = f"{_NAMESPACE_PREFIX}-{os.getpid()}-probe"
        try:
            netlink.run_ip("netns", "add", probe)
        except FarsideError as error:
            return error.message
        netlink.remove_namespace(probe)
        return None

    def traffic(self) -> Traffic:
        stats: dict[str, Any] = json.loads(self.command("stats"))
        ways = stats[netlink.TO_HUB], stats[netlink.TO_SPOKE]
        return Traffic(ways[0]["bytes"], ways[1]["bytes"], max(way["late_ms"] for way in ways))

    def command(self, *words: str) -> str:
        return netlink.send_command(self._hub, self._spoke, *words)

    def close(self) -> None:
        self._child.close()
        for name in (self._hub, self._spoke):
            if (netlink.NAMESPACES / name).exists():
                netlink.remove_namespace(name)


class ProxyLink:
    """The link of `farside.bench.delayproxy`, on loopback: needs no privilege."""

    def __init__(self, shape: netlink.Shape, work: Path) -> None:
        self.description = f"{_describe(shape.rtt, shape.rate, 0)}, through a delay proxy on loopback"
        self.hub_prefix: list[str] = []
        self.spoke_prefix: list[str] = []
        self.listen_address = f"127.0.0.1:{free_port()}"
        self._control = work / "link.sock"
        command = [sys.executable, "-m", "farside.bench.delayproxy", "--until-eof"]
        command += ["--listen", "127.0.0.1:0", "--to", self.listen_address]
        command += ["--rtt", str(shape.rtt), "--rate", str(shape.rate), "--control", str(self._control)]
        self._control.unlink(missing_ok=True)
        self._child = Child(command, work / "link.log")
        self.hub_address = self._child.wait_ready("ready").split()[1]

    def traffic(self) -> Traffic:
        stats: dict[str, Any] = json.loads(self.command("stats"))
        return Traffic(int(stats[delayproxy.TO_SERVER]), int(stats[delayproxy.TO_CLIENT]))

    def command(self, *words: str) -> str:
        return delayproxy.send_command(self._control, " ".join(words))

    def close(self) -> None:
        self._child.close()


def open_link(shape: netlink.Shape, work: Path) -> tuple[Link, str]:
    """The best link that this machine can have, and why it is not the one between namespaces ("" if it is).

    Logs go to the directory `work`. Raises FarsideError if the link does not come up.
    """
    obstacle = NamespaceLink.obstacle()
    if obstacle is None:
        return NamespaceLink(shape, work), ""
    return ProxyLink(shape, work), obstacle


def free_port() -> int:
    """A TCP port of loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _describe(rtt: float, rate: float, loss: float) -> str:
    text = f"{rtt:g} ms, " + (f"{rate / 1000:g} Gbit/s" if rate else "no rate limit")
    return text + (f", {loss:g} % loss" if loss else "")
