"""In which dtype parameters compute and gradients accumulate.

Trained weights are float32 and compute in `compute_dtype`; the gradients of a chunk arrive in that
dtype and are added to float32 sums at once. (bf16 sums over 64 chunks cost 0.8 % of the gradient.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def compute_parameters(
    model: nn.Module,
    compute_dtype: torch.dtype | None,
    *,
    unchanged: Collection[nn.Parameter] = (),
) -> Iterator[None]:
    """Within it the model's parameters are `compute_dtype` (None: as they are).

    `unchanged`: parameters that keep their dtype. Gradients end in the `.grad` of the model's own
    parameters. Those of 16-bit computations are summed in float32; a parameter that is itself
    16-bit gets its sum on exit, rounded once. Hooks of `Tensor.register_hook` see the sum of this
    call, once, on exit. On exit, also after an error, the model holds its own parameters again.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
                parameters[id(parameter)] = parameter
    as_they_are = {id(parameter) for parameter in unchanged}
    finish: list[Callable[[], None]] = []
    handles = []
    grads_before = {key: p.grad for key, p in parameters.items()}
    try:
        for key, parameter in parameters.items():
            dtype = parameter.dtype if key in as_they_are else compute_dtype or parameter.dtype
            leaf = _leaf(parameter, dtype)
            for module, name in places[key]:
                module._parameters[name] = leaf
            if leaf.requires_grad and (leaf.dtype.itemsize < 4 or _hooks(parameter)):
                add, end = _sum_apart(parameter) if _is_apart(parameter) else _sum_in(parameter)
                handles.append(leaf.register_post_accumulate_grad_hook(add))
                finish.append(end)
        yield
        for end in finish:
            end()
    except BaseException:
        for key, parameter in parameters.items():
            if _is_apart(parameter):
                parameter.grad = grads_before[key]
        raise
    finally:
        for handle in handles:
            handle.remove()
        for key, parameter in parameters.items():
            for module, name in places[key]:
                module._parameters[name] = parameter


def _leaf(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """What computes in a parameter's place: itself where nothing is to be changed."""
    if not parameter.is_floating_point() or (parameter.dtype == dtype and not _hooks(parameter)):
        return parameter
    return nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)


def _hooks(parameter: nn.Parameter) -> list[Callable[[Tensor], Tensor | None]]:
    """What `Tensor.register_hook` was given: each may change the gradient that it sees."""
    return list((getattr(parameter, "_backward_hooks", None) or {}).values())


def _is_apart(parameter: nn.Parameter) -> bool:
    """Whether this call's gradient is summed apart from `.grad`, to be added to it on exit."""
    return parameter.dtype.itemsize < 4 or bool(_hooks(parameter))


def _sum_in(parameter: nn.Parameter) -> tuple[Callable[[Tensor], None], Callable[[], None]]:
    """A hook that adds a leaf's gradient to a wide parameter's `.grad`, and what ends the sum."""

    def add(leaf: Tensor) -> None:
        assert leaf.grad is not None
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad += leaf.grad
        leaf.grad = None

    return add, lambda: None


def _sum_apart(parameter: nn.Parameter) -> tuple[Callable[[Tensor], None], Callable[[], None]]:
    """A hook that adds a leaf's gradient to a float32 or wider sum, and what adds that to `.grad`,
    rounded once, after the parameter's own hooks."""
    before, parameter.grad = parameter.grad, None
    wide = torch.promote_types(parameter.dtype, torch.float32)
    total: Tensor | None = None

    def add(leaf: Tensor) -> None:
        nonlocal total
        assert leaf.grad is not None
        total = leaf.grad.to(wide) if total is None else total.add_(leaf.grad)
        leaf.grad = None

    def end() -> None:
        if total is None:
            parameter.grad = before
            return
        grad = total
        for hook in _hooks(parameter):
            changed = hook(grad.to(parameter.dtype))
            grad = grad if changed is None else changed.to(wide)
        parameter.grad = (grad if before is None else grad.add(before)).to(parameter.dtype)

    return add, end
