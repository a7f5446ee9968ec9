"""The executor runs one rank's actions in the order of the plan. All decisions, such as the order
and what is kept, are the plan's.

Hidden states that go from stage to stage, and their gradients, are stored in the pool
`offload.inputs` until the receiving stage uses them. The key of a stored tensor is the tuple
(payload, chunk, stage that the tensor comes from), as for messages to other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import product
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor

from furlong.kv.pools import Handle, Pools
from furlong.models.attention import CellAttention, KVReady
from furlong.models.decoder import HFDecoder
from furlong.models.mixers import TokenMixing
from furlong.ops.backends.base import Backend
from furlong.ops.sequence_parallel import Exchange
from furlong.plan.check import check
from furlong.plan.passes import Pass, input_frees, kv_frees, passes
from furlong.plan.plan import (
    ON_DEVICE,
    Action,
    Backward,
    ChunkPlan,
    Computing,
    Forward,
    Payload,
    RebuildKV,
    Recompute,
    Recv,
    Reduce,
    Reshard,
    Send,
    Unshard,
)
from furlong.runtime.batch import Batch, ChunkInputs, ChunkTargets, chunk_inputs, chunk_targets
from furlong.runtime.cell import Cell, SavedGraph, chunk_pieces, open_store, rows_on, state_runs
from furlong.runtime.distributed.comms import Comms
from furlong.runtime.head import Head, LossHead
from furlong.runtime.profile import Measuring, ProcessHeap, Recorder
from furlong.runtime.rng import RNGState, replayed
from furlong.timeline import Timeline

Message = tuple[Payload, int, int]
"""Key of hidden states or gradients between stages: (payload, chunk, source stage)."""


class Layers(Protocol):
    """The layers that a stage runs: a `models.decoder.Stage`, or one mixer in the self-check."""

    layers: range

    @property
    def events(self) -> tuple[TokenMixing, ...]: ...
    def run(self, x: Tensor, position_ids: Tensor, cell: CellAttention, what: Pass) -> Tensor: ...


class _Entered(torch.autograd.Function):
    """Identity function from a leaf to the stage's input. Autograd does not treat the output as a
    view of the leaf, so hooks and layers may change it in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Executor:
    """Runs one rank's actions of a checked plan, once. Gradients are those of the summed loss
    divided by num_valid_tokens."""

    def __init__(
        self,
        model: HFDecoder,
        plan: ChunkPlan,
        batch: Batch,
        *,
        num_valid_tokens: int,
        backend: Backend,
        pools: Pools,
        comms: Comms,
        rank: int = 0,
        num_labels: int | None = None,
        process: int = 0,
        exchange: Exchange | None = None,
        head: Head | None = None,
        modes: Callable[[], AbstractContextManager[object]] = nullcontext,
        stages: Sequence[Layers] | None = None,
        embedded: Callable[[int], Tensor] | None = None,
        **measuring: Unpack[Measuring],
    ) -> None:
        """
        Args:
            num_valid_tokens: The divisor of the loss, in tokens.
            rank: Index of the list of `plan.actions` to run.
            num_labels: Number of labels of the whole batch, if `batch.num_labels` is None.
            process: Number of this process in the sequence-parallel group that runs the list.
            exchange: All-to-all of that group; None for a group of one.
            head: Consumer of final hidden states, by default the loss.
            modes: Makes the context manager that passes run in, such as an autocast.
            stages: Layers to run instead of `model.stages(plan.stages)`.
            embedded: Returns the leaf (1, T, D) that holds a chunk's input embeddings. If given,
                backwards end at stage inputs, and no weight gets a gradient.
        """
        comms.accept(plan)
        check(plan)
        self._model, self._plan, self._rank, self._divisor = model, plan, rank, num_valid_tokens
        self._backend, self._pools, self._comms = backend, pools, comms
        self._stages = stages or model.stages(plan.stages)
        self._embedded = embedded
        model.require_frozen(sum(plan.stages[: plan.frozen_stages]))
        self._actions = plan.actions[rank]
        self._passes = passes(plan, rank)
        computing = [(i, a) for i, a in enumerate(self._actions) if isinstance(a, Computing)]
        own = {(a.chunk, a.stage): i for i, a in computing}
        self._own, self._cell_ends = own.keys(), {index: at for at, index in own.items()}
        self._chunk_ends = {i: chunk for chunk, i in {a.chunk: i for i, a in computing}.items()}
        model.require_held(i for stage in {s for _, s in own} for i in self._stages[stage].layers)
        self._num_labels = num_labels or batch.num_labels
        self._rows_of, self._exchange = rows_on(model, plan, process), exchange
        self._state_runs, self._process = state_runs(model, plan, process), process
        self._batch, self._inputs = batch, dict[int, ChunkInputs]()
        self._store = open_store(plan, pools)
        self._graphs = None if plan.offload.graphs == "none" else pools.of(plan.offload.graphs)
        self._attention = pools.of(plan.offload.attention)
        self._heap = ProcessHeap(
            model.device,
            maps_small=plan.offload != ON_DEVICE or hasattr(model.model, "peft_config"),
            is_measured=measuring.get("exact_peaks", False),
        )  # fmt: skip
        self._num_done, self._skipped = 0, frozenset[int]()
        self._between = pools.of(plan.offload.inputs)
        self._hidden: dict[Message, Handle] = {}
        """Hidden states (T, D) between stages, and their gradients, that this rank will read."""
        self._outbox: dict[Message, Tensor] = {}
        self._cells: dict[tuple[int, int], Cell] = {}
        self._kv_dead, self._input_dead = kv_frees(plan, rank), input_frees(plan, rank)
        self._head, self._modes = head or LossHead(model, plan, batch), modes
        self._recorder = Recorder(pools, rank, **measuring)
        self.token_losses = self._head.token_losses
        """Token losses (T,) of each sequence; empty for a plan with backwards."""
        self.has_drawn = False
        """Whether a forward drew random numbers."""
        self.num_labels = 0
        """Labels that have been evaluated on all ranks; set by `run`."""

    def run(self, watch: Callable[[], None] = lambda: None) -> tuple[float, Timeline]:
        """Run all actions. Return (summed loss, timeline): the timeline has time and memory of each
        action. Call this inside the context manager `HFDecoder.installed`.

        `watch` is called after each action; an error that it raises ends the run."""
        self.advance(len(self._actions), watch)
        self._comms.finish()
        loss_sum, self.num_labels = self._head.total(self._num_labels, self._comms.add_up)
        return loss_sum, self._recorder.timeline()

    def advance(self, stop: int, watch: Callable[[], None] = lambda: None) -> None:
        """Run the next actions, up to number `stop` (exclusive); see `run`."""
        try:
            while self._num_done < stop:
                index, action = self._num_done, self._actions[self._num_done]
                if getattr(action, "chunk", None) not in self._skipped:
                    # receives are posted first, and the next action's input is prefetched, so that
                    # both overlap with this action
                    self._comms.before(index)
                    self._recorder.begin(action)
                    if index + 1 < len(self._actions):
                        self._expect_for(self._actions[index + 1])
                    self._obey(action, self._passes[index])
                    self._free_after(index)
                    self._heap.end()
                    self._recorder.end(action)
                self._num_done += 1
                watch()
            if stop == len(self._actions):
                left = self._cells or self._hidden or self._outbox
                assert not left and not self._store.num_buffers, "cells, messages or K,V are left"
        except BaseException:  # an interrupt, too: later calls use the same pools
            self.abandon()
            raise

    def skip(self, chunks: frozenset[int]) -> None:
        """Leave `chunks` out of the rest of the plan, because no backward of them is needed: free
        their cells and K,V now, and skip their remaining actions. Only for plans of a single stage.
        With a chunk, `chunks` must include every later chunk that reads its K,V."""
        self._skipped = chunks
        for chunk in chunks:
            # at once: every chunk that would read these K,V is skipped, too
            self._free_kv(chunk, 0)
            self._cells.pop((chunk, 0)).forget()

    def _free_after(self, index: int) -> None:
        for chunk, stage in self._kv_dead[index]:
            self._free_kv(chunk, stage)
        for chunk, stage in self._input_dead[index]:
            self._drop_input(chunk, stage)
        self._inputs.pop(self._chunk_ends.get(index, -1), None)
        if index in self._cell_ends:  # the last action of the cell
            cell = self._cells.pop(self._cell_ends[index])
            assert cell.output is None and not cell.saved_attention, "a graph or attention is left"

    def abandon(self) -> None:
        """Free cells, messages and the contents of store and pools, after an error."""
        for cell in self._cells.values():
            cell.output = None  # its graph refers back to the cell
        for alive in (self._cells, self._outbox, self._store, self._pools):
            alive.clear()

    def _obey(self, action: Action, what: Pass) -> None:
        match action:
            case Forward() | Recompute() | RebuildKV():
                self._compute(action, what)
            case Backward():
                self._backward(action, what)
            case Send(payload, chunk, stage):
                self._comms.send(action, self._outbox.pop((payload, chunk, stage)))
            case Recv(payload, chunk, stage):
                self._keep((payload, chunk, stage), self._comms.recv(action))
            case Unshard(stage):
                self._comms.unshard(stage)
            case Reshard(stage):
                self._comms.reshard(stage)
            case Reduce(stage):
                self._comms.reduce(stage)

    def _compute(self, action: Forward | Recompute | RebuildKV, what: Pass) -> None:
        at = action.chunk, action.stage
        if isinstance(action, Forward):
            self._cells[at] = self._open(*at)
            # a forward that computes nothing draws nothing: the Recompute is the first to draw
            if what.computes != "nothing":
                self._cells[at].rng = RNGState.read(self._model.device)
        cell = self._cells[at]
        with replayed(None if isinstance(action, Forward) else cell.rng, self._model.device):
            match what.computes:
                case "to last kv":
                    with torch.no_grad(), suppress(KVReady):
                        self._run(cell, at, what)
                    self._comms.cut_short(action.stage)
                case "values":
                    with torch.no_grad():
                        hidden = self._run(cell, at, what)
                        if what.loss:
                            self._head.evaluate(hidden, self._targets_of(action.chunk))
                    self._deliver(("activation", *at), hidden)
                case "graph":
                    if self._graphs is not None and isinstance(action, Forward):
                        cell.saved = SavedGraph(self._graphs)  # a recomputed one is used at once
                    with torch.enable_grad(), cell.saving(self._model.model):
                        cell.output = self._run(cell, at, what)
                    # after the run, in which the embedding makes the leaf
                    if self._embedded is not None and action.stage == 0:
                        cell.x = self._embedded(action.chunk)
                    # a Recompute's output was delivered by its Forward
                    if isinstance(action, Forward):
                        self._deliver(("activation", *at), cell.output)
        if what.computes != "graph":
            cell.end_pass()

    def _run(self, cell: Cell, at: tuple[int, int], what: Pass) -> Tensor:
        """Return the stage's output (T, D); raises KVReady if the pass ends at the last K,V."""
        chunk, stage = at
        own = self._inputs_of(chunk)
        before = RNGState.read(self._model.device)
        cell.begin_pass(what)
        try:
            with self._modes():
                x = own.input_ids if stage == 0 else self._leaf(cell, at, what)
                hidden = self._stages[stage].run(x, own.position_ids, cell, what)
        except KVReady:
            cell.require_met(self._model.name)
            raise
        finally:
            if not self.has_drawn:
                self.has_drawn = not before.equals(RNGState.read(self._model.device))
        # LayerDrop skips layers in some forwards only, which the self-check need not have met
        cell.require_met(self._model.name)
        return hidden

    def _leaf(self, cell: Cell, at: tuple[int, int], what: Pass) -> Tensor:
        """Return the stage's input (T, D), copied from the pool so that a hook may change it in
        place. If the pass builds a graph and an earlier stage has a Backward, `cell.x` becomes a
        leaf with these values, which receives the input's gradient, and the result is computed from
        that leaf."""
        lease = self._between.get(self._hidden["activation", at[0], at[1] - 1])
        x = lease.tensor.clone()
        lease.release()
        if what.computes != "graph" or at[1] <= self._plan.frozen_stages:
            return x
        cell.x = x.requires_grad_()
        return _Entered.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    def _inputs_of(self, chunk: int) -> ChunkInputs:
        """Return a chunk's inputs, built once and dropped after its last action on this rank."""
        if chunk not in self._inputs:
            rows, position = self._rows_of(self._plan.chunks[chunk]), self._plan.token_position
            own = chunk_inputs(rows, self._batch, self._model.device, partial(position, chunk))
            self._inputs[chunk] = own
        return self._inputs[chunk]

    def _targets_of(self, chunk: int) -> ChunkTargets:
        return chunk_targets(self._inputs_of(chunk).rows, self._batch, self._model.device)

    def _deliver(self, message: Message, x: Tensor) -> None:
        """Store a tensor (T, D) that a stage has computed, its output or the gradient of its input.
        If the receiving stage is on this rank, its pass reads the tensor from the pool. If that
        stage is on another rank, a Send takes it. Without a receiving stage the tensor is
        dropped."""
        payload, chunk, stage = message
        stage += 1 if payload == "activation" else -1
        if (chunk, stage) in self._own:
            self._keep(message, x)
        elif stage < len(self._stages):
            self._outbox[message] = x.detach()

    def _keep(self, message: Message, x: Tensor) -> None:
        assert message not in self._hidden, f"{message} has come before"
        self._hidden[message] = self._between.put(x.detach())

    def _drop_input(self, chunk: int, stage: int) -> None:
        """Free the input of a cell, if there is one."""
        if handle := self._hidden.pop(("activation", chunk, stage - 1), None):
            self._between.drop(handle)

    def _expect_for(self, action: Action) -> None:
        """Prefetch the hidden states or gradient that an action reads, if this rank holds them."""
        handle = None
        match action:
            case Forward(chunk, stage) | Recompute(chunk, stage) | RebuildKV(chunk, stage):
                handle = self._hidden.get(("activation", chunk, stage - 1))
            case Backward(chunk, stage):
                handle = self._hidden.get(("gradient", chunk, stage + 1))
        if handle is not None:
            self._between.prefetch(handle)

    def _backward(self, action: Backward, what: Pass) -> None:
        chunk, stage = action.chunk, action.stage
        cell = self._cells[chunk, stage]
        assert cell.output is not None
        cell.relay_factor = action.relay_factor
        if what.loss:
            own = self._targets_of(chunk)
            gradient = self._head.gradient(cell.output, own, action.loss_factor, self._divisor)
            if not self._head.num_labels and self._comms.is_last(action):
                self._head.no_rows(cell.output)  # FSDP2 needs a gradient on every rank
            self._pull(action, cell, gradient)
        else:
            handle = self._hidden.pop(("gradient", chunk, stage + 1))
            lease = self._between.get(handle)
            self._pull(action, cell, lease.tensor)
            lease.release()
            self._between.drop(handle)
        # the graph is freed before the gradient is stored, for a lower peak
        cell.forget()
        self._drop_input(chunk, stage)
        if stage > self._plan.frozen_stages:
            assert cell.x is not None and cell.x.grad is not None
            self._deliver(("gradient", chunk, stage), cell.x.grad)

    def _pull(self, action: Backward, cell: Cell, gradient: Tensor) -> None:
        output, ends = cell.output, None if self._embedded is None else cell.x
        assert output is not None
        with self._comms.backward(action):
            if output.requires_grad:
                torch.autograd.backward(output, gradient, inputs=ends)
                cell.require_routed(self._model.name)
            elif self._comms.is_last(action):  # nothing is trained in this stage or below
                self._model.empty_backward()

    def _open(self, chunk: int, stage: int) -> Cell:
        own = self._stages[stage]
        return Cell(
            self._inputs_of(chunk).rows, chunk_pieces(self._plan, chunk), self._store,
            self._backend, self._attention, own.layers, own.events, self._exchange,
            self._state_runs(chunk), self._process, self._plan.sp_size,
            routing=self._head.routing, adds_gradients=self._embedded is None,
        )  # fmt: skip

    def _free_kv(self, chunk: int, stage: int) -> None:
        for (seq_id, index), layer in product(self._plan.links[chunk], self._stages[stage].layers):
            self._store.free(seq_id, layer, index)
