"""TRL's trainers on two processes of torchrun behind the door, beside themselves alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers.launched import Launched
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl_cases import LORA, adapted, common, compare, pairs, small, tokenizer

# the last batch of a process is smaller, and 7 rows are unlike for two
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
ACCUMULATED = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}


def trainer(kind: str, folder: Path, of: Any, lora: str, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "train_dataset": pairs(21), "eval_dataset": pairs(7), "processing_class": tokenizer(),
        "peft_config": LORA if lora == "new" else None,
    }  # fmt: skip
    model = of(adapted(small()) if lora == "trained" else small())
    arguments = common(folder, **EVALUATED, **changes)
    if kind == "dpo":
        reference = None if lora == "new" else of(small(seed=1))
        return DPOTrainer(model, reference, args=DPOConfig(**arguments), **given)
    for name in ("train_dataset", "eval_dataset"):
        named = given[name].rename_column("chosen", "completion")
        given[name] = named.remove_columns("rejected")
    return SFTTrainer(model, args=SFTConfig(**arguments), **given)


def on_process(kind: str, folder: Path, divides: bool) -> None:
    """Both runs on this process, plain and with adapters."""
    for lora in ("", "trained" if divides else "new"):
        own = folder / f"{lora} {os.environ['RANK']}"
        changes = ACCUMULATED if lora else {}
        compare(lambda of: trainer(kind, own, of, lora, **changes), divides=divides)  # noqa: B023
    assert dist.get_world_size() == 2
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("divides", [False, True], ids=["ddp", "divided"])
@pytest.mark.parametrize("kind", ["dpo", "sft"])
def test_two_processes_train_as_trl_does_alone(tmp_path: Path, kind: str, divides: bool) -> None:
    launched = Launched(tmp_path / "said", on_process, kind, tmp_path, divides)
    for ended in launched.ended(240):
        assert ended.code == 0, ended.said
