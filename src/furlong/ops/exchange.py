"""How the rows of a level travel between the processes of its place.

On the way in a process sends its rows of queries, one part of their heads to each process of its
block, and its rows of keys and values, one part of theirs to each process of the place (a head that
several processes need goes to each of them). What comes in from a block is in the order of its
rows. The way back goes the same roads: parts of heads are put together again, and what several
processes return of one head, or of gathered keys, is added up.

    u  processes of a block;  t  local rows;  L  rows of a block;  S  those of all blocks;  H  head
    dim;  M, m  heads of a tensor, and those of them that one process gets;  w  heads of several
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from furlong.plan.rows import Level


class Exchange(Protocol):
    """All-to-alls between the processes of a pool."""

    def start(
        self, x: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int], size: int
    ) -> Callable[[], Tensor]:
        """Send rows of x (rows, H) to each process of the place of `size` that this process is in,
        `send_rows` of them; the call that is returned waits for theirs (sum of `recv_rows`, H).

        All processes of a pool start their exchanges in an order that they agree on.
        """
        ...


def send_in(
    exchange: Exchange, level: Level, queries: Sequence[Tensor], keys: Sequence[Tensor]
) -> Callable[[], Tensor]:
    """Start the way in of local rows: `queries` (M, t, H) within the block, `keys` to all."""
    to_block = _split(level, (*queries, *keys))
    to_others = _split(level, keys) if keys and level.num_blocks > 1 else to_block[:, :, :0]
    parts = [to_block if b == level.block else to_others for b in range(level.num_blocks)]
    x = torch.cat([part.flatten(0, 2) for part in parts]) if len(parts) > 1 else parts[0]
    rows, widths = num_local(level), _widths(level, to_block.shape[2], to_others.shape[2])
    return exchange.start(
        x.reshape(-1, x.shape[-1]), [rows * width for width in widths],
        _products(level.shares, widths), level.size,
    )  # fmt: skip


def received(level: Level, x: Tensor, queries: Sequence[int], keys: Sequence[int]) -> list[Tensor]:
    """By block, the rows (w, L, H) that came in: of all tensors from the process's own block, of
    keys from the others. `queries`, `keys`: the heads of each tensor before it was sent."""
    narrow = sum(part_of(level, heads) for heads in keys)
    wide = narrow + sum(part_of(level, heads) for heads in queries)
    found, start = [], 0
    for block, rows in enumerate(level.block_rows):
        width = wide if block == level.block else narrow
        part = x[start : start + rows * width]
        found.append(part.view(rows, width, x.shape[-1]).transpose(0, 1))
        start += rows * width
    return found


def in_token_order(level: Level, blocks: Sequence[Tensor]) -> Tensor:
    """Gathered rows (w, S, H) in token order, of each block's (w, L, H)."""
    return torch.cat([blocks[block][:, start:stop] for block, start, stop in level.key_runs], 1)


def by_block(level: Level, x: Tensor) -> list[Tensor]:
    """Rows (w, L, H) of each block, of gathered rows (w, S, H) in token order."""
    found = [x.new_empty((x.shape[0], rows, x.shape[2])) for rows in level.block_rows]
    row = 0
    for block, start, stop in level.key_runs:
        found[block][:, start:stop] = x[:, row : row + stop - start]
        row += stop - start
    return found


def send_back(
    exchange: Exchange, level: Level, blocks: Sequence[Sequence[Tensor]]
) -> Callable[[], Tensor]:
    """Start the way back of tensors (m, L, H) by block: those of the process's own block, and of
    the others as many of keys as came in."""
    each = [sum(x.shape[0] for x in tensors) for tensors in blocks]
    other = next((width for block, width in enumerate(each) if block != level.block), 0)
    parts = [torch.cat([x.transpose(0, 1) for x in tensors], 1) for tensors in blocks if tensors]
    x = torch.cat([part.flatten(0, 1) for part in parts]) if len(parts) > 1 else parts[0]
    rows, widths = num_local(level), _widths(level, each[level.block], other)
    return exchange.start(
        x.reshape(-1, x.shape[-1]), _products(level.shares, widths),
        [rows * width for width in widths], level.size,
    )  # fmt: skip


def returned(level: Level, x: Tensor, queries: Sequence[int], keys: Sequence[int]) -> list[Tensor]:
    """Local rows (t, M, H) of each tensor that came back; `queries` and `keys` as in `received`."""
    u, rows, head_dim = level.block_size, num_local(level), x.shape[-1]
    narrow = [part_of(level, heads) for heads in keys]
    wide = [part_of(level, heads) for heads in queries] + narrow
    of_keys: list[Tensor] = []  # from each block
    found, start = [], 0
    for block in range(level.num_blocks):
        widths = wide if block == level.block else narrow
        stop = start + u * rows * sum(widths)
        parts = x[start:stop].view(u, rows, sum(widths), head_dim)
        start = stop
        if block == level.block:
            found = list(parts[:, :, : sum(wide) - sum(narrow)].split(wide[: len(queries)], 2))
        of_keys.append(parts[:, :, sum(widths) - sum(narrow) :])
    joined = [_joined(part, heads) for part, heads in zip(found, queries, strict=True)]
    if keys:
        sums = of_keys[0] if len(of_keys) == 1 else torch.stack(of_keys).to(_wide(x)).sum(0)
        parts_of_keys = sums.split(narrow, 2)
        joined += [_joined(part, heads) for part, heads in zip(parts_of_keys, keys, strict=True)]
    return joined


def num_local(level: Level) -> int:
    """Rows of a level that the process has before the exchange."""
    return level.local[1] - level.local[0]


def part_of(level: Level, num_heads: int) -> int:
    """Heads of a tensor that one process gets."""
    return max(1, num_heads // level.block_size)


def _split(level: Level, tensors: Sequence[Tensor]) -> Tensor:
    """Local rows (M, t, H) of each tensor -> (u, t, w, H), for each process of a block."""
    u, parts = level.block_size, []
    for x in tensors:
        if x.shape[0] % u:  # fewer heads than processes: copies
            x = x.repeat_interleave(u // x.shape[0], 0)
        parts.append(x.unflatten(0, (u, -1)).transpose(1, 2))
    return torch.cat(parts, 2)


def _joined(x: Tensor, num_heads: int) -> Tensor:
    """Parts (u, t, m, H) of heads -> (t, M, H); copies of a head are added up."""
    u, rows, width, head_dim = x.shape
    x = x.transpose(0, 1).reshape(rows, u * width, head_dim)
    if u * width == num_heads:
        return x
    return x.view(rows, num_heads, u * width // num_heads, head_dim).to(_wide(x)).sum(2)


def _wide(x: Tensor) -> torch.dtype:
    """The dtype in which several values of x are added up."""
    return torch.promote_types(x.dtype, torch.float32)


def _widths(level: Level, own: int, other: int) -> list[int]:
    """Heads that travel between the process and each one of the place, of its own block and of
    others."""
    return [
        own if member // level.block_size == level.block else other
        for member in range(level.size)
    ]  # fmt: skip


def _products(rows: Sequence[int], widths: Sequence[int]) -> list[int]:
    return [n * width for n, width in zip(rows, widths, strict=True)]
