"""The nodes that the kernel knows: node id ↔ (directory, name, value), with reference counts.

A node stands for one *version* of a file: when the content changes at the hub, the name gets a new node, so
the kernel's page cache and passthrough of the old one stay with the handles that are open on it. Hard links
to one file share a node. A directory keeps its node as long as its path lives.

Node ids are never used twice. ``find``, ``intern`` and ``forget`` may be called from any FUSE thread.
"""

from __future__ import annotations

import errno
import stat
import threading

from farside.fuse import FuseAttr
from farside.protocol.attributes import Attr, attr_of

ROOT = 1


class Node:
    """One inode of the kernel's.

    Attributes:
        parent: node of the directory it was last looked up in; None for the root.
        name: its name there.
        value: record, flags and symlink target, as in the namespace (shared, not copied).
        lookups: references that the kernel holds.
        path: of a directory, its path; for others ask ``path_of``.
        served: bytes of it may have been handed out; the kernel may keep them as long as the node.
    """

    __slots__ = ("id", "lookups", "name", "parent", "path", "served", "value")

    def __init__(
        self, node_id: int, parent: Node | None, name: bytes, value: bytes, path: bytes | None
    ) -> None:
        self.id = node_id
        self.parent = parent
        self.name = name
        self.value = value
        self.path = path
        self.lookups = 0
        self.served = False

    @property
    def attr(self) -> Attr:
        return attr_of(self.value)


def path_of(node: Node) -> bytes:
    """The node's latest path in the portal; the root's is ``b""``."""
    if node.path is not None:
        return node.path
    assert node.parent is not None and node.parent.path is not None
    return join(node.parent.path, node.name)


def join(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name


class Nodes:
    """All nodes of one mount."""

    def __init__(self, root_value: bytes) -> None:
        self._lock = threading.Lock()
        self.root = Node(ROOT, None, b"", root_value, b"")
        self.root.lookups = 1
        self._by_id: dict[int, Node] = {ROOT: self.root}
        self._dirs: dict[bytes, Node] = {b"": self.root}
        self._files: dict[int, Node] = {}  # fileid → the node of its newest known version
        self._next = ROOT + 1

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, node_id: int) -> Node:
        """Raises OSError ESTALE for a node that the kernel has forgotten: file handles of NFS name such."""
        node = self._by_id.get(node_id)
        if node is None:
            raise OSError(errno.ESTALE, "the kernel has forgotten this node")
        return node

    def directory(self, path: bytes) -> Node | None:
        """The node of a directory, if the kernel knows it."""
        return self._dirs.get(path)

    def children(self, directory: Node) -> list[Node]:
        """The nodes that were last looked up in a directory. Walks all nodes: for rare events only."""
        return [node for node in self._all() if node.parent is directory]

    def below(self, path: bytes) -> list[Node]:
        """The nodes that were last looked up in a directory or anywhere below it. Walks all nodes, once."""
        prefix = path + b"/" if path else b""

        def holds(parent: Node | None) -> bool:
            return parent is not None and ((at := parent.path) == path or (at or b"").startswith(prefix))

        return [node for node in self._all() if holds(node.parent)]

    def _all(self) -> list[Node]:
        with self._lock:
            return list(self._by_id.values())

    def intern(self, parent: Node, name: bytes, value: bytes) -> Node:
        """The node of what was just looked up; counts one reference of the kernel's."""
        attr = attr_of(value)
        with self._lock:
            if stat.S_ISDIR(attr.mode):
                assert parent.path is not None
                path = join(parent.path, name)
                node = self._dirs.get(path)
                if node is None:
                    node = self._dirs[path] = self._new(parent, name, value, path)
                node.value = value
            else:
                found = self._files.get(attr.fileid)
                if found is None or found.attr.version != attr.version:
                    node = self._files[attr.fileid] = self._new(parent, name, value, None)
                else:
                    node = found
                    node.value = value  # st_blocks may settle without a change of content
                    node.parent, node.name = parent, name  # the path that certainly exists now
            node.lookups += 1
        return node

    def forget(self, node_id: int, count: int) -> None:
        """The kernel drops ``count`` references; at none the node goes."""
        if node_id == ROOT:
            return
        with self._lock:
            node = self._by_id.get(node_id)
            if node is None:
                return
            node.lookups -= count
            if node.lookups > 0:
                return
            del self._by_id[node_id]
            if node.path is not None:
                if self._dirs.get(node.path) is node:
                    del self._dirs[node.path]
            else:
                fileid = node.attr.fileid
                if self._files.get(fileid) is node:
                    del self._files[fileid]

    def _new(self, parent: Node, name: bytes, value: bytes, path: bytes | None) -> Node:
        node = Node(self._next, parent, name, value, path)
        self._next += 1
        self._by_id[node.id] = node
        return node


def fuse_attr(attr: Attr) -> FuseAttr:
    """Attributes as the kernel wants them. Access times are not kept: they show the time of change."""
    return FuseAttr(
        ino=attr.fileid,
        size=attr.size,
        blocks=attr.blocks,
        atime_ns=attr.mtime_ns,
        mtime_ns=attr.mtime_ns,
        ctime_ns=attr.ctime_ns,
        mode=attr.mode,
        nlink=attr.nlink,
        uid=attr.uid,
        gid=attr.gid,
        rdev=attr.rdev,
    )
