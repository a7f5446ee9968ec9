"""Plans of an engine's own calls, made from options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch

from furlong.plan.plan import ChunkPlan
from furlong.planners.chunks import Forks
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device, plan_replica
from furlong.planners.spaco import sampled
from furlong.runtime.followed_model import FollowedModel
from furlong.runtime.inputs import require_options


def planner_of(
    followed: FollowedModel, options: ChunkOptions, *, backward: bool, forks: Forks | None = None
) -> Callable[[Sequence[int]], ChunkPlan]:
    """A function that plans the sequences of one replica, by their lengths. Among several stages a
    collective; what it returns is none. `forks`: where sequences branch, on one device."""
    model, ranks = followed.model, followed.ranks
    is_staged = ranks is not None and ranks.pp > 1
    frozen = followed.num_frozen_layers if backward and is_staged else 0

    def plan(seq_lens: Sequence[int]) -> ChunkPlan:
        require_options(options)
        is_cut = backward and options.order == "layer-first"
        if forks:
            return plan_on_device(
                seq_lens, options, num_layers=model.num_layers, forks=forks, backward=backward,
                frozen_layers=model.num_frozen_layers if is_cut else 0,
            )  # fmt: skip
        return plan_replica(
            seq_lens, options,
            num_layers=model.num_layers, backward=backward,
            stages=followed.heights if is_staged else (),
            sp_size=1 if ranks is None else ranks.sp,
            frozen_layers=model.num_frozen_layers if is_cut and not is_staged else frozen,
        )  # fmt: skip

    return plan


def with_draw(
    followed: FollowedModel,
    plan: ChunkPlan,
    options: ChunkOptions,
    labelled: Collection[int] = (),
) -> ChunkPlan:
    """The plan of the whole batch with its draw, the same on all processes, if `options` ask for
    one. `labelled`: chunks whose labels decide with which probability they are drawn."""
    sampling = options.sampling
    if sampling is None or not plan.trained:
        return plan
    if sampling.seed is None:
        seed = int(torch.randint(2**62, (), device="cpu"))
        sampling = replace(sampling, seed=followed.by_first(seed))
    return sampled(plan, sampling, labelled)
