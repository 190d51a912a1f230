"""Frames: the unit of transfer on a connection, without any I/O.

A frame is a 40-byte prefix, a header (one message, or nothing) and a raw payload. ``docs/protocol.md``
gives the layout byte by byte. Lengths are in bytes, integers little-endian.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Mapping, Sequence

import xxhash

from ..errors import ProtocolError, printable

MAGIC = b"FARSIDE1"
"""The first bytes that each side sends."""

PROTOCOL = 1
"""The newest protocol version that this software speaks."""

OLDEST = 1
"""The oldest protocol version that this software speaks."""

KIB, MIB = 1024, 1024 * 1024

MAX_HEADER = 16 * MIB
MAX_REPLY_PAYLOAD = 9 * MIB
MAX_REQUEST_PAYLOAD = 32 * MIB
MAX_SMALL = 64 * KIB
"""The limit before a peer has introduced itself, and for peers that may only join."""

SCRATCH = 64 * KIB
"""Size of the buffer that prefixes, small headers and small payloads are parsed from."""

WINDOW = 32 * MIB
"""Bytes (headers and payloads) of one stream that may be sent and not yet consumed by the receiver."""

CREDIT_STEP = 4 * MIB
"""The receiver of a stream grants new credit each time it has consumed this many bytes."""

PAYLOAD_CHECKED = 1
"""Flag: the prefix carries the xxh3_64 of the payload."""

_BODY = struct.Struct("<IIIBBHQQ")
_CHECK = struct.Struct("<Q")
_CREDIT = struct.Struct("<Q")
PREFIX_SIZE = _BODY.size + _CHECK.size

Buffer = bytes | bytearray | memoryview
Payload = Buffer | Sequence[Buffer]
Received = bytes | bytearray
Limits = Mapping[int, tuple[int, int]]


class Kind(enum.IntEnum):
    """What a frame is. Spokes send REQUEST, CANCEL and CREDIT; hubs send the others."""

    REQUEST = 1
    PART = 2
    FINAL = 3
    ERROR = 4
    CANCEL = 5
    PUSH = 6
    CREDIT = 7


HUB_SENDS: Limits = {
    Kind.PART: (MAX_HEADER, MAX_REPLY_PAYLOAD),
    Kind.FINAL: (MAX_HEADER, MAX_REPLY_PAYLOAD),
    Kind.ERROR: (MAX_SMALL, 0),
    Kind.PUSH: (MAX_HEADER, 0),
}
"""(largest header, largest payload) of each kind of frame that a spoke accepts."""

SPOKE_SENDS: Limits = {
    Kind.REQUEST: (MAX_HEADER, MAX_REQUEST_PAYLOAD),
    Kind.CANCEL: (0, 0),
    Kind.CREDIT: (_CREDIT.size, 0),
}
"""(largest header, largest payload) of each kind of frame that a hub accepts."""

STRANGER_SENDS: Limits = {Kind.REQUEST: (MAX_SMALL, 0), Kind.CANCEL: (0, 0)}
"""What a hub accepts from a peer that has not said hello, or has no certificate and may only join."""

OnFrame = Callable[[int, int, int, bytes, Received], None]
"""Called with kind, flags, stream, header, payload."""


def buffers_of(payload: Payload) -> list[memoryview]:
    """The non-empty buffers of a payload as flat byte views (nothing is copied)."""
    parts = [payload] if isinstance(payload, (bytes, bytearray, memoryview)) else payload
    return [memoryview(part).cast("B") for part in parts if len(part)]


def frame_head(
    kind: int, stream: int, header: bytes = b"", payload: Sequence[memoryview] = (), *, checked: bool = True
) -> bytes:
    """Prefix and header of a frame; the payload's buffers follow it on the wire.

    ``checked`` puts the payload's checksum in the prefix. Only Data goes without: its blocks carry
    one checksum a chunk, which the receiver verifies anyway.
    """
    length = sum(map(len, payload))
    flags, check = 0, 0
    if length and checked:
        flags = PAYLOAD_CHECKED
        if len(payload) == 1:
            check = xxhash.xxh3_64_intdigest(payload[0])
        else:
            digest = xxhash.xxh3_64()
            for part in payload:
                digest.update(part)
            check = digest.intdigest()
    body = _BODY.pack(len(header), length, stream, kind, flags, 0, check, xxhash.xxh3_64_intdigest(header))
    return b"".join((body, _CHECK.pack(xxhash.xxh3_64_intdigest(body)), header))


def credit_head(stream: int, count: int) -> bytes:
    """A whole CREDIT frame that grants ``count`` more bytes to the sender of ``stream``."""
    return frame_head(Kind.CREDIT, stream, _CREDIT.pack(count))


def credit_of(header: bytes) -> int:
    """The bytes that a CREDIT frame grants.

    Raises:
        ProtocolError: the header has the wrong length.
    """
    if len(header) != _CREDIT.size:
        raise ProtocolError(f"a credit frame of {len(header)} bytes")
    return int(_CREDIT.unpack(header)[0])


def greeting_error(first: bytes, hub: str | None) -> ProtocolError:
    """The error for a peer whose first bytes are not the magic: says what it seems to speak instead."""
    if first[:2] in (b"\x15\x03", b"\x16\x03"):
        return ProtocolError(
            "that port speaks TLS, but this connection is without",
            hub=hub,
            hint="join the hub with a token; --insecure is only for hubs that serve with it",
        )
    if first[:7] == MAGIC[:7]:
        return ProtocolError(f"the peer speaks another farside framing ({printable(first[:8])})", hub=hub)
    line = printable(first.split(b"\n", 1)[0].rstrip(b"\r")[:80])
    return ProtocolError(
        f"that port does not speak farside (it answered: {line})", hub=hub, hint="check host and port"
    )


class FrameReader:
    """Cuts a byte stream into frames.

    ``buffer()`` says where the next received bytes go, ``received(n)`` that n of them arrived. Large
    payloads and headers are received straight into a fresh bytearray of their exact size, which is then
    handed over and never touched again; small ones are copied out of the scratch buffer.
    """

    def __init__(self, on_frame: OnFrame, limits: Limits, hub: str | None = None) -> None:
        self.limits = limits
        self._on_frame = on_frame
        self._hub = hub
        self._scratch = bytearray(SCRATCH)
        self._view = memoryview(self._scratch)
        self._start = 0
        self._end = 0
        self._greeted = False
        self._direct: bytearray | None = None
        self._filled = 0
        # The frame being received: prefix fields, and its header once that is here.
        self._fields: tuple[int, int, int, int, int, int, int, int] | None = None
        self._header: bytes | None = None

    @property
    def missing(self) -> int:
        """Bytes of the current large payload or header that are still to come, 0 between frames."""
        return 0 if self._direct is None else len(self._direct) - self._filled

    @property
    def stream(self) -> int | None:
        """Stream of the frame that is partly here, None between frames."""
        return None if self._fields is None else self._fields[2]

    def buffer(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if self._direct is not None:
            return memoryview(self._direct)[self._filled :]
        if self._start:
            left = self._end - self._start
            if left:
                self._scratch[:left] = self._scratch[self._start : self._end]
            self._start, self._end = 0, left
        return self._view[self._end :]

    def received(self, count: int) -> None:
        """``count`` bytes were put in ``buffer()``; calls ``on_frame`` for each frame that is complete.

        Raises:
            ProtocolError: wrong magic, a bad checksum, a limit violated; the connection must be closed.
        """
        if self._direct is None:
            self._end += count
        else:
            self._filled += count
            if self._filled < len(self._direct):
                return
            whole, self._direct = self._direct, None
            if self._header is None:
                self._take_header(bytes(whole))
            else:
                self._emit(whole)
        if not self._greeted and not self._greet():
            return
        while self._step():
            pass

    def _greet(self) -> bool:
        got = bytes(self._view[self._start : min(self._end, self._start + len(MAGIC))])
        if not MAGIC.startswith(got):
            raise greeting_error(bytes(self._view[self._start : self._end]), self._hub)
        if len(got) < len(MAGIC):
            return False
        self._greeted = True
        self._start += len(MAGIC)
        return True

    def _step(self) -> bool:
        """One step forward in the scratch buffer; False when more bytes are needed first."""
        if self._direct is not None:
            return False
        have = self._end - self._start
        if self._fields is None:
            if have < PREFIX_SIZE:
                return False
            self._take_prefix()
            return True
        assert self._fields is not None
        wanted = self._fields[0] if self._header is None else self._fields[1]
        if have >= wanted:
            piece = bytes(self._view[self._start : self._start + wanted])
            self._start += wanted
            if self._header is None:
                self._take_header(piece)
            else:
                self._emit(piece)
            return True
        if self._header is None and PREFIX_SIZE + wanted <= SCRATCH:
            return False
        direct = bytearray(wanted)
        direct[:have] = self._view[self._start : self._end]
        self._direct, self._filled = direct, have
        self._start = self._end = 0
        return False

    def _take_prefix(self) -> None:
        body = self._view[self._start : self._start + _BODY.size]
        (check,) = _CHECK.unpack_from(self._scratch, self._start + _BODY.size)
        if xxhash.xxh3_64_intdigest(body) != check:
            raise ProtocolError("a frame's prefix does not match its checksum", hub=self._hub, retry=True)
        fields = _BODY.unpack(body)
        self._start += PREFIX_SIZE
        header, payload, _, kind = fields[:4]
        limits = self.limits.get(kind)
        if limits is None:
            raise ProtocolError(f"a frame of kind {kind} is not allowed here", hub=self._hub)
        if header > limits[0] or payload > limits[1]:
            name = Kind(kind).name
            raise ProtocolError(
                f"a {name} frame is too large: header {header} of at most {limits[0]} bytes, "
                f"payload {payload} of at most {limits[1]}",
                hub=self._hub,
            )
        self._fields = fields

    def _take_header(self, header: bytes) -> None:
        assert self._fields is not None
        if xxhash.xxh3_64_intdigest(header) != self._fields[7]:
            raise ProtocolError("a frame's header does not match its checksum", hub=self._hub, retry=True)
        self._header = header
        if not self._fields[1]:
            self._emit(b"")

    def _emit(self, payload: Received) -> None:
        assert self._fields is not None and self._header is not None
        _, _, stream, kind, flags, _, check, _ = self._fields
        if flags & PAYLOAD_CHECKED and xxhash.xxh3_64_intdigest(payload) != check:
            raise ProtocolError("a frame's payload does not match its checksum", hub=self._hub, retry=True)
        header = self._header
        self._fields = self._header = None
        self._on_frame(kind, flags, stream, header, payload)
