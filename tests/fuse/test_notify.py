"""The queue of invalidations, written into a pipe in place of the kernel."""

from __future__ import annotations

import fcntl
import os
import select
import threading

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuse.processes import DEADLINE_S, wait_until

from farside.fuse import Operations
from farside.fuse.device import Device
from farside.fuse.notify import Notifier


class Pipe:
    def __init__(self) -> None:
        self.end, ours = os.pipe2(os.O_CLOEXEC | os.O_DIRECT)  # O_DIRECT: keeps message boundaries
        fcntl.fcntl(self.end, fcntl.F_SETPIPE_SZ, 1 << 20)
        self.notifier = Notifier(Device(ours, Operations()), "test")

    def read(self) -> list[bytes]:
        found = []
        while select.select([self.end], [], [], 0)[0]:
            found.append(os.read(self.end, 4096))
        return found


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.binary(min_size=1, max_size=64), st.none()), max_size=60))
def test_flushed_covers_everything_before_it(steps: list[bytes | None]) -> None:
    pipe = Pipe()
    sent: list[bytes] = []
    written: list[bytes] = []
    for step in steps:
        if step is not None:
            pipe.notifier.send(step)
            sent.append(step)
        else:
            pipe.notifier.flushed().result(DEADLINE_S)
            written += pipe.read()
            assert sorted(written) == sorted(sent)
    pipe.notifier.flushed().result(DEADLINE_S)
    assert sorted(written + pipe.read()) == sorted(sent)
    pipe.notifier.close()
    os.close(pipe.end)


def test_blocked_messages_hold_back_only_what_waits_for_them() -> None:
    end, ours = os.pipe2(os.O_CLOEXEC)
    fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, 4096)
    notifier = Notifier(Device(ours, Operations()), "test")
    early = notifier.flushed()
    early.result(DEADLINE_S)
    notifier.send(b"x" * 4096)  # fills the pipe
    notifier.send(b"y")  # waits
    future = notifier.flushed()
    cancelled = notifier.flushed()
    assert cancelled.cancel()  # must not break the thread that would complete it
    notifier.send(b"z")
    last = notifier.flushed()
    called = threading.Event()
    last.add_done_callback(lambda _: called.set())
    wait_until(lambda: len(select.select([end], [], [], 0)[0]) == 1)
    assert not future.done() and not last.done()
    got = b""
    while len(got) < 4098:
        got += os.read(end, 8192)
    future.result(DEADLINE_S)
    assert called.wait(DEADLINE_S)
    assert (got.count(b"x"), got.count(b"y"), got.count(b"z")) == (
        4096,
        1,
        1,
    )  # in any order: several threads write
    notifier.close()
    os.close(end)


def test_after_the_end_everything_counts_as_told() -> None:
    end, ours = os.pipe2(os.O_CLOEXEC)
    fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, 4096)
    notifier = Notifier(Device(ours, Operations()), "test")
    notifier.close()
    notifier.send(b"nobody")
    notifier.flushed().result(DEADLINE_S)
    os.close(end)
