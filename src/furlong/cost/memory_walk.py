"""One process of one rank walks its actions and adds up bytes.

Follows the executor: a graph lives from its Forward or Recompute to its Backward; a stage input
from its arrival to the cell's end; what is at work in one layer, and a tile of logits, only while
an action runs. For K,V see `stored_kv`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from furlong.cost.activations import Activations
from furlong.cost.cells import StageBytes, stage_bytes
from furlong.cost.shape import ModelShape
from furlong.cost.stored_kv import StoredKV, token_share
from furlong.cost.training import Training
from furlong.plan.liveness import kv_frees
from furlong.plan.values import (
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

Part = Literal[
    "weights", "gradients", "optimizer", "activations", "kv", "kv_gradients", "logits", "buffers"
]
PARTS: tuple[Part, ...] = get_args(Part)
_INDEX = {part: i for i, part in enumerate(PARTS)}
MAX_TILE_LOGITS = 2**27
"""Of a tile of the loss on a CUDA device, as `ops.loss` cuts it; 2**22 on a CPU."""
_MIN_TILE_TOKENS = 64


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes of one rank while each of its actions runs."""

    device: NDArray[np.int64]
    """(actions, parts): the parts at the moment of the action when their sum is highest."""
    host: NDArray[np.int64]
    """(actions,): K,V and their gradients in the host's memory, or on disk."""

    @property
    def device_bytes(self) -> list[int]:
        totals: list[int] = self.device.sum(axis=1).tolist()
        return totals

    @property
    def peak(self) -> dict[Part, int]:
        """The parts at the action whose sum is highest."""
        if not len(self.device):
            return dict.fromkeys(PARTS, 0)
        at = int(self.device.sum(axis=1).argmax())
        return {part: int(self.device[at, i]) for i, part in enumerate(PARTS)}


@dataclass(frozen=True)
class MemoryRules:
    """What a walk counts; the fields are those of `memory.PlanMemory`."""

    shape: ModelShape
    training: Training
    activations: Activations | None
    activation_factor: float
    overhead_bytes: int
    max_tile_logits: int | None
    """None: the loss holds the logits of a whole chunk."""


def walk(rules: MemoryRules, plan: ChunkPlan, rank: int, process: int) -> MemoryCurve:
    """The curve of process `process` of the sp group that obeys the list of `rank`."""
    return _Walk(rules, plan, rank, process).run()


