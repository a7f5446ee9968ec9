"""Bytes of the KVStore of one process: K,V of cut sequences and their gradients, by segments.

On the device a layer's K,V come into being as a whole with the first piece that is written, their
gradients with the first backward that sees any of them; a segment of both dies with the last piece
that touches it (`plan.segments`). In a lower tier a segment moves there once all of its pieces are
written; on the device remain, per layer, the segment that fills and the gradients of the newest
NUM_HOT segments of a prefix, and while an action reads, two segments: one computes, one arrives.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from furlong.cost.memory.cells import StageBytes
from furlong.cost.memory.stored_layers import StoredLayers, stored_layers
from furlong.cost.shapes.shape import ModelShape
from furlong.plan.segments import NUM_HOT
from furlong.plan.values import ChunkPlan

_NUM_BUFFERS = 2


@dataclass(slots=True)
class StoreLevel:
    """Bytes that a store holds, and those that have gone over its link so far."""

    kv: float = 0.0
    gradients: float = 0.0
    """On the device, as `kv` is."""
    lower: float = 0.0
    """K,V and gradients in a lower tier."""
    kv_read: float = 0.0
    kv_written: float = 0.0
    gradients_read: float = 0.0
    gradients_written: float = 0.0
    num_reads: int = 0
    num_writes: int = 0
    num_gradient_reads: int = 0
    num_gradient_writes: int = 0

    def moved(self) -> list[list[float]]:
        """Bytes read, bytes written, reads and writes so far, each of K,V and of gradients."""
        return [
            [self.kv_read, self.gradients_read],
            [self.kv_written, self.gradients_written],
            [self.num_reads, self.num_gradient_reads],
            [self.num_writes, self.num_gradient_writes],
        ]


class StoredKV:
    """The store of one process; `level` is what it holds now, in whichever tier."""

    def __init__(
        self,
        shape: ModelShape,
        plan: ChunkPlan,
        stages: Sequence[StageBytes],
        process: int,
        device_type: str,
    ) -> None:
        self._plan, self._stages, self._shape = plan, stages, shape
        self._process, self._device_type = process, device_type
        self._stored: dict[tuple[int, int], list[_Alive]] = {}
        self.level = StoreLevel()

    def write(self, chunk: int, stage: int) -> None:
        """The cell's K,V come into being."""
        for position, alive in self._pieces(chunk, stage):
            alive.write(position)

    def read(self, chunk: int, stage: int, layers: range) -> None:
        """The cell's attention runs in `layers` of the stage."""
        if self._plan.tiers.kv != "device":
            for position, alive in self._pieces(chunk, stage):
                alive.read(position, layers)

    def send_back(self, chunk: int, stage: int) -> None:
        """The cell's Backward adds to the gradients of its prefix."""
        for position, alive in self._pieces(chunk, stage):
            alive.send_back(position)

    def free(self, chunk: int, stage: int) -> None:
        """The cell's K,V die, and every segment that no other piece touches."""
        for position, alive in self._pieces(chunk, stage):
            alive.free(position)

    def buffers(self, chunk: int, stage: int) -> tuple[float, float]:
        """Bytes of K,V and of gradients that pass through the device while the cell's attention
        reads them from a lower tier."""
        kv = gradients = 0.0
        if self._plan.tiers.kv == "device":
            return kv, gradients
        for position, alive in self._pieces(chunk, stage):
            stored = alive.stored
            seen = stored.seen(position)
            tokens = sum(stored.sizes[i] for i in seen[:_NUM_BUFFERS])
            kv = max(kv, tokens * stored.kv_token_bytes)
            cold = sum(stored.sizes[i] for i in seen[: max(0, len(seen) - NUM_HOT)][-_NUM_BUFFERS:])
            gradients = max(gradients, cold * stored.gradient_token_bytes)
        return kv, gradients

    def _pieces(self, chunk: int, stage: int) -> Iterator[tuple[int, _Alive]]:
        for seq_id, position in self._plan.links[chunk]:
            if (seq_id, stage) not in self._stored:
                found = stored_layers(
                    self._shape, self._plan, self._stages[stage], seq_id, stage, self._process,
                    self._device_type,
                )  # fmt: skip
                on_device = self._plan.tiers.kv == "device"
                self._stored[seq_id, stage] = [
                    _Alive(stored, self.level, on_device=on_device) for stored in found
                ]
            for alive in self._stored[seq_id, stage]:
                yield position, alive


