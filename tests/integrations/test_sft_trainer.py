"""TRL's `SFTTrainer` through `furlong.integrations.Trainer`: its data, packing and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.byte_tokenizer import byte_tokenizer
from helpers.tiny_families import build
from sft_cases import ChunkedSFTTrainer, prompts_and_completions
from trainers import falls, largest_difference, recording, settings, wide_loss, with_adapters
from trl import SFTConfig, SFTTrainer

import furlong
from furlong.errors import UnsupportedModelError
from furlong.integrations import Trainer

OPTIONS = furlong.ChunkOptions(size=16)
BOUND = 1e-9


def train(trainer_class: type, folder: Path, *, lora: bool = False, **arguments: Any) -> Any:
    mine = issubclass(trainer_class, Trainer)
    model = build("llama", vocab_size=260)
    trainer = recording(trainer_class)(
        model=with_adapters(model) if lora else model,
        args=SFTConfig(**settings(folder, max_length=64, **arguments)),
        train_dataset=prompts_and_completions(),
        processing_class=byte_tokenizer(),
        **({"chunk_options": OPTIONS} if mine else {"compute_loss_func": wide_loss}),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("accumulation", "lora", "packing"),
    [
        (1, False, True),
        pytest.param(4, True, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:.compute_loss_func. is deprecated")
def test_losses_and_weights_equal_sft_trainers(
    tmp_path: Path, accumulation: int, lora: bool, packing: bool
) -> None:
    given: dict[str, Any] = {
        "gradient_accumulation_steps": accumulation, "lora": lora, "packing": packing,
        "num_train_epochs": 100, "max_steps": 8,
    }  # fmt: skip
    mine = train(ChunkedSFTTrainer, tmp_path, **given)
    plain = train(SFTTrainer, tmp_path, **given)
    assert len(mine.losses) == len(plain.losses) >= 8
    assert mine.losses == pytest.approx(plain.losses, rel=BOUND)
    assert falls(plain)
    assert largest_difference(mine.model, plain.model) < BOUND


def test_what_sft_trainer_adds_to_the_loss_is_refused_by_name(tmp_path: Path) -> None:
    def make(family: str, **arguments: Any) -> None:
        ChunkedSFTTrainer(
            model=build(family, vocab_size=260),
            args=SFTConfig(**settings(tmp_path, **arguments)),
            train_dataset=prompts_and_completions(),
            processing_class=byte_tokenizer(),
        )

    with pytest.raises(UnsupportedModelError, match="router loss"):
        make("mixtral", router_aux_loss_coef=0.01)
    make("mixtral", router_aux_loss_coef=0.0)
