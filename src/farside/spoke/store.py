"""What the spoke knows of names, kept on disk over a restart: SQLite, one row a directory.

All work happens in one thread of the store's own, first in, first out: a load that is asked for after a
mark sees the mark. A damaged database is dropped and said once; its contents come again from the hub.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import msgspec
import xxhash

from farside.errors import CacheError
from farside.protocol.attributes import digest_of, pack_listing

FORMAT = 1
"""Stored as the database's user_version; a database of another format is dropped."""

MAX_PENDING = 5_000
"""So many jobs that wait for the disk mean that it hangs: the store is given up for this run."""

CLOSE_PATIENCE = 5.0
"""Seconds to wait for the disk at the end."""

MAX_DIRTY = 10_000
"""More invalidated names in one row than this are recorded as the whole directory."""

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE dirs (
    id INTEGER PRIMARY KEY,
    portal BLOB NOT NULL,
    path BLOB NOT NULL,
    digest BLOB NOT NULL,      -- xxh3_128 of the listing
    session INTEGER NOT NULL,  -- in which the hub confirmed it; 0: none
    watched INTEGER NOT NULL,
    lost INTEGER NOT NULL,     -- the whole directory was invalidated since
    dirty BLOB NOT NULL,       -- msgpack list of the names invalidated since; may be empty
    value BLOB NOT NULL,
    seal INTEGER NOT NULL,     -- checksum of path, digest and value
    listing BLOB NOT NULL,     -- zlib; last, so that a scan of digests need not read it
    UNIQUE (portal, path)
);
"""

_UPSERT = """
INSERT INTO dirs (portal, path, digest, session, watched, lost, dirty, value, seal, listing)
VALUES (?,?,?,?,?,?,?,?,?,?)
ON CONFLICT (portal, path) DO UPDATE SET digest=excluded.digest, session=excluded.session,
watched=excluded.watched, lost=excluded.lost, dirty=excluded.dirty, value=excluded.value,
seal=excluded.seal, listing=excluded.listing
"""


_DAMAGE = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,  # no such table or column: a database, but not ours
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
)


class Row(NamedTuple):
    """One directory. ``listing`` is packed, or (name, value) pairs that the store packs in its thread."""

    path: bytes
    value: bytes
    digest: bytes
    session: int
    watched: bool
    lost: bool
    dirty: Sequence[bytes]
    listing: bytes | Sequence[tuple[bytes, bytes]]


def _seal(path: bytes, digest: bytes, value: bytes) -> int:
    return xxhash.xxh3_64_intdigest(b"\0".join((path, digest, value))) >> 1  # SQLite's integers are signed


def _below(path: bytes) -> tuple[bytes, bytes]:
    """Bounds (first, behind the last) of the paths strictly below ``path``; not for the root."""
    return path + b"/", path + b"0"  # "0" follows "/"


class Store:
    """Opens (or makes) the database file ``path``.

    Methods block and run in any thread; ``submit`` runs them in the store's own.

    Attributes:
        broken: why the store is not used any more in this run, or "".
        dropped: how often a damaged database was thrown away.

    Raises:
        CacheError: the file can neither be opened nor made anew.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.broken = ""
        self.dropped = 0
        self._pending = 0
        self._hangs = False
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="farside-names")
        try:
            self._db = self._open()
        except (sqlite3.Error, OSError) as error:
            self._worker.shutdown()
            raise CacheError(
                f"the metadata store cannot be opened: {error}",
                path=os.fspath(self.path),
                hint="check that the cache directory is writable and its disk is not full",
            ) from error

    # -- running ----------------------------------------------------------------------------------

    def submit(self, work: Callable[P, T | None], /, *args: P.args, **kwargs: P.kwargs) -> Future[T | None]:
        """Runs ``work`` behind all that was submitted before; None when the store is broken."""
        with self._lock:
            if self._pending >= MAX_PENDING and not self.broken:
                self._hangs = True
                self._give_up("its disk does not answer")
            if self.broken:
                done: Future[T | None] = Future()
                done.set_result(None)
                return done
            self._pending += 1
        return self._worker.submit(self._run, work, args, kwargs)

    @property
    def pending(self) -> int:
        """Jobs submitted and not done."""
        return self._pending

    def close(self) -> None:
        """Closes the database behind what was submitted; waits for at most ``CLOSE_PATIENCE`` seconds."""
        try:
            self._worker.submit(self._close_db).result(0.0 if self._hangs else CLOSE_PATIENCE)
        except TimeoutError:
            _log.warning("the disk of the metadata store does not answer [%s]", self.path)
        self._worker.shutdown(wait=False)
        self.broken = self.broken or "closed"

    def _run(self, work: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, object]) -> T | None:
        try:
            return None if self.broken else work(*args, **kwargs)
        except sqlite3.DatabaseError as error:
            self._damaged(error)
            return None
        except OSError as error:
            self._give_up(str(error))
            return None
        finally:
            with self._lock:
                self._pending -= 1

    def _give_up(self, reason: str) -> None:
        self.broken = reason
        _log.warning("metadata is not kept on disk any more: %s [%s]", reason, self.path)

    def _damaged(self, error: sqlite3.Error) -> None:
        """Damage: start with an empty one. A full, busy or failing disk ends the store for this run."""
        if (getattr(error, "sqlite_errorcode", -1) & 0xFF) not in _DAMAGE:
            self._give_up(str(error))
            return
        try:
            self._close_db()
            self._drop(str(error))
            self._db = self._open()
        except (sqlite3.Error, OSError) as second:
            self._give_up(str(second))

    # -- the file ---------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        for attempt in range(2):
            db = sqlite3.connect(self.path, timeout=5, isolation_level=None, check_same_thread=False)
            try:
                version = db.execute("PRAGMA user_version").fetchone()[0]
                empty = not db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
                if empty:
                    db.executescript(f"{_SCHEMA} PRAGMA user_version={FORMAT}; PRAGMA journal_mode=WAL;")
                elif version != FORMAT:
                    raise sqlite3.DatabaseError(f"format {version} instead of {FORMAT}")
                db.execute("SELECT path, seal FROM dirs LIMIT 1").fetchone()
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=NORMAL")
                db.execute("PRAGMA cache_size=-8192")
                return db
            except sqlite3.DatabaseError as error:
                db.close()
                if (
                    attempt
                    or (getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF) not in _DAMAGE
                ):
                    raise
                self._drop(str(error))
        raise AssertionError("unreachable")

    def _drop(self, reason: str) -> None:
        if not self.dropped:
            _log.warning("the metadata store is damaged and starts anew: %s [%s]", reason, self.path)
        self.dropped += 1
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)

    def _close_db(self) -> None:
        try:
            self._db.close()
        except sqlite3.Error:
            pass  # it is thrown away or the process ends

    # -- rows -------------------------------------------------------------------------------------

    def load(self, portal: bytes, path: bytes) -> Row | None:
        """One directory, its listing packed and checked; None when it is not there or damaged."""
        found = self._db.execute(
            "SELECT digest, session, watched, lost, dirty, value, seal, listing FROM dirs"
            " WHERE portal=? AND path=?",
            (portal, path),
        ).fetchone()
        if found is None:
            return None
        digest, session, watched, lost, dirty, value, seal, packed = found
        try:
            listing = zlib.decompress(packed)
            names = msgspec.msgpack.decode(dirty, type=list[bytes]) if dirty else []
        except (zlib.error, msgspec.MsgspecError, TypeError):
            listing, names, seal = b"", [], None
        if seal != _seal(path, digest, value) or digest_of(listing) != digest:
            self._db.execute("DELETE FROM dirs WHERE portal=? AND path=?", (portal, path))
            if not self.dropped:
                _log.warning("a damaged row of the metadata store was dropped [%s]", self.path)
            self.dropped += 1
            return None
        return Row(path, value, digest, session, bool(watched), bool(lost), names, listing)

    def digests(self, portal: bytes) -> dict[bytes, bytes]:
        """{path: digest} of all directories of a portal."""
        return dict(self._db.execute("SELECT path, digest FROM dirs WHERE portal=?", (portal,)))

    def count(self, portal: bytes) -> int:
        """Directories kept of a portal."""
        return int(self._db.execute("SELECT count(*) FROM dirs WHERE portal=?", (portal,)).fetchone()[0])

    def save(self, portal: bytes, rows: Iterable[Row]) -> dict[bytes, bytes]:
        """Puts rows in place, in one transaction. Returns {path: digest} where the row had none."""
        made: dict[bytes, bytes] = {}
        ready = []
        for row in rows:
            listing = row.listing if isinstance(row.listing, bytes) else pack_listing(row.listing)
            digest = row.digest
            if not digest:
                digest = made[row.path] = digest_of(listing)
            dirty = msgspec.msgpack.encode(row.dirty) if row.dirty else b""
            seal = _seal(row.path, digest, row.value)
            packed = zlib.compress(listing, 1)
            head = (portal, row.path, digest, row.session, row.watched, row.lost, dirty)
            ready.append((*head, row.value, seal, packed))
        with _Transaction(self._db):
            self._db.executemany(_UPSERT, ready)
        return made

    def confirm(self, portal: bytes, session: int, held: Mapping[bytes, tuple[bytes, bool]]) -> None:
        """The hub says in ``session`` that these listings hold: path → (digest, watched).

        Rows with another digest are left alone.
        """
        with _Transaction(self._db):
            self._db.executemany(
                "UPDATE dirs SET session=?, watched=?, lost=0, dirty=x''"
                " WHERE portal=? AND path=? AND digest=?",
                [(session, watched, portal, path, digest) for path, (digest, watched) in held.items()],
            )

    def mark(self, portal: bytes, marks: Mapping[bytes, Sequence[bytes] | None]) -> None:
        """Records invalidations: some names of a directory, or (None) the whole of it."""
        with _Transaction(self._db):
            for path, names in marks.items():
                self._mark_one(portal, path, names)

    def _mark_one(self, portal: bytes, path: bytes, names: Sequence[bytes] | None) -> None:
        where = (portal, path)
        if names is not None:
            found = self._db.execute("SELECT dirty FROM dirs WHERE portal=? AND path=?", where).fetchone()
            if found is None:
                return
            try:
                old = msgspec.msgpack.decode(found[0], type=list[bytes]) if found[0] else []
            except (msgspec.MsgspecError, TypeError):
                names = None
            else:
                merged = list(dict.fromkeys([*old, *names]))
                if len(merged) <= MAX_DIRTY:
                    blob = msgspec.msgpack.encode(merged)
                    self._db.execute("UPDATE dirs SET dirty=? WHERE portal=? AND path=?", (blob, *where))
                    return
        self._db.execute("UPDATE dirs SET lost=1, session=0 WHERE portal=? AND path=?", where)

    def unconfirm_tree(self, portal: bytes, path: bytes) -> None:
        """A directory and all below it must be confirmed again; what is known stays known."""
        if not path:
            self._db.execute("UPDATE dirs SET session=0 WHERE portal=?", (portal,))
            return
        self._db.execute("UPDATE dirs SET session=0 WHERE portal=? AND path=?", (portal, path))
        self._db.execute(
            "UPDATE dirs SET session=0 WHERE portal=? AND path>=? AND path<?", (portal, *_below(path))
        )

    def delete_tree(self, portal: bytes, path: bytes) -> None:
        """Forgets a directory and all below it."""
        if not path:
            self._db.execute("DELETE FROM dirs WHERE portal=?", (portal,))
            return
        self._db.execute("DELETE FROM dirs WHERE portal=? AND path=?", (portal, path))
        self._db.execute("DELETE FROM dirs WHERE portal=? AND path>=? AND path<?", (portal, *_below(path)))

    def delete_unconfirmed(self, portal: bytes, session: int) -> int:
        """After a whole walk: forgets the directories that the hub does not have any more; how many."""
        return self._db.execute("DELETE FROM dirs WHERE portal=? AND session<>?", (portal, session)).rowcount


class _Transaction:
    """BEGIN IMMEDIATE … COMMIT, or ROLLBACK when the body raises."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._db.execute("COMMIT")
        else:
            try:
                self._db.execute("ROLLBACK")
            except sqlite3.Error:
                pass  # the first error is the one that counts
