"""Kernels of other libraries for the element-wise modules of a run's model: `model.kernels`.

The start-up check compares chunks with the whole model. Both use these kernels, so it cannot show
errors of the kernels. Here the kernels are compared with the original modules.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from furlong.errors import ConfigError, UserError, reason_of
from furlong.models.decoder import HFDecoder
from furlong.runtime.check import GRADIENTS, Run, cut_embeddings, differences, random_ids
from furlong.runtime.precision import compute_parameters
from furlong.runtime.rng import modes_kept

_NUM_TOKENS = 16
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3}
# furlong computes head and loss; Liger would change the rotary embedding of all models
_LIGER = {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}


def put_kernels(adapter: HFDecoder, kernels: Literal["liger", "hub"], dtype: torch.dtype) -> None:
    """Replace forwards of a model's modules by Liger's or the Hub's kernels. The model must be on
    the compute device, and `dtype` is the compute dtype.

    Raises ConfigError if the library is missing, fails, does not support the model, or computes
    other values. Also raises it in a pipeline, where no process has the whole model to compare.
    """
    if adapter.local_layers != range(adapter.num_layers):
        raise _refusal(kernels, "in a pipeline, whose stages hold no whole model to compare")
    model, base = adapter.model, adapter.base
    before = {id(m): m.__dict__.get("forward") for m in base.modules()}
    with (
        modes_kept(model),
        compute_parameters(model.modules(), dtype, unchanged=adapter.stays_float32(dtype)),
        torch.enable_grad(),
    ):
        model.eval()  # no random draws
        whole = _outcome(adapter)
        with _rounded_again(adapter):
            moved = differences(_outcome(adapter), whole)
        model.train()
        try:
            _apply(base, kernels)
            model.eval()
            errors = differences(_outcome(adapter), whole)
        except UserError:
            raise
        except Exception as error:  # of another library: missing, or without a GPU
            raise _refusal(kernels, f"which fails: {reason_of(error)}") from error
    if all(m.__dict__.get("forward") == before[id(m)] for m in base.modules()):
        raise _refusal(kernels, f"which has nothing for {type(base).__name__}")
    for name, relative in errors.items():
        bound = max(_TOLERANCES.get(dtype, 0.0), 2 * moved[name])
        if not relative <= bound:
            raise _refusal(
                kernels,
                f"which gives other {name} (relative error {relative:.1e}, not {bound:.0e})",
            )


def _apply(base: Any, kernels: str) -> None:
    if kernels == "hub":
        base.set_use_kernels(True)
        return
    from liger_kernel.transformers import (  # type: ignore[import-not-found, unused-ignore]
        _apply_liger_kernel_to_instance,
    )

    family = vars(sys.modules[type(base).__module__])
    own = dict(family)
    try:
        _apply_liger_kernel_to_instance(model=base, **_LIGER)
    finally:
        family.update(own)  # it also changes the classes of every later model


def _outcome(model: HFDecoder) -> Run:
    """Run a model forward and backward on random tokens. Return tensors by name: the hidden states
    (T, D), the gradients of the embeddings, and the gradients of trained vectors (norms and
    biases)."""
    (ids,) = random_ids(model, [_NUM_TOKENS])
    vectors = [p for p in model.base.parameters() if p.requires_grad and p.ndim == 1]
    with cut_embeddings(model) as embedded:
        hidden = model.whole_hidden(ids)
        generator = torch.Generator().manual_seed(1)
        cotangent = torch.randn(hidden.shape, generator=generator).to(hidden)
        leaves = [embedded[0], *vectors]
        first, *others = torch.autograd.grad(hidden, leaves, cotangent, materialize_grads=True)
    outcome = {"hidden states": hidden.detach(), GRADIENTS: first[0]}
    if others:
        outcome["gradients of norms and biases"] = torch.cat(others)
    return outcome


@contextmanager
def _rounded_again(model: HFDecoder) -> Iterator[None]:
    """Context manager: perturb outputs of attention modules and their submodules by at most half a
    unit in the last place, to show what rounding alone changes."""
    generator = torch.Generator(device=model.device).manual_seed(0)

    def move(module: nn.Module, inputs: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor) or not first.is_floating_point():
            return output
        noise = torch.rand(first.shape, generator=generator, device=first.device) * 2 - 1
        moved = (first * (1 + noise * torch.finfo(first.dtype).eps / 2)).to(first.dtype)
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    with ExitStack() as stack:
        for part in {part: None for own in model.attention_modules for part in own.modules()}:
            stack.callback(part.register_forward_hook(move).remove)
        yield


def _refusal(kernels: str, what: str) -> ConfigError:
    packages = {"liger": "liger-kernel", "hub": "kernels"}
    return ConfigError(
        given=f"model.kernels: {kernels}, {what}",
        required=f"the package {packages[kernels]}, a GPU, a whole model in each process, and "
        "kernels that agree with the model's own modules",
        source="model.kernels",
        change="set model.kernels: none"
        + f", or pip install {packages[kernels]}, on a GPU" * ("ModuleNotFound" in what),
    )
