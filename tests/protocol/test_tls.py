from __future__ import annotations

import datetime
import hashlib
import ssl
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from tests.protocol.wire import Hub, connected, identity, run, served, until

from farside.errors import AuthError, HubUnreachable, ProtocolError
from farside.protocol import tls
from farside.protocol.connection import Responder
from farside.protocol.messages import Join, Stat, StatReply

NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture
def authority(tmp_path: Path) -> tls.CertificateAuthority:
    return tls.CertificateAuthority.create(tmp_path / "hub", "hub", ["127.0.0.1", "hub.example"])


async def echo(conn: Any, message: Any, payload: Any, respond: Responder) -> None:
    await respond.finish(StatReply(()), payload)


def test_files_are_private_and_a_second_authority_is_refused(
    authority: tls.CertificateAuthority, tmp_path: Path
) -> None:
    files = sorted((tmp_path / "hub").iterdir())
    assert [path.name for path in files] == ["ca-key.pem", "ca.pem", "hub.pem"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    with pytest.raises(AuthError, match="already"):
        tls.CertificateAuthority.create(tmp_path / "hub", "hub")
    again = tls.CertificateAuthority.load(tmp_path / "hub")
    assert again.pem == authority.pem and again.hub_name == "hub"
    assert (
        again.fingerprint
        == hashlib.sha256(authority.certificate.public_bytes(serialization.Encoding.DER)).digest()
    )


def test_certificates_say_what_they_should(authority: tls.CertificateAuthority, tmp_path: Path) -> None:
    hub = x509.load_pem_x509_certificates((tmp_path / "hub" / "hub.pem").read_bytes())[0]
    names = hub.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [tls.HUB_IDENTITY, "hub.example"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    lifetime = authority.certificate.not_valid_after_utc - NOW
    assert lifetime > datetime.timedelta(days=3640)
    for certificate in (hub, authority.certificate):
        assert (
            datetime.timedelta(0)
            < NOW - certificate.not_valid_before_utc + tls.BACKDATE
            < datetime.timedelta(days=1)
        )


def test_both_ends_are_verified_and_the_hub_knows_who_it_is(
    authority: tls.CertificateAuthority, tmp_path: Path
) -> None:
    async def main() -> None:
        home = identity(authority, tmp_path / "spoke", "gpu-7")
        hub = Hub(echo)
        async with served(hub, tls.hub_context(tmp_path / "hub")) as server:
            spoke = await connected(server.port, tls.spoke_context(home))
            assert (await spoke.call(Stat("p", ()), bytes(3_000_000), timeout=5)).payload == bytes(3_000_000)
            conn = hub.connections[0]
            certificate = x509.load_pem_x509_certificates((home / "identity.pem").read_bytes())[0]
            der = certificate.public_bytes(serialization.Encoding.DER)
            assert conn.peer_name == "gpu-7" and not conn.insecure
            assert conn.peer_serial == certificate.serial_number
            assert conn.peer_fingerprint == hashlib.sha256(der).hexdigest()
            await spoke.close()

    run(main())


def test_without_a_certificate_one_may_only_join(authority: tls.CertificateAuthority, tmp_path: Path) -> None:
    async def main() -> None:
        hub = Hub(echo)
        async with served(hub, tls.hub_context(tmp_path / "hub")) as server:
            stranger = await connected(server.port, tls.stranger_context())
            assert hub.connections[0].peer_name is None
            with pytest.raises(AuthError, match="can only join"):
                await stranger.call(Stat("p", ()), timeout=5)
            await stranger.ping(0, timeout=5)
            await stranger.call(Join("s", b"csr", "n"), timeout=5)
            assert not any(isinstance(message, Stat) for message in hub.seen)
            with pytest.raises((ProtocolError, HubUnreachable)):
                await stranger.call(Join("s", b"csr", "n"), b"payload", timeout=5)

    run(main())


def test_a_spoke_of_another_hub_is_refused(authority: tls.CertificateAuthority, tmp_path: Path) -> None:
    other = tls.CertificateAuthority.create(tmp_path / "other", "hub")

    async def main() -> None:
        hub = Hub(echo)
        async with served(hub, tls.hub_context(tmp_path / "hub")) as server:
            # Trusts this hub, but shows a certificate of another: as after `hub init` was run again.
            context = tls.spoke_context(identity(other, tmp_path / "a"))
            context.load_verify_locations(cadata=authority.pem.decode())
            with pytest.raises(AuthError, match="refused this spoke's certificate"):
                await connected(server.port, context)
            # Trusts only the other hub.
            with pytest.raises(AuthError, match="certificate was refused"):
                await connected(server.port, tls.spoke_context(tmp_path / "a"))
            assert all(conn.peer_name is None for conn in hub.connections)

    run(main())


def test_a_spoke_cannot_pose_as_the_hub(authority: tls.CertificateAuthority, tmp_path: Path) -> None:
    async def main() -> None:
        home = identity(authority, tmp_path / "spoke")
        thief = identity(authority, tmp_path / "thief", tls.HUB_IDENTITY)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(thief / "identity.pem")
        async with served(Hub(echo), context) as server:
            with pytest.raises(AuthError, match="certificate was refused"):
                await connected(server.port, tls.spoke_context(home))

    run(main())


def test_a_hub_cannot_pose_as_a_spoke(authority: tls.CertificateAuthority, tmp_path: Path) -> None:
    async def main() -> None:
        context = tls.stranger_context()
        context.load_cert_chain(tmp_path / "hub" / "hub.pem")
        hub = Hub(echo)
        async with served(hub, tls.hub_context(tmp_path / "hub")) as server:
            with pytest.raises((AuthError, HubUnreachable)):
                await connected(server.port, context)
            assert all(conn.peer_name is None for conn in hub.connections)

    run(main())


def test_tls_at_one_end_only_is_explained(authority: tls.CertificateAuthority, tmp_path: Path) -> None:
    async def main() -> None:
        home = identity(authority, tmp_path / "spoke")
        async with served(Hub(echo)) as plain:
            with pytest.raises(ProtocolError, match="does not speak TLS"):
                await connected(plain.port, tls.spoke_context(home))
        async with served(Hub(echo), tls.hub_context(tmp_path / "hub")) as secure:
            with pytest.raises(ProtocolError, match="that hub speaks TLS"):
                await connected(secure.port)

    run(main())


@pytest.mark.parametrize(
    ("skew", "says"), [(-86400, "1 day, 0:00:0. ahead of"), (3 * 86400, "[23] days?, .* behind")]
)
def test_a_clock_that_is_wrong_by_days_is_told_so(
    skew: int, says: str, authority: tls.CertificateAuthority, tmp_path: Path
) -> None:
    async def main() -> None:
        home = identity(authority, tmp_path / "spoke")
        async with served(Hub(echo, skew_s=skew), tls.hub_context(tmp_path / "hub")) as server:
            with pytest.raises(AuthError, match=f"this machine's clock is {says} the hub's") as caught:
                await connected(server.port, tls.spoke_context(home))
            assert "set the clock" in caught.value.hint and caught.value.retry

    run(main())


@pytest.mark.parametrize(("made", "clock"), [(2, 2), (-4000, -4000)])
def test_a_certificate_that_is_not_valid_by_this_clock_names_the_difference(
    made: int, clock: int, tmp_path: Path
) -> None:
    """As the spoke sees it when its own clock is 2 days behind (or eleven years ahead)."""
    authority = tls.CertificateAuthority.create(
        tmp_path / "hub", "hub", now=NOW + datetime.timedelta(days=made)
    )

    async def main() -> None:
        home = identity(authority, tmp_path / "spoke")
        async with served(Hub(echo, skew_s=clock * 86400), tls.hub_context(tmp_path / "hub")) as server:
            with pytest.raises(AuthError, match=f"{abs(clock)} days, 0:00:0. (behind|ahead of) the hub's"):
                await connected(server.port, tls.spoke_context(home))

    run(main())


def test_an_expired_certificate_with_a_right_clock_is_no_clock_error(tmp_path: Path) -> None:
    authority = tls.CertificateAuthority.create(
        tmp_path / "hub", "hub", now=NOW - datetime.timedelta(days=4000)
    )

    async def main() -> None:
        home = identity(authority, tmp_path / "spoke")
        async with served(Hub(echo), tls.hub_context(tmp_path / "hub")) as server:
            with pytest.raises(AuthError, match="certificate has expired"):
                await connected(server.port, tls.spoke_context(home))

    run(main())


def test_an_expired_spoke_certificate_is_refused(authority: tls.CertificateAuthority, tmp_path: Path) -> None:
    async def main() -> None:
        home = identity(authority, tmp_path / "spoke", now=NOW - datetime.timedelta(days=4000))
        hub = Hub(echo)
        async with served(hub, tls.hub_context(tmp_path / "hub")) as server:
            with pytest.raises(AuthError, match="refused this spoke's certificate"):
                await connected(server.port, tls.spoke_context(home))
            assert all(conn.peer_name is None for conn in hub.connections)

    run(main())


def test_a_revoked_spoke_is_cut_off_while_connected(
    authority: tls.CertificateAuthority, tmp_path: Path
) -> None:
    async def main() -> None:
        home = identity(authority, tmp_path / "spoke")
        hub = Hub(echo)
        async with served(hub, tls.hub_context(tmp_path / "hub")) as server:
            spoke = await connected(server.port, tls.spoke_context(home))
            hub.connections[0].abort(AuthError("this spoke was revoked"))
            await spoke.wait_closed()
            assert "this spoke was revoked" in str(spoke.close_reason)
            await until(lambda: not server.connections)

    run(main())


def test_a_hub_that_dies_during_bulk_over_tls_is_unreachable(
    authority: tls.CertificateAuthority, tmp_path: Path
) -> None:
    async def main() -> None:
        async def die(conn: Any, message: Any, payload: Any, respond: Responder) -> None:
            conn._transport.abort()

        home = identity(authority, tmp_path / "spoke")
        async with served(Hub(die), tls.hub_context(tmp_path / "hub")) as server:
            spoke = await connected(server.port, tls.spoke_context(home))
            with pytest.raises(HubUnreachable):
                await spoke.call(Stat("p", ()), timeout=5)

    run(main())


# -- signing and files ------------------------------------------------------------------------------


def test_only_the_key_of_a_request_is_believed(authority: tls.CertificateAuthority) -> None:
    key = tls.new_key()
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "root")]))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate = authority.sign_spoke(request.public_bytes(serialization.Encoding.PEM), "gpu-1")
    assert tls.common_name(certificate) == "gpu-1"
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    certificate.verify_directly_issued_by(authority.certificate)


