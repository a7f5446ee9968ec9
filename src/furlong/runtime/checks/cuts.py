"""The check of cuts: stages compute what all layers together compute, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from furlong.models.causal_lm import CausalLM
from furlong.models.held import uncuttable
from furlong.ops.backend import Backend
from furlong.runtime.checks.trial import Watch, chunked_run

_BOUNDS = {torch.float64: 1e-5, torch.float32: 1e-5}
"""Bounds of wide types; the same operations run in the same order, but for what a family does
outside of its layers. Other types are bound by the rounding of sums, which a GPU may order
otherwise."""
_NARROW_BOUND = 1e-3


def cut_errors(
    parts: Sequence[CausalLM],
    model: CausalLM,
    backend: Backend,
    heights: Sequence[int],
    ids: Sequence[Tensor],
    watch: Watch,
) -> list[float]:
    """The errors of stages of `heights` layers, which `parts` hold, against one stage of all.

    Raises UnsupportedModelError for a decoder that hands more from layer to layer than its hidden
    states, however little that matters.
    """
    if len(heights) == 1:
        return []
    whole = chunked_run([model], backend, (model.num_layers,), ids, watch)
    given = chunked_run(parts, backend, heights, ids, watch)
    errors = []
    for name, truth in whole.items():
        norm = float(truth.double().norm())
        errors.append(float((given[name].double() - truth.double()).norm()) / (norm or 1.0))
        if not errors[-1] <= _BOUNDS.get(truth.dtype, _NARROW_BOUND):
            raise uncuttable(
                model.name, f"gives other {name} in stages (relative error {errors[-1]:.1e})"
            )
    return errors
