"""The model test: a real fabric that is read, changed and maltreated at random, judged by a plain copy.

Reader processes read through the mount by every way there is; an editor changes files at the hub; chaos
cuts the link, kills and remounts, evicts and damages the cache. See ``model_judge.py`` for what counts as
wrong. At the end everything is made whole, and the mount must show exactly what the hub has.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import select
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mount import model_reader
from tests.mount.model_chaos import Chaos
from tests.mount.model_content import History
from tests.mount.model_edits import Editor
from tests.mount.model_judge import Handle, Judge

from farside.bench.link import ProxyLink
from farside.bench.netlink import Shape
from farside.bench.stack import Stack
from farside.fuse import cleanup_stale

MIB = 1 << 20
TIMEOUT_S = 3.0
HANG_S = 60.0
"""An operation that takes longer hangs: it is a few waits of ``--timeout`` each, on a busy machine."""

KILL_S = 15.0
CHECK_S = 120.0
PROGRESS_S = 10.0
MAX_HANDLES = 6
BLOCKS = (4096, 16384, 131072, MIB)
EXTRA_BYTES = 65536


class Hang(Exception):
    """A reader did not answer in time."""


class ReaderProcess:
    """One process of ``model_reader.py``; every wait for it is bounded."""

    def __init__(self, root: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", str(Path(model_reader.__file__)), str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            bufsize=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._out, self._in = self._process.stdin, self._process.stdout
        fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, MIB)

    def send(self, op: str, /, **arguments: Any) -> None:
        self._out.write(json.dumps({"op": op, **arguments}).encode() + b"\n")

    def ask(self, op: str, /, **arguments: Any) -> tuple[dict[str, Any], bytes]:
        """One operation. Raises Hang, or RuntimeError when the process died."""
        self.send(op, **arguments)
        deadline = time.monotonic() + HANG_S
        received = bytearray()
        while (end := received.find(b"\n")) < 0:
            received += self._some(deadline)
        head = json.loads(received[:end])
        del received[: end + 1]
        while len(received) < head["size"]:
            received += self._some(deadline)
        return head, bytes(received)

    def _some(self, deadline: float) -> bytes:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([self._in], [], [], left)[0]:
            raise Hang
        data = os.read(self._in.fileno(), MIB)
        if not data:
            raise RuntimeError(f"a reader died: exit code {self._process.wait(KILL_S)}")
        return data

    def kill(self) -> bool:
        """False when it cannot be killed."""
        self._process.kill()
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            return False
        self._out.close()
        self._in.close()
        return True


class ReaderLoop:
    """Random reads by one process, each judged. Runs in one thread of the test's process."""

    def __init__(self, root: Path, history: History, judge: Judge, rng: random.Random) -> None:
        self.root = root
        self.history, self.judge = history, judge
        self.rng = rng
        self.counts: Counter[str] = Counter()
        self.slowest: tuple[float, str] = (0.0, "")
        self._process = ReaderProcess(root)
        self._handles: dict[int, tuple[Handle, bool]] = {}
        self._slot = 0
        self._ways: list[tuple[float, Callable[[], None]]] = [
            (40, self.pread),
            (16, self.open),
            (8, self.close),
            (14, self.read),
            (5, self.map),
            (10, self.stat),
            (6, self.list_names),
            (0.3, self.kill),
        ]

    def run(self, stop: threading.Event) -> None:
        weights = [weight for weight, _ in self._ways]
        while not stop.is_set():
            _, way = self.rng.choices(self._ways, weights)[0]
            self.counts[way.__name__] += 1
            try:
                way()
            except Hang:
                self.judge.failed(f"{way.__name__} did not end within {HANG_S} s")
                self._renew()
            except (RuntimeError, OSError) as error:
                self.judge.failed(f"{way.__name__}: {error}")
                self._renew()
            stop.wait(self.rng.expovariate(500))
        if not self._process.kill():
            self.judge.failed("a reader could not be killed at the end")

    def check_all(self) -> None:
        """What the mount shows of every path that ever was, now that nothing changes any more."""
        deadline = time.monotonic() + CHECK_S
        for path in self.history.paths():
            if time.monotonic() > deadline:
                self.judge.failed(f"not all could be looked at within {CHECK_S} s at the end")
                return
            self._stat(path)
            if self.history.all_states(path)[-1].found.content is not None:
                self._read(path, MIB)
        for directory in self._directories():
            self._list(directory)

    # -- the ways of reading ----------------------------------------------------------------------

    def open(self) -> None:
        if len(self._handles) >= MAX_HANDLES:
            self.close()
        path, slot, direct = self._path(), self._slot, self.rng.random() < 0.15
        self._slot += 1
        head, _ = self._ask(path, "open", path=path, slot=slot, direct=direct)
        if head["errno"]:
            self.judge.error(path, head["errno"], head["began"], head["ended"])
            return
        handle = self.judge.opened(path, head["began"], head["ended"], head["st_size"])
        if handle is None:
            self._ask(path, "close", slot=slot)
        else:
            handle.how = " (direct)" if direct else " (kept open)"
            self._handles[slot] = (handle, direct)

    def pread(self) -> None:
        if not self._handles:
            self.open()
            return
        slot = self.rng.choice(list(self._handles))
        handle, direct = self._handles[slot]
        offset, length = self._range(handle.size)
        op = "pread"
        if direct:
            align = model_reader.DIRECT_ALIGN
            op, offset, length = "pread_direct", offset // align * align, -(-length // align) * align
        head, data = self._ask(handle.path, op, slot=slot, offset=offset, length=length)
        right = self.judge.data(handle, offset, length, data, head["eof"], head["began"], head["ended"])
        if head["errno"]:
            self.judge.error(handle.path, head["errno"], head["began"], head["ended"], handle.began)
        if not right or head["errno"] in (errno.ENOTCONN, errno.ECONNABORTED):
            self._close(slot)

    def close(self) -> None:
        if self._handles:
            self._close(self.rng.choice(list(self._handles)))

    def read(self) -> None:
        self._read(self._path(), self.rng.choice(BLOCKS))

    def map(self) -> None:
        path = self._path()
        size = next(
            (s.found.content.size for s in reversed(self.history.all_states(path)) if s.found.content), 0
        )
        slices = [self._range(size) for _ in range(self.rng.randint(2, 6))]
        hold_s = self.rng.choice((0.0, 0.0, 0.3, 3.0))
        head, data = self._ask(path, "map", path=path, slices=slices, hold_s=hold_s)
        if "st_size" in head:
            handle = self.judge.opened(path, head["began"], head["opened"], head["st_size"])
            at = 0
            for (offset, length), size in zip(slices, head["sizes"], strict=False):
                if handle is not None:
                    part = data[at : at + size]
                    eof, began, ended = size < length, head["began"], head["ended"]
                    handle.how = f" (mapping {slices}, pause {hold_s} s)"
                    if not self.judge.data(handle, offset, length, part, eof, began, ended):
                        break
                at += size
        if head["errno"]:
            since = head["began"] if "st_size" in head else None
            self.judge.error(path, head["errno"], head["began"], head["ended"], since)

    def stat(self) -> None:
        self._stat(self._path())

    def list_names(self) -> None:
        self._list(self.rng.choice(self._directories()))

    def kill(self) -> None:
        """The process is killed in the middle of a read: that must always work."""
        self._process.send("read", path=self._path(), block=self.rng.choice(BLOCKS))
        time.sleep(self.rng.uniform(0, 0.05))
        self._renew()

    # -- parts ------------------------------------------------------------------------------------

    def _ask(self, path: str, op: str, /, **arguments: Any) -> tuple[dict[str, Any], bytes]:
        head, data = self._process.ask(op, **arguments)
        took = head["ended"] - head["began"] - arguments.get("hold_s", 0.0)
        self.slowest = max(self.slowest, (took, f"{op} {path} {arguments}, errno {head['errno']}"))
        return head, data

    def _read(self, path: str, block: int) -> None:
        head, data = self._ask(path, "read", path=path, block=block)
        if "st_size" in head:
            handle = self.judge.opened(path, head["began"], head["ended"], head["st_size"])
            if handle is not None:
                extra = EXTRA_BYTES if head["eof"] else 0  # it must end where its size says
                self.judge.data(handle, 0, len(data) + extra, data, head["eof"], head["began"], head["ended"])
        if head["errno"]:
            since = head["began"] if "st_size" in head else None
            self.judge.error(path, head["errno"], head["began"], head["ended"], since)

    def _stat(self, path: str) -> None:
        head, _ = self._ask(path, "stat", path=path)
        if head["errno"]:
            self.judge.error(path, head["errno"], head["began"], head["ended"])
        else:
            self.judge.stat(path, head["began"], head["ended"], head["st_size"], head["mode"])

    def _list(self, directory: str) -> None:
        head, _ = self._ask(directory, "list", path=directory)
        if head["errno"]:
            if directory:
                self.judge.error(directory, head["errno"], head["began"], head["ended"])
            elif not self.history.touched(self.history.remounts, head["began"], head["ended"]):
                self.judge.failed(f"the root cannot be listed: errno {head['errno']}")
        else:
            self.judge.listing(directory, head["began"], head["ended"], head["names"])

    def _close(self, slot: int) -> None:
        handle, _ = self._handles.pop(slot)
        self._ask(handle.path, "close", slot=slot)

    def _renew(self) -> None:
        if not self._process.kill():
            self.judge.failed("a reader could not be killed")
        self._handles.clear()
        self._process = ReaderProcess(self.root)

    def _path(self) -> str:
        """Mostly one that is there now."""
        paths = self.history.paths()
        for _ in range(20):
            path = self.rng.choice(paths)
            found = self.history.all_states(path)[-1].found
            if found.content is not None or (not found.exists and self.rng.random() < 0.05):
                return path
        return "never"

    def _directories(self) -> list[str]:
        """Those that are there now, and the root."""
        states = [(p, self.history.all_states(p)[-1].found) for p in self.history.paths()]
        return ["", *(p for p, found in states if found.exists and found.content is None)]

    def _range(self, size: int) -> tuple[int, int]:
        offset = self.rng.choice(
            (0, self.rng.randint(0, size), self.rng.randint(0, size), max(0, size - 5000))
        )
        return offset, int(2 ** self.rng.uniform(0, 20.5))


