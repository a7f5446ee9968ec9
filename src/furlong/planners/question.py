"""A question to the planners, its limits of memory, a plan that one of them offers, the answer.

    question = Question(seq_lens, model, Limits(80 * 2**30), num_devices=8)
    answer = search(question)               # planners/search.py
    answer.best.plan_of(own_seq_lens)       # the plan of one replica

Each published system has a file with `candidates(question, layout)`, which offers its plans in a
layout, the fastest by one estimate first.

On a CPU the host's RAM is the device's: `memory.device` is the budget of everything in it, so
`memory.host` and the tier host are refused by name. The disk is a tier of its own everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any, Literal

from furlong.cost.memory import MemoryCurve, Part
from furlong.cost.model import CostModel
from furlong.cost.training import Training, ZeroStage
from furlong.errors import ConfigError
from furlong.plan.plan import ChunkPlan, Layout, Tier
from furlong.planners.layouts import cut_layers, layouts, mean_attended_keys
from furlong.planners.options import ChunkOptions
from furlong.planners.predict import Needs
from furlong.report.scene import PART_WORDS
from furlong.units import format_bytes

MARGIN = 0.10
"""Share of a device's budget that plans leave free, on one device and on several, unless a
calibration says what its own predictions lacked: of twelve steps that no fit had seen, measured on
a CPU, predicted peaks lacked 5.2 % at most (docs/benchmarks.md), and a run has more that no plan
counts. Gaps between allocated blocks are the hardware's `reserved_bytes`."""
_STATE: tuple[Part, ...] = ("weights", "gradients", "optimizer")
_SMALLER = ("use smaller chunks (chunks.size)",)
_SHORTER = ("use shorter sequences (data.max_seq_len)",)
_WAYS: dict[str, tuple[str, ...]] = {
    "activations": (*_SMALLER, "keep less of them (chunks.keep, chunks.num_retained)"),
    "kv": _SHORTER,
    "kv_gradients": _SHORTER,
    "states": ("use larger chunks (chunks.size): a state is kept at the end of each", *_SHORTER),
    "logits": _SMALLER,
    "buffers": _SMALLER,
}
"""Ways to need less of a part of memory."""
_LARGER, _SEVERAL = "use a larger sp or pp", "use several devices"
_WAYS_WITH_MORE = {
    "activations": (_LARGER,),
    "kv": ("keep K,V on the host (chunks.tier) if the method can", _LARGER),
}


def advice(
    part: str,
    training: Training,
    *,
    num_devices: int = 1,
    alone: bool = False,
    all_sizes: bool = False,
) -> str:
    """Advice for a plan of `num_devices` whose memory goes into `part`; `alone`: on one device that
    is given; `all_sizes`: chunks of every size were tried."""
    ways = ["give it a larger memory.device"] if alone else []
    if part == "state" or (all_sizes and _SMALLER[0] in _WAYS[part]):
        if num_devices > 1 and training.zero_stage < 3:
            ways += ["shard all of the state (ZeRO-3)"]
        if not alone:
            shared = "use several devices, which share the state (ZeRO)"
            ways += [shared if num_devices == 1 else "use more devices"]
        ways += ["train LoRA adapters (model.lora)"] * (training.lora is None)
        ways += _SHORTER * (part == "activations")
        ways += ["use a smaller model"]
    else:
        more = () if alone else _WAYS_WITH_MORE.get(part.removesuffix("_gradients"), ())
        ways += [_SEVERAL if way == _LARGER and num_devices == 1 else way for way in more]
        ways += _WAYS[part]
    *first, last = ways
    return f"{', '.join(first)}, or {last}" if first else last


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
        state = sum(peak[part] for part in _STATE)
        rest = {part: n for part, n in peak.items() if part not in _STATE and n > 0}
        largest = max(rest, key=rest.__getitem__, default="state")
        # with the state alone above the budget nothing else helps
        self.part: str = "state" if state > budget_bytes else largest
        """Part of memory that takes the most: `state`, or a part besides it."""
        parts = ", ".join(
            f"{PART_WORDS.get(part, part)} {format_bytes(n)}"
            for part, n in sorted(peak.items(), key=lambda pair: -pair[1])
            if n > 0
        )
        super().__init__(
            given=f"rank {rank} needs {format_bytes(needed)}"
            + (f" with {with_what}" if with_what else "")
            + f": {parts}",
            required=f"at most {format_bytes(budget_bytes)}, which lacks "
            f"{format_bytes(self.lacking_bytes)}",
            source="the memory of a device",
            change=advice(self.part, training, num_devices=num_devices),
        )


