"""`Backend`: the interface of attention kernels.

A backend computes one *block*: some query rows against some keys of the same sequence. Which keys a
row sees follows from positions alone, so that callers never build a mask.

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
    """Columns of v, out and dout from this one on are zeros, where values are narrower than keys
    (DeepSeek). None: values are as wide as keys."""
    squares: tuple[slice, ...] = ()
    """Consecutive ranges that cover all rows, of which there are as many as keys. Each range sees
    itself alone, causally, as at distance 0. Empty: all rows see the same keys."""

    def is_full(self, num_rows: int, num_keys: int) -> bool:
        """Whether every row sees every key."""
        in_window = self.window is None or self.distance + num_rows - 1 < self.window
        return self.distance >= num_keys - 1 and in_window

    def is_causal(self, num_rows: int, num_keys: int) -> bool:
        """Whether this is the plain causal square: row t sees keys 0..t."""
        in_window = self.window is None or self.window >= num_rows
        return self.distance == 0 and num_rows == num_keys and in_window

    def visible_rows(self, num_rows: int, num_keys: int) -> int:
        """Return the number of leading rows that see a key; later rows are beyond the window."""
        if self.window is None:
            return num_rows
        return max(0, min(num_rows, num_keys - 1 + self.window - self.distance))

    def visible_keys(self, start: int, stop: int, num_keys: int) -> tuple[int, int]:
        """Return the range of keys that at least one of rows [start, stop) sees."""
        first = 0 if self.window is None else self.distance + start - self.window + 1
        return max(0, first), min(num_keys, self.distance + stop)

    def num_pairs(self, num_rows: int, num_keys: int) -> int:
        """Return the number of (row, key) pairs in which the row sees the key."""
        if self.squares:
            alone = replace(self, squares=())
            lens = [rows.stop - rows.start for rows in self.squares]
            if self.window is None:  # fast: the host counts at each call
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
        """Return the rule for the part of the block that starts at this row and this key."""
        return replace(self, distance=self.distance + row - key)

    def mask(self, num_rows: int, num_keys: int, device: torch.device) -> Tensor:
        """Return a (T, S) bool mask, True where the row sees the key; for single tiles only."""
        rows = self.distance + torch.arange(num_rows, device=device)[:, None]
        keys = torch.arange(num_keys, device=device)[None, :]
        seen = keys <= rows
        return seen if self.window is None else seen & (keys > rows - self.window)


@dataclass(slots=True)
class Tally:
    """Calls and FLOPs of attention kernels, counted by the kernel's name.

    The name of the chosen backend does not tell which kernels run, since some backends cut a block
    and compute its parts with several kernels.
    """

    calls: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    """For each (row, key) pair, head and head dimension: 4 in a forward, 10 in a backward."""

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
    """Attention kernels for one block.

    Tensors may have any strides. Log-sum-exps are float32, or float64 for float64 inputs.
    """

    tally: Tally | None = None
    """Counts the calls of GPU kernels; None: no count."""

    def count(
        self, kernel: str, q: Tensor, k: Tensor, block: Block, *, backward: bool = False
    ) -> None:
        """Count a call of a kernel on q (N, T, H) and k (K, S, H)."""
        if self.tally is not None:
            pairs = block.num_pairs(q.shape[1], k.shape[1])
            self.tally.calls[kernel] += 1
            flops = (10 if backward else 4) * pairs * q.shape[0] * q.shape[2]
            self.tally.flops[kernel] += flops

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Map q (N, T, H), k and v (K, S, H) to out (N, T, H) in q's dtype and lse (N, T).

        A row that sees no key gets zeros and a log-sum-exp of -inf. A block with `squares` may be
        computed in one call, or square by square (`each_square`).
        """
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this block's part of dq (N, T, H), dk and dv (K, S, H).

        `out` and `lse` are merged over all blocks of a row. dk and dv may have lse's dtype.
        """
        ...


def each_square(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, block: Block
) -> tuple[Tensor, Tensor]:
    """Run the backend's `forward` on each of a block's squares (`Block.squares`)."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=lse_dtype(q.dtype))
    alone = replace(block, squares=())
    for rows in block.squares:
        out[:, rows], lse[:, rows] = backend.forward(q[:, rows], k[:, rows], v[:, rows], alone)
    return out, lse


def each_square_backward(
    backend: Backend, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    block: Block,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run the backend's `backward` on each of a block's squares (`Block.squares`)."""
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
    """Merge attention over other keys into out (N, T, H) and lse (N, T), both in lse's dtype.

    The two sets of keys must be disjoint, and each row must see a key in at least one set.
    """
    share = torch.sigmoid(other_lse - lse)  # exp(other_lse) / (exp(lse) + exp(other_lse))
    torch.logaddexp(lse, other_lse, out=lse)
    out.lerp_(other_out.to(lse.dtype), share[..., None])
