from __future__ import annotations

import contextlib
import ssl
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from tests.protocol.wire import Hub, connected, identity, run, served

from farside.errors import AuthError, ProtocolError
from farside.protocol import tls
from farside.protocol.connection import Responder, ServerConnection
from farside.protocol.join import join
from farside.protocol.messages import Join, Joined, Stat, StatReply
from farside.protocol.tokens import JoinToken, new_secret


class JoiningHub(Hub):
    """A hub that signs whoever shows the secret, once."""

    def __init__(self, authority: tls.CertificateAuthority, **options: Any) -> None:
        super().__init__(self._answer, ca_pem=authority.pem, **options)
        self.authority = authority
        self.secrets = {new_secret()}
        self.requests: list[Join] = []
        self.change: dict[str, Any] = {}

    def token(self, **changes: Any) -> JoinToken:
        fields: dict[str, Any] = {
            "hub": "hub",
            "address": "",
            "ca_sha256": self.authority.fingerprint,
            "secret": next(iter(self.secrets)),
            "portal": "c4",
            "writable": False,
            "expires": int(time.time()) + 3600,
            **changes,
        }
        return JoinToken(**fields)

    async def _answer(self, conn: ServerConnection, message: Any, payload: Any, respond: Responder) -> None:
        if isinstance(message, Stat):
            await respond.finish(StatReply(()))
            return
        assert isinstance(message, Join)
        self.requests.append(message)
        if message.secret not in self.secrets:
            raise AuthError("the join token is unknown or was used")
        self.secrets.discard(message.secret)
        csr = self.change.get("csr", message.csr)
        certificate = self.authority.sign_spoke(csr, message.name)
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        ca = self.change.get("ca", self.authority.pem)
        await respond.finish(Joined(self.change.get("certificate", pem), ca, message.name, ("c4",)))


@pytest.fixture
def authority(tmp_path: Path) -> tls.CertificateAuthority:
    return tls.CertificateAuthority.create(tmp_path / "hub", "hub")


@contextlib.asynccontextmanager
async def joining(
    authority: tls.CertificateAuthority, context: ssl.SSLContext | None = None, **options: Any
) -> AsyncIterator[tuple[JoiningHub, int]]:
    hub = JoiningHub(authority, **options)
    async with served(hub, context or tls.hub_context(authority.directory)) as server:
        yield hub, server.port


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def test_a_token_is_exchanged_for_an_identity_once(
    authority: tls.CertificateAuthority, tmp_path: Path
) -> None:
    async def main() -> None:
        home = tmp_path / "spoke"
        async with joining(authority) as (hub, port):
            token = hub.token()
            joined = await join("127.0.0.1", port, token, home, "gpu-1")
            assert (joined.spoke, joined.portals) == ("gpu-1", ("c4",))
            assert files(home) == ["identity.pem"]
            assert stat.S_IMODE((home / "identity.pem").stat().st_mode) == 0o600
            assert stat.S_IMODE(home.stat().st_mode) == 0o700
            spoke = await connected(port, tls.spoke_context(home))
            await spoke.call(Stat("c4", ()), timeout=5)
            assert hub.connections[-1].peer_name == "gpu-1"
            await spoke.close()
            before = (home / "identity.pem").read_bytes()
            with pytest.raises(AuthError, match="unknown or was used"):
                await join("127.0.0.1", port, token, home, "gpu-1")
            assert (home / "identity.pem").read_bytes() == before and files(home) == ["identity.pem"]

    run(main())


async def refused(
    hub: JoiningHub, port: int, token: JoinToken, home: Path, says: str, *, sent: bool = False
) -> None:
    """The join fails as it should, leaves nothing behind, and the secret stayed here unless ``sent``."""
    with pytest.raises(AuthError, match=says):
        await join("127.0.0.1", port, token, home, "gpu-1")
    assert files(home) == []
    assert bool(hub.requests) == sent


def test_another_hub_is_told_by_its_fingerprint(authority: tls.CertificateAuthority, tmp_path: Path) -> None:
    async def main() -> None:
        other = tls.CertificateAuthority.create(tmp_path / "other", "hub")
        async with joining(other) as (hub, port):
            token = hub.token(ca_sha256=authority.fingerprint)
            await refused(hub, port, token, tmp_path / "spoke", "another fingerprint.*was not sent")

    run(main())


