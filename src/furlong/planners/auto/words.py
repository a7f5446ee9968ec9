"""Words for what `auto` has decided, and the error where nothing fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from furlong.cost.machine import are_links_measured
from furlong.cost.training import Training
from furlong.errors import ConfigError
from furlong.plan.plan import Layout
from furlong.planners.auto.candidates import SMALLEST_CHUNK
from furlong.planners.auto.layouts import SearchedLayouts, TooLarge
from furlong.planners.auto.search import SLACK, Searched
from furlong.planners.budget import DoesNotFitError, advice
from furlong.planners.options import ChunkOptions, dials_of, value_in_words
from furlong.planners.predict import Needs
from furlong.planners.question import Limits
from furlong.units import count_words, format_bytes, format_seconds

_MOST_LAYOUTS = 3
"""Layouts that are named, of those that are slower and of those that do not fit."""


def why(searched: Searched, budgets: Limits, budget_words: str) -> str:
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
    change = compared(rival.step_s / best.step_s)
    return f"{words}{dials_in_words(rival.options)}: {change}, {needs_in_words(rival.needs)}"


def nothing_fits(
    searched: Searched, budgets: Limits, training: Training, *, alone: bool
) -> ConfigError:
    """The message of a search in which nothing fits, with the budgets that would do."""
    nearest, needs = searched.refused[0], searched.refused[0].needs
    count = len(searched.refused) + searched.num_pruned
    plans = count_words(count, "plan")
    words = f"of {plans} none fits; nearest is {dials_in_words(nearest.options)}"
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
    error = DoesNotFitError(0, nearest.curve.peak, budgets.limit_bytes, training)
    lacking["device"] = ceil(needs.device_bytes / (1 - budgets.margin))
    own = format_bytes(budgets.device_bytes)
    # no run has smaller chunks: that advice would lead nowhere
    part = "state" if alone and nearest.options.size <= SMALLEST_CHUNK else error.part
    return ConfigError(
        given=f"{words}, whose {error.given}",
        required=f"{error.required} ({own} less a margin of {budgets.margin:.0%})",
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


def layouts_in_words(found: SearchedLayouts) -> str:
    """The chosen layout with the seconds of its step, the next best, and why others are none."""
    best = found.best
    num_others = len(found.fitting) + len(found.slower) + len(found.too_large) - 1
    head = division_in_words(best.layout, best.space.stages) + " (auto)" * bool(num_others)
    others = [f"{f.layout} is {compared(f.step_s / best.step_s)}" for f in found.fitting[1:]]
    bounds = sorted(found.slower, key=lambda s: s.least_s)
    others += [f"{s.layout} is at least {compared(s.least_s / best.step_s)}" for s in bounds]
    larger = sorted(found.too_large, key=found.lacking_bytes)
    words = [f"{head}: {format_seconds(best.step_s)} predicted per step"]
    words += _some(others, "more are slower")
    words += _some([_too_large(found, one) for one in larger], "more do not fit")
    if not are_links_measured(best.space.model.hardware):
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


def _too_large(found: SearchedLayouts, layout: TooLarge) -> str:
    lacking = format_bytes(found.lacking_bytes(layout))
    least = "at least " if layout.nearest is None else ""
    return f"{layout.layout} does not fit: it lacks {least}{lacking}"


def no_layout_fits(found: SearchedLayouts, *, alone: bool) -> ConfigError:
    """The message of a search in which nothing fits in any layout."""
    nearest, budgets = found.nearest, found.budgets
    training = nearest.space.model.training
    if nearest.searched is not None:
        error = nothing_fits(nearest.searched, budgets, training, alone=alone)
    else:
        state, limit = format_bytes(nearest.state_bytes), format_bytes(budgets.limit_bytes)
        error = ConfigError(
            given=f"weights, gradients and optimizer of {state} on each device",
            required=f"at most {limit} ({format_bytes(budgets.device_bytes)} less a margin of"
            f" {budgets.margin:.0%})",
            source="the search over the plans of a layout",
            change=advice("state", training, num_devices=nearest.layout.num_devices, alone=alone),
        )
    given, source = error.given, error.source
    layouts = [one.layout for one in found.too_large]
    if len(layouts) > 1:
        source = f"the search over {len(layouts)} layouts"
        given = (
            f"in none of {len(layouts)} layouts a plan fits; nearest is {nearest.layout}: {given}"
        )
    ways = ["start more processes"]
    fixed = [name for name in ("sp", "pp") if all(getattr(one, name) == 1 for one in layouts)]
    if fixed:
        named = " and ".join(f"parallel.{name}" for name in fixed)
        ways.insert(0, f"set {named} to auto")
    return ConfigError(
        given=given, required=error.required, source=source,
        change=f"{', '.join(ways)}; or {error.change}",
    )  # fmt: skip