def fit(
    plan: ChunkPlan, model: CostModel, budget_bytes: int | None = None, *, with_what: str = ""
) -> int:
    """The peak bytes of the rank that needs most. Raises DoesNotFitError at the first rank whose
    device has less, ConfigError at the first whose share of its host's memory is smaller.
    `with_what`: words for what the plan computes."""
    memory, host_bytes = model.memory(budget_bytes), model.hardware.host_bytes
    num_devices = len(plan.actions) * plan.sp_size * model.training.replicas
    peak = 0
    for rank in range(len(plan.actions)):
        curve = memory.curve(plan, rank)
        needed = sum(curve.peak.values())
        if needed > memory.budget_bytes(rank):
            raise DoesNotFitError(
                rank, curve.peak, memory.budget_bytes(rank), model.training,
                num_devices=num_devices, with_what=with_what,
            )  # fmt: skip
        if (on_host := int(curve.host.max(initial=0))) > host_bytes:
            raise ConfigError(
                given=f"rank {rank} needs {format_bytes(on_host)} of its host's memory",
                required=f"at most {format_bytes(host_bytes)}: memory.host, or a device's share"
                " of its node",
                source="the memory of the host",
                change="raise memory.host if the node has more, keep less (chunks.keep), or use"
                " more devices",
            )
        peak = max(peak, needed)
    return peak


def tier_budgets(
    tier: Any,
    host: int | Literal["auto"],
    disk: int,
    *,
    on_cpu: bool,
    free_host_bytes: int | None = None,
) -> tuple[int | None, int]:
    """Bytes of host and disk that a plan may use; 0: none, None: no limit.

    `tier`: chunks.tier, or None or auto. `host`, `disk`: memory.host and memory.disk.
    `free_host_bytes`: what auto means on a GPU; None where that is not known. Raises ConfigError.
    """
    tiers = set() if tier in (None, "auto") else _named(tier)
    if on_cpu:
        if host not in ("auto", 0):
            raise ConfigError(
                given=f"memory.host = {format_bytes(int(host))} on a CPU",
                required="memory.device alone: on a CPU it is the budget of everything in RAM",
                source="memory.host",
                change="remove memory.host, and add what it gives to memory.device",
            )
        if "host" in tiers:
            raise ConfigError(
                given=f"chunks.tier = {tier!r} on a CPU",
                required="device or disk: on a CPU the host's RAM is the device's",
                source="chunks.tier",
                change="remove host from chunks.tier, or write disk and add memory.disk",
            )
        return 0, _disk(tiers, disk)
    host_bytes = free_host_bytes if host == "auto" else host
    if host_bytes == 0 and "host" in tiers:
        raise _no_room("host")
    return host_bytes, _disk(tiers, disk)


def _named(tier: Any) -> set[str]:
    tiers = ChunkOptions(tier=tier).tiers
    return {tiers.kv, tiers.inputs, tiers.attention, tiers.graphs}


def _disk(tiers: set[str], disk: int) -> int:
    if disk == 0 and "disk" in tiers:
        raise _no_room("disk")
    return disk


def _no_room(tier: str) -> ConfigError:
    return ConfigError(
        given=f"chunks.tier on the {tier} with memory.{tier} = 0",
        required=f"memory.{tier} above 0, for what is to live there",
        source=f"chunks.tier and memory.{tier}",
        change=f"add memory.{tier}, such as 64GiB, or change chunks.tier",
    )


SIZES = ("dp", "sp", "pp")
"""Names of a layout's sizes among what is given; the others are dials of `ChunkOptions`."""


