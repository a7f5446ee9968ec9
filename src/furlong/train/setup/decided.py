"""The decision of a run as plain values: in checkpoints, in `options.json`, for other processes.

Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from furlong.plan.plan import Layout
from furlong.planners.decide import Decision
from furlong.planners.options import ChunkOptions


def values_of(decision: Decision) -> dict[str, Any]:
    """The options of a run, its layout and its stages, and what decides about rivals where there
    are any, as JSON holds them."""
    values = asdict(decision.options) | {
        "layout": asdict(decision.layout), "stages": list(decision.stages),
    }  # fmt: skip
    if decision.budget_bytes is not None:
        values |= {"budget_bytes": decision.budget_bytes, "has_shrunk": decision.has_shrunk}
    return values


def shrunk(decision: Decision, options: ChunkOptions) -> Decision:
    """The decision with the options of now, which a step that did not fit may have changed."""
    has_shrunk = decision.has_shrunk or options != decision.options
    return replace(decision, options=options, has_shrunk=has_shrunk)


def decision_of(
    values: Mapping[str, Any], words: str = "", figures: str = "", layout_words: str = ""
) -> Decision:
    """The inverse of `values_of`; the others are those of the decision. An earlier release, with
    one device, wrote the options alone. Raises TypeError or ConfigError for other values."""
    options = dict(values)
    layout, stages = Layout(**options.pop("layout", {})), tuple(options.pop("stages", ()))
    budget_bytes, has_shrunk = options.pop("budget_bytes", None), options.pop("has_shrunk", False)
    chosen = ChunkOptions(**options)
    return Decision(
        chosen, words, figures=figures, layout=layout, stages=stages, layout_words=layout_words,
        budget_bytes=budget_bytes, has_shrunk=has_shrunk,
    )  # fmt: skip
