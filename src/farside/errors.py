"""Errors that a user may meet.

Each says what happened, to which path, at which hub, whether trying again may help, and what to do
next. The command line prints them without a traceback and exits with ``exit_code``; the mount answers
the kernel with ``errno``.
"""

from __future__ import annotations

import errno as _errno
import os

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3


class FarsideError(Exception):
    """Base of all errors that farside raises on purpose.

    Attributes:
        message: what happened, one sentence without a full stop.
        errno: the errno that a system call through the mount returns for it.
        path: the file or directory concerned, as bytes, or None.
        hub: ``host:port`` of the hub concerned, or None.
        retry: whether the same call may succeed later without anybody changing anything.
        hint: what the user can do next, or "".
        exit_code: exit status of the command line.
    """

    default_errno = _errno.EIO
    default_retry = False
    exit_code = EXIT_FAILED

    def __init__(
        self,
        message: str,
        *,
        errno: int | None = None,
        path: bytes | str | None = None,
        hub: str | None = None,
        retry: bool | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.errno = self.default_errno if errno is None else errno
        self.path = os.fsencode(path) if isinstance(path, str) else path
        self.hub = hub
        self.retry = self.default_retry if retry is None else retry
        self.hint = hint

    def __str__(self) -> str:
        text = self.message
        if self.path is not None:
            text += f" [{printable(self.path)}]"
        if self.hub is not None:
            text += f" (hub {self.hub})"
        if self.hint:
            text += f"; {self.hint}"
        return text


class UsageError(FarsideError):
    """The command line, a configuration file or an argument is wrong."""

    default_errno = _errno.EINVAL
    exit_code = EXIT_USAGE


class HubUnreachable(FarsideError):
    """The hub does not answer: refused, timed out, cut off. Never means "no such file"."""

    default_errno = _errno.ETIMEDOUT
    default_retry = True
    exit_code = EXIT_UNREACHABLE


class ProtocolError(FarsideError):
    """The peer sent bytes that are not valid farside frames (wrong port, corruption, a bug)."""

    default_errno = _errno.EPROTO


class VersionMismatch(ProtocolError):
    """Hub and spoke have no protocol version in common; the message names both."""


class AuthError(FarsideError):
    """A certificate, fingerprint or join token was refused."""

    default_errno = _errno.EACCES


class RemoteError(FarsideError):
    """The hub answered a request with an errno (ENOENT, EACCES, EIO of its disk, …)."""


class StaleVersion(FarsideError):
    """The file changed at the hub; the version asked for no longer exists there."""

    default_errno = _errno.ESTALE


class ChecksumMismatch(FarsideError):
    """Bytes do not match their checksum; they were dropped, never served."""

    default_retry = True


class CacheError(FarsideError):
    """The cache directory cannot be used: locked, unwritable, of another format, too small."""


class MountError(FarsideError):
    """The mount point or /dev/fuse cannot be used."""


def printable(path: bytes) -> str:
    """A path as text for messages: UTF-8 where it is, ``\\xNN`` where it is not."""
    text = path.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
