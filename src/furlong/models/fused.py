"""Fused element-wise kernels for passes on a GPU: RMS norms and the outputs of LoRA.

Outside of matrix products and attention, most bytes that a layer of an 8B model moves are those of
norms, which transformers writes as float32 operators, and with LoRA those of wide outputs, which
peft scales and adds. torch's RMS norm reads and writes once, and `addmm_` adds the low-rank product
to the base's output. Both round once where the originals round twice or more. A module whose
instance was given a `forward` keeps it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from furlong.models.attention import Change
from furlong.testing import relative_error

DEVICES = ("cuda",)
"""Types of devices on which modules are changed."""
_EPSILONS = ("variance_epsilon", "eps")
_NUM_ROWS = 8
_WORST = 1.1
"""Largest error against float32, as a multiple of the error of the module's own forward."""
_ROUNDING = 1e-6
"""Relative error that counts as float32 rounding."""

Norm = Callable[[Tensor, Tensor, float], Tensor]
"""x (..., D), weight (D,), epsilon -> (..., D)."""
NORMS: tuple[Norm, ...] = (
    lambda x, weight, eps: rms_norm(x, weight.shape, weight, eps),
    # Gemma's: the kernel takes one dtype, and 1 + weight is not to be rounded to 16 bits
    lambda x, weight, eps: rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype),
)

Agreed = dict[Any, dict[torch.dtype, Norm]]
"""Kind of module -> dtype -> norm that was tested and agrees; a tested kind may have none."""


def fused(base: nn.Module, device: torch.device, agreed: Agreed) -> list[Change]:
    """Return changes that give modules a fused `forward`, for a model that computes on `device`.

    `agreed` caches test results: kind of module -> dtype -> a norm that agrees with the module.
    Only the first module of each kind is tested, since a test waits for the device.
    """
    if device.type not in DEVICES:
        return []
    here = [m for m in base.modules() if "forward" not in vars(m)]
    functions = [*_norms(here, device, agreed), *_adapters(here)]
    return [(vars(own.args[0]), "forward", own) for own in functions]


def keep_written(base: nn.Module, device: torch.device) -> None:
    """Make modules keep their unfused kernels: store the class's `forward` on each module that
    `fused` would change. `fused` leaves modules that have such a `forward` unchanged."""
    for names, key, own in fused(base, device, {}):
        names[key] = own.args[0].forward


def _norms(
    modules: list[nn.Module], device: torch.device, agreed: Agreed
) -> Iterator[partial[Tensor]]:
    """Yield fused forwards of RMS norms. They are not recognized by name: one module of each kind
    with a weight (D,), an epsilon and nothing else is tested on random numbers on the device."""
    plain = vars(nn.Module()).keys()
    for module in modules:
        eps = next((e for n in _EPSILONS if isinstance(e := vars(module).get(n), float)), None)
        weight = module._parameters.get("weight")
        held = [*module._parameters.values(), *module._buffers.values(), *module._modules.values()]
        takes = inspect.signature(type(module).forward).parameters
        if eps is None or weight is None or weight.ndim != 1 or len(takes) != 2:
            continue
        if sum(x is not None for x in held) != 1:
            continue
        own = {name: x for name, x in vars(module).items() if name not in plain}
        if not all(isinstance(x, bool | int | float | str | None) for x in own.values()):
            continue
        numbers = own.items()
        kind = type(module), weight.shape, weight.dtype, *numbers
        if kind not in agreed:
            dtypes = {torch.bfloat16, weight.dtype} - {torch.float64}
            chosen = ((dtype, _choose(module, eps, device, dtype)) for dtype in dtypes)
            agreed[kind] = {dtype: norm for dtype, norm in chosen if norm is not None}
        if agreed[kind]:
            yield partial(_norm, module, eps, agreed[kind])


def _norm(
    module: Any, eps: float, norms: dict[torch.dtype, Norm], *args: Tensor, **named: Tensor
) -> Tensor:
    (x,) = (*args, *named.values())
    norm = norms.get(x.dtype)
    if norm is None or module.weight.dtype != x.dtype or torch.is_autocast_enabled(x.device.type):
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    return norm(x, module.weight, eps)


