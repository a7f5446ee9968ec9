"""In which dtype parameters compute and gradients accumulate.

Trained weights are float32 and compute in `compute_dtype`; the gradients of a chunk arrive in that
dtype and are added to float32 sums at once. (bf16 sums over 64 chunks cost 0.8 % of the gradient.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from furlong.errors import ConfigError


@contextmanager
def compute_parameters(
    model: nn.Module,
    compute_dtype: torch.dtype | None,
    *,
    unchanged: Collection[nn.Parameter] = (),
    returned: dict[int, Tensor] | None = None,
) -> Iterator[None]:
    """Within it the model's parameters are `compute_dtype` (None: as they are).

    `unchanged`: parameters that keep their dtype. With `returned` all compute on leaves of their
    own, and their gradients, summed in float32 or wider, end there by the parameter's id; no
    `.grad` and no hook is touched. Otherwise gradients end in the `.grad` of the model's own
    parameters, added in place. Those of 16-bit computations are summed in float32; a parameter that
    is itself 16-bit gets its sum on exit, rounded once. Hooks of `Tensor.register_hook` see the sum
    of this call, once, on exit. On exit, also after an error, the model holds its own parameters
    again. Raises ConfigError for a hook that returns no gradient.
    """
    places, parameters = _places(model)
    as_they_are = {id(parameter) for parameter in unchanged}
    sums: dict[int, Tensor] = {}
    """Gradients of this call that are added to `.grad` on exit."""
    handles = []
    grads_before = {
        key: p.grad for key, p in parameters.items() if returned is None and _is_apart(p)
    }
    try:
        for key, parameter in parameters.items():
            dtype = parameter.dtype if key in as_they_are else compute_dtype or parameter.dtype
            leaf = _leaf(parameter, dtype, is_own=returned is not None)
            for module, name in places[key]:
                module._parameters[name] = leaf
            if not leaf.requires_grad:
                continue
            if returned is not None:
                handles.append(
                    leaf.register_post_accumulate_grad_hook(partial(_sum, returned, key))
                )
            elif key in grads_before:
                parameter.grad = None
                handles.append(leaf.register_post_accumulate_grad_hook(partial(_sum, sums, key)))
            elif leaf is not parameter:
                handles.append(leaf.register_post_accumulate_grad_hook(partial(_add, parameter)))
        yield
        for key in sums:
            sums[key] = _heard(parameters[key], sums[key])
        for key, before in grads_before.items():
            parameters[key].grad = _added(parameters[key], before, sums.pop(key, None))
    except BaseException:
        for key, before in grads_before.items():
            parameters[key].grad = before
        raise
    finally:
        for handle in handles:
            handle.remove()
        for key, parameter in parameters.items():
            for module, name in places[key]:
                module._parameters[name] = parameter


def _places(
    model: nn.Module,
) -> tuple[dict[int, list[tuple[nn.Module, str]]], dict[int, nn.Parameter]]:
    """By id of each parameter: the modules that hold it, each with its name there; and itself."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
                parameters[id(parameter)] = parameter
    return places, parameters


@contextmanager
def forgotten_gradients(model: nn.Module) -> Iterator[None]:
    """After an error within it, parameters that had no gradient before have none again."""
    without = [parameter for parameter in model.parameters() if parameter.grad is None]
    try:
        yield
    except BaseException:
        for parameter in without:
            parameter.grad = None
        raise


@contextmanager
def made_gradients(model: nn.Module, *, keeps_zeros: bool = False) -> Iterator[None]:
    """Within it trained parameters have a `.grad`; those that nothing has reached lose it again,
    unless `keeps_zeros`: what was not drawn has a gradient of zeros, which an optimizer must see.

    Made in the first backward, gradients would lie among the short-lived tensors of the heap and
    keep it from shrinking.
    """
    sparse = {id(p) for m in model.modules() if getattr(m, "sparse", False) for p in m.parameters()}
    made: list[tuple[nn.Parameter, Tensor, int]] = []
    for parameter in model.parameters():
        is_usual = type(parameter) is nn.Parameter and id(parameter) not in sparse
        if not is_usual or not parameter.requires_grad or parameter.grad is not None:
            continue
        if not _is_apart(parameter):
            parameter.grad = torch.zeros_like(parameter, dtype=_grad_dtype(parameter))
            made.append((parameter, parameter.grad, parameter.grad._version))
    try:
        yield
    finally:
        for parameter, zeros, version in () if keeps_zeros else made:
            if parameter.grad is zeros and zeros._version == version:
                parameter.grad = None


def _leaf(parameter: nn.Parameter, dtype: torch.dtype, *, is_own: bool) -> nn.Parameter:
    """The parameter that computes in a parameter's place: itself where nothing is changed, or with
    `is_own` an alias of it."""
    is_own = is_own or parameter.dtype != dtype or bool(_hooks(parameter))
    if not parameter.is_floating_point() or not is_own:
        return parameter
    return nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)


def _hooks(parameter: nn.Parameter) -> list[Callable[[Tensor], Any]]:
    """Hooks of `Tensor.register_hook`: each may change the gradient that it sees."""
    return list((getattr(parameter, "_backward_hooks", None) or {}).values())


def _is_apart(parameter: nn.Parameter) -> bool:
    """Whether this call's gradient is summed apart from `.grad`, to be added to it on exit."""
    return parameter.dtype.itemsize < 4 or bool(_hooks(parameter))


def _add(parameter: nn.Parameter, leaf: Tensor) -> None:
    """Add the gradient of what computes in a wide parameter's place to its `.grad`."""
    assert leaf.grad is not None
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=_grad_dtype(parameter))
    parameter.grad += leaf.grad
    leaf.grad = None


def _sum(sums: dict[int, Tensor], key: int, leaf: Tensor) -> None:
    """Add the gradient of what computes in a parameter's place to a float32 or wider sum."""
    assert leaf.grad is not None
    wide = torch.promote_types(leaf.dtype, torch.float32)
    # a sparse sum and a dense one (of tied parameters) add up in one order only
    if key not in sums:
        sums[key] = leaf.grad.to(wide)
    elif sums[key].is_sparse and not leaf.grad.is_sparse:
        sums[key] = leaf.grad.to(wide).add_(sums[key])
    else:
        sums[key].add_(leaf.grad)
    leaf.grad = None


def _heard(parameter: nn.Parameter, total: Tensor) -> Tensor:
    """A gradient as the parameter's own hooks leave it, returned or changed in place."""
    for hook in _hooks(parameter):
        seen = total.to(_grad_dtype(parameter))
        version = seen._version
        changed = hook(seen)
        if changed is None:
            changed = seen if seen._version != version else total
        if not isinstance(changed, Tensor) or changed.shape != total.shape:
            what = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ConfigError(
                given=f"a hook on a gradient of shape {tuple(total.shape)} that returned {what}",
                required="a gradient of the same shape, or None",
                source="Tensor.register_hook on a parameter of the model",
                change="return the changed gradient",
            )
        total = changed.to(total.dtype)
    return total


def _added(parameter: nn.Parameter, before: Tensor | None, total: Tensor | None) -> Tensor | None:
    """`.grad` with the sum of this call added to it: in place, as autograd does."""
    if before is None or total is None:
        return before if total is None else total.to(_grad_dtype(parameter))
    wide = torch.promote_types(before.dtype, total.dtype)
    if before.is_sparse:
        return total.to(wide).add(before).to(before.dtype)
    with torch.no_grad():
        return before.copy_(before.to(wide).add(total))


def _grad_dtype(parameter: nn.Parameter) -> torch.dtype:
    return getattr(parameter, "grad_dtype", None) or parameter.dtype
