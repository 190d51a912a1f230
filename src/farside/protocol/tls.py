"""Mutual TLS with a private certificate authority of each hub.

Names in DNS say nothing here: hubs are reached by addresses and through tunnels. A spoke therefore
trusts exactly one CA, the hub's own, and asks for the fixed name HUB_IDENTITY, which only the hub's
certificate carries. A hub trusts client certificates that its CA signed; their common name is the spoke's.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
import re
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import AuthError, FarsideError, ProtocolError

HUB_IDENTITY = "farside-hub"
"""The name that every hub's certificate carries and every spoke checks."""

CA_DAYS, HUB_DAYS, SPOKE_DAYS = 3650, 3650, 3650
BACKDATE = datetime.timedelta(hours=1)
"""Certificates are valid from this long before they are made, for clocks that are a little behind."""

MAX_SKEW_S = 12 * 3600.0
"""A spoke whose clock differs by more from the hub's is told so instead of being let in."""

CA_CERTIFICATE, CA_KEY, HUB_FILE = "ca.pem", "ca-key.pem", "hub.pem"
IDENTITY_FILE = "identity.pem"

# With a space, so that no hub or spoke can have the same name: OpenSSL would take it for self-signed.
_CA_SUFFIX = " authority"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PEM = re.compile(rb"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----\n?", re.DOTALL)


class PeerCertificate(NamedTuple):
    """Common name, serial number and SHA-256 fingerprint (hex) of a verified client certificate."""

    name: str
    serial: int
    fingerprint: str


def peer_certificate(der: bytes | None) -> PeerCertificate | None:
    """What a certificate says of its owner; None for none."""
    if not der:
        return None
    certificate = x509.load_der_x509_certificate(der)
    return PeerCertificate(
        common_name(certificate), certificate.serial_number, hashlib.sha256(der).hexdigest()
    )


def common_name(certificate: x509.Certificate | x509.CertificateSigningRequest) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def fingerprint(ca_pem: bytes) -> bytes:
    """SHA-256 (32 bytes) of a PEM certificate's DER form.

    Raises:
        AuthError: it is no PEM certificate.
    """
    return hashlib.sha256(load_certificate(ca_pem).public_bytes(serialization.Encoding.DER)).digest()


def load_certificate(pem: bytes) -> x509.Certificate:
    """Raises AuthError when it is no PEM certificate."""
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise AuthError(f"not a PEM certificate: {error}") from error


