"""InfiniPipe: elastic pipelines over chunks of equal time, with checkpointing chosen per cell.

Wang et al., arXiv 2509.21275. The longest sequence is cut into `num_slices` slices of equal time
and the batch with it (`mesh`); chunks run in token-level 1F1B (`orders.seq1f1b`), those of the
longest sequences first; how many layers each cell recomputes is the least that fits
(`checkpointing`), and where two pipelines in a row are cheaper than one, sequences are parted
(`grouping`). Slice numbers are tried from the smallest that fits with everything recomputed; the
plan that the simulator finds fastest is returned.

Bytes and seconds are the cost model's own. The times that balance chunks are a fit to them of the
paper's form, a1 x^2 + a2 x.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Literal

from furlong.cost.model import CostModel
from furlong.errors import ConfigError
from furlong.plan.check import check
from furlong.plan.values import ON_DEVICE, Tiers
from furlong.planners.budget import DoesNotFitError
from furlong.planners.chunks.groups import Groups, refuse_unusable
from furlong.planners.chunks.placement import shard
from furlong.planners.infinipipe.checkpointing import Mode
from furlong.planners.infinipipe.elastic import (
    InfiniPipePlan,
    NoRoom,
    PipelineSetting,
    plan_elastic,
)
from furlong.planners.infinipipe.mesh import EQUAL_TOKENS, cut_and_pack
from furlong.planners.infinipipe.mesh_fit import fit_work
from furlong.planners.layout import cut_layers, mean_attended_keys
from furlong.units import count_words

EqualBy = Literal["time", "tokens"]

_PATIENCE = 3
"""Slice numbers in a row that bring nothing before the search ends."""


class NotFasterError(ConfigError):
    """Error where no plan is faster than the one that is to be beaten."""


def plan_infinipipe(
    seq_lens: Sequence[int],
    model: CostModel,
    *,
    num_stages: int,
    sp_size: int = 1,
    budget_bytes: int | None = None,
    stages: Sequence[int] | None = None,
    tiers: Tiers = ON_DEVICE,
    balance: EqualBy = "time",
    checkpointing: Mode = "adaptive",
    max_slices: int = 64,
    mip_gap: float = 0.02,
    max_nodes: int = 10_000,
    max_tried: int = 64,
    beat_s: float = inf,
    enough_s: float = 0.0,
    first_slices: int | None = None,
) -> InfiniPipePlan:
    """A checked plan of one replica of num_stages x sp_size devices that fits `budget_bytes` each.

    `stages`: layers per stage, default those that balance the stages' work; rank s holds stage s.
    With sp_size > 1 every slice is sharded over the sp group. `balance` and `checkpointing` switch
    parts of the method off. `mip_gap`: how much of the overhead may be too much (0: proven least);
    `max_nodes`: nodes of the tree of each integer program; `max_tried`: slice numbers that are
    worked out once one fits. Work is bounded by counts, never by a clock: equal questions have
    equal answers. `beat_s`: a step that it has to beat; `enough_s`: one that ends the search;
    `first_slices`: a slice number to try before all others.

    Raises DataError for unusable lengths, NotFasterError where no plan can beat `beat_s`, and
    DoesNotFitError for the plan that lacks least if no slice number up to `max_slices` fits.
    """
    refuse_unusable(seq_lens)
    setting = PipelineSetting(
        seq_lens=tuple(seq_lens), model=model, memory=model.memory(budget_bytes),
        stages=tuple(stages or cut_layers(model.shape, num_stages, mean_attended_keys(seq_lens))),
        sp_size=sp_size, tiers=tiers, mode=checkpointing, mip_gap=mip_gap, max_nodes=max_nodes,
    )  # fmt: skip
    most = min(max_slices, max(seq_lens))
    numbers = [*([] if first_slices is None else [min(first_slices, most)]), *slice_numbers(most)]
    return _search(setting, balance, numbers, max_tried, beat_s, enough_s)


def _search(
    setting: PipelineSetting,
    balance: EqualBy,
    numbers: Sequence[int],
    max_tried: int,
    beat_s: float,
    enough_s: float,
) -> InfiniPipePlan:
    """Tries slice numbers until some in a row bring nothing, or one is good enough."""
    best: InfiniPipePlan | None = None
    nearest: tuple[NoRoom, int] | None = None
    tried: list[tuple[int, float]] = []
    least_s, without_gain = inf, 0
    for num_slices in numbers:
        if without_gain >= _PATIENCE or len(tried) >= max_tried or beat_s <= enough_s:
            break
        found = plan_elastic(setting, _chunks(setting, balance, num_slices), beat_s=beat_s)
        without_gain += best is not None or isinstance(found, float)
        if isinstance(found, float):
            if best is None and found < least_s:
                least_s, without_gain = found, 0
        elif isinstance(found, InfiniPipePlan):
            tried.append((num_slices, found.predicted_s))
            if found.predicted_s < beat_s:
                best, beat_s, without_gain = found, found.predicted_s, 0
                best = replace(best, num_slices=num_slices)
        elif nearest is None or found.lacking_bytes < nearest[0].lacking_bytes:
            nearest = found, num_slices
    if best is not None:
        check(best.plan, setting.memory)
        return replace(best, tried=tuple(tried))
    if least_s < inf:
        raise NotFasterError(
            given=f"a step of at least {least_s:.3g} s however it is cut",
            required=f"less than {beat_s:.3g} s",
            source="the step that InfiniPipe's plan has to beat",
            change="take the other plan",
        )
    assert nearest is not None
    raise _no_room(setting, *nearest)


def _chunks(setting: PipelineSetting, balance: EqualBy, num_slices: int) -> Groups:
    work = EQUAL_TOKENS
    if balance == "time":
        work = fit_work(setting.model, max(setting.seq_lens), num_slices, **setting.layout)
    return shard(cut_and_pack(setting.seq_lens, num_slices, work), setting.sp_size)


def slice_numbers(most: int) -> Iterator[int]:
    """Slice numbers to try: 1, 2, 3, .. and from 8 on by about a fifth more each time, up to
    `most`."""
    number = 1
    while number <= most:
        yield number
        number += max(1, (number + 2) // 5)


def _no_room(setting: PipelineSetting, nearest: NoRoom, num_slices: int) -> DoesNotFitError:
    number = "no" if setting.mode == "none" else "every"
    return DoesNotFitError(
        nearest.rank,
        setting.memory.curve(nearest.plan, nearest.rank).peak,
        setting.memory.device_budget_bytes,
        setting.model.training,
        num_devices=len(setting.stages) * setting.sp_size,
        with_what=f"the longest sequence of {count_words(max(setting.seq_lens), 'token')} cut into "
        f"{count_words(num_slices, 'chunk')} and {number} layer recomputed",
    )
