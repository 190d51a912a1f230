"""The options of ``hub serve``, ``mount`` and the library: types, defaults, TOML keys, places on disk.

Every option is one field of a dataclass; its ``Setting`` says how a flag or a TOML value is read. The TOML
key of a field is its flag without the leading dashes (``cache_size`` → ``cache-size``, ``timeout_s`` →
``timeout``). Flags win over the file, the file over the defaults.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import os
import re
import socket
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from farside.addresses import (
    DEFAULT_PORT,
    Endpoint,
    PortalAddress,
    PortalRoot,
    is_loopback,
    parse_endpoint,
    parse_name,
    parse_portal_address,
    parse_portal_name,
)
from farside.errors import UsageError
from farside.units import parse_duration, parse_fraction, parse_size

# -- readers of values: each takes a flag's text or a TOML value and raises UsageError -------------


def parse_portal_roots(value: object) -> tuple[PortalRoot, ...]:
    """Portals from flags (a sequence of ``NAME=DIR``) or from TOML (a table of NAME = "DIR").

    Raises:
        UsageError: malformed, or a name is there twice.
    """
    if isinstance(value, Mapping):
        pairs = [(str(name), root) for name, root in value.items()]
    elif isinstance(value, list | tuple):
        pairs = []
        for item in value:
            name, equals, root = str(item).partition("=")
            if not equals or not root:
                raise UsageError(f"{item!r} is not NAME=DIR", hint="for example --portal c4=/data/c4")
            pairs.append((name, root))
    else:
        raise UsageError("portals must be a table of NAME = DIR")
    roots: dict[str, PortalRoot] = {}
    for name, root in pairs:
        if name in roots:
            raise UsageError(f"portal {name!r} is given twice", hint="give each portal its own name")
        roots[parse_portal_name(name)] = PortalRoot(name, parse_path(root))
    return tuple(roots.values())


def parse_path(value: object) -> Path:
    """An absolute path; ``~`` is the home directory, a relative one starts at the current directory."""
    if not isinstance(value, str | Path) or not str(value):
        raise UsageError(f"{value!r} is not a path")
    return Path(os.path.abspath(os.path.expanduser(value)))


def parse_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{value!r} is neither true nor false")
    return value


def parse_count(value: object) -> int:
    """A whole number of 1 or more."""
    if not re.fullmatch(r"\d{1,12}", str(value)) or int(str(value)) < 1:
        raise UsageError(f"{value!r} is not a whole number above 0")
    return int(str(value))


def _parse_congestion(value: object) -> str:
    name = str(value)
    if not re.fullmatch(r"[a-z0-9_]{1,15}", name):
        raise UsageError(f"{name!r} is not a congestion control", hint="for example bbr, cubic or default")
    return name


def _parse_positive_duration(value: object) -> float:
    seconds = parse_duration(value if isinstance(value, int | float) else str(value))
    if seconds <= 0:
        raise UsageError("it must be longer than 0")
    return seconds


def _parse_size(value: object) -> int:
    return parse_size(value if isinstance(value, int) else str(value))


def _parse_fraction(value: object) -> float:
    return parse_fraction(value if isinstance(value, int | float) else str(value))


# -- where things lie ------------------------------------------------------------------------------


def _base(root_dir: str, variable: str, home_dir: str) -> Path:
    if os.geteuid() == 0:
        return Path(root_dir)
    return Path(os.environ.get(variable) or Path.home() / home_dir) / "farside"


def default_hub_state_dir() -> Path:
    return _base("/var/lib/farside", "XDG_STATE_HOME", ".local/state") / "hub"


def default_spoke_state_dir() -> Path:
    return _base("/var/lib/farside", "XDG_STATE_HOME", ".local/state") / "spoke"


def default_cache_dir(address: PortalAddress) -> Path:
    """A cache directory has one owner, so each portal gets its own by default."""
    return _base("/var/cache/farside", "XDG_CACHE_HOME", ".cache") / slug(address)


def default_log_file(address: PortalAddress) -> Path:
    root = os.geteuid() == 0
    base = Path("/var/log/farside") if root else _base("", "XDG_STATE_HOME", ".local/state") / "log"
    return base / f"{slug(address)}.log"


def slug(address: PortalAddress) -> str:
    """The address as one file name, ``hub.example_7420_c4``."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"{address.host}_{address.port}_{address.portal}")


