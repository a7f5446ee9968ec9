"""Attention of one level: its rows come in, are attended to with this process's heads, and go back.

t  local rows of the level;  L  query rows after the exchange;  S  keys after it;  N, K, H  heads
and head dim of the layer;  n, m  query and key-value heads of this process
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from furlong.errors import UnsupportedModelError
from furlong.ops.exchange import (
    Exchange,
    by_inner_place,
    in_token_order,
    part_of,
    received,
    returned,
    send_back,
    send_in,
)
from furlong.ops.layer_kv import AttentionRule, LayerKV
from furlong.ops.slice_attention import Gathered, SliceAttention, store_slices
from furlong.plan.rows import Level


class LevelAttention:
    """One level in one layer, from the start of its way in to the end of its way back."""

    def __init__(
        self, level: Level, exchange: Exchange | None, num_heads: int, num_kv_heads: int
    ) -> None:
        """`num_heads`: query heads of the layer, 0 if keys and values alone travel."""
        assert exchange is not None, f"a place of {level.size} processes needs an exchange"
        u = level.inner_size
        if num_heads % u or (num_kv_heads % u and u % num_kv_heads):
            raise UnsupportedModelError(
                given=f"attention with {num_heads} query and {num_kv_heads} key-value heads, which "
                f"{u} processes cannot divide among them",
                required="layers with the heads that the model's config names",
                source="the model's attention",
                change="use parallel: {sp: 1}",
            )
        self.level, self._exchange = level, exchange
        self._queries, self._keys = num_heads, (num_kv_heads, num_kv_heads)
        self._n, self._m = part_of(level, num_heads), part_of(level, num_kv_heads)
        self._way: Callable[[], Tensor] | None = None

    @property
    def heads(self) -> slice:
        """This process's query heads."""
        inner = self.level.member % self.level.inner_size
        return slice(inner * self._n, (inner + 1) * self._n)

    def start(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> None:
        """Start the way in of the level's rows of `queries` (N, T, H) and `keys` (K, T, H)."""
        own = slice(*self.level.local)
        each = [x[:, own] for x in queries], [x[:, own] for x in keys]
        self._way = send_in(self._exchange, self.level, *each)

    def store(self, layer_kv: LayerKV, rule: AttentionRule) -> None:
        """Store keys and values that came in without queries."""
        x = self._arrived()
        inners = received(self.level, x, (), self._keys)
        kv = in_token_order(self.level, inners) if len(inners) > 1 else inners[0]
        store_slices(self.level.slices, kv[: self._m], kv[self._m :], layer_kv, rule)

    def forward(
        self, attention: SliceAttention, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend to q, k, v that came in, store k and v, start the way back of out.

        What came in, out (n, L, H) and lse (n, L): the backward takes them again.
        """
        x = self._arrived()
        (q,), k, v, gathered = self._unpacked(x, 1)
        of = (k, v) if gathered is None else (gathered.k, gathered.v)
        store_slices(self.level.slices, *of, attention.layer_kv, attention.rule)
        own_sinks = None if sinks is None else sinks[self.heads]
        out, lse = attention.forward(q, k, v, own_sinks, gathered)
        self._send_back((out,), ())
        return x, out, lse

    def returned_out(self) -> Tensor:
        """out (t, N, H) of the local rows."""
        return returned(self.level, self._arrived(), (self._queries,), ())[0]

    def backward(
        self, attention: SliceAttention, lse: Tensor, before: tuple[Tensor, Tensor] | None, *,
        needs_kv: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Start the way back of dq, dk, dv; returns dout and out (n, L, H), for the sinks.

        `before`: what came in to the forward, and its out. Only dout comes in then, and without it
        dout, out, q, k and v.
        """
        x = self._arrived()
        if before is None:
            (dout, out, q), k, v, gathered = self._unpacked(x, 3)
        else:
            (q,), k, v, gathered = self._unpacked(before[0], 1)
            inners = received(self.level, x, (self._queries,), ())
            dout, out = inners[self.level.inner], before[1]
        if gathered is not None:
            gathered = Gathered(
                gathered.k, gathered.v, *(_zeros(y, lse) for y in (gathered.k, gathered.v))
            )
        dq, dk, dv = attention.backward(dout, q, k, v, out, lse, gathered, needs_kv=needs_kv)
        if gathered is None:
            self._send_back((dq, dk.to(q.dtype), dv.to(q.dtype)), ())
        else:
            assert gathered.dk is not None and gathered.dv is not None
            keys = by_inner_place(self.level, torch.cat((gathered.dk, gathered.dv)))
            keys[self.level.inner] += torch.cat((dk, dv))
            self._send_back((dq,), [x.to(q.dtype) for x in keys])
        return dout, out

    def returned_gradients(self) -> list[Tensor]:
        """dq (t, N, H), dk and dv (t, K, H) of the local rows."""
        return returned(self.level, self._arrived(), (self._queries,), self._keys)

    def send_nothing_back(self, like: Tensor, *, gradients: bool) -> None:
        """Start the way back of zeros in the place of out, or of dq, dk and dv; `like` (H,)."""
        rows = self.level.inner_rows
        own = like.expand(self._n, self.level.num_queries, -1)
        keys = [like.expand(2 * self._m, num_rows, -1) for num_rows in rows]
        if gradients and self.level.num_inner == 1:
            self._send_back((own, *keys), ())
        else:
            self._send_back((own,), keys if gradients else ())

    def wait(self) -> None:
        """Wait for what is under way."""
        self._arrived()

    def _arrived(self) -> Tensor:
        assert self._way is not None
        way, self._way = self._way, None
        return way()

    def _unpacked(
        self, x: Tensor, num_queries: int
    ) -> tuple[Sequence[Tensor], Tensor, Tensor, Gathered | None]:
        """Query tensors (n, L, H), k and v (m, L, H) of the same rows, and what was gathered."""
        level, m = self.level, self._m
        inners = received(level, x, (self._queries,) * num_queries, self._keys)
        *queries, k, v = inners[level.inner].split((self._n,) * num_queries + (m, m))
        if level.num_inner == 1:
            return queries, k, v, None
        kv = in_token_order(level, [inner[-2 * m :] for inner in inners])
        return queries, k, v, Gathered(kv[:m], kv[m:])

    def _send_back(self, own: Sequence[Tensor], keys: Sequence[Tensor]) -> None:
        """`own` (w, L, H) within the inner place, `keys` (w, L, H) of each inner place to it."""
        each = [[y] for y in keys] or [[] for _ in range(self.level.num_inner)]
        each[self.level.inner] = [*own, *each[self.level.inner]]
        self._way = send_back(self._exchange, self.level, each)


def _zeros(x: Tensor, lse: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=lse.dtype, device=x.device)
