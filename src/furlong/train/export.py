"""From a checkpoint to a folder that transformers, or for adapters peft, loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from furlong.config.sources import build_run
from furlong.data.tokenize import load_tokenizer
from furlong.errors import CheckpointError, ConfigError
from furlong.models.build import check_export_folder, export_model
from furlong.train.architecture import check_architecture
from furlong.train.checkpoint import load_tensors, one_process
from furlong.train.checkpoint_folder import (
    MANIFEST,
    STATE,
    check_checkpoint,
    newest_checkpoint,
    read_state,
)
from furlong.train.disk import check_creatable, folder_errors_reported
from furlong.train.run import build_run_model, read_architecture
from furlong.train.run_folder import CHECKPOINTS
from furlong.train.state import base_fingerprint, check_base, trained_tensors


def export(source: Path, *, merge: bool = False, out: Path | None = None) -> Path:
    """Writes the model of a checkpoint, or of a run's newest one, into a new folder; returns it.

    Adapters are written in peft's format or, with `merge`, added to the base's weights. By default
    the folder lies beside the run's `checkpoints`. Raises CheckpointError or ConfigError.
    """
    checkpoint = _find_checkpoint(source)
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
    out = out or checkpoint.absolute().parent.parent / name
    check_creatable(out, "the export")
    check_export_folder(out)
    check_architecture(checkpoint, state, read_architecture(config), config.model.name)
    model = build_run_model(config)
    check_base(checkpoint, state, base_fingerprint(model))
    with one_process():
        load_tensors(checkpoint, trained_tensors(model))
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    if merge:
        model = _merged(model)
    with folder_errors_reported(out.parent):
        export_model(model, load_tokenizer(config.model.name), out, dtype=dtype)
    print(f"exported step {state['step']} to {out}")
    return out


def _merged(model: Any) -> Any:
    """The base model with its adapters added, in float32, so that they are rounded once."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    return model.merge_and_unload()


def _find_checkpoint(source: Path) -> Path:
    if (source / MANIFEST).exists() or (source.parent.name == CHECKPOINTS and source.is_dir()):
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
