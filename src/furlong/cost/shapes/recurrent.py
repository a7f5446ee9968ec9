"""The recurrent mixers of transformers: parameters, state, and the work of their scans.

Scans are counted as transformers computes them: in inner chunks of C tokens, whose matrices are of
C by C; D hidden size, h heads, d head dim, n state size, g groups, k columns of the convolution.
`saved` and `saved_float32` are fitted to what autograd keeps of the scans in plain torch, to about
a fifth, as the tests measure it; with fused kernels it is far less.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from furlong.cost.shapes.kinds import LayerKind
from furlong.cost.shapes.mixers import MixerShape, shared_block, side_by_side
from furlong.errors import ConfigError
from furlong.families import (
    CONV_BIASES,
    CONV_WIDTHS,
    INNER_CHUNKS,
    PROJECTION_BIASES,
    STATE_EXPANSIONS,
    STATE_GROUPS,
    STATE_HEAD_DIMS,
    STATE_HEADS,
    STATE_RANKS,
    STATE_SIZES,
    Family,
)

_DELTA_CHUNK = 64
"""Inner chunk of the delta rules, a constant in transformers."""
_ELEMENTWISE = 9
"""FLOPs of Mamba's scan per channel and state: Gu and Dao 2023."""


def layer_mixers(
    config: Mapping[str, Any], family: Family, kinds: tuple[LayerKind, ...], attention: MixerShape
) -> tuple[MixerShape, ...]:
    """The mixer of each layer; `attention`: that of layers which have nothing else."""
    if not kinds:
        return (attention,) * int(config["num_hidden_layers"])
    own = recurrent_mixer(config, family) if {"recurrent", "hybrid"} & set(kinds) else MixerShape()
    blocks = int(config.get("num_mem_blocks") or 1)
    found = []
    for layer, kind in enumerate(kinds):
        match kind:
            case "full" | "sliding" | "chunked":
                found.append(attention)
            case "recurrent":
                found.append(own)
            case "hybrid" if family.parts == "shared":
                is_first = kinds[:layer].count("hybrid") < blocks
                found.append(shared_block(config, family, own, is_first=is_first))
            case "hybrid":
                found.append(side_by_side(attention, own))
            case _:
                found.append(MixerShape())
    return tuple(found)


def recurrent_mixer(config: Mapping[str, Any], family: Family) -> MixerShape:
    """The mixer of a family's recurrent layers. Raises ConfigError for a size that is missing."""
    match family.recurrent:
        case "gated delta":
            return _gated_delta(config)
        case "key delta" | "low-rank key delta":
            return _key_delta(config, low_rank=family.recurrent == "low-rank key delta")
        case "mamba":
            return _mamba(config)
        case "mamba2":
            return _mamba2(config, family)
        case "conv":
            return _short_conv(config)
        case "lightning":
            return _lightning(config)
        case "rg-lru":
            return _rg_lru(config)
        case "none":
            return MixerShape()


def _gated_delta(config: Mapping[str, Any]) -> MixerShape:
    hidden, columns = int(config["hidden_size"]), _size(config, *CONV_WIDTHS)
    key_dim, value_dim = (_size(config, f"linear_{name}_head_dim") for name in ("key", "value"))
    heads = _size(config, "linear_num_value_heads")
    keys, values = _size(config, "linear_num_key_heads") * key_dim, heads * value_dim
    inputs = hidden * (2 * keys + 2 * values + 2 * heads)
    channels = 2 * keys + values
    return MixerShape(
        matrices=inputs + values * hidden,
        before_kv=inputs,
        vectors=channels * columns + 2 * heads + value_dim,
        state_float32=heads * key_dim * value_dim,
        state_columns=channels * columns,
        scan_flops=_delta_flops(heads, key_dim, value_dim) + 2 * channels * columns,
        saved=7.5 * channels + heads * key_dim,
        saved_float32=values + heads * (8 * _DELTA_CHUNK + 5 * key_dim * value_dim / _DELTA_CHUNK),
    )


def _key_delta(config: Mapping[str, Any], *, low_rank: bool) -> MixerShape:
    hidden = int(config["hidden_size"])
    own = config.get("linear_attn_config") or {}
    dim = int(own.get("head_dim") or config.get("linear_head_dim") or config.get("head_dim") or 0)
    heads = int(own.get("num_heads") or config.get("linear_num_heads") or 0)
    heads = heads or int(config["num_attention_heads"])
    columns = int(own.get("short_conv_kernel_size") or _size(config, *CONV_WIDTHS))
    width = heads * dim
    gate = dim * (hidden + width) if low_rank else hidden * width
    return MixerShape(
        matrices=4 * hidden * width + 2 * gate + hidden * heads,
        before_kv=3 * hidden * width + gate + hidden * heads,
        vectors=3 * width * columns + width + heads + dim,
        state_float32=heads * dim * dim,
        state_columns=3 * width * columns,
        scan_flops=_delta_flops(heads, dim, dim) + 6 * width * columns,
        saved=7 * width,
        # a decay for each key of each pair of tokens in an inner chunk
        saved_float32=width * (3 * _DELTA_CHUNK + 22)
        + heads * (23 * _DELTA_CHUNK + dim * dim / _DELTA_CHUNK),
    )


def _delta_flops(heads: int, key_dim: int, value_dim: int) -> int:
    inner = 2 * _DELTA_CHUNK * (3 * key_dim + 2 * value_dim)
    return heads * (inner + 6 * key_dim * value_dim)


