"""One step: all processes agree on a plan and its sequences, then each runs its list of actions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from furlong.cost.memory import PlanMemory
from furlong.cost.training import Training
from furlong.errors import ConfigError, DataError, PlanError, UserError, in_short
from furlong.kv.pools import CpuPool
from furlong.models.decoder import HFDecoder
from furlong.models.describe import describe
from furlong.ops.backends.base import Tally
from furlong.plan.plan import Chunk, ChunkPlan, Forward
from furlong.plan.rows import ChunkRows
from furlong.planners.chunks import Forks
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_replica
from furlong.planners.spaco import sampled
from furlong.runtime.batch import (
    WEIGHTS,
    Batch,
    JoinedSequence,
    ShiftedSequence,
    Span,
    batch_of,
    check_ranges,
    labelled_chunks,
    refused_data,
    require_type,
    shift_labels,
    whole_number,
)
from furlong.runtime.distributed.comms import require_layout
from furlong.runtime.distributed.consensus import (
    Facts,
    ReplicaPlan,
    checksum_of,
    join_brought,
    run_on_all,
)
from furlong.runtime.executor import Executor
from furlong.runtime.head import Head, LossHead
from furlong.runtime.profile import Measuring
from furlong.runtime.routing import RouterLoads, router_loss
from furlong.runtime.session import Session, untrainable
from furlong.timeline import Timeline


def batch_for(
    session: Session,
    plan: ChunkPlan,
    sequences: object,
    *,
    extras: Collection[str] | None = (WEIGHTS,),
    weights: Sequence[float] | None = None,
) -> Batch:
    """Return the batch of a plan, with shifted labels, from the caller's sequences.

    Args:
        sequences: All sequences in order, or a mapping from seq_id to sequence with at least those
            that this process reads, or a batch whose sequences are joined to those of the plan.
        extras: See `shift_labels`.
        weights: Factor of each sequence's loss in the gradient, for plans that do not sample.

    Raises:
        DataError: For sequences of other lengths than the plan's, or another number of weights.
    """
    require_type(plan, ChunkPlan, "Engine.plan returns one")
    if plan.two_phases:
        raise PlanError("a plan of two phases has no loss: Engine.token_values makes and obeys it")
    if session.ranks is not None:
        require_layout(plan, session.ranks)
    own_lens = sequences.seq_lens if isinstance(sequences, Batch) else plan.seq_lens
    num_sequences = len(own_lens)
    if weights is not None and (len(weights) != num_sequences or plan.sampled):
        raise refused_data(
            f"{len(weights)} weights of a plan with {num_sequences} sequences"
            + ", which samples" * plan.sampled,
            "a number for each sequence of an exact plan",
            "pass one for each seq_id, or leave weights out",
        )
    weights = None if weights is None else [float(weight) for weight in weights]
    if isinstance(sequences, Batch):
        _require_lens([len(tree.input_ids) for tree in sequences.planned], plan.seq_lens)
        return replace(sequences, weights=weights)
    needs_labels = extras is not None
    if not isinstance(sequences, Mapping):
        shifted = shift_labels(sequences, extras=extras, needs_labels=needs_labels)
        _require_lens([len(s.input_ids) for s in shifted], plan.seq_lens)
        return replace(along_paths(plan, batch_of(shifted)), weights=weights)
    shifted = shift_labels(sequences.values(), extras=extras, needs_labels=needs_labels)
    own: dict[Any, ShiftedSequence] = dict(zip(sequences, shifted, strict=True))
    needed = read_sequences(plan, session.rank, session.rows_of(plan))
    missing = [seq_id for seq_id in needed if seq_id not in own]
    others = [seq_id for seq_id in own if seq_id not in range(len(plan.seq_lens))]
    if missing or others:
        raise refused_data(
            f"no sequence {missing[0]}"
            if missing
            else f"a sequence {in_short(repr(others[0]), 60)}",
            f"at least those of list {session.rank} of the plan that this process reads: "
            f"{_listed(needed)}",
            "pass a mapping of seq_id to sequence, or all sequences of the batch in a list",
        )
    ids = sorted(own)
    _require_lens([len(own[i].input_ids) for i in ids], [plan.seq_lens[i] for i in ids])
    return replace(along_paths(plan, among(own, plan.seq_lens)), weights=weights)


def along_paths(plan: ChunkPlan, batch: Batch) -> Batch:
    """Return a batch whose `planned` sequences have spans for the plan's branching sequences, as
    labels need them: the last token of a prefix predicts the first token of each branch that
    continues the prefix. Other sequences are unchanged."""
    planned = list(batch.planned)
    for seq_id in plan.trees.keys() & range(len(planned)):
        bounds = sorted(b for c in plan.groups[seq_id] for b in plan.bounds(seq_id, c))
        spans = [Span(seq_id, start, start, stop - 1) for start, stop, _ in bounds]
        spans += [
            Span(seq_id, start - 1, before - 1, before) for start, _, before in bounds if before
        ]
        planned[seq_id] = replace(planned[seq_id], spans=tuple(spans))
    return replace(batch, planned=planned)


def among(own: Mapping[Any, ShiftedSequence], seq_lens: Sequence[int]) -> Batch:
    """Return a batch of sequences of lengths `seq_lens`, of which this process has those in `own`
    (by seq_id); the others are empty."""
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    absent = ShiftedSequence(none, none)
    return batch_of([own.get(seq_id, absent) for seq_id in range(len(seq_lens))], seq_lens)


def divisor_of(num_valid_tokens: int | None, own_valid_tokens: int | None) -> int:
    """Return the number of tokens that the summed loss is divided by: `num_valid_tokens` if given,
    else `own_valid_tokens`, the number of labels in the batch. Raises DataError if neither is
    known, or if the batch has no label."""
    if num_valid_tokens is not None:
        return whole_number(num_valid_tokens, "num_valid_tokens")
    if own_valid_tokens is None:
        raise DataError(
            given="a part of the batch's sequences, without num_valid_tokens",
            required="the labelled tokens of the whole batch, by which the loss is divided",
            source="the arguments of Engine.run",
            change="pass num_valid_tokens, or all sequences of the batch",
        )
    if not own_valid_tokens:
        raise refused_data(
            "no token with a label to divide the loss by",
            "at least one label",
            "leave batches without labels out, or pass num_valid_tokens",
        )
    return own_valid_tokens


def read_sequences(plan: ChunkPlan, rank: int, rows_of: Callable[[Chunk], ChunkRows]) -> list[int]:
    """Return the seq_ids of the sequences that a process has to read: those with tokens in its rows
    of chunks that `rank` runs at the first stage, which takes token ids, or at the last stage,
    which takes labels."""
    ends = {0, len(plan.stages) - 1}
    own = {a.chunk for a in plan.actions[rank] if isinstance(a, Forward) and a.stage in ends}
    return sorted({seq_id for chunk in own for seq_id, *_ in rows_of(plan.chunks[chunk]).tokens})


def _require_lens(lens: Sequence[int], required: Sequence[int]) -> None:
    if tuple(lens) != tuple(required):
        raise refused_data(
            f"sequences of {_listed(lens)} tokens",
            f"the plan's: {_listed(required)}",
            "pass the sequences for which the plan was made, in their order",
        )


def _listed(lens: Sequence[int]) -> str:
    shown = ", ".join(map(str, lens[:8]))
    return f"{shown}, ... ({len(lens)} of them)" if len(lens) > 8 else shown or "no"


@dataclass(frozen=True, slots=True)
class StepResult:
    loss: float
    """The summed loss divided by the divisor."""
    loss_sum: float
    num_valid_tokens: int
    """Tokens with a label in this call."""
    timeline: Timeline
    token_losses: tuple[Tensor, ...] = ()
    """Losses of an evaluation (backward=False): one (T,) float64 tensor per sequence, on the CPU.
    Entry t is the loss of token t + 1 given those up to t; 0 where that has no label."""
    plan: ChunkPlan | None = None
    """The plan that ran."""
    cpu_bytes: int = 0
    """Peak of offloaded bytes in CPU memory."""
    disk_bytes: int = 0
    has_drawn: bool = False
    """Whether a forward drew random numbers on this process."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other metrics of the loss, by name."""
    attention: Tally = field(default_factory=Tally)
    """Calls and FLOPs of attention kernels on a GPU."""
    loads: RouterLoads | None = None
    """How the batch loads its experts, if the model adds a router loss."""


