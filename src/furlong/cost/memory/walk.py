"""One process of one rank walks its actions and adds up bytes.

Follows the executor, which obeys the plan's passes. A graph lives from its Forward or Recompute to
its Backward. The input of a cell behind the first stage lives where stage inputs do, from the pass
that delivers it; it dies with the pass that reads it last, or in its Backward becomes its own
gradient, which dies with the Backward of the stage before. For K,V see `stored_kv`.

What lives in a lower tier still has a working set on the device while an action runs: the input
that is read and the output on its way, one layer's attention outputs (from the Recompute to the
Backward all of the cell's, which its graph holds), one layer of a retained graph, blocks of K,V.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from furlong.cost.memory.activations import Activations
from furlong.cost.memory.cells import StageBytes, stage_bytes
from furlong.cost.memory.curve import MemoryCurve
from furlong.cost.memory.levels import PARTS, Levels, Part
from furlong.cost.memory.stored_kv import StoredKV
from furlong.cost.memory.stored_layers import gathered_tokens, token_share
from furlong.cost.memory.traffic import KINDS, PlanTraffic
from furlong.cost.memory.training import Training
from furlong.cost.shapes.shape import ModelShape
from furlong.plan.liveness import input_frees, kv_frees
from furlong.plan.passes import Pass, passes
from furlong.plan.values import (
    ON_DEVICE,
    Action,
    Backward,
    ChunkPlan,
    Forward,
    RebuildKV,
    Recompute,
    Recv,
    Reshard,
    Send,
    Unshard,
)


@dataclass(frozen=True)
class MemoryRules:
    """What a walk counts; the fields are those of `memory.PlanMemory`."""

    shape: ModelShape
    training: Training
    activations: Activations | None
    activation_factor: float
    overhead_bytes: int
    tile_tokens: int | None
    """Rows of a tile of the loss; None: it holds the logits of a whole chunk."""
    device_type: str = "cuda"
    """cuda or cpu: it decides how large the store's segments are."""


def walk(
    rules: MemoryRules, plan: ChunkPlan, rank: int, process: int
) -> tuple[MemoryCurve, PlanTraffic]:
    """Of process `process` of the pool that obeys the list of `rank`."""
    return _Walk(rules, plan, rank, process).run()


