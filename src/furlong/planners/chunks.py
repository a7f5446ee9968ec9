"""Groups of chunks: which tokens run together, on which processes of a pool.

A group is all pieces of one sequence in order, branches included, or one packed chunk. Groups run
in the order in which they are listed; these functions list the one with most tokens first, since a
short sequence before a long one interrupts the steady phase of a pipeline (InfiniPipe, III-C).

    split_long           pieces of equal tokens (ChunkFlow, Algorithm 1, first half)
    split_equal_work     pieces of equal work (InfiniPipe, Seq1F1B)
    pack                 whole sequences in as few chunks as best-fit-decreasing finds
    branch_chunks        sequences that branch, such as one prompt with several answers
    by_cost              the sequences of a global batch dealt to data-parallel replicas
    place_by_load        each sequence on one process or on all (Skrull, Algorithm 1)
    shard, shard_long    slices on all processes of a pool, or whole sequences on one
    chunk_by_chunk       a plan in which every chunk runs forward and backward before the next
    fitting_tokens       tokens that a device can hold at a time then

ChunkFlow tries bin counts upwards until a packing succeeds. Opening a bin only when no open one has
room gives the same count in one pass: with fewer bins the same pass would have failed.

Skrull's RollBack (Algorithm 3) has a wrong sign and leaves the other ranks out; as corrected here
places are found exactly where all tokens fit into all buckets. Rooms are counted in tokens times
the number of ranks, so that a share of a sequence is whole.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import count, pairwise
from math import sqrt

from furlong.cost.memory import PlanMemory
from furlong.cost.model import CostModel
from furlong.cost.seconds import stage_flops
from furlong.cost.shape import ModelShape
from furlong.errors import ConfigError, DataError
from furlong.plan.plan import (
    Action,
    Backward,
    Chunk,
    ChunkPlan,
    Forward,
    Place,
    Reduce,
    Slice,
)
from furlong.planners.options import ChunkOptions
from furlong.units import count_words, format_bytes

Groups = Sequence[Sequence[Chunk]]


def group_chunks(
    seq_lens: Sequence[int], options: ChunkOptions, forks: Forks | None = None
) -> list[list[Chunk]]:
    """The chunks of every cut sequence, and every packed chunk by itself; most tokens first.
    `forks`: where sequences branch."""
    refuse_unusable(seq_lens)
    forks = forks or {}
    groups = [
        [Chunk((piece,)) for piece in pieces]
        for seq_id, pieces in split_long(seq_lens, options.size).items()
        if seq_id not in forks
    ]
    groups += [branch_chunks(i, seq_lens[i], own, options.size) for i, own in forks.items()]
    cut = {group[0].slices[0].seq_id for group in groups}
    short = {seq_id: n for seq_id, n in enumerate(seq_lens) if seq_id not in cut}
    tails = [group[-1].num_tokens for group in groups] if options.hybrid else []
    bins = [
        [Slice(seq_id, 0, seq_lens[seq_id]) for seq_id in seq_ids]
        for seq_ids in pack(short, options.size, taken=tails)
    ]
    if options.hybrid:
        for group, joined in zip(groups, bins, strict=False):
            # a chunk's piece with a prefix comes first
            group[-1] = Chunk((*group[-1].slices, *joined))
    groups += [[Chunk(tuple(slices))] for slices in bins[len(tails) :]]
    return longest_first(groups)


def whole_groups(seq_lens: Sequence[int]) -> list[list[Chunk]]:
    """A group of one chunk for every sequence."""
    return sliced_groups(seq_lens, num_slices=1)


def sliced_groups(
    seq_lens: Sequence[int], *, num_slices: int, quadratic: float = 0.0, linear: float = 1.0
) -> list[list[Chunk]]:
    """A group for every sequence, cut into `num_slices` chunks of equal tokens, or with `quadratic`
    of equal work (`planners.chunks.split.split_equal_work`); Seq1F1B's two ways."""
    refuse_unusable(seq_lens)
    work = {"quadratic": quadratic, "linear": linear}
    return longest_first(
        [Chunk((piece,)) for piece in split_equal_work(seq_id, seq_len, num_slices, **work)]
        for seq_id, seq_len in enumerate(seq_lens)
    )


