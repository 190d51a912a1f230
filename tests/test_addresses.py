from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farside.addresses import (
    Endpoint,
    PortalAddress,
    is_loopback,
    parse_endpoint,
    parse_name,
    parse_portal_address,
)
from farside.errors import UsageError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("hub.example:7420", "hub.example", 7420),
        ("hub", "hub", 7420),
        ("10.0.0.1:80", "10.0.0.1", 80),
        ("[::1]:7421", "::1", 7421),
        ("[fe80::1%eth0]", "fe80::1%eth0", 7420),
        ("0.0.0.0:0", "0.0.0.0", 0),
    ],
)
def test_endpoints(text: str, host: str, port: int) -> None:
    assert parse_endpoint(text) == Endpoint(host, port)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://hub:7420", "scheme"),
        ("::1", "brackets"),
        ("[nonsense]:1", "not an IPv6"),
        ("hub:", "not a port"),
        ("hub:70000", "not a port"),
        ("hub:http", "not a port"),
        ("", "not a host name"),
        ("a b:1", "not a host name"),
    ],
)
def test_what_is_no_endpoint_says_why(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_endpoint(text)


def test_portal_addresses() -> None:
    assert parse_portal_address("hub.example:7420/c4") == PortalAddress("hub.example", 7420, "c4")
    assert parse_portal_address("[::1]/c4") == PortalAddress("::1", 7420, "c4")
    for wrong, message in (("hub", "no portal"), ("hub/", "no portal"), ("hub/a/b", "not a portal name")):
        with pytest.raises(UsageError, match=message):
            parse_portal_address(wrong)


@given(
    st.sampled_from(["h", "hub.example", "10.1.2.3", "::1", "2001:db8::7"]),
    st.integers(0, 65535),
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
)
def test_what_is_printed_reads_back(host: str, port: int, portal: str) -> None:
    address = PortalAddress(host, port, portal)
    assert parse_portal_address(str(address)) == address


def test_loopback_is_told_by_the_name_alone() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "hub.example", "localhost.example")))


def test_names() -> None:
    assert parse_name("gpu-17.west") == "gpu-17.west"
    for wrong in ("", "a b", "-x", "x" * 65, "ä"):
        with pytest.raises(UsageError):
            parse_name(wrong)
