"""Report of a calibration: fitted rates, their residuals, predictions beside measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from furlong.calibrate.run import CalibrationOutcome
from furlong.cost.machine import Efficiency
from furlong.units import format_bytes, format_count, format_seconds

_WORDS = {
    "peak_flops_per_s": "peak of matrix products",
    "linear": "matrices",
    "attention_forward": "attention, forward",
    "attention_backward": "attention, backward",
    "pass_launch_s": "launches of a pass over a stage",
    "layer_launch_s": "launches of a layer",
    "slice_launch_s": "launches of a slice in a layer",
    "activation_bytes_per_s": "kernels that pass bytes",
    "optimizer_parameters_per_s": "optimizer",
    "activation_factor": "graphs, measured over counted",
    "heap_blocks": "freed blocks that the heap holds",
    "heap_share": "share of a freed graph that it holds",
}
_PASSES = {
    "to last kv": "forward to the last K,V",
    "values": "forward",
    "graph": "forward with its graph",
    "backward": "backward",
}


def tables(outcome: CalibrationOutcome) -> list[Table]:
    """All that a calibration has to show: rates, residuals, predictions beside measurements."""
    own = outcome.calibration
    rates = [
        (words, _format(name, value, own.peak_flops_per_s))
        for name, words in _WORDS.items()
        if (value := getattr(own, name)) is not None
    ]
    links = [
        (
            f"link: {name}",
            f"{format_seconds(link.latency_s)} and {format_bytes(link.bytes_per_s)}/s",
        )
        for name, link in own.links.items()
    ]
    passes = [
        (_PASSES.get(name, name), str(len(errors)), f"{statistics.median(map(abs, errors)):.1%}",
         f"{max(map(abs, errors)):.1%}")
        for name, errors in outcome.residuals.by_pass.items()
    ]  # fmt: skip
    plans: dict[bool, list[Sequence[str]]] = {False: [], True: []}
    for result in outcome.results:
        measured = result.measured
        plans[result.trial.held_out].append((
            str(result.trial), format_seconds(measured.step_s), format_seconds(result.predicted_s),
            f"{result.time_error:+.1%}", format_bytes(measured.peak_bytes),
            format_bytes(result.predicted_bytes), f"{result.memory_error:+.1%}",
        ))  # fmt: skip
    heads = ("plan", "step", "predicted", "error", "peak", "predicted", "error")
    return [
        _table("fitted", ("term", "measured"), [*rates, *links]),
        _table("residuals", ("pass", "actions", "median", "worst"), passes),
        _table("plans that were fitted", heads, plans[False]),
        _table("plans that the fit has not seen", heads, plans[True]),
    ]


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*heads, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def _format(name: str, value: float | Efficiency, peak: float | None) -> str:
    if isinstance(value, Efficiency):
        reached = f"{value.best:.0%} of the peak"
        rate = f" ({format_count(value.best * peak)}FLOP/s)" if peak else ""
        half = f", half of it at {value.half_tokens:.0f} tokens" if value.half_tokens else ""
        return f"{reached}{rate}{half}"
    if name.endswith("flops_per_s"):
        return f"{format_count(value)}FLOP/s"
    if name.endswith("bytes_per_s"):
        return f"{format_bytes(value)}/s"
    if name.endswith("per_s"):
        return f"{format_count(value)} parameters/s"
    return format_seconds(value) if name.endswith("_s") else f"{value:.2f}"
