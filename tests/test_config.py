from __future__ import annotations

import os
from pathlib import Path

import pytest

from farside.addresses import Endpoint, PortalAddress
from farside.config import (
    HubConfig,
    MountConfig,
    control_socket,
    hub_config,
    mount_config,
    read_toml,
    settings,
)
from farside.errors import UsageError

ADDRESSES = {"hub": "hub.example/c4", "mountpoint": "/mnt/c4"}


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_defaults_of_a_mount() -> None:
    config = mount_config(ADDRESSES)
    assert config.hub == PortalAddress("hub.example", 7420, "c4")
    assert config.reserve == 0.05
    assert config.timeout_s == 30
    assert config.cache_dir.name == "hub.example_7420_c4"
    assert config.cache_size > 0


def test_two_portals_have_two_default_cache_directories() -> None:
    other = mount_config({**ADDRESSES, "hub": "hub.example/laion"})
    assert other.cache_dir != mount_config(ADDRESSES).cache_dir


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = _write(
        tmp_path / "c4.toml",
        'hub = "hub.example:7421/c4"\nmountpoint = "/mnt/c4"\ncache-size = "2T"\n'
        'timeout = "90s"\nreserve = 0.1\nallow-other = true\nconnections = 4\n',
    )
    config = mount_config({"timeout_s": "5s", "allow_other": False}, file)
    assert (config.timeout_s, config.cache_size, config.reserve) == (5, 2 * 1024**4, 0.1)
    assert (config.connections, config.allow_other, config.hub.port) == (4, False, 7421)


def test_an_unknown_key_names_the_nearest_known_one(tmp_path: Path) -> None:
    file = _write(tmp_path / "c4.toml", 'cache-szie = "2T"\n')
    with pytest.raises(UsageError, match=r"unknown key 'cache-szie'.*did you mean 'cache-size'"):
        read_toml(file, MountConfig)
    with pytest.raises(UsageError, match="did you mean 'cache-size'"):
        read_toml(_write(tmp_path / "b.toml", "cache_size = 1"), MountConfig)
    with pytest.raises(UsageError, match="known keys: hub, mountpoint"):
        read_toml(_write(tmp_path / "d.toml", "zzz = 1"), MountConfig)


def test_a_file_that_cannot_be_read_says_which_and_where(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_toml(tmp_path / "none.toml", MountConfig)
    with pytest.raises(UsageError, match=r"not TOML.*line 2"):
        read_toml(_write(tmp_path / "bad.toml", "a = 1\n= 2\n"), MountConfig)
    with pytest.raises(UsageError, match="not TOML"):
        (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
        read_toml(tmp_path / "bytes.toml", MountConfig)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('cache-size = "2X"', "cache-size: '2X' is not a size"),
        ("insecure = 1", "insecure: 1 is neither true nor false"),
        ("cache-dir = 5", "cache-dir: 5 is not a path"),
        ("connections = 0", "connections: 0 is not a whole number"),
        ('timeout = "0s"', "timeout: it must be longer than 0"),
        ("reserve = 5", "reserve: '5' is not a share"),
        ("cache-size = -5", "cache-size: '-5' is not a size"),
        ('congestion = "b b"', "congestion: 'b b' is not a congestion control"),
    ],
)
def test_a_wrong_value_names_file_and_key(tmp_path: Path, line: str, message: str) -> None:
    file = _write(tmp_path / "c4.toml", line)
    with pytest.raises(UsageError, match=message) as caught:
        mount_config(ADDRESSES, file)
    assert str(file) in str(caught.value)


def test_a_wrong_flag_names_the_flag() -> None:
    with pytest.raises(UsageError, match="--cache-size: '2X' is not a size"):
        mount_config({**ADDRESSES, "cache_size": "2X"})


def test_relative_paths_in_a_file_start_at_the_file(tmp_path: Path) -> None:
    file = _write(tmp_path / "hub.toml", '[portals]\nc4 = "data"\n')
    assert hub_config({}, file).portals[0].root == tmp_path / "data"
    file = _write(tmp_path / "c4.toml", 'cache-dir = "cache"\n')
    assert mount_config(ADDRESSES, file).cache_dir == tmp_path / "cache"


def test_what_a_mount_cannot_do_without() -> None:
    with pytest.raises(UsageError, match="no hub is given"):
        mount_config({})
    with pytest.raises(UsageError, match="no mountpoint is given"):
        mount_config({"hub": "hub/c4"})


def test_insecure_is_for_loopback_unless_the_link_is_trusted() -> None:
    with pytest.raises(UsageError, match=r"in the clear and hub\.example is not loopback"):
        mount_config({**ADDRESSES, "insecure": True})
    assert mount_config({**ADDRESSES, "insecure": True, "insecure_link_is_trusted": True}).insecure
    assert mount_config({"hub": "[::1]/c4", "mountpoint": "/mnt/c4", "insecure": True}).insecure
    with pytest.raises(UsageError, match="does nothing without"):
        mount_config({**ADDRESSES, "insecure_link_is_trusted": True})
    with pytest.raises(UsageError, match=r"0\.0\.0\.0 is not loopback"):
        hub_config({"portals": ("a=/a",), "insecure": True, "listen": "0.0.0.0:1"})


def test_hub_listens_everywhere_but_on_loopback_when_insecure() -> None:
    assert hub_config({"portals": ("a=/a",)}).listen == Endpoint("0.0.0.0", 7420)
    assert hub_config({"portals": ("a=/a",), "insecure": True}).listen == Endpoint("127.0.0.1", 7420)


def test_portals_of_flags_are_added_and_win(tmp_path: Path) -> None:
    file = _write(tmp_path / "hub.toml", '[portals]\na = "/file/a"\nb = "/file/b"\n')
    config = hub_config({"portals": ("b=/flag/b", "c=/flag/c")}, file)
    assert {p.name: str(p.root) for p in config.portals} == {"a": "/file/a", "b": "/flag/b", "c": "/flag/c"}


@pytest.mark.parametrize(
    ("portals", "message"),
    [
        (("c4=/a", "c4=/b"), "portal 'c4' is given twice"),
        (("/data",), "is not NAME=DIR"),
        (("c4=",), "is not NAME=DIR"),
        (("a/b=/x",), "not a portal name"),
        ((), "no portal to serve"),
    ],
)
def test_wrong_portals(portals: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hub_config({"portals": portals or None})


def test_keys_are_the_flags_and_every_field_has_one() -> None:
    assert settings(MountConfig)["timeout"][0] == "timeout_s"
    assert settings(MountConfig)["cache-size"][0] == "cache_size"
    assert settings(HubConfig)["lease"][0] == "lease_s"
    for config in (MountConfig, HubConfig):
        for key, (_, setting) in settings(config).items():
            assert key == key.lower()
            assert callable(setting.parse)
            assert all(isinstance(text, str) for text in (setting.help, setting.metavar, setting.default))
            assert isinstance(setting.argument, bool)


def test_control_sockets_do_not_depend_on_how_long_the_mount_point_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FARSIDE_RUNTIME_DIR", "/run/x")
    path = control_socket("/mnt/" + "long/" * 200)
    assert len(os.fsencode(path)) < 100
    assert path.parent == Path("/run/x")
    assert control_socket("/mnt/\udcff") != control_socket("/mnt/a")
