"""The dials, the method and the layout that `auto` chooses for a run, and the words for them.

    decision = decide(lengths, sequences_per_step=32, model=model, budget_bytes=budget)
    decision.options, decision.words, decision.predict(plan)

The search is that of `planners.search`; what is given holds. Times are those of a run's first
steps, or of some sequences of them; the longest sequence of the data must fit. `longest_sequence`
finds the longest one that a decision could still train.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Literal

from furlong.cost.machine import are_links_measured
from furlong.cost.model import CostModel
from furlong.cost.training import Lora, Training
from furlong.errors import ConfigError, PlanError, UserError
from furlong.plan.lengths import Lengths, draw_lengths
from furlong.plan.plan import ONE_DEVICE, ChunkPlan, Layout
from furlong.planners.candidates import SMALLEST_CHUNK, space_of, state_of
from furlong.planners.options import ChunkOptions, dials_of, fixed_options, value_in_words
from furlong.planners.orders import plan_replica
from furlong.planners.predict import Needs, Prediction, needs_of, predict_step
from furlong.planners.question import (
    SIZES,
    Answer,
    DoesNotFitError,
    Limits,
    Question,
    Trial,
    advice,
)
from furlong.planners.search import SLACK, search, walkable, whole_model
from furlong.planners.spaco import Sampling
from furlong.units import count_words, format_bytes, format_seconds

if TYPE_CHECKING:
    from furlong.config.schema import ChunksConfig, ModelConfig


_NEEDS = {
    "spaco": "chunks.sample, a layout",
    "infinipipe": "a pipeline (parallel.pp above 1)",
    "skrull": "a pool (parallel.sp above 1) without a pipeline",
    "places": "a pool (parallel.sp above 1) without a pipeline",
    "seco": "no pipeline, keep kv, num_retained 0, order chunk-first",
}
"""The needs of each method, which it cannot do without."""
MAX_CHUNKS = 2048
"""Chunks of the sequences that are tried: more take too long to plan for a figure."""
MAX_ACTIONS = 6_000
"""Most actions of one rank in a plan that is tried."""
MAX_TOKENS = 2**28


@dataclass(frozen=True, slots=True)
class Longest:
    """The answer to how long a sequence may be."""

    num_tokens: int
    """0 where not even one token fits."""
    limit: Literal["memory", "positions", "trials"]
    """Reason for the limit: a longer sequence does not fit, the model has no more positions, or
    nothing longer was tried."""


def longest_sequence(
    answer: Answer, *, start: int = 1024, num_positions: int | None = None
) -> Longest:
    """By bisection, to 1 % or a token, with the chosen method and with the dials of its layout.

    `start`: a length to try first; `num_positions`: the most that the model has, None where that is
    unknown. The other replicas share the state and hold less.
    """
    question, layout = answer.question, answer.best.candidate.layout
    model, stages = question.model_of(layout), question.stages_of(layout)
    memory, options = model.memory(), answer.dials.candidate.options

    def plans(num_tokens: int) -> Iterator[ChunkPlan]:
        yield plan_replica(
            [num_tokens], options, num_layers=model.shape.num_layers, stages=stages,
            sp_size=layout.sp,
        )  # fmt: skip
        if answer.best is not answer.dials:
            with suppress(UserError):
                yield answer.best.candidate.plan_of([num_tokens])

    def try_length(num_tokens: int) -> ChunkPlan | None:
        """The plan, or None where there is none that fits."""
        with suppress(PlanError):
            for plan in plans(num_tokens):
                curves = (memory.curve(plan, rank) for rank in range(len(plan.actions)))
                if all(question.limits.hold(needs_of(curve)) for curve in curves):
                    return plan
        return None

    most = num_positions or MAX_TOKENS
    low, high = 0, min(max(1, start), most)
    while (tried := try_length(high)) is not None:
        low = high
        if high == num_positions:
            return Longest(low, "positions")
        is_large = len(tried.chunks) >= MAX_CHUNKS or len(tried.actions[0]) >= MAX_ACTIONS
        if is_large or high >= most:
            return Longest(low, "trials")
        high = min(2 * high, most)
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if try_length(middle) is not None else (low, middle)
    return Longest(low, "memory")


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
_MOST_LAYOUTS = 3
"""Layouts that are named, of those that are slower and of those that do not fit."""


@dataclass(frozen=True)
class Decision:
    """The dials of a run, and why."""

    options: ChunkOptions
    words: str
    """The choice, its reason, and the price of the next best; empty where nothing was left to
    choose."""
    answer: Answer | None = None
    """Outcome of the search; None where nothing was searched, or nothing fits."""
    model: CostModel | None = None
    """The model that predicts the steps; None where the work cannot be counted."""
    figures: str = ""
    """Origin of the model's seconds and bytes."""
    layout: Layout = ONE_DEVICE
    """How the processes of the run are divided."""
    stages: tuple[int, ...] = ()
    """Layers of each stage of a pipeline; empty without one."""
    layout_words: str = ""
    """The layout with the seconds of a step, and what the others would have cost; empty on one
    device, and where no layout was searched."""
    budget_bytes: int | None = None
    """Bytes of a device for the planners of single batches, which a resumed run makes of the same;
    None where there are none."""
    has_shrunk: bool = False
    """Whether the options are of smaller chunks than those that were chosen, after a step that did
    not fit."""

    def predict(self, plan: ChunkPlan) -> Prediction | None:
        """Seconds and bytes of a plan's step; None where there is nothing to predict with."""
        return None if self.model is None else predict_step(self.model, plan)


