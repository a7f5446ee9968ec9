"""The exceptions that furlong raises. A `UserError` is one that the user can fix: its message has
four parts, and a command that it ends exits with code 2."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from furlong.families import NEWEST_RELEASE, installed_release, versions

if TYPE_CHECKING:
    from typing import Self

    from pydantic import ValidationError

_MAX_NAMED = 5


def in_four_parts(*, given: str, required: str, source: str, change: str) -> str:
    return f"given:    {given}\nrequired: {required}\nfrom:     {source}\nchange:   {change}"


def differing(own: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose values differ between two mappings of plain values, with both values.

    The value of a missing key is None. Keys of nested mappings are joined by dots:
    `{"train.lr": (1e-4, 1e-5)}`.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(own.keys() | other.keys()):
        pair = own.get(key), other.get(key)
        inner = [value for value in pair if value is not None]
        if all(isinstance(value, Mapping) for value in inner):
            of_key = differing(*(value or {} for value in pair))
            found |= {f"{key}.{name}": values for name, values in of_key.items()}
        elif pair[0] != pair[1]:
            found[key] = pair
    return found


def difference_words(found: Mapping[str, tuple[Any, Any]], where: str) -> str:
    """Return the first entries in a result of `differing` as text: `key = value, WHERE other
    value`. `where`: words for the place of the other value, such as "in the manifest"."""
    shown = [
        f"{key} = {_shown(own)}, {where} {_shown(other)}"
        for key, (own, other) in list(found.items())[:_MAX_NAMED]
    ]
    more = len(found) - len(shown)
    return "; ".join(shown) + (f" and {more} more" if more else "")


def _shown(value: Any) -> str:
    return in_short(json.dumps(value, default=str), 80)


def in_yaml(value: object) -> str:
    """Return a mapping as one line of YAML, `{weights: cpu}`, and other values as they are."""
    if not isinstance(value, Mapping):
        return str(value)
    whole = {k: int(x) for k, x in value.items() if isinstance(x, float) and x.is_integer()}
    return f"{{{', '.join(f'{key}: {one}' for key, one in {**value, **whole}.items())}}}"


def in_short(text: object, most: int = 300) -> str:
    """Return the text in one line of about `most` characters. A longer text is cut, after a
    sentence or a word where possible, and ends with "..."."""
    line = re.sub(r"\s*\n\s*", " ", str(text).strip())
    if len(line) <= most:
        return line
    head = line[: most + 1]
    whole = max(head.rfind(f"{mark} ") for mark in ".;!?") + 1 or head.rfind(" ")
    return f"{head[:whole].rstrip()} ..." if whole > most // 2 else f"{head[:most]}..."


class FurlongError(Exception):
    """Base class of all exceptions that furlong raises on purpose."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened; for a `UserError`, the part "given".
    A line that ends with ":", "," or " or" is joined to the next one."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    last = next(
        (i for i, line in enumerate(lines) if not line.rstrip().endswith((":", ",", " or"))), 0
    )
    return in_short("\n".join(lines[: last + 1])).removeprefix("given:").strip()


def reason_of(error: BaseException) -> str:
    """Return the type and the first line of an error: `ValueError: no such value`."""
    told = in_short(error.given) if isinstance(error, UserError) else first_line(error)
    return f"{type(error).__name__}: {told}"


class UserError(FurlongError):
    """An error that the user can fix: `given` is the wrong value, `required` what is accepted,
    `source` the key, flag or file that the value came from, `change` how to fix it."""

    is_common = False
    """Whether every process of a run raises this error, so that only one needs to print it."""

    def __init__(self, *, given: str, required: str, source: str, change: str) -> None:
        self.given = given
        self.required = required
        self.source = source
        self.change = change
        super().__init__()

    def __str__(self) -> str:
        return in_four_parts(
            given=self.given, required=self.required, source=self.source, change=self.change
        )

    def on_all(self) -> Self:
        """Mark this error as one that every process raises with the same text, so that only the
        first process prints it. Return the error."""
        self.is_common = True
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # unpickling must not call __init__: subclasses may take other arguments
        return Exception.__new__, (type(self), *self.args), vars(self)


class ConfigError(UserError):
    """A wrong key, value or flag in the configuration of a run."""


FLOAT16 = "float16 needs loss scaling, which furlong lacks"
"""Why neither runs nor the engine's losses have gradients in float16: many would round to 0."""


def refusal(
    given: str, required: str, change: str, source: str = "the command line"
) -> ConfigError:
    """Return a ConfigError, by default about the command line. The arguments are the parts of its
    message; see `UserError`."""
    return ConfigError(given=given, required=required, source=source, change=change)


class DataError(UserError):
    """Files, records or sequences that cannot be trained on."""


class UnsupportedModelError(UserError):
    """A model, or a setting of it, that cannot be trained exactly."""

    def __str__(self) -> str:
        """Return the four parts, after a hint if transformers is newer than the tested releases."""
        if installed_release() <= NEWEST_RELEASE:
            return super().__str__()
        major, minor = NEWEST_RELEASE
        return (
            f"furlong knows transformers up to {major}.{minor}, and {versions()['transformers']} is"
            f" installed: try pip install 'transformers<{major}.{minor + 1}' first\n"
            f"{super().__str__()}"
        )


class CheckpointError(UserError):
    """A run folder or a checkpoint that cannot be read or written."""


class DivergenceError(UserError):
    """A step whose loss or gradient norm is not finite, or whose loss is above `train.max_loss`; it
    leaves the weights as they were."""


class PlanError(FurlongError):
    """A plan that breaks an invariant; the message shows it, with an arrow at the wrong action."""


class ElsewhereError(FurlongError):
    """Another process failed in a call that all processes make; the message names that process."""


class LinkError(ElsewhereError):
    """Another process exited, or left a call in which this one waits for it. All processes must be
    restarted; the message names that process."""


_T = TypeVar("_T")


def first_error(error: ValidationError) -> str:
    """Return the first value that pydantic refuses: its location, the value and the reason."""
    odd = error.errors(include_url=False)[0]
    place = ".".join(map(str, odd["loc"])) or "text"
    if odd["type"] == "missing":  # the input is the mapping around it, which may be long
        return f"no {place}"
    return f"{place} = {in_short(repr(odd['input']), 80)}: {odd['msg']}"


NEAR = 0.7
"""Least similarity, by difflib, at which a name counts as a misspelling of another."""


def look_up(name: str, known: Mapping[str, _T], *, kind: str, source: str, instead: str = "") -> _T:
    """Return the value of a name in `known`, ignoring case. Raises ConfigError, which calls it a
    `kind` and suggests a known name if one is near. `instead`: what else may be given."""
    by_lower = {key.lower(): key for key in known}
    key = by_lower.get(name.strip().lower())
    if key is not None:
        return known[key]
    given = name.strip().lower()
    near = [key for key in by_lower if given and key.startswith(given)]
    near = near or difflib.get_close_matches(given, by_lower, n=1, cutoff=NEAR)
    also = f"{instead}, or " if instead else ""
    raise ConfigError(
        given=f"{kind} {name!r}",
        required=f"{also}one of {', '.join(sorted(known))}",
        source=source,
        change=f"did you mean {by_lower[near[0]]}?"
        if near
        else f"give {also}a name that is listed",
    )
