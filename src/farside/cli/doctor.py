"""``farside doctor``: checks this machine and says what to change."""

from __future__ import annotations

import json
from pathlib import Path

import click

from farside.cli.checks import Finding, State, run_all
from farside.cli.options import DIRECTORY, examples, json_option
from farside.errors import EXIT_FAILED

_MARKS = {State.OK: ("ok", "green"), State.WARN: ("warn", "yellow"), State.BROKEN: ("BROKEN", "red")}


@click.command(
    epilog=examples(
        """
farside doctor
farside doctor --cache-dir /nvme/farside
farside doctor --json
"""
    )
)
@click.option("--cache-dir", "cache_dirs", type=DIRECTORY, multiple=True, help="Look at this one too.")
@json_option
def doctor(cache_dirs: tuple[Path, ...], as_json: bool) -> int:
    """Check kernel, FUSE, TCP, limits, clock, cache directory and left-over mounts of this machine.

    Exits with 1 when something is broken; warnings cost speed only.
    """
    findings = run_all(list(cache_dirs))
    if as_json:
        click.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        for finding in findings:
            click.echo(_line(finding))
    return EXIT_FAILED if any(f.state is State.BROKEN for f in findings) else 0


def _line(finding: Finding) -> str:
    word, colour = _MARKS[finding.state]
    line = click.style(f"{word:<7}", fg=colour) + f"{finding.check}: {finding.found}"
    return f"{line}\n         → {finding.advice}" if finding.advice else line
