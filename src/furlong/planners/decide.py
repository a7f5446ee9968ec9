"""The options, method and layout that `auto` chooses for a run, with text that explains them.

    decision = decide(Question((), model, limits), lengths, size=StepSize(32))
    decision.options, decision.words, decision.predict(plan)

The search itself is in `planners.search`; it keeps all options that the user has set. Times are
predicted for the first steps of a run or, if these are too large, for some sequences of the first
step. The data's longest sequence must fit. `longest_sequence` finds the longest sequence that a
decision can train.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Literal

from furlong.config.schema import offloads_weights
from furlong.cost.machine import are_links_measured
from furlong.cost.memory import PARTS, PlanMemory
from furlong.cost.model import CostModel
from furlong.cost.training import RankWeights
from furlong.errors import ConfigError, PlanError, UserError
from furlong.plan.lengths import NUM_TIMED, Lengths, StepSize, draw_lengths
from furlong.plan.plan import ONE_DEVICE, ChunkPlan, Layout
from furlong.planners.candidates import KEEPS
from furlong.planners.chunks import Forks
from furlong.planners.options import ChunkOptions, fixed_options, options_in_words
from furlong.planners.orders import plan_two_phases, stages_of
from furlong.planners.question import (
    SIZES,
    SLACK,
    STATE,
    Answer,
    Candidate,
    Limits,
    Question,
    key_of,
    whole_model,
)
from furlong.planners.refusals import nothing_fits
from furlong.planners.search import candidates_of, search, walkable
from furlong.simulate.predict import Needs, Prediction, most_of, needs_of, predict_step
from furlong.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from furlong.config.schema import RunConfig


MAX_CHUNKS = 2048
"""Most chunks of the longest sequence: more take too long to plan."""
MAX_ACTIONS = 6_000
"""Most actions of one rank in plans of `longest_sequence`."""
_MOST_PROBES = 16
"""Most lengths that `longest_sequence` plans."""
_LONGEST_TOKENS = 2**28


@dataclass(frozen=True, slots=True)
class Longest:
    """Result of `longest_sequence`: the longest sequence that can be trained, and the reason for
    the limit."""

    num_tokens: int
    """Number of tokens; 0 if not even one token fits."""
    limit: Literal["memory", "positions", "trials"]
    """Reason for the limit: a longer sequence does not fit, the model has no more positions, or
    nothing longer was tried."""


def longest_sequence(
    answer: Answer, *, start: int = 1024, num_positions: int | None = None
) -> Longest:
    """Return the longest sequence that fits in memory, within 1 % or one token.

    A sequence fits if a plan with the chunk options of `answer`, the outcome of a search, fits in
    memory. If the user has named a method, a plan of this method may fit instead. Only the replica
    that has the sequence is planned, as the others need less. Bytes grow with tokens along a few
    straight lines, so a few plans suffice.

    `start`: length to try first. `num_positions`: number of positions that the model supports;
    None: unknown.
    """
    best, space = answer.best, replace(answer.best.space, beat_s=inf)
    question, memory, limits = space.question, space.model.memory(), space.question.limits
    plans = [space.plan_of(best.options)]
    if best.longest:
        plans = [best.plan_of]
    elif best.method == question.method:
        plans += [own.plan_of for own in candidates_of(best.method)(space)]

    def room(num_tokens: int) -> tuple[float, int]:
        """Return (excess, number of actions of a rank) for sequences of `num_tokens`. The excess is
        that of the fullest memory, as a share of its limit; it is negative if bytes are free."""
        least, actions = inf, 0
        for plan_of in plans:
            with suppress(PlanError, UserError):
                count = len(question.calls[0].seq_lens) if question.calls else 1
                plan = plan_of([num_tokens] * count)
                curves = (memory.curve(plan, rank) for rank in range(len(plan.actions)))
                share = limits.fullest(most_of(map(needs_of, curves))) - 1
                least, actions = min(least, share), len(plan.actions[0])
            if least <= 0:
                break
        return least, actions

    limit = most = num_positions or _LONGEST_TOKENS
    low, lacks, longest_refused = 0, -1.0, inf  # longest that fits, and its (negative) excess
    tried = min(max(1, start), most)
    for _ in range(_MOST_PROBES):
        share, actions = room(tried)
        slope = (share - lacks) / max(1, tried - low)
        if share <= 0:
            low, lacks = tried, share
            limit = min(most, max(tried, tried * MAX_ACTIONS // actions))
        else:
            longest_refused = tried
        step = max(1, low // 100)
        if low == limit or longest_refused - low <= step:
            break
        # where the line through the last two lengths meets the limit
        meets = low - int(lacks / slope) if slope > 0 and low else 0
        if not low:
            meets = int(longest_refused) // 2
        tried = int(min(max(meets, low + step), limit, max(longest_refused - step, low + 1)))
    if low == limit:
        return Longest(low, "positions" if limit == num_positions else "trials")
    return Longest(low, "memory")


_MIN_SEQUENCES = 32
"""Fewest sequences of all predicted steps together, within the limits below."""
_MAX_SEQUENCES = 1024
_MAX_TOKENS = 2**17
"""Most tokens of all predicted steps together, unless a single sequence has more. Further tokens
would change the choice by less than the predictions err."""
_MOST_IN_A_STEP = 2**14
_MIN_STEPS = 4
"""Fewest steps to predict for several devices, within the limit on tokens."""
_MOST_TIMES = 8
"""Most devices by whose number `_MAX_TOKENS` is multiplied."""
MAX_STEP_TOKENS = _MAX_TOKENS * _MOST_TIMES
"""Most tokens of a step on several devices that is predicted whole."""
_MOST_LAYOUTS = 3
"""Most slower layouts, and most layouts that do not fit, that a text names."""


@dataclass(frozen=True)
class Decision:
    """The options and the layout of a run, with the reasons for them."""

    options: ChunkOptions
    words: str
    """Text: the choice, its reason, and how much slower the next best one is; empty if there was
    nothing to choose."""
    answer: Answer | None = None
    """Outcome of the search; None if nothing was searched, or nothing fits."""
    model: CostModel | None = None
    """Cost model that predicts the steps; None if the model's work cannot be counted."""
    figures: str = ""
    """Text: the origin of the cost model's seconds and bytes."""
    layout: Layout = ONE_DEVICE
    """Layout of the run's processes."""
    stages: tuple[int, ...] = ()
    """Layers of each stage of a pipeline; empty without one."""
    layout_words: str = ""
    """Text: the layout with its step time, and how much slower other layouts are; empty on one
    device, and if no layout was searched."""
    budget_bytes: int | None = None
    """Bytes of a device for planners of single batches; a resumed run takes the same value. None:
    no such planners."""
    has_shrunk: bool = False
    """Whether chunks were made smaller than chosen, after a step that did not fit."""
    offload_weights: bool = False
    """Whether weights, gradients and optimizer are in CPU memory, as in `model.training`; `options`
    then free the weights of stages, also on one process."""

    def predict(self, plan: ChunkPlan) -> Prediction | None:
        """Return seconds and bytes of a plan's step; None without a cost model."""
        return None if self.model is None else predict_step(self.model, plan)


