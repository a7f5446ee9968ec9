"""The model's config as a run uses it: what trained weights mean, and with what they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from furlong.errors import CheckpointError, difference_words, differing


def check_architecture(
    checkpoint: Path, state: Mapping[str, Any], present: Mapping[str, Any], name: str
) -> None:
    """Raises CheckpointError unless `present`, the architecture of the model `name` today, is the
    one that the checkpoint's weights were trained with."""
    trained = state["architecture"]
    if found := differing(present, trained):
        raise CheckpointError(
            given=difference_words(found, "trained with"),
            required=f"the config.json of {name} with which the weights were trained",
            source=f"{name}, config.json, and {checkpoint}",
            change=f"restore the config.json of {name} (a hub id may have a new revision), or start"
            " anew with another out",
        )
