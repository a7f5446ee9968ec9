"""The KVStore: per sequence and layer, what later chunks need of earlier ones.

K,V of a cut sequence, states of its recurrent layers (`furlong.kv.states`), and the gradients that
later chunks send (float32 where K,V have 16 bits), made when the first one arrives. With a sliding
window of w tokens only the last w-1 tokens of a chunk are kept: no later token sees the others, and
what a later chunk sees stays contiguous, along its path where a sequence branches. With attention
blocks only those of the block that is open at its end are kept. They lie in segments, the unit of
freeing and of tiers (`furlong.plan.segments` says how they are cut).

Without a pool everything is in the arena. With one, segments travel, and bytes are counted by

    S_p   stored tokens before piece p;  e_i  the end of segment i;  K_i, G_i  bytes of its K,V
          and of its gradients;  P_p  the segments that hold some of what piece p sees, that is
          of the last min(S_p, window - 1) of these tokens;  h  `num_hot`;  N  pieces

    forward of piece p        written  sum of K_i over S_p < e_i <= S_(p+1)
                              read     sum of K_i over P_p with e_i <= S_min(p+1, N-1)
    recompute of piece p      read     sum of K_i over P_p
    backward of piece p       read     sum of K_i over P_p
                              written  sum of G_i over P_p without its newest h
    all backwards together    read     as many bytes of G as are written

for one layer, pieces written in order and their backwards in the opposite order, each once. The
gradients of a segment are read whenever they meet the next later piece, but for the first time, and
once more when they become one of the newest or are relayed. What attention does not run (a
recompute from remembered outputs) reads nothing. A piece that is freed and written again while its
segment is alive costs one read and one write of the segment more.

In the arena lie meanwhile, per sequence and layer: K,V of the segment that fills, the gradients of
the newest `num_hot` segments and of those behind them that still wait for their own backward.

    K key-value heads, S stored tokens, H head dim; `piece` is a chunk's position in its group
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from furlong.kv.arena import Arena
from furlong.kv.layer_segments import LayerSegments
from furlong.kv.pools.contract import Pool
from furlong.kv.pools.device import DevicePool
from furlong.kv.segments import StoredBlock
from furlong.kv.states import StateStore
from furlong.plan.segments import NUM_HOT, StoredTokens, segment_tokens
from furlong.plan.trees import Tree

_MAX_FORWARD_TOKENS = 65_536
_MAX_BACKWARD_TOKENS = 8192
"""Keys per prefix block on the device; in the backward it bounds what a kernel call returns."""


class KVStore:
    """K,V blocks of cut sequences, in the arena or in a pool."""

    def __init__(
        self,
        arena: Arena,
        pieces: Mapping[int, Sequence[int]],
        pool: Pool | None = None,
        *,
        trained: Mapping[int, Sequence[int]] | None = None,
        num_hot: int = NUM_HOT,
        trees: Mapping[int, Tree] | None = None,
    ) -> None:
        """`pieces`: for each cut sequence, the tokens of each of its pieces in order; `trained`:
        those of its pieces whose gradients are kept, ascending (None: all); `num_hot`: segments of
        a prefix, the newest, whose gradients stay in the arena beside a pool; `trees`: how the
        pieces of sequences that branch follow one another."""
        assert num_hot > 0, "a segment that two pieces share would be read for each"
        self.arena = arena
        self._pieces, self._trained, self._trees = pieces, trained, trees or {}
        self._pool = pool
        self._num_hot = num_hot
        self._layers: dict[tuple[int, int], LayerSegments] = {}
        self.states = StateStore(pool or DevicePool(arena), trained)

    def write(
        self, seq_id: int, layer: int, piece: int, k: Tensor, v: Tensor, window: int | None,
        block: int | None = None,
    ) -> None:  # fmt: skip
        """Keep a piece's k, v (K, T, H) for the pieces after it, which see `window` tokens each,
        their own included, or all (None). With attention blocks of `block` tokens they see no
        earlier one than that in which they begin."""
        k, v = k.detach(), v.detach()
        segments = self._layers.get((seq_id, layer))
        if segments is None:
            token_bytes = 2 * k.shape[0] * k.shape[2] * k.dtype.itemsize
            per_segment = segment_tokens(token_bytes, self.arena.device.type)
            tree = self._trees.get(seq_id)
            tokens = StoredTokens.of(self._pieces[seq_id], window, per_segment, tree, block)
            if self._trained is not None:
                tokens = tokens.with_gradients_of(self._trained[seq_id])
            segments = LayerSegments(self.arena, self._pool, tokens, k, self._num_hot)
            self._layers[seq_id, layer] = segments
        segments.write(piece, k, v)

    def prefix(
        self, seq_id: int, layer: int, piece: int, window: int | None, *, gradients: bool
    ) -> Iterator[StoredBlock]:
        """Keys and values before `piece` that its tokens see, in blocks.

        A block is valid until the next one is asked for. With `gradients` the newest comes first,
        and blocks take gradients.
        """
        segments = self._layers[seq_id, layer]
        seen = segments.tokens.seen_from(piece, window)
        segments.require_alive(seen, f"sequence {seq_id}")
        if self._pool is not None:
            return segments.streamed(seen, gradients=gradients)
        max_tokens = _MAX_BACKWARD_TOKENS if gradients else _MAX_FORWARD_TOKENS
        return segments.blocks(seen, gradients=gradients, max_tokens=max_tokens)

    def relayed(self, seq_id: int, layer: int, piece: int) -> tuple[int, Tensor, Tensor] | None:
        """(index within the piece of the first kept token, dK, dV (K, kept tokens, H)) that later
        pieces have sent, or None if they sent nothing. Valid until the next call on the store."""
        segments = self._layers.get((seq_id, layer))
        if segments is None:
            return None
        sent = segments.relayed(piece)
        if sent is None:
            return None
        first = segments.tokens.lens[piece] - sent.shape[0]
        return first, sent[:, 0].transpose(0, 1), sent[:, 1].transpose(0, 1)

    def free(self, seq_id: int, layer: int, piece: int) -> None:
        """Forget a piece; a segment goes back when the last piece that touches it is forgotten."""
        self.states.free(seq_id, layer, piece)
        segments = self._layers.get((seq_id, layer))
        if segments is None:
            return
        segments.free(piece)
        if not segments.alive:
            segments.forget()
            del self._layers[seq_id, layer]

    def clear(self) -> None:
        """Give everything back, after an error; clears the pool if anything was in it."""
        in_pool = [segments.forget_arena() for segments in self._layers.values()]
        self.states.clear()
        self._layers.clear()
        if self._pool is not None and any(in_pool):
            self._pool.clear()

    @property
    def num_buffers(self) -> int:
        """K,V of sequences in layers, and states, that are kept; 0 at the end of a step."""
        return len(self._layers) + self.states.num_buffers
