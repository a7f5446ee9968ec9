"""Steps of an engine on any layout of processes, against one process that cuts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import peft
import torch
from helpers.batches import batch
from helpers.ranks import run_ranks
from helpers.tiny_families import build
from helpers.wide_norms import widen_norms
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import furlong
from furlong.models.placeholders import hold, placeholders
from furlong.plan.plan import ChunkPlan, Forward
from furlong.plan.rows import rows_of
from furlong.runtime.distributed.mesh import Ranks, make_ranks
from furlong.testing import (
    TokenSequences,
    num_labels,
    reference_loss,
    relative_error,
    take_grads,
    total_norm,
)

Grads = dict[str, Tensor]
BOUND = 1e-10


@dataclass(frozen=True)
class Case:
    """A plan of some layout, and the model and the batch that it is for."""

    plan: ChunkPlan
    family: str = "llama"
    settings: Mapping[str, Any] = field(default_factory=dict)
    masked: tuple[range, ...] = ()
    lora: bool = False
    frozen_layers: int = 0
    """First layers of which, and of the embeddings, nothing is trained."""
    holds_all: bool = False
    """Whether each process of a pipeline has the whole model."""
    num_steps: int = 1
    """Steps whose gradients are added up."""

    @property
    def seq_lens(self) -> Sequence[int]:
        return self.plan.seq_lens

    def model(self, layers: range | None = None) -> nn.Module:
        """The whole model, or what a process holds of it."""
        base: Any = widen_norms(build(self.family, **self.settings))
        if layers is not None and not self.holds_all:
            hold(base, placeholders(base, layers))
        if self.frozen_layers:
            base.get_input_embeddings().requires_grad_(False)
            base.model.layers[: self.frozen_layers].requires_grad_(False)
        return _adapted(base) if self.lora else base

    def sequences(self) -> TokenSequences:
        return batch(self.seq_lens, masked=self.masked)

    def layers_of(self, stage: int) -> range | None:
        if len(self.plan.actions) == 1 or len(self.plan.stages) == 1:
            return None
        stop = list(accumulate(self.plan.stages))[stage]
        return range(stop - self.plan.stages[stage], stop)


@dataclass(frozen=True)
class Found:
    """What one process finds of a case."""

    loss: float
    grads: Grads
    token_losses: tuple[Tensor, ...]


def check(
    cases: dict[str, Case],
    sizes: tuple[int, int, int],
    *,
    own_alone: bool = False,
    bound: float = BOUND,
) -> None:
    """The cases on processes of dp, sp, pp are exact."""
    num_ranks = sizes[0] * sizes[1] * sizes[2]
    answers = run_ranks(
        run_cases, list(cases.values()), sizes, own_alone, num_ranks=num_ranks, limit_s=240
    )
    for index, (name, case) in enumerate(cases.items()):
        error = worst_error(case, [own[index] for own in answers])
        assert error <= bound, name


def run_cases(
    rank: int, cases: Sequence[Case], sizes: tuple[int, int, int], own_alone: bool = False
) -> list[Found]:
    """Each case on an engine of dp, sp, pp; `own_alone`: given what this process reads alone."""
    replicate = sizes[0] if cases[0].plan.regathers else 1
    ranks = make_ranks(*sizes, "cpu", replicate)
    engines: dict[str, furlong.Engine] = {}
    found = []
    for case in cases:
        layers = case.layers_of(ranks.stage)
        key = f"{layers} {replace(case, plan=None, masked=(), num_steps=1)}"
        if key not in engines:  # cases of one model share its checks
            engines[key] = furlong.Engine(case.model(layers), ranks=ranks)
        found.append(run_case(case, engines[key], ranks, own_alone))
    return found


def run_case(case: Case, engine: furlong.Engine, ranks: Ranks, own_alone: bool) -> Found:
    sequences = case.sequences()
    given: Any = read_by(case, engine, ranks, sequences) if own_alone else sequences
    for _ in range(case.num_steps):
        result = engine.run(case.plan, given, num_labels(sequences))
        assert result.num_valid_tokens == num_labels(sequences)
    return Found(result.loss, whole_grads(engine.model.model), result.token_losses)


def read_by(
    case: Case, engine: furlong.Engine, ranks: Ranks, sequences: TokenSequences
) -> dict[int, dict[str, Tensor]]:
    """The sequences of which a process reads a token; of a middle stage none."""
    q_heads, kv_heads = engine.model.heads
    if ranks.stage not in (0, ranks.pp - 1):
        return {}
    plan, found = case.plan, {}
    for action in plan.actions[ranks.plan_rank]:
        if isinstance(action, Forward):
            rows = rows_of(
                plan.chunks[action.chunk], ranks.process,
                sp_size=ranks.sp, q_heads=q_heads, kv_heads=kv_heads,
            )  # fmt: skip
            found |= {seq_id: sequences[seq_id] for seq_id, *_ in rows.tokens}
    return found


def whole_grads(model: nn.Module) -> Grads:
    """The gradients of this process's stage, which are then cleared."""
    found = read_grads(model)
    model.zero_grad(set_to_none=True)
    return found


def read_grads(model: nn.Module) -> Grads:
    """The gradients of this process's stage, each put together from all that share it."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            found[name] = whole.double().clone()
    return found


def worst_error(case: Case, found: Sequence[Found]) -> float:
    """The largest relative error of loss, gradients and token losses on any process."""
    model = case.model()
    trains = bool(case.plan.trained)
    loss = reference_loss(model, case.sequences(), backward=trains)
    truth = {name: case.num_steps * grad for name, grad in take_grads(model).items()}
    floor = 1e-9 * total_norm(truth) if truth else 1.0
    errors, seen = [relative_error(one.loss, loss) for one in found], set()
    for one in found:
        for name, grad in one.grads.items():
            if case.holds_all and not grad.any():
                continue  # another stage's: replicas make zeros of no gradient
            seen.add(name)
            errors.append(relative_error(grad, truth[name], floor))
        assert bool(one.token_losses) != trains
        if not trains:
            errors.append(_token_error(model, case.sequences(), one.token_losses))
    assert seen == truth.keys(), seen ^ truth.keys()
    return max(errors)


def _token_error(model: nn.Module, sequences: TokenSequences, given: Sequence[Tensor]) -> float:
    error = 0.0
    for sequence, losses in zip(sequences, given, strict=True):
        with torch.no_grad():
            logits = model(input_ids=sequence["input_ids"][None], use_cache=False).logits[0]
        each = cross_entropy(logits[:-1], sequence["labels"][1:], reduction="none")
        error = max(error, float((losses[:-1] - each).abs().max()))
    return error


def _adapted(base: Any) -> nn.Module:
    """The model with adapters that are not zero, the same on all layouts."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(base, config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.1 * noise)
    return model