def _choose(module: Any, eps: float, device: torch.device, dtype: torch.dtype) -> Norm | None:
    """Return the first of `NORMS` whose values and gradients are as close to float32 as the
    module's, on rows of usual size and on rows so small that epsilon matters. Return None if there
    is none, or if the module behaves differently in train mode."""
    generator, shape = torch.Generator("cpu").manual_seed(0), module.weight.shape

    def draw(*sizes: int) -> Tensor:
        # a nonzero mean distinguishes an RMS norm from a layer norm
        x = torch.randn(*sizes, *shape, generator=generator, device="cpu") + 0.5
        return x.to(device, dtype)

    x, w, g = draw(_NUM_ROWS), draw(), draw(_NUM_ROWS)

    def written(x: Tensor, w: Tensor, _: float, training: bool = True) -> Tensor:
        twin = copy(module)
        vars(twin).update(_parameters={"weight": w}, training=training)
        return type(module).forward(twin, x)  # type: ignore[no-any-return]

    def outcome(norm: Norm, x: Tensor, w: Tensor, g: Tensor) -> list[Tensor]:
        leaves = [given.clone().requires_grad_() for given in (x, w)]
        with torch.enable_grad():
            y = norm(leaves[0], leaves[1], eps)
        return [y.detach(), *torch.autograd.grad(y, leaves, g)]

    inputs = [(x, w, g), (x * eps**0.5, w, g)]

    def outcomes(norm: Norm, dtype: torch.dtype) -> list[Tensor]:
        return [y for given in inputs for y in outcome(norm, *(own.to(dtype) for own in given))]

    def errors(norm: Norm) -> list[float]:
        found = outcomes(norm, dtype)
        return [relative_error(own, true) for own, true in zip(found, truth, strict=True)]

    try:
        truth = outcomes(written, torch.float32)
        again = outcomes(partial(written, training=False), torch.float32)
        if not all(map(torch.equal, truth, again)):
            return None
        bounds = [max(_WORST * error, _ROUNDING) for error in errors(written)]
        for norm in NORMS:
            if all(e <= most for e, most in zip(errors(norm), bounds, strict=True)):
                return norm
    except (RuntimeError, TypeError):  # not a norm of one tensor, or no kernel for it
        pass
    return None


def _adapters(modules: list[nn.Module]) -> Iterator[partial[Tensor]]:
    peft: Any = sys.modules.get("peft.tuners.lora.layer")
    for module in modules if peft else ():
        if type(module) is peft.Linear and type(module.base_layer) is nn.Linear:
            yield partial(_adapted, module)


def _adapted(module: Any, x: Tensor, *args: Any, **named: Any) -> Tensor:
    """Run peft's forward of a LoRA linear layer, with the low-rank product added in place."""
    names = [name for name in module.active_adapters if name in module.lora_A]
    parts: list[Any] = [module.base_layer]
    parts += [table[names[0]] for table in (module.lora_A, module.lora_B) if names]
    if (
        args or named or len(names) != 1 or names[0] in module.lora_variant or module.merged
        or module.disable_adapters or torch.is_autocast_enabled(x.device.type)
        or not all(_is_plain(part) and part.weight.dtype == x.dtype for part in parts)
        or parts[-1].bias is not None
    ):  # fmt: skip
        return type(module).forward(module, x, *args, **named)  # type: ignore[no-any-return]
    (name,) = names
    base, down, up = parts
    low = down(module.lora_dropout[name](x)).flatten(0, -2)  # (tokens, rank)
    # 2-D, since the output is then no view, which addmm_ would copy
    out = base(x.flatten(0, -2))
    out.addmm_(low, up.weight.t(), alpha=module.scaling[name])
    return out.view(*x.shape[:-1], out.shape[-1])  # type: ignore[no-any-return]


def _is_plain(module: Any) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks
    return type(module) is nn.Linear and not hooks and "forward" not in vars(module)
