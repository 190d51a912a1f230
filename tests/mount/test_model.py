"""The reference model: random reads of a fabric under edits and faults (a minute here, an hour in the soak).

First the judge itself: a judge that finds nothing is worth nothing.
"""

from __future__ import annotations

import errno
import os
import random
import time
from pathlib import Path

import pytest
from tests.mount.model import Model
from tests.mount.model_content import NOTHING, Content, Found, History, generated, whole
from tests.mount.model_judge import Judge

SECONDS = 60.0
SIZE = 300_000
FILE = 0o100644


def file_of(generation: int, size: int = SIZE) -> Found:
    return Found(whole(generation, size), FILE)


class Case:
    """One file "f" that was generation 1 long ago and is generation 2 since ``age`` seconds."""

    def __init__(self, age: float) -> None:
        self.history = History(0.0)
        self.judge = Judge(self.history)
        for found in (file_of(1), file_of(2)):
            with self.history.edit({"f": found}):
                pass
        nothing, first, second = self.history.all_states("f")
        now = time.monotonic()
        nothing.until = first.since = first.done = now - 1000
        first.until = second.since = second.done = now - age
        self.history.generations = 9

    def reads(self, data: bytes, offset: int = 0, asked: int | None = None, eof: bool = False) -> str:
        """What the judge says of one read of a handle that was opened just now."""
        now = time.monotonic()
        handle = self.judge.opened("f", now, now, SIZE)
        assert handle is not None
        self.judge.data(handle, offset, len(data) if asked is None else asked, data, eof, now, now)
        return "\n".join(self.judge.wrong)


def test_generated_bytes_do_not_depend_on_how_they_are_cut() -> None:
    rng = random.Random(1)
    data = generated(7, 0, 3 << 20)
    for _ in range(50):
        offset, size = rng.randrange(3 << 20), rng.randrange(1 << 20)
        assert generated(7, offset, size) == data[offset : offset + size][:size] or offset + size > 3 << 20
    assert generated(7, 5, 100) != generated(8, 5, 100)
    assert b"\0" * 8 not in data


def test_contents_are_cut_and_patched() -> None:
    content = whole(1, 1000).patched(100, 50, 2).patched(1000, 20, 3)
    assert content.size == 1020
    plain = bytearray(generated(1, 0, 1000) + generated(3, 1000, 20))
    plain[100:150] = generated(2, 100, 50)
    assert content.read(0, 2000) == plain
    assert content.truncated(120).read(90, 100) == plain[90:120]
    assert content.truncated(0) == Content()
    assert content.patched(50, 970, 4).pieces == ((50, 1), (1020, 4))


def test_the_judge_takes_what_may_be() -> None:
    new, old = whole(2, SIZE), whole(1, SIZE)
    assert Case(10).reads(new.read(5, 1000), 5) == ""
    assert Case(1).reads(old.read(5, 1000), 5) == ""
    assert Case(10).reads(new.read(SIZE - 10, 10), SIZE - 10, 500, True) == ""
    assert Case(10).reads(new.read(0, 10), 0, 500) == "", "an error cut it short"


@pytest.mark.parametrize(
    ("data", "offset", "asked", "eof", "says"),
    [
        (whole(1, SIZE).read(0, 1000), 0, None, False, "as it was"),
        (whole(2, SIZE).read(0, 500) + bytes(500), 0, None, False, "byte 500 on: zeros"),
        (whole(2, SIZE).read(0, 512) + whole(1, SIZE).read(512, 512), 0, None, False, "byte 512"),
        (whole(2, SIZE).read(65536, 1000), 0, None, False, "nothing known"),
        (whole(7, SIZE).read(64, 1000), 64, None, False, "generation 7"),
        (whole(2, SIZE).read(0, 1000), 0, 4096, True, "300000 bytes are there"),
        (b"", 0, 4096, True, "300000 bytes are there"),
        (
            whole(2, SIZE + 99).read(SIZE - 9, 20),
            SIZE - 9,
            None,
            False,
            "right as far as it goes, but 300000",
        ),
    ],
    ids=["stale", "zeros", "mixed", "shifted", "other file", "cut short", "empty", "too long"],
)
def test_the_judge_finds_wrong_bytes(
    data: bytes, offset: int, asked: int | None, eof: bool, says: str
) -> None:
    said = Case(10).reads(data, offset, asked, eof)
    if says.startswith("right as far"):
        assert "wrong bytes" in said
    else:
        assert says in said, said


