"""``farside mount`` and ``farside unmount``."""

from __future__ import annotations

import dataclasses
import os
import select
import time
from pathlib import Path
from typing import Any

import click

from farside.cli import mountpoint as mountpoints
from farside.cli.control_client import call, owner_pid
from farside.cli.main import Invocation
from farside.cli.options import DIRECTORY, DURATION, config_options, examples
from farside.cli.process import Readiness, raise_file_limit, set_up_logging, warn_insecure
from farside.config import MountConfig, control_socket, default_log_file, mount_config
from farside.errors import FarsideError, MountError

_START_S = 60.0
"""What a mount may take on top of the waits for the hub: joining, opening the cache, the kernel."""


@click.command(
    epilog=examples(
        """
farside mount hub.example:7420/c4 /mnt/c4 --token-file join.txt      # the first time
farside mount hub.example:7420/c4 /mnt/c4 --cache-dir /nvme/farside --cache-size 2T
farside mount --config c4.toml --foreground                          # under systemd
farside mount 127.0.0.1:7420/c4 /mnt/c4 --insecure                   # a hub on this machine
"""
    )
)
@click.argument("hub", required=False, metavar="[HUB:PORT/PORTAL]")
@click.argument("mountpoint", required=False, metavar="[MOUNTPOINT]")
@click.option("--foreground", is_flag=True, help="Stay in the foreground and log to stderr.")
@config_options(MountConfig)
@click.pass_obj
def mount(invocation: Invocation, /, config_file: Path | None, foreground: bool, **flags: Any) -> int:
    """Mount a hub's portal at a directory.

    Returns as soon as the mount can be used; a process in the background serves it. Sizes read 2T, 500M, 64K
    (powers of 1024), times 90s, 1h30m.
    """
    readiness = Readiness()
    try:
        config = mount_config(flags, config_file)
        config = dataclasses.replace(config, mountpoint=mountpoints.check(config.mountpoint))
        if config.insecure and not readiness.has_parent:
            warn_insecure(str(config.hub))
        if foreground or readiness.has_parent:
            return _serve(config, readiness, invocation.debug)
    except Exception as error:
        readiness.failed(error)
        raise
    from farside.cli.background import run_in_background

    log_file = config.log_file or default_log_file(config.hub)
    pid = run_in_background(invocation.argv, log_file, config.timeout_s + _START_S)
    click.echo(f"{config.hub} is mounted at {config.mountpoint} (pid {pid}, log {log_file})")
    return 0


def _serve(config: MountConfig, readiness: Readiness, debug: bool) -> int:
    set_up_logging(debug)
    raise_file_limit()
    from farside.mount.run import run_mount

    if readiness.has_parent:
        os.chdir("/")  # a background process must not hold the directory it was started in
    return run_mount(config, readiness.ready)


@click.command(
    epilog=examples(
        """
farside unmount /mnt/c4
"""
    )
)
@click.argument("mountpoint", type=DIRECTORY)
@click.option(
    "--timeout", type=DURATION, default="20s", show_default=True, help="When to go on without the process."
)
def unmount(mountpoint: Path, timeout: float) -> int:
    """Unmount, always: also when the hub is away, the mount is in use, or its process has crashed.

    Programs that still have files open get errors from then on. What is cached stays for the next mount.
    """
    from farside.fuse.mounting import resolve

    path = Path(resolve(str(mountpoint)))
    address = control_socket(path)
    deadline = time.monotonic() + timeout
    known = address.exists()
    pid = owner_pid(address) if known else None
    trouble = ""
    if pid is not None:
        try:
            call(address, "unmount", silence_s=max(1.0, timeout / 2))
        except FarsideError as error:
            trouble = error.message
        if trouble == "" and not _wait_for_exit(pid, deadline - time.monotonic()):
            trouble = f"process {pid} still runs"
    detached = _detach(path)
    if trouble:
        click.echo(f"farside: {path} is unmounted, but: {trouble}", err=True)
    elif not known and not detached:
        raise MountError(
            "nothing of farside is mounted there", path=str(path), hint="`farside status` lists mounts"
        )
    if pid is None:
        address.unlink(missing_ok=True)
    click.echo(f"{path} is unmounted")
    return 0


def _detach(path: Path) -> bool:
    """Takes a farside mount out of the tree without its process's help; True when there was one.

    Raises:
        MountError: the kernel or fusermount3 refuses.
    """
    from farside.fuse.mounting import cleanup_stale, is_mounted
    from farside.fuse.mounting import unmount as detach

    try:
        if cleanup_stale(str(path)):
            return True
        kind = is_mounted(str(path))
        if kind is None or "farside" not in kind:
            return False
        detach(str(path), lazy=True)
    except OSError as error:
        why = (error.strerror or str(error)).removeprefix("cannot unmount: ")
        raise MountError(f"cannot unmount: {why}", path=str(path)) from error
    return True


def _wait_for_exit(pid: int, timeout_s: float) -> bool:
    """Whether a process that is no child of ours ended in time."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], max(0.0, timeout_s))[0])
    finally:
        os.close(fd)
