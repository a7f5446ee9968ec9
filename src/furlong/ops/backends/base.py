"""The signature behind which attention kernels are exchanged.

A backend computes one *block*: some query rows against some keys of the same sequence. Which keys a
row sees follows from positions alone, so no caller ever builds a mask.

    T query rows, S keys, N query heads, K key-value heads (N a multiple of K), H head dim"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Block:
    """Which keys of a block the query rows see, and how scores are formed.

    Row t sits `distance + t` tokens after the block's first key. It sees key s if
    `s <= distance + t` and, with a window, `s > distance + t - window`.
    """

    distance: int
    scale: float
    window: int | None = None
    """Sliding window in tokens, the row's own token included."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)` (Gemma 2)."""
    value_width: int | None = None
    """Columns of v from this one on are zeros, and so are those of out and dout: values that are
    narrower than keys (DeepSeek)."""
    squares: tuple[slice, ...] = ()
    """Rows behind one another that cover all, as many as keys: each slice of them sees itself
    alone, causally, as at distance 0. Empty: all rows see the same keys."""

    def is_full(self, num_rows: int, num_keys: int) -> bool:
        """Whether every row sees every key."""
        in_window = self.window is None or self.distance + num_rows - 1 < self.window
        return self.distance >= num_keys - 1 and in_window

    def is_causal(self, num_rows: int, num_keys: int) -> bool:
        """Whether this is the plain causal square: row t sees keys 0..t."""
        in_window = self.window is None or self.window >= num_rows
        return self.distance == 0 and num_rows == num_keys and in_window

    def visible_rows(self, num_rows: int, num_keys: int) -> int:
        """How many first rows see at least one key; the rows after them are beyond the window."""
        if self.window is None:
            return num_rows
        return max(0, min(num_rows, num_keys - 1 + self.window - self.distance))

    def visible_keys(self, start: int, stop: int, num_keys: int) -> tuple[int, int]:
        """The range of keys that rows [start, stop) see between them."""
        first = 0 if self.window is None else self.distance + start - self.window + 1
        return max(0, first), min(num_keys, self.distance + stop)

    def num_pairs(self, num_rows: int, num_keys: int) -> int:
        """Pairs of a row and a key that it sees."""
        if self.squares:
            alone = replace(self, squares=())
            lens = [rows.stop - rows.start for rows in self.squares]
            if self.window is None:  # counted at each call, in the host's time
                return sum(n * (n + 1) // 2 for n in lens)
            return sum(alone.num_pairs(n, n) for n in lens)

        def up_to(last: int) -> int:  # sum of min(i, num_keys) for i = 1 .. last
            inside = max(0, min(last, num_keys))
            return inside * (inside + 1) // 2 + max(0, last - num_keys) * num_keys

        def of_rows(first: int) -> int:  # row t sees the first `first + t` keys
            return up_to(first + num_rows - 1) - up_to(first - 1)

        before = 0 if self.window is None else of_rows(self.distance + 1 - self.window)
        return of_rows(self.distance + 1) - before

    def at(self, row: int, key: int) -> Block:
        """The same rule for the sub-block that starts at this row and key."""
        return replace(self, distance=self.distance + row - key)

    def mask(self, num_rows: int, num_keys: int, device: torch.device) -> Tensor:
        """(T, S) bool, True where the row sees the key. For single tiles only."""
        rows = self.distance + torch.arange(num_rows, device=device)[:, None]
        keys = torch.arange(num_keys, device=device)[None, :]
        seen = keys <= rows
        return seen if self.window is None else seen & (keys > rows - self.window)


@dataclass(slots=True)
class Tally:
    """Calls and FLOPs of attention kernels, by the kernel's name: which one computes what, of
    blocks that are cut for several, no choice of a backend tells."""

    calls: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    """4 per pair, head and head dimension forward, 10 backward."""

    def taken(self) -> Tally:
        """Return what was counted since the last call."""
        found = Tally(self.calls, self.flops)
        self.calls, self.flops = Counter(), Counter()
        return found

    def __str__(self) -> str:
        total = max(1, self.flops.total())
        each = [f"{n / total:.1%} by {name}" for name, n in self.flops.most_common()]
        return ", ".join(each)


class Backend(Protocol):
    """Kernels for one block.

    Tensors may have any strides. Log-sum-exps are float32, or float64 for float64 inputs.
    """

    tally: Tally | None = None
    """Counts what kernels of a GPU compute."""

    def count(
        self, kernel: str, q: Tensor, k: Tensor, block: Block, *, backward: bool = False
    ) -> None:
        """Count a call that a kernel has taken, on q (N, T, H) and k (K, S, H)."""
        if self.tally is not None:
            pairs = block.num_pairs(q.shape[1], k.shape[1])
            self.tally.calls[kernel] += 1
            flops = (10 if backward else 4) * pairs * q.shape[0] * q.shape[2]
            self.tally.flops[kernel] += flops

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """q (N, T, H), k and v (K, S, H) -> out (N, T, H) in q's dtype, lse (N, T).

        A row that sees no key gets zeros and a log-sum-exp of -inf. Squares may be one call, or
        one each (`each_square`).
        """
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients (N, T, H), (K, S, H), (K, S, H) of this block's part.

        `out` and `lse` are those of the whole row, over all of its blocks. Key and value gradients
        may come in lse's dtype.
        """
        ...


def each_square(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, block: Block
) -> tuple[Tensor, Tensor]:
    """`forward` of a block's squares, one call each."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=lse_dtype(q.dtype))
    alone = replace(block, squares=())
    for rows in block.squares:
        out[:, rows], lse[:, rows] = backend.forward(q[:, rows], k[:, rows], v[:, rows], alone)
    return out, lse


def each_square_backward(
    backend: Backend, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    block: Block,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`backward` of a block's squares, one call each."""
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    alone = replace(block, squares=())
    for rows in block.squares:
        dq[:, rows], dk[:, rows], dv[:, rows] = backend.backward(
            dout[:, rows], q[:, rows], k[:, rows], v[:, rows], out[:, rows], lse[:, rows], alone
        )
    return dq, dk, dv


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Make out (N, T, H) and lse (N, T), both in lse's dtype, attention over the keys of both.

    The two key sets are disjoint. A row must see a key of at least one of them.
    """
    share = torch.sigmoid(other_lse - lse)  # exp(other_lse) / (exp(lse) + exp(other_lse))
    torch.logaddexp(lse, other_lse, out=lse)
    out.lerp_(other_out.to(lse.dtype), share[..., None])
