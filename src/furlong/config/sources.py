"""Sources of a run's values, strongest first: flags, the run file, the schema's defaults.

There are no environment variables. Scalars of YAML are those of YAML 1.2: 010 is ten, yes is a
text. Whatever is wrong with a file, a key or a flag ends as one ConfigError that names where it
came from; all wrong keys are told at once.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined
from pydantic_settings import CliSettingsSource, SettingsError

from furlong.config import foreign
from furlong.config.schema import RunConfig, words_of
from furlong.errors import ConfigError

_SHOWN_CHARS = 120
_COLUMN_CHARS = 40
"""Most characters of the first column of a table of keys that are padded."""
_UNKNOWN = ", an unknown key"
NO_FILE = "no run file"
"""The source of values that no run file gave."""
_NEAR = 0.75
"""Similarity, by difflib, from which one name counts as another one misspelled."""


class _Wrong(NamedTuple):
    """The four parts of the message about one key."""

    given: str
    required: str
    source: str
    change: str


def config_error(errors: Sequence[ErrorDetails], file: str, flags: set[str]) -> ConfigError:
    """The message about a faulty key, or the table of all of them.

    file: the run file's name, or NO_FILE. flags: those of the command line, such as
    `--train.lr`.
    """
    by_key: dict[str, list[ErrorDetails]] = {}
    # A misspelled key is told before the required one that it was meant to be.
    for error in sorted(errors, key=lambda error: error["type"] != "extra_forbidden"):
        by_key.setdefault(_key_of(error["loc"]), []).append(error)
    is_bare = file == NO_FILE and not any(flag[2:] in _leaves(RunConfig) for flag in flags)
    if is_bare and all(own[0]["type"] == "missing" for own in by_key.values()):
        return ConfigError(
            given="no run file",
            required="a run: its file, or at least --model.name and --data.train",
            source="the command line",
            change="name a run file: RUN.yaml, or the config.json of a run's folder",
        )
    wrong = [_wrong(key, own, file, flags) for key, own in by_key.items()]
    if len(wrong) == 1:
        return ConfigError(**wrong[0]._asdict())
    rows = []
    for one in wrong:
        says_all = one.given.startswith("no ") or one.given.endswith(_UNKNOWN)
        change = one.change if says_all else f"required: {one.required}; {one.change}"
        by_flag = one.source.startswith("the flag ")
        rows.append((one.given.removesuffix(_UNKNOWN), change + f" ({one.source})" * by_flag))
    own = any(not one.source.startswith("the flag ") for one in wrong) and file != NO_FILE
    return table_of_keys(rows, file if own else "the command line")


def table_of_keys(rows: Sequence[tuple[str, str]], source: str) -> ConfigError:
    """The message about several keys: what each was given as, and what to change."""
    width = min(_COLUMN_CHARS, max(len(given) for given, _ in rows))
    lines = [f"\n  {given:<{width}}  {change}" for given, change in rows]
    return ConfigError(
        given=f"{len(rows)} wrong keys",
        required="keys of a run, as furlong train --help lists them, with values that fit",
        source=source,
        change="each of them:" + "".join(lines),
    )


def _wrong(key: str, errors: Sequence[ErrorDetails], file: str, flags: set[str]) -> _Wrong:
    kind = errors[0]["type"]
    given, required, change = _explain(key, errors)
    if kind == "run_length":
        key = "train.steps and train.epochs"
        given, change = _explain_length(errors[0]["input"], flags)
    elif kind == "lora_base":
        key = "model.lora and model.init"
    elif kind == "told":
        key = errors[0]["ctx"].get("key", key)
    named = [f for f in sorted(flags) if any(_meets(f[2:], one) for one in key.split(" and "))]
    source = " and ".join(f"the flag {flag}" for flag in named)
    return _Wrong(given, required, source or f"{file}, key {key}", change)


def check_sections(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The same values without empty sections.

    Raises ConfigError for a section that is none, which flags for its keys would replace without a
    word, and for names that are no keys but settings of pydantic's.
    """
    for name in values:
        if name.startswith("_"):
            raise ConfigError(
                given=f"{name}{_UNKNOWN}",
                required=f"one of {', '.join(RunConfig.model_fields)}",
                source=f"{source}, key {name}",
                change="remove it",
            )
    _refuse_no_sections(values, (), source)
    return {name: v for name, v in values.items() if v is not None or not fields_at((name,))}


def _refuse_no_sections(values: Mapping[Any, Any], key: tuple[str, ...], source: str) -> None:
    for name, value in values.items():
        inner = (*key, str(name))
        if value is None or not (known := fields_at(inner)):
            continue
        if isinstance(value, Mapping):
            _refuse_no_sections(value, inner, source)
            continue
        whole = ".".join(inner)
        given, required, change = _no_section(whole, known, _shortened(repr(value)))
        place = f"{source}, key {whole}"
        raise ConfigError(given=given, required=required, source=place, change=change)


