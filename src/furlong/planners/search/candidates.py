"""Candidates of the search: one way to plan a batch each, and how the common ones are made.

A candidate has a layout, values of dials, and a function that plans the sequences of one replica. A
ladder holds those over the same chunks, which a search climbs down to a rung that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from furlong.cost.model import CostModel
from furlong.plan.values import ChunkPlan, Keep, Tier, Tiers
from furlong.planners.chunks.balance import Balance
from furlong.planners.chunks.groups import Groups, group_chunks
from furlong.planners.chunks.placement import shard, shard_long
from furlong.planners.infinipipe.mesh import cut_and_pack
from furlong.planners.infinipipe.mesh_fit import fit_work
from furlong.planners.layout import Layout
from furlong.planners.methods.fpdt import plan_fpdt
from furlong.planners.options import ChunkOptions
from furlong.planners.orders.pipeline import plan_1f1b
from furlong.planners.orders.seq1f1b import plan_seq1f1b

Build = Callable[[Sequence[int], CostModel], ChunkPlan]
MakeGroups = Callable[[Sequence[int], CostModel], Groups]


@dataclass(frozen=True)
class Candidate:
    """One way to plan a batch."""

    method: str
    layout: Layout
    dials: Mapping[str, object]
    """What sets it apart from the method's other candidates."""
    build: Build
    """The plan of one replica from its lengths; raises UserError where there is none."""
    balance: Balance = "none"
    deals_itself: bool = False
    """Whether `build` takes the whole batch and plans all replicas."""

    def __str__(self) -> str:
        return f"{self.method}: " + ", ".join([str(self.layout), *self.words()])

    def words(self) -> list[str]:
        """The dials, each as its name and value."""
        return [f"{name} {value_in_words(value)}" for name, value in self.dials.items()]


def value_in_words(value: object) -> str:
    """A dial's value; a mapping as a run file has it."""
    if not isinstance(value, Mapping):
        return str(value)
    return "{" + ", ".join(f"{name}: {inner}" for name, inner in value.items()) + "}"


