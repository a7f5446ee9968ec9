"""Errors that pydantic finds in a run's configuration, as one message of four parts."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails, PydanticUndefined

from furlong.config import foreign
from furlong.config.schema import RunConfig
from furlong.config.words import words_of
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