def decide(
    question: Question,
    lengths: Lengths,
    *,
    size: StepSize,
    budget_words: str = "memory.device",
    seed: int = 0,
    longest: int | None = None,
    steps: Sequence[int] | None = None,
    must_fit: bool = False,
    alone: bool = True,
    tell: Callable[[str], None] | None = None,
    may_cut_short: bool = False,
) -> Decision:
    """Return the options and the layout of a run over sequences of these lengths.

    If no plan is predicted to fit, the decision has small chunks that keep K,V, and its text says
    so; with `must_fit` ConfigError is raised instead.

    Args:
        question: The run's model, devices and given options, without steps. For a run on pairs it
            has `calls` (see `choose_calls`) in place of steps. Each call runs in two phases on one
            device. The first of them are timed, and all must fit in memory.
        size: Size of a step.
        budget_words: Origin of the memory budget, for the text.
        longest: Tokens of the data's longest sequence, if it is not among `lengths`.
        steps: Tokens of each sequence of the steps to time; None: drawn as in a run.
        alone: Whether advice on memory assumes a fixed number of devices.
        tell, may_cut_short: See `search`.
    """
    calls, limits, num_devices = question.calls, question.limits, question.num_devices
    if calls:
        question = replace(
            question, steps=[call.seq_lens for call in calls[:NUM_TIMED]], num_devices=1,
            longest=max(max(call.seq_lens) for call in calls), size=StepSize(), weight=0.0,
            given={name: value for name, value in question.given.items() if name not in SIZES},
        )  # fmt: skip
    else:
        longest, whole = max(longest or 0, lengths.longest), list[int]()
        if steps is None:
            whole = whole_step(lengths, size, seed, longest) if num_devices > 1 else whole
            steps, size = sample_steps(lengths, size, seed, num_devices)
        weight = size.sequences / len(steps) if size.sequences and not size.tokens else 0.0
        question = replace(
            question, steps=size.cut(steps), longest=longest, size=size, weight=weight, whole=whole,
            mean_keys=lengths.num_pairs / lengths.num_tokens,
        )  # fmt: skip

    def unsearched(options: ChunkOptions, words: str, layout: Layout) -> Decision:
        asked = replace(question, given={**question.given, "reshard": options.reshard})
        whole, stages = whole_model(asked.model_of(layout)), asked.stages_of(layout)
        return Decision(
            options, words, model=whole, layout=layout, stages=stages,
            offload_weights=bool(whole.training.offload_weights),
        )  # fmt: skip

    if not calls and question.longest > MAX_CHUNKS * question.given.get("size", inf):
        words = f"more than {MAX_CHUNKS:,} chunks are not searched: by the fixed rule"
        options = fixed_options(question.longest, question.options)
        return unsearched(options, words, walkable(question)[0])
    answer = search(question, tell, may_cut_short=may_cut_short)
    if not answer.tried:
        error = nothing_fits(answer, alone=alone or bool(calls))
        if must_fit:
            raise error
        budget = f"{format_bytes(limits.device_bytes)} ({budget_words})"
        words = f"small chunks, for no plan is predicted to fit {budget}: {error.given}"
        layout = answer.nearest[1]
        least = question.resharding(layout) if question.may_reshard(layout) else question
        small = {"num_retained": 0, "keep": "kv"} | least.options
        options = fixed_options(min(1024, question.longest), small)
        return unsearched(options, words, layout)
    question, space = answer.question, answer.best.space
    is_one = question.num_devices == 1
    return Decision(
        answer.options, why(answer, budget_words), answer,
        question.model if is_one else whole_model(space.model),
        layout=space.layout, stages=space.stages,
        layout_words="" if is_one else layouts_in_words(answer),
        offload_weights=bool(question.model.training.offload_weights),
    )  # fmt: skip


