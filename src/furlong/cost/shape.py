"""ModelShape: a decoder as plain numbers, read from its config.json without transformers.

N query heads, K key-value heads, H head dim, D hidden size, F MLP width, V vocabulary

The values of a config.json, checked before a shape is made of them.

The kind of every layer of a decoder, read from its config as transformers reads it.

The layers of a model one by one, from its config and its family's row: MLPs and windows.

How the tokens of a layer meet: the sizes of its attention, of its recurrence, or of neither.

D hidden size, N query heads, K key-value heads, H head dim

The recurrent mixers of transformers: parameters, state, and the work of their scans.

Scans are counted as transformers computes them: in inner chunks of C tokens, whose matrices are of
C by C; D hidden size, h heads, d head dim, n state size, g groups, k columns of the convolution.
`saved` and `saved_float32` are fitted to what autograd keeps of the scans in plain torch, to about
a fifth, as the tests measure it; with fused kernels it is far less.

Gemma 4's layers: head dims of their own, shared keys and values, embeddings of every layer.

Configurations of known models by name, as in their config.json.

Published models are given by the keys of their own config.json on the hub. The GPT models of
InfiniPipe and FPDT are described by their sizes only: a two-matrix MLP of width 4 D and full heads
is what GPT-3 has; biases, vocabulary and the tied head are assumptions. 2.7B, 6.7B and 13B are of
Brown et al. 2020, Table 2.1 (13B with 5,120 for 5,140, divisible by 40 heads); InfiniPipe names 7B,
taken as 6.7B, and 30B, of which it checkpoints 55 layers: 60 layers of 6,656, as LLaMA has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any, Literal

from furlong.cost.inputs import look_up, read_object
from furlong.errors import ConfigError
from furlong.families import (
    ACTIVE_EXPERTS,
    CONV_BIASES,
    CONV_WIDTHS,
    FAMILIES,
    INNER_CHUNKS,
    LAYER_KINDS,
    NUM_ACTIVE_EXPERTS,
    NUM_EXPERTS,
    PROJECTION_BIASES,
    SHARED_EXPERTS,
    SHARED_WIDTHS,
    STATE_EXPANSIONS,
    STATE_GROUPS,
    STATE_HEAD_DIMS,
    STATE_HEADS,
    STATE_RANKS,
    STATE_SIZES,
    Family,
    family_of,
    is_set,
)
from furlong.plan.rows import inner_size
from furlong.units import count_words


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes. Counts of parameters are transformers' own; see `exact`."""

    family: str
    """The `model_type` of the config."""
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_head: bool
    windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens, the token itself included; None: sees all; 1: a layer
    without attention."""
    mlps: tuple[Mlp, ...]
    """The MLP of each layer."""
    mixers: tuple[MixerShape, ...]
    """The attention or recurrence of each layer."""
    norm_parameters: int = 0
    """Parameters of one layer's norms."""
    final_norm_parameters: int = 0
    head_bias_parameters: int = 0
    entrance_parameters: int = 0
    """Parameters beside the embedding at the decoder's entrance."""
    exact: bool = True
    """Whether the family is in the table; others are read as if they were Llamas."""
    num_positions: int | None = None
    """Positions that the model knows; None where its config names no number."""
    original_positions: int | None = None
    """Positions before its RoPE was scaled; None where the config names no number."""

    def __hash__(self) -> int:
        """Quick, for a shape is part of many keys: of few sizes, and none of the layers' values."""
        return hash((self.num_layers, self.hidden_size, self.num_kv_heads, self.vocab_size))

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @cached_property
    def q_size(self) -> int:
        """N * H: the width of one token's queries, and of what attention gives."""
        return max((m.query_size + m.output_size) // 2 for m in self.mixers)

    @cached_property
    def kv_size(self) -> int:
        """K * H: the width of one token's keys, and of its values."""
        return max(mixer.kv_width for mixer in self.mixers) // 2

    @cached_property
    def stored_size(self) -> int:
        """Numbers of one token that a layer with attention keeps for later chunks."""
        return max(mixer.stored for mixer in self.mixers)

    def inner_size(self, place_size: int) -> int:
        """Processes of a place that divide the heads among them (`plan.rows.inner_size`)."""
        return inner_size(place_size, self.num_heads, self.num_kv_heads)

    def kv_share(self, place_size: int) -> float:
        """Share of a layer's K,V heads, at least one head, that each process of a place gets and
        keeps of all tokens: the same for as many processes as an inner group has."""
        return max(1 / self.inner_size(place_size), 1 / self.num_kv_heads)

    @cached_property
    def is_recurrent(self) -> bool:
        """Whether a state goes from chunk to chunk in any layer."""
        return any(mixer.is_recurrent for mixer in self.mixers)

    @property
    def whole(self) -> str:
        """Why the decoder is not divided between layers, as the end of "which ..."; "" if it is."""
        return family_of(self.family).whole

    @cached_property
    def has_latents(self) -> bool:
        """Whether the store holds narrower vectors than the keys and values made of them."""
        return any(0 < mixer.stored < mixer.kv_width for mixer in self.mixers)

    def layer_parameters(self, layer: int) -> int:
        """All parameters of a layer."""
        return self._parameters[layer]

    @cached_property
    def _parameters(self) -> tuple[int, ...]:
        return tuple(
            mixer.parameters + mlp.parameters(self.hidden_size) + self.norm_parameters
            for mixer, mlp in zip(self.mixers, self.mlps, strict=True)
        )

    def layer_active_parameters(self, layer: int) -> int:
        """Parameters of a layer's matrices that one token is multiplied with."""
        own = self.mlps[layer].active_parameters(self.hidden_size)
        return self.mixers[layer].matrices + own

    def layer_flops(self, layer: int) -> int:
        """FLOPs of a layer's forward per token, attention apart."""
        return 2 * self.layer_active_parameters(layer) + self.mixers[layer].scan_flops

    def state_bytes(self, layers: Iterable[int], element_bytes: int) -> int:
        """Bytes of the states that leave one chunk of a sequence in these layers."""
        return sum(self.mixers[layer].state_bytes(element_bytes) for layer in layers)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Parameters of the head beside the embedding's: only a bias where it is tied."""
        return (0 if self.tied_head else self.embedding_parameters) + self.head_bias_parameters

    @property
    def num_parameters(self) -> int:
        layers = sum(self.layer_parameters(layer) for layer in range(self.num_layers))
        ends = self.embedding_parameters + self.entrance_parameters
        return ends + layers + self.final_norm_parameters + self.head_parameters

    @property
    def num_active_parameters(self) -> int:
        """`num_parameters` without the experts that a token does not visit."""
        idle = sum(m.parameters(self.hidden_size, idle_only=True) for m in self.mlps)
        return self.num_parameters - idle

    def stage_parameters(self, stages: tuple[int, ...], stage: int) -> int:
        """Parameters that a rank needs for one stage: its layers, and at the ends the embedding,
        the final norm and the head. A tied head of its own stage is a copy of the embedding."""
        first = sum(stages[:stage])
        count = sum(self.layer_parameters(first + i) for i in range(stages[stage]))
        if stage == 0:
            count += self.embedding_parameters + self.entrance_parameters
        if stage == len(stages) - 1:
            tied_here = self.tied_head and stage == 0
            head = self.head_bias_parameters + (0 if tied_here else self.embedding_parameters)
            count += self.final_norm_parameters + head
        return count

    @classmethod
    def from_config(cls, config: dict[str, Any], source: str = "the model's config") -> ModelShape:
        """The shape that a config.json describes. Raises ConfigError for values that are missing
        or no sizes of a decoder."""
        inside = config.get("text_config")
        config = {**config, **inside} if isinstance(inside, dict) else config
        family = family_of(str(config.get("model_type", "")))
        if family.not_in_chunks:
            raise _not_in_chunks(config, family.not_in_chunks, source)
        config, kinds = completed(config, family)
        check_values(config, source)
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or family.default_head_dim or hidden // heads)
        if family.attention == "none":
            head_dim = 0
        norm = hidden * (2 if family.norm == "layer" else 1)
        vocab, name = int(config["vocab_size"]), str(config.get("model_type", ""))
        attention = (
            latent_mixer(config, family, hidden=hidden, heads=heads)
            if family.attention == "latent"
            else attention_mixer(
                config, family, hidden=hidden, heads=heads, kv_heads=kv_heads, dim=head_dim
            )
        )
        windows = layer_windows(config, family, kinds)
        mlps = layer_mlps(config, family, kinds)
        mixers, entrance = layer_mixers(config, family, kinds, attention), 0
        if family.varied:
            layers = gemma4_layers(config, family, windows=windows, mlp=mlps[0])
            mixers, mlps, entrance = layers.mixers, layers.mlps, layers.entrance_parameters
        return cls(
            family=name,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab,
            tied_head=bool(config.get("tie_word_embeddings", family.tied)),
            windows=windows,
            mlps=mlps,
            mixers=mixers,
            norm_parameters=family.num_norms * norm,
            final_norm_parameters=norm,
            head_bias_parameters=vocab if family.head_bias else 0,
            entrance_parameters=entrance,
            exact=name in FAMILIES and not family.refused,
            num_positions=config.get("max_position_embeddings") or None,
            original_positions=rope_original(config),
        )

    @classmethod
    def from_file(cls, file: str | Path) -> ModelShape:
        """The shape of a config.json, or of the folder that holds one. Raises ConfigError."""
        path = Path(file)
        path = path / "config.json" if path.is_dir() else path
        change = "give a model's config.json, or a folder that holds it"
        config = read_object(path, source="the model's name", change=change)
        return cls.from_config(config, str(path))


def _not_in_chunks(config: dict[str, Any], reason: str, source: str) -> ConfigError:
    return ConfigError(
        given=f"a model of type {config.get('model_type')}, which {reason}",
        required="a decoder whose tokens meet by their positions alone, or by a state that goes"
        " from one to the next",
        source=source,
        change="train a model of another family",
    )


MAX_LAYERS = 512
MAX_SIZE = 2**24
"""Heads, widths, experts and entries of a vocabulary: more than any model has."""
MAX_POSITIONS = 2**40

NEEDED_SIZES = (
    "hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size",
)  # fmt: skip
_OPTIONAL = (
    "num_key_value_heads", "head_dim", "sliding_window", "max_window_layers", *NUM_EXPERTS,
    NUM_ACTIVE_EXPERTS, "moe_intermediate_size", "decoder_sparse_step",
    "shared_expert_intermediate_size", "max_position_embeddings",
)  # fmt: skip


def check_values(config: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError for sizes that are missing, no whole numbers or beyond any model's."""
    for key in NEEDED_SIZES:
        _check_size(config, key, source, lowest=1)
    for key in _OPTIONAL:
        if config.get(key) is not None:
            _check_size(config, key, source, lowest=0)
    heads, num_layers = config["num_attention_heads"], config["num_hidden_layers"]
    if not config.get("head_dim") and heads > config["hidden_size"]:
        raise _wrong(
            count_words(heads, "head"), f"at most hidden_size = {config['hidden_size']}", source
        )
    if heads % (config.get("num_key_value_heads") or heads):
        key_value_heads = config["num_key_value_heads"]
        given = f"{count_words(heads, 'head')} on num_key_value_heads = {key_value_heads}"
        raise _wrong(given, "a divisor of the heads", source)
    num_experts = next((config[key] for key in NUM_EXPERTS if config.get(key)), 0)
    active = config.get(NUM_ACTIVE_EXPERTS)
    if num_experts and active and active > num_experts:
        given = f"{NUM_ACTIVE_EXPERTS} = {active} of {num_experts}"
        raise _wrong(given, "no more than there are experts", source)
    types, dense = config.get("layer_types"), config.get("mlp_only_layers")
    if types and not (isinstance(types, list) and len(types) == num_layers):
        raise _wrong("layer_types", f"a list of {num_layers} names, one per layer", source)
    if dense and not (isinstance(dense, list) and all(type(layer) is int for layer in dense)):
        raise _wrong("mlp_only_layers", "a list of layers", source)


def rope_original(config: Mapping[str, Any]) -> int | None:
    """Positions before any scaling, None where the config names no number."""
    for holder in (config.get("rope_parameters"), config.get("rope_scaling"), config):
        value = holder.get("original_max_position_embeddings") if isinstance(holder, dict) else None
        if type(value) is int and 0 < value <= MAX_POSITIONS:
            return value
    return None


def _check_size(config: Mapping[str, Any], key: str, source: str, *, lowest: int) -> None:
    value = config.get(key)
    most = {"num_hidden_layers": MAX_LAYERS, "max_position_embeddings": MAX_POSITIONS}
    if type(value) is int and lowest <= value <= most.get(key, MAX_SIZE):
        return
    raise ConfigError(
        given=f"{key} = {value!r}"[:100] if key in config else f"no {key}",
        required=f"{', '.join(NEEDED_SIZES)} as whole numbers; {key}: from {lowest}"
        f" to {most.get(key, MAX_SIZE):,}",
        source=source,
        change="give the config.json of a decoder of the Llama kind",
    )


def _wrong(given: str, required: str, source: str) -> ConfigError:
    return ConfigError(
        given=given,
        required=required,
        source=source,
        change="mend config.json, or use the model's own",
    )


LayerKind = Literal["full", "sliding", "chunked", "recurrent", "hybrid", "mlp", "experts"]
"""hybrid: attention and recurrence in one layer; mlp, experts: a layer without either."""

_NAMES: dict[str, LayerKind] = {
    "full_attention": "full", "attention": "full", "sliding_attention": "sliding",
    "chunked_attention": "chunked", "linear_attention": "recurrent", "mamba": "recurrent",
    "recurrent": "recurrent", "conv": "recurrent", "hybrid": "hybrid", "mlp": "mlp",
    "moe": "experts",
}  # fmt: skip
_LETTERS: dict[str, LayerKind] = {"M": "recurrent", "*": "full", "-": "mlp", "E": "experts"}


def is_plain(family: Family) -> bool:
    """Whether all layers of a family have attention with heads of their own, and an MLP."""
    return family.recurrent == "none" and family.attention == "heads"


def completed(
    config: Mapping[str, Any], family: Family
) -> tuple[dict[str, Any], tuple[LayerKind, ...]]:
    """A config with the sizes that every decoder has, though a family names none or names them
    otherwise; and the kinds of its layers, none where all are alike or differ in windows only."""
    values = dict(config)
    if "tie_embedding" in values:
        values.setdefault("tie_word_embeddings", values["tie_embedding"])
    if is_plain(family) and not values.get("attention_chunk_size"):
        return values, ()
    kinds = _listed(values, family)
    if kinds:
        values["num_hidden_layers"] = values.get("num_hidden_layers") or len(kinds)
    if family.attention == "none":
        values["num_attention_heads"] = values["num_key_value_heads"] = 1
    width = values.get("block_ff_dim") or values.get("moe_intermediate_size")
    values["intermediate_size"] = (
        values.get("intermediate_size") or width or values.get("hidden_size")
    )
    if not isinstance(values.get("num_hidden_layers"), int):
        return values, kinds  # refused with the other sizes
    return values, layer_kinds(values, family)


def layer_kinds(config: Mapping[str, Any], family: Family) -> tuple[LayerKind, ...]:
    """The kind of each layer. Raises ConfigError where the config does not tell them."""
    found = _listed(config, family) or _numbered(config, family)
    if not found:
        raise ConfigError(
            given="no layer_types",
            required=f"the kind of each layer of a {config.get('model_type')}",
            source="the model's config",
            change="give the config.json that transformers saves with the model",
        )
    return found


def _listed(config: Mapping[str, Any], family: Family) -> tuple[LayerKind, ...]:
    """Kinds that the config lists layer by layer; none if it does not."""
    for key in LAYER_KINDS:
        if names := config.get(key):
            return tuple(_known(str(name), family) for name in names)
    if letters := config.get("hybrid_override_pattern"):
        return tuple(_LETTERS[letter] for letter in str(letters) if letter in _LETTERS)
    return ()


def _known(name: str, family: Family) -> LayerKind:
    if name in _NAMES:
        return _NAMES[name]
    reason = family.not_in_chunks or "has layers of a kind that is not known here"
    raise ConfigError(
        given=f"layers of type {name}, in a model which {reason}",
        required=f"layers of type {', '.join(_NAMES)}",
        source="the model's config",
        change="train a model of another family",
    )


def _numbered(config: Mapping[str, Any], family: Family) -> tuple[LayerKind, ...]:
    """Kinds that follow from a layer's number."""
    layers = range(int(config["num_hidden_layers"]))
    if family.parts == "parallel":
        return _alike("hybrid", layers)
    if family.attention == "none":
        return _alike("recurrent", layers)
    if family.recurrent == "none":
        return _chunked(config, layers)
    cycle = config.get("block_types")  # the attention among them has the window
    if cycle:
        names = [str(cycle[layer % len(cycle)]) for layer in layers]
        cycled: list[LayerKind] = [
            "sliding" if name == "attention" else _NAMES[name] for name in names
        ]
        return tuple(cycled)
    if (full := _full_layers(config, layers)) is None:
        return ()
    kinds: list[LayerKind] = ["full" if layer in full else "recurrent" for layer in layers]
    return tuple(kinds)


def _alike(kind: LayerKind, layers: range) -> tuple[LayerKind, ...]:
    return tuple(kind for _ in layers)


def _chunked(config: Mapping[str, Any], layers: range) -> tuple[LayerKind, ...]:
    """Kinds where no layer is recurrent: those with RoPE are chunked, if the config has blocks."""
    if not config.get("attention_chunk_size"):
        return _alike("full", layers)
    every = int(config.get("no_rope_layer_interval") or 4)
    with_rope = config.get("no_rope_layers") or [(layer + 1) % every != 0 for layer in layers]
    kinds: list[LayerKind] = ["chunked" if with_rope[layer] else "full" for layer in layers]
    return tuple(kinds)


def _full_layers(config: Mapping[str, Any], layers: range) -> set[int] | None:
    """Numbers of the layers with full attention, None where no key tells them."""
    for key in ("attn_layer_indices", "full_attn_idxs"):
        if config.get(key) is not None:
            return set(config[key])
    own = config.get("linear_attn_config")
    if isinstance(own, dict) and own.get("full_attn_layers"):
        return {layer - 1 for layer in own["full_attn_layers"]}
    if period := config.get("attn_layer_period"):
        offset = config.get("attn_layer_offset") or 0
        return {layer for layer in layers if layer % period == offset}
    for key in ("full_attention_interval", "layer_group_size"):
        if every := config.get(key):
            return {layer for layer in layers if (layer + 1) % every == 0}
    return set() if "attn_layer_indices" in config else None


NO_ATTENTION = 1
"""The window of a layer without attention: a token sees itself alone."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """One layer's MLP, or its experts."""

    width: int
    """Columns of one expert, or of the dense MLP."""
    num_matrices: int = 3
    """Number of matrices: 3 with a gate (SwiGLU and its kin), 2 without."""
    num_experts: int = 1
    num_active: int = 1
    """Experts that one token visits."""
    shared_width: int = 0
    """Width of an expert that every token visits too."""
    bias: bool = False
    router: bool = False
    router_bias: bool = False
    shared_gate: bool = True
    """Whether a gate scales what the shared expert gives."""

    @property
    def active_width(self) -> int:
        """Width of what one token passes through."""
        return self.width * self.num_active + self.shared_width

    def active_parameters(self, hidden: int) -> int:
        """Parameters of the matrices that one token is multiplied with."""
        routing = hidden * self.num_experts if self.router else 0
        return self.num_matrices * hidden * self.active_width + routing + self._gate(hidden)

    @property
    def unvisited(self) -> float:
        """Share of the experts that a token does not visit."""
        return 1 - self.num_active / self.num_experts

    def parameters(self, hidden: int, *, idle_only: bool = False) -> int:
        """All parameters; with `idle_only` those of the experts that a token does not visit."""
        biases = (self.num_matrices - 1) * self.width + hidden if self.bias and self.width else 0
        expert = self.num_matrices * hidden * self.width + biases
        if idle_only:
            return expert * (self.num_experts - self.num_active)
        routing = hidden * self.num_experts if self.router else 0
        routing += self.num_experts if self.router_bias else 0
        shared = self.num_matrices * hidden * self.shared_width
        return expert * self.num_experts + routing + shared + self._gate(hidden)

    def _gate(self, hidden: int) -> int:
        """Parameters of the shared expert's gate."""
        return hidden if self.shared_width and self.shared_gate else 0


def layer_windows(
    config: Mapping[str, Any], family: Family, kinds: tuple[LayerKind, ...] = ()
) -> tuple[int | None, ...]:
    """The window of each layer in tokens; `kinds`: those of a family whose layers differ."""
    num_layers = int(config["num_hidden_layers"])
    window = config.get("sliding_window", family.default_window)
    types = config.get("layer_types")
    if kinds:
        window = window or config.get("attention_window_size")
        return tuple(_window_of(kind, config, window) for kind in kinds)
    if types:
        slides = ["sliding" in str(kind) for kind in types]
    elif isinstance(family.windows, int):
        slides = [(layer + 1) % family.windows != 0 for layer in range(num_layers)]
    elif family.windows == "late":
        first = int(config.get("max_window_layers") or 0)
        late = bool(config.get("use_sliding_window"))
        slides = [late and layer >= first for layer in range(num_layers)]
    else:
        slides = [family.windows == "all"] * num_layers
    return tuple(int(window) if window and has_window else None for has_window in slides)


def _window_of(kind: LayerKind, config: Mapping[str, Any], window: int | None) -> int | None:
    match kind:
        case "full" | "hybrid":
            return None
        case "sliding":
            return int(window) if window else None
        case "chunked":
            return int(config["attention_chunk_size"])
        case "recurrent" | "mlp" | "experts":
            return NO_ATTENTION


def layer_mlps(
    config: Mapping[str, Any], family: Family, kinds: tuple[LayerKind, ...] = ()
) -> tuple[Mlp, ...]:
    """The MLP of each layer; some layers of a mixture of experts may be dense, and some layers of
    hybrids have none."""
    num_layers = int(config["num_hidden_layers"])
    bias = is_set(config, family.mlp_bias)
    matrices = 3 if family.gated else 2
    dense = Mlp(_dense_width(config, family), matrices, bias=bias)
    if family.parts == "shared":  # the block's MLP counts with its attention
        return (Mlp(0),) * num_layers
    if family.parts == "one":
        mlps = {"mlp": dense}
        if "experts" in kinds:
            mlps["experts"] = _experts(config, family, matrices, bias)
        return tuple(mlps.get(kind, Mlp(0)) for kind in kinds)
    has_experts = family.experts and any(config.get(key) for key in NUM_EXPERTS)
    if not has_experts:
        if family.experts and is_plain(family):
            _count(config, *NUM_EXPERTS)  # refuses
        alone = config.get("shared_intermediate_size")  # Granite's, where it has no experts
        return (Mlp(int(alone), matrices, bias=bias) if alone else dense,) * num_layers
    sparse = _experts(config, family, matrices, bias)
    chosen = _has_experts(config, range(num_layers))
    return tuple(sparse if has else dense for has in chosen)


def _experts(config: Mapping[str, Any], family: Family, matrices: int, bias: bool) -> Mlp:
    width = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    return Mlp(
        width=width,
        num_matrices=matrices,
        num_experts=_count(config, *NUM_EXPERTS),
        num_active=_count(config, *ACTIVE_EXPERTS),
        shared_width=_shared_width(config, family, width),
        bias=bias,
        router=True,
        router_bias=family.sinks,  # gpt-oss alone has either
        shared_gate=family.shared_gate,
    )


def _shared_width(config: Mapping[str, Any], family: Family, width: int) -> int:
    """Width of the experts that every token visits."""
    for key in SHARED_WIDTHS:
        if config.get(key):
            return int(config[key])
    if family.shared_gate:
        return 0
    number = next((config[key] for key in SHARED_EXPERTS if key in config), family.shared_experts)
    return int(number or 0) * width


def _dense_width(config: Mapping[str, Any], family: Family) -> int:
    """Width of an MLP without experts."""
    width = int(config.get("intermediate_size_mlp") or config.get("intermediate_size") or 0)
    width //= family.mlp_divisor
    if config.get("block_auto_adjust_ff_dim"):  # LFM2, as Llama's own code does
        width = int((config.get("block_ffn_dim_multiplier") or 1) * int(2 * width / 3))
        step = int(config.get("block_multiple_of") or 1)
        width = -(-width // step) * step
    return width


def _has_experts(config: Mapping[str, Any], layers: range) -> list[bool]:
    """Whether each layer has experts, by whichever key the config tells it."""
    names, listed = config.get("mlp_layer_types"), config.get("moe_layers")
    if names:
        return [name == "sparse" for name in names]
    if listed is not None:
        return [layer in listed for layer in layers]
    dense = config.get("first_k_dense_replace", config.get("num_dense_layers"))
    if dense is not None:
        return [layer >= dense for layer in layers]
    if period := config.get("expert_layer_period"):
        offset = int(config.get("expert_layer_offset") or 0)
        several = _count(config, *NUM_EXPERTS) > 1
        return [several and layer % period == offset for layer in layers]
    dense_layers = set(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1
    return [layer not in dense_layers and (layer + 1) % int(step) == 0 for layer in layers]


def _count(config: Mapping[str, Any], *keys: str) -> int:
    """The value of the first key that is there and not 0. Raises ConfigError if none is."""
    for key in keys:
        if config.get(key):
            return int(config[key])
    raise ConfigError(
        given=f"no {keys[0]}",
        required=f"{' or '.join(keys)} in the config of {config.get('model_type')}",
        source="the model's config",
        change="give the model's own config.json",
    )


@dataclass(frozen=True, slots=True)
class MixerShape:
    """One layer without its MLP and without the norms that every layer has."""

    matrices: int = 0
    """Parameters of the matrices that one token is multiplied with."""
    before_kv: int = 0
    """Parameters among `matrices` that a token meets before its K,V, or its state, are there."""
    vectors: int = 0
    """Parameters of biases, norms, convolutions, decays and other things per channel."""
    shared: int = 0
    """Parameters among `matrices` and `vectors` that are counted with an earlier layer."""
    key_flops: int = 0
    """FLOPs of one (query, key) pair over all heads; 0 without attention."""
    query_size: int = 0
    """Width of one token's queries over all heads."""
    output_size: int = 0
    """Width of what attention gives."""
    kv_width: int = 0
    """Width of one token's keys and values together, as attention reads them."""
    stored: int = 0
    """Numbers of one token in the KV store: K and V, or the vector that they are made of."""
    state_float32: int = 0
    """Numbers of the recurrence's state that leaves a chunk, in float32."""
    state_columns: int = 0
    """Numbers of the convolution's state that leaves a chunk, in compute dtype."""
    scan_flops: int = 0
    """FLOPs of the recurrence and its convolution, per token."""
    saved: float = 0.0
    """Numbers that a graph saves per token beside attention's, in compute dtype."""
    saved_float32: float = 0.0
    """Numbers that a graph saves per token beside attention's, in float32."""

    @property
    def attends(self) -> bool:
        return self.key_flops > 0

    @property
    def is_recurrent(self) -> bool:
        return self.state_float32 + self.state_columns > 0

    @property
    def parameters(self) -> int:
        """All parameters that are counted with this layer."""
        return self.matrices + self.vectors - self.shared

    def state_bytes(self, element_bytes: int) -> int:
        """Bytes of the state at the end of a chunk."""
        return max(4, element_bytes) * self.state_float32 + element_bytes * self.state_columns


def attention_mixer(
    config: Mapping[str, Any], family: Family, *, hidden: int, heads: int, kv_heads: int, dim: int
) -> MixerShape:
    """Attention whose heads have keys and values of their own."""
    q, kv = heads * dim, kv_heads * dim
    queries = q * (2 if family.gate == "wide" else 1)
    matrices = hidden * (queries + q + 2 * kv)
    mixer = MixerShape(
        matrices=matrices,
        before_kv=hidden * (queries + 2 * kv),
        vectors=_attention_vectors(config, family, queries, q, kv, dim, heads, hidden),
        key_flops=4 * q,
        query_size=q,
        output_size=q,
        kv_width=2 * kv,
        stored=2 * kv,
        saved=3 * q if family.gate == "wide" else 0,
    )
    return _with_head_gate(config, family, mixer, hidden, heads)


def _attention_vectors(
    config: Mapping[str, Any], family: Family, queries: int, q: int, kv: int, dim: int, heads: int,
    hidden: int,
) -> int:  # fmt: skip
    """Parameters of one layer's attention outside its matrices."""
    count = queries + 2 * kv if is_set(config, family.qkv_bias) else 0
    count += hidden if is_set(config, family.out_bias) else 0
    if family.qk_norm == "head":
        count += 2 * dim
    asked = config.get("use_qk_norm") or config.get("qk_layernorm")
    if family.qk_norm == "width" or (family.qk_norm == "heads" and asked):
        count += q + kv
    return count + (heads if family.sinks else 0)


def latent_mixer(
    config: Mapping[str, Any], family: Family, *, hidden: int, heads: int
) -> MixerShape:
    """Attention whose keys and values are made of one narrow vector per token (DeepSeek's MLA)."""
    rank, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
    nope, value = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
    queries, q_rank = heads * (nope + rope), int(config.get("q_lora_rank") or 0)
    q_matrices = q_rank * (hidden + queries) if q_rank else hidden * queries
    narrow = hidden * (rank + rope)
    wide = rank * heads * (nope + value)
    bias = bool(config.get("attention_bias"))
    mixer = MixerShape(
        matrices=q_matrices + narrow + wide + heads * value * hidden,
        before_kv=q_matrices + narrow + wide,
        vectors=q_rank + rank + (q_rank + rank + rope + hidden if bias else 0),
        key_flops=2 * heads * (nope + rope + value),
        query_size=queries,
        output_size=heads * value,
        kv_width=heads * (nope + rope + value),
        stored=rank + rope,
        saved=2 * q_rank + 2 * rank + rope,
    )
    return _with_head_gate(config, family, mixer, hidden, heads)


def _with_head_gate(
    config: Mapping[str, Any], family: Family, mixer: MixerShape, hidden: int, heads: int
) -> MixerShape:
    """The mixer with a gate of one number per head that scales its output, if the family has it."""
    if family.gate != "heads" or config.get("use_attention_gate") is False:
        return mixer
    return replace(
        mixer, matrices=mixer.matrices + hidden * heads, saved=mixer.saved + mixer.output_size
    )


def side_by_side(first: MixerShape, second: MixerShape) -> MixerShape:
    """Attention and recurrence in one layer."""
    names = MixerShape.__dataclass_fields__
    return MixerShape(**{name: getattr(first, name) + getattr(second, name) for name in names})


def shared_block(
    config: Mapping[str, Any], family: Family, recurrent: MixerShape, *, is_first: bool
) -> MixerShape:
    """A recurrence behind a block of attention and MLP that other layers have too (Zamba): it
    reads the layer's input and the original embeddings, and a matrix leads back."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    dim = int(config.get("attention_head_dim") or 2 * hidden // heads)
    wide, q, width = 2 * hidden, heads * dim, int(config["intermediate_size"])
    attention = 3 * wide * q + q * hidden
    mlp, norms = 3 * hidden * width, wide + hidden
    rank, adapters = int(config.get("adapter_rank") or 0), 0
    if family.recurrent == "mamba2":  # only Zamba2 adapts its blocks to their layers
        adapters = rank * (hidden + 2 * width)
        adapters += 6 * rank * wide if config.get("use_shared_attention_adapter") else 0
    block = MixerShape(
        matrices=attention + mlp + adapters + hidden * hidden,
        before_kv=attention + mlp + adapters + hidden * hidden,  # the state comes behind it
        vectors=norms,
        shared=0 if is_first else attention + mlp + norms,
        key_flops=4 * q,
        query_size=q,
        output_size=q,
        kv_width=2 * q,
        stored=2 * q,
        saved=2 * wide + 4 * width + 2 * hidden,
    )
    return side_by_side(block, recurrent)


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


@dataclass(frozen=True, slots=True)
class Gemma4Layers:
    """The layers, and what the decoder has at its entrance for them."""

    mixers: tuple[MixerShape, ...]
    mlps: tuple[Mlp, ...]
    entrance_parameters: int


def gemma4_layers(
    config: Mapping[str, Any], family: Family, *, windows: tuple[int | None, ...], mlp: Mlp
) -> Gemma4Layers:
    """The layers of a config with these windows; `mlp`: its dense one."""
    num_layers, hidden = len(windows), int(config["hidden_size"])
    narrow = int(config.get("hidden_size_per_layer_input") or 0)
    num_own = num_layers - int(config.get("num_kv_shared_layers") or 0)
    mixers, mlps = [], []
    for layer, window in enumerate(windows):
        mixer = _mixer(config, family, layer, is_full=window is None, is_shared=layer >= num_own)
        own = replace(mlp, width=2 * mlp.width) if layer >= num_own and _is_double(config) else mlp
        if config.get("enable_moe_block"):
            own, norms = _with_experts(config, own, hidden)
            mixer = replace(mixer, vectors=mixer.vectors + norms)
        if narrow:  # what the layer takes of its own embedding
            mixer = replace(
                mixer, matrices=mixer.matrices + 2 * hidden * narrow,
                vectors=mixer.vectors + hidden, saved=mixer.saved + 4 * narrow + 2 * hidden,
            )  # fmt: skip
        mixers.append(mixer)
        mlps.append(own)
    vocab = int(config.get("vocab_size_per_layer_input") or config["vocab_size"])
    entrance = narrow * num_layers * (vocab + hidden) + narrow
    return Gemma4Layers(tuple(mixers), tuple(mlps), entrance)


def _mixer(
    config: Mapping[str, Any], family: Family, layer: int, *, is_full: bool, is_shared: bool
) -> MixerShape:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    sizes = _own_sizes(config, layer, is_full)
    dim = int(sizes.get("head_dim") or family.default_head_dim or hidden // heads)
    kv_heads = int(sizes.get("num_key_value_heads") or heads)
    mixer = attention_mixer(config, family, hidden=hidden, heads=heads, kv_heads=kv_heads, dim=dim)
    kv, has_bias = kv_heads * dim, bool(config.get("attention_bias"))
    if is_shared:  # no keys, no values, no norm of keys
        gone, vectors = 2 * hidden * kv, dim + (2 * kv if has_bias else 0)
    elif is_full and config.get("attention_k_eq_v"):
        gone, vectors = hidden * kv, kv if has_bias else 0
    else:
        return mixer
    return replace(
        mixer, matrices=mixer.matrices - gone, before_kv=mixer.before_kv - gone,
        vectors=mixer.vectors - vectors,
    )  # fmt: skip


def _own_sizes(config: Mapping[str, Any], layer: int, is_full: bool) -> dict[str, Any]:
    """Head dim and key-value heads of one layer."""
    sizes = {name: config.get(name) for name in ("head_dim", "num_key_value_heads")}
    listed = config.get("per_layer_config")
    if isinstance(listed, dict):
        return sizes | next((own for key, own in listed.items() if int(key) == layer), {})
    if is_full:
        sizes["head_dim"] = config.get("global_head_dim", 512)
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            sizes["num_key_value_heads"] = config["num_global_key_value_heads"]
    return sizes


def _is_double(config: Mapping[str, Any]) -> bool:
    return bool(config.get("use_double_wide_mlp"))


def _with_experts(config: Mapping[str, Any], dense: Mlp, hidden: int) -> tuple[Mlp, int]:
    """Experts beside the dense MLP, and the parameters of their norms and scales."""
    num_experts = int(config.get("num_experts") or 1)
    both = Mlp(
        width=int(config.get("moe_intermediate_size") or dense.width),
        num_matrices=dense.num_matrices,
        num_experts=num_experts,
        num_active=int(config.get("top_k_experts") or 1),
        shared_width=dense.width,
        router=True,
        shared_gate=False,
    )
    return both, 4 * hidden + num_experts


def _sized(
    family: str, hidden: int, layers: int, heads: int, kv_heads: int, width: int, vocab: int,
    *, tied: bool = False, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": family, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": width,
        "vocab_size": vocab, "tie_word_embeddings": tied, **more,
    }  # fmt: skip


def _qwen2_5(*sizes: int, tied: bool = False) -> dict[str, Any]:
    return _sized("qwen2", *sizes, tied=tied, use_sliding_window=False)


def _qwen3(*sizes: int, tied: bool = False) -> dict[str, Any]:
    return _sized("qwen3", *(*sizes, 151936), tied=tied, head_dim=128, use_sliding_window=False)


def _llama(*sizes: int, tied: bool = False) -> dict[str, Any]:
    return _sized("llama", *sizes, tied=tied)


def _gpt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "intermediate_size": 4 * hidden, "vocab_size": 50304,
        "tie_word_embeddings": True,
    }  # fmt: skip


MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": _qwen2_5(896, 24, 14, 2, 4864, 151936, tied=True),
    "Qwen2.5-1.5B": _qwen2_5(1536, 28, 12, 2, 8960, 151936, tied=True),
    "Qwen2.5-7B": _qwen2_5(3584, 28, 28, 4, 18944, 152064),
    "Qwen2.5-14B": _qwen2_5(5120, 48, 40, 8, 13824, 152064),
    "Qwen2.5-32B": _qwen2_5(5120, 64, 40, 8, 27648, 152064),
    "Qwen2.5-72B": _qwen2_5(8192, 80, 64, 8, 29568, 152064),
    "Qwen3-0.6B": _qwen3(1024, 28, 16, 8, 3072, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 28, 16, 8, 6144, tied=True),
    "Qwen3-8B": _qwen3(4096, 36, 32, 8, 12288),
    "Llama-2-7B": _llama(4096, 32, 32, 32, 11008, 32000),
    "Llama-2-13B": _llama(5120, 40, 40, 40, 13824, 32000),
    "Llama-3-8B": _llama(4096, 32, 32, 8, 14336, 128256),
    "Llama-3.1-8B": _llama(4096, 32, 32, 8, 14336, 128256),
    "Llama-3.2-1B": _llama(2048, 16, 32, 8, 8192, 128256, tied=True),
    "GPT-2.7B": _gpt(2560, 32, 32),
    "GPT-6.7B": _gpt(4096, 32, 32),
    "GPT-7B": _gpt(4096, 32, 32),
    "GPT-13B": _gpt(5120, 40, 40),
    "GPT-30B": _gpt(6656, 60, 52),
}


def model_shape(name: str) -> ModelShape:
    """The shape of a model by name. Raises ConfigError that names the nearest."""
    config = look_up(name, MODELS, kind="model", source="the model's name")
    return ModelShape.from_config(config, f"the preset {name}")
