"""ModelShape: a decoder as plain numbers, read from its config.json without transformers.

N query heads, K key-value heads, H head dim, D hidden size, F MLP width, V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.cost.files import read_object
from furlong.cost.shapes.config_values import check_values, rope_original
from furlong.cost.shapes.layers import Mlp, attention_vectors, layer_mlps, layer_windows
from furlong.families import FAMILIES, family_of
from furlong.plan.values import inner_size


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
    """Sliding window of each layer in tokens, the token itself included; None: sees all."""
    mlps: tuple[Mlp, ...]
    """The MLP of each layer."""
    attention_vectors: int = 0
    """Parameters of one layer's attention outside its four matrices: biases, norms of q and k,
    sinks."""
    norm_parameters: int = 0
    """Parameters of one layer's norms."""
    final_norm_parameters: int = 0
    head_bias_parameters: int = 0
    exact: bool = True
    """Whether the family is in the table; others are read as if they were Llamas."""
    num_positions: int | None = None
    """Positions that the model knows; None where its config names no number."""
    original_positions: int | None = None
    """Positions before its RoPE was scaled; None where the config names no number."""

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def q_size(self) -> int:
        """N * H: the width of one token's queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """K * H: the width of one token's keys, and of its values."""
        return self.num_kv_heads * self.head_dim

    def inner_size(self, place_size: int) -> int:
        """Processes of a place that divide the heads among them (`plan.values.inner_size`)."""
        return inner_size(place_size, self.num_heads, self.num_kv_heads)

    def kv_share(self, place_size: int) -> float:
        """Share of a layer's K,V heads, at least one head, that each process of a place gets and
        keeps of all tokens: the same for as many processes as an inner group has."""
        return max(1 / self.inner_size(place_size), 1 / self.num_kv_heads)

    @property
    def attention_parameters(self) -> int:
        """The q, k, v and output matrices of one layer."""
        return self.hidden_size * (2 * self.q_size + 2 * self.kv_size)

    @property
    def qkv_parameters(self) -> int:
        """The q, k and v matrices of one layer."""
        return self.hidden_size * (self.q_size + 2 * self.kv_size)

    def layer_parameters(self, layer: int) -> int:
        """All parameters of a layer."""
        attention = self.attention_parameters + self.attention_vectors
        return attention + self.mlps[layer].parameters(self.hidden_size) + self.norm_parameters

    def layer_active_parameters(self, layer: int) -> int:
        """Parameters of a layer's matrices that one token is multiplied with."""
        return self.attention_parameters + self.mlps[layer].active_parameters(self.hidden_size)

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
        return (
            self.embedding_parameters + layers + self.final_norm_parameters + self.head_parameters
        )

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
            count += self.embedding_parameters
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
        name = str(config.get("model_type", ""))
        family = family_of(name)
        check_values(config, source)
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or family.default_head_dim or hidden // heads)
        norm = hidden * (2 if family.norm == "layer" else 1)
        vocab = int(config["vocab_size"])
        return cls(
            family=name,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab,
            tied_head=bool(config.get("tie_word_embeddings", family.tied)),
            windows=layer_windows(config, family),
            mlps=layer_mlps(config, family),
            attention_vectors=attention_vectors(
                config, family, heads=heads, kv_heads=kv_heads, head_dim=head_dim, hidden=hidden
            ),
            norm_parameters=family.num_norms * norm,
            final_norm_parameters=norm,
            head_bias_parameters=vocab if family.head_bias else 0,
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
