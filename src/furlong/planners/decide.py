"""The dials, the method and the layout that `auto` chooses for a run, and the words for them.

    decision = decide(lengths, sequences_per_step=32, model=model, budget_bytes=budget)
    decision.options, decision.words, decision.predict(plan)

The search is that of `planners.search`; what is given holds. Times are those of a run's first
steps, or of some sequences of them; the longest sequence of the data must fit. `longest_sequence`
finds the longest one that a decision could still train, `decide_pairs` decides for a run on pairs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Any, Literal

from furlong.cost.memory import PARTS, PlanMemory
from furlong.cost.model import CostModel
from furlong.cost.training import Lora, Training
from furlong.errors import ConfigError, PlanError, UserError
from furlong.plan.lengths import Lengths, draw_lengths
from furlong.plan.plan import ONE_DEVICE, ChunkPlan, Layout
from furlong.planners.candidates import KEEPS
from furlong.planners.options import ChunkOptions, fixed_options
from furlong.planners.orders import plan_two_phases
from furlong.planners.question import Answer, Limits, Question, whole_model
from furlong.planners.search import METHODS, search, walkable
from furlong.planners.spaco import Sampling
from furlong.planners.words import layouts_in_words, nearest, nothing_fits, why
from furlong.simulate.predict import Needs, Prediction, needs_of, predict_step
from furlong.units import format_bytes

if TYPE_CHECKING:
    from furlong.config.schema import ChunksConfig, ModelConfig


MAX_CHUNKS = 2048
"""Most chunks of the longest sequence: more take too long to plan."""
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
    """By bisection, to 1 % or a token, with the chosen method and with the options of a run in its
    layout.

    `start`: a length to try first; `num_positions`: the most that the model has, None where that is
    unknown. The other replicas share the state and hold less.
    """
    question, best, chunked = answer.question, answer.best.candidate, answer.chunked[0].candidate
    memory, plans = question.model_of(best.layout).memory(), [chunked.plan_of]
    if not best.longest:
        plans += [own.plan_of for own in METHODS[best.method](question, best.layout)]

    def try_length(num_tokens: int) -> ChunkPlan | None:
        """The plan, or None where there is none that fits."""
        for plan_of in plans:
            with suppress(PlanError, UserError):
                plan = plan_of([num_tokens] * max(1, len(question.pair)))
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
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


Pair = tuple[int, int]
"""Tokens of both sequences."""
_NUM_TIMED = 3
"""Pairs whose steps are timed, evenly spread over their lengths."""
_STATE = ("weights", "gradients", "optimizer")


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
    sequences of the steps that are timed; None: drawn as a run draws them. `given`: options, and
    sizes of the layout, that the user has given. Where no plan is predicted to fit, small
    chunks that keep K,V are taken, and the words say so; with `must_fit` that is a ConfigError,
    whose advice is that for a run, or without `alone` that for who may take more devices.
    """
    if steps is None:
        steps = sample_steps(lengths, sequences_per_step, seed, num_devices)
    question = Question(
        steps, model, limits, num_devices, longest=max(longest or 0, lengths.longest),
        sequences_per_step=sequences_per_step, given=given or {}, method=method,
        mean_keys=lengths.num_pairs / lengths.num_tokens,
    )  # fmt: skip
    if question.longest > MAX_CHUNKS * question.given.get("size", inf):
        words = f"more than {MAX_CHUNKS:,} chunks are not searched: by the fixed rule"
        options = fixed_options(question.longest, question.options)
        return _unsearched(options, words, question, walkable(question)[0])
    return _decided(question, budget_words, must_fit, alone, tell)


