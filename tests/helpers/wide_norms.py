"""RMS norms that compute in the dtype of their input.

Those of transformers round to float32 inside: a difference of one unit in the last place there is
an error of 1e-9 in a float64 gradient, in about one of some hundred layouts.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def widen_norms(model: nn.Module) -> nn.Module:
    """Replace the forward of every RMS norm of a Llama, Mistral or Gemma."""
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    assert norms, "no RMS norm to replace"
    for norm in norms:
        norm.forward = MethodType(_forward, norm)  # type: ignore[method-assign]
    return model


def _forward(norm: Any, x: Tensor) -> Tensor:
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    scale = 1 + norm.weight if type(norm).__name__.startswith("Gemma") else norm.weight
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * scale
