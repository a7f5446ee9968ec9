"""The keep of a plan in two phases, where it is auto: the least work for which memory has room.

Between the phases lives what the chunks of all sequences keep, so what is fastest for a pair of
them may not fit for a batch. `attention` runs no attention again, `kv` all of it once more, `input`
every forward: work rises and memory falls in this order, whatever the lengths are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from furlong.cost.memory import PARTS, PlanMemory
from furlong.plan.plan import ChunkPlan
from furlong.planners.auto.candidates import KEEPS
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_two_phases
from furlong.planners.predict import Needs
from furlong.planners.question import Limits

_STATE = ("weights", "gradients", "optimizer")


def with_keep(
    seq_lens: Sequence[int], options: ChunkOptions, memory: PlanMemory, budgets: Limits
) -> ChunkOptions:
    """The options with a keep in the place of auto: the first of `KEEPS` whose plan the budgets
    hold beside weights, gradients and optimizer; where none does the last one, which needs least.
    """
    for keep in KEEPS:
        found = replace(options, keep=keep)
        plan = plan_two_phases(seq_lens, found, num_layers=memory.shape.num_layers)
        if budgets.hold(needs_beside_state(plan, memory)):
            break
    return found


def needs_beside_state(plan: ChunkPlan, memory: PlanMemory) -> Needs:
    """Most bytes that a plan in two phases needs of each tier, besides weights, gradients and
    optimizer; with the final hidden states that it gives out, and their gradient."""
    curve = memory.curve(plan, 0)
    columns = [index for index, part in enumerate(PARTS) if part not in _STATE]
    per_token = 2 * memory.shape.hidden_size * memory.training.compute_bytes
    device = int(curve.device[:, columns].sum(axis=1).max()) + per_token * sum(plan.seq_lens)
    return Needs(device, int(curve.host.max()), int(curve.disk.max()))
