"""A hub over dicts, in this process, whose replies and pushes the test lets go when it wants."""

from __future__ import annotations

import asyncio
import errno
import stat
from collections import deque
from collections.abc import AsyncIterator, Sequence

import xxhash

from farside.errors import HubUnreachable, RemoteError
from farside.protocol.attributes import Attr, digest_of, pack_listing, pack_value
from farside.protocol.messages import DirChange, ListDirReply, TreeDir, TreeDone, TreePart

DIR = 0o40755
FILE = 0o100644


def file_value(fileid: int, size: int, version: int) -> bytes:
    token = xxhash.xxh3_128_digest(version.to_bytes(8, "little"))
    return pack_value(Attr(fileid, size, 8, version, version, FILE, 1, 0, 0, 0, token))


def dir_value(fileid: int, version: int) -> bytes:
    token = xxhash.xxh3_128_digest(version.to_bytes(8, "little"))
    return pack_value(Attr(fileid, 4096, 8, version, version, DIR, 2, 0, 0, 0, token))


def parent_of(path: bytes) -> bytes:
    return path.rpartition(b"/")[0]


class FakeHub:
    """``values``: path → value of everything there is. ``pushes``: changes not delivered yet, in order.

    ``held``: while it is a list, replies are computed at once, but wait there for ``release``.
    """

    def __init__(self, page: int = 20_000) -> None:
        self.clock = 1
        self.fileids = 1
        self.values: dict[bytes, bytes] = {b"": dir_value(1, 1)}
        self.children: dict[bytes, set[bytes]] = {b"": set()}
        self.pushes: deque[DirChange] = deque()
        self.up = True
        self.watched = True
        self.page = page
        self.quiet = False
        """Only the changed names are pushed: nothing is said of what lay below a removed directory."""
        self.held: list[asyncio.Future[None]] | None = None
        self.refuse: dict[bytes, int] = {}
        self.calls: list[tuple[str, bytes]] = []

    # -- edits ------------------------------------------------------------------------------------

    def mkdir(self, path: bytes) -> None:
        self.fileids += 1
        self.clock += 1
        self._put(path, dir_value(self.fileids, self.clock))
        self.children[path] = set()

    def write(self, path: bytes, size: int = 10) -> None:
        self.clock += 1
        old = self.values.get(path)
        if old is None:
            self.fileids += 1
        fileid = self.fileids if old is None else int.from_bytes(old[:8], "little")
        self._put(path, file_value(fileid, size, self.clock))

    def remove(self, path: bytes) -> None:
        """A file, or a directory with all that is in it."""
        self.clock += 1
        tree = path in self.children
        for below in [p for p in self.values if p == path or p.startswith(path + b"/")]:
            del self.values[below]
            self.children.pop(below, None)
        self.children[parent_of(path)].discard(path)
        self._touch(parent_of(path))
        self._push(path)
        if tree and not self.quiet:
            self.pushes.append(DirChange(path, (), True))

    def rename(self, old: bytes, new: bytes) -> None:
        """``new`` must not exist, and not lie below ``old``."""
        self.clock += 1
        moved = [p for p in self.values if p == old or p.startswith(old + b"/")]
        tree = old in self.children
        for path in moved:
            target = new + path[len(old) :]
            self.values[target] = self.values.pop(path)
            if path in self.children:
                kids = self.children.pop(path)
                self.children[target] = {new + k[len(old) :] for k in kids}
        self.children[parent_of(old)].discard(old)
        self.children[parent_of(new)].add(new)
        for changed in (old, new):
            self._touch(parent_of(changed))
            self._push(changed)
            if tree and not self.quiet:
                self.pushes.append(DirChange(changed, (), True))

    def _put(self, path: bytes, value: bytes) -> None:
        new = path not in self.values
        self.values[path] = value
        self.children[parent_of(path)].add(path)
        if new:
            self._touch(parent_of(path))
        self._push(path)

    def _touch(self, directory: bytes) -> None:
        fileid = int.from_bytes(self.values[directory][:8], "little")
        self.values[directory] = dir_value(fileid, self.clock)

    def _push(self, path: bytes) -> None:
        self.pushes.append(DirChange(parent_of(path), (path.rpartition(b"/")[2],)))

    # -- as the namespace sees it -----------------------------------------------------------------

    def listing(self, path: bytes) -> list[tuple[bytes, bytes]]:
        return sorted((p.rpartition(b"/")[2], self.values[p]) for p in self.children[path])

    async def list_dir(self, path: bytes, digest: bytes, after: bytes) -> tuple[ListDirReply, bytes]:
        self._call("list", path)
        code = self._errno(path)
        if code:
            reply: RemoteError | tuple[ListDirReply, bytes] = RemoteError("no", errno=code, path=path)
        else:
            entries = [e for e in self.listing(path) if e[0] > after]
            page = entries[: self.page]
            data = pack_listing(page)
            more = len(entries) > len(page)
            whole = digest_of(data) if not after and not more else b""
            same = bool(digest) and not after and digest == digest_of(pack_listing(entries))
            value = self.values[path]
            if same:
                reply = ListDirReply(path, value, digest, True, False, self.watched), b""
            else:
                reply = ListDirReply(path, value, whole, False, more, self.watched), data
        await self._wait()
        if isinstance(reply, RemoteError):
            raise reply
        return reply

    async def stat(self, paths: Sequence[bytes]) -> list[tuple[int, bytes]]:
        results = []
        for path in paths:
            self._call("stat", path)
            if path in self.refuse:
                results.append((self.refuse[path], b""))
            elif path in self.values:
                results.append((0, self.values[path]))
            else:
                results.append((errno.ENOENT, b""))
        await self._wait()
        return results

    async def list_tree(
        self, path: bytes, known: dict[bytes, bytes], limit: int
    ) -> AsyncIterator[tuple[TreePart | TreeDone, bytes]]:
        self._call("tree", path)
        queue, dirs, entries = deque([path]), 0, 0
        if path not in self.children:
            raise RemoteError("no", errno=errno.ENOENT, path=path)
        while queue and entries < limit:
            at = queue.popleft()
            if at not in self.children:
                continue
            found = self.listing(at)
            data = pack_listing(found)
            digest = digest_of(data)
            same = known.get(at) == digest
            sent = b"" if same else data
            part = TreePart((TreeDir(at, self.values[at], digest, len(sent), same, self.watched),))
            queue.extend(sorted(p for p in self.children[at] if p in self.children))
            dirs, entries = dirs + 1, entries + len(found)
            await self._wait()
            yield part, sent
        await self._wait()
        yield TreeDone(dirs, entries, bool(queue)), b""

    def _errno(self, path: bytes) -> int:
        if path in self.refuse:
            return self.refuse[path]
        if path not in self.values:
            return errno.ENOENT
        return 0 if stat.S_ISDIR(int.from_bytes(self.values[path][40:44], "little")) else errno.ENOTDIR

    def _call(self, what: str, path: bytes) -> None:
        if not self.up:
            raise HubUnreachable("cut", path=path)
        self.calls.append((what, path))

    async def _wait(self) -> None:
        if self.held is not None:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.held.append(turn)
            await turn
        else:
            await asyncio.sleep(0)

    # -- the test's hand --------------------------------------------------------------------------

    def release(self, index: int = 0) -> None:
        """Lets one held reply go."""
        assert self.held is not None
        turn = self.held.pop(index)
        if not turn.done():
            turn.set_result(None)

    def cut(self) -> None:
        """The link goes down: what is held fails."""
        self.up = False
        for turn in self.held or ():
            if not turn.done():
                turn.set_exception(HubUnreachable("cut"))
        if self.held is not None:
            self.held = []

    def take_pushes(self, count: int | None = None) -> list[DirChange]:
        count = len(self.pushes) if count is None else min(count, len(self.pushes))
        return [self.pushes.popleft() for _ in range(count)]
