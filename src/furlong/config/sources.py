"""Where a run's values come from, strongest first: flags, the run file, the schema's defaults.

There are no environment variables. Whatever is wrong with a file, a key or a flag ends as one
ConfigError that names where it came from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError
from pydantic_settings import CliSettingsSource, SettingsError

from furlong.config.messages import check_sections, config_error, is_text, unknown_flag
from furlong.config.run_file import read_run_file, read_yaml
from furlong.config.schema import RunConfig
from furlong.errors import ConfigError


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            flag = message.removeprefix(prefix).split()[0].split("=")[0]
            raise unknown_flag(flag, list(self._option_string_actions))
        raise ConfigError(
            given=message,
            required="--section.key=value",
            source="the command line",
            change="see furlong train --help",
        )


def parse_run(
    arguments: Sequence[str],
    prog: str = "furlong train",
    switches: Mapping[str, str] | None = None,
    description: str = "Train a model.",
) -> RunConfig:
    """The run that a command line asks for: `[RUN.yaml] [--section.key=value ...]`.

    `switches`: flags without a value that the verb reads itself, with their help. Raises
    ConfigError; `--help` prints and raises SystemExit(0).
    """
    parser = _Parser(prog=prog, allow_abbrev=False, description=description)
    parser.add_argument("file", nargs="?", help="run file (YAML or JSON)")
    for name, text in (switches or {}).items():
        parser.add_argument(name, action="store_true", help=text)
    chosen: dict[str, str | None] = {}

    def parse_args(_: Any, arguments: list[str]) -> argparse.Namespace:
        parsed = parser.parse_args(arguments)
        chosen["file"] = parsed.file
        return parsed

    with _settings_error_told():
        flags: CliSettingsSource[Any] = CliSettingsSource(
            RunConfig,
            cli_parse_args=_with_json(arguments),
            cli_parse_none_str="null",
            cli_enforce_required=False,
            cli_exit_on_error=False,
            cli_avoid_json=True,
            cli_hide_none_type=True,
            root_parser=parser,
            parse_args_method=parse_args,
        )
    file = chosen.get("file")
    values = check_sections(read_run_file(file), file) if file is not None else {}
    given_flags = {text.split("=")[0] for text in arguments if text.startswith("--")}
    return _validated(
        lambda: RunConfig(**({"_cli_settings_source": flags} | values)),
        file or "no run file",
        given_flags,
    )


def _with_json(arguments: Sequence[str]) -> list[str]:
    """The same arguments, with mappings and lists in YAML as the JSON that pydantic reads."""
    changed = []
    flag = ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if argument.startswith("--"):
            flag = name
        elif flag:
            name, equals, value = "", "", argument
        if flag and value.lstrip()[:1] in ("{", "[") and not is_text(flag[2:]):
            change = "quote the value for the shell, and in it every name with odd characters:"
            read = read_yaml(value, f"the flag {flag}", f"{change} {flag}='[\"a b.jsonl\"]'")
            try:
                argument = f"{name}{equals}{json.dumps(read, default=str)}"
            except (ValueError, RecursionError) as error:  # a list that holds itself
                raise ConfigError(
                    given=f"{flag}: {error}",
                    required="a list or mapping that can be written out",
                    source=f"the flag {flag}",
                    change="write it without & and *",
                ) from error
        if not argument.startswith("--") or equals:
            flag = ""
        changed.append(argument)
    return changed


@contextmanager
def _settings_error_told() -> Iterator[None]:
    try:
        yield
    except SettingsError as error:
        raise ConfigError(
            given=str(error),
            required="values that fit their keys",
            source="the command line",
            change="see furlong train --help",
        ) from error


def load_run(file: str | Path) -> RunConfig:
    """The run of a YAML or JSON file. Raises ConfigError."""
    return build_run(read_run_file(str(file)), str(file))


def build_run(values: Mapping[str, Any], source: str) -> RunConfig:
    """The run of values that were read from `source`. Raises ConfigError."""
    checked = check_sections(values, source)
    return _validated(lambda: RunConfig(**checked), source, set())


def _validated(build: Callable[[], RunConfig], file: str, flags: set[str]) -> RunConfig:
    try:
        with _settings_error_told():
            return build()
    except ValidationError as error:
        raise config_error(error.errors(), file, flags) from None
