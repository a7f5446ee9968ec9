"""Names and JSON files that a user gives, refused where they are not what they should be."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from furlong.errors import ConfigError


def read_object(file: str | Path, *, source: str, change: str) -> dict[str, Any]:
    """The object that a JSON file holds. Raises ConfigError for everything else."""
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            given=f"{file}: {error.strerror if isinstance(error, OSError) else error}",
            required="JSON that can be read",
            source=source,
            change=change,
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            given=f"{file} holds a {type(found).__name__}", required="one JSON object",
            source=source, change=change,
        )  # fmt: skip
    return found


def user_cache() -> Path:
    """The folder in the user's cache for what was measured once."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "furlong"


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
