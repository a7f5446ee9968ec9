"""The one choice of a plan, for `furlong train` and `furlong plan`, and it as plain values.

Loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from furlong.config.schema import RunConfig, TrainConfig
from furlong.cost.model import CostModel
from furlong.plan.lengths import Lengths, StepSize
from furlong.plan.plan import Layout
from furlong.planners.decide import Decision, Pair, decide, decide_pairs
from furlong.planners.options import ChunkOptions
from furlong.planners.question import SIZES, Limits


def step_size(settings: TrainConfig) -> StepSize:
    """The size of a run's global batches, in what is drawn or in tokens."""
    return StepSize(settings.sequences_per_step, settings.tokens_per_step)


def choose_plan(
    config: RunConfig,
    model: CostModel,
    lengths: Lengths,
    limits: Limits,
    budget_words: str,
    num_devices: int,
    *,
    size: StepSize,
    given: Mapping[str, Any],
    pairs: Sequence[Pair] | None = None,
    longest: int | None = None,
    steps: Sequence[int] | None = None,
    method: str | None = None,
    must_fit: bool = True,
    alone: bool = True,
    tell: Callable[[str], None] | None = None,
) -> Decision:
    """The options and the layout of a run over sequences of these lengths.

    `model`: of one device. `given`: options, and sizes of the layout, that hold. `pairs`: of a loss
    that takes two sequences in one call. `method`: None is the run's own. The others: see `decide`.
    Raises ConfigError.
    """
    if pairs is not None:
        options = {name: value for name, value in given.items() if name not in SIZES}
        return decide_pairs(
            pairs, model=model, limits=limits, budget_words=budget_words, given=options,
            must_fit=must_fit,
        )  # fmt: skip
    return decide(
        lengths, size=size, model=model, limits=limits,
        budget_words=budget_words, num_devices=num_devices, seed=config.train.seed,
        longest=longest, steps=steps, given=given, method=method or config.chunks.method,
        must_fit=must_fit, alone=alone, tell=tell,
    )  # fmt: skip


def values_of(decision: Decision) -> dict[str, Any]:
    """The options of a run, its layout and its stages, and what decides about alternatives where
    there are any, as JSON holds them."""
    values = asdict(decision.options) | {
        "layout": asdict(decision.layout), "stages": list(decision.stages),
    }  # fmt: skip
    if decision.budget_bytes is not None:
        values |= {"budget_bytes": decision.budget_bytes, "has_shrunk": decision.has_shrunk}
    return values


def decision_of(values: Mapping[str, Any]) -> Decision:
    """The inverse of `values_of`. An earlier release, with one device, wrote the options alone.
    Raises TypeError or ConfigError for other values."""
    options = dict(values)
    layout, stages = Layout(**options.pop("layout", {})), tuple(options.pop("stages", ()))
    budget_bytes, has_shrunk = options.pop("budget_bytes", None), options.pop("has_shrunk", False)
    chosen = ChunkOptions(**options)
    return Decision(
        chosen, "", layout=layout, stages=stages, budget_bytes=budget_bytes, has_shrunk=has_shrunk
    )


def shrunk(decision: Decision, options: ChunkOptions) -> Decision:
    """The decision with the options of now, which a step that did not fit may have changed."""
    has_shrunk = decision.has_shrunk or options != decision.options
    return replace(decision, options=options, has_shrunk=has_shrunk)
