from __future__ import annotations

import random
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from farside.errors import ProtocolError
from farside.protocol.frames import (
    HUB_SENDS,
    MAGIC,
    MAX_REPLY_PAYLOAD,
    MAX_SMALL,
    PREFIX_SIZE,
    SCRATCH,
    SPOKE_SENDS,
    STRANGER_SENDS,
    Buffer,
    FrameReader,
    Kind,
    Received,
    buffers_of,
    credit_head,
    credit_of,
    frame_head,
)
from farside.protocol.messages import Ping, encode

Frame = tuple[int, int, bytes, bytes]


class Collector:
    def __init__(self, limits: object = HUB_SENDS) -> None:
        self.frames: list[Frame] = []
        self.payloads: list[Received] = []
        self.reader = FrameReader(self._take, limits)  # type: ignore[arg-type]

    def _take(self, kind: int, flags: int, stream: int, header: bytes, payload: Received) -> None:
        self.frames.append((kind, stream, header, bytes(payload)))
        self.payloads.append(payload)

    def feed(self, data: bytes, pieces: random.Random | None = None) -> None:
        at = 0
        while at < len(data):
            buffer = self.reader.buffer()
            assert len(buffer) > 0
            most = min(len(buffer), len(data) - at)
            count = most if pieces is None else pieces.randint(1, most)
            buffer[:count] = data[at : at + count]
            buffer.release()
            self.reader.received(count)
            at += count


def wire(frame: Frame, *, checked: bool = True) -> bytes:
    kind, stream, header, payload = frame
    return frame_head(kind, stream, header, buffers_of(payload), checked=checked) + payload


def blob(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


sizes = st.one_of(
    st.integers(0, 300), st.sampled_from([SCRATCH - PREFIX_SIZE, SCRATCH, SCRATCH + 1, 200_000])
)
frames = st.builds(
    lambda kind, stream, header, payload, seed: (kind, stream, blob(seed, header), blob(seed + 1, payload)),
    st.sampled_from([Kind.PART, Kind.FINAL]),
    st.integers(0, 2**32 - 1),
    sizes,
    sizes,
    st.integers(0, 1000),
)


@given(st.lists(frames, max_size=6), st.integers(0, 2**32), st.booleans(), st.booleans())
def test_frames_come_out_as_they_went_in_however_they_are_cut(
    sent: list[Frame], seed: int, checked: bool, small_pieces: bool
) -> None:
    collector = Collector()
    data = MAGIC + b"".join(wire(frame, checked=checked) for frame in sent)
    collector.feed(data, random.Random(seed) if small_pieces else None)
    assert collector.frames == sent
    assert collector.reader.missing == 0 and collector.reader.stream is None


def test_every_damaged_byte_is_noticed() -> None:
    frame = (Kind.FINAL, 7, b"header", b"payload of a listing")
    data = wire(frame)
    for at in range(len(data)):
        for flip in (1, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[at] ^= flip
            collector = Collector()
            with pytest.raises(ProtocolError):
                collector.feed(MAGIC + bytes(damaged))
            assert collector.frames == []


@given(st.integers(0, 100))
def test_a_truncated_frame_is_never_handed_over(cut: int) -> None:
    data = MAGIC + wire((Kind.FINAL, 7, b"header", b"payload"))
    collector = Collector()
    collector.feed(data[: min(cut, len(data) - 1)])
    assert collector.frames == []


def test_large_payloads_have_a_buffer_of_their_own_and_exact_size() -> None:
    collector = Collector()
    first, second = blob(1, 300_000), blob(2, 300_000)
    collector.feed(MAGIC + wire((Kind.PART, 1, b"h", first)) + wire((Kind.PART, 1, b"h", second)))
    one, two = collector.payloads
    assert isinstance(one, bytearray) and isinstance(two, bytearray) and one is not two
    assert bytes(one) == first and bytes(two) == second
    collector.feed(wire((Kind.PART, 1, b"h", blob(3, 300_000))))
    assert bytes(one) == first, "a payload that was handed over must never be touched again"


def test_large_payload_is_received_in_place() -> None:
    collector = Collector()
    data = MAGIC + wire((Kind.PART, 9, b"h", blob(1, 1_000_000)))
    collector.feed(data[:1000])
    assert collector.reader.stream == 9
    assert collector.reader.missing == len(data) - 1000 == len(collector.reader.buffer())


def test_payload_of_many_buffers_has_the_checksum_of_the_whole() -> None:
    collector = Collector()
    parts: list[Buffer] = [b"one", bytearray(b""), memoryview(b"two")]
    buffers = buffers_of(parts)
    collector.feed(MAGIC + frame_head(Kind.FINAL, 1, b"h", buffers) + b"".join(buffers))
    assert collector.frames == [(Kind.FINAL, 1, b"h", b"onetwo")]


@pytest.mark.parametrize(
    ("limits", "kind", "header", "payload"),
    [
        (HUB_SENDS, Kind.PART, 0, MAX_REPLY_PAYLOAD + 1),
        (HUB_SENDS, Kind.ERROR, MAX_SMALL + 1, 0),
        (HUB_SENDS, Kind.PUSH, 10, 1),
        (STRANGER_SENDS, Kind.REQUEST, MAX_SMALL + 1, 0),
        (STRANGER_SENDS, Kind.REQUEST, 10, 1),
        (SPOKE_SENDS, Kind.CANCEL, 1, 0),
    ],
)
def test_limits_are_checked_before_anything_is_allocated(
    limits: object, kind: int, header: int, payload: int
) -> None:
    head = frame_head(kind, 1, bytes(header), buffers_of(bytes(payload)), checked=False)
    collector = Collector(limits)
    with pytest.raises(ProtocolError, match="too large"):
        collector.feed(MAGIC + head[:PREFIX_SIZE])


@pytest.mark.parametrize("kind", [0, 1, 5, 7, 8, 255])
def test_kinds_that_a_hub_does_not_send_are_refused(kind: int) -> None:
    with pytest.raises(ProtocolError, match=f"kind {kind}"):
        Collector().feed(MAGIC + frame_head(kind, 1))


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nServer: x\r\n\r\n", "it answered: HTTP/1.1 400 Bad Request"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "it answered: SSH-2.0-OpenSSH_9.2"),
        (b"\x15\x03\x03\x00\x02\x02\x16", "speaks TLS"),
        (b"FARSIDE9", "another farside framing"),
        (b"\x00\xff\n", r"it answered: \\x00\\xff"),
    ],
)
def test_other_protocols_are_named(first: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        Collector().feed(first)


def test_magic_may_come_byte_by_byte() -> None:
    collector = Collector()
    for byte in MAGIC + wire((Kind.FINAL, 1, b"h", b"")):
        collector.feed(bytes([byte]))
    assert collector.frames == [(Kind.FINAL, 1, b"h", b"")]


def test_the_example_in_the_documentation_is_true() -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    example = bytes.fromhex(page.split("```frame\n")[1].split("```")[0])
    assert example == frame_head(Kind.REQUEST, 5, encode(Ping(1234, 7)))
    body, check = example[:32], example[32:40]
    assert check == xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    empty = xxhash.xxh3_64_intdigest(b"").to_bytes(8, "little").hex(" ").upper()
    assert f"of no bytes: `{empty}`" in page


def test_credit() -> None:
    collector = Collector(SPOKE_SENDS)
    collector.feed(MAGIC + credit_head(3, 12345))
    kind, stream, header, _ = collector.frames[0]
    assert (kind, stream, credit_of(header)) == (Kind.CREDIT, 3, 12345)
    with pytest.raises(ProtocolError):
        credit_of(b"123")
