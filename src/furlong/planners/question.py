"""The inputs and outputs of a search: questions, memory limits, candidates and answers.

    question = Question([seq_lens], model, Limits(80 * 2**30), num_devices=8)
    answer = search(question)               # planners/search.py
    answer.best.plan_of(own_seq_lens)       # the plan of one replica

A `Question` is all that a search must know, an `Answer` its outcome. Each published system has a
file with `candidates(space)`. This function yields the system's plans in one layout, sorted by an
estimate of their time.

If the device is a CPU, its memory is RAM, and `memory.device` is the budget of all RAM that a run
takes. `memory.cpu` and offload to cpu then have no meaning and raise errors. Offload to disk is
always possible.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, chain
from math import inf
from typing import Any

from furlong.cost.memory import MemoryPart
from furlong.cost.model import CostModel, update_s
from furlong.cost.training import RankWeights, Training, ZeroStage
from furlong.errors import ConfigError
from furlong.plan.lengths import Call, StepSize
from furlong.plan.plan import TARGETS, ChunkPlan, Layout, OffloadTarget
from furlong.planners.chunks import by_cost
from furlong.planners.layouts import cut_layers, layouts, mean_attended_keys, replicate_of
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import gathered_first, join_kept, plan_replica, stage_heights
from furlong.report.scene import PART_WORDS
from furlong.simulate.predict import Needs, step_s
from furlong.units import format_bytes

MARGIN = 0.10
"""Share of a device's budget that plans leave free, unless a calibration has measured the error of
its predictions. In twelve held-out steps on a CPU, predicted peaks were at most 5.2 % too low
(docs/calibration.md), and a run has memory that no plan counts. Gaps of the allocator are in the
hardware's `reserved_bytes`."""
SLACK = 0.02
"""Relative difference of step times below which plans count as equally fast, given the accuracy of
predictions."""
SIZES = ("dp", "sp", "pp")
"""Keys of `Question.given` that are sizes of the layout; all others are chunk options."""
RESHARDING = ("auto", "fpdt")
"""Methods whose plans can free the weights of stages; others run each chunk through all stages."""
PASSING = ("auto", "chunkflow", "infinipipe")
"""Pipeline methods in which each pass can gather and free the weights of its stage."""
STATE: tuple[MemoryPart, ...] = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class Limits:
    """Bytes that a step may use in each memory; 0: not available; None: no limit."""

    device_bytes: int
    cpu_bytes: int | None = 0
    disk_bytes: int | None = 0
    margin: float = MARGIN
    """Share of the device's bytes that a plan leaves free."""

    @property
    def limit_bytes(self) -> int:
        """Bytes of the device that a plan may use: all but the margin."""
        return int(self.device_bytes * (1 - self.margin))

    @property
    def by_memory(self) -> dict[str, int | None]:
        """Limits in bytes, {"device": ..., "cpu": ..., "disk": ...}, named as under `memory` in a
        run file. The margin of the device is subtracted."""
        return {"device": self.limit_bytes, "cpu": self.cpu_bytes, "disk": self.disk_bytes}

    @property
    def offload_targets(self) -> tuple[OffloadTarget, ...]:
        """Memories that tensors may be offloaded to."""
        return tuple(target for target in TARGETS if self.by_memory[target] != 0)

    def exceeded(self, needs: Needs) -> dict[str, int]:
        """Return {memory: needed bytes} of each memory of which more is needed than its limit."""
        return {
            memory: used
            for (memory, limit), used in zip(self.by_memory.items(), needs, strict=True)
            if limit is not None and used > limit
        }

    def fullest(self, needs: Needs) -> float:
        """Return the largest ratio of needed bytes to limit over all memories."""
        limits = self.by_memory.values()
        return max(
            n / max(1, most) for n, most in zip(needs, limits, strict=True) if most is not None
        )

    def hold(self, needs: Needs) -> bool:
        """Whether the needs are within the limits of all memories."""
        return not self.exceeded(needs)

    def lacking(self, needs: Needs) -> int:
        """Return the bytes above the limits, summed over all memories; 0 if the needs fit."""
        return sum(
            used - (self.by_memory[name] or 0) for name, used in self.exceeded(needs).items()
        )


