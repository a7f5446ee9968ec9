"""The data types of a plan: slices, chunks, actions, the plan itself, and its layout.

A plan covers a grid. Its columns are chunks (at most `chunk_size` tokens of one or more sequences),
its rows are stages (consecutive layers); a cell is (chunk, stage). For each rank the plan lists
actions on these cells, in order. With sequence parallelism a rank of a plan is a pool of `sp_size`
processes. Everything here is immutable and free of torch.

A sequence may branch: one prompt with several answers, laid out as one sequence.

    tokens      0          75       92       110         a prompt, then two answers to it
    pieces      [ prompt  )[ one   )[ two    )           two continues from token 75, the end of
                                                         its parent

A piece attends to its path (its parent, the parent's parent, and so on), and position ids continue
along it. Pieces are laid out depth-first, so all pieces that see a piece directly follow it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

Keep = Literal["input", "kv", "attention", "all"]
"""Tensors that a cell keeps after its forward. input: the stage input; kv: also its K,V; attention:
also each layer's attention output and log-sum-exp; all: its whole autograd graph."""

OffloadTarget = Literal["none", "cpu", "disk"]
"""Where tensors are stored between the actions that use them; none: on the device."""
OffloadKind = Literal["kv", "inputs", "attention", "graphs"]
Order = Literal["chunk-first", "layer-first"]
ChunkKind = Literal["packed", "split", "hybrid", "dummy"]
Payload = Literal["activation", "gradient"]


@dataclass(frozen=True, slots=True)
class Offload:
    """Where each kind of kept tensor is stored: on the device, in CPU memory or on disk."""

    kv: OffloadTarget = "none"
    """K,V of cut sequences, and their gradients."""
    inputs: OffloadTarget = "none"
    """Stage inputs, and later the gradients that replace them."""
    attention: OffloadTarget = "none"
    """Attention outputs with their log-sum-exps, so that a recompute skips attention."""
    graphs: OffloadTarget = "none"
    """Saved tensors of retained autograd graphs."""

    @property
    def targets(self) -> list[OffloadTarget]:
        """The targets of the kinds of tensors that do not stay on the device."""
        kinds = (self.kv, self.inputs, self.attention, self.graphs)
        return [target for target in kinds if target != "none"]


TARGETS: tuple[OffloadTarget, ...] = ("cpu", "disk")
"""The targets off the device."""
ON_DEVICE = Offload()


@dataclass(frozen=True, slots=True)
class Place:
    """The sequence-parallel group of a slice: processes [first, first + size) of a pool, which has
    `sp_size` processes. The tokens of the slice are divided equally among them."""

    first: int
    size: int

    @property
    def stop(self) -> int:
        return self.first + self.size


FIRST_PROCESS = Place(0, 1)


