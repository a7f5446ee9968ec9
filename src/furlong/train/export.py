"""Export a checkpoint to a folder that transformers (or peft, for adapters) can load.

Torch is imported after all checks that do not need it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from furlong.config.sources import build_run
from furlong.errors import CheckpointError, ConfigError
from furlong.models.folder import check_export_folder, check_files
from furlong.train.run_folder import (
    CHECKPOINTS,
    MANIFEST,
    STATE,
    Checkpoint,
    check_creatable,
    folder_errors_reported,
    newest_checkpoint,
    read_checkpoint,
)


def export(
    source: Path,
    *,
    merge: bool = False,
    out: Path | None = None,
    loading: Callable[[], None] = lambda: None,
) -> Path:
    """Write a checkpoint's model to a new folder; return the folder.

    Args:
        source: A checkpoint, or a run, whose newest checkpoint is exported.
        merge: Add adapters to the base weights; else they are written in peft's format.
        out: The new folder, by default beside the run's `checkpoints`.
        loading: Called before torch is imported.

    Raises:
        CheckpointError, ConfigError: For an unreadable checkpoint, or settings that do not fit it.
    """
    checkpoint = _chosen(source)
    path, state = checkpoint.path, checkpoint.state
    config = build_run(state["config"], str(path / STATE))
    if merge and config.model.lora is None:
        raise ConfigError(
            given="--merge for a checkpoint without adapters",
            required="a run with model.lora",
            source=str(path),
            change="leave --merge out: the checkpoint's weights are whole",
        )
    name = f"model-{path.name}{'-merged' if merge else ''}"
    folder = out or path.absolute().parent.parent / name
    check_creatable(folder, "the export")
    check_export_folder(folder)
    check_files(config.model.name, config.model.revision)
    loading()
    import torch

    from furlong.data.tokenize import tokenizer_of
    from furlong.models.build import export_model, exported_names, merge_adapters
    from furlong.models.quantized import packed_linears
    from furlong.train.build import build_run_model
    from furlong.train.card import model_card
    from furlong.train.checkpoints import (
        base_fingerprint,
        check_weights,
        load_tensors,
        one_process,
        stored_weights,
        trained_tensors,
    )
    from furlong.train.run_model import check_architecture, has_other_base, read_architecture

    check_architecture(checkpoint, read_architecture(config))
    # without frozen weights the checkpoint has all of them, and the model's files are not read
    is_empty = state["base_fingerprint"] is None
    model = build_run_model(config, is_empty=is_empty)
    frozen = base_fingerprint(model, like=state["base_fingerprint"])
    check_weights(checkpoint, {"base_fingerprint": frozen})
    if merge and packed_linears(model):
        model = build_run_model(config, unpacked=True)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    names, weights = {*exported_names(model).values()} if is_empty else set[str](), None
    try:
        with one_process(), folder_errors_reported(path):
            if is_empty:
                weights = stored_weights(path, names, dtype)
            if weights is None or names - weights.keys():  # a buffer, or another model's
                weights, model = None, build_run_model(config) if is_empty else model
                load_tensors(path, trained_tensors(model))
    except CheckpointError:
        if path == source or path.exists():
            raise
        print(f"{path.name} was removed by its run meanwhile: again with the newest")
        return export(source, merge=merge, out=out)
    if merge:
        model = merge_adapters(model)
    with folder_errors_reported(folder.parent):
        card = model_card(config, state)
        export_model(
            model, tokenizer_of(config), folder, dtype=dtype, weights=weights,
            has_other_config=has_other_base(config), card=card,
        )  # fmt: skip
    print(f"exported step {state['step']} to {folder}")
    return folder


def _chosen(source: Path) -> Checkpoint:
    """Return the checkpoint in the folder `source`, or the newest checkpoint of the run in it."""
    with folder_errors_reported(source):
        if (source / MANIFEST).exists() or (source.parent.name == CHECKPOINTS and source.is_dir()):
            return read_checkpoint(source)
        if (checkpoint := newest_checkpoint(source / CHECKPOINTS)) is not None:
            return checkpoint
    found = "which holds no checkpoint" if source.is_dir() else "which is no folder"
    raise CheckpointError(
        given=f"{source}, {found}",
        required="the folder of a run with checkpoints, or of one of them",
        source="the command line",
        change="check the path; a run writes checkpoints with train.save_every_steps above 0",
    )
