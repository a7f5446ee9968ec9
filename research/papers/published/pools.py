"""Dials of plans whose only rank is one pool of devices: whole sequences on places of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from furlong.plan.plan import Layout
from papers.published.catalogue import Method, flexsp, hybrid_cp
from papers.published.dials import Dials
from papers.published.problem import Problem
from papers.published.room import Room, round_numbers

_METHODS = (flexsp, hybrid_cp)
"""The methods that know a pool."""


def pool_dials(problem: Problem, methods: Collection[Method]) -> Iterator[Dials]:
    """The dials that the methods allow, with the sizes that are given. The axes of data
    and sequence parallelism are one, so that neither may have a size of its own. Pools of
    fewer devices may have more sizes of places: 12 have four, 13 have two."""
    given = (problem.dp, problem.sp, problem.pp)
    groups = problem.num_devices
    if problem.model.shape.is_recurrent:
        return  # a state is on one device
    for layout in (Layout(sp=number) for number in round_numbers(groups)):
        sizes = (layout.dp, layout.sp, layout.pp)
        if layout.sp == 1 or any(n not in (None, own) for n, own in zip(given, sizes, strict=True)):
            continue
        room = Room(
            layout=layout, stages=(problem.model.shape.num_layers,), balance="none",
            longest_tokens=max(problem.seq_lens), sizes=(), is_pool=True,
        )  # fmt: skip
        for method in methods:
            for (dials,) in method(room) if method in _METHODS else ():
                yield dials
