"""A mount from end to end: what programs see, what the kernel asks, and that nothing is left behind."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from tests.fuse.processes import DEADLINE_S, Mount, run_python, start_python, wait_until
from tests.fuse.treefs import TTL, Content, Node, TreeFs

from farside.fuse import (
    DEFERRED,
    Deferred,
    EntryOut,
    OpenOut,
    Request,
    abi,
    negative_entry,
    reply_data,
    reply_entry,
    reply_open,
)

pytestmark = pytest.mark.mount


def kernel_forgets() -> None:
    """Have the kernel drop unused nodes, so that it gives lookups back."""
    Path("/proc/sys/vm/drop_caches").write_text("2")


def kernel_drops_pages() -> None:
    Path("/proc/sys/vm/drop_caches").write_text("1")


def test_tree_names_links_and_attributes(tmp_path: Path, mount: Mount) -> None:
    fs = TreeFs()
    fs.add("plain", b"hello")
    fs.add("empty")
    fs.add("dir/deep/file", b"x" * 5000)
    fs.add("link", b"dir/deep/file", mode=stat.S_IFLNK | 0o777)
    odd = [b"\xff\xfe", b"caf\xc3\xa9", b"cafe\xcc\x81", b"n" * 255, b" ", b"a\nb", b"-rf"]
    for name in odd:
        fs.root.children[name] = fs.nodes[fs.root.children[b"plain"].number]
    session = mount(fs)
    point = os.fsencode(tmp_path / "mnt")
    assert sorted(os.listdir(point)) == sorted(fs.root.children)
    for name in odd:
        assert os.stat(point + b"/" + name).st_size == 5
    found = os.stat(point + b"/plain")
    assert (found.st_mode, found.st_mtime_ns) == (stat.S_IFREG | 0o644, 1_700_000_000_123_456_789)
    assert os.readlink(point + b"/link") == b"dir/deep/file"
    with open(point + b"/link", "rb") as file:
        assert file.read() == b"x" * 5000
    with open(point + b"/empty", "rb") as file:
        assert file.read() == b""
    assert os.statvfs(point)[2:5] == (1000, 400, 300)
    with pytest.raises(FileNotFoundError):
        os.stat(point + b"/none")
    assert session.stats["open"] == 2 and session.threads == 2
    assert not session.closed and session.info is not None and session.info.minor >= 31


def test_lookups_and_handles_balance(tmp_path: Path, mount: Mount) -> None:
    fs = TreeFs()
    for place in range(300):
        fs.add(f"d{place % 7}/f{place}", b"data")
    session = mount(fs)
    for _ in range(3):
        for directory, _, files in os.walk(tmp_path / "mnt"):
            for name in files:
                with open(os.path.join(directory, name), "rb") as file:
                    assert file.read() == b"data"
        with pytest.raises(FileNotFoundError):
            os.stat(tmp_path / "mnt" / "d1" / "missing")
        held = +fs.lookups
        assert len(held) >= 300
        kernel_forgets()
        wait_until(lambda: not +fs.lookups, "all lookups given back")
        assert not -fs.lookups, "more given back than were taken"
    wait_until(lambda: not +fs.handles, "all handles released")
    assert not -fs.handles
    assert session.stats.keys() >= {"lookup", "open", "read", "readdirplus", "release"}


def test_negative_names_are_remembered_until_told(tmp_path: Path, mount: Mount) -> None:
    fs = TreeFs()
    session = mount(fs)
    path = tmp_path / "mnt" / "later"
    for _ in range(5):
        assert not path.exists()
    assert fs.calls.count(("lookup", b"later")) == 1
    fs.add("later", b"here")
    assert not path.exists()
    session.invalidate_entry(1, b"later")
    session.invalidated().result(DEADLINE_S)
    assert path.read_bytes() == b"here"


def test_invalidated_pages_and_attributes_are_asked_again(tmp_path: Path, mount: Mount) -> None:
    fs = TreeFs()
    node = fs.add("file", b"a" * 100_000)
    session = mount(fs, read_only=True)  # else the kernel asks for the access time after each read
    path = tmp_path / "mnt" / "file"
    assert path.read_bytes() == b"a" * 100_000
    node.data = b"b" * 50_000
    assert path.read_bytes() == b"a" * 100_000  # remembered: TTL and KEEP_CACHE
    session.invalidate_inode(node.number)
    session.invalidated().result(DEADLINE_S)
    assert path.stat().st_size == 50_000
    assert path.read_bytes() == b"b" * 50_000
    session.invalidate_inode(999)  # unknown to the kernel: not an error
    session.invalidate_entry(77, b"none")
    session.invalidated().result(DEADLINE_S)


def test_blocked_invalidation_delays_nothing_else(tmp_path: Path, mount: Mount) -> None:
    class Holding(TreeFs):
        def content(self, req: Request, node: Node, offset: int, size: int, buffer: memoryview) -> Content:
            if node.number == slow.number and not held:
                held.append(req)
                self.arrived.set()
                return DEFERRED
            return super().content(req, node, offset, size, buffer)

    held: list[Request] = []
    fs = Holding()
    slow, other = fs.add("slow", b"s" * 10), fs.add("other", b"1")  # slow only the first time
    session = mount(fs)
    assert (tmp_path / "mnt" / "other").read_bytes() == b"1"
    reader = start_python(
        "import sys; f = open(sys.argv[1], 'rb'); print(1); f.read()", tmp_path / "mnt" / "slow"
    )
    assert fs.arrived.wait(DEADLINE_S)
    session.invalidate_inode(slow.number)  # waits in the kernel for the page that is being read
    blocked = session.invalidated()
    other.data = b"2"
    session.invalidate_inode(other.number)
    wait_until(lambda: (tmp_path / "mnt" / "other").read_bytes() == b"2", "the other file refreshed")
    assert not blocked.done()
    assert reply_data(held[0], b"s" * 10)
    blocked.result(DEADLINE_S)
    assert reader.wait(DEADLINE_S) == 0


def test_reads_of_every_shape_give_the_right_bytes(tmp_path: Path, mount: Mount) -> None:
    content = random.Random(1).randbytes(3_000_001)
    real = tmp_path / "real"
    real.write_bytes(content)
    fs = TreeFs()
    fs.add("memory", content)
    fs.add("real", backing=str(real))
    mount(fs)
    rng = random.Random(2)
    for name in ("memory", "real"):
        fd = os.open(tmp_path / "mnt" / name, os.O_RDONLY)
        for _ in range(200):
            offset, size = rng.randrange(len(content) + 10), rng.choice([1, 511, 4096, 16384, 1 << 20])
            assert os.pread(fd, size, offset) == content[offset : offset + size]
            if rng.random() < 0.05:
                kernel_drops_pages()
        assert os.pread(fd, 10, len(content)) == b""
        os.close(fd)


def test_one_mebibyte_requests(tmp_path: Path, mount: Mount) -> None:
    real = tmp_path / "real"
    real.write_bytes(os.urandom(8 << 20))
    fs = TreeFs()
    fs.add("file", backing=str(real))
    mount(fs)
    assert (tmp_path / "mnt" / "file").read_bytes() == real.read_bytes()
    sizes = [call[1][2] for call in fs.calls if call[0] == "read"]  # type: ignore[index]
    assert max(sizes) == 1 << 20
    assert len(sizes) <= 16


def test_beyond_four_gibibytes(tmp_path: Path, mount: Mount) -> None:
    real = tmp_path / "sparse"
    with real.open("wb") as file:
        file.seek(5 << 30)
        file.write(b"end")
    fs = TreeFs()
    fs.add("file", backing=str(real))
    mount(fs)
    fd = os.open(tmp_path / "mnt" / "file", os.O_RDONLY)
    assert os.fstat(fd).st_size == (5 << 30) + 3
    assert os.pread(fd, 10, 5 << 30) == b"end"
    assert os.pread(fd, 4, (4 << 30) - 2) == bytes(4)
    assert os.lseek(fd, 0, os.SEEK_DATA) == 0
    assert os.lseek(fd, 0, os.SEEK_HOLE) == (5 << 30) + 3
    with pytest.raises(OSError, match="No such device or address"):
        os.lseek(fd, 6 << 30, os.SEEK_DATA)
    os.close(fd)


MAPPED = """
import hashlib, mmap, sys
with open(sys.argv[1], "rb") as file:
    for kind in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
        with mmap.mmap(file.fileno(), 0, flags=kind, prot=mmap.PROT_READ) as data:
            data.madvise(mmap.MADV_RANDOM)
            assert data[1234567] == data[1234567:1234568][0]
            print(hashlib.sha256(data).hexdigest())
