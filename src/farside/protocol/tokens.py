"""Join tokens: one line that lets a spoke join a hub once.

``farside1.`` + base64url(msgpack array of the fields + first 4 bytes of its SHA-256). The checksum tells
a token that was damaged in copying from one that the hub does not know.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets

import msgspec

from ..errors import AuthError

PREFIX = "farside1."
_CHECK = 4


class JoinToken(msgspec.Struct, array_like=True, frozen=True):
    """What `farside hub invite` prints.

    Attributes:
        hub: the hub's name.
        address: ``host:port`` to reach it at, as the operator wrote it; may be "".
        ca_sha256: SHA-256 of the hub's CA certificate (DER), 32 bytes.
        secret: the one-time secret, text. The hub keeps only its hash.
        portal: the portal that the spoke may attach.
        writable: whether it may write there.
        expires: Unix time in seconds of the hub's clock.
    """

    hub: str
    address: str
    ca_sha256: bytes
    secret: str
    portal: str
    writable: bool
    expires: int

    def __repr__(self) -> str:
        return f"JoinToken(hub={self.hub!r}, portal={self.portal!r}, expires={self.expires})"


def new_secret() -> str:
    """A secret of 256 random bits, URL-safe text."""
    return secrets.token_urlsafe(32)


def format_token(token: JoinToken) -> str:
    """The token as one line without a newline."""
    body = msgspec.msgpack.encode(token)
    data = base64.urlsafe_b64encode(body + hashlib.sha256(body).digest()[:_CHECK])
    return PREFIX + data.decode().rstrip("=")


def parse_token(text: str) -> JoinToken:
    """The token in a line; white space and line breaks from copying do not matter.

    Raises:
        AuthError: it is no token, of a newer format, or damaged.
    """
    line = "".join(text.split())
    if not line:
        raise AuthError("the join token is empty")
    if not line.startswith(PREFIX):
        if line.startswith("farside"):
            raise AuthError("the join token is of another version", hint="use the hub's version of farside")
        raise AuthError(
            "that is not a join token", hint=f"it starts with {PREFIX!r}; see `farside hub invite`"
        )
    data = line[len(PREFIX) :]
    try:
        raw = base64.b64decode(data + "=" * (-len(data) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise _damaged() from error
    # The last character may hold unused bits; only the one way of writing a token is accepted.
    if base64.urlsafe_b64encode(raw).decode().rstrip("=") != data:
        raise _damaged()
    body, check = raw[:-_CHECK], raw[-_CHECK:]
    if hashlib.sha256(body).digest()[:_CHECK] != check:
        raise _damaged()
    try:
        token = msgspec.msgpack.decode(body, type=JoinToken)
    except msgspec.MsgspecError as error:
        raise _damaged() from error
    if len(token.ca_sha256) != hashlib.sha256().digest_size:
        raise _damaged()
    return token


def _damaged() -> AuthError:
    return AuthError(
        "the join token is damaged (cut short or changed in copying)", hint="copy the whole line again"
    )
