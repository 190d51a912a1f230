"""What lies in the cache of a running mount: ``farside warm``, ``pin``, ``unpin`` and ``evict``."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import click

from farside.cli.control_client import Place, call, find
from farside.cli.options import FILE, SIZE, examples, json_option
from farside.errors import printable
from farside.units import format_count, format_duration, format_rate, format_size

_AWAY = "the hub is AWAY, waiting"
_SILENCE_S = 300.0
"""The longest that a long-running request may go without a line of progress."""


@click.command(
    epilog=examples(
        """
farside warm /mnt/c4/train
farside warm /mnt/c4 --include '*.parquet' --exclude 'validation/*'
farside warm /mnt/c4 --limit 500M
farside warm /mnt/c4 --dry-run          # says bytes and time, moves nothing
"""
    )
)
@click.argument("path", type=FILE)
@click.option("--include", multiple=True, metavar="GLOB", help="Only these files; may be repeated.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Not these files; may be repeated.")
@click.option(
    "--limit", type=SIZE, help="Stop before more than so many bytes have moved; files are not split."
)
@click.option(
    "--dry-run", is_flag=True, help="Only say how many bytes would move and how long it would take."
)
@json_option
def warm(
    path: Path,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    limit: int | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Bring the files below PATH into the cache before they are read.

    Can be interrupted with ^C and given again: what is cached is skipped. Globs are matched against the path
    below PATH and against the file's name.
    """
    place = find(path)
    arguments = {
        "path": place.relative,
        "include": list(include),
        "exclude": list(exclude),
        "limit": limit,
        "dry_run": dry_run,
    }
    with _progress(quiet=as_json or dry_run) as progress:
        result = call(place.socket, "warm", arguments, on_progress=progress.show, silence_s=_SILENCE_S)
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return 0
    click.echo(_warmed(result, dry_run))
    return 0


def _warmed(result: dict[str, Any], dry_run: bool) -> str:
    files, count = result.get("files", 0), result.get("bytes", 0)
    seconds, total = result.get("seconds"), result.get("bytes_total")
    if dry_run:
        text = f"{format_count(files, 'file')}, {format_size(count)} would cross the link"
        if seconds is not None:
            text += f", in about {format_duration(seconds)}"
        if total is not None:
            text += f" ({format_size(total - count)} of {format_size(total)} are cached)"
    else:
        text = f"{format_count(files, 'file')} {'is' if files == 1 else 'are'} cached"
        text += f"; {format_size(count)} crossed the link"
        if seconds and count:
            text += f" in {format_duration(seconds)} ({format_rate(count / seconds)})"
    if result.get("skipped"):
        text += f"; {format_count(result['skipped'], 'file')} did not fit or failed, see the log"
    if result.get("stopped"):
        why = "the limit is reached" if result["stopped"] == "limit" else "the cache holds no more"
        text += f"; {why}, {format_count(result.get('left', 0), 'file')} not looked at"
    return text


@click.command(epilog=examples("farside pin /mnt/c4/tokenizer /mnt/c4/validation"))
@click.argument("paths", nargs=-1, required=True, type=FILE)
@json_option
def pin(paths: tuple[Path, ...], as_json: bool) -> int:
    """Keep the files at PATHS, or below them, in the cache whatever happens.

    They are not fetched by this; use `farside warm` too if they should be there before they are read.
    """
    return _each("pin", "pinned", paths, as_json)


@click.command(epilog=examples("farside unpin /mnt/c4/validation"))
@click.argument("paths", nargs=-1, required=True, type=FILE)
@json_option
def unpin(paths: tuple[Path, ...], as_json: bool) -> int:
    """Let the files at PATHS, or below them, be evicted again."""
    return _each("unpin", "unpinned", paths, as_json)


@click.command(epilog=examples("farside evict /mnt/c4/train/2024"))
@click.argument("paths", nargs=-1, required=True, type=FILE)
@json_option
def evict(paths: tuple[Path, ...], as_json: bool) -> int:
    """Drop the files at PATHS, or below them, from the cache now. At the hub nothing changes.

    Pinned files are kept.
    """
    return _each("evict", "evicted", paths, as_json)


def _each(op: str, done: str, paths: tuple[Path, ...], as_json: bool) -> int:
    places: list[tuple[Path, Place]] = [(path, find(path)) for path in paths]  # all or nothing is found
    results: dict[str, dict[str, Any]] = {}
    for path, place in places:
        result = call(place.socket, op, {"path": place.relative}, silence_s=_SILENCE_S)
        results[str(path)] = result
        if not as_json:
            files, size = result.get("files", 0), result.get("bytes", 0)
            text = (
                f"{printable(os.fsencode(path))}: {format_count(files, 'file')}, {format_size(size)} {done}"
            )
            if result.get("pinned"):
                text += f"; {result['pinned']:,} pinned, kept (`farside unpin` lets them go)"
            click.echo(text)
    if as_json:
        click.echo(json.dumps(results, indent=2))
    return 0


# -- progress --------------------------------------------------------------------------------------


class _Progress(Protocol):
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def show(self, state: dict[str, Any]) -> None: ...


def _progress(quiet: bool) -> _Progress:
    return _Bar() if not quiet and sys.stderr.isatty() else _Lines(quiet)


class _Lines:
    """Progress where nobody watches: one line on stderr every ten seconds, or none."""

    def __init__(self, quiet: bool) -> None:
        self._next = float("inf") if quiet else time.monotonic() + 10

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, state: dict[str, Any]) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 10
        click.echo(
            f"{state.get('files', 0):,} of {state.get('files_total', 0):,} files, "
            f"{format_size(state.get('bytes', 0))} of {format_size(state.get('bytes_total', 0))}, "
            + (_AWAY if state.get("away") else format_rate(state.get("rate", 0))),
            err=True,
        )


class _Bar:
    """A progress bar on a terminal."""

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("looking", total=None)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, state: dict[str, Any]) -> None:
        self._bar.update(
            self._task,
            description=_AWAY
            if state.get("away")
            else f"{state.get('files', 0):,}/{state.get('files_total', 0):,} files",
            completed=state.get("bytes", 0),
            total=state.get("bytes_total") or None,
        )