@dataclass
class Report:
    """What a run found. ``operations``, ``edits`` and ``events`` count by kind."""

    seed: int
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    needless: list[str] = field(default_factory=list)
    operations: Counter[str] = field(default_factory=Counter)
    edits: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    reads: int = 0
    read_bytes: int = 0
    slowest: tuple[float, str] = (0.0, "")
    corrupt_chunks: int = 0
    evicted_bytes: int = 0
    link_bytes: int = 0

    def line(self) -> str:
        """The state of the run in one line."""
        return (
            f"{self.seconds:6.0f} s  {self.operations.total()} operations  {self.reads} reads judged  "
            f"{self.read_bytes / 1e6:.0f} MB  {self.edits.total()} edits  {self.events.total()} events  "
            f"{self.errors.total()} errors told  {len(self.needless)} needless  "
            f"{len(self.failures)} failures  {len(self.wrong)} WRONG"
        )

    def text(self, limit: int = 10) -> str:
        """All of it, for a log."""
        lines = [f"seed {self.seed}", self.line()]
        for name in ("operations", "edits", "events", "errors"):
            lines.append(f"{name}: {dict(getattr(self, name))}")
        lines.append(
            f"corrupt chunks found {self.corrupt_chunks}, evicted {self.evicted_bytes / 1e6:.0f} MB, "
            f"over the link {self.link_bytes / 1e6:.0f} MB"
        )
        lines.append(f"slowest operation {self.slowest[0]:.1f} s: {self.slowest[1]}")
        for name in ("wrong", "failures", "needless"):
            found: list[str] = getattr(self, name)
            lines += [f"{name}: {text}" for text in found[:limit]]
            if len(found) > limit:
                lines.append(f"… and {len(found) - limit} more {name}")
        return "\n".join(lines)


