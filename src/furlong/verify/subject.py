"""The subject of a proof: a small model of the user's kind, sequences, and the model's own truth.

The truth is the model's unchunked forward over one sequence at a time, in float64, with
transformers' SDPA attention where the family has it, and cross-entropy in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from furlong.families import family_of
from furlong.models.folders.build import build_model
from furlong.models.small.shrink import LONGEST_TOKENS, SHORTEST_TOKENS, VOCAB_SIZE
from furlong.ops.loss import IGNORE_INDEX
from furlong.planners.options import ChunkOptions
from furlong.runtime.memory.pools import Storage
from furlong.verify.wide import Wide

EXACT = 1e-12
ROUNDED = 2e-6
WIDE = 1e-9
CHUNK_SIZE = 16
LENS = (LONGEST_TOKENS, SHORTEST_TOKENS, 23, 30)
# Two prompts without labels; the first one fills more than a chunk.
_NUM_PROMPT_TOKENS = (2 * CHUNK_SIZE + 3, 4)
# Freshly drawn weights give attention that looks at all tokens alike, which would prove little.
_SPREAD = 5.0

Batch = list[dict[str, Tensor]]
Gradients = dict[str, Tensor]


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
    if hasattr(base, "set_experts_implementation"):
        base.set_experts_implementation("eager")  # the others know no float64
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


def num_labels(batch: Batch) -> int:
    return sum(int((s["labels"][1:] != IGNORE_INDEX).sum()) for s in batch)


def true_gradients(subject: Subject, batch: Batch) -> tuple[float, Gradients]:
    """Mean loss and gradients by the model's own forward."""
    divisor, total = num_labels(batch), 0.0
    for sequence in batch:
        with subject.computing():
            logits = subject.model(input_ids=sequence["input_ids"][None], use_cache=False).logits[0]
            loss = cross_entropy(
                logits[:-1].double(), sequence["labels"][1:],
                ignore_index=IGNORE_INDEX, reduction="sum",
            )  # fmt: skip
            (loss / divisor).backward()
        total += float(loss.detach())
    return total / divisor, take_gradients(subject.model)


def take_gradients(model: nn.Module) -> Gradients:
    """The gradients, which are then cleared."""
    taken = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken


def worst_error(given: Gradients, truth: Gradients) -> tuple[float, str]:
    """The largest relative L2 error of a parameter's gradient, and its name; inf if one lacks
    or is NaN.

    A gradient that is zero but for rounding has no direction: it counts against a billionth of the
    norm of all.
    """
    if given.keys() != truth.keys():
        return float("inf"), min(given.keys() ^ truth.keys())
    floor = 1e-9 * float(torch.stack([g.norm() for g in truth.values()]).norm())
    errors = {
        name: float((given[name] - truth[name]).norm()) / max(float(truth[name].norm()), floor)
        for name in truth
    }
    for name, error in errors.items():
        if math.isnan(error):
            return float("inf"), name
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


class _Float32Watch(TorchFunctionMode):
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


def rounded_to_float32(subject: Subject) -> list[str]:
    """Names of what the model's own forward sums over tokens in float32, among float64 weights."""
    return sorted(_watched(subject).found)


def computes_in_float32(subject: Subject) -> bool:
    """Whether the model's own forward computes anything in float32, if only for each token."""
    return _watched(subject).has_float32


def _watched(subject: Subject) -> _Float32Watch:
    watch = _Float32Watch()
    with watch, subject.computing():
        subject.model(input_ids=sequences()[1]["input_ids"][None], use_cache=False)
    return watch