def refuse_unusable(seq_lens: Sequence[int]) -> None:
    """Raises DataError for a batch without sequences and for a sequence without tokens."""
    empty = next((seq_id for seq_id, seq_len in enumerate(seq_lens) if seq_len < 1), None)
    if seq_lens and empty is None:
        return
    raise DataError(
        given="no sequences" if empty is None else f"sequence {empty} has {seq_lens[empty]} tokens",
        required="at least one sequence, and at least one token in each",
        source="the lengths of the global batch",
        change="give every rank a sequence; one token without a label will do",
    )


def longest_first(groups: Iterable[Sequence[Chunk]]) -> list[list[Chunk]]:
    """The groups by falling tokens; equal ones stay in their order."""
    return sorted(map(list, groups), key=lambda group: -sum(chunk.num_tokens for chunk in group))


def split_long(seq_lens: Sequence[int], chunk_size: int) -> dict[int, list[Slice]]:
    """The pieces of every sequence longer than `chunk_size`, by its seq_id.

    All pieces but the last have `chunk_size` tokens; the last has the rest (ChunkFlow, Algorithm 1,
    first half).
    """
    return {
        seq_id: [
            Slice(seq_id, start, min(start + chunk_size, seq_len))
            for start in range(0, seq_len, chunk_size)
        ]
        for seq_id, seq_len in enumerate(seq_lens)
        if seq_len > chunk_size
    }


def split_equal_work(
    seq_id: int, seq_len: int, num_slices: int, *, quadratic: float = 0.0, linear: float = 1.0
) -> list[Slice]:
    """Pieces of one sequence that cost about the same, longest first.

    Tokens up to x cost quadratic * x^2 + linear * x (attention, and all else); the default cuts
    equal tokens. Bounds are rounded to tokens; a sequence of fewer tokens than slices gets fewer.
    """
    count = min(num_slices, seq_len)
    starts = [0]
    for bound in equal_work_bounds(seq_len, count, quadratic=quadratic, linear=linear):
        latest = seq_len - (count - len(starts))
        starts.append(min(max(round(bound), starts[-1] + 1), latest))
    return [Slice(seq_id, a, b) for a, b in pairwise(starts)]


def equal_work_bounds(
    seq_len: float, num_slices: int, *, quadratic: float, linear: float
) -> list[float]:
    """Tokens at which `num_slices` slices stop so that all cost quadratic * x^2 + linear * x alike.

    The same idea in InfiniPipe's mesh and in Seq1F1B: f(bound j) = j / num_slices * f(seq_len).
    """
    work = quadratic * seq_len**2 + linear * seq_len
    if num_slices < 1 or quadratic < 0 or linear < 0 or work <= 0:
        raise ValueError(f"no {num_slices} slices by {quadratic} x^2 + {linear} x of {seq_len}")
    shares = [work * j / num_slices for j in range(1, num_slices + 1)]
    # the root of quadratic x^2 + linear x - share in the form that also holds where quadratic is 0
    return [
        2 * share / (linear + sqrt(linear * linear + 4 * quadratic * share)) for share in shares
    ]


def pack(
    seq_lens: Mapping[int, int], chunk_size: int, *, taken: Sequence[int] = ()
) -> list[list[int]]:
    """Bins of seq_ids whose tokens fit into `chunk_size`; `seq_lens` maps seq_ids to tokens.

    `taken` offers bins that are partly filled already, each with that many tokens in it. They come
    first in the result, and stay there when nothing was added.
    """
    for seq_id, seq_len in seq_lens.items():
        if not 1 <= seq_len <= chunk_size:
            raise DataError(
                given=f"sequence {seq_id} has {count_words(seq_len, 'token')}",
                required=f"1 to {count_words(chunk_size, 'token')} in each sequence to be packed",
                source="the lengths of the global batch",
                change="leave out empty sequences; cut longer ones first",
            )
    bins: list[list[int]] = [[] for _ in taken]
    stamps = count(0, -1)  # of bins with equal space the one that was filled last
    spaces = sorted((chunk_size - n, next(stamps), index) for index, n in enumerate(taken))
    for seq_id in sorted(seq_lens, key=lambda seq_id: (-seq_lens[seq_id], seq_id)):
        place = bisect_left(spaces, (seq_lens[seq_id],))
        if place < len(spaces):
            space, _, index = spaces.pop(place)
        else:
            space, index = chunk_size, len(bins)
            bins.append([])
        bins[index].append(seq_id)
        insort(spaces, (space - seq_lens[seq_id], next(stamps), index))
    return bins


Forks = Mapping[int, Sequence[tuple[int, int]]]
"""By sequence, the (first token, token it goes on from) of each branch that does not go on from the
token before it; sequences lie depth-first."""