def write_private(path: Path, data: bytes) -> None:
    """Writes a file that only its owner may read: temp, fsync, rename, fsync of the directory."""
    temp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temp.unlink(missing_ok=True)
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temp.rename(path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def new_key() -> ec.EllipticCurvePrivateKey:
    """A P-256 key."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def signing_request(key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    """A certificate signing request (PEM) for a spoke of that name."""
    request = x509.CertificateSigningRequestBuilder().subject_name(_subject(check_name(name)))
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def check_name(name: str) -> str:
    """The name of a hub or spoke, as it is.

    Raises:
        AuthError: it is not 1 to 63 of letters, digits and ``. _ -``, starting with a letter or digit.
    """
    if not _NAME.fullmatch(name):
        raise AuthError(
            f"{name!r} cannot name a hub or spoke", hint="use letters, digits and . _ -, 63 at most"
        )
    return name


class CertificateAuthority:
    """A hub's private CA, in a directory: ``ca.pem``, ``ca-key.pem``, ``hub.pem`` (key and certificate)."""

    def __init__(
        self, directory: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
    ) -> None:
        self.directory = directory
        self.certificate = certificate
        self._key = key

    @property
    def pem(self) -> bytes:
        """The CA's certificate, PEM. It is public."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the CA's certificate, 32 bytes."""
        return fingerprint(self.pem)

    @property
    def hub_name(self) -> str:
        return common_name(self.certificate).removesuffix(_CA_SUFFIX)

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        name: str,
        addresses: Iterable[str] = (),
        *,
        now: datetime.datetime | None = None,
    ) -> Self:
        """Makes the CA and the hub's certificate, files 0600.

        ``addresses``: host names and IP addresses to name in the hub's certificate, for other TLS tools
        (spokes check HUB_IDENTITY). ``now``: the time to make them at, for tests.

        Raises:
            AuthError: there is a CA already, or the name is impossible.
            OSError: the directory cannot be written.
        """
        directory = Path(directory)
        if (directory / CA_CERTIFICATE).exists():
            raise AuthError("there is a certificate authority already", path=str(directory))
        now = now or datetime.datetime.now(datetime.UTC)
        key = new_key()
        subject = _subject(check_name(name) + _CA_SUFFIX)
        builder = (
            _builder(subject, subject, key.public_key(), now, CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(ca=True), critical=True)
        )
        authority = cls(directory, builder.sign(key, hashes.SHA256()), key)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(directory / CA_KEY, key_pem(key))
        authority.renew_hub(addresses, now=now)
        write_private(directory / CA_CERTIFICATE, authority.pem)  # last: it says that the others are there
        return authority

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Self:
        """Raises AuthError when the directory has no (whole) CA."""
        directory = Path(directory)
        try:
            certificate = load_certificate((directory / CA_CERTIFICATE).read_bytes())
            key = serialization.load_pem_private_key((directory / CA_KEY).read_bytes(), None)
        except FileNotFoundError as error:
            raise AuthError(
                "there is no certificate authority", path=str(directory), hint="run `farside hub init`"
            ) from error
        except ValueError as error:
            raise AuthError(f"the CA's key is damaged: {error}", path=str(directory)) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise AuthError("the CA's key is of another kind", path=str(directory))
        return cls(directory, certificate, key)

    def renew_hub(self, addresses: Iterable[str] = (), *, now: datetime.datetime | None = None) -> None:
        """Makes a new key and certificate for the hub's end (``hub.pem``)."""
        now = now or datetime.datetime.now(datetime.UTC)
        key = new_key()
        names: list[x509.GeneralName] = [x509.DNSName(HUB_IDENTITY)]
        for address in addresses:
            try:
                names.append(x509.IPAddress(ipaddress.ip_address(address)))
            except ValueError:
                names.append(x509.DNSName(address))
        certificate = self._sign(
            _subject(self.hub_name), key.public_key(), ExtendedKeyUsageOID.SERVER_AUTH, names, now, HUB_DAYS
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        write_private(self.directory / HUB_FILE, key_pem(key) + pem)

    def sign_spoke(self, csr: bytes, name: str, *, now: datetime.datetime | None = None) -> x509.Certificate:
        """A client certificate for the key in a signing request (PEM); nothing else in it is believed.

        Raises:
            AuthError: the request is damaged, not signed by its own key, or of another kind of key.
        """
        try:
            request = x509.load_pem_x509_csr(csr)
        except ValueError as error:
            raise AuthError(f"the certificate signing request is damaged: {error}") from error
        key = request.public_key()
        if not request.is_signature_valid:
            raise AuthError("the certificate signing request is not signed by its own key")
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise AuthError("the certificate signing request is not for a P-256 key")
        now = now or datetime.datetime.now(datetime.UTC)
        return self._sign(
            _subject(check_name(name)), key, ExtendedKeyUsageOID.CLIENT_AUTH, [], now, SPOKE_DAYS
        )

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        usage: x509.ObjectIdentifier,
        names: list[x509.GeneralName],
        now: datetime.datetime,
        days: int,
    ) -> x509.Certificate:
        builder = (
            _builder(subject, self.certificate.subject, key, now, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(ca=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def hub_context(directory: str | os.PathLike[str]) -> ssl.SSLContext:
    """TLS 1.3 for a hub: client certificates are verified where there is one; joining goes without.

    Raises:
        AuthError: the directory has no (whole) CA.
    """
    directory = Path(directory)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_OPTIONAL
    try:
        context.load_cert_chain(directory / HUB_FILE)
        context.load_verify_locations(cafile=directory / CA_CERTIFICATE)
    except FileNotFoundError as error:
        raise AuthError(
            "the hub has no certificate", path=str(directory), hint="run `farside hub init`"
        ) from error
    except ssl.SSLError as error:
        raise AuthError(f"the hub's certificate is damaged: {error}", path=str(directory)) from error
    return context


def spoke_context(identity_dir: str | os.PathLike[str]) -> ssl.SSLContext:
    """TLS 1.3 for a spoke that has joined: shows its certificate, trusts its hub's CA only.

    Raises:
        AuthError: the directory holds no identity, or a damaged one.
    """
    path = Path(identity_dir) / IDENTITY_FILE
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        blocks = [match.group() for match in _PEM.finditer(path.read_bytes())]
        context.load_cert_chain(path)
        context.load_verify_locations(cadata=blocks[-1].decode())
    except FileNotFoundError as error:
        raise AuthError(
            "this spoke has not joined the hub", path=str(path), hint="mount once with --token-file"
        ) from error
    except (ssl.SSLError, IndexError, ValueError) as error:
        raise AuthError(
            f"this spoke's identity is damaged: {error}",
            path=str(path),
            hint="join again with a new token",
        ) from error
    return context


def stranger_context() -> ssl.SSLContext:
    """TLS that verifies nothing: to join (which checks by itself) and to ask a hub for the time."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def has_identity(identity_dir: str | os.PathLike[str]) -> bool:
    """Whether a spoke has joined from this directory."""
    return (Path(identity_dir) / IDENTITY_FILE).exists()


def verify_hub(ca_pem: bytes, leaf_der: bytes | None) -> None:
    """Checks that the certificate a server presented is a hub certificate of this CA.

    Validity times are not looked at: the clock is compared with the hub's instead.

    Raises:
        AuthError: it is not.
    """
    if not leaf_der:
        raise AuthError("the server presented no certificate")
    ca, leaf = load_certificate(ca_pem), x509.load_der_x509_certificate(leaf_der)
    try:
        leaf.verify_directly_issued_by(ca)
        usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound) as error:
        raise AuthError("the server's certificate was not issued by the hub's authority") from error
    if ExtendedKeyUsageOID.SERVER_AUTH not in usage or HUB_IDENTITY not in names.get_values_for_type(
        x509.DNSName
    ):
        raise AuthError("the server's certificate is not a hub's")


def clock_error(skew_s: float, hub: str | None) -> AuthError:
    """The error for a spoke whose clock is ``skew_s`` seconds ahead of the hub's (negative: behind)."""
    direction = "ahead of" if skew_s > 0 else "behind"
    delta = datetime.timedelta(seconds=round(abs(skew_s)))
    return AuthError(
        f"this machine's clock is {delta} {direction} the hub's, so certificates cannot be checked",
        hub=hub,
        retry=True,
        hint="set the clock (timedatectl set-ntp true) and try again",
    )


def tls_error(error: ssl.SSLError, hub: str | None) -> FarsideError:
    """What a TLS failure means: AuthError where certificates are to blame, else ProtocolError."""
    reason = error.reason or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthError(
            f"the hub's certificate was refused: {error.verify_message}",
            hub=hub,
            hint="is it the hub that this spoke joined? If it was set up anew, join again with a new token",
        )
    if "ALERT" in reason and ("UNKNOWN_CA" in reason or "DECRYPT_ERROR" in reason):
        return AuthError(
            "the hub does not know this spoke's certificate", hub=hub, hint="join again with a new token"
        )
    if "ALERT" in reason and "CERTIFICATE" in reason:
        return AuthError(
            f"the hub refused this spoke's certificate ({reason})",
            hub=hub,
            hint="it may have expired, or a clock is wrong; join again with a new token",
        )
    if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"):
        return ProtocolError(
            "that port does not speak TLS", hub=hub, hint="check the port; is the hub served with --insecure?"
        )
    return ProtocolError(f"TLS failed: {reason}", hub=hub, retry=True)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    days: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
