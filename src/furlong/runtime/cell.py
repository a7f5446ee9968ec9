"""One (chunk, stage) while it computes: where its attention reads, writes and remembers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from furlong.errors import UnsupportedModelError
from furlong.kv.store import KVStore
from furlong.ops.backend import Backend
from furlong.ops.chunk_attention import AttentionRule, PrefixBlock, chunk_attention


class KVReady(Exception):  # noqa: N818 - it ends a forward early, it is no error
    """The cell's last K,V are stored: only its backward needs what follows in the forward."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a cut sequence inside a chunk."""

    rows: slice
    seq_id: int
    index: int
    """Its position in the sequence's group."""
    continues: bool
    """Whether later chunks read its K,V."""


@dataclass
class Cell:
    """Implements `models.causal_lm.Cell` over the store."""

    slices: tuple[slice, ...]
    pieces: tuple[Piece, ...]
    store: KVStore
    backend: Backend
    num_layers: int
    relay_factor: float = 1.0
    writes_kv: bool = False
    stops_at_last_kv: bool = False
    remembers: bool = False
    """Whether each layer's attention output and log-sum-exp are put into `known`."""
    layers: list[int] = field(default_factory=list)
    """Those that have attended, in order; whoever starts a forward clears it."""
    known: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By layer: out (N, T, H), lse (N, T). In the arena until `forget`."""
    _held: list[Tensor] = field(default_factory=list)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, sinks: Tensor | None
    ) -> Tensor:
        """q (N, T, H), k and v (K, T, H) -> (N, T, H)."""
        self.layers.append(layer)
        if self.writes_kv:
            for piece in self.pieces:
                if piece.continues:
                    own_k, own_v = k.detach()[:, piece.rows], v.detach()[:, piece.rows]
                    self.store.write(piece.seq_id, layer, piece.index, own_k, own_v, rule.window)
        if self.stops_at_last_kv and layer == self.num_layers - 1:
            raise KVReady
        out, lse = chunk_attention(
            q, k, v, slices=self.slices, layer_kv=_LayerView(self, layer), rule=rule,
            backend=self.backend, sinks=sinks, known=self.known.pop(layer, None),
        )  # fmt: skip
        if self.remembers:
            self.known[layer] = self._hold(out.detach()), self._hold(lse)
        return out

    def forget(self) -> None:
        """Give back what was remembered; after the backward, whose graph still uses it."""
        for tensor in self._held:
            self.store.arena.give(tensor)
        self._held.clear()
        self.known.clear()

    def _hold(self, x: Tensor) -> Tensor:
        """A copy of x (N, T, ...) in the arena, row-major as attention's output is read."""
        held = self.store.arena.take((x.shape[1], x.shape[0], *x.shape[2:]), x.dtype)
        self._held.append(held)
        return held.transpose(0, 1).copy_(x)


def require_each_layer(name: str, layers: Sequence[int], num_layers: int) -> None:
    """Raise UnsupportedModelError unless a forward's `layers` are all, in order, each once."""
    if len(layers) != num_layers:
        raise UnsupportedModelError(
            given=f"{name} reaches transformers' AttentionInterface {len(layers)} times in a "
            f"forward of {num_layers} layers",
            required="every layer's attention to go through it once",
            source="the model's forward",
            change="train a model of another family, or one that skips no layer (layerdrop 0)",
        )
    if list(layers) != list(range(num_layers)):
        raise UnsupportedModelError(
            given=f"{name} has attention layers numbered {', '.join(map(str, layers))}",
            required=f"0 to {num_layers - 1}, in the order in which they run",
            source="layer_idx of the model's attention modules",
            change="number them anew after layers are removed, copied or moved: "
            "layer.self_attn.layer_idx = its place",
        )


@dataclass(frozen=True, slots=True)
class _LayerView:
    """Implements `ops.chunk_attention.LayerKV` for one layer of a cell."""

    cell: Cell
    layer: int

    def prefix_blocks(self, window: int | None) -> Iterable[PrefixBlock]:
        for piece in self.cell.pieces:
            if piece.index > 0:
                store = self.cell.store
                yield from store.prefix(
                    piece.seq_id, self.layer, piece.index, window, gradients=False
                )

    def relayed(self) -> Iterable[tuple[slice, Tensor, Tensor]]:
        for piece in self.cell.pieces:
            sent = self.cell.store.relayed(piece.seq_id, self.layer, piece.index)
            if sent is not None:
                first, dk, dv = sent
                rows = slice(piece.rows.start + first, piece.rows.stop)
                factor = self.cell.relay_factor
                yield rows, *((dk, dv) if factor == 1 else (dk * factor, dv * factor))
