"""Errors of a search in which nothing fits: what is lacking, and what would suffice."""

from __future__ import annotations

from math import ceil

from furlong.cost.machine import THIS_CPU
from furlong.errors import ConfigError, UserError
from furlong.planners.options import SMALLEST_CHUNK, options_in_words
from furlong.planners.question import (
    SIZES,
    Answer,
    Candidate,
    DoesNotFitError,
    Question,
    advice,
    key_of,
)
from furlong.planners.search import METHODS
from furlong.units import budget_of, count_words, format_bytes


def nothing_fits(answer: Answer, *, alone: bool) -> ConfigError:
    """Return the error of a search in which nothing fits, with memory budgets that would suffice.
    `alone`: whether the run's number of devices is fixed."""
    question, (trial, layout) = answer.question, answer.nearest
    limits, training, num_devices = question.limits, question.model.training, question.num_devices
    state_bytes = question.state_bytes(layout)
    on_cpu = question.model.hardware.name == THIS_CPU  # whose processes share its RAM
    margin = f" ({format_bytes(limits.device_bytes)} less a margin of {limits.margin:.0%})"
    if answer.error is None and trial is not None:
        options, enough = trial.options, limits.exceeded(trial.needs)
        memory, used = next(iter(enough.items()))
        plans = count_words(len(answer.refused) + answer.num_pruned, "plan")
        part, needs = memory, f"which needs {format_bytes(used)} of memory.{memory}"
        required = f"at most {format_bytes(limits.by_memory[memory] or 0)} (memory.{memory})"
        source = f"the search over {plans}"
        if memory == "device":
            error = DoesNotFitError(0, trial.peak, limits.limit_bytes, training)
            part, needs, required = error.part, f"whose {error.given}", error.required + margin
            enough["device"] = ceil(used / (1 - limits.margin))
        elif memory == "cpu" and training.offload_weights:
            part, words = _largest_below(trial, question)
            needs += f": {words}"
        away = ", weights in CPU memory" * bool(training.offload_weights)
        given = f"of {plans} none fits; nearest is {options_in_words(options)}{away}, {needs}"
        # chunks cannot be smaller, so advice to leave out the size would not help
        names = [n for n in question.options if n != "size" or options.size > SMALLEST_CHUNK]
        sizes = (f"memory.{name}: {budget_of(most)}" for name, most in enough.items())
        change = advice(part, training, num_devices, names, alone=alone or on_cpu, memory=memory)
        change += f"; the smallest that would do is {', with '.join(sizes)}"
    elif state_bytes > limits.limit_bytes:
        given = f"weights, gradients and optimizer of {format_bytes(state_bytes)} on each device"
        required = f"at most {format_bytes(limits.limit_bytes)}{margin}"
        source = "the search over the plans of a layout"
        change = advice("state", training, num_devices, alone=alone or on_cpu)
    else:
        return _nothing_offered(question, answer.error)
    if num_devices > 1:
        layouts = {one for one, _ in answer.too_large}
        layouts |= {refused.layout for refused in answer.refused}
        if len(layouts) > 1:
            given = f"in none of {len(layouts)} layouts a plan fits; nearest is {layout}: {given}"
        fixed = [name for name in ("sp", "pp") if question.given.get(name) == 1]
        fixed += ["reshard"] * (question.given.get("reshard") is False)
        ways = [f"set parallel.{name} to auto" for name in fixed]
        if question.fits_with_narrow_moments(layout):
            ways.append("set train.optimizer to adamw and train.state_dtype to bfloat16")
        ways += ["start more processes"] if alone and not on_cpu else []
        change = "; or ".join([*ways, change])
    return ConfigError(given=given, required=required, source=source, change=change)


def _largest_below(trial: Candidate, question: Question) -> tuple[str, str]:
    """Return (part, text) for a plan with weights offloaded to CPU memory. `part` is the larger of
    two parts of CPU memory: "state" (weights, gradients, optimizer) or "cpu" (kept tensors). `text`
    names the bytes of both."""
    own = question.resharded(trial.layout)
    kept = trial.needs.cpu_bytes - own.host_bytes
    words = f"weights, gradients and optimizer {format_bytes(own.host_bytes)}"
    parts = sorted([(own.host_bytes, "state", words),
                    (kept, "cpu", f"kept tensors {format_bytes(kept)}")], reverse=True)  # fmt: skip
    return parts[0][1], ", ".join(words for *_, words in parts)


def _nothing_offered(question: Question, error: Exception | None) -> ConfigError:
    """Return the error for a method that yields no plan. `error`: the error that its planner
    raised."""
    method = f"chunks.method = {question.method}"
    if isinstance(error, UserError):
        return ConfigError(
            given=f"{method}, and {error.given}", required=error.required, source=error.source,
            change=error.change,
        )  # fmt: skip
    asked = METHODS.get(question.method, METHODS["chunkflow"])
    needed, sizes = asked.needs, asked.sizes
    has_layout = any(map(asked.takes, question.layouts()))
    keys = question.keys_of(question.options)
    if not has_layout:  # a size of 1 is that of a run which names none
        keys = [key_of(name) for name in SIZES if question.given.get(name, 1) > 1]
        sizes = f"use several devices, and {sizes}" if question.num_devices == 1 else sizes
    words = f" with {', '.join(keys)}" if keys else ""
    changes = [
        "add chunks.sample: {rate: 0.5, label_rate: 0.5}, with chunks.size"
        if question.method == "spaco" and "sample" not in question.given
        else "",
        "" if has_layout else sizes,
        f"leave {' and '.join(keys)} out" if keys and has_layout else "",
    ]
    changes = [" and ".join(filter(None, changes)), "remove chunks.method"]
    return ConfigError(
        given=f"{method}{words} on {count_words(question.num_devices, 'device')}",
        required=f"{needed}, and options and a batch for which the method has a plan that fits",
        source="chunks.method",
        change=", or ".join(filter(None, changes)),
    )
