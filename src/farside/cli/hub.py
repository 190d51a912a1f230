"""``farside hub``: make a hub, serve portals, invite, list and revoke spokes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import click

from farside.addresses import (
    DEFAULT_PORT,
    Endpoint,
    is_loopback,
    parse_endpoint,
    parse_name,
    parse_portal_name,
)
from farside.cli.main import Invocation, Lazy, LazyGroup
from farside.cli.options import DIRECTORY, DURATION, config_options, examples, json_option
from farside.cli.process import Readiness, raise_file_limit, set_up_logging, warn_insecure
from farside.config import HubConfig, default_hub_state_dir, host_name, hub_config
from farside.errors import UsageError
from farside.units import format_duration

_STOP_S = 10.0
"""How long spokes that are being served get at the end, seconds."""


class HubGroup(LazyGroup):
    lazy: ClassVar[Mapping[str, Lazy]] = {
        "init": Lazy(__name__, "init", "Make the state directory and the certificate authority."),
        "serve": Lazy(__name__, "serve", "Serve portals until SIGTERM or ^C."),
        "invite": Lazy(__name__, "invite", "Print one join token."),
        "spokes": Lazy(__name__, "spokes", "List the spokes that have joined."),
        "revoke": Lazy(__name__, "revoke", "Shut a spoke out, live connections included."),
    }


@click.command(
    cls=HubGroup,
    epilog=examples(
        """
farside hub init
farside hub serve --portal c4=/data/c4
farside hub invite --portal c4 --expires 1h > join.txt
"""
    ),
)
def hub() -> None:
    """Beside the data: export directories to spokes."""


_state_dir = click.option(
    "--state-dir",
    type=DIRECTORY,
    default=None,
    metavar="DIR",
    help="Where the hub keeps its keys and lists.  [default: /var/lib/farside/hub]",
)


@click.command(epilog=examples("farside hub init\nfarside hub init --name ohio --state-dir /srv/farside"))
@click.option("--name", help="The hub's name in certificates and tokens.  [default: host name]")
@_state_dir
@json_option
def init(name: str | None, state_dir: Path | None, as_json: bool) -> int:
    """Make the state directory and a private certificate authority. What exists already is left alone."""
    from farside.hub import state
    from farside.protocol.tls import CertificateAuthority

    directory = state_dir or default_hub_state_dir()
    fingerprint = state.init(directory, parse_name(name) if name else host_name())
    made = CertificateAuthority.load(directory).hub_name
    if name not in (None, made):
        raise UsageError(
            f"there is a hub already and its name is {made!r}",
            path=str(directory),
            hint="its name is in every certificate; use another --state-dir for another hub",
        )
    name = made
    if as_json:
        click.echo(json.dumps({"name": name, "state_dir": str(directory), "ca_sha256": fingerprint}))
    else:
        click.echo(f"hub {name} is ready in {directory}\nfingerprint of its authority: {fingerprint}")
        click.echo("next: farside hub serve --portal NAME=DIR", err=True)
    return 0


@click.command(
    epilog=examples(
        """
