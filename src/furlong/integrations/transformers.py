"""`Trainer`: transformers' own trainer, with every gradient computed chunk by chunk.

Whatever a trainer of the transformers kind does around a forward and a backward stays as it is:
data preparation, accumulation, clipping, optimizers, callbacks, checkpoints, PEFT. It combines with
TRL's by inheritance: `class ChunkedSFTTrainer(furlong.integrations.Trainer, SFTTrainer): ...`.

Batches of a data collator are read as sequences. A loss is a sum over tokens, which chunks compute
one tile of logits at a time, or any function of the model's outputs, which goes through
`furlong.chunked` and holds all logits. Settings that chunks or several processes cannot honour are
refused.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from furlong.api import Engine
from furlong.chunked_model import chunked_within
from furlong.errors import ConfigError, DataError
from furlong.kv.pools import Storage
from furlong.models.support import refuse_attention_dropout
from furlong.ops.loss import IGNORE_INDEX, wide
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import require_two_phases
from furlong.runtime.batch import (
    IMPLIED,
    ShiftedSequence,
    count_valid_tokens,
    read_padded,
    unreadable,
)
from furlong.runtime.distributed.fsdp import reshard
from furlong.values import (
    Extras,
    TokenFunction,
    log_prob,
    log_sum_exp,
    mean_logit,
    require_function,
)

_READ = {"input_ids", "labels", "attention_mask", "position_ids"}


def unpad(
    batch: dict[str, Any], *, model_type: str = "", has_cache: bool = False
) -> list[ShiftedSequence]:
    """The sequences of a collator's batch, without padding, each with what its tokens predict.

    batch: input_ids, labels (B, T) int64; attention_mask and position_ids as in `read_padded`,
        and `has_cache` too. `model_type`: that of the model which is trained on it.
    Raises DataError for a batch that asks for anything else, and for labels that padding predicts.
    """
    positions = batch.get("position_ids")
    known = _READ | (IMPLIED if positions is not None else set())
    unknown = sorted(key for key in batch.keys() - known if batch[key] is not None)
    input_ids, labels = batch.get("input_ids"), batch.get("labels")
    is_shaped = (
        isinstance(input_ids, Tensor)
        and isinstance(labels, Tensor)
        and input_ids.ndim == 2
        and input_ids.shape == labels.shape
        and input_ids.dtype == labels.dtype == torch.int64
    )
    if unknown or not is_shaped:
        found = ", ".join(unknown or sorted(batch))
        raise unreadable(
            f"a batch with {found}", "input_ids and labels of shape (B, T), int64",
            "use a collator of causal language modelling, such as TRL's",
        )  # fmt: skip
    assert isinstance(input_ids, Tensor) and isinstance(labels, Tensor)
    return read_padded(
        input_ids, batch.get("attention_mask"), positions, labels, has_cache=has_cache,
        model_type=model_type,
    )[0]  # fmt: skip


def without_repeats(batch: dict[str, Any], num_samples: int, num_own: int) -> dict[str, Any]:
    """A batch of `num_samples` samples, of which those behind the first `num_own` have no labels.

    A sample is a row, or a sequence where a collator has joined them to one row. Where samples
    cannot be told apart, in one row of packed ones, all keep their labels.
    """
    labels = batch.get("labels")
    if labels is None:
        return batch  # `unpad` refuses it
    if len(labels) == num_samples:
        sample = torch.arange(num_samples, device=labels.device)[:, None]
    elif len(labels) == 1 and batch.get("position_ids") is not None:
        sample = (batch["position_ids"] == 0).cumsum(-1) - 1
        if int(sample[0, -1]) != num_samples - 1:
            return batch
    else:
        return batch
    return {**batch, "labels": labels.masked_fill(sample >= num_own, IGNORE_INDEX)}


def refuse_inexact(trainer: Any) -> None:
    """Raise ConfigError for a setting of a trainer that chunks cannot honour exactly."""
    args = trainer.args
    optimizer = str(getattr(args.optim, "value", args.optim))
    is_inside = any(name in optimizer.lower() for name in ("lomo", "layerwise"))
    leave_out = "leave it out, or use the trainer without furlong"
    found = [
        (args.neftune_noise_alpha, "neftune_noise_alpha", "no noise scaled by a call's length"),
        (args.fp16, "fp16", "bf16 or float32, which need no scaling of the loss"),
        (is_inside, f"optim={optimizer}, which updates inside the backward",
         "an optimizer of whole gradients"),
        (trainer.model_init, "model_init", "the model itself"),
    ]  # fmt: skip
    _refuse_first(trainer, [(*row, leave_out) for row in found])


def refuse_processes(trainer: Any) -> None:
    """Raise ConfigError for a way to use several devices that is neither replicas of the whole
    model nor FSDP2 as the engine has it."""
    args, kind = trainer.args, trainer.accelerator.distributed_type
    replicas = "one process per device, each with the whole model (torchrun, accelerate launch)"
    divided = "leave it out; `torchrun -m furlong train` divides weights that do not fit whole"
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
        (not is_known, f"distributed training by {kind}", replicas,
         "leave it out, or use the trainer without furlong"),
        (several and not args.average_tokens_across_devices, "average_tokens_across_devices=False",
         "a loss divided by the labels of all processes", "leave it out"),
        (several and args.auto_find_batch_size, "auto_find_batch_size on several processes",
         "batches that all processes take together", "set chunk_options.size smaller instead"),
    ]  # fmt: skip
    _refuse_first(trainer, found, ", or the launcher's")
    if not trainer.is_fsdp_enabled:
        return
    plugin = trainer.accelerator.state.fsdp_plugin
    whole = "leave FSDP out, so that each process has the whole model; or `furlong train`"
    settings = [
        (not several, "one process", "leave it out"),
        (plugin.fsdp_version != 2, "version 1", "fsdp_config={'version': 2}"),
        (isinstance(plugin.cpu_offload, CPUOffloadPolicy), "cpu_offload", "leave it out"),
        (plugin.activation_checkpointing, "activation_checkpointing",
         "leave it out: chunk_options.keep decides what is recomputed"),
        (args.torch_compile, "torch_compile", "leave it out"),
        (hasattr(trainer.model, "peft_config"), "adapters", whole),
    ]  # fmt: skip
    own = "FSDP2 of a model alone, whose weights stay on the device"
    rows = [(is_set, f"FSDP of accelerate with {what}", own, do) for is_set, what, do in settings]
    _refuse_first(trainer, rows, ", or the launcher's")


def _refuse_first(
    trainer: Any, rows: Iterable[tuple[Any, str, str, str]], beside: str = ""
) -> None:
    """Raise ConfigError for the first of the settings (is_set, given, required, change) that is
    set."""
    for is_set, given, required, change in rows:
        if is_set:
            source = f"the arguments of {type(trainer).__name__}{beside}"
            raise ConfigError(given=given, required=required, source=source, change=change)


_SFT = "trl.trainer.sft_trainer"
_KNOWN = ("transformers.trainer", _SFT)
"""Modules whose `compute_loss` is understood."""


@dataclass(frozen=True)
class TokenLoss:
    """A `compute_loss_func` that is a sum over tokens.

    `furlong.integrations.Trainer` computes it without the logits of a whole batch; other trainers
    of transformers call it as they call any. `function`: as in `furlong.values`, a loss (t,) of
    logits (t, V) in float32 or wider and labels (t,), without extras.
    """

    function: TokenFunction

    def __post_init__(self) -> None:
        require_function(self.function, "TokenLoss")

    def __call__(
        self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """The sum over labels (B, T), by their number where `num_items_in_batch` is None."""
        logits, targets = outputs.logits[:, :-1], labels[:, 1:]
        mask = targets != IGNORE_INDEX
        losses = self.function(wide(logits[mask]), targets[mask], {})
        return losses.sum() / (mask.sum() if num_items_in_batch is None else num_items_in_batch)


def token_loss(trainer: Any) -> TokenFunction | None:
    """The loss of a trainer that is a sum over tokens; None for the cross-entropy of the labels."""
    if isinstance(trainer.compute_loss_func, TokenLoss):
        return trainer.compute_loss_func.function
    if getattr(trainer.args, "loss_type", "nll") == "dft":
        return _dft
    factor = trainer.args.label_smoothing_factor
    return _smoothed(factor) if factor else None


def is_any_function(trainer: Any) -> bool:
    """Whether the loss is made of the outputs of the model, by a `compute_loss_func` or by a
    `compute_loss` of a trainer's own."""
    owner = next(cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls))
    is_own = "compute_loss" in vars(trainer) or owner.__module__ not in _KNOWN
    function = trainer.compute_loss_func
    return is_own or not (function is None or isinstance(function, TokenLoss))


