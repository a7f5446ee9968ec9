"""Names that a user gives, looked up in a dict; an unknown one is refused with the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from furlong.errors import ConfigError

T = TypeVar("T")


def look_up(name: str, known: Mapping[str, T], *, kind: str, source: str) -> T:
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
