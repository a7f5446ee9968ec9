"""Where a run's values come from, strongest first: flags, the run file, the schema's defaults.

There are no environment variables. Whatever is wrong with a file, a key or a flag ends as one
ConfigError that names where it came from.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pydantic import ValidationError
from pydantic_settings import CliSettingsSource, SettingsError

from furlong.config.messages import (
    NO_FILE,
    check_sections,
    config_error,
    example_of,
    fields_at,
    is_text,
    unknown_flags,
)
from furlong.config.run_file import read_run_file, read_yaml
from furlong.config.schema import RunConfig
from furlong.errors import ConfigError


class RunParser(argparse.ArgumentParser):
    """Flags of a verb, to which `read_flags` adds the keys of a run. Raises ConfigError instead of
    ending the process."""

    def error(self, message: str) -> NoReturn:
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            texts = message.removeprefix(prefix).split()
            names = [text.split("=")[0] for text in texts if text.startswith("--")] or texts[:1]
            raise unknown_flags(names, list(self._option_string_actions), self.prog)
        raise ConfigError(
            given=message,
            required="--section.key=value",
            source="the command line",
            change=f"see {self.prog} --help",
        )


# Python's words in the help of a key, and ours.
_TYPE_WORDS = (
    (r"dict\[.*\]", "MAPPING"),
    (r"tuple\[(.*)\]", r"[\1]"),
    (r"\bJSON\b", "MAPPING"),
    (r"\bstr\b", "TEXT"),
    (r"\bfloat\b", "NUMBER"),
    (r"\bbool\b", "{true,false}"),
)
_HELP_WORDS = (
    ("default: None", "default: null"), ("default: True", "default: true"),
    ("default: False", "default: false"), ("(0.9, 0.95)", "[0.9, 0.95]"),
    ("ifdef: required", "required in this section"),
)  # fmt: skip


def _in_words(key: str, kinds: str) -> str:
    """The values that a key takes; `kinds` are pydantic's words for it."""
    example = example_of(key)
    kinds = re.sub(r"\bint\b", example if example.endswith("iB") else "N", kinds)
    for python, words in _TYPE_WORDS:
        kinds = re.sub(python, words, kinds)
    return kinds


class RunFlags(NamedTuple):
    """The flags of a command line: those that are keys of the schema, and a verb's own."""

    keys: CliSettingsSource[Any]
    """Keys of a run."""
    names: frozenset[str]
    """All flags, such as `--train.lr`."""
    own: argparse.Namespace
    """The verb's own arguments."""


def read_flags(parser: RunParser, arguments: Sequence[str]) -> RunFlags:
    """A command line of the parser's own arguments and the keys of a run.

    A flag of the parser comes before a key of that name. Raises ConfigError; `--help` prints and
    raises SystemExit(0).
    """
    own = parser.parse_args([])

    def add_argument(group: Any, *names: str, **kinds: Any) -> None:
        if (key := names[0].removeprefix("--")) not in own:
            if "metavar" in kinds:
                kinds["metavar"] = _in_words(key, kinds["metavar"])
                for python, word in _HELP_WORDS:
                    kinds["help"] = kinds["help"].replace(python, word)
            argparse.ArgumentParser.add_argument(group, *names, **kinds)

    def parse_args(_: Any, arguments: list[str]) -> argparse.Namespace:
        parsed = vars(parser.parse_args(arguments))
        for name in vars(own):
            setattr(own, name, parsed.pop(name))
        return argparse.Namespace(**parsed)

    with _settings_error_told(parser.prog):
        keys: CliSettingsSource[Any] = CliSettingsSource(
            RunConfig,
            cli_parse_args=_with_json(arguments),
            cli_parse_none_str="null",
            cli_enforce_required=False,
            cli_exit_on_error=False,
            cli_avoid_json=True,
            cli_hide_none_type=True,
            root_parser=parser,
            add_argument_method=add_argument,
            parse_args_method=parse_args,
        )
    names = frozenset(text.split("=")[0] for text in arguments if text.startswith("--"))
    return RunFlags(keys, names, own)


def merge(flags: RunFlags, values: Mapping[str, Any], source: str) -> RunConfig:
    """The run of `values`, which were read from `source`, under the flags. Raises ConfigError."""
    checked = check_sections(values, source)
    build = partial(RunConfig, **({"_cli_settings_source": flags.keys} | checked))
    return _validated(build, source, set(flags.names))


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
    usage = f"{prog} [RUN.yaml] [--section.key=value ...]" + "".join(
        f" [{s}]" for s in switches or {}
    )
    parser = RunParser(prog=prog, usage=usage, allow_abbrev=False, description=description)
    parser.add_argument("file", nargs="?", help="run file (YAML or JSON)")
    for name, text in (switches or {}).items():
        parser.add_argument(name, action="store_true", help=text)
    flags = read_flags(parser, arguments)
    file = flags.own.file
    values = read_run_file(file) if file is not None else {}
    return merge(flags, values, file or NO_FILE)


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
        if equals or not argument.startswith("--"):
            _refuse_word(flag, value)
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


def _refuse_word(flag: str, value: str) -> None:
    """Raise ConfigError for a word in the place of a section's keys."""
    keys = fields_at(tuple(flag[2:].split(".")))
    if keys and value != "null" and value.lstrip()[:1] not in ("{", "["):
        raise ConfigError(
            given=f"{flag} {value[:40]}",
            required=f"one of its keys: {', '.join(keys)}",
            source="the command line",
            change=f"did you mean {flag}.{keys[0]}?",
        )


@contextmanager
def _settings_error_told(prog: str = "furlong train") -> Iterator[None]:
    try:
        yield
    except SettingsError as error:
        raise ConfigError(
            given=str(error),
            required="values that fit their keys",
            source="the command line",
            change=f"see {prog} --help",
        ) from error


def load_run(file: str | Path) -> RunConfig:
    """The run of a YAML or JSON file. Raises ConfigError."""
    return build_run(read_run_file(str(file)), str(file))


def build_run(values: Mapping[str, Any], source: str) -> RunConfig:
    """The run of values that were read from `source`. Raises ConfigError."""
    return _validated(partial(RunConfig, **check_sections(values, source)), source, set())


def _validated(build: Callable[[], RunConfig], file: str, flags: set[str]) -> RunConfig:
    try:
        with _settings_error_told():
            return build()
    except ValidationError as error:
        raise config_error(error.errors(), file, flags) from None
