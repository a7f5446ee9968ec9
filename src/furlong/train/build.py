"""Functions that build the parts of a `Trainer`: device, data, model, engine, number of steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from functools import partial
from typing import Any
from uuid import uuid4

import torch

from furlong.api import Engine
from furlong.config.schema import DataConfig, Format, RunConfig, TrainConfig
from furlong.cost.model import CostModel
from furlong.data.cache import cache_folder
from furlong.data.chat import DATE
from furlong.data.dataset import DataSet, describe_shared, load_data
from furlong.data.loader import (
    Epochs,
    LoaderState,
    TrainBatch,
    count_steps,
    describe_batches,
    iterate_batches,
)
from furlong.data.stream import SharedBlocks, StreamSet
from furlong.kv.pools import Storage
from furlong.models.build import build_model, check_model
from furlong.models.decoder import HFDecoder
from furlong.models.fused import keep_written
from furlong.models.new_tokens import require_one_place
from furlong.models.quantized import packed_linears
from furlong.models.support import bare_model, is_sharded
from furlong.planners.decide import Decision, division_in_words, share_of
from furlong.planners.layouts import replicate_of
from furlong.planners.options import option_values, value_in_words
from furlong.planners.search import BatchPlans
from furlong.planners.setup import given_options
from furlong.planners.spaco import sampling_in_words
from furlong.report.text import weights_words
from furlong.runtime.distributed.mesh import Ranks, gpu_of, make_ranks, ranks_given
from furlong.runtime.session import divide
from furlong.simulate.predict import step_s as predicted_s
from furlong.train.batches import BatchEngine
from furlong.train.checkpoints import ModelSize
from furlong.train.kernels import put_kernels
from furlong.train.processes import Launch, Processes, group_of_one
from furlong.train.run_folder import Checkpoint
from furlong.train.run_model import OPTION_NAMES, RunModel, new_rows_of, rope_of, step_size
from furlong.units import format_bytes, format_count


def device_of(launch: Launch) -> torch.device:
    """Return this process's GPU, or the CPU if the machine has no GPU. Raises ConfigError if the
    machine has fewer GPUs than processes."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = gpu_of(launch.local_number, launch.num_local)
    return torch.device("cuda") if launch.num_processes == 1 else device


def engine_of(
    config: RunConfig, model: Any, longest_tokens: int, storage: Storage, ranks: Ranks | None,
    processes: Processes, *, offload_weights: bool = False,
) -> Engine:  # fmt: skip
    """Return the `Engine` of this process. All processes must call this together; if one fails, all
    raise its error.

    Args:
        longest_tokens: Length of the longest sequence.
        storage: Limits and folder of offloaded tensors.
        ranks: Process groups and coordinates; None for a single process.
        offload_weights: Whether weights are in CPU memory between uses.
    """
    make = partial(
        Engine, model, max_seq_len=longest_tokens, storage=storage, ranks=ranks,
        compute_dtype=getattr(torch, config.model.dtype), offload_weights=offload_weights,
    )  # fmt: skip
    return processes.together(make)


def batch_engine_of(
    config: RunConfig, model: Any, run_model: RunModel, decision: Decision, longest_tokens: int,
    storage: Storage, ranks: Ranks | None, processes: Processes,
    alternatives: BatchPlans | None = None, tree_tokens: int = 0,
) -> BatchEngine:  # fmt: skip
    """Return the `BatchEngine` of this process, as `engine_of` makes its engine. All processes must
    call this together. `alternatives`, `tree_tokens`: see `BatchEngine`."""
    engine = engine_of(
        config, model, longest_tokens, storage, ranks, processes,
        offload_weights=decision.offload_weights,
    )  # fmt: skip
    cost = run_model.cost
    # without a cost model, balance the tokens of replicas
    work = (lambda seq_lens: seq_lens) if cost is None else cost.sequence_seconds
    seconds = (lambda plan: 0.0) if cost is None else partial(predicted_s, cost)
    return BatchEngine(engine, processes, work, decision.stages, alternatives, seconds, tree_tokens)


def storage_beside(storage: Storage, cost: CostModel | None, decision: Decision) -> Storage:
    """Return `storage` with a lower limit of CPU memory, because offloaded weights, gradients and
    optimizer states also use CPU memory. Return `storage` unchanged if no weights are offloaded."""
    own = None if cost is None else share_of(cost, decision)
    if own is None or not own.is_away or storage.cpu_bytes is None:
        return storage
    return replace(storage, cpu_bytes=max(0, storage.cpu_bytes - own.host_bytes))


