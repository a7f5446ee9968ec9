"""Read the values of a run: flags override the run file, which overrides the schema's defaults.

Environment variables are not read. Files are YAML 1.2: 010 is ten, and yes is a string. Errors in a
file, a key or a flag raise one ConfigError that names their source and lists all wrong keys.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError

from furlong.config.messages import NO_FILE, config_error, example_of, no_section, unknown_flags
from furlong.config.schema import RunConfig, Source, all_keys, keys_below, section_of, types_of
from furlong.errors import in_short, refusal


def read_yaml(text: str, source: str, change: str) -> Any:
    """Return the value of a YAML text. Raises ConfigError for an invalid text; `source` and
    `change` are the error's source and advice."""
    reader = YAML(typ="safe", pure=True)
    # Timestamps stay strings, as in JSON.
    of_times = {"tag:yaml.org,2002:timestamp": SafeConstructor.construct_yaml_str}
    reader.constructor.yaml_constructors = SafeConstructor.yaml_constructors | of_times
    try:
        return reader.load(text)
    # A number of thousands of digits is a ValueError, a wrong one after a tag any of the others.
    except (YAMLError, ValueError, LookupError, RecursionError) as error:
        raise refusal(_reason(error, text), "YAML", change, source) from error


def _reason(error: Exception, text: str) -> str:
    """Return what is wrong in a YAML text, with its line and column."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return in_short(error)
    lines = text.splitlines()
    shown = in_short(lines[mark.line], 80) if mark.line < len(lines) else "the end"
    problem, _, _ = str(getattr(error, "problem", "")).partition(" with value")
    return f"{problem} in line {mark.line + 1}, column {mark.column + 1}: {shown}"


def is_run_file(name: str) -> bool:
    """Return whether a name is that of a run file: one that ends with .yaml or .yml, or a .json
    file with the sections of a run, such as the config.json in a run folder."""
    file = Path(name)
    if file.suffix.lower() != ".json":
        return file.suffix.lower() in (".yaml", ".yml")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and {"model", "data"} <= values.keys()


def file_text(file: Path, noun: str) -> str:
    """Return the text of a file. Raises ConfigError, in which `noun` says what file it is."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        is_binary = isinstance(error, UnicodeDecodeError)
        raise refusal(
            f"{file}: {getattr(error, 'strerror', None) or error}",
            f"{noun}, which is text in UTF-8" if is_binary else f"{noun} that can be read",
            "name another file, or save this one as text in UTF-8"
            if is_binary
            else "check the path; paths are relative to the folder you call furlong from",
            f"the path of {noun}",
        ) from error


def read_run_file(file: str, change: str = "mend the line that is named") -> dict[str, Any]:
    """Return the values in a run file, in sections. Raises ConfigError; `change`: advice for a file
    that cannot be read as YAML."""
    text = file_text(Path(file), "a run file")
    values = read_yaml(text, file, change)
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        kind = "unnamed keys" if isinstance(values, dict) else f"a {type(values).__name__}"
        given = "an empty file" if values is None else kind
        required = f"a run, in sections: {', '.join(RunConfig.model_fields)}"
        raise refusal(given, required, "see recipes/quickstart.yaml", file)
    return values


def check_sections(values: Mapping[Any, Any], source: str, outer: str = "") -> dict[str, Any]:
    """Return the values without empty sections.

    Raises ConfigError for a plain value in the place of a section: a flag for a key of the section
    would silently replace this value.
    """
    checked = {}
    for name, value in values.items():
        key = f"{outer}.{name}" if outer else str(name)
        if not keys_below(key):
            checked[name] = value
        elif isinstance(value, Mapping):
            checked[name] = check_sections(value, source, key)
        elif value is not None:
            raise no_section(key, value, f"{source}, key {key}")
        elif outer:  # null for a section that may be absent
            checked[name] = None
    return checked


class FlagParser(argparse.ArgumentParser):
    """The argument parser of a subcommand (verb), to which `read_flags` adds the keys of a run. It
    raises ConfigError instead of exiting."""

    def __init__(
        self, verb: str, *, takes: str, description: str, usage: str | None = None
    ) -> None:
        """Create a parser; `takes`: the arguments of the subcommand, as errors name them."""
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
        if switch := re.fullmatch(r"argument (\S+): ignored explicit argument '(.*)'", message):
            flag, value = switch.groups()
            raise refusal(f"{flag}={value}", "a switch, which takes no value", f"write {flag}")
        raise refusal(message, self._takes, f"see {self.prog} --help")


class RunFlags(NamedTuple):
    """The parsed flags of a command line: keys of a run, and other arguments of the subcommand."""

    values: dict[str, Any]
    """Values by the key of a run, such as `train.lr`."""
    names: frozenset[str]
    """Names of all flags that were given, such as `--train.lr`."""
    own: argparse.Namespace
    """The other arguments of the verb."""


def read_flags(parser: FlagParser, arguments: Sequence[str]) -> RunFlags:
    """Parse a command line with the parser's own arguments and the keys of a run.

    A flag of the parser hides a key of the same name. Raises ConfigError; `--help` prints and
    raises SystemExit(0).
    """
    own = set(parser._option_string_actions)
    groups: dict[str, Any] = {"": parser}
    for key, field in all_keys().items():
        outer = key.rpartition(".")[0]
        help = argparse.SUPPRESS
        if section := section_of(field):
            groups[key] = parser.add_argument_group(f"{key} options", section.__doc__)
        else:
            help = f"{field.description} ({default_of(key)})".replace("%", "%%")
        if f"--{key}" not in own:
            groups[outer].add_argument(
                f"--{key}", action="append", default=[], metavar=values_in_words(key), help=help
            )
    known = parser._option_string_actions
    for text in arguments:
        name, is_pair, _ = text.partition("=")
        if is_pair and f"--{name}" in known:
            raise refusal(text, f"what {parser.prog} --help lists", f"did you mean --{text}?")
        if name.startswith("--") and " " in text and name not in known:  # argparse: no flag
            raise unknown_flags([name], list(known), parser.prog)
    parsed = vars(parser.parse_args(arguments))
    texts = {key: parsed.pop(key) for key in all_keys() if f"--{key}" not in own}
    values = {key: _value(key, given) for key, given in texts.items() if given}
    names = frozenset(text.split("=")[0] for text in arguments if text.startswith("--"))
    return RunFlags(values, names, argparse.Namespace(**parsed))