def runtime_dir() -> Path:
    """Where the control sockets of running mounts lie, mode 0700. It is not created here."""
    if chosen := os.environ.get("FARSIDE_RUNTIME_DIR"):
        return Path(chosen)
    if os.geteuid() == 0:
        return Path("/run/farside")
    xdg = os.environ.get("XDG_RUNTIME_DIR")
    return Path(xdg) / "farside" if xdg else Path(f"/tmp/farside-{os.geteuid()}")


def control_socket(mountpoint: str | Path) -> Path:
    """The control socket of the mount at ``mountpoint`` (an absolute path without symlinks).

    The path is not resolved here: resolving would ask the mount itself, which may be stuck.
    """
    digest = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16]
    return runtime_dir() / f"{digest}.sock"


def _default_cache_size(directory: Path) -> int:
    """Half of the file system that holds (or will hold) the directory, bytes."""
    existing = directory
    while not existing.exists():
        existing = existing.parent
    stat = os.statvfs(existing)
    if not stat.f_blocks:  # /proc and the like
        raise UsageError(
            "no cache can be there: its file system has no size",
            path=str(directory),
            hint="choose a --cache-dir on a local disk",
        )
    return stat.f_frsize * stat.f_blocks // 2


# -- options ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Setting:
    """How one option is read and shown. ``argument``: it is an argument or has its own flag."""

    parse: Callable[[Any], Any]
    help: str
    metavar: str = ""
    default: str = ""
    argument: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpokeConfig:
    """Everything that a spoke needs to know. Sizes in bytes, times in seconds."""

    hub: Annotated[PortalAddress, Setting(parse_portal_address, "Hub and portal.", argument=True)]
    cache_dir: Annotated[
        Path,
        Setting(parse_path, "Directory of the chunk cache; one mount owns it.", "DIR", "one for each portal"),
    ]
    cache_size: Annotated[
        int, Setting(_parse_size, "The most that the cache may hold.", "SIZE", "half of its file system")
    ]
    reserve: Annotated[
        float, Setting(_parse_fraction, "Share of the cache's file system that stays free.", "SHARE", "5%")
    ] = 0.05
    token_file: Annotated[
        Path | None,
        Setting(parse_path, "File with the join token; needed the first time only.", "FILE"),
    ] = None
    name: Annotated[str, Setting(parse_name, "This spoke's name at the hub.", "NAME", "host name")] = (
        dataclasses.field(default_factory=lambda: host_name())
    )
    state_dir: Annotated[
        Path, Setting(parse_path, "Keys and certificates of this spoke.", "DIR", "/var/lib/farside/spoke")
    ] = dataclasses.field(default_factory=default_spoke_state_dir)
    insecure: Annotated[bool, Setting(parse_bool, "No TLS; for loopback only.")] = False
    insecure_link_is_trusted: Annotated[bool, Setting(parse_bool, "Allow --insecure beyond loopback.")] = (
        False
    )
    timeout_s: Annotated[
        float,
        Setting(
            _parse_positive_duration, "How long a read waits for the hub before it fails.", "TIME", "30s"
        ),
    ] = 30.0
    connections: Annotated[int, Setting(parse_count, "TCP connections to the hub.", "N", "16")] = 16
    congestion: Annotated[
        str,
        Setting(
            _parse_congestion,
            "TCP congestion control; 'auto' is bbr where the kernel has it, 'default' the kernel's.",
            "NAME",
            "auto",
        ),
    ] = "auto"
    read_ahead: Annotated[
        int, Setting(_parse_size, "The most that is read ahead of one reader; 0 for none.", "SIZE", "128M")
    ] = 128 * 1024 * 1024
    metadata_limit: Annotated[int, Setting(parse_count, "Names kept in memory.", "N", "2000000")] = 2_000_000
    io_threads: Annotated[int, Setting(parse_count, "Threads for the cache's disk.", "N", "4")] = 4

    def __post_init__(self) -> None:
        _check_insecure(self.insecure, self.insecure_link_is_trusted, self.hub.host)

    @property
    def identity_dir(self) -> Path:
        """Key and certificate for this hub and portal; each join token makes one identity."""
        return self.state_dir / slug(self.hub)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MountConfig(SpokeConfig):
    """What a mount needs to know on top of its spoke."""

    mountpoint: Annotated[Path, Setting(parse_path, "Where to mount.", argument=True)]
    allow_other: Annotated[
        bool, Setting(parse_bool, "Let other users read through the mount, by its modes and owners.")
    ] = False
    passthrough: Annotated[
        bool, Setting(parse_bool, "Let the kernel read whole cached files by itself.", default="on")
    ] = True
    log_file: Annotated[
        Path | None, Setting(parse_path, "Log of the background process.", "FILE", "/var/log/farside/…")
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubConfig:
    """Everything that ``hub serve`` needs to know. Times in seconds."""

    portals: Annotated[
        tuple[PortalRoot, ...], Setting(parse_portal_roots, "Names and directories.", argument=True)
    ]
    listen: Annotated[
        Endpoint,
        Setting(
            parse_endpoint,
            "Address to listen at.",
            "HOST:PORT",
            "0.0.0.0:7420; with --insecure 127.0.0.1:7420",
        ),
    ]
    state_dir: Annotated[
        Path, Setting(parse_path, "What `hub init` made.", "DIR", "/var/lib/farside/hub")
    ] = dataclasses.field(default_factory=default_hub_state_dir)
    insecure: Annotated[
        bool,
        Setting(parse_bool, "No TLS and no tokens: whoever reaches the port reads; loopback only."),
    ] = False
    insecure_link_is_trusted: Annotated[bool, Setting(parse_bool, "Allow --insecure beyond loopback.")] = (
        False
    )
    lease_s: Annotated[
        float,
        Setting(_parse_positive_duration, "How long a silent spoke may trust what it knows.", "TIME", "10s"),
    ] = 10.0
    congestion: Annotated[
        str,
        Setting(
            _parse_congestion,
            "TCP congestion control; 'auto' is bbr where the kernel has it, 'default' the kernel's.",
            "NAME",
            "auto",
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        if not self.portals:
            raise UsageError("no portal to serve", hint="give at least one --portal NAME=DIR")
        _check_insecure(self.insecure, self.insecure_link_is_trusted, self.listen.host)


def host_name() -> str:
    """This machine's name, cut to what `parse_name` allows."""
    name = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()).strip("-.")[:64]
    return name or "spoke"


def _check_insecure(insecure: bool, trusted: bool, host: str) -> None:
    if insecure and not trusted and not is_loopback(host):
        raise UsageError(
            f"--insecure sends all data in the clear and {host} is not loopback",
            hint="leave it out, or add --insecure-link-is-trusted if nobody else can reach that network",
        )
    if trusted and not insecure:
        raise UsageError("--insecure-link-is-trusted does nothing without --insecure")


def key_of(field_name: str) -> str:
    """The TOML key of a field: ``timeout_s`` → ``timeout``, ``cache_size`` → ``cache-size``."""
    return field_name.removesuffix("_s").replace("_", "-")


def settings(config: type[SpokeConfig] | type[HubConfig]) -> dict[str, tuple[str, Setting]]:
    """TOML key → (field name, setting): arguments first, else in the order of the fields."""
    hints = get_type_hints(config, include_extras=True)
    found = {key_of(f.name): (f.name, hints[f.name].__metadata__[0]) for f in dataclasses.fields(config)}
    return dict(sorted(found.items(), key=lambda item: not item[1][1].argument))


def read_toml(path: Path, config: type[SpokeConfig] | type[HubConfig]) -> dict[str, Any]:
    """The options in a TOML file by field name, still to be read by their settings.

    Relative paths in it start at the file's own directory.

    Raises:
        UsageError: the file is missing, is not TOML, or has a key that no option has.
    """
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"cannot read the configuration file: {error.strerror}", path=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the configuration file is not TOML: {error}", path=str(path)) from error
    known = settings(config)
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key.replace("_", "-"), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise UsageError(f"unknown key {key!r} in the configuration file", path=str(path), hint=hint)
        name, setting = known[key]
        if setting.parse is parse_path and isinstance(value, str):
            value = os.path.join(path.parent, os.path.expanduser(value))
        elif setting.parse is parse_portal_roots and isinstance(value, dict):
            for portal, root in value.items():
                if not isinstance(root, str):
                    what = f"portal {portal!r}: {root!r} is not a directory in quotes"
                    raise UsageError(what, path=str(path), hint=f'write {portal} = "/data/{portal}"')
            value = {n: os.path.join(path.parent, os.path.expanduser(r)) for n, r in value.items()}
        found[name] = value
    return found


def _read(
    config: type[SpokeConfig] | type[HubConfig], flags: Mapping[str, Any], config_file: Path | None
) -> dict[str, Any]:
    """The given options, read; flags win over the file. Options that nobody gave are missing."""
    table = read_toml(config_file, config) if config_file else {}
    values: dict[str, Any] = {}
    for key, (name, setting) in settings(config).items():
        flag = flags.get(name)
        if flag is None and name not in table:
            continue
        source = f"{config_file}, {key}" if flag is None else key if setting.argument else f"--{key}"
        try:
            values[name] = setting.parse(table[name] if flag is None else flag)
        except UsageError as error:
            raise UsageError(f"{source}: {error.message}", hint=error.hint) from error
    return values


def mount_config(flags: Mapping[str, Any], config_file: Path | None = None) -> MountConfig:
    """The configuration of a mount from flags (field name → text, None where not given) and a TOML file.

    Raises:
        UsageError: something is missing, unreadable or contradicts itself.
    """
    values = _read(MountConfig, flags, config_file)
    for name in ("hub", "mountpoint"):
        if name not in values:
            raise UsageError(
                f"no {name} is given", hint="for example: farside mount hub.example:7420/c4 /mnt/c4"
            )
    return MountConfig(**_with_cache(values))


def spoke_config(**options: Any) -> SpokeConfig:
    """The configuration of a spoke without a mount. Options are the fields of ``SpokeConfig``, as people
    write them: ``spoke_config(hub="hub.example:7420/c4", cache_size="2T", token_file="join.txt")``.

    Raises:
        UsageError: ``hub`` is missing, or an option is unknown, unreadable or contradicts another.
    """
    known = [field.name for field in dataclasses.fields(SpokeConfig)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
            raise UsageError(f"unknown option {name!r}", hint=hint)
    values = _read(SpokeConfig, options, None)
    if "hub" not in values:
        raise UsageError("no hub is given", hint='for example: hub="hub.example:7420/c4"')
    return SpokeConfig(**_with_cache(values))


def _with_cache(values: dict[str, Any]) -> dict[str, Any]:
    """The options with the cache's place and size, which depend on others."""
    values.setdefault("cache_dir", default_cache_dir(values["hub"]))
    if "cache_size" not in values:
        values["cache_size"] = _default_cache_size(values["cache_dir"])
    return values


def hub_config(flags: Mapping[str, Any], config_file: Path | None = None) -> HubConfig:
    """The configuration of ``hub serve``; portals of the flags are added to those of the file and win.

    Raises:
        UsageError: something is missing, unreadable or contradicts itself.
    """
    values = _read(HubConfig, flags, config_file)
    if config_file and flags.get("portals"):
        table = read_toml(config_file, HubConfig).get("portals", {})
        merged = {p.name: p for p in parse_portal_roots(table)} | {p.name: p for p in values["portals"]}
        values["portals"] = tuple(merged.values())
    values.setdefault("portals", ())
    if "listen" not in values:
        values["listen"] = Endpoint("127.0.0.1" if values.get("insecure") else "0.0.0.0", DEFAULT_PORT)
    return HubConfig(**values)
