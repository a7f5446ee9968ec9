"""The rows of a chunk on each process, before and after the all-to-alls of sequence parallelism.

A place is the sequence-parallel group of a slice. A process is in one place of each size. A `Level`
is the rows of all slices of a chunk that are on one place, concatenated. Before the exchange (an
all-to-all) each process of the place has an equal part of these rows, with all heads. After the
exchange it has all rows, with its part of the heads.

If the place has more processes than the heads can be divided among, it is split into equal
subgroups (inner places). Queries are then exchanged within a subgroup, and keys and values are
gathered from the whole place. Inputs, attention, messages and losses all use these rows.

    s  processes of the place;  u  processes that divide the heads;  c = s / u  inner places
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd
from operator import attrgetter

from furlong.plan.plan import Chunk, Slice

RowRun = tuple[int, int, int]
"""Consecutive rows: (owner, start, stop); the owner is a sequence, a slice or an inner place."""


@cache
def inner_size(size: int, num_heads: int, num_kv_heads: int) -> int:
    """Return the number of processes of each inner place, for a sequence-parallel group of `size`
    processes. Inner places are equal subgroups, each of which divides the heads among its
    processes.

    The result is the largest divisor of `size` that divides the query heads evenly and leaves each
    process with whole K,V heads, or with one K,V head that several share. If it is less than
    `size`, each inner place computes attention for its part of the rows, to K,V gathered from the
    whole group.
    """
    fitting = (n for n in range(gcd(size, num_heads), 1, -1) if gcd(size, num_heads) % n == 0)
    return next((n for n in fitting if num_kv_heads % n == 0 or n % num_kv_heads == 0), 1)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens of a slice, as rows [start, stop) of the query rows of a `Level`."""

    start: int
    stop: int
    position: int
    """Position id of its first token."""


@dataclass(frozen=True, slots=True)
class PlacedSlice:
    """A slice of a chunk on one process after the all-to-all: where its queries and keys are."""

    index: int
    """Index of the slice in the chunk."""
    start: int
    """Position id of its first token."""
    stretches: tuple[Stretch, ...]
    """Its query rows: one stretch, or at most two for the part of an inner place."""
    keys: tuple[int, int]
    """(start, stop) of its rows among the keys and values in token order."""
    joins: bool = False
    """Whether it shares the prefix of the slice before it: both are branches of one parent."""

    @property
    def num_pairs(self) -> int:
        """A measure of the work of the slice: about twice the number of its query-key pairs, over
        all processes of its sequence-parallel group."""
        num_tokens = self.keys[1] - self.keys[0]
        return num_tokens * (2 * self.start + num_tokens)


@dataclass(frozen=True)
class Level:
    """The rows that a process exchanges within one of its sequence-parallel groups (a place)."""

    size: int
    """Processes of the place; 1: nothing is exchanged."""
    inner_size: int
    """Processes that divide the heads. If fewer than `size`, the place has several inner places,
    and keys and values are gathered."""
    member: int
    """The process's rank in the place."""
    local: tuple[int, int]
    """(start, stop) of the level's rows before the exchange, among the process's rows of the
    chunk."""
    shares: tuple[int, ...]
    """Rows of each process of the place before the exchange."""
    slices: tuple[PlacedSlice, ...]
    key_runs: tuple[RowRun, ...] = ()
    """The keys in token order, as (inner place, start, stop) of rows gathered from it; empty with a
    single inner place, whose keys are in token order."""

    @property
    def num_inner(self) -> int:
        return self.size // self.inner_size

    @property
    def inner(self) -> int:
        """Index of the inner place (subgroup of processes) that the process is in."""
        return self.member // self.inner_size

    @cached_property
    def inner_rows(self) -> tuple[int, ...]:
        """Number of rows of each inner place (subgroup that divides the heads), summed over its
        processes."""
        u = self.inner_size
        return tuple(sum(self.shares[b * u : (b + 1) * u]) for b in range(self.num_inner))

    @property
    def num_queries(self) -> int:
        """Number of query rows after the exchange: all rows of the process's inner place."""
        return self.inner_rows[self.inner]


@dataclass(frozen=True)
class ChunkRows:
    """The rows of a chunk on one process of a pool, by level (sequence-parallel group)."""

    levels: tuple[Level, ...]
    """Levels by falling size of their place: the order in which all processes exchange."""
    tokens: tuple[RowRun, ...]
    """(seq_id, start, stop) of the process's rows before the exchange, in row order."""

    @cached_property
    def num_tokens(self) -> int:
        return sum(stop - start for _, start, stop in self.tokens)

    @property
    def num_rows(self) -> int:
        """Number of rows of hidden states. A process without tokens computes one row of no
        sequence, since a model needs at least one."""
        return max(1, self.num_tokens)

    @cached_property
    def exchanged(self) -> tuple[Level, ...]:
        return tuple(level for level in self.levels if level.size > 1)

    @cached_property
    def own(self) -> Level | None:
        """The `Level` of the slices that lie on this process alone, whose rows are not exchanged;
        None if there are no such slices."""
        return next((level for level in self.levels if level.size == 1), None)

    def runs(self) -> Iterator[tuple[RowRun, int]]:
        """Yield ((seq_id, start, stop), its first row) for each run of consecutive tokens."""
        return _with_rows(self.tokens)


def _with_rows(runs: Iterable[RowRun]) -> Iterator[tuple[RowRun, int]]:
    """Yield (run, its first row) for each run; the rows of `runs` follow one another from row 0
    on."""
    row = 0
    for run in runs:
        yield run, row
        row += run[2] - run[1]


