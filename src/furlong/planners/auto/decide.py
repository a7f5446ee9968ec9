"""The dials and the layout that `auto` chooses for a run, and the words for them.

    decision = decide(lengths, sequences_per_step=32, model=model, budget_bytes=budget)
    decision.options, decision.words, decision.predict(plan)

The searches are `auto.search` on one device and `auto.layouts` on several; dials that are given
hold. Times are those of a run's first steps, or of some sequences of them; the longest sequence of
the data must fit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Any

from furlong.cost.model import CostModel
from furlong.cost.training import Lora, Training
from furlong.errors import ConfigError
from furlong.plan.lengths import Lengths, draw_lengths
from furlong.plan.plan import ONE_DEVICE, ChunkPlan, Layout
from furlong.planners.auto.candidates import Space
from furlong.planners.auto.layouts import SearchedLayouts, search_layouts, space_of
from furlong.planners.auto.search import Searched, search_device
from furlong.planners.auto.steps import whole_model
from furlong.planners.auto.words import layouts_in_words, no_layout_fits, nothing_fits, why
from furlong.planners.budget import MARGIN
from furlong.planners.options import ChunkOptions, fixed_options
from furlong.planners.predict import Prediction, predict_step
from furlong.planners.question import Limits
from furlong.planners.spaco import Sampling
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
    searched_layouts: SearchedLayouts | None = None
    """Outcome of the search over layouts, where there was one and a plan fits."""
    layout_words: str = ""
    """The layout with the seconds of a step, and what the others would have cost; empty on one
    device, and where no layout was searched."""
    budget_bytes: int | None = None
    """Bytes of a device for rivals, which a resumed run makes of the same; None where there are
    none."""
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
    seed: int = 0,
    longest: int | None = None,
    model: CostModel,
    layouts: Sequence[Layout] = (ONE_DEVICE,),
    budget_bytes: int,
    budget_words: str = "memory.device",
    host_bytes: int | None = 0,
    disk_bytes: int | None = 0,
    margin: float = MARGIN,
    must_fit: bool = False,
    alone: bool = True,
    dials: Mapping[str, Any] | None = None,
) -> Decision:
    """The options of a run over sequences of these lengths, and one of the `layouts`.

    `longest`: tokens of the data's longest sequence, if it is not among `lengths`. `host_bytes`,
    `disk_bytes`: budgets of the tiers below of one device, 0 where there is none, None without a
    limit. `margin`: share of the device's budget that the plan leaves free. `dials`: what the user
    has given. Where no plan is predicted to fit, small chunks that keep K,V are taken, and the
    words say so; with `must_fit` that is a ConfigError, whose advice is that for a run, or without
    `alone` that for who may take more devices.
    """
    given = dict(dials or {})
    longest = max(longest or 0, lengths.longest)
    layouts = _walkable(layouts, given, sequences_per_step)
    seq_lens = sample_steps(lengths, sequences_per_step, seed, layouts[0].num_devices)
    mean_keys = lengths.num_pairs / lengths.num_tokens
    space = Space(model, seq_lens, sequences_per_step, longest, given, mean_keys=mean_keys)
    if longest > _MAX_CHUNKS * given.get("size", inf):
        words = f"more than {_MAX_CHUNKS:,} chunks are not searched: by the fixed rule"
        return _unsearched(fixed_options(longest, given), words, space_of(space, layouts[0]))
    budgets = Limits(budget_bytes, host_bytes, disk_bytes, margin)
    if tuple(layouts) == (ONE_DEVICE,):
        searched = search_device(space, budgets)
        if searched.tried:
            words = why(searched, budgets, budget_words)
            return Decision(searched.best.options, words, searched, model)
        error = nothing_fits(searched, budgets, model.training, alone=alone)
    else:
        found = search_layouts(space, layouts, budgets)
        if found.fitting:
            words = why(found.best.searched, budgets, budget_words)
            return _best(found, words)
        error = no_layout_fits(found, alone=alone)
        space = found.nearest.space
    if must_fit:
        raise error
    budget = f"{format_bytes(budget_bytes)} ({budget_words})"
    words = f"small chunks, for no plan is predicted to fit {budget}: {error.given}"
    return _unsearched(_smallest(longest, given), words, space)


def _walkable(
    layouts: Sequence[Layout], given: Mapping[str, Any], sequences_per_step: int
) -> list[Layout]:
    """The layouts that the given dials can have; of these those without an idle replica, if there
    are any. Raises ConfigError."""
    found = list(layouts)
    if given.get("order") == "layer-first":
        found = [layout for layout in found if layout.pp == 1]
    if not found:
        raise ConfigError(
            given=f"chunks.order = layer-first with {layouts[0]}",
            required="chunk-first: a pipeline has stages of its own, one for each rank",
            source="chunks.order or chunks.stage_layers, and parallel.pp",
            change="leave chunks.order and chunks.stage_layers out, or set parallel.pp to 1",
        )
    return [one for one in found if one.dp <= sequences_per_step] or found


def _best(found: SearchedLayouts, words: str) -> Decision:
    best = found.best
    return Decision(
        best.options, words, best.searched, whole_model(best.space.model),
        layout=best.layout, stages=best.space.stages, searched_layouts=found,
        layout_words=layouts_in_words(found),
    )  # fmt: skip


def _unsearched(options: ChunkOptions, words: str, space: Space) -> Decision:
    model = whole_model(space.model)
    return Decision(options, words, model=model, layout=space.layout, stages=space.stages)


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
