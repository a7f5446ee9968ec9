"""All-to-alls of sequence parallelism: the dispatch before attention, the combine after it.

A sequence-parallel group consists of one or more inner groups (`furlong.plan.rows`). The processes
of an inner group divide the heads among them, so that each computes attention for one part of the
heads.

In the dispatch a process sends its rows of queries to its inner group, and its rows of keys and
values to the whole group. Each process gets its part of the heads; a head that several processes
need goes to each of them. The rows that arrive from an inner group are in that group's order.

The combine is the reverse: a process gets results for its rows, and joins the parts of heads again.
Several processes may have results for one head, or for gathered keys; these results are summed.

    u  processes of an inner group;  t  local rows;  L  rows of an inner group;  S  rows of all;
    M, m  heads of a tensor, and how many of them one process gets;  w  sum of m over several
    tensors;  H  head dim
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
    """All-to-alls between the processes of a sequence-parallel group."""

    def start(
        self, x: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int], size: int
    ) -> Callable[[], Tensor]:
        """Start an all-to-all of x (sum of `send_rows`, H) in this process's group of `size`.

        All processes must start their exchanges in the same order.

        Returns:
            A function that waits for and returns the rows of the others (sum of `recv_rows`, H).
        """
        ...


def dispatch(
    exchange: Exchange, level: Level, queries: Sequence[Tensor], keys: Sequence[Tensor]
) -> Callable[[], Tensor]:
    """Start the dispatch, the all-to-all before attention, of local rows (M, t, H): `queries` go to
    the processes of the inner group, `keys` to all processes of the group. Return a function that
    waits for the rows of the other processes and returns them, to be split by `dispatched`."""
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
    """Split dispatched rows x into one tensor (w, L, H) for each inner group, in the order of the
    groups. The tensor of this process's inner group has heads of queries, then of keys; those of
    other inner groups have heads of keys only.

    `queries`, `keys`: number of heads of each tensor before it was sent.
    """
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
    """Join the rows of all inner groups. `inners`: one tensor (w, L, H) for each inner group.
    Return (w, S, H), in token order."""
    return torch.cat([inners[inner][:, start:stop] for inner, start, stop in level.key_runs], 1)


def by_inner_place(level: Level, x: Tensor) -> list[Tensor]:
    """Split rows x (w, S, H), which are in token order, into the rows of each inner group. Return
    one tensor (w, L, H) for each: the inverse of `in_token_order`."""
    found = [x.new_empty((x.shape[0], rows, x.shape[2])) for rows in level.inner_rows]
    row = 0
    for inner, start, stop in level.key_runs:
        found[inner][:, start:stop] = x[:, row : row + stop - start]
        row += stop - start
    return found


def combine(
    exchange: Exchange, level: Level, inners: Sequence[Sequence[Tensor]]
) -> Callable[[], Tensor]:
    """Start the combine, the all-to-all after attention. Return a function that waits for the
    results from other processes and returns them, to be split by `combined`.

    `inners`: for each inner group, the tensors (m, L, H) that go to its processes. This process's
    inner group gets results for queries and keys. Each other inner group gets results for keys
    alone; these have equally many heads for all groups.
    """
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
    """Split combined rows x into one tensor (t, M, H) of local rows for each of the tensors that
    were dispatched: those of queries, then those of keys.

    `queries`, `keys`: number of heads of each tensor (see `dispatched`).
    """
    u, rows, head_dim = level.inner_size, num_local(level), x.shape[-1]
    narrow = [part_of(level, heads) for heads in keys]
    wide = [part_of(level, heads) for heads in queries] + narrow
    of_keys: list[Tensor] = []  # one from each inner group
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
    """Return the number of rows of a level (the slices that one sequence-parallel group shares)
    that this process holds before the dispatch."""
    return level.local[1] - level.local[0]


def part_of(level: Level, num_heads: int) -> int:
    """Return the number of heads that one process gets of a tensor with `num_heads` heads: an equal
    part of them, at least one."""
    return max(1, num_heads // level.inner_size)


def _split(level: Level, tensors: Sequence[Tensor]) -> Tensor:
    """Split local rows (M, t, H) of each tensor by heads. Return (u, t, w, H): for each process of
    an inner group, its heads of all tensors. If a tensor has fewer heads than processes, several
    processes get copies of a head."""
    u, parts = level.inner_size, []
    for x in tensors:
        if x.shape[0] % u:  # fewer heads than processes: several get copies of one
            x = x.repeat_interleave(u // x.shape[0], 0)
        parts.append(x.unflatten(0, (u, -1)).transpose(1, 2))
    return torch.cat(parts, 2)


def _joined(x: Tensor, num_heads: int) -> Tensor:
    """Join the parts of heads that u processes have sent, x (u, t, m, H), to (t, M, H), where M is
    `num_heads`. If several processes have sent results for the same head, these are summed."""
    u, rows, width, head_dim = x.shape
    x = x.transpose(0, 1).reshape(rows, u * width, head_dim)
    if u * width == num_heads:
        return x
    return x.view(rows, num_heads, u * width // num_heads, head_dim).to(_wide(x)).sum(2)


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype in which values of x are summed: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def _widths(level: Level, own: int, other: int) -> list[int]:
    """Return a list with the number of heads exchanged with each process of the group: `own` for
    processes of this process's inner group, `other` for all other processes."""
    return [
        own if member // level.inner_size == level.inner else other
        for member in range(level.size)
    ]  # fmt: skip


def _products(rows: Sequence[int], widths: Sequence[int]) -> list[int]:
    return [n * width for n, width in zip(rows, widths, strict=True)]


class AllToAll:
    """Implements `Exchange` with `torch.distributed` process groups."""

    def __init__(self, groups: Mapping[int, dist.ProcessGroup]) -> None:
        """`groups`: size -> this process's group of that size."""
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


def pass_on(
    exchange: Exchange, size: int, process: int, way: tuple[int, int], given: Sequence[Tensor],
    forms: Sequence[tuple[torch.Size, torch.dtype]], device: torch.device,
) -> list[Tensor]:  # fmt: skip
    """Send tensors from one process of a group to another, in an all-to-all that each process of
    the group enters. Return the tensors on the process that gets them, which waits for them; an
    empty list on the others.

    Args:
        size: Processes of the group.
        process: Number of this process in the group.
        way: (number of the sender, number of the receiver).
        given: The sender's tensors; not read elsewhere.
        forms: (shape, dtype) of each tensor.
    """
    source, target = way
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in forms]
    send, recv, x = [0] * size, [0] * size, torch.empty(0, dtype=torch.uint8, device=device)
    if process == source:
        forms_given = [(own.shape, own.dtype) for own in given]
        assert forms_given == list(forms), f"states {forms_given}, expected {list(forms)}"
        x = torch.cat([own.detach().contiguous().view(-1).view(torch.uint8) for own in given])
        send[target] = sum(sizes)
    if process == target:
        recv[source] = sum(sizes)
    arrived = exchange.start(x[:, None], send, recv, size)
    if process != target:
        return []
    parts = arrived()[:, 0].split(sizes)
    # a copy each: a part of the bytes may begin where no element of its dtype can
    return [
        part.clone().view(dtype).view(shape)
        for part, (shape, dtype) in zip(parts, forms, strict=True)
    ]


def _arrived(work: dist.Work, into: Tensor, sent: Tensor) -> Tensor:
    """Wait for the rows that arrive, and return them; `sent` must live until then."""
    work.wait()
    return into
