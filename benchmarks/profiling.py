"""Where the time of one furlong step goes: kinds of work by kinds of action, then operators.

One thread. What an operator does itself counts, not what it calls; time between operators (Python,
waiting for the disk) is what is left of an action.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from typing import Any

import torch
from contenders import Trial, build
from harness import console, machine
from rich.table import Table

import furlong
from furlong.plan.plan import Backward, Forward, RebuildKV, Recompute

_OPERATORS_SHOWN = 25
_WORK = {
    "attention kernel": ("_scaled_dot_product", "_flash_attention"),
    "matrices": ("aten::addmm", "aten::mm", "aten::bmm", "aten::linear", "mkldnn"),
    "loss": ("aten::_log_softmax", "aten::nll_loss"),
    "copies": ("aten::copy_", "aten::cat", "aten::clone", "aten::index", "aten::_index_put"),
    "allocation, filling": ("aten::empty", "aten::fill_", "aten::zero_", "aten::resize_"),
    "elementwise": ("aten::",),
}
"""The first kind whose prefix an operator's name has is its kind."""
_ACTIONS = {Forward: "F", Recompute: "R", RebuildKV: "K", Backward: "B"}
_NAMES = {"F": "forward", "R": "recompute", "K": "rebuild K,V", "B": "backward"}


def profile(name: str, trial: Trial) -> None:
    """Print the profile of a trial's step."""
    torch.set_num_threads(1)
    model, batch = build(trial.shape), trial.batch()
    options = furlong.ChunkOptions(**trial.dials)
    start = [{key: ids[: 2 * options.size] for key, ids in batch[0].items()}]
    furlong.forward_backward(model, start, options)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities) as profiler,
        torch.profiler.record_function("step"),
    ):
        result = furlong.forward_backward(model, batch, options)
    console.print(f"{name}: {trial.num_tokens:,} tokens", style="bold")
    _print_kinds(profiler.events(), result.timeline)
    averages = profiler.key_averages()
    print(averages.table(sort_by="self_cpu_time_total", row_limit=_OPERATORS_SHOWN))
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()))


def _print_kinds(events: Any, timeline: furlong.Timeline) -> None:
    (whole,) = [e for e in events if e.name == "step"]
    # the timeline ends with the step; its clock starts with the first action
    origin_us = whole.time_range.end - timeline.duration_s * 1e6
    starts = [origin_us + r.start_s * 1e6 for r in timeline.records]
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        if event is whole:
            continue
        at = bisect_right(starts, event.time_range.start) - 1
        action = _ACTIONS.get(type(timeline.records[at].action), "") if at >= 0 else ""
        seconds[kind_of_work(event.name)][action] += event.self_cpu_time_total / 1e6
    by_action = {a: s for a, s in timeline.seconds_by_kind().items() if a in _ACTIONS.values()}
    table = Table("seconds", *(_NAMES[a] for a in by_action), "together", "share")
    rest = dict(by_action)
    for kind in (*_WORK, "other"):
        row = [seconds[kind][action] for action in by_action]
        for action, spent_s in zip(by_action, row, strict=True):
            rest[action] -= spent_s
        _add_row(table, kind, row, timeline.duration_s)
    _add_row(table, "between operators", list(rest.values()), timeline.duration_s)
    _add_row(table, "all", list(by_action.values()), timeline.duration_s)
    console.print(table)


def kind_of_work(name: str) -> str:
    for kind, parts in _WORK.items():
        if any(part in name for part in parts):
            return kind
    return "other"


def _add_row(table: Table, name: str, row: list[float], duration_s: float) -> None:
    together = sum(row)
    cells = [f"{value:.2f}" for value in (*row, together)]
    table.add_row(name, *cells, f"{together / duration_s:.0%}")