def decide_pairs(
    pairs: Sequence[Pair],
    *,
    model: CostModel,
    limits: Limits,
    budget_words: str,
    given: Mapping[str, Any] | None = None,
    must_fit: bool = True,
) -> Decision:
    """The options of a run whose loss stands between two phases, of a pair of sequences in each
    call: the largest pair must fit, and a few of them are timed. All else as for `decide`."""
    ordered = sorted(pairs, key=sum)
    timed = [ordered[(2 * i + 1) * len(ordered) // (2 * _NUM_TIMED)] for i in range(_NUM_TIMED)]
    question = Question(
        [n for pair in timed for n in pair], model, limits, longest=max(map(max, pairs)),
        sequences_per_step=2, given=given or {},
        pair=max(pairs, key=lambda pair: (sum(pair), max(pair))),
    )  # fmt: skip
    return _decided(question, budget_words, must_fit)


def _decided(
    question: Question,
    budget_words: str,
    must_fit: bool,
    alone: bool = True,
    tell: Callable[[str], None] | None = None,
) -> Decision:
    answer = search(question, tell)
    if not answer.tried:
        error = nothing_fits(answer, alone=alone)
        if must_fit:
            raise error
        budget = f"{format_bytes(question.limits.device_bytes)} ({budget_words})"
        words = f"small chunks, for no plan is predicted to fit {budget}: {error.given}"
        options = smallest(question.longest, question.options)
        return _unsearched(options, words, question, nearest(answer)[1])
    is_one, layout = question.num_devices == 1, answer.best.candidate.layout
    return Decision(
        answer.options, why(answer, budget_words), answer,
        question.model if is_one else whole_model(question.model_of(layout)),
        layout=layout, stages=question.stages_of(layout),
        layout_words="" if is_one else layouts_in_words(answer),
    )  # fmt: skip


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


def smallest(longest: int, given: Mapping[str, Any]) -> ChunkOptions:
    """Options that need little, with the dials that are given."""
    size = min(1024, fixed_options(longest).size)
    small: dict[str, Any] = {"size": size, "num_retained": 0, "keep": "kv"}
    return ChunkOptions(**(small | dict(given)))


def check_pair_dials(chunks: ChunksConfig) -> None:
    """Raises ConfigError for dials that two phases have not."""
    retained = chunks.num_retained
    for name, value, is_odd, change in (
        ("keep", chunks.keep, chunks.keep == "all", "set it to attention, kv or input"),
        ("order", chunks.order, chunks.order == "layer-first", "remove it"),
        ("stage_layers", chunks.stage_layers, chunks.stage_layers != "auto", "remove it"),
        ("num_retained", retained, retained not in ("auto", 0), "remove it, or set it to 0"),
        ("method", chunks.method, chunks.method != "auto", "remove it"),
        ("sample", "{...}", chunks.sample is not None, "remove it"),
    ):
        if is_odd:
            raise ConfigError(
                given=f"chunks.{name} = {value} with train.loss: dpo",
                required="chunk-first plans without a graph between forward and backward, where"
                " the loss of a pair is made, and exact gradients",
                source=f"chunks.{name} and train.loss",
                change=change,
            )


def with_keep(
    seq_lens: Sequence[int], options: ChunkOptions, memory: PlanMemory, budgets: Limits
) -> ChunkOptions:
    """The options with a keep in the place of auto: the first of `KEEPS` whose plan the budgets
    hold beside weights, gradients and optimizer; where none does the last one, which needs least.
    """
    for keep in KEEPS:
        found = replace(options, keep=keep)
        plan = plan_two_phases(seq_lens, found, num_layers=memory.shape.num_layers)
        if budgets.hold(needs_beside_state(plan, memory)):
            break
    return found


def needs_beside_state(plan: ChunkPlan, memory: PlanMemory) -> Needs:
    """Most bytes that a plan in two phases needs of each tier, besides weights, gradients and
    optimizer; with the final hidden states that it gives out, and their gradient."""
    curve = memory.curve(plan, 0)
    columns = [index for index, part in enumerate(PARTS) if part not in _STATE]
    per_token = 2 * memory.shape.hidden_size * memory.training.compute_bytes
    device = int(curve.device[:, columns].sum(axis=1).max()) + per_token * sum(plan.seq_lens)
    return Needs(device, int(curve.host.max()), int(curve.disk.max()))


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