def decide(
    lengths: Lengths,
    *,
    sequences_per_step: int,
    model: CostModel,
    limits: Limits,
    budget_words: str = "memory.device",
    num_devices: int = 1,
    seed: int = 0,
    longest: int | None = None,
    steps: Sequence[int] | None = None,
    given: Mapping[str, Any] | None = None,
    method: str = "auto",
    must_fit: bool = False,
    alone: bool = True,
    tell: Callable[[str], None] | None = None,
) -> Decision:
    """The options of a run over sequences of these lengths, and its layout.

    `longest`: tokens of the data's longest sequence, if it is not among `lengths`. `steps`: the
    sequences of the steps that are timed; None: drawn as a run draws them. `given`: dials, and
    sizes of the layout, that the user has given. Where no plan is predicted to fit, small
    chunks that keep K,V are taken, and the words say so; with `must_fit` that is a ConfigError,
    whose advice is that for a run, or without `alone` that for who may take more devices.
    """
    longest = max(longest or 0, lengths.longest)
    if steps is None:
        steps = sample_steps(lengths, sequences_per_step, seed, num_devices)
    question = Question(
        steps, model, limits, num_devices,
        longest, sequences_per_step, dict(given or {}), method, seed,
        lengths.num_pairs / lengths.num_tokens,
    )  # fmt: skip
    if longest > _MAX_CHUNKS * question.given.get("size", inf):
        words = f"more than {_MAX_CHUNKS:,} chunks are not searched: by the fixed rule"
        options = fixed_options(longest, question.dials)
        return _unsearched(options, words, question, walkable(question)[0])
    answer = search(question, tell)
    if answer.tried:
        return _decision(answer, budget_words)
    error = nothing_fits(answer, alone=alone)
    if must_fit:
        raise error
    budget = f"{format_bytes(limits.device_bytes)} ({budget_words})"
    words = f"small chunks, for no plan is predicted to fit {budget}: {error.given}"
    return _unsearched(_smallest(longest, question.dials), words, question, _nearest(answer)[1])


def _decision(answer: Answer, budget_words: str) -> Decision:
    question, layout = answer.question, answer.best.candidate.layout
    dials = chunk_trials(answer, layout)
    is_one = question.num_devices == 1
    return Decision(
        answer.dials.candidate.options, why(answer, dials, budget_words), answer,
        question.model if is_one else whole_model(question.model_of(layout)),
        layout=layout, stages=question.stages_of(layout),
        layout_words="" if is_one else layouts_in_words(answer),
    )  # fmt: skip


def chunk_trials(answer: Answer, layout: Layout) -> list[Trial]:
    """The plans of dials that fit in a layout, the fastest first or the chosen one."""
    return [
        trial for trial in answer.tried
        if trial.candidate.layout == layout and trial.candidate.longest
    ]  # fmt: skip


def _unsearched(options: ChunkOptions, words: str, question: Question, layout: Layout) -> Decision:
    model = whole_model(question.model_of(layout))
    return Decision(options, words, model=model, layout=layout, stages=question.stages_of(layout))


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