def planner_of(
    session: Session, options: ChunkOptions, *, backward: bool
) -> Callable[[Sequence[int], Forks | None], ChunkPlan]:
    """Return a function (seq_lens, forks) -> plan, for the sequences of one replica. `seq_lens` are
    their lengths; `forks` are the tokens at which they branch."""
    model, ranks, pipeline = session.model, session.ranks, session.state.pipeline
    frozen = min(session.frozen_layers) if pipeline else 0

    def plan(seq_lens: Sequence[int], forks: Forks | None = None) -> ChunkPlan:
        require_type(options, ChunkOptions)
        if options.reshard and pipeline and ranks is not None and ranks.replicate != ranks.dp:
            raise ConfigError(
                given=f"reshard with pp {ranks.pp}, dp {ranks.dp}, replicate {ranks.replicate}",
                required="replicate = dp: the stages of a pipeline are divided in each pool",
                source="ChunkOptions and make_ranks",
                change=f"make_ranks(..., replicate={ranks.dp}), or leave reshard out",
            )
        is_cut = options.order == "layer-first"
        own_frozen = model.num_frozen_layers if is_cut and not pipeline else frozen
        return plan_replica(
            seq_lens, options,
            num_layers=model.num_layers, backward=backward, forks=forks,
            stages=pipeline.heights if pipeline else (),
            sp_size=1 if ranks is None else ranks.sp,
            frozen_layers=own_frozen if backward else 0,
        )  # fmt: skip

    return plan


