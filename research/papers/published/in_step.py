"""Replicas in step: where ZeRO-3 gathers weights for every pass, all run equal passes.

On one rank with one stage each, their groups are sorted and filled up with dummies; pipelines and
layer-first walks stay as they are, and must have equal passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from furlong.cost.model import CostModel
from furlong.plan.passes import layer_directions
from furlong.plan.plan import COMPUTING, Action, Backward, Chunk, ChunkPlan, Computing, Forward
from furlong.planners.orders import join_replicas


def join_in_step(
    plans: Sequence[ChunkPlan],
    seq_ids: Sequence[Sequence[int]],
    seq_lens: Sequence[int],
    model: CostModel,
) -> ChunkPlan:
    """As `join_replicas`, in step where the model's ZeRO-3 gathers weights with every pass. Raises
    PlanError for unequal passes."""
    regathers = model.training.regathers
    if regathers and len(plans[0].actions) == len(plans[0].stages) == 1:
        plans = fill_up(plans, model)
    plans = [replace(plan, regathers=regathers) for plan in plans]
    return join_replicas(plans, seq_ids, seq_lens)


@dataclass(frozen=True, slots=True)
class _Group:
    """Consecutive actions whose chunks no other ones depend on."""

    actions: tuple[Computing, ...]
    ways: tuple[str, ...]
    """Direction of each action through the layers: f, b, or nothing."""
    pattern: str
    """The directions in one word."""
    seconds: float


def fill_up(plans: Sequence[ChunkPlan], model: CostModel) -> list[ChunkPlan]:
    """The plans of replicas with one stage on one rank each, sorted and filled up with dummies so
    that all run the same sequence of forwards and backwards."""
    left = [deque(_groups(plan, model)) for plan in plans]
    rows: list[list[tuple[list[_Group], str]]] = [[] for _ in plans]
    while any(left):
        wanted = _common(groups[0].pattern for groups in left if groups)
        for own, groups in zip(rows, left, strict=True):
            own.append((_take(groups, wanted), wanted))
    return [_filled(plan, own) for plan, own in zip(plans, rows, strict=True)]


def _groups(plan: ChunkPlan, model: CostModel) -> list[_Group]:
    """The groups of a plan's only list, longest patterns first, then the slowest."""
    costs = model.costs(plan)
    walked = [
        (action, way[0] if way else "")
        for action, way in zip(plan.actions[0], layer_directions(plan, 0), strict=True)
        if isinstance(action, COMPUTING)
    ]
    last = {action.chunk: index for index, (action, _) in enumerate(walked)}
    for group in plan.groups.values():
        last |= dict.fromkeys(group, max(last.get(chunk, -1) for chunk in group))
    found, start, end = [], 0, 0
    for index, (action, _) in enumerate(walked):
        end = max(end, last[action.chunk])
        if index == end:
            actions, ways = zip(*walked[start : end + 1], strict=True)
            seconds = sum(costs.compute_s(a, 0) for a in actions)
            found.append(_Group(actions, ways, "".join(ways), seconds))
            start = end = index + 1
    return sorted(found, key=lambda group: (-len(group.pattern), group.pattern, -group.seconds))


def _common(patterns: Iterable[str]) -> str:
    """A pattern into which each of `patterns` fits: the longest, where all fit into that."""
    common = ""
    for pattern in sorted(set(patterns), key=lambda one: (-len(one), one)):
        if _places(pattern, common) is None:
            common += pattern
    return common


def _take(groups: deque[_Group], wanted: str) -> list[_Group]:
    """Removes and returns groups that fit into `wanted` one after the other, first ones first."""
    taken: list[_Group] = []
    left: list[_Group] = []
    pattern = ""
    while groups and len(pattern) + len(groups[-1].pattern) <= len(wanted):
        group = groups.popleft()
        is_tried = bool(left) and left[-1].pattern == group.pattern
        if is_tried or _places(pattern + group.pattern, wanted) is None:
            left.append(group)
        else:
            taken.append(group)
            pattern += group.pattern
    groups.extendleft(reversed(left))
    return taken


def _places(pattern: str, wanted: str) -> list[int] | None:
    """Places of the passes of `pattern` in `wanted`, so that dummies can do the rest: there, each
    backward has a forward before it. As late as may be, for extra forwards come first."""
    for stop in range(len(wanted), len(pattern) - 1, -1):
        places: list[int] = []
        for way in reversed(pattern):
            places.append(wanted.rfind(way, 0, places[-1] if places else stop))
            if places[-1] < 0:
                return None
        balance, taken = 0, set(places)
        for place, way in enumerate(wanted):
            balance += 0 if place in taken else 1 if way == "f" else -1
            if balance < 0:
                break
        else:
            return places[::-1]
    return None


def _filled(plan: ChunkPlan, rows: Iterable[tuple[Sequence[_Group], str]]) -> ChunkPlan:
    """The plan with its groups in this order, those of each row filled up to its pattern."""
    actions: list[Action] = []
    num_chunks = len(plan.chunks)
    for groups, wanted in rows:
        places = _places("".join(group.pattern for group in groups), wanted)
        assert places is not None
        dummies = _dummies(wanted, places, num_chunks)
        num_chunks += len({dummy.chunk for dummy in dummies.values()})
        own = (pair for group in groups for pair in zip(group.actions, group.ways, strict=True))
        for place in range(len(wanted)):
            if place in dummies:
                actions.append(dummies[place])
                continue
            for action, way in own:
                actions.append(action)
                if way:
                    break
        actions += [action for action, _ in own]
    added = (Chunk(()),) * (num_chunks - len(plan.chunks))
    others = [a for a in plan.actions[0] if not isinstance(a, Computing)]
    return replace(plan, chunks=plan.chunks + added, actions=((*actions, *others),), regathers=True)


def _dummies(wanted: str, places: Sequence[int], first: int) -> dict[int, Forward | Backward]:
    """The passes of `wanted` at no one's place, by dummy chunks from number `first` on: a backward
    takes the latest dummy that has none, and those that get none only run forward."""
    passes: dict[int, Forward | Backward] = {}
    waiting: list[int] = []
    for place in sorted(set(range(len(wanted))) - set(places)):
        if wanted[place] == "f":
            waiting.append(place)
            passes[place] = Forward(first, 0, "input")
            first += 1
        else:
            chunk = passes[waiting[-1]].chunk
            passes[waiting.pop()] = Forward(chunk, 0, "all")
            passes[place] = Backward(chunk, 0)
    return passes