def ranks_of(config: RunConfig, decision: Decision, device: torch.device) -> Ranks | None:
    """Return this process's `Ranks`: its coordinates in the layout, and its process groups. None
    for a single process that does not offload weights."""
    layout, offloads = decision.layout, decision.offload_weights
    if layout.num_devices == 1 and not offloads:
        return None
    sizes = layout.dp, layout.sp, layout.pp
    replicate = replicate_of(layout, decision.options.reshard, config.parallel.replicate)
    ranks = make_ranks(*sizes, device.type, replicate)
    return ranks_given(ranks, None, device.type, offloads)


def division(
    config: RunConfig, longest_tokens: int, ranks: Ranks | None, *, offload_weights: bool = False
) -> Callable[[Any], None] | None:
    """Return a function of a model that shards the model over the processes, or offloads its
    weights to CPU memory. Return None if the run neither shards nor offloads weights."""
    if ranks is None or not ranks.divides:
        return None
    dtype = getattr(torch, config.model.dtype)
    share = partial(divide, ranks=ranks, compute_dtype=dtype, offload=offload_weights)
    return lambda model: share(HFDecoder(model, max_seq_len=longest_tokens))


def read_model(
    stack: ExitStack, config: RunConfig, decision: Decision, longest_tokens: int,
    device: torch.device, processes: Processes,
) -> tuple[Any, Ranks | None]:  # fmt: skip
    """Return this process's model as `decision` says, read, on its device and sharded, and its
    `Ranks`. All processes must call this together. `stack`: closes the process group of a single
    process."""
    offloads, layers = decision.offload_weights, None
    if offloads:
        stack.enter_context(group_of_one())
    ranks = ranks_of(config, decision, device)
    if ranks is not None and ranks.pp > 1:  # the layers of this stage
        first = sum(decision.stages[: ranks.stage])
        layers = range(first, first + decision.stages[ranks.stage])
    divide = division(config, longest_tokens, ranks, offload_weights=offloads)
    place = torch.device("cpu") if offloads else device
    model = processes.together(
        partial(build_run_model, config, layers, divide=divide, device=place)
    )
    return processes.together(partial(placed, config, model, device, divide)), ranks


def check_run_model(config: RunConfig) -> None:
    """Raise UserError if the run's model cannot be trained; print the changes of its config."""
    settings = config.model
    check_model(
        settings.name, revision=settings.revision, init=settings.init,
        quantize=settings.quantize, has_adapters=settings.lora is not None,
        changes=settings.config, rope=rope_of(config), max_seq_len=config.data.max_seq_len,
    )  # fmt: skip


def build_run_model(
    config: RunConfig, layers: range | None = None, *, unpacked: bool = False,
    is_empty: bool = False, divide: Callable[[Any], None] | None = None,
    device: torch.device | None = None,
) -> Any:  # fmt: skip
    """Return the initial model of a run, on the CPU and unsharded.

    With `divide`, a function from `division`, the model is sharded while it is read, and is on
    `device`. This requires that transformers can read this process's rows of each weight alone, and
    that no kernels must be compared with the original modules.

    Args:
        layers: Layers of this process's pipeline stage; None: all layers.
        unpacked: Whether to dequantize 4-bit weights.
        is_empty: Whether to create parameters on the meta device.
    """
    settings = config.model
    new_rows = new_rows_of(config)
    if new_rows is not None and settings.lora is not None:
        require_one_place(settings.lora.modules_to_save, divides=divide is not None, layers=layers)
    if settings.kernels in _COMPARED:
        divide = None
    return build_model(
        settings.name,
        revision=settings.revision,
        init=settings.init,
        dtype=getattr(torch, settings.dtype),
        quantize=settings.quantize,
        lora=None if settings.lora is None else settings.lora.model_dump(),
        changes=settings.config,
        rope=rope_of(config),
        max_seq_len=config.data.max_seq_len,
        new_rows=new_rows,
        seed=config.train.seed,
        layers=layers,
        divide=divide,
        device=device,
        unpacked=unpacked,
        is_empty=is_empty,
    )


_COMPARED = ("liger", "hub")
"""Kernels that are compared with the original modules, which needs the whole model."""


