"""Token values or hidden states of the engine as the outputs of one autograd node, from which the
caller computes a loss.

On one process (`TwoPhases`) one plan is run in two phases. The node's forward runs all Forwards of
the plan; its backward runs the other actions, starting from the output gradients that autograd
passes. The parameters are inputs of the node, so their gradients are returned to autograd: `.grad`,
`torch.autograd.grad`, hooks, data parallelism and gradient scalers see each parameter once. Both
phases compute on separate leaves that share the parameters' memory, so an error leaves every
`.grad` unchanged, unless gradients="added".

On several processes (`TwoSteps`) two steps are run. The node's forward is an evaluation step. Its
backward is a training step, whose head takes the caller's gradients instead of a loss. No tensor is
kept between the steps, and any layout of processes is possible, at the price of one more forward up
to the last K,V. The second step would draw other random numbers, so models that draw any are
refused. The gradient is that of the sum of all replicas' losses; the processes of a replica must
all compute the same loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from furlong.cost.machine import card_budget_bytes, free_ram_budget_bytes
from furlong.errors import ConfigError, in_short
from furlong.kv.pools import Pools
from furlong.models.attention import patched
from furlong.plan.plan import ChunkPlan, Forward
from furlong.planners.chunks import Forks
from furlong.planners.decide import with_keep
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device, plan_two_phases, require_two_phases
from furlong.planners.question import Limits
from furlong.runtime.batch import (
    Batch,
    batch_of,
    check_ranges,
    count_valid_tokens,
    join_prompts,
    refused_data,
    require_type,
    shift_labels,
)
from furlong.runtime.distributed.comms import Comms
from furlong.runtime.distributed.consensus import (
    agree,
    all_gather_ints,
    require_same_loss,
    run_on_all,
    weights_checksum,
)
from furlong.runtime.distributed.fsdp import gradient_of_replicas, whole_weight
from furlong.runtime.distributed.mesh import Ranks
from furlong.runtime.executor import Executor
from furlong.runtime.head import OutputHead
from furlong.runtime.precision import gradients_apart
from furlong.runtime.routing import RouterOutputs
from furlong.runtime.scan import ModelScan
from furlong.runtime.session import Autocast, Session
from furlong.runtime.step import memory_of, own_plan, take_step, whole_plan
from furlong.values import TokenFunction, require_function

GradientMode = Literal["returned", "added"]
_T = TypeVar("_T")


class TwoPhases:
    """One call on one process, and the tensors kept from its forward to its backward. The tensors
    are freed, too, if the call is garbage-collected without a backward."""

    def __init__(
        self,
        session: Session,
        plan: ChunkPlan,
        batch: Batch,
        function: TokenFunction | None,
        gradients: GradientMode,
        autocast: Autocast,
        watch: Callable[[], None] = lambda: None,
        *,
        routers: bool = False,
    ) -> None:
        """`function`: see `OutputHead`. `watch` (see `Executor.run`) is called in both phases.
        `routers`: whether the logits of routers are outputs, too, behind those of sequences."""
        self._session, self._plan, self._gradients = session, plan, gradients
        self._batch = batch
        self._watch = watch
        self._model = session.model
        self._at_forward = session.scan
        self._head = OutputHead(self._model, batch, function, autocast, is_rounded=autocast.enabled)
        if routers:
            self._head.routing = RouterOutputs(batch)
        state = session.state
        # separate pools: other calls may run, and fail, between the phases
        pools = state.opened.beside()
        # divided by 1: the gradients are those of the caller's loss
        self._executor = Executor(
            self._model, plan, batch,
            num_valid_tokens=1, num_labels=1, backend=state.backend, pools=pools, comms=Comms(),
            head=self._head, modes=autocast,
        )  # fmt: skip
        self._end = weakref.finalize(self, state.drop, partial(_end, self._executor, pools))
        self._end.atexit = False

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return self._at_forward.parameters

    def first(self) -> list[Tensor]:
        """Run all Forwards of the plan. Return the output of each sequence, without a graph. Call
        this inside `Session.call`."""
        # in a plan of two phases all Forwards come before other actions
        forwards = sum(isinstance(action, Forward) for action in self._plan.actions[0])
        with self._session.computing():
            self._executor.advance(forwards, self._watch)
        routed = {} if self._head.routing is None else self._head.routing.finish()
        self._routers = list(routed)
        return self._head.finish() + [own for logits in routed.values() for own in logits]

    def second(self, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run all other actions of the plan. They start from `cotangents`, the gradient of the
        caller's loss with respect to each output (None: zero).

        Return the gradient of each parameter, in the order of `parameters`; None for a parameter
        without one, and for all if gradients="added" has added them to `.grad`."""
        if not self._end.alive:
            raise _second_backward()
        returned: dict[int, Tensor] | None = {} if self._gradients == "returned" else None
        model, num_sequences = self._model, len(self._batch.seq_lens)
        parts = _parts(cotangents, num_sequences)
        used = [any(x is not None for x in own) for own in zip(*parts, strict=True)]
        try:
            self._head.cotangents = parts[0]
            if self._head.routing is not None:
                self._head.routing.cotangents = dict(zip(self._routers, parts[1:], strict=True))
            with self._session.alone(takes_autocast=True):
                # while no other thread's call runs
                _require_unchanged(self._at_forward, self._session.scan)
                with (
                    _modes_of(self._at_forward),
                    self._session.computing(self._plan, returned, model),
                ):
                    self._executor.skip(_unused(self._plan, self._batch, used))
                    self._executor.advance(len(self._plan.actions[0]), self._watch)
            # only now has every chunk been computed a second time
            self._head.require_unmoved(self.parameters[0].dtype)
        finally:
            self._head.cotangents = ()
            if self._head.routing is not None:
                self._head.routing.cotangents = {}
            self._end()
        return [(returned or {}).get(id(p)) for p in self.parameters]


