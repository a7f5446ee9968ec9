"""Orders of actions (schedules), and plan builders that apply them to groups of chunks.

A group is the chunks of one sequence, or one packed chunk.

Chunk-first: ChunkFlow's Algorithm 2 (planners/chunkflow.py). All stages run for one group, forward
and backward, before the next group begins. Layer-first, too, finishes one group before the next,
unless `reshard`.

Layer-first: within a group, one stage runs for all chunks, then the next stage. All stages are on
one rank, so nothing is sent. Between forward and backward each (chunk, stage) cell keeps its stage
input. K,V are stored for one stage at a time, and rebuilt when the backward reaches the stage. At
the last stage the backward follows the forward at once, so its K,V are still there. Only the last
stage may retain graphs; any other stage would hold them while all later stages run.

With one stage layer-first is SeCO's order, with one layer per stage FPDT's. With L layers in stages
of h layers, memory per token is L/h hidden states, and K,V with their gradients of h layers. The
peak is lowest near h = sqrt(L * hidden bytes / K,V bytes per layer).

With `reshard`, layer-first runs each stage for all groups before the next stage. Processes that
share weights then gather a stage once in the forward and once in the backward, however many chunks
there are. The price is memory for the whole batch's hidden states at each stage. Below are four
stages. Each is gathered (U) while the one before it runs, and freed (/) so that at most two are
whole at a time:

    U0 U1 F.0 | /0 U2 F.1 | /1 U3 F.2 | F.3 B.3 reduce 3 | /3 U1 B.2 reduce 2 | /2 U0 B.1 ...

State-aware 1F1B (planners/chunkflow.py): plain 1F1B as in Megatron-LM if each group is one chunk.
Data dependencies have no cycle, and neighbours agree on the order of messages per direction, so
non-blocking sends and a queue per direction suffice.

Token-level 1F1B: forwards run in the order of the groups. Backwards run last in, first out within a
group, and first in, first out across groups. With N chunks in the longest group, stage s of P runs
P - 1 - s + N - 1 forwards ahead, then one forward and one backward in turn. All chunks keep their
graphs; a stage holds at most P - 1 - s + N of them, its window.

Two phases: F0 F1 F2 F3 | K0 K1 R2 B2 R1 B1 R0 B0 R3 B3 | reduce, where chunks 0 to 2 are one
sequence (F forward, K rebuild K,V, R recompute, B backward). Between the phases K,V and the tensors
named by `keep` are held for all chunks, but no graph.

If a replica has p ranks, replica d becomes ranks d * p to d * p + p - 1 of the joined plan. All
ranks of a stage take part in its Reduce. Under ZeRO-3, where each pass gathers weights, they take
part in its passes, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, groupby, pairwise
from operator import attrgetter

from furlong.cost.shape import ModelShape
from furlong.errors import ConfigError, difference_words, differing, in_short
from furlong.plan.check import check
from furlong.plan.passes import keep_passes
from furlong.plan.plan import (
    ON_DEVICE,
    Action,
    Backward,
    Chunk,
    ChunkPlan,
    Forward,
    Keep,
    Offload,
    RebuildKV,
    Recompute,
    Recv,
    Reduce,
    Reshard,
    Send,
    Unshard,
)
from furlong.planners.chunks import (
    Forks,
    Groups,
    group_chunks,
    refuse_idle,
    shard_all,
    shard_long,
)
from furlong.planners.options import ChunkOptions


def schedule_group(
    chunks: Sequence[int],
    *,
    num_retained: int,
    keep: Keep,
    stage: int = 0,
    recompute_layers: int = 0,
    backward: bool = True,
    rebuilds: Collection[str] = ("input",),
) -> list[Action]:
    """Return the actions of one stage for `chunks`: those of one sequence, or one packed chunk.

    The last `num_retained` chunks keep their whole graphs. The other chunks keep the tensors that
    `keep` names, and recompute their graphs before their backwards. The first `recompute_layers`
    layers of each graph are checkpointed. If `keep` is among `rebuilds`, K,V are not stored until
    the backwards, and RebuildKV actions make them again. Without `backward` there are only
    forwards.
    """
    if not backward:
        return [Forward(chunk, stage, "input") for chunk in chunks]
    num_dropped = 0 if keep == "all" else max(0, len(chunks) - num_retained)
    dropped, retained = chunks[:num_dropped], chunks[num_dropped:]
    actions: list[Action] = [Forward(chunk, stage, keep) for chunk in dropped]
    actions += [Forward(chunk, stage, "all", recompute_layers) for chunk in retained]
    if keep in rebuilds:
        # Backwards read the K,V of all earlier chunks, the retained chunks' Backwards included, so
        # K,V of all dropped chunks come first; the group's last chunk has no reader.
        actions += [RebuildKV(chunk, stage) for chunk in dropped if chunk != chunks[-1]]
    actions += [Backward(chunk, stage) for chunk in reversed(retained)]
    for chunk in reversed(dropped):
        actions += [Recompute(chunk, stage, recompute_layers), Backward(chunk, stage)]
    return actions


def walk_groups(
    numbered: Sequence[Sequence[int]],
    stages: Sequence[int],
    options: ChunkOptions,
    *,
    frozen_stages: int = 0,
    backward: bool = True,
    only: Collection[int] | None = None,
) -> list[Action]:
    """Return the actions of a rank that has all stages and runs each stage for all groups of chunks
    before the next. At the last stage each group's backward follows its forward at once.

    `numbered`: chunk indices of each group. `stages`: layers of each stage. The first
    `frozen_stages`, in which nothing is trained, only run forward. `only`: stages whose actions are
    returned (for estimates); None: all.
    """
    schedules: list[list[list[Action]]] = []
    for stage, height in enumerate(stages):
        if only is not None and stage not in only:
            continue
        keep, num_retained = options.kept, options.num_retained
        rebuilds: tuple[str, ...] = ("input",)
        if options.order == "layer-first" and stage < len(stages) - 1:
            num_retained, rebuilds = 0, ("input", "attention")
        elif options.order == "layer-first" and keep == "input":
            keep = "kv"  # K,V are still stored, as the backward follows at once
        schedules.append([
            schedule_group(
                chunks, num_retained=num_retained, keep=keep, stage=stage, rebuilds=rebuilds,
                recompute_layers=min(options.recompute_layers, height),
                backward=backward and stage >= frozen_stages,
            )
            for chunks in numbered
        ])  # fmt: skip
    *others, last = ([action for own in groups for action in own] for groups in schedules)
    ahead, back = _there_and_back(others)
    return [*ahead, *last, *back]


def _there_and_back(schedules: Sequence[Sequence[Action]]) -> tuple[list[Action], list[Action]]:
    """Return two lists of actions: the forwards of all `schedules`, in order; and all their other
    actions, those of the last schedule first."""
    ahead: list[Action] = [a for own in schedules for a in own if isinstance(a, Forward)]
    return ahead, [a for own in reversed(schedules) for a in own if not isinstance(a, Forward)]


def plan_1f1b(
    seq_lens: Sequence[int],
    groups: Groups,
    *,
    stages: Sequence[int],
    offload: Offload = ON_DEVICE,
    sp_size: int = 1,
    frozen_stages: int = 0,
    backward: bool = True,
    num_retained: int = 1,
    keep: Keep = "kv",
    recompute_layers: int = 0,
    regathers: bool = False,
    checked: bool = True,
) -> ChunkPlan:
    """Return a pipeline's plan in state-aware 1F1B, with the groups of chunks in the given order.

    `stages`: layers per stage; rank s holds stage s. The first `frozen_stages`, in which nothing is
    trained, only run forward; without `backward` all stages do. `checked`: whether `plan.check`
    runs. Other arguments: see `state_aware_lists` and `assemble`.
    """
    numbered = number_chunks(groups)
    first = frozen_stages if backward else len(stages)
    lists = state_aware_lists(
        numbered, stages, num_retained=num_retained, keep=keep, recompute_layers=recompute_layers,
        frozen_stages=first,
    )  # fmt: skip
    return assemble(
        seq_lens, groups, stages, lists, offload=offload, sp_size=sp_size,
        frozen_stages=frozen_stages if backward else 0, regathers=regathers, checked=checked,
    )  # fmt: skip


def state_aware_lists(
    numbered: Sequence[range],
    stages: Sequence[int],
    *,
    num_retained: int = 1,
    keep: Keep = "kv",
    recompute_layers: int = 0,
    frozen_stages: int = 0,
) -> list[list[Action]]:
    """Return the actions of each rank, with messages, in state-aware 1F1B.

    The order is plain 1F1B with one change: the backwards of a group of chunks, with their
    recomputation, all run in the slot of the backward of its last chunk. `numbered`: chunk indices
    of each group. Other arguments: see `schedule_group`.
    """
    lists = []
    for stage, height in enumerate(stages):
        forwards: list[Action] = []
        bound: list[Sequence[Action]] = []
        for group in numbered:
            own = schedule_group(
                group, num_retained=num_retained, keep=keep, stage=stage,
                recompute_layers=min(recompute_layers, height), backward=stage >= frozen_stages,
            )  # fmt: skip
            forwards += own[: len(group)]
            bound += [()] * (len(group) - 1) + [own[len(group) :]]
        cells = _interleave(forwards, bound, num_ahead=len(stages) - 1 - stage)
        lists.append(with_messages(cells, stage, len(stages), frozen_stages))
    return lists


def _interleave(
    forwards: Sequence[Action], bound: Iterable[Sequence[Action]], *, num_ahead: int
) -> list[Action]:
    """Return the actions of a stage in 1F1B order: first `num_ahead` forwards, then in turn one
    more forward and one list of actions in `bound`. `bound` has one list per chunk: the actions
    that run in the slot of the chunk's backward, possibly none."""
    cells = list(forwards[:num_ahead])
    for place, actions in enumerate(bound):
        cells += forwards[place + num_ahead : place + num_ahead + 1]
        cells += actions
    return cells


