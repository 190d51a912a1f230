"""Flags made from the settings of a configuration class, and the flags that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from farside.config import HubConfig, MountConfig, parse_bool, parse_path, settings
from farside.errors import UsageError
from farside.units import parse_duration, parse_size

Command = TypeVar("Command", bound=Callable[..., Any])


def _typed(name: str, parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """A reader of farside.config or farside.units as a type of click: its errors name the parameter."""

    def convert(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, str) else value
        except UsageError as error:
            raise click.BadParameter(str(error)) from error

    convert.__name__ = name
    return convert


SIZE = _typed("SIZE", parse_size)
DURATION = _typed("TIME", parse_duration)
DIRECTORY = _typed("DIR", parse_path)
FILE = _typed("FILE", parse_path)


def config_options(config: type[MountConfig] | type[HubConfig]) -> Callable[[Command], Command]:
    """One flag for each setting that is no argument, and --config. Values arrive as typed, or None."""

    def decorate(command: Command) -> Command:
        add = click.option(
            "--config", "config_file", type=FILE, help="TOML file with any of these options; flags win."
        )
        for key, (name, setting) in reversed(settings(config).items()):
            if setting.argument:
                continue
            text = setting.help + (f"  [default: {setting.default}]" if setting.default else "")
            if setting.parse is parse_bool:
                flag = click.option(f"--{key}/--no-{key}", name, default=None, help=text)
            else:
                flag = click.option(f"--{key}", name, metavar=setting.metavar, help=text)
            command = flag(command)
        return add(command)

    return decorate


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")(command)


def examples(text: str) -> str:
    """Lines of examples as an epilog that click does not wrap."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in text.strip().splitlines())
