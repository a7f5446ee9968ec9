"""Messages about wrong keys of a run: an error of four parts for one key, a table for several."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence

from pydantic_core import ErrorDetails, PydanticUndefined

from furlong.config.foreign import answer_to, foreign_table
from furlong.config.schema import ParameterGroup, Source, all_keys, keys_below, words_of
from furlong.errors import NEAR, ConfigError, in_short, refusal

NO_FILE = "no run file"
"""The source that messages name if there is no run file."""

_SHOWN_CHARS = 120
_COLUMN_CHARS = 40
"""Most characters to which the first column of a table of keys is padded."""
_UNKNOWN = ", an unknown key"


def config_error(errors: Sequence[ErrorDetails], file: str, flags: set[str]) -> ConfigError:
    """Return the error for a wrong key, or a table for several.

    `file`: the name of the run file, or NO_FILE. `flags`: the names of the flags that were given,
    such as `--train.lr`.
    """
    by_key: dict[str, list[ErrorDetails]] = {}
    # A misspelled key comes before the missing key that it was meant to be.
    for error in sorted(errors, key=lambda error: error["type"] != "extra_forbidden"):
        by_key.setdefault(key_at(error["loc"]), []).append(error)
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
    theirs = [key for key in by_key if "." not in key and answer_to(key) is not None]
    head = f"if this is a recipe of another trainer, furlong convert {file}; otherwise "
    is_recipe = of_file and len(theirs) > 2
    return table_of_keys(rows, file if of_file else "the command line", head * is_recipe)


def table_of_keys(rows: Sequence[tuple[str, str]], source: str, head: str = "") -> ConfigError:
    """Return the error for several keys; `rows`: for each, what was given and how to change it;
    `head`: advice before them."""
    width = min(_COLUMN_CHARS, max(len(given) for given, _ in rows))
    lines = [f"\n  {given:<{width}}  {change}" for given, change in rows]
    required = "keys of a run, as furlong train --help lists them, with values that fit"
    change = f"{head}each of them:" + "".join(lines)
    return refusal(f"{len(rows)} wrong keys", required, change, source)


def unknown_flags(flags: Sequence[str], known: Sequence[str], prog: str) -> ConfigError:
    """Return the error for arguments of the command `prog` that are unknown, such as a second run
    file."""
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
    """Return advice for an unknown key. `known`: keys that may be meant, all with their sections.
    `prefix`: what to write before a suggested key."""
    key = key.lower().replace("-", "_")
    section, _, name = key.rpartition(".")
    beside = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == section}
    if (answer := answer_to(key)) is not None:  # before keys that are only spelt alike
        return answer.advice
    sections = {one.rpartition(".")[0] for one in (*known, *all_keys())}
    if section not in sections and (
        meant := difflib.get_close_matches(section, sections, n=1, cutoff=NEAR)
    ):
        return suggest(f"{meant[0]}.{name}", known, prefix)
    close = difflib.get_close_matches(name, beside, n=1, cutoff=NEAR)
    if close:
        return f"did you mean {prefix}{beside[close[0]]}?"
    if section == "offload":
        return f"write offload as a mapping: {{{name}: cpu}}"
    by_name = {one.rpartition(".")[2]: one for one in (*known, *all_keys())}
    close = [by_name[one] for one in difflib.get_close_matches(name, by_name, n=1, cutoff=NEAR)]
    if not close and section in ("model", "model.config"):
        return f"set model.config: {{{name}: ...}} for a key of its config.json, or remove it"
    return f"did you mean {prefix}{close[0]}?" if close else "remove it: furlong has none"


def example_of(key: str) -> str:
    """Return an example value for a key, written as in a run file; empty if the schema has none."""
    field = all_keys().get(key)
    if field is None or keys_below(key):
        return ""
    value = field.examples[0] if field.examples else field.get_default()
    if value in (None, PydanticUndefined, "auto"):
        return ""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def shortened(value: object) -> str:
    """Return a value as short text."""
    return "null" if value is None else in_short(repr(value), _SHOWN_CHARS)


def no_section(key: str, value: object, source: str) -> ConfigError:
    """Return the error for a plain value in the place of a section."""
    known = keys_below(key)
    return refusal(
        f"{key} = {shortened(value)}",
        f"a section with keys among {', '.join(known)}",
        f"write {key}: {{{known[0]}: {example_of(f'{key}.{known[0]}') or '...'}}}",
        source,
    )


def _wrong(key: str, errors: Sequence[ErrorDetails], file: str, flags: set[str]) -> ConfigError:
    """Return the error for one key, or for several whose values do not fit each other."""
    kind, value, location = errors[0]["type"], errors[0]["input"], errors[0]["loc"]
    context = errors[0].get("ctx", {})
    keys = context.get("keys", key) if kind == "told" else key
    about = keys.split(" and ")
    outer = key.rpartition(".")[0]
    if kind == "missing" and file == NO_FILE and outer and not all_keys()[outer].is_required():
        about = [outer]  # the section is there by its other flags
    named = [f for f in sorted(flags) if any(meet(f[2:], one) for one in about)]
    source = " and ".join(f"the flag {flag}" for flag in named) or f"{file}, key {keys}"
    required = " or ".join(dict.fromkeys(map(words_of, errors)))
    example = example_of(key)
    change = f"set {key}, such as {example}" if example else f"set {key} to what is required"
    if kind == "int_parsing" and (in_k := re.fullmatch(r"(\d{1,6})[kK]", str(value))):
        change = f"set {key} to {1024 * int(in_k[1])}"
    if choice := _near_choice(value, errors):
        change = f"set {key} to {choice}"
    given = f"{key} = {shortened(value)}"
    inside = next((n for n, part in enumerate(location) if isinstance(part, int)), None)
    if inside is not None:  # the value is an item of a list
        part = ".".join((f"{key}[{location[inside]}]", *map(str, location[inside + 1 :])))
        given, change = f"{part} = {shortened(value)}", context.get("change", change)
        if kind == "extra_forbidden":
            given = f"{part}{_UNKNOWN}"
            is_source, name = key.startswith("data."), str(location[-1])
            known = (Source if is_source else ParameterGroup).model_fields
            required = f"{'a text, or ' * is_source}a mapping of {', '.join(known)}"
            near = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
            advice = foreign_table()["in a source"] if is_source else {}
            own = next((ours for ours, names in advice.items() if name in names), "".join(near))
            whole = f"{example}, or {{path: {example}, weight: 2.0}}" if is_source else example
            change = f"write {own or whole}"
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
    """Return the allowed value that is spelt most like a given one, ignoring case, hyphens,
    underscores and blanks; empty if none is close."""
    expected = " ".join(str(error.get("ctx", {}).get("expected", "")) for error in errors)
    choices = {re.sub(r"[-_ ]", "", one): one for one in re.findall(r"'([^']+)'", expected)}
    bare = re.sub(r"[-_ ]", "", value.lower()) if isinstance(value, str) else ""
    return "".join(choices[one] for one in difflib.get_close_matches(bare, choices, 1, NEAR))


def _unknown(key: str, name: str, source: str) -> ConfigError:
    """Return the error for an unknown key; `name`: its last part."""
    outer = key.rpartition(".")[0]
    if key == name and key in all_keys():  # written with dots, as a flag is, in a file
        section, _, inner = key.partition(".")
        change = f"write {section}: {{{inner.replace('.', ': {')}: ...}}" + "}" * inner.count(".")
        required = "sections, with their keys inside"
        return refusal(f"{key} with a dot{_UNKNOWN}", required, change, source)
    known = keys_below(outer)
    whole = [f"{outer}.{field}" if outer else field for field in known]
    required = f"one of {', '.join(known)}"
    return refusal(f"{key}{_UNKNOWN}", required, suggest(key, whole), source)


def meet(one: str, other: str) -> bool:
    """Return whether two dotted keys are equal, or one is a section that contains the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def key_at(location: tuple[int | str, ...]) -> str:
    """Return the key of a pydantic error location, without trailing union branches: `chunks.size`
    for `("chunks", "size", "literal['auto']")`."""
    key = ""
    for part in location:
        if key and not keys_below(key):
            break
        key = f"{key}.{part}" if key else str(part)
    return key
