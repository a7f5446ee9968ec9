"""ModelShape: a decoder as plain numbers, as `models.describe` measures them; known ones by name.

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
"""Name, widths in and out (of all experts together), kind and number of weights of what may have
adapters: a linear layer where tokens meet ("mixer") or not ("mlp"), or a "bare" parameter."""
NO_ATTENTION = 1
"""The window of a layer without attention: a token sees itself alone."""
SavedBytes = tuple[float, float, float, float]
"""Bytes per token that autograd saves: of trained weights, and of frozen ones with adapters in
attention, in the MLP, in both."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer. FLOPs, widths and bytes are those of one token."""

    parameters: int
    """Those that are counted with this layer; what several share is counted with the first."""
    matrices: int
    """Parameters of the matrices that one token is multiplied with."""
    before_kv: int
    """Parameters among `matrices` that a token meets before its K,V, or its state, are there."""
    expert_parameters: int = 0
    """Parameters of all experts among which a router chooses."""
    num_experts: int = 1
    num_active: int = 1
    """Experts that one token visits."""
    width: int = 0
    """F: the width of what one token passes through in MLP and experts."""
    window: int | None = NO_ATTENTION
    """Sliding window in tokens, the token itself included; None: sees all; 1: no attention."""
    key_flops: int = 0
    """FLOPs of one (query, key) pair over all heads; 0 without attention."""
    query_size: int = 0
    """N * H: the width of one token's queries."""
    output_size: int = 0
    """The width of what attention gives."""
    kv_width: int = 0
    """The width of one token's keys and values together, as attention reads them."""
    stored: int = 0
    """Numbers of one token in the KV store: K and V, or the vector that they are made of."""
    state_float32: int = 0
    """Numbers of the states that leave a chunk, in float32."""
    state_columns: int = 0
    """Numbers of the states that leave a chunk, in compute dtype."""
    scan_flops: int = 0
    """FLOPs of the recurrence and its convolution."""
    adaptable: tuple[Matrix, ...] = ()
    """Linear layers and bare parameters of the layer, which adapters may change."""
    saved: tuple[SavedBytes, SavedBytes] = ((0.0,) * 4, (0.0,) * 4)
    """By dtype (2 and 4 bytes an element)."""
    scan_saved: tuple[float, float] = (0.0, 0.0)
    """Bytes among `saved` that recurrences save, by dtype, all weights trained."""

    @property
    def flops(self) -> int:
        """FLOPs of a token's forward, attention apart."""
        return 2 * self.matrices + self.scan_flops

    @property
    def attends(self) -> bool:
        return self.key_flops > 0

    @property
    def is_recurrent(self) -> bool:
        return self.state_float32 + self.state_columns > 0

    @property
    def unvisited(self) -> float:
        """Share of the experts that a token does not visit."""
        return 1 - self.num_active / self.num_experts

    @property
    def idle_parameters(self) -> int:
        """Parameters of the experts that a token does not visit."""
        return self.expert_parameters // self.num_experts * (self.num_experts - self.num_active)

    @property
    def linear_parameters(self) -> int:
        """Parameters of linear layers, and of a router."""
        visited = self.expert_parameters // self.num_experts * self.num_active
        return min(self.parameters, self.matrices - visited)

    def state_bytes(self, element_bytes: int) -> int:
        """Bytes of the state at the end of a chunk."""
        return max(4, element_bytes) * self.state_float32 + element_bytes * self.state_columns


