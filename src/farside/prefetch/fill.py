"""Fill: fetch the rest of a file when the link has nothing better to do. Pure.

A file that is read at random is likely to be read whole in the end (a training job that shuffles), and the
order cannot be guessed. So after a few random reads the rest is fetched front to back, in the largest runs
that the link takes, at the lowest priority and without evicting anything.
"""

from __future__ import annotations

from dataclasses import dataclass

RANDOM_READS = 8
"""Random reads that missed the cache, after which a file is filled."""


@dataclass(slots=True)
class Fill:
    """Whether one file should be filled.

    Attributes:
        after: random reads that it takes.
        due: the rest of the file is to be fetched.
    """

    after: int = RANDOM_READS
    due: bool = False
    _seen: int = 0

    def missed(self) -> bool:
        """A random read was not in the cache. True exactly once: when filling becomes due."""
        self._seen += 1
        if self.due or self._seen < self.after:
            return False
        self.due = True
        return True
