"""One process of one rank walks its actions and adds up bytes.

Follows the executor, which obeys the plan's passes. A graph lives from its Forward or Recompute to
its Backward. The input of a cell behind the first stage lives where stage inputs do, from the pass
that delivers it; it dies with the pass that reads it last, or in its Backward becomes its own
gradient, which dies with the Backward of the stage before. For K,V see `stored_kv`.

What lives in a lower tier still has a working set on the device while an action runs: the input
that is read and the output on its way, one layer's attention outputs (from the Recompute to the
Backward all of the cell's, which its graph holds), one layer of a retained graph, blocks of K,V.
On a GPU the tier host has buffers there for all of a step, which blocks of K,V are a part of.
"""

from __future__ import annotations

import numpy as np

from furlong.cost.memory.curve import MemoryCurve
from furlong.cost.memory.levels import PARTS, Levels, Part
from furlong.cost.memory.rules import MemoryRules
from furlong.cost.memory.stored_kv import StoredKV
from furlong.cost.memory.stored_layers import gathered_tokens, token_share
from furlong.cost.memory.stored_states import StoredStates
from furlong.cost.memory.traffic import KINDS, PlanTraffic
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


def walk(
    rules: MemoryRules, plan: ChunkPlan, rank: int, process: int, overhead_bytes: float = 0.0
) -> tuple[MemoryCurve, PlanTraffic]:
    """Bytes of process `process` of the pool that obeys the list of `rank`; the overhead is there
    all through the step."""
    one = _Walk(rules, plan, rank, process)
    one.start(overhead_bytes)
    actions = plan.actions[rank]
    device, lower = np.zeros((len(actions), len(PARTS))), np.zeros((len(actions), 2))
    staged = np.zeros(len(actions))
    moved = np.zeros((1 + len(actions), 4, len(KINDS)))
    for i, (action, what) in enumerate(zip(actions, passes(plan, rank), strict=True)):
        one.begin(action, what)
        device[i], lower[i] = one.levels.now()
        staged[i] = one.levels.staged
        if plan.tiers != ON_DEVICE:
            moved[i + 1] = one.levels.moved
        one.end(action, i)
    staging = rules.staging_bytes(one.levels.largest["host"])
    device[:, PARTS.index("buffers")] += np.maximum(0, staging - staged)
    host, disk = np.rint(lower).astype(np.int64).T
    curve = MemoryCurve(np.rint(device).astype(np.int64), host, disk)
    return curve, PlanTraffic(plan.tiers, *np.diff(moved, axis=0).swapaxes(0, 1))


