"""CostModel: seconds and bytes of a plan's actions, composed of shape, machine and training.

    model = CostModel(model_shape("Qwen2.5-7B"), Machine.named("H100"))
    costs = model.costs(plan)               # the simulator's ActionCosts
    check(plan, model.memory())             # the checker's Memory

Each action computes what `plan.passes` says.

Collectives hide behind the computation that they go with, and what does not fit behind it takes
time. Under ZeRO-3 that is every pass. Else it is a stage's last Backward for the gradients of its
layers, each of which is on its way as soon as that layer's backward is over, and its first Forward
for weights, unless an Unshard gathers them: before it or, in this runtime, layer by layer beside
what runs meanwhile (`simulate.clock`). This runtime has it of FSDP2 (set_requires_gradient_sync in
the last backward; `unshard(async_op=True)`); of other frameworks it is the best that they do:
Megatron-Core's --overlap-grad-reduce and --overlap-param-gather reduce and gather bucket by bucket
in the last and the first micro-batch. Gradients of the embedding and the head are complete at the
end only, and hide behind nothing. Nor does a CPU's process compute while it waits for others.
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
    parts_of,
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
"""Kernels that oneDNN keeps for 16-bit matrix products of 64 shapes on a CPU: 55 MiB measured for
layers of 256 by 1,024, some 130 MiB for 896 by 4,864."""


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
        """On the machine as it was measured in this dtype, if it was (`Machine.calibrated`)."""
        return replace(self, hardware=self.hardware.calibrated(dtype))

    def costs(self, plan: ChunkPlan, *, free: Collection[Hidden] = ()) -> PlanCosts:
        """Seconds of every action of `plan`. `free`: things that take no time, so that the
        difference tells how long actions wait for them."""
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
        """(stages, C, 2) seconds of a forward and of a backward of every chunk at every stage of a
        pipeline, with the first `recompute_layers` of each stage checkpointed."""
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
        """The seconds of one stage of a plan's replicas, which are on `ranks`; those of replicas
        that the plan does not list come on top of its `layout`."""
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
        """Seconds of a forward and a backward of each whole sequence through the whole model on one
        device with its kernels at their best, by which replicas are dealt sequences."""
        return self._at_best((self.shape.num_layers,), 0, seq_lens)

    def layer_seconds(self, mean_keys: float) -> list[float]:
        """Seconds as of `sequence_seconds` of each layer, those of the head with the last one's,
        for a sequence whose tokens attend `mean_keys` on average: stages are cut by them."""
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
        """Bytes of every action of any plan; the default budget is the device's."""
        budget = self.hardware.budget_bytes if budget_bytes is None else budget_bytes
        machine = self.hardware
        kernels = self.device_type == "cpu" and self.training.compute_bytes == 2
        shape, training = self.shape, self.training
        made = 0  # whole weights that a layer makes of codes, or of experts and their adapters
        if training.packed_bytes is not None:
            made = shape.hidden_size * max(shape.q_size, *(n.width for n in shape.layers))
        if training.lora is not None:
            bare = [
                sum(count for _, _, kind, count in layer if kind == "bare")
                for layer in training.lora.adapted(shape)
            ]
            made += sum(bare) + 2 * max(bare)  # and what one layer adds to them, and its gradient
        return PlanMemory(
            self.shape, self.training, budget,
            activation_factor=machine.activation_factor,
            heap_blocks=machine.heap_blocks, heap_share=machine.heap_share,
            overhead_bytes=made * training.compute_bytes + (_CPU_KERNEL_BYTES if kernels else 0),
            device_type=self.device_type,
        )  # fmt: skip


