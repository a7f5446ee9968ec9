"""Whether a plan fits, and the words for what does not: of a plan, and of a whole search.

    fit(plan, model, budget_bytes)                 # raises DoesNotFitError
    raise nothing_fits(answer, alone=True)         # where a search has found nothing

Advice names a dial only where the user has given it: of all others a search has tried the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, inf

from furlong.cost.machine import are_links_measured
from furlong.cost.memory import Part
from furlong.cost.training import Training
from furlong.errors import ConfigError, UserError
from furlong.plan.plan import Layout
from furlong.planners.options import SMALLEST_CHUNK, dials_in_words
from furlong.planners.question import SIZES, SLACK, Answer, Limits, Question, Trial
from furlong.report.scene import PART_WORDS
from furlong.simulate.predict import Needs
from furlong.units import count_words, format_bytes, format_seconds

_MOST_LAYOUTS = 3
"""Layouts that are named, of those that are slower and of those that do not fit."""
_STATE: tuple[Part, ...] = ("weights", "gradients", "optimizer")
_SMALLER = ("size", "use smaller chunks (chunks.size)")
_LESS = ("keep", "keep less (chunks.keep, chunks.num_retained)")
_LARGER = ("size", "use larger chunks (chunks.size): a state is kept at the end of each")
_LOWER = ("tier", "keep K,V on the host (chunks.tier)")
_HIGHER = ("tier", "leave more on the device (chunks.tier)")
_WAYS: dict[str, tuple[tuple[str, str], ...]] = {
    "activations": (_SMALLER, _LESS),
    "kv": (_LOWER,),
    "kv_gradients": (_LOWER,),
    "states": (_LARGER,),
    "logits": (_SMALLER,),
    "buffers": (_SMALLER,),
    "host": (_HIGHER, _LESS),
    "disk": (_HIGHER, _LESS),
}
"""Dials by which a plan needs less of a part of memory."""
_NEEDS = {
    "spaco": "chunks.sample, a layout",
    "infinipipe": "a pipeline (parallel.pp above 1)",
    "skrull": "a pool (parallel.sp above 1) without a pipeline",
    "places": "a pool (parallel.sp above 1) without a pipeline",
    "fpdt": "no pipeline, keep input, num_retained 0, order layer-first, stage_layers 1",
    "seco": "no pipeline, keep kv, num_retained 0, order chunk-first",
}
"""The needs of each method, which it cannot do without."""


def advice(
    part: str,
    training: Training,
    num_devices: int = 1,
    given: Iterable[str] = (),
    *,
    alone: bool = False,
) -> str:
    """Advice for a plan of `num_devices` whose memory goes into `part`, one of a device or a tier.
    `given`: the dials that the user has given; `alone`: the devices are given too."""
    ways = ["use more devices" if num_devices > 1 else "use several devices"]
    if alone:
        ways = [f"give it a larger memory.{part if part in ('host', 'disk') else 'device'}"]
    elif part == "state" and num_devices == 1:
        ways = ["use several devices, which share the state (ZeRO)"]
    dials = {"keep" if name == "num_retained" else name for name in given}
    ways += [words for dial, words in _WAYS.get(part, ()) if dial in dials]
    if part in ("activations", "kv", "kv_gradients", "states"):
        ways.append("use shorter sequences (data.max_seq_len)")
    if part == "state" and training.lora is None:
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
        words = f" with {with_what}" if with_what else ""
        super().__init__(
            given=f"rank {rank} needs {format_bytes(needed)}{words}: {parts}",
            required=f"at most {format_bytes(budget_bytes)}, which lacks "
            f"{format_bytes(self.lacking_bytes)}",
            source="the memory of a device",
            change=advice(self.part, training, num_devices),
        )


def nearest(answer: Answer) -> tuple[Trial | None, Layout]:
    """The plan that lacks least, or None where the state of a layout lacks less; and its layout."""
    question, limits, refused = answer.question, answer.question.limits, answer.refused
    too_large = sorted(answer.too_large, key=lambda pair: pair[1])
    least = limits.lacking(refused[0].needs) if refused else inf
    for layout, lacking_bytes in too_large:
        if lacking_bytes < least and question.state_bytes(layout) > limits.limit_bytes:
            return None, layout
    if refused:
        return refused[0], refused[0].candidate.layout
    return None, too_large[0][0] if too_large else question.layouts()[0]


def nothing_fits(answer: Answer, *, alone: bool) -> ConfigError:
    """The error of a search in which nothing fits in any layout, with the budgets that would do.
    `alone`: a run's devices are given."""
    question, (trial, layout) = answer.question, nearest(answer)
    limits, state_bytes = question.limits, question.state_bytes(layout)
    if answer.error is None and trial is not None:
        error = _plan_lacks(answer, trial, alone=alone)
    elif state_bytes > limits.limit_bytes:
        error = ConfigError(
            given=f"weights, gradients and optimizer of {format_bytes(state_bytes)} on each device",
            required=f"at most {format_bytes(limits.limit_bytes)}{_margin(limits)}",
            source="the search over the plans of a layout",
            change=advice("state", question.model.training, question.num_devices, alone=alone),
        )
    else:
        return _nothing_offered(question, answer.error)
    if question.num_devices == 1:
        return error
    given, source = error.given, error.source
    some = [one for one, _ in answer.too_large]
    some += dict.fromkeys(refused.candidate.layout for refused in answer.refused)
    if len(some) > 1:
        source = f"the search over {len(some)} layouts"
        given = f"in none of {len(some)} layouts a plan fits; nearest is {layout}: {given}"
    fixed = [name for name in ("sp", "pp") if question.given.get(name) == 1]
    ways = [f"set {' and '.join(f'parallel.{name}' for name in fixed)} to auto"] if fixed else []
    ways += ["start more processes"] if alone else []
    return ConfigError(
        given=given, required=error.required, source=source,
        change="; or ".join(filter(None, (", ".join(ways), error.change))),
    )  # fmt: skip


