"""In which dtype parameters compute and gradients accumulate.

Trained weights are float32 and compute in `compute_dtype`; the gradients of a chunk arrive in that
dtype and are added to float32 sums at once. (bf16 sums over 64 chunks cost 0.8 % of the gradient.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class ParameterGroup:
    """Parameters of some modules, in whose places leaves compute between `put` and `restore`.

    A leaf may be the parameter itself, have another dtype, lie on another device or be filled from
    elsewhere. Its gradients are added to `.grad` as they arrive where that is wide enough and
    beside them; else to a sum in float32 or wider, which `reduce` adds to `.grad`, rounded once.
    """

    def __init__(
        self, modules: Iterable[nn.Module], returned: dict[int, Tensor] | None = None
    ) -> None:
        """`returned`: where all gradients are summed, by the parameter's id, and stay; no `.grad`
        is touched."""
        self.parameters: dict[int, nn.Parameter] = {}
        self._places: list[tuple[int, nn.Module, str]] = []
        self._all_apart = returned is not None
        self._sums = {} if returned is None else returned
        self._own_grads: dict[int, Tensor | None] = {}
        """The earlier `.grad` of a parameter that is its own leaf, while gradients are summed."""
        self._handles: list[RemovableHandle] = []
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._places.append((id(parameter), module, name))
                    self.parameters[id(parameter)] = parameter

    def put(self, leaf_of: Callable[[nn.Parameter], nn.Parameter]) -> None:
        """Let `leaf_of` each parameter compute in all its places."""
        leaves = {key: leaf_of(parameter) for key, parameter in self.parameters.items()}
        for key, module, name in self._places:
            module._parameters[name] = leaves[key]
        for key, leaf in leaves.items():
            parameter, hear = self.parameters[key], None
            if self._all_apart or _is_narrow(parameter) or leaf.device != parameter.device:
                hear = partial(_sum, self._sums, key)
                if leaf is parameter:
                    self._own_grads[key], parameter.grad = parameter.grad, None
            elif leaf is not parameter:
                hear = partial(_add, parameter)
            if hear is not None and leaf.requires_grad:
                self._handles.append(leaf.register_post_accumulate_grad_hook(hear))

    def restore(self) -> None:
        """Put the parameters back into their places; sums wait for `reduce`, or a next `put`."""
        while self._handles:
            self._handles.pop().remove()
        for key, module, name in self._places:
            module._parameters[name] = self.parameters[key]
        while self._own_grads:
            key, grad = self._own_grads.popitem()
            self.parameters[key].grad = grad

    def reduce(self) -> None:
        """Add the sums to the `.grad` of restored parameters, and forget them."""
        for key, parameter in self.parameters.items():
            total = self._sums.pop(key, None)
            if total is not None:
                parameter.grad = _added(parameter, total)


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
    own, and their gradients end there; see `ParameterGroup`. Otherwise they end in the `.grad` of
    the model's own parameters, added in place. On exit, also after an error, the model holds its
    own parameters again.
    """
    group = ParameterGroup(model.modules(), returned)
    kept = {id(parameter) for parameter in unchanged}

    def leaf_of(parameter: nn.Parameter) -> nn.Parameter:
        is_kept = compute_dtype is None or id(parameter) in kept
        dtype = parameter.dtype if is_kept else compute_dtype
        is_changed = returned is not None or parameter.dtype != dtype
        if not (is_changed and parameter.is_floating_point()):
            return parameter
        return nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)

    try:
        group.put(leaf_of)
        yield
    finally:
        group.restore()
    if returned is None:
        group.reduce()


@contextmanager
def added_gradients(model: nn.Module, *, keeps_zeros: bool = False) -> Iterator[None]:
    """Within it runs a step. Trained parameters that had no `.grad` have none after an error.
    `keeps_zeros`: what nothing has reached has zeros, which an optimizer must see where it was not
    drawn."""
    without = [parameter for parameter in model.parameters() if parameter.grad is None]
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


def _is_narrow(parameter: nn.Parameter) -> bool:
    """Whether this call's gradient is summed apart from `.grad`, to be added to it on exit."""
    return parameter.dtype.itemsize < 4


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
    if key in sums:
        sums[key].add_(leaf.grad)
    else:
        sums[key] = leaf.grad.to(torch.promote_types(leaf.dtype, torch.float32))
    leaf.grad = None


def _added(parameter: nn.Parameter, total: Tensor) -> Tensor:
    """`.grad` with a sum added to it: in place, as autograd does."""
    grad, total = parameter.grad, total.to(parameter.device)
    if grad is None:
        return total.to(_grad_dtype(parameter))
    wide = torch.promote_types(grad.dtype, total.dtype)
    with torch.no_grad():
        return grad.copy_(grad.to(wide).add(total))


def _grad_dtype(parameter: nn.Parameter) -> torch.dtype:
    return getattr(parameter, "grad_dtype", None) or parameter.dtype
