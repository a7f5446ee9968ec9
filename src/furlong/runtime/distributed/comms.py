"""Communication of a rank with others, as an argument of the executor.

No plan that needs another rank can run on a single one: a Reduce that nothing carries out would
leave half a gradient that looks like a whole one.

Tied embeddings in a pipeline: the first and the last stage each hold the weight under the name of
the input embeddings, with equal values. The first one's gradient is that of the embedding, the last
one's that of the head; after their sum both optimizers make the same update.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from furlong.errors import ConfigError, PlanError, reason_of
from furlong.models.decoder import HFDecoder
from furlong.ops.backends.select import is_out_of_memory
from furlong.plan.plan import (
    COMPUTING,
    Action,
    Backward,
    ChunkPlan,
    Computing,
    Recv,
    Reshard,
    Send,
    Unshard,
)
from furlong.plan.text import format_action
from furlong.planners.orders import even_heights
from furlong.runtime.distributed.consensus import (
    FINE,
    failure_of,
    gathered,
    outcome_of,
)
from furlong.runtime.distributed.failures import is_lost
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
    """The links of one process, and its copy of a weight that two stages hold, if it has one."""

    links: Links
    heights: tuple[int, ...]
    """Layers of each stage."""
    tied_group: dist.ProcessGroup | None = None
    """The first and the last stage of this pipeline; None for a process without a copy."""
    is_second: bool = False
    """Whether the copy is the last stage's."""

    @contextmanager
    def adding_up(self, model: HFDecoder) -> Iterator[None]:
        """Within it runs a step, of which the gradients of both copies are then added up; what
        there was before it is a sum of both already. An error forgets those of the step."""
        group, weight = self.tied_group, model.tied_weight
        if group is None or weight is None or not weight.requires_grad:
            yield
            return
        found: dict[int, Tensor] = {}
        with gradients_apart([weight], found):
            yield
        own = found[id(weight)] if found else torch.zeros_like(weight)
        dist.all_reduce(own.to_local() if isinstance(own, DTensor) else own, group=group)
        weight.grad = own if weight.grad is None else weight.grad.add_(own)


def open_pipeline(ranks: Ranks, model: HFDecoder) -> Pipeline:
    """The pipeline of this process. Collective over the world: every process makes all groups."""
    by_stage = ranks.mesh.mesh.reshape(ranks.pp, -1).T.tolist()
    pipeline = Pipeline(open_links(by_stage, model.device), _stage_heights(ranks, model))
    for first, *_, last in by_stage if model.config.tie_word_embeddings else ():
        text = f"tied embeddings of processes {first}, {last}"
        group = dist.new_group([first, last], group_desc=text)
        if dist.get_rank() in (first, last):
            pipeline.links.groups.insert(0, group)
            pipeline = replace(pipeline, tied_group=group, is_second=dist.get_rank() == last)
    return pipeline


def _stage_heights(ranks: Ranks, model: HFDecoder) -> tuple[int, ...]:
    """Layers of each stage: those that its processes hold, or about equally many where all hold all
    of them. Collective over the world."""
    held = gathered(ranks, [model.local_layers.start, len(model.local_layers)])
    firsts, counts = zip(*held[:: ranks.dp * ranks.sp], strict=True)
    if firsts == tuple(accumulate((0, *counts[:-1]))) and sum(counts) == model.num_layers:
        return counts
    return even_heights(model.num_layers, ranks.pp)


