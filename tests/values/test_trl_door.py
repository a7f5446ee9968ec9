"""TRL's preference trainers behind the door, as they are: the weights of their own run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl_cases import (
    LAYERS,
    LORA,
    adapted,
    common,
    compare,
    pairs,
    small,
    small_rewarding,
    squared_errors,
    tokenizer,
    words,
)

slow, nightly = pytest.mark.slow, pytest.mark.nightly
LOSSES: list[dict[str, Any]] = [
    {"loss_type": ["aot_unpaired"]},
    {"loss_type": ["sigmoid", "sft", "bco_pair"], "loss_weights": [1.0, 0.2, 0.5]},
]  # fmt: skip
ALIKE: list[dict[str, Any]] = [
    {"loss_type": ["robust"], "label_smoothing": 0.1},
    *({"loss_type": [name]} for name in (
        "hinge", "nca_pair", "bco_pair", "sppo_hard", "aot", "apo_zero", "apo_down", "discopop",
        "sft", "sigmoid_norm",
    )),
    {"loss_type": ["exo_pair"], "label_smoothing": 0.1}, {"ld_alpha": 0.5}, {"lora": "trained"},
    {"gradient_checkpointing": True}, {"precompute_ref_log_probs": True},
]  # fmt: skip
"""Alone what others have together, and losses that ask of a model what one of `LOSSES` does."""
OTHERS: list[dict[str, Any]] = [
    {"use_weighting": True}, {"f_divergence_type": "js_divergence"},
    {"max_length": 40}, {"padding_free": False, "pad_to_multiple_of": 8},
    {"sync_ref_model": True, "ref_model_sync_steps": 2}, {"gradient_accumulation_steps": 2},
    {"precompute_ref_log_probs": True, "lora": "new"}, {"padding_free": True},
    {"lora": "trained", "loss_type": ["sigmoid_norm"]},
    {"lora": "new", "gradient_checkpointing": True, "evaluates": True},
]  # fmt: skip
QUICK: list[dict[str, Any]] = [{}, {"loss_type": ["ipo"], "lora": "new"}]


@pytest.mark.parametrize(
    "changes",
    [
        *QUICK,
        *(pytest.param(x, marks=slow) for x in LOSSES + OTHERS),
        *(pytest.param(x, marks=nightly) for x in ALIKE),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.few(1)
def test_dpo(tmp_path: Path, changes: dict[str, Any]) -> None:
    changes = dict(changes)
    lora, evaluates = changes.pop("lora", None), changes.pop("evaluates", False)
    if evaluates:
        changes |= {"eval_strategy": "steps", "eval_steps": 2}

    def make(of: Any) -> Any:
        model = of(small())
        return DPOTrainer(
            model=adapted(model) if lora == "trained" else model,
            ref_model=None if lora else of(small(seed=1)),
            args=DPOConfig(**common(tmp_path, **changes)),
            train_dataset=pairs(), eval_dataset=pairs(4) if evaluates else None,
            processing_class=tokenizer(), peft_config=LORA if lora == "new" else None,
        )  # fmt: skip

    compare(make)


@slow
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"loss_type": "apo_zero_unpaired"}, {"lora": True}, {"precompute_ref_log_probs": True},
    ],
    ids=str,
)  # fmt: skip
def test_kto(tmp_path: Path, changes: dict[str, Any]) -> None:
    changes = dict(changes)
    lora = changes.pop("lora", False)
    data = Dataset.from_list(
        [{"prompt": words(i, 8), "completion": words(i + 1, 3 + i % 5), "label": bool(i % 2)}
         for i in range(16)]
    )  # fmt: skip

    def make(of: Any) -> Any:
        return KTOTrainer(
            model=of(small()), ref_model=None if lora else of(small(seed=1)),
            args=KTOConfig(**common(tmp_path, **changes)),
            train_dataset=data, processing_class=tokenizer(),
            peft_config=LORA if lora else None,
        )  # fmt: skip

    compare(make)


@slow
@pytest.mark.parametrize("lora", [False, True])
def test_reward(tmp_path: Path, lora: bool) -> None:
    data = Dataset.from_list(
        [{"chosen": words(i, 6 + i % 7), "rejected": words(i + 2, 5 + i % 9)} for i in range(16)]
    )

    scoring = replace(LAYERS, task_type="SEQ_CLS", modules_to_save=["score"])

    def make(of: Any) -> Any:
        return RewardTrainer(
            model=of(small_rewarding()), args=RewardConfig(**common(tmp_path)),
            train_dataset=data, processing_class=tokenizer(),
            peft_config=scoring if lora else None,
        )  # fmt: skip

    compare(make)


@pytest.mark.parametrize(
    ("lora", "num_seeds"),
    [pytest.param(False, 6, marks=nightly), pytest.param(True, 3, marks=slow)],
)
def test_the_error_of_bfloat16_is_that_of_the_trainer_itself(
    tmp_path: Path, lora: bool, num_seeds: int
) -> None:
    """Over several models: rounding moves the ratio of a single one by 15 % either way."""
    errors = []
    for seed in range(num_seeds):

        def make(of: Any, bf16: bool, seed: int = seed) -> Any:
            return DPOTrainer(
                model=of(small(seed)), ref_model=None if lora else of(small(seed + 50)),
                args=DPOConfig(**common(tmp_path, bf16=bf16)),
                train_dataset=pairs(), processing_class=tokenizer(),
                peft_config=LAYERS if lora else None,
            )  # fmt: skip

        errors.append(squared_errors(make))
    of_door, of_trainer = (sum(own) for own in zip(*errors, strict=True))
    assert 0 < of_door <= 1.1**2 * of_trainer