class TwoSteps:
    """One call of several processes: an evaluation, and a training step for its backward."""

    def __init__(
        self,
        session: Session,
        batch: Batch,
        options: ChunkOptions,
        function: TokenFunction | None,
        gradients: GradientMode,
        watch: Callable[[], None] = lambda: None,
        *,
        routers: bool = False,
    ) -> None:
        """`batch`: this replica's sequences. Other arguments: see `TwoPhases`."""
        assert session.ranks is not None
        self._session, self._ranks = session, session.ranks
        self._place = f"the backward of call {session.state.num_calls} of {_name(function)}"
        self._gradients, self._watch, self._options = gradients, watch, options
        self._local, self._at_forward = batch, session.scan
        self._plan, self._batch, self._own = self._planned(backward=False)
        _require_labels(function, self._batch.num_labels)  # a replica may have none
        dtype = session.compute_dtype
        self._head = OutputHead(
            session.model, self._batch, function, nullcontext,
            is_rounded=dtype is not None and dtype.itemsize < 4,
        )  # fmt: skip
        self._routers = [router.name for router in session.model.routers] if routers else []
        if routers:
            self._head.routing = RouterOutputs(self._batch)
        outside = session.model.outside if session.is_entered else ()
        self.outside = [parameter for *_, parameter in outside]
        """Parameters that the caller's head uses; the last outputs are these, whole."""
        self._is_over = False
        self._records = torch.is_grad_enabled()  # read here: it is off in the node's forward
        self._checksum = weights_checksum(self.parameters) if self._records else 0
        reached = self.parameters if function else session.model.decoder.parameters()
        ids = {id(parameter) for parameter in reached}
        self._head_alone = [p for p in self.parameters if id(p) not in ids]
        """Parameters outside the decoder, if the head is not used (hidden states)."""
        self._like: list[Tensor] = []
        """Outputs of sequences, on meta."""

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return self._at_forward.parameters

    def first(self) -> list[Tensor]:
        """Run the evaluation; return the outputs of each sequence of this replica, without a graph
        and whole on all its processes. Raises ConfigError, on all processes, if the model drew
        random numbers and a backward will follow."""
        has_drawn = self._take(self._plan)
        # `_records` is equal on all processes: all or none enter the collective
        if self._records and any(n for (n,) in all_gather_ints(self._ranks, [int(has_drawn)])):
            raise ConfigError(
                given=f"values on {self._ranks.num_processes} processes of a model that draws"
                " random numbers in train mode (dropout, jitter or sampling)",
                required="no draws: values are made of one forward, gradients of another",
                source="the model's config, and the ranks",
                change="set its dropouts, such as attention_dropout, to 0, or use one process",
            )
        found = self._of_replica(self._head.finish())
        if self._head.routing is not None:
            routed = self._head.routing.finish()
            for router in self._routers:
                found += self._of_replica(routed.get(router, ()))
        self._like = [own.to("meta") for own in found]
        return found + [whole_weight(weight, self._ranks) for weight in self.outside]

    def second(self, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Do what `TwoPhases.second` does; gradients are those of this process's shards."""
        with self._session.call(self._place):
            return self._second(cotangents)

    def _second(self, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        session, ranks = self._session, self._ranks

        def begin() -> None:
            if self._is_over:
                raise _second_backward()
            _require_unchanged(self._at_forward, session.scan)
            if weights_checksum(self.parameters) != self._checksum:
                raise _changed("weights")

        run_on_all(ranks, begin, self._place)
        self._is_over = True
        # zeros for outputs that the loss does not use: processes then compare the same tensors
        device = session.model.device
        whole = [
            torch.zeros_like(like, device=device) if own is None else own
            for like, own in zip(self._like, cotangents, strict=False)
        ]
        require_same_loss(whole, ranks)
        found: dict[int, Tensor] = {}
        without = [p for p in self._head_alone if p.grad is None]
        parts = [self._among_all(own) for own in _parts(whole, len(self._own))]
        self._head.cotangents = parts[0]
        if self._head.routing is not None:
            self._head.routing.cotangents = dict(zip(self._routers, parts[1:], strict=True))
        with ExitStack() as stack:
            stack.enter_context(_modes_of(self._at_forward))
            if self._gradients == "returned":
                stack.enter_context(gradients_apart(self.parameters, found))
            # planned anew: the plan of the forward has no Backwards
            plan, *_ = self._planned(backward=True)
            self._take(plan)
        run_on_all(ranks, lambda: self._head.require_unmoved(self.parameters[0].dtype))
        self._head.cotangents = ()
        if self._head.routing is not None:
            self._head.routing.cotangents = {}
        for parameter in without:  # FSDP2 sets zeros where no backward arrives
            parameter.grad = None
        for parameter in self._head_alone:
            found.pop(id(parameter), None)
        self._add_outside(found, cotangents[len(self._like) :])
        return [found.get(id(p)) for p in self.parameters]

    def _add_outside(self, found: dict[int, Tensor], cotangents: Sequence[Tensor | None]) -> None:
        """Add the gradients of the caller's head, summed over replicas, to those `found`, on the
        stages that train its parameters: the last one and, with tied embeddings, the first."""
        ranks, tied = self._ranks, self._session.model.tied_weight
        if not self.outside:
            return
        each = all_gather_ints(ranks, [int(own is not None) for own in cotangents])
        for weight, own, used in zip(
            self.outside, cotangents, zip(*each, strict=True), strict=True
        ):
            is_trained = ranks.stage == ranks.pp - 1 or (weight is tied and not ranks.stage)
            if any(used) and is_trained:
                if own is None:  # other replicas use it
                    own = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
                part = gradient_of_replicas(own, weight, ranks)
                before = found.get(id(weight))
                found[id(weight)] = part if before is None else before + part

    def _among_all(self, own: Sequence[Tensor]) -> list[Tensor | None]:
        """Return gradients of this replica's outputs among those of all sequences of the batch."""
        every: list[Tensor | None] = [None] * len(self._batch.seq_lens)
        for i, x in zip(self._own, own, strict=True):
            every[i] = x
        return every

    def _planned(self, *, backward: bool) -> tuple[ChunkPlan, Batch, range]:
        """Return the plan of all replicas, its batch and the seq_ids of this replica."""
        session, options = self._session, self._options
        own, each = agree(
            self._ranks,
            partial(own_plan, session, options, lambda: self._local, 1, backward=backward),
        )
        return whole_plan(session, options, own, each)

    def _take(self, plan: ChunkPlan) -> bool:
        """Run a step; return whether this process drew random numbers."""
        return take_step(
            self._session, plan, self._batch, 1, self._watch, head=lambda *_: self._head
        ).has_drawn

    def _of_replica(self, found: Sequence[Tensor]) -> list[Tensor]:
        """Sum the tensors `found` over the processes of this replica, and return those of its
        sequences. `found` has one output for each sequence, with zeros for tokens that another
        process computed. Pass an empty list on a process that computed no output. A collective of
        all processes."""
        form = (_DTYPES.index(found[0].dtype), *found[0].shape[1:], 0)[:2] if found else (-1, -1)
        forms = {tuple(form) for form in all_gather_ints(self._ranks, form)} - {(-1, -1)}
        if len(forms) > 1:
            raise ConfigError(
                given="fn, which returned another number of values, or another dtype, on some "
                "processes than on others",
                required="one floating-point value per token or k of them, alike on all processes",
                source="fn, called with logits (t, V), labels (t,) and extras (t, ...)",
                change="pass the same fn on all processes",
            )
        ((dtype, columns),) = forms
        ranks, outputs = self._ranks, []
        groups = [ranks.place_groups[ranks.sp]] if ranks.sp > 1 else []
        groups += [ranks.mesh["pp"].get_group()] if ranks.pp > 1 else []
        for i in self._own:
            shape = (self._batch.seq_lens[i], columns)[: 2 if columns else 1]
            device = self._session.model.device
            own = found[i] if found else torch.zeros(shape, dtype=_DTYPES[dtype], device=device)
            for group in groups:
                dist.all_reduce(own, group=group)
            outputs.append(own)
        return outputs


_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def _require_unchanged(before: ModelScan, now: ModelScan) -> None:
    """Raise ConfigError if the parameters or adapters have changed since the forward."""
    if {id(p) for p in before.parameters} != {id(p) for p in now.parameters}:
        raise _changed("parameters")
    if before.adapters != now.adapters:
        raise _changed("active, disabled or merged adapters")


def _modes_of(before: ModelScan) -> AbstractContextManager[None]:
    """Context manager: set the train or eval mode that each module had in the forward."""
    modes = zip(before.modules, before.modes, strict=True)
    return patched((vars(m), "training", mode) for m, mode in modes if m.training != mode)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: TwoPhases | TwoSteps, anchor: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """`anchor`: a leaf that gives outputs a graph on processes without trained weights, too."""
        ctx.run = run
        # None marks outputs without a gradient: chunks of these alone need no backward
        ctx.set_materialize_grads(False)
        if isinstance(run, TwoPhases):  # `TwoSteps` compares checksums instead
            ctx.save_for_backward(*parameters)  # reading them raises if one was changed in place
            return tuple(run.first())
        found = run.first()
        outside = zip(reversed(run.outside), reversed(found), strict=False)
        ctx.mark_non_differentiable(*(own for weight, own in outside if not weight.requires_grad))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ConfigError(
                given="a backward with create_graph=True",
                required="gradients of first order: chunks compute them without a graph",
                source="the backward of token_values, hidden_states or a chunked model",
                change="leave create_graph out, or use the model without furlong",
            )
        try:
            _ = ctx.saved_tensors
        except RuntimeError as error:
            if "inplace" in str(error):
                raise _changed("weights") from error
            raise
        return None, None, *ctx.run.second(cotangents)


def differentiable(run: TwoPhases | TwoSteps) -> list[Tensor]:
    """Return the outputs of a call, connected to the parameters by one autograd node."""
    anchor = torch.empty(0, device="cpu", requires_grad=True)
    return list(_Node.apply(run, anchor, *run.parameters))  # type: ignore[no-untyped-call]


def _parts(outputs: Sequence[_T], num_sequences: int) -> list[Sequence[_T]]:
    """Split what belongs to outputs of sequences: final states or values, then of each router."""
    starts = range(0, len(outputs), num_sequences)
    return [outputs[start : start + num_sequences] for start in starts]


def _unused(plan: ChunkPlan, batch: Batch, has_gradient: Sequence[bool]) -> frozenset[int]:
    """Return the chunks that no sequence with an output gradient needs: they get no backward."""
    used = {
        index
        for index, chunk in enumerate(plan.chunks)
        if any(has_gradient[i] for s in chunk.slices for i in batch.members(s))
    }
    for seq_id, group in plan.groups.items():
        # the whole group too if its tail shares a chunk with such a sequence
        tree = plan.trees.get(seq_id)
        if tree is None and not used.isdisjoint(group):
            used.update(group)
        for number in (n for n, chunk in enumerate(group) if tree and chunk in used):
            used.update(group[earlier] for earlier in plan.trees[seq_id].path(number))
    return frozenset(range(len(plan.chunks))) - used


def _end(executor: Executor, pools: Pools) -> None:
    executor.abandon()
    pools.close()


def _require_labels(function: TokenFunction | None, num_labels: int | None) -> None:
    """Raise DataError for token values of sequences without any label."""
    if function is not None and not num_labels:
        raise refused_data(
            "no token with a label, but for first ones, which nothing predicts",
            "at least one: an answer of at least one token behind its prompt",
            "leave such sequences out; -100 in labels means no label",
        )


def _name(function: TokenFunction | None) -> str:
    return "token_values" if function else "hidden_states"


def _second_backward() -> ConfigError:
    return ConfigError(
        given="a second backward through the same values",
        required="one: the first has freed what the chunks kept",
        source="retain_graph=True, or two losses of the same values",
        change="add the losses and call backward once, or compute the values again",
    )


def _changed(what: str) -> ConfigError:
    return ConfigError(
        given=f"a model whose {what} are others than in the forward",
        required="the model that the values were computed with",
        source="the backward of token_values, hidden_states or a chunked model",
        change="step the optimizer, switch or merge adapters, or resize embeddings after the "
        "backward; in the place of torch.func.functional_call, whose weights are gone by then, "
        "model.load_state_dict",
    )


def token_values(
    session: Session,
    sequences: object,
    options: ChunkOptions,
    function: TokenFunction | None,
    gradients: GradientMode = "returned",
    *,
    share_prompts: bool = True,
    routers: bool = False,
    watch: Callable[[], None] = lambda: None,
) -> list[Tensor]:
    """Return, for each sequence, the values (T,) or (T, k) that `function` computes from its
    tokens; with `function` None, final hidden states (T, D). The tensors are differentiable unless
    grad mode is off or nothing is trained. Arguments: see `Engine.token_values` and
    `Engine.hidden_states`; `sequences` may also be a function that returns them, whose error is
    one of all processes. With `routers` the logits of each router follow, for each sequence
    (T, E). On several processes, inside a call of the decoder (`is_entered`), the whole weights of
    `HFDecoder.outside` follow, for a head of the caller's."""

    def read() -> Batch:
        if function is not None:
            require_function(function, "fn")
        extras = None if function is not None else ()
        given = sequences() if callable(sequences) else sequences
        shifted = shift_labels(given, extras=extras, needs_labels=False)
        if not shifted:
            raise refused_data("no sequences", "at least one sequence", "leave the call out")
        if session.ranks is None:
            _require_labels(function, count_valid_tokens(shifted))
        refuse_router_loss(session, routers=routers)
        require_type(options, ChunkOptions)
        require_two_phases(options)
        if gradients not in get_args(GradientMode):
            raise ConfigError(
                given=f"gradients={in_short(repr(gradients), 60)}", required="returned or added",
                source="the arguments of the engine",
                change="added adds to .grad without a second copy; returned is what autograd "
                "expects",
            )  # fmt: skip
        shares = share_prompts and may_share(session)
        return join_prompts(shifted, options.size) if shares else batch_of(shifted)

    autocast, place = Autocast.captured(session.autocast_kind), f"a call of {_name(function)}"
    with session.call(place, takes_autocast=session.ranks is None):
        batch = run_on_all(session.ranks, read, place)
        # the number tells apart the backwards of several calls, which processes compare
        session.state.num_calls += 1
        trains = session.records()
        if session.ranks is not None:
            trains = _any_trains(session.ranks, trains)
        differs = torch.is_grad_enabled() and trains
        run: TwoPhases | TwoSteps
        if session.ranks is not None:
            # free memory differs between processes, and all must make one plan
            if options.keep == "auto":
                options = replace(options, keep="kv")
            run = TwoSteps(session, batch, options, function, gradients, watch, routers=routers)
        else:
            plan = _planned_alone(session, batch, options, autocast, differs=differs)
            run = TwoPhases(
                session, plan, batch, function, gradients, autocast, watch, routers=routers
            )
        return differentiable(run) if differs else run.first()


def refuse_router_loss(session: Session, *, routers: bool) -> None:
    """Raise ConfigError for values without a router loss that the model's own forward would add.
    `routers`: whether router logits are outputs, too."""
    model = session.model
    if routers and not model.routers:
        raise ConfigError(
            given=f"{model.name} with output_router_logits=True, whose routers are "
            + ("compiled" if model.compiled else "unknown"),
            required="router logits, which its routers return (`_can_record_outputs`)",
            source="a call of a model that furlong.chunked has changed",
            change="set config.output_router_logits=False (in TRL: router_aux_loss_coef=0.0)"
            + ", or compile no layers" * bool(model.compiled),
        )
    if not session.is_entered and model.router_rule is not None:
        raise ConfigError(
            given=f"{model.name} with a router loss (output_router_logits=True)",
            required="a loss that the caller makes of values of tokens: nothing would add it",
            source="Engine.token_values or Engine.hidden_states, and the model's config",
            change="set config.output_router_logits=False, use forward_backward, or furlong.chunked"
            " and the outputs' aux_loss",
        )


def _planned_alone(
    session: Session, batch: Batch, options: ChunkOptions, autocast: Autocast, *, differs: bool
) -> ChunkPlan:
    """Return the plan of a call on one device. `differs`: a backward will follow."""
    model = session.model
    check_ranges(batch.sequences, model, backward=differs)
    lens = [len(tree.input_ids) for tree in batch.planned]
    if differs:
        if options.keep == "auto":
            options = decided(session, options, lens, batch.forks, autocast)
        return plan_two_phases(lens, options, num_layers=model.num_layers, forks=batch.forks)
    if options.keep == "auto":
        options = replace(options, keep="kv")  # unused: an evaluation keeps nothing
    return plan_on_device(
        lens, options, num_layers=model.num_layers, forks=batch.forks, backward=False
    )


def _any_trains(ranks: Ranks, trains: bool) -> bool:
    """Return whether any process trains parameters. Raises ConfigError, on all processes, if only
    some record a graph: these would wait in the backward for the others. A collective."""
    rows = all_gather_ints(ranks, [int(torch.is_grad_enabled()), int(trains)])
    without = [str(process) for process, (records, _) in enumerate(rows) if not records]
    if 0 < len(without) < len(rows):
        raise ConfigError(
            given=f"values under torch.no_grad on process {', '.join(without)}, and not on others",
            required="the same on all: a backward is one of all processes",
            source="the caller's code on each process",
            change="enter torch.no_grad on all processes, or on none",
        )
    return any(trains for _, trains in rows)


def may_share(session: Session) -> bool:
    """Whether answers may share a prompt's computation: not with recurrent layers, whose state only
    one answer could continue."""
    return not session.is_recurrent


_COPIES_TO_COME = 3
"""Copies of the trained weights allocated after the first call: gradients and AdamW's moments."""


def decided(
    session: Session, options: ChunkOptions, seq_lens: Sequence[int], forks: Forks,
    autocast: Autocast,
) -> ChunkOptions:  # fmt: skip
    """Replace keep="auto" in the options. The new `keep` is the one that stores most between
    forward and backward and whose plan fits in the free memory. If none fits, it is the one that
    needs least; if memory cannot be predicted, it is "kv"."""
    storage = session.state.opened.storage
    room = _room_bytes(session) if storage.device_bytes is None else storage.device_bytes
    memory = memory_of(session, autocast.dtype if autocast.enabled else None, room)
    if memory is None:
        return replace(options, keep="kv")
    limits = Limits(room, storage.cpu_bytes, storage.disk_bytes)
    return with_keep(seq_lens, options, memory, limits, forks)


def _room_bytes(session: Session) -> int:
    """Return the device bytes that a call may use: the bytes that were free at the first call on
    the model, without what gradients and AdamW's two moments will take. All calls on a model get
    the same number, so that equal calls have equal plans."""
    state, model = session.state, session.model.model
    if state.room_bytes is None:
        trained_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        free_bytes = _free_bytes(session.model.device)
        state.room_bytes = max(0, free_bytes - _COPIES_TO_COME * trained_bytes)
    return state.room_bytes


def _free_bytes(device: torch.device) -> int:
    """Return the budget of `memory.device: auto`; on CUDA it includes the unused memory that
    torch's caching allocator holds."""
    if device.type != "cuda":
        return free_ram_budget_bytes()
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return card_budget_bytes(torch.cuda.mem_get_info(device)[0] + held)
