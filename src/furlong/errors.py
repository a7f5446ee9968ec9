"""All errors that furlong raises: a `UserError` can be mended by the user, and is told in one
message of four parts, with exit code 2."""

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
    """The keys in which two mappings of plain values differ, with both values (None: no such key).

    Keys of inner mappings come as `outer.inner`: `{"train.lr": (1e-4, 1e-5)}`.
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
    """The first keys that `differing` has found, for an error: `key = own, WHERE other`."""
    shown = [
        f"{key} = {_shown(own)}, {where} {_shown(other)}"
        for key, (own, other) in list(found.items())[:_MAX_NAMED]
    ]
    more = len(found) - len(shown)
    return "; ".join(shown) + (f" and {more} more" if more else "")


def _shown(value: Any) -> str:
    return in_short(json.dumps(value, default=str), 80)


def in_short(text: object, most: int = 300) -> str:
    """The text in one line of about `most` characters; a longer one ends with "..." behind a
    sentence, else behind a word."""
    line = re.sub(r"\s*\n\s*", " ", str(text).strip())
    if len(line) <= most:
        return line
    head = line[: most + 1]
    whole = max(head.rfind(f"{mark} ") for mark in ".;!?") + 1 or head.rfind(" ")
    return f"{head[:whole].rstrip()} ..." if whole > most // 2 else f"{head[:most]}..."


class FurlongError(Exception):
    """Root of everything furlong raises on purpose."""


def first_line(error: BaseException) -> str:
    """The first line of an error, with the lines that it announces, in short; of four parts the
    first."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    last = next(
        (i for i, line in enumerate(lines) if not line.rstrip().endswith((":", ",", " or"))), 0
    )
    return in_short("\n".join(lines[: last + 1])).removeprefix("given:").strip()


def reason_of(error: BaseException) -> str:
    """The kind of an error, and its first line."""
    told = in_short(error.given) if isinstance(error, UserError) else first_line(error)
    return f"{type(error).__name__}: {told}"


class UserError(FurlongError):
    """Something the user can mend, told in four parts."""

    is_common = False
    """Whether every process of a run raises it, so that the first one tells it for all."""

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
        """The error, which every process has made of the same figures and is about to raise."""
        self.is_common = True
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # comes back whole from another process, whatever a subclass takes to be made
        return Exception.__new__, (type(self), *self.args), vars(self)


class ConfigError(UserError):
    """A key, a value or a flag of the run's configuration."""


def refusal(
    given: str, required: str, change: str, source: str = "the command line"
) -> ConfigError:
    """The error of a command line, or of what it names."""
    return ConfigError(given=given, required=required, source=source, change=change)


class DataError(UserError):
    """Files, records or sequences that cannot be trained on."""


class UnsupportedModelError(UserError):
    """A model, or a setting of it, that cannot be trained exactly."""

    def __str__(self) -> str:
        """The four parts, after a line that says so where transformers is newer than furlong."""
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
    """A step whose loss or gradient is not finite; the weights are as they were before it."""


class PlanError(FurlongError):
    """A plan breaks an invariant; the text shows the plan with an arrow at the guilty action."""


class ElsewhereError(FurlongError):
    """Another process has failed in a call that all make together; the text names it."""


class LinkError(ElsewhereError):
    """Another process has ended or left a call in which this one waits for it, so that all have to
    be started again; the text names it."""


class NoMemoryElsewhereError(ElsewhereError, MemoryError):
    """Another process ran out of memory: the same step can be tried in smaller chunks."""


_T = TypeVar("_T")


def first_error(error: ValidationError) -> str:
    """The first value that pydantic refuses: its place, the value, and why."""
    odd = error.errors(include_url=False)[0]
    place = ".".join(map(str, odd["loc"])) or "text"
    if odd["type"] == "missing":  # what it is missing from may be long
        return f"no {place}"
    return f"{place} = {in_short(repr(odd['input']), 80)}: {odd['msg']}"


def look_up(name: str, known: Mapping[str, _T], *, kind: str, source: str) -> _T:
    """The value of `name`, upper and lower case alike. Raises ConfigError naming the nearest."""
    by_lower = {key.lower(): key for key in known}
    key = by_lower.get(name.strip().lower())
    if key is not None:
        return known[key]
    given = name.strip().lower()
    near = [key for key in by_lower if given and key.startswith(given)]
    near = near or difflib.get_close_matches(given, by_lower, n=1, cutoff=0.0)
    raise ConfigError(
        given=f"{kind} {name!r}",
        required=f"one of {', '.join(sorted(known))}",
        source=source,
        change=f"did you mean {by_lower[near[0]]}?" if near else f"there is no {kind} to choose",
    )
