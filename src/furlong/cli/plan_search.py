"""The search behind `furlong plan`: which methods, and candidates that keep the given dials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from furlong.cli.plan_subject import Subject
from furlong.cost.names import look_up
from furlong.errors import ConfigError
from furlong.plan.text import tiers_in_words
from furlong.plan.values import ON_DEVICE, Tiers
from furlong.planners.search.catalogue import ABLATIONS, PUBLISHED, Method, combined
from furlong.planners.search.dials import Dials
from furlong.planners.search.problem import Found, NothingOfferedError
from furlong.planners.search.search import search
from furlong.report.patience import Tell
from furlong.report.words import count_words

OURS = "furlong"
METHODS: Mapping[str, Method] = {**PUBLISHED, **ABLATIONS, OURS: combined}


def methods_named(name: str | None) -> Mapping[str, Method]:
    """All methods, or the one of that name. Raises ConfigError that names the nearest."""
    if name is None:
        return METHODS
    known = look_up(name, {n: n for n in METHODS}, kind="method", source="--method")
    return {known: METHODS[known]}


def search_with(
    subject: Subject, methods: Mapping[str, Method], *, strict: bool, tell: Tell | None = None
) -> Found:
    """The search with the dials that are given. `strict`: only candidates that have each of them;
    else those too that do not know it. Raises ConfigError."""
    problem = replace(subject.problem, given=_given(subject), strict=strict)
    try:
        return search(problem, methods, tell=tell)
    except NothingOfferedError:
        raise _nothing_offered(subject, methods) from None


def has_given(subject: Subject, dials: Dials) -> bool:
    """Whether dials have every value that is given."""
    return dials.agree(_given(subject), strict=True)


def _given(subject: Subject) -> dict[str, Any]:
    given = dict(subject.dials)
    if "tier" in given:
        given["tier"] = _tier_of_kv(given["tier"])
    return given


def _tier_of_kv(given: Any) -> str:
    """The tier of K,V, which is what the plans of several devices choose; a word of no candidate
    where other kinds are named as well."""
    if isinstance(given, str):
        return given
    others = replace(given, kv="device")
    return str(given.kv) if others == ON_DEVICE else tiers_in_words(given)


def _nothing_offered(subject: Subject, methods: Mapping[str, Method]) -> ConfigError:
    problem = subject.problem
    sizes = {"dp": problem.dp, "sp": problem.sp, "pp": problem.pp}
    given = [f"{name} {size}" for name, size in sizes.items() if size]
    given += [
        tiers_in_words(value) if isinstance(value, Tiers) else f"{name} {value}"
        for name, value in subject.dials.items()
    ]
    names = ", ".join(methods) if len(methods) < 4 else f"{len(methods)} methods"
    return ConfigError(
        given=f"{names} on {count_words(problem.num_devices, 'device')}"
        + (f" with {', '.join(given)}" if given else ""),
        required="a layout and dials that the method has",
        source="the search for a plan",
        change="give fewer sizes and dials, or other methods",
    )
