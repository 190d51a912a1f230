"""What /proc says, and mount points that are not as they should be."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.fuse.processes import DEADLINE_S, Mount, run_python, start_python, wait_until
from tests.fuse.treefs import TreeFs

from farside.fuse import MountOptions, Operations, Session, cleanup_stale, is_mounted
from farside.fuse.mounting import parse_mountinfo, resolve

MOUNTINFO = rb"""21 28 0:19 / /proc rw,nosuid shared:5 master:3 - proc proc rw
40 28 0:37 / /mnt/with\040space rw - fuse.farside hub:7420/c4 rw,user_id=0
41 28 8:1 / /mnt/twice rw - ext4 /dev/sda1 rw
42 41 0:38 / /mnt/twice rw - fuse.farside a rw
not a line
"""


def test_parse_mountinfo() -> None:
    assert parse_mountinfo(MOUNTINFO, b"/mnt/with space") == ("0:37", "fuse.farside")
    assert parse_mountinfo(MOUNTINFO, b"/mnt/twice") == ("0:38", "fuse.farside")
    assert parse_mountinfo(MOUNTINFO, b"/proc") == ("0:19", "proc")
    assert parse_mountinfo(MOUNTINFO, b"/mnt") is None


def test_resolve_follows_symlinks(tmp_path: Path) -> None:
    (tmp_path / "real" / "mnt").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "other").symlink_to("mnt")
    real = os.path.realpath(tmp_path / "real" / "mnt")
    assert resolve(str(tmp_path / "link" / "mnt")) == real
    assert resolve(str(tmp_path / "link" / "other")) == real
    assert resolve("/") == "/"


def test_is_mounted_and_nothing_to_clean(tmp_path: Path) -> None:
    assert is_mounted("/proc") == "proc"
    assert is_mounted(str(tmp_path)) is None
    assert cleanup_stale(str(tmp_path)) is False
    assert cleanup_stale("/proc") is False


@pytest.mark.mount
def test_mount_point_missing_or_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Session(str(tmp_path / "none"), Operations(), options=MountOptions()).mount()
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        Session(str(tmp_path / "file"), Operations(), options=MountOptions()).mount()
    with pytest.raises(ValueError):
        Session(str(tmp_path), Operations(), options=MountOptions(max_read=1000))


SERVE = """
import sys, signal, threading
from farside.fuse import MountOptions, Session
from tests.fuse.treefs import TreeFs
fs = TreeFs()
fs.add("file", b"content")
session = Session(sys.argv[1], fs, options=MountOptions(fsname="a,b\\\\c"))
session.mount()
session.start()
ended = threading.Event()
session.on_closed = ended.set
def stop(*_):
    session.unmount()
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, stop)
print(session.passthrough_reason or "ready", flush=True)
if len(sys.argv) > 2:
    sys.exit(3)
while not ended.wait(0.05):
    pass