def _mamba2(config: Mapping[str, Any], family: Family) -> MixerShape:
    hidden, columns = int(config["hidden_size"]), _size(config, *CONV_WIDTHS)
    heads, groups, state = (
        _size(config, *names) for names in (STATE_HEADS, STATE_GROUPS, STATE_SIZES)
    )
    inner = _inner_width(config, heads)
    channels = inner + 2 * groups * state
    inputs = hidden * (inner + channels + heads)
    in_bias = _flag(config, PROJECTION_BIASES)
    out_bias = _flag(config, ("projectors_bias", *PROJECTION_BIASES))
    has_norm = config.get("mamba_rms_norm", family.parts != "parallel")
    vectors = channels * columns + (channels if _flag(config, CONV_BIASES, default=True) else 0)
    vectors += 3 * heads + (inner if has_norm else 0)
    vectors += (inner + channels + heads if in_bias else 0) + (hidden if out_bias else 0)
    chunk = _size(config, *INNER_CHUNKS)
    scan = 2 * chunk * (groups * state + inner) + 4 * inner * state
    return MixerShape(
        matrices=inputs + inner * hidden,
        before_kv=inputs,
        vectors=vectors,
        state_float32=inner * state,
        state_columns=channels * columns,
        scan_flops=scan + 2 * channels * columns,
        saved=2 * channels + 0.6 * heads * state,
        saved_float32=10.5 * inner + 3.4 * heads * (state + chunk) + 4 * inner * state / chunk,
    )


def _inner_width(config: Mapping[str, Any], heads: int) -> int:
    """Channels of a state space with heads."""
    dim = next((config[name] for name in STATE_HEAD_DIMS if config.get(name)), None)
    if dim is None and config.get("model_type") == "mamba2":
        dim = config.get("head_dim")
    if isinstance(dim, int):
        return heads * dim
    if config.get("mamba_d_ssm"):
        return int(config["mamba_d_ssm"])
    return int(config["hidden_size"] * _size(config, *STATE_EXPANSIONS))


def _mamba(config: Mapping[str, Any]) -> MixerShape:
    hidden, state = int(config["hidden_size"]), _size(config, *STATE_SIZES)
    columns = _size(config, *CONV_WIDTHS)
    inner = hidden * _size(config, *STATE_EXPANSIONS)
    rank = next((config[name] for name in STATE_RANKS if config.get(name)), "auto")
    rank = ceil(hidden / 16) if rank == "auto" else int(rank)
    out_bias = _flag(config, PROJECTION_BIASES)
    inputs = 2 * hidden * inner + inner * (rank + 2 * state) + rank * inner
    vectors = inner * columns + (inner if _flag(config, CONV_BIASES, default=True) else 0)
    vectors += inner + inner * state + inner  # the step's bias, A, D
    vectors += rank + 2 * state if config.get("model_type") == "jamba" else 0
    vectors += 2 * inner + hidden if out_bias else 0
    return MixerShape(
        matrices=inputs + inner * hidden,
        before_kv=inputs,
        vectors=vectors,
        state_float32=inner * state,
        state_columns=inner * columns,
        scan_flops=_ELEMENTWISE * inner * state + 2 * inner * columns,
        saved=6 * inner,
        saved_float32=3.5 * inner * state + 3 * inner + rank + 2 * state,
    )


def _short_conv(config: Mapping[str, Any]) -> MixerShape:
    hidden, columns = int(config["hidden_size"]), _size(config, *CONV_WIDTHS)
    return MixerShape(
        matrices=4 * hidden * hidden,
        before_kv=3 * hidden * hidden,
        vectors=hidden * columns + (5 * hidden if config.get("conv_bias") else 0),
        state_columns=hidden * columns,
        scan_flops=2 * hidden * columns,
        saved=6 * hidden,
    )


def _lightning(config: Mapping[str, Any]) -> MixerShape:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    dim = int(config.get("head_dim") or hidden // heads)
    width, block = heads * dim, _size(config, *INNER_CHUNKS)
    return MixerShape(
        matrices=5 * hidden * width,
        before_kv=3 * hidden * width,
        vectors=width,
        state_float32=heads * dim * dim,
        scan_flops=4 * heads * (block * dim + dim * dim),
        saved=12 * width + heads * (block + dim * dim / block),
        saved_float32=width,
    )


def _rg_lru(config: Mapping[str, Any]) -> MixerShape:
    hidden, columns = int(config["hidden_size"]), _size(config, *CONV_WIDTHS)
    width = int(config.get("lru_width") or hidden)
    gates = 2 * width * width // int(config["num_attention_heads"])  # a block per head
    return MixerShape(
        matrices=3 * hidden * width + gates,
        before_kv=2 * hidden * width + gates,
        vectors=2 * width + hidden + width * columns + 4 * width,
        state_float32=width,
        state_columns=width * columns,
        scan_flops=_ELEMENTWISE * width + 2 * width * columns,
        saved=14 * width,
        saved_float32=2 * width,
    )


def _flag(config: Mapping[str, Any], names: tuple[str, ...], *, default: bool = False) -> bool:
    """The first of these keys that is there."""
    return bool(next((config[name] for name in names if name in config), default))


def _size(config: Mapping[str, Any], *names: str) -> int:
    """The first of these keys that has a number. Raises ConfigError if none has."""
    value = next((config[name] for name in names if config.get(name)), None)
    if isinstance(value, (int, float)) and 0 < value < 2**24:
        return int(value)
    raise ConfigError(
        given=f"{names[0]} = {value!r}" if value is not None else f"no {names[0]}",
        required=f"{' or '.join(names)} in the config of {config.get('model_type')}",
        source="the model's config",
        change="give the config.json that transformers saves with the model",
    )
