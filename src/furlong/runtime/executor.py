"""Carries out one rank's actions on a device. It decides nothing: the plan says what comes when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import product
from typing import Unpack

import torch
from torch import Tensor

from furlong.models.attention import KVReady
from furlong.models.causal_lm import CausalLM
from furlong.ops.backend import Backend
from furlong.ops.exchange import Exchange
from furlong.plan.check import check
from furlong.plan.liveness import input_frees, kv_frees
from furlong.plan.passes import Pass, passes
from furlong.plan.plan import (
    ON_DEVICE,
    Action,
    Backward,
    ChunkPlan,
    Forward,
    RebuildKV,
    Recompute,
    Recv,
    Reduce,
    Reshard,
    Send,
    Unshard,
)
from furlong.runtime.cells.cell import Cell
from furlong.runtime.cells.chunk_inputs import BatchInputs
from furlong.runtime.cells.layout import chunk_pieces, open_store, rows_on
from furlong.runtime.cells.live_cell import LiveCell, last_actions
from furlong.runtime.cells.loss_head import FinalHead, loss_head
from furlong.runtime.cells.stage_inputs import StageInputs
from furlong.runtime.comms import Comms
from furlong.runtime.inputs import ShiftedSequence, count_valid_tokens
from furlong.runtime.memory.heap import FreedMemory, process_heap
from furlong.runtime.memory.ledger import Ledger
from furlong.runtime.memory.pools import Pools
from furlong.runtime.memory.saved_graphs import SavedGraph, saving
from furlong.runtime.recorder import Measuring, Recorder
from furlong.runtime.rng import RNGState, replayed
from furlong.timeline import Timeline


class Executor:
    """One plan on one rank, checked; `run`, once, adds the gradients of loss / num_valid_tokens."""

    def __init__(
        self,
        model: CausalLM,
        plan: ChunkPlan,
        sequences: Sequence[ShiftedSequence],
        *,
        num_valid_tokens: int,
        backend: Backend,
        pools: Pools,
        comms: Comms,
        rank: int = 0,
        num_labels: int | None = None,
        process: int = 0,
        exchange: Exchange | None = None,
        head: FinalHead | None = None,
        modes: Callable[[], AbstractContextManager[object]] = nullcontext,
        **measuring: Unpack[Measuring],
    ) -> None:
        """`num_labels`: those of the whole batch, None if all sequences are there. `process`: its
        number among those that obey the rank's actions together, which `exchange`. `head`: what
        takes final hidden states; `modes`: torch's, within which passes run."""
        comms.accept(plan)
        check(plan)
        self._model, self._plan, self._rank, self._divisor = model, plan, rank, num_valid_tokens
        self._backend, self._pools, self._comms = backend, pools, comms
        self._stages = model.stages(plan.stages)
        model.require_frozen(sum(plan.stages[: plan.frozen_stages]))
        self._actions = plan.actions[rank]
        self._passes = passes(plan, rank)
        own = self._last_action = last_actions(self._actions)
        self._ends = {index: at for at, index in own.items()}
        model.require_held(i for stage in {s for _, s in own} for i in self._stages[stage].layers)
        self._last_backward = {a.stage: a for a in self._actions if isinstance(a, Backward)}
        self._num_labels = num_labels or count_valid_tokens(sequences)
        rows_of, self._exchange = rows_on(model, plan, process, exchange), exchange
        self._inputs = BatchInputs(plan, rank, sequences, model.device, rows_of)
        self._store = open_store(plan, pools)
        self._graphs = None if plan.tiers.graphs == "device" else pools.of(plan.tiers.graphs)
        self._attention = pools.of(plan.tiers.attention)
        heap = None if plan.tiers == ON_DEVICE else process_heap(model.device)
        self._freed = FreedMemory(heap, self._passes)
        self._ledger, self._num_done = Ledger(), 0
        self._hidden = StageInputs(pools.of(plan.tiers.inputs), self._ledger)
        self._outbox: dict[tuple[str, int, int], Tensor] = {}
        self._live: dict[tuple[int, int], LiveCell] = {}
        self._kv_dead, self._input_dead = kv_frees(plan, rank), input_frees(plan, rank)
        self._draws = any(module.training for module in model.model.modules())
        self._head, self._modes = head or loss_head(model, plan), modes
        self._recorder = Recorder(pools, rank, **measuring)
        self.token_losses = self._head.token_losses
        """The loss of each token (T,) of each sequence; empty for a plan with backwards."""
        self.has_drawn = False
        """Whether a forward in train mode drew random numbers."""
        self.num_labels = 0
        """Tokens with a label in what has run on all ranks."""

    def run(self, watch: Callable[[], None] = lambda: None) -> tuple[float, Timeline]:
        """Obey the plan; returns the summed loss and what ran when. Call inside `installed`.
        `watch` is called after each action; what it raises ends the run."""
        self.advance(len(self._actions), watch)
        self._comms.settle()
        loss_sum, self.num_labels = self._head.total(self._num_labels, self._comms.add_up)
        return loss_sum, self._recorder.timeline()

    def advance(self, stop: int, watch: Callable[[], None] = lambda: None) -> None:
        """Obey actions up to number `stop`, where the last call ended; see `run`."""
        try:
            while self._num_done < stop:
                self._act(self._num_done)
                self._num_done += 1
                watch()
            if stop == len(self._actions):
                self._ledger.assert_empty()
                assert not self._outbox and not self._store.num_buffers, "messages or K,V are left"
        except BaseException as error:
            self.abandon()
            self._comms.give_up(error, self._actions[self._num_done :])
            raise

    def _act(self, index: int) -> None:
        action = self._actions[index]
        self._recorder.begin(action)
        self._hidden.expect_for(self._actions[index + 1 : index + 2])
        self._comms.before(index)
        self._obey(action, self._passes[index])
        for chunk, stage in self._kv_dead[index]:
            self._free_kv(chunk, stage)
        for cell in self._input_dead[index]:
            self._hidden.drop(cell)
        self._inputs.end(index)
        if index in self._ends:
            del self._live[self._ends[index]]  # no later action uses it
        self._freed.end(index)
        self._recorder.end(action)

    def abandon(self) -> None:
        """Forget everything that is alive, after an error."""
        for alive in (self._live, self._outbox, self._store, self._pools):
            alive.clear()

    def _obey(self, action: Action, what: Pass) -> None:
        match action:
            case Forward() | Recompute() | RebuildKV():
                self._compute(action, what)
            case Backward():
                self._backward(action, what)
            case Send(payload, chunk, stage):
                self._comms.send(action, self._outbox.pop((payload, chunk, stage)))
            case Recv("activation", chunk, stage):
                self._hidden.deliver((chunk, stage + 1), self._comms.recv(action))
            case Recv("gradient", chunk, stage):
                self._hidden.deliver_gradient((chunk, stage), self._comms.recv(action))
            case Unshard(stage):
                self._comms.unshard(stage)
            case Reshard(stage):
                self._comms.reshard(stage)
            case Reduce(stage):
                self._comms.reduce(stage)

    def _compute(self, action: Forward | Recompute | RebuildKV, what: Pass) -> None:
        at = action.chunk, action.stage
        if isinstance(action, Forward):
            self._live[at] = LiveCell(self._open(*at))
            if self._draws and what.computes != "nothing":
                self._live[at].rng = RNGState.read(self._model.device)
        live = self._live[at]
        if what.writes_kv:
            self._ledger.hold("kv", *at)
        if what.remembers:
            self._ledger.hold("attention", *at)
        with replayed(None if isinstance(action, Forward) else live.rng, self._model.device):
            match what.computes:
                case "to last kv":
                    with torch.no_grad(), suppress(KVReady):
                        self._run(live, at, what)
                case "values":
                    with torch.no_grad():
                        hidden = self._run(live, at, what)
                        if what.loss:
                            self._head.evaluate(hidden, self._inputs.of(action.chunk))
                    self._deliver(action, hidden)
                case "graph":
                    self._ledger.hold("graph", *at)
                    if self._graphs is not None and isinstance(action, Forward):
                        live.saved = SavedGraph(self._graphs)  # a recomputed one is used at once
                    with torch.enable_grad(), saving(live.saved, self._model.model):
                        live.output = self._run(live, at, what)
                    if isinstance(action, Forward):
                        self._deliver(action, live.output)
        if what.computes != "graph":
            live.cell.end_pass()

    def _run(self, live: LiveCell, at: tuple[int, int], what: Pass) -> Tensor:
        """Hidden states (T, D) behind the stage; raises KVReady for a pass to the last K,V."""
        chunk, stage = at
        own, cell = self._inputs.of(chunk), live.cell
        before = RNGState.read(self._model.device) if self._draws else None
        cell.begin_pass(what)
        try:
            with self._modes():
                x = own.input_ids if stage == 0 else self._leaf(live, at, what)
                hidden = self._stages[stage].run(x, own.position_ids, cell, what)
        except KVReady:
            cell.require_met(self._model.name)
            raise
        finally:
            if before is not None and not self.has_drawn:
                self.has_drawn = not before.equals(RNGState.read(self._model.device))
        # LayerDrop skips layers in some forwards only, which the self-check need not have met
        cell.require_met(self._model.name)
        return hidden

    def _leaf(self, live: LiveCell, at: tuple[int, int], what: Pass) -> Tensor:
        """A copy of the stage's input (T, D), which a hook may change in place; of a graph a leaf,
        whose gradient is the input's."""
        lease = self._hidden.read(at)
        x = lease.tensor.clone()
        lease.release()
        if what.computes == "graph":
            live.x = x.requires_grad_(at[1] > self._plan.frozen_stages)
        return x

    def _deliver(self, action: Action, hidden: Tensor) -> None:
        """Hand a stage's output (T, D) to the next stage."""
        assert not isinstance(action, (Send, Recv, Unshard, Reshard, Reduce))
        following = action.chunk, action.stage + 1
        if following in self._last_action:
            self._hidden.deliver(following, hidden)
        elif following[1] < len(self._stages):
            self._outbox["activation", action.chunk, action.stage] = hidden.detach()

    def _backward(self, action: Backward, what: Pass) -> None:
        at = action.chunk, action.stage
        live = self._live[at]
        assert live.output is not None
        live.cell.relay_factor = action.relay_factor
        if what.loss:
            own = self._inputs.of(action.chunk)
            gradient = self._head.gradient(live.output, own, action.loss_factor, self._divisor)
            if not self._head.num_labels and self._last_backward[action.stage] is action:
                self._head.no_rows(live.output)
            self._pull(action, live.output, gradient)
        else:
            following = action.chunk, action.stage + 1
            lease = self._hidden.read_gradient(following)
            self._pull(action, live.output, lease.tensor)
            lease.release()
            self._hidden.drop(following)
        live.forget_graph()
        if self._ledger.holds("attention", *at):
            self._ledger.release("attention", *at)
        self._ledger.release("graph", *at)
        self._return_gradient(at, live)

    def _pull(self, action: Backward, output: Tensor, gradient: Tensor) -> None:
        is_last = self._last_backward[action.stage] is action
        with self._comms.backward(action.stage, is_last=is_last):
            if output.requires_grad:
                torch.autograd.backward(output, gradient)
            elif is_last:  # nothing is trained below the head, whose own backwards are over
                self._head.no_rows(output)

    def _return_gradient(self, at: tuple[int, int], live: LiveCell) -> None:
        """Hand the gradient of a cell's input to the stage before, if that is trained."""
        chunk, stage = at
        if stage == 0:
            return
        if stage > self._plan.frozen_stages:
            assert live.x is not None and live.x.grad is not None
            if (chunk, stage - 1) in self._last_action:
                self._hidden.deliver_gradient(at, live.x.grad)
                return
            self._outbox["gradient", chunk, stage] = live.x.grad
        if self._ledger.holds("input", *at):
            self._hidden.drop(at)

    def _open(self, chunk: int, stage: int) -> Cell:
        own = self._stages[stage]
        return Cell(
            self._inputs.of(chunk).rows, chunk_pieces(self._plan, chunk), self._store,
            self._backend, self._attention, own.layers, own.events, self._exchange,
        )  # fmt: skip

    def _free_kv(self, chunk: int, stage: int) -> None:
        self._ledger.release("kv", chunk, stage)
        for (seq_id, index), layer in product(self._plan.links[chunk], self._stages[stage].layers):
            self._store.free(seq_id, layer, index)
