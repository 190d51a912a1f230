"""Cases of what programs expect of a file system: names, directories, sizes, mappings, locks, seeking."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import random
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from inotify_simple import INotify, flags
from tests.cases.conftest import SEEN_S, Site, drop_pages, errno_of, within
from tests.mount.conftest import run_python, wait_until

pytestmark = pytest.mark.mount

MB = 1 << 20
MANY = 100_000
"""Entries of the large directory: the reports have 1 M and 3.8 M; beyond 65,536 nothing new happens."""

libc = ctypes.CDLL(None, use_errno=True)


def data_of(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A fabric whose hub has directories of 1, 2,500 and 100,000 names from the start."""
    made = Site(tmp_path_factory.mktemp("posix"), timeout="5s")
    try:
        for count in (1, 2500, MANY):
            directory = made.data / f"of{count}"
            directory.mkdir()
            if count == MANY:  # (where files are made ten times as fast)
                subprocess.run(["mount", "-t", "tmpfs", "tmpfs", directory], check=True)
            for n in range(count):
                os.mknod(f"{directory}/entry-{n:06}")
        made.mount()
        yield made
    finally:
        made.close()
        subprocess.run(["umount", "-l", made.data / f"of{MANY}"], check=False)


# -- names -------------------------------------------------------------------------------------------------

ODD_NAMES = [
    # rclone/rclone#7072: two forms of the same letter are two names
    *("e\u0301".encode(), "\u00e9".encode()),
    # rclone/rclone#2333: dots and spaces at the ends
    *(b"a.", b"a ", b" a", b"..a", b"...", b" ", b"a"),
    # rclone/rclone#5360: bytes that are special somewhere
    *(
        b"new\nline",
        b"tab\t",
        b"\x7f",
        b"\x01",
        b"\xff\xfe",
        b"\xc3",
        b"a\\b",
        b'a:b*?"<>|',
        b"CON",
        b"%2F",
        b"~",
    ),
    # rclone/rclone#1907: as long as names may be, also where each byte would be escaped
    *(b"x" * 255, b"\xff" * 255, "\u00e9".encode() * 127),
]


def test_names_are_bytes_and_stay_what_they_are(site: Site) -> None:
    hub, mnt = os.fsencode(site.data / "odd"), os.fsencode(site.mnt / "odd")
    os.mkdir(hub)
    for n, name in enumerate(ODD_NAMES):
        with open(hub + b"/" + name, "wb") as file:
            file.write(b"content %d" % n)
    within(SEEN_S, lambda: errno_of(lambda: os.stat(mnt)) == 0, "directory seen")
    within(SEEN_S, lambda: len(os.listdir(mnt)) == len(ODD_NAMES), "names seen")
    assert sorted(os.listdir(mnt)) == sorted(ODD_NAMES)
    for _ in range(2):  # over the link, then from the cache
        for n, name in enumerate(ODD_NAMES):
            with open(mnt + b"/" + name, "rb") as file:
                assert file.read() == b"content %d" % n, name
            drop_pages(site.mnt / "odd" / os.fsdecode(name))
    assert errno_of(lambda: os.stat(mnt + b"/" + b"y" * 256)) == errno.ENAMETOOLONG
    assert errno_of(lambda: os.stat(mnt + b"/A")) == errno.ENOENT, "case counts"