class PlanCosts:
    """Seconds of one plan's actions; implements the simulator's ActionCosts.

    Ranks are numbered as in the plan, devices as a run numbers its processes (`first_device`); a
    node is as many of these as the hardware has per node.
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
                    found = parts_of(what, plan.stages[action.stage])
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
        """That of all devices, those of replicas that the plan does not list among them."""
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
        """In this runtime by the first stage of a rank: seconds in which what the rank has in front
        of its layers is gathered, and waited for, and what it has beside them, once for a step."""
        self._head_s: dict[int, float] = {}
        """By the last stage of a rank: seconds in which its head is gathered, behind the layers."""
        self._ends_s: dict[int, float] = defaultdict(float)
        """By stage: seconds in which gradients of both are reduced, after those of its layers."""
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
        """The first stage of each one's kind."""
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
        """Seconds that `action` keeps the rank's devices busy; 0 for Send and Recv."""
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
        """Seconds of links in which an action gathers weights."""
        if isinstance(action, Unshard):
            return self.compute_s(action, rank)
        if not isinstance(action, COMPUTING) or not self.parts(action):
            return 0.0
        costs = self._stages[action.stage]
        return costs.layer_gathers_s if costs.passes_gather else 0.0

    def link_s(self, action: Reduce, rank: int) -> float:
        """Seconds for which a Reduce takes the link, those beside the last Backward among them."""
        of_layers_s, late_s = self._reduces_s(action.stage)
        return late_s if self._stages[action.stage].passes_gather else of_layers_s + late_s

    def blocking_s(self, action: Unshard | Reduce, rank: int) -> float:
        """Seconds of a collective, from its start, in which its ranks compute nothing: on a GPU
        those of an Unshard's weights in front of the layers."""
        if not self._hides:
            return self.compute_s(action, rank)
        return self._before_s(action.stage) if isinstance(action, Unshard) else 0.0

    def _before_s(self, stage: int) -> float:
        """Seconds in which a stage's weights come from CPU memory, which FSDP2 copies in the stream
        of the passes, and in which what is in front of its layers is gathered."""
        return self._stages[stage].brought_s + self._front_s.get(stage, 0.0)

    def head_s(self, action: Unshard, rank: int) -> float:
        """Seconds in which an Unshard gathers the head, behind the layers."""
        return self._head_s.get(action.stage, 0.0)

    @property
    def _hides(self) -> bool:
        """Whether collectives run beside computation."""
        return self._model.device_type != "cpu" and self._model.training.overlaps

    def copy_s(self, action: Action, rank: int) -> float:
        """Seconds of the copies of offloaded tensors that run beside `action`: those of each memory
        and each way at the same time. What an action waits for inside its layers
        (a segment of K,V before its attention) is in `compute_s`."""
        if self._plan.offload == ON_DEVICE or not isinstance(action, COMPUTING):
            return 0.0
        if rank not in self._copies:
            self._copies[rank] = self._copies_of(rank)
        return self._copies[rank].get((type(action), action.chunk, action.stage), 0.0)

    def _copies_of(self, rank: int) -> dict[tuple[type[Action], int, int], float]:
        """Seconds as of `copy_s` of all of a rank's actions."""
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
        """Seconds of a message on its link: hidden states of a chunk, or their gradient; each
        process of an sp group sends its part to its counterpart."""
        model = self._model
        tokens = float(self.table.tokens[:, action.chunk].max())
        width = model.shape.hidden_size * model.training.compute_bytes
        devices = first_device(rank, self._layout), first_device(action.peer, self._layout)
        return model.hardware.links.p2p_s(tokens * width, *devices)

    def unshard_s(self, stage: int) -> float:
        """Seconds of the all-gather of a stage's weights."""
        return self._stages[stage].unshard_s

    def reduce_s(self, stage: int) -> float:
        """Seconds in which the gradients of a stage's trained weights are reduced."""
        return self._stages[stage].reduce_s

    def _reduce_at_end_s(self, stage: int) -> float:
        """Seconds of a Reduce that the last Backward does not hide: under ZeRO-1 and 2 the ranks
        also gather each other's new weights, as far as the next first Forward does not hide that,
        unless an Unshard does it; where ZeRO-3 gathers with every pass the backwards have reduced
        already, in this runtime but for ends, and for sums between groups that hold all weights."""
        training, costs, gathered_s = self._model.training, self._stages[stage], 0.0
        of_layers_s, late_s = self._reduces_s(stage)
        if costs.passes_gather:
            ends_s = self._front_s.get(stage, 0.0) + self._head_s.get(stage, 0.0)
            return ends_s + late_s + costs.between_s if training.gathers else 0.0
        if training.zero_stage in (1, 2) and stage not in self._unsharded:
            gathered_s = max(0.0, costs.trained_gather_s - self._layers_s(self._firsts, stage))
        # the gradients of the layer whose backward is the last one hide behind none
        before_last = 1 - 1 / self._plan.stages[stage]
        of_layers_s -= before_last * min(of_layers_s, self._layers_s(self._lasts, stage))
        return late_s + of_layers_s + gathered_s

    def _reduces_s(self, stage: int) -> tuple[float, float]:
        """Seconds in which the gradients of a stage's layers are reduced, and in which those are
        that are complete at the end only."""
        costs = self._stages[stage]
        of_layers_s = costs.reduce_s * (1 - costs.late_share)
        gathers = self._model.training.gathers
        return of_layers_s, self._ends_s[stage] if gathers else costs.reduce_s - of_layers_s

    def _layers_s(self, passes: Mapping[tuple[int, int], Computing], stage: int) -> float:
        """Seconds in which the slowest rank of a stage is in its layers, in one of its passes, and
        collectives beside it."""
        if not self._hides:
            return 0.0
        seconds = [0.0]
        for rank in self._plan.holders[stage]:
            if (action := passes.get((stage, rank))) is not None:
                parts = tuple(part for part in self.parts(action) if part.work not in HEADS)
                seconds.append(self._seconds(parts, stage)[action.chunk])
        return max(seconds)

    def parts(self, action: Computing) -> tuple[PassPart, ...]:
        """The parts of an action's pass, as the plan's passes say."""
        return self._parts[type(action), action.chunk, action.stage]

    def _seconds(self, parts: tuple[PassPart, ...], stage: int) -> list[float]:
        """Seconds of parts of a pass for every chunk: in each those of the slowest process."""
        key = parts, self._alike[stage]
        if key not in self._parts_s:
            seconds = np.zeros(len(self._plan.chunks))
            for part in parts:
                seconds += self.process_seconds((part,), key[1], self.table)[0].max(axis=0)
            self._parts_s[key] = seconds.tolist()
        return self._parts_s[key]

    def process_seconds(self, parts: tuple[PassPart, ...], stage: int, table: ChunkTable) -> Array:
        """(P, S, C) seconds of parts of passes on every process, for any table's chunks."""
        return self._stages[stage].pass_seconds(parts, table)


def update_s(model: CostModel, plan: ChunkPlan) -> float:
    """Seconds of the optimizer's step behind a plan, on the device with most trained parameters;
    none without a Backward. Under ZeRO a device updates its share of what others hold too; the
    optimizer of weights in a node's CPU memory runs there, for all of its devices."""
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