def suggest(key: str, known: Sequence[str], prefix: str = "") -> str:
    """Advice for an unknown key, with its section in front; `known` are whole keys too."""
    key = key.lower().replace("-", "_")
    section, _, name = key.rpartition(".")
    beside = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == section}
    close = difflib.get_close_matches(name, beside, n=1, cutoff=_NEAR)
    if close:
        return f"did you mean {prefix}{beside[close[0]]}?"
    if text := foreign.answer(key):
        return text
    elsewhere = [one for one in _leaves(RunConfig) if one.rpartition(".")[2] == name]
    close = elsewhere or difflib.get_close_matches(key, known, n=1, cutoff=_NEAR)
    return f"did you mean {prefix}{close[0]}?" if close else "remove it: furlong has none"


def is_text(key: str) -> bool:
    """Whether the schema has a key that takes any text, so that `{a}` is one as well."""
    *section, name = key.split(".")
    field = _section_at(tuple(section)).model_fields.get(name)
    kinds = (field.annotation, *get_args(field.annotation)) if field else ()
    return str in kinds


def _explain(key: str, errors: Sequence[ErrorDetails]) -> tuple[str, str, str]:
    """Three parts of the message about a key: given, required, change."""
    required = " or ".join(dict.fromkeys(map(words_of, errors)))
    value = errors[0]["input"]
    shown = "null" if value is None else _shortened(repr(value))
    section = fields_at(tuple(key.split(".")))
    kinds = {error["type"] for error in errors}
    example = example_of(key)
    change = f"set {key}, such as {example}" if example else f"set {key} to what is required"
    if kinds & {"missing", "too_long", "tuple_type"} and (length := _tuple_length(key)):
        count = len(value) if isinstance(value, list | tuple) else 1
        given = f"{key} = {shown}, {count} value{'' if count == 1 else 's'}"
        return given, f"a list of {length} values", change
    match errors[0]["type"]:
        case "extra_forbidden":
            return _unknown(key, str(errors[0]["loc"][-1]), value)
        case "missing":
            added = f"add {f'{key}.{section[0]}' if section else key}"
            return f"no {key}", "a value", added + (f", such as {example}" if example else "")
        case "model_type" if section:
            return _no_section(key, section, shown)
        case "tuple_type":
            return f"{key} = {shown}", "a list", change
        case "lora_base":
            return "model.lora and model.init: random", required, "set model.init or remove lora"
        case "told":
            context = errors[0]["ctx"]
            return context.get("given", f"{key} = {shown}"), required, context["change"]
    return f"{key} = {shown}", required, change


def _unknown(key: str, name: str, value: object) -> tuple[str, str, str]:
    """The parts of the message about an unknown key, which its section has as `name`."""
    outer = key.rpartition(".")[0]
    known = fields_at(tuple(outer.split(".")) if outer else ())
    if key == name and key in _leaves(RunConfig):  # a flag's way of writing, in a file
        given, required = f"{key} with a dot{_UNKNOWN}", "sections, with their keys inside"
        *sections, last = key.split(".")
        inner = f"{last}: {_shortened(_in_yaml(value))}"
        for section in reversed(sections[1:]):
            inner = f"{section}: {{{inner}}}"
        return given, required, f"write {sections[0]}: {{{inner}}}"
    whole = [f"{outer}.{field}" if outer else field for field in known]
    return f"{key}{_UNKNOWN}", f"one of {', '.join(known)}", suggest(key, whole)


def example_of(key: str) -> str:
    """A value that the key takes, as a run file has it; empty where the schema names none."""
    *section, name = key.split(".")
    field = _section_at(tuple(section)).model_fields.get(name)
    if field is None or fields_at((*section, name)):
        return ""
    value = field.examples[0] if field.examples else field.get_default()
    return "" if value in (None, PydanticUndefined, "auto") else _in_yaml(value)


def _in_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _no_section(key: str, known: Sequence[str], shown: str) -> tuple[str, str, str]:
    return (
        f"{key} = {shown}",
        f"a section with keys among {', '.join(known)}",
        f"write {key.rpartition('.')[2]}: {{{known[0]}: ...}}",
    )


def _meets(flag: str, key: str) -> bool:
    """Whether one of the two keys is the other one or a section around it."""
    return f"{flag}.".startswith(f"{key}.") or f"{key}.".startswith(f"{flag}.")


def _explain_length(values: object, flags: set[str]) -> tuple[str, str]:
    """Two parts of the message about the length of a run: given, change."""
    named = ("steps", "epochs")
    if not isinstance(values, Mapping) or any(values.get(name) is None for name in named):
        return "none of train.steps and train.epochs", "set one of them"
    for name, other in (named, named[::-1]):
        if f"--train.{name}" in flags and f"--train.{other}" not in flags:
            return f"both: the run file has {other}", f"add --train.{other}=null, or remove one"
    return "both of them", "remove one of them"


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _key_of(location: tuple[int | str, ...]) -> str:
    """`chunks.size` of `(chunks, size, literal['auto'])`: pydantic adds the union's branches."""
    key: list[str] = []
    for part in location:
        known = fields_at(tuple(key))
        if key and not known:
            break
        key.append(str(part))
    return ".".join(key)


