"""One (chunk, stage) while it computes: where its attention reads, writes and remembers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from furlong.errors import UnsupportedModelError
from furlong.kv.pools.contract import Handle, Lease, Pool
from furlong.kv.store import KVStore
from furlong.models.attention import KVReady
from furlong.ops.backend import Backend
from furlong.ops.chunk_attention import AttentionRule, PrefixBlock, Relayed, chunk_attention
from furlong.plan.passes import Pass


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a cut sequence inside a chunk."""

    rows: slice
    """Its rows among the T tokens of the chunk."""
    seq_id: int
    index: int
    """Its number in the sequence, from 0."""
    continues: bool
    """Whether later chunks read its K,V."""


@dataclass
class Cell:
    """A `models.attention.CellAttention` over the store; `known` waits in the pool `attention`."""

    slices: tuple[slice, ...]
    """The rows of each sequence in the chunk, among its T tokens."""
    pieces: tuple[Piece, ...]
    """Those slices that are of cut sequences: only they have a prefix or write K,V."""
    store: KVStore
    backend: Backend
    attention: Pool
    layers: range
    """Layers of the stage."""
    relay_factor: float = 1.0
    attended: list[int] = field(default_factory=list)
    """Layers that have attended in this pass, in order; whoever starts a forward clears it."""
    known: dict[int, tuple[Handle, Handle]] = field(default_factory=dict)
    """By layer: out (T, N, H) and lse (T, N), which a forward has put away."""
    _graph_leases: list[Lease] = field(default_factory=list)
    """Leases of `known` that a graph uses, until its backward."""
    _pass_leases: list[Lease] = field(default_factory=list)
    """Leases of `known` that the layer under way uses, in a pass without a graph."""

    def attend(
        self,
        what: Pass,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: AttentionRule,
        sinks: Tensor | None,
    ) -> Tensor:
        """q (N, T, H), k and v (K, T, H) -> (N, T, H)."""
        self.attended.append(layer)
        if what.writes_kv:
            for piece in self.pieces:
                if piece.continues:
                    own_k, own_v = k.detach()[:, piece.rows], v.detach()[:, piece.rows]
                    self.store.write(piece.seq_id, layer, piece.index, own_k, own_v, rule.window)
        if what.computes == "to last kv" and layer == self.layers[-1]:
            raise KVReady
        place = layer - self.layers.start
        out, lse = chunk_attention(
            q, k, v, slices=self.slices, layer_kv=_LayerView(self, layer), rule=rule,
            backend=self.backend, sinks=sinks,
            known=self._recalled(what, layer) if place < what.remembered else None,
        )  # fmt: skip
        if place < what.remembers:
            self.known[layer] = (
                self.attention.put(out.detach().transpose(0, 1)),
                self.attention.put(lse.transpose(0, 1)),
            )
        return out

    def expect(self, what: Pass) -> None:
        """Begin to bring what the first layer of a pass will recall."""
        if what.remembered:
            self._prefetch(self.layers.start)

    def end_pass(self) -> None:
        """Let go of what a pass without a graph has recalled: no later layer uses it."""
        _release(self._pass_leases)

    def forget(self) -> None:
        """Drop what was remembered, after the backward."""
        self.end_pass()
        _release(self._graph_leases)
        for handles in self.known.values():
            for handle in handles:
                self.attention.drop(handle)
        self.known.clear()

    def _recalled(self, what: Pass, layer: int) -> tuple[Tensor, Tensor]:
        """out (N, T, H) and lse (N, T) of an earlier pass, the next layer's on their way."""
        self.end_pass()  # the layer before has used its own
        leases = [self.attention.get(handle) for handle in self.known[layer]]
        # a cell may have its graph before a RebuildKV passes through it
        held = self._graph_leases if what.computes == "graph" else self._pass_leases
        held += leases
        if layer - self.layers.start + 1 < what.remembered:
            self._prefetch(layer + 1)
        out, lse = (lease.tensor.transpose(0, 1) for lease in leases)
        return out, lse

    def _prefetch(self, layer: int) -> None:
        for handle in self.known.get(layer, ()):
            self.attention.prefetch(handle)


def _release(leases: list[Lease]) -> None:
    for lease in leases:
        lease.release()
    leases.clear()


def require_each_layer(name: str, attended: Sequence[int], layers: range) -> None:
    """Raise UnsupportedModelError unless a pass attended in all of `layers`, once, in order."""
    if len(attended) != len(layers):
        raise UnsupportedModelError(
            given=f"{name} reaches transformers' AttentionInterface {len(attended)} times in a "
            f"forward of {len(layers)} layers",
            required="every layer's attention to go through it once",
            source="the model's forward",
            change="train a model of another family, or one that skips no layer (layerdrop 0)",
        )
    if list(attended) != list(layers):
        raise UnsupportedModelError(
            given=f"{name} has attention layers numbered {', '.join(map(str, attended))}",
            required=f"{layers[0]} to {layers[-1]}, in the order in which they run",
            source="layer_idx of the model's attention modules",
            change="number them anew after layers are removed, copied or moved: "
            "layer.self_attn.layer_idx = its place",
        )


@dataclass(frozen=True, slots=True)
class _LayerView:
    """Implements `ops.chunk_attention.LayerKV` for one layer of a cell."""

    cell: Cell
    layer: int

    def prefix(
        self, slice_index: int, window: int | None, *, gradients: bool
    ) -> Iterator[PrefixBlock]:
        piece = self._piece(slice_index)
        if piece is None or piece.index == 0:
            return
        store = self.cell.store
        yield from store.prefix(piece.seq_id, self.layer, piece.index, window, gradients=gradients)

    def relayed(self, slice_index: int) -> Relayed | None:
        piece, factor = self._piece(slice_index), self.cell.relay_factor
        if piece is None:
            return None
        sent = self.cell.store.relayed(piece.seq_id, self.layer, piece.index)
        if sent is None or factor == 1:
            return sent
        first, dk, dv = sent
        return first, dk * factor, dv * factor

    def _piece(self, slice_index: int) -> Piece | None:
        """The piece of a cut sequence that a slice is, None for a whole sequence."""
        rows = self.cell.slices[slice_index]
        return next((piece for piece in self.cell.pieces if piece.rows == rows), None)
