"""Addresses as they are typed: ``hub.example:7420``, ``[::1]:7420``, ``hub.example:7420/c4``."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import NamedTuple

from farside.errors import UsageError

DEFAULT_PORT = 7420

_PORTAL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+")


class Endpoint(NamedTuple):
    """A host name or IP address (IPv6 without brackets) and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PortalAddress(NamedTuple):
    """A portal at a hub, written ``hub.example:7420/c4``."""

    host: str
    port: int
    portal: str

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.host, self.port)

    def __str__(self) -> str:
        return f"{self.endpoint}/{self.portal}"


class PortalRoot(NamedTuple):
    """A portal that a hub exports: its name and the directory behind it."""

    name: str
    root: Path


def parse_endpoint(text: object, default_port: int | None = DEFAULT_PORT) -> Endpoint:
    """``host:port``, ``[IPv6]:port``, or without the port.

    Raises:
        UsageError: it is no such thing, or the port is missing and ``default_port`` is None.
    """
    word = str(text).strip()
    if "://" in word:
        raise UsageError(
            f"{word!r} has a scheme in front", hint="write only HOST:PORT, for example hub.example:7420"
        )
    match = re.fullmatch(r"\[([^\]]*)\](?::(.*))?", word)
    if match:
        host, port = match[1], match[2]
        try:
            ipaddress.IPv6Address(host.split("%")[0])
        except ValueError:
            raise UsageError(f"{host!r} in brackets is not an IPv6 address") from None
    else:
        if word.count(":") > 1:
            raise UsageError(f"{word!r} is ambiguous", hint="put an IPv6 address in brackets: [::1]:7420")
        host, colon, port = word.partition(":")
        port = port if colon else None
        if not _HOST_NAME.fullmatch(host):
            raise UsageError(
                f"{host!r} is not a host name", hint="write HOST:PORT, for example hub.example:7420"
            )
    if port is None:
        if default_port is None:
            raise UsageError(f"{word!r} has no port")
        return Endpoint(host, default_port)
    if not re.fullmatch(r"\d{1,5}", port) or int(port) > 65535:
        raise UsageError(f"{port!r} is not a port", hint="ports are 1 to 65535")
    return Endpoint(host, int(port))


def parse_portal_address(text: object) -> PortalAddress:
    """``hub.example:7420/c4``; the port may be left out (7420).

    Raises:
        UsageError: no portal in it, or the hub's part is wrong.
    """
    word = str(text).strip()
    if "://" in word:
        raise UsageError(
            f"{word!r} has a scheme in front", hint="write HUB:PORT/PORTAL, for example hub.example:7420/c4"
        )
    hub, _, portal = word.partition("/")
    if not portal:
        raise UsageError(
            f"{word!r} names no portal", hint="write HUB:PORT/PORTAL, for example hub.example:7420/c4"
        )
    endpoint = parse_endpoint(hub)
    return PortalAddress(endpoint.host, endpoint.port, parse_portal_name(portal))


def parse_portal_name(text: object) -> str:
    """The name of a portal: letters, digits, ``.``, ``_`` and ``-``, at most 64, the first no punctuation."""
    name = str(text)
    if not _PORTAL_NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a portal name", hint="use letters, digits, '.', '_' and '-', at most 64 of them"
        )
    return name


def parse_name(value: object) -> str:
    """The name of a hub or a spoke, as it stands in certificates and lists."""
    name = str(value)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise UsageError(
            f"{name!r} is not a name", hint="use letters, digits, '.', '_' and '-', at most 64 of them"
        )
    return name


def is_loopback(host: str) -> bool:
    """Whether the host is this machine's loopback by its very name; names are not looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False