"""


@pytest.mark.parametrize("flags", [abi.FOPEN_KEEP_CACHE, abi.FOPEN_DIRECT_IO])
def test_mmap(tmp_path: Path, mount: Mount, flags: int) -> None:
    content = os.urandom(2_500_000)
    fs = TreeFs(open_flags=flags)
    fs.add("file", content)
    mount(fs)
    done = run_python(MAPPED, tmp_path / "mnt" / "file")
    assert done.stdout.split() == [hashlib.sha256(content).hexdigest()] * 2


def test_attribute_refresh_does_not_break_a_mapping(tmp_path: Path, mount: Mount) -> None:
    """bindfs#159: mapping a file and then listing its directory turned pages into SIGBUS."""
    fs = TreeFs()
    fs.add("dir/file", b"m" * 100_000)
    mount(fs)
    script = """
import mmap, os, sys
with open(sys.argv[1] + "/file", "rb") as file:
    data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    for _ in range(20):
        os.listdir(sys.argv[1]), list(os.scandir(sys.argv[1]))
        assert data[:] == b"m" * 100_000
"""
    run_python(script, tmp_path / "mnt" / "dir")


def test_hundred_thousand_entries_listed_once_each(tmp_path: Path, mount: Mount) -> None:
    fs = TreeFs()
    for place in range(100_000):
        fs.add(f"big/file-{place:06}")
    mount(fs)
    with os.scandir(tmp_path / "mnt" / "big") as listing:
        names = [entry.name for entry in listing]
    assert len(names) == 100_000 and len(set(names)) == 100_000
    assert fs.calls.count(("readdirplus", 0)) >= 1
    kernel_forgets()
    wait_until(lambda: not +fs.lookups, "lookups given back")
    assert not -fs.lookups


