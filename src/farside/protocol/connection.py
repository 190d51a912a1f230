"""Both ends of a connection: ``connect`` for a spoke, ``serve`` for a hub."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl

from ..errors import AuthError, FarsideError, HubUnreachable, ProtocolError
from .client import Connection, OnPush, Reply, ReplyStream
from .endpoint import Endpoint
from .messages import Hello
from .server import Responder, Server, ServerConnection, ServerHandler, serve
from .sockets import tune
from .tls import HUB_IDENTITY, MAX_SKEW_S, clock_error, stranger_context, tls_error

__all__ = [
    "Connection",
    "Endpoint",
    "Reply",
    "ReplyStream",
    "Responder",
    "Server",
    "ServerConnection",
    "ServerHandler",
    "connect",
    "serve",
]

# X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_VALIDITY_CODES = (9, 10)


async def connect(
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | None,
    hello: Hello,
    timeout: float,
    on_push: OnPush | None = None,
    congestion: str | None = None,
    local: tuple[str, int] | None = None,
) -> Connection:
    """Connects to a hub and exchanges greetings, all within ``timeout`` seconds.

    ``on_push`` is called in the loop for every message that the hub pushes, the first ones possibly
    before this returns. ``local``: address and port (0: any) to connect from.

    Raises:
        HubUnreachable: no such host, refused, timed out.
        ProtocolError: something else than a hub answers there, or TLS at one end only.
        VersionMismatch: no protocol version in common.
        AuthError: a certificate was refused, at either end; or the clock is wrong by MAX_SKEW_S or more.
        UsageError: the kernel does not have that congestion control.
    """
    hub = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout):
            try:
                return await _connect(host, port, hub, tls, hello, on_push, congestion, local)
            except ssl.SSLCertVerificationError as error:
                if error.verify_code in _VALIDITY_CODES:
                    skew = await _clock_skew(host, port, hub, hello, local)
                    if skew is not None and abs(skew) > 60:
                        raise clock_error(skew, hub) from error
                raise
    except TimeoutError as error:
        raise HubUnreachable(
            f"no answer within {timeout:g} s",
            hub=hub,
            hint="check address, port and firewall; is a hub there?",
        ) from error
    except ssl.SSLError as error:
        raise tls_error(error, hub) from error
    except OSError as error:
        raise _socket_error(error, hub) from error


async def _connect(
    host: str,
    port: int,
    hub: str,
    tls: ssl.SSLContext | None,
    hello: Hello,
    on_push: OnPush | None,
    congestion: str | None,
    local: tuple[str, int] | None,
) -> Connection:
    loop = asyncio.get_running_loop()
    sock = await _open_socket(host, port, congestion, local)
    try:
        _, connection = await loop.create_connection(
            lambda: Connection(
                hello, tls=tls is not None, address=hub, on_push=on_push, congestion=congestion
            ),
            sock=sock,
            ssl=tls,
            server_hostname=HUB_IDENTITY if tls is not None else None,
        )
    except BaseException:
        sock.close()
        raise
    try:
        await connection.welcomed
        if (
            tls is not None
            and tls.verify_mode == ssl.CERT_REQUIRED
            and abs(connection.clock_skew_s) >= MAX_SKEW_S
        ):
            raise clock_error(connection.clock_skew_s, hub)
    except BaseException as error:
        reason = error if isinstance(error, FarsideError) else HubUnreachable("given up", hub=hub)
        connection.abort(reason)
        if isinstance(error, HubUnreachable) and not connection.bytes_in:
            raise await _why_closed(host, port, hub, tls, hello, local, error) from error
        raise
    return connection


async def _open_socket(
    host: str, port: int, congestion: str | None, local: tuple[str, int] | None
) -> socket.socket:
    """A connected socket to the first address of the host that answers."""
    loop = asyncio.get_running_loop()
    last: OSError | None = None
    for family, kind, proto, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, proto)
        try:
            sock.setblocking(False)
            tune(sock, congestion)
            if local is not None:
                sock.bind(local)
            await loop.sock_connect(sock, address)
            return sock
        except OSError as error:
            sock.close()
            last = error
        except BaseException:
            sock.close()
            raise
    raise last or OSError(errno.EHOSTUNREACH, "the host has no address")


async def _why_closed(
    host: str,
    port: int,
    hub: str,
    tls: ssl.SSLContext | None,
    hello: Hello,
    local: tuple[str, int] | None,
    error: HubUnreachable,
) -> FarsideError:
    """A better reason for a connection that the hub closed before it said a word.

    asyncio's TLS closes without sending the alert when it refuses a peer, so the spoke asks once more,
    as a stranger: a hub that admits strangers objects to this spoke's certificate, or to its plain TCP.
    """
    if tls is not None and tls.verify_mode == ssl.CERT_NONE:
        return error
    skew = await _clock_skew(host, port, hub, hello, local)
    if skew is None:
        return error
    if tls is None:
        return ProtocolError(
            "that hub speaks TLS, but this connection is without",
            hub=hub,
            hint="join it with a token; --insecure is only for hubs that serve with it",
        )
    if abs(skew) >= MAX_SKEW_S:
        return clock_error(skew, hub)
    return AuthError(
        "the hub refused this spoke's certificate (it expired, or another hub issued it)",
        hub=hub,
        hint="join again with a new token",
    )


async def _clock_skew(
    host: str, port: int, hub: str, hello: Hello, local: tuple[str, int] | None
) -> float | None:
    """This clock minus the hub's in seconds, asked as a stranger over TLS; None when there is no answer.

    The answer is not verified, so it serves for messages only.
    """
    try:
        connection = await _connect(host, port, hub, stranger_context(), hello, None, None, local)
    except (OSError, FarsideError):
        return None
    skew = connection.clock_skew_s
    await connection.close()
    return skew


def _socket_error(error: OSError, hub: str) -> HubUnreachable:
    if isinstance(error, socket.gaierror):
        return HubUnreachable(f"the host name cannot be resolved: {error.strerror}", hub=hub)
    if isinstance(error, ConnectionRefusedError):
        return HubUnreachable("nothing listens there", hub=hub, hint="is `farside hub serve` running?")
    return HubUnreachable(f"cannot connect: {error.strerror or error}", hub=hub)
