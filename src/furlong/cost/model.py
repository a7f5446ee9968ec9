"""CostModel: seconds and bytes of a plan's actions, from model shape, machine and training setup.

    model = CostModel(model_shape("Qwen2.5-7B"), Machine.named("H100"))
    costs = model.costs(plan)               # the simulator's ActionCosts
    check(plan, model.memory())             # the checker's Memory

`plan.passes` says what each action computes.

Collectives overlap with computation: they only add the time by which they take longer. On a CPU
nothing overlaps.

Under ZeRO-3 collectives overlap with each pass. Otherwise the gradients of a stage's layers are
reduced during the stage's last Backward, each layer's as soon as the layer's backward is over. The
gradients of embedding and head are complete only at the end, so that their reduction overlaps with
nothing. Weights are gathered during the stage's first Forward, unless an Unshard gathers them:
before the Forward or, in this runtime, layer by layer during other computation (`simulate.clock`).

For this overlap, this runtime relies on FSDP2 (set_requires_gradient_sync in the last backward;
`unshard(async_op=True)`). Other frameworks overlap no more than that: Megatron-Core's
--overlap-grad-reduce and --overlap-param-gather reduce and gather bucket by bucket in the last and
the first micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from furlong.cost.machine import Machine
from furlong.cost.memory import PlanMemory
from furlong.cost.seconds import (
    HEADS,
    Array,
    ChunkTable,
    Hidden,
    PassPart,
    StageSeconds,
    cell_parts,
    chunk_table,
    pass_parts,
)
from furlong.cost.shape import LayerShape, ModelShape
from furlong.cost.training import Training
from furlong.errors import ConfigError
from furlong.plan.passes import passes
from furlong.plan.plan import (
    COMPUTING,
    ON_DEVICE,
    TARGETS,
    Action,
    Backward,
    Chunk,
    ChunkPlan,
    Computing,
    Forward,
    Layout,
    OffloadTarget,
    Reduce,
    Send,
    Unshard,
    first_device,
)

_CPU_KERNEL_BYTES = 3 * 2**26
"""Bytes that oneDNN caches in kernels for 16-bit matrix products of 64 shapes on a CPU: 55 MiB
measured for layers of 256 by 1,024, some 130 MiB for 896 by 4,864."""


@dataclass(frozen=True)
class CostModel:
    shape: ModelShape
    hardware: Machine
    training: Training = field(default_factory=Training)
    _known: dict[tuple[Any, ...], StageSeconds] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    @property
    def device_type(self) -> str:
        return self.hardware.device_type

    def calibrated(self, dtype: str) -> CostModel:
        """Return this cost model on the calibrated machine (`Machine.calibrated`)."""
        return replace(self, hardware=self.hardware.calibrated(dtype))

    def costs(self, plan: ChunkPlan, *, free: Collection[Hidden] = ()) -> PlanCosts:
        """Return the seconds of each action of `plan`. Waits of the kinds in `free` ("all-to-all",
        "gathers", "streams") are counted as taking no time. Costs with and without `free` differ by
        the seconds that actions spend in these waits."""
        return PlanCosts(self, plan, free)

    def cell_seconds(
        self,
        chunks: Sequence[Chunk],
        stages: tuple[int, ...],
        *,
        sp_size: int = 1,
        recompute_layers: Sequence[int] = (),
        free: Collection[Hidden] = (),
    ) -> Array:
        """Return (stages, C, 2): seconds of the forward and the backward of each chunk at each
        stage of a pipeline, with the first `recompute_layers[stage]` layers checkpointed."""
        table = chunk_table(chunks, self.shape, sp_size, self.hardware.tile_tokens)
        layout = Layout(sp=sp_size, pp=len(stages))
        seconds = np.zeros((len(stages), len(chunks), 2))
        for stage, layers in enumerate(recompute_layers or [0] * len(stages)):
            forward, backward = cell_parts(stages, stage, layers)
            own = self.stage_seconds(stages, stage, layout=layout, ranks=(stage,), free=free)
            of_parts = own.pass_seconds(forward + backward, table).max(axis=1)
            seconds[stage, :, 0] = of_parts[: len(forward)].sum(axis=0)
            seconds[stage, :, 1] = of_parts[len(forward) :].sum(axis=0)
        return seconds

    def stage_seconds(
        self,
        stages: tuple[int, ...],
        stage: int,
        *,
        layout: Layout,
        ranks: tuple[int, ...],
        kv: OffloadTarget = "none",
        free: Collection[Hidden] = (),
        unsharded: bool = False,
    ) -> StageSeconds:
        """Return the `StageSeconds` of a stage; the arguments are described there. `layout` and the
        `ranks` that hold the stage are those of the plan. Replicas that the plan does not list
        (`Training.replicas`) are added to both."""
        key = stages, stage, layout, ranks, kv, frozenset(free), unsharded
        if key not in self._known:
            dp, per_replica = self.training.replicas, layout.dp * layout.pp
            self._known[key] = StageSeconds(
                self.shape, self.hardware, self.training, stages, stage,
                layout=replace(layout, dp=layout.dp * dp),
                ranks=[more * per_replica + rank for more in range(dp) for rank in ranks],
                kv=kv, free=free, unsharded=unsharded,
            )  # fmt: skip
        return self._known[key]

    def sequence_seconds(self, seq_lens: Sequence[int]) -> list[float]:
        """Return the seconds of forward and backward of each whole sequence on one device, at the
        best efficiency of its kernels. Planners distribute sequences over replicas by these
        seconds."""
        return self._at_best((self.shape.num_layers,), 0, seq_lens)

    def layer_seconds(self, mean_keys: float) -> list[float]:
        """Return the seconds of each layer (the last one with the head), computed as in
        `sequence_seconds`, for a sequence whose tokens attend to `mean_keys` keys on average.
        Planners divide layers into stages by these seconds."""
        layers, seq_len = self.shape.layers, max(1, round(2 * mean_keys) - 1)
        stages, known = (1,) * len(layers), dict[tuple[LayerShape, bool], float]()
        for i, layer in enumerate(layers):
            kind = layer, i == len(layers) - 1
            if kind not in known:
                (known[kind],) = self._at_best(stages, i, [seq_len])
        return [known[layer, i == len(layers) - 1] for i, layer in enumerate(layers)]

    def _at_best(self, stages: tuple[int, ...], stage: int, seq_lens: Sequence[int]) -> list[float]:
        own = self.stage_seconds(stages, stage, layout=Layout(), ranks=(0,))
        return own.sequence_seconds(sum(cell_parts(stages, stage), ()), seq_lens)

    def memory(self, budget_bytes: int | None = None) -> PlanMemory:
        """Return the memory model for plans. The default budget is the machine's."""
        budget = self.hardware.budget_bytes if budget_bytes is None else budget_bytes
        machine = self.hardware
        kernels = self.device_type == "cpu" and self.training.compute_bytes == 2
        shape, training = self.shape, self.training
        made = 0  # parameters of temporary weights: dequantized, or experts merged with adapters
        if training.packed_bytes is not None:
            made = shape.hidden_size * max(shape.q_size, *(n.width for n in shape.layers))
        if training.lora is not None:
            bare = [
                sum(count for _, _, kind, count in layer if kind == "bare")
                for layer in training.lora.adapted(shape)
            ]
            made += sum(bare) + 2 * max(bare)  # also one layer's delta and its gradient
            if training.lora.new_tokens:  # peft copies the weight to put the trained rows into it
                made += shape.embedding_parameters
        return PlanMemory(
            self.shape, self.training, budget,
            activation_factor=machine.activation_factor,
            heap_blocks=machine.heap_blocks, heap_share=machine.heap_share,
            overhead_bytes=made * training.compute_bytes + (_CPU_KERNEL_BYTES if kernels else 0),
            device_type=self.device_type,
        )  # fmt: skip


