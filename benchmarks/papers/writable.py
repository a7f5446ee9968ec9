"""Which published methods could have written a plan, judged by the plan and the model's heads.

    writers(plan, shape)    # ("Skrull", "Ulysses"); () for what only a combination can write

A method is taken to allow everything that its paper or its public code has: any way to deal
sequences to replicas, any layout, any ZeRO stage. Where the order of actions could be a reason to
refuse, but what they are is not, the method gets the benefit of the doubt. Methods that share a
sequence by DeepSpeed Ulysses' all-to-all share it among as many processes as divide the query
heads; Megatron-LM's context parallelism has no such limit, and neither has the two-dimensional
attention of LoongTrain and USP, one degree for all sequences, which is no method of the search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from furlong.cost.shapes.shape import ModelShape
from furlong.plan.values import ON_DEVICE, ChunkPlan, Forward, Keep


@dataclass(frozen=True)
class Traits:
    """Traits of a plan that tell the methods apart."""

    plan: ChunkPlan
    num_heads: int
    """Query heads of the model."""

    @cached_property
    def forwards(self) -> list[Forward]:
        plan = self.plan
        found = (a for own in plan.actions for a in own if isinstance(a, Forward))
        # a chunk without a token only keeps replicas in step
        return [a for a in found if a.chunk in plan.trained and plan.chunks[a.chunk].slices]

    @cached_property
    def layer_first(self) -> bool:
        """Whether a rank holds several stages."""
        return any(
            len({a.stage for a in own if isinstance(a, Forward)}) > 1 for own in self.plan.actions
        )

    @cached_property
    def pipelined(self) -> bool:
        return len(self.plan.stages) > 1 and not self.layer_first

    @cached_property
    def cuts(self) -> bool:
        """Whether a sequence is cut."""
        return bool(self.plan.groups)

    @cached_property
    def mixes(self) -> bool:
        """Whether a piece of a cut sequence shares its chunk."""
        return any(len(links) and len(c.slices) > 1
                   for links, c in zip(self.plan.links, self.plan.chunks, strict=True))  # fmt: skip

    @cached_property
    def all_sharded(self) -> bool:
        """Whether every slice is spread over its whole sp group."""
        return self.sizes <= {self.plan.sp_size}

    @cached_property
    def sizes(self) -> set[int]:
        """Sizes of the places that slices are on."""
        return {s.place.size for chunk in self.plan.chunks for s in chunk.slices}

    @cached_property
    def within_heads(self) -> bool:
        """Whether the processes of every place can divide the heads."""
        return all(self.num_heads % size == 0 for size in self.sizes)

    @cached_property
    def disjoint(self) -> bool:
        """Whether no process has slices of two places in one chunk."""
        for chunk in self.plan.chunks:
            places = sorted({(s.place.first, s.place.stop) for s in chunk.slices})
            if any(b[0] < a[1] for a, b in pairwise(places)):
                return False
        return True

    @cached_property
    def on_device(self) -> bool:
        """Whether nothing that is stored leaves the device; whole sequences store no K,V."""
        tiers = self.plan.tiers
        return (tiers if self.cuts else replace(tiers, kv="device")) == ON_DEVICE

    @cached_property
    def kept(self) -> frozenset[Keep]:
        """The values of keep that cells have."""
        return frozenset(a.keep for a in self.forwards)

    @cached_property
    def checkpointed(self) -> frozenset[tuple[int, int]]:
        """(stage, checkpointed layers) of all cells."""
        return frozenset((a.stage, a.recompute_layers) for a in self.forwards)

    @cached_property
    def one_number(self) -> bool:
        """Whether all cells of a stage checkpoint as many layers."""
        return len(self.checkpointed) == len({stage for stage, _ in self.checkpointed})

    @cached_property
    def equal_pieces(self) -> bool:
        """Whether all pieces of cut sequences but the last have one size, which none exceeds."""
        plan = self.plan
        sizes = {chunk: plan.chunks[chunk].num_tokens for own in plan.groups.values()
                 for chunk in own[:-1]}  # fmt: skip
        most = max((chunk.num_tokens for chunk in plan.chunks), default=0)
        return len(set(sizes.values())) <= 1 and most <= max(sizes.values(), default=most)

    @cached_property
    def numbers_of_slices(self) -> set[int]:
        """Into how many pieces sequences are cut."""
        plan = self.plan
        return {len(plan.groups.get(i, (0,))) for i, n in enumerate(plan.seq_lens) if n > 16}

    @cached_property
    def numbers_retained(self) -> set[int]:
        """Graphs kept of each group of which some are dropped."""
        kept = {a.chunk: a.keep == "all" for a in self.forwards}
        groups = list(self.plan.groups.values())
        inside = {chunk for own in groups for chunk in own}
        groups += [(chunk,) for chunk in kept if chunk not in inside]
        flags = [[kept[chunk] for chunk in own if chunk in kept] for own in groups]
        return {sum(own) for own in flags if not all(own)}


def _chunked(t: Traits) -> bool:
    """Chunks of one size, never mixed, whose K,V stay on the device."""
    plain = t.all_sharded and t.equal_pieces and not (t.mixes or t.layer_first)
    return plain and t.on_device and t.checkpointed <= {(s, 0) for s, _ in t.checkpointed}


def _chunkflow(t: Traits) -> bool:
    same = len(t.numbers_retained) <= 1 and 0 not in t.numbers_retained
    return _chunked(t) and t.kept <= {"kv", "all"} and same


def _seco(t: Traits) -> bool:
    return _chunked(t) and t.kept == {"kv"} and not t.pipelined


def _infinipipe(t: Traits) -> bool:
    return t.pipelined and t.all_sharded and t.on_device and t.kept == {"all"}


def _whole(t: Traits) -> bool:
    """Whole sequences of which nothing is dropped."""
    whole = not (t.cuts or t.layer_first)
    return whole and t.on_device and t.kept == {"all"} and t.one_number


def _flexsp(t: Traits) -> bool:
    return _whole(t) and not t.pipelined and t.disjoint


def _skrull(t: Traits) -> bool:
    """One process or a whole group for each sequence, groups of one size."""
    return _whole(t) and not t.pipelined and len(t.sizes - {1}) <= 1


def _static(t: Traits) -> bool:
    return _skrull(t) and len(t.sizes) <= 1


def _fpdt(t: Traits) -> bool:
    high = set(t.plan.stages) == {1}
    plain = t.all_sharded and t.equal_pieces and not (t.mixes or t.pipelined)
    # K,V of the last layer are there when its backward starts
    last = len(t.plan.stages) - 1
    inputs = all(a.keep == ("kv" if a.stage == last else "input") for a in t.forwards)
    return high and plain and inputs and t.checkpointed <= {(s, 0) for s, _ in t.checkpointed}


def _seq1f1b(t: Traits) -> bool:
    plain = t.all_sharded and t.on_device and not (t.mixes or t.layer_first)
    cut = t.equal_pieces or len(t.numbers_of_slices) <= 1
    return plain and cut and t.kept == {"all"} and t.one_number


_WRITERS: dict[str, Callable[[Traits], bool]] = {
    "ChunkFlow": _chunkflow,
    "InfiniPipe": _infinipipe,
    "Skrull": _skrull,
    "SeCO": _seco,
    "FPDT": _fpdt,
    "FlexSP": _flexsp,
    "Ulysses": lambda t: _static(t) and t.sizes != {1},
    "Data parallel": lambda t: _static(t) and t.sizes <= {1},
    "1F1B": lambda t: _whole(t) and t.all_sharded,
    "Seq1F1B": _seq1f1b,
}


def writers(plan: ChunkPlan, shape: ModelShape) -> tuple[str, ...]:
    """The published methods that could have written the plan; none: only a combination can."""
    if plan.sampled:  # SpaCO is no method of the search: its gradients are others
        return ()
    traits = Traits(plan, shape.num_heads)
    possible = _WRITERS if traits.within_heads else {"1F1B": _WRITERS["1F1B"]}
    return tuple(name for name, could in possible.items() if could(traits))
