"""Recurrent states at the boundaries of chunks, and their gradients.

A state is kept for each cut sequence, layer and piece: the one that leaves the piece. It lives as
long as the piece's K,V, in the same tier. Only the next piece reads it, and sends its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from furlong.kv.pools.contract import Handle, Pool

Key = tuple[str, int]
"""Kind of a state and its number in its layer."""
_Place = tuple[int, int, int]
"""Sequence, layer, piece."""


class StateStore:
    """States of cut sequences in a pool; their gradients stay on the device, one set at a time."""

    def __init__(self, pool: Pool, trained: Mapping[int, Sequence[int]] | None = None) -> None:
        """`trained`: for each cut sequence the pieces whose gradients are kept; None: all."""
        self._pool = pool
        self._trained = trained
        self._handles: dict[_Place, dict[Key, Handle]] = {}
        self._sent: dict[_Place, list[Tensor | None]] = {}

    def write(self, seq_id: int, layer: int, piece: int, states: Mapping[Key, Tensor]) -> None:
        """Keep the states that leave a piece."""
        place = seq_id, layer, piece
        self._drop(place)
        self._handles[place] = {key: self._pool.put(x.detach()) for key, x in states.items()}

    def read(self, seq_id: int, layer: int, piece: int) -> dict[Key, Tensor]:
        """Copies of the states that left a piece: a graph may hold them longer than the pool."""
        handles = self._handles.get((seq_id, layer, piece))
        assert handles is not None, f"states of piece {piece} of sequence {seq_id} are gone"
        found = {}
        for key, handle in handles.items():
            lease = self._pool.get(handle)
            found[key] = lease.tensor.clone()
            lease.release()
        return found

    def send(self, seq_id: int, layer: int, piece: int, grads: Sequence[Tensor | None]) -> None:
        """Keep the gradients of the states that left a piece, from the one behind it."""
        if self._trained is None or piece in self._trained[seq_id]:
            self._sent[seq_id, layer, piece] = [g if g is None else g.detach() for g in grads]

    def relayed(self, seq_id: int, layer: int, piece: int) -> list[Tensor | None] | None:
        """The gradients that were sent to a piece, which are then forgotten."""
        return self._sent.pop((seq_id, layer, piece), None)

    def free(self, seq_id: int, layer: int, piece: int) -> None:
        self._drop((seq_id, layer, piece))
        self._sent.pop((seq_id, layer, piece), None)

    def clear(self) -> None:
        """Forget everything, after an error; clears the pool if anything was in it."""
        if self._handles:
            self._pool.clear()
        self._handles.clear()
        self._sent.clear()

    @property
    def num_buffers(self) -> int:
        return len(self._handles) + len(self._sent)

    def _drop(self, place: _Place) -> None:
        for handle in self._handles.pop(place, {}).values():
            self._pool.drop(handle)
