"""JSON files of users, refused by name where they are not what they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
