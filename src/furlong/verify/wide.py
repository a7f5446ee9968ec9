"""A forward in which nothing is rounded to float32.

Recurrent layers of transformers sum in float32 over inner chunks of tokens, in whatever dtype the
weights are. Their gradients partly cancel, and change with the inner chunk in the fifth digit: no
bound tells that from an error. With every float32 in them made float64, both proofs are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Wide(TorchFunctionMode):
    """Within it every torch function that is asked for float32 gives float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        own = {key: _wide(value) for key, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **own)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
