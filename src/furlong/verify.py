"""`furlong verify`: proofs on a shrunk copy of a run's model.

Gradients are compared with those of the model's unchunked forward, one sequence at a time, in
float64 and with transformers' SDPA attention where the family supports it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from furlong.api import Engine
from furlong.config.schema import DataConfig, ModelConfig, RunConfig, Source
from furlong.cost.shape import known_models
from furlong.families import family_of
from furlong.kv.pools import Storage
from furlong.models.build import build_model, model_of_config
from furlong.models.routers import ROUTER_LOGITS
from furlong.models.shrink import LONGEST_TOKENS, SHORTEST_TOKENS, VOCAB_SIZE, shrink_config
from furlong.ops.loss import IGNORE_INDEX
from furlong.planners.options import ChunkOptions, fixed_options, options_in_words
from furlong.planners.setup import given_options
from furlong.testing import (
    Gradients,
    TokenSequences,
    num_labels,
    reference_loss,
    take_grads,
    worst_error,
)
from furlong.train.run_model import read_model_config
from furlong.units import format_seconds

EXACT_BOUND = 1e-12
RECURRENT = 1e-9
"""Bound for recurrent layers: they sum over inner chunks, and gradients partly cancel."""
CHUNK_SIZE = 16
LENS = (LONGEST_TOKENS, SHORTEST_TOKENS, 23, 30)
# Two prompts without labels; the first one fills more than a chunk.
_NUM_PROMPT_TOKENS = (2 * CHUNK_SIZE + 3, 4)
# Initial weights give nearly uniform attention, which would prove little.
_SPREAD = 5.0
_SIZES = (CHUNK_SIZE, CHUNK_SIZE // 2 - 1, 2 * LENS[0])
"""Chunk sizes: one that cuts sequences, an odd one, and one for the whole batch."""


class Float64(TorchDispatchMode):  # type: ignore[misc]
    """Mode in which kernels with a float32 or default `dtype` argument return float64, also in a
    backward.

    Families compute softmaxes, norms and scans in float32 whatever the weights' dtype. The rounding
    of float32 depends on the chunks, and no bound would separate such rounding from a wrong
    gradient.
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
    """A float64 model in train mode, and the user's chunk options."""

    model: Any
    options: ChunkOptions
    """The user's options, with a chunk size that cuts the sequences of the proofs."""
    bound: float
    """Largest allowed relative error between two computations of the same gradients."""
    storage: Storage | None = None
    """Where offloaded tensors are stored."""

    @cached_property
    def engine(self) -> Engine:
        """The engine of all proofs, so that the self-check runs once."""
        return Engine(self.model, max_seq_len=LONGEST_TOKENS, storage=self.storage)

    def chunked(self, batch: TokenSequences, size: int = CHUNK_SIZE) -> tuple[float, Gradients]:
        """Return mean loss and gradients of a batch, computed in chunks of `size` tokens."""
        with Float64():
            loss = self.engine.forward_backward(batch, replace(self.options, size=size)).loss
        return loss, take_grads(self.model)

    def whole(self, batch: TokenSequences) -> tuple[float, Gradients]:
        """Return mean loss and gradients of the model's own forward."""
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
    """Return a subject with a random model of a shrunk transformers config. Its adapters are not
    zero, and have no dropout."""
    with TemporaryDirectory() as folder, Float64():  # tables made once are float64, too
        config.save_pretrained(folder)
        own = None if lora is None else {**lora, "dropout": 0.0}
        model = build_model(folder, init="random", dtype=torch.float64, lora=own)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    text = config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None):
        base.set_attn_implementation("eager")  # SDPA has no softcap
    spread_weights(model, seed=0)
    is_recurrent = family_of(text.model_type).recurrent != "none"
    return Subject(model, options, RECURRENT if is_recurrent else EXACT_BOUND, storage)


def spread_weights(model: nn.Module, *, seed: int) -> None:
    """Change a model's weights in place: scale matrices by 5, and move vectors and adapters away
    from their neutral initial values. `seed`: the seed of the noise that is added."""
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


def sequences() -> TokenSequences:
    """Return random sequences of `LENS` tokens, the first ones with prompts without labels."""
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
    """The result of one proof."""

    name: str
    figure: str
    """The measured error in words, with its bound."""
    passed: bool


