"""The messages of the link, each a small msgpack header; bulk bytes travel as the frame's payload.

Requests, in the spoke's words, and their replies. Names and paths are bytes, relative to the portal's
root, components joined by ``/`` with none leading or trailing; the root itself is ``b""``.
"""

from __future__ import annotations

import msgspec

CHUNK = 64 * 1024
"""Unit of presence and checksum, bytes. Ranges that are read start on a multiple of it."""

MAX_READ = 8 * 1024 * 1024
"""The largest range of one fetch, bytes."""

MAX_PART = 1024 * 1024
"""The hub cuts replies to reads into parts of at most this many payload bytes."""


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages: arrays on the wire, told apart by the class name in front."""


# -- connection -----------------------------------------------------------------------------------


class Hello(Message):
    """First message of each side. ``protocol`` is the newest version spoken, ``oldest`` the oldest."""

    protocol: int
    oldest: int
    software: str
    name: str
    features: tuple[str, ...] = ()


class Welcome(Message):
    """The hub's answer to Hello: the version chosen, its name, its wall clock in ns, and its CA."""

    protocol: int
    software: str
    name: str
    clock_ns: int
    ca_pem: bytes = b""
    features: tuple[str, ...] = ()


class Join(Message):
    """A one-time secret and a certificate signing request (PEM); allowed without a client certificate."""

    secret: str
    csr: bytes
    name: str


class Joined(Message):
    """Answer to Join: the spoke's certificate and the CA's, PEM, and the portals it may attach."""

    certificate: bytes
    ca: bytes
    spoke: str
    portals: tuple[str, ...]


class Ping(Message):
    """Keep-alive and heartbeat. ``ack`` is the last Invalidate.seq that the spoke has applied."""

    sent_ns: int
    ack: int = 0


class Pong(Message):
    """Echo of Ping; the lease of every attached portal is renewed from ``sent_ns`` of the Ping."""

    sent_ns: int
    seq: int = 0


class Failure(Message):
    """A request failed. ``code`` is one of ``CODES``; ``retry`` says whether the same request may succeed."""

    errno: int
    code: str
    message: str
    path: bytes = b""
    retry: bool = False


CODES = (
    "errno",
    "stale",
    "no_portal",
    "forbidden",
    "bad_token",
    "bad_request",
    "version",
    "busy",
    "internal",
)


# -- portals and metadata -------------------------------------------------------------------------


class Attach(Message):
    """Attach a portal. Pushes for it follow on the connection that attached it."""

    portal: str


class Attached(Message):
    """``portal_id``: 16 bytes that never change for this portal; ``root``: value of the root directory."""

    portal: str
    portal_id: bytes
    writable: bool
    root: bytes
    lease_s: float
    seq: int
    watched: bool


class Stat(Message):
    """Attributes of many paths at once."""

    portal: str
    paths: tuple[bytes, ...]


class StatReply(Message):
    """One (errno, value) for each path, in order; errno 0 means the value is there."""

    results: tuple[tuple[int, bytes], ...]


class ListDir(Message):
    """One directory. ``digest``: what the spoke has (or empty); ``after``: continue behind this name."""

    portal: str
    path: bytes
    digest: bytes = b""
    after: bytes = b""
    limit: int = 20_000


class ListDirReply(Message):
    """Payload: a listing. ``same``: the spoke's digest still holds, no payload. ``more``: page on.

    ``digest`` is that of the whole directory where the whole of it is in the payload, else empty.
    ``watched``: the hub will push changes of this directory; otherwise the spoke rechecks at open.
    """

    path: bytes
    value: bytes
    digest: bytes
    same: bool
    more: bool
    watched: bool


class ListTree(Message):
    """A subtree, breadth first. Payload: what the spoke has, as ``pack_known``; replies are TreeParts."""

    portal: str
    path: bytes
    limit: int


