"""The messages about wrong keys of a run: one error in four parts, or a table of all of them."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic_core import ErrorDetails, PydanticUndefined

from furlong.config.foreign import answer_to, foreign_table
from furlong.config.schema import Source, all_keys, keys_below, words_of
from furlong.errors import ConfigError, in_short, refusal

NO_FILE = "no run file"
"""The source of values that no run file gave."""

_SHOWN_CHARS = 120
_COLUMN_CHARS = 40
"""Most characters of the first column of a table of keys that are padded."""
_UNKNOWN = ", an unknown key"
_NEAR = 0.75
"""Similarity, by difflib, from which one name counts as another one misspelled."""


def config_error(errors: Sequence[ErrorDetails], file: str, flags: set[str]) -> ConfigError:
    """The message about a faulty key, or the table of all of them.

    file: the run file's name, or NO_FILE. flags: those of the command line, such as
    `--train.lr`.
    """
    by_key: dict[str, list[ErrorDetails]] = {}
    # A misspelled key is told before the required one that it was meant to be.
    for error in sorted(errors, key=lambda error: error["type"] != "extra_forbidden"):
        by_key.setdefault(key_of(error["loc"]), []).append(error)
    is_bare = file == NO_FILE and not any(flag[2:] in all_keys() for flag in flags)
    if is_bare and all(own[0]["type"] == "missing" for own in by_key.values()):
        return refusal(
            "no run file",
            "a run: its file, or at least --model.name and --data.train",
            "name a run file: RUN.yaml, or the config.json of a run's folder",
        )
    wrong = [_wrong(key, own, file, flags) for key, own in by_key.items()]
    if len(wrong) == 1:
        return wrong[0]
    rows = []
    for one in wrong:
        says_all = one.given.startswith("no ") or one.given.endswith(_UNKNOWN)
        change = one.change if says_all else f"required: {one.required}; {one.change}"
        by_flag = one.source.startswith("the flag ")
        rows.append((one.given.removesuffix(_UNKNOWN), change + f" ({one.source})" * by_flag))
    of_file = file != NO_FILE and any(not one.source.startswith("the flag ") for one in wrong)
    return table_of_keys(rows, file if of_file else "the command line")


def table_of_keys(rows: Sequence[tuple[str, str]], source: str) -> ConfigError:
    """The message about several keys: what each was given as, and what to change."""
    width = min(_COLUMN_CHARS, max(len(given) for given, _ in rows))
    lines = [f"\n  {given:<{width}}  {change}" for given, change in rows]
    required = "keys of a run, as furlong train --help lists them, with values that fit"
    change = "each of them:" + "".join(lines)
    return refusal(f"{len(rows)} wrong keys", required, change, source)


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
    return refusal(flag, f"what {prog} --help lists", change)


def suggest(key: str, known: Sequence[str], prefix: str = "") -> str:
    """Advice for an unknown key, with its section in front; `known` are whole keys too."""
    key = key.lower().replace("-", "_")
    section, _, name = key.rpartition(".")
    beside = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == section}
    if (answer := answer_to(key)) is not None:  # before what is only spelt alike
        return answer.advice
    close = difflib.get_close_matches(name, beside, n=1, cutoff=_NEAR)
    if close:
        return f"did you mean {prefix}{beside[close[0]]}?"
    if section == "offload":
        return f"write offload as a mapping: {{{name}: cpu}}"
    by_name = {one.rpartition(".")[2]: one for one in (*known, *all_keys())}
    close = [by_name[one] for one in difflib.get_close_matches(name, by_name, n=1, cutoff=_NEAR)]
    if not close and section in ("model", "model.config"):
        return f"set model.config: {{{name}: ...}} for a key of its config.json, or remove it"
    return f"did you mean {prefix}{close[0]}?" if close else "remove it: furlong has none"


def example_of(key: str) -> str:
    """A value that the key takes, as a run file has it; empty where the schema names none."""
    field = all_keys().get(key)
    if field is None or keys_below(key):
        return ""
    value = field.examples[0] if field.examples else field.get_default()
    return "" if value in (None, PydanticUndefined, "auto") else _in_yaml(value)


def shortened(value: object) -> str:
    """A value for people."""
    return "null" if value is None else in_short(repr(value), _SHOWN_CHARS)


def no_section(key: str, value: object, source: str) -> ConfigError:
    """The message about a value where a section stands."""
    known = keys_below(key)
    return refusal(
        f"{key} = {shortened(value)}",
        f"a section with keys among {', '.join(known)}",
        f"write {key}: {{{known[0]}: {example_of(f'{key}.{known[0]}') or '...'}}}",
        source,
    )


def _wrong(key: str, errors: Sequence[ErrorDetails], file: str, flags: set[str]) -> ConfigError:
    """The message about one key, or about several that do not fit each other."""
    kind, value, location = errors[0]["type"], errors[0]["input"], errors[0]["loc"]
    context = errors[0].get("ctx", {})
    keys = context.get("keys", key) if kind == "told" else key
    named = [f for f in sorted(flags) if any(meet(f[2:], one) for one in keys.split(" and "))]
    source = " and ".join(f"the flag {flag}" for flag in named) or f"{file}, key {keys}"
    required = " or ".join(dict.fromkeys(map(words_of, errors)))
    example = example_of(key)
    change = f"set {key}, such as {example}" if example else f"set {key} to what is required"
    if choice := _near_choice(value, errors):
        change = f"set {key} to {choice}"
    given = f"{key} = {shortened(value)}"
    inside = next((n for n, part in enumerate(location) if isinstance(part, int)), None)
    if inside is not None:  # of a list
        part = ".".join((f"{key}[{location[inside]}]", *map(str, location[inside + 1 :])))
        given, change = f"{part} = {shortened(value)}", context.get("change", change)
        if kind == "extra_forbidden":
            given = f"{part}{_UNKNOWN}"
            required = f"a text, or a mapping of {', '.join(Source.model_fields)}"
            name = str(location[-1])
            near = difflib.get_close_matches(name, Source.model_fields, n=1, cutoff=_NEAR)
            advice = foreign_table()["in a source"]
            own = next((ours for ours, names in advice.items() if name in names), "".join(near))
            change = f"write {own or f'{example}, or {{path: {example}, weight: 2.0}}'}"
        elif kind == "missing":
            given = f"no {part}"
        return refusal(given, required, change, source)
    match kind:
        case "extra_forbidden" if f".{key}".endswith(f".{location[-1]}"):
            return _unknown(key, str(location[-1]), source)
        case "missing":
            below = keys_below(key)
            added = f"add {key}.{below[0]}" if below else f"add {key}"
            added += f", such as {example}" if example else ""
            return refusal(f"no {key}", "a value", added, source)
        case "model_type" if keys_below(key):
            return no_section(key, value, source)
        case "told":
            given, change = context.get("given", given), context["change"]
    return refusal(given, required, change, source)


def _near_choice(value: object, errors: Sequence[ErrorDetails]) -> str:
    """The allowed value that is spelt most like one, whatever its case and its marks between words;
    empty where none is."""
    expected = " ".join(str(error.get("ctx", {}).get("expected", "")) for error in errors)
    choices = {re.sub(r"[-_ ]", "", one): one for one in re.findall(r"'([^']+)'", expected)}
    bare = re.sub(r"[-_ ]", "", value.lower()) if isinstance(value, str) else ""
    return "".join(choices[one] for one in difflib.get_close_matches(bare, choices, 1, _NEAR))


def _unknown(key: str, name: str, source: str) -> ConfigError:
    """The message about an unknown key, which its section has as `name`."""
    outer = key.rpartition(".")[0]
    if key == name and key in all_keys():  # a flag's way of writing, in a file
        section, _, inner = key.partition(".")
        change = f"write {section}: {{{inner.replace('.', ': {')}: ...}}" + "}" * inner.count(".")
        required = "sections, with their keys inside"
        return refusal(f"{key} with a dot{_UNKNOWN}", required, change, source)
    known = keys_below(outer)
    whole = [f"{outer}.{field}" if outer else field for field in known]
    required = f"one of {', '.join(known)}"
    return refusal(f"{key}{_UNKNOWN}", required, suggest(key, whole), source)


def _in_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def meet(one: str, other: str) -> bool:
    """Whether one of two keys is the other one or a section around it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def key_of(location: tuple[int | str, ...]) -> str:
    """`chunks.size` of `(chunks, size, literal['auto'])`: pydantic adds the union's branches."""
    key = ""
    for part in location:
        if key and not keys_below(key):
            break
        key = f"{key}.{part}" if key else str(part)
    return key
