"""The dials of a run whose loss stands between two phases, of a pair of sequences in each call.

The longest pair must fit, with what both of its sequences keep from one phase to the other. Times
are those of a few pairs, evenly spread over their lengths.

Between the phases lives what the chunks of all sequences keep, so the keep that is fastest for a
pair of them may not fit for a batch. `attention` runs no attention again, `kv` all of it once more,
`input` every forward: work rises and memory falls in this order, whatever the lengths are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from furlong.cost.memory import PARTS, PlanMemory
from furlong.cost.model import CostModel
from furlong.errors import ConfigError
from furlong.plan.plan import ChunkPlan, Keep, Tiers
from furlong.planners.candidates import KEEPS, Space, sizes
from furlong.planners.decide import Decision, dials_in_words, needs_in_words
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_two_phases
from furlong.planners.predict import Needs, needs_of, step_s
from furlong.planners.question import Limits
from furlong.planners.search import SLACK
from furlong.units import format_bytes

if TYPE_CHECKING:
    from furlong.config.schema import ChunksConfig

Pair = tuple[int, int]
"""Tokens of both sequences."""
_NUM_TIMED = 3
_STATE = ("weights", "gradients", "optimizer")


def decide_pairs(
    pairs: Sequence[Pair],
    *,
    model: CostModel,
    budgets: Limits,
    budget_words: str,
    dials: Mapping[str, Any] | None = None,
) -> Decision | None:
    """The fastest options that fit, or None where none is predicted to. `dials`: those given."""
    given = dict(dials or {})
    ordered = sorted(pairs, key=sum)
    largest = max(pairs, key=lambda pair: (sum(pair), max(pair)))
    timed = [ordered[(2 * i + 1) * len(ordered) // (2 * _NUM_TIMED)] for i in range(_NUM_TIMED)]
    longest = max(map(max, pairs))
    found = []
    for options in _candidates(Space(model, largest, 1, longest, given), budgets):
        needs = _needs(model, largest, options)
        if budgets.hold(needs):
            plans = (_plan(model, pair, options) for pair in timed)
            found.append((sum(step_s(model, plan) for plan in plans), needs, options))
    if not found:
        return None
    fastest_s = min(seconds for seconds, *_ in found)
    alike = [one for one in found if one[0] <= fastest_s * (1 + SLACK)]
    _, needs, options = min(alike, key=lambda one: (one[1].device_bytes, one[0]))
    words = (
        f"{dials_in_words(options)}: the fastest of {len(found)} that fit"
        f" {format_bytes(budgets.device_bytes)} ({budget_words}) less {budgets.margin:.0%} for what"
        f" no prediction sees, one pair at a time; {needs_in_words(needs)} predicted"
    )
    return Decision(options, words, model=model)


def check_dials(chunks: ChunksConfig) -> None:
    """Raises ConfigError for dials that two phases have not."""
    retained = chunks.num_retained
    for name, value, is_odd, change in (
        ("keep", chunks.keep, chunks.keep == "all", "set it to attention, kv or input"),
        ("order", chunks.order, chunks.order == "layer-first", "remove it"),
        ("stage_layers", chunks.stage_layers, chunks.stage_layers != "auto", "remove it"),
        ("num_retained", retained, retained not in ("auto", 0), "remove it, or set it to 0"),
        ("method", chunks.method, chunks.method != "auto", "remove it"),
        ("sample", "{...}", chunks.sample is not None, "remove it"),
    ):
        if is_odd:
            raise ConfigError(
                given=f"chunks.{name} = {value} with train.loss: dpo",
                required="chunk-first plans without a graph between forward and backward, where"
                " the loss of a pair is made, and exact gradients",
                source=f"chunks.{name} and train.loss",
                change=change,
            )


def _candidates(space: Space, budgets: Limits) -> Iterator[ChunkOptions]:
    """Keeps and chunk sizes; tiers on the device, then what is read least often lower first."""
    given = space.given
    keeps: Sequence[Keep] = [given["keep"]] if "keep" in given else KEEPS
    for size in sizes(space):
        for keep in keeps:
            tiers = [Tiers()] if "tier" not in given else [ChunkOptions(tier=given["tier"]).tiers]
            if "tier" not in given:
                for lower in budgets.lower_tiers:
                    tiers += [Tiers(attention=lower)] if keep == "attention" else []
                    tiers += [Tiers(attention=lower, kv=lower)]
            for each in tiers:
                yield ChunkOptions(size=size, keep=keep, num_retained=0, tier=each)


def _plan(model: CostModel, pair: Pair, options: ChunkOptions) -> ChunkPlan:
    return plan_two_phases(pair, options, num_layers=model.shape.num_layers)


def _needs(model: CostModel, pair: Pair, options: ChunkOptions) -> Needs:
    return needs_of(model.memory().curve(_plan(model, pair, options), 0))


def with_keep(
    seq_lens: Sequence[int], options: ChunkOptions, memory: PlanMemory, budgets: Limits
) -> ChunkOptions:
    """The options with a keep in the place of auto: the first of `KEEPS` whose plan the budgets
    hold beside weights, gradients and optimizer; where none does the last one, which needs least.
    """
    for keep in KEEPS:
        found = replace(options, keep=keep)
        plan = plan_two_phases(seq_lens, found, num_layers=memory.shape.num_layers)
        if budgets.hold(needs_beside_state(plan, memory)):
            break
    return found


def needs_beside_state(plan: ChunkPlan, memory: PlanMemory) -> Needs:
    """Most bytes that a plan in two phases needs of each tier, besides weights, gradients and
    optimizer; with the final hidden states that it gives out, and their gradient."""
    curve = memory.curve(plan, 0)
    columns = [index for index, part in enumerate(PARTS) if part not in _STATE]
    per_token = 2 * memory.shape.hidden_size * memory.training.compute_bytes
    device = int(curve.device[:, columns].sum(axis=1).max()) + per_token * sum(plan.seq_lens)
    return Needs(device, int(curve.host.max()), int(curve.disk.max()))
