"""Bytes of the KVStore of one process: K,V of cut sequences and their gradients, by segments.

On the device a layer's K,V come into being as a whole with the first piece that is written, their
gradients with the first backward that sees any of them; a segment of both dies with the last piece
that touches it (`plan.segments`). In a lower tier a segment moves there once all of its pieces are
written; on the device remain, per layer, the segment that fills and the gradients of the newest
NUM_HOT segments of a prefix, and while an action reads, two segments: one computes, one arrives.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate

from furlong.cost.memory.levels import Levels
from furlong.cost.memory.rules import MemoryRules
from furlong.cost.memory.stored_layers import StoredLayers, stored_layers
from furlong.plan.segments import NUM_HOT
from furlong.plan.values import ChunkPlan, Tier

_NUM_BUFFERS = 2


class StoredKV:
    """The store of one process, which adds to its `levels`."""

    def __init__(self, rules: MemoryRules, plan: ChunkPlan, process: int, levels: Levels) -> None:
        self._rules, self._plan, self._process, self._levels = rules, plan, process, levels
        self._stored: dict[tuple[int, int], list[_Segments]] = {}

    def write(self, chunk: int, stage: int) -> None:
        """The cell's K,V come into being."""
        for position, segments in self._pieces(chunk, stage):
            segments.write(position)

    def read(self, chunk: int, stage: int, *layers: range) -> None:
        """The cell's attention runs in `layers` of the stage; K,V of a lower tier pass by."""
        if self._plan.tiers.kv == "device":
            return
        most = 0.0
        for position, segments in self._pieces(chunk, stage):
            segments.read(position, *layers)
            stored = segments.stored
            arriving = sum(stored.sizes[i] for i in stored.seen(position)[:_NUM_BUFFERS])
            most = max(most, arriving * stored.kv_token_bytes)
        self._levels.pass_by("kv", most)

    def send_back(self, chunk: int, stage: int) -> None:
        """The cell's Backward adds to the gradients of its prefix, of which old ones pass by."""
        most = 0.0
        for position, segments in self._pieces(chunk, stage):
            segments.send_back(position)
            stored, seen = segments.stored, segments.stored.seen(position)
            cold = sum(stored.sizes[i] for i in seen[: max(0, len(seen) - NUM_HOT)][-_NUM_BUFFERS:])
            most = max(most, cold * stored.gradient_token_bytes)
        if self._plan.tiers.kv != "device":
            self._levels.pass_by("kv_gradients", most)

    def free(self, chunk: int, stage: int) -> None:
        """The cell's K,V die, and every segment that no other piece touches."""
        for position, segments in self._pieces(chunk, stage):
            segments.free(position)

    def _pieces(self, chunk: int, stage: int) -> Iterator[tuple[int, _Segments]]:
        plan, rules = self._plan, self._rules
        for seq_id, position in plan.links[chunk]:
            if (seq_id, stage) not in self._stored:
                found = stored_layers(
                    rules.shape, plan, rules.cell(plan.stages, stage), seq_id, stage,
                    self._process, rules.device_type,
                )  # fmt: skip
                self._stored[seq_id, stage] = [
                    _Segments(stored, self._levels, plan.tiers.kv) for stored in found
                ]
            for segments in self._stored[seq_id, stage]:
                yield position, segments


