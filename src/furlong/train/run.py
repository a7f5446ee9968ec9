"""A run from its config to its report: the builder that hands plain arguments to the rest."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from furlong.api import Engine
from furlong.config.schema import DataConfig, RunConfig, TrainConfig
from furlong.data.loader import batches_per_epoch, in_order, iterate_batches
from furlong.data.sources import read_documents
from furlong.data.tokenize import Tokenized, load_tokenizer, tokenize
from furlong.errors import ConfigError
from furlong.models.build import build_model, check_folder, export_model
from furlong.planners.options import ChunkOptions, choose_options
from furlong.train.loop import LoopFigures, run_steps
from furlong.train.metrics import MetricsLog
from furlong.train.optimizer import build_optimizer, build_schedule
from furlong.train.step import evaluate
from furlong.units import format_count

_DIALS = ("size", "num_retained", "keep", "tier", "order")


@dataclass(frozen=True, slots=True)
class TrainReport:
    """The final figures of a run, as in its `report.json`."""

    num_steps: int
    num_tokens: int
    train_loss: float
    """Of the last step's global batch."""
    eval_loss_before: float | None
    eval_loss_after: float | None
    tokens_per_s: float
    peak_memory_bytes: int
    num_skipped_batches: int
    run_folder: str
    export_folder: str


def train(config: RunConfig) -> TrainReport:
    """Trains, evaluates, exports. Raises UserError for what the user can mend.

    The run folder appears when everything that can be checked before the first step has been.
    """
    folder = _check_run_folder(config.out)
    options = decide_options(config)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Reading fails sooner than loading a model does.
    check_folder(config.model.name)
    documents = {"train": list(read_documents(config.data.train, format=config.data.format))}
    if config.data.eval is not None:
        documents["eval"] = list(read_documents(config.data.eval, format=config.data.format))
    tokenizer = load_tokenizer(config.model.name)
    torch.manual_seed(config.train.seed)
    lora = None if config.model.lora is None else config.model.lora.model_dump()
    model = build_model(
        config.model.name, init=config.model.init, dtype=dtype, lora=lora, seed=config.train.seed
    ).to(device)
    vocab_size = model.get_input_embeddings().num_embeddings
    data = {
        split: _tokenize_split(split, texts, tokenizer, vocab_size, config.data)
        for split, texts in documents.items()
    }
    engine = Engine(model, max_seq_len=config.data.max_seq_len, compute_dtype=dtype)
    num_steps = _count_steps(config.train, len(data["train"].sequences))
    _announce(config, model, options, device, num_steps)
    _write_json(folder / "config.json", config.model_dump(mode="json"))
    _write_json(folder / "options.json", asdict(options))
    with MetricsLog(folder / "metrics.jsonl", num_steps) as log:
        figures = _run(config, engine, model, data, options, num_steps, log)
    exported = export_model(model, tokenizer, folder / "model", dtype=dtype)
    report = TrainReport(
        num_steps=num_steps,
        num_tokens=figures.num_tokens,
        train_loss=figures.losses[-1],
        eval_loss_before=figures.eval_loss_before,
        eval_loss_after=figures.eval_loss_after,
        tokens_per_s=figures.num_tokens / figures.steps_s,
        peak_memory_bytes=figures.peak_memory_bytes,
        num_skipped_batches=figures.num_skipped_batches,
        run_folder=str(folder),
        export_folder=str(exported),
    )
    _write_json(folder / "report.json", asdict(report))
    print(f"exported to {exported}")
    return report


def decide_options(config: RunConfig) -> ChunkOptions:
    """The dials of the plan: what the user fixed, and the rule's choice for each `auto`."""
    dials = {name: getattr(config.chunks, name) for name in _DIALS}
    decided = {name: value for name, value in dials.items() if value != "auto"}
    return choose_options(config.data.max_seq_len, decided)


def _run(
    config: RunConfig,
    engine: Engine,
    model: Any,
    data: dict[str, Tokenized],
    options: ChunkOptions,
    num_steps: int,
    log: MetricsLog,
) -> LoopFigures:
    settings = config.train
    optimizer = build_optimizer(
        model.parameters(),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    held_out = None
    if "eval" in data:
        batches = list(in_order(data["eval"].sequences, settings.sequences_per_step))
        held_out = partial(evaluate, engine, model, batches, options)
    return run_steps(
        engine,
        model,
        iterate_batches(
            data["train"].sequences,
            sequences_per_step=settings.sequences_per_step,
            seed=settings.seed,
        ),
        options,
        num_steps=num_steps,
        optimizer=optimizer,
        scheduler=build_schedule(
            optimizer, settings.schedule, num_steps=num_steps, warmup_ratio=settings.warmup_ratio
        ),
        max_grad_norm=settings.max_grad_norm,
        log=log,
        evaluate=held_out,
        eval_every_steps=settings.eval_every_steps,
    )


def _check_run_folder(out: str) -> Path:
    folder = Path(out).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            given=f"out = {out}, which is not empty",
            required="a folder that does not exist or is empty",
            source="out",
            change="set another out, or move the old run away",
        )
    return folder


def _count_steps(settings: TrainConfig, num_sequences: int) -> int:
    if settings.steps is not None:
        return settings.steps
    assert settings.epochs is not None  # the schema holds it
    per_epoch = batches_per_epoch(num_sequences, settings.sequences_per_step)
    return math.ceil(settings.epochs * per_epoch)


def _tokenize_split(
    split: str, documents: list[Any], tokenizer: Any, vocab_size: int, settings: DataConfig
) -> Tokenized:
    tokenized = tokenize(
        documents,
        tokenizer,
        vocab_size=vocab_size,
        max_seq_len=settings.max_seq_len,
        too_long=settings.too_long,
    )
    line = (
        f"data.{split}: {len(tokenized.sequences):,} sequences,"
        f" {format_count(tokenized.num_tokens)} tokens, longest {tokenized.longest:,}"
    )
    if tokenized.num_truncated or tokenized.num_dropped:
        line += (
            f"; above {settings.max_seq_len:,}: {tokenized.num_truncated} truncated,"
            f" {tokenized.num_dropped} dropped"
        )
    print(line)
    return tokenized


def _announce(
    config: RunConfig, model: Any, options: ChunkOptions, device: torch.device, num_steps: int
) -> None:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    print(
        f"model: {config.model.name}, {format_count(total)} parameters,"
        f" {format_count(trained)} trained, {config.model.dtype} on {device}; {num_steps} steps"
    )
    dials = []
    for name in _DIALS:
        automatic = getattr(config.chunks, name) == "auto"
        dials.append(f"{name} {getattr(options, name)}{' (auto)' if automatic else ''}")
    print(f"chunks: {', '.join(dials)}")


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
