from __future__ import annotations

from farside.prefetch.fill import RANDOM_READS, Fill


def test_due_once_after_enough_random_misses() -> None:
    fill = Fill()
    answers = [fill.missed() for _ in range(RANDOM_READS + 5)]
    assert answers.index(True) == RANDOM_READS - 1
    assert answers.count(True) == 1
    assert fill.due
    assert Fill(after=1).missed()