def placed(
    config: RunConfig, model: Any, device: torch.device, divide: Callable[[Any], None] | None
) -> Any:
    """Move a model to the device, put in the run's kernels (see `with_kernels`), and shard the
    model if `divide` is given. Return the model.

    The modules are sharded one by one, so that only one module at a time is whole on the device.
    Kernels that must be compared with the original modules first need the whole model on the
    device.
    """
    is_compared = config.model.kernels in _COMPARED
    if divide is None or is_compared:
        model = with_kernels(config, model.to(device), device)
    if divide is not None and not is_sharded(bare_model(model)):
        for linear in packed_linears(model).values():
            linear.to(device)  # codes stay whole
        divide(model)
    return model if divide is None or is_compared else with_kernels(config, model, device)


def with_kernels(config: RunConfig, model: Any, device: torch.device) -> Any:
    """Put the kernels of the run (`model.kernels`) into a model on `device` and, with
    `model.compile`, compile its layers. Return the model."""
    settings = config.model
    if settings.kernels == "none":
        keep_written(model, device)
    if settings.kernels in ("auto", "none") and not settings.compile:
        return model
    adapter = HFDecoder(model, max_seq_len=config.data.max_seq_len)
    if settings.kernels == "liger" or settings.kernels == "hub":
        put_kernels(adapter, settings.kernels, getattr(torch, settings.dtype))
    for layer in adapter.layers if settings.compile else ():
        layer.compile()
    return model


def dated(settings: DataConfig, tokenizer: Any, day: str | None = None) -> DataConfig:
    """Return the data settings. If the tokenizer's chat template prints a date, the returned
    settings contain a date: that of `settings`, else `day`, else today."""
    if DATE not in str(tokenizer.chat_template):
        return settings
    kwargs = {DATE: day or str(date.today()), **settings.chat_template_kwargs}
    return settings.model_copy(update={"chat_template_kwargs": kwargs})


def load_splits(
    settings: DataConfig,
    tokenizer: Any,
    format: Format | None,
    seed: int = 0,
    say: Callable[[str], None] = print,
    day: str | None = None,
    *,
    is_compared: bool = False,
    shared: Callable[[], SharedBlocks] | None = None,
) -> dict[str, Any]:
    """Load the data sets and print descriptions of them. Return {"train": data set} and, if
    configured, "eval", and "eval N" for the sources of `data.eval` with a `max_seq_len` N.

    Args:
        format: Record format that the loss requires; None: the format in the settings.
        seed: Seed of the run, which determines the order of a stream and the held-out share.
        say: Called with a line when a stream leaves out records for a new reason.
        day: Date for chat templates that print a date; None: today.
        is_compared: Skip checksums of cached data, as another process of this machine checked them.
        shared: Opens the folder of shared stream blocks; None if each process reads for itself.
    """
    data: dict[str, Any] = {}
    settings = dated(settings, tokenizer, day)
    load = partial(load_data, tokenizer=tokenizer, format=format, is_compared=is_compared)
    if settings.streaming:
        data["train"] = StreamSet(settings, tokenizer, seed=seed, say=say, shared=shared)
    else:
        data["train"] = load(settings.train, settings=settings, key="data.train")
    for length, held_out in load_held_out(settings, load).items():
        data["eval" if length == settings.max_seq_len else f"eval {length}"] = held_out
    if settings.eval_share:
        data["train"], data["eval"] = data["train"].split_off(settings.eval_share, seed)
    said = [*data["train"].describe()]
    if settings.eval_share:
        said.append(data["eval"].summary())
    for held_out in [data[name] for name in data if name != "train" and not settings.eval_share]:
        said += held_out.describe()
        said += [] if settings.streaming else describe_shared(data["train"], held_out)
    print(*said, sep="\n")
    return data


def load_held_out(settings: DataConfig, load: Callable[..., DataSet]) -> dict[int, DataSet]:
    """Return the data sets of `data.eval` by their maximum number of tokens. `load`: `load_data`
    with a tokenizer."""
    return {
        length: load(
            sources, settings=settings.model_copy(update={"max_seq_len": length}), key="data.eval"
        )
        for length, sources in settings.eval_by_length.items()
    }


