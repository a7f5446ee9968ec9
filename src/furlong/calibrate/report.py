"""Report of a calibration: fitted rates, their residuals, predictions beside measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import fields

from rich.table import Table

from furlong.calibrate.fit import Residuals
from furlong.calibrate.run import CalibrationOutcome, TrialResult
from furlong.cost.calibration import Calibration
from furlong.cost.machine import Efficiency, Link
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


def rates_table(calibration: Calibration) -> Table:
    """One row per term that was measured."""
    table = Table("term", "measured", title="fitted", title_justify="left")
    peak = calibration.peak_flops_per_s
    for field in fields(calibration):
        value = getattr(calibration, field.name)
        if field.name in _WORDS and value is not None:
            table.add_row(_WORDS[field.name], _format(field.name, value, peak))
    for name, link in calibration.links.items():
        table.add_row(f"link: {name}", _format_link(link))
    return table


def residuals_table(residuals: Residuals) -> Table:
    """One row per kind of pass: errors of the actions that were fitted."""
    table = Table("pass", "actions", "median", "worst", title="residuals", title_justify="left")
    for name, errors in residuals.by_pass.items():
        table.add_row(
            _PASSES.get(name, name), str(len(errors)),
            f"{statistics.median(map(abs, errors)):.1%}", f"{max(map(abs, errors)):.1%}",
        )  # fmt: skip
    return table


def results_table(results: Sequence[TrialResult], title: str) -> Table:
    """One row per plan: predicted against measured."""
    table = Table("plan", "step", "predicted", "error", "peak", "predicted", "error", title=title)
    table.title_justify = "left"
    for result in results:
        measured = result.measured
        table.add_row(
            str(result.trial),
            format_seconds(measured.step_s), format_seconds(result.predicted_s),
            f"{result.time_error:+.1%}",
            format_bytes(measured.peak_bytes), format_bytes(result.predicted_bytes),
            f"{result.memory_error:+.1%}",
        )  # fmt: skip
    return table


def tables(outcome: CalibrationOutcome) -> list[Table]:
    """All that a calibration has to show."""
    unseen = [result for result in outcome.results if result.trial.held_out]
    seen = [result for result in outcome.results if not result.trial.held_out]
    return [
        rates_table(outcome.calibration),
        residuals_table(outcome.residuals),
        results_table(seen, "plans that were fitted"),
        results_table(unseen, "plans that the fit has not seen"),
    ]


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
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("per_s"):
        return f"{format_count(value)} parameters/s"
    return format_seconds(value) if name.endswith("_s") else f"{value:.2f}"


def _format_link(link: Link) -> str:
    return f"{format_seconds(link.latency_s)} and {format_bytes(link.bytes_per_s)}/s"