def key_of(name: str) -> str:
    """Return the run-file key of `name`, a chunk option or a size of the layout."""
    section = "parallel" if name in (*SIZES, "reshard") else "chunks"
    return name if name == "offload" else f"{section}.{name}"


def advice(
    part: str,
    training: Training,
    num_devices: int = 1,
    given: Iterable[str] = (),
    *,
    alone: bool = False,
    memory: str = "",
) -> str:
    """Return advice for a user whose plan on `num_devices` needs too much memory.

    `part`: the largest part of memory, such as `state` (weights, gradients, optimizer) or `kv`; or
    a memory's name, if no part is known. `memory`: name of the memory that `part` is in. `given`:
    options that the user has set, and may leave out. `alone`: whether the number of devices is
    fixed, so that a larger memory is advised instead of more devices.
    """
    ways = ["use more devices" if num_devices > 1 else "use several devices"]
    if alone:
        ways = [f"give it a larger memory.{memory or (part if part in TARGETS else 'device')}"]
    elif part == "state" and num_devices == 1:
        ways = ["use several devices, which share the state (ZeRO)"]
    if part != "state":
        ways += [f"leave {key_of(name)} out" for name in given]
        if part in ("activations", "kv", "kv_gradients", "states"):
            ways.append("use shorter sequences (data.max_seq_len)")
    elif training.lora is None:
        ways.append("train LoRA adapters (model.lora)")
    return f"{', '.join(ways)}, or use a smaller model"


class DoesNotFitError(ConfigError):
    """A plan needs more memory than a device has."""

    def __init__(
        self,
        rank: int,
        peak: Mapping[MemoryPart, int],
        budget_bytes: int,
        training: Training,
        *,
        num_devices: int = 1,
        with_what: str = "",
    ) -> None:
        needed = sum(peak.values())
        self.lacking_bytes = needed - budget_bytes
        state = sum(peak[part] for part in STATE)
        rest = {part: n for part, n in peak.items() if part not in STATE and n > 0}
        largest = max(rest, key=rest.__getitem__, default="state")
        # if the state alone exceeds the budget, reducing other parts does not help
        self.part: str = "state" if state > budget_bytes else largest
        """Part of memory to reduce: `state`, or the largest other part."""
        parts = ", ".join(
            f"{PART_WORDS.get(part, part)} {format_bytes(n)}"
            for part, n in sorted(peak.items(), key=lambda pair: -pair[1])
            if n > 0
        )
        words = f" with {with_what}" if with_what else ""
        super().__init__(
            given=f"rank {rank} needs {format_bytes(needed)}{words}: {parts}",
            required=f"at most {format_bytes(budget_bytes)}, which lacks "
            f"{format_bytes(self.lacking_bytes)}",
            source="the memory of a device",
            change=advice(self.part, training, num_devices),
        )