class _Walk:
    """One sp process of one rank, action by action."""

    def __init__(self, rules: MemoryRules, plan: ChunkPlan, rank: int, process: int) -> None:
        self._rules, self._plan = rules, plan
        self._actions = plan.actions[rank]
        self._frees = kv_frees(plan, rank)
        shape, training = rules.shape, rules.training
        self._bytes: list[StageBytes] = [
            stage_bytes(
                shape, plan.stages, stage, training, rules.activations, rules.activation_factor
            )
            for stage in range(len(plan.stages))
        ]
        computed = [a for a in self._actions if isinstance(a, (Forward, Backward))]
        self._held = frozenset(action.stage for action in computed)
        self._trained = {(a.chunk, a.stage) for a in computed if isinstance(a, Backward)}
        self._keeps = {(a.chunk, a.stage): a for a in computed if isinstance(a, Forward)}
        rebuilt = {(a.chunk, a.stage) for a in self._actions if isinstance(a, RebuildKV)}
        self._needs_input = self._trained | rebuilt
        # of the rank's own chunks only: a plan may have a thousand ranks
        self._tokens = {
            index: sum(
                s.num_tokens * token_share(s, plan.sp_size, process)
                for s in plan.chunks[index].slices
            )
            for index in {a.chunk for a in self._actions if isinstance(a, Forward)}
        }
        self._store = StoredKV(shape, plan, self._bytes, self._held, process)
        self._level = [0.0] * len(PARTS)
        self._held_bytes: dict[tuple[str, int, int], tuple[Part, float]] = {}

    def run(self) -> MemoryCurve:
        self._start()
        on_device = self._plan.tiers.kv == "device"
        device = np.zeros((len(self._actions), len(PARTS)))
        host = np.zeros(len(self._actions))
        for i, (action, dead) in enumerate(zip(self._actions, self._frees, strict=True)):
            passing = self._begin(action)
            row = self._level.copy()
            for part, num_bytes in passing.items():
                row[_INDEX[part]] += num_bytes
            if on_device:
                row[_INDEX["kv"]] += self._store.kv_bytes
                row[_INDEX["kv_gradients"]] += self._store.gradient_bytes
            else:
                host[i] = self._store.kv_bytes + self._store.gradient_bytes
            device[i] = row
            self._end(action)
            for chunk, stage in dead:
                self._store.free(chunk, stage)
        return MemoryCurve(np.rint(device).astype(np.int64), np.rint(host).astype(np.int64))

    def _start(self) -> None:
        rules, plan = self._rules, self._plan
        # ranks that share one stage share all of theirs, so the first one tells
        firsts = (next((a for a in acts if isinstance(a, Forward)), None) for acts in plan.actions)
        alike = sum(first is not None and first.stage in self._held for first in firsts)
        group = max(1, alike) * plan.sp_size * rules.training.replicas
        state = rules.training.state_bytes(rules.shape, plan.stages, self._held, group)
        self._add("weights", state.weights)
        self._add("gradients", state.gradients)
        self._add("optimizer", state.optimizer)
        self._add("buffers", rules.overhead_bytes)
        if not any(isinstance(action, Unshard) for action in self._actions):
            gathered = rules.training.gathered_bytes(rules.shape, plan.stages, self._held, group)
            self._add("buffers", gathered)
        kv, kv_gradients = self._store.device_buffers()
        self._add("kv", kv)
        self._add("kv_gradients", kv_gradients)

    def _begin(self, action: Action) -> dict[Part, float]:
        """Allocate what the action makes and keeps; returns what only lives while it runs."""
        match action:
            case Forward(chunk, stage, keep, layers):
                return self._forward(chunk, stage, keep, layers)
            case Recompute(chunk, stage, layers):
                graph = self._tokens[chunk] * self._bytes[stage].graph(layers)
                # the graph is made of what was remembered of attention, no second copy
                remembered = self._held_bytes.get(("attention", chunk, stage), ("", 0.0))[1]
                self._hold("graph", chunk, stage, "activations", graph - remembered)
                return {"buffers": self._tokens[chunk] * self._bytes[stage].working}
            case RebuildKV(chunk, stage):
                self._store.write(chunk, stage)
                return {"buffers": self._tokens[chunk] * self._bytes[stage].working}
            case Backward(chunk, stage):
                return self._backward(chunk, stage)
            case Recv(payload, chunk, stage):
                message = self._tokens[chunk] * self._bytes[stage].message
                reader = stage + 1 if payload == "activation" else stage - 1
                name = "input" if payload == "activation" else "gradient"
                part: Part = "activations" if payload == "activation" else "buffers"
                self._hold(name, chunk, reader, part, message)
            case Unshard(stage):
                parameters = self._rules.training.held_parameters(
                    self._rules.shape, self._plan.stages, frozenset((stage,))
                )
                training = self._rules.training
                whole = parameters * training.compute_bytes / training.tp_size
                self._hold("unsharded", 0, stage, "weights", whole)
        return {}

    def _forward(self, chunk: int, stage: int, keep: str, layers: int) -> dict[Part, float]:
        tokens, cell = self._tokens[chunk], self._bytes[stage]
        is_last = stage == len(self._plan.stages) - 1
        trained = (chunk, stage) in self._trained
        if stage == 0 or ("input", chunk, stage) not in self._held_bytes:
            self._hold("input", chunk, stage, "activations", tokens * cell.input)
        if self._plan.continues[chunk]:
            self._store.write(chunk, stage)
        passing: dict[Part, float] = {"buffers": tokens * cell.working}
        if keep == "all":
            self._hold("graph", chunk, stage, "activations", tokens * cell.graph(layers))
        elif is_last and trained and not self._plan.continues[chunk]:
            passing = {}
        elif keep == "attention" and trained:
            known = self._plan.stages[stage] - is_last
            self._hold("attention", chunk, stage, "activations", tokens * known * cell.attention)
        if is_last and not trained:
            passing["logits"] = self._logits(chunk, cell)
        if not is_last:
            self._hold("output", chunk, stage, "buffers", tokens * cell.message)
        return passing

    def _backward(self, chunk: int, stage: int) -> dict[Part, float]:
        tokens, cell = self._tokens[chunk], self._bytes[stage]
        self._store.send_back(chunk, stage)
        passing: dict[Part, float] = {"buffers": tokens * (cell.working + cell.message)}
        forward = self._keeps[chunk, stage]
        if forward.recompute_layers:
            passing["activations"] = tokens * cell.graph_layers[0]
        if stage == len(self._plan.stages) - 1:
            passing["logits"] = self._logits(chunk, cell)
        if stage:
            self._hold("gradient out", chunk, stage, "buffers", tokens * cell.message)
        return passing

    def _end(self, action: Action) -> None:
        """Free what ends with the action, K,V apart."""
        match action:
            case Backward(chunk, stage):
                for name in ("graph", "attention", "input", "gradient"):
                    self._let_go(name, chunk, stage)
                # within one rank the next reader takes the gradient over
                if stage and stage - 1 in self._held:
                    self._rename("gradient out", chunk, stage, "gradient", stage - 1)
            case Forward(chunk, stage):
                if (chunk, stage) not in self._needs_input:
                    self._let_go("input", chunk, stage)
                if stage + 1 in self._held:
                    self._rename("output", chunk, stage, "input", stage + 1)
            case RebuildKV(chunk, stage) if (chunk, stage) not in self._trained:
                self._let_go("input", chunk, stage)
            case Send(payload, chunk, stage):
                name = "output" if payload == "activation" else "gradient out"
                self._let_go(name, chunk, stage)
            case Reshard(stage):
                self._let_go("unsharded", 0, stage)

    def _logits(self, chunk: int, cell: StageBytes) -> float:
        vocab = self._rules.shape.vocab_size
        tokens = self._tokens[chunk]
        if self._rules.max_tile_logits is not None:
            tokens = min(tokens, max(_MIN_TILE_TOKENS, self._rules.max_tile_logits // vocab))
        return cell.logit * vocab * tokens

    def _add(self, part: Part, num_bytes: float) -> None:
        self._level[_INDEX[part]] += num_bytes

    def _hold(self, name: str, chunk: int, stage: int, part: Part, num_bytes: float) -> None:
        assert (name, chunk, stage) not in self._held_bytes, f"{name} of {chunk}.{stage} is there"
        self._held_bytes[name, chunk, stage] = part, num_bytes
        self._add(part, num_bytes)

    def _let_go(self, name: str, chunk: int, stage: int) -> None:
        part, num_bytes = self._held_bytes.pop((name, chunk, stage), ("buffers", 0.0))
        self._add(part, -num_bytes)

    def _rename(self, name: str, chunk: int, stage: int, new_name: str, new_stage: int) -> None:
        if (name, chunk, stage) in self._held_bytes:
            held = self._held_bytes[name, chunk, stage][1]
            part: Part = "activations" if new_name == "input" else "buffers"
            self._let_go(name, chunk, stage)
            self._hold(new_name, chunk, new_stage, part, held)
