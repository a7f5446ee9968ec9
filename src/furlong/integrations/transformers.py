"""`Trainer`: transformers' trainer, with every gradient computed chunk by chunk.

Everything that a transformers trainer does around forward and backward stays: data preparation,
accumulation, clipping, optimizers, callbacks, checkpoints, PEFT. It combines with TRL's trainers by
inheritance: `class ChunkedSFTTrainer(furlong.integrations.Trainer, SFTTrainer): ...`.

Batches of a data collator are read as sequences. The loss must be a sum over tokens, which chunks
compute one tile of logits at a time. For any other loss, use `furlong.chunked` with an ordinary
trainer. Settings that chunks or several processes cannot honour raise ConfigError.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.data_loader import BatchSamplerShard
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn.functional import cross_entropy
from transformers.trainer_pt_utils import LabelSmoother

from furlong.api import Engine
from furlong.errors import ConfigError
from furlong.kv.pools import Storage
from furlong.models.attention import forward_as_written
from furlong.models.support import bare_model, refuse_attention_dropout, unsupported
from furlong.ops.loss import IGNORE_INDEX, wide
from furlong.planners.options import ChunkOptions
from furlong.runtime.batch import ShiftedSequence, count_valid_tokens, refused_data, require_type
from furlong.runtime.check import random_ids
from furlong.runtime.distributed.consensus import Facts, agree, run_on_all
from furlong.runtime.distributed.fsdp import reshard
from furlong.runtime.distributed.mesh import Ranks, ranks_given
from furlong.runtime.hf_batches import IMPLIED, read_padded
from furlong.runtime.rng import RNGState, modes_kept, replayed
from furlong.runtime.scan import HOOKS, scan
from furlong.testing import relative_error
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
    """Return the sequences of a collator's batch, without padding, with shifted labels.

    Args:
        batch: input_ids, labels (B, T) int64; attention_mask and position_ids as in `read_padded`.
        model_type: `config.model_type` of the model that is trained.
        has_cache: as in `read_padded`.

    Raises:
        DataError: the batch has unknown entries, or a label that would be predicted from padding.
    """
    positions = batch.get("position_ids")
    known = _READ | (IMPLIED if positions is not None else set())
    unknown = sorted(key for key in batch.keys() - known if batch[key] is not None)
    input_ids, labels = batch.get("input_ids"), batch.get("labels")
    is_shaped = (
        all(isinstance(x, Tensor) and x.dtype == torch.int64 for x in (input_ids, labels))
        and input_ids.shape == labels.shape  # type: ignore[union-attr]
    )
    if unknown or not is_shaped:
        change = "use a collator of causal language modelling, such as TRL's"
        raise refused_data(
            f"a batch with {', '.join(unknown or sorted(batch))}",
            "input_ids and labels of shape (B, T), int64",
            f"leave them out: dataset.remove_columns({unknown})" if unknown else change,
        )
    assert isinstance(input_ids, Tensor) and isinstance(labels, Tensor)
    return read_padded(
        input_ids, batch.get("attention_mask"), positions, labels, has_cache=has_cache,
        model_type=model_type,
    )[0]  # fmt: skip


def without_repeats(batch: dict[str, Any], num_samples: int, num_own: int) -> dict[str, Any]:
    """Return the batch with labels of its first `num_own` samples only; other labels become -100. A
    data loader may repeat samples to fill its last batch, which has `num_samples`: the repeats come
    last.

    A sample is a row or, if a collator has joined all samples to one row, a sequence of that row.
    If samples cannot be told apart, since one of them packs several sequences, the batch is
    returned unchanged.
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