@dataclass(frozen=True)
class Limits:
    """Bytes that a step may use in each tier; 0: the tier is not there; None: no limit."""

    device_bytes: int
    host_bytes: int | None = 0
    disk_bytes: int | None = 0
    margin: float = MARGIN
    """Share of the device's bytes that a plan leaves free."""

    @property
    def limit_bytes(self) -> int:
        """Bytes of the device, without the margin."""
        return int(self.device_bytes * (1 - self.margin))

    @property
    def lower_tiers(self) -> tuple[Tier, ...]:
        """The tiers that are there, besides the device."""
        tiers: tuple[Tier, ...] = ("host", "disk")
        limits = self.host_bytes, self.disk_bytes
        return tuple(tier for tier, limit in zip(tiers, limits, strict=True) if limit != 0)

    def hold(self, needs: Needs) -> bool:
        """Whether each tier has room for what is needed of it."""
        return not self.lacking(needs)

    def lacking(self, needs: Needs) -> int:
        """Bytes that do not fit, of all tiers together; 0 where it fits."""
        limits = self.limit_bytes, self.host_bytes, self.disk_bytes
        return sum(
            max(0, used - limit)
            for used, limit in zip(needs, limits, strict=True)
            if limit is not None
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
    """0: all of `seq_lens` are one step."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of the layout (`SIZES`) and dials that the user has fixed, by their names."""
    method: str = "auto"
    """`auto`, or the published system whose plans are wanted."""
    seed: int = 0
    mean_keys: float = 0.0
    """Keys that a token of the data attends on average; 0: that of `seq_lens`."""
    stages: tuple[int, ...] = ()
    """Layers of each stage of a pipeline that is cut already."""
    beat_s: float = inf
    """Seconds of a step that is there: planners that search need find none that is slower."""
    most_chunks: int = 512
    """Most chunks of the longest sequence."""
    most_cells: int = 2048
    """Most cells of the longest sequence, layer-first: more take longer to walk than all else."""

    def __post_init__(self) -> None:
        if not self.longest:
            object.__setattr__(self, "longest", max(self.seq_lens, default=0))
        if not self.sequences_per_step:
            object.__setattr__(self, "sequences_per_step", len(self.seq_lens))
        if not self.mean_keys:
            object.__setattr__(self, "mean_keys", mean_attended_keys(self.seq_lens))

    @property
    def dials(self) -> dict[str, Any]:
        """The given dials of `ChunkOptions`."""
        return {name: value for name, value in self.given.items() if name not in SIZES}

    def layouts(self) -> list[Layout]:
        """The layouts with the given sizes, among them pools without a pipeline that do not divide
        the heads, which gather K,V. Raises ConfigError where there is none."""
        dp, sp, pp = (self.given.get(name) for name in SIZES)
        find = partial(layouts, self.num_devices, self.model.shape, dp=dp, sp=sp, pp=pp)
        found = find()
        return found + [one for one in find(gathers=True) if one.pp == 1 and one not in found]

    def stages_of(self, layout: Layout) -> tuple[int, ...]:
        """Layers of each stage of a pipeline; empty without one."""
        if layout.pp == 1:
            return ()
        if len(self.stages) == layout.pp:
            return self.stages
        return cut_layers(self.model.shape, layout.pp, self.mean_keys)

    def model_of(self, layout: Layout) -> CostModel:
        """The model of one replica's plan, with whose replicas and pools a stage's state is shared
        as a run shares it."""
        zero: ZeroStage = 1 if layout.dp * layout.sp > 1 else 0
        training = replace(
            self.model.training, zero_stage=zero, gathers=bool(zero), replicas=layout.dp
        )
        return replace(self.model, training=training)


@dataclass(frozen=True)
class Candidate:
    """Plans that a method offers in a layout, one for any batch."""

    method: str
    layout: Layout
    options: ChunkOptions
    """The dials; a method that makes chunks of its own reads only those that it knows."""
    estimate_s: float
    """About the seconds of the question's steps, or less."""
    plan_of: Callable[[Sequence[int]], ChunkPlan]
    """The plan of one replica's sequences. Raises UserError where it has none that fits."""
    least: Needs | None = None
    """Bytes of a device below which no step with the longest sequence gets, where they are known
    without its plan."""
    longest: Sequence[int] = ()
    """Sequences of one replica's step that needs most memory; empty: those of the question."""
    busiest_s: Callable[[], float] | None = None
    """Seconds of all steps of the busiest replica, where there is a shorter way to them than the
    clock over its plans."""


Candidates = Callable[[Question, Layout], Iterable[Candidate]]
"""Offers the plans of one published system in a layout, rising in their estimates."""


@dataclass(frozen=True)
class Trial:
    """A candidate whose plans were made, walked and timed."""

    candidate: Candidate
    step_s: float
    """Seconds of a step on average, of the plans of all replicas joined; 0 of those refused."""
    needs: Needs
    curve: MemoryCurve
    """Bytes over the step of the longest sequence, of the device that lacks most."""


@dataclass(frozen=True)
class Answer:
    """The outcome of a search."""

    question: Question
    tried: tuple[Trial, ...]
    """The plans that fit, the chosen one first, then by their seconds; empty where none does."""
    refused: tuple[Trial, ...]
    """The plans that do not fit after all, the one that lacks least first."""
    too_large: tuple[tuple[Layout, int], ...] = ()
    """Layouts of which nothing fits, and was not walked, with the bytes that a device lacks at
    least."""
    slower: tuple[tuple[Layout, float], ...] = ()
    """Layouts of which no plan was timed, with the seconds that a step takes, about or at least."""
    alike: int = 1
    """Plans like the chosen one within the slack of its time."""
    num_pruned: int = 0
    """Candidates that were left out by their bounds or their estimates."""
    seconds: float = field(default=0.0, compare=False)
    """Seconds that the search took."""

    @property
    def best(self) -> Trial:
        return self.tried[0]

    @property
    def dials(self) -> Trial:
        """The plan of dials in the chosen layout, which a run needs beside a method's own chunks:
        the chosen one, or the fastest there."""
        layout = self.best.candidate.layout
        return next(
            trial for trial in self.tried
            if trial.candidate.layout == layout and trial.candidate.longest
        )  # fmt: skip