def _smallest(longest: int, given: Mapping[str, Any]) -> ChunkOptions:
    """Options that need little, with the dials that are given."""
    size = min(1024, fixed_options(longest).size)
    small: dict[str, Any] = {"size": size, "num_retained": 0, "keep": "kv"}
    return ChunkOptions(**(small | dict(given)))


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


def why(answer: Answer, dials: Sequence[Trial], budget_words: str) -> str:
    """The chosen dials of a layout, their reason, and the price of the next best."""
    limits, (best, *others) = answer.question.limits, dials
    budget = f"{format_bytes(limits.device_bytes)} ({budget_words})"
    why = f"the fastest that fits {budget} less {limits.margin:.0%} for what no prediction sees"
    if answer.alike > 1 and answer.question.num_devices == 1:
        why = f"needs least memory of {answer.alike} plans within {SLACK:.0%} of {why}"
    chosen = answer.best
    own = f"{chosen.candidate.method} batch by batch, else " if chosen is not best else ""
    words = (
        f"{own}{dials_in_words(best.candidate.options)}: {why}; {needs_in_words(best.needs)}"
        f" predicted; next best of {len(dials)} that were tried and fit: "
    )
    if not others:
        return f"{words}none"
    other = others[0]
    change = compared(other.step_s / best.step_s)
    needs = needs_in_words(other.needs)
    return f"{words}{dials_in_words(other.candidate.options)}: {change}, {needs}"


def nothing_fits(answer: Answer, *, alone: bool) -> ConfigError:
    """The message of a search in which nothing fits in any layout, with the budgets that would
    do."""
    question = answer.question
    limits, (nearest, layout) = question.limits, _nearest(answer)
    training = question.model_of(layout).training
    state_bytes = state_of(space_of(question, layout))
    if nearest is not None:
        error = _plan_lacks(answer, nearest, training, alone=alone)
    elif state_bytes > limits.limit_bytes:
        limit = format_bytes(limits.limit_bytes)
        error = ConfigError(
            given=f"weights, gradients and optimizer of {format_bytes(state_bytes)} on each device",
            required=f"at most {limit} ({format_bytes(limits.device_bytes)} less a margin of"
            f" {limits.margin:.0%})",
            source="the search over the plans of a layout",
            change=advice("state", training, num_devices=layout.num_devices, alone=alone),
        )
    else:
        raise _nothing_offered(question)
    if question.num_devices == 1:
        return error
    given, source = error.given, error.source
    some = [one for one, _ in answer.too_large]
    some += dict.fromkeys(trial.candidate.layout for trial in answer.refused)
    if len(some) > 1:
        source = f"the search over {len(some)} layouts"
        given = f"in none of {len(some)} layouts a plan fits; nearest is {layout}: {given}"
    ways = ["start more processes"]
    fixed = [name for name in ("sp", "pp") if all(getattr(one, name) == 1 for one in some)]
    if fixed:
        named = " and ".join(f"parallel.{name}" for name in fixed)
        ways.insert(0, f"set {named} to auto")
    return ConfigError(
        given=given, required=error.required, source=source,
        change=f"{', '.join(ways)}; or {error.change}",
    )  # fmt: skip


def _nearest(answer: Answer) -> tuple[Trial | None, Layout]:
    """The plan that lacks least, or None where the state of a layout lacks less; and its layout."""
    question, limits = answer.question, answer.question.limits
    refused, too_large = answer.refused, sorted(answer.too_large, key=lambda pair: pair[1])
    least = limits.lacking(refused[0].needs) if refused else inf
    for layout, lacking_bytes in too_large:
        state_bytes = state_of(space_of(question, layout))
        if lacking_bytes < least and state_bytes > limits.limit_bytes:
            return None, layout
    if refused:
        return refused[0], refused[0].candidate.layout
    return None, too_large[0][0] if too_large else question.layouts()[0]


def _nothing_offered(question: Question) -> ConfigError:
    dials = ", ".join(f"{name} {value}" for name, value in question.given.items())
    layouts = question.layouts()
    return ConfigError(
        given=f"chunks.method = {question.method}"
        + (f" with {dials}" if dials else "")
        + f" on {count_words(question.num_devices, 'device')}",
        required=f"{_NEEDS.get(question.method, 'a layout')}, dials and a batch for which the"
        " method has a plan that fits",
        source=f"chunks.method, in {count_words(len(layouts), 'layout')}",
        change=f"give fewer of {', '.join((*SIZES, 'chunks'))}, start more processes, or use"
        " another method",
    )


