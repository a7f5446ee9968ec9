"""A problem of the search and what is found: values, and the error where nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from furlong.cost.model import CostModel
from furlong.errors import ConfigError, PlanError, UserError
from furlong.plan.plan import Layout, OffloadTarget
from furlong.planners.question import MARGIN, DoesNotFitError, advice
from furlong.units import count_words, format_bytes
from papers.published.dials import Dials
from papers.published.replicas import Outcome


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A batch, a model on devices, and what is given."""

    seq_lens: tuple[int, ...]
    model: CostModel
    num_devices: int = 1
    """Some of which a plan may leave idle."""
    dp: int | None = None
    """None: searched; so are the next."""
    sp: int | None = None
    pp: int | None = None
    budget_bytes: int | None = None
    """Bytes of one device; None: those that the hardware has."""
    margin: float = MARGIN
    """Share of the budget that plans leave free."""
    offload: tuple[OffloadTarget, ...] = ("none",)

    def num_idle(self, layout: Layout) -> int:
        """Devices that a layout leaves out."""
        return self.num_devices - layout.num_devices

    @property
    def limit_bytes(self) -> int:
        """Bytes of one device, without the margin."""
        budget = self.model.hardware.budget_bytes
        return int((budget if self.budget_bytes is None else self.budget_bytes) * (1 - self.margin))


@dataclass(frozen=True)
class Refusal:
    """Why dials have no plan."""

    dials: Dials
    error: UserError | PlanError


@dataclass(frozen=True)
class Found:
    """The fastest plan that fits, and what it was compared with."""

    best: Outcome
    others: tuple[Outcome, ...]
    """Also planned whole, by step time."""


def nothing_fits(problem: Problem, refused: Sequence[Refusal]) -> ConfigError:
    """The refusal that came nearest, in the words of the whole search."""
    errors = [(r.dials, r.error) for r in refused]
    near = [(d, error) for d, error in errors if isinstance(error, DoesNotFitError)]
    count = count_words(len(errors), "candidate")
    source = f"the search over {count}"
    if near:
        dials, error = min(near, key=lambda pair: pair[1].lacking_bytes)
        whole = format_bytes(int(problem.limit_bytes / (1 - problem.margin)))
        margin = f" ({whole} less a margin of {problem.margin:.0%})" if problem.margin else ""
        return ConfigError(
            given=f"of {count} none fits; nearest is {dials}, whose {error.given}",
            required=error.required + margin,
            source=source,
            change=advice(error.part, problem.model.training, problem.num_devices),
        )
    for _, other in errors:
        if isinstance(other, UserError):
            return ConfigError(
                given=other.given, required=other.required, source=other.source,
                change=other.change,
            )  # fmt: skip
    return ConfigError(
        given=f"{count_words(len(problem.seq_lens), 'sequence')} on"
        f" {count_words(problem.num_devices, 'device')}",
        required="a layout in which every replica has a sequence, and a method for it",
        source="the search for a plan",
        change="use fewer replicas (parallel.dp), or more sequences per step",
    )
