"""Groups of chunks: cutting, packing and placing sequences.

A group is all pieces of one sequence in order, including branches, or one packed chunk. Groups run
in list order. The functions here sort groups by falling number of tokens, since a short sequence
before a long one interrupts the steady phase of a pipeline (InfiniPipe, III-C).

A pool is the `sp_size` processes of one rank of a plan. A place is a sequence-parallel group within
the pool: the processes, one or more, over which a slice is sharded.
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
from furlong.cost.seconds import sequence_flops
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
    """Return the chunks of a batch in groups, sorted by falling number of tokens; groups with
    equally many keep their order (ChunkFlow, Algorithm 1).

    A sequence longer than a chunk is cut into pieces of `options.size` tokens, and the last piece
    has the remainder. These pieces are one group. Shorter sequences are packed into chunks, each of
    which is a group, or with `options.hybrid` also into the last chunks of cut sequences. `forks`:
    for sequences that branch, where their branches start.
    """
    refuse_unusable(seq_lens)
    forks, size = forks or {}, options.size
    groups = [
        [Chunk((Slice(i, start, min(start + size, n)),)) for start in range(0, n, size)]
        for i, n in enumerate(seq_lens)
        if n > size and i not in forks
    ]
    groups += [branch_chunks(i, seq_lens[i], own, size) for i, own in forks.items()]
    cut = {group[0].slices[0].seq_id for group in groups}
    short = {seq_id: n for seq_id, n in enumerate(seq_lens) if seq_id not in cut}
    tails = [group[-1].num_tokens for group in groups] if options.hybrid else []
    bins = [
        [Slice(seq_id, 0, seq_lens[seq_id]) for seq_id in seq_ids]
        for seq_ids in pack(short, size, taken=tails)
    ]
    if options.hybrid:
        for group, joined in zip(groups, bins, strict=False):
            # the slice with a prefix comes first in a chunk
            group[-1] = Chunk((*group[-1].slices, *joined))
    groups += [[Chunk(tuple(slices))] for slices in bins[len(tails) :]]
    return sorted(groups, key=lambda group: -sum(chunk.num_tokens for chunk in group))


def refuse_unusable(seq_lens: Sequence[int]) -> None:
    """Raise DataError if a batch has no sequences, or a sequence has no tokens."""
    empty = next((seq_id for seq_id, seq_len in enumerate(seq_lens) if seq_len < 1), None)
    if seq_lens and empty is None:
        return
    raise DataError(
        given="no sequences" if empty is None else f"sequence {empty} has {seq_lens[empty]} tokens",
        required="at least one sequence, and at least one token in each",
        source="the lengths of the global batch",
        change="give every rank a sequence; one token without a label will do",
    )


def split_equal_work(
    seq_id: int, seq_len: int, num_slices: int, *, quadratic: float = 0.0, linear: float = 1.0,
    step: int = 1,
) -> list[Slice]:  # fmt: skip
    """Cut one sequence into `num_slices` slices of about equal cost.

    The first x tokens cost f(x) = quadratic * x^2 + linear * x: the first term is attention, the
    second all other work. Slice j of n stops where f(x) = j / n * f(seq_len), as in InfiniPipe and
    Seq1F1B. By default slices have equal tokens. Bounds are rounded to multiples of `step`, or only
    to whole tokens if the sequence is too short for `step`. A sequence with fewer tokens than
    `num_slices` gets one slice per token.
    """
    count = min(num_slices, seq_len)
    if seq_len < count * step:
        step = 1
    work = quadratic * seq_len**2 + linear * seq_len
    starts = [0]
    for number in range(1, count):
        share = work * number / count
        # the root of f(x) = share in the form that also holds where quadratic is 0
        bound = 2 * share / (linear + sqrt(linear * linear + 4 * quadratic * share))
        latest = seq_len // step - (count - len(starts))
        starts.append(step * min(max(round(bound / step), starts[-1] // step + 1), latest))
    return [Slice(seq_id, a, b) for a, b in pairwise([*starts, seq_len])]


def pack(
    seq_lens: Mapping[int, int], chunk_size: int, *, taken: Sequence[int] = ()
) -> list[list[int]]:
    """Pack sequences into bins of `chunk_size` tokens, and return the seq_ids of each bin.

    Best fit, longest first: a bin is opened only if no open one has room. ChunkFlow instead tries
    rising numbers of bins until a packing succeeds. The number of bins is the same, as best fit
    would fail with fewer.

    Args:
        seq_lens: seq_id -> tokens.
        chunk_size: Most tokens of a bin.
        taken: Tokens of partly filled bins. They come first in the result, even if left empty.
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
    stamps = count(0, -1)  # among bins with equal space, the one filled last is preferred
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
"""seq_id -> (first token, end of the parent) of each branch that does not continue the token before
it; branches are laid out depth-first."""