def number_chunks(groups: Groups) -> list[range]:
    """Return the chunk indices of each group, numbered group after group."""
    return [range(a, b) for a, b in pairwise(accumulate(map(len, groups), initial=0))]


def with_messages(
    cells: Iterable[Action], stage: int, num_stages: int, frozen_stages: int = 0
) -> list[Action]:
    """Return the actions of rank `stage`: `cells`, with messages from and to neighbouring stages.

    A message is received right before the cell that needs it and sent right after the cell that
    computes it, so both ends list messages in the order of their cells. No gradient is sent to the
    first `frozen_stages`.
    """
    actions: list[Action] = []
    for action in cells:
        if isinstance(action, Forward) and stage > 0:
            actions.append(Recv("activation", action.chunk, stage - 1, stage - 1))
        if isinstance(action, Backward) and stage < num_stages - 1:
            actions.append(Recv("gradient", action.chunk, stage + 1, stage + 1))
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
    offload: Offload = ON_DEVICE,
    sp_size: int = 1,
    frozen_stages: int = 0,
    two_phases: bool = False,
    reshard: bool = False,
    regathers: bool = False,
    checked: bool = True,
) -> ChunkPlan:
    """Return a plan of the actions in `lists` (one list per rank), with a Reduce added for each
    trained stage.

    RebuildKV is left out for chunks that no later chunk reads: the last chunk of a branch, and
    chunks of groups that are not pieces of one sequence. `reshard`: insert Unshard and Reshard, so
    that at most two stages have whole weights. `regathers`: each pass gathers and frees its layers'
    weights within its pool. `checked`: whether `plan.check` runs. Other arguments: see `ChunkPlan`.
    """
    plan = ChunkPlan(
        tuple(seq_lens), tuple(chunk for group in groups for chunk in group), tuple(stages), (),
        offload, sp_size, frozen_stages=frozen_stages, two_phases=two_phases,
        regathers=regathers, replicated=regathers,
    )  # fmt: skip
    needed = (
        [a for a in own if not isinstance(a, RebuildKV) or plan.continues[a.chunk]] for own in lists
    )
    reduced = map(_with_reduces, needed)
    plan = plan.with_actions(tuple(map(_with_loads, reduced) if reshard else reduced))
    if checked:
        check(plan)
    return plan