def refuse_settings(trainer: Any) -> None:
    """Raise ConfigError for a trainer's setting that chunks cannot honour exactly, and for any use
    of several devices other than replicas of the whole model and the engine's FSDP2."""
    args, kind = trainer.args, str(getattr(trainer.accelerator.distributed_type, "value", ""))
    optimizer, several = str(getattr(args.optim, "value", args.optim)), args.world_size > 1
    whole = "start one process per device with torchrun or accelerate launch, each with the whole"
    whole += " model; `torchrun -m furlong train` divides weights that do not fit whole"
    found = [
        (args.neftune_noise_alpha, "neftune_noise_alpha, noise scaled by a call's length", ""),
        (args.fp16, "fp16", "use bf16 or float32, which need no scaling of the loss"),
        (any(name in optimizer.lower() for name in ("lomo", "layerwise")),
         f"optim={optimizer}, which updates inside the backward", ""),
        (trainer.model_init, "model_init",
         "pass the model itself; for a search over hyperparameters, "
         "transformers.Trainer(model_init=lambda: furlong.chunked(make()))"),
        (args.torch_compile or hasattr(trainer.model, "_orig_mod"),
         "torch_compile or torch.compile(model), of a forward that chunks never call",
         "leave it out, and compile layers in place: "
         "for layer in model.get_decoder().layers: layer.compile()"),
        (args.n_gpu > 1, f"DataParallel over {args.n_gpu} GPUs", whole),
        (getattr(trainer.accelerator, "parallelism_config", None) is not None,
         "a parallelism_config of accelerate (tp, cp, sp)", whole),
        (kind not in ("NO", "FSDP") and not kind.startswith("MULTI_"),  # MULTI_CPU, MULTI_GPU, ...
         f"distributed training by {kind}", whole),
        (several and not args.average_tokens_across_devices,
         "average_tokens_across_devices=False, on several processes", ""),
    ]  # fmt: skip
    if trainer.is_fsdp_enabled:
        plugin = trainer.accelerator.state.fsdp_plugin
        has_adapters = hasattr(trainer.model, "peft_config")
        fsdp = [
            (not several, "one process", ""),
            (plugin.fsdp_version != 2, "version 1", "fsdp_config={'version': 2}"),
            (isinstance(plugin.cpu_offload, CPUOffloadPolicy), "cpu_offload", ""),
            (plugin.activation_checkpointing, "activation_checkpointing",
             "leave it out: chunk_options.keep decides what is recomputed"),
            (has_adapters, "adapters", "leave FSDP out: each process then has the whole model"),
        ]  # fmt: skip
        found += [(is_set, f"FSDP of accelerate with {what}", do) for is_set, what, do in fsdp]
    _refuse_first(trainer, found)


def refuse_model(trainer: Any, model: nn.Module) -> None:
    """Raise ConfigError if the trainer's model is not the engine's. Raise it, too, if other code
    has set hooks, a forward or a loss function on the decoder's enclosing modules.

    In chunks only the decoder and the head are called, so such code would never run. The test by
    `require_model_loss` uses a few tokens. It could miss a loss weight of a rare token, a factor
    that is raised later, or a loss that depends on the length.
    """
    own = trainer.engine.model
    path = next((name for name, x in model.named_modules() if x is own.decoder), "").split(".")
    around = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path))]
    hooks = [hook for module in around for kind in HOOKS for hook in vars(module)[kind].values()]
    accelerates = [vars(module)["_hf_hook"] for module in around if "_hf_hook" in vars(module)]
    hooks += [hook for own in accelerates for hook in getattr(own, "hooks", (own,))]
    others = [hook for hook in hooks if not str(hook.__module__).startswith(_OWN_HOOKS)]
    forwards = [f for module in around for f in _foreign_forwards(module)]
    loss = getattr(own.base, "loss_function", None)
    found = [
        (bare_model(model) is not own.base,
         f"trainer.model = another {type(model).__name__} than the trainer was made of",
         "leave trainer.model as it was, or make another trainer of the other model"),
        (token_loss(trainer) is None and _is_foreign(loss),
         f"a {own.name} whose loss_function was set",
         f"pass compute_loss_func=furlong.integrations.TokenLoss(function), or {_CHUNKED}"),
        (forwards, f"a {own.name} with a forward in the place of its family's "
         f"({', '.join(map(_name_of, forwards))}), which no chunk calls", _CHUNKED),
        (others, f"hooks on the whole model ({', '.join(map(_name_of, others))}), which no chunk "
         "calls", _CHUNKED),
    ]  # fmt: skip
    _refuse_first(trainer, found)


