"""``farside status``: what a running mount reports, for people or as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from farside.cli.control_client import call, find, sockets
from farside.cli.main import EXIT_INTERRUPTED
from farside.cli.mounttable import farside_mounts
from farside.cli.options import DIRECTORY, DURATION, examples, json_option
from farside.config import control_socket
from farside.errors import FarsideError
from farside.units import format_count, format_duration, format_rate, format_size

REASONS = ("demand", "planned", "readahead", "fill", "metadata")


@click.command(
    epilog=examples(
        """
farside status                        # every mount of this user
farside status /mnt/c4
farside status /mnt/c4 --watch        # again every second, with rates
farside status /mnt/c4 --json | jq .link_bytes
"""
    )
)
@click.argument("path", type=DIRECTORY, required=False)
@json_option
@click.option("--watch", is_flag=True, help="Show it again and again until ^C.")
@click.option("--interval", type=DURATION, default="1s", show_default=True, help="Pause with --watch.")
def status(path: Path | None, as_json: bool, watch: bool, interval: float) -> int:
    """Show link, cache, hits and bytes by reason of the mount that holds PATH, or of all mounts.

    With --json: one object for PATH, a list without PATH; with --watch one such line per interval.
    """
    before: dict[str, dict[str, Any]] = {}
    while True:
        began = time.monotonic()
        found = [call(find(path).socket, "status")] if path is not None else _all()
        if as_json:
            shown: Any = found[0] if path is not None else found
            click.echo(json.dumps(shown) if watch else json.dumps(shown, indent=2))
        else:
            text = "\n\n".join(render(s, before.get(s["mountpoint"])) for s in found)
            if watch and sys.stdout.isatty():
                text = "\x1b[H\x1b[J" + text
            click.echo(text or "nothing is mounted")
        if not watch:
            return 0
        before = {s["mountpoint"]: s for s in found}
        try:
            time.sleep(max(0.05, interval - (time.monotonic() - began)))
        except KeyboardInterrupt:  # the way to end it
            return EXIT_INTERRUPTED


def _all() -> list[dict[str, Any]]:
    """The status of every mount that answers; the others are named on stderr."""
    found = []
    places = {control_socket(mountpoint): mountpoint for mountpoint in farside_mounts()}
    for address in sockets():
        try:
            found.append(call(address, "status", silence_s=10.0))
        except FarsideError as error:
            click.echo(f"farside: {places.get(address, address)}: {error}", err=True)
    return found


def render(now: dict[str, Any], before: dict[str, Any] | None = None) -> str:
    """One mount's status as lines of text; with an earlier status of it also the rates since then."""
    seconds = now.get("uptime_s", 0.0) - before.get("uptime_s", 0.0) if before else 0.0
    lines = [_title(now)]
    for label, text in (
        ("link", _link(now)),
        ("crossed", _crossed(now, before, seconds)),
        ("reads", _reads(now, before, seconds)),
        ("cache", _cache(now.get("cache", {}))),
        ("names", _names(now.get("namespace", {}))),
        ("mount", _mount(now)),
        ("errors", _errors(now.get("errors", {}))),
    ):
        if text:
            lines.append(f"  {label:<8} {text}")
    return "\n".join(lines)


def _title(now: dict[str, Any]) -> str:
    up = now.get("state") == "up"
    state = click.style("up", fg="green") if up else click.style("AWAY", fg="red", bold=True)
    since = f" for {format_duration(now['since_s'])}" if "since_s" in now else ""
    title = (
        f"{click.style(now['mountpoint'], bold=True)}  {now.get('hub')}/{now.get('portal')}  {state}{since}"
    )
    if not up:
        why = now.get("reason") or "the hub does not answer"
        title += f"\n  {why}: what is cached can be read, the rest fails until it is back"
    return title