def _plan_lacks(answer: Answer, nearest: Trial, training: Training, *, alone: bool) -> ConfigError:
    """The message of the plan that lacks least."""
    limits, needs, options = answer.question.limits, nearest.needs, nearest.candidate.options
    plans = count_words(len(answer.refused) + answer.num_pruned, "plan")
    words = f"of {plans} none fits; nearest is {dials_in_words(options)}"
    most = {"device": limits.limit_bytes, "host": limits.host_bytes, "disk": limits.disk_bytes}
    lacking = {
        tier: used
        for (tier, limit), used in zip(most.items(), needs, strict=True)
        if limit is not None and used > limit
    }
    if "device" not in lacking:
        tier, used = next(iter(lacking.items()))
        return ConfigError(
            given=f"{words}, which needs {format_bytes(used)} on the {tier}",
            required=f"at most {format_bytes(most[tier] or 0)}",
            source=f"memory.{tier}",
            change="leave more on the device (chunks.tier), or less to keep (chunks.keep);"
            f" {_enough({tier: used})}",
        )
    error = DoesNotFitError(0, nearest.curve.peak, limits.limit_bytes, training)
    lacking["device"] = ceil(needs.device_bytes / (1 - limits.margin))
    own = format_bytes(limits.device_bytes)
    # no run has smaller chunks: that advice would lead nowhere
    part = "state" if alone and options.size <= SMALLEST_CHUNK else error.part
    return ConfigError(
        given=f"{words}, whose {error.given}",
        required=f"{error.required} ({own} less a margin of {limits.margin:.0%})",
        source=f"the search over {plans} of one device",
        change=f"{advice(part, training, alone=alone)}; {_enough(lacking)}",
    )


def _enough(needed: Mapping[str, int]) -> str:
    """The smallest budgets with which a plan fits, rounded up to a MiB."""
    amounts = (f"memory.{tier}: {-(-used // 2**20)}MiB" for tier, used in needed.items())
    return f"the smallest that would do is {', with '.join(amounts)}"


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


def compared(ratio: float) -> str:
    """Words for a ratio of two durations: 1.032 is '3.2% slower'."""
    if abs(ratio - 1) < 5e-4:
        return "as fast"
    return f"{abs(ratio - 1):.1%} {'slower' if ratio > 1 else 'faster'}"


def layouts_in_words(answer: Answer) -> str:
    """The chosen layout with the seconds of its step, the next best, and why others are none."""
    best, question, limits = answer.best, answer.question, answer.question.limits
    layout = best.candidate.layout
    fastest: dict[Layout, Trial] = {}
    for trial in answer.tried:
        fastest.setdefault(trial.candidate.layout, trial)
    refused: dict[Layout, str] = {}
    for one, lacking in sorted(answer.too_large, key=lambda pair: pair[1]):
        refused[one] = f"at least {format_bytes(lacking)}"
    for trial in answer.refused:
        if trial.candidate.layout not in fastest:
            refused.setdefault(trial.candidate.layout, format_bytes(limits.lacking(trial.needs)))
    slower = sorted(answer.slower, key=lambda pair: pair[1])
    num_others = len(fastest) + len(refused) + len(slower) - 1
    head = division_in_words(layout, question.stages_of(layout)) + " (auto)" * bool(num_others)
    others = [
        f"{one} is {compared(trial.step_s / best.step_s)}"
        for one, trial in fastest.items()
        if one != layout
    ]
    others += [f"{one} is about {compared(s / best.step_s)}" for one, s in slower]
    words = [f"{head}: {format_seconds(best.step_s)} predicted per step"]
    words += _some(others, "more are slower")
    words += _some(
        [f"{one} does not fit: it lacks {amount}" for one, amount in refused.items()],
        "more do not fit",
    )
    if not are_links_measured(question.model.hardware):
        words.append("links between devices are assumed")
    return "; ".join(words)


def division_in_words(layout: Layout, stages: Sequence[int]) -> str:
    """The layout of a run, with the layers of its stages."""
    layers = f" of {', '.join(map(str, stages))} layers" if stages else ""
    return f"{layout}{layers}"


def _some(words: list[str], more: str) -> list[str]:
    """The first few, and how many there are besides."""
    left = len(words) - _MOST_LAYOUTS
    return words if left < 2 else [*words[:_MOST_LAYOUTS], f"{left} {more}"]
