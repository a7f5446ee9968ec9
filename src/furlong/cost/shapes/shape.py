"""ModelShape: a decoder as plain numbers, read from its config.json without transformers.

N query heads, K key-value heads, H head dim, D hidden size, F MLP width, V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from furlong.cost.files import read_object
from furlong.cost.shapes.config_values import check_values, rope_original
from furlong.cost.shapes.gemma4 import gemma4_layers
from furlong.cost.shapes.kinds import completed
from furlong.cost.shapes.layers import Mlp, layer_mlps, layer_windows
from furlong.cost.shapes.mixers import MixerShape, attention_mixer, latent_mixer
from furlong.cost.shapes.recurrent import layer_mixers
from furlong.errors import ConfigError
from furlong.families import FAMILIES, family_of
from furlong.plan.rows import inner_size


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
