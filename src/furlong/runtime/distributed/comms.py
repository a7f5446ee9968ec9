"""Communication of one rank with others, passed to the executor.

A single process refuses a plan for several ranks: nothing would sum the gradients of the ranks, and
partial gradients would look complete.

Tied embeddings in a pipeline: the first and the last stage each hold a copy of the weight, under
the name of the input embeddings and with equal values. The first stage computes the embedding's
gradient, the last stage the head's. They are summed, so both optimizers make the same update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from furlong.errors import PlanError
from furlong.models.decoder import HFDecoder
from furlong.models.placeholders import is_tied
from furlong.plan.plan import (
    COMPUTING,
    Backward,
    ChunkPlan,
    Recv,
    Send,
    Unshard,
)
from furlong.plan.text import format_action
from furlong.planners.orders import even_heights
from furlong.runtime.distributed.consensus import all_gather_ints
from furlong.runtime.distributed.fsdp import (
    adding_up,
    adds_unused,
    end_gather,
    reshard_modules,
)
from furlong.runtime.distributed.mesh import Ranks
from furlong.runtime.distributed.p2p import Links, Neighbour, Parcel, open_links
from furlong.runtime.precision import gradients_apart


@dataclass(frozen=True)
class Pipeline:
    """Links of one process to neighbouring stages, and its process group for tied embeddings."""

    links: Links
    heights: tuple[int, ...]
    """Layers of each stage."""
    tied_group: dist.ProcessGroup | None = None
    """This pipeline's first and last stage; None for a process without the tied weight."""
    is_second: bool = False
    """Whether this process holds the last stage's copy."""

    @contextmanager
    def adding_up(self, model: HFDecoder) -> Iterator[None]:
        """Context manager for a step: on exit, add the gradients that the first and the last stage
        have computed for the tied weight, by an all-reduce. The sum is added to the `.grad` from
        before the step, which was reduced earlier. After an error the step's gradient of this
        weight is dropped."""
        group, weight = self.tied_group, model.tied_weight
        if group is None or weight is None or not weight.requires_grad:
            yield
            return
        found: dict[int, Tensor] = {}
        with gradients_apart([weight], found):
            yield
        # without a gradient here, too: the other process waits in the all-reduce
        own = found[id(weight)] if found else torch.zeros_like(weight)
        dist.all_reduce(own.to_local() if isinstance(own, DTensor) else own, group=group)
        weight.grad = own if weight.grad is None else weight.grad.add_(own)


def open_pipeline(ranks: Ranks, model: HFDecoder) -> Pipeline:
    """Open this process's links. Collective over the world: every process creates all groups."""
    by_stage = ranks.mesh.mesh.reshape(ranks.pp, -1).T.tolist()
    pipeline = Pipeline(open_links(by_stage, model.device), _stage_heights(ranks, model))
    for first, *_, last in by_stage if is_tied(model.base) else ():
        text = f"tied embeddings of processes {first}, {last}"
        # on all processes: `new_group` is collective over the world
        group = dist.new_group([first, last], group_desc=text)
        if dist.get_rank() in (first, last):
            pipeline.links.groups.insert(0, group)
            pipeline = replace(pipeline, tied_group=group, is_second=dist.get_rank() == last)
    return pipeline


def _stage_heights(ranks: Ranks, model: HFDecoder) -> tuple[int, ...]:
    """Return the number of layers of each stage: the layers that its processes hold, or an even
    split if each holds the whole model. Collective over the world."""
    held = all_gather_ints(ranks, [model.local_layers.start, len(model.local_layers)])
    # one process per stage: stages are the outermost axis of the numbering
    firsts, counts = zip(*held[:: ranks.dp * ranks.sp], strict=True)
    if firsts == tuple(accumulate((0, *counts[:-1]))) and sum(counts) == model.num_layers:
        return counts
    return even_heights(model.num_layers, ranks.pp)


