"""The store as one layer of a cell sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from furlong.kv.store import KVStore
from furlong.ops.layer_kv import AttentionRule, PrefixBlock, Relayed


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a cut sequence inside a chunk."""

    seq_id: int
    index: int
    """Its number in the sequence, from 0."""
    continues: bool
    """Whether later chunks read its K,V."""


class OfCell(Protocol):
    """The part of a cell that its layers' views read."""

    @property
    def pieces(self) -> Mapping[int, Piece]: ...
    @property
    def store(self) -> KVStore: ...
    @property
    def relay_factor(self) -> float: ...


@dataclass(frozen=True, slots=True)
class LayerView:
    """Implements `ops.layer_kv.LayerKV` for one layer of a cell."""

    cell: OfCell
    layer: int
    writes: bool
    is_own: bool = True
    """Whether the layer's keys and values are its own, and not read of another one."""

    def keeps(self, slice_index: int) -> bool:
        piece = self.cell.pieces.get(slice_index)
        return self.writes and self.is_own and piece is not None and piece.continues

    def write(self, slice_index: int, k: Tensor, v: Tensor, rule: AttentionRule) -> None:
        piece, store = self.cell.pieces[slice_index], self.cell.store
        store.write(piece.seq_id, self.layer, piece.index, k, v, rule.window, rule.block)

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
        if piece is None or not self.is_own:
            return None
        sent = self.cell.store.relayed(piece.seq_id, self.layer, piece.index)
        if sent is None or factor == 1:
            return sent
        first, dk, dv = sent
        return first, dk * factor, dv * factor
