"""A small file system over a dict, for the tests of farside.fuse: contents in memory or in real files."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import Counter
from dataclasses import dataclass, field

from farside.fuse import (
    AttrOut,
    Deferred,
    DirBuffer,
    EntryOut,
    FuseAttr,
    InitInfo,
    OpenOut,
    Operations,
    Request,
    Session,
    StatfsOut,
    abi,
    negative_entry,
)

TTL = 60.0
Content = int | bytes | bytearray | memoryview | Deferred


@dataclass
class Node:
    number: int
    mode: int
    data: bytes = b""
    backing: str | None = None
    children: dict[bytes, Node] = field(default_factory=dict)
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    mtime_ns: int = 1_700_000_000_123_456_789

    @property
    def size(self) -> int:
        return os.stat(self.backing).st_size if self.backing else len(self.data)

    @property
    def attr(self) -> FuseAttr:
        links = 2 if stat.S_ISDIR(self.mode) else 1
        when = self.mtime_ns
        size = self.size
        return FuseAttr(self.number, size, -(-size // 512), when, when, when, self.mode, links, 0, 0)


class TreeFs(Operations):
    """Read-only tree; counts what the kernel holds and notes what it asks."""

    def __init__(self, *, open_flags: int = abi.FOPEN_KEEP_CACHE | abi.FOPEN_NOFLUSH) -> None:
        self.lock = threading.Lock()
        self.root = Node(1, stat.S_IFDIR | 0o755)
        self.nodes = {1: self.root}
        self.lookups: Counter[int] = Counter()  # what the kernel holds
        self.handles: Counter[int] = Counter()
        self.calls: list[tuple[str, object]] = []
        self.open_flags = open_flags
        self.passthrough = False
        self.backing: dict[int, int] = {}
        self.session: Session | None = None
        self.info: InitInfo | None = None
        self.destroyed = threading.Event()
        self.listings: dict[int, list[tuple[bytes, Node]]] = {}
        self.arrived = threading.Event()

    def add(
        self, path: str, data: bytes = b"", *, mode: int = stat.S_IFREG | 0o644, backing: str | None = None
    ) -> Node:
        parent = self.root
        *directories, name = os.fsencode(path).split(b"/")
        for part in directories:
            if part not in parent.children:
                parent.children[part] = self._new(stat.S_IFDIR | 0o755)
            parent = parent.children[part]
        node = parent.children[name] = self._new(mode)
        node.data, node.backing = data, backing
        return node

    def _new(self, mode: int) -> Node:
        node = Node(len(self.nodes) + 1, mode)
        self.nodes[node.number] = node
        return node

    def entry(self, node: Node) -> EntryOut:
        with self.lock:
            self.lookups[node.number] += 1
        return EntryOut(node.number, 0, node.attr, TTL, TTL)

    def init(self, session: Session, info: InitInfo) -> None:
        self.session, self.info = session, info

    def destroy(self) -> None:
        self.destroyed.set()

    def lookup(self, req: Request, parent: int, name: bytes) -> EntryOut | Deferred:
        self.calls.append(("lookup", name))
        node = self.nodes[parent].children.get(name)
        return self.entry(node) if node else negative_entry(TTL)

    def forget(self, nodeid: int, nlookup: int) -> None:
        with self.lock:
            self.lookups[nodeid] -= nlookup

    def getattr(self, req: Request, nodeid: int, fh: int | None) -> AttrOut | Deferred:
        self.calls.append(("getattr", nodeid))
        return AttrOut(self.nodes[nodeid].attr, TTL)

    def readlink(self, req: Request, nodeid: int) -> bytes | Deferred:
        return self.nodes[nodeid].data

    def open(self, req: Request, nodeid: int, flags: int) -> OpenOut | Deferred:
        return self.opened(nodeid)

    def opened(self, nodeid: int) -> OpenOut:
        self.calls.append(("open", nodeid))
        node = self.nodes[nodeid]
        with self.lock:
            self.handles[nodeid] += 1
        if self.passthrough and node.backing:
            assert self.session is not None
            if nodeid not in self.backing:
                fd = os.open(node.backing, os.O_RDONLY)
                try:
                    self.backing[nodeid] = self.session.backing_open(fd)
                finally:
                    os.close(fd)
            flags = abi.FOPEN_PASSTHROUGH | abi.FOPEN_NOFLUSH
            return OpenOut(nodeid, flags, self.backing[nodeid])
        return OpenOut(nodeid, self.open_flags)

    def release(self, req: Request, nodeid: int, fh: int) -> None:
        with self.lock:
            self.handles[nodeid] -= 1

    def read(self, req: Request, nodeid: int, fh: int, offset: int, size: int, buffer: memoryview) -> Content:
        self.calls.append(("read", (nodeid, offset, size)))
        return self.content(req, self.nodes[nodeid], offset, size, buffer)

    def content(self, req: Request, node: Node, offset: int, size: int, buffer: memoryview) -> Content:
        if node.backing:
            fd = os.open(node.backing, os.O_RDONLY)
            try:
                return os.preadv(fd, [buffer[:size]], offset)
            finally:
                os.close(fd)
        return node.data[offset : offset + size]

    def opendir(self, req: Request, nodeid: int, flags: int) -> OpenOut | Deferred:
        with self.lock:
            self.handles[nodeid] += 1
        return OpenOut(0)

    def releasedir(self, req: Request, nodeid: int, fh: int) -> None:
        with self.lock:
            self.handles[nodeid] -= 1

    def _listing(self, nodeid: int) -> list[tuple[bytes, Node]]:
        node = self.nodes[nodeid]
        listing = self.listings.get(nodeid)
        if listing is None or len(listing) != len(node.children) + 2:
            listing = self.listings[nodeid] = [(b".", node), (b"..", node), *node.children.items()]
        return listing

    def readdir(self, req: Request, nodeid: int, fh: int, offset: int, size: int) -> DirBuffer | Deferred:
        out = DirBuffer(size)
        listing = self._listing(nodeid)
        for place in range(offset, len(listing)):
            name, child = listing[place]
            if not out.add(name, child.number, child.mode >> 12, place + 1):
                break
        return out

    def readdirplus(self, req: Request, nodeid: int, fh: int, offset: int, size: int) -> DirBuffer | Deferred:
        self.calls.append(("readdirplus", offset))
        out = DirBuffer(size)
        listing = self._listing(nodeid)
        for place in range(offset, len(listing)):
            name, child = listing[place]
            if not out.add_plus(EntryOut(child.number, 0, child.attr, TTL, TTL), name, place + 1):
                break
        with self.lock:
            self.lookups.update(out.nodeids)
        return out

    def statfs(self, req: Request, nodeid: int) -> StatfsOut:
        return StatfsOut(1000, 400, 300, len(self.nodes), 7)

    def getxattr(self, req: Request, nodeid: int, name: bytes, size: int) -> bytes:
        try:
            return self.nodes[nodeid].xattrs[name]
        except KeyError:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA)) from None

    def listxattr(self, req: Request, nodeid: int, size: int) -> bytes:
        return b"".join(name + b"\0" for name in self.nodes[nodeid].xattrs)

    def lseek(self, req: Request, nodeid: int, fh: int, offset: int, whence: int) -> int:
        size = self.nodes[nodeid].size
        if offset >= size:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        return offset if whence == os.SEEK_DATA else size