def own_plan(
    session: Session,
    options: ChunkOptions,
    read: Callable[[], Batch],
    num_valid_tokens: int | None,
    *,
    backward: bool,
) -> tuple[tuple[Batch, ReplicaPlan], Facts, tuple[ReplicaPlan | None, int]]:
    """Plan this replica's sequences, which `read` returns as a batch. Return (result, facts, value)
    for `agree`. The result is (batch, its plan). The value is (plan, checks that this process
    lacks, as from `Session.lacks`); its plan is None unless this process is the first of its
    replica."""
    batch, ranks = read(), session.ranks
    check_ranges(batch.sequences, session.model, backward=backward)
    planner = planner_of(session, options, backward=backward)
    plan = planner([len(tree.input_ids) for tree in batch.planned], batch.forks)
    seed = drawn_seed(plan, options)
    labelled, lens = labelled_chunks(plan, batch), tuple(batch.seq_lens)
    found = ReplicaPlan(plan, labelled, batch.num_labels or 0, lens, seed)
    if ranks is None:
        return (batch, found), {}, (None, session.lacks(plan.stages))
    _require_stage(session, plan, ranks.stage)
    checksum = plan.checksum
    for sequence in batch.sequences:
        checksum = checksum_of(sequence, checksum)
    facts = facts_of(options, backward) | {
        f"sequences and options of replica {ranks.replica}": checksum,
        "the divisor": num_valid_tokens,
    }
    is_first = not ranks.stage and not ranks.process
    return (batch, found), facts, (found if is_first else None, session.lacks(plan.stages))


def whole_plan(
    session: Session,
    options: ChunkOptions,
    own: tuple[Batch, ReplicaPlan],
    each: Sequence[tuple[ReplicaPlan | None, int]],
) -> tuple[ChunkPlan, Batch, range]:
    """Join the plans of all replicas. Return (joint plan, its batch, indices of this replica's
    sequences in the batch).

    Args:
        own: The result of `own_plan` on this process: (batch, plan).
        each: The value of `own_plan` on each process: (plan or None, lacking checks).
    """
    (batch, found), indices = own, range(len(own[0].sequences))
    if session.ranks is not None:
        found, indices, seq_ids = join_brought(session.ranks, [planned for planned, _ in each])
        whole = among(dict(zip(indices, batch.sequences, strict=True)), found.lens)
        absent = JoinedSequence(torch.empty(0, dtype=torch.int64, device="cpu"), 0, ())
        planned = [absent] * len(found.plan.seq_lens)
        planned[seq_ids.start : seq_ids.stop] = [tree.moved(indices) for tree in batch.planned]
        batch = replace(whole, planned=planned, num_labels=found.num_labels)
    require_checked(session, found.plan, [lacks for _, lacks in each])
    return with_draw(found.plan, options, found.seed, found.labelled), batch, indices


