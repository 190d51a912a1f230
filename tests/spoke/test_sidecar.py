"""Side-cars survive a round trip and refuse anything that was damaged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farside.spoke import sidecar
from farside.spoke.sidecar import CacheKey, SideCarError, digest_of_key

CHUNK = 4096


@st.composite
def cars(draw: st.DrawFn) -> tuple[CacheKey, bytes, bytes, bytearray]:
    chunks = draw(st.integers(1, 70))
    size = (chunks - 1) * CHUNK + draw(st.integers(1, CHUNK))
    key = CacheKey(draw(st.binary(max_size=16)), draw(st.binary(max_size=40)), size)
    state = bytes(draw(st.lists(st.sampled_from([0, 1, 2]), min_size=chunks, max_size=chunks)))
    sums = bytearray(chunks * 16)
    for at, value in enumerate(state):
        if value:
            sums[at * 16 : at * 16 + 16] = draw(st.binary(min_size=16, max_size=16))
    return key, draw(st.binary(max_size=50)), state, sums


@given(cars())
def test_round_trip(car: tuple[CacheKey, bytes, bytes, bytearray]) -> None:
    key, path, state, sums = car
    data = sidecar.pack(key, CHUNK, path, state, sums)
    assert len(data) <= sidecar.size_of(len(state), len(state) - state.count(0))
    found = sidecar.parse(data)
    assert found == (key, CHUNK, path, bytearray(2 if value else 0 for value in state), sums)


@given(cars(), st.data())
def test_any_damage_is_noticed(car: tuple[CacheKey, bytes, bytes, bytearray], data: st.DataObject) -> None:
    key, path, state, sums = car
    packed = bytearray(sidecar.pack(key, CHUNK, path, state, sums))
    at = data.draw(st.integers(0, len(packed) - 1))
    if data.draw(st.booleans()):
        packed[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del packed[at:]  # torn, or empty after a power cut
    with pytest.raises(SideCarError):
        sidecar.parse(bytes(packed))


def test_foreign_bytes_are_no_side_car() -> None:
    for data in (b"", b"x" * 500, sidecar.MAGIC, bytes(4096)):
        with pytest.raises(SideCarError):
            sidecar.parse(data)


def test_keys_differ_in_every_field() -> None:
    keys = [
        CacheKey(b"a", b"b", 1),
        CacheKey(b"ab", b"", 1),
        CacheKey(b"", b"ab", 1),
        CacheKey(b"a", b"b", 2),
        CacheKey(b"a", b"c", 1),
        CacheKey(b"b", b"b", 1),
    ]
    digests = {digest_of_key(key, CHUNK) for key in keys} | {digest_of_key(keys[0], 2 * CHUNK)}
    assert len(digests) == len(keys) + 1


def test_long_path_hint_keeps_its_end() -> None:
    packed = sidecar.pack(CacheKey(b"p", b"v", 1), CHUNK, b"d/" * 2000 + b"name", b"\1", bytearray(16))
    assert sidecar.parse(packed).path.endswith(b"d/name")