class TreeDir(Message):
    """One directory of a TreePart; ``length`` bytes of the payload are its listing (0 when ``same``)."""

    path: bytes
    value: bytes
    digest: bytes
    length: int
    same: bool
    watched: bool
    errno: int = 0


class TreePart(Message):
    dirs: tuple[TreeDir, ...]


class TreeDone(Message):
    """``truncated``: the limit was reached; what was not sent is asked for on demand."""

    dirs: int
    entries: int
    truncated: bool


class GetXattrs(Message):
    """Extended attributes of many paths (never followed through a symlink)."""

    portal: str
    paths: tuple[bytes, ...]


class XattrsReply(Message):
    """One (errno, {name: value}) for each path, in order."""

    results: tuple[tuple[int, dict[bytes, bytes]], ...]


class Statfs(Message):
    portal: str


class StatfsReply(Message):
    """As statvfs: bsize and frsize in bytes, blocks in frsize."""

    bsize: int
    frsize: int
    blocks: int
    bfree: int
    bavail: int
    files: int
    ffree: int
    namemax: int


# -- content --------------------------------------------------------------------------------------


class FileRanges(Message):
    """Ranges (offset, length) of one version of one file; offsets are multiples of CHUNK."""

    path: bytes
    version: bytes
    ranges: tuple[tuple[int, int], ...]


class Read(Message):
    """Many ranges of many files. ``reason``: demand, planned, readahead or fill (for the hub's metrics)."""

    portal: str
    files: tuple[FileRanges, ...]
    reason: str


class Block(Message):
    """One run of bytes in a Data payload: which file of the request, and where it belongs.

    ``checksums`` holds one xxh3_128 digest (16 bytes) for each chunk of the run, in order.
    """

    file: int
    path: bytes
    version: bytes
    offset: int
    length: int
    checksums: bytes


class FileFailure(Message):
    """A file of a Read that could not be served. ``stale`` carries the value that now holds, if any."""

    file: int
    path: bytes
    errno: int
    stale: bool
    value: bytes = b""
    message: str = ""


class Data(Message):
    """A part of the reply to Read; its payload is the blocks' bytes, one behind the other."""

    blocks: tuple[Block, ...]
    failures: tuple[FileFailure, ...] = ()


class ReadDone(Message):
    """The last reply to Read, without payload."""

    bytes: int


# -- pushes ---------------------------------------------------------------------------------------


class DirChange(Message):
    """Names that changed in one directory; none named means: distrust the whole directory.

    ``tree`` means: distrust everything below it too (it was moved, or events were lost).
    """

    path: bytes
    names: tuple[bytes, ...] = ()
    tree: bool = False


class Invalidate(Message):
    """Push from hub to spoke. The spoke acknowledges by ``ack`` in its next Ping, at once."""

    portal: str
    seq: int
    changes: tuple[DirChange, ...]


class Goodbye(Message):
    """The sender is about to close: the reason, and whether reconnecting makes sense."""

    reason: str
    retry: bool = True


AnyMessage = (
    Hello
    | Welcome
    | Join
    | Joined
    | Ping
    | Pong
    | Failure
    | Attach
    | Attached
    | Stat
    | StatReply
    | ListDir
    | ListDirReply
    | ListTree
    | TreePart
    | TreeDone
    | GetXattrs
    | XattrsReply
    | Statfs
    | StatfsReply
    | Read
    | Data
    | ReadDone
    | Invalidate
    | Goodbye
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> AnyMessage:
    """Raises msgspec.ValidationError or msgspec.DecodeError when the bytes are no known message."""
    return _decoder.decode(data)


def pack_known(known: dict[bytes, bytes]) -> bytes:
    """{directory path: 16-byte digest} as the payload of ListTree."""
    return msgspec.msgpack.encode(known)


def unpack_known(payload: bytes | memoryview) -> dict[bytes, bytes]:
    """Raises msgspec.ValidationError or msgspec.DecodeError on anything else."""
    return msgspec.msgpack.decode(payload, type=dict[bytes, bytes]) if len(payload) else {}
