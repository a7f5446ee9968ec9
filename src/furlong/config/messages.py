"""Errors that pydantic finds in a run's configuration, as one message of four parts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from furlong.config import foreign
from furlong.config.schema import RunConfig
from furlong.errors import ConfigError

_SHOWN_CHARS = 120
_NEAR = 0.75
"""Similarity, by difflib, from which one name counts as another one misspelled."""


def config_error(errors: Sequence[ErrorDetails], file: str, flags: set[str]) -> ConfigError:
    """The message about all that is wrong with the first faulty key.

    file: the run file's name. flags: the flags of the command line, such as `--train.lr`.
    """
    # A misspelled key is told before the required one that it was meant to be.
    errors = sorted(errors, key=lambda error: error["type"] != "extra_forbidden")
    key = _key_of(errors[0]["loc"])
    own = [error for error in errors if _key_of(error["loc"]) == key]
    more = len({_key_of(error["loc"]) for error in errors}) - 1
    given, required, change = _explain(key, own)
    if own[0]["type"] == "run_length":
        key = "train.steps and train.epochs"
        given, change = _explain_length(own[0]["input"], flags)
    elif own[0]["type"] == "lora_base":
        key = "model.lora and model.init"
    elif own[0]["type"] == "told":
        key = own[0]["ctx"].get("key", key)
    named = key.split(" and ") if own[0]["type"] == "told" else [key]
    flag = next((f for f in sorted(flags) if any(_meets(f[2:], one) for one in named)), None)
    return ConfigError(
        given=given,
        required=required,
        source=f"the flag {flag}" if flag else f"{file}, key {key}",
        change=change + (f"; {more} more of its keys are wrong" if more else ""),
    )


def check_sections(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The same values without empty sections.

    Raises ConfigError for a section that is none, which flags for its keys would replace without a
    word, and for names that are no keys but settings of pydantic's.
    """
    for name in values:
        if name.startswith("_"):
            raise ConfigError(
                given=f"{name}, an unknown key",
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
    key = key.replace("-", "_")
    section, _, name = key.rpartition(".")
    beside = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == section}
    close = difflib.get_close_matches(name, beside, n=1, cutoff=_NEAR)
    if close:
        return f"did you mean {prefix}{beside[close[0]]}?"
    if text := foreign.answer(key):
        return text
    elsewhere = [one for one in _leaves(RunConfig) if one.rpartition(".")[2] == name]
    close = elsewhere or difflib.get_close_matches(key, known, n=1, cutoff=_NEAR)
    return f"did you mean {prefix}{close[0]}?" if close else "remove it"


def is_text(key: str) -> bool:
    """Whether the schema has a key that takes any text, so that `{a}` is one as well."""
    *section, name = key.split(".")
    field = _section_at(tuple(section)).model_fields.get(name)
    kinds = (field.annotation, *get_args(field.annotation)) if field else ()
    return str in kinds


def _explain(key: str, errors: Sequence[ErrorDetails]) -> tuple[str, str, str]:
    """Three parts of the message about a key: given, required, change."""
    noise = r"^Input should be |^Value error, |, unable to parse string as an? \w+"
    required = " or ".join(dict.fromkeys(re.sub(noise, "", error["msg"]) for error in errors))
    value = errors[0]["input"]
    shown = "null" if value is None else _shortened(repr(value))
    section = fields_at(tuple(key.split(".")))
    kinds = {error["type"] for error in errors}
    if kinds & {"missing", "too_long", "tuple_type"} and (length := _tuple_length(key)):
        count = len(value) if isinstance(value, list | tuple) else 1
        given = f"{key} = {shown}, {count} value{'' if count == 1 else 's'}"
        return given, f"a list of {length} values", f"set {key} to what is required"
    match errors[0]["type"]:
        case "extra_forbidden":
            outer = key.rpartition(".")[0]
            known = fields_at(tuple(outer.split(".")) if outer else ())
            whole = [f"{outer}.{name}" if outer else name for name in known]
            return f"{key}, an unknown key", f"one of {', '.join(known)}", suggest(key, whole)
        case "missing":
            return f"no {key}", "a value", f"add {f'{key}.{section[0]}' if section else key}"
        case "model_type" if section:
            return _no_section(key, section, shown)
        case "tuple_type":
            return f"{key} = {shown}", "a list", f"set {key} to what is required"
        case "lora_base":
            return "model.lora and model.init: random", required, "set model.init or remove lora"
        case "told":
            context = errors[0]["ctx"]
            return context.get("given", f"{key} = {shown}"), required, context["change"]
    return f"{key} = {shown}", required, f"set {key} to what is required"


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


def unknown_flag(flag: str, known: Sequence[Any], prog: str) -> ConfigError:
    """The message about a flag, or a second run file, that the verb `prog` does not know."""
    if flag.startswith("-"):
        change = suggest(flag.lstrip("-"), [text.lstrip("-") for text in known], "--")
    else:
        change = "remove it"
    return ConfigError(
        given=flag,
        required=f"a flag of {prog}, or one run file",
        source="the command line",
        change=change,
    )
