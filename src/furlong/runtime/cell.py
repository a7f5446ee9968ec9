"""One (chunk, stage) while it computes: where its attention reads, writes and remembers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from furlong.errors import UnsupportedModelError
from furlong.kv.pools.contract import Handle, Lease, Pool
from furlong.kv.store import KVStore
from furlong.models.attention import KVReady
from furlong.ops.backend import Backend
from furlong.ops.chunk_attention import Known, chunk_attention, store_kv
from furlong.ops.exchange import Exchange
from furlong.ops.layer_kv import AttentionRule, PrefixBlock, Relayed
from furlong.plan.passes import Pass
from furlong.plan.rows import ChunkRows


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a cut sequence inside a chunk."""

    seq_id: int
    index: int
    """Its number in the sequence, from 0."""
    continues: bool
    """Whether later chunks read its K,V."""


@dataclass
class Cell:
    """A `models.attention.CellAttention` over the store; `known` waits in the pool `attention`."""

    rows: ChunkRows
    """The rows of the chunk that this process has."""
    pieces: Mapping[int, Piece]
    """By number, those slices that are of cut sequences: only they have a prefix or write K,V."""
    store: KVStore
    backend: Backend
    attention: Pool
    layers: range
    """Layers of the stage."""
    exchange: Exchange | None = None
    """Needed where a slice lies on several processes."""
    relay_factor: float = 1.0
    attended: list[int] = field(default_factory=list)
    """Layers that have attended in this pass, in order; whoever starts a forward clears it."""
    known: dict[int, tuple[Handle, ...]] = field(default_factory=dict)
    """By layer: out (T, N, H), and the log-sum-exp (rows, heads) of each part of the attention,
    which a forward has put away."""
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
        place = layer - self.layers.start
        view = _LayerView(self, layer, writes=what.writes_kv)
        ends = what.computes == "to last kv" and layer == self.layers[-1]
        if what.writes_kv and (ends or place < what.remembered):
            store_kv(k, v, rows=self.rows, layer_kv=view, rule=rule, exchange=self.exchange)
        if ends:
            raise KVReady
        out, known = chunk_attention(
            q, k, v, rows=self.rows, layer_kv=view, rule=rule, backend=self.backend,
            exchange=self.exchange, sinks=sinks,
            known=self._recalled(what, layer) if place < what.remembered else None,
        )  # fmt: skip
        if place < what.remembers:
            kept = (known[0].detach(), *known[1])
            self.known[layer] = tuple(self.attention.put(x.transpose(0, 1)) for x in kept)
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

    def _recalled(self, what: Pass, layer: int) -> Known:
        """Attention of an earlier pass, the next layer's on its way."""
        self.end_pass()  # the layer before has used its own
        leases = [self.attention.get(handle) for handle in self.known[layer]]
        # a cell may have its graph before a RebuildKV passes through it
        held = self._graph_leases if what.computes == "graph" else self._pass_leases
        held += leases
        if layer - self.layers.start + 1 < what.remembered:
            self._prefetch(layer + 1)
        out, *lses = (lease.tensor.transpose(0, 1) for lease in leases)
        return out, tuple(lses)

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
    """Implements `ops.layer_kv.LayerKV` for one layer of a cell."""

    cell: Cell
    layer: int
    writes: bool

    def keeps(self, slice_index: int) -> bool:
        piece = self.cell.pieces.get(slice_index)
        return self.writes and piece is not None and piece.continues

    def write(self, slice_index: int, k: Tensor, v: Tensor, window: int | None) -> None:
        piece = self.cell.pieces[slice_index]
        self.cell.store.write(piece.seq_id, self.layer, piece.index, k, v, window)

    def prefix(
        self, slice_index: int, window: int | None, *, gradients: bool
    ) -> Iterator[PrefixBlock]:
        piece = self.cell.pieces.get(slice_index)
        if piece is None or piece.index == 0:
            return
        store = self.cell.store
        yield from store.prefix(piece.seq_id, self.layer, piece.index, window, gradients=gradients)

    def relayed(self, slice_index: int) -> Relayed | None:
        piece, factor = self.cell.pieces.get(slice_index), self.cell.relay_factor
        if piece is None:
            return None
        sent = self.cell.store.relayed(piece.seq_id, self.layer, piece.index)
        if sent is None or factor == 1:
            return sent
        first, dk, dv = sent
        return first, dk * factor, dv * factor