def branch_chunks(
    seq_id: int, seq_len: int, forks: Sequence[tuple[int, int]], chunk_size: int
) -> list[Chunk]:
    """The chunks of a sequence that branches, in the order of their first tokens."""
    parents = dict(forks)
    cuts = sorted({0, seq_len, *parents, *parents.values()})
    stretches = [(start, stop, parents.get(start)) for start, stop in pairwise(cuts)]
    continued = {start if parent is None else parent for start, _, parent in stretches}
    chunks: list[Chunk] = []
    last: dict[int, dict[int, Slice]] = {}
    for start, stop, parent in stretches:
        whole = Slice(seq_id, start, stop, parent=parent)
        if start and stop not in continued and whole.num_tokens <= chunk_size:
            last.setdefault(whole.goes_on_from, {})[start] = whole
            continue
        for first in range(start, stop, chunk_size):
            before = parent if first == start else None
            piece = Slice(seq_id, first, min(first + chunk_size, stop), parent=before)
            chunks.append(Chunk((piece,)))
    for branches in last.values():
        bins = pack({start: piece.num_tokens for start, piece in branches.items()}, chunk_size)
        chunks += [Chunk(tuple(branches[start] for start in sorted(own))) for own in bins]
    return sorted(chunks, key=lambda chunk: chunk.slices[0].start)


def by_order(num_sequences: int, dp_size: int) -> list[list[int]]:
    """The seq_ids of each replica, dealt in turn as a plain distributed sampler does."""
    refuse_idle(num_sequences, dp_size)
    return [list(range(replica, num_sequences, dp_size)) for replica in range(dp_size)]


def by_cost(costs: Sequence[float], dp_size: int) -> list[list[int]]:
    """The seq_ids of each replica, of about equal sums of `costs` (one per sequence).

    Longest processing time first (Graham 1969): the dearest sequence goes to the replica with least
    so far. At most 4/3 of the best makespan. No replica is empty.
    """
    refuse_idle(len(costs), dp_size)
    replicas: list[list[int]] = [[] for _ in range(dp_size)]
    lightest = [(0.0, 0, replica) for replica in range(dp_size)]
    heapify(lightest)
    for seq_id in sorted(range(len(costs)), key=lambda seq_id: (-costs[seq_id], seq_id)):
        total, count, replica = lightest[0]
        replicas[replica].append(seq_id)
        # of equal sums the one with fewer sequences, so that costs of zero leave nobody idle
        heapreplace(lightest, (total + costs[seq_id], count + 1, replica))
    return replicas


def sequence_work(seq_lens: Sequence[int], shape: ModelShape) -> list[float]:
    """FLOPs of a forward of each whole sequence, head included: Skrull's Eq. 13 with the exact
    constants of the model (its quadratic term halved, since attention is causal)."""
    whole = stage_flops(shape, (shape.num_layers,), 0)
    return [whole.sequence(seq_len).total for seq_len in seq_lens]


def refuse_idle(num_sequences: int, dp_size: int) -> None:
    """Raises ConfigError where there are fewer sequences than replicas, or no replicas."""
    if 1 <= dp_size <= num_sequences:
        return
    works = f"set dp to at most {num_sequences}, or put more sequences into a step"
    raise ConfigError(
        given=f"dp {dp_size} for a global batch of {count_words(num_sequences, 'sequence')}",
        required="at least one replica, and at least one sequence for each",
        source="the size of the data-parallel axis and the sequences of a step",
        change=works if num_sequences else "put at least one sequence into a step",
    )


