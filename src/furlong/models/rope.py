"""RoPE for other lengths: write `model.rope` into a transformers config, and check lengths.

Only RoPE types that depend on the position alone are exact in chunks; `dynamic` depends on the
length of each call. The keys of a type, and which of them it requires, are those of the installed
transformers: its own validation runs, and its warnings are errors here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from furlong.errors import ConfigError, in_yaml, refusal
from furlong.families import for_all_layers
from furlong.files import read_object
from furlong.models.asked import positions_of, rope_entries

_WITH_ORIGINAL_LENGTH = ("yarn", "llama3", "longrope")
_REPLACED = ("default", "linear", "dynamic", *_WITH_ORIGINAL_LENGTH)
"""RoPE types that `apply_rope` may replace: they rotate the same dimensions of each head."""
_LIKELY = {"factor": 4, "low_freq_factor": 1, "high_freq_factor": 4}
"""Most common values of keys that a RoPE type requires, to suggest for a missing key."""
_KEPT = ("rope_theta", "partial_rotary_factor")
_SOURCE = "model.rope, as the installed transformers checks it"
_scaled_entries = partial(rope_entries, but="sliding_attention")
"""The RoPE parameters to scale for longer sequences: not those of sliding-window layers."""


def num_positions(config: Any, wanted: int = 0) -> int | None:
    """Return the number of positions that a model supports, or None if its config names none or its
    outputs do not depend on positions.

    `wanted`: a sequence length. If it exceeds the positions of a config with RoPE, a tiny model
    tests whether anything is rotated at all.
    """
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if not positions or positions < 0:
        return None
    is_known = bool(rope_entries(text)) and wanted <= positions
    return int(positions) if is_known or positions_of(text) != "none" else None


def goes_beyond(config: Any) -> bool:
    """Whether a model computes positions beyond the number that its config names as it does others:
    it rotates by angles that depend on the position alone."""
    entries = rope_entries(config.get_text_config())
    is_static = not {"dynamic", "longrope"} & {*map(_type_of, entries)}
    return bool(entries) and is_static and positions_of(config) == "rotary"


def takes_rope(config: Any) -> bool:
    """Whether `apply_rope` can change the RoPE of a model that has one. Gemma 4's "proportional"
    pads the frequencies of a part of each head; other types would compute too few."""
    return {*map(_type_of, _scaled_entries(config.get_text_config()))} <= {*_REPLACED}


def switching_lengths(config: Any) -> list[int]:
    """Return the lengths up to which longrope uses its short factors, one per layer type."""
    text = config.get_text_config()
    return [_original_length(text, [x]) for x in rope_entries(text) if _type_of(x) == "longrope"]


def apply_rope(config: Any, rope: Mapping[str, Any], *, max_seq_len: int | None = None) -> None:
    """Change the RoPE of a transformers config and its number of positions, in place.

    Some keys that `rope` lacks keep the model's values: `rope_theta`, `partial_rotary_factor` and,
    if `rope` has the model's RoPE type, all others; an `attention_factor` that is inferred from the
    model's factor follows the new one. Sliding-window layers with a separate RoPE keep it, since
    distances in them do not grow.

    With a factor, the model then has `factor` times its positions before any scaling. If the RoPE
    type stays, it has at least its present positions times the ratio of new to old factor. Without
    a factor, it has at least its present positions and `max_seq_len`. Raises ConfigError for a
    model without RoPE or whose RoPE it does not take (`takes_rope`), and if transformers refuses
    the new RoPE or warns of it.
    """
    text = config.get_text_config()
    given: dict[str, Any] = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in rope.items()
        if value is not None
    }
    changed = _scaled_entries(text)
    if not changed or positions_of(text) != "rotary":
        given_type = f"model.rope for a model of type {text.model_type}, which has no RoPE"
        required = "a model that rotates queries and keys"
        raise refusal(given_type, required, "remove model.rope", _SOURCE)
    if not takes_rope(config):
        given_type = f"model.rope for a model with RoPE of type {_type_of(changed[0])}"
        required = f"a model with RoPE of type {', '.join(_REPLACED)}"
        raise refusal(given_type, required, "remove model.rope", _SOURCE)
    known, before = _complaints(text), num_positions(config) or 0
    original = int(given.get("original_max_position_embeddings") or _original_length(text, changed))
    is_own_type = _type_of(changed[0]) == given["rope_type"]
    own_factor = changed[0].get("factor") if is_own_type else None
    if factor := given.get("factor", own_factor):
        positions = math.floor(factor * original)
        if own_factor:  # Llama 3's positions are more than factor x original
            positions = max(positions, math.floor(before * factor / own_factor))
    else:
        positions = max(before, max_seq_len or 0)
    if given["rope_type"] in _WITH_ORIGINAL_LENGTH:
        given["original_max_position_embeddings"] = original
    elif given["rope_type"] == "linear":  # transformers knows no original length of this type
        given.pop("original_max_position_embeddings", None)
    if given["rope_type"] == "longrope":
        given.setdefault("factor", positions / original)
    for entry in changed:
        kept = {k: v for k, v in entry.items() if v is not None and (is_own_type or k in _KEPT)}
        if factor != own_factor and _is_inferred(kept):
            del kept["attention_factor"]
        entry.clear()
        entry.update(kept | given)
    text.max_position_embeddings = positions
    # Mixtral's is None, and transformers' YaRN multiplies by it
    if for_all_layers(text, "head_dim", 0) is None:
        text.head_dim = text.hidden_size // text.num_attention_heads
    if hasattr(text, "original_max_position_embeddings"):
        text.original_max_position_embeddings = original  # takes precedence over rope_parameters
    if new := [told for told in _complaints(text) if told not in known]:
        missing = new[0].rpartition(": ")[2] if "Missing" in new[0] else ""
        likely = {key: value for key, value in _LIKELY.items() if f"'{key}'" in missing}
        whole = f"set model.rope: {in_yaml(given | likely)}"
        change = whole if likely else "mend or remove model.rope"
        required = "keys and values of model.rope that transformers accepts"
        raise refusal(f"model.rope = {in_yaml(given)}: {new[0]}", required, change, _SOURCE)


def ropes_to_try(
    config: Any, given: Mapping[str, Any], factors: Sequence[float], wanted: int
) -> list[tuple[dict[str, Any] | None, float, int]]:
    """Return (value of model.rope, its factor, positions of the model with it), the model's own
    RoPE first, as None.

    Args:
        config: A transformers config of a model that `goes_beyond` its positions.
        given: Keys of model.rope that all of them have. Without a `rope_type`, it is the model's
            where that has a factor, else YaRN.
        factors: The factors; if empty, the model's own is doubled until it has `wanted` positions.

    Raises ConfigError if transformers refuses one of them.
    """
    text = config.get_text_config()
    own, positions = _scaled_entries(text)[0], text.max_position_embeddings
    kind = given.get("rope_type") or (_type_of(own) if own.get("factor") else "yarn")
    original = given.get("original_max_position_embeddings")
    factor = positions / _original_length(text, [own])
    if kind == _type_of(own):
        factor = own["factor"]
    elif original:
        factor = 1.0
    ropes: list[tuple[dict[str, Any] | None, float, int]] = [(None, factor, positions)]

    def add(factor: float) -> None:
        rope, scaled = {**given, "rope_type": kind, "factor": factor}, deepcopy(config)
        apply_rope(scaled, rope)
        ropes.append((rope, factor, scaled.get_text_config().max_position_embeddings))

    for other in sorted({*factors} - {factor}):
        add(other)
    while not factors and (len(ropes) == 1 or ropes[-1][2] < wanted):
        add(2 * ropes[-1][1])
    return ropes


def check_length(
    config: Any, max_seq_len: int, *, has_rope: bool, source: str | None = None
) -> None:
    """Raise ConfigError if sequences of `max_seq_len` have more positions than the model.

    `has_rope`: whether `model.rope` is set; `source`: the model's folder, whose
    tokenizer_config.json may name a length too.
    """
    positions = num_positions(config, max_seq_len)
    if positions is None or max_seq_len <= positions:
        return
    required = f"at most {positions:,}, or a RoPE that reaches further"
    change = f"lower data.max_seq_len to {positions}, with data.too_long for longer records"
    if positions_of(config) == "table":
        required = f"at most {positions:,}: each position has an entry in a table, and no RoPE"
    elif has_rope:
        factor = _scaled_entries(config.get_text_config())[0]["factor"]
        change = f"raise model.rope.factor to {math.ceil(factor * max_seq_len / positions)}"
    elif ropes := _reaching(config, positions, max_seq_len, source):
        change += f", or set model.rope: {'; or '.join(ropes)}"
    raise ConfigError(
        given=f"data.max_seq_len = {max_seq_len:,} for a model of {positions:,} positions"
        + (" after model.rope" if has_rope else ""),
        required=required,
        source="data.max_seq_len and max_position_embeddings in the model's config.json",
        change=change,
    )


def check_rope(config: Any, source: str) -> None:
    """Raise ConfigError for a RoPE whose angles would not be finite."""
    for entry in rope_entries(config.get_text_config()):
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


def _type_of(entry: Mapping[str, Any]) -> str:
    return str(entry.get("rope_type", "default"))


def _is_inferred(entry: Mapping[str, Any]) -> bool:
    """Whether the `attention_factor` of a RoPE of type yarn is what transformers infers from the
    factor: 0.1 ln(factor) + 1."""
    given, factor = entry.get("attention_factor"), entry.get("factor")
    is_yarn = _type_of(entry) == "yarn" and bool(given and factor)
    return is_yarn and math.isclose(given, 0.1 * math.log(factor) + 1, rel_tol=1e-4)  # type: ignore[arg-type]


_LENGTHS = ("model_max_length", "max_sequence_length", "seq_length")
"""Keys, besides `max_position_embeddings`, that name the length a model was trained for."""


def _original_length(text: Any, entries: list[dict[str, Any]]) -> int:
    """Return the number of positions that the model has without any scaling by RoPE.

    transformers keeps none for `linear`. There the longest length that the config names is the one
    after the scaling: Gemma 3's positions, Vicuna's `max_sequence_length`."""
    lengths = [entry.get("original_max_position_embeddings") for entry in entries]
    own = getattr(text, "original_max_position_embeddings", None)
    if known := next((int(n) for n in (own, *lengths) if n), None):
        return known
    positions = int(text.max_position_embeddings)
    if _type_of(entries[0]) != "linear":
        return positions
    scaled = max(positions, _named_length(vars(text)))
    return max(1, int(scaled / (entries[0].get("factor") or 1)))


def _named_length(values: Mapping[str, Any]) -> int:
    """Return the longest length that a config names besides its positions; 0 if there is none."""
    # a model_max_length of a billion or more means that the tokenizer has no limit
    named = (values.get(key) for key in _LENGTHS)
    return max((n for n in named if isinstance(n, int) and n < 10**9), default=0)


def _reaching(config: Any, positions: int, wanted: int, source: str | None) -> list[str]:
    """Return values for `model.rope` that make a model of `positions` positions reach `wanted`
    tokens, as texts in YAML, the likeliest first. A text may end with the condition under which its
    value fits. Values that transformers refuses are left out."""
    text, file = config.get_text_config(), Path(source or "", "tokenizer_config.json")
    entries, more = _scaled_entries(text), float(math.ceil(wanted / positions))
    own, rope_type, original = entries[0], _type_of(entries[0]), _original_length(text, entries)
    factor = own.get("factor") or positions / original
    raised = {"rope_type": rope_type, "factor": float(math.ceil(factor * wanted / positions))}
    named = read_object(file, source=str(file), change="mend it") if file.is_file() else {}
    by_config, by_tokenizer = (wanted <= _named_length(values) for values in (vars(text), named))
    ropes: list[tuple[dict[str, Any], str]] = [(raised, "")]
    if alpha := own.get("alpha"):  # Hunyuan's larger base, which it calls dynamic
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        theta = own["rope_theta"] * alpha ** (dim / (dim - 2))
        ropes = [({"rope_type": "default", "rope_theta": theta}, "")]
    elif rope_type in ("default", "dynamic"):
        ropes = [({"rope_type": "yarn", "factor": more}, "")]
        if rope_type == "default" and (by_config or by_tokenizer):
            why = "" if by_config else f" if it was trained so far, as {file.name} says"
            ropes = [*([] if by_config else ropes), ({"rope_type": rope_type}, why)]
    elif rope_type == "linear":  # its positions may be those before or those after the scaling
        less = raised | {"factor": max(factor, more)}
        if not by_config:
            less["original_max_position_embeddings"] = positions
        why = f" if its {positions:,} positions are those before that scaling"
        ropes = [(less, "")] if by_config or by_tokenizer else [(raised, ""), (less, why)]
    elif wanted <= factor * original:
        ropes = [(raised | {"factor": factor}, "")]
    found = []
    for rope, why in ropes:
        with suppress(ConfigError):
            apply_rope(deepcopy(config), rope, max_seq_len=wanted)
            found.append(in_yaml(rope) + why)
    return found


def _complaints(text: Any) -> list[str]:
    """Return transformers' errors and warnings about a config's RoPE parameters."""
    told: list[str] = []
    logger = logging.getLogger("transformers.modeling_rope_utils")
    with patch.object(logger, "warning", told.append):
        try:
            text.standardize_rope_params()
            text.validate_rope()
        except (KeyError, TypeError, ValueError) as error:
            told.insert(0, str(error.args[0] if error.args else error))
    # positions are rounded to an integer, so that their ratio is not exactly the factor
    return [message for message in told if "implicit factor" not in message]
