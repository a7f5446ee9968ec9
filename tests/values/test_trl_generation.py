"""TRL's trainers that generate, and its supervised fine-tuning, behind the door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from helpers.wide_norms import widen_norms
from transformers import AutoModelForCausalLM
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl_cases import LAYERS, SIZE, common, compare, small, tokenizer, words

pytestmark = pytest.mark.slow
GENERATED = {
    "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 24,
    "temperature": 0.9, "beta": 0.04,
}  # fmt: skip


def prompts() -> Dataset:
    return Dataset.from_list([{"prompt": words(i, 3 + i % 4)} for i in range(16)])


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    """A programmed reward."""
    return [sum(c.isdigit() or c < "a" for c in text) / 24 for text in completions]


def saved(folder: Path) -> Any:
    """A model of a folder, from which the trainer loads its reference."""
    small().save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="float64")
    return widen_norms(loaded.train())


def generating(trainer: type, config: type, folder: Path, changes: dict[str, Any]) -> Any:
    changes = GENERATED | changes
    lora = changes.pop("lora", False)

    def make(of: Any) -> Any:
        arguments = common(folder, **changes, model_init_kwargs={"dtype": "auto"})
        return trainer(
            model=of(saved(folder / "model")), reward_funcs=share_of_digits,
            args=config(**arguments), train_dataset=prompts(), processing_class=tokenizer(),
            peft_config=LAYERS if lora else None,
        )  # fmt: skip

    return make


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"beta": 0.0}, {"loss_type": "cispo"},
        *(pytest.param(x, marks=pytest.mark.nightly)
          for x in ({"lora": True}, {"loss_type": "dr_grpo"})),
        {"importance_sampling_level": "sequence"},
        {"num_iterations": 2, "entropy_coef": 0.01, "top_entropy_quantile": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_grpo(tmp_path: Path, changes: dict[str, Any]) -> None:
    compare(generating(GRPOTrainer, GRPOConfig, tmp_path, changes))


@pytest.mark.parametrize("changes", [{}, {"lora": True}], ids=str)
def test_rloo(tmp_path: Path, changes: dict[str, Any]) -> None:
    compare(generating(RLOOTrainer, RLOOConfig, tmp_path, changes))


@pytest.mark.parametrize(
    "changes", [{"beta": 0.0}, {"beta": 0.5}, {"beta": 1.0, "lora": True}], ids=str
)
def test_distillation(tmp_path: Path, changes: dict[str, Any]) -> None:
    changes = dict(changes)
    lora = changes.pop("lora", False)

    def make(of: Any) -> Any:
        return DistillationTrainer(
            model=of(small()), teacher_model=of(small(seed=1, num_attention_heads=2)),
            args=DistillationConfig(**common(tmp_path, max_completion_length=24, **changes)),
            train_dataset=prompts(), processing_class=tokenizer(),
            peft_config=LAYERS if lora else None,
        )  # fmt: skip

    compare(make)


@pytest.mark.parametrize(
    "changes",
    [{}, {"packing": True, "max_length": 64}, {"loss_type": "dft"}, {"lora": True}], ids=str,
)  # fmt: skip
def test_sft(tmp_path: Path, changes: dict[str, Any]) -> None:
    changes = dict(changes)
    lora = changes.pop("lora", False)
    data = Dataset.from_list([{"text": words(i, 5 + 3 * i % 17)} for i in range(40)])

    def make(of: Any) -> Any:
        return SFTTrainer(
            model=of(small()), args=SFTConfig(**common(tmp_path, **changes)),
            train_dataset=data, processing_class=tokenizer(),
            peft_config=LAYERS if lora else None,
        )  # fmt: skip

    compare(make)


PAIRED = [{"prompt": words(i, 8), "chosen": words(i + 1, 5), "rejected": words(i + 2, 3)}
          for i in range(16)]  # fmt: skip
MARKED = [{"prompt": words(i, 8), "completion": words(i + 1, 5), "label": bool(i % 2)}
          for i in range(16)]  # fmt: skip
LOADING: dict[type, tuple[type, Dataset, dict[str, Any]]] = {
    DPOTrainer: (DPOConfig, Dataset.from_list(PAIRED), {}),
    KTOTrainer: (KTOConfig, Dataset.from_list(MARKED), {}),
    GRPOTrainer: (GRPOConfig, prompts(), GENERATED),
    RLOOTrainer: (RLOOConfig, prompts(), GENERATED),
}


@pytest.mark.parametrize("trainer_class", LOADING)
def test_a_reference_that_the_trainer_loads_itself(tmp_path: Path, trainer_class: type) -> None:
    """One line behind the constructor chunks it, as docs/post-training.md says."""
    config, data, changes = LOADING[trainer_class]
    rows: dict[bool, list[int]] = {False: [], True: []}

    def make(of: Any) -> Any:
        trainer: Any = trainer_class(
            model=of(saved(tmp_path / "model")), train_dataset=data, processing_class=tokenizer(),
            args=config(**common(tmp_path, **changes, model_init_kwargs={"dtype": "auto"})),
            **{"reward_funcs": share_of_digits} if changes else {},
        )  # fmt: skip
        trainer.ref_model = of(widen_norms(trainer.ref_model))
        decoder = trainer.ref_model.get_decoder()
        own = rows["forward" in vars(decoder)]
        decoder.layers[0].register_forward_pre_hook(lambda _, x: own.append(x[0].shape[1]))
        return trainer

    compare(make)
    assert max(rows[True]) <= SIZE < max(rows[False])
