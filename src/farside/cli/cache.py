"""``farside cache``: look after a cache directory that no mount is using."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import click

from farside.cli.main import Lazy, LazyGroup
from farside.cli.options import DIRECTORY, examples, json_option
from farside.errors import EXIT_FAILED, CacheError, printable
from farside.units import format_count, format_size


class CacheGroup(LazyGroup):
    lazy: ClassVar[dict[str, Lazy]] = {
        "status": Lazy(__name__, "status", "Format, files, bytes on disk, and who uses it."),
        "verify": Lazy(__name__, "verify", "Check every chunk against its checksum, drop damaged ones."),
        "clear": Lazy(__name__, "clear", "Delete what farside put there."),
    }


@click.command(
    cls=CacheGroup, epilog=examples("farside cache status /nvme/farside\nfarside cache verify /nvme/farside")
)
def cache() -> None:
    """Look after a cache directory. What a running mount holds is shown by `farside status`."""


@click.command(epilog=examples("farside cache status /nvme/farside"))
@click.argument("directory", type=DIRECTORY)
@json_option
def status(directory: Path, as_json: bool) -> int:
    """Show format, files, bytes on disk and the owner of a cache directory; changes nothing."""
    found = _look(directory)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        owner = f"in use by process {found['owner_pid']}" if found["owner_pid"] else "not in use"
        click.echo(
            f"{directory}: format {found['format']}, chunks of {format_size(found['chunk'])}, "
            f"{format_count(found['files'], 'file')}, {format_size(found['bytes'])} on disk, {owner}"
        )
    return 0


def _look(directory: Path) -> dict[str, Any]:
    from farside.spoke.cachedir import FORMAT_FILE

    _must_be_cache(directory)
    try:
        about = json.loads((directory / FORMAT_FILE).read_text())
        number, chunk = int(about["format"]), int(about["chunk"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"cannot read {FORMAT_FILE}: {error}"
        raise CacheError(what, path=str(directory), hint="`farside cache clear` starts anew") from error
    files, count = _measure(directory)
    return {
        "dir": str(directory),
        "format": number,
        "chunk": chunk,
        "files": files,
        "bytes": count,
        "owner_pid": _owner(directory / "lock"),
    }


def _must_be_cache(directory: Path) -> None:
    from farside.spoke.cachedir import FORMAT_FILE

    if not (directory / FORMAT_FILE).exists():
        raise CacheError("not a farside cache", path=str(directory), hint=f"it has no {FORMAT_FILE}")


def _measure(directory: Path) -> tuple[int, int]:
    """Cached files, and the bytes that they and what belongs to them take on disk."""
    files = count = 0
    for folder, _, names in os.walk(directory / "data"):
        for name in names:
            try:
                count += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue  # evicted while we look
            files += name.endswith(".data")
    return files, count


def _owner(lock: Path, locks: str = "/proc/locks") -> int | None:
    """The process that holds an flock on a file, from the kernel's table, so that nothing is locked here."""
    try:
        inode = lock.stat().st_ino
        with open(locks, encoding="ascii") as table:
            rows = [line.split() for line in table]
    except OSError:
        return None
    for row in rows:
        if "FLOCK" in row and row[-3].endswith(f":{inode}"):
            return int(row[row.index("FLOCK") + 3])
    return None


@click.command(epilog=examples("farside cache verify /nvme/farside"))
@click.argument("directory", type=DIRECTORY)
@json_option
def verify(directory: Path, as_json: bool) -> int:
    """Read everything in a cache directory and check it against its checksums.

    Damaged chunks are dropped and fetched anew when they are next read. Exits with 1 if there were any.
    """
    from farside.spoke.maintenance import verify_directory

    watched = not as_json and sys.stderr.isatty()

    def show(done: int, total: int) -> None:
        click.echo(f"\r{done * 100 // max(total, 1)} % checked", nl=done == total, err=True)

    report = verify_directory(directory, show if watched else None)
    damaged = [printable(path) for path in report.damaged]
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(report), "damaged": damaged}, indent=2))
    else:
        click.echo(
            f"{format_count(report.files, 'file')}, {format_count(report.chunks, 'chunk')}, "
            f"{format_size(report.read_bytes)} checked; "
            f"{format_count(report.corrupt_chunks, 'damaged chunk')} and "
            f"{format_count(report.left_overs, 'left-over')} dropped"
        )
        for path in damaged:
            click.echo(f"  damaged: {path}")
    return EXIT_FAILED if report.corrupt_chunks else 0


@click.command(epilog=examples("farside cache clear /nvme/farside\nfarside cache clear /nvme/farside --yes"))
@click.argument("directory", type=DIRECTORY)
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def clear(directory: Path, yes: bool, as_json: bool) -> int:
    """Delete everything that farside put into a cache directory, and nothing else.

    At the hub nothing changes; the next mount starts with an empty cache.
    """
    from farside.spoke.maintenance import clear_directory

    _must_be_cache(directory)
    if not yes:
        size = format_size(_measure(directory)[1])
        if not click.confirm(f"delete {size} of cached data in {directory}?", err=True):
            click.echo("nothing was deleted", err=True)
            return EXIT_FAILED
    freed = clear_directory(directory)
    if as_json:
        click.echo(json.dumps({"dir": str(directory), "bytes": freed}))
    else:
        click.echo(f"{directory} is cleared; {format_size(freed)} are free again")
    return 0
