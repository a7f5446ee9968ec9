"""The chosen plan of a run as plain values, and the size of its steps. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from furlong.config.schema import TrainConfig
from furlong.plan.lengths import StepSize
from furlong.plan.plan import Layout
from furlong.planners.decide import Decision
from furlong.planners.options import ChunkOptions


def step_size(settings: TrainConfig) -> StepSize:
    """The size of a run's global batches, in what is drawn or in tokens."""
    return StepSize(settings.sequences_per_step, settings.tokens_per_step)


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
    """The inverse of `values_of`. Raises KeyError, TypeError or ConfigError for other values."""
    options = dict(values)
    layout, stages = Layout(**options.pop("layout")), tuple(options.pop("stages"))
    budget = {name: options.pop(name) for name in ("budget_bytes", "has_shrunk") if name in options}
    return Decision(ChunkOptions(**options), "", layout=layout, stages=stages, **budget)


def shrunk(decision: Decision, options: ChunkOptions) -> Decision:
    """The decision with the options of now, which a step that did not fit may have changed."""
    has_shrunk = decision.has_shrunk or options != decision.options
    return replace(decision, options=options, has_shrunk=has_shrunk)
