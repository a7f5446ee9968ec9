"""Losses of a trainer that are not the mean cross-entropy: as plain trainers compute them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.tiny_families import build
from sft_cases import ChunkedSFTTrainer, byte_tokenizer, prompts_and_completions
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
SGD = {"optim": "sgd", "learning_rate": 0.5, "max_steps": 4, "gradient_accumulation_steps": 2}


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


def with_z_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """A loss that couples the tokens of a batch."""
    log_z = outputs.logits[:, :-1][labels[:, 1:] != -100].logsumexp(-1)
    return wide_loss(outputs, labels, num_items_in_batch) + 0.02 * log_z.sum() * log_z.max()


def squared(logits: Tensor, labels: Tensor, extras: Any) -> Tensor:
    own = furlong.values.log_prob()(logits, labels, extras)
    return -own + 1e-2 * own**2


def own_loss(base: type) -> type:
    class OwnLoss(base):  # type: ignore[misc, valid-type]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            outputs = model(**inputs)
            loss = with_z_loss(outputs, inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    return OwnLoss


def train(trainer_class: type, folder: Path, *, lora: bool = False, **changes: Any) -> Any:
    """A trainer after its run, and the loss that it evaluates."""
    function, later = changes.pop("compute_loss_func", None), changes.pop("later", None)
    model = build("qwen2")
    own = {"chunk_options": OPTIONS} if issubclass(trainer_class, Trainer) else {}
    trainer = recording(trainer_class)(
        model=with_adapters(model) if lora else model,
        args=transformers.TrainingArguments(**settings(folder, **SGD, **changes)),
        train_dataset=records(), eval_dataset=records(5), data_collator=padded("right"),
        compute_loss_func=function, **own,
    )  # fmt: skip
    if later is not None:
        trainer.compute_loss_func = later
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
    "a sum over tokens": {"compute_loss_func": TokenLoss(squared)},
    "any function": {"compute_loss_func": with_z_loss},
    "set later": {"later": with_z_loss},
    "a class's own": {"own": True},
    # a function goes before smoothing
    "both": {"compute_loss_func": TokenLoss(squared), "label_smoothing_factor": 0.1},
}


@pytest.mark.parametrize(
    ("case", "lora"),
    [
        (case, lora)
        for case in CASES for lora in (False, True)
        if not lora or case in ("smoothing", "any function")
    ],
)  # fmt: skip
def test_weights_and_losses_equal_the_plain_trainers(tmp_path: Path, case: str, lora: bool) -> None:
    changes = dict(CASES[case])
    classes = [Trainer, transformers.Trainer]
    if changes.pop("own", False):
        classes = [own_loss(base) for base in classes]
    mine, plain = (train(base, tmp_path, lora=lora, **changes) for base in classes)
    assert len(mine.losses) == 2 * SGD["max_steps"] + 1
    assert mine.losses == pytest.approx(plain.losses, rel=BOUND)
    assert largest_difference(mine.model, plain.model) <= BOUND
    assert "forward" not in mine.engine.model.base.get_decoder().__dict__, "the door is still open"


def rows_of(module: Any) -> list[int]:
    """Rows of hidden states that a module is given, from now on."""
    rows: list[int] = []
    module.register_forward_pre_hook(lambda _, given: rows.append(given[0].numel() // 32))
    return rows


@pytest.mark.parametrize(
    ("function", "is_tiled"), [(TokenLoss(squared), True), (with_z_loss, False)]
)
def test_sums_over_tokens_never_hold_the_logits_of_a_batch(
    tmp_path: Path, function: Any, is_tiled: bool
) -> None:
    trainer = Trainer(
        model=build("qwen2"), compute_loss_func=function, chunk_options=OPTIONS,
        args=transformers.TrainingArguments(**settings(tmp_path, max_steps=1)),
        train_dataset=[{"input_ids": [5] * 60, "labels": [5] * 60}] * 3,
        data_collator=padded("right"),
    )  # fmt: skip
    model = trainer.model
    of_layers, of_head = (rows_of(x) for x in (model.model.layers[1], model.lm_head))
    trainer.train()
    assert len(of_layers) > 3 * 3 and max(of_layers) <= OPTIONS.size
    assert (max(of_head) <= OPTIONS.size) == is_tiled


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


def test_any_function_meets_the_autocast_of_the_trainer(tmp_path: Path) -> None:
    """bf16: float32 weights, and the loss of the plain trainer but for rounding."""

    def run(trainer_class: type, **own: Any) -> Any:
        trainer = recording(trainer_class)(
            model=build("qwen2", torch.float32), compute_loss_func=with_z_loss,
            args=transformers.TrainingArguments(**settings(tmp_path, max_steps=2, bf16=True)),
            train_dataset=records(), data_collator=padded("right"), **own,
        )  # fmt: skip
        trainer.train()
        return trainer

    mine, plain = run(Trainer, chunk_options=OPTIONS), run(transformers.Trainer)
    assert {p.dtype for p in mine.model.parameters()} == {torch.float32}
    assert mine.losses == pytest.approx(plain.losses, rel=1e-2)
    assert largest_difference(mine.model, plain.model) <= 1e-2


def test_options_that_two_phases_have_not_are_refused_with_such_a_loss(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(**settings(tmp_path))
    with pytest.raises(ConfigError, match="keep = 'all'"):
        Trainer(
            model=build("llama"), args=arguments, compute_loss_func=with_z_loss,
            chunk_options=furlong.ChunkOptions(keep="all"),
        )  # fmt: skip
    with pytest.raises(ConfigError, match="TokenLoss"):
        TokenLoss(furlong.values.log_prob)  # type: ignore[arg-type]