class Model:
    """One run. Everything lies in ``work``, which it makes."""

    def __init__(
        self,
        work: Path,
        seed: int,
        *,
        readers: int = 3,
        data_bytes: int = 64 * MIB,
        cache_size: int = 24 * MIB,
        rtt_ms: float = 4.0,
        edits_per_s: float = 8.0,
        calm_s: float = 2.0,
        hard_links: bool = True,
    ) -> None:
        work.mkdir(parents=True)
        data = work / "data"
        data.mkdir()
        rng = random.Random(seed)
        self.report = Report(seed)
        self.work = work
        self._edits_per_s, self._calm_s = edits_per_s, calm_s
        self._oversleeps: deque[float] = deque(maxlen=200)
        self.history = History(rtt_ms / 1e3, lambda: max(self._oversleeps, default=0.0))
        self.judge = Judge(self.history)
        editing = random.Random(rng.random())
        self.editor = Editor(data, work / "staging", self.history, editing, data_bytes, hard_links)
        self.editor.populate()
        self._rng = rng
        self.link = ProxyLink(Shape(rtt=rtt_ms), work)
        try:
            self.stack = Stack(work, data, self.link, tls=False)
        except BaseException:
            self.link.close()
            raise
        options = ("--timeout", f"{TIMEOUT_S:g}s")
        self.chaos = Chaos(
            self.stack, self.link, self.history, self.judge, random.Random(rng.random()), options, cache_size
        )
        self.loops: list[ReaderLoop] = []
        self._readers = readers

    def run(self, seconds: float, progress: Callable[[Report], None] = lambda report: None) -> Report:
        """Run for ``seconds``, then check that all is as at the hub. ``progress`` is called every 10 s."""
        begun = time.monotonic()
        self.chaos.mount()
        mnt = self.stack.mountpoint
        self.loops = [
            ReaderLoop(mnt, self.history, self.judge, random.Random(self._rng.random()))
            for _ in range(self._readers)
        ]
        readers_stop = threading.Event()
        readers = [
            threading.Thread(
                target=self._guarded, args=(lambda one=loop: one.run(readers_stop),), daemon=True
            )
            for loop in self.loops
        ]
        others = [
            threading.Thread(target=self._guarded, args=(work,), daemon=True)
            for work in (self._edit, self._measure_lag, lambda: self._tell(begun, seconds, progress))
        ]
        for thread in (*readers, *others):
            thread.start()
        self._guarded(self._befall)  # in this thread: the hub that it starts dies with the starting thread
        for thread in others:
            self._join(thread)
        readers_stop.set()
        for thread in readers:
            self._join(thread)
        self._guarded(self._converge)
        self._guarded(self.chaos.finish)
        return self._sum_up(begun)

    def _tell(self, begun: float, seconds: float, progress: Callable[[Report], None]) -> None:
        """Say how far the run is, and end it."""
        end = begun + seconds
        while (left := end - time.monotonic()) > 0 and not self.chaos.stop.wait(min(left, PROGRESS_S)):
            progress(self._sum_up(begun))
        self.chaos.stop.set()

    def _join(self, thread: threading.Thread) -> None:
        thread.join(2 * HANG_S)
        if thread.is_alive():
            self.judge.failed("a part of the test did not end")

    def _converge(self) -> None:
        """Nothing changes, the link is whole: after a while the mount shows exactly what the hub has."""
        self.chaos.wait_up()
        time.sleep(self.history.staleness_s)
        self.history.outages.clear()
        loop = ReaderLoop(self.stack.mountpoint, self.history, self.judge, random.Random(0))
        self.loops.append(loop)
        loop.check_all()
        stop = threading.Event()
        stop.set()
        loop.run(stop)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            import traceback

            self.judge.failed(f"a part of the test ended early: {error!r}\n{traceback.format_exc()}")

    def _edit(self) -> None:
        while not self.chaos.stop.wait(self.editor.rng.expovariate(self._edits_per_s)):
            self.editor.step()

    def _befall(self) -> None:
        while not self.chaos.stop.wait(self.chaos.rng.expovariate(1 / self._calm_s)):
            self.chaos.step()

    def _measure_lag(self) -> None:
        while not self.chaos.stop.is_set():
            begun = time.monotonic()
            time.sleep(0.05)
            self._oversleeps.append(time.monotonic() - begun - 0.05)

    def _sum_up(self, begun: float) -> Report:
        report, judge, chaos = self.report, self.judge, self.chaos
        report.seconds = time.monotonic() - begun
        report.wrong, report.failures, report.needless = judge.wrong, judge.failures, judge.needless
        report.operations = sum((loop.counts for loop in self.loops), Counter())
        report.edits, report.events, report.errors = self.editor.counts, chaos.counts, judge.errors
        report.reads, report.read_bytes = judge.reads, judge.bytes
        report.slowest = max(loop.slowest for loop in self.loops)
        report.corrupt_chunks, report.evicted_bytes = chaos.corrupt_chunks, chaos.evicted_bytes
        report.link_bytes = chaos.link_bytes
        return report

    def close(self) -> None:
        self.stack.close()
        self.link.close()
        cleanup_stale(str(self.stack.mountpoint))