@dataclass(frozen=True)
class Question:
    """Input of a search: a model, batches, devices, and the choices that the user has made."""

    steps: Sequence[Sequence[int]]
    """Tokens of each sequence of the steps to time."""
    model: CostModel
    """Cost model of one device; `model_of` adds the sharing of state in a layout."""
    limits: Limits
    num_devices: int = 1
    longest: int = 0
    """Tokens of the data's longest sequence, which must fit; 0: the longest of `steps`."""
    size: StepSize = field(default_factory=StepSize)
    """Number of sequences of a run's step (default: as in the first of `steps`), or the mean
    number, and most tokens."""
    weight: float = 0.0
    """Factor from the total seconds of `steps` to seconds per step: 1 / len(steps) by default;
    above 1 if `steps` is only a part of one step."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of the layout (`SIZES`) and chunk options that the user has fixed, by name."""
    method: str = "auto"
    """`auto`, or the published system whose plans to use."""
    whole: Sequence[int] = ()
    """Tokens of each sequence of a whole step with the longest sequence. The step must fit, too.
    Empty if `steps` are whole."""
    mean_keys: float = 0.0
    """Mean number of keys that a token of the data attends to; 0: the mean over `steps`."""
    calls: tuple[Call, ...] = ()
    """Calls that may need most memory, if steps consist of calls in two phases."""
    stages: tuple[int, ...] = ()
    """Layers of each stage, if the pipeline is cut already."""
    most_chunks: int = 512
    """Most chunks of the longest sequence."""
    most_cells: int = 2048
    """Most cells of the longest sequence in layer-first plans, whose simulation takes longest."""

    recent: deque[Any] = field(default_factory=partial(deque, maxlen=1), repr=False, compare=False)
    """Cache of the last batch that a planner has cut, shared with questions derived from this one:
    the same batch is planned again with another `Space.beat_s`."""

    def __post_init__(self) -> None:
        seq_lens, set_field = [*chain(*self.steps)], partial(object.__setattr__, self)
        set_field("longest", self.longest or max(seq_lens, default=0))
        set_field("mean_keys", self.mean_keys or mean_attended_keys(seq_lens))
        if self.steps:
            set_field("weight", self.weight or 1 / len(self.steps))
            if self.size.sequences is None:
                set_field("size", replace(self.size, sequences=len(self.steps[0])))

    def of_step(self, seq_lens: Sequence[int]) -> Question:
        """Return this question with one step, which has sequences of `seq_lens` tokens."""
        return replace(self, steps=[seq_lens], size=StepSize(), weight=0.0)

    def call_of(self, seq_lens: Sequence[int]) -> Call:
        """Return the call in `calls` whose sequences have these lengths; of several, the one with
        the shortest shared prompt. If there is none, return a new call without a shared prompt."""
        lens = tuple(seq_lens)
        alike = (call for call in self.calls if call.seq_lens == lens)
        return min(alike, key=lambda call: call.shared, default=Call(lens))

    @property
    def options(self) -> dict[str, Any]:
        """The user's chunk options by name; `reshard: False` is left out, as it is the default."""
        return {
            name: value
            for name, value in self.given.items()
            if name not in SIZES and (name != "reshard" or value)
        }

    def keys_of(self, names: Iterable[str]) -> list[str]:
        """Return the run-file keys of the options `names`. If weights are in CPU memory, order and
        reshard follow from that, so `offload` is returned in their place."""
        away = ("order", "reshard") if self.model.training.offload_weights else ()
        return list(dict.fromkeys("offload" if name in away else key_of(name) for name in names))

    def layouts(self) -> list[Layout]:
        """Return the layouts that have the given sizes. Raises ConfigError if there is none."""
        sizes = {name: self.given.get(name) for name in SIZES}
        replicate = self.model.training.replicate
        return layouts(
            self.num_devices, self.model.shape, gathers=True, replicate=replicate, **sizes
        )

    def stages_of(self, layout: Layout) -> tuple[int, ...]:
        """Return the number of layers of each stage of a pipeline; empty without a pipeline."""
        if layout.pp == 1:
            return ()
        if len(self.stages) == layout.pp:
            return self.stages
        return cut_layers(
            self.model_of(layout), layout.pp, self.mean_keys,
            group_size=layout.dp * layout.sp, limit_bytes=self.limits.limit_bytes,
        )  # fmt: skip

    def fits_with_narrow_moments(self, layout: Layout) -> bool:
        """Whether weights, gradients and optimizer do not fit on a device, but would if AdamW's
        moments took half of their bytes."""
        training = self.model.training
        if training.optimizer_bytes != 2 * training.gradient_bytes or training.lora is not None:
            return False
        narrow = replace(training, optimizer_bytes=4)
        asked = replace(self, model=replace(self.model, training=narrow))
        return asked.state_bytes(layout) <= self.limits.limit_bytes < self.state_bytes(layout)

    def may_reshard(self, layout: Layout) -> bool:
        """Whether a search may choose reshard, freeing the weights of stages, in a layout."""
        replicate = self.model.training.replicate
        if "reshard" in self.given:
            return False
        if layout.pp > 1:
            return self.method in PASSING and layout.sp > 1 and replicate == 1
        return layout.num_devices > replicate and self._may_cut_layers

    @property
    def may_offload_weights(self) -> bool:
        """Whether a search may choose CPU memory for weights, gradients and optimizer."""
        training, given = self.model.training, self.given
        return (
            training.offload_weights is None
            and not training.host_is_device
            and self.limits.cpu_bytes != 0
            and training.packed_bytes is None
            and given.get("reshard", True)
            and given.get("pp", 1) == 1
            and self._may_cut_layers
        )

    @property
    def _may_cut_layers(self) -> bool:
        """Whether a search may cut the layers into stages on one device (layer-first)."""
        shape, given = self.model.shape, self.given
        return (
            self.method in RESHARDING
            and not (shape.whole or self.calls)
            and given.get("order") != "chunk-first"
            and given.get("stage_layers", 1) < shape.num_layers
        )

    def offloading(self) -> Question:
        """Return this question with weights, gradients and optimizer in CPU memory, and with the
        options that this needs: layer-first and reshard."""
        model = replace(self.model, training=self.model.training.offloading())
        given = {**self.given, "order": "layer-first", "reshard": True}
        return replace(self, model=model, given=given)

    def resharding(self, layout: Layout, reshard: bool = True) -> Question:
        """Return a copy of this question with the option `reshard` set to True or False: whether
        plans free the weights of stages during a step. True without a pipeline needs layer-first,
        so this is set, too."""
        order = {"order": "layer-first"} if reshard and layout.pp == 1 else {}
        return replace(self, given={**self.given, **order, "reshard": reshard})

    def state_bytes(self, layout: Layout) -> int:
        """Return a lower bound on the bytes of weights, gradients and optimizer, on the device with
        most of them."""
        if self.may_reshard(layout):
            return self.resharding(layout).state_bytes(layout)
        if self.given.get("reshard") and layout.pp == 1:
            return self.resharded(layout).resharded_bytes
        model, size = self.model_of(layout), layout.dp * layout.sp
        stages = self.stages_of(layout) or (model.shape.num_layers,)
        weights = model.training.weights
        return max(
            weights(model.shape, stages, frozenset((stage,)), size).state.total
            for stage in range(len(stages))
        )

    def resharded(self, layout: Layout) -> RankWeights:
        """Return the weights that each device holds in plans without a pipeline that free the
        weights of stages during a step (reshard). Stages are assumed as small as the user's options
        allow: of `stage_layers` layers if given, else of one layer."""
        model, size = self.model_of(layout), layout.dp * layout.sp
        stages = stage_heights(model.shape.num_layers, self.given.get("stage_layers", 1))
        held = frozenset(range(len(stages)))
        return model.training.weights(model.shape, stages, held, size)

    def model_of(self, layout: Layout) -> CostModel:
        """Return the cost model for the plan of one replica in a layout. In it, weights, gradients
        and optimizer of a stage are sharded over replicas and sequence-parallel groups in the same
        way as in a run."""
        zero: ZeroStage = 1 if layout.dp * layout.sp > 1 else 0
        reshards = bool(self.given.get("reshard"))
        replicate = replicate_of(layout, reshards, self.model.training.replicate)
        training = replace(
            self.model.training, zero_stage=3 if reshards and layout.pp > 1 else zero,
            gathers=bool(zero), replicas=layout.dp, replicate=replicate,
        )  # fmt: skip
        if training.offload_weights:
            training = training.offloading()
        return replace(self.model, training=training)