def _section_at(key: tuple[str, ...]) -> type[BaseModel]:
    """The section of a key, or `BaseModel`, which has no field, where there is none."""
    section: type[BaseModel] = RunConfig
    for name in key:
        field = section.model_fields.get(name)
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        section = inner[0] if inner else BaseModel
    return section


def fields_at(key: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the keys of a section; empty for a leaf."""
    return tuple(_section_at(key).model_fields)


def _tuple_length(key: str) -> int | None:
    """How many values a key takes, if that is fixed."""
    *section, name = key.split(".")
    field = _section_at(tuple(section)).model_fields.get(name)
    if field is None or get_origin(field.annotation) is not tuple:
        return None
    kinds = get_args(field.annotation)
    return None if Ellipsis in kinds else len(kinds)


def _leaves(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Every key of a section and of those in it, sections among them."""
    found = []
    for name in section.model_fields:
        key = f"{prefix}{name}"
        found.append(key)
        inner = _section_at(tuple(key.split(".")))
        if inner.model_fields:
            found += _leaves(inner, f"{key}.")
    return found


def unknown_flags(flags: Sequence[str], known: Sequence[str], prog: str) -> ConfigError:
    """The message about flags, or a second run file, that the verb `prog` does not know."""
    names = [text.lstrip("-") for text in known]
    changes = {
        flag: suggest(flag.lstrip("-"), names, "--") if flag.startswith("-") else "remove it"
        for flag in flags
    }
    if len(changes) > 1:
        return table_of_keys(list(changes.items()), "the command line")
    ((flag, change),) = changes.items()
    return ConfigError(
        given=flag,
        required=f"a flag of {prog}, or one run file",
        source="the command line",
        change=change,
    )


_TAG = "tag:yaml.org,2002:"
# Type, how its texts look, and which characters they begin with.
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("merge", r"<<", "<"),
)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    found: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for kind, pattern, first in _SCALARS:
        for char in first:
            found.setdefault(char, []).append((_TAG + kind, re.compile(rf"(?:{pattern})\Z")))
    return found


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice: YAML itself takes the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value} is there twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        value: str = super().construct_scalar(node)
        if "\0" in value:  # only an escape can write it; no path and no name may hold it
            raise yaml.constructor.ConstructorError(
                problem="a text with a NUL character", problem_mark=node.start_mark
            )
        return value

    def _int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node))

    def _float(self, node: yaml.ScalarNode) -> float:
        return float(self.construct_scalar(node))

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = _resolvers()  # type: ignore[misc]
    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        **yaml.SafeLoader.yaml_constructors,
        f"{_TAG}int": _int,
        f"{_TAG}float": _float,
    }


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
        raise ConfigError(
            given=f"bytes that are no UTF-8: {error.reason} at byte {error.start}",
            required="a run file: text in YAML",
            source=file,
            change="check that it is the run file that you mean",
        ) from error
    except (OSError, ValueError) as error:  # a NUL in the name is a ValueError
        raise ConfigError(
            given=f"{file}: {getattr(error, 'strerror', None) or error}",
            required="a run file that can be read",
            source="the command line",
            change="check the path; paths are relative to the folder you call furlong from",
        ) from error
    values = read_yaml(text, file, "mend the line that is named")
    if values is None:
        raise ConfigError(
            given="an empty file",
            required="a run: at least model.name and data.train",
            source=file,
            change="see examples/quickstart.yaml",
        )
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(
            given=f"a {type(values).__name__}" if not isinstance(values, dict) else "unnamed keys",
            required=f"sections: {', '.join(RunConfig.model_fields)}",
            source=file,
            change="see examples/quickstart.yaml",
        )
    return values


def read_yaml(text: str, source: str, change: str) -> Any:
    """The value that `text` from `source` stands for. Raises ConfigError, which says `change`."""
    try:
        return yaml.load(text, _Loader)
    # A number of thousands of digits is a ValueError.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            given=_reason(error, text),
            required="YAML",
            source=source,
            change=change,
        ) from error


def _reason(error: Exception, text: str) -> str:
    """The fault of a YAML text, and its line."""
    mark = getattr(error, "problem_mark", None)
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return " ".join(str(error).split())
    context, begun = error.context, error.context_mark
    during = f"{context} that begins in line {begun.line + 1}: " if context and begun else ""
    lines = text.splitlines()
    shown = lines[mark.line].strip()[:80] if mark.line < len(lines) else "the end"
    return f"{during}{error.problem} in line {mark.line + 1}, column {mark.column + 1}: {shown}"


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
