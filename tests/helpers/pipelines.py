"""Steps of pipelines over gloo, each rank with a model that holds its own stage alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from zlib import crc32

import peft
import torch
import torch.distributed as dist
from torch import Tensor, nn

from furlong.kv.arena import Arena
from furlong.models.causal_lm import CausalLM
from furlong.models.folders.random_weights import draw_adapters
from furlong.models.held import hold, stand_ins
from furlong.ops.choose import ProbedBackend
from furlong.plan.plan import Action, ChunkPlan, Recv, Send
from furlong.runtime.executor import Executor
from furlong.runtime.inputs import shift_labels
from furlong.runtime.memory.pools import Pools, Storage
from furlong.runtime.parallel.links import Links, Parcel, open_links
from furlong.runtime.parallel.tied import open_tied
from helpers.gradients import batch, num_labels, reference_loss, take_grads
from helpers.tiny_families import build
from helpers.wide_norms import widen_norms

CPU = torch.device("cpu")
Grads = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A plan, and the model and the batch that it is for."""

    plan: ChunkPlan
    family: str = "llama"
    settings: dict[str, Any] = field(default_factory=dict)
    masked: tuple[range, ...] = ()
    lora: bool = False
    frozen_layers: int = 0
    """First layers of which, and of the embeddings, nothing is trained."""

    def model(self, layers: range | None = None) -> nn.Module:
        """The whole model, or what of it a process holds."""
        base = widen_norms(build(self.family, **self.settings))
        if layers is not None:
            hold(base, stand_ins(base, layers))
        if self.frozen_layers:
            base.get_input_embeddings().requires_grad_(False)
            base.model.layers[: self.frozen_layers].requires_grad_(False)
        return _with_adapters(base) if self.lora else base

    def batch(self) -> list[dict[str, Tensor]]:
        return batch(self.plan.seq_lens, masked=self.masked)

    def truth(self) -> tuple[float, Grads]:
        """Loss and gradients of one process, unchunked."""
        model = self.model()
        return reference_loss(model, self.batch()), take_grads(model)


@dataclass
class GlooComms:
    """Implements `Comms` for one process: links, and a plain all-reduce over its replicas."""

    links: Links
    rank: int
    parcel: Parcel
    model: nn.Module
    replicas: dist.ProcessGroup | None = None

    def accept(self, plan: ChunkPlan) -> None:
        self.links.begin(plan, self.rank, self.parcel)

    def before(self, index: int) -> None:
        self.links.before(index)

    def send(self, action: Send, x: Tensor) -> None:
        self.links.send(action, x)

    def recv(self, action: Recv) -> Tensor:
        return self.links.recv(action)

    def unshard(self, stage: int) -> None: ...
    def reshard(self, stage: int) -> None: ...
    def backward(self, stage: int, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def is_settled(self) -> bool:
        return True

    def settle(self) -> None: ...
    def give_up(self, error: BaseException, rest: Sequence[Action]) -> None: ...

    def add_up(self, values: Tensor) -> Tensor:
        return values  # what this process has computed is asked for

    def reduce(self, stage: int) -> None:
        if self.replicas is not None:
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    dist.all_reduce(parameter.grad, group=self.replicas)


@dataclass(frozen=True)
class Outcome:
    loss: float
    """This rank's share."""
    grads: Grads
    most_held: int


def stage_layers(plan: ChunkPlan, stage: int) -> range:
    stops = list(accumulate(plan.stages))
    return range(stops[stage] - plan.stages[stage], stops[stage])


def run_step(case: Case, model: nn.Module, comms: GlooComms) -> float:
    """Obey the plan's list; the loss that this rank has computed."""
    sequences = case.batch()
    whole = CausalLM(model)
    pools = Pools(Arena(CPU, poison=True), Storage(poison=True))
    with whole.installed():
        executor = Executor(
            whole, case.plan, shift_labels(sequences), num_valid_tokens=num_labels(sequences),
            backend=ProbedBackend(), pools=pools, comms=comms, rank=comms.rank,
        )  # fmt: skip
        loss_sum, timeline = executor.run()
    comms.links.finish()
    assert len(timeline.records) == len(case.plan.actions[comms.rank])
    assert pools.arena.taken_bytes == 0
    return loss_sum / num_labels(sequences)


def parcel_of(model: nn.Module) -> Parcel:
    return Parcel(model.config.hidden_size, torch.float64, CPU)  # type: ignore[union-attr,arg-type]


def run_cases(process: int, cases: Sequence[Case]) -> list[Outcome]:
    """Each case on this process of world; replica d of P stages has the processes d * P and on."""
    num_stages = len(cases[0].plan.stages)
    world = dist.get_world_size()
    rows = [range(first, first + num_stages) for first in range(0, world, num_stages)]
    links = open_links(rows, CPU)
    groups = [dist.new_group(list(range(s, world, num_stages))) for s in range(num_stages)]
    stage = process % num_stages
    replicas = groups[stage] if len(rows) > 1 else None
    tied = open_tied(rows, tied=True)
    outcomes = []
    for case in cases:
        model = case.model(stage_layers(case.plan, stage))
        comms = GlooComms(links, process, parcel_of(model), model, replicas)
        links.most_held = 0
        loss = run_step(case, model, comms)
        tied.add_up(CausalLM(model))
        outcomes.append(Outcome(loss, take_grads(model), links.most_held))
    return outcomes


def worst_error(case: Case, outcomes: Sequence[Outcome]) -> float:
    """The largest relative error of loss and gradients of a case, given by its ranks."""
    loss, truth = case.truth()
    floor = 1e-9 * float(torch.stack([g.norm() for g in truth.values()]).norm())
    seen: set[str] = set()
    error = abs(sum(o.loss for o in outcomes) - loss) / loss
    for outcome in outcomes:
        seen |= outcome.grads.keys()
        for name, grad in outcome.grads.items():
            off = float((grad - truth[name]).norm()) / max(float(truth[name].norm()), floor)
            error = max(error, off)
    assert seen == truth.keys(), seen ^ truth.keys()
    return error


def _with_adapters(base: Any) -> nn.Module:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(base, config).double()
    draw_adapters(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                generator = torch.Generator().manual_seed(crc32(name.encode()))
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.1 * noise)
    return model