def _link(now: dict[str, Any]) -> str:
    link = now.get("link", {})
    parts = []
    if link.get("rtt_ms") is not None:
        parts.append(f"RTT {link['rtt_ms']:.1f} ms")
    if link.get("bandwidth_bps"):
        parts.append(f"best {format_rate(link['bandwidth_bps'] / 8)}")
    if link.get("window_bytes"):
        parts.append(
            f"in flight {format_size(link.get('inflight_bytes', 0))} of {format_size(link['window_bytes'])}"
        )
    parts.append(f"{link.get('connections', 0)} connections")
    parts.append("TLS" if link.get("tls") else click.style("no TLS", fg="yellow"))
    return ", ".join(parts)


def _crossed(now: dict[str, Any], before: dict[str, Any] | None, seconds: float) -> str:
    counts = now.get("link_bytes", {})
    text = format_size(counts.get("total", 0))
    shares = [f"{reason} {format_size(counts[reason])}" for reason in REASONS if counts.get(reason)]
    if shares:
        text += f" ({', '.join(shares)})"
    if before and seconds > 0:
        moved = counts.get("total", 0) - before.get("link_bytes", {}).get("total", 0)
        text += f", now {format_rate(moved / seconds)}"
    return text


def _reads(now: dict[str, Any], before: dict[str, Any] | None, seconds: float) -> str:
    reads = now.get("reads", {})
    if not reads.get("count"):
        return "none seen yet (the kernel reads whole cached files without asking)"
    text = f"{reads['count']:,} ({format_size(reads.get('bytes', 0))})"
    text += f", {_percent(reads.get('local_share'))} local"
    if reads.get("first_touch_share") is not None:
        text += f", first-touch hits {_percent(reads['first_touch_share'])}"
    if reads.get("p50_ms") is not None:
        text += f", p50 {_ms(reads['p50_ms'])}, p99 {_ms(reads.get('p99_ms'))}"
    if before and seconds > 0:
        past = before.get("reads", {})
        text += f", now {format_rate((reads.get('bytes', 0) - past.get('bytes', 0)) / seconds)}"
    return text


def _cache(cache: dict[str, Any]) -> str:
    used, limit = cache.get("used", 0), cache.get("limit") or 0
    text = f"{format_size(used)} of {format_size(limit)}"
    if limit:
        text += f" ({_percent(used / limit)})"
    if cache.get("files") is not None:
        text += f", {format_count(cache['files'], 'file')}"
    text += f" in {cache.get('dir')}"
    if cache.get("pinned_files"):
        text += f", {cache['pinned_files']:,} pinned"
    if cache.get("evicted_bytes"):
        text += f", evicted {format_size(cache['evicted_bytes'])}"
    if cache.get("corrupt_chunks"):
        text += click.style(f", {cache['corrupt_chunks']} damaged chunks dropped", fg="yellow")
    if cache.get("bypass"):
        text += click.style(f"; NOT USED: {cache['bypass']}", fg="red")
    return text


def _names(names: dict[str, Any]) -> str:
    dirs = names.get("dirs", 0)
    text = format_count(names.get("entries", 0), "name")
    text += f" in {dirs:,} {'directory' if dirs == 1 else 'directories'}"
    return text + (", complete" if names.get("synced") else ", still coming")


def _mount(now: dict[str, Any]) -> str:
    mount = now.get("mount", {})
    if mount.get("passthrough"):
        opens, handled = mount.get("passthrough_opens", 0), mount.get("handled_opens", 0)
        way = f"kernel passthrough ({opens:,} opens, {handled:,} handled)"
    else:
        way = "reads handled by this process"
        if mount.get("passthrough_reason"):
            way += f" ({mount['passthrough_reason']})"
    text = f"{now.get('write_mode', 'read-only')}, {way}"
    if "pid" in now:
        text += (
            f", pid {now['pid']}, up {format_duration(now.get('uptime_s', 0))}, farside {now.get('version')}"
        )
    return text


def _errors(errors: dict[str, Any]) -> str:
    text = ", ".join(f"{name} {count:,}" for name, count in errors.items() if count)
    return click.style(text, fg="yellow") if text else ""


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share * 100:.1f} %"


def _ms(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1000:.0f} µs" if value < 1 else f"{value:.1f} ms"
