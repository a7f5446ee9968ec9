"""The proofs that need no training run: gradients, isolation, accumulation.

Their subject is a small model of the user's kind. The truth is its unchunked forward over one
sequence at a time, in float64, with transformers' SDPA attention where the family has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from furlong.api import Engine
from furlong.families import family_of
from furlong.kv.pools import Storage
from furlong.models.build import build_model
from furlong.models.shrink import LONGEST_TOKENS, SHORTEST_TOKENS, VOCAB_SIZE
from furlong.ops.loss import IGNORE_INDEX
from furlong.planners.options import ChunkOptions
from furlong.testing import (
    Batch,
    Gradients,
    num_labels,
    reference_loss,
    take_grads,
    worst_error,
)

EXACT = 1e-12
RECURRENT = 1e-9
"""Recurrent layers sum over inner chunks of tokens, and their gradients partly cancel."""
CHUNK_SIZE = 16
LENS = (LONGEST_TOKENS, SHORTEST_TOKENS, 23, 30)
# Two prompts without labels; the first one fills more than a chunk.
_NUM_PROMPT_TOKENS = (2 * CHUNK_SIZE + 3, 4)
# Freshly drawn weights give attention that looks at all tokens alike, which would prove little.
_SPREAD = 5.0
_SIZES = (CHUNK_SIZE, CHUNK_SIZE // 2 - 1, 2 * LENS[0])
"""One chunk per sequence or less, an odd one, and everything in a chunk."""


class Float64(TorchDispatchMode):  # type: ignore[misc]
    """Within it every kernel that is asked for float32 gives float64, also in a backward, and so
    does one that is asked for nothing: tables of decays are made so.

    Families of transformers compute softmaxes, norms and scans in float32 in whatever dtype the
    weights are. Such sums round otherwise in other chunks: no bound tells that from an error.
    """

    def __enter__(self) -> Self:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._default)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named = {n: torch.float64 if x is torch.float32 else x for n, x in (kwargs or {}).items()}
        return func(*args, **named)


@dataclass(frozen=True)
class Subject:
    """A float64 model in train mode and how the user wants it cut."""

    model: Any
    options: ChunkOptions
    """The user's options, with a chunk size that cuts these sequences."""
    bound: float
    """How far two computations of the same gradients may lie apart, relative to their norm."""
    storage: Storage | None = None
    """Where offloaded tensors live."""

    def engine(self) -> Engine:
        return Engine(self.model, max_seq_len=LONGEST_TOKENS, storage=self.storage)

    def chunked(self, batch: Batch, size: int = CHUNK_SIZE) -> tuple[float, Gradients]:
        """Mean loss and gradients in chunks."""
        with Float64():
            loss = self.engine().forward_backward(batch, replace(self.options, size=size)).loss
        return loss, take_grads(self.model)

    def whole(self, batch: Batch) -> tuple[float, Gradients]:
        """Mean loss and gradients by the model's own forward."""
        with Float64():
            loss = reference_loss(self.model, batch)
        return loss, take_grads(self.model)


def build_subject(
    config: Any,
    options: ChunkOptions,
    lora: Mapping[str, Any] | None,
    *,
    storage: Storage | None = None,
) -> Subject:
    """A random model of a shrunk transformers config, with adapters that do something."""
    with TemporaryDirectory() as folder, Float64():  # tables made once are float64, too
        config.save_pretrained(folder)
        own = None if lora is None else {**lora, "dropout": 0.0}
        model = build_model(folder, init="random", dtype=torch.float64, lora=own)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(base.config, "attn_logit_softcapping", None):
        base.set_attn_implementation("eager")  # SDPA has no softcap
    spread_weights(model, seed=0)
    is_recurrent = family_of(config.model_type).recurrent != "none"
    return Subject(model, options, RECURRENT if is_recurrent else EXACT, storage)


