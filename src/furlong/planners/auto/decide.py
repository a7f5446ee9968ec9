"""The dials that `auto` chooses for a run on one device, and the words for it.

    decision = decide(lengths, sequences_per_step=32, model=model, budget_bytes=budget)
    decision.options, decision.words, decision.predict(plan)

The search is `auto_search`; dials that are given hold. Times are those of a run's first steps, or
of some sequences of them; the longest sequence of the data must fit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil, inf
from typing import TYPE_CHECKING, Any

from furlong.cost.memory.training import Lora, Training
from furlong.cost.model import CostModel
from furlong.errors import ConfigError
from furlong.plan.lengths import Lengths, draw_lengths
from furlong.plan.values import ChunkPlan
from furlong.planners.auto.candidates import SMALLEST_CHUNK, Space
from furlong.planners.auto.search import MARGIN, SLACK, Budgets, Searched, search_device
from furlong.planners.budget import DoesNotFitError, advice
from furlong.planners.layout import ONE_DEVICE, Layout
from furlong.planners.options import ChunkOptions, dials_of, fixed_options, value_in_words
from furlong.planners.predict import Needs, Prediction, predict
from furlong.planners.sampling.rules import Sampling
from furlong.units import format_bytes

if TYPE_CHECKING:
    from furlong.config.schema import ChunksConfig, ModelConfig

FREE_RAM = "three fifths of the free RAM"
"""The budget of `memory.device: auto` on a CPU."""
SEARCHED_DIALS = ("size", "num_retained", "keep", "tier", "order")
_MIN_SEQUENCES = 32
"""Number of sequences in the steps whose time is predicted, together."""
_MAX_SEQUENCES = 1024
_MAX_TOKENS = 2**17
"""Most tokens of the predicted steps, but for a single longer sequence: more change the choice by
less than its error."""
_MIN_STEPS = 4
"""Number of steps that are predicted for several devices, if they have no more tokens than may be.
"""
_MOST_TIMES = 8
"""Devices whose number multiplies `_MAX_TOKENS`, at most."""
_MAX_CHUNKS = 2048
"""Most chunks of the longest sequence, in a search."""
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


@dataclass(frozen=True)
class Decision:
    """The dials of a run, and why."""

    options: ChunkOptions
    words: str
    """The choice, its reason, and the price of the next best; empty where nothing was left to
    choose."""
    searched: Searched | None = None
    """Outcome of the search; None where nothing was searched, or nothing fits."""
    model: CostModel | None = None
    """The model that predicts the steps; None where the work cannot be counted."""
    figures: str = ""
    """Origin of the model's seconds and bytes."""
    layout: Layout = ONE_DEVICE
    """How the processes of the run are divided."""
    stages: tuple[int, ...] = ()
    """Layers of each stage of a pipeline; empty without one."""

    def predict(self, plan: ChunkPlan) -> Prediction | None:
        """Seconds and bytes of a plan's step; None where there is nothing to predict with."""
        return None if self.model is None else predict(self.model, plan)


def decide(
    lengths: Lengths,
    *,
    sequences_per_step: int,
    seed: int = 0,
    longest: int | None = None,
    model: CostModel,
    budget_bytes: int,
    budget_words: str = "memory.device",
    host_bytes: int | None = 0,
    disk_bytes: int | None = 0,
    margin: float = MARGIN,
    must_fit: bool = False,
    alone: bool = True,
    dials: Mapping[str, Any] | None = None,
) -> Decision:
    """The options of a run over sequences of these lengths on one device.

    `longest`: tokens of the data's longest sequence, if it is not among `lengths`. `host_bytes`,
    `disk_bytes`: budgets of the tiers below, 0 where there is none, None without a limit. `margin`:
    share of the device's budget that the plan leaves free. `dials`: what the user has given. Where
    no plan is predicted to fit, small chunks that keep K,V are taken, and the words say so; with
    `must_fit` that is a ConfigError, whose advice is that for a run, or without `alone` that for
    who may take more devices.
    """
    given = dict(dials or {})
    longest = max(longest or 0, lengths.longest)
    if longest > _MAX_CHUNKS * given.get("size", inf):
        words = f"more than {_MAX_CHUNKS:,} chunks are not searched: by the fixed rule"
        return Decision(fixed_options(longest, given), words, model=model)
    seq_lens = sample_steps(lengths, sequences_per_step, seed)
    budgets = Budgets(budget_bytes, host_bytes, disk_bytes, margin)
    space = Space(model, seq_lens, sequences_per_step, longest, given)
    searched = search_device(space, budgets)
    if searched.tried:
        words = _why(searched, budgets, budget_words)
        return Decision(searched.best.options, words, searched, model)
    error = _nothing_fits(searched, budgets, alone=alone)
    if must_fit:
        raise error
    budget = f"{format_bytes(budget_bytes)} ({budget_words})"
    words = f"small chunks, for no plan is predicted to fit {budget}: {error.given}"
    return Decision(_smallest(longest, given), words, model=model)