class _Walk:
    """Bytes that one process has in use, action by action."""

    def __init__(self, rules: MemoryRules, plan: ChunkPlan, rank: int, process: int) -> None:
        self._rules, self._plan, self._actions = rules, plan, plan.actions[rank]
        self._frees = kv_frees(plan, rank), input_frees(plan, rank)
        self._cells = [rules.cell(plan.stages, stage) for stage in range(len(plan.stages))]
        computed = [a for a in self._actions if isinstance(a, (Forward, Backward))]
        self._held = frozenset(action.stage for action in computed)
        trained = {a.chunk for a in computed if isinstance(a, Backward) and a.stage == 0}
        self._last_use = {
            action.chunk: index
            for index, action in enumerate(self._actions)
            if isinstance(action, (Forward, RebuildKV)) and action.chunk not in trained
            if action.stage == 0
        }
        """chunk without a Backward -> the action that reads its token ids last."""
        # of the rank's own chunks only: a plan may have a thousand ranks
        self._tokens = {
            index: 1.0
            if plan.chunks[index].is_dummy
            else sum(s.num_tokens * token_share(s, process) for s in plan.chunks[index].slices)
            for index in {a.chunk for a in self._actions if isinstance(a, Forward)}
        }
        self._exchanged = {
            index: sum(
                s.num_tokens * token_share(s, process)
                for s in plan.chunks[index].slices
                if s.place.size > 1
            )
            for index in self._tokens
        }
        """Tokens of the process's own part that travel, in each layer."""
        self._gathered = {
            index: sum(gathered_tokens(s, process, rules.shape) for s in plan.chunks[index].slices)
            for index in self._tokens
        }
        """Tokens of which K,V come beyond the process's own part; their gradients go back."""
        self.levels = Levels(plan.tiers)
        self._store = StoredKV(rules, plan, process, self.levels)
        self._states = StoredStates(rules, plan, process, self.levels)

    def start(self, overhead_bytes: float) -> None:
        """Bytes that are there before the first action, and stay."""
        plan, training = self._plan, self._rules.training.under(self._plan.regathers)
        # ranks that share one stage share all of theirs, so the first one tells
        firsts = (next((a for a in acts if isinstance(a, Forward)), None) for acts in plan.actions)
        alike = sum(first is not None and first.stage in self._held for first in firsts)
        group = max(1, alike) * plan.sp_size * training.replicas
        state = training.state_bytes(self._rules.shape, plan.stages, self._held, group)
        self.levels.add("weights", state.weights)
        trained = frozenset(a.stage for a in self._actions if isinstance(a, Backward))
        unreduced = training.unreduced_bytes(self._rules.shape, plan.stages, trained, group)
        self.levels.add("gradients", state.gradients + unreduced)
        self.levels.add("optimizer", state.optimizer)
        collective = training.collective_bytes(self._rules.shape, plan.stages, self._held, group)
        self.levels.add("buffers", overhead_bytes + collective + self._under_way())
        if not any(isinstance(action, Unshard) for action in self._actions):
            gathered = training.gathered_bytes(self._rules.shape, plan.stages, self._held, group)
            self.levels.add("buffers", gathered)

    def _under_way(self) -> float:
        """Bytes of messages beside those that an action reads or makes: from each neighbour one
        receive is posted ahead, and sends wait until the neighbour takes them, of activations as
        many as a stage may be ahead."""
        most: dict[tuple[type[Action], int], float] = {}
        for action in self._actions:
            if isinstance(action, (Send, Recv)):
                ahead = 1
                if isinstance(action, Send):
                    is_ahead = action.payload == "activation"
                    ahead = len(self._plan.stages) - action.stage if is_ahead else 2
                message = self._tokens[action.chunk] * self._cells[action.stage].message
                key = type(action), action.peer
                most[key] = max(most.get(key, 0.0), ahead * message)
        return sum(most.values())

    def begin(self, action: Action, what: Pass) -> None:
        """Allocate what the action makes and keeps, and what only lives while it runs."""
        match action:
            case Forward() | Recompute() | RebuildKV() | Backward():
                self._compute(action, what)
            case Recv(payload, chunk, stage):
                message = self._tokens[chunk] * self._cells[stage].message
                arrives = payload == "activation"
                part: Part = "activations" if arrives else "buffers"
                self.levels.hold("inputs", chunk, stage + arrives, part, message)
            case Unshard(stage) if self._rules.training.regathers:
                training, shape = self._rules.training, self._rules.shape
                own = training.held_parameters(shape, self._plan.stages, frozenset((stage,)))
                whole = own * training.compute_bytes / training.tp_size
                self.levels.hold("unsharded", 0, stage, "weights", whole)

    def _compute(self, action: Forward | Recompute | RebuildKV | Backward, what: Pass) -> None:
        chunk, stage, levels = action.chunk, action.stage, self.levels
        tokens, cell, tiers = self._tokens[chunk], self._cells[stage], self._plan.tiers
        if isinstance(action, Forward):
            self._deliver(chunk, stage)
        if what.computes == "nothing":
            return
        backward, message = what.computes == "backward", tokens * cell.message
        gathered = self._gathered[chunk] * cell.kv_layer
        exchanged = self._exchanged[chunk] * cell.exchange
        levels.pass_by("buffers", tokens * cell.working + gathered + exchanged)
        if what.loss:
            levels.pass_by("logits", self._rules.loss_bytes(cell, tokens, backward=backward))
        if what.writes_kv:
            self._store.write(chunk, stage)
            self._states.write(chunk, stage)
        height = self._plan.stages[stage]
        if backward:
            again = range(what.remembered, what.recompute_layers)
            self._store.read(chunk, stage, range(height), again)
            self._backward(chunk, stage, recomputes=what.recompute_layers > 0)
            return
        self._states.read(chunk, stage)
        layers = range(what.remembered, height - (what.computes == "to last kv"))
        if layers:
            self._store.read(chunk, stage, layers)
        if stage:
            levels.read("inputs", message)
        levels.read(
            "attention", tokens * cell.attention(range(what.remembered)), 2 * what.remembered
        )
        if what.computes == "graph":
            self._graph(action, what)
        else:
            if stage and tiers.inputs != "device":
                levels.pass_by("activations", message)
            if tiers.attention != "device" and (what.remembers or what.remembered):
                levels.pass_by("activations", tokens * cell.widest_attention)
        if remembered := tokens * cell.attention(range(what.remembers)):
            widest = tokens * cell.widest_attention
            levels.write("attention", remembered, 2 * what.remembers, widest)
            levels.hold("attention", chunk, stage, "activations", remembered)

    def _deliver(self, chunk: int, stage: int) -> None:
        """The cell's own input, if it comes from nowhere else, and its output."""
        tokens, cell, levels = self._tokens[chunk], self._cells[stage], self.levels
        message = tokens * cell.message
        if stage == 0:
            levels.hold("ids", chunk, 0, "activations", tokens * cell.input)
        elif ("inputs", chunk, stage) not in levels.held:
            levels.hold("inputs", chunk, stage, "activations", message)
        if stage < len(self._plan.stages) - 1:
            part: Part = "activations" if stage + 1 in self._held else "buffers"
            levels.hold("inputs", chunk, stage + 1, part, message)
            levels.write("inputs", message)
            if self._plan.tiers.inputs != "device":
                levels.pass_by("buffers", message)

    def _graph(self, action: Action, what: Pass) -> None:
        assert isinstance(action, (Forward, Recompute))
        chunk, stage, levels = action.chunk, action.stage, self.levels
        tokens, cell, tiers = self._tokens[chunk], self._cells[stage], self._plan.tiers
        height, gathered = self._plan.stages[stage], self._gathered[chunk] * cell.kv_layer
        num_bytes = tokens * cell.graph(what.recompute_layers)
        num_bytes += gathered * (height - what.recompute_layers)
        if isinstance(action, Forward):
            levels.hold("graphs", chunk, stage, "activations", num_bytes)
            levels.write("graphs", num_bytes, height, tokens * cell.widest_saved)
            if tiers.graphs != "device":
                levels.pass_by("activations", tokens * max(cell.graph_layers) + gathered)
        else:
            if tiers.attention == "device":
                # the graph is made of what was remembered of attention, no second copy
                num_bytes -= tokens * cell.attention(range(what.remembered))
            levels.hold("graph again", chunk, stage, "activations", num_bytes)
        if stage and tiers.inputs != "device":
            levels.hold("leaf", chunk, stage, "activations", tokens * cell.message)

    def _backward(self, chunk: int, stage: int, *, recomputes: bool) -> None:
        tokens, cell, levels = self._tokens[chunk], self._cells[stage], self.levels
        message = tokens * cell.message
        self._store.send_back(chunk, stage)
        self._states.send_back(chunk, stage)
        levels.pass_by("buffers", message)
        graph = levels.held.get(("graphs", chunk, stage))
        if graph is not None:
            levels.read("graphs", graph[2], self._plan.stages[stage])
        if recomputes or (graph is not None and self._plan.tiers.graphs != "device"):
            gathered = self._gathered[chunk] * cell.kv_layer
            levels.pass_by("activations", tokens * max(cell.graph_layers) + gathered)
        if stage < len(self._plan.stages) - 1:
            levels.read("inputs", message)
        if stage > self._plan.frozen_stages:
            levels.write("inputs", message)
            if ("inputs", chunk, stage) in levels.held:
                # autograd's gradient, until it is copied over the input
                levels.pass_by("buffers", message)
            else:
                levels.hold("inputs", chunk, stage, "buffers", message)

    def end(self, action: Action, index: int) -> None:
        """Free what ends with the action."""
        levels, (kv_dead, inputs_dead) = self.levels, (frees[index] for frees in self._frees)
        for chunk, stage in inputs_dead:
            num_bytes = levels.let_go("inputs", chunk, stage)
            if ("graphs", chunk, stage) in levels.held and self._plan.tiers.inputs == "device":
                # nobody reads it again, but it is the leaf of a graph
                levels.hold("leaf", chunk, stage, "activations", num_bytes)
        for chunk, stage in kv_dead:
            self._store.free(chunk, stage)
            self._states.free(chunk, stage)
        match action:
            case Backward(chunk, stage):
                for name in ("graphs", "graph again", "attention", "ids", "leaf"):
                    levels.let_go(name, chunk, stage)
                levels.let_go("inputs", chunk, stage + 1)  # by now the gradient of the output
                gradient = levels.let_go("inputs", chunk, stage)
                if gradient and stage > self._plan.frozen_stages:
                    levels.hold("inputs", chunk, stage, "buffers", gradient)
            case Forward(chunk, 0) | RebuildKV(chunk, 0) if index == self._last_use.get(chunk):
                levels.let_go("ids", chunk, 0)
            case Send(payload, chunk, stage):
                levels.let_go("inputs", chunk, stage + (payload == "activation"))
            case Reshard(stage):
                levels.let_go("unsharded", 0, stage)
