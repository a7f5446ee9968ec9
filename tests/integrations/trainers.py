"""Runs of Hugging Face trainers, recorded, and the loss that both sides are held to.

transformers and TRL round logits to float32 before their loss. The plain trainers get their own
door for a loss, `compute_loss_func`, with the same cross-entropy in the logits' dtype.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy


def wide_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """Mean cross-entropy of labels (B, T), in the dtype of the logits (B, T, V)."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    targets = labels[:, 1:].flatten()
    total = cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def recording(trainer_class: type) -> type:
    """The trainer, with the loss of every `training_step` in `losses`."""

    class Recording(trainer_class):  # type: ignore[misc, valid-type]
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            self.__dict__.setdefault("losses", []).append(loss.item())
            return loss

    return Recording


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of TrainingArguments: 20 steps in which clipping, decay and schedule matter."""
    return {
        "output_dir": str(folder), "max_steps": 20, "per_device_train_batch_size": 3,
        "learning_rate": 2e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, "warmup_steps": 4,
        "lr_scheduler_type": "cosine", "use_cpu": True, "report_to": [], "save_strategy": "no",
        "logging_steps": 2, "disable_tqdm": True, "seed": 3, "bf16": False,
        **changes,
    }  # fmt: skip


def records(num_sequences: int = 60) -> list[dict[str, list[int]]]:
    """Sequences of 2 to 40 tokens; of every third, a prompt has no label."""
    generator = torch.Generator().manual_seed(0)
    lens = torch.randint(2, 41, (num_sequences,), generator=generator).tolist()
    found = []
    for index, num_tokens in enumerate(lens):
        ids = torch.randint(3, 96, (num_tokens,), generator=generator).tolist()
        prompt = 1 + num_tokens // 3 if index % 3 == 0 else 1
        found.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return found


def padded(side: str) -> Any:
    """A collator that pads batches on one side; "left, unsaid": without positions."""

    def collate(records: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        length = max(len(record["input_ids"]) for record in records)

        def pad(name: str, value: int) -> torch.Tensor:
            rows = []
            for record in records:
                values = record.get(name, [1] * len(record["input_ids"]))
                gap = [value] * (length - len(values))
                rows.append(gap + values if side != "right" else values + gap)
            return torch.tensor(rows)

        batch = {name: pad(name, -100 if name == "labels" else 0) for name in records[0]}
        batch["attention_mask"] = pad("attention_mask", 0)
        if side == "left":
            # Else transformers counts from the padding on: the same angles but for rounding, as it
            # computes cos and sin in float32.
            batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return batch

    return collate


def with_adapters(model: Any) -> Any:
    """LoRA on every linear layer, in the model's dtype."""
    torch.manual_seed(1)
    return get_peft_model(
        model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    ).to(model.dtype)


def falls(trainer: Any) -> bool:
    """Whether the logged loss fell: the weights have gone somewhere."""
    losses = [float(log["loss"]) for log in trainer.state.log_history if "loss" in log]
    return losses[0] > losses[-1] > 0


def largest_difference(one: Any, other: Any) -> float:
    """Of two models' weights, relative to the largest weight of each tensor."""
    theirs = dict(other.named_parameters())
    return max(
        float((p.detach() - theirs[name].detach()).abs().max() / theirs[name].detach().abs().max())
        for name, p in one.named_parameters()
    )