_ACCELERATE_HOOKS = "accelerate.hooks"
_OWN_HOOKS = ("torch.distributed.", "furlong.", _ACCELERATE_HOOKS)
_CHUNKED = "give furlong.chunked(model) to the trainer without furlong, which calls it"
_KNOWN_CODE = {"accelerate", "furlong", "liger_kernel", "peft", "torch", "transformers", "trl"}
"""Packages with known forwards and losses: the same as in chunks, or tested with a few tokens."""


def _is_foreign(function: Any) -> bool:
    """Whether a function, or one that it wraps, is from an unknown package, judged by its globals,
    since `functools.wraps` copies `__module__`."""
    while function is not None:
        bare = getattr(function, "__func__", function)
        if isinstance(bare, partial) and getattr(bare.func, "__module__", "") == _ACCELERATE_HOOKS:
            bare = bare.func  # calls the module's _hf_hook, and the forward that it wraps
        if not _is_known(getattr(bare, "__globals__", {}).get("__name__", type(bare).__module__)):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in _KNOWN_CODE


def _foreign_forwards(module: nn.Module) -> list[Any]:
    """Return forwards from unknown packages that were set on a module, or that override a known
    class's forward. Remote code without a known base class is tested (`require_model_loss`)."""
    classes = [c for c in type(module).__mro__ if "forward" in vars(c) and c is not nn.Module]
    is_own_family = not any(_is_known(c.__module__) for c in classes)
    forwards = [vars(module).get(name) for name in ("forward", "_original_forward")]  # accelerate's
    forwards += [] if is_own_family else [vars(c)["forward"] for c in classes]
    return [f for f in forwards if f is not None and _is_foreign(f)]


def _name_of(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)


_ASKED_TOKENS = 8


@torch.no_grad()
def require_model_loss(trainer: Any) -> None:
    """Raise ConfigError unless a call of the whole model gives what chunks compute: the
    cross-entropy of its class's logits or, if the trainer's loss takes logits, these logits.

    A call with a few tokens, in train mode, detects terms that a config adds to the loss, remote
    code and wrappers. All processes must call it, since sharded weights are gathered.
    """
    own, model = trainer.engine.model, trainer.model
    (ids,) = random_ids(own, [min(_ASKED_TOKENS, own.longest_tokens or _ASKED_TOKENS)])
    given: dict[str, Any] = {"input_ids": ids[None], "use_cache": False}
    labels, divisor = ids[1:], len(ids) - 1
    if token_loss(trainer) is None:
        given["labels"] = given["input_ids"]
        if _is_foreign(type(own.base).forward) and trainer.model_accepts_loss_kwargs:
            divisor *= 3  # tests that remote code uses it, as an update of several batches needs
            given["num_items_in_batch"] = torch.tensor(divisor, device=own.device)
        if "fused_lm_head" in inspect.signature(own.base.forward, follow_wrapped=False).parameters:
            given["fused_lm_head"] = True  # TRL's
    state = RNGState.read(own.device)
    with modes_kept(model), forward_as_written([*own.base.modules()], own.max_seq_len):
        model.train()
        with replayed(state, own.device):
            logits = own.whole_logits(ids)
        with replayed(state, own.device):
            output = model(**given)
    reshard(own.base)
    if "labels" in given:
        what, found = "loss", output.loss
        wanted = cross_entropy(wide(logits[:-1]), labels, reduction="sum") / divisor
    else:
        what, found, wanted = "logits", output.logits[0], logits
    is_narrow = trainer.args.bf16 or logits.dtype.itemsize < 4  # bf16: accelerate's autocast
    most = 2e-2 if is_narrow else 1e-4
    error = math.inf if found is None else relative_error(found, wanted)
    told = (
        f"{own.name} whose {what}, by its config, the forward of its class or what wraps it, is "
        f"not that of chunks (relative error {error:.1e})"
    )
    change = f"pass compute_loss_func=furlong.integrations.TokenLoss(function), or {_CHUNKED}"
    _refuse_first(trainer, [(not error <= most, told, change)])