@pytest.mark.parametrize("count", [0, 1, 2500, 65_537])
def test_seekdir_at_any_size(tmp_path: Path, mount: Mount, count: int) -> None:
    """mountpoint-s3#1323, nfsserve#50: positions in a directory must be stable."""
    fs = TreeFs()
    fs.add("big/x")
    fs.root.children[b"big"].children.clear()
    for place in range(count):
        fs.add(f"big/{place}")
    mount(fs)
    script = """
import ctypes, random, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.opendir.restype = libc.readdir.restype = ctypes.c_void_p
libc.readdir.argtypes = libc.telldir.argtypes = libc.closedir.argtypes = [ctypes.c_void_p]
libc.telldir.restype = ctypes.c_long
libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]
handle = libc.opendir(sys.argv[1].encode())
places, names = [], []
while True:
    places.append(libc.telldir(handle))
    entry = libc.readdir(handle)
    if not entry:
        break
    names.append(ctypes.string_at(entry + 19))
assert len(set(names)) == len(names) == int(sys.argv[2]) + 2, len(names)
for _ in range(100):
    place = random.randrange(len(names))
    libc.seekdir(handle, places[place])
    assert ctypes.string_at(libc.readdir(handle) + 19) == names[place]
libc.closedir(handle)
"""
    run_python(script, tmp_path / "mnt" / "big", count)


def test_xattrs(tmp_path: Path, mount: Mount) -> None:
    fs = TreeFs()
    node = fs.add("file")
    node.xattrs = {b"user.small": b"value", b"user.big": b"v" * 60_000, b"user.empty": b""}
    fs.add("bare")
    mount(fs)
    path = tmp_path / "mnt" / "file"
    assert sorted(os.listxattr(path)) == ["user.big", "user.empty", "user.small"]
    assert os.getxattr(path, "user.small") == b"value"
    assert os.getxattr(path, "user.big") == b"v" * 60_000
    assert os.getxattr(path, "user.empty") == b""
    assert os.listxattr(tmp_path / "mnt" / "bare") == []
    with pytest.raises(OSError, match="No data"):
        os.getxattr(path, "user.none")
    with pytest.raises(OSError, match="Read-only"):
        os.setxattr(path, "user.new", b"1")


