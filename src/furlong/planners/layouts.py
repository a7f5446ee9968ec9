"""Layouts of devices: data-parallel replicas, sequence-parallel groups, pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import gcd, inf, prod

import numpy as np
import numpy.typing as npt

from furlong.cost.model import CostModel
from furlong.cost.shape import ModelShape
from furlong.errors import ConfigError
from furlong.plan.plan import Layout
from furlong.units import count_words

Floats = npt.NDArray[np.float64]
_STATE_SHARE = 0.9
"""Share of a device's memory that the state of a pipeline stage may take; passes need the rest."""


def layouts(
    num_devices: int,
    shape: ModelShape,
    *,
    dp: int | None = None,
    sp: int | None = None,
    pp: int | None = None,
    gathers: bool = False,
    replicate: int = 1,
) -> list[Layout]:
    """Return all layouts of `num_devices` that the model supports, with the given sizes.

    - If sp divides the number of query heads, its groups use Ulysses. Otherwise they gather K,V.
      Such layouts come last in the result; without `gathers` only if there are no others.
    - pp is at most the number of layers, and 1 if layers need more than the output of the layer
      before.
    - dp is a multiple of `replicate`, the number of groups that each hold all weights.

    Raises ConfigError if no layout is left; its text multiplies the given sizes.
    """
    found = [
        Layout(num_devices // (s * p), s, p)
        for s in divisors(num_devices)
        if sp in (None, s)
        for p in divisors(num_devices // s)
        if pp in (None, p) and p <= (1 if shape.whole else shape.num_layers)
        if dp in (None, num_devices // (s * p))
    ]
    if not found:
        raise _no_layout(num_devices, shape, {"dp": dp, "sp": sp, "pp": pp})
    require_replicate(max(one.dp for one in found), replicate)
    found = [one for one in found if one.dp % replicate == 0]
    dividing = [one for one in found if shape.num_heads % one.sp == 0]
    if dividing and not gathers:
        return dividing
    return dividing + [one for one in found if one not in dividing]


def require_replicate(dp: int, replicate: int) -> None:
    """Raise ConfigError unless `replicate`, the number of groups that each hold all weights,
    divides dp."""
    if replicate < 1 or dp % replicate:
        raise ConfigError(
            given=f"replicate {replicate} with dp {dp}",
            required="a divisor of dp: each group that holds all weights has as many replicas",
            source="replicate (parallel.replicate) and the number of devices",
            change=f"set parallel.replicate to {gcd(dp, max(1, replicate))}",
        )


def no_pools(layout: Layout, replicate: int) -> ConfigError:
    """Return the error for a pipeline with reshard that cannot shard weights as reshard needs.
    There each replica gathers weights within its sequence-parallel group (pool), which must have
    several processes and hold all weights of a stage."""
    given = f"parallel.reshard = true with {layout}"
    return ConfigError(
        given=f"{given}, parallel.replicate {replicate}" if replicate > 1 else given,
        required="no pipeline, or pools (parallel.sp above 1) that each hold all weights of a stage"
        " (parallel.replicate 1 or dp)",
        source="parallel",
        change="set parallel.reshard to false",
    )


def replicate_of(layout: Layout, reshards: bool, replicate: int) -> int:
    """Return the number of groups of processes that each hold all weights of a stage. This is
    `replicate`, or dp if passes of a pipeline gather weights: replicas do not run in lockstep, so
    each one gathers within its sequence-parallel group (pool)."""
    return layout.dp if reshards and layout.pp > 1 else replicate


def refuse_reshard_alone(num_devices: int, replicate: int = 1, *, offloads: bool = False) -> None:
    """Raise ConfigError if there is no device to gather weights from, for a run with reshard: each
    of the `replicate` groups that hold all weights is then a single device. No error is raised with
    `offloads`, where weights are copied from CPU memory."""
    if num_devices <= replicate and not offloads:
        groups = f"{count_words(replicate, 'group')} of one device"
        raise ConfigError(
            given=f"parallel.reshard = true on {groups if replicate > 1 else 'one device'}",
            required="several devices that divide the weights among them",
            source="parallel.reshard, parallel.replicate and the number of devices",
            change="set parallel.reshard to false, or"
            f" {'parallel.replicate to 1' if replicate > 1 else 'use several devices'}",
        )


def _no_layout(num_devices: int, shape: ModelShape, sizes: dict[str, int | None]) -> ConfigError:
    """Return the error for sizes dp, sp and pp that no layout of the devices has, with a reason."""
    product = prod(size or 1 for size in sizes.values())
    words = " x ".join(f"{name} {'auto' if n is None else n}" for name, n in sizes.items())
    relation = "a multiple of" if None in sizes.values() else "="
    given = f"parallel: {words}, {relation} {count_words(product, 'device')}"
    source = "the sizes of parallel and the model's layers"
    pp, layers = sizes["pp"] or 1, shape.num_layers
    if pp > 1 and shape.whole:
        given += f", for a {shape.family}, which {shape.whole}"
        required = "parallel.pp 1: its decoder is not divided between layers"
        change = "set parallel.pp to 1; replicas (parallel.dp) take further devices"
    elif pp > layers:
        required = f"a parallel.pp of at most the model's {count_words(layers, 'layer')}"
        change = f"set parallel.pp to {layers}{' or less, or auto' if layers > 1 else ''}"
    else:
        required = f"sizes that multiply to {count_words(num_devices, 'device')}"
        source = "the sizes of parallel and the number of devices"
        change = f"use {count_words(product, 'device')}, or remove parallel, of which dp takes all"
        if None in sizes.values():
            below = num_devices // product * product
            change = f"use {f'{below} or ' if below else ''}{below + product} devices"
            fits = ", ".join(map(str, divisors(num_devices)[1:]))
            set_sizes = [name for name, size in sizes.items() if (size or 1) > 1]
            change += (
                f", or set parallel.{set_sizes[0]} to {fits}"
                if fits and len(set_sizes) == 1
                else ", or remove parallel, of which dp takes all"
            )
    return ConfigError(given=given, required=required, source=source, change=change)


def cut_layers(
    model: CostModel,
    num_stages: int,
    mean_keys: float = 0.0,
    *,
    group_size: int = 1,
    limit_bytes: float = inf,
) -> tuple[int, ...]:
    """Return the number of layers of each stage, cut so that the slowest stage is as fast as
    possible (the last stage includes the head) and, among such cuts, stages are most even.

    `mean_keys`: mean number of keys that a token of the batch attends to. `limit_bytes`: memory of
    a device. If possible, the state (weights, gradients, optimizer) of a stage, sharded over
    `group_size` devices, takes at most `_STATE_SHARE` of it.
    """
    shape, weights = model.shape, model.training.weights
    before, outside = [0.0, *accumulate(model.layer_seconds(mean_keys))], None
    if limit_bytes < inf:
        alone = (1,) * shape.num_layers
        layers = (frozenset((i,)) for i in range(shape.num_layers))
        states = [weights(shape, alone, own, group_size).state.total for own in layers]
        held = [0.0, *accumulate(states)]
        least, _ = _cut(held, num_stages, np.maximum)
        bound = max(least * (1 + 1e-9), _STATE_SHARE * limit_bytes)
        outside = np.subtract.outer(np.array(held), np.array(held)) > bound  # [stop, first]
    slowest, _ = _cut(before, num_stages, np.maximum, outside)
    limit = slowest * (1 + 1e-9)
    # the most even of all cuts with that slowest stage
    _, stages = _cut(
        before, num_stages,
        lambda so_far, stage: np.where(stage <= limit, so_far + stage**2, inf), outside,
    )  # fmt: skip
    return stages


def _cut(
    before: Sequence[float],
    num_stages: int,
    add: Callable[[Floats, Floats], Floats],
    outside: npt.NDArray[np.bool_] | None = None,
) -> tuple[float, tuple[int, ...]]:
    """Return (least cost, layers of each stage) of a cut of the layers into `num_stages` stages, by
    dynamic programming.

    `before[n]`: work of the first n layers. `add(costs, work)`: returns the cost of a cut with one
    more stage, given the cost without this stage and the work of this stage. `outside[stop,
    first]`: whether a stage of layers [first, stop) is not allowed.
    """
    num_layers = len(before) - 1
    work = np.subtract.outer(np.array(before), np.array(before))  # [stop, first]
    costs = np.full(num_layers + 1, inf)
    costs[0] = 0.0
    firsts = []
    for stage in range(num_stages):
        options = add(costs[None, :], work)
        options[:, :stage] = inf  # each earlier stage has a layer
        options[np.triu_indices(num_layers + 1)] = inf
        if outside is not None:
            options[outside] = inf
        firsts.append(options.argmin(axis=1))
        costs = options.min(axis=1)
    stop, stages = num_layers, list[int]()
    for first in reversed(firsts):
        stages.append(stop - int(first[stop]))
        stop = int(first[stop])
    return float(costs[-1]), tuple(reversed(stages))


def first_alike(shape: ModelShape, stages: Sequence[int]) -> list[int]:
    """Return, for each stage, the first stage with equal layers and head, and so equal time."""
    starts = [0, *accumulate(stages)]
    kinds = [(shape.layers[a:b], b == shape.num_layers) for a, b in pairwise(starts)]
    return [kinds.index(kind) for kind in kinds]


def mean_attended_keys(seq_lens: Sequence[int]) -> float:
    """Return the mean number of keys that a token attends to in full causal attention."""
    return sum(n * (n + 1) / 2 for n in seq_lens) / max(1, sum(seq_lens))


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]