def place_by_load(
    seq_lens: Sequence[int], work: Sequence[float], *, bucket_tokens: int, sp_size: int
) -> list[Place] | None:
    """The place of each sequence, one process or the whole group; None where they do not fit.

    `bucket_tokens`: what a rank holds at a time (a sharded sequence counts 1/sp_size with each; the
    split into whole tokens can add one per sharded sequence). `work`: FLOPs or any other measure of
    each sequence, spread evenly.
    """
    rooms = [bucket_tokens * sp_size] * sp_size
    loads = [0.0] * sp_size
    ranks: list[int | None] = [None] * len(seq_lens)
    local: list[deque[int]] = [deque() for _ in range(sp_size)]

    def shard(seq_id: int) -> None:
        shared = work[seq_id] / sp_size
        rooms[:] = [room - seq_lens[seq_id] for room in rooms]
        loads[:] = [load + shared for load in loads]

    def roll_back(rank: int) -> bool:
        if not local[rank]:
            return False
        seq_id = local[rank].popleft()
        ranks[seq_id] = None
        shard(seq_id)
        rooms[rank] += seq_lens[seq_id] * sp_size
        loads[rank] -= work[seq_id]
        return True

    for seq_id in sorted(range(len(seq_lens)), key=seq_lens.__getitem__):
        needed = seq_lens[seq_id] * sp_size
        while True:
            rank = loads.index(min(loads))
            if rooms[rank] < needed:
                rank = rooms.index(max(rooms))
            if rooms[rank] >= needed:
                ranks[seq_id] = rank
                local[rank].append(seq_id)
                rooms[rank] -= needed
                loads[rank] += work[seq_id]
                break
            fullest = rooms.index(min(rooms))
            if rooms[fullest] >= seq_lens[seq_id]:
                shard(seq_id)
                break
            if not roll_back(fullest):
                return None
    return [Place(0, sp_size) if rank is None else Place(rank, 1) for rank in ranks]


def shard(groups: Groups, sp_size: int) -> list[list[Chunk]]:
    """The same groups with every slice sharded over a pool of `sp_size` processes."""
    return [[Chunk(_sharded(chunk.slices, sp_size)) for chunk in group] for group in groups]


def shard_long(
    groups: Groups, seq_lens: Sequence[int], shape: ModelShape, sp_size: int
) -> list[list[Chunk]]:
    """The same groups with pieces of cut sequences sharded and whole sequences left on one process
    as far as they balance there (`dacp`): a process holds no more tokens than if all were sharded,
    but for one that does not divide."""
    work = sequence_work(seq_lens, shape)
    return [[_place(chunk, seq_lens, work, sp_size) for chunk in group] for group in groups]


