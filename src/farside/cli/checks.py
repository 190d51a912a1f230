"""What ``farside doctor`` looks at: each check reads this machine and returns one finding."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from farside.cli.control_client import owner_pid
from farside.cli.mounttable import MOUNT_TABLE, farside_mounts, filesystem_of, mounted_by
from farside.config import control_socket, runtime_dir
from farside.errors import printable
from farside.units import format_size

MIB = 1024 * 1024
TCP_MAX = 64 * MIB
"""TCP buffers grow to what a link needs: 64 MiB carry 8 Gbit/s over 60 ms on one connection."""

FILES_WANTED = 65_536
WATCHES_WANTED = 524_288
FREE_WANTED = 1024 * MIB
NO_EARLIER_THAN = 1_764_547_200
"""2025-12-01: an earlier clock is certainly wrong, and certificates of today are not valid to it."""

_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
_CAP_SYS_ADMIN = 21


class State(StrEnum):
    OK = "ok"
    WARN = "warn"
    BROKEN = "broken"


class Finding(NamedTuple):
    """``advice``: what to do, a command where there is one; empty when the state is ok."""

    check: str
    state: State
    found: str
    advice: str = ""


def kernel() -> Finding:
    """FUSE passthrough came with Linux 6.9; 1 MiB requests with 4.20."""
    release = os.uname().release
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < (4, 20):
        return Finding(
            "kernel", State.BROKEN, release, "use Linux 5.4 or later (6.9 or later for full speed)"
        )
    if version < (6, 9):
        return Finding("kernel", State.WARN, release, "Linux 6.9 or later reads cached files at native speed")
    return Finding("kernel", State.OK, release)


def fuse_device(path: str = "/dev/fuse") -> Finding:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        advice = "modprobe fuse; in a container give it --device /dev/fuse"
        return Finding("/dev/fuse", State.BROKEN, "missing", advice)
    except OSError as error:
        advice = "chmod 0666 /dev/fuse; in a container give it --device /dev/fuse"
        return Finding("/dev/fuse", State.BROKEN, f"cannot be opened: {error.strerror}", advice)
    return Finding("/dev/fuse", State.OK, "can be opened")


def privilege() -> Finding:
    """Passthrough needs CAP_SYS_ADMIN; without it reads are handled by the mount's process."""
    capabilities = 0
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("CapEff:"):
                capabilities = int(line.split()[1], 16)
    if capabilities >> _CAP_SYS_ADMIN & 1:
        return Finding("passthrough", State.OK, "CAP_SYS_ADMIN is there")
    advice = "mount as root (or with CAP_SYS_ADMIN) to read cached files at native speed"
    return Finding("passthrough", State.WARN, "no CAP_SYS_ADMIN: reads are handled", advice)


def fusermount(euid: int | None = None) -> Finding:
    found = shutil.which("fusermount3")
    if found:
        return Finding("fusermount3", State.OK, found)
    if (os.geteuid() if euid is None else euid) == 0:
        return Finding("fusermount3", State.OK, "missing, not needed as root")
    return Finding("fusermount3", State.BROKEN, "missing", "apt install fuse3 (needed to mount without root)")


def tcp_buffers(sysctl: Path = Path("/proc/sys/net/ipv4")) -> Iterator[Finding]:
    for name in ("tcp_rmem", "tcp_wmem"):
        try:
            words = (sysctl / name).read_text().split()
        except OSError:
            yield Finding(name, State.WARN, "cannot be read here", "look at it on the host")
            continue
        most = int(words[2])
        if most >= TCP_MAX:
            yield Finding(name, State.OK, f"up to {format_size(most)}")
            continue
        value = f"{words[0]} {words[1]} {TCP_MAX}"
        yield Finding(
            name,
            State.WARN,
            f"up to {format_size(most)}: caps a connection at {format_size(most / 0.06)}/s over 60 ms",
            f"sysctl -w net.ipv4.{name}='{value}'",
        )


def slow_start(sysctl: Path = Path("/proc/sys/net/ipv4")) -> Finding:
    name = "tcp_slow_start_after_idle"
    try:
        on = (sysctl / name).read_text().strip() != "0"
    except OSError:
        return Finding(name, State.WARN, "cannot be read here", "look at it on the host")
    if on:
        return Finding(
            name, State.WARN, "on: every pause costs a connection its pace", f"sysctl -w net.ipv4.{name}=0"
        )
    return Finding(name, State.OK, "off")


