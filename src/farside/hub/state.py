"""What a hub keeps between runs: invites, spokes, portal ids and change counters, in one SQLite file.

The command line changes it beside a running hub, which notices within a second. Secrets of invites are
kept as hashes only. All calls block; any thread may make them.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from farside.errors import AuthError, FarsideError, UsageError
from farside.protocol.tls import CA_CERTIFICATE, CertificateAuthority, check_name
from farside.protocol.tokens import JoinToken, format_token, new_secret

DATABASE = "hub.db"
FORMAT = 1
_BUSY_S = 10.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS portals (
    name TEXT, fsid TEXT, inode TEXT, id BLOB NOT NULL, PRIMARY KEY (name, fsid, inode)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (
    portal BLOB, device TEXT, inode TEXT, counter INTEGER NOT NULL,
    PRIMARY KEY (portal, device, inode)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS invites (
    secret BLOB PRIMARY KEY, portal TEXT NOT NULL, writable INTEGER NOT NULL,
    created REAL NOT NULL, expires REAL NOT NULL, used REAL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spokes (
    fingerprint TEXT PRIMARY KEY, name TEXT NOT NULL, serial TEXT NOT NULL, portals TEXT NOT NULL,
    joined REAL NOT NULL, last_seen REAL, revoked REAL) WITHOUT ROWID;
"""


class Spoke(NamedTuple):
    """One certificate of a spoke. Times are Unix times in seconds; ``rights``: portal -> may write."""

    name: str
    serial: int
    fingerprint: str
    rights: dict[str, bool]
    joined: float
    last_seen: float | None
    revoked: float | None

    @property
    def portals(self) -> tuple[str, ...]:
        return tuple(self.rights)


class HubState:
    """The open database.

    Args:
        directory: the hub's state directory; None keeps everything in memory.

    Raises:
        FarsideError: the database is damaged, of a newer format, or cannot be written.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self._lock = threading.RLock()
        try:
            if directory is not None:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                path = directory / DATABASE
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(
                ":memory:" if directory is None else path,
                timeout=_BUSY_S,
                isolation_level=None,
                check_same_thread=False,
            )
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            raise FarsideError(
                f"the hub's state cannot be opened: {error}",
                path=str(directory),
                hint="run as the user who ran `farside hub init`, or restore the directory from a backup",
            ) from error

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        found = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if found > FORMAT:
            raise FarsideError(
                f"the hub's state is of format {found}, this program knows up to {FORMAT}",
                path=str(self.directory),
                hint="install the newer version of farside again",
            )
        if found == FORMAT:
            return
        with self._change():
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version={FORMAT}")

    @contextmanager
    def _change(self) -> Iterator[None]:
        """One durable transaction."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def foreign_changes(self) -> int:
        """A number that differs when another process has changed the state."""
        with self._lock:
            return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    # -- portals ----------------------------------------------------------------------------------

    def portal_id(self, name: str, fsid: int, inode: int) -> bytes:
        """The 16 bytes that stand for this directory under this name, the same at every start.

        Without a state directory they are derived from the three, so that spokes know the portal again.
        """
        key = (name, str(fsid), str(inode))
        with self._change():
            row = self._db.execute(
                "SELECT id FROM portals WHERE name=? AND fsid=? AND inode=?", key
            ).fetchone()
            if row is not None:
                return bytes(row[0])
            made = secrets.token_bytes(16)
            if self.directory is None:
                made = hashlib.sha256("\0".join(key).encode()).digest()[:16]
            self._db.execute("INSERT INTO portals VALUES (?,?,?,?)", (*key, made))
            return made

    def portal_names(self) -> list[str]:
        """Names under which portals were ever served."""
        with self._lock:
            return [row[0] for row in self._db.execute("SELECT DISTINCT name FROM portals ORDER BY name")]

    def counters(self, portal_id: bytes) -> dict[tuple[int, int], int]:
        """(device, inode) -> change counter."""
        with self._lock:
            rows = self._db.execute(
                "SELECT device, inode, counter FROM counters WHERE portal=?", (portal_id,)
            ).fetchall()
        return {(int(device), int(inode)): counter for device, inode, counter in rows}

    def set_counter(self, portal_id: bytes, device: int, inode: int, counter: int) -> None:
        """Durable when it returns."""
        with self._change():
            self._db.execute(
                "INSERT OR REPLACE INTO counters VALUES (?,?,?,?)",
                (portal_id, str(device), str(inode), counter),
            )

    # -- invites and spokes -----------------------------------------------------------------------

    def add_invite(self, secret: str, portal: str, writable: bool, expires: float) -> None:
        now = time.time()
        with self._change():
            # Kept for a month after they ran out, so that a late user is told why.
            self._db.execute("DELETE FROM invites WHERE expires < ?", (now - 30 * 86400,))
            self._db.execute(
                "INSERT INTO invites VALUES (?,?,?,?,?,NULL)",
                (_hash(secret), portal, int(writable), now, expires),
            )

    def join(self, secret: str, rights: dict[str, bool], issue: Callable[[], tuple[str, int, str]]) -> Spoke:
        """Exchanges a one-time secret for a certificate, all or nothing.

        Args:
            rights: those that the spoke has already, by the certificate it shows.
            issue: makes the certificate; returns (name, serial number, fingerprint).

        Raises:
            AuthError: unknown, used or expired secret; whatever ``issue`` raises. The secret stays good.
        """
        now = time.time()
        with self._change():
            row = self._db.execute(
                "SELECT portal, writable, expires, used FROM invites WHERE secret=?", (_hash(secret),)
            ).fetchone()
            if row is None:
                raise AuthError("the hub does not know this join token", hint=_NEW_TOKEN)
            portal, writable, expires, used = row
            if used is not None:
                raise AuthError(f"the join token was used {_ago(now - used)} ago", hint=_NEW_TOKEN)
            if expires <= now:
                raise AuthError(f"the join token expired {_ago(now - expires)} ago", hint=_NEW_TOKEN)
            name, serial, fingerprint = issue()
            spoke = Spoke(name, serial, fingerprint, {**rights, portal: bool(writable)}, now, now, None)
            self._db.execute("UPDATE invites SET used=? WHERE secret=?", (now, _hash(secret)))
            self._db.execute(
                "INSERT INTO spokes VALUES (?,?,?,?,?,?,NULL)",
                (fingerprint, name, str(serial), json.dumps(spoke.rights), now, now),
            )
        return spoke

    def spokes(self) -> list[Spoke]:
        """All that ever joined, by name, then by time of joining."""
        with self._lock:
            rows = self._db.execute(
                "SELECT name, serial, fingerprint, portals, joined, last_seen, revoked FROM spokes "
                "ORDER BY name, joined"
            ).fetchall()
        return [Spoke(n, int(s), f, json.loads(p), j, seen, r) for n, s, f, p, j, seen, r in rows]

    def revoke(self, name: str) -> int:
        """Shuts out every certificate of that name; returns how many that were."""
        with self._change():
            return self._db.execute(
                "UPDATE spokes SET revoked=? WHERE name=? AND revoked IS NULL", (time.time(), name)
            ).rowcount

    def seen(self, fingerprints: Iterable[str]) -> None:
        """These spokes are connected now."""
        now = time.time()
        with self._change():
            self._db.executemany(
                "UPDATE spokes SET last_seen=? WHERE fingerprint=?", [(now, f) for f in fingerprints]
            )


