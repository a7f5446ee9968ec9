"""Exchange of one of several ranks with the others, as an argument of the executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from furlong.errors import LinkError, PlanError
from furlong.ops.scarcity import is_out_of_memory
from furlong.plan.plan import (
    Action,
    Backward,
    ChunkPlan,
    Computing,
    Forward,
    Recv,
    Reduce,
    Reshard,
    Send,
    Unshard,
)
from furlong.plan.text import format_action
from furlong.runtime.parallel.empty_passes import EmptyPasses
from furlong.runtime.parallel.links import Links, Parcel
from furlong.runtime.parallel.ranks import Ranks
from furlong.runtime.parallel.recovery import Failures, cannot_go_on, let_go
from furlong.runtime.parallel.sharding import adding_up, adds_unused


class ShardedRanks:
    """The comms of one plan on this process, one of several that hold its stage's weights."""

    def __init__(
        self,
        base: nn.Module,
        layers: Sequence[nn.Module],
        ranks: Ranks,
        messages: tuple[Links, Parcel] | None = None,
        pool: Callable[[ChunkPlan], EmptyPasses] | None = None,
    ) -> None:
        """`base`: the model, as `sharding.shard` has left it; whole where no other process holds
        the same stage. `layers`: all of its decoder, of which a pipeline's process has its own.
        `messages`: the links to other stages, and the form of what passes them in this plan.
        `pool`: the exchanges of a plan's passes, where processes share its slices."""
        self._base, self._layers, self._ranks = base, layers, ranks
        self._messages, self._pool = messages, pool
        self._exchanges: EmptyPasses | None = None
        self._waiting: ChunkPlan | None = None
        self._stages: tuple[tuple[FSDPModule, ...], ...] = ()
        self._last_stage = 0
        self._failures = Failures(ranks)
        self._agreed: set[int] = set()
        """Stages of which all know that their gradients are about to be added up."""
        self._is_adding_up = False

    def accept(self, plan: ChunkPlan) -> None:
        ranks = self._ranks
        require_layout(plan, ranks)
        self._waiting = plan
        self._exchanges = self._pool(plan) if self._pool else None
        own = self._actions = plan.actions[ranks.plan_rank]
        self._last_backwards = {a.stage: a for a in own if isinstance(a, Backward)}
        self._last_stage = min(self._last_backwards, default=0)
        self._regathers = plan.regathers
        stops = list(accumulate(plan.stages))
        self._stages = tuple(
            tuple(x for x in self._layers[stop - n : stop] if isinstance(x, FSDPModule))
            for n, stop in zip(plan.stages, stops, strict=True)
        )

    def before(self, index: int) -> None:
        if self._messages is not None and self._waiting is None:
            self._messages[0].before(index)

    def send(self, action: Send, x: Tensor) -> None:
        self._links(action).send(action, x)

    def recv(self, action: Recv) -> Tensor:
        return self._links(action).recv(action)

    def unshard(self, stage: int) -> None:
        """Gather the stage's layers, and in front of this process's first ones what is beside all
        layers."""
        first = self._ranks.stage if self._ranks.pp > 1 else 0
        if stage == first and isinstance(self._base, FSDPModule):
            self._base.unshard()
        for module in self._stages[stage]:
            module.unshard()

    def reshard(self, stage: int) -> None:
        for module in self._stages[stage]:
            module.reshard()

    @contextmanager
    def backward(self, stage: int, *, is_last: bool) -> Iterator[None]:
        """Within it the stage's gradients are added up, in its last Backward or, where weights come
        with every pass, in each; in the last of all also those beside the layers. Before a last one
        all that add them up agree that none of them has failed.

        All ranks come to it in the same order: the last Backward of a stage comes after that of the
        stage behind it.
        """
        modules = [*self._stages[stage]]
        if not is_last:
            with adding_up(modules) if self._regathers and adds_unused() else nullcontext():
                yield
            return
        is_last_of_all = stage == self._last_stage
        if is_last_of_all and isinstance(self._base, FSDPModule):
            modules.append(self._base)
        self._agree_on(stage)
        self._is_adding_up = self._ranks.shard_mesh.size() > 1
        with adding_up(modules, is_last=is_last_of_all):
            yield
        self._is_adding_up = False

    def reduce(self, stage: int) -> None:
        """Nothing is left to do: the last Backward has added them up."""

    @property
    def is_settled(self) -> bool:
        """Whether every message and every collective of the list is over, on all processes."""
        return self._failures.all_know

    def settle(self) -> None:
        if self._messages is not None:
            self._messages[0].finish()
        self._failures.agree()

    def give_up(self, error: BaseException, rest: Sequence[Action]) -> None:
        """See `parallel.recovery`. What cannot be made up for leaves the step unsettled; then
        raises ConfigError for a lack of memory."""
        self._failures.note(error)
        if not isinstance(error, Exception) or isinstance(error, LinkError):
            return
        if (meanwhile := self._is_waited_for(rest)) is not None:
            if is_out_of_memory(error):
                raise cannot_go_on(error, dist.get_rank(), meanwhile) from error
            return
        let_go(error)
        for index, action in enumerate(rest, len(self._actions) - len(rest)):
            self._skip(action)
            self._exchange_nothing(index, action)
        self.settle()

    def _is_waited_for(self, rest: Sequence[Action]) -> str | None:
        """In the midst of which collectives this process stopped, whose others wait; None where
        it can make up for them."""
        ranks = self._ranks
        if self._is_adding_up:
            return "while gradients were added up"
        if self._failures.stage_knows:
            return None
        exchanges, first = self._exchanges, len(self._actions) - len(rest)
        is_needed = any(isinstance(action, Computing) for action in rest)
        if exchanges is not None and is_needed and not exchanges.are_known(first):
            return "while its pool exchanged a chunk"
        is_shared = ranks.shard_mesh.size() > 1
        if is_shared and (self._regathers or any(isinstance(a, Reshard) for a in rest)):
            return "while weights were gathered with every pass"
        return None

    def _skip(self, action: Action) -> None:
        """Do of an action what others wait for."""
        match action:
            case Send() | Recv():
                self._links(action).skip(action)
            case Unshard() if not self._failures.stage_knows:
                self._gather()
            case Forward() if not self._failures.stage_knows and self._exchanges is None:
                self._gather()
            case Backward(_, stage) if action is self._last_backwards[stage]:
                if not self._failures.stage_knows and stage not in self._agreed:
                    self._agree_on(stage)

    def _exchange_nothing(self, index: int, action: Action) -> None:
        """Take part in what a pool exchanges, as long as it does."""
        if self._exchanges is None or self._failures.stage_knows:
            return
        if isinstance(action, Computing):
            self._exchanges.join(index, self._gather_layer)

    def _gather(self) -> None:
        """Gather what a first forward gathers on its way, in the same order."""
        if isinstance(self._base, FSDPModule):
            self._base.unshard()
        for stage in self._stages:
            for module in stage:
                module.unshard()

    def _gather_layer(self, layer: int) -> None:
        """Gather a layer, as its first forward would, behind what is beside all layers."""
        for module in (self._base, self._layers[layer]):
            if isinstance(module, FSDPModule):
                module.unshard()

    def _agree_on(self, stage: int) -> None:
        if self._ranks.shard_mesh.size() > 1:
            self._agreed.add(stage)
            self._failures.agree_in_stage()

    def add_up(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self._ranks.group)
        return values

    def _links(self, action: Send | Recv) -> Links:
        """The links, which expect the plan's messages from its first one on: not before it has
        passed all checks, since a receive that is posted cannot be taken back."""
        if self._messages is None:
            text = format_action(action)
            raise PlanError(f"this run has one stage: nobody answers {text!r}")
        links, parcel = self._messages
        plan, self._waiting = self._waiting, None
        if plan is not None:
            links.begin(plan, self._ranks.plan_rank, parcel)
        return links


