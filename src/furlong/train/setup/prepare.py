"""The parts of a run before its first step: device, tiers, data, dials, model, engine, steps.

Below `train.run` functions take plain arguments; those here read them from the config.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from furlong.api import Engine
from furlong.config.schema import DataConfig, RunConfig, TrainConfig
from furlong.cost.model import CostModel
from furlong.data.dataset import DataSet, describe_shared, load_data
from furlong.data.loader import Batch, LoaderState, count_steps, describe_batches, iterate_batches
from furlong.data.tokenize import load_tokenizer
from furlong.errors import ConfigError
from furlong.kv.pools import Storage
from furlong.models.build import build_model, check_model
from furlong.models.decoder import HFDecoder
from furlong.plan.plan import Layout
from furlong.planners.decide import Decision
from furlong.runtime.distributed.mesh import Ranks, make_ranks
from furlong.train.checkpoints import check_data
from furlong.train.choose_plan import decision_of, values_of
from furlong.train.processes import Launch, Processes
from furlong.train.run_folder import CHECKPOINTS, RunFolder, check_room
from furlong.train.run_model import (
    RunModel,
    check_free,
    choose_run_plan,
    rope_of,
    storage_of,
)
from furlong.train.setup.architecture import check_architecture
from furlong.train.setup.kernels import put_kernels
from furlong.train.setup.start import source_of


def device_of(launch: Launch) -> torch.device:
    """The device of this process."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if launch.num_processes == 1:
        return torch.device("cuda")
    return torch.device("cuda", launch.local_number)


def checked(
    config: RunConfig, run: RunFolder, device: torch.device, launch: Launch
) -> tuple[Storage, RunModel, Any]:
    """Tiers, model and tokenizer of a run, as far as they can be had before all else."""
    num_gpus = torch.cuda.device_count()
    if device.type == "cuda" and launch.local_number >= num_gpus:
        raise ConfigError(
            given=f"{launch.num_local} processes on a machine with {num_gpus} GPUs",
            required="at most one process per GPU",
            source="the number of processes that were started",
            change=f"torchrun --nproc-per-node {num_gpus}",
        )
    storage = storage_of(config, device, num_local=launch.num_local)
    limit = config.data.max_seq_len
    check_model(config.model.name, init=config.model.init, rope=rope_of(config), max_seq_len=limit)
    model = RunModel.read(config, device, launch)
    if run.checkpoint is not None and run.state is not None:
        check_architecture(run.checkpoint, run.state, model.architecture, config.model.name)
    return storage, model, load_tokenizer(config.model.name)


def check_batches(config: RunConfig, run: RunFolder, train: DataSet) -> None:
    """Raises UserError for data other than a checkpoint's, and for batches larger than it."""
    if run.checkpoint is not None and run.state is not None:
        check_data(run.checkpoint, run.state, train.fingerprint)
    draws_per_epoch = sum(train.mixture.draws)
    per_step = config.train.sequences_per_step
    print(f"data.train: {describe_batches(draws_per_epoch, per_step, train.noun)}")


def decided(
    config: RunConfig,
    run: RunFolder,
    train: DataSet,
    model: RunModel,
    storage: Storage,
    processes: Processes,
) -> Decision:
    """The plan of the run; the first process chooses it for all, and has the words for it."""

    def choose() -> Decision | None:
        if not processes.is_first or run.decided is not None:
            return run.decided
        decision = choose_run_plan(config, model, train, storage)
        check_free(storage, decision)
        return decision

    chosen = processes.together(choose)
    if chosen is not None and processes.num_processes == 1:
        return chosen
    values = processes.from_first(lambda: values_of(chosen) if chosen else {})
    return chosen or decision_of(values)


def ranks_of(layout: Layout, device: torch.device) -> Ranks | None:
    """The place of this process in the layout; None where it is alone. A collective."""
    if layout.num_devices == 1:
        return None
    return make_ranks(layout.dp, layout.sp, layout.pp, device.type)


def layers_of(stages: Sequence[int], ranks: Ranks | None) -> range | None:
    """The layers that this process holds; None without a pipeline: all."""
    if ranks is None or not stages:
        return None
    first = sum(stages[: ranks.stage])
    return range(first, first + stages[ranks.stage])