def _nothing_offered(question: Question, error: Exception | None) -> ConfigError:
    """The error of a method that has no plan; `error`: its own reason."""
    if isinstance(error, UserError):
        return ConfigError(
            given=f"chunks.method = {question.method}, and {error.given}",
            required=error.required, source=error.source, change=error.change,
        )  # fmt: skip
    dials = ", ".join(f"{name} {value}" for name, value in question.given.items())
    layouts = count_words(len(question.layouts()), "layout")
    needed = _NEEDS.get(question.method, "a layout")
    keys = [f"{'parallel' if name in SIZES else 'chunks'}.{name}" for name in question.given]
    ways = [f"leave {' and '.join(keys)} out"] if keys else []
    if "parallel" in needed and question.num_devices == 1:
        ways.append("use more devices")
    if needed.startswith("chunks."):
        ways.append("set chunks.size and chunks.sample")
    return ConfigError(
        given=f"chunks.method = {question.method}"
        + (f" with {dials}" if dials else "")
        + f" on {count_words(question.num_devices, 'device')}",
        required=f"{needed}, and dials and a batch for which the method has a plan that fits",
        source=f"chunks.method, in {layouts}",
        change=" or ".join([*ways, "use another method"]),
    )


def _plan_lacks(answer: Answer, trial: Trial, *, alone: bool) -> ConfigError:
    """The error of the plan that lacks least."""
    question, limits, options = answer.question, answer.question.limits, trial.candidate.options
    training = question.model.training
    plans = count_words(len(answer.refused) + answer.num_pruned, "plan")
    tier, *_ = lacking = limits.exceeded(trial.needs)
    if tier == "device":
        error = DoesNotFitError(0, trial.curve.peak, limits.limit_bytes, training)
        part, needs = error.part, f"whose {error.given}"
        required = error.required + _margin(limits)
        source = f"the search over {plans} of one device"
        lacking["device"] = ceil(lacking["device"] / (1 - limits.margin))
    else:
        part, needs = tier, f"which needs {format_bytes(lacking[tier])} on the {tier}"
        required = f"at most {format_bytes(limits.of_tiers[tier] or 0)}"
        source = f"memory.{tier}"
    # no run has smaller chunks: that advice would lead nowhere
    given = [name for name in question.options if name != "size" or options.size > SMALLEST_CHUNK]
    enough = (f"memory.{name}: {-(-used // 2**20)}MiB" for name, used in lacking.items())
    return ConfigError(
        given=f"of {plans} none fits; nearest is {dials_in_words(options)}, {needs}",
        required=required,
        source=source,
        change=advice(part, training, question.num_devices, given, alone=alone)
        + f"; the smallest that would do is {', with '.join(enough)}",
    )


def _margin(limits: Limits) -> str:
    return f" ({format_bytes(limits.device_bytes)} less a margin of {limits.margin:.0%})"


def why(answer: Answer, budget_words: str) -> str:
    """The chosen dials of a layout, their reason, and the price of the next best."""
    limits, (best, *others) = answer.question.limits, answer.chunked
    budget = f"{format_bytes(limits.device_bytes)} ({budget_words})"
    why = f"the fastest that fits {budget} less {limits.margin:.0%} for what no prediction sees"
    if answer.alike > 1 and answer.question.num_devices == 1:
        why = f"needs least memory of {answer.alike} plans within {SLACK:.0%} of {why}"
    chosen = answer.best
    own = f"{chosen.candidate.method} batch by batch, else " if chosen is not best else ""
    if not limits.hold(best.needs):  # only a method by name goes on without dials that fit
        return (
            f"{own}{dials_in_words(best.candidate.options)}, in evaluations: no dials are predicted"
            f" to fit {budget}; {needs_in_words(best.needs)} predicted for a step of theirs"
        )
    words = (
        f"{own}{dials_in_words(best.candidate.options)}: {why}; {needs_in_words(best.needs)}"
        f" predicted; next best of {1 + len(others)} that were tried and fit: "
    )
    if not others:
        return f"{words}none"
    other = others[0]
    change = compared(other.step_s / best.step_s)
    needs = needs_in_words(other.needs)
    return f"{words}{dials_in_words(other.candidate.options)}: {change}, {needs}"


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
    others += [f"{one} is at least {max(0, s / best.step_s - 1):.1%} slower" for one, s in slower]
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
