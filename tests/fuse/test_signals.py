"""Which waiters are let go."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest

from farside.fuse.signals import should_let_go, waiter_should_go


def status(
    *,
    thread: Sequence[int] = (),
    process: Sequence[int] = (),
    blocked: Sequence[int] = (),
    ignored: Sequence[int] = (),
    caught: Sequence[int] = (),
) -> str:
    masks = {"SigPnd": thread, "ShdPnd": process, "SigBlk": blocked, "SigIgn": ignored, "SigCgt": caught}
    lines = [f"{key}:\t{sum(1 << (n - 1) for n in signals):016x}" for key, signals in masks.items()]
    return "Name:\tcat\nState:\tD (disk sleep)\n" + "\n".join(lines) + "\nCapInh:\t0\n"


@pytest.mark.parametrize(
    ("text", "reading", "waiting"),
    [
        (status(), False, False),
        (status(thread=[signal.SIGKILL]), True, True),
        (status(process=[signal.SIGTERM]), True, True),
        (status(process=[signal.SIGINT], caught=[signal.SIGINT]), True, False),  # Python under a page fault
        (status(process=[signal.SIGINT], caught=[signal.SIGINT]), False, True),  # ^C in an open()
        (status(process=[signal.SIGINT], ignored=[signal.SIGINT]), False, False),  # nohup
        (status(process=[signal.SIGTERM], blocked=[signal.SIGTERM]), True, False),
        (status(process=[signal.SIGCHLD]), False, False),
        (status(process=[signal.SIGALRM], caught=[signal.SIGALRM]), False, False),
        (status(process=[signal.SIGALRM]), True, True),
        (status(process=[signal.SIGURG], caught=[signal.SIGURG]), False, False),  # the Go scheduler
        (status(process=[signal.SIGTSTP]), False, False),
    ],
)
def test_should_let_go(text: str, reading: bool, waiting: bool) -> None:
    assert should_let_go(text, reading=reading) is waiting


def test_living_threads_stay_and_unknown_ones_go() -> None:
    assert not waiter_should_go(os.getpid(), reading=True)
    assert waiter_should_go(0, reading=True)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert waiter_should_go(child, reading=True)
