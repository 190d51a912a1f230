"""What befalls the fabric while it is read: cuts, restarts, crashes, evictions, a damaged cache disk."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.mount.model_content import History
from tests.mount.model_judge import Judge

from farside.bench.link import ProxyLink
from farside.bench.stack import Stack, is_mounted
from farside.cli.control_client import RequestFailed, call
from farside.config import control_socket
from farside.errors import FarsideError
from farside.fuse import cleanup_stale

HEAL_S = 25.0
"""After the link's return the mount must be up again within it ("seconds", on a busy machine)."""

SETTLE_S = 4.0
"""What a healed link may still need to notice that it was broken, and to confirm names anew."""

NOTICE_S = 6.0
"""A cut link that counts as up still may not have been noticed before half a lease has gone by."""

CHUNK = 64 << 10


class Chaos:
    """One event at a time, from a shuffled deck, so that a short run has each of them. One thread."""

    def __init__(
        self,
        stack: Stack,
        link: ProxyLink,
        history: History,
        judge: Judge,
        rng: random.Random,
        mount_options: tuple[str, ...],
        cache_size: int,
    ) -> None:
        self.stack, self.link = stack, link
        self.history, self.judge = history, judge
        self.rng = rng
        self.cache_size = cache_size
        self.counts: Counter[str] = Counter()
        self.stop = threading.Event()
        self.corrupt_chunks = self.evicted_bytes = self.link_bytes = 0
        self._options = mount_options
        self._deck: list[Callable[[], None]] = []
        self._address = control_socket(stack.mountpoint)

    def mount(self) -> None:
        self.stack.mount(self.cache_size, *self._options)

    def step(self) -> None:
        """The next event. An exception of the product's is a failure of the run."""
        if not self._deck:
            self._deck = [
                self.cut,
                self.cut_briefly,
                self.reset,
                self.refuse,
                self.restart_hub,
                self.remount,
                self.damage,
                self.crash,
                self.crash_and_damage,
                *[self.evict] * 4,
                *[self.warm] * 3,
                self.pin,
                self.unpin,
            ]
            self.rng.shuffle(self._deck)
        event = self._deck.pop()
        self.counts[event.__name__] += 1
        begun = time.monotonic()
        try:
            event()
        except (FarsideError, OSError, subprocess.SubprocessError) as error:
            self.judge.failed(f"{event.__name__} failed: {error}\n{self.stack.logs()}")
            self._recover()
        self.history.events.append((begun, time.monotonic(), event.__name__))

    def _recover(self) -> None:
        """After a failure: a mount that answers, whatever it takes, so that the run can go on."""
        try:
            self.status()
        except FarsideError:
            with self.history.trouble(self.history.remounts):
                cleanup_stale(str(self.stack.mountpoint))
                if is_mounted(self.stack.mountpoint):
                    self.stack.unmount()
                self.mount()

    # -- the link ---------------------------------------------------------------------------------

    def cut(self) -> None:
        self._broken(lambda: self._cut_for(self.rng.uniform(6.0, 13.0)))

    def cut_briefly(self) -> None:
        self._broken(lambda: self._cut_for(self.rng.uniform(0.2, 3.0)))

    def reset(self) -> None:
        self._broken(lambda: self.link.command("reset"))

    def refuse(self) -> None:
        def refuse() -> None:
            self.link.command("refuse")
            self.stop.wait(self.rng.uniform(0.5, 6.0))
            self.link.command("restore")

        self._broken(refuse)

    def restart_hub(self) -> None:
        self._broken(self.stack.restart_hub)

    def _cut_for(self, seconds: float) -> None:
        self.link.command("cut")
        self.stop.wait(seconds)
        self.link.command("restore")

    def _broken(self, act: Callable[[], object]) -> None:
        with self.history.trouble(self.history.outages) as span:
            act()
            restored = time.monotonic()
            self.wait_up()
            span.end = max(restored + NOTICE_S, time.monotonic() + SETTLE_S)

    def wait_up(self) -> None:
        """Wait until the mount says that it is up; a failure when it does not heal."""
        deadline = time.monotonic() + HEAL_S
        while self.status()["state"] != "up":
            if time.monotonic() > deadline:
                self.judge.failed(f"the mount did not heal within {HEAL_S} s: {self.status()}")
                return
            time.sleep(0.1)

    # -- the mount --------------------------------------------------------------------------------

    def remount(self) -> None:
        self._away(self._unmount, lambda: None)

    def damage(self) -> None:
        self._away(self._unmount, self._damage)

    def crash(self) -> None:
        self._away(self._kill, lambda: None)

    def crash_and_damage(self) -> None:
        self._away(self._kill, self._damage)

    def _away(self, leave: Callable[[], None], meanwhile: Callable[[], None]) -> None:
        with self.history.trouble(self.history.remounts):
            leave()
            meanwhile()
            self.mount()

    def _unmount(self) -> None:
        pid = self._count()
        self.stack.unmount()
        if is_mounted(self.stack.mountpoint):
            self.judge.failed("still mounted after `farside unmount`")
        if _alive(pid):
            self.judge.failed("the process of the mount is still there after `farside unmount`")

    def _kill(self) -> None:
        pid = self._count()
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while _alive(pid):
            if time.monotonic() > deadline:
                self.judge.failed(f"the process of the mount ({pid}) survives SIGKILL")
                return
            time.sleep(0.01)

    # -- the cache --------------------------------------------------------------------------------

    def evict(self) -> None:
        self._ask("evict")

    def warm(self) -> None:
        self._ask("warm")

    def pin(self) -> None:
        self._ask("pin")

    def unpin(self) -> None:
        self._ask("unpin", path="")

    def _ask(self, op: str, path: str | None = None) -> None:
        if path is None:
            path = self.rng.choice(["", *self.history.paths()] if op == "evict" else self.history.paths())
        try:
            call(self._address, op, {"path": path, "limit": 8 << 20}, silence_s=30.0)
        except RequestFailed:
            self.counts[f"{op} refused"] += 1  # the path is gone, or the hub is away

    def status(self) -> dict[str, Any]:
        return call(self._address, "status", silence_s=30.0)

    def _count(self) -> int:
        """Keep the counters of a mount that is about to end; returns its process."""
        status = self.status()
        self.corrupt_chunks += status["cache"]["corrupt_chunks"]
        self.evicted_bytes += status["cache"]["evicted_bytes"]
        self.link_bytes += status["link_bytes"]["total"]
        if status["cache"]["used"] > status["cache"]["limit"]:
            self.judge.failed(f"the cache is larger than its limit: {status['cache']}")
        return int(status["pid"])

    def finish(self) -> None:
        """Everything whole again, then the last unmount."""
        with self.history.trouble(self.history.remounts):
            self._unmount()

    # -- damage -----------------------------------------------------------------------------------

    def _damage(self) -> None:
        """Ruin some files of the cache. Each gets a new inode first: what a reader may still have mapped of
        the old one through passthrough is not farside's to keep whole."""
        found = sorted((self.stack.cache / "data").glob("*/*"))
        kinds = (self._flip, self._zero, self._swap, self._swap, self._cut_file, self._empty, self._delete)
        for path in self.rng.sample(found, min(len(found), self.rng.randint(1, 8))):
            if path.exists():
                self.rng.choice(kinds)(path)
        names = self.stack.cache / "namespace.db"
        if self.rng.random() < 0.3 and names.exists():
            self.rng.choice((self._flip, self._zero, self._cut_file))(names)

    def _flip(self, path: Path) -> None:
        with open(_fresh(path), "r+b") as file:
            for _ in range(self.rng.choice((1, 1, 20))):
                at = self._somewhere(file.fileno(), path.stat().st_size)
                byte = os.pread(file.fileno(), 1, at)
                if byte:
                    os.pwrite(file.fileno(), bytes([byte[0] ^ (1 << self.rng.randrange(8))]), at)

    def _zero(self, path: Path) -> None:
        """A block that never reached the disk."""
        with open(_fresh(path), "r+b") as file:
            size = path.stat().st_size
            at = self._somewhere(file.fileno(), size) // CHUNK * CHUNK
            os.pwrite(file.fileno(), bytes(min(CHUNK, size - at)), at)

    def _swap(self, path: Path) -> None:
        """With another file of its kind, if there is one of the same size: that is the cruellest."""
        others = [p for p in sorted((self.stack.cache / "data").glob(f"*/*{path.suffix}")) if p != path]
        if not others:
            return
        same = [p for p in others if p.stat().st_size == path.stat().st_size]
        other = self.rng.choice(same or others)
        spare = path.with_name("swap")
        path.rename(spare)
        other.rename(path)
        spare.rename(other)

    def _cut_file(self, path: Path) -> None:
        size = path.stat().st_size
        os.truncate(_fresh(path), self.rng.randint(0, max(0, size - 1)))

    def _empty(self, path: Path) -> None:
        os.truncate(_fresh(path), 0)

    def _delete(self, path: Path) -> None:
        path.unlink()

    def _somewhere(self, fd: int, size: int) -> int:
        """An offset where the file has data rather than a hole, if it can be found."""
        if size < 1:
            return 0
        at = self.rng.randrange(size)
        try:
            return os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            return at


def _fresh(path: Path) -> Path:
    """Give a file a new inode with the same bytes, holes, mode and time stamps."""
    copy = path.with_name("copy")
    subprocess.run(["cp", "-p", "--sparse=always", str(path), str(copy)], check=True, timeout=60)
    shutil.copystat(path, copy)
    copy.rename(path)
    return path


def _alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
