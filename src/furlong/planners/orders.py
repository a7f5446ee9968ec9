"""Orders of actions, and the plans that they make of groups of chunks.

    schedule_group       chunk-first, one group at one stage (ChunkFlow, Algorithm 2, corrected)
    state_aware_lists    a pipeline in state-aware 1F1B (ChunkFlow, Figures 6 and 7)
    walk_layer_first     one stage for all chunks of a group, then the next (SeCO, FPDT)
    seq1f1b_cells        a pipeline in token-level 1F1B (Seq1F1B, InfiniPipe)
    plan_on_device       one device, in the order that `ChunkOptions` say
    plan_replica         one replica of a run: all layers on one pool, or a pipeline of pools
    plan_two_phases      every forward, then, for a loss that the caller makes, the rest
    join_replicas        one plan of a global batch from those of its data-parallel replicas

Chunk-first: forwards ascend, and all but the last `num_retained` chunks drop their graphs; then
backwards descend and recompute what was dropped. Groups run one after another, each through all
stages and back. The other order, every stage over all groups, would hold the hidden states of the
whole batch at every stage at once; it would only gather sharded parameters less often.

State-aware 1F1B: all chunks are forwarded in the order of their groups. The backwards of a group,
with the recomputes of what was dropped, are bound to the place of its last chunk. Stage s of P runs
P - 1 - s forwards ahead, then a forward and what is bound to its place in turn, and holds at most
P - 1 - s + num_retained graphs. Where every group is one chunk this is plain 1F1B, the order of
Megatron-LM. Data dependencies never close a circle, and neighbours agree on the order of messages
per direction, so a Send that does not wait and a queue per direction are all it needs.

Token-level 1F1B: forwards in the order of the groups; backwards last in, first out within a group,
first in, first out across groups. Stage s of P runs P - 1 - s + N - 1 forwards ahead, N chunks
being the longest group, then one forward and one backward in turn. Every chunk keeps its graph; a
stage holds those of at most P - 1 - s + N chunks, its window. Places start at 0.

Layer-first: all stages are on one rank (or one sp group), so nothing is sent. Between forward and
backward a cell keeps its stage input; K,V live for one stage at a time, and are rebuilt when the
backward comes to it. The last stage turns around on the spot: its K,V are still there. With one
stage this is SeCO's walk, with one layer per stage FPDT's. In between, a stage of h of L layers
holds L/h hidden states and h layers of K,V with their gradients per token: the peak is lowest near
h = sqrt(L * hidden bytes / K,V bytes per layer).

Two phases: F0 F1 F2 F3 | K0 K1 R2 B2 R1 B1 R0 B0 R3 B3 | reduce, for chunks 0 to 2 of one sequence,
and 3. Between them live the K,V and what `keep` says of all sequences, but no graph.

Replica d of plans with p ranks each becomes the ranks d * p and following. The replicas share the
Reduce of each stage, which all ranks of that stage join, and under ZeRO-3 all passes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Literal

from furlong.cost.shape import ModelShape
from furlong.errors import ConfigError
from furlong.plan.check import check
from furlong.plan.plan import (
    ON_DEVICE,
    Action,
    Backward,
    Chunk,
    ChunkPlan,
    Computing,
    Forward,
    Keep,
    RebuildKV,
    Recompute,
    Recv,
    Reduce,
    Send,
    Slice,
    Tiers,
    Unshard,
)
from furlong.planners.chunks import (
    Forks,
    Groups,
    group_chunks,
    refuse_idle,
    shard,
    shard_long,
)
from furlong.planners.options import ChunkOptions


def schedule_group(
    chunks: Sequence[int],
    *,
    num_retained: int,
    keep: Keep,
    backward: bool = True,
    stage: int = 0,
    recompute_layers: int = 0,
) -> list[Action]:
    """Actions for `chunks`: all pieces of one sequence in order, or one packed chunk.

    The last `num_retained` keep their whole graphs, the others what `keep` says; the first
    `recompute_layers` layers of every graph keep only their input. Without backward nothing
    outlives its last reader, and none of this matters.
    """
    if not backward:
        return [Forward(chunk, stage, "input") for chunk in chunks]
    num_dropped = 0 if keep == "all" else max(0, len(chunks) - num_retained)
    dropped, retained = chunks[:num_dropped], chunks[num_dropped:]
    actions: list[Action] = [Forward(chunk, stage, keep) for chunk in dropped]
    actions += [Forward(chunk, stage, "all", recompute_layers) for chunk in retained]
    if keep == "input":
        # Every Backward reads the K,V of all earlier chunks, those of retained chunks too, so all
        # that later chunks read is rebuilt first; the group's last chunk has no reader.
        actions += [RebuildKV(chunk, stage) for chunk in dropped if chunk != chunks[-1]]
    actions += [Backward(chunk, stage) for chunk in reversed(retained)]
    for chunk in reversed(dropped):
        actions += [Recompute(chunk, stage, recompute_layers), Backward(chunk, stage)]
    return actions


RecomputeStart = Literal["eager", "lazy"]
"""Moments at which a dropped chunk may be recomputed: as soon as its stage is free, or after the
gradient of its output has arrived (then it is part of the backward; never faster, and what
ChunkFlow draws)."""


def plan_1f1b(
    seq_lens: Sequence[int],
    groups: Groups,
    *,
    stages: Sequence[int],
    tiers: Tiers = ON_DEVICE,
    sp_size: int = 1,
    frozen_stages: int = 0,
    backward: bool = True,
    **dials: Any,
) -> ChunkPlan:
    """A checked plan of any groups in state-aware 1F1B, in the order in which they are listed.

    `stages`: layers per stage; rank s holds stage s. The first `frozen_stages`, with nothing to
    train in them or below, only run forward; without backward all do. `dials`: those of
    `state_aware_lists`.
    """
    numbered = number_chunks(groups)
    first = frozen_stages if backward else len(stages)
    lists = state_aware_lists(numbered, stages, frozen_stages=first, **dials)
    return assemble(
        seq_lens, groups, stages, lists, tiers=tiers, sp_size=sp_size,
        frozen_stages=frozen_stages if backward else 0,
    )  # fmt: skip


def state_aware_lists(
    numbered: Sequence[range],
    stages: Sequence[int],
    *,
    num_retained: int = 1,
    keep: Keep = "kv",
    recompute: RecomputeStart = "eager",
    recompute_layers: int = 0,
    frozen_stages: int = 0,
) -> list[list[Action]]:
    """The list of every rank for groups whose chunks have the numbers `numbered`.

    Dropped chunks keep what `keep` says, the others recompute `recompute_layers` of each stage; the
    first `frozen_stages` only run forward.
    """
    lists = []
    for stage, height in enumerate(stages):
        schedules = [
            schedule_group(
                group,
                num_retained=num_retained,
                keep=keep,
                backward=stage >= frozen_stages,
                stage=stage,
                recompute_layers=min(recompute_layers, height),
            )
            for group in numbered
        ]
        cells = _interleave(schedules, num_ahead=len(stages) - 1 - stage)
        lists.append(with_messages(cells, stage, len(stages), recompute, frozen_stages))
    return lists


def _interleave(schedules: Sequence[Sequence[Action]], *, num_ahead: int) -> list[Action]:
    """Forwards of all groups in order, `num_ahead` of them before anything else; what follows a
    group's forwards in its own schedule comes at the place of its last forward."""
    forwards: list[Action] = []
    bound: list[Sequence[Action]] = []
    for schedule in schedules:
        own = [action for action in schedule if isinstance(action, Forward)]
        forwards += own
        bound += [()] * (len(own) - 1) + [schedule[len(own) :]]
    cells = forwards[:num_ahead]
    for place, actions in enumerate(bound):
        cells += forwards[place + num_ahead : place + num_ahead + 1]
        cells += actions
    return cells


