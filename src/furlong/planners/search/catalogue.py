"""Published methods and baselines, each as candidates with the dials that its paper varies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from furlong.cost.model import CostModel
from furlong.plan.values import ChunkPlan, Keep
from furlong.planners.chunks.balance import Balance
from furlong.planners.chunks.groups import (
    Groups,
    group_chunks,
    packed_groups,
    padded_groups,
    sliced_groups,
)
from furlong.planners.infinipipe.plan import plan_infinipipe
from furlong.planners.methods.data_parallel import plan_data_parallel
from furlong.planners.methods.flexsp import plan_flexsp
from furlong.planners.methods.skrull import plan_skrull
from furlong.planners.methods.ulysses import plan_ulysses
from furlong.planners.options import ChunkOptions
from furlong.planners.places.plan import plan_places
from furlong.planners.search.candidates import (
    Candidate,
    Ladder,
    Room,
    chunked,
    layer_first,
    token_level,
    whole_sequences,
)

Method = Callable[[Room], Iterator[Ladder]]

_KEPT: tuple[Keep, ...] = ("attention", "kv")
_CUTS = ((False, False), (True, False), (False, True), (True, True))
"""Whether short sequences stay on one sp rank, and whether chunks take equal time."""
_SLICES = (2, 4, 8)
_INFINIPIPE_S = 1.0
"""For the plan of one replica; its own search goes on with what it has then."""


def chunkflow(room: Room) -> Iterator[Ladder]:
    """ChunkFlow: equal chunks, never mixed, K and ChunkSize by grid search (its section 5)."""
    for size in room.sizes():
        yield chunked("ChunkFlow", room, size, room.retained(size)[:-1])


def seco(room: Room) -> Iterator[Ladder]:
    """SeCO: no chunk is retained; one stage."""
    if room.layout.pp == 1:
        for size in room.sizes():
            yield chunked("SeCO", room, size, [0])


def infinipipe(room: Room) -> Iterator[Ladder]:
    """InfiniPipe: pipelines of equal-time chunks, checkpointing by integer program."""
    yield from _infinipipe("InfiniPipe", room)


def infinipipe_equal_tokens(room: Room) -> Iterator[Ladder]:
    """InfiniPipe without workload-balanced chunking (its ablation)."""
    yield from _infinipipe("InfiniPipe, equal tokens", room, balance="tokens")


def infinipipe_no_recompute(room: Room) -> Iterator[Ladder]:
    """InfiniPipe without checkpointing (its ablation)."""
    yield from _infinipipe("InfiniPipe, no checkpointing", room, checkpointing="none")


def infinipipe_full_recompute(room: Room) -> Iterator[Ladder]:
    """InfiniPipe with every layer checkpointed (its ablation)."""
    yield from _infinipipe("InfiniPipe, full checkpointing", room, checkpointing="full")


def fpdt(room: Room) -> Iterator[Ladder]:
    """FPDT: layer after layer with K,V on the host, chunks of every size (the paper settles on
    64K)."""
    if room.layout.pp == 1 and "host" in room.tiers:
        for size in room.sizes():
            yield layer_first("FPDT", room, size, stage_layers=1, keep="input", tier="host")


def skrull(room: Room) -> Iterator[Ladder]:
    """Skrull: whole sequences, sharded or local; one stage."""
    layout = room.layout
    if layout.pp > 1:
        return

    def build(lens: Sequence[int], model: CostModel) -> ChunkPlan:
        return plan_skrull(
            lens, model, dp_size=layout.dp, cp_size=layout.sp, budget_bytes=room.budget_bytes
        )

    yield Ladder([Candidate("Skrull", layout, {}, build, deals_itself=True)])


def flexsp(room: Room) -> Iterator[Ladder]:
    """FlexSP: disjoint groups of different sizes, anew for every micro-batch; one stage."""
    if (room.layout.sp, room.layout.pp) == (1, 1):
        yield _in_one_pool("FlexSP", room, plan_flexsp)


def ulysses(room: Room) -> Iterator[Ladder]:
    """DeepSpeed-Ulysses: every sequence sharded over one static group; one stage."""
    layout = room.layout
    if layout.pp > 1:
        return

    def build(lens: Sequence[int], model: CostModel) -> ChunkPlan:
        return plan_ulysses(
            lens, model, dp_size=layout.dp, sp_size=layout.sp, budget_bytes=room.budget_bytes
        )

    yield Ladder([Candidate("Ulysses", layout, {}, build, deals_itself=True)])


def data_parallel(room: Room) -> Iterator[Ladder]:
    """Replicas of one device, balanced by tokens and by FLOPs."""
    layout = room.layout
    if layout.pp > 1 or layout.sp > 1:
        return
    balances: tuple[Balance, ...] = ("tokens", "flops")
    for balance in balances:

        def build(lens: Sequence[int], model: CostModel, by: Balance = balance) -> ChunkPlan:
            return plan_data_parallel(
                lens, model, dp_size=layout.dp, balance=by, budget_bytes=room.budget_bytes
            )

        dials = {"balanced by": balance}
        yield Ladder([Candidate("Data parallel", layout, dials, build, deals_itself=True)])


def packed_1f1b(room: Room) -> Iterator[Ladder]:
    """Megatron-LM: whole sequences packed up to the longest one of the batch."""
    longest = room.longest_tokens
    yield whole_sequences("1F1B packed", room, lambda lens: (lens, packed_groups(lens, longest)))


def padded_1f1b(room: Room) -> Iterator[Ladder]:
    """Megatron-LM: every sequence padded to the longest one of the batch."""
    longest = room.longest_tokens
    yield whole_sequences("1F1B padded", room, lambda lens: padded_groups(lens, pad_to=longest))


def seq1f1b(room: Room) -> Iterator[Ladder]:
    """Seq1F1B: every sequence in as many slices, of equal tokens or of equal work."""

    def groups(lens: Sequence[int], model: CostModel, count: int, even: bool) -> Groups:
        quadratic = 0.0 if even else _quadratic_share(model)
        return sliced_groups(lens, num_slices=count, quadratic=quadratic)

    for count in _SLICES:
        for even in (True, False):
            cut = "equal tokens" if even else "equal work"
            make = partial(groups, count=count, even=even)
            yield token_level("Seq1F1B", room, {"slices": count, "cut": cut}, make)


def seq1f1b_packed(room: Room) -> Iterator[Ladder]:
    """Seq1F1B over chunks of one size: pieces of long sequences, packed short ones."""

    def groups(lens: Sequence[int], model: CostModel, size: int) -> Groups:
        return group_chunks(lens, ChunkOptions(size=size, hybrid=False))

    for size in room.sizes():
        yield token_level("Seq1F1B packed", room, {"size": size}, partial(groups, size=size))


def combined(room: Room) -> Iterator[Ladder]:
    """What no paper combines: state-aware 1F1B over chunks of equal time or equal tokens that mix
    tails and short sequences, short sequences that stay on one sp rank, attention that is
    remembered, any tier and stage height, replicas balanced by work."""
    for tier, keep, size in product(room.tiers, _KEPT, room.sizes()):
        # where all chunks are retained it does not matter what the others keep
        retained = room.retained(size)[_KEPT.index(keep) :]
        for local, equal_time in _CUTS:
            if (room.layout.sp > 1 or not local) and (size < room.longest_tokens or not equal_time):
                yield chunked(
                    "furlong", room, size, retained, keep=keep, hybrid=True, tier=tier,
                    balance="flops", local=local, equal_time=equal_time,
                )  # fmt: skip
    if (room.layout.sp, room.layout.pp) == (1, 1):
        yield _in_one_pool("furlong", room, plan_places)
    if room.layout.pp == 1:
        heights = room.heights(sum(room.stages))
        for tier, height, size in product(room.tiers, heights, room.sizes()):
            yield layer_first(
                "furlong", room, size, stage_layers=height, keep="attention",
                tier=tier, balance="flops",
            )  # fmt: skip


PUBLISHED: dict[str, Method] = {
    "ChunkFlow": chunkflow,
    "InfiniPipe": infinipipe,
    "Skrull": skrull,
    "FlexSP": flexsp,
    "SeCO": seco,
    "FPDT": fpdt,
    "Ulysses": ulysses,
    "Data parallel": data_parallel,
    "1F1B padded": padded_1f1b,
    "1F1B packed": packed_1f1b,
    "Seq1F1B": seq1f1b,
    "Seq1F1B packed": seq1f1b_packed,
}

SEARCHED: dict[str, Method] = {
    "furlong": combined,
    **{name: PUBLISHED[name] for name in ("InfiniPipe", "Skrull", "Ulysses", "1F1B packed")},
}
"""What `auto` searches: the other methods' plans are, up to hybrid chunks, among the combined."""

