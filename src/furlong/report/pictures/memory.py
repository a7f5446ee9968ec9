"""A rank's memory over a step, by its parts, as steps in time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from furlong.cost.memory.curve import MemoryCurve
from furlong.cost.memory.levels import PARTS
from furlong.plan.values import Action, Recv, Reduce, Reshard
from furlong.report.pictures.colours import PART_COLOURS
from furlong.timeline import Record


@dataclass(frozen=True, slots=True)
class Steps:
    """Bytes by part, from each of `times` to the next; both are empty where none are in use."""

    times: tuple[float, ...]
    parts: dict[str, tuple[int, ...]]
    """The parts from the bottom of a stack to its top, each with a number for each time."""

    @property
    def totals(self) -> list[int]:
        return [sum(row) for row in zip(*self.parts.values(), strict=True)]

    @property
    def peak(self) -> int:
        return max(self.totals, default=0)


def memory_steps(
    records: Sequence[Record], actions: Sequence[Action], lower: str, curve: MemoryCurve | None
) -> tuple[Steps, Steps]:
    """The memory of one rank, on its device and below it, from the records of its `actions`.

    `curve`: what the cost model counts for these actions, by parts. Without it only the totals are
    known, and `lower` names the tiers below the device.
    """
    # what is still on its way when the rank goes on says nothing about the rank's memory
    settled = [r for r in records if r.lane == "compute" or _waits(r)]
    settled.sort(key=lambda record: record.start_s)
    times = [record.start_s for record in settled]
    if curve is None:
        device = {"in use": [record.device_bytes for record in settled]}
        return _steps(times, device), _steps(times, {lower: [r.host_bytes for r in settled]})
    places = _places(settled, actions)
    moments = [*zip(times, places, places, strict=True)]
    for (one, place), (other, behind) in pairwise(zip(settled, places, strict=True)):
        if one.stop_s < other.start_s:  # idle: what either had at work for itself is not there
            moments.append((one.stop_s, place, behind))
    moments.sort(key=lambda moment: moment[0])
    times = [time for time, _, _ in moments]
    before, after = [place for _, place, _ in moments], [place for _, _, place in moments]
    rows = np.minimum(curve.device[before], curve.device[after])
    device = {part: rows[:, i].tolist() for i, part in enumerate(PARTS)}
    below = {
        name: np.minimum(tier[before], tier[after]).tolist()
        for name, tier in (("host", curve.host), ("disk", curve.disk))
    }
    return _steps(times, device), _steps(times, below)


def _steps(times: Sequence[float], parts: Mapping[str, Sequence[int]]) -> Steps:
    """The steps from 0 on, without what changes nothing; of several at one time the last stands."""
    shown = {name: parts[name] for name in PART_COLOURS if any(parts.get(name, ()))}
    if not shown:
        return Steps((), {})
    last_at = {time: index for index, time in enumerate(times)}
    rows = {time: tuple(values[i] for values in shown.values()) for time, i in last_at.items()}
    kept: list[tuple[float, tuple[int, ...]]] = []
    for time, row in rows.items():
        if not kept or row != kept[-1][1]:
            kept.append((time if kept else 0.0, row))
    columns = zip(*(row for _, row in kept), strict=True)
    return Steps(tuple(time for time, _ in kept), dict(zip(shown, columns, strict=True)))


def _places(records: Sequence[Record], actions: Sequence[Action]) -> list[int]:
    """The place of each record's action in the list of its rank; equal ones run in their order."""
    places: dict[Action, deque[int]] = defaultdict(deque)
    for place, action in enumerate(actions):
        places[action].append(place)
    return [places[record.action].popleft() for record in records]


def _waits(record: Record) -> bool:
    """Whether the rank waits for an action that is no cell."""
    return record.lane != "copy" and isinstance(record.action, (Recv, Reshard, Reduce))