def values_in_words(key: str) -> str:
    """Return the values that a key takes, as `--help` shows them."""
    example = example_of(key)
    words: list[str] = []
    for kind in types_of(all_keys()[key].annotation):
        if get_origin(kind) is Literal:
            words += map(str, get_args(kind))
        elif kind is int and example.endswith("iB"):
            words.append(example)
        elif kind is bool:
            words += ["true", "false"]
        elif kind is not NoneType:
            words.append(_word_of(kind))
    return words[0] if len(words) == 1 else f"{{{','.join(words)}}}"


def _word_of(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return "[" + ",".join(_word_of(types_of(one)[0]) for one in get_args(kind)) + "]"
    if kind is Ellipsis:
        return "..."
    known: dict[Any, str] = {
        int: "N",
        float: "NUMBER",
        str: "TEXT",
        Source: "TEXT",
    }
    return known.get(kind, "MAPPING")


def default_of(key: str) -> str:
    """Return the default of a key, as `--help` shows it."""
    field = all_keys()[key]
    if not field.is_required():
        text = json.dumps(field.default, default=str)
        return f"default: {field.default if isinstance(field.default, str) else text}"
    outer = all_keys().get(key.rpartition(".")[0])
    return "required" if outer is None or outer.is_required() else "required in this section"


def _value(key: str, texts: Sequence[str]) -> Any:
    """Return the value of a flag; a list may be given as several flags, or with commas. Raises
    ConfigError, also for a plain value in the place of a section."""
    kinds = types_of(all_keys()[key].annotation)
    if any(get_origin(kind) is tuple for kind in kinds):
        items: list[Any] = []
        for text in texts:
            found = _read(key, text)
            items += found if isinstance(found, list) else [found]
        return items[0] if len(items) == 1 and not texts[0].lstrip().startswith("[") else items
    text = texts[-1]
    if str in kinds and text != "null":
        return text
    value = _read(key, text)
    if (below := keys_below(key)) and not isinstance(value, Mapping | None):
        required = f"one of its keys: {', '.join(below)}"
        raise refusal(
            f"--{key} {in_short(text, 40)}", required, f"did you mean --{key}.{below[0]}?"
        )
    return value


def _read(key: str, text: str) -> Any:
    """Return the value of a flag's text: a mapping or list in YAML, None for null, a list of texts
    if it has commas, otherwise the text itself."""
    if text.lstrip()[:1] in ("{", "["):
        change = "quote the value for the shell, and in it every name with odd characters:"
        return read_yaml(text, f"the flag --{key}", f"{change} --{key}='[\"a b.jsonl\"]'")
    if text == "null":
        return None
    parts = text.split(",")
    return parts if len(parts) > 1 else text


def parse_run(
    arguments: Sequence[str],
    verb: str = "train",
    switches: Mapping[str, str] | None = None,
    description: str = "Train a model.",
) -> RunConfig:
    """Return the settings of a run from a command line, `[RUN.yaml] [--section.key=value ...]`.

    `switches`: flags without a value that the subcommand `verb` reads itself, with their help text.
    Raises ConfigError; `--help` prints and raises SystemExit(0).
    """
    takes = "[RUN.yaml] [--section.key=value ...]"
    usage = f"furlong {verb} {takes}" + "".join(f" [{s}]" for s in switches or {})
    parser = FlagParser(verb, takes="--section.key=value", description=description, usage=usage)
    parser.add_argument("file", nargs="?", help="run file (YAML or JSON)")
    for name, text in (switches or {}).items():
        parser.add_argument(name, action="store_true", help=text)
    flags = read_flags(parser, arguments)
    file = flags.own.file
    values = read_run_file(file) if file is not None else {}
    return build_run(values, file or NO_FILE, flags)


def load_run(file: str | Path) -> RunConfig:
    """Return the settings of the run in a YAML or JSON file. Raises ConfigError."""
    return build_run(read_run_file(str(file)), str(file))


def build_run(values: Mapping[str, Any], source: str, flags: RunFlags | None = None) -> RunConfig:
    """Return the run with `values`, read from `source`, overridden by `flags`. Raises
    ConfigError."""
    merged = check_sections(values, source)
    for key, value in sorted(flags.values.items()) if flags else ():  # sections before their keys
        is_section = isinstance(value, Mapping) and keys_below(key)
        put(merged, key, value, beside=bool(is_section))
    try:
        return RunConfig.model_validate(merged)
    except ValidationError as error:
        names = set(flags.names) if flags else set()
        raise config_error(error.errors(), source, names) from None


def put(values: dict[str, Any], key: str, value: Any, *, beside: bool = False) -> None:
    """Set a dotted key in nested dicts (`values`), in place. `beside`: whether to merge the value,
    a mapping, into the mapping that the key has already."""
    *path, name = key.split(".")
    for part in path:
        values[part] = values = values.get(part) or {}
    values[name] = (values.get(name) or {}) | value if beside else value
