"""Exchanges of rows between processes: the all-to-all before and after attention.

In the dispatch a process sends its rows of queries, one part of their heads to each process of its
inner place (`furlong.plan.rows`), and its rows of keys and values, one part of theirs to each
process of the place; a head that several processes need goes to each of them. What comes in from an
inner place is in the order of its rows. The combine goes the same roads: parts of heads are put
together again, and what several processes return of one head, or of gathered keys, is added up.

    u  processes of an inner place;  t  local rows;  L  rows of an inner place;  S  those of all;
    M, m  heads of a tensor, and those of them that one process gets;  w  m of several tensors
    together;  H  head dim
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from furlong.plan.rows import Level


class Exchange(Protocol):
    """All-to-alls between the processes of an sp group."""

    def start(
        self, x: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int], size: int
    ) -> Callable[[], Tensor]:
        """Send rows of x (rows, H) to each process of the place of `size` that this process is in,
        `send_rows` of them; the call that is returned waits for theirs (sum of `recv_rows`, H).

        All processes of a group start their exchanges in an order that they agree on.
        """
        ...


def dispatch(
    exchange: Exchange, level: Level, queries: Sequence[Tensor], keys: Sequence[Tensor]
) -> Callable[[], Tensor]:
    """Start the dispatch of local rows: `queries` (M, t, H) to the inner place, `keys` to all."""
    to_inner = _split(level, (*queries, *keys))
    to_others = _split(level, keys) if keys and level.num_inner > 1 else to_inner[:, :, :0]
    parts = [to_inner if b == level.inner else to_others for b in range(level.num_inner)]
    x = torch.cat([part.flatten(0, 2) for part in parts]) if len(parts) > 1 else parts[0]
    rows, widths = num_local(level), _widths(level, to_inner.shape[2], to_others.shape[2])
    return exchange.start(
        x.reshape(-1, x.shape[-1]), [rows * width for width in widths],
        _products(level.shares, widths), level.size,
    )  # fmt: skip


def dispatched(
    level: Level, x: Tensor, queries: Sequence[int], keys: Sequence[int]
) -> list[Tensor]:
    """By inner place, the rows (w, L, H) that came in: of all tensors from the process's own, of
    keys from the others. `queries`, `keys`: the heads of each tensor before it was sent."""
    narrow = sum(part_of(level, heads) for heads in keys)
    wide = narrow + sum(part_of(level, heads) for heads in queries)
    found, start = [], 0
    for inner, rows in enumerate(level.inner_rows):
        width = wide if inner == level.inner else narrow
        part = x[start : start + rows * width]
        found.append(part.view(rows, width, x.shape[-1]).transpose(0, 1))
        start += rows * width
    return found


def in_token_order(level: Level, inners: Sequence[Tensor]) -> Tensor:
    """Gathered rows (w, S, H) in token order, of (w, L, H) by inner place."""
    return torch.cat([inners[inner][:, start:stop] for inner, start, stop in level.key_runs], 1)


def by_inner_place(level: Level, x: Tensor) -> list[Tensor]:
    """Rows (w, L, H) of each inner place, of gathered rows (w, S, H) in token order."""
    found = [x.new_empty((x.shape[0], rows, x.shape[2])) for rows in level.inner_rows]
    row = 0
    for inner, start, stop in level.key_runs:
        found[inner][:, start:stop] = x[:, row : row + stop - start]
        row += stop - start
    return found


def combine(
    exchange: Exchange, level: Level, inners: Sequence[Sequence[Tensor]]
) -> Callable[[], Tensor]:
    """Start the combine of tensors (m, L, H) by inner place: those of the process's own, and of
    the others as many of keys as came in."""
    each = [sum(x.shape[0] for x in tensors) for tensors in inners]
    other = next((width for inner, width in enumerate(each) if inner != level.inner), 0)
    parts = [torch.cat([x.transpose(0, 1) for x in tensors], 1) for tensors in inners if tensors]
    x = torch.cat([part.flatten(0, 1) for part in parts]) if len(parts) > 1 else parts[0]
    rows, widths = num_local(level), _widths(level, each[level.inner], other)
    return exchange.start(
        x.reshape(-1, x.shape[-1]), _products(level.shares, widths),
        [rows * width for width in widths], level.size,
    )  # fmt: skip


def combined(level: Level, x: Tensor, queries: Sequence[int], keys: Sequence[int]) -> list[Tensor]:
    """Local rows (t, M, H) of each tensor that came back; `queries`, `keys`: see `dispatched`."""
    u, rows, head_dim = level.inner_size, num_local(level), x.shape[-1]
    narrow = [part_of(level, heads) for heads in keys]
    wide = [part_of(level, heads) for heads in queries] + narrow
    of_keys: list[Tensor] = []  # from each inner place
    found, start = [], 0
    for inner in range(level.num_inner):
        widths = wide if inner == level.inner else narrow
        stop = start + u * rows * sum(widths)
        parts = x[start:stop].view(u, rows, sum(widths), head_dim)
        start = stop
        if inner == level.inner:
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
    return max(1, num_heads // level.inner_size)


def _split(level: Level, tensors: Sequence[Tensor]) -> Tensor:
    """Local rows (M, t, H) of each tensor -> (u, t, w, H), for each process of an inner place."""
    u, parts = level.inner_size, []
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
    """Heads that travel between the process and each one of the place: `own` within its inner
    place, else `other`."""
    return [
        own if member // level.inner_size == level.inner else other
        for member in range(level.size)
    ]  # fmt: skip


def _products(rows: Sequence[int], widths: Sequence[int]) -> list[int]:
    return [n * width for n, width in zip(rows, widths, strict=True)]


class AllToAll:
    """Implements `Exchange` by one process group for each size of a place."""

    def __init__(self, groups: Mapping[int, dist.ProcessGroup]) -> None:
        """`groups`: for each size of a place, the one that this process is in."""
        self._groups = groups

    def start(
        self, x: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int], size: int
    ) -> Callable[[], Tensor]:
        x = x.contiguous()
        into = x.new_empty((sum(recv_rows), x.shape[1]))
        work = dist.all_to_all_single(
            into, x, list(recv_rows), list(send_rows), group=self._groups[size], async_op=True
        )
        return partial(_arrived, work, into, x)


def _arrived(work: dist.Work, into: Tensor, sent: Tensor) -> Tensor:
    """Rows that come in, when they are there; `sent` lives until it has gone."""
    work.wait()
    return into
