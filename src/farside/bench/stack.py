"""A hub, a link and a mount, put together by nothing but farside's command line.

Where nothing can be mounted, a process that reads through the library stands in for the mount.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farside.bench.child import Child, tail
from farside.bench.link import Link
from farside.errors import FarsideError

PORTAL = "demo"
_COMMAND = [sys.executable, "-m", "farside.cli"]
_CAP_SYS_ADMIN = 21
_QUIET_S = 1.5  # the link carries nothing new for as long: prefetching is done
_QUIET_BYTES = 200_000  # heartbeats and status pushes do not count


def run_farside(*arguments: str, prefix: Sequence[str] = (), timeout: float = 120.0) -> str:
    """Run one command of the product; returns its standard output.

    Raises FarsideError with what it printed if it fails or takes more than `timeout` seconds.
    """
    command = [*prefix, *_COMMAND, *arguments]
    shown = " ".join(["farside", *arguments])
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise FarsideError(f"`{shown}` took more than {timeout:g} s") from None
    if result.returncode:
        said = (result.stderr or result.stdout).strip() or f"exit code {result.returncode}"
        raise FarsideError(f"`{shown}` failed: {said}")
    return result.stdout


class Stack:
    """One hub that exports `root`, and one mount of it across `link`. Everything lies in `work`.

    `tls=False` runs both ends without certificates. Use it as a context manager.
    """

    def __init__(self, work: Path, root: Path, link: Link, *, tls: bool = True) -> None:
        self.work = work
        self.link = link
        self.mountpoint = work / "mnt"
        self.cache = work / "cache"
        self._tls = tls
        self._hub_state, self._spoke_state = work / "hub", work / "spoke"
        self._joined = False
        self._library: Child | None = None
        for state in (self._hub_state, self._spoke_state):
            shutil.rmtree(state, ignore_errors=True)
        self._clear_mountpoint()
        clear = [] if tls else ["--insecure", "--insecure-link-is-trusted"]
        hub = ["hub", "serve", "--portal", f"{PORTAL}={root}", "--listen", link.listen_address]
        hub += ["--state-dir", str(self._hub_state)]
        if tls:
            run_farside("hub", "init", "--state-dir", str(self._hub_state))
        self._hub_command = [*link.hub_prefix, *_COMMAND, *hub, *clear]
        self._hub = self._start_hub()

    def _start_hub(self) -> Child:
        hub = Child(self._hub_command, self.work / "hub.log")
        hub.wait_ready("serving")
        return hub

    def restart_hub(self) -> None:
        """Stop the hub and start it again, at the same address."""
        self._hub.close()
        self._hub = self._start_hub()

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    @property
    def hub_pid(self) -> int:
        return self._hub.pid

    @property
    def hub_address(self) -> str:
        return f"{self.link.hub_address}/{PORTAL}"

    def mount(self, cache_size: int, *options: str, fresh: bool = False) -> float:
        """Mount it; `fresh` with an empty cache. Returns the seconds until it could be used."""
        if not is_mounted(self.mountpoint):  # what a crash has left is the product's to clear
            self.mountpoint.mkdir(parents=True, exist_ok=True)
        arguments = ["mount", self.hub_address, str(self.mountpoint)]
        for name, value in self._spoke_options(cache_size, fresh).items():
            flag = f"--{name.replace('_', '-')}"
            arguments += [flag] if value is True else [flag, str(value)]
        arguments += ["--log-file", str(self.work / "mount.log")]
        began = time.monotonic()
        run_farside(*arguments, *options, prefix=self.link.spoke_prefix)
        self._joined = True
        return time.monotonic() - began

    def start_library(self, cache_size: int, *, fresh: bool = False) -> tuple[Child, float]:
        """Start a `farside.bench.libraryload`, which reads without a mount; `fresh` with an empty cache.

        Returns it with the seconds until it could be used. Close it; `close` does so, too.
        """
        options = {"hub": self.hub_address, **self._spoke_options(cache_size, fresh)}
        command = [sys.executable, "-m", "farside.bench.libraryload", json.dumps(options)]
        began = time.monotonic()
        child = self._library = Child([*self.link.spoke_prefix, *command], self.work / "library.log")
        child.wait_ready("ready", timeout=60.0)
        self._joined = True
        return child, time.monotonic() - began

    def _spoke_options(self, cache_size: int, fresh: bool) -> dict[str, str | int | bool]:
        """The options of the spoke by name, without its hub."""
        if fresh:
            shutil.rmtree(self.cache, ignore_errors=True)
        options: dict[str, str | int | bool] = {
            "cache_dir": str(self.cache),
            "cache_size": cache_size,
            "state_dir": str(self._spoke_state),
        }
        if not self._tls:
            options |= {"insecure": True, "insecure_link_is_trusted": True}
        elif not self._joined:
            options["token_file"] = str(self.invite())
        return options

    def unmount(self) -> None:
        run_farside("unmount", str(self.mountpoint))

    def status(self) -> dict[str, Any]:
        """What `farside status --json` says of the mount."""
        status: dict[str, Any] = json.loads(run_farside("status", "--json", str(self.mountpoint)))
        return status

    def wait_quiet(self, timeout: float = 90.0) -> bool:
        """Wait until prefetching is done and the link carries nothing; False if it still does."""
        deadline = time.monotonic() + timeout
        before, since = self.link.traffic().to_spoke, time.monotonic()
        while time.monotonic() < deadline:
            time.sleep(0.1)
            now = self.link.traffic().to_spoke
            if now - before > _QUIET_BYTES:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > _QUIET_S:
                return True
        return False

    def logs(self) -> str:
        """The ends of the logs, for an error message."""
        names = ("hub.log", "mount.log", "library.log", "link.log")
        return "\n".join(f"{name}: {said}" for name in names if (said := tail(self.work / name)))

    def close(self) -> None:
        """Unmount and stop what was started here. The link stays; it is its maker's."""
        self._clear_mountpoint()
        if self._library is not None:
            self._library.close()
        self._hub.close()

    def invite(self) -> Path:
        """A file with a fresh join token for one spoke."""
        token = run_farside(
            *("hub", "invite", "--portal", PORTAL, "--read-only", "--expires", "1h"),
            *("--address", self.link.hub_address, "--state-dir", str(self._hub_state)),
        )
        path = self.work / "join.txt"
        path.touch(mode=0o600)
        path.write_text(token)
        return path

    def _clear_mountpoint(self) -> None:
        """Take down a mount of ours that is there, or that an earlier run has left."""
        if is_mounted(self.mountpoint):
            try:
                self.unmount()
            except FarsideError:
                detach = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
                subprocess.run([*detach, str(self.mountpoint)], capture_output=True, timeout=20)


def mount_obstacle() -> str | None:
    """Why nothing can be mounted on this machine, or None if it can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is missing or closed to this user"
    if os.geteuid() != 0 and not shutil.which("fusermount3"):
        return "not root, and the program `fusermount3` is missing"
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapBnd" and not int(value, 16) >> _CAP_SYS_ADMIN & 1:
            return "this container does not allow it (CAP_SYS_ADMIN is missing)"
    return None


def is_mounted(path: Path) -> bool:
    """Whether something is mounted at `path`; asks the kernel's table, never the mount itself."""
    absolute = os.path.abspath(path).replace(" ", "\\040")
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split()[4] == absolute for line in lines)