ABLATIONS: dict[str, Method] = {
    "InfiniPipe, equal tokens": infinipipe_equal_tokens,
    "InfiniPipe, no checkpointing": infinipipe_no_recompute,
    "InfiniPipe, full checkpointing": infinipipe_full_recompute,
}


def _infinipipe(method: str, room: Room, **changes: Any) -> Iterator[Ladder]:
    layout = room.layout
    if layout.pp == 1:
        return

    def build(lens: Sequence[int], model: CostModel) -> ChunkPlan:
        return plan_infinipipe(
            lens, model, num_stages=layout.pp, sp_size=layout.sp, stages=room.stages,
            budget_bytes=room.budget_bytes, time_limit_s=_INFINIPIPE_S, **changes,
        ).plan  # fmt: skip

    yield Ladder([Candidate(method, layout, {}, build)])


def _in_one_pool(method: str, room: Room, plan: Callable[..., ChunkPlan]) -> Ladder:
    """Whole sequences on places of all devices; `plan` takes lengths, model, pool and budget."""

    def build(lens: Sequence[int], model: CostModel) -> ChunkPlan:
        return plan(lens, model, pool_size=room.layout.dp, budget_bytes=room.budget_bytes)

    dials = {"places": "of one pool"}
    return Ladder([Candidate(method, room.layout, dials, build, deals_itself=True)])


def _quadratic_share(model: CostModel) -> float:
    """FLOPs of attention per squared token over the others per token, of one layer."""
    shape = model.shape
    return shape.q_size / shape.layer_active_parameters(0)