def spread_weights(model: nn.Module, *, seed: int) -> None:
    """Weights five times as large, vectors and adapters away from their neutral start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if sum(size > 1 for size in parameter.shape) < 2:  # Kimi's decays are (1, 1, heads, 1)
                parameter.add_(0.1 * noise)
            elif "lora_B" in name:
                parameter.copy_(0.1 * noise)
            else:
                parameter.mul_(_SPREAD)


def sequences() -> Batch:
    """Random sequences of `LENS` tokens, the first ones with a prompt."""
    generator = torch.Generator().manual_seed(0)
    batch = []
    for index, num_tokens in enumerate(LENS):
        input_ids = torch.randint(4, VOCAB_SIZE, (num_tokens,), generator=generator)
        labels = input_ids.clone()
        if index < len(_NUM_PROMPT_TOKENS):
            labels[: _NUM_PROMPT_TOKENS[index]] = IGNORE_INDEX
        batch.append({"input_ids": input_ids, "labels": labels})
    return batch


@dataclass(frozen=True, slots=True)
class Finding:
    """Outcome of one proof."""

    name: str
    figure: str
    """The figure in words, with its bound."""
    passed: bool


def check_gradients(subject: Subject) -> Finding:
    """Every parameter's gradient and the loss against the model's own, for several chunk sizes."""
    batch = sequences()
    loss, truth = subject.whole(batch)
    found = []
    for size in _SIZES:
        given_loss, given = subject.chunked(batch, size)
        errors = worst_error(given, truth), (_gap(given_loss, loss) / abs(loss), "the loss")
        found += [(error, f"{told}, chunks of {size}") for error, told in errors]
    worst, where = max(found, key=lambda one: one[0])
    figure = f"worst relative error {worst:.1e} of {len(truth)} ({where})"
    return _within("gradients", figure, worst, subject)


def check_isolation(subject: Subject) -> Finding:
    """Other tokens in one sequence move no bit of what the others contribute.

    Where experts gather tokens of all sequences into one matrix product, a product of another
    height may round otherwise: there the bound of the gradients holds.
    """
    moved, own_moves = 0.0, []
    whole = sequences()
    whole_loss, _ = subject.chunked(whole)
    for changed in range(len(whole)):
        others = _without_labels(whole, changed)
        loss, gradients = subject.chunked(others)
        given_loss, given = subject.chunked(_with_another_token(others, changed))
        moved = max(moved, worst_error(given, gradients)[0], _gap(given_loss, loss))
        own_moves.append(_gap(whole_loss, subject.chunked(_with_another_token(whole, changed))[0]))
    has_experts = any("experts" in name for name, _ in subject.model.named_parameters())
    allowed = subject.bound if has_experts else 0.0
    told = "no bit moves" if moved == 0 else f"moves by {moved:.1e}"
    figure = f"outside the changed sequence {told}, inside the loss by {min(own_moves):.1e}"
    if allowed:
        figure += f" (bound {allowed:.0e}: experts see all sequences in one product)"
    return Finding("isolation", figure, moved <= allowed and 0 < min(own_moves) < math.inf)


def check_accumulation(subject: Subject) -> Finding:
    """One call, or one call per sequence with the global count: the same sum."""
    batch = sequences()
    _, truth = subject.chunked(batch)
    engine = subject.engine()
    with Float64():
        for sequence in batch:
            engine.forward_backward([sequence], subject.options, num_labels(batch))
    error, name = worst_error(take_grads(subject.model), truth)
    figure = f"one call or {len(batch)}: relative error {error:.1e} ({name})"
    return _within("accumulation", figure, error, subject)


def _within(name: str, figure: str, error: float, subject: Subject) -> Finding:
    return Finding(name, f"{figure}; bound {subject.bound:.0e}", error <= subject.bound)


def _gap(one: float, other: float) -> float:
    """The distance of two losses; inf for NaN, which no comparison would find."""
    gap = abs(one - other)
    return math.inf if math.isnan(gap) else gap


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
