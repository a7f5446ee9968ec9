"""Sources of a run's values, strongest first: flags, the run file, the schema's defaults.

There are no environment variables. Files are YAML 1.2: 010 is ten, yes is a text. Whatever is wrong
with a file, a key or a flag ends as one ConfigError that names where it came from; all wrong keys
are told at once.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_args

from pydantic import ValidationError
from pydantic_settings import CliSettingsSource, SettingsError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import YAMLError

from furlong.config.messages import (
    NO_FILE,
    config_error,
    example_of,
    no_section,
    unknown_flags,
)
from furlong.config.schema import RunConfig, all_keys, keys_below
from furlong.errors import refusal


class _Constructor(SafeConstructor):
    """Values of YAML 1.2, without texts that hold a NUL."""

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        if "\0" in value:  # only an escape can write it; no path and no name may hold it
            raise ConstructorError(
                problem="a text with a NUL character", problem_mark=node.start_mark
            )
        return value


def read_yaml(text: str, source: str, change: str) -> Any:
    """The value that `text` from `source` stands for. Raises ConfigError, which says `change`."""
    reader = YAML(typ="safe", pure=True)
    reader.Constructor = _Constructor
    # Times stay texts, as in JSON.
    of_times = {"tag:yaml.org,2002:timestamp": SafeConstructor.construct_yaml_str}
    reader.constructor.yaml_constructors = SafeConstructor.yaml_constructors | of_times
    try:
        return reader.load(text)
    # A number of thousands of digits is a ValueError, a wrong one behind a tag any of the others.
    except (YAMLError, ValueError, LookupError, RecursionError) as error:
        raise refusal(_reason(error, text), "YAML", change, source) from error


def _reason(error: Exception, text: str) -> str:
    """The fault of a YAML text, and its line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    lines = text.splitlines()
    shown = lines[mark.line].strip()[:80] if mark.line < len(lines) else "the end"
    problem, _, _ = str(getattr(error, "problem", "")).partition(" with value")
    return f"{problem} in line {mark.line + 1}, column {mark.column + 1}: {shown}"


def is_run_file(name: str) -> bool:
    """Whether a name is that of a run file: by its ending, or a .json file, such as the
    config.json of a run's folder, by its sections."""
    file = Path(name)
    if file.suffix.lower() != ".json":
        return file.suffix.lower() in (".yaml", ".yml")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and {"model", "data"} <= values.keys()


def read_run_file(file: str) -> dict[str, Any]:
    """The values of a run file. Raises ConfigError."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        given = f"bytes that are no UTF-8: {error.reason} at byte {error.start}"
        change = "check that it is the run file that you mean"
        raise refusal(given, "a run file: text in YAML", change, file) from error
    except (OSError, ValueError) as error:  # a NUL in the name is a ValueError
        raise refusal(
            f"{file}: {getattr(error, 'strerror', None) or error}",
            "a run file that can be read",
            "check the path; paths are relative to the folder you call furlong from",
            "the path of the run file",
        ) from error
    values = read_yaml(text, file, "mend the line that is named")
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        kind = "unnamed keys" if isinstance(values, dict) else f"a {type(values).__name__}"
        given = "an empty file" if values is None else kind
        required = (
            f"a run, at least model.name and data.train, in sections: {', '.join(_sections())}"
        )
        raise refusal(given, required, "see examples/quickstart.yaml", file)
    return values


def _sections() -> Sequence[str]:
    return list(RunConfig.model_fields)


def check_sections(values: Mapping[Any, Any], source: str, outer: str = "") -> dict[str, Any]:
    """The same values without empty sections.

    Raises ConfigError for a section that is none, which flags for its keys would replace without a
    word, and for names that are no keys but settings of pydantic's.
    """
    checked = {}
    for name, value in values.items():
        key = f"{outer}.{name}" if outer else str(name)
        if not outer and str(name).startswith("_"):
            required = f"one of {', '.join(_sections())}"
            raise refusal(f"{name}, an unknown key", required, "remove it", f"{source}, key {name}")
        if not keys_below(key):
            checked[name] = value
        elif isinstance(value, Mapping):
            checked[name] = check_sections(value, source, key)
        elif value is not None:
            raise no_section(key, value, f"{source}, key {key}")
        elif outer:  # a section that may be absent
            checked[name] = None
    return checked


class FlagParser(argparse.ArgumentParser):
    """The flags of a verb, to which `read_flags` adds the keys of a run. Raises ConfigError instead
    of ending the process."""

    def __init__(
        self, verb: str, *, takes: str, description: str, usage: str | None = None
    ) -> None:
        """`takes`: what the verb is called with, for the error."""
        super().__init__(
            prog=f"furlong {verb}", usage=usage, allow_abbrev=False, description=description
        )
        self._takes = takes

    def error(self, message: str) -> NoReturn:
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            texts = message.removeprefix(prefix).split()
            names = [text.split("=")[0] for text in texts if text.startswith("--")] or texts[:1]
            raise unknown_flags(names, list(self._option_string_actions), self.prog)
        raise refusal(message, self._takes, f"see {self.prog} --help")


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


def read_flags(parser: FlagParser, arguments: Sequence[str]) -> RunFlags:
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
    verb: str = "train",
    switches: Mapping[str, str] | None = None,
    description: str = "Train a model.",
) -> RunConfig:
    """The run that a command line asks for: `[RUN.yaml] [--section.key=value ...]`.

    `switches`: flags without a value that the verb reads itself, with their help. Raises
    ConfigError; `--help` prints and raises SystemExit(0).
    """
    takes = "[RUN.yaml] [--section.key=value ...]"
    usage = f"furlong {verb} {takes}" + "".join(f" [{s}]" for s in switches or {})
    parser = FlagParser(verb, takes="--section.key=value", description=description, usage=usage)
    parser.add_argument("file", nargs="?", help="run file (YAML or JSON)")
    for name, text in (switches or {}).items():
        parser.add_argument(name, action="store_true", help=text)
    flags = read_flags(parser, arguments)
    file = flags.own.file
    return merge(flags, read_run_file(file) if file is not None else {}, file or NO_FILE)


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
            argument = name + equals + _value_in_json(flag, value) if flag else argument
            flag = ""
        changed.append(argument)
    return changed


def _value_in_json(flag: str, value: str) -> str:
    """The value of a flag, in JSON where it is a mapping or a list. Raises ConfigError, also for a
    word in the place of a section's keys."""
    keys = keys_below(flag[2:])
    if value.lstrip()[:1] not in ("{", "["):
        if keys and value != "null":
            required = f"one of its keys: {', '.join(keys)}"
            raise refusal(f"{flag} {value[:40]}", required, f"did you mean {flag}.{keys[0]}?")
        return value
    if _takes_any_text(flag[2:]):
        return value
    source = f"the flag {flag}"
    change = "quote the value for the shell, and in it every name with odd characters:"
    read = read_yaml(value, source, f"{change} {flag}='[\"a b.jsonl\"]'")
    try:
        return json.dumps(read, default=str)
    except (ValueError, RecursionError) as error:  # a list that holds itself
        required = "a list or mapping that can be written out"
        raise refusal(f"{flag}: {error}", required, "write it without & and *", source) from error


def _takes_any_text(key: str) -> bool:
    """Whether the schema has a key that takes any text, so that `{a}` is one as well."""
    field = all_keys().get(key)
    return field is not None and str in (field.annotation, *get_args(field.annotation))


@contextmanager
def _settings_error_told(prog: str = "furlong train") -> Iterator[None]:
    try:
        yield
    except SettingsError as error:
        raise refusal(str(error), "values that fit their keys", f"see {prog} --help") from error


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
