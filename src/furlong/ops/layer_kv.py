"""The store as the attention of a chunk sees it, and how a layer forms its scores.

K key-value heads of the process, S keys of a prefix block, H head dim
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from furlong.ops.backend import Block

Relayed = tuple[int, Tensor, Tensor]
"""First row within the slice, and the dK,dV (K, rows, H) that later chunks sent from there on."""


class PrefixBlock(Protocol):
    """Some stored keys and values before a slice, valid until the next block is asked for."""

    @property
    def k(self) -> Tensor: ...  # (K, S, H)
    @property
    def v(self) -> Tensor: ...  # (K, S, H)
    @property
    def distance(self) -> int:
        """Position of the slice's first token minus that of the block's first key."""
        ...

    def add_grad(self, dk: Tensor, dv: Tensor) -> None:
        """Add to the gradients that wait for this block's own chunk."""
        ...


class LayerKV(Protocol):
    """The store as one layer of one cell sees it; slices go by their number in the chunk.

    Of a slice on a place the store of each process holds its heads of all tokens.
    """

    def keeps(self, slice_index: int) -> bool:
        """Whether this pass stores a slice's keys and values, for later chunks."""
        ...

    def write(self, slice_index: int, k: Tensor, v: Tensor, rule: AttentionRule) -> None:
        """Store a slice's k and v (K, tokens, H), as far as later tokens see them by `rule`."""
        ...

    def prefix(
        self, slice_index: int, window: int | None, *, gradients: bool
    ) -> Iterator[PrefixBlock]:
        """The blocks that a slice's tokens see, in any order.

        Whoever asks for the next block is done with this one: it keeps no tensor of it and, with
        `gradients`, has added this one's.
        """
        ...

    def relayed(self, slice_index: int) -> Relayed | None:
        """Gradients of a slice's own keys and values from later chunks, None if there are none."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How a layer's attention forms its scores."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    block: int | None = None
    """Tokens of an attention block (Llama 4): the token at position p sees those from
    `p // block * block` on. No kernel knows of it: slices are cut there."""

    value_width: int | None = None
    """See `Block`."""

    def scores(self, distance: int) -> Block:
        """The scores of rows against keys, the first of which lies `distance` before them."""
        return Block(distance, self.scale, self.window, self.softcap, self.value_width)

    def open_tokens(self, position: int) -> int:
        """Tokens before a position that lie in its own attention block."""
        return position if self.block is None else position % self.block

    def left_tokens(self, position: int, num_tokens: int) -> int:
        """Tokens from a position on up to the end of its block, `num_tokens` at most."""
        if self.block is None:
            return num_tokens
        return max(0, min(num_tokens, self.block - position % self.block))
