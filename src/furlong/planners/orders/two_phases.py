"""The plan of token values: every forward first, then, for a loss that the caller makes, the rest.

    F0 F1 F2 F3 | K0 K1 R2 B2 R1 B1 R0 B0 R3 B3 | reduce       chunks 0 to 2 of one sequence, and 3

Between the phases live the K,V and what `keep` says of all sequences, but no graph. A plan that
keeps the input alone is a second forward. The group that was forwarded last goes back first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from furlong.errors import ConfigError
from furlong.plan.check import check
from furlong.plan.values import Action, Backward, ChunkPlan, Forward, RebuildKV, Recompute, Reduce
from furlong.planners.chunks.branches import Forks, without_unread
from furlong.planners.chunks.groups import group_chunks
from furlong.planners.options import ChunkOptions
from furlong.planners.orders.pipeline import number_chunks


def plan_two_phases(
    seq_lens: Sequence[int], options: ChunkOptions, *, num_layers: int, forks: Forks | None = None
) -> ChunkPlan:
    """A checked plan for one device whose loss stands between its forwards and its backwards.

    `forks`: where sequences branch. `num_retained` is as 0. Raises ConfigError for graphs that
    should be kept, for samples and for layer-first.
    """
    require_two_phases(options)
    groups = group_chunks(seq_lens, options, forks)
    numbered = number_chunks(groups)
    layers = min(options.recompute_layers, num_layers)
    actions: list[Action] = [Forward(c, 0, options.kept) for group in numbered for c in group]
    for group in reversed(numbered):
        if options.keep == "input":
            actions += [RebuildKV(chunk, 0) for chunk in group[:-1]]
        for chunk in reversed(group):
            actions += [Recompute(chunk, 0, layers), Backward(chunk, 0)]
    plan = ChunkPlan(
        tuple(seq_lens), tuple(chunk for group in groups for chunk in group), (num_layers,),
        ((*actions, Reduce(0)),), tiers=options.tiers, two_phases=True,
    )  # fmt: skip
    plan = without_unread(plan)
    check(plan)
    return plan


def require_two_phases(options: ChunkOptions) -> None:
    """Raise ConfigError for options that two phases have not."""
    odd: tuple[tuple[bool, str, Any, str], ...] = (
        (options.keep == "all", "keep", options.keep,
         "input, kv, attention or auto: no graph lives until the caller has made a loss"),
        (options.order != "chunk-first", "order", options.order,
         "chunk-first: all forwards run before the caller makes a loss"),
        (options.sampling is not None, "sample", options.sampling,
         "none: the caller's loss wants the gradient of all that it reads"),
    )  # fmt: skip
    for is_odd, name, value, required in odd:
        if is_odd:
            raise ConfigError(
                given=f"chunks.{name} = {value!r:.60}",
                required=required,
                source="the options of token_values, hidden_states or furlong.chunked",
                change=f"leave {name} out",
            )