def branch_chunks(
    seq_id: int, seq_len: int, forks: Sequence[tuple[int, int]], chunk_size: int
) -> list[Chunk]:
    """Return the chunks of one sequence that branches, in the order of their first tokens.

    `forks`: one pair for each branch, (its first token, end of the earlier piece that it
    continues). For example, forks [(92, 75)] say that tokens from 92 on continue the piece that
    ends at token 75. Short branches that continue the same piece are packed together into chunks,
    unless another branch continues them.
    """
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


def by_cost(costs: Sequence[float], dp_size: int) -> list[list[int]]:
    """Distribute sequences over replicas with about equal sums of `costs` (one per sequence), and
    return the seq_ids of each replica.

    Longest processing time first (Graham 1969): the most expensive sequence goes to the replica
    with the lowest sum so far, which gives at most 4/3 of the best makespan. No replica is empty.
    """
    refuse_idle(len(costs), dp_size)
    replicas: list[list[int]] = [[] for _ in range(dp_size)]
    lightest = [(0.0, 0, replica) for replica in range(dp_size)]
    heapify(lightest)
    for seq_id in sorted(range(len(costs)), key=lambda seq_id: (-costs[seq_id], seq_id)):
        total, count, replica = lightest[0]
        replicas[replica].append(seq_id)
        # ties go to the replica with fewer sequences, so that costs of zero leave none empty
        heapreplace(lightest, (total + costs[seq_id], count + 1, replica))
    return replicas


def sequence_work(seq_lens: Sequence[int], shape: ModelShape) -> list[float]:
    """Return the forward FLOPs of each whole sequence, including the head: Skrull's Eq. 13 with the
    exact constants of the model and half of the quadratic term, since attention is causal."""
    return [sum(sequence_flops(shape, seq_len)) for seq_len in seq_lens]


def refuse_idle(num_sequences: int, dp_size: int) -> None:
    """Raise ConfigError if there are fewer sequences than replicas, or no replicas."""
    if 1 <= dp_size <= num_sequences:
        return
    raise ConfigError(
        given=f"dp {dp_size} for a global batch of {count_words(num_sequences, 'sequence')}",
        required="at least one replica, and at least one sequence for each",
        source="the size of the data-parallel axis and the sequences of a step",
        change="lower dp, or put more sequences into a step",
    )


def place_by_load(
    seq_lens: Sequence[int], work: Sequence[float], *, bucket_tokens: int, sp_size: int
) -> list[Place] | None:
    """Return the place of each sequence: one process, or the whole pool over which it is sharded.
    Return None if the sequences do not fit.

    This is Skrull's Algorithm 1. Its step RollBack (Algorithm 3) is corrected here: as printed it
    has a wrong sign, and leaves out the other ranks that a sharded sequence is on. As corrected it
    succeeds whenever all processes together have room for all tokens.

    Args:
        seq_lens: Tokens of each sequence.
        work: FLOPs (or another measure) of each sequence, which are balanced over processes.
        bucket_tokens: Most tokens of a process. A sharded sequence counts 1/sp_size on each;
            rounding to whole tokens can add one per sharded sequence.
        sp_size: Processes of the pool.
    """
    # in units of 1/sp_size token, so that shares of a sequence are integers
    rooms = [bucket_tokens * sp_size] * sp_size
    loads = [0.0] * sp_size
    ranks: list[int | None] = [None] * len(seq_lens)
    local: list[deque[int]] = [deque() for _ in range(sp_size)]

    def share(seq_id: int) -> None:
        rooms[:] = [room - seq_lens[seq_id] for room in rooms]
        loads[:] = [load + work[seq_id] / sp_size for load in loads]

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
                share(seq_id)
                break
            if not local[fullest]:
                return None
            back = local[fullest].popleft()
            ranks[back] = None
            share(back)
            rooms[fullest] += seq_lens[back] * sp_size
            loads[fullest] -= work[back]
    return [Place(0, sp_size) if rank is None else Place(rank, 1) for rank in ranks]


def shard_all(groups: Groups, sp_size: int) -> list[list[Chunk]]:
    """Return the groups with each slice sharded over a pool of `sp_size` processes."""
    place = Place(0, sp_size)
    return [
        [Chunk(tuple(replace(piece, place=place) for piece in chunk.slices)) for chunk in group]
        for group in groups
    ]