def number_chunks(groups: Groups) -> list[range]:
    """The indices of each group's chunks when the groups' chunks are numbered one after another."""
    starts = [0]
    for group in groups:
        starts.append(starts[-1] + len(group))
    return [range(a, b) for a, b in pairwise(starts)]


def with_messages(
    cells: Iterable[Action],
    stage: int,
    num_stages: int,
    recompute: RecomputeStart = "eager",
    frozen_stages: int = 0,
) -> list[Action]:
    """The list of rank `stage`: its cells, each with the messages from and to its neighbours.

    A message is received right before the cell that needs it and sent right after the cell that
    makes it, so that both ends have the order of their cells. No gradient goes to one of the first
    `frozen_stages`.
    """
    actions: list[Action] = []
    early = -1
    for action in cells:
        if isinstance(action, Forward) and stage > 0:
            actions.append(Recv("activation", action.chunk, stage - 1, stage - 1))
        lazy = isinstance(action, Recompute) and recompute == "lazy"
        if (lazy or isinstance(action, Backward)) and stage < num_stages - 1:
            assert isinstance(action, (Recompute, Backward))
            if action.chunk != early:
                actions.append(Recv("gradient", action.chunk, stage + 1, stage + 1))
            early = action.chunk
        actions.append(action)
        if isinstance(action, Forward) and stage < num_stages - 1:
            actions.append(Send("activation", action.chunk, stage, stage + 1))
        if isinstance(action, Backward) and stage > frozen_stages:
            actions.append(Send("gradient", action.chunk, stage, stage - 1))
    return actions