@pytest.mark.parametrize("read_only", [False, True])
def test_changes_are_refused(tmp_path: Path, mount: Mount, read_only: bool) -> None:
    fs = TreeFs()
    fs.add("dir/file", b"data")
    mount(fs, read_only=read_only)
    top = tmp_path / "mnt"
    attempts: list[Callable[[], object]] = [
        lambda: (top / "new").write_bytes(b""),
        lambda: (top / "dir" / "file").write_bytes(b""),  # truncates
        lambda: os.truncate(top / "dir" / "file", 1),
        lambda: os.mkdir(top / "newdir"),
        lambda: os.mkfifo(top / "fifo"),
        lambda: os.symlink("x", top / "newlink"),
        lambda: os.link(top / "dir" / "file", top / "hard"),
        lambda: os.unlink(top / "dir" / "file"),
        lambda: os.rmdir(top / "dir"),
        lambda: os.rename(top / "dir" / "file", top / "moved"),
        lambda: os.chmod(top / "dir" / "file", 0o600),
        lambda: os.utime(top / "dir" / "file"),
        lambda: os.chown(top / "dir" / "file", 1, 1),
    ]
    for attempt in attempts:
        with pytest.raises(OSError) as caught:
            attempt()
        assert caught.value.errno == errno.EROFS
    assert (top / "dir" / "file").read_bytes() == b"data"


