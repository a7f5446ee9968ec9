"""A question to the planners, its limits of memory, a plan that one of them offers, the answer.

    question = Question(seq_lens, model, Limits(80 * 2**30), num_devices=8)
    answer = search(question)               # planners/search.py
    answer.best.plan_of(own_seq_lens)       # the plan of one replica

Each published system has a file with `candidates(question, layout)`, which offers its plans in a
layout, the fastest by one estimate first.

On a CPU its RAM is the device's: `memory.device` is the budget of everything in it, so
`memory.cpu` and offload to cpu are refused by name. The disk may be used everywhere.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from math import inf
from typing import Any

from furlong.cost.memory import Part
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
"""Share of a device's budget that plans leave free, on one device and on several, unless a
calibration says what its own predictions lacked: of twelve steps that no fit had seen, measured on
a CPU, predicted peaks lacked 5.2 % at most (docs/calibration.md), and a run has more that no plan
counts. Gaps between allocated blocks are the hardware's `reserved_bytes`."""
SLACK = 0.02
"""Plans whose times differ by less are alike: no prediction is better."""
SIZES = ("dp", "sp", "pp")
"""Names of a layout's sizes among what is given; the others are those of `ChunkOptions`."""
RESHARDING = ("auto", "fpdt")
"""Methods whose plans may free the weights of stages: others take a chunk through all of them."""
PASSING = ("auto", "chunkflow", "infinipipe")
"""Methods of pipelines, whose passes may gather and free the weights of a stage."""
STATE: tuple[Part, ...] = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class Limits:
    """Bytes that a step may use in each memory; 0: it is not there; None: no limit."""

    device_bytes: int
    cpu_bytes: int | None = 0
    disk_bytes: int | None = 0
    margin: float = MARGIN
    """Share of the device's bytes that a plan leaves free."""

    @property
    def limit_bytes(self) -> int:
        """Bytes of the device, without the margin."""
        return int(self.device_bytes * (1 - self.margin))

    @property
    def by_memory(self) -> dict[str, int | None]:
        """The limit of each memory, as `memory.` names it, without the margin."""
        return {"device": self.limit_bytes, "cpu": self.cpu_bytes, "disk": self.disk_bytes}

    @property
    def offload_targets(self) -> tuple[OffloadTarget, ...]:
        """Where tensors may be offloaded to."""
        return tuple(target for target in TARGETS if self.by_memory[target] != 0)

    def exceeded(self, needs: Needs) -> dict[str, int]:
        """The memories that have less than is needed of them, with these bytes."""
        return {
            memory: used
            for (memory, limit), used in zip(self.by_memory.items(), needs, strict=True)
            if limit is not None and used > limit
        }

    def fullest(self, needs: Needs) -> float:
        """The share of its limit that is needed of the memory that is fullest."""
        limits = self.by_memory.values()
        return max(
            n / max(1, most) for n, most in zip(needs, limits, strict=True) if most is not None
        )

    def hold(self, needs: Needs) -> bool:
        """Whether each memory has room for what is needed of it."""
        return not self.exceeded(needs)

    def lacking(self, needs: Needs) -> int:
        """Bytes that do not fit, of all memories together; 0 where it fits."""
        return sum(
            used - (self.by_memory[name] or 0) for name, used in self.exceeded(needs).items()
        )