farside hub serve --portal c4=/data/c4
farside hub serve --portal c4=/data/c4 --portal code=/srv/code --listen 0.0.0.0:7420
farside hub serve --config hub.toml
farside hub serve --portal c4=/data/c4 --insecure          # for spokes on this machine only
"""
    )
)
@click.option(
    "--portal", "portals", multiple=True, metavar="NAME=DIR", help="A directory to export; may be repeated."
)
@json_option
@config_options(HubConfig)
@click.pass_obj
def serve(
    invocation: Invocation,
    /,
    portals: tuple[str, ...],
    as_json: bool,
    config_file: Path | None,
    **flags: Any,
) -> int:
    """Serve directories as they are, until SIGTERM or ^C.

    Prints one line when it accepts spokes. With --json that line is an object: host, port, portals, tls.
    """
    config = hub_config({"portals": portals or None, **flags}, config_file)
    for portal in config.portals:
        _check_root(portal.name, portal.root)
    if config.insecure:
        warn_insecure(str(config.listen))
    set_up_logging(invocation.debug)
    raise_file_limit()
    asyncio.run(_serve(config, as_json))
    return 0


async def _serve(config: HubConfig, as_json: bool) -> None:
    from farside.hub import Hub, PortalSpec

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = Hub(
        config.state_dir,
        [PortalSpec(p.name, p.root, False) for p in config.portals],
        insecure=config.insecure,
        lease_s=config.lease_s,
        congestion=config.congestion,
    )
    port = await server.start(config.listen.host, config.listen.port)
    at = Endpoint(config.listen.host, port)
    if as_json:
        roots = {p.name: str(p.root) for p in config.portals}
        click.echo(
            json.dumps({"host": at.host, "port": at.port, "portals": roots, "tls": not config.insecure})
        )
    else:
        names = ", ".join(f"{p.name} ({p.root})" for p in config.portals)
        click.echo(f"serving {names} at {at}" + (" without TLS" if config.insecure else ""))
    Readiness().ready()
    await stop.wait()
    try:
        await asyncio.wait_for(server.stop(), _STOP_S)
    except TimeoutError:
        click.echo(f"farside: gave up waiting for an orderly end after {_STOP_S:.0f} s", err=True)


def _check_root(name: str, root: Path) -> None:
    """Raises UsageError when a portal's directory cannot be served."""
    try:
        os.close(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except FileNotFoundError:
        raise UsageError(f"the directory of portal {name!r} does not exist", path=str(root)) from None
    except NotADirectoryError:
        raise UsageError(f"portal {name!r} is not a directory", path=str(root)) from None
    except OSError as error:
        raise UsageError(
            f"cannot open the directory of portal {name!r}: {error.strerror}", path=str(root)
        ) from error


@click.command(
    epilog=examples(
        """
farside hub invite --portal c4 > join.txt
farside hub invite --portal c4 --expires 15m --address 203.0.113.7:7420
"""
    )
)
@click.option("--portal", required=True, metavar="NAME", help="The portal that the token opens.")
@click.option("--read-only", is_flag=True, help="Reading only: the only right there is so far.")
@click.option(
    "--expires", type=DURATION, default="1h", show_default=True, help="How long the token can be used."
)
@click.option(
    "--address", metavar="HOST:PORT", help="Where spokes reach this hub.  [default: host name:7420]"
)
@_state_dir
@json_option
def invite(
    portal: str, read_only: bool, expires: float, address: str | None, state_dir: Path | None, as_json: bool
) -> int:
    """Print one join token. It lets one spoke join, once; treat it like a password until it is used."""
    from farside.hub import state

    if expires <= 0:
        raise UsageError("--expires must be longer than 0")
    where = parse_endpoint(address) if address else Endpoint(host_name(), DEFAULT_PORT)
    directory = state_dir or default_hub_state_dir()
    token = state.invite(directory, parse_portal_name(portal), expires_s=expires, address=str(where))
    served = state.portal_names(directory)
    if served and portal not in served:
        click.echo(
            f"farside: portal {portal!r} was never served yet; there are {', '.join(served)}", err=True
        )
    if as_json:
        click.echo(
            json.dumps(
                {"token": token, "portal": portal, "address": str(where), "expires": time.time() + expires}
            )
        )
        return 0
    click.echo(token)
    click.echo(
        f"one spoke may join with it within {format_duration(expires)}:\n"
        f"  farside mount {where}/{portal} /mnt/{portal} --token-file FILE",
        err=True,
    )
    if is_loopback(where.host):
        click.echo("farside: the address is this machine's loopback; see --address", err=True)
    return 0


@click.command(epilog=examples("farside hub spokes\nfarside hub spokes --json"))
@_state_dir
@json_option
def spokes(state_dir: Path | None, as_json: bool) -> int:
    """List the spokes that have joined."""
    from farside.hub import state

    rows = [_spoke(spoke) for spoke in state.spokes(state_dir or default_hub_state_dir())]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return 0
    if not rows:
        click.echo("no spoke has joined; `farside hub invite` makes a token")
        return 0
    lines = [("SPOKE", "PORTALS", "JOINED", "LAST SEEN", "STATE")]
    for row in rows:
        state_word = "revoked" if row["revoked"] else "may attach"
        lines.append(
            (row["name"], ",".join(row["portals"]), _ago(row["joined"]), _ago(row["last_seen"]), state_word)
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0


@click.command(epilog=examples("farside hub revoke gpu-17"))
@click.argument("spoke")
@_state_dir
def revoke(spoke: str, state_dir: Path | None) -> int:
    """Shut SPOKE out for good.

    Its live connections end within about a second; it needs a new token to come back.
    """
    from farside.hub import state

    state.revoke(state_dir or default_hub_state_dir(), spoke)
    click.echo(f"{spoke} is revoked")
    return 0


def _spoke(spoke: Any) -> dict[str, Any]:
    return {
        "name": spoke.name,
        "portals": list(spoke.portals),
        "serial": str(spoke.serial),
        "fingerprint": spoke.fingerprint,
        "joined": spoke.joined,
        "last_seen": spoke.last_seen,
        "revoked": bool(spoke.revoked),
    }


def _ago(when: float | None) -> str:
    return "never" if not when else f"{format_duration(max(0.0, time.time() - when))} ago"
