"""Losses of a trainer that are not the mean cross-entropy: as plain trainers compute them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.byte_tokenizer import byte_tokenizer
from helpers.tiny_families import build
from process_cases import SQUARED
from sft_cases import ChunkedSFTTrainer, prompts_and_completions
from torch import Tensor
from trainers import (
    largest_difference,
    padded,
    recording,
    records,
    settings,
    wide_loss,
    with_adapters,
)
from transformers.trainer_pt_utils import LabelSmoother
from trl import SFTConfig, SFTTrainer

import furlong
from furlong.errors import ConfigError
from furlong.integrations import TokenLoss, Trainer

BOUND = 1e-12
OPTIONS = furlong.ChunkOptions(size=16, keep="kv")
SGD = {"optim": "sgd", "learning_rate": 0.5, "max_steps": 2, "gradient_accumulation_steps": 2}


class WideSmoother(LabelSmoother):  # type: ignore[misc]
    """The smoother of transformers, whose own sum over the vocabulary is float32."""

    def __call__(
        self, outputs: Any, labels: Tensor, shift_labels: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        log_probs = outputs.logits[:, :-1].log_softmax(-1)
        targets = labels[:, 1:]
        own = log_probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        each = -(1 - self.epsilon) * own - self.epsilon * log_probs.mean(-1)
        mask = targets != self.ignore_index
        return each[mask].sum() / (mask.sum() if num_items_in_batch is None else num_items_in_batch)


def train(trainer_class: type, folder: Path, *, lora: bool = False, **changes: Any) -> Any:
    """A trainer after its run, and the loss that it evaluates."""
    function = changes.pop("compute_loss_func", None)
    model = build("qwen2")
    own = {"chunk_options": OPTIONS} if issubclass(trainer_class, Trainer) else {}
    trainer = recording(trainer_class)(
        model=with_adapters(model) if lora else model,
        args=transformers.TrainingArguments(**settings(folder, **SGD, **changes)),
        train_dataset=records(), eval_dataset=records(5), data_collator=padded("right"),
        compute_loss_func=function, **own,
    )  # fmt: skip
    if trainer.label_smoother is not None and not own:
        trainer.label_smoother = WideSmoother(trainer.label_smoother.epsilon)
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = (float((p - start[n]).abs().max()) for n, p in trainer.model.named_parameters())
    assert max(moved) > 1e-4
    trainer.losses.append(trainer.evaluate()["eval_loss"])
    return trainer


CASES: dict[str, dict[str, Any]] = {
    "smoothing": {"label_smoothing_factor": 0.1},
    "a sum over tokens": {"compute_loss_func": SQUARED},
    # a function goes before smoothing
    "both": {"compute_loss_func": SQUARED, "label_smoothing_factor": 0.1},
}


@pytest.mark.parametrize(
    ("case", "lora"),
    [
        (case, lora)
        for case in CASES for lora in (False, True)
        if not lora or case == "smoothing"
    ],
)  # fmt: skip
@pytest.mark.few(2)
def test_weights_and_losses_equal_the_plain_trainers(tmp_path: Path, case: str, lora: bool) -> None:
    classes = Trainer, transformers.Trainer
    mine, plain = (train(base, tmp_path, lora=lora, **CASES[case]) for base in classes)
    assert len(mine.losses) == 2 * SGD["max_steps"] + 1
    assert mine.losses == pytest.approx(plain.losses, rel=BOUND)
    assert largest_difference(mine.model, plain.model) <= BOUND


def rows_of(module: Any) -> list[int]:
    """Rows of hidden states that a module is given, from now on."""
    rows: list[int] = []
    module.register_forward_pre_hook(lambda _, given: rows.append(given[0].numel() // 32))
    return rows


def test_sums_over_tokens_never_hold_the_logits_of_a_batch(tmp_path: Path) -> None:
    trainer = Trainer(
        model=build("qwen2"), compute_loss_func=SQUARED, chunk_options=OPTIONS,
        args=transformers.TrainingArguments(**settings(tmp_path, max_steps=1)),
        train_dataset=[{"input_ids": [5] * 60, "labels": [5] * 60}] * 3,
        data_collator=padded("right"),
    )  # fmt: skip
    model = trainer.model
    of_layers, of_head = (rows_of(x) for x in (model.model.layers[1], model.lm_head))
    trainer.train()
    assert len(of_layers) > 3 * 3 and max(of_layers) <= OPTIONS.size
    assert max(of_head) <= OPTIONS.size


def test_the_own_loss_type_of_sft(tmp_path: Path) -> None:
    def dft(logits: Tensor, labels: Tensor, extras: Any) -> Tensor:
        own = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
        return -own.detach().exp() * own

    def run(trainer_class: type, **own: Any) -> Any:
        loss_type = "nll" if "compute_loss_func" in own else "dft"
        trainer = recording(trainer_class)(
            model=build("llama", vocab_size=260),
            args=SFTConfig(**settings(tmp_path, max_length=64, loss_type=loss_type, **SGD)),
            train_dataset=prompts_and_completions(), processing_class=byte_tokenizer(), **own,
        )  # fmt: skip
        trainer.train()
        return trainer

    mine = run(ChunkedSFTTrainer, chunk_options=OPTIONS)
    with pytest.warns(FutureWarning, match="compute_loss_func"):
        wide = run(SFTTrainer, compute_loss_func=TokenLoss(dft))
    assert mine.losses == pytest.approx(wide.losses, rel=BOUND)
    assert largest_difference(mine.model, wide.model) <= BOUND
    narrow = run(SFTTrainer)  # TRL's head is float32
    assert mine.losses == pytest.approx(narrow.losses, rel=1e-5)


def test_losses_of_outputs_are_refused_also_when_they_are_set_later(
    tmp_path: Path,
) -> None:
    class OwnLoss(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return model(**inputs).logits.sum()

    given: dict[str, Any] = {
        "model": build("llama"), "train_dataset": records(), "data_collator": padded("right"),
        "args": transformers.TrainingArguments(**settings(tmp_path)),
    }  # fmt: skip
    with pytest.raises(ConfigError, match="compute_loss of the trainer's own"):
        OwnLoss(**given)
    with pytest.raises(ConfigError, match=r"furlong\.chunked\(model\)"):
        Trainer(**given, compute_loss_func=wide_loss)
    trainer = Trainer(**given)
    trainer.compute_loss_func = wide_loss
    with pytest.raises(ConfigError, match="compute_loss_func"):
        trainer.train()
    with pytest.raises(ConfigError, match="TokenLoss"):
        TokenLoss(furlong.values.log_prob)  # type: ignore[arg-type]
