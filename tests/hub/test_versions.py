"""Versions: whatever differs in a stat differs in the version, and what does not is caught by the counter."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from farside.hub import versions
from farside.hub.versions import COARSE_GRAIN_NS, GRAIN_NS, SKEW_NS, SUSPECT_NS, Versions


@dataclass(frozen=True)
class Stat:
    """The fields of a stat that versions look at."""

    st_dev: int = 7
    st_ino: int = 11
    st_size: int = 8
    st_mtime_ns: int = 1_700_000_000_123_456_789
    st_ctime_ns: int = 1_700_000_000_123_456_789
    st_blocks: int = 8
    st_mode: int = 0o100644
    st_nlink: int = 1
    st_uid: int = 0
    st_gid: int = 0
    st_rdev: int = 0


def stat(**fields: Any) -> os.stat_result:
    return cast(os.stat_result, replace(Stat(), **fields))


def make(**options: Any) -> tuple[Versions, list[tuple[int, int, int]]]:
    kept: list[tuple[int, int, int]] = []
    return Versions(7, {}, lambda *row: kept.append(row), **options), kept


FIELDS = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")


@given(st.sampled_from(FIELDS), st.integers(1, 2**62))
def test_every_part_counts(field: str, value: int) -> None:
    known, _ = make()
    other = stat(**{field: value})
    assert (known.of(other) == known.of(stat())) == (getattr(other, field) == getattr(stat(), field))


def test_attr_and_version_agree_and_are_stable() -> None:
    known, _ = make()
    again, _ = make()
    assert known.attr(stat()).version == known.of(stat()) == again.of(stat())
    assert len(known.of(stat())) == 16
    assert known.attr(stat()).fileid == 11


def test_the_roots_device_number_may_change_at_a_reboot() -> None:
    before = Versions(7, {}, lambda *row: None)
    after = Versions(9, {}, lambda *row: None)
    assert before.of(stat(st_dev=7)) == after.of(stat(st_dev=9))


def test_files_of_two_devices_never_share_an_id() -> None:
    known, _ = make()
    assert known.attr(stat(st_dev=8)).fileid != known.attr(stat()).fileid
    assert known.of(stat(st_dev=8)) != known.of(stat())


@given(st.integers(-(10**10), 10**10))
def test_a_version_is_settled_when_any_later_change_must_differ(age: int) -> None:
    known, _ = make()
    info = stat()
    wait_s = known.unsettled_s(info, info.st_ctime_ns + age)
    assert (wait_s == 0.0) == (age > GRAIN_NS)
    assert wait_s < GRAIN_NS / 1e9 + 0.01
    if 0 <= age <= GRAIN_NS:
        assert wait_s * 1e9 + age > GRAIN_NS


def test_whole_second_stamps_take_longer() -> None:
    known, _ = make()
    info = stat(st_ctime_ns=1_700_000_000_000_000_000)
    assert known.unsettled_s(info, info.st_ctime_ns + 1_500_000_000) > 0.5
    assert known.unsettled_s(info, info.st_ctime_ns + COARSE_GRAIN_NS + 1) == 0.0


def test_another_machines_clock_is_not_believed() -> None:
    known, _ = make(is_local=lambda device: False)
    info = stat()
    assert known.unsettled_s(info, info.st_ctime_ns + 1_000_000_000) > 0.0
    assert known.unsettled_s(info, info.st_ctime_ns + SKEW_NS + GRAIN_NS + 1) == 0.0


def test_an_event_without_a_difference_raises_the_counter() -> None:
    known, kept = make()
    info = stat()
    version = known.of(info)
    known.remember(info, info.st_ctime_ns + 1)
    assert known.has_suspects
    assert known.modified(info)
    assert kept == [(0, 11, 1)]
    assert known.of(info) != version and known.attr(info).version == known.of(info)
    assert not known.modified(info), "once told, the next read has to come first"
    known.remember(info, info.st_ctime_ns + 1)
    assert known.modified(info) and kept[-1] == (0, 11, 2)


def test_an_event_with_a_difference_does_not() -> None:
    known, kept = make()
    known.remember(stat(), stat().st_ctime_ns)
    assert not known.modified(stat(st_size=9))
    assert not known.modified(stat()), "what was read is no longer what is there"
    assert kept == []


def test_old_files_are_not_remembered_except_where_stores_leave_no_stamp() -> None:
    late = stat().st_ctime_ns + SUSPECT_NS + 1
    known, _ = make()
    known.remember(stat(), late)
    assert not known.has_suspects
    unstamped, _ = make(unstamped=lambda device: True)
    unstamped.remember(stat(), late)
    assert unstamped.modified(stat())


def test_counters_survive_a_restart() -> None:
    known, kept = make()
    known.remember(stat(), stat().st_ctime_ns)
    known.modified(stat())
    again = Versions(7, {row[:2]: row[2] for row in kept}, lambda *row: None)
    assert again.of(stat()) == known.of(stat()) != make()[0].of(stat())


def test_lost_events_raise_every_suspect() -> None:
    known, kept = make()
    for inode in range(3):
        known.remember(stat(st_ino=inode), stat().st_ctime_ns)
    known.distrust()
    assert sorted(kept) == [(0, 0, 1), (0, 1, 1), (0, 2, 1)] and not known.has_suspects


def test_a_counter_that_cannot_be_kept_is_raised_all_the_same() -> None:
    def full(*row: int) -> None:
        raise OSError(28, "disk full")

    known = Versions(7, {}, full)
    version = known.of(stat())
    known.remember(stat(), stat().st_ctime_ns)
    assert known.modified(stat()) and known.of(stat()) != version


def test_suspects_are_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(versions, "MAX_SUSPECTS", 10)
    known, _ = make()
    for inode in range(100):
        known.remember(stat(st_ino=inode), stat().st_ctime_ns)
    assert [inode for inode in range(100) if known.modified(stat(st_ino=inode))] == list(range(90, 100))


def test_real_files(tmp_path: Path) -> None:
    """Overwriting with the same size and setting the old mtime back still makes another version."""
    path = tmp_path / "f"
    path.write_bytes(b"12345678")
    known = Versions(path.stat().st_dev, {}, lambda *row: None)
    before = path.stat()
    while known.unsettled_s(path.stat(), time.time_ns()):
        time.sleep(0.005)
    path.write_bytes(b"abcdefgh")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert known.of(path.stat()) != known.of(before)
