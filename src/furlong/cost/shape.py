"""ModelShape: a decoder as plain numbers, which `models.describe` measures; known models by name.

N query heads, K key-value heads, H head dim, D hidden size, F MLP width, V vocabulary
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from furlong.errors import look_up
from furlong.families import family_of, versions
from furlong.files import user_cache, write_json
from furlong.plan.rows import inner_size

Matrix = tuple[str, int, str, int]
"""(name, in features, out features over all experts, kind, number of weights) of a module that can
have adapters. Kinds: a linear layer of attention or a recurrence ("mixer") or of an MLP ("mlp"), or
a "bare" parameter."""
NO_ATTENTION = 1
"""Window of a layer without attention: a token sees only itself."""
SavedBytes = tuple[float, float, float, float]
"""Bytes per token that autograd saves: with all weights trained, and with frozen weights and
adapters in attention, in the MLP, or in both."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer. FLOPs, widths and bytes are per token."""

    parameters: int
    """Parameters of the layer; those shared by several layers count for the first."""
    matrices: int
    """Parameters of the matrices that multiply one token."""
    before_kv: int
    """Parameters among `matrices` that are needed for a token's K,V or its state."""
    expert_parameters: int = 0
    """Parameters of all routed experts."""
    num_experts: int = 1
    num_active: int = 1
    """Experts per token."""
    width: int = 0
    """F: intermediate width of MLP and experts that one token passes."""
    window: int | None = NO_ATTENTION
    """Sliding window in tokens, including the token itself; None: full; 1: no attention."""
    key_flops: int = 0
    """FLOPs of one (query, key) pair over all heads; 0 without attention."""
    query_size: int = 0
    """N * H: the width of one token's queries."""
    output_size: int = 0
    """Width of the attention output."""
    kv_width: int = 0
    """Width of one token's keys and values together, as attention reads them."""
    stored: int = 0
    """Elements per token in the KV store: K and V, or the latent that they are computed from."""
    state_float32: int = 0
    """Elements of the recurrent states at the end of a chunk, in float32."""
    state_columns: int = 0
    """Elements of the recurrent states at the end of a chunk, in compute dtype."""
    scan_flops: int = 0
    """FLOPs of the recurrence and its convolution."""
    adaptable: tuple[Matrix, ...] = ()
    """Linear layers and bare parameters that can have adapters."""
    saved: tuple[SavedBytes, SavedBytes] = ((0.0,) * 4, (0.0,) * 4)
    """Saved bytes for dtypes of 2 and of 4 bytes."""
    scan_saved: tuple[float, float] = (0.0, 0.0)
    """Bytes among `saved` of recurrences, by dtype, with all weights trained."""

    @property
    def flops(self) -> int:
        """FLOPs of a token's forward without attention."""
        return 2 * self.matrices + self.scan_flops

    @property
    def attends(self) -> bool:
        return self.key_flops > 0

    @property
    def is_recurrent(self) -> bool:
        return self.state_float32 + self.state_columns > 0

    @property
    def mixer_share(self) -> float:
        """Share of the layer's FLOPs without attention that its recurrent mixer has: all linear
        layers of kind "mixer", and the scan. 0 without a recurrent mixer."""
        if not self.is_recurrent:
            return 0.0
        own = sum(weights for *_, kind, weights in self.adaptable if kind == "mixer")
        return min(1.0, (2 * own + self.scan_flops) / max(1, self.flops))

    @property
    def unvisited(self) -> float:
        """Share of the experts that are inactive for a token."""
        return 1 - self.num_active / self.num_experts

    @property
    def idle_parameters(self) -> int:
        """Parameters of the experts that are inactive for a token."""
        return self.expert_parameters // self.num_experts * (self.num_experts - self.num_active)

    @property
    def linear_parameters(self) -> int:
        """Parameters of linear layers and of a router, without experts."""
        visited = self.expert_parameters // self.num_experts * self.num_active
        return min(self.parameters, self.matrices - visited)

    def state_bytes(self, element_bytes: int) -> int:
        """Return the bytes of the recurrent states at the end of a chunk."""
        return max(4, element_bytes) * self.state_float32 + element_bytes * self.state_columns


