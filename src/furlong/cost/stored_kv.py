"""Bytes of the KVStore of one process: K,V of cut sequences and their gradients.

K,V of a cut sequence lie in one buffer per layer from its first forward on (all pieces but the
last, of a windowed layer the last window - 1 tokens of each), their gradients in a second one from
the first backward of a later chunk on; both go back with the last piece that is alive. With tier
host or disk they lie there, and two blocks of each stay on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from furlong.cost.cells import StageBytes
from furlong.cost.rates import BLOCK_TOKENS
from furlong.cost.shape import ModelShape
from furlong.plan.values import SHARDED, ChunkPlan, Slice


def token_share(piece: Slice, sp_size: int, process: int) -> float:
    """Of a slice's tokens, those that a process of the sp group holds."""
    if piece.placement == SHARDED:
        return 1 / sp_size
    return 1.0 if piece.placement % sp_size == process else 0.0


class StoredKV:
    """`kv_bytes` and `gradient_bytes` are what the store holds now, in whichever tier."""

    def __init__(
        self,
        shape: ModelShape,
        plan: ChunkPlan,
        stages: Sequence[StageBytes],
        held: frozenset[int],
        process: int,
    ) -> None:
        self._plan, self._stages, self._held = plan, stages, held
        self._shape, self._process = shape, process
        self._stored: dict[tuple[int, int], float] = {}
        self._alive: dict[tuple[int, int], set[int]] = {}
        self._sent_back: set[tuple[int, int]] = set()
        self.kv_bytes = 0.0
        self.gradient_bytes = 0.0

    def device_buffers(self) -> tuple[float, float]:
        """Bytes of K,V and of their gradients that a lower tier needs on the device: two blocks."""
        if self._plan.tiers.kv == "device" or not self._plan.groups or not self._held:
            return 0.0, 0.0
        sharded = any(s.placement == SHARDED for c in self._plan.chunks for s in c.slices)
        tokens = min(BLOCK_TOKENS, max(self._plan.seq_lens))
        blocks = 2 * tokens / (self._plan.sp_size if sharded else 1)
        kv = max(self._stages[stage].kv_layer for stage in self._held)
        return blocks * kv, blocks * max(self._stages[s].kv_gradient_layer for s in self._held)

    def write(self, chunk: int, stage: int) -> None:
        """The cell's K,V come into being."""
        for seq_id, position in self._plan.links[chunk]:
            if position == len(self._plan.groups[seq_id]) - 1:
                continue
            alive = self._alive.setdefault((seq_id, stage), set())
            if not alive:
                self.kv_bytes += self._stages[stage].kv_layer * self._tokens(seq_id, stage)
            alive.add(position)

    def send_back(self, chunk: int, stage: int) -> None:
        """The cell's Backward adds to the gradients of its prefix."""
        for seq_id, position in self._plan.links[chunk]:
            if position and (seq_id, stage) not in self._sent_back:
                self._sent_back.add((seq_id, stage))
                per_token = self._stages[stage].kv_gradient_layer
                self.gradient_bytes += per_token * self._tokens(seq_id, stage)

    def free(self, chunk: int, stage: int) -> None:
        """The cell's K,V die; with the last of a sequence its buffers go back."""
        for seq_id, position in self._plan.links[chunk]:
            alive = self._alive.get((seq_id, stage), set())
            if position not in alive:
                continue
            alive.discard(position)
            if alive:
                continue
            tokens = self._tokens(seq_id, stage)
            self.kv_bytes -= self._stages[stage].kv_layer * tokens
            if (seq_id, stage) in self._sent_back:
                self._sent_back.discard((seq_id, stage))
                self.gradient_bytes -= self._stages[stage].kv_gradient_layer * tokens

    def _tokens(self, seq_id: int, stage: int) -> float:
        """Stored tokens of a cut sequence times the stage's layers, on this process."""
        if (seq_id, stage) not in self._stored:
            plan = self._plan
            pieces = [
                s for c in plan.groups[seq_id] for s in plan.chunks[c].slices if s.seq_id == seq_id
            ]
            lens = [piece.num_tokens for piece in pieces[:-1]]
            first = sum(plan.stages[:stage])
            windows = Counter(self._shape.windows[first : first + plan.stages[stage]])
            total = sum(
                count * sum(n if window is None else min(n, window - 1) for n in lens)
                for window, count in windows.items()
            )
            heads = self._shape.num_kv_heads
            share = _kv_share(pieces[0], plan.sp_size, self._process, heads)
            self._stored[seq_id, stage] = share * total
        return self._stored[seq_id, stage]


def _kv_share(piece: Slice, sp_size: int, process: int, num_kv_heads: int) -> float:
    """Of a sharded sequence each process keeps its heads of all tokens, at least one head."""
    share = token_share(piece, sp_size, process)
    return max(share, 1 / num_kv_heads) if piece.placement == SHARDED else share