def test_bad_requests_are_refused(authority: tls.CertificateAuthority) -> None:
    good = tls.signing_request(tls.new_key(), "gpu-1")
    with pytest.raises(AuthError, match="damaged"):
        authority.sign_spoke(b"nonsense", "gpu-1")
    der = bytearray(x509.load_pem_x509_csr(good).public_bytes(serialization.Encoding.DER))
    der[-3] ^= 1
    forged = x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(AuthError, match="not signed by its own key"):
        authority.sign_spoke(forged, "gpu-1")
    other = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .sign(ed25519.Ed25519PrivateKey.generate(), None)
    )
    with pytest.raises(AuthError, match="P-256"):
        authority.sign_spoke(other.public_bytes(serialization.Encoding.PEM), "gpu-1")
    for name in ("", "a b", "a/b", "-a", "x" * 64, "a\n"):
        with pytest.raises(AuthError, match="cannot name"):
            authority.sign_spoke(good, name)


def test_missing_and_damaged_files_are_explained(authority: tls.CertificateAuthority, tmp_path: Path) -> None:
    with pytest.raises(AuthError, match="hub init"):
        tls.CertificateAuthority.load(tmp_path / "nowhere")
    with pytest.raises(AuthError, match="hub init"):
        tls.hub_context(tmp_path / "nowhere")
    with pytest.raises(AuthError, match="--token-file"):
        tls.spoke_context(tmp_path / "nowhere")
    assert not tls.has_identity(tmp_path / "nowhere")
    home = identity(authority, tmp_path / "spoke")
    assert tls.has_identity(home)
    whole = (home / "identity.pem").read_bytes()
    for cut in (0, 10, 300, len(whole) // 2, len(whole) - 100):
        (home / "identity.pem").write_bytes(whole[:cut])
        with pytest.raises(AuthError, match="damaged"):
            tls.spoke_context(home)
    for name, load in (("hub.pem", tls.hub_context), ("ca-key.pem", tls.CertificateAuthority.load)):
        (tmp_path / "hub" / name).write_bytes(b"")
        with pytest.raises(AuthError, match="damaged"):
            load(tmp_path / "hub")


def test_a_private_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    tls.write_private(path, b"one")
    tls.write_private(path, b"two")
    assert path.read_bytes() == b"two" and [p.name for p in tmp_path.iterdir()] == ["file"]