def sample_steps(
    lengths: Lengths, sequences_per_step: int, seed: int, num_devices: int = 1
) -> Sequence[int]:
    """Sequences of a run's first steps: as many whole steps as have tokens enough; of a larger step
    some of its sequences, evenly spread over their lengths, one for each device at least. Several
    devices have several steps, for one sequence may decide how long a step takes all of them."""
    num_steps = max(-(-_MIN_SEQUENCES // sequences_per_step), _MIN_STEPS if num_devices > 1 else 1)
    most = max(_MAX_SEQUENCES, num_devices)
    drawn = draw_lengths(lengths, min(num_steps * sequences_per_step, most), seed)
    most_tokens = _MAX_TOKENS * min(num_devices, _MOST_TIMES)
    num_fitting = bisect_right(list(accumulate(drawn)), most_tokens)
    if num_fitting == len(drawn):
        return drawn
    if whole := num_fitting // sequences_per_step * sequences_per_step:
        return drawn[:whole]
    step = sorted(drawn[:sequences_per_step], reverse=True)
    count = max(min(num_devices, len(step)), int(len(step) * most_tokens / sum(step)))
    return [step[(2 * i + 1) * len(step) // (2 * count)] for i in range(count)]


def _why(searched: Searched, budgets: Budgets, budget_words: str) -> str:
    """The choice, its reason, and the price of the next best."""
    best, rivals = searched.best, searched.tried[1:]
    budget = f"{format_bytes(budgets.device_bytes)} ({budget_words})"
    why = f"the fastest that fits {budget} less {budgets.margin:.0%} for what no prediction sees"
    if searched.alike > 1:
        why = f"needs least memory of {searched.alike} plans within {SLACK:.0%} of {why}"
    words = (
        f"{dials_in_words(best.options)}: {why}; {needs_in_words(best.needs)} predicted;"
        f" next best of {len(searched.tried)} that were tried and fit: "
    )
    if not rivals:
        return f"{words}none"
    rival = rivals[0]
    change = _change(rival.step_s / best.step_s)
    return f"{words}{dials_in_words(rival.options)}: {change}, {needs_in_words(rival.needs)}"


def _nothing_fits(searched: Searched, budgets: Budgets, *, alone: bool) -> ConfigError:
    """The message of a search in which nothing fits, with the budgets that would do."""
    nearest, needs = searched.refused[0], searched.refused[0].needs
    count = len(searched.refused) + searched.num_pruned
    words = f"of {count:,} plans none fits; nearest is {dials_in_words(nearest.options)}"
    limits = {
        "device": budgets.limit_bytes, "host": budgets.host_bytes, "disk": budgets.disk_bytes,
    }  # fmt: skip
    lacking = {
        tier: used
        for (tier, limit), used in zip(limits.items(), needs, strict=True)
        if limit is not None and used > limit
    }
    if "device" not in lacking:
        tier, used = next(iter(lacking.items()))
        return ConfigError(
            given=f"{words}, which needs {format_bytes(used)} on the {tier}",
            required=f"at most {format_bytes(limits[tier] or 0)}",
            source=f"memory.{tier}",
            change="leave more on the device (chunks.tier), or less to keep (chunks.keep);"
            f" {_enough({tier: used})}",
        )
    error = DoesNotFitError(0, nearest.curve.peak, budgets.limit_bytes)
    lacking["device"] = ceil(needs.device_bytes / (1 - budgets.margin))
    own = format_bytes(budgets.device_bytes)
    # no run has smaller chunks: that advice would lead nowhere
    part = "state" if alone and nearest.options.size <= SMALLEST_CHUNK else error.part
    return ConfigError(
        given=f"{words}, whose {error.given}",
        required=f"{error.required} ({own} less a margin of {budgets.margin:.0%})",
        source=f"the search over {count:,} plans of one device",
        change=f"{advice(part, alone=alone)}; {_enough(lacking)}",
    )


def _enough(needed: Mapping[str, int]) -> str:
    """The smallest budgets with which a plan fits, rounded up to a MiB."""
    amounts = (f"memory.{tier}: {-(-used // 2**20)}MiB" for tier, used in needed.items())
    return f"the smallest that would do is {', with '.join(amounts)}"


def _smallest(longest: int, given: Mapping[str, Any]) -> ChunkOptions:
    """Options that need little, with the dials that are given."""
    size = min(1024, fixed_options(longest).size)
    small: dict[str, Any] = {"size": size, "num_retained": 0, "keep": "kv"}
    return ChunkOptions(**(small | dict(given)))


def dials_in_words(options: ChunkOptions) -> str:
    """The dials of a plan as text, each as its name and value."""
    return ", ".join(f"{name} {value_in_words(value)}" for name, value in dials_of(options).items())


def needs_in_words(needs: Needs) -> str:
    """Bytes of each tier that has any."""
    words = format_bytes(needs.device_bytes)
    for tier, num_bytes in (("host", needs.host_bytes), ("disk", needs.disk_bytes)):
        if num_bytes:
            words += f" and {format_bytes(num_bytes)} on the {tier}"
    return words


def _change(ratio: float) -> str:
    """Words for a ratio of two durations: 1.032 is '3.2% slower'."""
    if abs(ratio - 1) < 5e-4:
        return "as fast"
    return f"{abs(ratio - 1):.1%} {'slower' if ratio > 1 else 'faster'}"


def training_of(model: ModelConfig) -> Training:
    """The trained weights of a run and their dtypes, on one device."""
    training, lora = Training.in_dtype(model.dtype), model.lora
    if lora is None:
        return training
    named = {"all"} if lora.target_modules == "all-linear" else set(lora.target_modules)
    attention, mlp = "all" in named or bool(named & _ATTENTION), bool(named - _ATTENTION)
    return replace(training, lora=Lora(lora.rank, attention=attention, mlp=mlp))


def given_dials(chunks: ChunksConfig) -> dict[str, Any]:
    """The dials that a run file gives; stage_layers alone mean layer-first. Raises ConfigError for
    a sample whose keys contradict each other."""
    dials = {name: getattr(chunks, name) for name in (*SEARCHED_DIALS, "stage_layers")}
    given = {name: value for name, value in dials.items() if value != "auto"}
    if "stage_layers" in given:
        given = {"order": "layer-first", **given}
    if chunks.sample is not None:
        given["sample"] = Sampling(**chunks.sample.model_dump(exclude={"check_every_steps"}))
    return given