def check_gradients(subject: Subject) -> Finding:
    """Compare the loss and each parameter's gradient with those of the model's own forward, for
    several chunk sizes. Return the finding, with the worst error."""
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
    """Check that changed tokens of one sequence change no bit of the others' loss and gradients.
    Return the finding.

    With experts, tokens of all sequences share matrix products, whose rounding may depend on their
    shapes. Changes up to the bound for gradients are then allowed.
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
    """Compare gradients of one call with those summed over one call per sequence. Return the
    finding."""
    batch = sequences()
    _, truth = subject.chunked(batch)
    with Float64():
        for sequence in batch:
            subject.engine.forward_backward([sequence], subject.options, num_labels(batch))
    error, name = worst_error(take_grads(subject.model), truth)
    figure = f"one call or {len(batch)}: relative error {error:.1e} ({name})"
    return _within("accumulation", figure, error, subject)


def _within(name: str, figure: str, error: float, subject: Subject) -> Finding:
    return Finding(name, f"{figure}; bound {subject.bound:.0e}", error <= subject.bound)


def _gap(one: float, other: float) -> float:
    """Return the absolute difference of two losses; inf for NaN."""
    gap = abs(one - other)
    return math.inf if math.isnan(gap) else gap


def _without_labels(batch: TokenSequences, changed: int) -> TokenSequences:
    batch = [dict(sequence) for sequence in batch]
    batch[changed]["labels"] = torch.full_like(batch[changed]["labels"], IGNORE_INDEX)
    return batch


def _with_another_token(batch: TokenSequences, changed: int) -> TokenSequences:
    """Return the batch with an early and a late token of sequence `changed` replaced: a sliding
    window may hide the early one from all labels and from the next sequence."""
    batch = [dict(sequence) for sequence in batch]
    input_ids = batch[changed]["input_ids"].clone()
    for place in (2, -3):
        # the next id that is no special token
        input_ids[place] = 3 + (input_ids[place] - 2) % (VOCAB_SIZE - 3)
    batch[changed]["input_ids"] = input_ids
    return batch


def verify(config: RunConfig | None = None) -> list[Finding]:
    """Run all proofs on a shrunk copy of a run's model, by default a small Qwen2; print each one.

    Raises UserError for a model that cannot be trained.
    """
    from transformers import AutoConfig

    run = config or RunConfig(
        model=ModelConfig(name="Qwen2"),
        data=DataConfig(train=(Source(path="none"),), max_seq_len=LONGEST_TOKENS),
    )
    if config is None:
        whole = AutoConfig.for_model(**known_models()["Qwen2.5-0.5B"]["config"])
    else:
        whole = read_model_config(run)
        # refusals should name this model, not its shrunk copy
        model_of_config(whole, run.model.name, dtype=torch.float32)
    shrunk = shrink_config(whole, max_seq_len=run.data.max_seq_len)
    text = shrunk.get_text_config()
    if getattr(text, ROUTER_LOGITS, False):  # calls of other batches have another router loss
        setattr(text, ROUTER_LOGITS, False)
        print("the router loss is left out: proved is the cross-entropy")
    lora = None if run.model.lora is None else run.model.lora.model_dump() | {"adapter": None}
    options = _options(run, whole, shrunk)
    # no budgets: they were meant for the whole model
    storage = Storage(disk_dir=run.memory.disk_dir)
    subject = build_subject(shrunk, options, lora, storage=storage)
    print(_describe(subject, run.model.name))
    if run.model.quantize is not None:
        print("these weights are in floats: those in 4 bits are checked at the start of each run")
    findings = []
    for check in (check_gradients, check_isolation, check_accumulation):
        started_s = time.perf_counter()
        finding = check(subject)
        verdict, took = "ok  " if finding.passed else "FAIL", time.perf_counter() - started_s
        told = f"{finding.name:<12}  {finding.figure}  ({format_seconds(took)})"
        print(f"{verdict}  {told}", flush=True)
        findings.append(finding)
    return findings


def _options(run: RunConfig, whole: Any, shrunk: Any) -> ChunkOptions:
    """Return the options for the proofs: those of the run, without sampling, and with small chunks.
    `chunks.stage_layers` is at most half of the shrunk model's layers if the run cuts its model
    into stages.

    `whole`, `shrunk`: the config of the run's model, and its shrunk copy.
    """
    given = given_options(run) | {"size": CHUNK_SIZE, "sample": None, "reshard": False}
    num_layers = whole.get_text_config().num_hidden_layers
    if given.get("stage_layers", num_layers) < num_layers:
        most = max(1, shrunk.get_text_config().num_hidden_layers // 2)
        given["stage_layers"] = min(given["stage_layers"], most)
    return fixed_options(run.data.max_seq_len, given)


def _describe(subject: Subject, name: str) -> str:
    model = subject.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config()
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or ["full_attention"])
    adapters = ", adapters" if base is not model else ""
    return (
        f"{name} in small: {type(base).__name__}, {config.num_hidden_layers} layers"
        f" ({', '.join(kinds)}), hidden {config.hidden_size}{adapters};"
        f" chunks: {options_in_words(subject.options)}; float64 on the CPU"
    )