def _place(chunk: Chunk, seq_lens: Sequence[int], work: Sequence[float], sp_size: int) -> Chunk:
    whole = [s for s in chunk.slices if s.start == 0 and s.stop == seq_lens[s.seq_id]]
    places = place_by_load(
        [s.num_tokens for s in whole], [work[s.seq_id] for s in whole],
        bucket_tokens=-(-sum(s.num_tokens for s in whole) // sp_size), sp_size=sp_size,
    )  # fmt: skip
    everywhere = Place(0, sp_size)
    ids = [s.seq_id for s in whole]
    placed = dict(zip(ids, places or [everywhere] * len(ids), strict=True))
    slices = [replace(s, place=placed.get(s.seq_id, everywhere)) for s in chunk.slices]
    return Chunk(by_place(slices))


def by_place(slices: Iterable[Slice]) -> tuple[Slice, ...]:
    """Slices in the order of a chunk: by falling size of their places, then by first process."""
    return tuple(sorted(slices, key=lambda s: (-s.place.size, s.place.first)))


def _sharded(slices: Sequence[Slice], sp_size: int) -> tuple[Slice, ...]:
    place = Place(0, sp_size)
    return tuple(replace(piece, place=place) for piece in slices)


def chunk_by_chunk(
    seq_lens: Sequence[int],
    replicas: Sequence[Sequence[Chunk]],
    *,
    num_layers: int,
    sp_size: int = 1,
    recompute_layers: int = 0,
    regathers: bool = False,
) -> ChunkPlan:
    """The plan, not checked yet; replica d is rank d. `recompute_layers`: that many first layers
    are checkpointed, each by its own input. `regathers`: as the plan says it; the replicas have
    equally many chunks then."""
    chunks: list[Chunk] = []
    lists: list[tuple[Action, ...]] = []
    for own in replicas:
        actions: list[Action] = []
        for chunk in range(len(chunks), len(chunks) + len(own)):
            actions += Forward(chunk, 0, "all", recompute_layers), Backward(chunk, 0)
        chunks += own
        lists.append((*actions, Reduce(0)))
    return ChunkPlan(
        seq_lens=tuple(seq_lens), chunks=tuple(chunks), stages=(num_layers,), actions=tuple(lists),
        sp_size=sp_size, regathers=regathers,
    )  # fmt: skip


def peak_bytes(
    model: CostModel,
    device_tokens: int,
    *,
    dp_size: int,
    sp_size: int,
    recompute_layers: int,
    place_size: int | None = None,
) -> int:
    """Bytes that a device needs with `device_tokens` tokens at a time, of slices that are sharded
    over all of the pool, or (`place_size`) over so many processes each."""
    return _peak_bytes(
        model.memory(), device_tokens, dp_size, sp_size, recompute_layers, place_size
    )


def _peak_bytes(
    memory: PlanMemory,
    device_tokens: int,
    dp_size: int,
    sp_size: int,
    recompute_layers: int,
    place_size: int | None,
) -> int:
    size = sp_size if place_size is None else place_size
    firsts, num_tokens = range(0, sp_size, size), device_tokens * size
    chunk = Chunk(tuple(Slice(i, 0, num_tokens, Place(at, size)) for i, at in enumerate(firsts)))
    num_layers = memory.shape.num_layers
    plan = chunk_by_chunk(
        (num_tokens,) * len(firsts), [[chunk]], num_layers=num_layers, sp_size=sp_size,
        recompute_layers=recompute_layers,
    )  # fmt: skip
    # the other replicas share the state; one that runs is enough
    plan = replace(plan, actions=plan.actions * dp_size)
    return max(memory.peak_bytes_of_actions(plan, 0))


def fitting_tokens(
    model: CostModel,
    budget_bytes: int,
    *,
    dp_size: int,
    sp_size: int,
    recompute_layers: int = 0,
    place_size: int | None = None,
) -> int:
    """Most tokens that a device can hold at a time (Skrull's Eq. 12); 0 where none fits. The sizes
    are those of `peak_bytes`."""
    memory = model.memory(budget_bytes)
    return _fitting_tokens(memory, dp_size, sp_size, recompute_layers, place_size)


@lru_cache(maxsize=4096)
def _fitting_tokens(
    memory: PlanMemory, dp_size: int, sp_size: int, recompute_layers: int, place_size: int | None
) -> int:
    """Kept from batch to batch, which do not change it."""

    def left(num_tokens: int) -> int:
        return memory.device_budget_bytes - _peak_bytes(
            memory, num_tokens, dp_size, sp_size, recompute_layers, place_size
        )

    low, left_low = 1, left(1)
    if left_low < 0:
        return 0
    high = 1024
    while (left_high := left(high)) >= 0:
        low, left_low, high = high, left_high, 2 * high
    while high - low > 1:
        # bytes grow on straight lines: where this one meets the budget, and one token beyond
        guess = low + (high - low) * left_low // (left_low - left_high)
        for middle in (guess, guess + 1, (low + high) // 2):
            if low < middle < high:
                left_middle = left(middle)
                if left_middle >= 0:
                    low, left_low = middle, left_middle
                else:
                    high, left_high = middle, left_middle
    return low


def recompute_choices(num_layers: int) -> list[int]:
    """Numbers of recomputed layers that are tried: none, all, and eighths between them."""
    return sorted({round(num_layers * eighth / 8) for eighth in range(9)})


def does_not_fit(
    seq_lens: Sequence[int],
    model: CostModel,
    budget_bytes: int,
    *,
    dp_size: int,
    sp_size: int,
    recompute_layers: int,
    device_tokens: int | None = None,
) -> ConfigError:
    """The error for a longest sequence, or a wanted number of tokens, that is too much."""
    layout = {"dp_size": dp_size, "sp_size": sp_size, "recompute_layers": recompute_layers}
    fitting = fitting_tokens(model, budget_bytes, **layout)
    seq_id = max(range(len(seq_lens)), key=seq_lens.__getitem__)
    needed = -(-seq_lens[seq_id] // sp_size) if device_tokens is None else device_tokens
    each = f", {needed:,} on each of {sp_size} devices" if sp_size > 1 else " on one device"
    given = f"sequence {seq_id} of {count_words(seq_lens[seq_id], 'token')}{each}"
    ways = [f"give each device {format_bytes(peak_bytes(model, needed, **layout))}"]
    if device_tokens is not None:
        given = f"{device_tokens:,} tokens on a device at a time"
        ways.append(f"ask for {fitting:,} tokens")
    elif fitting:
        least, num_heads = -(-seq_lens[seq_id] // fitting), model.shape.num_heads
        # Ulysses divides the heads; beyond their number it takes another way to share a sequence
        size = next((n for n in range(least, num_heads + 1) if num_heads % n == 0), least)
        ways.append(f"spread a sequence over {size} devices")
    return ConfigError(
        given=given,
        required=f"at most {count_words(fitting, 'token')} on a device, with {recompute_layers} of "
        f"{count_words(model.shape.num_layers, 'layer')} recomputed",
        source=f"a budget of {format_bytes(budget_bytes)} per device",
        change=", ".join(ways) + ", or cut the sequence",
    )