def require_layout(plan: ChunkPlan, ranks: Ranks) -> None:
    """Raise PlanError for a plan that is not of these ranks."""
    num_lists, sp_size = ranks.dp * ranks.pp, ranks.sp
    if (len(plan.actions), plan.sp_size) != (num_lists, sp_size):
        raise PlanError(
            f"the plan has {len(plan.actions)} lists of actions for {plan.sp_size} processes each, "
            f"this run has dp {ranks.dp} x pp {ranks.pp} = {num_lists}, each for sp {sp_size}"
        )
    if ranks.pp > 1 and len(plan.stages) < ranks.pp:
        raise PlanError(f"the plan has {len(plan.stages)} stages, this run has pp {ranks.pp}")
    if plan.regathers and ranks.pp > 1:
        raise PlanError("a pipeline keeps its weights: the plan gathers them with every pass")
    for rank, actions in enumerate(plan.actions):
        kinds = {type(action) for action in actions}
        if Forward not in kinds or (Backward in kinds) > (Reduce in kinds):
            lack = "Forward; without work it takes a dummy" if Forward not in kinds else "Reduce"
            raise PlanError(f"list {rank} of the plan has no {lack}: others wait for it for ever")
    for first in range(0, num_lists, ranks.pp):
        _require_pipeline(plan, range(first, first + ranks.pp))


def stages_of(plan: ChunkPlan, rank: int) -> list[int]:
    """The stages of which a list of a plan has forwards."""
    return sorted({a.stage for a in plan.actions[rank] if isinstance(a, Forward)})


def _require_pipeline(plan: ChunkPlan, lists: range) -> None:
    """Raise PlanError unless the lists have all stages one after the other."""
    start = 0
    for rank in lists:
        own = stages_of(plan, rank)
        stop = own[-1] + 1
        if own != [*range(start, stop)] or (rank == lists[-1] and stop != len(plan.stages)):
            raise PlanError(
                f"list {rank} of the plan has forwards of the stages {own}, number "
                f"{rank - lists.start} of the {len(lists)} lists over stages 0 to "
                f"{len(plan.stages) - 1}: it needs those from {start} on, in one piece"
            )
        start = stop
