"""Settings of a trainer that chunks, or several processes, cannot honour exactly."""

from __future__ import annotations

import os
from typing import Any

from accelerate.utils import DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy

from furlong.errors import ConfigError
from furlong.planners.options import ChunkOptions


def refuse_inexact(trainer: Any) -> None:
    """Raise ConfigError for a setting of a trainer that chunks cannot honour exactly."""
    args = trainer.args
    optimizer = str(getattr(args.optim, "value", args.optim))
    found = [
        (args.neftune_noise_alpha, "neftune_noise_alpha", "no noise scaled by a call's length"),
        (args.fp16, "fp16", "bf16 or float32, which need no scaling of the loss"),
        (
            any(name in optimizer.lower() for name in ("lomo", "layerwise")),
            f"optim={optimizer}, which updates inside the backward",
            "an optimizer of whole gradients",
        ),
        (trainer.model_init, "model_init", "the model itself"),
    ]
    for is_set, name, required in found:
        if is_set:
            raise ConfigError(
                given=name,
                required=required,
                source=f"the arguments of {type(trainer).__name__}",
                change="leave it out, or use the trainer without furlong",
            )


def refuse_processes(trainer: Any) -> None:
    """Raise ConfigError for a way to use several devices other than replicas of the whole model."""
    args, kind = trainer.args, trainer.accelerator.distributed_type
    replicas = "one process per device, each with the whole model (torchrun, accelerate launch)"
    divided = "leave it out; `torchrun -m furlong train` divides weights that do not fit whole"
    leave_out = "leave it out, or use the trainer without furlong"
    several = args.world_size > 1
    wants_fsdp = args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    has_axes = getattr(trainer.accelerator, "parallelism_config", None) is not None
    is_known = kind in ("NO", "FSDP") or kind.startswith("MULTI_")  # MULTI_CPU, MULTI_GPU, ...
    found = [
        (args.n_gpu > 1, f"DataParallel over {args.n_gpu} GPUs", replicas,
         f"start {args.n_gpu} processes with torchrun, or show this one a single GPU"),
        (kind == DistributedType.DEEPSPEED, "DeepSpeed", replicas, divided),
        (wants_fsdp and kind != DistributedType.FSDP, f"FSDP on {args.device.type}",
         "several processes with a GPU each: elsewhere accelerate leaves FSDP out", divided),
        (has_axes, "a parallelism_config of accelerate (tp, cp, sp)", replicas, divided),
        (not is_known, f"distributed training by {kind}", replicas, leave_out),
        (several and not args.average_tokens_across_devices, "average_tokens_across_devices=False",
         "a loss divided by the labels of all processes", "leave it out"),
        (several and args.auto_find_batch_size, "auto_find_batch_size on several processes",
         "batches that all processes take together", "set chunk_options.size smaller instead"),
    ]  # fmt: skip
    for is_set, given, required, change in found:
        if is_set:
            source = f"the arguments of {type(trainer).__name__}, or the launcher's"
            raise ConfigError(given=given, required=required, source=source, change=change)


def refuse_fsdp(trainer: Any) -> None:
    """Raise ConfigError for a setting of accelerate's FSDP that the engine's own does not have."""
    if not trainer.is_fsdp_enabled:
        return
    plugin = trainer.accelerator.state.fsdp_plugin
    whole = "leave FSDP out, so that each process has the whole model; or `furlong train`"
    found = [
        (trainer.args.world_size == 1, "one process", "leave it out"),
        (plugin.fsdp_version != 2, "version 1", "fsdp_config={'version': 2}"),
        (isinstance(plugin.cpu_offload, CPUOffloadPolicy), "cpu_offload", "leave it out"),
        (plugin.activation_checkpointing, "activation_checkpointing",
         "leave it out: chunk_options.keep decides what is recomputed"),
        (trainer.args.torch_compile, "torch_compile", "leave it out"),
        (hasattr(trainer.model, "peft_config"), "adapters", whole),
    ]  # fmt: skip
    for is_set, what, change in found:
        if is_set:
            raise ConfigError(
                given=f"FSDP of accelerate with {what}",
                required="FSDP2 of a model alone, whose weights stay on the device",
                source=f"the arguments of {type(trainer).__name__}, or the launcher's",
                change=change,
            )


def refuse_frozen_draw(options: ChunkOptions) -> None:
    """Raise ConfigError for a sample with a seed: the trainer's options are those of all steps."""
    if options.sampling is not None and options.sampling.seed is not None:
        raise ConfigError(
            given=f"chunk_options with sample.seed = {options.sampling.seed}",
            required="no seed: every step would draw the same chunks",
            source="the arguments of the trainer",
            change="leave sample.seed out; draws then follow from args.seed",
        )
