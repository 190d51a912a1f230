"""The hub's state: survives restarts, is shared with the command line, secrets work once."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path

import pytest

from farside.errors import AuthError, FarsideError, UsageError
from farside.hub import state
from farside.hub.state import DATABASE, HubState
from farside.protocol.tls import CertificateAuthority
from farside.protocol.tokens import parse_token


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    state.init(tmp_path / "hub", "ohio")
    return tmp_path / "hub"


def issue(name: str = "gpu-1", number: int = 1) -> tuple[str, int, str]:
    return name, (1 << 150) + number, f"{number:064x}"


def test_init_makes_everything_private_and_leaves_it_alone_the_second_time(directory: Path) -> None:
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / DATABASE).stat().st_mode) == 0o600
    fingerprint = CertificateAuthority.load(directory).fingerprint.hex()
    assert state.init(directory, "another") == fingerprint
    assert CertificateAuthority.load(directory).hub_name == "ohio"


def test_init_in_an_impossible_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FarsideError, match="cannot be written"):
        state.init(tmp_path / "file" / "hub", "ohio")
    with pytest.raises(AuthError):
        state.init(tmp_path / "hub", "no/name")


def test_portal_ids_stay(directory: Path) -> None:
    one = HubState(directory)
    made = one.portal_id("c4", 2**63 + 5, 12)
    assert len(made) == 16 and one.portal_id("c4", 2**63 + 5, 12) == made
    others = {
        one.portal_id("c4", 1, 12),
        one.portal_id("c4", 2**63 + 5, 13),
        one.portal_id("c5", 2**63 + 5, 12),
    }
    assert len(others | {made}) == 4
    one.close()
    assert HubState(directory).portal_id("c4", 2**63 + 5, 12) == made


def test_without_a_directory_portal_ids_are_the_same_again() -> None:
    assert HubState(None).portal_id("p", 1, 2) == HubState(None).portal_id("p", 1, 2)
    assert HubState(None).portal_id("p", 1, 2) != HubState(None).portal_id("p", 1, 3)


def test_counters_stay(directory: Path) -> None:
    one = HubState(directory)
    one.set_counter(b"p" * 16, 0, 2**63 + 1, 1)
    one.set_counter(b"p" * 16, 0, 2**63 + 1, 2)
    one.set_counter(b"q" * 16, 0, 5, 1)
    one.close()
    assert HubState(directory).counters(b"p" * 16) == {(0, 2**63 + 1): 2}


def test_a_token_says_what_it_is_for(directory: Path) -> None:
    token = parse_token(state.invite(directory, "c4", expires_s=60, address="hub:7420"))
    authority = CertificateAuthority.load(directory)
    assert (token.hub, token.address, token.portal, token.writable) == ("ohio", "hub:7420", "c4", False)
    assert token.ca_sha256 == authority.fingerprint
    assert abs(token.expires - time.time() - 60) < 3
    assert token.secret.encode() not in (directory / DATABASE).read_bytes(), "only its hash is kept"


def test_a_token_works_once(directory: Path) -> None:
    token = parse_token(state.invite(directory, "c4", writable=True))
    opened = HubState(directory)
    spoke = opened.join(token.secret, {"old": False}, issue)
    assert spoke.rights == {"old": False, "c4": True} and spoke.portals == ("old", "c4")
    with pytest.raises(AuthError, match="was used"):
        opened.join(token.secret, {}, lambda: issue(number=2))
    assert [(s.name, s.serial, s.rights) for s in state.spokes(directory)] == [
        ("gpu-1", (1 << 150) + 1, {"old": False, "c4": True})
    ]


def test_unknown_and_expired_tokens(directory: Path) -> None:
    opened = HubState(directory)
    with pytest.raises(AuthError, match="does not know"):
        opened.join("nonsense", {}, issue)
    token = parse_token(state.invite(directory, "c4", expires_s=-5))
    with pytest.raises(AuthError, match=r"expired \d seconds ago"):
        opened.join(token.secret, {}, issue)
    assert state.spokes(directory) == []


def test_a_failed_join_leaves_the_token_good(directory: Path) -> None:
    token = parse_token(state.invite(directory, "c4"))
    opened = HubState(directory)

    def refuse() -> tuple[str, int, str]:
        raise AuthError("the request is damaged")

    with pytest.raises(AuthError, match="damaged"):
        opened.join(token.secret, {}, refuse)
    assert opened.join(token.secret, {}, issue).name == "gpu-1"


def test_of_two_that_use_a_token_at_once_one_joins(directory: Path) -> None:
    secret = parse_token(state.invite(directory, "c4")).secret
    results: list[str] = []
    barrier = threading.Barrier(4)

    def join(number: int) -> None:
        opened = HubState(directory)
        barrier.wait()
        try:
            opened.join(secret, {}, lambda: issue(number=number))
            results.append("joined")
        except AuthError:
            results.append("refused")
        opened.close()

    threads = [threading.Thread(target=join, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["joined", "refused", "refused", "refused"]


def test_revoking(directory: Path) -> None:
    opened = HubState(directory)
    for number in (1, 2):
        secret = parse_token(state.invite(directory, "c4")).secret
        opened.join(secret, {}, lambda number=number: issue("gpu-1", number))  # type: ignore[misc]
    mark = opened.foreign_changes()
    state.revoke(directory, "gpu-1")
    assert opened.foreign_changes() != mark, "a running hub notices"
    assert all(spoke.revoked for spoke in opened.spokes()), "every certificate of that name"
    with pytest.raises(UsageError, match="no spoke 'gpu-1' to revoke"):
        state.revoke(directory, "gpu-1")
    with pytest.raises(UsageError, match="none may attach"):
        state.revoke(directory, "gpu-2")


def test_looking_does_not_disturb_a_running_hub(directory: Path) -> None:
    opened = HubState(directory)
    mark = opened.foreign_changes()
    state.spokes(directory)
    assert opened.foreign_changes() == mark


def test_last_seen(directory: Path) -> None:
    opened = HubState(directory)
    secret = parse_token(state.invite(directory, "c4")).secret
    spoke = opened.join(secret, {}, issue)
    opened.seen({spoke.fingerprint, "unknown"})
    (row,) = opened.spokes()
    assert row.last_seen is not None and spoke.last_seen is not None and row.last_seen >= spoke.last_seen


@pytest.mark.parametrize("call", ["spokes", "invite", "revoke"])
def test_a_directory_without_a_hub(tmp_path: Path, call: str) -> None:
    arguments = {"spokes": (), "invite": ("c4",), "revoke": ("gpu",)}[call]
    with pytest.raises(AuthError, match="hub init"):
        getattr(state, call)(tmp_path, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_database_is_a_clear_error(directory: Path) -> None:
    for path in directory.glob(f"{DATABASE}*"):
        path.write_bytes(b"nonsense" * 1000)
    with pytest.raises(FarsideError, match="cannot be opened") as caught:
        HubState(directory)
    assert os.fsencode(directory) == caught.value.path


def test_a_newer_format_is_refused(directory: Path) -> None:
    opened = HubState(directory)
    opened._db.execute("PRAGMA user_version=99")
    opened.close()
    with pytest.raises(FarsideError, match="format 99"):
        HubState(directory)