@dataclass(frozen=True)
class Room:
    """What a method may choose from in one layout."""

    layout: Layout
    stages: tuple[int, ...]
    """Layers of each stage."""
    longest_tokens: int
    tiers: tuple[Tier, ...] = ("device",)
    """Where K,V may live."""
    budget_bytes: int | None = None
    """Of one device; None: what the hardware has."""
    most_chunks: int = 512
    """Of the longest sequence: more only make the search slower."""

    def sizes(self) -> list[int]:
        """Chunk sizes of an sp group, from 1,024 tokens per device up to the longest sequence; not
        those that cut it into more chunks than `most_chunks`."""
        per_device = max(1024, min(32_768, self.longest_tokens // self.layout.sp))
        sizes = (self.layout.sp << bits for bits in range(10, per_device.bit_length() + 1))
        return [size for size in sizes if self.longest_tokens <= self.most_chunks * size]

    def retained(self, size: int) -> list[int]:
        """Numbers of retained chunks, falling: all of the longest sequence, powers of four, 0."""
        num_chunks = -(-self.longest_tokens // size)
        powers = [1 << bits for bits in range(0, num_chunks.bit_length(), 2)]
        return sorted({0, *(n for n in powers if n < num_chunks), num_chunks}, reverse=True)

    def heights(self, num_layers: int) -> list[int]:
        """Layers of a stage on one rank, layer-first: powers of two below all of them."""
        return [1 << bits for bits in range(num_layers.bit_length() - 1)]


@dataclass(frozen=True)
class Ladder:
    """Candidates over the same chunks, falling: every rung needs less memory and more time than the
    one above it, so the highest that fits is the one to take."""

    rungs: Sequence[Candidate]
    groups: MakeGroups | None = None
    """The chunks that all of them compute, for a bound; None: not known before they are built, but
    no way to cut is faster than all sequences in one chunk."""
    cut: Hashable = None
    """Ladders of one room and balance with the same value, unless None, have the same chunks."""


def chunked(
    method: str,
    room: Room,
    size: int,
    retained: Sequence[int],
    *,
    keep: Keep = "kv",
    hybrid: bool = False,
    tier: Tier = "device",
    balance: Balance = "none",
    local: bool = False,
    equal_time: bool = False,
) -> Ladder:
    """State-aware 1F1B over chunks of equal tokens, or with `equal_time` of equal time; a rung for
    each number of retained chunks."""
    options, sp_size = ChunkOptions(size=size, hybrid=hybrid), room.layout.sp

    def cut(lens: Sequence[int], model: CostModel) -> Groups:
        if not equal_time:
            return group_chunks(lens, options)
        longest = max(lens)
        count = -(-longest // size)
        work = fit_work(
            model, longest, count, stages=room.stages, sp_size=sp_size, tiers=Tiers(kv=tier)
        )
        return cut_and_pack(lens, count, work)

    def groups(lens: Sequence[int], model: CostModel) -> Groups:
        chunks = cut(lens, model)
        return shard_long(chunks, lens, model.shape, sp_size) if local else shard(chunks, sp_size)

    def build(lens: Sequence[int], model: CostModel, num_retained: int) -> ChunkPlan:
        return plan_1f1b(
            lens,
            groups(lens, model),
            stages=room.stages,
            num_retained=num_retained,
            keep=keep,
            tiers=Tiers(kv=tier),
            sp_size=sp_size,
        )

    extra: dict[str, object] = {"tier": tier} if tier != "device" else {}
    if equal_time:
        extra["chunks of"] = "equal time"
    if local:
        extra["short sequences"] = "local"
    rungs = []
    for number in retained:
        dials = {"size": size, "num_retained": number, "keep": keep, **extra}
        make = partial(build, num_retained=number)
        rungs.append(Candidate(method, room.layout, dials, make, balance))
    return Ladder(
        rungs, groups, cut=(size, hybrid, tier if equal_time else None, local, equal_time)
    )


def layer_first(
    method: str,
    room: Room,
    size: int,
    *,
    stage_layers: int,
    keep: Keep,
    tier: Tier,
    balance: Balance = "none",
) -> Ladder:
    """The layer-first walk with stages of `stage_layers` layers: one candidate."""

    def build(lens: Sequence[int], model: CostModel) -> ChunkPlan:
        return plan_fpdt(
            lens,
            num_layers=model.shape.num_layers,
            chunk_size=size,
            stage_layers=stage_layers,
            keep=keep,
            tiers=Tiers(kv=tier),
            sp_size=room.layout.sp,
        )

    def groups(lens: Sequence[int], model: CostModel) -> Groups:
        return shard(group_chunks(lens, ChunkOptions(size=size, hybrid=False)), room.layout.sp)

    dials = {"size": size, "stage_layers": stage_layers, "keep": keep, "tier": tier}
    return Ladder([Candidate(method, room.layout, dials, build, balance)], groups)


def whole_sequences(
    method: str, room: Room, make: Callable[[Sequence[int]], tuple[Sequence[int], Groups]]
) -> Ladder:
    """1F1B over whole sequences with no, half and all layers of each stage recomputed, each from
    its own input. `make`: the lengths, which may be padded, and their groups."""
    sp_size = room.layout.sp

    def build(lens: Sequence[int], model: CostModel, share: float) -> ChunkPlan:
        padded, groups = make(lens)
        num_chunks = sum(map(len, groups))
        return plan_seq1f1b(
            padded,
            shard(groups, sp_size),
            stages=room.stages,
            recompute_layers=[[round(share * n)] * num_chunks for n in room.stages],
            sp_size=sp_size,
        )

    def groups(lens: Sequence[int], model: CostModel) -> Groups:
        return shard(make(lens)[1], sp_size)

    rungs = [
        Candidate(method, room.layout, {"recomputed layers": word}, partial(build, share=share))
        for word, share in (("none", 0.0), ("half", 0.5), ("all", 1.0))
    ]
    return Ladder(rungs, groups)


def token_level(method: str, room: Room, dials: Mapping[str, object], make: MakeGroups) -> Ladder:
    """Seq1F1B's order over the groups of `make`."""
    sp_size = room.layout.sp

    def groups(lens: Sequence[int], model: CostModel) -> Groups:
        return shard(make(lens, model), sp_size)

    def build(lens: Sequence[int], model: CostModel) -> ChunkPlan:
        return plan_seq1f1b(lens, groups(lens, model), stages=room.stages, sp_size=sp_size)

    return Ladder([Candidate(method, room.layout, dials, build)], groups)
