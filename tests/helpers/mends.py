"""Read the changes that an error message suggests, and apply them as a user would."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML

from furlong.config.messages import example_of
from furlong.config.schema import all_keys, keys_below
from furlong.errors import UserError
from furlong.units import parse_bytes

_DOTTED = "|".join(sorted((re.escape(k) for k in all_keys() if "." in k), key=len, reverse=True))
_SECTIONS = "|".join(key for key in all_keys() if "." not in key)
# A key of one word is an English word too: it counts between a verb or dashes and its value.
KEY = re.compile(
    rf"(?<![\w./-])(?:(?P<flag>--(?!resume|help)[a-z][a-z-]*)(?![\w.-])|(?:--)?(?P<key>model\.config\.[\w.]+|{_DOTTED}|"
    rf"(?:{_SECTIONS})(?=: [{{\w]|=)|offload(?= to )|(?<=remove )(?:hub|offload|parallel)"
    rf"|(?<=mean )(?:{_SECTIONS})))(?![\w-]|\.\w|/)"
)
ASKING = "set|add|give|remove|raise|lower|leave|use|change|write|name"
VERB = re.compile(rf"\b({ASKING}|with|without|no|mean|draw)\b")
_VALUE = re.compile(r"[\w.<|>/-]+(?:,\d{3})*")
_REMOVING = ("remove", "leave", "without", "no")
_NO_VALUES = {"a", "an", "the", "what", "your", "another", "it", "its", "one", "which"}
VALUES = {
    "--tokenizer": "llama",
    "model.tokenizer": "llama",
    "--hardware": "H100",
    "--lengths": 1000,
    "--devices": 1,
}
"""Values that a user gives if a message asks for a flag or a key without naming one."""
_IT = re.compile(r"\b(?P<verb>set|remove|lower|raise|leave) it\b")


@dataclass(frozen=True)
class Edit:
    """A change that a message suggests: a key, or a flag of a verb, is set or removed."""

    key: str
    value: Any = None
    is_removed: bool = False
    is_example: bool = False
    """Whether the message leaves the value to the user."""


@dataclass(frozen=True)
class Run:
    """Keys of a run file, and the command line around it."""

    keys: Mapping[str, Any]
    verb: str = "train"
    flags: tuple[str, ...] = ()

    def made(self, edits: tuple[Edit, ...]) -> Run:
        """Return the run with the edits applied."""
        keys, flags = dict(self.keys), list(self.flags)
        for edit in edits:
            flags = [f for f in flags if f.split("=")[0] not in (edit.key, f"--{edit.key}")]
            if edit.key.startswith("--") or not self.keys:  # a command line without a run file
                flag = f"--{edit.key.removeprefix('--')}={edit.value}"
                flags += [] if edit.is_removed else [flag]
                continue
            old = keys.get(edit.key)
            keys = {k: v for k, v in keys.items() if not f"{k}.".startswith(f"{edit.key}.")}
            for outer in [k for k in keys if edit.key.startswith(f"{k}.")]:
                keys |= {
                    f"{outer}.{name}": value for name, value in (keys.pop(outer) or {}).items()
                }
                keys.pop(edit.key, None)
            if not edit.is_removed:
                beside = old if edit.key == "data.fields" and old else {}
                keys[edit.key] = {**beside, **edit.value} if beside else edit.value
        return Run(keys, self.verb, tuple(flags))

    def sections(self) -> dict[str, Any]:
        """Return the values of the run file, in sections."""
        values: dict[str, Any] = {}
        for key, value in self.keys.items():
            *outer, name = key.split(".")
            section = values
            for one in outer:
                section = section.setdefault(one, {})
            section[name] = value
        return values


def ways(error: UserError, run: Run) -> list[tuple[Edit, ...]]:
    """Return the alternatives that a message suggests, each as edits of keys of a run."""
    found: list[tuple[Edit, ...]] = []
    change, verb, end = error.change, "", 0
    for match in KEY.finditer(change):
        before = change[end : match.start()]
        verbs = VERB.findall(before)
        verb = verbs[-1] if verbs else verb
        is_joined = found and re.search(rf"\b(?:and|with) (?:{VERB.pattern} )?$", before)
        is_joined = is_joined and not re.search(r"\bor\b|;", before)
        end = match.end()
        if re.search(r"\((?:and )?$", before):  # in brackets: an explanation of the text before
            continue
        edits = _edits(verb, match["key"] or match["flag"], change[end:], error, run)
        if is_joined:
            found[-1:] = [(*found[-1], *edit) for edit in edits] or found[-1:]
        else:
            found += edits
    named = KEY.search(error.source) or KEY.search(error.given)
    if named is not None:
        for match in _IT.finditer(change):
            edits = _edits(
                match["verb"], named["key"] or named["flag"], change[match.end() :], error, run
            )
            found += edits
    return [way for i, way in enumerate(found) if way not in found[:i]]


def _edits(verb: str, key: str, after: str, error: UserError, run: Run) -> list[tuple[Edit, ...]]:
    """Return what a verb asks of a key, by the words after the key: an alternative per value."""
    if verb in _REMOVING:
        return [(Edit(key, is_removed=True),)]
    if verb == "mean":
        old = error.given.lstrip("-").split(" ")[0].rstrip(",")
        return [(Edit(old, is_removed=True), Edit(key, run.keys.get(old)))]
    if fold := re.match(r" ([\d.]+)-fold", after):
        return [(Edit(key, _present(run, key) * float(fold[1])),)]
    if flow := re.match(r"(?:: ?|=| to (?=[{\[]))(?=[\w{\[\"'])", after):
        text = _balanced(after[flow.end() :])
        others = re.match(r"(?: or [a-z]+(?= |$|,))*", after[flow.end() + len(text) :])
        values = [text, *(others[0].split(" or ")[1:] if others and text.isalpha() else [])]
        return [] if "..." in text else [(Edit(key, _of_yaml(value)),) for value in values]
    if words := re.match(r" (?:back )?to (.+)", after):
        values, rest = [], words[1]
        while (one := _VALUE.match(rest)) and not (KEY.match(rest) or VERB.match(rest)):
            is_prose = re.match(r" (?!or |and |with )[a-z]", rest[one.end() :])
            if values and (is_prose or one[0] in _NO_VALUES):
                break
            values.append(one[0].rstrip("."))
            rest = rest[one.end() :]
            if not (more := re.match(r",? or |, ", rest)):
                break
            rest = rest[more.end() :]
        values = [value for value in values if value not in ("less", "more")]
        if "another" in values and key.endswith("_dir"):
            return [(Edit(key, "elsewhere", is_example=True),)]
        if _NO_VALUES & set(values):
            return []
        return [(Edit(key, _of_yaml(value.replace(",", ""))),) for value in values]
    if such := re.match(r",? such as ", after):
        text = _balanced(after[such.end() :])
        return [] if KEY.match(text) else [(Edit(key, _of_yaml(text), is_example=True),)]
    present = _present(run, key)
    if verb in ("raise", "lower") and isinstance(present, int | float):
        said = re.findall(r"\d[\d,]*", f"{error.given} {error.required}")
        fits = [
            n
            for n in (int(n.replace(",", "")) for n in said)
            if n != present and (n > present) == (verb == "raise")
        ]
        value = max(fits) if fits else present * 1000 if verb == "raise" else present // 2
        return [(Edit(key, value, is_example=True),)]
    if key.startswith("--"):
        return [(Edit(key, VALUES[key], is_example=True),)] if verb == "add" else []
    if verb in ("add", "set", "use", "name"):
        inner = keys_below(key)
        example = VALUES.get(key) or example_of(f"{key}.{inner[0]}" if inner else key)
        value = _of_yaml(example) if example else None
        return (
            [(Edit(key, {inner[0]: value} if inner else value, is_example=True),)]
            if example
            else []
        )
    return []


def _present(run: Run, key: str) -> Any:
    value = run.keys.get(key)
    if value is None:
        outer, _, name = key.rpartition(".")
        default = all_keys()[key].default if key in all_keys() else None
        value = (run.keys.get(outer) or {}).get(name, default)
    return parse_bytes(value) if isinstance(value, str) and value[:1].isdigit() else value


def _balanced(text: str) -> str:
    """Return the value at the start of a text: a word, or everything in matching brackets."""
    if text[0] not in "{[":
        return re.split(r"[\s,;)]", text)[0].rstrip(".:")
    depth = 0
    for at, char in enumerate(text):
        depth += (char in "{[") - (char in "}]")
        if not depth:
            return text[: at + 1]
    return text


def _of_yaml(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


@dataclass
class Followed:
    """Applies the changes that messages suggest for one input, and collects errors and faults."""

    open_door: Callable[[Run], None]
    errors: list[UserError] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def refused(self, run: Run) -> UserError | None:
        try:
            self.open_door(run)
        except UserError as error:
            self.errors.append(error)
            return error
        return None

    def follow(self, run: Run, depth: int = 4) -> list[tuple[tuple[Edit, ...], str | None]]:
        """Try all alternatives of the first message; from each, search for a way to an end."""
        error = self.refused(run)
        assert error is not None, "nothing is refused"
        first = ways(error, run)
        assert first, f"no key of a run to change:\n{error}"
        came = []
        for way in first:
            after = self._step(error, run, way)
            came.append((way, None if after is None else str(after)))
            if after is not None and not self._ends(after, run.made(way), [error], depth):
                self.faults.append(f"{_words(way)} leads nowhere, at last:\n{self.errors[-1]}")
        return came

    def _step(self, error: UserError, run: Run, way: tuple[Edit, ...]) -> UserError | None:
        after = self.refused(run.made(way))
        if after is None:
            return None
        offered = {edit.key for edit in way if not (edit.is_removed or edit.is_example)}
        said = f"{after.given}\n{after.source}"
        blamed = {match["key"] or match["flag"] for match in KEY.finditer(said)}
        set_again = {e.key for one in ways(after, run) for e in one if not e.is_removed}
        if (after.given, after.change) == (error.given, error.change):
            self.faults.append(f"{_words(way)} changes nothing:\n{after}")
        elif (blamed and blamed <= offered) or offered & set_again:
            self.faults.append(f"{_words(way)}, which is then refused:\n{error}\n\n{after}")
        return after

    def _ends(self, error: UserError, run: Run, path: list[UserError], depth: int) -> bool:
        """Return whether a message has no key to change, or one of its changes leads to an end."""
        own = ways(error, run)
        if not own:
            return True
        if depth == 0:
            return False
        for way in own:
            after = self.refused(run.made(way))
            if after is None:
                return True
            is_new = all(str(after) != str(one) for one in (*path, error))
            if is_new and self._ends(after, run.made(way), [*path, error], depth - 1):
                return True
            if not is_new and len(ways(path[0], run)) > 1:
                return True  # back at the first message, which offers something else too
        return False


def _words(way: tuple[Edit, ...]) -> str:
    return " and ".join(
        f"no {edit.key}" if edit.is_removed else f"{edit.key}: {edit.value!r}" for edit in way
    )