def key_of(name: str) -> str:
    """The key of a run file that gives an option, or a size of the layout."""
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
    """Advice for a plan of `num_devices` that needs too much of a `memory`, most for `part`, which
    may name it. `given`: the options that the user has given; `alone`: devices are given too."""
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
    """A plan needs more memory than a rank has."""

    def __init__(
        self,
        rank: int,
        peak: Mapping[Part, int],
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
        # with the state alone above the budget nothing else helps
        self.part: str = "state" if state > budget_bytes else largest
        """Part of memory that takes the most: `state`, or a part besides it."""
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
    """A model, a batch, devices, and what the user has fixed."""

    seq_lens: Sequence[int]
    """Sequences of the steps whose time is compared."""
    model: CostModel
    """Figures of one device; `model_of` adds what a layout's devices share."""
    limits: Limits
    num_devices: int = 1
    longest: int = 0
    """Tokens of the data's longest sequence, which must fit; 0: that of `seq_lens`."""
    sequences_per_step: int = 0
    """0: all of `seq_lens` are one step. With `tokens_per_step` their mean number."""
    tokens_per_step: int | None = None
    """Most tokens of a step; a longer sequence is one by itself."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of the layout (`SIZES`) and options of chunks that the user has fixed, by name."""
    method: str = "auto"
    """`auto`, or the published system whose plans are wanted."""
    whole: Sequence[int] = ()
    """Sequences of a whole step with the longest one, which must fit too; empty where `seq_lens`
    are such steps."""
    mean_keys: float = 0.0
    """Keys that a token of the data attends on average; 0: that of `seq_lens`."""
    calls: tuple[Call, ...] = ()
    """The calls that may need most memory, where a step is several calls in two phases."""
    stages: tuple[int, ...] = ()
    """Layers of each stage of a pipeline that is cut already."""
    beat_s: float = inf
    """Seconds of a step that is there: planners that search need find none that is slower."""
    most_chunks: int = 512
    """Most chunks of the longest sequence."""
    most_cells: int = 2048
    """Most cells of the longest sequence, layer-first: more take longer to walk than all else."""

    recent: deque[Any] = field(default_factory=partial(deque, maxlen=1), repr=False, compare=False)
    """The last batch that a planner has cut, and its cuts, kept for questions that are made of
    this one: the maker of an answer's plan asks again, with another step to beat."""

    def __post_init__(self) -> None:
        if not self.longest:
            object.__setattr__(self, "longest", max(self.seq_lens, default=0))
        if not self.sequences_per_step:
            object.__setattr__(self, "sequences_per_step", len(self.seq_lens))
        if not self.mean_keys:
            object.__setattr__(self, "mean_keys", mean_attended_keys(self.seq_lens))

    def call_of(self, seq_lens: Sequence[int]) -> Call:
        """The call of these sequences; nothing is shared in one that is not known."""
        lens = tuple(seq_lens)
        alike = (call for call in self.calls if call.seq_lens == lens)
        return min(alike, key=lambda call: call.shared, default=Call(lens))

    @property
    def options(self) -> dict[str, Any]:
        """The given options of chunks. `reshard: False` is none: every plan may keep weights."""
        return {
            name: value
            for name, value in self.given.items()
            if name not in SIZES and (name != "reshard" or value)
        }

    def keys_of(self, names: Iterable[str]) -> list[str]:
        """The keys of a run file that gave these options: offload of weights gives two."""
        away = ("order", "reshard") if self.model.training.offload_weights else ()
        return list(dict.fromkeys("offload" if name in away else key_of(name) for name in names))

    @property
    def stops(self) -> list[int]:
        """The ends of the steps in `seq_lens`."""
        return StepSize(self.sequences_per_step, self.tokens_per_step).stops(self.seq_lens)

    @property
    def share(self) -> float:
        """Steps in the seconds of all `seq_lens`: one over their number."""
        if self.tokens_per_step is not None:
            return 1 / len(self.stops)
        return self.sequences_per_step / len(self.seq_lens)

    def layouts(self) -> list[Layout]:
        """The layouts with the given sizes. Raises ConfigError where there is none."""
        sizes = {name: self.given.get(name) for name in SIZES}
        replicate = self.model.training.replicate
        return layouts(
            self.num_devices, self.model.shape, gathers=True, replicate=replicate, **sizes
        )

    def stages_of(self, layout: Layout) -> tuple[int, ...]:
        """Layers of each stage of a pipeline; empty without one."""
        if layout.pp == 1:
            return ()
        if len(self.stages) == layout.pp:
            return self.stages
        return cut_layers(
            self.model_of(layout), layout.pp, self.mean_keys,
            group_size=layout.dp * layout.sp, limit_bytes=self.limits.limit_bytes,
        )  # fmt: skip

    def fits_with_narrow_moments(self, layout: Layout) -> bool:
        """Whether a device holds the state if AdamW's moments take half of their bytes, which it
        does not hold with whole ones."""
        training = self.model.training
        if training.optimizer_bytes != 2 * training.gradient_bytes or training.lora is not None:
            return False
        narrow = replace(training, optimizer_bytes=4)
        asked = replace(self, model=replace(self.model, training=narrow))
        return asked.state_bytes(layout) <= self.limits.limit_bytes < self.state_bytes(layout)

    def may_reshard(self, layout: Layout) -> bool:
        """Whether a search may choose to free the weights of stages in a layout."""
        num_layers = self.model.shape.num_layers
        if layout.pp > 1:
            return (
                "reshard" not in self.given
                and self.method in PASSING
                and layout.sp > 1
                and self.model.training.replicate == 1
            )
        return (
            "reshard" not in self.given
            and self.method in RESHARDING
            and layout.num_devices > self.model.training.replicate
            and not (self.model.shape.whole or self.calls)
            and self.given.get("order") != "chunk-first"
            and self.given.get("stage_layers", 1) < num_layers
        )

    @property
    def may_offload_weights(self) -> bool:
        """Whether a search may choose CPU memory for weights, gradients and optimizer."""
        training, given = self.model.training, self.given
        shape = self.model.shape
        return (
            training.offload_weights is None
            and not training.host_is_device
            and self.limits.cpu_bytes != 0
            and training.packed_bytes is None
            and self.method in RESHARDING
            and not (shape.whole or self.calls)
            and given.get("reshard", True)
            and given.get("pp", 1) == 1
            and given.get("order") != "chunk-first"
            and given.get("stage_layers", 1) < shape.num_layers
        )

    def offloading(self) -> Question:
        """The question for plans with weights, gradients and optimizer in CPU memory."""
        model = replace(self.model, training=self.model.training.offloading())
        given = {**self.given, "order": "layer-first", "reshard": True}
        return replace(self, model=model, given=given)

    def resharding(self, layout: Layout, reshard: bool = True) -> Question:
        """The question for plans that free the weights of stages, or that keep those of all."""
        order = {"order": "layer-first"} if reshard and layout.pp == 1 else {}
        return replace(self, given={**self.given, **order, "reshard": reshard})

    def state_bytes(self, layout: Layout) -> int:
        """Least bytes of weights, gradients and optimizer on the device that has most of them."""
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
        """The weights of a device that frees those of stages, without a pipeline, with the lowest
        stages that the given options leave."""
        model, size = self.model_of(layout), layout.dp * layout.sp
        stages = stage_heights(model.shape.num_layers, self.given.get("stage_layers", 1))
        held = frozenset(range(len(stages)))
        return model.training.weights(model.shape, stages, held, size)

    def model_of(self, layout: Layout) -> CostModel:
        """The model of one replica's plan, with whose replicas and pools a stage's state is shared
        as a run shares it."""
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
"""Makes the plan of one replica's sequences. Raises UserError where none fits."""


class Space:
    """A question in one of its layouts."""

    def __init__(self, question: Question, layout: Layout) -> None:
        self.question, self.layout = question, layout
        self.model, self.stages = question.model_of(layout), question.stages_of(layout)

    @cached_property
    def dealt(self) -> list[list[list[int]]]:
        """The places of the sequences among all, by step and by replica, dealt by their seconds as
        a run deals them; of each step the replica with most work is first."""
        question, steps = self.question, []
        work = self.model.sequence_seconds(question.seq_lens)
        for first, stop in pairwise([0, *question.stops]):
            own = work[first:stop]
            replicas = by_cost(own, min(self.layout.dp, len(own)))
            most_first = sorted(replicas, key=lambda some: -sum(own[i] for i in some))
            steps.append([[first + i for i in sorted(some)] for some in most_first])
        return steps

    @cached_property
    def whole(self) -> list[tuple[int, ...]]:
        """Sequences of two replicas in a whole step: that with most work, that with the longest."""
        if not self.question.whole:
            return []
        step = replace(self.question, seq_lens=self.question.whole, sequences_per_step=0,
                       tokens_per_step=None)  # fmt: skip
        (replicas,) = Space(step, self.layout).dealt
        lens = [tuple(step.seq_lens[i] for i in own) for own in replicas]
        return list(dict.fromkeys((lens[0], max(lens, key=max))))

    @cached_property
    def most_tokens(self) -> int:
        """Tokens of the replica that has most of them in a step."""
        return max(sum(self.lens(own)) for step in self.dealt for own in step)

    @property
    def _is_regular(self) -> bool:
        """Whether the devices of every replica lie on nodes in the same way."""
        layout, node = self.layout, self.model.hardware.links.devices_per_node
        of_stage, is_divided = layout.dp * layout.sp, layout.sp % node and node % layout.sp
        is_alike = layout.pp == 1 or of_stage % node == 0 or layout.num_devices <= node
        return is_alike and not is_divided

    def lens(self, own: Iterable[int]) -> tuple[int, ...]:
        """Tokens of some of the sequences."""
        return tuple(self.question.seq_lens[i] for i in own)

    def plan_of(self, options: ChunkOptions, *, checked: bool = True) -> PlanOf:
        """Plans of chunks with these options."""
        return partial(
            plan_replica, options=options, num_layers=self.model.shape.num_layers,
            stages=self.stages, sp_size=self.layout.sp, checked=checked,
        )  # fmt: skip

    def busiest_s(self, plan_of: PlanOf) -> float:
        """Mean seconds of a step of the replicas with most work; equal ones are timed once."""
        count = Counter(self.lens(step[0]) for step in self.dealt)
        return sum(n * self._step_s(self.model, plan_of(lens)) for lens, n in count.items())

    def step_s(self, plan_of: PlanOf, beat_s: float = inf) -> float:
        """Seconds of a step on average, of the plans of all replicas as a run joins them, which
        meet in the last Backward of each stage, and of the optimizer. Infinite as soon as the first
        replicas, without which no step is faster, take `beat_s`."""
        model, total_s, part = whole_model(self.model), 0.0, min(1.0, self.question.share)
        # equal steps are timed once
        for lens, times in Counter(tuple(map(self.lens, step)) for step in self.dealt).items():
            if len(set(lens)) == 1 and len(lens) == self.layout.dp and self._is_regular:
                plan = gathered_first(plan_of(lens[0]))  # the other replicas' take as long
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
        """Seconds that the plan of one of the steps is of a mean step: of several its share; of a
        part of one those of the whole."""
        share = self.question.share
        return min(1.0, share) * step_s(model, plan, times=max(1.0, share))


def _joined(plans: Sequence[ChunkPlan], num_replicas: int = 0) -> ChunkPlan:
    """The plans of replicas as a run joins them, which nobody runs."""
    stops = accumulate(len(plan.seq_lens) for plan in plans)
    own_ids = [list(range(n - len(p.seq_lens), n)) for p, n in zip(plans, stops, strict=True)]
    seq_lens = [n for plan in plans for n in plan.seq_lens]
    return join_kept(plans, own_ids, seq_lens, num_replicas or len(plans), checked=False)


def whole_model(model: CostModel) -> CostModel:
    """The model of plans that list all replicas."""
    return replace(model, training=replace(model.training, replicas=1))


@dataclass(frozen=True)
class Candidate:
    """Plans that a method offers in a layout, one for any batch."""

    method: str
    layout: Layout
    options: ChunkOptions
    """The options of its chunks; of a method that makes its own those that a run takes in its
    evaluations, and for what the method has no plan of."""
    estimate_s: float
    """About the seconds of the question's steps, or less; on one device by the clock, but for
    copies and for what a draw leaves out."""
    plan_of: PlanOf
    """Makes checked plans."""
    least: Needs | None = None
    """Bytes of a device below which no step with the longest sequence gets, where they are known
    without its plan."""
    longest: Sequence[int] = ()
    """Sequences of one replica's step that needs most memory; empty where the plans of a method fit
    by themselves."""
    step_s: float = 0.0
    """Once it was timed: seconds of a step on average, of the plans of all replicas joined."""
    needs: Needs = field(default_factory=partial(Needs, 0))
    """Once its plans were walked: the bytes of a device and below, of the longest sequence."""
    peak: Mapping[Part, int] = field(default_factory=dict)
    """The parts of these, of the device that lacks most."""
    unchecked: PlanOf | None = None
    """Makes the same plans for a search, which runs none of them; None: `plan_of` does."""

    def trial(self, seq_lens: Sequence[int]) -> ChunkPlan:
        """A plan that is walked and timed, and never run."""
        return (self.unchecked or self.plan_of)(seq_lens)


Candidates = Callable[[Question, Layout], Iterable[Candidate]]
"""Offers the plans of one published system in a layout, rising in their estimates."""


@dataclass(frozen=True)
class Answer:
    """The outcome of a search."""

    question: Question
    tried: tuple[Candidate, ...]
    """The plans that fit, the chosen one first, then by their seconds; empty where none does."""
    refused: tuple[Candidate, ...]
    """The plans that do not fit after all, the one that lacks least first."""
    too_large: tuple[tuple[Layout, int], ...] = ()
    """Layouts of which nothing fits, and was not walked, with the bytes that a device lacks at
    least."""
    slower: tuple[tuple[Layout, float], ...] = ()
    """Layouts of which no plan was timed, with the seconds that a step takes, about."""
    error: Exception | None = None
    """Why a method by name that makes its own chunks has no plan, where it has said so."""
    alike: int = 1
    """Plans like the chosen one within the slack of its time."""
    num_pruned: int = 0
    """Candidates that were left out by their bounds or their estimates."""
    seconds: float = field(default=0.0, compare=False)
    """Seconds that the search took."""

    @property
    def asked(self) -> Question:
        """The question that the chosen plan answers, with whether it frees weights in a
        pipeline."""
        layout = self.best.layout
        if layout.pp > 1 and self.best.options.reshard:
            return self.question.resharding(layout)
        return self.question

    is_cut_short: bool = False
    """Whether a signal ended the search before its end."""
    on_device: Answer | None = None
    """The search with weights on the device, of which nothing fits: then `question` is that for
    weights in CPU memory."""

    @property
    def best(self) -> Candidate:
        return self.tried[0]

    @property
    def options(self) -> ChunkOptions:
        """The chunk options that a run uses."""
        return self.best.options

    @property
    def by_options(self) -> Candidate | None:
        """The plan of these options that was timed; None beside a method that is named and has
        chunks of its own."""
        layout, options = self.best.layout, self.best.options
        return next(
            (c for c in self.tried if c.longest and (c.layout, c.options) == (layout, options)),
            None,
        )