class _Walk:
    """One sp process of one rank, action by action."""

    def __init__(self, rules: MemoryRules, plan: ChunkPlan, rank: int, process: int) -> None:
        self._rules, self._plan = rules, plan
        self._actions = plan.actions[rank]
        self._passes = passes(plan, rank)
        self._frees = kv_frees(plan, rank), input_frees(plan, rank)
        shape, training = rules.shape, rules.training
        self._bytes: list[StageBytes] = [
            stage_bytes(
                shape, plan.stages, stage, training, rules.activations, rules.activation_factor
            )
            for stage in range(len(plan.stages))
        ]
        computed = [a for a in self._actions if isinstance(a, (Forward, Backward))]
        self._held = frozenset(action.stage for action in computed)
        trained = {a.chunk for a in computed if isinstance(a, Backward) and a.stage == 0}
        self._last_use = {
            action.chunk: index
            for index, action in enumerate(self._actions)
            if isinstance(action, (Forward, RebuildKV)) and action.chunk not in trained
            if action.stage == 0
        }
        """Where the token ids of a chunk without a Backward are read last."""
        # of the rank's own chunks only: a plan may have a thousand ranks
        self._tokens = {
            index: 1.0
            if plan.chunks[index].is_dummy
            else sum(s.num_tokens * token_share(s, process) for s in plan.chunks[index].slices)
            for index in {a.chunk for a in self._actions if isinstance(a, Forward)}
        }
        self._gathered = {
            index: sum(gathered_tokens(s, process, shape) for s in plan.chunks[index].slices)
            for index in self._tokens
        }
        """Tokens of which K,V come beyond the process's own part; their gradients go back."""
        self._store = StoredKV(shape, plan, self._bytes, process, rules.device_type)
        self._levels = Levels(plan.tiers)

    def run(self) -> tuple[MemoryCurve, PlanTraffic]:
        self._start()
        device = np.zeros((len(self._actions), len(PARTS)))
        lower = np.zeros((len(self._actions), 2))
        moved = np.zeros((1 + len(self._actions), 4, len(KINDS)))
        moves = self._plan.tiers != ON_DEVICE
        for i, (action, what) in enumerate(zip(self._actions, self._passes, strict=True)):
            self._begin(action, what)
            device[i], lower[i] = self._levels.now(self._store.level)
            if moves:
                moved[i + 1] = self._levels.moved
                moved[i + 1, :, :2] = self._store.level.moved()
            self._end(action, i)
        whole = np.rint(lower).astype(np.int64)
        curve = MemoryCurve(np.rint(device).astype(np.int64), whole[:, 0], whole[:, 1])
        return curve, PlanTraffic(self._plan.tiers, *np.diff(moved, axis=0).swapaxes(0, 1))

    def _start(self) -> None:
        rules, plan = self._rules, self._plan
        # ranks that share one stage share all of theirs, so the first one tells
        firsts = (next((a for a in acts if isinstance(a, Forward)), None) for acts in plan.actions)
        alike = sum(first is not None and first.stage in self._held for first in firsts)
        group = max(1, alike) * plan.sp_size * rules.training.replicas
        state = rules.training.state_bytes(rules.shape, plan.stages, self._held, group)
        self._levels.add("weights", state.weights)
        self._levels.add("gradients", state.gradients)
        self._levels.add("optimizer", state.optimizer)
        self._levels.add("buffers", rules.overhead_bytes)
        if not any(isinstance(action, Unshard) for action in self._actions):
            gathered = rules.training.gathered_bytes(rules.shape, plan.stages, self._held, group)
            self._levels.add("buffers", gathered)

    def _begin(self, action: Action, what: Pass) -> None:
        """Allocate what the action makes and keeps, and what only lives while it runs."""
        match action:
            case Forward() | Recompute() | RebuildKV() | Backward():
                self._compute(action, what)
            case Recv(payload, chunk, stage):
                message = self._tokens[chunk] * self._bytes[stage].message
                arrives = payload == "activation"
                part: Part = "activations" if arrives else "buffers"
                self._levels.hold("input", chunk, stage + arrives, part, message)
            case Unshard(stage):
                parameters = self._rules.training.held_parameters(
                    self._rules.shape, self._plan.stages, frozenset((stage,))
                )
                training = self._rules.training
                whole = parameters * training.compute_bytes / training.tp_size
                self._levels.hold("unsharded", 0, stage, "weights", whole)

    def _compute(self, action: Forward | Recompute | RebuildKV | Backward, what: Pass) -> None:
        chunk, stage = action.chunk, action.stage
        tokens, cell, tiers = self._tokens[chunk], self._bytes[stage], self._plan.tiers
        if isinstance(action, Forward):
            self._deliver(chunk, stage)
        if what.computes == "nothing":
            return
        gathered = self._gathered[chunk] * cell.kv_layer
        self._levels.pass_by("buffers", tokens * cell.working + gathered)
        if what.loss:
            backward = what.computes == "backward"
            self._levels.pass_by("logits", self._loss(chunk, cell, backward=backward))
        if what.writes_kv:
            self._store.write(chunk, stage)
        self._read(chunk, stage, what)
        remembered = tokens * what.remembers * cell.attention
        if what.computes == "graph":
            self._graph(action, what)
        elif what.computes == "backward":
            self._backward(chunk, stage, what)
        else:
            if stage and tiers.inputs != "device":
                self._levels.pass_by("activations", tokens * cell.message)
            if tiers.attention != "device" and (what.remembers or what.remembered):
                self._levels.pass_by("activations", tokens * cell.attention)
        if remembered:
            self._levels.move("attention", remembered, writes=True, operations=2 * what.remembers)
            self._levels.hold("attention", chunk, stage, "activations", remembered)

    def _read(self, chunk: int, stage: int, what: Pass) -> None:
        """What comes from lower tiers, K,V and their gradients in the Backward apart."""
        tokens, cell = self._tokens[chunk], self._bytes[stage]
        height = self._plan.stages[stage]
        stop = {"backward": what.recompute_layers, "to last kv": height - 1}
        layers = range(what.remembered, stop.get(what.computes, height))
        if layers or what.computes == "backward":
            self._store.read(chunk, stage, layers)
            self._levels.pass_by("kv", self._store.buffers(chunk, stage)[0])
        if what.computes != "backward":
            if stage:
                self._levels.move("inputs", tokens * cell.message, writes=False)
            known = what.remembered
            self._levels.move(
                "attention", tokens * known * cell.attention, writes=False, operations=2 * known
            )

    def _deliver(self, chunk: int, stage: int) -> None:
        """The cell's own input, if it comes from nowhere else, and its output."""
        tokens, cell = self._tokens[chunk], self._bytes[stage]
        if stage == 0:
            self._levels.hold("ids", chunk, 0, "activations", tokens * cell.input)
        elif ("input", chunk, stage) not in self._levels.held:
            self._levels.hold("input", chunk, stage, "activations", tokens * cell.message)
        if stage < len(self._plan.stages) - 1:
            part: Part = "activations" if stage + 1 in self._held else "buffers"
            self._levels.hold("input", chunk, stage + 1, part, tokens * cell.message)
            self._levels.move("inputs", tokens * cell.message, writes=True)
            if self._plan.tiers.inputs != "device":
                self._levels.pass_by("buffers", tokens * cell.message)

    def _graph(self, action: Action, what: Pass) -> None:
        assert isinstance(action, (Forward, Recompute))
        chunk, stage = action.chunk, action.stage
        tokens, cell, tiers = self._tokens[chunk], self._bytes[stage], self._plan.tiers
        height, gathered = self._plan.stages[stage], self._gathered[chunk] * cell.kv_layer
        num_bytes = tokens * cell.graph(what.recompute_layers)
        num_bytes += gathered * (height - what.recompute_layers)
        if isinstance(action, Forward):
            self._levels.hold("graph", chunk, stage, "activations", num_bytes)
            self._levels.move("graphs", num_bytes, writes=True, operations=height)
            if tiers.graphs != "device":
                self._levels.pass_by("activations", tokens * max(cell.graph_layers) + gathered)
        else:
            if tiers.attention == "device":
                # the graph is made of what was remembered of attention, no second copy
                num_bytes -= tokens * what.remembered * cell.attention
            self._levels.hold("graph again", chunk, stage, "activations", num_bytes)
        if stage and tiers.inputs != "device":
            self._levels.hold("leaf", chunk, stage, "activations", tokens * cell.message)

    def _backward(self, chunk: int, stage: int, what: Pass) -> None:
        tokens, cell, levels = self._tokens[chunk], self._bytes[stage], self._levels
        height, message = self._plan.stages[stage], tokens * cell.message
        self._store.read(chunk, stage, range(height))
        self._store.send_back(chunk, stage)
        levels.pass_by("kv_gradients", self._store.buffers(chunk, stage)[1])
        levels.pass_by("buffers", message)
        graph = levels.held.get(("graph", chunk, stage))
        if graph is not None:
            levels.move("graphs", graph[2], writes=False, operations=height)
        is_lower = graph is not None and self._plan.tiers.graphs != "device"
        if what.recompute_layers or is_lower:
            gathered = self._gathered[chunk] * cell.kv_layer
            levels.pass_by("activations", tokens * max(cell.graph_layers) + gathered)
        if stage < len(self._plan.stages) - 1:
            levels.move("inputs", message, writes=False)
        if stage > self._plan.frozen_stages:
            levels.move("inputs", message, writes=True)
            if ("input", chunk, stage) in levels.held:
                # autograd's gradient, until it is copied over the input
                levels.pass_by("buffers", message)
            else:
                levels.hold("input", chunk, stage, "buffers", message)

    def _end(self, action: Action, index: int) -> None:
        """Free what ends with the action."""
        kv_dead, inputs_dead = (frees[index] for frees in self._frees)
        for chunk, stage in inputs_dead:
            num_bytes = self._levels.let_go("input", chunk, stage)
            if ("graph", chunk, stage) in self._levels.held and self._plan.tiers.inputs == "device":
                # nobody reads it again, but it is the leaf of a graph
                self._levels.hold("leaf", chunk, stage, "activations", num_bytes)
        for chunk, stage in kv_dead:
            self._store.free(chunk, stage)
        match action:
            case Backward(chunk, stage):
                for name in ("graph", "graph again", "attention", "ids", "leaf"):
                    self._levels.let_go(name, chunk, stage)
                self._levels.let_go("input", chunk, stage + 1)  # by now the gradient of the output
                gradient = self._levels.let_go("input", chunk, stage)
                if gradient and stage > self._plan.frozen_stages:
                    self._levels.hold("input", chunk, stage, "buffers", gradient)
            case Forward(chunk, 0) | RebuildKV(chunk, 0) if index == self._last_use.get(chunk):
                self._levels.let_go("ids", chunk, 0)
            case Send(payload, chunk, stage):
                self._levels.let_go("input", chunk, stage + (payload == "activation"))
            case Reshard(stage):
                self._levels.let_go("unsharded", 0, stage)

    def _loss(self, chunk: int, cell: StageBytes, *, backward: bool) -> float:
        """Bytes of a tile's logits, with its gradient of the head."""
        tokens = min(self._tokens[chunk], self._rules.tile_tokens or self._tokens[chunk])
        logits = cell.logit * self._rules.shape.vocab_size * tokens
        return logits + (cell.head_gradient if backward else 0.0)