class _Segments:
    """The segments of some layers, by where they are now."""

    def __init__(self, stored: StoredLayers, levels: Levels, tier: Tier) -> None:
        self.stored = stored
        self._levels, self._tier, self._on_device = levels, tier, tier == "device"
        self._num_layers = num_layers = len(stored.layers)
        self._kv = [num_layers * stored.kv_token_bytes * n for n in stored.sizes]
        self._gradients = [num_layers * stored.gradient_token_bytes * n for n in stored.sizes]
        self._kv_before = [0.0, *accumulate(self._kv)]
        self._written: dict[int, set[int]] = {}
        """segment that is there -> its pieces that were written."""
        self._owners: dict[int, set[int]] = {}
        """segment that is there -> its pieces that are alive."""
        self._filling: set[int] = set()
        """Segments whose K,V are on the device."""
        self._hot: set[int] = set()
        """Segments whose gradients are on the device."""
        self._sent: set[int] = set()
        """Segments that have gradients; where some backwards are left out, not all behind one."""

    def write(self, piece: int) -> None:
        levels, stored = self._levels, self.stored
        if self._on_device and not self._written:
            for index in range(len(stored.sizes)):
                self._begin(index)
        for index in stored.touched(piece):
            if index not in self._written:
                self._begin(index)
            elif not self._on_device and index not in self._filling:
                # a segment that another piece keeps in the lower tier
                levels.read("kv", self._kv[index], self._num_layers)
                levels.write("kv", self._kv[index], self._num_layers)
            if piece not in self._owners[index] and self._is_cold(index):
                # a piece that is computed again begins without gradients, there too
                levels.read("kv_gradients", self._gradients[index], self._num_layers)
                levels.write("kv_gradients", self._gradients[index], self._num_layers)
            self._written[index].add(piece)
            self._owners[index].add(piece)
            complete = len(self._written[index]) == len(stored.pieces[index])
            if not self._on_device and complete and index in self._filling:
                self._filling.remove(index)
                levels.add("kv", -self._kv[index])
                levels.add("kv", self._kv[index], self._tier)
                levels.write("kv", self._kv[index], self._num_layers)

    def read(self, piece: int, *layers: range) -> None:
        """The segments that `piece` sees come from the lower tier."""
        seen = self.stored.seen(piece)
        filling = [index for index in self._filling if index in seen]
        if isinstance(seen, range):
            num_bytes = self._kv_before[seen.stop] - self._kv_before[seen.start] if seen else 0.0
        else:
            num_bytes = sum(self._kv[index] for index in seen)
        num_bytes -= sum(self._kv[index] for index in filling)
        reading = sum(layer in some for some in layers for layer in self.stored.layers)
        num_reads = (len(seen) - len(filling)) * reading
        self._levels.read("kv", num_bytes * reading / self._num_layers, num_reads)

    def send_back(self, piece: int) -> None:
        levels, seen, touched = self._levels, self.stored.seen(piece), self.stored.sent_to(piece)
        if self._on_device:
            # the first gradient brings those of all segments
            for index in self._written if touched else ():
                if index not in self._hot and self.stored.takes_gradients(index):
                    self._hot.add(index)
                    levels.add("kv_gradients", self._gradients[index])
            return
        num_rest = bisect_left(touched, seen[-NUM_HOT:][0] if seen else 0)
        rest, newest = touched[:num_rest], touched[num_rest:]
        had = [index for index in touched if index in self._sent]
        here = [index for index in self._hot if index in touched]
        were_here = self._sum(here)
        brought, taken = self._sum(had) - were_here, self._sum(rest)
        levels.read("kv_gradients", brought, self._num_layers * (len(had) - len(here)))
        levels.write("kv_gradients", taken, self._num_layers * len(rest))
        levels.add("kv_gradients", taken - brought, self._tier)
        levels.add("kv_gradients", self._sum(newest) - were_here)
        self._hot = self._hot.difference(rest).union(newest)
        self._sent.update(touched)
        # its own, which later pieces have sent
        relayed = [i for i in self.stored.touched(piece) if self._is_cold(i)]
        levels.read("kv_gradients", self._sum(relayed), self._num_layers * len(relayed))

    def free(self, piece: int) -> None:
        for index in self.stored.touched(piece):
            owners = self._owners.get(index, set())
            if piece not in owners:
                continue
            owners.remove(piece)
            if owners:
                continue
            if index in self._sent or index in self._hot:
                tier = "device" if index in self._hot else self._tier
                self._levels.add("kv_gradients", -self._gradients[index], tier)
            tier = "device" if index in self._filling else self._tier
            self._levels.add("kv", -self._kv[index], tier)
            for indices in (self._filling, self._hot, self._sent):
                indices.discard(index)
            del self._written[index], self._owners[index]

    def _begin(self, index: int) -> None:
        self._written[index], self._owners[index] = set(), set()
        self._filling.add(index)
        self._levels.add("kv", self._kv[index])

    def _is_cold(self, index: int) -> bool:
        """Whether the gradients of a segment are in the lower tier."""
        return index in self._sent and index not in self._hot

    def _sum(self, indices: Iterable[int]) -> float:
        """Bytes of the gradients of some segments."""
        return sum(self._gradients[index] for index in indices)