def refuse_loss(trainer: Any, options: ChunkOptions) -> None:
    """Raise ConfigError for a loss that several processes do not have, and for options that it, or
    a trainer of many steps, does not have."""
    is_any = is_any_function(trainer)
    if is_any:
        require_two_phases(options)
    size, seed = trainer.args.world_size, options.sampling and options.sampling.seed
    found = [
        (is_any and size > 1,
         f"a compute_loss_func or compute_loss of the trainer's own on {size} processes",
         "one process, or a loss that is a sum over tokens",
         "pass compute_loss_func=furlong.integrations.TokenLoss(function), or give "
         "furlong.chunked(model) to the trainer without furlong, on any number of processes"),
        (seed is not None, f"chunk_options with sample.seed = {seed}",
         "no seed: every step would draw the same chunks",
         "leave sample.seed out; draws then follow from args.seed"),
    ]  # fmt: skip
    _refuse_first(trainer, found, ", or its class")


def _smoothed(factor: float) -> TokenFunction:
    """The cross-entropy of labels that share `factor` of their probability among all ids."""
    label, mean, total = log_prob(), mean_logit(), log_sum_exp()

    def of_tile(logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
        others = mean(logits, labels, extras) - total(logits, labels, extras)
        return -(1 - factor) * label(logits, labels, extras) - factor * others

    return of_tile


def _dft(logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
    """The cross-entropy weighted by the label's own probability (arXiv 2508.05629)."""
    own = log_prob()(logits, labels, extras)
    return -own * own.exp().detach()


class Replica(nn.Module):
    """A whole model as a trainer wraps it: one of several, whose gradients `add_up_gradients` adds
    up. In place of `DistributedDataParallel`, which would do so for each chunk, or not at all."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@torch.no_grad()
def make_equal(model: nn.Module) -> None:
    """Give all processes the weights and buffers of the first one.

    Processes with other seeds would else train other models. Raises ConfigError, on all, unless
    they have the same parameters.
    """
    rows = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()]
    found = _gathered([zlib.crc32(repr(rows).encode())])
    other = next((process for process, own in enumerate(found) if own != found[0]), None)
    if other is not None:
        raise ConfigError(
            given=f"another model on process {other} than on process 0",
            required="parameters of the same names, shapes and dtypes, trained on all or on none",
            source="the model that was passed to the trainer of each process",
            change="make the same model on all processes; their weights may differ",
        )
    for x in chain(model.parameters(), model.buffers()):
        whole = x.contiguous()
        dist.broadcast(whole, 0)
        x.copy_(whole)


def require_parts(model: nn.Module) -> None:
    """Raise ConfigError unless each process has a part of each trained weight, by whose address
    accelerate tells an optimizer's parameters apart."""
    size = dist.get_world_size()
    for name, parameter in model.named_parameters():
        rows = parameter.shape[0]
        if parameter.requires_grad and -(-rows // size) * (size - 1) >= rows:
            raise ConfigError(
                given=f"{name} of {rows} rows, divided among {size} processes by FSDP2",
                required="a row for each process at least",
                source="the model that was passed, and the number of processes",
                change="leave FSDP out, so that each process has the whole model",
            )


def counted_together(num_batches: int, num_labels: int) -> int:
    """The labels of all processes up to their next update.

    Raises DataError, on all, unless each has the same number of batches: gradients are added up
    after the last one.
    """
    found = _gathered([num_batches, num_labels])
    numbers = [batches for batches, _ in found]
    if len(set(numbers)) > 1:
        raise DataError(
            given=f"{', '.join(map(str, numbers))} batches on the processes, before an update",
            required="the same number of batches on each process",
            source="the data loaders of the processes",
            change="leave even_batches in accelerator_config as it is, or drop the last batch",
        )
    return sum(labels for _, labels in found)


def last_round(loader: Any, num_processes: int) -> tuple[int, int]:
    """Samples that each process gets at the end of accelerate's data loader, and how many of all
    are no repeats; 0 where none are repeated, or where nobody knows."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    while not isinstance(sampler, BatchSamplerShard):
        if not hasattr(sampler, "batch_sampler"):
            return loader.total_batch_size // num_processes, max(0, loader.remainder)
        sampler = sampler.batch_sampler  # of one that skips batches when a run is resumed
    samples = getattr(sampler.batch_sampler, "sampler", None)
    if samples is None or sampler.drop_last or not sampler.batch_size:
        return 0, 0
    num_samples = sampler.batch_size // (num_processes if sampler.split_batches else 1)
    return num_samples, len(samples) % (num_samples * num_processes)


def add_up_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Put the sum of all processes' gradients in the place of each one's own.

    A parameter that has a gradient on some gets one on all; without any it stays without.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    own = [int(p.grad is not None) for p in trained]
    needed = [max(flags) for flags in zip(*_gathered(own), strict=True)]
    works = []
    for parameter, is_needed in zip(trained, needed, strict=True):
        if is_needed:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = parameter.grad.contiguous()
            works.append(dist.all_reduce(parameter.grad, async_op=True))
    for work in works:
        work.wait()


def added_up(loss_sum: float, count: int, device: torch.device) -> tuple[float, int]:
    """A sum of losses and the number of its labels, over all processes."""
    totals = torch.tensor([loss_sum, count], dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    whole, labels = totals.tolist()
    return whole, int(labels)


def _gathered(numbers: list[int]) -> list[list[int]]:
    """The numbers of each process."""
    found: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, numbers)
    return found


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
        self.chunk_options = chunk_options or ChunkOptions()
        self._sizes: dict[str, Any] = {"max_seq_len": max_seq_len, "storage": storage}
        refuse_loss(self, self.chunk_options)
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
        count = sum(count_valid_tokens(self._read(batch)) for batch in batches)
        if self._num_processes > 1:
            count = counted_together(len(batches), count)
        return batches, torch.tensor(count, device=device)

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Loss and gradients of a batch. On several processes the loss of an update comes with its
        last batch, when gradients are added up; it is that of all, and 0 before."""
        refuse_inexact(self)  # a loss may have been set since
        refuse_loss(self, self.chunk_options)
        if is_any_function(self):
            with chunked_within(self.model, self.chunk_options, **self._sizes):
                return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # schedule-free optimizers
        if num_items_in_batch is None:
            own = count_valid_tokens(self._read(inputs))
            num_items_in_batch = counted_together(1, own) if self._num_processes > 1 else own
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
        sequences = [
            s for s in every if count_valid_tokens([s])
        ]  # others add neither loss nor gradient
        if self._divides:
            self._divide_again()
            sequences = sequences or every[:1]  # the others wait for this process
        if not sequences:
            return 0.0, 0
        result = self.engine.forward_backward(
            sequences, self.chunk_options, divisor, backward, token_loss=token_loss(self)
        )
        return result.loss_sum, result.num_valid_tokens

    def _divide_again(self) -> None:
        """Let go of weights that a call of the model itself has gathered: they would go stale."""
        reshard(self.engine.model.base)

    def _as_tensor(self, loss: float) -> Tensor:
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        return torch.tensor(loss, dtype=dtype, device=self.args.device)
