"""Facts that processes tell each other before a step: all take the same one, or none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from furlong.errors import ConfigError, PlanError
from furlong.plan.plan import ChunkPlan
from furlong.runtime.parallel.likeness import require_same_sequences
from furlong.runtime.parallel.ranks import Ranks

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Facts:
    """A step as one process knows it."""

    plan: ChunkPlan
    divisor: int
    num_frozen_layers: int
    """First layers in which, and below which, it trains nothing."""
    trains: bool
    """Whether it has a parameter that is trained."""
    trained_names: int = 0
    """A checksum of the names of those that are (`likeness`)."""
    checksums: tuple[int, ...] = ()
    """Those of its sequences (`likeness`)."""


def agreed(ranks: Ranks | None, prepare: Callable[[], tuple[_T, Facts]]) -> tuple[_T, Facts]:
    """The outcome of `prepare`, with the facts of all processes together.

    Raises what `prepare` does, and on all processes where it does on one: others would wait for it
    for ever. Raises PlanError, on all, unless all have the same plan and the same divisor, and
    where the plan has no backward in layers that one of them trains.
    """
    if ranks is None:
        return prepare()
    try:
        made, own = prepare()
    except Exception:
        gathered(ranks, [1, 0, 0, 0, 0, 0])
        raise
    rows = gathered(
        ranks,
        [
            0,
            own.plan.checksum,
            own.divisor,
            own.num_frozen_layers,
            int(own.trains),
            own.trained_names,
        ],
    )
    _refuse_different(rows, ranks.dp * ranks.sp)
    require_same_sequences(own.checksums, ranks)
    least = min(row[3] for row in rows)
    if sum(own.plan.stages[: own.plan.frozen_stages]) > least:
        process = next(index for index, row in enumerate(rows) if row[3] == least)
        raise PlanError(
            f"the plan has no backward in its first {own.plan.frozen_stages} stages, where process "
            f"{process} trains parameters, or below: plan again"
        )
    return made, replace(own, num_frozen_layers=least, trains=any(row[4] for row in rows))


def _refuse_different(rows: Sequence[Sequence[int]], stage_size: int) -> None:
    """`stage_size`: processes of a stage, which are neighbours."""
    _, first_plan, first_divisor, *_ = rows[0]
    for process, (is_refusing, plan, divisor, _, _, names) in enumerate(rows):
        if is_refusing:
            raise ConfigError(
                given=f"an error on process {process}, before a step that all take together",
                required="a plan, sequences and a model that every process accepts",
                source=f"process {process}",
                change="see the message of that process",
            )
        if plan != first_plan:
            raise PlanError(f"process {process} has another plan than process 0")
        if divisor != first_divisor:
            shown = f"{divisor}, not {first_divisor}"
            raise PlanError(f"process {process} has another divisor than process 0: {shown}")
        first = process - process % stage_size
        if names != rows[first][5]:
            raise ConfigError(
                given=f"other trained parameters on process {process} than on process {first}",
                required="the same requires_grad on all processes that share a stage's weights",
                source="the model that was passed to furlong.Engine on each process",
                change="freeze the same parameters on all",
            )


def gathered(
    ranks: Ranks, own: Sequence[int], group: dist.ProcessGroup | None = None
) -> list[list[int]]:
    """The numbers of each process of a group, by default of all. A collective."""
    group = group or ranks.group
    x = torch.tensor(own, device=ranks.facts_device(group))
    found = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(found, x, group=group)
    rows: list[list[int]] = torch.stack(found).tolist()
    return rows
