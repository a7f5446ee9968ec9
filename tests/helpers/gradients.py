"""Gradients of the model's own unchunked forward, and how far others are from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Batch = list[dict[str, Tensor]]


def batch(
    lens: Sequence[int], *, vocab_size: int = 96, seed: int = 0, masked: Sequence[range] = ()
) -> Batch:
    """Random sequences; `masked[i]` are the tokens of sequence i that have no label."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for index, num_tokens in enumerate(lens):
        input_ids = torch.randint(3, vocab_size, (num_tokens,), generator=generator)
        labels = input_ids.clone()
        if index < len(masked):
            labels[list(masked[index])] = -100
        sequences.append({"input_ids": input_ids, "labels": labels})
    return sequences


def num_labels(sequences: Batch) -> int:
    return sum(int((s["labels"][1:] != -100).sum()) for s in sequences)


def reference_loss(model: nn.Module, sequences: Batch, *, backward: bool = True) -> float:
    """Summed cross-entropy / labelled tokens, one whole sequence at a time; adds to `.grad`."""
    divisor = num_labels(sequences)
    total = 0.0
    for sequence in sequences:
        logits = model(input_ids=sequence["input_ids"][None], use_cache=False).logits[0]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        loss = cross_entropy(wide[:-1], sequence["labels"][1:], ignore_index=-100, reduction="sum")
        if backward and loss.requires_grad:
            (loss / divisor).backward()
        total += float(loss.detach())
    return total / divisor


def take_grads(model: nn.Module) -> dict[str, Tensor]:
    """The gradients, which are then cleared."""
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def worst_relative_error(given: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The largest relative L2 error of any parameter's gradient."""
    assert given.keys() == truth.keys(), given.keys() ^ truth.keys()
    floor = 1e-9 * total_norm(truth)  # a gradient that is zero but for rounding has no direction
    return max(
        float((given[n] - truth[n]).norm()) / max(float(truth[n].norm()), floor) for n in truth
    )


def total_norm(grads: dict[str, Tensor]) -> float:
    return float(torch.stack([g.norm() for g in grads.values()]).norm())


def total_relative_error(given: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The relative L2 error over all parameters."""
    return total_norm({n: given[n] - truth[n] for n in truth}) / total_norm(truth)
