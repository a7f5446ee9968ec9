"""The proofs that need no training run: gradients, isolation, accumulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from furlong.models.shrink import VOCAB_SIZE
from furlong.ops.loss import IGNORE_INDEX
from furlong.testing import Batch, Gradients, num_labels, take_grads, worst_error
from furlong.verify.subject import (
    CHUNK_SIZE,
    EXACT,
    LENS,
    ROUNDED,
    WIDE,
    Subject,
    sequences,
    true_gradients,
    watched_forward,
)

# One chunk per sequence or less, an odd one, and everything in a chunk.
_SIZES = (CHUNK_SIZE, CHUNK_SIZE // 2 - 1, 2 * LENS[0])


@dataclass(frozen=True, slots=True)
class Finding:
    """Outcome of one proof."""

    name: str
    figure: str
    """The figure in words, with its bound."""
    passed: bool
    details: tuple[str, ...] = ()
    """Lines below it."""


@dataclass(frozen=True, slots=True)
class Bound:
    """How far two computations of the same gradients may lie apart, relative to their norm."""

    error: float
    reason: str


Check = Callable[[Subject, Bound], Finding]


def bound_of(subject: Subject) -> Bound:
    """1e-12, or 2e-6 where the model's own forward sums over tokens in float32.

    1e-9 where recurrent layers do, whose float32 is made float64: their gradients cancel.
    """
    if subject.is_wide:
        return Bound(WIDE, f"bound {WIDE:.0e}: float32 inside its layers made float64")
    rounded = sorted(watched_forward(subject).found)
    if not rounded:
        return Bound(EXACT, f"bound {EXACT:.0e}")
    reason = f"bound {ROUNDED:.0e}: transformers itself rounds {' and '.join(rounded)} to float32"
    return Bound(ROUNDED, reason)


def check_gradients(subject: Subject, bound: Bound) -> Finding:
    """Every parameter's gradient and the loss against the model's own, for several chunk sizes."""
    batch = sequences()
    loss, truth = true_gradients(subject, batch)
    found = []
    for size in _SIZES:
        given_loss, given = _chunked(subject, batch, size=size)
        errors = worst_error(given, truth), (_gap(given_loss, loss) / abs(loss), "the loss")
        found += [(error, f"{told}, chunks of {size}") for error, told in errors]
    worst, where = max(found, key=lambda one: one[0])
    figure = f"worst relative error {worst:.1e} of {len(truth)} ({where}); {bound.reason}"
    return Finding("gradients", figure, worst <= bound.error)


def check_isolation(subject: Subject, bound: Bound) -> Finding:
    """Other tokens in one sequence move no bit of what the others contribute.

    Where experts gather tokens of all sequences into one matrix product, a product of another
    height may round otherwise: there the bound of the gradients holds.
    """
    moved, own_moves = 0.0, []
    whole = sequences()
    whole_loss = _loss(subject, whole)
    for changed in range(len(whole)):
        others = _without_labels(whole, changed)
        loss, gradients = _chunked(subject, others)
        given_loss, given = _chunked(subject, _with_another_token(others, changed))
        moved = max(moved, worst_error(given, gradients)[0], _gap(given_loss, loss))
        own_moves.append(_gap(whole_loss, _loss(subject, _with_another_token(whole, changed))))
    allowed = bound.error if _has_experts(subject) else 0.0
    told = "no bit moves" if moved == 0 else f"moves by {moved:.1e}"
    figure = f"outside the changed sequence {told}, inside the loss by {min(own_moves):.1e}"
    if allowed:
        figure += f" (bound {allowed:.0e}: experts see all sequences in one product)"
    return Finding("isolation", figure, moved <= allowed and 0 < min(own_moves) < math.inf)


def check_accumulation(subject: Subject, bound: Bound) -> Finding:
    """One call, or one call per sequence with the global count: the same sum."""
    batch = sequences()
    _, truth = _chunked(subject, batch)
    engine = subject.engine()
    with subject.computing():
        for sequence in batch:
            engine.forward_backward([sequence], subject.options, num_labels(batch))
    error, name = worst_error(take_grads(subject.model), truth)
    figure = f"one call or {len(batch)}: relative error {error:.1e} ({name}); {bound.reason}"
    return Finding("accumulation", figure, error <= bound.error)


def _gap(one: float, other: float) -> float:
    """The distance of two losses; inf for NaN, which no comparison would find."""
    gap = abs(one - other)
    return math.inf if math.isnan(gap) else gap


def _chunked(subject: Subject, batch: Batch, size: int = CHUNK_SIZE) -> tuple[float, Gradients]:
    options = replace(subject.options, size=size)
    with subject.computing():
        loss = subject.engine().forward_backward(batch, options).loss
    return loss, take_grads(subject.model)


def _loss(subject: Subject, batch: Batch) -> float:
    with subject.computing():
        return subject.engine().forward_backward(batch, subject.options, backward=False).loss


def _without_labels(batch: Batch, changed: int) -> Batch:
    batch = [dict(sequence) for sequence in batch]
    batch[changed]["labels"] = torch.full_like(batch[changed]["labels"], IGNORE_INDEX)
    return batch


def _with_another_token(batch: Batch, changed: int) -> Batch:
    """Another early token, and another late one: a window may hide the early one from all labels
    and from the next sequence."""
    batch = [dict(sequence) for sequence in batch]
    input_ids = batch[changed]["input_ids"].clone()
    for place in (2, -3):
        # the next one that is not special
        input_ids[place] = 3 + (input_ids[place] - 2) % (VOCAB_SIZE - 3)
    batch[changed]["input_ids"] = input_ids
    return batch


def _has_experts(subject: Subject) -> bool:
    return any("experts" in name for name, _ in subject.model.named_parameters())