def engine_of(
    config: RunConfig, model: Any, storage: Storage, ranks: Ranks | None, processes: Processes
) -> Engine:
    """The engine of this process; the weights of several are divided among them from now on."""
    make = partial(
        Engine,
        model,
        max_seq_len=config.data.max_seq_len,
        storage=storage,
        compute_dtype=getattr(torch, config.model.dtype),
    )
    with warnings.catch_warnings():
        # Several check the model alone first: links between stages are opened by all, or by none.
        warnings.filterwarnings("ignore", r"\d+ processes: gradients are this process's own")
        engine = processes.together(make)
    return engine if ranks is None else processes.together(partial(make, ranks=ranks))


def work_of(model: CostModel | None) -> Callable[[Sequence[int]], Sequence[float]]:
    """Seconds of each sequence; its tokens where the model's work cannot be counted."""
    return model.sequence_seconds if model is not None else lambda seq_lens: seq_lens


def check_run_room(config: RunConfig, trained_bytes: int, folder: Path, num_steps: int) -> None:
    """Raises CheckpointError if the disk has no room for what the run is going to write, of a model
    with so many bytes of trained weights."""
    every = config.train.save_every_steps
    num_saves = math.ceil(num_steps / every) if every else 0
    check_room(folder, folder / CHECKPOINTS, weight_bytes=trained_bytes, num_saves=num_saves)


def build_run_model(config: RunConfig, layers: range | None = None) -> Any:
    """The model that a run begins with, on the CPU; of a stage's process what lies in `layers`, and
    before the first or behind the last of them."""
    settings = config.model
    return build_model(
        settings.name,
        init=settings.init,
        dtype=getattr(torch, settings.dtype),
        lora=None if settings.lora is None else settings.lora.model_dump(),
        rope=rope_of(config),
        max_seq_len=config.data.max_seq_len,
        seed=config.train.seed,
        layers=layers,
    )


def fused(config: RunConfig, model: Any) -> Any:
    """The model where it computes, with the kernels and the compiled layers that the run names."""
    settings = config.model
    if settings.kernels == "none" and not settings.compile:
        return model
    adapter = HFDecoder(model, max_seq_len=config.data.max_seq_len)
    if settings.kernels != "none":
        put_kernels(adapter, settings.kernels, getattr(torch, settings.dtype))
    for layer in adapter.layers if settings.compile else ():
        layer.compile()
    return model


def load_splits(
    settings: DataConfig, tokenizer: Any, loss: Literal["sft", "dpo"]
) -> dict[str, DataSet]:
    """The data sets `train` and, if there is one, `eval`; prints what was found."""
    data = {}
    for split, named in (("train", settings.train), ("eval", settings.eval)):
        if named is not None:
            data[split] = load_data(
                [source_of(source) for source in named],
                tokenizer,
                format="preference" if loss == "dpo" else settings.format,
                max_seq_len=settings.max_seq_len,
                too_long=settings.too_long,
                cache_dir=settings.cache_dir,
                key=f"data.{split}",
            )
            print(*data[split].describe(), sep="\n")
    if "eval" in data:
        for line in describe_shared(data["train"], data["eval"]):
            print(line)
    return data


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The sequences of a run."""

    batches: Callable[[LoaderState], Iterator[Batch]]
    """The global batches from a position on, endless."""
    train: DataSet
    held_out: DataSet | None
    fingerprint: dict[str, str]
    """Changes with the training sequences or their order."""


def run_data(config: RunConfig, data: dict[str, DataSet]) -> RunData:
    """The sequences of a run, and their batches from a position on."""
    train = data["train"]
    return RunData(
        batches=lambda state: iterate_batches(
            train,
            sequences_per_step=config.train.sequences_per_step,
            seed=config.train.seed,
            state=state,
            mixture=train.mixture,
            rows_per_record=train.rows_per_record,
        ),
        train=train,
        held_out=data.get("eval"),
        fingerprint=train.fingerprint,
    )


def steps_of(settings: TrainConfig, train: DataSet) -> int:
    """The number of steps of a run, by steps or by epochs."""
    if settings.steps is not None:
        return settings.steps
    assert settings.epochs is not None  # the schema holds it
    return count_steps(
        settings.epochs,
        train.has_label,
        train.mixture,
        sequences_per_step=settings.sequences_per_step,
        seed=settings.seed,
    )
