"""mount(2) and umount2(2) as root, fusermount3 for everybody else, and what /proc says about mounts."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import socket
import stat
import subprocess
import threading
from dataclasses import dataclass
from typing import NamedTuple

_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_HELPER_TIMEOUT_S = 10.0
_PROBE_TIMEOUT_S = 5.0

_libc = ctypes.CDLL(None, use_errno=True)  # releases the GIL during the calls


@dataclass(frozen=True)
class MountOptions:
    """How to mount.

    Attributes:
        read_only: the kernel refuses every change by itself (and asks less at open).
        allow_other: users other than the one who mounts may enter.
        default_permissions: the kernel checks modes and owners.
        fsname: what the first column of `mount` and `df` shows.
        subtype: file system type shown as ``fuse.SUBTYPE``.
        max_read: largest read request, bytes; a multiple of 4096, at most 1 MiB.
        readahead_kb: the kernel's readahead window, KiB; needs root, else the kernel's own 128.
        max_backing: largest number of backing files (passthrough) at one time.
        passthrough: False keeps all reads with the handler.
    """

    read_only: bool = False
    allow_other: bool = False
    default_permissions: bool = True
    fsname: str = "farside"
    subtype: str = "farside"
    max_read: int = 1 << 20
    readahead_kb: int = 1024
    max_backing: int = 1024
    passthrough: bool = True


class MountEntry(NamedTuple):
    """One line of /proc/self/mountinfo, as far as it matters here."""

    device: str  # "major:minor"
    fstype: str


def _unescape(field: bytes) -> bytes:
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field)


def parse_mountinfo(text: bytes, mountpoint: bytes) -> MountEntry | None:
    """The topmost mount on ``mountpoint`` (an absolute path without symlinks), or None."""
    found = None
    for line in text.splitlines():
        fields = line.split(b" ")
        try:
            separator = fields.index(b"-", 6)
            if _unescape(fields[4]) == mountpoint:
                found = MountEntry(fields[2].decode(), fields[separator + 1].decode())
        except (ValueError, IndexError):
            continue
    return found


def mount_entry(path: str) -> MountEntry | None:
    """What is mounted on ``path`` (as ``resolve`` gives it) right now. Does not touch the mount itself."""
    with open("/proc/self/mountinfo", "rb") as file:
        return parse_mountinfo(file.read(), os.fsencode(path))


def is_mounted(mountpoint: str) -> str | None:
    """File system type of what is mounted on ``mountpoint`` (``fuse.farside`` for ours), or None."""
    entry = mount_entry(resolve(mountpoint))
    return entry.fstype if entry else None


def resolve(mountpoint: str) -> str:
    """Absolute path without symlinks, found without asking what is mounted there, which may hang."""
    parent, name = os.path.split(os.path.abspath(mountpoint))
    path = os.path.join(os.path.realpath(parent), name)
    if mount_entry(path) is None and os.path.islink(path):
        return os.path.realpath(path)
    return path


def _raise_errno(what: str, mountpoint: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {os.strerror(number)}", mountpoint)


def _fusermount() -> str | None:
    return shutil.which("fusermount3") or shutil.which("fusermount")


def open_mount(mountpoint: str, options: MountOptions) -> tuple[int, bool]:
    """Mount; returns the open `/dev/fuse` and whether mount(2) did it (else fusermount3).

    Raises OSError: ENOENT, ENOTDIR for the mount point; ENODEV without FUSE in the kernel; EPERM when
    neither mount(2) nor fusermount3 may.
    """
    if not stat.S_ISDIR(os.stat(mountpoint).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "the mount point is not a directory", mountpoint)
    if os.geteuid() == 0:
        try:
            return _mount_directly(mountpoint, options), True
        except PermissionError:
            if _fusermount() is None:
                raise
    return _mount_by_helper(mountpoint, options), False


def _mount_directly(mountpoint: str, options: MountOptions) -> int:
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        data = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        data += f",max_read={options.max_read}"
        data += ",default_permissions" if options.default_permissions else ""
        data += ",allow_other" if options.allow_other else ""
        flags = _MS_NOSUID | _MS_NODEV | (_MS_RDONLY if options.read_only else 0)
        kind = f"fuse.{options.subtype}".encode()
        source, target = os.fsencode(options.fsname), os.fsencode(mountpoint)
        if _libc.mount(source, target, kind, ctypes.c_ulong(flags), data.encode()) != 0:
            _raise_errno("cannot mount", mountpoint)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _mount_by_helper(mountpoint: str, options: MountOptions) -> int:
    """fusermount3 opens the device, mounts and sends the descriptor through a socket."""
    helper = _fusermount()
    if helper is None:
        raise PermissionError(
            errno.EPERM, "only root may mount here: fusermount3 is not installed", mountpoint
        )
    fsname = options.fsname.replace("\\", "\\\\").replace(",", "\\,")
    words = [f"fsname={fsname}", f"subtype={options.subtype}", f"max_read={options.max_read}"]
    words += ["nosuid", "nodev", "ro" if options.read_only else "rw"]
    words += ["default_permissions"] if options.default_permissions else []
    words += ["allow_other"] if options.allow_other else []
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            child = subprocess.Popen(
                [helper, "-o", ",".join(words), "--", mountpoint],
                env=os.environ | {"_FUSE_COMMFD": str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        try:
            ours.settimeout(_HELPER_TIMEOUT_S)
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1, socket.MSG_CMSG_CLOEXEC)
            _, complaint = child.communicate(timeout=_HELPER_TIMEOUT_S)
        except (TimeoutError, subprocess.TimeoutExpired):
            child.kill()
            child.communicate()
            raise TimeoutError(errno.ETIMEDOUT, f"{helper} does not answer", mountpoint) from None
    if not descriptors:
        reason = complaint.decode(errors="replace").strip() or f"exit status {child.returncode}"
        raise PermissionError(errno.EPERM, f"cannot mount: {reason}", mountpoint)
    return descriptors[0]


def unmount(mountpoint: str, *, lazy: bool) -> None:
    """Unmount the topmost mount; ``lazy`` also when it is in use. Not mounted any more counts as done.

    Raises OSError: EBUSY when in use and not ``lazy``; EPERM when neither umount2(2) nor fusermount3 may.
    """
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
    if _libc.umount2(os.fsencode(mountpoint), flags) == 0:
        return
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOENT):
        return
    helper = _fusermount()
    if number != errno.EPERM or helper is None:
        raise OSError(number, f"cannot unmount: {os.strerror(number)}", mountpoint)
    arguments = [helper, "-u", *(["-z"] if lazy else []), "--", mountpoint]
    try:
        done = subprocess.run(
            arguments, stdin=subprocess.DEVNULL, capture_output=True, timeout=_HELPER_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(errno.ETIMEDOUT, f"{helper} does not answer", mountpoint) from None
    if done.returncode != 0 and is_mounted(mountpoint):
        reason = done.stderr.decode(errors="replace").strip()
        busy = "busy" in reason
        raise OSError(errno.EBUSY if busy else errno.EPERM, f"cannot unmount: {reason}", mountpoint)


def _is_dead(mountpoint: str) -> bool:
    """Whether the server of the FUSE mount on ``mountpoint`` has died. One that merely hangs has not."""
    verdict: list[bool] = []

    def probe() -> None:
        try:
            os.statvfs(mountpoint)  # unlike stat(2) never answered from what the kernel remembers
        except OSError as failure:
            verdict.append(failure.errno in (errno.ENOTCONN, errno.ECONNABORTED))

    thread = threading.Thread(target=probe, name="fuse-probe", daemon=True)
    thread.start()
    thread.join(_PROBE_TIMEOUT_S)
    return bool(verdict and verdict[0])


def cleanup_stale(mountpoint: str) -> bool:
    """Unmount what a crashed server has left on ``mountpoint``; True when there was something.

    Mounts whose server lives are not touched, nor are other kinds of file systems. Raises OSError when
    it may not be unmounted by this user.
    """
    path = resolve(mountpoint)
    cleaned = False
    for _ in range(16):  # several crashes may have left several, one on top of the other
        kind = is_mounted(path)
        if kind is None or not (kind == "fuse" or kind.startswith("fuse.")) or not _is_dead(path):
            break
        unmount(path, lazy=True)
        cleaned = True
    return cleaned


def set_readahead(device: str, kib: int) -> bool:
    """Set the readahead window of the mount with device number ``major:minor``. False: not permitted."""
    try:
        with open(f"/sys/class/bdi/{device}/read_ahead_kb", "w", encoding="ascii") as file:
            file.write(str(kib))
    except OSError:
        return False
    return True
