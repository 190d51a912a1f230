"""Looks at a mount point before anything is started."""

from __future__ import annotations

import os
from pathlib import Path

import click

from farside.errors import MountError


def check(path: Path) -> Path:
    """The resolved mount point: it exists, is empty, nothing is mounted; a crash's remains are cleared.

    Raises:
        MountError: it is missing, no directory, not empty, or in use.
    """
    from farside.fuse.mounting import cleanup_stale, is_mounted, resolve

    path = Path(resolve(str(path)))
    if cleanup_stale(str(path)):
        click.echo(f"farside: cleared what a crashed mount had left at {path}", err=True)
    kind = is_mounted(str(path))
    if kind is not None:
        hint = (
            f"unmount it first: farside unmount {path}" if "farside" in kind else "choose another directory"
        )
        raise MountError(f"something is mounted there already ({kind})", path=str(path), hint=hint)
    try:
        entries = os.listdir(path)
    except FileNotFoundError:
        raise MountError("the mount point does not exist", path=str(path), hint=f"mkdir -p {path}") from None
    except NotADirectoryError:
        raise MountError("the mount point is not a directory", path=str(path)) from None
    except OSError as error:
        raise MountError(f"cannot use the mount point: {error.strerror}", path=str(path)) from error
    if entries:
        raise MountError(
            "the mount point is not empty",
            path=str(path),
            hint="mount on an empty directory, so nothing is hidden",
        )
    return path