"""


@pytest.mark.mount
def test_name_with_a_space_and_a_comma_in_fsname(tmp_path: Path, mount: Mount) -> None:
    point = tmp_path / "a b"
    point.mkdir()
    child = start_python(SERVE, point)
    try:
        assert is_mounted(str(point)) == "fuse.farside"
        assert run_python("import sys; print(open(sys.argv[1]).read())", point / "file").stdout == "content\n"
    finally:
        child.terminate()
        assert child.wait(DEADLINE_S) == 0
    assert is_mounted(str(point)) is None


@pytest.mark.mount
@pytest.mark.parametrize("number", [2, 15])
def test_signal_unmounts_although_a_file_is_open(tmp_path: Path, number: int) -> None:
    child = start_python(SERVE, tmp_path)
    held = os.open(tmp_path / "file", os.O_RDONLY)
    child.send_signal(number)
    wait_until(lambda: is_mounted(str(tmp_path)) is None, "unmounted")
    assert os.pread(held, 10, 0) == b"content"  # whoever has it open is still served
    os.close(held)
    assert child.wait(DEADLINE_S) == 0


@pytest.mark.mount
def test_forgotten_mount_goes_with_the_process(tmp_path: Path) -> None:
    child = start_python(SERVE, tmp_path, "exit")
    assert child.wait(DEADLINE_S) == 3
    assert is_mounted(str(tmp_path)) is None


@pytest.mark.mount
def test_killed_server_leaves_a_mount_that_is_cleaned(tmp_path: Path) -> None:
    child = start_python(SERVE, tmp_path)
    assert cleanup_stale(str(tmp_path)) is False  # it lives
    child.kill()
    child.wait(DEADLINE_S)
    with pytest.raises(OSError, match="endpoint"):
        os.statvfs(tmp_path)
    assert is_mounted(str(tmp_path)) == "fuse.farside"
    assert cleanup_stale(str(tmp_path)) is True
    assert is_mounted(str(tmp_path)) is None
    assert cleanup_stale(str(tmp_path)) is False
    with start_python(SERVE, tmp_path) as child:  # and can be mounted again
        child.terminate()


@pytest.mark.mount
def test_unmounted_from_outside(tmp_path: Path, mount: Mount) -> None:
    ended: list[bool] = []
    session = mount(fs := TreeFs())
    session.on_closed = lambda: ended.append(True)
    assert os.system(f"umount {tmp_path}/mnt") == 0
    assert session.join(DEADLINE_S)
    assert ended == [True] and session.closed and fs.destroyed.is_set()
    session.unmount()  # nothing to do, says nothing
    session.invalidate_inode(1)
    session.invalidated().result(DEADLINE_S)


@pytest.mark.mount
def test_later_mount_of_somebody_else_is_left_alone(tmp_path: Path, mount: Mount) -> None:
    first = mount(TreeFs())
    held = os.open(tmp_path / "mnt", os.O_RDONLY)  # keeps the first alive behind a lazy unmount
    try:
        assert os.system(f"umount -l {tmp_path}/mnt") == 0
        mount(TreeFs())
        first.unmount()
        assert is_mounted(str(tmp_path / "mnt")) == "fuse.farside"
    finally:
        os.close(held)


@pytest.mark.mount
def test_busy_mount_is_not_unmounted_unless_lazily(tmp_path: Path, mount: Mount) -> None:
    session = mount(TreeFs())
    held = os.open(tmp_path / "mnt", os.O_RDONLY)
    with pytest.raises(OSError, match="busy"):
        session.unmount(lazy=False)
    session.unmount()
    assert is_mounted(str(tmp_path / "mnt")) is None
    assert not session.closed
    os.close(held)


AS_NOBODY = """
import encodings.ascii, os, subprocess, sys  # before giving up the right to read the installation
from farside.fuse import MountOptions, Session, cleanup_stale, is_mounted
from tests.fuse.treefs import TreeFs
point = sys.argv[1]
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
fs = TreeFs()
fs.add("file", b"content")
sessions = []
for killed in (False, True):
    session = Session(point, fs, options=MountOptions(fsname="hub:1/a,b", read_only=True))
    session.mount()
    session.start()
    assert is_mounted(point) == "fuse.farside"
    assert not session.passthrough and "CAP_SYS_ADMIN" in session.passthrough_reason
    assert subprocess.run(["cat", point + "/file"], capture_output=True, timeout=10).stdout == b"content"
    try:
        with open(point + "/file") as held:
            session.unmount(lazy=False)
    except OSError as failure:
        print("busy:", failure.strerror)
    session.unmount()
    assert session.join(10)
    assert is_mounted(point) is None
print("done")
"""

OWN_DEVICE = """
set -e
mkdir "$1/dev" "$1/mnt"
chown 65534:65534 "$1/mnt"
chmod 755 "$1"
mount -t tmpfs none "$1/dev"
mknod -m 666 "$1/dev/fuse" c 10 229
mount --bind "$1/dev/fuse" /dev/fuse
exec "$2" -c "$3" "$1/mnt"
"""


@pytest.mark.mount
def test_another_user_through_fusermount3() -> None:
    helper = shutil.which("fusermount3")
    if helper is None or not os.stat(helper).st_mode & stat.S_ISUID:
        pytest.skip("fusermount3 is not installed setuid root")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        # In a mount namespace of its own, because /dev/fuse is often closed to others in containers.
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", OWN_DEVICE, "sh", directory, sys.executable, AS_NOBODY],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S * 2,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n") and "busy: cannot unmount" in done.stdout
