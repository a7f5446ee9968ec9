"""Settings of a trainer that chunks, or several processes, cannot honour exactly."""

from __future__ import annotations

import os
from typing import Any

from accelerate.utils import DistributedType

from furlong.errors import ConfigError
from furlong.planners.options import ChunkOptions

_PLAIN_LOSS = ("transformers.trainer", "trl.trainer.sft_trainer")


def refuse_inexact(trainer: Any) -> None:
    """Raise ConfigError for a setting of a transformers trainer that chunks cannot honour exactly.

    Any loss but the mean cross-entropy of the labels would otherwise be ignored silently.
    """
    args = trainer.args
    loss_owner = next(cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls))
    own_loss = "compute_loss" in vars(trainer) or loss_owner.__module__ not in _PLAIN_LOSS
    optimizer = str(getattr(args.optim, "value", args.optim))
    loss_type = getattr(args, "loss_type", "nll")
    plain_loss = "the cross-entropy of the labels: chunks never hold the logits of a whole batch"
    found = [
        (args.label_smoothing_factor, "label_smoothing_factor", plain_loss),
        (trainer.compute_loss_func, "compute_loss_func", plain_loss),
        (loss_type != "nll", f"loss_type={loss_type}", plain_loss),
        (own_loss, f"{loss_owner.__name__}.compute_loss", plain_loss),
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
    divided = (
        "leave it out; weights that do not fit whole are divided by `torchrun -m furlong train`"
    )
    leave_out = "leave it out, or use the trainer without furlong"
    several = args.world_size > 1
    wants_fsdp = args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    has_axes = getattr(trainer.accelerator, "parallelism_config", None) is not None
    found = [
        (args.n_gpu > 1, f"DataParallel over {args.n_gpu} GPUs", replicas,
         f"start {args.n_gpu} processes with torchrun, or show this one a single GPU"),
        (kind == DistributedType.DEEPSPEED, "DeepSpeed", replicas, divided),
        (kind == DistributedType.FSDP or wants_fsdp, "FSDP of accelerate", replicas, divided),
        (has_axes, "a parallelism_config of accelerate (tp, cp, sp)", replicas, divided),
        (kind != "NO" and not kind.startswith("MULTI_"), f"distributed training by {kind}",
         replicas, leave_out),
        (several and not args.average_tokens_across_devices, "average_tokens_across_devices=False",
         "a loss divided by the labels of all processes", "leave it out"),
        (several and args.auto_find_batch_size, "auto_find_batch_size on several processes",
         "batches that all processes take together", "set chunk_options.size smaller instead"),
    ]  # fmt: skip
    for is_set, given, required, change in found:
        if is_set:
            source = f"the arguments of {type(trainer).__name__}, or the launcher's"
            raise ConfigError(given=given, required=required, source=source, change=change)


def refuse_frozen_draw(options: ChunkOptions) -> None:
    """Raise ConfigError for a sample with a seed: the trainer's options are those of all steps."""
    if options.sampling is not None and options.sampling.seed is not None:
        raise ConfigError(
            given=f"chunk_options with sample.seed = {options.sampling.seed}",
            required="no seed: every step would draw the same chunks",
            source="the arguments of the trainer",
            change="leave sample.seed out; draws then follow from args.seed",
        )