def assemble(
    seq_lens: Sequence[int],
    groups: Groups,
    stages: Sequence[int],
    lists: Iterable[Sequence[Action]],
    *,
    tiers: Tiers = ON_DEVICE,
    sp_size: int = 1,
    frozen_stages: int = 0,
    two_phases: bool = False,
    checked: bool = True,
) -> ChunkPlan:
    """The plan of every rank's list, checked unless told otherwise; a Reduce of each stage that has
    a Backward and none ends its list. K,V that no later chunk reads are not built again: those of
    the last ones of branches, and a group's chunks need not be pieces of one sequence."""
    plan = ChunkPlan(
        tuple(seq_lens), tuple(chunk for group in groups for chunk in group), tuple(stages),
        tuple((*actions, *_missing_reduces(actions)) for actions in lists), tiers, sp_size,
        frozen_stages=frozen_stages, two_phases=two_phases,
    )  # fmt: skip
    if any(_is_for_nobody(action, plan) for own in plan.actions for action in own):
        needed = (
            tuple(action for action in own if not _is_for_nobody(action, plan))
            for own in plan.actions
        )
        plan = replace(plan, actions=tuple(needed))
    if checked:
        check(plan)
    return plan


def _is_for_nobody(action: Action, plan: ChunkPlan) -> bool:
    return isinstance(action, RebuildKV) and not plan.continues[action.chunk]