def require_checked(session: Session, plan: ChunkPlan, lacking: Sequence[int]) -> None:
    """Run the self-check for the stages of a plan, if any process has not passed it."""
    if len(plan.stages) > 1:
        session.require_checked(plan.stages, lacking)


def facts_of(options: ChunkOptions, backward: bool) -> dict[str, object]:
    """Return the options of a step that must be equal on all replicas, by name."""
    return {
        "backward": backward, "chunks.order": options.order,
        "chunks.stage_layers": options.stage_layers, "chunks.reshard": options.reshard,
        "chunks.offload": str(options.offload),
        "chunks.sample": repr(options.sampling),
    }  # fmt: skip


def drawn_seed(plan: ChunkPlan, options: ChunkOptions) -> int | None:
    """Return the seed of the options' chunk sampling, drawn if not given; None without sampling."""
    sampling = options.sampling
    if sampling is None or not plan.trained:
        return None
    drawn = int(torch.randint(2**62, (), device="cpu")) if sampling.seed is None else None
    return sampling.seed if drawn is None else drawn


def with_draw(
    plan: ChunkPlan, options: ChunkOptions, seed: int | None, labelled: Collection[int] = ()
) -> ChunkPlan:
    """Return the plan with backwards only of the chunks that are sampled. The draw depends on
    `seed`, which is equal on all processes. If the options do not sample, return the plan as it is.
    `labelled`: numbers of the chunks that have labels, which may be drawn more often."""
    if options.sampling is None or seed is None:
        return plan
    return sampled(plan, replace(options.sampling, seed=seed), labelled)


def take_step(
    session: Session,
    plan: ChunkPlan,
    batch: Batch,
    num_valid_tokens: int | None,
    watch: Callable[[], None],
    *,
    head: Callable[[HFDecoder, ChunkPlan, Batch], Head] = LossHead,
    loads: RouterLoads | None = None,
    **measuring: Unpack[Measuring],
) -> StepResult:
    """Run a plan on its batch. Return loss, number of labels, timeline and memory of the step. The
    processes must have agreed on plan and batch before (`own_plan`, `facts_of_run`). If one process
    raises an error before the first action, all do.

    `head` is called with model, plan and batch, and returns the consumer of final hidden states, by
    default the loss. Other arguments: see `Engine.run`.
    """
    model, num_labels = session.model, batch.num_labels
    divisor = divisor_of(num_valid_tokens, num_labels)
    if plan.trained and not session.trains:
        raise untrainable(model)
    _require_frozen(session, plan)
    rule = None if session.is_entered else model.router_rule
    routing = None if rule is None else router_loss(rule, model, plan, loads, divisor)
    comms, pools = session.comms(plan), session.state.opened
    with ExitStack() as stack:

        def make() -> Executor:
            _take_pinned(session, plan)
            pools.reset_peaks()
            stack.enter_context(session.computing(plan))
            consumer = head(model, plan, batch)
            if isinstance(consumer, LossHead):
                consumer.routing = routing
            return Executor(
                model, plan, batch,
                num_valid_tokens=divisor,
                num_labels=divisor if num_labels is None else num_labels,
                backend=session.state.backend, pools=pools, comms=comms, rank=session.rank,
                process=session.process, exchange=session.exchange,
                head=consumer, **measuring,
            )  # fmt: skip

        executor = run_on_all(session.ranks, make)
        if plan.trained and session.state.pipeline is not None:
            session.state.trained_layers = layers_of(plan, session.rank)
        tally = session.state.backend.tally
        tally.taken()  # drop counts of checks and other calls
        # An error closes this process's connections before `stack` ends, which waits for gathers
        # that others join. Its end adds up tied gradients, so it is a part of the step.
        with session.heard("a step", by_all=False):
            loss_sum, timeline = executor.run(watch)
            stack.close()
    if num_labels is None:
        num_labels = executor.num_labels
    assert num_labels == executor.num_labels, "the plan met other labels than the batch has"
    loads = None if routing is None else routing.loads
    losses = tuple(losses.cpu() for losses in executor.token_losses)
    return StepResult(
        loss_sum / divisor, loss_sum, num_labels, timeline, losses, plan,
        cpu_bytes=pools.peak_bytes("cpu"), disk_bytes=pools.peak_bytes("disk"),
        has_drawn=executor.has_drawn, attention=tally.taken(), loads=loads,
        metrics={} if routing is None else routing.metrics,
    )  # fmt: skip