PlanOf = Callable[[Sequence[int]], ChunkPlan]
"""Return the plan of one replica's sequences. Raises UserError if none fits."""


@dataclass(frozen=True, eq=False)
class Space:
    """A search's question together with one layout of its devices. Planners take a space and yield
    candidates for it."""

    question: Question
    layout: Layout
    beat_s: float = inf
    """Step time of a known plan; planners may skip slower ones."""

    @cached_property
    def model(self) -> CostModel:
        return self.question.model_of(self.layout)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        return self.question.stages_of(self.layout)

    @cached_property
    def dealt(self) -> list[tuple[tuple[int, ...], ...]]:
        """dealt[step][replica]: tokens of each sequence of the replica."""
        return [*map(self._deal, self.question.steps)]

    def _deal(self, seq_lens: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the sequence lengths of each replica, with work balanced as in a run; the replica
        with most work comes first."""
        work = self.model.sequence_seconds(seq_lens)
        replicas = by_cost(work, min(self.layout.dp, len(work)))
        most_first = sorted(replicas, key=lambda own: -sum(work[i] for i in own))
        return tuple(tuple(seq_lens[i] for i in sorted(own)) for own in most_first)

    @cached_property
    def whole(self) -> list[tuple[int, ...]]:
        """Sequence lengths of two replicas of a whole step: the one with most work, and the one
        with the longest sequence."""
        if not self.question.whole:
            return []
        replicas = self._deal(self.question.whole)
        return list(dict.fromkeys((replicas[0], max(replicas, key=max))))

    @cached_property
    def busiest(self) -> list[tuple[int, ...]]:
        """Sequence lengths of the busiest replica of each step."""
        return [step[0] for step in self.dealt]

    @cached_property
    def most_tokens(self) -> int:
        """Most tokens that a replica has in a step."""
        return max(sum(own) for step in self.dealt for own in step)

    @property
    def _is_regular(self) -> bool:
        """Whether all replicas are spread over nodes in the same way, so that equal work takes each
        of them equally long."""
        layout, node = self.layout, self.model.hardware.links.devices_per_node
        of_stage, is_divided = layout.dp * layout.sp, layout.sp % node and node % layout.sp
        is_alike = layout.pp == 1 or of_stage % node == 0 or layout.num_devices <= node
        return is_alike and not is_divided

    def plan_of(self, options: ChunkOptions, *, checked: bool = True) -> PlanOf:
        """Return the function that plans a replica's sequences with these chunk options."""
        return partial(
            plan_replica, options=options, num_layers=self.model.shape.num_layers,
            stages=self.stages, sp_size=self.layout.sp, checked=checked,
        )  # fmt: skip

    def busiest_s(self, plan_of: PlanOf) -> float:
        """Return the mean seconds of each step's busiest replica; equal replicas are timed once."""
        count = Counter(self.busiest)
        return sum(n * self._step_s(self.model, plan_of(lens)) for lens, n in count.items())

    def step_s(self, plan_of: PlanOf, beat_s: float = inf) -> float:
        """Return the mean seconds of a step, including the optimizer's step. The plans of all
        replicas are joined as in a run. Return infinity once the step is known to take at least
        `beat_s`, which the plans of a few replicas may show."""
        model, total_s, part = whole_model(self.model), 0.0, min(1.0, self.question.weight)
        for lens, times in Counter(self.dealt).items():  # equal steps are timed once
            if len(set(lens)) == 1 and len(lens) == self.layout.dp and self._is_regular:
                plan = gathered_first(plan_of(lens[0]))  # other replicas take equally long
                seconds = self._step_s(self.model, plan) + part * update_s(self.model, plan)
                total_s += times * seconds
                continue
            plans = list[ChunkPlan]()
            for number, own in enumerate(lens, start=1):
                plans.append(plan_of(own))
                is_some = beat_s < inf and number.bit_count() == 1
                if is_some and total_s + self._step_s(model, _joined(plans)) >= beat_s:
                    return inf
            joined = _joined(plans, self.layout.dp)
            total_s += times * (self._step_s(model, joined) + part * update_s(model, joined))
        return total_s

    def _step_s(self, model: CostModel, plan: ChunkPlan) -> float:
        """Return the part of the mean step time that a plan's step makes up. If several steps are
        timed, its seconds are divided by their number. If the plan covers only a part of one step,
        its seconds are scaled up to the whole step."""
        weight = self.question.weight
        return min(1.0, weight) * step_s(model, plan, times=max(1.0, weight))


def _joined(plans: Sequence[ChunkPlan], num_replicas: int = 0) -> ChunkPlan:
    """Return one plan of several replicas, joined from their `plans` as in a run, with dummy plans
    of further replicas up to `num_replicas`. It is unchecked, for simulation only."""
    stops = accumulate(len(plan.seq_lens) for plan in plans)
    own_ids = [list(range(n - len(p.seq_lens), n)) for p, n in zip(plans, stops, strict=True)]
    seq_lens = [n for plan in plans for n in plan.seq_lens]
    return join_kept(plans, own_ids, seq_lens, num_replicas or len(plans), checked=False)


def whole_model(model: CostModel) -> CostModel:
    """Return the cost model for plans that list all replicas."""
    return replace(model, training=replace(model.training, replicas=1))


@dataclass(frozen=True)
class Candidate:
    """A planning method with its chunk options in a layout, which can plan any batch."""

    method: str
    space: Space
    options: ChunkOptions
    """Chunk options; if the method makes its own chunks, the options for evaluations and for
    batches that the method has no plan for."""
    estimate_s: float
    """Estimated mean seconds of a step, or a lower bound. On one device it equals the simulated
    time, except for copies and the effect of sampling."""
    plan_of: PlanOf
    """Returns checked plans."""
    least: Needs = field(default_factory=partial(Needs, 0))
    """Lower bound on the bytes of a device in a step with the longest sequence."""
    longest: Sequence[int] = ()
    """Sequences of one replica's step that needs most memory; empty for methods whose planner
    itself ensures that its plans fit."""
    step_s: float = 0.0
    """Simulated mean seconds of a step with all replicas; 0 until simulated."""
    needs: Needs = field(default_factory=partial(Needs, 0))
    """Simulated peak bytes in each memory; 0 until simulated."""
    peak: Mapping[MemoryPart, int] = field(default_factory=dict)
    """Bytes of each part of memory at the peak, on the device that lacks most."""
    unchecked: PlanOf | None = None
    """Returns the same plans without a check, for simulation only; None: use `plan_of`."""

    @property
    def layout(self) -> Layout:
        return self.space.layout

    def trial(self, seq_lens: Sequence[int]) -> ChunkPlan:
        """Return the candidate's plan for these sequences, unchecked where possible, for simulation
        only."""
        return (self.unchecked or self.plan_of)(seq_lens)


Candidates = Callable[[Space], Iterable[Candidate]]
"""Yields the candidates of one published system in a layout, by ascending estimates."""


@dataclass(frozen=True)
class Answer:
    """The outcome of a search."""

    question: Question
    tried: tuple[Candidate, ...]
    """Candidates that fit, the chosen one first, then by step time; empty if none fits."""
    refused: tuple[Candidate, ...]
    """Candidates that do not fit in simulation, the one closest to fitting first."""
    too_large: tuple[tuple[Layout, int], ...] = ()
    """(layout, least bytes that a device lacks) of layouts in which nothing fits by its bounds."""
    slower: tuple[tuple[Layout, float], ...] = ()
    """(layout, estimated seconds of a step) of layouts in which no plan was simulated."""
    error: Exception | None = None
    """Error of a named method with own chunks that has no plan, if it raised one."""
    alike: int = 1
    """Number of plans about as fast as the chosen one."""
    num_pruned: int = 0
    """Number of candidates excluded by their bounds or estimates."""
    seconds: float = field(default=0.0, compare=False)
    """Seconds that the search took."""

    is_cut_short: bool = False
    """Whether a signal ended the search before its end."""
    on_device: Answer | None = None
    """Answer with weights on the device, if no plan fits there; `question` then has weights in CPU
    memory."""

    @property
    def best(self) -> Candidate:
        return self.tried[0]

    @property
    def options(self) -> ChunkOptions:
        """Chunk options that a run uses."""
        return self.best.options

    @property
    def nearest(self) -> tuple[Candidate | None, Layout]:
        """(candidate, layout): the candidate closest to fitting, and its layout.

        In some layouts not even weights, gradients and optimizer fit, so that no candidate was
        simulated. If such a layout lacks fewer bytes than the candidate, the result is (None, this
        layout). If no candidate was simulated in any layout, the candidate is None as well.
        """
        question, limits, refused = self.question, self.question.limits, self.refused
        too_large = sorted(self.too_large, key=lambda pair: pair[1])
        least = limits.lacking(refused[0].needs) if refused else inf
        for layout, lacking_bytes in too_large:
            if lacking_bytes < least and question.state_bytes(layout) > limits.limit_bytes:
                return None, layout
        if refused:
            return refused[0], refused[0].layout
        return None, too_large[0][0] if too_large else question.layouts()[0]

    @property
    def by_options(self) -> Candidate | None:
        """The simulated candidate that cuts chunks by the options of `options`, in the chosen
        layout. None if there is none, as for a named method that does not use these options."""
        layout, options = self.best.layout, self.best.options
        return next(
            (c for c in self.tried if c.longest and (c.layout, c.options) == (layout, options)),
            None,
        )