def shard_long(
    groups: Groups, seq_lens: Sequence[int], shape: ModelShape, sp_size: int
) -> list[list[Chunk]]:
    """Return the groups of chunks with a place for each slice. Pieces of cut sequences are sharded
    over the pool of `sp_size` processes. Whole sequences stay on one process each while the process
    has room (`place_by_load`); the others are sharded, too. A process has room for the tokens that
    it would hold if all sequences were sharded, up to rounding."""
    work, everywhere = sequence_work(seq_lens, shape), Place(0, sp_size)

    def placed(chunk: Chunk) -> Chunk:
        whole = [s for s in chunk.slices if s.start == 0 and s.stop == seq_lens[s.seq_id]]
        places = place_by_load(
            [s.num_tokens for s in whole], [work[s.seq_id] for s in whole],
            bucket_tokens=-(-sum(s.num_tokens for s in whole) // sp_size), sp_size=sp_size,
        )  # fmt: skip
        found = dict(zip(whole, places or [everywhere] * len(whole), strict=True))
        return Chunk(by_place(replace(s, place=found.get(s, everywhere)) for s in chunk.slices))

    return [[placed(chunk) for chunk in group] for group in groups]


def by_place(slices: Iterable[Slice]) -> tuple[Slice, ...]:
    """Sort slices as a chunk needs them: by falling size of their sequence-parallel groups, then by
    the first process of the group."""
    return tuple(sorted(slices, key=lambda s: (-s.place.size, s.place.first)))


def chunk_by_chunk(
    seq_lens: Sequence[int],
    replicas: Sequence[Sequence[Chunk]],
    *,
    num_layers: int,
    sp_size: int = 1,
    recompute_layers: int = 0,
) -> ChunkPlan:
    """Return a plan in which each chunk's Backward directly follows its Forward, and the gradients
    are reduced at the end. The plan is not checked (`plan.check`). `replicas`: for each rank of the
    plan, the chunks that it runs. `recompute_layers`: number of first layers that are
    checkpointed."""
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
        sp_size=sp_size,
    )  # fmt: skip


def peak_bytes(
    memory: PlanMemory,
    device_tokens: int,
    *,
    dp_size: int,
    sp_size: int,
    recompute_layers: int = 0,
    place_size: int | None = None,
) -> int:
    """Return the peak bytes of a device in a step whose micro-batches have `device_tokens` tokens
    per device.

    Two steps are simulated with `memory`: one of a single micro-batch, and one of two, where the
    second micro-batch runs when gradients are in memory. The larger peak is returned. `place_size`:
    number of processes over which each slice is sharded; None: the whole pool.
    """
    size = sp_size if place_size is None else place_size
    firsts, num_tokens = range(0, sp_size, size), device_tokens * size
    count = len(firsts)
    batches = [
        Chunk(tuple(Slice(i, 0, num_tokens, Place(at, size)) for i, at in enumerate(firsts, start)))
        for start in (0, count)
    ]
    most = 0
    for number in (1, 2):
        plan = chunk_by_chunk(
            (num_tokens,) * number * count, [batches[:number]], num_layers=memory.shape.num_layers,
            sp_size=sp_size, recompute_layers=recompute_layers,
        )  # fmt: skip
        # replicas only matter as they share the state: copy the first one's list
        plan = replace(plan, actions=plan.actions * dp_size, regathers=memory.training.regathers)
        most = max(most, *memory.peak_bytes_of_actions(plan, 0))
    return most


@lru_cache(maxsize=4096)
def fitting_tokens(memory: PlanMemory, **sizes: int) -> int:
    """Return the most tokens per device with which a micro-batch fits in memory (Skrull's Eq. 12);
    0 if not even one token fits. `sizes`: keyword arguments of `peak_bytes`. The result is cached,
    as it does not depend on the batch."""

    def left(num_tokens: int) -> int:
        return memory.device_budget_bytes - peak_bytes(memory, num_tokens, **sizes)

    low, left_low = 1, left(1)
    if left_low < 0:
        return 0
    high = 1024
    while (left_high := left(high)) >= 0:
        low, left_low, high = high, left_high, 2 * high
    while high - low > 1:
        # bytes are piecewise linear: interpolate, try the next token, and bisect
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
    """Return the numbers of layers to try to recompute: none, all, and eighths in between."""
    return sorted({round(num_layers * eighth / 8) for eighth in range(9)})


def does_not_fit(
    seq_lens: Sequence[int],
    model: CostModel,
    budget_bytes: int | None,
    *,
    sp_size: int,
    recompute_layers: int,
    dp_size: int = 1,
) -> ConfigError:
    """Return the error for a batch whose longest sequence does not fit in memory. `budget_bytes`:
    memory of one device; None: the machine's."""
    sizes = {"dp_size": dp_size, "sp_size": sp_size, "recompute_layers": recompute_layers}
    memory = model.memory(budget_bytes)
    fitting = fitting_tokens(memory, **sizes)
    seq_id = max(range(len(seq_lens)), key=seq_lens.__getitem__)
    needed = -(-seq_lens[seq_id] // sp_size)
    each = f", {needed:,} on each of {sp_size} devices" if sp_size > 1 else " on one device"
    wanted = format_bytes(peak_bytes(model.memory(), needed, **sizes))
    return ConfigError(
        given=f"sequence {seq_id} of {count_words(seq_lens[seq_id], 'token')}{each}",
        required=f"at most {count_words(fitting, 'token')} on a device, with {recompute_layers} of "
        f"{count_words(model.shape.num_layers, 'layer')} recomputed",
        source=f"a budget of {format_bytes(memory.device_budget_bytes)} per device",
        change=f"give each device {wanted}, use more devices, or cut the sequence",
    )
