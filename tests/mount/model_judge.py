"""Judges what a reader of the mount was told, by the plain copy.

*Wrong* is what must never be: bytes, sizes, names or attributes that no version that may count as current
had, two versions mixed in one handle, "no such file" for a file that is there. *Needless* is an error that
nothing explains: no change, no outage, no remount.
"""

from __future__ import annotations

import errno
import stat
import threading
from collections import Counter
from dataclasses import dataclass, field

from tests.mount.model_content import Content, History, State, Window, generated

ERRORS_OF_THE_LINK = (errno.EIO, errno.ETIMEDOUT)
ERRORS_OF_A_MOUNT_THAT_GOES = (errno.ENOTCONN, errno.ECONNABORTED, errno.EINTR, errno.EIO, errno.ESTALE)
EXPLAINED_FOR_S = 10.0
"""So long after an outage or a remount an error may still come of it (requests wait for ``--timeout``)."""

MAX_KEPT = 40


@dataclass
class Handle:
    """One open handle: the contents that it may have, fewer with each read.

    Before its first read it may still follow its file to newer versions of the same size.
    """

    path: str
    began: float
    ended: float
    candidates: list[Content]
    size: int
    inodes: set[int]
    read: bool = False
    how: str = ""
    seen: list[str] = field(default_factory=list)


