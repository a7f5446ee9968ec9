"""A problem of the search and what is found: values, and the error where nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from furlong.cost.model import CostModel
from furlong.errors import ConfigError, PlanError, UserError
from furlong.plan.plan import Layout, OffloadTarget
from furlong.planners.question import MARGIN, DoesNotFitError
from furlong.units import count_words
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
class Found:
    """The fastest plan that fits, and what it was compared with."""

    best: Outcome
    others: tuple[Outcome, ...]
    """Also planned whole, by step time."""


def nothing_fits(problem: Problem, refused: Sequence[UserError | PlanError]) -> ConfigError:
    """The refusal that came nearest, or the first one."""
    near = [error for error in refused if isinstance(error, DoesNotFitError)]
    if near:
        return min(near, key=lambda error: error.lacking_bytes)
    for other in refused:
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