@pytest.mark.parametrize("ca_pem", [b"", b"nonsense"])
def test_a_hub_without_a_proper_authority(
    ca_pem: bytes, authority: tls.CertificateAuthority, tmp_path: Path
) -> None:
    async def main() -> None:
        async with joining(authority) as (hub, port):
            hub.ca_pem = ca_pem
            await refused(hub, port, hub.token(), tmp_path / "spoke", "another fingerprint")

    run(main())


def test_a_man_in_the_middle_who_shows_the_genuine_authority(
    authority: tls.CertificateAuthority, tmp_path: Path
) -> None:
    async def main() -> None:
        other = tls.CertificateAuthority.create(tmp_path / "other", "hub")
        async with joining(authority, tls.hub_context(other.directory)) as (hub, port):
            says = "not issued by the hub's authority.*stands in between.*was not sent"
            await refused(hub, port, hub.token(), tmp_path / "spoke", says)

    run(main())


def test_a_spoke_of_the_same_hub_that_poses_as_it(
    authority: tls.CertificateAuthority, tmp_path: Path
) -> None:
    async def main() -> None:
        thief = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        thief.load_cert_chain(identity(authority, tmp_path / "thief", tls.HUB_IDENTITY) / "identity.pem")
        async with joining(authority, thief) as (hub, port):
            says = "authority|not a hub's"
            await refused(hub, port, hub.token(), tmp_path / "spoke", says)

    run(main())


def test_an_expired_token_is_not_sent(authority: tls.CertificateAuthority, tmp_path: Path) -> None:
    async def main() -> None:
        async with joining(authority) as (hub, port):
            token = hub.token(expires=int(time.time()) - 1)
            await refused(hub, port, token, tmp_path / "spoke", "has expired")

    run(main())


def test_expiry_is_by_the_clock_of_the_hub(authority: tls.CertificateAuthority, tmp_path: Path) -> None:
    async def main() -> None:
        async with joining(authority, skew_s=7200) as (hub, port):
            await refused(hub, port, hub.token(), tmp_path / "spoke", "has expired")

    run(main())


def test_a_clock_wrong_by_a_day_does_not_use_up_the_token(
    authority: tls.CertificateAuthority, tmp_path: Path
) -> None:
    async def main() -> None:
        async with joining(authority, skew_s=-86400) as (hub, port):
            await refused(hub, port, hub.token(), tmp_path / "spoke", r"clock is 1 day, 0:00:0\d ahead of")

    run(main())


def test_answers_that_would_not_work_are_not_kept(
    authority: tls.CertificateAuthority, tmp_path: Path
) -> None:
    async def main() -> None:
        other = tls.CertificateAuthority.create(tmp_path / "other", "hub")
        foreign = other.sign_spoke(tls.signing_request(tls.new_key(), "gpu-1"), "gpu-1")
        changes: list[tuple[dict[str, Any], str]] = [
            ({"csr": tls.signing_request(tls.new_key(), "gpu-1")}, "for another key"),
            ({"ca": other.pem}, "another authority than the token's"),
            (
                {"certificate": foreign.public_bytes(serialization.Encoding.PEM)},
                "certificate of another authority",
            ),
            ({"certificate": b"nonsense"}, "not a PEM certificate"),
        ]
        for change, says in changes:
            async with joining(authority) as (hub, port):
                hub.change = change
                await refused(hub, port, hub.token(), tmp_path / "spoke", says, sent=True)

    run(main())


def test_what_is_wrong_at_this_end_is_found_before_the_token_is_used(
    authority: tls.CertificateAuthority, tmp_path: Path
) -> None:
    async def main() -> None:
        async with joining(authority) as (hub, port):
            with pytest.raises(AuthError, match="cannot name"):
                await join("127.0.0.1", port, hub.token(), tmp_path / "spoke", "no spaces please")
            (tmp_path / "file").write_bytes(b"")
            with pytest.raises(OSError):
                await join("127.0.0.1", port, hub.token(), tmp_path / "file" / "spoke", "gpu-1")
            assert hub.requests == [] and hub.connections == []

    run(main())


def test_a_hub_without_tls_cannot_be_joined(authority: tls.CertificateAuthority, tmp_path: Path) -> None:
    async def main() -> None:
        hub = JoiningHub(authority)
        async with served(hub) as server:
            with pytest.raises(ProtocolError, match="does not speak TLS"):
                await join("127.0.0.1", server.port, hub.token(), tmp_path / "spoke", "gpu-1")
            assert hub.requests == []

    run(main())