def place_sizes(sp_size: int) -> tuple[int, ...]:
    """Return the possible sizes of sequence-parallel groups (`Place`) in a pool of `sp_size`
    processes, ascending: the divisors of `sp_size`. A group begins at a multiple of its size, so a
    process is in exactly one group of each size."""
    return tuple(size for size in range(1, sp_size + 1) if sp_size % size == 0)


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [start, stop) of one sequence inside a chunk."""

    seq_id: int
    start: int
    stop: int
    place: Place = FIRST_PROCESS
    parent: int | None = None
    """End of the piece that it continues; None: it continues the piece before it, at `start`."""

    @property
    def goes_on_from(self) -> int:
        return self.start if self.parent is None else self.parent

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Chunk:
    """The slices that one forward computes together.

    A slice with `start > 0` has a prefix: the earlier tokens of its sequence, or of its path where
    the sequence branches. Slices on larger sequence-parallel groups (`Place`) come first, then
    those on groups of lower processes: the order of their all-to-alls. A chunk without slices is a
    dummy: each process computes one token of no sequence, without a label.
    """

    slices: tuple[Slice, ...]

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.slices)

    @property
    def is_dummy(self) -> bool:
        """Whether the chunk has no slices. Its rank has it only to join collectives: passes of
        other ranks (see `ChunkPlan.regathers`), or the Reduce if the rank has no other chunk."""
        return not self.slices


@dataclass(frozen=True, slots=True)
class Forward:
    chunk: int
    stage: int
    keep: Keep
    recompute_layers: int = 0
    """Number of first layers of the stage that are checkpointed one by one (InfiniPipe's l)."""


@dataclass(frozen=True, slots=True)
class Recompute:
    chunk: int
    stage: int
    recompute_layers: int = 0


@dataclass(frozen=True, slots=True)
class Backward:
    chunk: int
    stage: int
    loss_factor: float = 1.0
    """Factor of the chunk's loss (SpaCO's a)."""
    relay_factor: float = 1.0
    """Factor of the dK,dV received from later chunks (SpaCO's c)."""


@dataclass(frozen=True, slots=True)
class RebuildKV:
    """Compute K,V of a chunk at a stage again: run the stage's forward without gradients, up to its
    last K,V projection."""

    chunk: int
    stage: int


@dataclass(frozen=True, slots=True)
class Send:
    payload: Payload
    chunk: int
    stage: int
    """The stage whose output (activation) or input gradient (gradient) is sent."""
    peer: int


@dataclass(frozen=True, slots=True)
class Recv:
    payload: Payload
    chunk: int
    stage: int
    """The stage of the matching Send."""
    peer: int


@dataclass(frozen=True, slots=True)
class Unshard:
    """Gather the weights of a stage, until its Reshard or for the rest of the step."""

    stage: int


@dataclass(frozen=True, slots=True)
class Reshard:
    """Free the gathered weights of a stage; each process keeps its shard."""

    stage: int


@dataclass(frozen=True, slots=True)
class Reduce:
    stage: int


Computing = Forward | Recompute | Backward | RebuildKV
COMPUTING = (Forward, Recompute, Backward, RebuildKV)
MESSAGES = (Send, Recv)
ON_PARAMETERS = (Unshard, Reshard, Reduce)
Action = Computing | Send | Recv | Unshard | Reshard | Reduce


Bounds = tuple[int, int, int]
"""(start, stop, end of the piece that it continues) of a slice."""


@dataclass(frozen=True)
class Tree:
    """The pieces of a sequence as a tree, numbered depth-first; without branches a chain."""

    parents: tuple[int, ...]
    """For each piece, the earlier piece that it continues; -1 for the first."""

    @cached_property
    def continued(self) -> tuple[bool, ...]:
        """For each piece, whether another piece continues it."""
        followed = set(self.parents)
        return tuple(piece in followed for piece in range(len(self.parents)))

    def path(self, piece: int) -> list[int]:
        """Return the ancestors of a piece, from the root down: the pieces that it sees."""
        found = []
        while (piece := self.parents[piece]) >= 0:
            found.append(piece)
        return found[::-1]

    def stops(self, lens: Sequence[int]) -> list[int]:
        """Return the position id at which each piece ends. `lens`: tokens of each piece."""
        found: list[int] = []
        for parent, n in zip(self.parents, lens, strict=True):
            found.append(n + (found[parent] if parent >= 0 else 0))
        return found


_OF_CHUNKS = ("groups", "trees", "links", "num_computed", "piece_lens", "continues")
"""Properties derived from a plan's chunks; all but the first three may also depend on actions."""


@dataclass(frozen=True)
class ChunkPlan:
    """The actions of each rank on one global batch."""

    seq_lens: tuple[int, ...]
    """Tokens of each sequence; a slice's `seq_id` is an index into it."""
    chunks: tuple[Chunk, ...]
    stages: tuple[int, ...]
    """Layers of each stage, from the first to the last."""
    actions: tuple[tuple[Action, ...], ...]
    """actions[rank]: that rank's actions in order. A rank is a pool of `sp_size` processes, which
    all run the same list."""
    offload: Offload = ON_DEVICE
    sp_size: int = 1
    sampled: bool = False
    """Whether chunks may lack a Backward (SpaCO draws the chunks that get one)."""
    report_loss: bool = True
    """Whether chunks without a Backward compute their loss. If False (sampled plans only), they
    stop at their last K,V, and those that no drawn chunk reads have no Forward."""
    two_phases: bool = False
    """Whether the caller computes the loss from the last stage's outputs, between two phases:
    first all Forwards, each run to its end, then all other actions."""
    frozen_stages: int = 0
    """Number of first stages that have no Backward: all their parameters are frozen."""
    regathers: bool = False
    """Whether each pass gathers the weights of its stage anew, layer by layer, as ZeRO-3 does.
    Unless `replicated`, each pass is then a collective of all ranks that hold the stage: they run
    in lockstep, with equally many passes in one order of forwards and backwards, and ranks with
    less work have dummy chunks."""
    replicated: bool = False
    """Whether each rank of a stage holds all its weights, sharded over its pool only (HSDP). A pass
    that gathers weights is then a collective of one pool."""

    def __getstate__(self) -> dict[str, object]:
        """Return the fields only: cached properties are not pickled."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def with_actions(self, actions: tuple[tuple[Action, ...], ...]) -> ChunkPlan:
        """Return a plan with the same chunks and other actions. It takes over cached properties
        that depend on the chunks alone, so that they are not computed again."""
        made = replace(self, actions=actions)
        # without `report_loss` the rest depends on which chunks have a Forward
        names = _OF_CHUNKS if self.report_loss else _OF_CHUNKS[:3]
        vars(made).update({name: getattr(self, name) for name in names})
        vars(made)["_loads"] = vars(self).setdefault("_loads", {})  # see `cost.memory`
        return made

    @cached_property
    def checksum(self) -> int:
        """CRC-32 of all fields, by which processes compare their plans."""
        return zlib.crc32(repr(self).encode())

    @cached_property
    def reshards(self) -> bool:
        """Whether the plan frees gathered weights before the step ends."""
        return any(isinstance(action, Reshard) for own in self.actions for action in own)

    @cached_property
    def sizes_of_places(self) -> tuple[int, ...]:
        """All sizes of sequence-parallel groups that slices of the plan have, ascending; (1,) if no
        sequence is sharded."""
        return tuple(sorted({p.place.size for chunk in self.chunks for p in chunk.slices})) or (1,)

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the stages that it holds (runs a Forward of), ascending."""
        stages = ({a.stage for a in own if isinstance(a, Forward)} for own in self.actions)
        return tuple(tuple(sorted(own)) for own in stages)

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the ranks that hold it, ascending."""
        return tuple(
            tuple(rank for rank, held in enumerate(self.held) if stage in held)
            for stage in range(len(self.stages))
        )

    @cached_property
    def groups(self) -> dict[int, tuple[int, ...]]:
        """The chunks of each cut sequence in the order of its tokens, by seq_id."""
        pieces: dict[int, list[tuple[int, int]]] = {}
        for index, chunk in enumerate(self.chunks):
            for piece in chunk.slices:
                pieces.setdefault(piece.seq_id, []).append((piece.start, index))
        return {
            seq_id: tuple(dict.fromkeys(index for _, index in sorted(starts)))
            for seq_id, starts in pieces.items()
            if len(starts) > 1
        }

    @cached_property
    def trees(self) -> dict[int, Tree]:
        """The tree of each sequence that branches, by seq_id. Its nodes are the sequence's chunks,
        in the order of `groups`."""
        return {
            seq_id: _tree_of([self.bounds(seq_id, c) for c in self.groups.get(seq_id, ())])
            for seq_id in {s.seq_id for c in self.chunks for s in c.slices if s.parent is not None}
        }

    @cached_property
    def _behind(self) -> dict[int, dict[int, int]]:
        """Position ids for the pieces of sequences that branch, as {seq_id: {stop: position id}}. A
        piece that continues the slice which ends at token `stop` begins with this position id."""
        behind: dict[int, dict[int, int]] = {}
        for seq_id in self.trees:
            own = behind[seq_id] = {0: 0}
            bounds = (b for c in self.groups[seq_id] for b in self.bounds(seq_id, c))
            for start, stop, before in sorted(bounds):
                own[stop] = own[before] + stop - start
        return behind

    def bounds(self, seq_id: int, chunk: int) -> list[Bounds]:
        """Return one tuple (start, stop, goes_on_from) for each slice of a sequence in a chunk. The
        slice is tokens [start, stop); it continues the piece that ends at token `goes_on_from`."""
        own = (s for s in self.chunks[chunk].slices if s.seq_id == seq_id)
        return [(s.start, s.stop, s.goes_on_from) for s in own]

    def position(self, piece: Slice) -> int:
        """Return a slice's first position id: the number of tokens before it on its path."""
        behind = self._behind.get(piece.seq_id)
        return piece.start if behind is None else behind[piece.goes_on_from]

    def token_position(self, chunk: int, seq_id: int, token: int) -> int:
        """Return the position id of a token, which is in a slice of the chunk: the number of tokens
        before it on its path. `token`: its index in the sequence `seq_id`."""
        if seq_id not in self._behind:
            return token
        slices = (s for s in self.chunks[chunk].slices if s.seq_id == seq_id)
        piece = next(s for s in slices if s.start <= token < s.stop)
        return self.position(piece) + token - piece.start

    @cached_property
    def links(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each chunk, a pair (seq_id, i) for each cut sequence that has a piece in the chunk:
        the chunk is number i among all chunks of this sequence."""
        links: list[list[tuple[int, int]]] = [[] for _ in self.chunks]
        for seq_id, group in self.groups.items():
            for position, index in enumerate(group):
                links[index].append((seq_id, position))
        return tuple(tuple(pairs) for pairs in links)

    @cached_property
    def num_computed(self) -> dict[int, int]:
        """Number of first chunks of each cut sequence that have a Forward, by seq_id."""
        if self.report_loss:
            return {seq_id: len(group) for seq_id, group in self.groups.items()}
        computed = {a.chunk for acts in self.actions for a in acts if isinstance(a, Forward)}
        return {
            seq_id: sum(chunk in computed for chunk in group)
            for seq_id, group in self.groups.items()
        }

    @cached_property
    def piece_lens(self) -> dict[int, list[int]]:
        """Tokens of each cut sequence in each of its chunks that have a Forward, by seq_id."""
        return {
            seq_id: [
                sum(stop - start for start, stop, _ in self.bounds(seq_id, chunk))
                for chunk in group[: self.num_computed[seq_id]]
            ]
            for seq_id, group in self.groups.items()
        }

    @cached_property
    def continues(self) -> tuple[bool, ...]:
        """For each chunk, whether a later chunk reads its K,V."""
        return tuple(any(self.is_read(*pair) for pair in pairs) for pairs in self.links)

    def is_read(self, seq_id: int, position: int) -> bool:
        """Whether a later chunk of the sequence reads the K,V of its chunk number `position`."""
        tree = self.trees.get(seq_id)
        return tree.continued[position] if tree else position < self.num_computed[seq_id] - 1

    @cached_property
    def trained(self) -> frozenset[int]:
        """The chunks that have a Backward."""
        return frozenset(a.chunk for acts in self.actions for a in acts if isinstance(a, Backward))

    def kind(self, chunk: int) -> ChunkKind:
        """Return the kind of a chunk. packed: whole sequences; split: a piece of one sequence;
        hybrid: the last piece of one sequence, and whole sequences; dummy: no slice."""
        slices = self.chunks[chunk].slices
        if not slices:
            return "dummy"
        whole = [s.start == 0 and s.stop == self.seq_lens[s.seq_id] for s in slices]
        if all(whole):
            return "packed"
        return "hybrid" if any(whole) else "split"


def _tree_of(group: Sequence[Sequence[Bounds]]) -> Tree:
    """Return the tree of a sequence's chunks. `group`: for each chunk, the bounds of the sequence's
    slices in it, (start, stop, end of the piece it continues); all slices in one chunk continue the
    same piece. Raises KeyError if a slice does not continue the end of an earlier slice."""
    by_stop, parents = {0: -1}, []
    for number, slices in enumerate(group):
        parents.append(by_stop[slices[0][2]])
        by_stop |= {stop: number for _, stop, _ in slices}
    return Tree(tuple(parents))


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """`dp` replicas, each a pipeline of `pp` stages, each stage on a group of `sp` devices."""

    dp: int = 1
    sp: int = 1
    pp: int = 1

    @property
    def num_devices(self) -> int:
        return self.dp * self.sp * self.pp

    def __str__(self) -> str:
        return f"dp {self.dp} x sp {self.sp} x pp {self.pp}"


ONE_DEVICE = Layout()


def first_device(plan_rank: int, layout: Layout) -> int:
    """Return the global rank of the first device that runs actions[plan_rank].

    Action lists are numbered replica by replica and, within a replica, stage by stage. Devices are
    numbered with sp innermost and pp outermost, so that devices which share a stage's weights are
    neighbours.
    """
    replica, stage = divmod(plan_rank, layout.pp)
    return (stage * layout.dp + replica) * layout.sp
