"""Errors across the link: exceptions become Failure messages at the hub and exceptions again at the spoke."""

from __future__ import annotations

import errno
import os

from ..errors import (
    AuthError,
    FarsideError,
    HubUnreachable,
    ProtocolError,
    RemoteError,
    StaleVersion,
    VersionMismatch,
    printable,
)
from .messages import Failure

_CODE_OF: tuple[tuple[type[FarsideError], str], ...] = (
    (StaleVersion, "stale"),
    (VersionMismatch, "version"),
    (ProtocolError, "bad_request"),
    (AuthError, "forbidden"),
)


def failure_of(error: BaseException) -> Failure:
    """The Failure that tells a spoke of an exception raised while its request was handled.

    Unexpected exceptions tell the spoke their type only: their text may hold what is none of its business.
    """
    if isinstance(error, FarsideError):
        code = next((code for kind, code in _CODE_OF if isinstance(error, kind)), "errno")
        text = error.message if not error.hint else f"{error.message}; {error.hint}"
        return Failure(error.errno, code, text, error.path or b"", error.retry)
    if isinstance(error, OSError) and error.errno:
        path = error.filename
        name = os.fsencode(path) if isinstance(path, (str, bytes)) else b""
        return Failure(error.errno, "errno", os.strerror(error.errno), name)
    return Failure(errno.EIO, "internal", f"the hub failed ({type(error).__name__}); its log says more")


def error_of(failure: Failure, hub: str | None) -> FarsideError:
    """The exception that a Failure is raised as at the spoke.

    A missing portal is ENODEV, never ENOENT: it must not be taken for a deleted file.
    """
    kind: type[FarsideError] = RemoteError
    number = failure.errno or errno.EIO
    if failure.code == "stale":
        kind = StaleVersion
    elif failure.code == "version":
        kind = VersionMismatch
    elif failure.code in ("forbidden", "bad_token"):
        kind = AuthError
    elif failure.code == "bad_request":
        kind = ProtocolError
    elif failure.code == "no_portal":
        number = errno.ENODEV
    return kind(
        printable(failure.message.encode("utf-8", "surrogatepass")),
        errno=number,
        path=failure.path or None,
        hub=hub,
        retry=failure.retry,
    )


def copy_of(error: FarsideError) -> FarsideError:
    """A fresh exception that says the same, to raise in each of many waiting tasks."""
    return type(error)(
        error.message, errno=error.errno, path=error.path, hub=error.hub, retry=error.retry, hint=error.hint
    )


def unreachable(error: BaseException | None, hub: str | None) -> HubUnreachable:
    """HubUnreachable for a connection that was lost to ``error`` (None: the peer closed it)."""
    if error is None:
        return HubUnreachable("the connection was closed by the other side", hub=hub)
    detail = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return HubUnreachable(f"the connection was lost: {detail or type(error).__name__}", hub=hub)
