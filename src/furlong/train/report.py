"""The final figures of a run, and whether its exported model still exists."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from furlong.errors import CheckpointError

_WEIGHTS = ".safetensors"


@dataclass(frozen=True, slots=True)
class TrainReport:
    """The final figures of a run, as in its `report.json`."""

    num_steps: int
    num_tokens: int
    train_loss: float | None
    """Mean loss of the last step's global batch; None where no step has one, as sampled steps whose
    drawn chunks have no label."""
    eval_loss_before: float | None
    eval_loss_after: float | None
    tokens_per_s: float
    peak_memory_bytes: int
    num_skipped_batches: int
    run_folder: str
    export_folder: str
    export_files: dict[str, int]
    """Bytes of each file of the exported model, by name."""


def read_report(file: Path) -> TrainReport:
    """The report of a finished run. Raises CheckpointError."""
    try:
        return TrainReport(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            given=f"{file}: {error}",
            required="the report of a finished run",
            source=str(file),
            change="remove it: --resume then ends the run again from its newest checkpoint",
        ) from error


def list_export(folder: Path) -> dict[str, int]:
    """Bytes of each file of an exported model, by name."""
    return {
        file.relative_to(folder).as_posix(): file.stat().st_size
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def missing_of_export(folder: Path, files: dict[str, int]) -> str | None:
    """The first file of an exported model that is missing or, with weights, of another size; None
    if the model is whole. Other files may have been edited."""
    if not folder.is_dir():
        return str(folder)
    found = list_export(folder)
    for name, num_bytes in files.items():
        if name not in found or (name.endswith(_WEIGHTS) and found[name] != num_bytes):
            return str(folder / name)
    return None