def test_a_path_of_four_thousand_bytes(site: Site) -> None:
    # rclone/rclone#1907
    parts = [b"%02d" % n + b"p" * 253 for n in range(15)] + [b"q" * (4000 - 15 * 256)]
    assert len(b"/".join(parts)) == 4000

    def walk(root: Path, *, make: bool) -> int:
        """A descriptor of the last directory, step by step: the whole path is too long for one call."""
        fd = os.open(root, os.O_PATH)
        for part in parts[:-1]:
            if make:
                os.mkdir(part, dir_fd=fd)
            below = os.open(part, os.O_PATH | os.O_DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = below
        return fd

    made = walk(site.data, make=True)
    with os.fdopen(os.open(parts[-1], os.O_CREAT | os.O_WRONLY, dir_fd=made), "wb") as file:
        file.write(b"deep")
    os.close(made)
    within(SEEN_S, (site.mnt / os.fsdecode(parts[0])).exists, "the first part seen")
    found = walk(site.mnt, make=False)
    with os.fdopen(os.open(parts[-1], os.O_RDONLY, dir_fd=found), "rb") as reader:
        assert reader.read() == b"deep"
    os.close(found)


# -- directories -------------------------------------------------------------------------------------------


def entries(fd: int, size: int) -> list[tuple[bytes, int, int]]:
    """One getdents64 with a buffer of ``size`` bytes: (name, offset behind it, inode)."""
    buffer = ctypes.create_string_buffer(size)
    got = libc.getdents64(fd, buffer, ctypes.c_size_t(size))
    assert got >= 0, os.strerror(ctypes.get_errno())
    found, at = [], 0
    while at < got:
        ino, offset, length = struct.unpack_from("<QqH", buffer, at)
        found.append((buffer.raw[at + 19 : at + length].split(b"\0", 1)[0], offset, ino))
        at += length
    return found


@pytest.mark.parametrize("count", [1, 2500, MANY])
def test_offsets_in_a_directory_are_places_at_any_size(site: Site, count: int) -> None:
    # awslabs/mountpoint-s3#1323, huggingface/nfsserve#50 (here without NFS): every name once, seek anywhere
    fd = os.open(site.mnt / f"of{count}", os.O_RDONLY)
    sizes = [512, 4096, 65_536] if count < MANY else [65_536]
    for size in sizes:
        os.lseek(fd, 0, os.SEEK_SET)
        listed: list[tuple[bytes, int, int]] = []
        while len(listed) <= count + 2 and (page := entries(fd, size)):
            listed += page
        names = [name for name, _, _ in listed]
        assert sorted(names) == [b".", b"..", *(b"entry-%06d" % n for n in range(count))]
        assert len({offset for _, offset, _ in listed}) == count + 2
        rng = random.Random(size)
        for at in [0, count, count + 1, *(rng.randrange(count + 2) for _ in range(60))]:
            os.lseek(fd, listed[at][1], os.SEEK_SET)
            after = entries(fd, 512)
            assert [name for name, _, _ in after] == names[at + 1 : at + 1 + len(after)]
            assert after or at == count + 1
    os.close(fd)


def test_a_hundred_thousand_names_are_listed_with_bounded_memory(site: Site) -> None:
    # Alluxio/alluxio#12472
    for _ in range(3):
        assert len(os.listdir(site.mnt / f"of{MANY}")) == MANY
    with os.scandir(site.mnt / f"of{MANY}") as found:
        assert sum(entry.is_file() for entry in found) == MANY
    assert site.status()["memory_bytes"] < 300 * MB


def test_hard_links_are_all_listed_although_they_share_an_inode(site: Site) -> None:
    # huggingface/nfsserve#49, here without NFS
    directory = site.data / "linked"
    directory.mkdir()
    for n in range(6):
        (directory / f"f{n}").write_bytes(b"%d" % n)
    os.link(directory / "f0", directory / "zlink")
    within(SEEN_S, (site.mnt / "linked" / "zlink").exists, "link seen")
    fd = os.open(site.mnt / "linked", os.O_RDONLY)
    listed: list[tuple[bytes, int, int]] = []
    while len(listed) < 100 and (page := entries(fd, 64)):  # one or two names at a time
        listed += page
    os.close(fd)
    inodes = {name: ino for name, _, ino in listed}
    assert len(listed) == len(inodes) == 9
    assert inodes[b"zlink"] == inodes[b"f0"] and len(set(inodes.values())) >= 7
    assert (site.mnt / "linked" / "zlink").stat().st_nlink == 2
    before = site.fetched()
    assert (site.mnt / "linked" / "f0").read_bytes() == b"0"
    assert (site.mnt / "linked" / "zlink").read_bytes() == b"0"
    assert site.fetched() - before <= 6, "one content, however many names"


# -- sizes and holes ---------------------------------------------------------------------------------------


def test_empty_files_are_shown_and_read_without_a_fetch(site: Site) -> None:
    # fangfufu/httpdirfs#184
    site.put("nothing/later", b"x" * 5000)
    assert site.cached("nothing/later") == b"x" * 5000
    site.put("nothing/empty", b"")
    wait_until(lambda: site.status()["link"]["inflight_bytes"] == 0, "quiet")
    before = site.fetched()
    assert (site.mnt / "nothing" / "empty").read_bytes() == b""
    assert sorted(os.listdir(site.mnt / "nothing")) == ["empty", "later"]
    os.truncate(site.data / "nothing" / "later", 0)
    within(SEEN_S, lambda: (site.mnt / "nothing" / "later").stat().st_size == 0, "truncation seen")
    assert (site.mnt / "nothing" / "later").read_bytes() == b""
    assert site.fetched() == before
    site.put("nothing/empty", b"now something")
    assert site.cached("nothing/empty") == b"now something"


def test_data_are_never_called_a_hole(site: Site) -> None:
    # marmos91/dittofs#1481: unknown, partly cached and wholly cached alike
    size, runs = 8 * MB, [(MB, MB + 65_536), (5 * MB + 4096, 6 * MB)]
    with (site.data / "sparse").open("wb") as file:
        file.truncate(size)
        for begin, end in runs:
            file.seek(begin)
            file.write(data_of(begin, end - begin).replace(b"\0", b"\1"))
    within(SEEN_S, lambda: site.shows("sparse", size), "file seen")
    whole = (site.data / "sparse").read_bytes()
    for cached in (0, 2 * MB, size):
        fd = os.open(site.mnt / "sparse", os.O_RDONLY)
        if cached:
            assert os.pread(fd, cached, 0) == whole[:cached]
        for begin, end in runs:
            for at in (begin, (begin + end) // 2, end - 1):
                assert os.lseek(fd, at, os.SEEK_DATA) == at
                assert os.lseek(fd, at, os.SEEK_HOLE) >= end
            assert os.lseek(fd, begin - 10, os.SEEK_DATA) <= begin
        assert errno_of(lambda fd=fd: os.lseek(fd, size, os.SEEK_DATA)) == errno.ENXIO  # type: ignore[misc]
        os.close(fd)
    assert site.cached("sparse") == whole


def test_appending_is_refused_at_open(site: Site) -> None:
    # rclone/rclone#3843: read-only in this version, and said before a byte is taken
    site.put("log", b"first\n")
    for mode in (os.O_WRONLY, os.O_RDWR):
        assert errno_of(lambda m=mode: os.open(site.mnt / "log", m | os.O_APPEND)) == errno.EROFS  # type: ignore[misc]
    assert errno_of(lambda: os.open(site.mnt / "new", os.O_WRONLY | os.O_APPEND | os.O_CREAT)) == errno.EROFS
    assert (site.data / "log").read_bytes() == b"first\n"
    assert not (site.data / "new").exists()


# -- mappings ----------------------------------------------------------------------------------------------

_MAP_AND_LIST = """
import hashlib, mmap, os, sys
path, parent = sys.argv[1], sys.argv[2]
fd = os.open(path, os.O_RDONLY)
size = os.fstat(fd).st_size
mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ)
for round in range(20):
    with os.scandir(parent) as found:
        assert any(entry.stat().st_size == size for entry in found)
    assert os.fstat(fd).st_size == size
    mapped.madvise(mmap.MADV_DONTNEED)
    for at in range(0, size, 4096):
        mapped[at]
print(hashlib.sha256(mapped).hexdigest())
"""


def test_listing_the_parent_does_not_take_pages_from_a_mapping(site: Site) -> None:
    # mpartel/bindfs#159
    data = data_of(11, 3 * MB + 5)
    site.put("mapped/f", data)
    for _ in range(2):  # cold, then whole in the cache
        done = run_python(_MAP_AND_LIST, site.mnt / "mapped" / "f", site.mnt / "mapped")
        assert done.stdout.strip() == hashlib.sha256(data).hexdigest()


_MAP = """
import hashlib, mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
for flags in (mmap.MAP_PRIVATE, mmap.MAP_SHARED):
    mapped = mmap.mmap(fd, 0, flags=flags, prot=mmap.PROT_READ)
    print(hashlib.sha256(mapped).hexdigest(), mapped[-1])
"""


@pytest.mark.parametrize("size", [1, 4096, MB + 100])
def test_files_can_be_mapped_private_and_shared(site: Site, size: int) -> None:
    # huggingface/safetensors#195
    data = data_of(size, size)
    site.put(f"tensors{size}", data)
    for _ in range(2):
        done = run_python(_MAP, site.mnt / f"tensors{size}")
        assert done.stdout.split() == [hashlib.sha256(data).hexdigest(), str(data[-1])] * 2


# -- locks and events --------------------------------------------------------------------------------------

_WAIT_FOR_LOCK = """
import ctypes, errno, fcntl, os, signal, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
try:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    sys.exit("two processes hold the lock")
except BlockingIOError:
    pass
libc = ctypes.CDLL(None, use_errno=True)
signal.siginterrupt(signal.SIGALRM, True)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.siginterrupt(signal.SIGALRM, True)
signal.setitimer(signal.ITIMER_REAL, 0.1)
result = libc.flock(fd, fcntl.LOCK_EX)
print(result, errno.errorcode.get(ctypes.get_errno(), ctypes.get_errno()))
"""


def test_flock_excludes_other_processes_and_a_signal_ends_the_wait_with_eintr(site: Site) -> None:
    # juicedata/juicefs#6770 (only documented errno values) and huggingface/datasets#6744 (locks are there)
    site.put("lock", b"")
    with (site.mnt / "lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert run_python(_WAIT_FOR_LOCK, site.mnt / "lock").stdout.split() == ["-1", "EINTR"]
        fcntl.flock(held, fcntl.LOCK_UN)
        fcntl.lockf(held, fcntl.LOCK_SH | fcntl.LOCK_NB)  # (an exclusive one needs a file open for writing)
        assert errno_of(lambda: fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)) == errno.EBADF


def test_locks_are_of_one_machine_as_documented(site: Site) -> None:
    # huggingface/datasets#6744
    site.put("lock2", b"")
    with site.second_mount() as other:
        with (site.mnt / "lock2").open("rb") as one, (other / "lock2").open("rb") as two:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_inotify_shows_what_is_done_at_the_spoke_only_as_documented(site: Site) -> None:
    # lizardfs/lizardfs#750
    site.put("events/f", b"old")
    site.put("events/marker", b"m")
    with INotify() as watch:
        watch.add_watch(site.mnt / "events", flags.MODIFY | flags.CREATE | flags.ATTRIB | flags.OPEN)
        (site.data / "events" / "f").write_bytes(b"changed")
        (site.data / "events" / "g").write_bytes(b"new")
        within(SEEN_S, (site.mnt / "events" / "g").exists, "new file seen")
        within(SEEN_S, lambda: site.shows("events/f", 7), "change seen")
        assert (site.mnt / "events" / "marker").read_bytes() == b"m"
        seen = [(event.name, flags.from_mask(event.mask)) for event in watch.read(timeout=2000)]
    assert seen == [("marker", [flags.OPEN])]