def rows_of(
    chunk: Chunk, process: int, *, sp_size: int, q_heads: int, kv_heads: int,
    position: Callable[[Slice], int] = attrgetter("start"),
) -> ChunkRows:  # fmt: skip
    """Return the rows of a chunk on `process` of a pool of `sp_size` processes, for a model with
    `q_heads` query heads and `kv_heads` key-value heads. `position` returns the position id of a
    slice's first token, which in a branch differs from the token's index."""
    assert 0 <= process < sp_size, f"process {process} of a pool of {sp_size}"
    by_size: dict[int, list[tuple[int, Slice]]] = {}
    for index, piece in enumerate(chunk.slices):
        if piece.place.first <= process < piece.place.stop:
            by_size.setdefault(piece.place.size, []).append((index, piece))
    levels: list[Level] = []
    tokens: list[RowRun] = []
    row = 0
    for size in sorted(by_size, reverse=True):
        member = process - by_size[size][0][1].place.first
        u = inner_size(size, q_heads, kv_heads)
        level, runs = _level(by_size[size], size, u, member, row, position)
        levels.append(level)
        tokens += runs
        row = level.local[1]
    return ChunkRows(tuple(levels), tuple(tokens))


def _level(
    slices: Sequence[tuple[int, Slice]], size: int, u: int, member: int, row: int,
    position: Callable[[Slice], int],
) -> tuple[Level, list[RowRun]]:  # fmt: skip
    """Return (level, runs) of `slices`, all on one place of `size` processes, for process `member`
    of the place.

    `runs` are the tokens that the process has before the exchange, as (seq_id, start, stop). The
    level begins at row `row` of the process. `slices`: (index in the chunk, slice) of each. `u`:
    number of processes that divide the heads.
    """
    num_inner, own_inner = size // u, member // u
    inners = [_inner_runs([piece for _, piece in slices], b, num_inner) for b in range(num_inner)]
    totals = [sum(stop - start for _, start, stop in runs) for runs in inners]
    shares = [
        totals[b] * (i + 1) // u - totals[b] * i // u for b in range(num_inner) for i in range(u)
    ]
    inner, total = member % u, totals[own_inner]
    part = range(total * inner // u, total * (inner + 1) // u)
    level = Level(
        size, u, member, (row, row + len(part)), tuple(shares),
        _placed(slices, inners[own_inner], position), _key_runs(inners) if num_inner > 1 else (),
    )  # fmt: skip
    numbered = [(slices[at][1].seq_id, start, stop) for at, start, stop in inners[own_inner]]
    return level, _cut(numbered, part)


def _inner_runs(slices: Sequence[Slice], inner: int, num_inner: int) -> list[RowRun]:
    """Return the query tokens of subgroup `inner` as runs (index of the slice, start, stop).

    Each slice is cut into 2c parts (c = `num_inner`), and subgroup b computes parts b and 2c-1-b,
    so that all subgroups have equal work under the causal mask.
    """
    if num_inner == 1:
        return [(at, piece.start, piece.stop) for at, piece in enumerate(slices)]
    runs: list[RowRun] = []
    last = 2 * num_inner - 1
    for at, piece in enumerate(slices):
        for part in (inner, last - inner):
            start, stop = (piece.num_tokens * p // (last + 1) for p in (part, part + 1))
            if start < stop:
                runs.append((at, piece.start + start, piece.start + stop))
    return runs


def _placed(
    slices: Sequence[tuple[int, Slice]], runs: Sequence[RowRun], position: Callable[[Slice], int]
) -> tuple[PlacedSlice, ...]:
    """Return a `PlacedSlice` for each of `slices`: which rows its queries and keys have on a
    process after the exchange. `runs`: the query tokens of the process's inner place, in row order,
    as (index of the slice, start, stop)."""
    stretches: list[list[Stretch]] = [[] for _ in slices]
    for (at, start, stop), row in _with_rows(runs):
        piece = slices[at][1]
        first = position(piece) + start - piece.start
        stretches[at].append(Stretch(row, row + stop - start, first))
    found: list[PlacedSlice] = []
    key, before = 0, -1
    for (index, piece), own in zip(slices, stretches, strict=True):
        keys = (key, key + piece.num_tokens)
        joins = piece.seq_id == before
        found.append(PlacedSlice(index, position(piece), tuple(own), keys, joins))
        key, before = keys[1], piece.seq_id
    return tuple(found)


def _key_runs(inners: Sequence[Sequence[RowRun]]) -> tuple[RowRun, ...]:
    """Return an index that puts gathered keys into token order: runs (inner place, start, stop),
    each of which is rows [start, stop) of the keys of an inner place. `inners`: for each inner
    place its query tokens, in row order."""
    found = sorted(
        ((at, start), (inner, row, row + stop - start))
        for inner, runs in enumerate(inners)
        for (at, start, stop), row in _with_rows(runs)
    )
    return tuple(run for _, run in found)


def _cut(runs: Sequence[RowRun], rows: range) -> list[RowRun]:
    """Return those tokens of the concatenated `runs` that lie in `rows`."""
    found: list[RowRun] = []
    for (seq_id, start, stop), row in _with_rows(runs):
        first, end = max(rows.start, row), min(rows.stop, row + stop - start)
        if first < end:
            found.append((seq_id, start + first - row, start + end - row))
    return found
