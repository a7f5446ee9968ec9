"""One step: a plan and its sequences, agreed on by all processes, then obeyed by each of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Unpack

from furlong.errors import PlanError
from furlong.models.wrappers import refuse_hooks
from furlong.plan.values import ChunkPlan
from furlong.runtime.batch import Batch, batch_of, divisor_of, require_plan
from furlong.runtime.executor import Executor
from furlong.runtime.followed_model import FollowedModel
from furlong.runtime.inputs import check_ranges
from furlong.runtime.parallel.agreement import Facts, agreed
from furlong.runtime.parallel.comms import require_layout
from furlong.runtime.precision import made_gradients
from furlong.runtime.recorder import Measuring
from furlong.runtime.result import StepResult
from furlong.runtime.surroundings import drawn, untrainable


def batch_for(followed: FollowedModel, plan: object, sequences: object) -> Batch:
    """The batch that a caller has passed to this process; see `batch_of` for `sequences`."""
    plan = require_plan(plan)
    if plan.two_phases:
        raise PlanError("a plan of two phases has no loss: Engine.token_values makes and obeys it")
    if followed.ranks is not None:
        require_layout(plan, followed.ranks)
    return batch_of(plan, sequences, followed.rank, lambda: followed.rows_of(plan))


def take_step(
    followed: FollowedModel,
    find: Callable[[], Batch],
    num_valid_tokens: int | None,
    watch: Callable[[], None],
    **measuring: Unpack[Measuring],
) -> StepResult:
    """Take the step of a batch, which `find` returns; where that raises an error, no process takes
    it. The other arguments are those of `Engine.run`."""
    model = followed.model
    if followed.kept.pipeline is not None:
        followed.kept.pipeline.require_whole()
    batch, facts = agreed(followed.ranks, lambda: _prepared(followed, find(), num_valid_tokens))
    plan, num_labels, trains = batch.plan, batch.num_labels, bool(batch.plan.trained)
    if trains and not facts.trains:
        raise untrainable(model)
    if len(plan.stages) > 1:
        followed.require_checked(plan.stages)
    comms, pools = followed.comms(plan), followed.kept.opened
    pools.reset_peaks()
    made = made_gradients(model.model, keeps_zeros=plan.sampled) if trains else nullcontext()
    tied, computing = followed.adding_up_tied(), followed.computing(regathers=plan.regathers)
    with tied if trains else nullcontext(), made, computing, model.installed():
        executor = Executor(
            model, plan, batch.sequences,
            num_valid_tokens=facts.divisor,
            num_labels=facts.divisor if num_labels is None else num_labels,
            backend=followed.kept.backend, pools=pools, comms=comms, rank=followed.rank,
            process=followed.process, exchange=followed.exchange,
            head=batch.make_head and batch.make_head(model, plan), **measuring,
        )  # fmt: skip
        with followed.passing():
            loss_sum, timeline = executor.run(watch)
    if num_labels is None:
        num_labels = executor.num_labels
    assert num_labels == executor.num_labels, "the plan met other labels than the batch has"
    if trains and executor.has_drawn:
        followed.note(drawn(model))
    losses = tuple(losses.cpu() for losses in executor.token_losses)
    return StepResult(
        loss_sum / facts.divisor, loss_sum, num_labels, timeline, losses, plan,
        host_bytes=pools.peak_bytes("host"), disk_bytes=pools.peak_bytes("disk"),
    )  # fmt: skip


def _prepared(
    followed: FollowedModel, batch: Batch, num_valid_tokens: int | None
) -> tuple[Batch, Facts]:
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
    return batch, Facts(plan, divisor, num_frozen, trains)


def _require_stage(followed: FollowedModel, plan: ChunkPlan) -> None:
    """Raise PlanError for a stage of which this process lacks a layer."""
    assert followed.ranks is not None
    stage = followed.ranks.stage
    first = sum(plan.stages[:stage])
    followed.model.stages(plan.stages)  # of other heights than the model has
    followed.model.require_held(range(first, first + plan.stages[stage]))
