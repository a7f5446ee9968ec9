"""The model's config as a run uses it: what trained weights mean, and with what they are loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from furlong.errors import CheckpointError

_MAX_NAMED = 5


def check_architecture(
    checkpoint: Path, state: Mapping[str, Any], present: Mapping[str, Any], name: str
) -> None:
    """Raises CheckpointError unless `present`, the architecture of the model `name` today, is the
    one that the checkpoint's weights were trained with."""
    trained = state["architecture"]
    if differing := differing_keys(present, trained, "trained with"):
        raise CheckpointError(
            given=differing,
            required=f"the config.json of {name} with which the weights were trained",
            source=f"{name}, config.json, and {checkpoint}",
            change=f"restore the config.json of {name} (a hub id may have a new revision), or start"
            " anew with another out",
        )


def differing_keys(own: Mapping[str, Any], other: Mapping[str, Any], where: str) -> str:
    """The first keys whose values differ, each with the other's value behind the words `where`;
    empty where none does."""
    found = [
        f"{key} = {_shown(own.get(key))}, {where} {_shown(other.get(key))}"
        for key in sorted(own.keys() | other.keys())
        if own.get(key) != other.get(key)
    ]
    more = len(found) - _MAX_NAMED
    return "; ".join(found[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _shown(value: Any) -> str:
    text = "null" if value is None else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
