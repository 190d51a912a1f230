"""Sizes and encodings of what goes to the kernel."""

from __future__ import annotations

import stat
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farside.fuse import AttrOut, DirBuffer, EntryOut, FuseAttr, OpenOut, StatfsOut, abi, negative_entry
from farside.fuse.records import encode_attr, encode_attr_out, encode_entry, encode_open, encode_statfs

ATTR = FuseAttr(7, 123, 1, 1_000_000_001, -1, 3_500_000_000, stat.S_IFREG | 0o640, 2, 10, 20, 0, 4096)


@pytest.mark.parametrize(
    ("record", "size"),
    [
        (abi.IN_HEADER, 40),
        (abi.OUT_HEADER, 16),
        (abi.INIT_OUT, 64),
        (abi.ATTR, 88),
        (abi.ENTRY, 40),
        (abi.ENTRY_ATTR, 128),
        (abi.ATTR_OUT, 16),
        (abi.OPEN_OUT, 16),
        (abi.READ_IN, 40),
        (abi.RELEASE_IN, 24),
        (abi.FLUSH_IN, 24),
        (abi.FSYNC_IN, 16),
        (abi.GETATTR_IN, 16),
        (abi.GETXATTR_IN, 8),
        (abi.GETXATTR_OUT, 8),
        (abi.LSEEK_IN, 24),
        (abi.STATFS_OUT, 80),
        (abi.DIRENT, 24),
        (abi.FORGET_ONE, 16),
        (abi.INVAL_INODE_OUT, 24),
        (abi.INVAL_ENTRY_OUT, 16),
        (abi.BACKING_MAP, 16),
    ],
)
def test_records_have_the_kernels_sizes(record: struct.Struct, size: int) -> None:
    assert record.size == size


def test_times_before_1970_and_nanoseconds() -> None:
    fields = abi.ATTR.unpack(encode_attr(ATTR))
    assert fields[3:9] == (1, -1, 3, 1, 999_999_999, 500_000_000)
    assert fields[9:] == (ATTR.mode, 2, 10, 20, 0, 4096, 0)


def test_entry_joins_both_halves() -> None:
    raw = encode_entry(EntryOut(5, 9, ATTR, 1.5, 0.25))
    assert abi.ENTRY.unpack_from(raw) == (5, 9, 1, 0, 500_000_000, 250_000_000)
    assert raw[40:] == encode_attr(ATTR)
    assert abi.ENTRY.unpack_from(encode_entry(negative_entry(2.0))) == (0, 0, 2, 0, 0, 0)


def test_other_answers() -> None:
    assert encode_attr_out(AttrOut(ATTR, -3.0))[:16] == bytes(16)
    assert abi.OPEN_OUT.unpack(encode_open(OpenOut(3, abi.FOPEN_PASSTHROUGH, 8))) == (3, 128, 8)
    assert abi.STATFS_OUT.unpack(encode_statfs(StatfsOut(1, 2, 3, 4, 5))) == (
        1,
        2,
        3,
        4,
        5,
        4096,
        255,
        4096,
        0,
    )


names = st.binary(min_size=1, max_size=255).filter(lambda name: b"/" not in name and b"\0" not in name)


@given(st.lists(names, max_size=40), st.integers(0, 4096), st.booleans())
def test_directory_never_exceeds_its_size_and_parses_back(found: list[bytes], size: int, plus: bool) -> None:
    out = DirBuffer(size)
    fitted = 0
    for place, name in enumerate(found):
        entry = EntryOut(place + 2, 0, ATTR, 1.0, 1.0)
        fits = out.add_plus(entry, name, place + 1) if plus else out.add(name, place + 2, 8, place + 1)
        if not fits:
            break
        fitted += 1
    raw = bytes(out)
    assert len(raw) <= size
    parsed: list[bytes] = []
    at = 0
    while at < len(raw):
        at += 128 if plus else 0
        _, offset, length, kind = abi.DIRENT.unpack_from(raw, at)
        assert (offset, kind) == (len(parsed) + 1, 8)
        parsed.append(raw[at + 24 : at + 24 + length])
        at += 24 + length + (-length % 8)
    assert parsed == found[:fitted]
    counted = [place + 2 for place, name in enumerate(parsed) if name not in (b".", b"..")]
    assert out.nodeids == (counted if plus else [])


def test_dot_entries_are_not_counted() -> None:
    out = DirBuffer(4096)
    assert out.add_plus(EntryOut(1, 0, ATTR, 1, 1), b"..", 1)
    assert out.nodeids == [] and bytes(out)[:8] == bytes(8)
