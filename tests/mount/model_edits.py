"""Changes at the hub, behind farside's back, each told to the history before it is made."""

from __future__ import annotations

import itertools
import os
import random
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.mount.model_content import NOTHING, Content, Found, History, whole

KIB, MIB = 1 << 10, 1 << 20
MAX_FILE = 12 * MIB
TOP = ("a", "b", "c", "d", "e", "f", "g")
BELOW = ("x", "y", "z")
FILES = tuple(f"f{i}" for i in range(9))
MODES = (0o644, 0o600, 0o640, 0o444, 0o755)


class Inode:
    """One file at the hub, with one or more names."""

    __slots__ = ("content", "mode", "number")
    _numbers = itertools.count(1)

    def __init__(self, content: Content, mode: int) -> None:
        self.number = next(Inode._numbers)
        self.content = content
        self.mode = mode

    def found(self, grows_from: int | None = None) -> Found:
        return Found(self.content, stat.S_IFREG | self.mode, grows_from, self.number)


class Editor:
    """The tree at the hub and random changes of it. One thread.

    Names come back: a pool of few names is used over and over, for files and for directories. With
    ``hard_links`` files get second names while they are served, and are written by any of them.
    """

    def __init__(
        self,
        root: Path,
        staging: Path,
        history: History,
        rng: random.Random,
        total_bytes: int,
        hard_links: bool,
    ) -> None:
        self.root, self.staging = root, staging
        self.history = history
        self.rng = rng
        self.total_bytes = total_bytes
        self.files: dict[str, Inode] = {}
        self.dirs: list[str] = []
        self.counts: Counter[str] = Counter()
        staging.mkdir()
        self._staged = 0
        self._edits: list[tuple[int, Callable[[], bool]]] = [
            (20, self.overwrite),
            (16, self.patch),
            (8, self.append),
            (6, self.truncate),
            (20, self.replace),
            (10, self.create),
            (6, self.delete),
            (4, self.rename),
            (4, self.rename_directory),
            (4, self.chmod),
            (6 if hard_links else 0, self.link),
            (1, self.make_directory),
            (1, self.remove_directory),
        ]

    def populate(self) -> None:
        """The tree as it is before the mount."""
        for name in TOP[:5]:
            self._mkdir(name)
        for name in ("a/x", "b/x", "b/y"):
            self._mkdir(name)
        size = 0
        while size < self.total_bytes:
            if self.create():
                size = sum(i.content.size for i in set(self.files.values()))

    def step(self) -> None:
        """One random change, or a burst of changes of one kind."""
        weights = [weight for weight, _ in self._edits]
        _, edit = self.rng.choices(self._edits, weights)[0]
        for _ in range(1 if self.rng.random() < 0.9 else self.rng.randint(2, 6)):
            if edit():
                self.counts[edit.__name__] += 1

    # -- contents ---------------------------------------------------------------------------------

    def overwrite(self) -> bool:
        """All of a file in place, of the same size; often the time of change is put back, too."""
        path = self._file()
        if path is None or not self.files[path].content.size:
            return False
        inode = self.files[path]
        size, generation = inode.content.size, self.history.generation()
        cuts = sorted({0, size, *(self.rng.randrange(size) for _ in range(self.rng.choice((0, 0, 1, 3))))})
        before = os.stat(self.root / path)
        fd = os.open(self.root / path, os.O_WRONLY)
        try:
            for begin, end in itertools.pairwise(cuts):
                self._write(fd, path, inode, begin, end - begin, generation)
            if self.rng.random() < 0.6:
                os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
        finally:
            os.close(fd)
        return True

    def patch(self) -> bool:
        """A few bytes somewhere in a file."""
        path = self._file()
        if path is None or not self.files[path].content.size:
            return False
        inode = self.files[path]
        offset = self.rng.randrange(inode.content.size)
        length = min(self.rng.choice((1, 8, 4 * KIB, 64 * KIB, 300 * KIB)), inode.content.size - offset)
        before = os.stat(self.root / path)
        fd = os.open(self.root / path, os.O_WRONLY)
        try:
            self._write(fd, path, inode, offset, length, self.history.generation())
            if self.rng.random() < 0.5:
                os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
        finally:
            os.close(fd)
        return True

    def append(self) -> bool:
        path = self._file()
        if path is None:
            return False
        inode = self.files[path]
        length = min(self._size() // 4 + 1, MAX_FILE - inode.content.size)
        if length <= 0 or self._room() < length:
            return False
        fd = os.open(self.root / path, os.O_WRONLY)
        try:
            self._write(fd, path, inode, inode.content.size, length, self.history.generation())
        finally:
            os.close(fd)
        return True

    def truncate(self) -> bool:
        path = self._file()
        if path is None:
            return False
        inode = self.files[path]
        size = self.rng.choice((0, self.rng.randint(0, inode.content.size)))
        inode.content = inode.content.truncated(size)
        with self.history.edit(dict.fromkeys(self._names(inode), inode.found()), f"truncate by {path}"):
            os.truncate(self.root / path, size)
        return True

    def replace(self) -> bool:
        """A new file, renamed over an old one; now and then of the old one's size and time of change."""
        path = self._file()
        if path is None:
            return False
        old = self.files[path]
        same = self.rng.random() < 0.5
        size = old.content.size if same else self._size()
        if self._room() < size - old.content.size:
            return False
        inode = Inode(whole(self.history.generation(), size), old.mode if same else self._mode())
        staged = self._stage(inode)
        if same:
            before = os.stat(self.root / path)
            os.utime(staged, ns=(before.st_atime_ns, before.st_mtime_ns))
        with self.history.edit(self._stamped(old) | {path: inode.found()}, f"replace {path}"):
            staged.rename(self.root / path)
        self.files[path] = inode
        return True

    def create(self) -> bool:
        path = self._free_name(self.rng.choice(["", *self.dirs]), FILES)
        size = self._size()
        if path is None or self._room() < size:
            return False
        if self.rng.random() < 0.6:
            inode = Inode(whole(self.history.generation(), size), self._mode())
            staged = self._stage(inode)
            with self.history.edit({path: inode.found()}, "create"):
                staged.rename(self.root / path)
            self.files[path] = inode
            return True
        inode = Inode(Content(), 0o644)
        with self.history.edit({path: inode.found()}, "create"):
            fd = os.open(self.root / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self.files[path] = inode
        try:
            generation = self.history.generation()
            cut = self.rng.randint(0, size)
            for begin, end in ((0, cut), (cut, size)):
                if end > begin:
                    self._write(fd, path, inode, begin, end - begin, generation)
        finally:
            os.close(fd)
        return True

    def delete(self) -> bool:
        path = self._file()
        if path is None or len(self.files) < 12:
            return False
        with self.history.edit(self._stamped(self.files[path]) | {path: NOTHING}, f"delete {path}"):
            os.unlink(self.root / path)
        del self.files[path]
        return True

    # -- names ------------------------------------------------------------------------------------

    def rename(self) -> bool:
        """A file to another name, which may have been somebody else's."""
        path = self._file()
        directory = self.rng.choice(["", *self.dirs])
        new = f"{directory}/{self.rng.choice(FILES)}" if directory else self.rng.choice(FILES)
        if path is None or new == path or self.files.get(new) is self.files[path]:
            return False
        inode = self.files[path]
        changes = self._stamped(inode)
        if new in self.files:
            changes |= self._stamped(self.files[new])
        with self.history.edit(changes | {path: NOTHING, new: inode.found()}, f"rename {path} {new}"):
            os.rename(self.root / path, self.root / new)
        self.files[new] = self.files.pop(path)
        return True

    def link(self) -> bool:
        path = self._file()
        new = self._free_name(self.rng.choice(["", *self.dirs]), FILES)
        if path is None or new is None:
            return False
        inode = self.files[path]
        with self.history.edit(self._stamped(inode) | {new: inode.found()}, f"link {path} {new}"):
            os.link(self.root / path, self.root / new)
        self.files[new] = inode
        return True

    def chmod(self) -> bool:
        path = self._file()
        if path is None:
            return False
        inode = self.files[path]
        inode.mode = self._mode()
        with self.history.edit(dict.fromkeys(self._names(inode), inode.found()), f"chmod by {path}"):
            os.chmod(self.root / path, inode.mode)
        return True

    def rename_directory(self) -> bool:
        """A directory with all below it, to another name beside it or in another directory."""
        old = self.rng.choice(self.dirs)
        parents = ["", *(d for d in self.dirs if "/" not in d and d != old)]
        has_below = any(d.startswith(old + "/") for d in self.dirs)
        parent = "" if has_below or self.rng.random() < 0.6 else self.rng.choice(parents)
        new = self._free_name(parent, BELOW if parent else TOP)
        if new is None:
            return False
        moved = {p: i for p, i in self.files.items() if p.startswith(old + "/")}
        below = [d for d in self.dirs if d == old or d.startswith(old + "/")]
        changes: dict[str, Found] = dict.fromkeys([*moved, *below], NOTHING)
        changes |= {new + p[len(old) :]: i.found() for p, i in moved.items()}
        changes |= {new + d[len(old) :]: _directory() for d in below}
        with self.history.edit(changes, f"rename {old} {new}"):
            os.rename(self.root / old, self.root / new)
        for path, inode in moved.items():
            del self.files[path]
            self.files[new + path[len(old) :]] = inode
        self.dirs = sorted(new + d[len(old) :] if d in below else d for d in self.dirs)
        return True

    def make_directory(self) -> bool:
        parent = self.rng.choice(["", *(d for d in self.dirs if "/" not in d)])
        path = self._free_name(parent, BELOW if parent else TOP)
        if path is not None:
            self._mkdir(path)
        return path is not None

    def remove_directory(self) -> bool:
        empty = [d for d in self.dirs if not any(p.startswith(d + "/") for p in [*self.files, *self.dirs])]
        if not empty:
            return False
        path = self.rng.choice(empty)
        with self.history.edit({path: NOTHING}, "remove_directory"):
            os.rmdir(self.root / path)
        self.dirs.remove(path)
        return True

    # -- parts ------------------------------------------------------------------------------------

    def _write(self, fd: int, path: str, inode: Inode, offset: int, length: int, generation: int) -> None:
        """One write(2): to whoever reads, it has happened or not."""
        old = inode.content.size
        inode.content = inode.content.patched(offset, length, generation)
        grows_from = old if inode.content.size > old else None
        data = inode.content.read(offset, length)
        with self.history.edit(
            dict.fromkeys(self._names(inode), inode.found(grows_from)),
            f"write {length} at {offset} by {path}",
        ):
            assert os.pwrite(fd, data, offset) == length

    def _stage(self, inode: Inode) -> Path:
        self._staged += 1
        path = self.staging / str(self._staged)
        path.write_bytes(inode.content.read(0, inode.content.size))
        path.chmod(inode.mode)
        return path

    def _mkdir(self, path: str) -> None:
        with self.history.edit({path: _directory()}, "_mkdir"):
            os.mkdir(self.root / path, 0o755)
        self.dirs = sorted([*self.dirs, path])

    def _names(self, inode: Inode) -> list[str]:
        return [path for path, other in self.files.items() if other is inode]

    def _stamped(self, inode: Inode) -> dict[str, Found]:
        """The names of a file that gains or loses one: no byte changes, but its ctime, and so its version."""
        return dict.fromkeys(self._names(inode), inode.found())

    def _file(self) -> str | None:
        return self.rng.choice(list(self.files)) if self.files else None

    def _free_name(self, parent: str, names: Sequence[str]) -> str | None:
        paths = [f"{parent}/{name}" if parent else name for name in names]
        free = [p for p in paths if p not in self.files and p not in self.dirs]
        return self.rng.choice(free) if free else None

    def _room(self) -> int:
        return self.total_bytes * 5 // 4 - sum(i.content.size for i in set(self.files.values()))

    def _mode(self) -> int:
        return self.rng.choice(MODES)

    def _size(self) -> int:
        kind = self.rng.random()
        if kind < 0.05:
            return 0
        if kind < 0.45:
            return self.rng.randint(1, 200 * KIB)
        if kind < 0.9:
            return self.rng.randint(64 * KIB, 2 * MIB)
        return self.rng.randint(2 * MIB, 10 * MIB)


def _directory() -> Found:
    return Found(None, stat.S_IFDIR | 0o755)