def stage_heights(num_layers: int, stage_layers: int) -> tuple[int, ...]:
    """Layers per stage: as few stages as hold at most `stage_layers` each, of even height."""
    if num_layers < 1 or stage_layers < 1:
        raise ValueError(f"no stages of {stage_layers} of {num_layers} layers")
    num_stages = -(-num_layers // stage_layers)
    low, num_higher = divmod(num_layers, num_stages)
    return (low + 1,) * num_higher + (low,) * (num_stages - num_higher)


def walk_layer_first(
    chunks: Sequence[int],
    stages: Sequence[int],
    *,
    keep: Keep,
    num_retained: int = 0,
    recompute_layers: int = 0,
    frozen_stages: int = 0,
    backward: bool = True,
    reduces: bool = False,
    only: Collection[int] | None = None,
) -> list[Action]:
    """Actions for one group: all pieces of one sequence in order, or one packed chunk.

    `stages`: layers of each. `keep`: input and attention drop K,V after their stage (attention also
    keeps each layer's attention output, so that a recompute runs no attention); kv and all hold
    those of all stages. `num_retained`: that many last chunks keep their graph at the last stage,
    whose backward comes next; at any other stage a graph would be held through all stages behind
    it, which is what the walk spares (with `keep="all"` every cell does). `recompute_layers`: as
    many first layers of a cell's graph keep only their input. `frozen_stages`: first stages without
    a backward, for there is nothing to train in them or below. `reduces`: this is a rank's last
    group, and each stage is reduced behind its last Backward. `only`: those stages alone, for who
    wants the time of one stage of each kind. Without backward nothing outlives its last reader, and
    none of this matters.
    """
    last = len(stages) - 1
    walked = [stage for stage in range(last + 1) if only is None or stage in only]
    if not backward:
        return [Forward(c, stage, "input") for stage in walked for c in chunks]
    retained = frozenset(chunks[max(0, len(chunks) - num_retained) :])
    layers = [min(recompute_layers, height) for height in stages]

    def forward(chunk: int, stage: int) -> Forward:
        if stage < frozen_stages:
            return Forward(chunk, stage, "input")
        if keep == "all" or (stage == last and chunk in retained):
            return Forward(chunk, stage, "all", layers[stage])
        # the last stage's K,V are there until its backward, which comes next
        return Forward(chunk, stage, "kv" if keep == "input" and stage == last else keep)

    actions: list[Action] = [forward(c, stage) for stage in walked for c in chunks]
    for stage in reversed(walked):
        if stage < frozen_stages:
            break
        if stage < last and keep in ("input", "attention"):
            # the last chunk of a group has no reader
            actions += [RebuildKV(chunk, stage) for chunk in chunks[:-1]]
        for chunk in reversed(chunks):
            if keep != "all" and not (stage == last and chunk in retained):
                actions.append(Recompute(chunk, stage, layers[stage]))
            actions.append(Backward(chunk, stage))
        if reduces:
            actions.append(Reduce(stage))
    return actions


def plan_on_device(
    seq_lens: Sequence[int],
    options: ChunkOptions,
    *,
    num_layers: int,
    forks: Forks | None = None,
    **others: Any,
) -> ChunkPlan:
    """A checked plan for one device of the chunks that `options` make; `forks`: where sequences
    branch; `others` as for `plan_groups`."""
    groups = group_chunks(seq_lens, options, forks)
    return plan_groups(seq_lens, groups, options, num_layers=num_layers, **others)


def plan_groups(
    seq_lens: Sequence[int],
    groups: Groups,
    options: ChunkOptions,
    *,
    num_layers: int,
    backward: bool = True,
    frozen_layers: int = 0,
    sp_size: int = 1,
) -> ChunkPlan:
    """A checked plan of any groups for one device, or for one pool of `sp_size`; without backward
    a plan that only evaluates.

    `frozen_layers`: first layers without a trained parameter in them or below, so that neither
    recompute nor backward runs at stages of such layers alone. The last stage always has both, for
    the loss is in its backward; so chunk-first, with all layers in one stage, leaves nothing out.
    """
    stages = stages_of(num_layers, options)
    ends = list(accumulate(stages))[:-1]
    frozen_stages = sum(end <= frozen_layers for end in ends) if backward else 0
    numbered = number_chunks(groups)
    actions: list[Action] = []
    for numbers in numbered:
        actions += walk_group(
            numbers, stages, options, frozen_stages=frozen_stages, backward=backward,
            reduces=numbers is numbered[-1],
        )  # fmt: skip
    return assemble(
        seq_lens, groups, stages, [actions], tiers=options.tiers, sp_size=sp_size,
        frozen_stages=frozen_stages,
    )  # fmt: skip


def stages_of(num_layers: int, options: ChunkOptions) -> tuple[int, ...]:
    """Layers of each stage."""
    if options.order == "chunk-first":
        return (num_layers,)
    return stage_heights(num_layers, options.stage_layers or 1)


def walk_group(
    chunks: Sequence[int],
    stages: Sequence[int],
    options: ChunkOptions,
    *,
    backward: bool = True,
    reduces: bool = False,
    **layer_first: Any,
) -> list[Action]:
    """The actions of one group. `reduces`: it is a rank's last one, and each stage is reduced
    behind its last Backward; `layer_first`: more for `walk_layer_first`."""
    dials: dict[str, Any] = {
        "keep": options.kept, "num_retained": options.num_retained, "backward": backward,
        "recompute_layers": min(options.recompute_layers, stages[0]),
    }  # fmt: skip
    if options.order == "layer-first":
        return walk_layer_first(chunks, stages, reduces=reduces, **dials, **layer_first)
    actions = schedule_group(chunks, **dials)
    return [*actions, Reduce(0)] if reduces and backward else actions


def plan_seq1f1b(
    seq_lens: Sequence[int],
    groups: Groups,
    *,
    stages: Sequence[int],
    recompute_layers: Sequence[Sequence[int]] = (),
    tiers: Tiers = ON_DEVICE,
    sp_size: int = 1,
    frozen_stages: int = 0,
) -> ChunkPlan:
    """A checked plan of any groups in token-level 1F1B, in the order in which they are listed.

    `stages`: layers per stage; rank s holds stage s. `recompute_layers[stage][chunk]`: how many
    layers of the cell are checkpointed, each by its own input (default none). The first
    `frozen_stages`, with nothing to train in them or below, only run forward.
    """
    lists = token_level_lists(number_chunks(groups), stages, recompute_layers, frozen_stages)
    return assemble(
        seq_lens, groups, stages, lists, tiers=tiers, sp_size=sp_size, frozen_stages=frozen_stages
    )


def token_level_lists(
    numbered: Sequence[range],
    stages: Sequence[int],
    recompute_layers: Sequence[Sequence[int]] = (),
    frozen_stages: int = 0,
) -> list[list[Action]]:
    """The list of every rank for groups whose chunks have the numbers `numbered`; the first
    `frozen_stages` only run forward."""
    num_stages, lists = len(stages), []
    for stage, row in enumerate(recompute_layers or [()] * num_stages):
        cells = seq1f1b_cells(numbered, num_stages, stage, row)
        if stage < frozen_stages:
            cells = [Forward(chunk, stage, "input") for chunks in numbered for chunk in chunks]
        lists.append(with_messages(cells, stage, num_stages, frozen_stages=frozen_stages))
    return lists


def seq1f1b_cells(
    numbered: Sequence[range],
    num_stages: int,
    stage: int,
    recompute_layers: Sequence[int] = (),
) -> list[Action]:
    """The cells of one stage in order, for groups whose chunks have the numbers `numbered`.

    `recompute_layers`: those of each chunk, in forward order (default none).
    """
    forwards = [chunk for chunks in numbered for chunk in chunks]
    backwards = [chunk for chunks in numbered for chunk in reversed(chunks)]
    layers = recompute_layers or [0] * len(forwards)
    cells: list[Action] = [
        Forward(chunk, stage, "all", count) for chunk, count in zip(forwards, layers, strict=True)
    ]
    num_ahead = count_ahead([len(chunks) for chunks in numbered], num_stages, stage)
    paired: list[Action] = cells[:num_ahead]
    for place, chunk in enumerate(backwards):
        paired += cells[place + num_ahead : place + num_ahead + 1]
        paired.append(Backward(chunk, stage))
    return paired


def count_ahead(counts: Sequence[int], num_stages: int, stage: int) -> int:
    """Number of forwards before the first pair (Seq1F1B; InfiniPipe's Eq. 7 counts one more)."""
    return min(num_stages - 1 - stage + max(counts) - 1, sum(counts))


def backward_places(counts: Sequence[int]) -> list[int]:
    """Place in backward order of each chunk in forward order (InfiniPipe's f2b).

    `counts`: the chunks of each group, in the order in which they run.
    """
    places: list[int] = []
    for count in counts:
        places += range(len(places) + count - 1, len(places) - 1, -1)
    return places


def recompute_on_diagonals(
    layers: Sequence[int], counts: Sequence[int], heights: Sequence[int]
) -> list[list[int]]:
    """Values for recompute_layers[stage][chunk], equal along each diagonal of the schedule but for
    stages that have fewer layers; `heights`: those of each stage.

    `layers` has one value per diagonal, len(chunks) + len(heights) - 1 of them (InfiniPipe, Eq. 15
    and 16). To recompute in one cell of a diagonal takes as long as in all of them.
    """
    places, last = backward_places(counts), len(heights) - 1
    return [
        [min(layers[place + last - stage], height) for place in places]
        for stage, height in enumerate(heights)
    ]


def plan_two_phases(
    seq_lens: Sequence[int], options: ChunkOptions, *, num_layers: int, forks: Forks | None = None
) -> ChunkPlan:
    """A checked plan for one device whose loss stands between its forwards and its backwards.

    `forks`: where sequences branch. `num_retained` is as 0. Raises ConfigError for graphs that
    should be kept, for samples and for layer-first.
    """
    require_two_phases(options)
    groups = group_chunks(seq_lens, options, forks)
    numbered = number_chunks(groups)
    layers = min(options.recompute_layers, num_layers)
    actions: list[Action] = [Forward(c, 0, options.kept) for group in numbered for c in group]
    for group in reversed(numbered):
        if options.keep == "input":
            actions += [RebuildKV(chunk, 0) for chunk in group[:-1]]
        for chunk in reversed(group):
            actions += [Recompute(chunk, 0, layers), Backward(chunk, 0)]
    return assemble(
        seq_lens, groups, (num_layers,), [actions], tiers=options.tiers, two_phases=True
    )


def require_two_phases(options: ChunkOptions) -> None:
    """Raise ConfigError for options that two phases have not."""
    odd: tuple[tuple[bool, str, Any, str], ...] = (
        (options.keep == "all", "keep", options.keep,
         "input, kv, attention or auto: no graph lives until the caller has made a loss"),
        (options.order != "chunk-first", "order", options.order,
         "chunk-first: all forwards run before the caller makes a loss"),
        (options.sampling is not None, "sample", options.sampling,
         "none: the caller's loss wants the gradient of all that it reads"),
    )  # fmt: skip
    for is_odd, name, value, required in odd:
        if is_odd:
            raise ConfigError(
                given=f"chunks.{name} = {value!r:.60}",
                required=required,
                source="the options of token_values, hidden_states or furlong.chunked",
                change=f"leave {name} out",
            )


def plan_replica(
    seq_lens: Sequence[int],
    options: ChunkOptions,
    *,
    num_layers: int,
    stages: Sequence[int] = (),
    sp_size: int = 1,
    backward: bool = True,
    frozen_layers: int = 0,
    local_in: ModelShape | None = None,
) -> ChunkPlan:
    """A checked plan of the chunks that `options` make, every slice shared by all `sp_size`
    processes of a pool, or with the shape `local_in` of a model whole sequences on one process as
    far as its work then balances.

    `stages`: layers of each stage of a pipeline, which is walked in state-aware 1F1B; without one
    the order is that of `options`. `frozen_layers`: first layers without a trained parameter in
    them or below.
    """
    groups = group_chunks(seq_lens, options)
    if local_in is None:
        groups = shard(groups, sp_size)
    else:
        groups = shard_long(groups, seq_lens, local_in, sp_size)
    if len(stages) < 2:
        return plan_groups(
            seq_lens, groups, options, num_layers=num_layers, backward=backward,
            frozen_layers=frozen_layers, sp_size=sp_size,
        )  # fmt: skip
    ends = list(accumulate(stages))[:-1]
    return plan_1f1b(
        seq_lens, groups, stages=stages, tiers=options.tiers, sp_size=sp_size,
        frozen_stages=sum(end <= frozen_layers for end in ends), backward=backward,
        num_retained=options.num_retained, keep=options.kept,
        recompute_layers=options.recompute_layers,
    )  # fmt: skip


def join_replicas(
    plans: Sequence[ChunkPlan],
    seq_ids: Sequence[Sequence[int]],
    seq_lens: Sequence[int],
    *,
    regathers: bool = False,
) -> ChunkPlan:
    """A checked plan of the global batch `seq_lens`.

    `plans[d]` is the plan of replica d for the sequences `seq_ids[d]` of the batch, numbered from 0
    in that order. All have the same stages, as many of them frozen, and the same ranks, sp_size and
    tiers. A rank with a Backward whose plan left out the Reduce of a stage gets it at its end.
    `regathers`: weights are gathered with every pass, and the replicas' passes must be equal.
    A replica without sequences has the plan of a dummy (`idle_plan`).
    Raises ConfigError where there is no sequence, ValueError for plans that
    differ or do not belong to the sequences, and PlanError for unequal passes.
    """
    refuse_idle(len(seq_lens), sum(bool(plan.seq_lens) for plan in plans))
    _refuse_different(plans, seq_ids, seq_lens)
    first = plans[0]
    num_ranks = len(first.actions)
    chunks: list[Chunk] = []
    actions: list[tuple[Action, ...]] = []
    for replica, (plan, own) in enumerate(zip(plans, seq_ids, strict=True)):
        first_chunk, first_rank = len(chunks), replica * num_ranks
        chunks += _renamed(plan.chunks, own)
        for listed in plan.actions:
            moved = _moved(listed, first_chunk, first_rank)
            actions.append((*moved, *_missing_reduces(listed)))
    joined = ChunkPlan(
        seq_lens=tuple(seq_lens), chunks=tuple(chunks), stages=first.stages, actions=tuple(actions),
        tiers=first.tiers, sp_size=first.sp_size, sampled=any(plan.sampled for plan in plans),
        frozen_stages=first.frozen_stages,
        regathers=regathers or any(plan.regathers for plan in plans),
    )  # fmt: skip
    check(joined)
    return joined


def join_kept(
    plans: Sequence[ChunkPlan],
    seq_ids: Sequence[Sequence[int]],
    seq_lens: Sequence[int],
    num_replicas: int,
) -> ChunkPlan:
    """The checked plan of a run's batch, in which weights are kept for the step: `join_replicas`,
    with dummies for replicas without a plan.

    Weights are gathered before the first chunk: a replica meets the others then only where
    gradients are added up, and one that fails in between can tell them.
    """
    num_idle = num_replicas - len(plans)
    some = [*plans, *[idle_plan(plans[0])] * num_idle]
    some = [replace(plan, actions=tuple(map(_gathering, plan.actions))) for plan in some]
    return join_replicas(some, [*seq_ids, *[[]] * num_idle], seq_lens)


def _gathering(actions: Sequence[Action]) -> tuple[Action, ...]:
    """The list of a rank, which first gathers the weights of its stages."""
    stages = {action.stage for action in actions if isinstance(action, Forward)}
    return (*map(Unshard, sorted(stages)), *actions)


def idle_plan(like: ChunkPlan) -> ChunkPlan:
    """The plan of a replica without sequences, beside one with the plan `like`: it takes one token
    of no sequence through all stages, so that its processes meet the others' collectives."""
    trained = any(isinstance(action, Backward) for listed in like.actions for action in listed)
    stages = range(len(like.stages))
    backwards = stages[like.frozen_stages :] if trained else ()
    cells: list[list[Action]] = [
        [Forward(0, stage, "all" if stage in backwards else "input")] for stage in stages
    ]
    ends: list[list[Action]] = [
        [Backward(0, stage), Reduce(stage)] if stage in backwards else [] for stage in stages
    ]
    if len(like.actions) == 1:
        lists = [[action for own in (*cells, *reversed(ends)) for action in own]]
    else:
        lists = [
            with_messages([*own, *end], stage, len(stages), frozen_stages=like.frozen_stages)
            for stage, own, end in zip(stages, cells, ends, strict=True)
        ]
    actions = tuple(map(tuple, lists))
    return replace(like, seq_lens=(), chunks=(Chunk(()),), actions=actions)


def _refuse_different(
    plans: Sequence[ChunkPlan], seq_ids: Sequence[Sequence[int]], seq_lens: Sequence[int]
) -> None:
    layouts = {
        (plan.stages, len(plan.actions), plan.sp_size, plan.tiers, plan.frozen_stages)
        for plan in plans
    }
    if len(layouts) > 1:
        shown = "; ".join(sorted(map(str, layouts)))
        raise ValueError(f"replicas differ in (stages, ranks, sp_size, tiers, frozen): {shown}")
    for replica, (plan, own) in enumerate(zip(plans, seq_ids, strict=True)):
        if plan.seq_lens != tuple(seq_lens[seq_id] for seq_id in own):
            raise ValueError(f"the plan of replica {replica} is not one of its sequences")


def _renamed(chunks: Iterable[Chunk], seq_ids: Sequence[int]) -> list[Chunk]:
    return [
        Chunk(tuple(Slice(seq_ids[s.seq_id], s.start, s.stop, s.place) for s in chunk.slices))
        for chunk in chunks
    ]


def _moved(actions: Sequence[Action], chunks: int, ranks: int) -> list[Action]:
    """The actions with chunk numbers and peers raised by so many."""
    moved: list[Action] = []
    for action in actions:
        if isinstance(action, (Send, Recv)):
            chunk, peer = action.chunk + chunks, action.peer + ranks
            moved.append(type(action)(action.payload, chunk, action.stage, peer))
        elif isinstance(action, Computing):
            moved.append(replace(action, chunk=action.chunk + chunks))
        else:
            moved.append(action)
    return moved


def _missing_reduces(actions: Iterable[Action]) -> list[Action]:
    """A Reduce for each stage with a Backward and without one, in the order of last Backwards."""
    trained: dict[int, None] = {}
    reduced: set[int] = set()
    for action in actions:
        if isinstance(action, Backward):
            trained.pop(action.stage, None)
            trained[action.stage] = None
        elif isinstance(action, Reduce):
            reduced.add(action.stage)
    return [Reduce(stage) for stage in trained if stage not in reduced]