def test_the_judge_finds_two_versions_in_one_handle() -> None:
    case = Case(1)  # either may be current
    now = time.monotonic()
    handle = case.judge.opened("f", now, now, SIZE)
    assert handle is not None and len(handle.candidates) == 2
    assert case.judge.data(handle, 0, 100, whole(1, SIZE).read(0, 100), False, now, now)
    assert not case.judge.data(handle, 100, 100, whole(2, SIZE).read(100, 100), False, now, now)
    assert case.judge.opened("f", now, now, SIZE - 1) is None


def test_the_judge_lets_a_handle_follow_its_file_until_it_is_read() -> None:
    history = History(0.0)
    judge = Judge(history)
    contents = whole(1, SIZE), whole(2, SIZE), whole(3, SIZE)
    for content in contents[:1]:
        with history.edit({"f": Found(content, FILE, None, 5)}):
            pass
    now = time.monotonic()
    handles = [judge.opened("f", now, now, SIZE) for _ in range(3)]
    for content, path in ((contents[1], "f"), (contents[2], "g")):
        with history.edit({path: Found(content, FILE, None, 5)}):
            pass
    now = time.monotonic()
    for handle, content in zip(handles, contents, strict=True):
        assert handle is not None
        assert judge.data(handle, 0, 10, content.read(0, 10), False, now, now)
    assert handles[0] is not None
    assert not judge.data(handles[0], 20, 10, contents[1].read(20, 10), False, now, now)


def test_the_judge_knows_what_excuses_a_stale_read() -> None:
    case = Case(100)
    old = whole(1, SIZE).read(0, 100)
    with case.history.trouble(case.history.outages) as span:
        span.begin -= 120
        assert case.reads(old) == "", "cut since before the change"
    span.end = span.begin + 50
    assert "as it was" in case.reads(old), "healed long ago"


def test_the_judge_knows_when_a_file_may_be_absent() -> None:
    case = Case(10)
    now = time.monotonic()
    case.judge.error("f", errno.ENOENT, now, now)
    case.judge.listing("", now, now, [])
    case.judge.stat("f", now, now, SIZE, 0o100600)
    assert [text.split(":")[0] for text in case.judge.wrong] == [
        "wrong absence",
        "wrong name",
        "wrong attributes",
    ]
    with case.history.edit({"f": NOTHING}):
        pass
    now = time.monotonic()
    case.judge.error("f", errno.ENOENT, now, now)
    case.judge.listing("", now, now, [])
    case.judge.listing("", now, now, ["f"])
    assert len(case.judge.wrong) == 3
    case.judge.error("g", errno.EIO, now, now)
    assert len(case.judge.needless) == 1 and not case.judge.failures
    case.judge.error("f", errno.EPERM, now, now)
    assert len(case.judge.failures) == 1


@pytest.mark.mount
@pytest.mark.timeout(400)
def test_reads_under_edits_and_faults_are_right(tmp_path: Path) -> None:
    seed = int(os.environ.get("FARSIDE_MODEL_SEED") or random.SystemRandom().randrange(1 << 32))
    seconds = float(os.environ.get("FARSIDE_MODEL_SECONDS") or SECONDS)
    model = Model(tmp_path / "model", seed)
    try:
        report = model.run(seconds)
    finally:
        model.close()
    print(report.text())
    again = f"FARSIDE_MODEL_SEED={seed} pytest tests/mount/test_model.py -k edits_and_faults"
    told = (
        f"{report.text()}\nagain: {again}\nlonger: python -m benchmarks.soak_model --minutes 10 --seed {seed}"
    )
    assert not report.wrong, told
    assert not report.failures, told
    assert not report.needless, told
    assert report.reads > 100 and report.edits.total() > 50 and report.events.total() > 5, told
