"""Rotary position embeddings of another length: `model.rope` written into a transformers config.

Only types that depend on the position alone are exact in chunks; `dynamic` depends on the length of
each call. Keys, and which of them a type needs, are those of the installed transformers: its own
validation runs, and what it would only log is an error here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from logging.handlers import BufferingHandler
from typing import Any

from furlong.errors import ConfigError

_WITH_ORIGINAL_LENGTH = ("yarn", "llama3", "longrope")
_KEPT = ("rope_theta", "partial_rotary_factor")


def num_positions(config: Any) -> int | None:
    """Positions that the model knows, None where its config names no number."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(positions) if positions and positions > 0 else None


def apply_rope(config: Any, rope: Mapping[str, Any], *, max_seq_len: int | None = None) -> None:
    """Change the RoPE of a transformers config, in place.

    `rope` holds `rope_type` and its own keys; base and rotated share stay the model's unless they
    are given. The original length is the one before any scaling; afterwards the model has
    `factor` times as many positions, or `max_seq_len` where the type has no factor. Layers with a
    sliding window of their own RoPE keep it: distances in them do not grow.
    Raises ConfigError.
    """
    text = config.get_text_config()
    before = getattr(text, "rope_parameters", None)
    if not before:
        raise _refused(f"a model of type {text.model_type}, which has no RoPE", "no model.rope")
    given: dict[str, Any] = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in rope.items()
        if value is not None
    }
    layered = {key: entry for key, entry in before.items() if isinstance(entry, dict)}
    changed = [entry for key, entry in layered.items() if key != "sliding_attention"] or [before]
    original = int(given.get("original_max_position_embeddings") or _original_length(text, changed))
    if "factor" in given:
        positions = math.floor(given["factor"] * original)
    else:
        positions = max(num_positions(config) or 0, max_seq_len or 0)
    if given["rope_type"] in _WITH_ORIGINAL_LENGTH:
        given["original_max_position_embeddings"] = original
    if given["rope_type"] == "longrope":
        given.setdefault("factor", positions / original)
    for entry in changed:
        kept = {key: entry[key] for key in _KEPT if entry.get(key) is not None}
        entry.clear()
        entry.update(kept | given)
    text.max_position_embeddings = positions
    if hasattr(text, "original_max_position_embeddings"):
        text.original_max_position_embeddings = original  # it comes before rope_parameters
    _validate(text, given)


def check_length(config: Any, max_seq_len: int, *, has_rope: bool) -> None:
    """Raise ConfigError if sequences of `max_seq_len` have more positions than the model."""
    positions = num_positions(config)
    if positions is None or max_seq_len <= positions:
        return
    factor = math.ceil(max_seq_len / positions)
    raise ConfigError(
        given=f"data.max_seq_len = {max_seq_len:,} for a model of {positions:,} positions"
        + (" after model.rope" if has_rope else ""),
        required=f"at most {positions:,}, or a RoPE that reaches further",
        source="data.max_seq_len and max_position_embeddings in the model's config.json",
        change=f"raise model.rope.factor {factor}-fold"
        if has_rope
        else f"lower data.max_seq_len, or set model.rope: {{rope_type: yarn, factor: {factor}}}",
    )


def check_rope(config: Any, source: str) -> None:
    """Raise ConfigError where a transformers config has a RoPE whose angles would not be finite."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested = [entry for entry in parameters.values() if isinstance(entry, dict)]
    for entry in nested or [parameters]:
        for key in ("rope_theta", "factor", "partial_rotary_factor"):
            value = entry.get(key)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < math.inf):
                raise ConfigError(
                    given=f"{key} = {value!r} in rope_parameters",
                    required="a number above 0",
                    source=f"{source}, config.json",
                    change="mend config.json, or use the model's own",
                )


def _original_length(text: Any, entries: list[dict[str, Any]]) -> int:
    """Positions before the scaling that the model already has, if it has one."""
    lengths = [entry.get("original_max_position_embeddings") for entry in entries]
    own = getattr(text, "original_max_position_embeddings", None)
    return next((int(n) for n in (own, *lengths) if n), text.max_position_embeddings)


def _validate(text: Any, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for all that transformers refuses or warns of."""
    logger, told = logging.getLogger("transformers.modeling_rope_utils"), BufferingHandler(1000)
    before = logger.level, logger.propagate
    logger.addHandler(told)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        text.standardize_rope_params()
        text.validate_rope()
    except (KeyError, TypeError, ValueError) as error:
        message = error.args[0] if error.args else error
        raise _refused(_shown(given), str(message)) from error
    finally:
        logger.removeHandler(told)
        logger.setLevel(before[0])
        logger.propagate = before[1]
    # the number of positions is rounded to a whole one, hence no ratio to the last digit
    messages = [record.getMessage() for record in told.buffer]
    if complaints := [message for message in messages if "implicit factor" not in message]:
        raise _refused(_shown(given), complaints[0])


def _shown(given: Mapping[str, Any]) -> str:
    return "model.rope = {" + ", ".join(f"{key}: {value}" for key, value in given.items()) + "}"


def _refused(given: str, required: str) -> ConfigError:
    return ConfigError(
        given=given,
        required=required,
        source="model.rope, as the installed transformers checks it",
        change="mend model.rope; a common one is {rope_type: yarn, factor: 4}",
    )
