"""The metadata store: rows survive, damage is dropped and said once, a bad disk ends it quietly."""

from __future__ import annotations

import logging
import os
import sqlite3
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.spoke.fakehub import dir_value, file_value

from farside.errors import CacheError
from farside.protocol.attributes import digest_of, pack_listing
from farside.spoke.store import MAX_DIRTY, MAX_PENDING, Row, Store

PORTAL = b"s" * 16


def row(path: bytes, count: int = 5, session: int = 7, version: int = 1) -> Row:
    names = [(b"f%04d" % n, file_value(n + 10, n, version)) for n in range(count)]
    listing = pack_listing(names)
    return Row(path, dir_value(1, 1), digest_of(listing), session, True, False, (), listing)


def test_rows_come_back_after_a_restart_by_portal(tmp_path: Path) -> None:
    store = Store(tmp_path / "names.db")
    made = store.save(PORTAL, [row(b""), row(b"a\xff/\n"), row(b"edited")._replace(digest=b"", listing=[])])
    assert made == {b"edited": digest_of(b"")}
    store.close()
    store = Store(tmp_path / "names.db")
    assert store.load(PORTAL, b"a\xff/\n") == row(b"a\xff/\n")._replace(dirty=[])
    assert store.load(b"other portal id!", b"") is None
    assert store.digests(PORTAL) == {
        b"": row(b"").digest,
        b"a\xff/\n": row(b"").digest,
        b"edited": digest_of(b""),
    }
    assert store.count(PORTAL) == 3
    store.close()


def test_marks_and_confirmations(tmp_path: Path) -> None:
    store = Store(tmp_path / "names.db")
    store.save(PORTAL, [row(b"a"), row(b"b")])
    store.mark(PORTAL, {b"a": [b"x", b"y"], b"b": None, b"unknown": [b"z"]})
    store.mark(PORTAL, {b"a": [b"y", b"z"]})
    loaded = store.load(PORTAL, b"a")
    assert loaded is not None and loaded.dirty == [b"x", b"y", b"z"] and loaded.session == 7
    loaded = store.load(PORTAL, b"b")
    assert loaded is not None and loaded.lost and loaded.session == 0
    digest = row(b"a").digest
    store.confirm(PORTAL, 9, {b"a": (digest, False), b"b": (b"another digest!!", True)})
    loaded = store.load(PORTAL, b"a")
    assert loaded is not None and not loaded.dirty and loaded.session == 9 and not loaded.watched
    loaded = store.load(PORTAL, b"b")
    assert loaded is not None and loaded.lost
    store.mark(PORTAL, {b"a": [b"n%d" % n for n in range(MAX_DIRTY + 1)]})
    loaded = store.load(PORTAL, b"a")
    assert loaded is not None and loaded.lost
    store.close()


def test_trees(tmp_path: Path) -> None:
    paths = [b"", b"a", b"a!", b"a/b", b"a/b/c", b"a0", b"ab"]
    store = Store(tmp_path / "names.db")
    store.save(PORTAL, [row(p) for p in paths])

    def confirmed() -> set[bytes]:
        return {p for p in paths if (found := store.load(PORTAL, p)) is not None and found.session}

    store.unconfirm_tree(PORTAL, b"a")
    assert confirmed() == {b"", b"a!", b"a0", b"ab"}
    assert store.delete_unconfirmed(PORTAL, 7) == 3
    store.delete_tree(PORTAL, b"a!")
    assert set(store.digests(PORTAL)) == {b"", b"a0", b"ab"}
    store.unconfirm_tree(PORTAL, b"")
    assert not confirmed()
    store.delete_tree(PORTAL, b"")
    assert store.count(PORTAL) == 0
    store.close()


def damage(kind: str, path: Path) -> None:
    if kind == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif kind == "one byte":
        os.truncate(path, 1)
    elif kind == "rubbish":
        path.write_bytes(os.urandom(8192))
    elif kind == "header":
        with path.open("r+b") as file:
            file.write(b"not a database")
    elif kind == "other format":
        db = sqlite3.connect(path)
        db.execute("PRAGMA user_version=999")
        db.close()
    elif kind == "other tables":
        path.unlink()
        db = sqlite3.connect(path)
        db.executescript("CREATE TABLE things (x); PRAGMA user_version=1;")
        db.close()
    elif kind == "middle":
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xa5" * 4096)


@pytest.mark.parametrize(
    "kind", ["truncated", "one byte", "rubbish", "header", "other format", "other tables", "middle"]
)
def test_a_damaged_database_is_dropped_and_said_once(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """cvmfs/cvmfs#3659."""
    path = tmp_path / "names.db"
    store = Store(path)
    store.save(PORTAL, [row(b"d%d" % n, 200) for n in range(50)])
    store.close()
    damage(kind, path)
    with caplog.at_level(logging.WARNING):
        store = Store(path)
        for n in range(50):
            found = store.submit(store.load, PORTAL, b"d%d" % n).result(10)
            assert found is None or found.listing == row(b"", 200).listing
    if kind != "one byte":  # SQLite takes that for an empty database
        assert store.dropped and len(caplog.records) == 1
    store.submit(store.save, PORTAL, [row(b"new")]).result(10)
    assert store.submit(store.load, PORTAL, b"new").result(10) is not None
    assert not store.broken
    store.close()


@given(at=st.integers(0, 60_000), bit=st.integers(0, 7))
@settings(max_examples=40, deadline=None)
def test_a_flipped_bit_never_gives_a_wrong_listing(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int
) -> None:
    path = tmp_path_factory.mktemp("flip") / "names.db"
    store = Store(path)
    wanted = {b"d%d" % n: row(b"d%d" % n, 100, version=n) for n in range(5)}
    store.save(PORTAL, wanted.values())
    store.close()
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1 << bit
    path.write_bytes(data)
    store = Store(path)
    for name, want in wanted.items():
        found = store.submit(store.load, PORTAL, name).result(10)
        if found is not None:
            assert (found.listing, found.value, found.digest) == (want.listing, want.value, want.digest)
    store.close()


def test_a_path_that_cannot_be_opened_is_a_cache_error(tmp_path: Path) -> None:
    with pytest.raises(CacheError) as caught:
        Store(tmp_path / "no such directory" / "names.db")
    assert "names.db" in str(caught.value) and caught.value.hint


def test_a_disk_that_hangs_ends_the_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path / "names.db")
    go_on = threading.Event()

    def hang() -> None:
        go_on.wait(20)

    store.submit(hang)
    with caplog.at_level(logging.WARNING):
        for _ in range(MAX_PENDING + 5):
            last = store.submit(store.count, PORTAL)
    assert last.done() and last.result() is None and store.broken
    assert len(caplog.records) == 1
    go_on.set()
    store.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small tmpfs")
@pytest.mark.mount
def test_a_full_disk_ends_the_store_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], capture_output=True)
    if done.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {done.stderr.decode().strip()}")
    try:
        store = Store(small / "names.db")
        with caplog.at_level(logging.WARNING):
            for n in range(400):
                store.submit(store.save, PORTAL, [row(b"d%d" % n, 200, version=n)]).result(10)
        assert store.broken and len(caplog.records) == 1
        assert store.submit(store.load, PORTAL, b"d1").result(10) is None
        store.close()
    finally:
        subprocess.run(["umount", small], check=True)
