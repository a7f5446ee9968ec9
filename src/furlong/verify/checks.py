"""The proofs that need no training run: gradients, isolation, accumulation.

Their subject is a small model of the user's kind. The truth is its unchunked forward over one
sequence at a time, in float64, with transformers' SDPA attention where the family has it, and
cross-entropy in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
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
ROUNDED = 2e-6
WIDE = 1e-9
CHUNK_SIZE = 16
LENS = (LONGEST_TOKENS, SHORTEST_TOKENS, 23, 30)
# Two prompts without labels; the first one fills more than a chunk.
_NUM_PROMPT_TOKENS = (2 * CHUNK_SIZE + 3, 4)
# Freshly drawn weights give attention that looks at all tokens alike, which would prove little.
_SPREAD = 5.0


class Wide(TorchDispatchMode):  # type: ignore[misc]
    """Within it every kernel that is asked for float32 gives float64, also in a backward, and so
    does one that is asked for nothing: tables of decays are made so.

    Recurrent layers of transformers sum in float32 over inner chunks of tokens, in whatever dtype
    the weights are. Their gradients partly cancel, and change with the inner chunk in the fifth
    digit: no bound tells that from an error.
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
        return func(*args, **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@dataclass(frozen=True)
class Subject:
    """A float64 model in train mode and how the user wants it cut."""

    model: Any
    options: ChunkOptions
    """The user's dials, with a chunk size that cuts these sequences."""
    max_seq_len: int = LONGEST_TOKENS
    storage: Storage | None = None
    """Where the tiers of these dials live."""
    is_wide: bool = False
    """Whether what its layers round to float32 stays in float64: recurrent ones sum in it."""

    def engine(self) -> Engine:
        return Engine(self.model, max_seq_len=self.max_seq_len, storage=self.storage)

    def computing(self) -> AbstractContextManager[object]:
        """Within it the model is computed, here and in chunks."""
        return Wide() if self.is_wide else nullcontext()


def build_subject(
    config: Any,
    options: ChunkOptions,
    lora: Mapping[str, Any] | None,
    *,
    seed: int = 0,
    storage: Storage | None = None,
) -> Subject:
    """A random model of a shrunk transformers config, with adapters that do something."""
    is_wide = family_of(config.model_type).recurrent != "none"
    making = Wide() if is_wide else nullcontext()  # tables made once are float64, too
    with TemporaryDirectory() as folder, making:
        config.save_pretrained(folder)
        model = build_model(
            str(Path(folder)),
            init="random",
            dtype=torch.float64,
            lora=None if lora is None else {**lora, "dropout": 0.0},
            seed=seed,
        )
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(base.config, "attn_logit_softcapping", None):
        base.set_attn_implementation("eager")  # SDPA has no softcap
    spread_weights(model, seed=seed)
    return Subject(model, options, storage=storage, is_wide=is_wide)


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


def sequences(*, seed: int = 0) -> Batch:
    """Random sequences of `LENS` tokens, the first ones with a prompt."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for index, num_tokens in enumerate(LENS):
        input_ids = torch.randint(4, VOCAB_SIZE, (num_tokens,), generator=generator)
        labels = input_ids.clone()
        if index < len(_NUM_PROMPT_TOKENS):
            labels[: _NUM_PROMPT_TOKENS[index]] = IGNORE_INDEX
        batch.append({"input_ids": input_ids, "labels": labels})
    return batch


def true_gradients(subject: Subject, batch: Batch) -> tuple[float, Gradients]:
    """Mean loss and gradients by the model's own forward."""
    with subject.computing():
        loss = reference_loss(subject.model, batch)
    return loss, take_grads(subject.model)


class Float32Watch(TorchFunctionMode):
    """Notes where a float64 model sums over tokens in float32.

    That is attention's softmax, (B, N, T, T), and weights that are cast to float32, whose gradients
    are then summed in it. What is rounded for each token alone (norms, routers) is rounded alike
    however a sequence is cut.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.has_float32 = False
        """Whether anything at all that has a gradient is float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.float32 and out.requires_grad:
            self.has_float32 = True
            if getattr(func, "__name__", "") == "softmax" and out.ndim == 4:
                self.found.add("attention's softmax")
            elif isinstance(args[0], nn.Parameter) and args[0].dtype == torch.float64:
                self.found.add("weights of norms" if args[0].ndim == 1 else "weights")
        return out


def watched_forward(subject: Subject) -> Float32Watch:
    """Note what the model's own forward computes in float32, among float64 weights."""
    watch = Float32Watch()
    with watch, subject.computing():
        subject.model(input_ids=sequences()[1]["input_ids"][None], use_cache=False)
    return watch


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
