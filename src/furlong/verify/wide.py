"""A forward in which nothing is rounded to float32.

Recurrent layers of transformers sum in float32 over inner chunks of tokens, in whatever dtype the
weights are. Their gradients partly cancel, and change with the inner chunk in the fifth digit: no
bound tells that from an error. With every float32 in them made float64, both proofs are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Wide(TorchDispatchMode):  # type: ignore[misc]
    """Within it every kernel that is asked for float32 gives float64, also in a backward, and so
    does one that is asked for nothing: tables of decays are made so."""

    def __enter__(self) -> Self:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._default)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