def of_dtype(by_dtype: tuple[SavedBytes, SavedBytes], element_bytes: int, adapters: int) -> float:
    """Return the bytes that autograd saves per token, for elements of `element_bytes`.

    Args:
        by_dtype: field `saved` of `LayerShape`: bytes in 16-bit dtypes, and in wider ones.
        adapters: where the layer has adapters: 0 nowhere, 1 in attention, 2 in the MLP, 3 in both.
    """
    wide = max(1, element_bytes // 4)  # float64 saves as many tensors as float32
    return by_dtype[element_bytes > 2][adapters] * wide


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes."""

    family: str
    """The `model_type` of the config."""
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_head: bool
    layers: tuple[LayerShape, ...]
    entrance_parameters: int = 0
    """Parameters before the layers other than the embedding."""
    final_parameters: int = 0
    """Parameters after the layers other than the head's matrix: the final norm, the head's bias."""
    final_saved: tuple[SavedBytes, SavedBytes] = ((0.0,) * 4, (0.0,) * 4)
    """Bytes per token that are saved outside the layers, including the final hidden states."""
    layers_name: str = "model.layers"
    """Qualified name of the model's list of layers."""
    num_positions: int | None = None
    """Maximum number of positions; None if the config does not give one."""

    def __hash__(self) -> int:
        """Return a cheap hash over a few sizes, since a shape is part of many keys."""
        return hash((self.num_layers, self.hidden_size, self.num_kv_heads, self.vocab_size))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each layer."""
        return tuple(layer.window for layer in self.layers)

    @cached_property
    def q_size(self) -> int:
        """N * H: the width of one token's queries and attention output."""
        return max((layer.query_size + layer.output_size) // 2 for layer in self.layers)

    @cached_property
    def kv_size(self) -> int:
        """K * H: the width of one token's keys, and of its values."""
        return max(layer.kv_width for layer in self.layers) // 2

    @cached_property
    def stored_size(self) -> int:
        """Elements that a layer with attention stores per token for later chunks: keys and values,
        or latents. Where layers differ, the largest number."""
        return max(layer.stored for layer in self.layers)

    def inner_size(self, place_size: int) -> int:
        """Return the number of processes that divide the heads among them, in a sequence-parallel
        group of `place_size` processes. If it is smaller than the group, the group consists of
        several such subgroups (`plan.rows.inner_size`)."""
        return inner_size(place_size, self.num_heads, self.num_kv_heads)

    def kv_share(self, place_size: int) -> float:
        """Return the share of a layer's K,V heads that one process stores for all tokens, in a
        sequence-parallel group of `place_size` processes. The share is that of at least one
        head."""
        return max(1 / self.inner_size(place_size), 1 / self.num_kv_heads)

    @cached_property
    def is_recurrent(self) -> bool:
        """Whether any layer passes a recurrent state from chunk to chunk."""
        return any(layer.is_recurrent for layer in self.layers)

    @property
    def whole(self) -> str:
        """Why the decoder cannot be cut into pipeline stages; "" if it can. The text completes a
        sentence "a model which ..."."""
        return family_of(self.family).whole

    @cached_property
    def has_latents(self) -> bool:
        """Whether the store holds latents, narrower than the keys and values made of them (MLA)."""
        return any(0 < layer.stored < layer.kv_width for layer in self.layers)

    @cached_property
    def token_flops(self) -> int:
        """FLOPs of a token's forward through the model with head, without attention."""
        return sum(layer.flops for layer in self.layers) + 2 * self.embedding_parameters

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        beside = self.entrance_parameters + self.final_parameters
        beside += self.embedding_parameters * (1 if self.tied_head else 2)
        return beside + sum(layer.parameters for layer in self.layers)

    @property
    def num_active_parameters(self) -> int:
        """`num_parameters` without the experts that are inactive for a token."""
        return self.num_parameters - sum(layer.idle_parameters for layer in self.layers)

    def to_values(self) -> dict[str, Any]:
        """Return the shape as plain values for JSON, in which equal layers are written once."""
        kinds = list(dict.fromkeys(self.layers))
        values = {name: value for name, value in vars(self).items() if name in _FIELDS}
        return values | {
            "layers": [asdict(kind) for kind in kinds],
            "kinds": [kinds.index(layer) for layer in self.layers],
        }

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> ModelShape:
        """Return the shape saved by `to_values`. Raises KeyError or TypeError for other values."""
        own = {name: _tuples(value) for name, value in values.items()}
        kinds = [
            LayerShape(**{name: _tuples(value) for name, value in layer.items()})
            for layer in values["layers"]
        ]
        own["layers"] = tuple(kinds[kind] for kind in own.pop("kinds"))
        return cls(**own)


_PUBLISHERS = {"qwen": "qwen", "llama": "meta-llama", "olmo": "allenai"}
_FIELDS = ModelShape.__dataclass_fields__.keys()


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the config and shape of each known model by name (scripts/known_models.py)."""
    text = Path(__file__).with_name("known_models.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


@cache
def _known_shape(name: str) -> ModelShape:
    return ModelShape.from_values(known_models()[name]["shape"])


def is_known_model(name: str) -> bool:
    """Whether `name` is a known model's name, alone or after its publisher on the Hub. After any
    other publisher the name does not count: it may denote another model."""
    publisher, _, last = name.lower().rpartition("/")
    own = next((own for start, own in _PUBLISHERS.items() if last.startswith(start)), "")
    return last in {known.lower() for known in known_models()} and publisher in ("", own)


def known_name(name: str) -> str:
    """Return the spelling of a known model's name. Raises ConfigError that suggests the nearest."""
    names = {known: known for known in known_models()}
    instead = "a config.json, OWNER/NAME of the hub"
    return look_up(name, names, kind="model", source="the model's name", instead=instead)


def known_config(name: str) -> dict[str, Any]:
    """Return the config of a known model by its name on the Hub; an empty dict for other models."""
    last = name.rpartition("/")[2]
    return known_models()[known_name(last)]["config"] if is_known_model(name) else {}


def model_shape(name: str) -> ModelShape:
    """Return the shape of a known model. Raises ConfigError that suggests the nearest name."""
    return _known_shape(known_name(name))


def cached_shape(about: Mapping[str, Any], measure: Callable[[], ModelShape]) -> ModelShape:
    """Return the shape of a model from the user's cache. If the cache has no shape that the same
    versions of furlong, torch and transformers measured, call `measure`, and cache and return its
    result.

    `about`: values that distinguish models, hashed for the key: a parsed config.json and options of
    the build.
    """
    fields = sorted(LayerShape.__dataclass_fields__)
    package = Path(__file__).parents[1]
    measuring = [package / "families.py", *sorted((package / "models").glob("*.py"))]
    sources = [hashlib.sha256(file.read_bytes()).hexdigest() for file in measuring]
    text = json.dumps([about, versions(), fields, sources], sort_keys=True, default=str)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    file = user_cache() / f"shape-{key}.json"
    with suppress(
        OSError, ValueError, KeyError, TypeError, AttributeError
    ):  # no file, or a damaged one
        return ModelShape.from_values(json.loads(file.read_text(encoding="utf-8")))
    shape = measure()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, shape.to_values())
    return shape
