"""When to try again: exponential backoff with jitter."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator


def backoff(
    first: float = 0.1, last: float = 5.0, factor: float = 2.0, rand: Callable[[], float] = random.random
) -> Iterator[float]:
    """Endless delays in seconds: each between half and all of a bound that grows from first to last.

    The lower half is never used, so that a dead hub is not hammered; the jitter keeps many spokes from
    coming back in step. ``rand`` returns numbers in [0, 1).
    """
    bound = first
    while True:
        yield bound * (0.5 + 0.5 * rand())
        bound = min(last, bound * factor)
