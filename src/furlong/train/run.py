"""A run from its config to its report: the builder that hands plain arguments to the rest."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from furlong.api import Engine
from furlong.config.data import DataConfig
from furlong.config.schema import RunConfig, TrainConfig
from furlong.data.dataset import DataSet
from furlong.data.load import load_data
from furlong.data.loader import count_steps, describe_batches, iterate_batches
from furlong.data.tokenize import load_tokenizer
from furlong.models.build import build_model, export_model, read_config
from furlong.models.check import check_model
from furlong.models.folder import check_folder
from furlong.planners.auto.decide import Decision
from furlong.planners.options import dials_of, value_in_words
from furlong.planners.predict import predict
from furlong.planners.sampling.use import sampling_in_words
from furlong.runtime.pools import Storage
from furlong.train.architecture import architecture_of, check_architecture
from furlong.train.checkpoint import one_process
from furlong.train.checkpoint_folder import write_json
from furlong.train.decide import DIALS, cost_model, decide_options
from furlong.train.disk import check_room, folder_errors_reported
from furlong.train.fitting import lack_of_memory_told
from furlong.train.loop import LoopFigures
from furlong.train.report import TrainReport, list_export
from furlong.train.resumable import RunData, run_resumable
from furlong.train.run_folder import (
    CHECKPOINTS,
    EXPORT,
    REPORT,
    RunFolder,
    clear_export,
    create_run_folder,
)
from furlong.train.start import open_run, source_of
from furlong.train.state import check_data
from furlong.train.stop import StopRequest
from furlong.train.storage import check_free, storage_of
from furlong.units import format_bytes, format_count


def train(config: RunConfig, *, resume: bool = False) -> TrainReport | None:
    """Trains, evaluates, exports; None when a signal ended it before that, with a checkpoint.

    `resume` goes on with the run in `config.out`, if there is one. The run folder appears when
    everything that can be checked before the first step has been. Raises UserError for what the
    user can mend.
    """
    with ExitStack() as stack:
        return train_opened(stack, config, open_run(stack, config, resume=resume))


def train_opened(stack: ExitStack, config: RunConfig, run: RunFolder) -> TrainReport | None:
    """The same for a run that `open_run` has opened."""
    if run.report is not None:
        return run.report
    stack.enter_context(one_process())
    stack.enter_context(lack_of_memory_told())
    return _train(config, run, stack)


def _train(config: RunConfig, run: RunFolder, stack: ExitStack) -> TrainReport | None:
    folder = run.path
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # What fails without weights and data fails first.
    storage = storage_of(config, device)
    limit = config.data.max_seq_len
    check_model(config.model.name, init=config.model.init, rope=_rope(config), max_seq_len=limit)
    architecture = read_architecture(config)
    if run.checkpoint is not None and run.state is not None:
        check_architecture(run.checkpoint, run.state, architecture, config.model.name)
    tokenizer = load_tokenizer(config.model.name)
    data = load_splits(config.data, tokenizer)
    if run.checkpoint is not None and run.state is not None:
        check_data(run.checkpoint, run.state, data["train"].fingerprint)
    draws_per_epoch = sum(data["train"].mixture.draws)
    print(f"data.train: {describe_batches(draws_per_epoch, config.train.sequences_per_step)}")
    decision = Decision(run.options, "") if run.options else None
    if decision is None:
        decision = decide_options(config, data["train"], device, storage, rope=_rope(config))
        check_free(storage, decision)
    model_cost = cost_model(config, device, rope=_rope(config))
    torch.manual_seed(config.train.seed)
    model = build_run_model(config).to(device)
    for split in data.values():
        split.check_vocabulary(model.get_input_embeddings().num_embeddings)
    engine = Engine(
        model,
        max_seq_len=limit,
        storage=storage,
        compute_dtype=getattr(torch, config.model.dtype),
    )
    num_steps = _count_steps(config.train, data["train"])
    _announce(config, model, decision, device, storage, num_steps)
    settings = config.train
    trained_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    every = settings.save_every_steps
    num_saves = math.ceil(num_steps / every) if every else 0
    checkpoints = folder / CHECKPOINTS
    check_room(folder, checkpoints, weight_bytes=trained_bytes, num_saves=num_saves)
    with folder_errors_reported(folder), StopRequest() as stop:
        if run.is_new:
            create_run_folder(stack, folder)
        figures = run_resumable(
            config,
            run,
            engine,
            model,
            decision.options,
            _run_data(config, data),
            stop,
            num_steps=num_steps,
            architecture=architecture,
            predict=None if model_cost is None else partial(predict, model_cost),
        )
        if figures.stopped:
            return None
        return _finish(config, folder, model, tokenizer, figures)


def _finish(
    config: RunConfig, folder: Path, model: Any, tokenizer: Any, figures: LoopFigures
) -> TrainReport:
    """Exports the model and writes the report, which marks the run as finished."""
    clear_export(folder)
    dtype = getattr(torch, config.model.dtype)
    exported = export_model(model, tokenizer, folder / EXPORT, dtype=dtype)
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


def build_run_model(config: RunConfig) -> Any:
    """The model that a run begins with, on the CPU."""
    settings = config.model
    return build_model(
        settings.name,
        init=settings.init,
        dtype=getattr(torch, settings.dtype),
        lora=None if settings.lora is None else settings.lora.model_dump(),
        rope=_rope(config),
        max_seq_len=config.data.max_seq_len,
        seed=config.train.seed,
    )


def read_architecture(config: RunConfig) -> dict[str, Any]:
    """The architecture of the run's model, by its files as they are now."""
    source, limit = check_folder(config.model.name), config.data.max_seq_len
    return architecture_of(read_config(source, rope=_rope(config), max_seq_len=limit))


