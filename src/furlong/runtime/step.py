"""One step: a plan and its sequences, agreed on by all processes, then obeyed by each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Unpack

import torch.distributed as dist

from furlong.cost.memory import PlanMemory
from furlong.cost.training import Training
from furlong.errors import PlanError, UserError
from furlong.models.describe import describe
from furlong.models.wrappers import refuse_hooks
from furlong.plan.plan import ChunkPlan
from furlong.runtime.batch import PlannedSequences, batch_of, divisor_of, require_plan
from furlong.runtime.checks.surroundings import drawn, untrainable
from furlong.runtime.executor import Executor
from furlong.runtime.followed_model import FollowedModel
from furlong.runtime.inputs import check_ranges
from furlong.runtime.parallel.agreement import Facts, agreed
from furlong.runtime.parallel.comms import require_layout, stages_of
from furlong.runtime.parallel.likeness import checksums, trained_names
from furlong.runtime.parallel.recovery import made_together
from furlong.runtime.precision import forgotten_gradients, made_gradients
from furlong.runtime.recorder import Measuring
from furlong.runtime.result import StepResult
from furlong.runtime.rng import independent_draws


def batch_for(followed: FollowedModel, plan: object, sequences: object) -> PlannedSequences:
    """The batch that a caller has passed to this process; see `batch_of` for `sequences`."""
    plan = require_plan(plan)
    if plan.two_phases:
        raise PlanError("a plan of two phases has no loss: Engine.token_values makes and obeys it")
    if followed.ranks is not None:
        require_layout(plan, followed.ranks)
    return batch_of(plan, sequences, followed.rank, lambda: followed.rows_of(plan))


def take_step(
    followed: FollowedModel,
    find: Callable[[], PlannedSequences],
    num_valid_tokens: int | None,
    watch: Callable[[], None],
    **measuring: Unpack[Measuring],
) -> StepResult:
    """Take the step of a batch, which `find` returns; where that raises an error, no process takes
    it. The other arguments are those of `Engine.run`."""
    model = followed.model
    followed.require_settled()
    batch, facts = agreed(followed.ranks, lambda: _prepared(followed, find(), num_valid_tokens))
    plan, num_labels, trains = batch.plan, batch.num_labels, bool(batch.plan.trained)
    if trains and not facts.trains:
        raise untrainable(model)
    if trains and followed.ranks is not None and followed.ranks.pp > 1:
        followed.kept.trained_layers = layers_of(plan, followed.rank)
    comms, pools = followed.comms(plan), followed.kept.opened
    with ExitStack() as stack:

        def make() -> Executor:
            if len(plan.stages) > 1:
                followed.require_checked(plan.stages)
            _take_pinned(followed, plan)
            pools.reset_peaks()
            for context in _surroundings(followed, plan):
                stack.enter_context(context)
            return Executor(
                model, plan, batch.sequences,
                num_valid_tokens=facts.divisor,
                num_labels=facts.divisor if num_labels is None else num_labels,
                backend=followed.kept.backend, pools=pools, comms=comms, rank=followed.rank,
                process=followed.process, exchange=followed.exchange,
                head=batch.make_head and batch.make_head(model, plan), **measuring,
            )  # fmt: skip

        executor = made_together(followed.ranks, make)
        with followed.settling(comms):
            loss_sum, timeline = executor.run(watch)
    if num_labels is None:
        num_labels = executor.num_labels
    assert num_labels == executor.num_labels, "the plan met other labels than the batch has"
    followed.kept.has_drawn |= executor.has_drawn
    if trains and executor.has_drawn:
        followed.note(drawn(model))
    losses = tuple(losses.cpu() for losses in executor.token_losses)
    return StepResult(
        loss_sum / facts.divisor, loss_sum, num_labels, timeline, losses, plan,
        host_bytes=pools.peak_bytes("host"), disk_bytes=pools.peak_bytes("disk"),
        has_drawn=executor.has_drawn,
    )  # fmt: skip


def _take_pinned(followed: FollowedModel, plan: ChunkPlan) -> None:
    """Take the pinned memory that a plan needs before its first action: seconds for each 10 GB,
    once. A plan with no more tokens than those before finds it there; what cannot be predicted,
    and what `memory.host` does not hold, is taken as the step goes on."""
    model, pools = followed.model, followed.kept.opened
    lower = {plan.tiers.kv, plan.tiers.inputs, plan.tiers.attention, plan.tiers.graphs}
    if model.device.type != "cuda" or "host" not in lower:
        return
    kind = bool(plan.trained), plan.tiers
    before = longest, total = pools.reserved.get(kind, (0, 0))
    most = max(longest, *plan.seq_lens), max(total, sum(plan.seq_lens))
    if most == before:
        return
    try:
        shape = describe(model.config)
    except UserError:
        return
    dtype = followed.compute_dtype or next(model.model.parameters()).dtype
    memory = PlanMemory(shape, Training.in_dtype(str(dtype).removeprefix("torch.")), 0)
    num_bytes = int(memory.curve(plan, followed.rank).host.max())
    limit_bytes = pools.storage.host_bytes
    if limit_bytes is None or num_bytes <= limit_bytes:
        pools.host.reserve(num_bytes, limit_bytes)
    pools.reserved[kind] = most


def _surroundings(
    followed: FollowedModel, plan: ChunkPlan
) -> Iterator[AbstractContextManager[None]]:
    """The contexts in which a plan is obeyed, each to be entered before the next is made."""
    model = followed.model
    if plan.trained:
        yield forgotten_gradients(model.model)
        yield followed.adding_up_tied()
        yield made_gradients(model.model, keeps_zeros=plan.sampled)
    yield followed.computing(regathers=plan.regathers)
    yield model.installed()
    if followed.ranks is not None:  # masks of dropout must not be the same on all
        yield independent_draws(dist.get_rank(followed.ranks.group), model.device)


def _prepared(
    followed: FollowedModel, batch: PlannedSequences, num_valid_tokens: int | None
) -> tuple[PlannedSequences, Facts]:
    """The batch and what this process knows of it. Raises for what it cannot take."""
    model, plan = followed.model, batch.plan
    divisor = divisor_of(num_valid_tokens, batch.num_labels)
    check_ranges(
        batch.sequences, num_input_ids=model.num_input_ids, vocab_size=model.vocab_size,
        longest_tokens=model.longest_tokens,
    )  # fmt: skip
    if plan.trained:
        refuse_hooks(model.model)
    num_frozen = model.num_layers  # the executor compares where the model is whole
    if followed.kept.pipeline is not None:
        _require_stage(followed, plan)
        num_frozen = model.num_frozen_layers if plan.frozen_stages else num_frozen
    trains = any(parameter.requires_grad for parameter in model.model.parameters())
    if followed.ranks is None:
        return batch, Facts(plan, divisor, num_frozen, trains)
    own = trained_names(model), checksums(batch.sequences)
    return batch, Facts(plan, divisor, num_frozen, trains, *own)


def _require_stage(followed: FollowedModel, plan: ChunkPlan) -> None:
    """Raise PlanError for layers that this process lacks, or of which it has old weights."""
    model, before = followed.model, followed.kept.trained_layers
    model.stages(plan.stages)  # of other heights than the model has
    own = layers_of(plan, followed.rank)
    model.require_held(own)
    if len(model.held) > len(own) and before not in (None, own):
        raise PlanError(
            f"the plan runs {own} of the layers here, where an earlier one has trained {before}: "
            "this process has the whole model, but old weights of its other layers"
        )


def layers_of(plan: ChunkPlan, rank: int) -> range:
    """The layers that a list of a plan runs."""
    stages = stages_of(plan, rank)
    return range(sum(plan.stages[: stages[0]]), sum(plan.stages[: stages[-1] + 1]))
