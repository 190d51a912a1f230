"""The ``farside`` program: finds the command, prints errors as one paragraph, sets the exit status.

Exit status: 0 done, 1 failed, 2 used wrongly, 3 the hub cannot be reached, 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import click

from farside import __version__
from farside.errors import EXIT_FAILED, FarsideError, printable

EXIT_INTERRUPTED = 130


@dataclass
class Invocation:
    """How the program was called: its arguments without the program's name, and whether --debug is on."""

    argv: Sequence[str]
    debug: bool = False


class Lazy(NamedTuple):
    """Where a command lives and its line in the help, so that help need not import it."""

    module: str
    attribute: str
    summary: str


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    lazy: ClassVar[Mapping[str, Lazy]]

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return None
        place = self.lazy[cmd_name]
        command: click.Command = getattr(importlib.import_module(place.module), place.attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, place.summary) for name, place in self.lazy.items()])


class Farside(LazyGroup):
    lazy: ClassVar[Mapping[str, Lazy]] = {
        "hub": Lazy("farside.cli.hub", "hub", "Beside the data: export directories."),
        "mount": Lazy("farside.cli.mount", "mount", "Beside the GPUs: mount a hub's portal."),
        "unmount": Lazy("farside.cli.mount", "unmount", "Unmount, always."),
        "status": Lazy("farside.cli.status", "status", "Link, cache, hits, bytes by reason."),
        "warm": Lazy("farside.cli.contents", "warm", "Bring files into the cache before they are read."),
        "pin": Lazy("farside.cli.contents", "pin", "Keep files in the cache whatever happens."),
        "unpin": Lazy("farside.cli.contents", "unpin", "Let pinned files be evicted again."),
        "evict": Lazy("farside.cli.contents", "evict", "Drop files from the cache now."),
        "cache": Lazy("farside.cli.cache", "cache", "Look after a cache directory (status, verify, clear)."),
        "doctor": Lazy("farside.cli.doctor", "doctor", "Check this machine and say what to change."),
    }


EXAMPLES = """\b
Beside the data:
  farside hub init
  farside hub serve --portal c4=/data/c4
  farside hub invite --portal c4 --expires 1h > join.txt
\b
Beside the GPUs:
  farside mount hub.example:7420/c4 /mnt/c4 --token-file join.txt
  python train.py --data /mnt/c4
  farside status /mnt/c4
"""


@click.command(
    cls=Farside,
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="farside", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show tracebacks and log everything.")
@click.pass_obj
def farside(invocation: Invocation, /, debug: bool) -> None:
    """Train in one region on data that stays in another."""
    invocation.debug = debug


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    invocation = Invocation(list(sys.argv[1:] if argv is None else argv))
    try:
        result = farside.main(
            args=list(invocation.argv), prog_name="farside", standalone_mode=False, obj=invocation
        )
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("farside: interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; the interpreter must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        text, code = explain(error)
        if invocation.debug:
            traceback.print_exc()
        click.secho("farside: ", err=True, fg="red", bold=True, nl=False)
        click.echo(text, err=True)
        return code


def explain(error: Exception) -> tuple[str, int]:
    """An error as one paragraph, and the exit status for it."""
    if isinstance(error, FarsideError):
        return str(error), error.exit_code
    if isinstance(error, OSError):
        where = (
            f" [{printable(os.fsencode(error.filename))}]" if isinstance(error.filename, str | bytes) else ""
        )
        return (f"{error.strerror}{where}" if error.strerror else str(error)), EXIT_FAILED
    what = f"internal error, please report it: {type(error).__name__}: {error}"
    return f"{what} (`farside --debug …` shows the traceback)", EXIT_FAILED