def _rope(config: RunConfig) -> dict[str, Any] | None:
    return None if config.model.rope is None else config.model.rope.model_dump(mode="json")


def load_splits(settings: DataConfig, tokenizer: Any) -> dict[str, DataSet]:
    """The data sets `train` and, if there is one, `eval`; prints what was found."""
    data = {}
    for split, named in (("train", settings.train), ("eval", settings.eval)):
        if named is not None:
            data[split] = load_data(
                [source_of(source) for source in named],
                tokenizer,
                format=settings.format,
                max_seq_len=settings.max_seq_len,
                too_long=settings.too_long,
                cache_dir=settings.cache_dir,
                key=f"data.{split}",
            )
            print(*data[split].describe(), sep="\n")
    return data


def _run_data(config: RunConfig, data: dict[str, DataSet]) -> RunData:
    train = data["train"]
    return RunData(
        batches=lambda state: iterate_batches(
            train,
            sequences_per_step=config.train.sequences_per_step,
            seed=config.train.seed,
            state=state,
            mixture=train.mixture,
        ),
        train=train,
        held_out=data.get("eval"),
        fingerprint=train.fingerprint,
    )


def _count_steps(settings: TrainConfig, train: DataSet) -> int:
    if settings.steps is not None:
        return settings.steps
    assert settings.epochs is not None  # the schema holds it
    return count_steps(
        settings.epochs,
        train.valid_tokens > 0,
        train.mixture,
        sequences_per_step=settings.sequences_per_step,
        seed=settings.seed,
    )


def _announce(
    config: RunConfig,
    model: Any,
    decision: Decision,
    device: torch.device,
    storage: Storage,
    num_steps: int,
) -> None:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    print(
        f"model: {config.model.name}, {format_count(total)} parameters,"
        f" {format_count(trained)} trained, {config.model.dtype} on {device}; {num_steps} steps"
    )
    options = decision.options
    values = {"tier": "device", "order": options.order} | dials_of(options)
    dials = [
        f"{name} {value_in_words(values[name])}"
        + (" (auto)" if getattr(config.chunks, name) == "auto" else "")
        for name in DIALS
        if name in values
    ]
    print(f"chunks: {', '.join(dials)}")
    if "disk" in asdict(options.tiers).values():
        print(f"disk: at most {format_bytes(storage.disk_bytes or 0)} in {storage.disk_dir}")
    if options.sampling is not None:
        print(f"sample: {sampling_in_words(options.sampling)}; the gradient is an estimate")
    if decision.words:
        print(f"auto: {decision.words}")
    if decision is not None and decision.figures:
        print(f"figures: {decision.figures}")
