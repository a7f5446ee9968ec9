"""In which dtype parameters compute and gradients accumulate.

Trained weights are float32 and compute in `compute_dtype`; the gradients of a chunk arrive in that
dtype and are added to float32 sums at once. (bf16 sums over 64 chunks cost 0.8 % of the gradient.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def compute_parameters(model: nn.Module, compute_dtype: torch.dtype | None) -> Iterator[None]:
    """Within it the model's parameters are `compute_dtype` (None: as they are).

    Gradients end in the `.grad` of the model's own parameters. Those of 16-bit computations are
    summed in float32; a parameter that is itself 16-bit gets its sum on exit, rounded once. On
    exit, also after an error, the model holds its own parameters again.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
                parameters[id(parameter)] = parameter
    finish: list[Callable[[], None]] = []
    handles = []
    grads_before = {key: p.grad for key, p in parameters.items()}
    try:
        for key, parameter in parameters.items():
            leaf = _in_dtype(parameter, compute_dtype)
            for module, name in places[key]:
                module._parameters[name] = leaf
            if leaf.requires_grad and leaf.dtype.itemsize < 4:
                add, end = _float32_sum(parameter)
                handles.append(leaf.register_post_accumulate_grad_hook(add))
                finish.append(end)
        yield
        for end in finish:
            end()
    except BaseException:
        for key, parameter in parameters.items():
            if parameter.dtype.itemsize < 4:
                parameter.grad = grads_before[key]
        raise
    finally:
        for handle in handles:
            handle.remove()
        for key, parameter in parameters.items():
            for module, name in places[key]:
                module._parameters[name] = parameter


def _in_dtype(parameter: nn.Parameter, dtype: torch.dtype | None) -> nn.Parameter:
    if dtype is None or parameter.dtype == dtype or not parameter.is_floating_point():
        return parameter
    return nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)


def _float32_sum(parameter: nn.Parameter) -> tuple[Callable[[Tensor], None], Callable[[], None]]:
    """A hook that moves a leaf's gradient into a float32 sum, and what ends the sum."""
    if parameter.dtype == torch.float32:

        def add(leaf: Tensor) -> None:
            assert leaf.grad is not None
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad += leaf.grad
            leaf.grad = None

        return add, lambda: None

    before, parameter.grad = parameter.grad, None
    total: Tensor | None = None

    def collect(leaf: Tensor) -> None:
        nonlocal total
        assert leaf.grad is not None
        total = leaf.grad.float() if total is None else total.add_(leaf.grad)
        leaf.grad = None

    def end() -> None:
        if total is None:
            parameter.grad = before
            return
        exact = total if before is None else total.add_(before)
        parameter.grad = exact.to(parameter.dtype)

    return collect, end