def _refuse_first(trainer: Any, rows: Iterable[tuple[Any, str, str]]) -> None:
    """Raise ConfigError for the first of `rows` whose setting is set; return if none is. A row is
    (whether the setting is set, the setting in words, advice for the error or "" for the
    default)."""
    for is_set, given, change in rows:
        if is_set:
            raise ConfigError(
                given=given,
                required="settings that give the gradients of whole sequences, summed over tokens",
                source=f"the arguments of {type(trainer).__name__}, its class, or the launcher's",
                change=change or "leave it out, or use the trainer without furlong",
            )


_SFT = "trl.trainer.sft_trainer"
_KNOWN = ("transformers.trainer", _SFT)
"""Modules whose `compute_loss` is known to be a sum over tokens."""


@dataclass(frozen=True)
class TokenLoss:
    """A `compute_loss_func` that is a sum over tokens.

    `furlong.integrations.Trainer` computes it without the logits of a whole batch; other trainers
    of transformers call it like any other.

    Args:
        function: as in `furlong.values`, maps logits (t, V) in float32 or wider and labels (t,) to
            losses (t,), without extras.
    """

    function: TokenFunction

    def __post_init__(self) -> None:
        require_function(self.function, "TokenLoss")

    def __call__(
        self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Return the sum of losses over labels (B, T), divided by `num_items_in_batch`, or by the
        number of labels if that is None."""
        logits, targets = outputs.logits[:, :-1], labels[:, 1:]
        mask = targets != IGNORE_INDEX
        losses = self.function(wide(logits[mask]), targets[mask], {})
        return losses.sum() / (mask.sum() if num_items_in_batch is None else num_items_in_batch)


def token_loss(trainer: Any) -> TokenFunction | None:
    """Return a trainer's loss as a function of single tokens; None for the cross-entropy."""
    if isinstance(trainer.compute_loss_func, TokenLoss):
        return trainer.compute_loss_func.function
    if getattr(trainer.args, "loss_type", "nll") == "dft":
        return _dft
    smoother = trainer.label_smoother
    return None if smoother is None else _smoothed(smoother.epsilon)


def refuse_loss(trainer: Any) -> None:
    """Raise ConfigError for a loss computed from the model's outputs by a custom
    `compute_loss_func` or `compute_loss`, and for a fixed sampling seed."""
    owner = next(cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls))
    is_own = "compute_loss" in vars(trainer) or owner.__module__ not in _KNOWN
    function, sampling = trainer.compute_loss_func, trainer.chunk_options.sampling
    seed = None if sampling is None else sampling.seed
    found = [
        (is_own or not (function is None or isinstance(function, TokenLoss)),
         "a compute_loss_func or compute_loss of the trainer's own",
         f"pass compute_loss_func=furlong.integrations.TokenLoss(function), or {_CHUNKED}"),
        (type(trainer.label_smoother) not in (type(None), LabelSmoother),
         f"a label_smoother of the trainer's own ({type(trainer.label_smoother).__name__})",
         f"pass compute_loss_func=furlong.integrations.TokenLoss(function), or {_CHUNKED}"),
        (seed is not None, f"chunk_options with sample.seed = {seed}, the same draw in every step",
         "leave sample.seed out; draws then follow from args.seed"),
    ]  # fmt: skip
    _refuse_first(trainer, found)