class Comms:
    """Messages and collectives of this process in one plan; without `ranks` it is alone, and holds
    every sum whole."""

    def __init__(
        self,
        ranks: Ranks | None = None,
        model: HFDecoder | None = None,
        messages: tuple[Links, Parcel] | None = None,
        copies: torch.cuda.Stream | None = None,
    ) -> None:
        """`model`: as `fsdp.shard` has left it. `messages`: the links to other stages, and the form
        of what passes them in this plan. `copies`: the stream on which weights come from the CPU,
        always the same one; None where they are gathered."""
        self._ranks, self._messages, self._copies = ranks, messages, copies
        self._freed: torch.Event | None = None
        """When all was computed that used weights that are freed."""
        self._ready: dict[int, torch.Event] = {}
        """When the weights of stages that no pass has used yet are on the device."""
        base = None if model is None else model.base
        self._base: FSDPModule | None = base if isinstance(base, FSDPModule) else None
        """The model; None where no other process holds the same weights."""
        self._model = model
        self._stages: tuple[tuple[FSDPModule, ...], ...] = ()
        """The layers of each stage, with embedding or head: gathered and added up together."""
        self._passing: tuple[tuple[FSDPModule, ...], ...] = ()
        """The layers of each stage that are gathered with each pass."""
        self._is_kept = False
        """Whether the plan leaves open when weights are gathered: before the first action."""
        self._outcome = FINE
        self._stage_knows = False
        """Whether all processes of this stage know that one of them has failed."""
        self.is_settled = ranks is None
        """Whether every message and every collective of the list is over, on all processes."""
        self._agreed: set[int] = set()
        """Stages of which all know that their gradients are about to be added up."""
        self._is_adding_up = False

    def _now(self) -> torch.Event:
        return torch.cuda.current_stream().record_event()

    def accept(self, plan: ChunkPlan) -> None:
        """Raise PlanError for a plan that is not of these ranks."""
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
        self._passing = tuple(_divided(own if plan.regathers else ()) for own in stages)
        stages[0].insert(0, embedding)
        stages[-1].append(head)
        self._stages = tuple(map(_divided, stages))

    def before(self, index: int) -> None:
        """Action number `index` is about to begin; the first one when the plan has passed all
        checks, for what is posted cannot be taken back."""
        if self._messages is not None:
            links, parcel = self._messages
            if not index:
                links.begin(self._plan, self._rank, parcel)
            links.before(index)
        if not index:
            self._gather_kept()
        if self._ready:
            action = self._plan.actions[self._rank][index]
            if isinstance(action, COMPUTING) and action.stage in self._ready:
                torch.cuda.current_stream().wait_event(self._ready.pop(action.stage))

    def send(self, action: Send, x: Tensor) -> None:
        """Send hidden states, or their gradient, (T, D) to a neighbour."""
        self._neighbour(action).send(action, x)

    def recv(self, action: Recv) -> Tensor:
        """Receive the same."""
        return self._neighbour(action).recv(action)

    def unshard(self, stage: int) -> None:
        """Start to gather the stage's weights, each group of which FSDP2 waits for before its first
        pass.

        In front of this process's first layers what is beside all of them is gathered, and waited
        for: every first pass needs it, and no copy of it is made beside layers that have come.
        """
        if self._base is None:
            return
        if stage == self._plan.held[self._rank][0]:
            self._base.unshard()
        if self._copies is not None:
            # FSDP2 by itself would copy in front of the first pass, which would wait
            self._copies.wait_event(self._freed or self._now())  # memory is taken again
            with torch.cuda.stream(self._copies):
                for module in self._stages[stage]:
                    module.unshard()
                self._ready[stage] = self._now()
            return
        for module in self._stages[stage]:
            if module not in self._passing[stage]:
                module.unshard(async_op=True)

    def cut_short(self, stage: int) -> None:
        """A pass of the stage has ended inside its last layer, which FSDP2 would not free."""
        if passing := self._passing[stage]:
            reshard_modules(passing)

    def reshard(self, stage: int) -> None:
        """Free the stage's gathered weights."""
        reshard_modules(self._stages[stage])
        if self._copies is not None:
            self._freed = self._now()

    def _gather_kept(self) -> None:
        """Gather all weights of a plan that leaves open when."""
        if self._is_kept:
            self._is_kept = False
            for stage in self._plan.held[self._rank]:
                self.unshard(stage)

    def is_last(self, action: Backward) -> bool:
        """Whether an action is the last Backward of its stage in this process's list."""
        return self._last_backwards[action.stage] is action

    @contextmanager
    def backward(self, action: Backward) -> Iterator[None]:
        """Within it runs a Backward, without the loss in front of it. A stage's gradients are added
        up in its last Backward or, of layers that are gathered with each pass, in each; in the last
        of all also those beside the stages. Before a last one all that add them up agree that none
        of them has failed.

        All ranks come to it in the same order: the last Backward of a stage comes after that of the
        stage behind it.
        """
        if self._ranks is None:
            yield
            return
        modules = [*self._stages[action.stage]]
        for module in modules:  # FSDP2 expects whole ones of a head that no label has used, too
            end_gather(module)
        stage = action.stage
        if not self.is_last(action):
            own = self._passing[stage] if adds_unused() else ()
            with adding_up(own, is_complete=False) if own else nullcontext():
                yield
            return
        is_last_of_all = stage == min(self._last_backwards)
        if is_last_of_all and self._base is not None:
            modules.append(self._base)
        self._agree_on(stage)
        self._is_adding_up = self._base is not None
        with adding_up(modules, is_last=is_last_of_all):
            yield
        self._is_adding_up = False

    def reduce(self, stage: int) -> None:
        """The stage's gradients are added up over its ranks: `backward` has done it."""

    def settle(self) -> None:
        """The list has been obeyed. Raises ElsewhereError where another process could not."""
        if self._ranks is None:
            return
        if self._messages is not None:
            self._messages[0].finish()
        failure = failure_of(self._ranks, self._outcome)
        self.is_settled = True
        if failure is not None and self._outcome is FINE:
            raise failure

    def give_up(self, error: BaseException, rest: Sequence[Action]) -> None:
        """An error has ended this process's step at the first action of `rest`: do of them what
        others wait for. Where that cannot be, leave the step unsettled, and raise ConfigError for a
        lack of memory. Raises ElsewhereError where the error is only that others have failed."""
        self._outcome = outcome_of(error)
        alone = self._ranks is None
        if alone or not isinstance(error, Exception) or is_lost(error):
            return
        if (meanwhile := self._is_waited_for(rest)) is not None:
            if is_out_of_memory(error):
                number = dist.get_rank()
                raise ConfigError(
                    given=f"out of memory on process {number} {meanwhile}: {reason_of(error)}",
                    required="memory for that beside the chunks",
                    source="the memory of the device",
                    change="set chunks.size to less; where there is a checkpoint, --resume goes on "
                    "from it",
                ) from error
            return
        traceback.clear_frames(error.__traceback__)  # they hold tensors
        self._gather_kept()
        for action in rest:
            self._skip(action)
        self.settle()

    def add_up(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes; it may be changed. A number that the host has
        counted stays there on one process."""
        if self._ranks is not None:
            if values.device.type == "cpu":
                values = values.to(self._ranks.facts_device(self._ranks.group))
            dist.all_reduce(values, group=self._ranks.group)
        return values

    def _is_waited_for(self, rest: Sequence[Action]) -> str | None:
        """In the midst of which collectives this process stopped, whose others wait; None where
        it can make up for them."""
        if self._stage_knows or self._ranks is None or self._ranks.num_processes == 1:
            return None
        if self._is_adding_up:
            return "while gradients were added up"
        if self._plan.sp_size > 1 and any(isinstance(action, Computing) for action in rest):
            return "while processes exchanged rows of a chunk"
        return None

    def _skip(self, action: Action) -> None:
        """Do of an action what others wait for."""
        match action:
            case Send() | Recv():
                self._neighbour(action).skip(action)
            case Unshard(stage) if not self._stage_knows:
                self.unshard(stage)
            case Reshard(stage):
                self.reshard(stage)
            case Backward(_, stage) if self.is_last(action):
                if not self._stage_knows and stage not in self._agreed:
                    self._agree_on(stage)

    def _agree_on(self, stage: int) -> None:
        if self._ranks is not None and self._base is not None:
            self._agreed.add(stage)
            failure = failure_of(self._ranks, self._outcome, self._ranks.stage_group)
            self._stage_knows = failure is not None
            if failure is not None and self._outcome is FINE:
                raise failure

    def _neighbour(self, action: Send | Recv) -> Neighbour:
        if self._messages is None:
            text = format_action(action)
            raise PlanError(f"this run has one stage: nobody answers {text!r}")
        return self._messages[0].of(action)


def require_layout(plan: ChunkPlan, ranks: Ranks | None) -> None:
    """Raise PlanError for a plan that is not of these ranks, or of one rank."""
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
    """Those of some modules that FSDP2 has divided."""
    return tuple(module for module in modules if isinstance(module, FSDPModule))
