"""`Trainer`: transformers' own trainer, with every gradient computed chunk by chunk.

Whatever a trainer of the transformers kind does around a forward and a backward stays as it is:
data preparation, accumulation, clipping, optimizers, callbacks, checkpoints, PEFT. It combines with
TRL's by inheritance: `class ChunkedSFTTrainer(furlong.integrations.Trainer, SFTTrainer): ...`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from furlong.api import Engine
from furlong.door import chunked_within
from furlong.integrations.collated import num_labels, unpad, without_repeats
from furlong.integrations.losses import is_any_function, refuse_loss, token_loss
from furlong.integrations.processes import (
    Replica,
    add_up_gradients,
    added_up,
    counted_together,
    last_round,
    make_equal,
    require_parts,
)
from furlong.integrations.refusals import (
    refuse_frozen_draw,
    refuse_fsdp,
    refuse_inexact,
    refuse_processes,
)
from furlong.models.support import refuse_attention_dropout
from furlong.planners.options import ChunkOptions
from furlong.runtime.inputs import ShiftedSequence
from furlong.runtime.memory.pools import Storage
from furlong.runtime.parallel.sharding import sharded_modules


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` that trains on sequences longer than memory should allow.

    Takes its arguments, and by keyword `chunk_options` (`furlong.ChunkOptions`), and `max_seq_len`
    and `storage` (see `furlong.forward_backward`). Batches may be padded on either side or packed
    with `position_ids`; attention, gradient checkpointing and activation offloading of the model
    are set aside. Raises ConfigError or UnsupportedModelError, by name, for what would not be
    exact.

    A loss that is a sum over tokens never holds the logits of a batch: `label_smoothing_factor`,
    the `loss_type` of TRL's SFTTrainer, and a `compute_loss_func` that is a `TokenLoss`. Any other
    `compute_loss_func`, and a `compute_loss` of a class's own, is transformers' training step on a
    model that is `furlong.chunked`, and holds them all.

    On several processes each holds the whole model, and gradients are added up once per update;
    with accelerate's FSDP2 the engine divides the weights among them.
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
        refuse_processes(self)
        refuse_fsdp(self)
        self.chunk_options = chunk_options or ChunkOptions()
        self._sizes: dict[str, Any] = {"max_seq_len": max_seq_len, "storage": storage}
        refuse_frozen_draw(self.chunk_options)
        refuse_loss(self, self.chunk_options, divides=self._divides)
        if self._divides:
            self.model.to(self.args.device)
            make_equal(self.model)
        with warnings.catch_warnings():
            # somebody does: this trainer
            warnings.filterwarnings("ignore", ".*nobody adds them up")
            self.engine = Engine(
                self.model, **self._sizes,
                compute_dtype=torch.bfloat16 if self.args.bf16 else None,
                process_group=dist.group.WORLD if self._divides else None,
            )  # fmt: skip
        if self._divides:
            require_parts(self.model)
            self.accelerator.state.fsdp_plugin.auto_wrap_policy = None  # nothing is left to wrap
        refuse_attention_dropout(self.engine.model.base)  # from_pretrained returns it in eval mode
        self._own_loss = 0.0  # of the batches since the last update

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """Counts the labels that a token predicts: what the loss sums over, on all processes."""
        if is_any_function(self):
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[no-any-return]
        batches = [self._own_samples(batch) for batch in islice(epoch_iterator, num_batches)]
        count = sum(num_labels(s) for batch in batches for s in self._read(batch))
        if self._num_processes > 1:
            count = self._counted(len(batches), count)
        return batches, torch.tensor(count, device=device)

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Loss and gradients of a batch. On several processes the loss of an update comes with its
        last batch, when gradients are added up; it is that of all, and 0 before."""
        refuse_inexact(self)  # a loss may have been set since
        refuse_loss(self, self.chunk_options, divides=self._divides)
        if is_any_function(self):
            with chunked_within(self.model, self.chunk_options, **self._sizes):
                return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # schedule-free optimizers
        if num_items_in_batch is None:
            own = sum(map(num_labels, self._read(inputs)))
            num_items_in_batch = self._counted(1, own) if self._num_processes > 1 else own
        divisor = int(num_items_in_batch)
        loss = self._summed(inputs, divisor)[0] / divisor if divisor else 0.0
        if self._num_processes > 1 and not self._divides:
            self._own_loss += loss
            loss = 0.0
            if self.accelerator.sync_gradients:
                add_up_gradients(self.model.parameters())
                loss, _ = added_up(self._own_loss, 0, self.args.device)
                self._own_loss = 0.0
        return self._as_tensor(loss)

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Mean loss of a batch, on several processes that of all their batches together; None,
        which evaluation leaves out, for a batch without labels.

        A `compute_metrics` asks for logits, and so does a loss of the model's outputs: these are
        the model's own, of the whole batch.
        """
        if not prediction_loss_only or is_any_function(self):
            found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            self._divide_again()
            return found  # type: ignore[no-any-return]
        loss_sum, count = self._summed(self._own_samples(inputs), 1, backward=False)
        if self._num_processes > 1 and not self._divides:
            loss_sum, count = added_up(loss_sum, count, self.args.device)
        return (self._as_tensor(loss_sum / count) if count else None), None, None

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        """Leaves `DistributedDataParallel` out, which acts in a forward that chunks never call."""
        if not training or self._num_processes == 1 or self._divides:
            return super()._wrap_model(model, training, dataloader)  # type: ignore[no-any-return]
        if not isinstance(model, Replica):
            make_equal(model)
            model = Replica(model)
        return model

    @property
    def _divides(self) -> bool:
        """Whether processes share the weights, by accelerate's FSDP2 and our engine."""
        return self.is_fsdp_enabled  # type: ignore[no-any-return]

    @property
    def _num_processes(self) -> int:
        return self.args.world_size  # type: ignore[no-any-return]

    def _read(self, batch: dict[str, Any]) -> list[ShiftedSequence]:
        return unpad(
            batch, model_type=self.engine.model.config.model_type, has_cache=self.args.use_cache
        )

    def _own_samples(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch that a data loader has just given, without the labels of what it repeats at its
        end to give every process equally many samples."""
        state = self.accelerator.gradient_state
        if self._num_processes == 1 or not state.end_of_dataloader:
            return batch
        num_samples, num_left = last_round(state.active_dataloader, self._num_processes)
        if not num_left:
            return batch
        return without_repeats(batch, num_samples, num_left - num_samples * self.args.process_index)

    def _summed(
        self, batch: dict[str, Any], divisor: int, *, backward: bool = True
    ) -> tuple[float, int]:
        """The summed loss of a batch and the number of its labels: where weights are divided, of
        all processes' batches."""
        every = self._read(self._prepare_inputs(batch))
        sequences = [s for s in every if num_labels(s)]  # others add neither loss nor gradient
        if self._divides:
            self._divide_again()
            sequences = sequences or every[:1]  # the others wait for this process
        if not sequences:
            return 0.0, 0
        result = self.engine.forward_backward(
            sequences, self.chunk_options, divisor, backward, token_loss=token_loss(self)
        )
        return result.loss_sum, result.num_valid_tokens

    def _counted(self, num_batches: int, count: int) -> int:
        return counted_together(num_batches, count, self.args.device)

    def _divide_again(self) -> None:
        """Let go of weights that a call of the model itself has gathered: they would go stale."""
        for module in sharded_modules(self.engine.model.base):
            module.reshard()

    def _as_tensor(self, loss: float) -> Tensor:
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        return torch.tensor(loss, dtype=dtype, device=self.args.device)