def _with_reduces(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return the actions with a Reduce of each stage, after its last Backward and its last Send of
    a gradient."""
    last = {
        action.stage: place
        for place, action in enumerate(actions)
        if isinstance(action, Backward)
        or (isinstance(action, Send) and action.payload == "gradient")
    }
    found = list(actions)
    for stage, place in sorted(last.items(), key=lambda item: -item[1]):
        found.insert(place + 1, Reduce(stage))
    return tuple(found)


def _with_loads(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return the actions with an Unshard of each stage, one stage ahead of its use, and with
    Reshards so that no more than two stages have whole weights at a time."""
    runs = [(stage, list(own)) for stage, own in groupby(actions, key=attrgetter("stage"))]
    found: list[Action] = []
    whole: list[int] = []

    def gather(stage: int, needed: int) -> None:
        if stage in whole:
            return
        if len(whole) == 2:
            freed = next(own for own in whole if own != needed)
            whole.remove(freed)
            found.append(Reshard(freed))
        whole.append(stage)
        found.append(Unshard(stage))

    for place, (stage, own) in enumerate(runs):
        gather(stage, needed=stage)
        if place + 1 < len(runs):
            gather(runs[place + 1][0], needed=stage)
        found += own
    return (*found, *map(Reshard, whole))


def stage_heights(num_layers: int, stage_layers: int) -> tuple[int, ...]:
    """Return the number of layers of each stage: as few stages as possible of at most
    `stage_layers` layers, with layers divided evenly."""
    return even_heights(num_layers, -(-num_layers // stage_layers))


def even_heights(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage if divided evenly, the larger stages first."""
    low, num_higher = divmod(num_layers, num_stages)
    return (low + 1,) * num_higher + (low,) * (num_stages - num_higher)


def plan_on_device(
    seq_lens: Sequence[int],
    options: ChunkOptions,
    *,
    num_layers: int,
    groups: Groups | None = None,
    forks: Forks | None = None,
    sp_size: int = 1,
    backward: bool = True,
    frozen_layers: int = 0,
    checked: bool = True,
) -> ChunkPlan:
    """Return a plan for one device, or for one pool of `sp_size` processes. Without `backward` it
    only runs forward.

    `groups`: chunks to use instead of those that `options` make. `forks`: branches of sequences.
    `frozen_layers`: number of first layers in which nothing is trained. Stages within these layers
    only run forward. The last stage runs backward in any case, as it has the loss. Chunk-first
    plans have one stage, so they ignore `frozen_layers`. `checked`: whether `plan.check` runs.
    """
    if options.reshard and options.order == "chunk-first":
        raise ConfigError(
            given="chunks.reshard with order chunk-first and no pipeline",
            required="order layer-first, or a pipeline: all layers are one stage",
            source="the options of chunks, and pp",
            change="set order to layer-first, or leave reshard out",
        )
    if groups is None:
        groups = group_chunks(seq_lens, options, forks)
    stages = stages_of(num_layers, options)
    frozen = _count_frozen(stages, frozen_layers) if backward else 0
    numbered = number_chunks(groups)
    walks = [
        walk_groups(own, stages, options, frozen_stages=frozen, backward=backward)
        for own in ([numbered] if options.reshard else ([numbers] for numbers in numbered))
    ]
    return assemble(
        seq_lens, groups, stages, [[action for walk in walks for action in walk]],
        offload=options.offloading, sp_size=sp_size, frozen_stages=frozen,
        reshard=options.reshard, checked=checked,
    )  # fmt: skip


def _count_frozen(stages: Sequence[int], frozen_layers: int) -> int:
    """Return how many stages, except the last, lie within the first `frozen_layers`."""
    return sum(end <= frozen_layers for end in accumulate(stages[:-1]))


def stages_of(num_layers: int, options: ChunkOptions) -> tuple[int, ...]:
    """Return the number of layers of each stage, without a pipeline; chunk-first has one stage."""
    if options.order == "chunk-first":
        return (num_layers,)
    return stage_heights(num_layers, options.stage_layers or 1)


def seq1f1b_cells(
    numbered: Sequence[range],
    num_stages: int,
    stage: int,
    recompute_layers: Sequence[int] = (),
) -> list[Action]:
    """Return the forwards and backwards of one stage in token-level 1F1B.

    `numbered`: chunk indices of each group. `recompute_layers`: number of checkpointed layers of
    each chunk, in forward order (default none).
    """
    chunks = [chunk for group in numbered for chunk in group]
    layers = recompute_layers or [0] * len(chunks)
    forwards = [Forward(c, stage, "all", count) for c, count in zip(chunks, layers, strict=True)]
    backwards = [(Backward(chunk, stage),) for group in numbered for chunk in reversed(group)]
    # as in Seq1F1B; InfiniPipe's Eq. 7 counts one more
    num_ahead = num_stages - 1 - stage + max(map(len, numbered)) - 1
    return _interleave(forwards, backwards, num_ahead=num_ahead)


def recompute_on_diagonals(
    layers: Sequence[int], counts: Sequence[int], heights: Sequence[int]
) -> list[list[int]]:
    """Return recompute_layers[stage][chunk], equal along each diagonal of the schedule, up to the
    number of layers of the stage (InfiniPipe, Eqs. 15 and 16).

    The cells of one diagonal run at the same time on different stages, so recomputing layers in one
    of them takes as long as in all of them. `layers`: one value for each of the num_chunks +
    num_stages - 1 diagonals; `counts`: chunks of each group; `heights`: layers of each stage.
    """
    places: list[int] = []  # position of each chunk in backward order (InfiniPipe's f2b)
    for count in counts:
        places += range(len(places) + count - 1, len(places) - 1, -1)
    last = len(heights) - 1
    return [
        [min(layers[place + last - stage], height) for place in places]
        for stage, height in enumerate(heights)
    ]


def plan_two_phases(
    seq_lens: Sequence[int], options: ChunkOptions, *, num_layers: int, forks: Forks | None = None
) -> ChunkPlan:
    """Return a checked plan for one device in two phases: the caller computes the loss between all
    forwards and all backwards.

    `forks`: branches of sequences. `options.num_retained` is ignored. Raises ConfigError for
    keep="all", sampling, reshard and layer-first.
    """
    require_two_phases(options)
    groups = group_chunks(seq_lens, options, forks)
    layers = min(options.recompute_layers, num_layers)
    schedules = [
        schedule_group(group, num_retained=0, keep=options.kept, recompute_layers=layers)
        for group in number_chunks(groups)
    ]
    ahead, back = _there_and_back(schedules)
    return assemble(
        seq_lens, groups, (num_layers,), [[*ahead, *back]], offload=options.offloading,
        two_phases=True,
    )  # fmt: skip


def require_two_phases(options: ChunkOptions) -> None:
    """Raise ConfigError for options that two phases (forwards, loss, backwards) do not support."""
    if options.keep == "all":
        odd = (
            "keep",
            "input, kv, attention or auto: no graph lives until the caller's loss is there",
        )
    elif options.order != "chunk-first":
        odd = "order", "chunk-first: all forwards run before the caller makes a loss"
    elif options.reshard:
        odd = "reshard", "False: weights are kept between the phases"
    elif options.sampling is not None:
        odd = "sample", "none: the caller's loss wants the gradient of all that it reads"
    else:
        return
    name, required = odd
    raise ConfigError(
        given=f"chunks.{name} = {in_short(repr(getattr(options, name)), 60)}",
        required=required,
        source="the options of token_values, hidden_states or furlong.chunked",
        change=f"leave {name} and reshard out" if options.reshard else f"leave {name} out",
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
    forks: Forks | None = None,
    local_in: ModelShape | None = None,
    checked: bool = True,
) -> ChunkPlan:
    """Return the plan of one replica, whose sequences `options` cut into chunks.

    Each slice is sharded over all `sp_size` processes of the pool. With a model shape `local_in`,
    whole sequences stay on one process each where it has room, with FLOPs balanced over processes
    (`shard_long`). `stages`: layers of each stage of a pipeline, which runs state-aware 1F1B.
    Without a pipeline `options.order` applies. Other arguments: see `plan_on_device`.
    """
    groups = group_chunks(seq_lens, options, forks)
    if local_in is None:
        groups = shard_all(groups, sp_size)
    else:
        groups = shard_long(groups, seq_lens, local_in, sp_size)
    if len(stages) < 2:
        return plan_on_device(
            seq_lens, options, num_layers=num_layers, groups=groups, sp_size=sp_size,
            backward=backward, frozen_layers=frozen_layers, checked=checked,
        )  # fmt: skip
    return plan_1f1b(
        seq_lens, groups, stages=stages, offload=options.offloading, sp_size=sp_size,
        frozen_stages=_count_frozen(stages, frozen_layers), backward=backward,
        num_retained=options.num_retained, keep=options.kept,
        recompute_layers=options.recompute_layers, regathers=options.reshard, checked=checked,
    )  # fmt: skip


def join_replicas(
    plans: Sequence[ChunkPlan],
    seq_ids: Sequence[Sequence[int]],
    seq_lens: Sequence[int],
    *,
    checked: bool = True,
) -> ChunkPlan:
    """Return the plan of the global batch `seq_lens`, joined from the plans of its replicas.

    plans[d] is the plan of replica d for the sequences seq_ids[d], which it numbers from 0. A
    replica without sequences has a dummy plan (`idle_plan`). All plans must have the same stages,
    frozen stages, number of ranks, sp_size and offload. If passes gather weights from all replicas,
    all replicas must also run equal passes.

    Raises ConfigError if there is no sequence or these properties differ, ValueError if a plan does
    not belong to its sequences, PlanError for unequal passes.
    """
    refuse_idle(len(seq_lens), sum(bool(plan.seq_lens) for plan in plans))
    first = plans[0]
    chunks: list[Chunk] = []
    actions: list[tuple[Action, ...]] = []
    for replica, (plan, own) in enumerate(zip(plans, seq_ids, strict=True)):
        if _layout(plan) != _layout(first):
            odd = differing(_layout(plan), _layout(first))
            raise ConfigError(
                given=f"on replica {replica}: {difference_words(odd, 'on replica 0')}",
                required="one layout of all replicas' plans",
                source="the options and the trained layers of each replica",
                change="pass the same order, stage_layers and offload on all, and train the same "
                "layers",
            )
        if plan.seq_lens != tuple(seq_lens[i] for i in own):
            raise ValueError("a replica with other sequences than its own")
        first_chunk, first_rank = len(chunks), len(actions)
        for chunk in plan.chunks:
            slices = (replace(piece, seq_id=own[piece.seq_id]) for piece in chunk.slices)
            chunks.append(Chunk(tuple(slices)))
        for listed in plan.actions:
            actions.append(tuple(_moved(action, first_chunk, first_rank) for action in listed))
    joined = ChunkPlan(
        seq_lens=tuple(seq_lens), chunks=tuple(chunks), stages=first.stages, actions=tuple(actions),
        offload=first.offload, sp_size=first.sp_size, sampled=any(plan.sampled for plan in plans),
        frozen_stages=first.frozen_stages, regathers=any(plan.regathers for plan in plans),
        replicated=any(plan.replicated for plan in plans),
        report_loss=all(plan.report_loss for plan in plans),
    )  # fmt: skip
    for replica, plan in enumerate(plans):
        if plan.report_loss == joined.report_loss:
            keep_passes(joined, replica * len(first.actions), plan)
    if checked:
        check(joined)
    return joined


def join_kept(
    plans: Sequence[ChunkPlan],
    seq_ids: Sequence[Sequence[int]],
    seq_lens: Sequence[int],
    num_replicas: int,
    *,
    checked: bool = True,
) -> ChunkPlan:
    """Return the plan of a global batch on `num_replicas` replicas. The first replicas have the
    given `plans` (see `join_replicas`), further ones get dummy plans, which compute nothing that
    counts.

    A plan without any gathers of weights gets Unshards before its first chunk (`gathered_first`).
    Replicas then meet in no further collective until gradients are reduced. If each pass gathers
    weights, replicas meet in each pass.
    """
    num_idle = num_replicas - len(plans)
    some = [*plans, *[idle_plan(plans[0])] * num_idle]
    ids = [*seq_ids, *[[]] * num_idle]
    return join_replicas(list(map(gathered_first, some)), ids, seq_lens, checked=checked)


def gathered_first(plan: ChunkPlan) -> ChunkPlan:
    """Return the plan with an Unshard of each stage before its rank's other actions, unless the
    plan has Unshards already or its passes gather weights."""
    if plan.regathers or any(isinstance(action, Unshard) for own in plan.actions for action in own):
        return plan
    lists = zip(plan.held, plan.actions, strict=True)
    made = plan.with_actions(tuple((*map(Unshard, held), *own) for held, own in lists))
    keep_passes(made, 0, plan)
    return made


def idle_plan(like: ChunkPlan) -> ChunkPlan:
    """Return the plan of a replica without sequences, if other replicas have plans such as `like`.
    A dummy chunk runs through all stages, so that the replica's processes join all collectives."""
    trained = any(isinstance(action, Backward) for listed in like.actions for action in listed)
    frozen = like.frozen_stages if trained else len(like.stages)
    if len(like.actions) == 1:
        options = ChunkOptions(keep="all", order="layer-first")
        lists = [walk_groups([[0]], like.stages, options, frozen_stages=frozen)]
    else:
        lists = state_aware_lists([range(1)], like.stages, keep="all", frozen_stages=frozen)
    reduced = map(_with_reduces, lists)
    actions = tuple(map(_with_loads, reduced) if like.reshards else reduced)
    return replace(like, seq_lens=(), chunks=(Chunk(()),), actions=actions)


def _layout(plan: ChunkPlan) -> dict[str, object]:
    return {
        "stages": plan.stages, "lists of actions": len(plan.actions), "sp_size": plan.sp_size,
        "offload": asdict(plan.offload), "frozen_stages": plan.frozen_stages,
        "reshard": plan.reshards or plan.regathers,
    }  # fmt: skip


def _moved(action: Action, chunks: int, ranks: int) -> Action:
    """Return the action with `chunks` added to its chunk and `ranks` to its peer.
    (`dataclasses.replace` would take half of the time of joining replicas.)"""
    match action:
        case Send(payload, chunk, stage, peer) | Recv(payload, chunk, stage, peer):
            return type(action)(payload, chunk + chunks, stage, peer + ranks)
        case Forward(chunk, stage, keep, layers):
            return Forward(chunk + chunks, stage, keep, layers)
        case Recompute(chunk, stage, layers):
            return Recompute(chunk + chunks, stage, layers)
        case Backward(chunk, stage, loss_factor, relay_factor):
            return Backward(chunk + chunks, stage, loss_factor, relay_factor)
        case RebuildKV(chunk, stage):
            return RebuildKV(chunk + chunks, stage)
    return action