class Comms:
    """Messages and collectives of this process in one plan; a single process has none."""

    def __init__(
        self,
        ranks: Ranks | None = None,
        model: HFDecoder | None = None,
        messages: tuple[Links, Parcel] | None = None,
        copies: torch.cuda.Stream | None = None,
    ) -> None:
        """
        Args:
            ranks: None for a single process.
            model: The model, already sharded by `fsdp.shard`.
            messages: Links to other stages, and the shape and dtype of this plan's messages.
            copies: Stream that copies offloaded weights to the GPU, the same one for all plans;
                None if weights are gathered from other processes.
        """
        self._ranks, self._messages, self._copies = ranks, messages, copies
        self._freed: torch.Event | None = None
        """Recorded at the last reshard, after all work that uses the freed weights."""
        self._ready: dict[int, torch.Event] = {}
        """Stage -> event after the copy of its weights, until its first pass waits for it."""
        base = None if model is None else model.base
        self._base: FSDPModule | None = base if isinstance(base, FSDPModule) else None
        """The root FSDP2 module; None if weights are not sharded."""
        self._model = model
        self._stages: tuple[tuple[FSDPModule, ...], ...] = ()
        """FSDP2 modules of each stage, with embedding or head."""
        self._passing: tuple[tuple[FSDPModule, ...], ...] = ()
        """Those that FSDP2 gathers and frees in each pass (`plan.regathers`)."""
        self._is_kept = False
        """Whether the plan has no Unshard: weights are gathered before the first action."""

    def _now(self) -> torch.Event:
        return torch.cuda.current_stream().record_event()

    def accept(self, plan: ChunkPlan) -> None:
        """Prepare for a plan. Raises PlanError if it was made for other ranks."""
        require_layout(plan, self._ranks)
        self._plan, self._rank = plan, 0 if self._ranks is None else self._ranks.plan_rank
        own = plan.actions[self._rank]
        self._last_backwards = {a.stage: a for a in own if isinstance(a, Backward)}
        if self._base is None or self._model is None:
            self._stages = self._passing = ((),) * len(plan.stages)
            return
        self._is_kept = not any(isinstance(action, Unshard) for action in own)
        layers, (embedding, head) = self._model.layers, self._model.ends
        stages: list[list[object]] = [
            [*layers[stop - n : stop]]
            for n, stop in zip(plan.stages, accumulate(plan.stages), strict=True)
        ]
        # layers only: embedding and head stay gathered between passes
        self._passing = tuple(_divided(own if plan.regathers else ()) for own in stages)
        stages[0].insert(0, embedding)
        stages[-1].append(head)
        self._stages = tuple(map(_divided, stages))

    def before(self, index: int) -> None:
        """Prepare action number `index` of this rank's list: post receives of messages that must be
        posted by now, and wait for weights that the action uses. Before the first action of a plan
        without Unshard, also gather all weights.

        Call this only for a plan that has passed all checks: a posted receive cannot be
        withdrawn."""
        if self._messages is not None:
            links, parcel = self._messages
            if not index:
                links.begin(self._plan, self._rank, parcel)
            links.before(index)
        if not index:
            self._gather_kept()
        if self._ready:
            action = self._plan.actions[self._rank][index]
            # earlier passes overlap with the copy
            if isinstance(action, COMPUTING) and action.stage in self._ready:
                torch.cuda.current_stream().wait_event(self._ready.pop(action.stage))

    def send(self, action: Send, x: Tensor) -> None:
        """Send hidden states or their gradient (T, D) to a neighbouring stage."""
        self._neighbour(action).send(action, x)

    def recv(self, action: Recv) -> Tensor:
        """Receive hidden states or their gradient (T, D) from a neighbouring stage."""
        return self._neighbour(action).recv(action)

    def unshard(self, stage: int) -> None:
        """Start to gather the stage's weights. FSDP2 waits for each module's weights before its
        first pass.

        Before the first stage of this process, the root module's parameters are gathered
        synchronously, because all first passes need them. The buffers of this gather are then free
        before layers are gathered.
        """
        if self._base is None:
            return
        if stage == self._plan.held[self._rank][0]:
            self._base.unshard()
        if self._copies is not None:
            # FSDP2 would copy on the current stream, in front of the next pass
            self._copies.wait_event(self._freed or self._now())  # copies may reuse freed memory
            with torch.cuda.stream(self._copies):
                for module in self._stages[stage]:
                    module.unshard()
                self._ready[stage] = self._now()
            return
        for module in self._stages[stage]:
            if module not in self._passing[stage]:
                module.unshard(async_op=True)

    def cut_short(self, stage: int) -> None:
        """Free the stage's layers if each pass gathers them anew (`plan.regathers`). Call this
        after KVReady has ended a pass early: FSDP2 frees the last of these layers in a hook that
        did not run."""
        if passing := self._passing[stage]:
            reshard_modules(passing)

    def reshard(self, stage: int) -> None:
        """Free the stage's gathered weights."""
        reshard_modules(self._stages[stage])
        if self._copies is not None:
            # the next copy may take this memory, but only after the work that is queued now
            self._freed = self._now()

    def _gather_kept(self) -> None:
        """Gather all weights, once, for a plan without Unshard."""
        if self._is_kept:
            self._is_kept = False
            for stage in self._plan.held[self._rank]:
                self.unshard(stage)

    def is_last(self, action: Backward) -> bool:
        """Whether `action` is the last Backward of its stage on this rank."""
        return self._last_backwards[action.stage] is action

    @contextmanager
    def backward(self, action: Backward) -> Iterator[None]:
        """Context manager around the backward pass of an action, entered after the backward of the
        loss. The pass reduce-scatters gradients of its stage or not, as in this table. Layers are
        gathered once per step or, if `plan.regathers`, in each pass.

                                       gathered once    gathered in each pass
            last Backward of a stage   reduced          reduced
            other Backwards            not reduced      reduced, from torch 2.13 on

        The last Backward of this rank also reduces the root module's parameters.

        All ranks reach the last Backwards in the same order: a stage's last Backward comes after
        that of the next stage.
        """
        if self._ranks is None:
            yield
            return
        modules = [*self._stages[action.stage]]
        for module in modules:  # FSDP2 expects gathered weights, also of a head that no pass used
            end_gather(module)
        stage = action.stage
        if not self.is_last(action):
            own = self._passing[stage] if adds_unused() else ()
            with adding_up(own, is_complete=False) if own else nullcontext():
                yield
            return
        # a stage's last Backward comes after those of later stages
        is_last_of_all = stage == min(self._last_backwards)
        if is_last_of_all and self._base is not None:
            modules.append(self._base)
        with adding_up(modules, is_last=is_last_of_all):
            yield

    def reduce(self, stage: int) -> None:
        """Do nothing: `backward` has reduced the stage's gradients."""

    def finish(self) -> None:
        """Wait until every message of the plan has been sent."""
        if self._messages is not None:
            self._messages[0].finish()

    def add_up(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes; `values` may be changed in place."""
        if self._ranks is not None:
            if values.device.type == "cpu":
                # NCCL reduces no CPU tensors
                values = values.to(self._ranks.facts_device(self._ranks.group))
            dist.all_reduce(values, group=self._ranks.group)
        return values

    def _neighbour(self, action: Send | Recv) -> Neighbour:
        if self._messages is None:
            text = format_action(action)
            raise PlanError(f"this run has one stage: nobody answers {text!r}")
        return self._messages[0].of(action)


def require_layout(plan: ChunkPlan, ranks: Ranks | None) -> None:
    """Raise PlanError unless the plan was made for `ranks` (None: one process)."""
    if ranks is None:
        if len(plan.actions) * plan.sp_size > 1:
            raise PlanError(
                f"this run has one rank: the plan has {len(plan.actions)} with {plan.sp_size} "
                "processes each, whose gradients nothing would add up"
            )
        return
    num_lists, sp_size = ranks.dp * ranks.pp, ranks.sp
    if (len(plan.actions), plan.sp_size) != (num_lists, sp_size):
        raise PlanError(
            f"the plan has {len(plan.actions)} lists of actions for {plan.sp_size} processes each, "
            f"this run has dp {ranks.dp} x pp {ranks.pp} = {num_lists}, each for sp {sp_size}"
        )
    if ranks.pp > 1 and len(plan.stages) < ranks.pp:
        raise PlanError(f"the plan has {len(plan.stages)} stages, this run has pp {ranks.pp}")
    if plan.regathers and not plan.replicated:
        raise PlanError("the plan gathers weights with every pass over replicas, which no run does")
    if plan.regathers and ranks.replicate != ranks.dp:
        raise PlanError(
            "the plan gathers weights in each pool with every pass: its ranks are those of "
            f"make_ranks(replicate=dp), here dp is {ranks.dp}, replicate {ranks.replicate}"
        )
    if plan.reshards and ranks.pp > 1:
        raise PlanError("a pipeline's plan gathers with every pass, and has no Reshard")


def _divided(modules: Iterable[object]) -> tuple[FSDPModule, ...]:
    """Return the modules that FSDP2 has wrapped."""
    return tuple(module for module in modules if isinstance(module, FSDPModule))