class PlanCosts:
    """Seconds of one plan's actions; implements the simulator's ActionCosts.

    Ranks are numbered as in the plan. Devices are numbered as the processes of a run
    (`first_device`); consecutive devices share a node.
    """

    def __init__(self, model: CostModel, plan: ChunkPlan, free: Collection[Hidden] = ()) -> None:
        training = model.training
        self._model = model
        self._plan = plan
        self._parts: dict[tuple[type[Action], int, int], tuple[PassPart, ...]] = {}
        self._firsts: dict[tuple[int, int], Computing] = {}
        """(stage, rank) -> the first Forward."""
        self._lasts: dict[tuple[int, int], Computing] = {}
        """(stage, rank) -> the last Backward."""
        self._unsharded: set[int] = set()
        for rank, actions in enumerate(plan.actions):
            for action, what in zip(actions, passes(plan, rank), strict=True):
                if isinstance(action, COMPUTING):
                    found = pass_parts(what, plan.stages[action.stage])
                    self._parts[type(action), action.chunk, action.stage] = found
                if isinstance(action, Forward):
                    self._firsts.setdefault((action.stage, rank), action)
                elif isinstance(action, Backward):
                    self._lasts[action.stage, rank] = action
                elif isinstance(action, Unshard):
                    self._unsharded.add(action.stage)
        dp = max(1, len(plan.holders[0]))  # the first stage of each replica is on one rank
        pp = len(plan.actions) // dp
        layout = Layout(dp, plan.sp_size, pp)
        self._layout = replace(layout, dp=dp * training.replicas)
        """Layout of all devices, including replicas that the plan does not list."""
        shape, tile_tokens = model.shape, model.hardware.tile_tokens
        self.table = chunk_table(plan.chunks, shape, plan.sp_size, tile_tokens, plan.position)
        self._stages = [
            model.stage_seconds(
                plan.stages, stage, layout=layout, ranks=plan.holders[stage] or (0,),
                kv=plan.offload.kv, free=free, unsharded=stage in self._unsharded,
            )
            for stage in range(len(plan.stages))
        ]  # fmt: skip
        self._front_s: dict[int, float] = {}
        """A rank's first stage -> seconds of gathering the embedding, during which the rank waits,
        and of gathering its other weights outside the layers, which happens once per step and is
        divided over the stage's Unshards. This runtime only; so are `_head_s` and `_ends_s`."""
        self._head_s: dict[int, float] = {}
        """A rank's last stage -> seconds of gathering the head, after the layers."""
        self._ends_s: dict[int, float] = defaultdict(float)
        """Stage -> seconds of reducing gradients of embedding and head, after those of layers."""
        for held in filter(None, set(plan.held)) if training.gathers else ():
            own = training.weights(shape, plan.stages, frozenset(held))
            first, last = self._stages[held[0]], self._stages[held[-1]]
            beside, embedding, head = own.groups
            times = max(1, plan.actions[plan.held.index(held)].count(Unshard(held[0])))
            beside_s, embedding_s, head_s = (
                stage.gather_s(count) if count else 0.0
                for stage, count in ((first, beside), (first, embedding), (last, head))
            )
            self._front_s[held[0]] = embedding_s + beside_s / times
            self._head_s[held[-1]] = head_s
            of_head = own.ends_trained[1] if head else 0
            for stage, of_ends in ((0, own.beside_trained - of_head), (-1, of_head)):
                if of_ends:
                    self._ends_s[held[stage]] += self._stages[held[stage]].sum_s(of_ends)
        firsts: dict[tuple[Any, ...], int] = {}
        self._alike = [firsts.setdefault(own.kind, i) for i, own in enumerate(self._stages)]
        """[stage] -> the first stage with equal times, whose results are reused."""
        each = zip(plan.holders, self._stages, strict=True)
        if not plan.regathers and any(len(own) > 1 and s.passes_gather for own, s in each):
            raise ConfigError(
                given="a plan whose replicas pass their chunks independently of each other",
                required="replicas in lockstep: weights are gathered with every pass, from all",
                source="the plan, and ZeRO-3",
                change="plan for ZeRO-3, or shard no more than optimizer and gradients (ZeRO-2)",
            )
        self._parts_s: dict[tuple[tuple[PassPart, ...], int], list[float]] = {}
        self._copies: dict[int, dict[tuple[type[Action], int, int], float]] = {}

    def compute_s(self, action: Action, rank: int) -> float:
        """Return the seconds for which `action` keeps the rank's devices busy; 0 for messages."""
        if isinstance(action, COMPUTING):
            return self._seconds(self.parts(action), action.stage)[action.chunk]
        match action:
            case Unshard(stage) if self._model.training.gathers:
                gathers_s = self._stages[stage].layer_gathers_s + self._head_s.get(stage, 0.0)
                return self._before_s(stage) + gathers_s
            case Unshard(stage):
                return self.unshard_s(stage)
            case Reduce(stage):
                return self._reduce_at_end_s(stage)
            case _:
                return 0.0

    def gathers_s(self, action: Action, rank: int) -> float:
        """Return the seconds for which an action's gathers of weights occupy the links."""
        if isinstance(action, Unshard):
            return self.compute_s(action, rank)
        if not isinstance(action, COMPUTING) or not self.parts(action):
            return 0.0
        costs = self._stages[action.stage]
        return costs.layer_gathers_s if costs.passes_gather else 0.0

    def link_s(self, action: Reduce, rank: int) -> float:
        """Return the seconds for which a Reduce occupies the link, including the part of it that
        runs during the last Backward."""
        of_layers_s, late_s = self._reduces_s(action.stage)
        return late_s if self._stages[action.stage].passes_gather else of_layers_s + late_s

    def blocking_s(self, action: Unshard | Reduce, rank: int) -> float:
        """Return the seconds at the start of a collective in which its ranks compute nothing.
        Without overlap (on a CPU) these are all seconds of the collective. On a GPU a Reduce does
        not block. An Unshard blocks while it fetches the weights that are needed before the first
        layer runs."""
        if not self._hides:
            return self.compute_s(action, rank)
        return self._before_s(action.stage) if isinstance(action, Unshard) else 0.0

    def _before_s(self, stage: int) -> float:
        """Return the seconds that FSDP2 takes before a stage's first layer can run. FSDP2 copies
        the stage's weights from CPU memory, if they are offloaded (in the stream of the passes),
        and gathers those weights that are used before the layers, such as the embedding."""
        return self._stages[stage].brought_s + self._front_s.get(stage, 0.0)

    def head_s(self, action: Unshard, rank: int) -> float:
        """Return the seconds in which an Unshard gathers the head, after the layers."""
        return self._head_s.get(action.stage, 0.0)

    @property
    def _hides(self) -> bool:
        """Whether collectives overlap with computation."""
        return self._model.device_type != "cpu" and self._model.training.overlaps

    def copy_s(self, action: Action, rank: int) -> float:
        """Return the seconds of the copies of offloaded tensors that run during `action`. Copies
        overlap if they use different memories or directions. Waits inside the action's layers (for
        a segment of K,V before attention) are in `compute_s`."""
        if self._plan.offload == ON_DEVICE or not isinstance(action, COMPUTING):
            return 0.0
        if rank not in self._copies:
            self._copies[rank] = self._copies_of(rank)
        return self._copies[rank].get((type(action), action.chunk, action.stage), 0.0)

    def _copies_of(self, rank: int) -> dict[tuple[type[Action], int, int], float]:
        """Return (type of action, chunk, stage) -> seconds of the copies of offloaded tensors
        during the action (see `copy_s`), for all computing actions of a rank."""
        links = self._model.hardware.links
        traffic = self._model.memory().curve(self._plan, rank).traffic
        slowest = np.zeros(len(self._plan.actions[rank]))
        for own, link in ((traffic.of(target), links.to(target)) for target in TARGETS):
            for operations, num_bytes in (
                (traffic.num_reads, traffic.read), (traffic.num_writes, traffic.written),
            ):  # fmt: skip
                seconds = operations[:, own].sum(axis=1) * link.latency_s
                seconds += num_bytes[:, own].sum(axis=1) / link.bytes_per_s
                slowest = np.maximum(slowest, seconds)
        return {
            (type(action), action.chunk, action.stage): seconds
            for action, seconds in zip(self._plan.actions[rank], slowest.tolist(), strict=True)
            if isinstance(action, COMPUTING)
        }

    def transfer_s(self, action: Send, rank: int) -> float:
        """Return the seconds of a message: a chunk's hidden states, or their gradient. Each process
        of the sending rank sends its part to its counterpart in the receiving rank."""
        model = self._model
        tokens = float(self.table.tokens[:, action.chunk].max())
        width = model.shape.hidden_size * model.training.compute_bytes
        devices = first_device(rank, self._layout), first_device(action.peer, self._layout)
        return model.hardware.links.p2p_s(tokens * width, *devices)

    def unshard_s(self, stage: int) -> float:
        """Return the seconds of the all-gather of a stage's weights."""
        return self._stages[stage].unshard_s

    def reduce_s(self, stage: int) -> float:
        """Return the seconds of reducing the gradients of a stage's trained weights."""
        return self._stages[stage].reduce_s

    def _reduce_at_end_s(self, stage: int) -> float:
        """Return the seconds of a Reduce that the last Backward does not hide.

        If each pass gathers weights (ZeRO-3), the backwards have already reduced all gradients, and
        the result is 0. In this runtime embedding and head are still gathered and reduced, and the
        gradients of layers are summed between sharding groups that each hold all weights (HSDP):
        the result is then the seconds of both.

        Under ZeRO-1 and 2 without Unshards, updated weights are gathered after the Reduce. The
        seconds of this gather that the first Forward of the next step does not hide are included.
        """
        training, costs, gathered_s = self._model.training, self._stages[stage], 0.0
        of_layers_s, late_s = self._reduces_s(stage)
        if costs.passes_gather:
            ends_s = self._front_s.get(stage, 0.0) + self._head_s.get(stage, 0.0)
            return ends_s + late_s + costs.between_s if training.gathers else 0.0
        if training.zero_stage in (1, 2) and stage not in self._unsharded:
            gathered_s = max(0.0, costs.trained_gather_s - self._layers_s(self._firsts, stage))
        # nothing hides the reduction of the layer whose backward comes last
        before_last = 1 - 1 / self._plan.stages[stage]
        of_layers_s -= before_last * min(of_layers_s, self._layers_s(self._lasts, stage))
        return late_s + of_layers_s + gathered_s

    def _reduces_s(self, stage: int) -> tuple[float, float]:
        """Return the seconds of reducing the gradients of a stage's layers, and of reducing the
        gradients that are complete only at the end (embedding and head)."""
        costs = self._stages[stage]
        of_layers_s = costs.reduce_s * (1 - costs.late_share)
        gathers = self._model.training.gathers
        return of_layers_s, self._ends_s[stage] if gathers else costs.reduce_s - of_layers_s

    def _layers_s(self, passes: Mapping[tuple[int, int], Computing], stage: int) -> float:
        """Return the seconds for which a pass computes in a stage's layers, on the slowest rank.
        Collectives may overlap with these seconds; if nothing overlaps, return 0. `passes`: (stage,
        rank) -> the action of the pass."""
        if not self._hides:
            return 0.0
        seconds = [0.0]
        for rank in self._plan.holders[stage]:
            if (action := passes.get((stage, rank))) is not None:
                parts = tuple(part for part in self.parts(action) if part.work not in HEADS)
                seconds.append(self._seconds(parts, stage)[action.chunk])
        return max(seconds)

    def parts(self, action: Computing) -> tuple[PassPart, ...]:
        """Return the kinds of work of which an action's pass consists."""
        return self._parts[type(action), action.chunk, action.stage]

    def _seconds(self, parts: tuple[PassPart, ...], stage: int) -> list[float]:
        """Return the seconds of a pass through a stage for each chunk. They are a sum over `parts`,
        in which each part takes the time of its slowest process."""
        key = parts, self._alike[stage]
        if key not in self._parts_s:
            seconds = np.zeros(len(self._plan.chunks))
            for part in parts:
                seconds += self.process_seconds((part,), key[1], self.table)[0].max(axis=0)
            self._parts_s[key] = seconds.tolist()
        return self._parts_s[key]

    def process_seconds(self, parts: tuple[PassPart, ...], stage: int, table: ChunkTable) -> Array:
        """Return (P, S, C): seconds of P parts of passes on S processes, for C chunks."""
        return self._stages[stage].pass_seconds(parts, table)


def update_s(model: CostModel, plan: ChunkPlan) -> float:
    """Return the seconds of the optimizer's step after a plan, on the device with most trained
    parameters; 0 if the plan has no Backward. Under ZeRO the update is divided over devices.
    Weights in CPU memory are updated by the node's CPUs, which all devices of the node share."""
    if not plan.trained:
        return 0.0
    training = model.training
    weights = [training.weights(model.shape, plan.stages, frozenset(own)) for own in plan.held]
    trained = max(own.trained for own in weights)
    machine, num_devices = model.hardware, len(plan.holders[0]) * plan.sp_size * training.replicas
    shards = max(1, num_devices // training.replicate) if training.zero_stage else 1
    rate = machine.optimizer_parameters_per_s
    if training.offload_weights and machine.device_type != "cpu":
        rate = machine.host_parameters_per_s / min(num_devices, machine.links.devices_per_node)
    return trained / (shards * rate)
