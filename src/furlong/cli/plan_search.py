"""The search behind `furlong plan`: which methods, and candidates that keep the given dials."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from furlong.cli.plan_subject import Subject
from furlong.cost.names import look_up
from furlong.errors import ConfigError
from furlong.plan.text import tiers_in_words
from furlong.plan.values import ON_DEVICE, Tiers
from furlong.planners.search.candidates import Candidate, Ladder, Room
from furlong.planners.search.catalogue import ABLATIONS, PUBLISHED, Method, combined
from furlong.planners.search.search import Found, search
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


@dataclass(frozen=True)
class _FixedRoom(Room):
    """A room in which some dials are given."""

    given: tuple[tuple[str, Any], ...] = ()

    def sizes(self) -> list[int]:
        size = dict(self.given).get("size")
        return super().sizes() if size is None else [size]

    def heights(self, num_layers: int) -> list[int]:
        height = dict(self.given).get("stage_layers")
        return super().heights(num_layers) if height is None else [height]

    def retained(self, size: int) -> list[int]:
        number = dict(self.given).get("num_retained")
        return sorted(
            {*super().retained(size), *([] if number is None else [number])}, reverse=True
        )


def search_with(
    subject: Subject, methods: Mapping[str, Method], *, strict: bool, tell: Tell | None = None
) -> Found:
    """The search with the dials that are given. `strict`: only candidates that have each of them;
    else those too that do not know it. Raises ConfigError."""
    dials = dict(subject.dials)
    if "tier" in dials:
        dials["tier"] = _tier_of_kv(dials["tier"])
    num_rooms = num_offered = 0

    def agrees(candidate: Candidate) -> bool:
        order = "layer-first" if "stage_layers" in candidate.dials else "chunk-first"
        own = {"tier": "device", "order": order, **candidate.dials}
        if "size" in dials and "chunks of" in own:
            return False  # chunks of equal time may hold more tokens than their size says
        return all(
            own[name] == value if name in own else not strict for name, value in dials.items()
        )

    def fixed(method: Method) -> Method:
        def ladders(room: Room) -> Iterator[Ladder]:
            nonlocal num_rooms, num_offered
            num_rooms += 1
            own = {field.name: getattr(room, field.name) for field in fields(room)}
            within = _FixedRoom(**own, given=tuple(dials.items()))
            for ladder in method(within):
                rungs = [candidate for candidate in ladder.rungs if agrees(candidate)]
                num_offered += len(rungs)
                if rungs:
                    yield replace(ladder, rungs=rungs)

        return ladders

    try:
        among = {name: fixed(method) for name, method in methods.items()}
        return search(subject.problem, among, tell=tell)
    except ConfigError:
        if num_offered or not num_rooms:
            raise
        raise _nothing_offered(subject, methods) from None


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
