"""Reference loss and gradients of a model's unchunked forward, and relative errors.

Used by `furlong verify`, the start-up check and the tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from furlong.ops.loss import IGNORE_INDEX

TokenSequences = list[dict[str, Tensor]]
Gradients = dict[str, Tensor]


def num_labels(sequences: TokenSequences) -> int:
    return sum(int((s["labels"][1:] != IGNORE_INDEX).sum()) for s in sequences)


def reference_loss(model: nn.Module, sequences: TokenSequences, *, backward: bool = True) -> float:
    """Return the mean cross-entropy per label. Each sequence runs whole and by itself; with
    `backward`, its gradients are added to `.grad`.

    The loss is computed in float32, or float64 for a float64 model, whatever the logits' dtype.
    """
    wide = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    divisor, total = num_labels(sequences), 0.0
    for sequence in sequences:
        logits = model(input_ids=sequence["input_ids"][None], use_cache=False).logits[0]
        loss = cross_entropy(
            logits[:-1].to(wide), sequence["labels"][1:],
            ignore_index=IGNORE_INDEX, reduction="sum",
        )  # fmt: skip
        if backward and loss.requires_grad:
            (loss / divisor).backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total / divisor


def take_grads(model: nn.Module) -> Gradients:
    """Return the gradients in float64 by name, and set `.grad` to None."""
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def relative_error(given: Tensor | float, truth: Tensor | float, floor: float = 0.0) -> float:
    """Return |given - truth| / max(|truth|, floor) in L2 norms; inf for NaN, as comparisons with
    NaN are false."""
    # numbers on the CPU, whatever torch's default device
    one, other = (
        x.double() if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64, device="cpu")
        for x in (given, truth)
    )
    difference = float((one - other).norm())
    if math.isnan(difference):
        return math.inf
    return difference / max(float(other.norm()), floor) if difference else 0.0


def worst_error(
    given: Mapping[str, Tensor], truth: Mapping[str, Tensor], *, least: float = 1e-9
) -> tuple[float, str]:
    """Return the largest relative error of a parameter's gradient, and the name of the parameter;
    inf if a gradient is missing.

    Errors are relative to at least `least` of the total norm, since the relative error of a
    gradient that is zero except for rounding means nothing.
    """
    if given.keys() != truth.keys():
        return math.inf, min(given.keys() ^ truth.keys())
    floor = least * total_norm(truth)
    errors = {name: relative_error(given[name], truth[name], floor) for name in truth}
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def worst_relative_error(given: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """Return the largest relative error of a parameter's gradient; the names must be equal."""
    assert given.keys() == truth.keys(), given.keys() ^ truth.keys()
    return worst_error(given, truth)[0]


def total_norm(grads: Mapping[str, Tensor]) -> float:
    return float(torch.stack([g.norm() for g in grads.values()]).norm())


def total_relative_error(given: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """Return the relative error, in the L2 norm, of all gradients together."""
    return total_norm({n: given[n] - truth[n] for n in truth}) / total_norm(truth)
