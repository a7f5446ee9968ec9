"""How far a sampled gradient is from the exact one, measured on one sequence during a run."""

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
    """A sampled gradient beside the exact one, over all trained parameters together."""

    cosine: float | None
    """Cosine of the angle between them; None where one of them is zero."""
    relative_error: float | None
    """Norm of their difference over that of the exact one; None where that is zero."""
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
    """Compares the two gradients of the batch's longest sequence with a label, with the draw that
    `options` say; None where memory did not suffice for both. A collective of all processes.
    `watch` is called after every action, and its MemoryError is a lack of memory.

    Dropout is off: what differs is the sample alone. Gradients, random generators and the model's
    modes are afterwards as before.
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
    """Within it the model evaluates and its trained parameters, which are yielded, have no
    gradient."""
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
    """The gradients, zeros where nothing was reached; the parameters have none afterwards."""
    taken = []
    for parameter in parameters:
        gradient = parameter.grad
        taken.append(torch.zeros_like(parameter.data) if gradient is None else gradient)
        parameter.grad = None
    return taken


def _sums(exact: Sequence[Tensor], drawn: Sequence[Tensor]) -> list[float]:
    """Sums over this process's part of all gradients, in float64: exact x drawn, the squares of
    both, and that of their difference."""
    sums = torch.zeros(4, dtype=torch.float64)
    for one, other in zip(map(local, exact), map(local, drawn), strict=True):
        pairs = ((one, other), (one, one), (other, other), (other - one, other - one))
        sums += torch.stack([(a * b).sum(dtype=torch.float64) for a, b in pairs]).cpu()
    return sums.tolist()


def _compared(
    product: float, exact_square: float, drawn_square: float, difference_square: float
) -> tuple[float | None, float | None]:
    """Cosine and relative error of a drawn gradient by the exact one."""
    if not exact_square > 0 or not math.isfinite(drawn_square):
        return None, None
    error = math.sqrt(difference_square / exact_square)
    if not drawn_square:
        return None, error
    return product / math.sqrt(exact_square * drawn_square), error