def _smoothed(factor: float) -> TokenFunction:
    """Return cross-entropy with label smoothing: `factor` of the probability goes to all ids."""
    label, mean, total = log_prob(), mean_logit(), log_sum_exp()

    def of_tile(logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
        others = mean(logits, labels, extras) - total(logits, labels, extras)
        return -(1 - factor) * label(logits, labels, extras) - factor * others

    return of_tile


def _dft(logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
    """Return the cross-entropy, weighted by the label's probability (DFT, arXiv 2508.05629)."""
    own = log_prob()(logits, labels, extras)
    return -own * own.exp().detach()


_DECIDING = (
    "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
    "max_steps", "num_train_epochs", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
    "optim", "optim_args", "bf16", "label_smoothing_factor", "gradient_accumulation_steps",
    "loss_type", "seed", "data_seed", "per_device_train_batch_size", "eval_strategy", "eval_steps",
    "save_strategy", "save_steps",
)  # fmt: skip
"""Training arguments that must be equal on all processes."""


class Replica(nn.Module):
    """Wrapper of a model that has replicas on other processes; `add_up_gradients` sums gradients.

    It replaces `DistributedDataParallel`, which would reduce in each chunk, or never.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@torch.no_grad()
def make_equal(model: nn.Module) -> None:
    """Broadcast the weights and buffers of process 0, as other processes may have been initialized
    with other seeds."""
    for x in chain(model.parameters(), model.buffers()):
        whole = x.contiguous()
        dist.broadcast(whole, 0)
        x.copy_(whole)


def require_parts(model: nn.Module) -> None:
    """Raise ConfigError if FSDP2 would leave a process without rows of some trained weight:
    accelerate identifies an optimizer's parameters by their addresses, and empty shards have
    none."""
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


def last_round(loader: Any, num_processes: int) -> tuple[int, int]:
    """Return (samples per process, samples that are not repeats) for the last batch of accelerate's
    data loader. The first is the number of samples that each process gets. The second is counted
    over all processes; it is 0 if no sample is repeated, or if that is unknown."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    while not isinstance(sampler, BatchSamplerShard):
        if not hasattr(sampler, "batch_sampler"):
            return loader.total_batch_size // num_processes, max(0, loader.remainder)
        sampler = sampler.batch_sampler  # the outer one skips batches when a run is resumed
    samples = getattr(sampler.batch_sampler, "sampler", None)
    if samples is None or sampler.drop_last or not sampler.batch_size:
        return 0, 0
    num_samples = sampler.batch_size // (num_processes if sampler.split_batches else 1)
    return num_samples, len(samples) % (num_samples * num_processes)


def add_up_gradients(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Sum the gradients of all processes in place.

    A parameter with a gradient on some processes gets one on all; without any it keeps None.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    numbers = added_up(device, *(parameter.grad is not None for parameter in trained))
    for parameter, num_processes in zip(trained, numbers, strict=True):
        if num_processes:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = own.contiguous()
            dist.all_reduce(parameter.grad)


def added_up(device: torch.device, *numbers: float) -> list[float]:
    """Return the sum of each number over all processes."""
    sums = torch.tensor(numbers, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(sums)
    return sums.tolist()  # type: ignore[no-any-return]


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` for sequences whose activations would not fit in memory.

    Batches may be padded on either side or packed with `position_ids`. The model's attention
    implementation, gradient checkpointing and activation offloading are not used.

    The loss must be a sum over tokens, so that the logits of a batch never exist at once: the
    cross-entropy, also with `label_smoothing_factor`, the `loss_type` of TRL's SFTTrainer, or a
    `compute_loss_func` that is a `TokenLoss`. A test with a few tokens compares the model's own
    loss with the loss in chunks, and refuses a difference. For any other loss pass a
    `furlong.chunked(model)` to an ordinary trainer.

    On several processes each one holds the whole model, and gradients are summed once per update;
    with accelerate's FSDP2 the engine shards the weights.

    Args:
        chunk_options, max_seq_len, storage: as in `furlong.forward_backward`; all other arguments
            are those of `transformers.Trainer`.

    Raises:
        ConfigError, UnsupportedModelError: a setting or a model for which chunks are not exact.
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
        refuse_settings(self)
        self.chunk_options = chunk_options or ChunkOptions()
        require_type(self.chunk_options, ChunkOptions)
        refuse_loss(self)
        divides = self.is_fsdp_enabled
        if divides:
            self.model.to(self.args.device)
            make_equal(self.model)
        with warnings.catch_warnings():
            # this trainer sums the gradients of replicas
            warnings.filterwarnings("ignore", ".*nobody adds them up")
            self.engine = Engine(
                self.model, max_seq_len=max_seq_len, storage=storage,
                compute_dtype=torch.bfloat16 if self.args.bf16 else None,
                process_group=dist.group.WORLD if divides else None,
            )  # fmt: skip
        if divides:
            require_parts(self.model)
            self.accelerator.state.fsdp_plugin.auto_wrap_policy = None  # nothing is left to wrap
        if self.engine.adds_router_loss:
            raise unsupported(
                self.model, "adds a router loss (output_router_logits=True)",
                "the cross-entropy alone: this trainer's steps are several batches",
                "set router_aux_loss_coef=0.0, or use furlong.chunked and an ordinary trainer",
            )  # fmt: skip
        refuse_attention_dropout(self.engine.model.base)  # from_pretrained returns it in eval mode
        self._own_loss = 0.0  # this process's loss since the last update
        self._asked: object = None  # state of the model that `require_model_loss` has tested
        if divides:
            self._ask_together("the making of a trainer")
        else:
            self._refuse(self.model)
            self._ask()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """Return the batches of an update, and the number of predicted labels in the batches of all
        processes."""
        self._ask_together("an update of a trainer")
        batches = [self._own_samples(batch) for batch in islice(epoch_iterator, num_batches)]
        return batches, torch.tensor(self._num_labels(batches), device=device)

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Compute loss and gradients of a batch. With replicas, the last batch of an update returns
        the loss of all batches of the update on all processes, and earlier batches return 0."""
        self._refuse(model)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # schedule-free optimizers
        divisor = num_items_in_batch
        divisor = int(self._num_labels([inputs]) if divisor is None else divisor)
        loss = self._summed(inputs, divisor)[0] / divisor if divisor else 0.0
        is_last = self.accelerator.sync_gradients
        if is_last and self.args.world_size > 1:
            self._require_alike()
        if self._has_replicas:
            self._own_loss += loss
            loss = 0.0
            if is_last:
                add_up_gradients(self.model.parameters(), self.args.device)
                (loss,) = added_up(self.args.device, self._own_loss)
                self._own_loss = 0.0
        return self._as_tensor(loss)

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Return (loss, None, None): the mean loss over the batches of all processes or, if they
        have no labels, None, which evaluation skips.

        For `compute_metrics`, return the loss, logits and labels of the model's own forward.
        """
        if not prediction_loss_only:
            found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            reshard(self.engine.model.base)  # gathered weights would be stale after an update
            return found  # type: ignore[no-any-return]
        self._refuse(self.model)
        if inputs.get("labels") is None:  # counts as a batch without labels
            inputs = {**inputs, "labels": torch.full_like(inputs["input_ids"], IGNORE_INDEX)}
        loss_sum, count = self._summed(self._own_samples(inputs), 1, backward=False)
        if self._has_replicas:
            loss_sum, count = added_up(self.args.device, loss_sum, count)
        return (self._as_tensor(loss_sum / count) if count else None), None, None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._ask_together("an evaluation of a trainer")
        return super().evaluation_loop(*args, **kwargs)

    def _refuse(self, model: nn.Module) -> None:
        """Raise ConfigError for a setting, a loss or a model that was changed since the start."""
        refuse_settings(self)
        refuse_loss(self)
        refuse_model(self, model.module if isinstance(model, Replica) else model)

    def _ask_together(self, place: str) -> None:
        """Raise ConfigError for settings, a loss or a model that chunks cannot honour. If the model
        has changed on any process since the last test, test its loss again on all.

        A collective. `place` is the call, in words; all processes must make the same one."""

        def has_changed() -> tuple[None, Facts, bool]:
            self._refuse(self.model)
            return None, {}, self._asked_of() != self._asked

        if any(agree(self._ranks, has_changed, place)[1]):
            run_on_all(self._ranks, self._ask, place)

    @cached_property
    def _ranks(self) -> Ranks | None:
        """The ranks of a training on several processes, else None. The first access is a
        collective."""
        group = dist.group.WORLD if self.args.world_size > 1 else None
        return self.engine.ranks or ranks_given(None, group, self.args.device.type)

    def _require_alike(self) -> None:
        """Collective: raise ConfigError on all processes unless they train the same weights with
        equal arguments."""
        facts: dict[str, object] = {
            name: f"{parameter.dtype} {tuple(parameter.shape)} "
            + ("trained" if parameter.requires_grad else "frozen")
            for name, parameter in self.model.named_parameters()
        }
        facts |= {name: str(getattr(self.args, name, None)) for name in _DECIDING}
        if hasattr(self.train_dataset, "__len__"):
            facts["rows of train_dataset"] = len(self.train_dataset)
        agree(self._ranks, lambda: (None, facts, None), "a comparison of trainers")

    def _ask(self) -> None:
        require_model_loss(self)
        self._asked = self._asked_of()

    def _asked_of(self) -> object:
        """Return an object that changes when the result of a model's forward may change by other
        causes than new weights: modules, hooks, forwards, config, buffers, and numbers that are set
        on the model."""
        own = vars(self.engine.model.base)
        numbers = [(n, x) for n, x in own.items() if isinstance(x, int | float | str)]
        buffers = [(n, id(x), x._version) for n, x in own["_buffers"].items() if x is not None]
        structure, *_ = scan(self.model, self.model).fingerprint
        return structure, buffers, [x for x in numbers if x[0] != "training"]

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        """Wrap with `Replica` in place of `DistributedDataParallel`, which acts in a forward that
        chunks never call."""
        if not training or not self._has_replicas:
            return super()._wrap_model(model, training, dataloader)  # type: ignore[no-any-return]
        if not isinstance(model, Replica):
            self._require_alike()
            make_equal(model)
            model = Replica(model)
        return model

    @property
    def _has_replicas(self) -> bool:
        """Whether there are several processes, each with the whole model."""
        return self.args.world_size > 1 and not self.is_fsdp_enabled

    def _num_labels(self, batches: Iterable[dict[str, Any]]) -> int:
        """Return the number of labels in all processes' batches."""
        own = sum(count_valid_tokens(self._read(batch)) for batch in batches)
        return int(added_up(self.args.device, own)[0])

    def _read(self, batch: dict[str, Any]) -> list[ShiftedSequence]:
        return unpad(
            batch, model_type=self.engine.model.config.model_type, has_cache=self.args.use_cache
        )

    def _own_samples(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch that a data loader has just yielded, without labels of samples that the
        loader repeats at its end to give every process equally many."""
        state = self.accelerator.gradient_state
        if self.args.world_size == 1 or not state.end_of_dataloader:
            return batch
        num_samples, num_left = last_round(state.active_dataloader, self.args.world_size)
        if not num_left:
            return batch
        return without_repeats(batch, num_samples, num_left - num_samples * self.args.process_index)

    def _summed(
        self, batch: dict[str, Any], divisor: int, *, backward: bool = True
    ) -> tuple[float, float]:
        """Compute the loss of a batch and, if `backward`, its gradients, divided by `divisor`.
        Return (summed loss, number of labels); with FSDP2 both are of the batches of all processes
        together."""
        every = self._read(self._prepare_inputs(batch))
        # sequences without labels add neither loss nor gradient
        sequences = [sequence for sequence in every if count_valid_tokens([sequence])]
        if self.is_fsdp_enabled:
            reshard(self.engine.model.base)
            sequences = sequences or every[:1]  # other processes wait for this one's collectives
        if not sequences:
            return 0.0, 0
        result = self.engine.forward_backward(
            sequences, self.chunk_options, divisor, backward, token_loss=token_loss(self)
        )
        return result.loss_sum, result.num_valid_tokens

    def _as_tensor(self, loss: float) -> Tensor:
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        return torch.tensor(loss, dtype=dtype, device=self.args.device)