def shared_blocks(config: RunConfig, processes: Processes) -> Callable[[], SharedBlocks] | None:
    """Return a function that opens a folder of blocks of a data stream. One process of each machine
    reads the blocks into the folder, and the machine's other processes read them there. Return None
    if each process reads the stream itself. All processes must call this together."""
    if not config.data.streaming or processes.num_processes == 1:
        return None
    reader, name = processes.from_first_of_machine((os.getpid(), uuid4().hex))
    if processes.launch.num_local == 1:
        return None
    folder = cache_folder(config.data.cache_dir) / "streams" / name
    return partial(SharedBlocks, folder, None if reader == os.getpid() else reader)


def batches_of(
    settings: TrainConfig, train: DataSet | StreamSet, state: LoaderState
) -> Iterator[TrainBatch]:
    """Return an endless iterator over the global batches of a run. `state`: position in the data at
    which to start."""
    if isinstance(train, StreamSet):
        return train.batches(step_size(settings), state)
    return iterate_batches(train, train.units, epochs_of(settings, train), state=state)


def batches_in_words(settings: TrainConfig, train: DataSet | StreamSet) -> str:
    """Return a text about the sizes of a run's global batches. Raises ConfigError if the data is
    less than one batch."""
    if isinstance(train, StreamSet):
        return train.describe_batches(step_size(settings))
    return describe_batches(epochs_of(settings, train), train.noun)


def epochs_of(settings: TrainConfig, train: DataSet) -> Epochs:
    """Return the run's epochs, each divided into global batches."""
    return Epochs(train.mixture, step_size(settings), settings.seed, train.unit_lens)


def steps_of(settings: TrainConfig, train: DataSet | StreamSet) -> int:
    """Return the number of steps of a run, from `train.steps` or `train.epochs`."""
    if settings.steps is not None:
        return settings.steps
    assert settings.epochs is not None and isinstance(train, DataSet)  # the schema holds it
    return count_steps(settings.epochs, epochs_of(settings, train), train.has_label)


def check_steps(num_steps: int, checkpoint: Checkpoint, config: RunConfig) -> None:
    """Raise CheckpointError if the checkpoint is of a step after `num_steps`. Print a change of
    `train.steps` or `train.epochs`, which changes the learning rate schedule."""
    if num_steps < checkpoint.state["step"]:
        raise checkpoint.refusal(
            f"{num_steps} steps for a run that has taken {checkpoint.state['step']}",
            "at least as many",
            "raise it, or start anew with another out",
            also="train.steps or train.epochs, and ",
        )
    before = checkpoint.state["config"]["train"]
    for key in ("steps", "epochs"):
        if (now := getattr(config.train, key)) != before[key]:
            print(
                f"train.{key} = {now}, before {before[key]}: from now on the learning rate is that"
                f" of a run of {num_steps} steps"
            )
            return


def announce(
    config: RunConfig,
    size: ModelSize,
    decision: Decision,
    device: torch.device,
    storage: Storage,
    num_steps: int,
    cost: CostModel | None,
) -> None:
    """Print the model, the options and the layout of the run. `cost`: the cost model, if any."""
    trained, total = size.num_trained, size.num_parameters
    where = str(device)
    if (count := decision.layout.num_devices) > 1:
        where = f"{count} processes, each a {device.type}"
    print(
        f"model: {config.model.name}, {format_count(total)} parameters,"
        f" {format_count(trained)} trained, {config.model.dtype} on {where}; {num_steps} steps"
    )
    options, given = decision.options, given_options(config)
    values = {"offload": "none", "order": options.order} | option_values(options)
    words = [
        f"{name} {value_in_words(values[name])}" + (" (auto)" if name not in given else "")
        for name in OPTION_NAMES
        if name in values
    ]
    print(f"chunks: {', '.join(words)}")
    if count > 1:
        divided = division_in_words(decision.layout, decision.stages)
        replicate = replicate_of(decision.layout, options.reshard, config.parallel.replicate)
        groups = f"; {replicate} groups of replicas hold all weights" if replicate > 1 else ""
        print(f"parallel: {decision.layout_words or divided}{groups}")
    if cost is not None and (
        shared := weights_words(share_of(cost, decision), reshards=options.reshard)
    ):
        print(f"weights: {shared}")
    if "disk" in options.offloading.targets:
        print(f"disk: at most {format_bytes(storage.disk_bytes or 0)} in {storage.disk_dir}")
    if options.sampling is not None:
        print(f"sample: {sampling_in_words(options.sampling)}; the gradient is an estimate")
    if decision.words:
        print(f"auto: {decision.words}")
    if decision.figures:
        print(f"figures: {decision.figures}")
