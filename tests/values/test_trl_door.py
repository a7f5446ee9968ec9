"""Stock trainers of TRL behind the door: the weights of their own run, to rounding.

TRL's head computes in float32 whatever the model is; both sides use it, on equal hidden states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.tiny_families import build
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    SFTConfig,
    SFTTrainer,
)

import furlong

pytestmark = pytest.mark.slow
BOUND = 1e-12
OPTIONS = furlong.ChunkOptions(size=16, keep="kv")
LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and an end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(["<pad>", "<end>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>", padding_side="left"
    )


def common(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "max_steps": 5, "per_device_train_batch_size": 2,
        "learning_rate": 1e-2, "optim": "sgd", "use_cpu": True, "bf16": False, "report_to": [],
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "seed": 3, **changes,
    }  # fmt: skip


def words(seed: int, num_words: int) -> str:
    return " ".join(f"w{(seed * 7 + i * i) % 23}" for i in range(num_words))


def pairs() -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": words(i, 8 + i % 5), "chosen": words(i + 1, 3 + i % 7),
             "rejected": words(i + 2, 2 + i % 9)}
            for i in range(16)
        ]
    )  # fmt: skip


def trained(trainer: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    start = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    weights = {n: p.detach() for n, p in trainer.model.named_parameters()}
    assert any(float((x - start[n]).abs().max()) > 1e-6 for n, x in weights.items())
    return weights, logs


def compare(make: Any) -> None:
    """The trainer that `make(of)` builds, with models as they are and behind the door."""
    torch.manual_seed(11)
    own, own_logs = trained(make(lambda model: model))
    torch.manual_seed(11)
    found, logs = trained(make(lambda model: furlong.chunked(model, OPTIONS)))
    for name, x in own.items():
        assert float((found[name] - x).abs().max()) <= BOUND * max(1, float(x.abs().max())), name
    assert len(logs) == len(own_logs) > 0
    for mine, theirs in zip(logs, own_logs, strict=True):
        for key in (key for key in theirs if "time" not in key and "per_second" not in key):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-9, abs=1e-12), key


DPO: list[dict[str, Any]] = [
    {}, {"loss_type": "ipo"}, {"loss_type": "hinge"}, {"loss_type": "sigmoid_norm"},
    {"use_weighting": True}, {"ld_alpha": 0.5}, {"gradient_accumulation_steps": 2},
    {"precompute_ref_log_probs": True}, {"lora": True}, {"gradient_checkpointing": True},
]  # fmt: skip


@pytest.mark.parametrize("changes", DPO, ids=str)
def test_dpo(tmp_path: Path, tokenizer: Any, changes: dict[str, Any]) -> None:
    changes = {"gradient_checkpointing": False, **changes}
    lora = changes.pop("lora", False)

    def make(of: Any) -> Any:
        return DPOTrainer(
            model=of(build("llama", vocab_size=260)),
            ref_model=None if lora else of(build("llama", vocab_size=260, seed=1)),
            args=DPOConfig(**common(tmp_path, **changes)),
            train_dataset=pairs(), processing_class=tokenizer,
            peft_config=LORA if lora else None,
        )  # fmt: skip

    compare(make)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto(tmp_path: Path, tokenizer: Any, loss_type: str) -> None:
    data = Dataset.from_list(
        [{"prompt": words(i, 8), "completion": words(i + 1, 3 + i % 5), "label": bool(i % 2)}
         for i in range(16)]
    )  # fmt: skip

    def make(of: Any) -> Any:
        return KTOTrainer(
            model=of(build("llama", vocab_size=260)),
            ref_model=of(build("llama", vocab_size=260, seed=1)),
            args=KTOConfig(
                **common(tmp_path, loss_type=loss_type, gradient_checkpointing=False)
            ),
            train_dataset=data, processing_class=tokenizer,
        )  # fmt: skip

    compare(make)


@pytest.mark.parametrize("changes", [{}, {"packing": True, "max_length": 64}], ids=str)
def test_sft(tmp_path: Path, tokenizer: Any, changes: dict[str, Any]) -> None:
    data = Dataset.from_list([{"text": words(i, 5 + 3 * i % 17)} for i in range(40)])

    def make(of: Any) -> Any:
        return SFTTrainer(
            model=of(build("llama", vocab_size=260)),
            args=SFTConfig(**common(tmp_path, gradient_checkpointing=False, **changes)),
            train_dataset=data, processing_class=tokenizer,
        )  # fmt: skip

    compare(make)
