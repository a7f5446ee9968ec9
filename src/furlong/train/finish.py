"""The end of a run: its model as a folder, and its report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from furlong.api import Engine
from furlong.config.schema import RunConfig
from furlong.files import write_json
from furlong.models.build import export_model
from furlong.train.figures.report import TrainReport, list_export
from furlong.train.loop import LoopFigures
from furlong.train.processes import Processes
from furlong.train.run_folder import EXPORT, REPORT, clear_export
from furlong.train.run_model import rope_of
from furlong.train.setup.prepare import build_run_model
from furlong.train.whole import put_weights, whole_weights


def finish(
    config: RunConfig,
    folder: Path,
    engine: Engine,
    tokenizer: Any,
    figures: LoopFigures,
    processes: Processes,
) -> TrainReport:
    """Exports the model and writes the report, which marks the run as finished."""
    processes.at("the export")
    if processes.num_processes > 1:
        weights = whole_weights(engine, processes)

    def write() -> dict[str, Any]:
        whole: Any = engine.model.model
        if processes.num_processes > 1:
            whole = build_run_model(config)
            put_weights(whole, weights)
        return asdict(_report(config, folder, whole, tokenizer, figures))

    return TrainReport(**processes.from_first(write))


def _report(
    config: RunConfig, folder: Path, model: Any, tokenizer: Any, figures: LoopFigures
) -> TrainReport:
    clear_export(folder)
    dtype = getattr(torch, config.model.dtype)
    exported = export_model(model, tokenizer, folder / EXPORT, dtype=dtype, rope=rope_of(config))
    progress = figures.progress
    report = TrainReport(
        num_steps=progress.step,
        num_tokens=progress.num_tokens,
        train_loss=progress.last_loss,
        eval_loss_before=progress.eval_loss_before,
        eval_loss_after=figures.eval_loss_after,
        tokens_per_s=progress.num_tokens / progress.steps_s,
        peak_memory_bytes=progress.peak_memory_bytes,
        num_skipped_batches=progress.num_skipped_batches,
        run_folder=str(folder),
        export_folder=str(exported),
        export_files=list_export(exported),
    )
    write_json(folder / REPORT, asdict(report))
    print(f"exported to {exported}")
    return report
