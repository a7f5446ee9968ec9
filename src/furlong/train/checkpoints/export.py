"""From a checkpoint to a folder that transformers, or for adapters peft, loads."""

from __future__ import annotations

from pathlib import Path

import torch

from furlong.data.tokenize import load_tokenizer
from furlong.models.build import export_model, merge_adapters
from furlong.train.checkpoints.checkpoint import load_tensors, one_process
from furlong.train.checkpoints.exportable import Exportable
from furlong.train.checkpoints.fingerprints import base_fingerprint, check_base
from furlong.train.checkpoints.folder import RemovedCheckpointError, removal_told
from furlong.train.checkpoints.state import trained_tensors
from furlong.train.disk import folder_errors_reported
from furlong.train.run_model import read_architecture, rope_of
from furlong.train.setup.architecture import check_architecture
from furlong.train.setup.prepare import build_run_model

_NUM_TRIES = 5


def export(found: Exportable) -> Path:
    """Writes the model of a checkpoint into a new folder; returns it.

    Adapters are written in peft's format or added to the base's weights. A run that trains on may
    remove its checkpoint meanwhile: then its newest is taken. Raises CheckpointError or
    ConfigError.
    """
    for _ in range(_NUM_TRIES - 1):
        try:
            return _export(found)
        except RemovedCheckpointError:
            if found.checkpoint == found.source:
                raise
            found = found.again()
    return _export(found)


def _export(found: Exportable) -> Path:
    checkpoint, state, config = found.checkpoint, found.state, found.config
    check_architecture(checkpoint, state, read_architecture(config), config.model.name)
    model = build_run_model(config)
    check_base(checkpoint, state, base_fingerprint(model))
    with one_process(), removal_told(checkpoint):
        load_tensors(checkpoint, trained_tensors(model))
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    if found.merge:
        model = merge_adapters(model)
    with folder_errors_reported(found.out.parent):
        tokenizer = load_tokenizer(config.model.name)
        export_model(model, tokenizer, found.out, dtype=dtype, rope=rope_of(config))
    print(f"exported step {state['step']} to {found.out}")
    return found.out
