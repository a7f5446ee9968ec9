"""Runs of trainers that one process or several take together, and what each of them finds.

As a script it is one process of a launcher: `torchrun process_cases.py FOLDER`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from helpers.byte_tokenizer import byte_tokenizer
from helpers.tiny_families import build
from sft_cases import ChunkedSFTTrainer, prompts_and_completions
from torch.distributed.tensor import DTensor
from trainers import padded, recording, records, settings, wide_loss, with_adapters
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy
from trl import SFTConfig

import furlong
from furlong.errors import FurlongError
from furlong.integrations import TokenLoss, Trainer

OPTIONS = furlong.ChunkOptions(size=16)


class OnGPUs(Trainer):
    """The trainer, told that its processes have GPUs: on CPUs accelerate takes no FSDP plugin."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        if self.args.fsdp_plugin_args is not None:
            state.distributed_type = DistributedType.FSDP
            PartialState().distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True


@dataclass(frozen=True)
class Run:
    """A run of a trainer with 6 sequences per batch, on all processes together."""

    arguments: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    num_records: int = 21
    num_muted: int = 0
    """First records without a label."""
    resumed: str = ""
    """An earlier run and a step of it, as folders, after which this one goes on."""
    other_weights: bool = False
    """Whether each process has made weights of its own."""
    num_other_layers: int = 0
    """Layers that the model of the second process has more."""
    metrics: bool = False
    """Whether an evaluation asks for logits."""
    unlike: str = ""
    """Whether the second process puts a hook on its model when the trainer is made."""
    sft: bool = False
    loss: Any = None
    """A `compute_loss_func` of its own."""

    def trainer(self, folder: Path, plain: type | None = None) -> Any:
        """That of the run, or a `plain` one for it."""
        own = OnGPUs if "fsdp" in self.arguments else ChunkedSFTTrainer if self.sft else Trainer
        trainer_class = plain or own
        number, num_processes = (
            int(os.environ.get(n, d)) for n, d in (("RANK", 0), ("WORLD_SIZE", 1))
        )
        size = 6 // num_processes
        arguments = {
            "per_device_train_batch_size": size, "per_device_eval_batch_size": size, "data_seed": 5,
            **self.arguments,
        }  # fmt: skip
        is_plain = not issubclass(trainer_class, Trainer)
        loss = self.loss or (wide_loss if is_plain else None)
        own = {"compute_loss_func": loss} | ({} if is_plain else {"chunk_options": OPTIONS})
        if self.sft:
            return recording(trainer_class)(
                model=build("llama", vocab_size=260),
                args=SFTConfig(**settings(folder, max_length=64, **arguments)),
                train_dataset=prompts_and_completions().select(range(self.num_records)),
                processing_class=byte_tokenizer(),
                **own,
            )
        model = build("qwen2", num_hidden_layers=3 + number * self.num_other_layers)
        if self.other_weights and number:
            torch.nn.init.normal_(model.lm_head.weight)
        data = records(self.num_records)
        for record in data[: self.num_muted]:
            record["labels"] = [-100] * len(record["labels"])
        return recording(trainer_class)(
            model=with_adapters(model) if self.lora else model,
            args=transformers.TrainingArguments(**settings(folder, **arguments)),
            train_dataset=data,
            eval_dataset=records(7),
            data_collator=padded("right"),
            compute_metrics=num_rows if self.metrics else None,
            **own,
        )


def squared(logits: torch.Tensor, labels: torch.Tensor, extras: Any) -> torch.Tensor:
    own = furlong.values.log_prob()(logits, labels, extras)
    return -own + 1e-2 * own**2


SQUARED = TokenLoss(squared)


def num_rows(prediction: Any) -> dict[str, float]:
    return {"rows": float(len(prediction.predictions))}


@dataclass(frozen=True)
class Found:
    """A run's outcome on one process."""

    losses: list[float]
    logs: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]
    train_loss: float

    @classmethod
    def of(cls, trainer: Any, folder: Path, resumed: str = "") -> Found:
        """The run, whose model is afterwards in the folder."""
        outcome = trainer.train(
            resume_from_checkpoint=str(folder.parent / resumed) if resumed else None
        )
        weights = {n: whole(p).clone() for n, p in trainer.model.named_parameters()}
        if trainer.is_fsdp_enabled:
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        trainer.save_model(str(folder / "exported"))
        return cls(trainer.losses, trainer.state.log_history, weights, outcome.training_loss)


def whole(parameter: torch.nn.Parameter) -> torch.Tensor:
    x = parameter.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x


def take(folder: Path, runs: dict[str, Run]) -> None:
    """All runs, on this process; leaves what it finds in the folder."""
    found = {}
    for name, run in runs.items():
        trainer = run.trainer(folder / name)
        found[name] = Found.of(trainer, folder / name, run.resumed)
    leave(folder, found)


class Freezes(TrainerCallback):  # type: ignore[misc]
    """Each step trains other layers, as LISA does."""

    def on_step_begin(self, *_: Any, model: Any, **__: Any) -> None:
        model.get_decoder().layers[0].requires_grad_(False)


UNLIKE: dict[str, Callable[[Any], Any]] = {
    "hook": lambda trainer: trainer.model.register_forward_hook(lambda *called: None),
    "freeze": lambda trainer: trainer.add_callback(Freezes()),
    "resize": lambda trainer: trainer.model.resize_token_embeddings(112),
    "clip": lambda trainer: setattr(trainer.args, "max_grad_norm", 0.01),
    "evaluate": lambda trainer: setattr(trainer.args, "eval_strategy", IntervalStrategy.STEPS),
}
"""What one process alone does."""


def refused(folder: Path, runs: dict[str, Run]) -> None:
    """The refusals of all runs, as `take` leaves what it finds."""
    found = {}
    for name, run in runs.items():
        try:
            trainer = run.trainer(folder / name)
            if run.unlike and os.environ["RANK"] == "1":
                UNLIKE[run.unlike](trainer)
            trainer.train()
        except FurlongError as error:
            found[name] = str(error)
    leave(folder, found)


def leave(folder: Path, found: dict[str, Any]) -> None:
    torch.save(found, folder / f"{os.environ['RANK']}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    import process_cases  # what it leaves is then read by the tests' names for it

    both = {name: process_cases.Run({"max_steps": 4}, sft=name == "sft") for name in ("run", "sft")}
    process_cases.take(Path(sys.argv[1]), both)
