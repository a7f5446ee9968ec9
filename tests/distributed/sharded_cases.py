"""Steps of several replicas against one process: models, plans, and what each rank finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from distributed.layout_cases import whole_grads
from helpers.batches import batch
from helpers.tiny_families import build
from helpers.wide_norms import widen_norms
from torch import nn
from torch.distributed.tensor import DTensor

import furlong
from furlong.errors import FurlongError
from furlong.plan.plan import ChunkPlan
from furlong.planners.orders import join_kept, plan_on_device
from furlong.runtime.distributed.mesh import make_ranks
from furlong.testing import TokenSequences, reference_loss, take_grads, worst_relative_error

NUM_LAYERS = 3


def llama(**changes: Any) -> nn.Module:
    return widen_norms(build("llama", **changes))


def tied_llama() -> nn.Module:
    return llama(tie_word_embeddings=True)


def adapted_llama() -> nn.Module:
    """A model with adapters that are not zero, beside frozen weights."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "down_proj"]
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=targets, lora_dropout=0.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model.double()


def llama_with_trained_upper_layers() -> nn.Module:
    """What has no group of its own is trained, and nothing below: the final norm."""
    model = tied_llama()
    model.get_input_embeddings().weight.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


def llama_with_a_trained_head() -> nn.Module:
    model = llama()
    model.requires_grad_(False)
    model.get_output_embeddings().weight.requires_grad_(True)
    return model


@dataclass(frozen=True)
class Step:
    """One step: lengths of the sequences of each replica, and how these are walked."""

    lens: tuple[tuple[int, ...], ...]
    options: dict[str, Any] = field(default_factory=dict)
    masked: tuple[range, ...] = ()
    """Tokens without a label, by sequence."""
    backward: bool = True

    @property
    def seq_lens(self) -> list[int]:
        return [n for own in self.lens for n in own]

    def ids(self, replica: int) -> range:
        start = sum(map(len, self.lens[:replica]))
        return range(start, start + len(self.lens[replica]))

    def sequences(self) -> TokenSequences:
        return batch(self.seq_lens, masked=self.masked)

    def plan(self, model: nn.Module) -> ChunkPlan:
        options = furlong.ChunkOptions(**{"size": 8} | self.options)
        plans = [
            plan_on_device(own, options, num_layers=NUM_LAYERS, backward=self.backward)
            for own in self.lens
        ]
        ids = [self.ids(replica) for replica in range(len(plans))]
        return join_kept(plans, ids, self.seq_lens, len(plans))


def message(call: Callable[[], object]) -> str:
    """What a call is refused with."""
    try:
        call()
    except (FurlongError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


class Counted:
    """Counts FSDP2's collectives within it."""

    def __init__(self) -> None:
        self.num_gathers = self.num_ahead = self.num_sums = 0

    def __enter__(self) -> Counted:
        names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single",
                 "reduce_scatter_single")  # fmt: skip
        self._own = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
        for name in self._own:
            setattr(dist, name, self._counting(name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, own in self._own.items():
            setattr(dist, name, own)

    def _counting(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.num_gathers += "gather" in name
            self.num_ahead += "gather" in name and kwargs["async_op"]
            self.num_sums += "scatter" in name
            return self._own[name](*args, **kwargs)

        return call


@dataclass(frozen=True)
class Found:
    """One step on one rank."""

    loss_error: float
    error: float
    """The largest relative error of any parameter's gradient."""
    num_gathers: int
    num_sums: int
    num_ahead: int
    """Gathers that run beside what follows them."""


def run_steps(
    rank: int, steps: Sequence[Step], make: Callable[[], nn.Module], offload_weights: bool = False
) -> list[Found]:
    """The steps one after the other on one model, without an update."""
    model = make()
    truths = []
    for step in steps:
        loss = reference_loss(model, step.sequences(), backward=step.backward)
        truths.append((loss, take_grads(model)))
    ranks = make_ranks(len(steps[0].lens), 1, 1, "cpu")
    engine = furlong.Engine(model, ranks=ranks, offload_weights=offload_weights)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    for height in {
        step.options.get("stage_layers", 1) for step in steps if "order" in step.options
    }:
        engine.run(*_evaluated(model, height))  # checks the model in these stages
    found = []
    for step, (loss, truth) in zip(steps, truths, strict=True):
        with Counted() as counted:
            result = engine.run(step.plan(model), step.sequences())
        assert result.num_valid_tokens == sum(
            (s["labels"][1:] != -100).sum() for s in step.sequences()
        )
        error = worst_relative_error(whole_grads(model), truth) if truth else 0.0
        loss_error = abs(result.loss / loss - 1)
        numbers = counted.num_gathers, counted.num_sums, counted.num_ahead
        found.append(Found(loss_error, error, *numbers))
    return found


def _evaluated(model: nn.Module, height: int) -> tuple[ChunkPlan, TokenSequences]:
    options = {"order": "layer-first", "stage_layers": height}
    step = Step(((3,),) * dist.get_world_size(), options, backward=False)
    return step.plan(model), step.sequences()