def _take_pinned(session: Session, plan: ChunkPlan) -> None:
    """Reserve the pinned memory of a plan before its first action: pinning 10 GB takes seconds.
    A plan with no more tokens than earlier plans reuses the memory of these plans. If the need
    cannot be predicted, or is above `memory.cpu`, memory is pinned during the step."""
    model, pools = session.model, session.state.opened
    if model.device.type != "cuda" or "cpu" not in plan.offload.targets:
        return
    kind = bool(plan.trained), plan.offload
    before = longest, total = pools.reserved.get(kind, (0, 0))
    most = max(longest, *plan.seq_lens), max(total, sum(plan.seq_lens))
    if most == before:
        return
    memory = memory_of(session)
    if memory is None:
        return
    num_bytes = int(memory.curve(plan, session.rank).cpu.max())
    limit_bytes = pools.storage.cpu_bytes
    if limit_bytes is None or num_bytes <= limit_bytes:
        pool = pools.of("cpu")
        assert isinstance(pool, CpuPool)
        pool.reserve(num_bytes, limit_bytes)
    pools.reserved[kind] = most


def memory_of(
    session: Session, dtype: torch.dtype | None = None, room_bytes: int = 0
) -> PlanMemory | None:
    """Return the memory model of a session's plans for passes in `dtype`, by default the session's;
    None for a config whose memory is not modelled. `room_bytes`: see `PlanMemory`."""
    model = session.model
    try:
        shape = describe(model.base.config)
    except UserError:
        return None
    dtype = dtype or session.compute_dtype or next(model.model.parameters()).dtype
    training = Training.in_dtype(str(dtype).removeprefix("torch."))
    return PlanMemory(shape, training, room_bytes, device_type=model.device.type)


def facts_of_run(
    session: Session, plan: ChunkPlan, batch: Batch, num_valid_tokens: int | None
) -> Facts:
    """Return {name: value} of all that must be equal on the processes that run a given plan: the
    plan, the divisor of the loss, weights, and the tokens of each sequence that several processes
    have."""
    divisor = divisor_of(num_valid_tokens, batch.num_labels)
    check_ranges(batch.sequences, session.model, backward=bool(plan.trained))
    if session.ranks is None:
        return {}
    _require_stage(session, plan, session.rank)
    facts: dict[str, object] = {"the plan's checksum": plan.checksum, "the divisor": divisor}
    weights = batch.weights or (None,) * len(batch.sequences)
    facts |= {f"weight of sequence {i}": repr(weight) for i, weight in enumerate(weights)}
    for seq_id, sequence in enumerate(batch.sequences):
        if len(sequence.input_ids):
            facts[f"checksum of sequence {seq_id}"] = checksum_of(sequence)
    return facts


def _require_frozen(session: Session, plan: ChunkPlan) -> None:
    """Raise PlanError if the plan has no backward in layers that a process trains."""
    if session.state.pipeline is None:  # the executor checks it
        return
    num_frozen, process = min((n, process) for process, n in enumerate(session.frozen_layers))
    if sum(plan.stages[: plan.frozen_stages]) > num_frozen:
        raise PlanError(
            f"the plan has no backward in its first {plan.frozen_stages} stages, where process "
            f"{process} trains parameters, or below: plan again"
        )


def _require_stage(session: Session, plan: ChunkPlan, rank: int) -> None:
    """Raise PlanError if, in a pipeline, this process lacks layers that `rank` runs, or has
    outdated weights of them."""
    if session.state.pipeline is None:
        return
    model, before = session.model, session.state.trained_layers
    model.stages(plan.stages)  # refuses stages that do not add up to the model's layers
    own = layers_of(plan, rank)
    model.require_held(own)
    if len(model.local_layers) > len(own) and before not in (None, own):
        raise PlanError(
            f"the plan runs {own} of the layers here, where an earlier one has trained {before}: "
            "this process has the whole model, but old weights of its other layers"
        )


def layers_of(plan: ChunkPlan, rank: int) -> range:
    """Return the layers that a rank of the plan runs."""
    stages = plan.held[rank]
    return range(sum(plan.stages[: stages[0]]), sum(plan.stages[: stages[-1] + 1]))
