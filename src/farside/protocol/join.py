"""Joining a hub: a token is exchanged for a certificate, once.

The hub is checked before the secret leaves this machine: its CA must have the token's fingerprint, and the
certificate of this very TLS connection must be a hub certificate issued by that CA.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from .. import __version__
from ..errors import AuthError, ProtocolError
from .connection import Connection, connect
from .frames import OLDEST, PROTOCOL
from .messages import Hello, Join, Joined
from .tls import (
    IDENTITY_FILE,
    MAX_SKEW_S,
    check_name,
    clock_error,
    fingerprint,
    key_pem,
    load_certificate,
    new_key,
    signing_request,
    stranger_context,
    verify_hub,
    write_private,
)
from .tokens import JoinToken


async def join(
    host: str,
    port: int,
    token: JoinToken,
    identity_dir: str | os.PathLike[str],
    name: str,
    *,
    timeout: float = 30.0,
) -> Joined:
    """Joins the hub under ``name`` and writes ``identity.pem`` (key, certificate, CA; 0600, atomically).

    ``timeout``: seconds for connecting and again for the hub's answer. An identity that was there before
    is replaced only when all went well.

    Raises:
        AuthError: wrong CA or certificate, expired or used token, impossible name, clock wrong by hours.
        HubUnreachable, ProtocolError, VersionMismatch: as ``connect``.
        OSError: the directory cannot be written; found out before the token is used up.
    """
    check_name(name)
    directory = Path(identity_dir)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = new_key()
    write_private(directory / "joining.pem", key_pem(key))
    try:
        hello = Hello(PROTOCOL, OLDEST, f"farside {__version__}", name)
        connection = await connect(host, port, tls=stranger_context(), hello=hello, timeout=timeout)
        try:
            _check_hub(connection, token)
            request = Join(token.secret, signing_request(key, name), name)
            reply = (await connection.call(request, timeout=timeout)).message
        finally:
            await connection.close()
        if not isinstance(reply, Joined):
            raise ProtocolError(f"Join was answered by {type(reply).__name__}", hub=connection.address)
        _check_answer(reply, token, key.public_key(), connection.address)
        write_private(directory / IDENTITY_FILE, key_pem(key) + reply.certificate + reply.ca)
    finally:
        (directory / "joining.pem").unlink(missing_ok=True)
    return reply


def _check_hub(connection: Connection, token: JoinToken) -> None:
    hub, welcome = connection.address, connection.peer
    try:
        genuine = hmac.compare_digest(fingerprint(welcome.ca_pem), token.ca_sha256)
    except AuthError:
        genuine = False
    if not genuine:
        raise AuthError(
            f"that is not the hub {token.hub!r} of the token: its authority has another fingerprint",
            hub=hub,
            hint="check the address, or ask for a new token if it was set up anew; the secret was not sent",
        )
    try:
        verify_hub(welcome.ca_pem, connection.certificate)
    except AuthError as error:
        raise AuthError(
            f"{error.message}: somebody stands in between, or answers in place of the hub",
            hub=hub,
            hint="the secret was not sent",
        ) from error
    if abs(connection.clock_skew_s) >= MAX_SKEW_S:
        raise clock_error(connection.clock_skew_s, hub)
    if welcome.clock_ns // 1_000_000_000 >= token.expires:
        raise AuthError("the join token has expired", hub=hub, hint="ask for a new one: `farside hub invite`")


def _check_answer(reply: Joined, token: JoinToken, key: ec.EllipticCurvePublicKey, hub: str) -> None:
    """The certificate must be for our key and of the hub's authority; later it would fail less clearly."""
    if not hmac.compare_digest(fingerprint(reply.ca), token.ca_sha256):
        raise AuthError("the hub answered with another authority than the token's", hub=hub)
    certificate = load_certificate(reply.certificate)
    try:
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(reply.ca))
    except (ValueError, TypeError, InvalidSignature) as error:
        raise AuthError("the hub answered with a certificate of another authority", hub=hub) from error
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    if certificate.public_key().public_bytes(*form) != key.public_bytes(*form):
        raise AuthError("the hub answered with a certificate for another key", hub=hub)