def of_dtype(by_dtype: tuple[SavedBytes, SavedBytes], element_bytes: int, adapters: int) -> float:
    """Saved bytes in a dtype; `adapters`: 0 without, 1 in attention, 2 in the MLP, 3 in both."""
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
    """Parameters beside the embedding at the decoder's entrance."""
    final_parameters: int = 0
    """Parameters behind the layers beside the head's matrix: the final norm's, the head's bias."""
    final_saved: tuple[SavedBytes, SavedBytes] = ((0.0,) * 4, (0.0,) * 4)
    """Bytes per token that are saved beside the layers, the final hidden states included."""
    layers_name: str = "model.layers"
    """The name of the list of layers in the model."""
    num_positions: int | None = None
    """Positions that the model knows; None where its config names no number."""

    def __hash__(self) -> int:
        """Quick, for a shape is part of many keys: of few sizes, and none of the layers' values."""
        return hash((self.num_layers, self.hidden_size, self.num_kv_heads, self.vocab_size))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return tuple(layer.window for layer in self.layers)

    @cached_property
    def q_size(self) -> int:
        """N * H: the width of one token's queries, and of what attention gives."""
        return max((layer.query_size + layer.output_size) // 2 for layer in self.layers)

    @cached_property
    def kv_size(self) -> int:
        """K * H: the width of one token's keys, and of its values."""
        return max(layer.kv_width for layer in self.layers) // 2

    @cached_property
    def stored_size(self) -> int:
        """Numbers of one token that a layer with attention keeps for later chunks."""
        return max(layer.stored for layer in self.layers)

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
        return any(layer.is_recurrent for layer in self.layers)

    @property
    def whole(self) -> str:
        """Why the decoder is not divided between layers, as the end of "which ..."; "" if it is."""
        return family_of(self.family).whole

    @cached_property
    def has_latents(self) -> bool:
        """Whether the store holds narrower vectors than the keys and values made of them."""
        return any(0 < layer.stored < layer.kv_width for layer in self.layers)

    @cached_property
    def token_flops(self) -> int:
        """FLOPs of a token's forward through the whole model, attention apart, head included."""
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
        """`num_parameters` without the experts that a token does not visit."""
        return self.num_parameters - sum(layer.idle_parameters for layer in self.layers)

    def to_values(self) -> dict[str, Any]:
        """Plain values; layers that are alike are written once."""
        kinds = list(dict.fromkeys(self.layers))
        values = {name: value for name, value in vars(self).items() if name in _FIELDS}
        return values | {
            "layers": [asdict(kind) for kind in kinds],
            "kinds": [kinds.index(layer) for layer in self.layers],
        }

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> ModelShape:
        """The shape of such values. Raises KeyError or TypeError for others."""
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
    """By name, the config of each known model and its shape, as scripts/known_models.py made it."""
    text = Path(__file__).with_name("known_models.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


@cache
def _known_shape(name: str) -> ModelShape:
    return ModelShape.from_values(known_models()[name]["shape"])


def is_known_model(name: str) -> bool:
    """Whether a name is a known model's, bare or with its publisher on the hub; what others publish
    under it may be another model."""
    publisher, _, last = name.lower().rpartition("/")
    own = next((own for start, own in _PUBLISHERS.items() if last.startswith(start)), "")
    return last in {known.lower() for known in known_models()} and publisher in ("", own)


def known_name(name: str) -> str:
    """The name of a known model, as it is written. Raises ConfigError that names the nearest."""
    names = {known: known for known in known_models()}
    return look_up(name, names, kind="model", source="the model's name")


def known_config(name: str) -> dict[str, Any]:
    """The config of a known model by its name on the hub; empty for others."""
    last = name.rpartition("/")[2]
    return known_models()[known_name(last)]["config"] if is_known_model(name) else {}


def model_shape(name: str) -> ModelShape:
    """The shape of a model by name. Raises ConfigError that names the nearest."""
    return _known_shape(known_name(name))


def cached_shape(about: Mapping[str, Any], measure: Callable[[], ModelShape]) -> ModelShape:
    """The shape of a model as it was measured before by the same furlong, torch and transformers,
    else as `measure` finds it. `about`: a config.json, as parsed, and what is made of it."""
    fields = sorted(LayerShape.__dataclass_fields__)
    measuring = sorted((Path(__file__).parents[1] / "models").glob("*.py"))
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
