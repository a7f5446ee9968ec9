"""`Trainer`: transformers' own trainer, with every gradient computed chunk by chunk.

Whatever a trainer of the transformers kind does around a forward and a backward stays as it is:
data preparation, accumulation, clipping, optimizers, callbacks, checkpoints, PEFT. It combines with
TRL's by inheritance: `class ChunkedSFTTrainer(furlong.integrations.Trainer, SFTTrainer): ...`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from accelerate.utils import DistributedType
from torch import Tensor

from furlong.api import Engine
from furlong.errors import ConfigError, DataError
from furlong.models.support import refuse_attention_dropout
from furlong.ops.loss import IGNORE_INDEX
from furlong.planners.options import ChunkOptions
from furlong.runtime.pools import Storage

_READ = {"input_ids", "labels", "attention_mask", "position_ids"}
# What collators add for kernels that we do not call: all of it follows from position_ids.
_IMPLIED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
_PLAIN_LOSS = ("transformers.trainer", "trl.trainer.sft_trainer")

Sequences = list[dict[str, Tensor]]


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` that trains on sequences longer than memory should allow.

    Takes its arguments, and by keyword `chunk_options` (`furlong.ChunkOptions`), and `max_seq_len`
    and `storage` (see `furlong.forward_backward`). Batches may be padded on either side or packed
    with `position_ids`; attention, gradient checkpointing and activation offloading of the model
    are set aside. Raises ConfigError or UnsupportedModelError, by name, for what would not be
    exact.
    """

    def __init__(
        self,
        *args: Any,
        chunk_options: ChunkOptions | None = None,
        max_seq_len: int | None = None,
        storage: Storage | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        refuse_inexact(self)
        self.chunk_options = chunk_options or ChunkOptions()
        _refuse_frozen_draw(self.chunk_options)
        compute_dtype = torch.bfloat16 if self.args.bf16 else None
        self.engine = Engine(
            self.model, max_seq_len=max_seq_len, compute_dtype=compute_dtype, storage=storage
        )
        refuse_attention_dropout(self.engine.model.base)  # from_pretrained returns it in eval mode

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """Counts the labels that have a context in their own sequence: what the loss sums over."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = [_num_labels(s) for batch in batches for s in unpad(batch)]
        return batches, torch.tensor(sum(counts), device=device)

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        refuse_inexact(self)  # a loss may have been set since
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # schedule-free optimizers
        divisor = None if num_items_in_batch is None else int(num_items_in_batch)
        return self._loss(inputs, divisor, backward=True)

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Mean loss of a batch; None, which evaluation leaves out, for a batch without labels.

        A `compute_metrics` asks for logits: these are the model's own, of the whole batch.
        """
        if not prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[no-any-return]
        if not any(_num_labels(sequence) for sequence in unpad(inputs)):
            return None, None, None
        return self._loss(inputs, None, backward=False), None, None

    def _loss(self, inputs: dict[str, Any], divisor: int | None, *, backward: bool) -> Tensor:
        # A sequence without labels adds neither loss nor gradient.
        labelled = [s for s in unpad(self._prepare_inputs(inputs)) if _num_labels(s)]
        loss = 0.0
        if labelled:
            loss = self.engine.forward_backward(
                labelled, self.chunk_options, divisor, backward=backward
            ).loss
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        return torch.tensor(loss, dtype=dtype, device=self.args.device)


def unpad(batch: dict[str, Any]) -> Sequences:
    """The sequences of a collator's batch, without padding.

    batch: input_ids, labels (B, T) int64; attention_mask (B, T) with padding on either side, 0; or
        position_ids (B, T), which start at 0 with every sequence of a packed row.
    Returns one {"input_ids": (T,), "labels": (T,)} per sequence. Raises DataError for a batch that
    asks for anything else.
    """
    unknown = sorted(key for key in batch.keys() - _READ - _IMPLIED if batch[key] is not None)
    if unknown or "labels" not in batch or batch["input_ids"].ndim != 2:
        found = ", ".join(unknown or sorted(batch))
        raise _unreadable(f"a batch with {found}", "input_ids and labels of shape (B, T)")
    rows = []
    for index in range(len(batch["input_ids"])):
        row = {key: batch[key][index] for key in _READ if batch.get(key) is not None}
        mask = row.pop("attention_mask", None)
        if mask is not None:
            row = _inside(row, mask)
        rows += _split_packed(row)
    return rows


def _inside(row: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """A row without its padding."""
    inside = mask.nonzero().flatten()
    length = len(inside)
    if (
        mask.ndim != 1
        or not length
        or int(mask.max()) != 1
        or int(inside[-1] - inside[0]) >= length
    ):
        raise _unreadable(
            f"an attention_mask of shape {tuple(mask.shape)} per row that is more than padding",
            "one run of ones per row, zeros before or after it",
        )
    return {key: value[inside[0] : inside[-1] + 1] for key, value in row.items()}


def _split_packed(row: dict[str, Tensor]) -> Sequences:
    """The sequences of an unpadded row."""
    if "position_ids" not in row:
        return [row]
    positions = row.pop("position_ids").cpu()
    starts = positions == 0
    rows = torch.arange(len(positions), device="cpu")
    last_start = torch.where(starts, rows, 0).cummax(0).values
    if not torch.equal(positions, rows - last_start):
        shown = ", ".join(map(str, positions.flatten()[:8].tolist()))
        raise _unreadable(f"position_ids {shown}, ...", "0, 1, 2, ... in every sequence")
    end = torch.tensor([len(positions)], device="cpu")
    lens = torch.cat([starts.nonzero().flatten(), end]).diff()
    parts = {key: value.split(lens.tolist()) for key, value in row.items()}
    return [
        {"input_ids": ids, "labels": labels}
        for ids, labels in zip(parts["input_ids"], parts["labels"], strict=True)
    ]


def _num_labels(sequence: dict[str, Tensor]) -> int:
    return int((sequence["labels"][1:] != IGNORE_INDEX).sum())


def refuse_inexact(trainer: Any) -> None:
    """Raise ConfigError for a setting of a transformers trainer that chunks cannot honour exactly.

    Any loss but the mean cross-entropy of the labels would otherwise be ignored silently.
    """
    args = trainer.args
    loss_owner = next(cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls))
    own_loss = "compute_loss" in vars(trainer) or loss_owner.__module__ not in _PLAIN_LOSS
    optimizer = str(getattr(args.optim, "value", args.optim))
    loss_type = getattr(args, "loss_type", "nll")
    distributed = trainer.accelerator.distributed_type
    plain_loss = "the cross-entropy of the labels: chunks never hold the logits of a whole batch"
    one_device = "one process on one device"
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
        (args.n_gpu > 1, f"DataParallel over {args.n_gpu} GPUs", one_device),
        (distributed != DistributedType.NO, f"distributed training ({distributed})", one_device),
    ]
    for is_set, name, required in found:
        if is_set:
            raise ConfigError(
                given=name,
                required=required,
                source=f"the arguments of {type(trainer).__name__}",
                change="leave it out, or use the trainer without furlong",
            )


def _refuse_frozen_draw(options: ChunkOptions) -> None:
    """Raise ConfigError for a sample with a seed: the trainer's options are those of all steps."""
    if options.sampling is not None and options.sampling.seed is not None:
        raise ConfigError(
            given=f"chunk_options with sample.seed = {options.sampling.seed}",
            required="no seed: every step would draw the same chunks",
            source="the arguments of the trainer",
            change="leave sample.seed out; draws then follow from args.seed",
        )


def _unreadable(given: str, required: str) -> DataError:
    return DataError(
        given=given,
        required=required,
        source="the data collator",
        change="use a collator of causal language modelling, such as TRL's",
    )