_NEW_TOKEN = "ask for a new one: `farside hub invite`"


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _ago(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0.0, seconds):.0f} seconds"


# -- what the command line calls ------------------------------------------------------------------


def init(directory: Path | str, name: str, addresses: Iterable[str] = ()) -> str:
    """Makes the state directory, the CA and the database; what exists already is left alone.

    Returns the SHA-256 fingerprint of the CA, in hex.

    Raises:
        AuthError: an impossible name.
        FarsideError: the directory cannot be written, or its database cannot be used.
    """
    directory = Path(directory)
    check_name(name)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (directory / CA_CERTIFICATE).exists():
            authority = CertificateAuthority.load(directory)
        else:
            authority = CertificateAuthority.create(directory, name, addresses)
    except OSError as error:
        raise FarsideError(
            f"the state directory cannot be written: {error.strerror}",
            errno=error.errno,
            path=str(directory),
            hint="choose another by --state-dir, or run as root",
        ) from error
    HubState(directory).close()
    return authority.fingerprint.hex()


def invite(
    directory: Path | str,
    portal: str,
    *,
    expires_s: float = 3600.0,
    address: str = "",
    writable: bool = False,
) -> str:
    """A join token (one line) for ``portal``, good once and for ``expires_s`` seconds.

    Raises:
        AuthError: the directory holds no hub.
        FarsideError: its database cannot be used.
    """
    directory = Path(directory)
    authority = CertificateAuthority.load(directory)
    secret = new_secret()
    expires = time.time() + expires_s
    with _opened(directory) as state:
        state.add_invite(secret, portal, writable, expires)
    return format_token(
        JoinToken(
            hub=authority.hub_name,
            address=address,
            ca_sha256=authority.fingerprint,
            secret=secret,
            portal=portal,
            writable=writable,
            expires=int(expires),
        )
    )


def portal_names(directory: Path | str) -> list[str]:
    """Names under which portals were ever served; raises as ``invite``."""
    with _opened(Path(directory)) as state:
        return state.portal_names()


def spokes(directory: Path | str) -> list[Spoke]:
    """The spokes that have joined; raises as ``invite``."""
    with _opened(Path(directory)) as state:
        return state.spokes()


def revoke(directory: Path | str, name: str) -> None:
    """Shuts a spoke out for good; a running hub ends its connections within a second.

    Raises:
        UsageError: no spoke of that name may attach.
        AuthError, FarsideError: as ``invite``.
    """
    with _opened(Path(directory)) as state:
        if state.revoke(name):
            return
        known = sorted({s.name for s in state.spokes() if s.revoked is None})
        listed = f"those that may attach: {', '.join(known)}" if known else "none may attach"
        raise UsageError(f"there is no spoke {name!r} to revoke", hint=listed)


@contextmanager
def _opened(directory: Path) -> Iterator[HubState]:
    if not (directory / DATABASE).exists():
        raise AuthError(
            "there is no hub in this directory", path=str(directory), hint="run `farside hub init`"
        )
    state = HubState(directory)
    try:
        yield state
    finally:
        state.close()
