"""Should a process that waits for the kernel be let go? Read from /proc/TID/status."""

from __future__ import annotations

import signal


def _bits(*signals: int) -> int:
    return sum(1 << (number - 1) for number in signals)


# What these do when a program does not handle them is not the end of the process.
_HARMLESS = _bits(
    *(signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH),
    *(signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
)
_KILL = _bits(signal.SIGKILL)
_ASKED = _bits(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def should_let_go(status: str, *, reading: bool) -> bool:
    """Judge the text of a /proc/TID/status.

    True when the thread has a signal pending that will end it, or, unless it is ``reading``, one by which
    somebody asks it to stop, even if it handles that one. Reads are not cut short for a handled signal,
    because the waiter may be a page fault, which would turn into SIGBUS.
    """
    masks = {"SigPnd": 0, "ShdPnd": 0, "SigBlk": 0, "SigIgn": 0, "SigCgt": 0}
    for line in status.splitlines():
        key, _, value = line.partition(":")
        if key in masks:
            masks[key] = int(value, 16)
    if masks["SigPnd"] & _KILL:  # the kernel sets it for every fatal signal and for an exiting process
        return True
    pending = (masks["SigPnd"] | masks["ShdPnd"]) & ~masks["SigBlk"] & ~masks["SigIgn"]
    if pending & ~masks["SigCgt"] & ~_HARMLESS:
        return True
    return bool(pending & _ASKED) and not reading


def waiter_should_go(pid: int, *, reading: bool) -> bool:
    """``should_let_go`` of a living thread. A thread that is gone, or that lives in a pid namespace that
    cannot be seen from here (``pid`` 0), counts as one to let go."""
    if pid <= 0:
        return True
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            status = file.read()
    except OSError:
        return True
    return should_let_go(status, reading=reading)