class Judge:
    """Any thread may call it.

    Attributes:
        wrong, needless: one text each.
        failures: hangs, unmounts that failed, and what else must not be.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self.wrong: list[str] = []
        self.needless: list[str] = []
        self.failures: list[str] = []
        self.errors: Counter[str] = Counter()
        self.reads = 0
        self.bytes = 0
        self._lock = threading.Lock()

    # -- contents ---------------------------------------------------------------------------------

    def opened(self, path: str, began: float, ended: float, size: int) -> Handle | None:
        """A file was opened and said its size; None when no version may have been that."""
        window = self.history.window(began, ended)
        states = self.history.states(path, window)
        candidates: list[Content] = []
        for state in states:
            content, grows_from = state.found.content, state.found.grows_from
            if content is None:
                continue
            if size != content.size:
                growing = grows_from is not None and state.done >= window.begin
                if not (growing and grows_from is not None and grows_from <= size < content.size):
                    continue
                content = content.truncated(size)
            if content not in candidates:
                candidates.append(content)
        if candidates:
            return Handle(path, began, ended, candidates, size, {s.found.inode for s in states})
        self._wrong("size", path, f"opened with {size} bytes", window, states)
        return None

    def data(
        self, handle: Handle, offset: int, asked: int, data: bytes, eof: bool, began: float, ended: float
    ) -> bool:
        """``data`` came of ``asked`` bytes at ``offset``; fewer at the end (``eof``) or before an error."""
        with self._lock:
            self.reads += 1
            self.bytes += len(data)
        if data and not handle.read:
            handle.read = True
            for inode in handle.inodes:
                for state in self.history.later(inode, handle.ended, ended):
                    content = state.found.content
                    if content is not None and content.size == handle.size:
                        handle.candidates.append(content)
        left = [c for c in handle.candidates if _agrees(c, offset, asked, data, eof)]
        note = f"{len(data)} of {asked} at {offset}{' (end)' if eof else ''}"
        if left:
            handle.candidates = left
            if len(handle.seen) < MAX_KEPT:
                handle.seen.append(note)
            return True
        window = self.history.window(handle.began, handle.ended)
        text = (
            f"read {note} from {began:.3f} to {ended:.3f} after {handle.seen[-3:]} of a handle{handle.how} "
            f"of {handle.size} bytes opened at {handle.began:.3f}: {self._describe(handle, offset, data)}"
        )
        self._wrong("bytes", handle.path, text, window, self.history.states(handle.path, window))
        return False

    # -- names ------------------------------------------------------------------------------------

    def stat(self, path: str, began: float, ended: float, size: int, mode: int) -> None:
        """``lstat`` answered; the sizes of directories are not judged."""
        window = self.history.window(began, ended)
        states = self.history.states(path, window)
        for state in states:
            found = state.found
            if found.mode != mode:
                continue
            if stat.S_ISDIR(mode) or (found.content is not None and found.content.size == size):
                return
            growing = found.grows_from is not None and state.done >= window.begin
            if (
                growing
                and found.content is not None
                and (found.grows_from or 0) <= size <= found.content.size
            ):
                return
        self._wrong("attributes", path, f"size {size}, mode {mode:o}", window, states)

    def listing(self, directory: str, began: float, ended: float, names: list[str]) -> None:
        window = self.history.window(began, ended)
        listed = {f"{directory}/{name}" if directory else name for name in names}
        if len(listed) != len(names):
            self._fail(f"{directory!r} lists a name twice: {sorted(names)}")
        if self.history.touched(self.history.remounts, began, ended):
            return
        for path in listed.union(self.history.names(directory)):
            states = self.history.states(path, window)
            if path in listed and not any(s.found.exists for s in states):
                self._wrong("name", path, "listed, but was not there", window, states)
            elif path not in listed and all(s.found.exists for s in states):
                self._wrong("name", path, "not listed, but was there", window, states)

    # -- errors -----------------------------------------------------------------------------------

    def error(self, path: str, number: int, began: float, ended: float, since: float | None = None) -> None:
        """An operation failed. ``since``: when its handle was opened."""
        self.errors[errno.errorcode.get(number, str(number))] += 1
        history = self.history
        window = history.window(began if since is None else since, ended)
        states = history.states(path, window)
        begin = began if since is None else since
        going = (*ERRORS_OF_A_MOUNT_THAT_GOES, *ERRORS_OF_THE_LINK, errno.ENOENT)
        if number in going and history.touched(history.remounts, begin, ended):
            return
        if number == errno.ENOENT and since is None:
            if all(s.found.exists for s in states):
                self._wrong("absence", path, "no such file", window, states)
            return
        if number == errno.ESTALE and (len(states) > 1 or self._outage(began, ended)):
            return
        if number in ERRORS_OF_THE_LINK and self._outage(began, ended):
            return
        text = f"{errno.errorcode.get(number, number)}{'' if since is None else ' of an open handle'}"
        if number in (*ERRORS_OF_THE_LINK, errno.ESTALE):
            with self._lock:
                self.needless.append(f"{path}: {self._text(text, began, ended, window, states)}")
        else:
            self._fail(f"{path}: unexpected {self._text(text, began, ended, window, states)}")

    def failed(self, what: str) -> None:
        """Something else that must not be."""
        self._fail(what)

    def _outage(self, began: float, ended: float) -> bool:
        history, begin = self.history, began - EXPLAINED_FOR_S
        return history.touched(history.outages, begin, ended) or history.touched(
            history.remounts, begin, ended
        )

    # -- words ------------------------------------------------------------------------------------

    def _wrong(self, kind: str, path: str, text: str, window: Window, states: list[State]) -> None:
        with self._lock:
            self.wrong.append(f"wrong {kind}: {path}: {self._text(text, *window, window, states)}")

    def _fail(self, text: str) -> None:
        with self._lock:
            self.failures.append(text)

    def _text(self, text: str, began: float, ended: float, window: Window, states: list[State]) -> str:
        told = "; ".join(_state(s) for s in states[-8:])
        for begin, end, name in self.history.events[-20:]:
            if end >= window.begin - 10 and begin <= window.end:
                told += f"; {name} {begin:.3f}–{end:.3f}"
        counted = f"counts from {window.begin:.3f} to {window.end:.3f}: {told}"
        return f"{text} [{began:.3f}–{ended:.3f}; {counted}]"

    def _describe(self, handle: Handle, offset: int, data: bytes) -> str:
        """Where the bytes leave each candidate, and whose they are there."""
        told: list[str] = []
        for content in handle.candidates[-3:]:
            wanted = content.read(offset, len(data))
            if data == wanted[: len(data)]:
                told.append(f"right as far as it goes, but {content.size} bytes are there")
                continue
            at = next((i for i, (a, b) in enumerate(zip(data, wanted, strict=False)) if a != b), len(wanted))
            told.append(
                f"differs from byte {offset + at} on: {self._owner(handle.path, offset + at, data[at:])}"
            )
        return "; ".join(told) + f"; candidates {handle.candidates[-3:]}"

    def _owner(self, path: str, offset: int, data: bytes) -> str:
        size = min(64, len(data))
        sample = data[:size]
        if not sample.strip(b"\0"):
            return f"zeros ({len(data) - len(data.lstrip(bytes(1)))} of them)"
        for state in reversed(self.history.all_states(path)):
            content = state.found.content
            if content is not None and content.read(offset, size) == sample:
                return f"of the file as it was: {_state(state)}"
        for generation in range(1, self.history.generations + 1):
            if generated(generation, offset, min(8, size)) == sample[:8]:
                return f"of generation {generation} at the same offset"
        return f"of nothing known: {sample[:16].hex()}"


def _agrees(content: Content, offset: int, asked: int, data: bytes, eof: bool) -> bool:
    there = max(0, min(asked, content.size - offset))
    if len(data) > there or (eof and len(data) != there):
        return False
    return content.read(offset, len(data)) == data


def _state(state: State) -> str:
    found = state.found
    what = "nothing" if not found.exists else f"{found.mode:o}"
    if found.content is not None:
        what += f" {found.content.size} bytes {found.content.pieces[-4:]}"
    return f"{state.since:.3f}–{state.until:.3f} {what} ({state.why})"