def congestion(sysctl: Path = Path("/proc/sys/net/ipv4")) -> Finding:
    try:
        names = (sysctl / "tcp_available_congestion_control").read_text().split()
    except OSError:
        return Finding("BBR", State.WARN, "cannot be read here", "look at it on the host")
    if "bbr" in names:
        return Finding("BBR", State.OK, "available")
    found = f"not loaded (there are {', '.join(names)}): loss costs rate"
    return Finding("BBR", State.WARN, found, "modprobe tcp_bbr, on the hub above all")


def watches(sysctl: Path = Path("/proc/sys/fs/inotify")) -> Finding:
    try:
        most = int((sysctl / "max_user_watches").read_text())
    except OSError:
        return Finding("inotify", State.WARN, "cannot be read here", "look at it on the host")
    if most >= WATCHES_WANTED:
        return Finding("inotify", State.OK, f"{most:,} watches")
    found = f"{most:,} watches: a hub watches so many directories, the others are rechecked at open"
    return Finding("inotify", State.WARN, found, f"sysctl -w fs.inotify.max_user_watches={WATCHES_WANTED}")


def open_files() -> Finding:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= FILES_WANTED:
        return Finding("open files", State.OK, "no limit" if hard == resource.RLIM_INFINITY else f"{hard:,}")
    return Finding(
        "open files",
        State.WARN,
        f"at most {hard:,}",
        f"ulimit -Hn {FILES_WANTED}, or LimitNOFILE={FILES_WANTED} in the unit",
    )


def cache_directory(directory: Path) -> Finding:
    """Whether a cache could live there: writable, on a file system with sparse files, with room."""
    existing = directory
    while not existing.exists():
        existing = existing.parent
    name = f"cache {printable(os.fsencode(directory))}"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding(name, State.BROKEN, f"{existing} cannot be written", "choose another --cache-dir")
    stat = os.statvfs(existing)
    free = stat.f_bavail * stat.f_frsize
    kind = filesystem_of(existing)
    found = f"{format_size(free)} free on {kind}"
    if kind in ("nfs", "nfs4", "cifs", "smb3", "9p", "vfat", "msdos", "exfat") or kind.startswith("fuse"):
        return Finding(name, State.WARN, found, "use a local disk with ext4 or xfs: NVMe is best")
    if kind in ("tmpfs", "ramfs"):
        return Finding(name, State.WARN, found, "this is memory: it is lost at a restart; use a disk")
    if free < FREE_WANTED:
        return Finding(name, State.WARN, found, "make room, or use another --cache-dir")
    return Finding(name, State.OK, found)


def clock(now: float | None = None) -> Finding:
    now = time.time() if now is None else now
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < NO_EARLIER_THAN:
        advice = "set the clock (timedatectl set-ntp true): certificates are refused otherwise"
        return Finding("clock", State.BROKEN, f"{shown} is in the past", advice)
    try:
        answer = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    except AttributeError:  # a C library without it
        answer = -1
    if answer == _TIME_ERROR:
        advice = "timedatectl set-ntp true, if this machine is not kept in time by its host"
        return Finding("clock", State.WARN, f"{shown}, not synchronised", advice)
    return Finding("clock", State.OK, shown)


def leftovers(table: str = MOUNT_TABLE) -> Iterator[Finding]:
    """Mounts whose process is gone, and control sockets whose mount is gone."""
    alive = set()
    for mountpoint in farside_mounts(table):
        address = control_socket(mountpoint)
        shown = printable(os.fsencode(mountpoint))
        owner = mounted_by(mountpoint, table)
        if owner_pid(address) is not None:
            yield Finding(f"mount {shown}", State.OK, "served")
            alive.add(address)
        elif owner is not None and owner != os.geteuid():
            yield Finding(f"mount {shown}", State.OK, f"user {owner} looks after it")
        else:
            advice = f"farside unmount {shown}"
            yield Finding(f"mount {shown}", State.BROKEN, "its process is gone", advice)
    for address in sorted(runtime_dir().glob("*.sock")):
        if address not in alive and owner_pid(address) is None:
            yield Finding(f"socket {address.name}", State.WARN, "left over from a crash", f"rm {address}")


ALL: tuple[Callable[[], Finding | Iterator[Finding]], ...] = (
    kernel,
    fuse_device,
    privilege,
    fusermount,
    tcp_buffers,
    slow_start,
    congestion,
    watches,
    open_files,
    clock,
    leftovers,
)


def run_all(cache_dirs: list[Path]) -> list[Finding]:
    """Every check, then one for each cache directory."""
    findings: list[Finding] = []
    for check in ALL:
        result = check()
        findings += [result] if isinstance(result, Finding) else list(result)
    return findings + [cache_directory(directory) for directory in cache_dirs]