class _Alive:
    """Where the segments of some layers are now."""

    def __init__(self, stored: StoredLayers, level: StoreLevel, *, on_device: bool) -> None:
        self.stored = stored
        self._level, self._on_device = level, on_device
        self._num_layers = num_layers = len(stored.layers)
        self._kv = [num_layers * stored.kv_token_bytes * n for n in stored.sizes]
        self._gradients = [num_layers * stored.gradient_token_bytes * n for n in stored.sizes]
        self._kv_before = [0.0, *accumulate(self._kv)]
        self._written: dict[int, set[int]] = {}
        """By segment that is there: the pieces that were written."""
        self._owners: dict[int, set[int]] = {}
        """Those of them that are alive."""
        self._filling: set[int] = set()
        """Segments whose K,V are on the device."""
        self._hot: set[int] = set()
        """Segments whose gradients are on the device."""
        self._sent: set[int] = set()
        """Segments that have gradients; where some backwards are left out, not all behind one."""

    def write(self, piece: int) -> None:
        level, stored = self._level, self.stored
        if self._on_device and not self._written:
            for index in range(len(stored.sizes)):
                self._begin(index)
        for index in stored.touched(piece):
            if index not in self._written:
                self._begin(index)
            elif not self._on_device and index not in self._filling:
                self._rewrite(index)
            if piece not in self._owners[index] and self._is_cold(index):
                self._zero_gradients(index)
            self._written[index].add(piece)
            self._owners[index].add(piece)
            complete = len(self._written[index]) == len(stored.pieces[index])
            if not self._on_device and complete and index in self._filling:
                self._filling.remove(index)
                level.kv -= self._kv[index]
                level.lower += self._kv[index]
                level.kv_written += self._kv[index]
                level.num_writes += self._num_layers

    def read(self, piece: int, layers: range) -> None:
        """From a lower tier; on the device nothing moves."""
        level, seen = self._level, self.stored.seen(piece)
        filling = [index for index in self._filling if index in seen]
        num_bytes = _sum(self._kv_before, seen) - sum(self._kv[index] for index in filling)
        reading = sum(layer in layers for layer in self.stored.layers)
        level.kv_read += num_bytes * reading / self._num_layers
        level.num_reads += (len(seen) - len(filling)) * reading

    def send_back(self, piece: int) -> None:
        level, seen, touched = self._level, self.stored.seen(piece), self.stored.sent_to(piece)
        if self._on_device:
            # the first gradient brings those of all segments
            for index in self._written if touched else ():
                if index not in self._hot and self.stored.takes_gradients(index):
                    self._hot.add(index)
                    level.gradients += self._gradients[index]
            return
        num_rest = bisect_left(touched, seen[-NUM_HOT:].start)
        rest, newest = touched[:num_rest], touched[num_rest:]
        had = [index for index in touched if index in self._sent]
        here = [index for index in self._hot if index in touched]
        were_here = sum(self._gradients[index] for index in here)
        brought = sum(self._gradients[index] for index in had) - were_here
        taken = sum(self._gradients[index] for index in rest)
        level.gradients_read += brought
        level.gradients_written += taken
        level.num_gradient_reads += self._num_layers * (len(had) - len(here))
        level.num_gradient_writes += self._num_layers * len(rest)
        level.lower += taken - brought
        level.gradients += sum(self._gradients[index] for index in newest) - were_here
        self._hot = self._hot.difference(rest).union(newest)
        self._sent.update(touched)
        # its own, which later pieces have sent
        relayed = [i for i in self.stored.touched(piece) if self._is_cold(i)]
        level.gradients_read += sum(self._gradients[index] for index in relayed)
        level.num_gradient_reads += self._num_layers * len(relayed)

    def free(self, piece: int) -> None:
        level = self._level
        for index in self.stored.touched(piece):
            owners = self._owners.get(index, set())
            if piece not in owners:
                continue
            owners.remove(piece)
            if owners:
                continue
            if self._is_cold(index):
                level.lower -= self._gradients[index]
            elif index in self._hot:
                level.gradients -= self._gradients[index]
            if index in self._filling:
                level.kv -= self._kv[index]
            else:
                level.lower -= self._kv[index]
            self._filling.discard(index)
            self._hot.discard(index)
            self._sent.discard(index)
            del self._written[index], self._owners[index]

    def _begin(self, index: int) -> None:
        self._written[index], self._owners[index] = set(), set()
        self._filling.add(index)
        self._level.kv += self._kv[index]

    def _rewrite(self, index: int) -> None:
        """A segment that another piece keeps in the lower tier is read and written back."""
        self._level.kv_read += self._kv[index]
        self._level.kv_written += self._kv[index]
        self._level.num_reads += self._num_layers
        self._level.num_writes += self._num_layers

    def _zero_gradients(self, index: int) -> None:
        """A piece that is computed again begins without gradients, there too."""
        self._level.gradients_read += self._gradients[index]
        self._level.gradients_written += self._gradients[index]
        self._level.num_gradient_reads += self._num_layers
        self._level.num_gradient_writes += self._num_layers

    def _is_cold(self, index: int) -> bool:
        """Whether its gradients are in the lower tier."""
        return index in self._sent and index not in self._hot


def _sum(before: Sequence[float], indices: range) -> float:
    return before[indices.stop] - before[indices.start] if indices else 0.0
