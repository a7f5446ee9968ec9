"""The dtypes in which parameters compute and gradients accumulate.

Trained weights are float32 and compute in `compute_dtype`; the gradients of a chunk arrive in that
dtype and are added to float32 sums at once. (bf16 sums over 64 chunks cost 0.8 % of the gradient.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from furlong.errors import FLOAT16, ConfigError


@contextmanager
def compute_parameters(
    modules: Iterable[nn.Module],
    compute_dtype: torch.dtype | None,
    *,
    unchanged: Collection[nn.Parameter] = (),
    returned: dict[int, Tensor] | None = None,
) -> Iterator[None]:
    """Context manager: replace the parameters of a model's `modules` by leaves of `compute_dtype`.

    On exit, also after an error, the modules have their original parameters again. Gradients of
    float32 and wider parameters are added to `.grad` as they arrive. Those of narrower ones are
    summed in float32 or wider, and added to `.grad` on exit, rounded once.

    Args:
        compute_dtype: The leaves' dtype; None: each parameter's.
        unchanged: Parameters that keep their dtype.
        returned: If given, all gradient sums go there, keyed by id(parameter), and no `.grad` is
            changed.
    """
    places = [
        (module, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    parameters = {id(parameter): parameter for *_, parameter in places}
    as_they_are = parameters if compute_dtype is None else {id(p) for p in unchanged}
    sums: dict[int, Tensor] = {} if returned is None else returned
    leaves: dict[int, nn.Parameter] = {}
    earlier: dict[int, Tensor | None] = {}
    """`.grad` of parameters that are not replaced but summed apart, to restore on exit."""
    with ExitStack() as hooks:
        try:
            for key, parameter in parameters.items():
                dtype = parameter.dtype if key in as_they_are else compute_dtype
                leaf, is_apart = parameter, returned is not None and parameter.requires_grad
                if (is_apart or parameter.dtype != dtype) and parameter.is_floating_point():
                    data = parameter.detach().to(dtype)
                    leaf = nn.Parameter(data, requires_grad=parameter.requires_grad)
                leaves[key], is_summed = leaf, returned is not None or _is_narrow(parameter)
                if is_summed and leaf is parameter:
                    earlier[key], parameter.grad = parameter.grad, None
                if leaf.requires_grad and (is_summed or leaf is not parameter):
                    hear = partial(_sum, sums, key) if is_summed else partial(_add, parameter)
                    hooks.callback(leaf.register_post_accumulate_grad_hook(hear).remove)
            for module, name, parameter in places:
                module._parameters[name] = leaves[id(parameter)]
            yield
        finally:
            for module, name, parameter in places:
                module._parameters[name] = parameter
            for key, grad in earlier.items():
                parameters[key].grad = grad
    for key, total in sums.items() if returned is None else ():
        parameters[key].grad = _added(parameters[key], total)


@contextmanager
def added_gradients(
    parameters: Iterable[nn.Parameter], *, keeps_zeros: bool = False
) -> Iterator[None]:
    """Context manager for a step that adds gradients to `.grad`. After an error, each parameter
    whose `.grad` was None before has None again.

    `keeps_zeros`: On exit, trained parameters that received no gradient get zeros. A plan that
    samples chunks needs this, since an optimizer would skip parameters without a `.grad`."""
    without = [parameter for parameter in parameters if parameter.grad is None]
    try:
        yield
    except BaseException:
        for parameter in without:
            parameter.grad = None
        raise
    for parameter in without if keeps_zeros else ():
        is_whole = type(parameter) is nn.Parameter and not _is_narrow(parameter)
        if is_whole and parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=_grad_dtype(parameter))


@contextmanager
def gradients_apart(parameters: Sequence[nn.Parameter], found: dict[int, Tensor]) -> Iterator[None]:
    """Context manager: collect the parameters' gradients in `found`, keyed by id(parameter), and
    restore `.grad` on exit."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
        found.update({id(p): p.grad for p in parameters if p.grad is not None})
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def refuse_float16(parameters: Iterable[nn.Parameter], compute_dtype: torch.dtype | None) -> None:
    """Raise ConfigError if gradients of the engine's own loss would be computed in float16. A
    caller's loss of token values may be scaled."""
    if torch.float16 in (compute_dtype, *(parameter.dtype for parameter in parameters)):
        raise ConfigError(
            given="gradients in float16",
            required=f"bfloat16, float32 or float64: {FLOAT16}",
            source="the model's dtype, and compute_dtype of furlong.Engine or forward_backward",
            change="load the model in bfloat16 or float32, with compute_dtype None, or scale a loss"
            " of your own of token_values or of furlong.chunked (torch.amp.GradScaler)",
        )


def _is_narrow(parameter: nn.Parameter) -> bool:
    """Whether a parameter's gradients are summed in a wider dtype, and added to `.grad` on exit."""
    return parameter.dtype.itemsize < 4


def _add(parameter: nn.Parameter, leaf: Tensor) -> None:
    """Move the gradient of a leaf to the `.grad` of the float32 or wider parameter it replaces."""
    assert leaf.grad is not None
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=_grad_dtype(parameter))
    parameter.grad += leaf.grad
    leaf.grad = None


def _sum(sums: dict[int, Tensor], key: int, leaf: Tensor) -> None:
    """Move the gradient of a leaf to `sums[key]`, which is float32 or wider."""
    assert leaf.grad is not None
    if key in sums:
        sums[key].add_(leaf.grad)
    else:
        sums[key] = leaf.grad.to(torch.promote_types(leaf.dtype, torch.float32))
    leaf.grad = None


def _added(parameter: nn.Parameter, total: Tensor) -> Tensor:
    """Add `total` to `.grad` in place, as autograd does; return the new `.grad`."""
    grad = parameter.grad
    if grad is None:
        return total.to(_grad_dtype(parameter))
    wide = torch.promote_types(grad.dtype, total.dtype)
    with torch.no_grad():
        return grad.copy_(grad.to(wide).add(total))


def _grad_dtype(parameter: nn.Parameter) -> torch.dtype:
    return getattr(parameter, "grad_dtype", None) or parameter.dtype
