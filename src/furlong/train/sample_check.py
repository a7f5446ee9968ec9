"""The error of a sampled gradient, measured on one sequence during a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from furlong.data.loader import Batch
from furlong.planners.options import ChunkOptions
from furlong.planners.spaco import num_drawn
from furlong.runtime.rng import RNGState
from furlong.train.evaluation import evaluating
from furlong.train.memory import try_call
from furlong.train.optim import local

if TYPE_CHECKING:
    from furlong.runtime.step import StepResult
    from furlong.train.batches import BatchEngine


@dataclass(frozen=True, slots=True)
class SampleCheck:
    """Comparison of a sampled gradient with the exact one, over all trained parameters."""

    cosine: float | None
    """Cosine of the angle between them; None if one is zero."""
    relative_error: float | None
    """Norm of their difference divided by that of the exact one; None if that is zero."""
    num_tokens: int
    """Tokens of the sequence."""
    num_chunks: int
    num_drawn: int


def check_sample(
    engine: BatchEngine,
    batch: Batch,
    options: ChunkOptions,
    *,
    watch: Callable[[], None] = lambda: None,
) -> SampleCheck | None:
    """Compare exact and sampled gradients of the batch's longest sequence with a label; return None
    if memory did not suffice. A collective.

    Runs in eval mode, so that only sampling differs. Gradients, random generators and modes are
    restored. `watch` is called after each action; a MemoryError that it raises counts as a lack of
    memory.
    """
    labelled = [sequence for sequence in batch.sequences if sequence.num_valid_tokens]
    longest = max(labelled, key=lambda sequence: sequence.seq_len)
    compute = partial(engine.compute, Batch((longest,), batch.next_state), watch=watch)

    def check() -> SampleCheck:
        with _undisturbed(engine.model, engine.device) as parameters:
            return _check(engine, parameters, compute, options)

    return try_call(check, engine.device)[0]


def _check(
    engine: BatchEngine,
    parameters: Sequence[nn.Parameter],
    compute: Callable[[ChunkOptions], StepResult],
    options: ChunkOptions,
) -> SampleCheck:
    elsewhere = {id(parameter) for parameter in engine.engine.counted_elsewhere}
    own = [parameter for parameter in parameters if id(parameter) not in elsewhere]
    compute(replace(options, sample=None))
    exact = _taken(own)
    for parameter in parameters:
        parameter.grad = None
    plan = compute(options).plan
    assert plan is not None  # the run plans every step
    cosine, error = _compared(*engine.processes.sums(_sums(exact, _taken(own))))
    return SampleCheck(cosine, error, sum(plan.seq_lens), len(plan.chunks), num_drawn(plan))


@contextmanager
def _undisturbed(model: nn.Module, device: torch.device) -> Iterator[list[nn.Parameter]]:
    """Context manager: eval mode, and no gradients on the trained parameters, which are yielded;
    restores modes, gradients and generators."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [parameter.grad for parameter in parameters]
    random = RNGState.read(device)
    try:
        for parameter in parameters:
            parameter.grad = None
        with evaluating(model):
            yield parameters
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        random.write(device)


def _taken(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Take the gradients off the parameters and return them, zeros where there are none."""
    taken = []
    for parameter in parameters:
        gradient = parameter.grad
        taken.append(torch.zeros_like(parameter.data) if gradient is None else gradient)
        parameter.grad = None
    return taken


def _sums(exact: Sequence[Tensor], drawn: Sequence[Tensor]) -> list[float]:
    """Return this process's float64 sums of exact * drawn, exact², drawn² and (drawn - exact)²."""
    sums = torch.zeros(4, dtype=torch.float64)
    for one, other in zip(map(local, exact), map(local, drawn), strict=True):
        pairs = ((one, other), (one, one), (other, other), (other - one, other - one))
        sums += torch.stack([(a * b).sum(dtype=torch.float64) for a, b in pairs]).cpu()
    return sums.tolist()


def _compared(
    product: float, exact_square: float, drawn_square: float, difference_square: float
) -> tuple[float | None, float | None]:
    """Return cosine and relative error from the sums of `_sums`."""
    if not exact_square > 0 or not math.isfinite(drawn_square):
        return None, None
    error = math.sqrt(difference_square / exact_square)
    if not drawn_square:
        return None, error
    return product / math.sqrt(exact_square * drawn_square), error