def test_failures_of_handlers(tmp_path: Path, mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    class HubError(Exception):
        errno = errno.ETIMEDOUT

    class Failing(TreeFs):
        failure: Any = None

        def content(self, req: Request, node: Node, offset: int, size: int, buffer: memoryview) -> Content:
            if isinstance(self.failure, Exception):
                raise self.failure
            return cast(Content, self.failure)

    fs = Failing()
    fs.add("file", b"x" * 10)
    mount(fs)
    fd = os.open(tmp_path / "mnt" / "file", os.O_RDONLY)
    for failure, expected in [
        (OSError(errno.EACCES, "no"), errno.EACCES),
        (HubError(), errno.ETIMEDOUT),
        (OSError(512, "ERESTARTSYS must not leak"), errno.EIO),
        (ValueError("a bug"), errno.EIO),
        (-5, errno.EIO),
        (1 << 21, errno.EIO),
        (None, errno.EIO),
    ]:
        fs.failure = failure
        with pytest.raises(OSError) as caught:
            os.pread(fd, 10, 0)
        assert caught.value.errno == expected, failure
    fs.failure = b"x" * 10
    assert os.pread(fd, 10, 0) == b"x" * 10
    os.close(fd)
    assert "a bug" in caplog.text


def test_estale_from_open_looks_up_anew(tmp_path: Path, mount: Mount) -> None:
    class Replaced(TreeFs):
        def open(self, req: Request, nodeid: int, flags: int) -> OpenOut:
            if nodeid == old.number and self.root.children[b"file"] is not old:
                raise OSError(errno.ESTALE, "an old version")
            return self.opened(nodeid)

    fs = Replaced()
    old = fs.add("file", b"old")
    mount(fs)
    path = tmp_path / "mnt" / "file"
    held = path.open("rb")
    fs.add("file", b"new!!")  # same name, new node
    assert path.read_bytes() == b"new!!"  # although the kernel still remembers the old entry
    assert held.read() == b"old"
    assert os.fstat(held.fileno()).st_ino == old.number
    held.close()


def test_answers_from_other_threads(tmp_path: Path, mount: Mount) -> None:
    class Later(TreeFs):
        def later(self, answer: Callable[[], object]) -> Deferred:
            threading.Thread(target=answer, daemon=True).start()
            return DEFERRED

        def lookup(self, req: Request, parent: int, name: bytes) -> EntryOut | Deferred:
            node = self.nodes[parent].children.get(name)
            entry = self.entry(node) if node else negative_entry(TTL)
            return self.later(lambda: reply_entry(req, entry))

        def open(self, req: Request, nodeid: int, flags: int) -> OpenOut | Deferred:
            out = self.opened(nodeid)
            return self.later(lambda: reply_open(req, out))

        def content(self, req: Request, node: Node, offset: int, size: int, buffer: memoryview) -> Content:
            def answer() -> None:
                first.append(reply_data(req, memoryview(node.data)[offset : offset + size]))
                second.append(req.reply(b"again") or req.error(errno.EIO))

            return self.later(answer)

    first: list[bool] = []
    second: list[bool] = []
    fs = Later()
    for place in range(20):
        fs.add(f"dir/{place}", bytes([place]) * 200_000)
    mount(fs)
    for place in range(20):
        assert (tmp_path / "mnt" / "dir" / str(place)).read_bytes() == bytes([place]) * 200_000
    wait_until(lambda: len(first) == len(second))
    assert all(first) and not any(second)


READ = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
print("opened")
os.read(fd, 4096)
"""


@pytest.mark.parametrize(
    ("number", "flags"),
    [
        (signal.SIGKILL, abi.FOPEN_KEEP_CACHE),
        (signal.SIGTERM, abi.FOPEN_KEEP_CACHE),  # the kernel itself lets a killed page wait end
        (signal.SIGKILL, abi.FOPEN_DIRECT_IO),
        (signal.SIGTERM, abi.FOPEN_DIRECT_IO),
        (signal.SIGQUIT, abi.FOPEN_DIRECT_IO),  # dumps core: not fatal to a page wait, as on any disk
    ],
)
@pytest.mark.parametrize("stuck", [False, True], ids=["deferred", "stuck"])
def test_hung_read_can_be_killed(tmp_path: Path, mount: Mount, number: int, flags: int, stuck: bool) -> None:
    class Hanging(TreeFs):
        def content(self, req: Request, node: Node, offset: int, size: int, buffer: memoryview) -> Content:
            req.on_interrupt(lambda: stopped.append(req))
            requests.append(req)
            self.arrived.set()
            if stuck:  # all threads hang in their handler, as on a disk that sleeps
                release.wait(DEADLINE_S)
                return b"late"
            return DEFERRED

    requests: list[Request] = []
    stopped: list[Request] = []
    release = threading.Event()
    fs = Hanging(open_flags=flags)
    fs.add("file", b"x" * 4096)
    session = mount(fs, threads=1)
    child = start_python(READ, tmp_path / "mnt" / "file")
    assert fs.arrived.wait(DEADLINE_S)
    child.send_signal(number)
    assert child.wait(DEADLINE_S) == -number
    if flags == abi.FOPEN_DIRECT_IO:  # through the page cache only the page wait is interrupted
        assert stopped and stopped[0].interrupted
        assert not stopped[0].reply(b"too late")
    if stuck:
        assert session.threads >= 2 or flags == abi.FOPEN_KEEP_CACHE
    release.set()
    for req in requests:
        req.error(errno.EIO)


def test_caught_signal_does_not_end_a_read_but_a_later_kill_does(tmp_path: Path, mount: Mount) -> None:
    class Hanging(TreeFs):
        def content(self, req: Request, node: Node, offset: int, size: int, buffer: memoryview) -> Content:
            requests.append(req)
            self.arrived.set()
            return DEFERRED

    requests: list[Request] = []
    fs = Hanging(open_flags=abi.FOPEN_DIRECT_IO)
    fs.add("file", b"x" * 4096)
    session = mount(fs)
    script = "import signal; signal.signal(signal.SIGUSR1, lambda *_: None)\n" + READ
    child = start_python(script, tmp_path / "mnt" / "file", 0)
    assert fs.arrived.wait(DEADLINE_S)
    child.send_signal(signal.SIGUSR1)
    wait_until(lambda: session.stats.get("interrupt", 0) == 1, "interrupt seen")
    threading.Event().wait(0.2)
    assert not requests[0].answered
    child.kill()  # the kernel does not report this second signal
    assert child.wait(DEADLINE_S) == -signal.SIGKILL
    assert requests[0].interrupted


def test_control_c_ends_a_hung_open_of_a_program_that_handles_it(tmp_path: Path, mount: Mount) -> None:
    class Hanging(TreeFs):
        def open(self, req: Request, nodeid: int, flags: int) -> OpenOut | Deferred:
            opened.append((req, self.opened(nodeid)))
            self.arrived.set()
            return DEFERRED

    opened: list[tuple[Request, OpenOut]] = []
    fs = Hanging()
    node = fs.add("file")
    mount(fs)
    script = """
import sys
print("ready")
try:
    open(sys.argv[1])
except KeyboardInterrupt:
    sys.exit(7)
"""
    child = start_python(script, tmp_path / "mnt" / "file")
    assert fs.arrived.wait(DEADLINE_S)
    child.send_signal(signal.SIGINT)
    assert child.wait(DEADLINE_S) == 7
    assert fs.handles[node.number] == 1
    assert not reply_open(*opened[0])  # nobody waits any more: the handle is given back at once
    assert fs.handles[node.number] == 0


def test_late_lookup_is_given_back(tmp_path: Path, mount: Mount) -> None:
    class Hanging(TreeFs):
        def lookup(self, req: Request, parent: int, name: bytes) -> EntryOut | Deferred:
            asked.append((req, self.entry(node)))
            self.arrived.set()
            return DEFERRED

    asked: list[tuple[Request, EntryOut]] = []
    fs = Hanging()
    node = fs.add("file")
    mount(fs)
    child = start_python("import os, sys; print(1); os.stat(sys.argv[1])", tmp_path / "mnt" / "file")
    assert fs.arrived.wait(DEADLINE_S)
    child.kill()
    assert child.wait(DEADLINE_S) == -signal.SIGKILL
    assert fs.lookups[node.number] == 1
    assert not reply_entry(*asked[0])
    assert fs.lookups[node.number] == 0


def test_unmount_works_while_requests_hang(tmp_path: Path, mount: Mount) -> None:
    class Hanging(TreeFs):
        def content(self, req: Request, node: Node, offset: int, size: int, buffer: memoryview) -> Content:
            requests.append(req)
            self.arrived.set()
            return DEFERRED

    requests: list[Request] = []
    fs = Hanging(open_flags=abi.FOPEN_DIRECT_IO)
    fs.add("file", b"x" * 10)
    session = mount(fs)
    child = start_python(READ, tmp_path / "mnt" / "file")
    assert fs.arrived.wait(DEADLINE_S)
    session.unmount()
    assert not os.path.ismount(tmp_path / "mnt")
    child.kill()
    assert child.wait(DEADLINE_S) == -signal.SIGKILL
    assert session.join(DEADLINE_S)
    assert not requests[0].reply(b"to nobody")


def test_many_readers_at_once(tmp_path: Path, mount: Mount) -> None:
    """leilfs#179: parallel checksums of many files went wrong with a shared buffer."""
    rng = random.Random(5)
    fs = TreeFs()
    sums = {}
    for place in range(40):
        content = rng.randbytes(rng.randrange(1, 400_000))
        real = tmp_path / f"real{place}"
        real.write_bytes(content)
        fs.add(str(place), backing=str(real)) if place % 2 else fs.add(str(place), content)
        sums[str(place)] = hashlib.sha256(content).hexdigest()
    mount(fs, threads=4)
    script = """
import hashlib, os, sys
for name in sorted(os.listdir(sys.argv[1]), key=lambda name: hash((name, sys.argv[2]))):
    print(name, hashlib.sha256(open(os.path.join(sys.argv[1], name), "rb").read()).hexdigest())
"""
    for _ in range(2):
        children = [
            subprocess.Popen(
                [sys.executable, "-c", script, tmp_path / "mnt", str(number)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(4)
        ]
        for child in children:
            out, _ = child.communicate(timeout=DEADLINE_S)
            assert dict(line.split() for line in out.splitlines()) == sums
        kernel_drops_pages()
