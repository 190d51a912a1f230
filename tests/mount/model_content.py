"""The plain copy that reads are judged by: what every file held, and when.

Every byte of the model is a pure function of (generation, offset in the file), never zero for long, so that
any bytes that are read can be told to be of this or that generation. A content is made of pieces of
generations: an edit in place puts a piece of a new one into an old one.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_WORDS = (1 << 17) - 1  # odd: no shift by pages or chunks maps the sequence to itself
_POOL = np.random.default_rng(0xFA51DE).integers(1, 1 << 63, _WORDS, dtype=np.uint64)
_MASK = (1 << 64) - 1

STALENESS_S = 2.0
"""docs/semantics.md: a change is seen within 2 s plus one round trip."""

GRACE_S = 0.5
"""On top of it, beside twice what this machine was seen to let a process wait."""


def _key(generation: int) -> int:
    z = (generation * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def generated(generation: int, offset: int, size: int) -> bytes:
    """``size`` bytes at ``offset`` of a generation."""
    if size <= 0:
        return b""
    first, end = offset // 8, -(-(offset + size) // 8)
    out = np.empty(end - first, dtype=np.uint64)
    key = _key(generation)
    at, pos, key_word = 0, (first + key) % _WORDS, np.uint64(key)
    while at < len(out):
        count = min(len(out) - at, _WORDS - pos)
        np.bitwise_xor(_POOL[pos : pos + count], key_word, out=out[at : at + count])
        at, pos = at + count, 0
    skip = offset - first * 8
    return out.tobytes()[skip : skip + size]


@dataclass(frozen=True)
class Content:
    """What one version of a file holds: pieces (end offset, generation), in order."""

    pieces: tuple[tuple[int, int], ...] = ()

    @property
    def size(self) -> int:
        return self.pieces[-1][0] if self.pieces else 0

    def read(self, offset: int, size: int) -> bytes:
        parts, start = [], 0
        for end, generation in self.pieces:
            low, high = max(start, offset), min(end, offset + size)
            if low < high:
                parts.append(generated(generation, low, high - low))
            start = end
        return b"".join(parts)

    def truncated(self, size: int) -> Content:
        kept, start = [], 0
        for end, generation in self.pieces:
            if start < size:
                kept.append((min(end, size), generation))
            start = end
        return Content(tuple(kept))

    def patched(self, offset: int, length: int, generation: int) -> Content:
        """``length`` bytes of ``generation`` laid over it at ``offset`` (at most its size: no holes)."""
        pieces = list(self.truncated(offset).pieces)
        pieces.append((offset + length, generation))
        pieces += [(end, g) for end, g in self.pieces if end > offset + length]
        return Content(tuple(pieces))


def whole(generation: int, size: int) -> Content:
    return Content(((size, generation),) if size else ())


class Found(NamedTuple):
    """What a path is: ``content`` of a file, None of a directory or of nothing; ``mode`` 0 for nothing.

    ``grows_from``: while the edit that makes it goes on, the source itself shows sizes from here on.
    ``inode`` tells the files of one name, and the names of one file, apart.
    """

    content: Content | None = None
    mode: int = 0
    grows_from: int | None = None
    inode: int = 0

    @property
    def exists(self) -> bool:
        return self.mode != 0


NOTHING = Found()


class State:
    """What a path was from ``since`` (its edit began) to ``until`` (the next edit had ended); monotonic s.

    ``done`` is when its own edit had ended, ``why`` what it was.
    """

    __slots__ = ("done", "found", "since", "until", "why")

    def __init__(self, found: Found, since: float, done: float, why: str = "") -> None:
        self.found = found
        self.why = why
        self.since = since
        self.done = done
        self.until = math.inf


class Span:
    """A time in which something was amiss, monotonic s; ``end`` is infinite while it lasts."""

    __slots__ = ("begin", "end")

    def __init__(self, begin: float) -> None:
        self.begin = begin
        self.end = math.inf

    def touches(self, begin: float, end: float) -> bool:
        return self.begin <= end and self.end >= begin


class Window(NamedTuple):
    """From when to when a state counts as current for somebody, monotonic s."""

    begin: float
    end: float


class History:
    """Every state that every path at the hub ever had, and the times of trouble. Any thread may ask.

    Attributes:
        outages: times in which the link was not whole, until it had healed.
        remounts: times in which the mount was not there.
        events: what befell the fabric (begin, end, name).
    """

    def __init__(self, rtt_s: float, lag_s: Callable[[], float] = lambda: 0.0) -> None:
        self._rtt_s = rtt_s
        self._lag_s = lag_s
        self._lock = threading.Lock()
        self._paths: dict[str, list[State]] = {}
        self._inodes: dict[int, list[State]] = {}
        self.outages: list[Span] = []
        self.remounts: list[Span] = []
        self.events: list[tuple[float, float, str]] = []
        self.generations = 0

    @property
    def staleness_s(self) -> float:
        return STALENESS_S + self._rtt_s + GRACE_S + 2 * self._lag_s()

    def generation(self) -> int:
        """A new generation's number."""
        self.generations += 1
        return self.generations

    @contextmanager
    def edit(self, changes: Mapping[str, Found], why: str = "") -> Iterator[None]:
        """The body makes ``changes`` at the hub. During it, old and new count as current."""
        begun = time.monotonic()
        ended, fresh = [], []
        with self._lock:
            for path, found in changes.items():
                states = self._paths.setdefault(path, [State(NOTHING, -math.inf, -math.inf)])
                ended.append(states[-1])
                states.append(State(found, begun, math.inf, why))
                fresh.append(states[-1])
                if found.inode:
                    self._inodes.setdefault(found.inode, []).append(states[-1])
        yield
        with self._lock:
            now = time.monotonic()
            for state in ended:
                state.until = now
            for state in fresh:
                state.done = now

    @contextmanager
    def trouble(self, spans: list[Span]) -> Iterator[Span]:
        """The body is a time of trouble; it may set the span's end itself."""
        span = Span(time.monotonic())
        spans.append(span)
        yield span
        if span.end == math.inf:
            span.end = time.monotonic()

    def window(self, begun: float, ended: float) -> Window:
        """What may count as current for what was asked from ``begun`` to ``ended``."""
        bound = self.staleness_s
        begin = begun - bound
        for span in reversed(list(self.outages)):
            if span.touches(begin, ended):
                begin = min(begin, span.begin - bound)
        return Window(begin, ended)

    def states(self, path: str, window: Window) -> list[State]:
        """What a path was at some moment of a window, oldest first."""
        with self._lock:
            states = self._paths.get(path)
            if states is None:
                return [State(NOTHING, -math.inf, -math.inf)]
            return [s for s in states if s.since <= window.end and s.until >= window.begin]

    def all_states(self, path: str) -> list[State]:
        with self._lock:
            return list(self._paths.get(path, ()))

    def later(self, inode: int, begin: float, end: float) -> list[State]:
        """What the file itself became from ``begin`` to ``end``, under whatever name."""
        with self._lock:
            return [s for s in self._inodes.get(inode, ()) if begin <= s.since <= end]

    def paths(self) -> list[str]:
        """Every path that ever was."""
        with self._lock:
            return list(self._paths)

    def names(self, directory: str) -> list[str]:
        """Every path that ever was in a directory ("" is the root)."""
        prefix = directory + "/" if directory else ""
        with self._lock:
            return [p for p in self._paths if p.startswith(prefix) and "/" not in p[len(prefix) :]]

    def touched(self, spans: list[Span], begin: float, end: float) -> bool:
        return any(span.touches(begin, end) for span in reversed(list(spans)))