def sample_steps(
    lengths: Lengths, size: StepSize, seed: int, num_devices: int = 1
) -> tuple[Sequence[int], StepSize]:
    """Return the tokens of each sequence of a run's first steps, and the size of these steps.

    The result has whole steps, as many as have at most about 131,000 tokens per device (counted for
    at most eight devices). If the first step alone has more tokens, the result is some of its
    sequences, evenly spaced by length, at least one per device. With several devices there are
    several steps, since a single sequence may decide the time of a step. If `size` bounds the
    tokens of a step, the returned size has the mean number of sequences.
    """
    least, most = _MIN_STEPS if num_devices > 1 else 1, max(_MAX_SEQUENCES, num_devices)
    most_tokens = _MAX_TOKENS * min(num_devices, _MOST_TIMES)
    if size.sequences is not None:
        num_steps = max(-(-_MIN_SEQUENCES // size.sequences), least)
        drawn = draw_lengths(lengths, min(num_steps * size.sequences, most), seed)
        stops = size.stops(drawn)
    else:
        drawn = draw_lengths(lengths, most, seed)
        stops = size.stops(drawn)
        stops = stops[:-1] or stops  # the last step may be incomplete
        size = replace(size, sequences=-(-stops[-1] // len(stops)))
        enough = next((n for n, stop in enumerate(stops, 1) if stop >= _MIN_SEQUENCES), len(stops))
        stops = stops[: max(least, enough)]
    fitting = [stop for stop in stops if sum(drawn[:stop]) <= most_tokens]
    if fitting:
        return drawn[: fitting[-1]], size
    step = sorted(drawn[: stops[0]], reverse=True)
    count = max(min(num_devices, len(step)), int(len(step) * most_tokens / sum(step)))
    some = [step[(2 * i + 1) * len(step) // (2 * count)] for i in range(count)]
    if size.tokens is not None:
        size = StepSize(max(count, size.tokens * count // sum(some)))
    return some, size


def whole_step(lengths: Lengths, size: StepSize, seed: int, longest: int) -> list[int]:
    """Return the sequence lengths of a run's first step, of which the longest is replaced by
    `longest`: no step of the run is likely to need more memory."""
    drawn = draw_lengths(lengths, min(size.sequences or _MOST_IN_A_STEP, _MOST_IN_A_STEP), seed)
    step = [longest, *sorted(drawn[: size.stops(drawn)[0]], reverse=True)[1:]]
    return step[: size.stops(step)[0]]


def check_pair_options(config: RunConfig) -> None:
    """Raise ConfigError for options of a run on pairs that its plans in two phases (all forwards,
    the loss, all backwards) do not support."""
    chunks, loss, retained = config.chunks, config.train.loss, config.chunks.num_retained
    for name, value, is_odd, change in (
        ("keep", chunks.keep, chunks.keep == "all", "set it to attention, kv or input"),
        ("order", chunks.order, chunks.order == "layer-first", "remove it"),
        ("stage_layers", chunks.stage_layers, chunks.stage_layers != "auto", "remove it"),
        ("num_retained", retained, retained not in ("auto", 0), "remove it, or set it to 0"),
        ("method", chunks.method, chunks.method != "auto", "remove it"),
        ("sample", "{...}", chunks.sample is not None, "remove it"),
        ("offload", "{weights: cpu}", offloads_weights(config.offload), "remove offload"),
    ):
        if is_odd:
            key = key_of(name)
            raise ConfigError(
                given=f"{key} = {value} with train.loss: {loss}",
                required="chunk-first plans without a graph between forward and backward, where"
                " the loss of a pair is made, and exact gradients",
                source=f"{key} and train.loss",
                change=change,
            )


def with_keep(
    seq_lens: Sequence[int], options: ChunkOptions, memory: PlanMemory, budgets: Limits,
    forks: Forks | None = None,
) -> ChunkOptions:  # fmt: skip
    """Return the options with keep="auto" replaced by the first of `KEEPS` whose plan fits
    `budgets`, or by the last one, which needs least. `budgets`: memory for all but weights,
    gradients and optimizer. `forks`: branches of sequences."""
    for keep in KEEPS:
        found = replace(options, keep=keep)
        plan = plan_two_phases(seq_lens, found, num_layers=memory.shape.num_layers, forks=forks)
        if budgets.hold(needs_beside_state(plan, memory)):
            break
    return found


def needs_beside_state(plan: ChunkPlan, memory: PlanMemory) -> Needs:
    """Return the peak bytes of a plan in two phases in each memory, without the state (weights,
    gradients, optimizer), but with the final hidden states that the plan returns, and the gradient
    of these."""
    curve = memory.curve(plan, 0)
    columns = [index for index, part in enumerate(PARTS) if part not in STATE]
    per_token = 2 * memory.shape.hidden_size * memory.training.compute_bytes
    device = int(curve.device[:, columns].sum(axis=1).max()) + per_token * sum(plan.seq_lens)
    return Needs(device, int(curve.cpu.max()), int(curve.disk.max()))


def model_of_run(model: CostModel, decision: Decision) -> CostModel:
    """Return `model` changed for plans of all replicas, as a run makes them. (A search plans one
    replica alone.) In the result weights are in CPU memory, or each pass of a pipeline gathers
    them, if `decision` says so."""
    if decision.offload_weights:
        model = replace(model, training=model.training.offloading())
    asked = Question([(1,)], model, Limits(0), given={"reshard": decision.options.reshard})
    training = asked.model_of(decision.layout).training
    return replace(model, training=replace(training, replicas=1))


def share_of(model: CostModel, decision: Decision) -> RankWeights:
    """Return the weights that one process of the run holds, for the process that holds most."""
    layout, shape = decision.layout, model.shape
    stages = decision.stages or stages_of(shape.num_layers, decision.options)
    stage_sets = [{stage} for stage in range(layout.pp)] if layout.pp > 1 else [range(len(stages))]
    training = model_of_run(model, decision).training
    weights = (
        training.weights(shape, stages, frozenset(held), layout.dp * layout.sp)
        for held in stage_sets
    )
    return max(weights, key=lambda own: own.share_bytes)


def why(answer: Answer, budget_words: str) -> str:
    """Return text: the chosen options, the reason for them, and how much slower the next best plan
    is."""
    limits, (best, *others) = answer.question.limits, answer.tried
    budget = f"{format_bytes(limits.device_bytes)} ({budget_words})"
    options, needs = options_in_words(best.options), needs_in_words(best.needs)
    if not best.longest:
        beside = "in evaluations" if best.method == answer.question.method else "else"
        options = f"{best.method} batch by batch, {beside} {options}"
    others = [one for one in others if one.layout == best.layout]
    why = f"the fastest that fits {budget} less {limits.margin:.0%} for what no prediction sees"
    if answer.alike > 1 and answer.question.num_devices == 1:
        why = f"needs least memory of {answer.alike} plans within {SLACK:.0%} of {why}"
    next_best = "none"
    if others:
        change, other = compared(others[0].step_s / best.step_s), others[0]
        next_best = (
            f"{options_in_words(other.options) if other.longest else other.method}: {change}"
        )
        next_best += f", {needs_in_words(others[0].needs)}"
    return (
        f"{options}: {why}; {needs} predicted; next best of {1 + len(others)} that were tried and"
        f" fit: {next_best}"
    )


def needs_in_words(needs: Needs) -> str:
    """Return words for the bytes that are needed in each memory."""
    words = format_bytes(needs.device_bytes)
    for memory, num_bytes in (("CPU", needs.cpu_bytes), ("disk", needs.disk_bytes)):
        if num_bytes:
            words += f" and {format_bytes(num_bytes)} on the {memory}"
    return words


def compared(ratio: float) -> str:
    """Return words for a ratio of two durations: 1.032 is '3.2% slower'."""
    if abs(ratio - 1) < 5e-4:
        return "as fast"
    return f"{abs(ratio - 1):.1%} {'slower' if ratio > 1 else 'faster'}"


def layouts_in_words(answer: Answer) -> str:
    """Return text: the chosen layout with its step time, the next best layouts, and layouts that do
    not fit."""
    best, question = answer.best, answer.question
    layout = best.layout
    fastest: dict[Layout, Candidate] = {}
    for trial in answer.tried:
        fastest.setdefault(trial.layout, trial)
    lacking = {t.layout: question.limits.lacking(t.needs) for t in answer.refused[::-1]}
    lacking = dict(sorted((dict(answer.too_large) | lacking).items(), key=lambda pair: pair[1]))
    refused = [
        f"{one} does not fit: it lacks {format_bytes(num_bytes)}"
        for one, num_bytes in lacking.items()
        if one not in fastest
    ]
    others = [
        f"{one} is {compared(trial.step_s / best.step_s)}"
        for one, trial in fastest.items()
        if one != layout
    ]
    others += [
        f"{one} is at least {max(0, seconds / best.step_s - 1):.1%} slower"
        for one, seconds in answer.slower
    ]
    auto = " (auto)" if len(walkable(question)) > 1 else ""
    words = [
        f"{division_in_words(layout, question.stages_of(layout))}{auto}:"
        f" {format_seconds(best.step_s)} predicted per step",
        *others[:_MOST_LAYOUTS],
        *refused[:_MOST_LAYOUTS],
    ]
    if not are_links_measured(question.model.hardware):
        words.append("links between devices are assumed")
    return "; ".join(words)


def division_in_words(layout: Layout, stages: Sequence[int]) -> str:
    """Return words for the layout of a run and the layers of its stages."""
    layers = f" of {', '.join(map(str, stages))} layers" if stages else ""
    return f"{layout}{layers}"
