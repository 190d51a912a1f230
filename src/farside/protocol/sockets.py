"""Socket options of the link's TCP connections, the same at both ends.

SO_RCVBUF and SO_SNDBUF are never set: the kernel clamps them and then stops tuning the buffers itself.
"""

from __future__ import annotations

import errno
import socket

from ..errors import UsageError

USER_TIMEOUT_S = 20
"""Sent data that nobody acknowledges for this long means a dead link."""

NOTSENT_BYTES = 1024 * 1024
"""At most this much waits unsent in the kernel, so that a small frame is not far behind a bulk payload."""

KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 10, 5, 3


def tune(sock: socket.socket, congestion: str | None = None) -> None:
    """No Nagle, keep-alive, a bounded time for unacknowledged data, and the congestion control asked for.

    Raises:
        UsageError: this kernel does not have that congestion control, or does not allow it.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_S * 1000)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_BYTES)
    if congestion:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EPERM):
                raise
            raise UsageError(
                f"the kernel does not offer the congestion control {congestion!r}",
                hint=f"try `modprobe tcp_{congestion}`, or see net.ipv4.tcp_allowed_congestion_control",
            ) from error


def check_congestion(congestion: str | None) -> None:
    """Raises UsageError now, rather than at the first connection, when that control is not to be had."""
    if congestion:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            tune(probe, congestion)


def choose_congestion(setting: str) -> str | None:
    """The congestion control for a setting: ``auto`` is bbr where this kernel offers it, ``default`` the
    kernel's own (None), any other name itself.

    BBR paces to the measured bottleneck instead of backing off at each loss (Cardwell et al., 2016), which
    long paths need; the side that sends the bulk, the hub, needs it most.

    Raises:
        UsageError: a control that was asked for by name is not to be had.
    """
    if setting == "default":
        return None
    try:
        check_congestion("bbr" if setting == "auto" else setting)
    except UsageError:
        if setting == "auto":
            return None
        raise
    return "bbr" if setting == "auto" else setting


def address_text(address: object) -> str:
    """``host:port`` of a socket address, IPv6 in brackets."""
    if isinstance(address, tuple) and len(address) >= 2:
        host = str(address[0])
        return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"
    return str(address)
