"""Source and target of an export: all that can be checked before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.config.schema import RunConfig
from furlong.config.sources import build_run
from furlong.errors import CheckpointError, ConfigError
from furlong.models.folder import check_export_folder, check_files
from furlong.train.checkpoints.folder import (
    MANIFEST,
    STATE,
    check_checkpoint,
    newest_checkpoint,
    read_state,
    removal_told,
)
from furlong.train.disk import check_creatable, folder_errors_reported
from furlong.train.run_folder import CHECKPOINTS


@dataclass(frozen=True, slots=True)
class Exportable:
    """A whole checkpoint, and a folder that can be created for its model."""

    checkpoint: Path
    state: dict[str, Any]
    """State that the checkpoint holds beside its tensors."""
    config: RunConfig
    """With which it was written."""
    merge: bool
    """Whether adapters are added to their base."""
    out: Path
    source: Path
    """The run or checkpoint that was named."""
    given_out: Path | None

    def again(self) -> Exportable:
        """The same export, found anew where a run has removed the checkpoint since."""
        return find_exportable(self.source, merge=self.merge, out=self.given_out)


def find_exportable(source: Path, *, merge: bool = False, out: Path | None = None) -> Exportable:
    """The checkpoint `source`, or the newest one of the run `source`.

    By default the model's folder lies beside the run's `checkpoints`. Raises CheckpointError or
    ConfigError.
    """
    with folder_errors_reported(source):
        checkpoint = _find_checkpoint(source)
        with removal_told(checkpoint):
            state = read_state(checkpoint)
    config = build_run(state["config"], str(checkpoint / STATE))
    if merge and config.model.lora is None:
        raise ConfigError(
            given="--merge for a checkpoint without adapters",
            required="a run with model.lora",
            source=str(checkpoint),
            change="leave --merge out: the checkpoint's weights are whole",
        )
    name = f"model-{checkpoint.name}{'-merged' if merge else ''}"
    folder = out or checkpoint.absolute().parent.parent / name
    check_creatable(folder, "the export")
    check_export_folder(folder)
    check_files(config.model.name)
    return Exportable(checkpoint, state, config, merge, folder, source, out)


def _find_checkpoint(source: Path) -> Path:
    if (source / MANIFEST).exists() or (source.parent.name == CHECKPOINTS and source.is_dir()):
        with removal_told(source):
            check_checkpoint(source)
        return source
    checkpoint = newest_checkpoint(source / CHECKPOINTS)
    if checkpoint is None:
        raise CheckpointError(
            given=f"{source}, which holds no checkpoint",
            required="the folder of a run with checkpoints, or of one of them",
            source="the command line",
            change="name a run that was trained with train.save_every_steps above 0",
        )
    return checkpoint
