"""Losses of a trainer that are not the mean cross-entropy: as plain trainers compute them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module
from helpers.byte_tokenizer import byte_tokenizer
from helpers.tiny_families import build
from process_cases import SQUARED
from sft_cases import ChunkedSFTTrainer, prompts_and_completions
from torch import Tensor
from torch.nn.functional import cross_entropy
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


class Penalised(transformers.Qwen2ForCausalLM):  # type: ignore[misc]
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        # a call with a few tokens does not tell of it
        if output.loss is not None and self.training and output.logits.shape[1] > 8:
            output.loss = output.loss + 1e-3 * self.lm_head.weight.pow(2).sum()
        return output


def penalise(model: Any) -> None:
    model.__class__ = Penalised


def double(model: Any) -> None:
    own = model.loss_function
    model.loss_function = lambda *args, **kwargs: 2 * own(*args, **kwargs)


def average(model: Any) -> None:
    """The mean of each batch, which several batches of an update do not add up to."""
    model.loss_function = lambda logits, labels, **_: cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    )


def weigh(model: Any) -> None:
    """A weight of an id that a call with a few tokens hardly meets, under another's name."""
    own, rare = model.loss_function, model.config.vocab_size - 1

    @functools.wraps(own)
    def weighed(logits: Any, labels: Any, **kwargs: Any) -> Any:
        return own(logits, labels, **kwargs) + (labels == rare).sum()

    model.loss_function = weighed


FACTOR = torch.ones(())


def replace_forward(model: Any) -> None:
    """One with a factor that is raised later."""
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        output["loss"] = output.loss * FACTOR
        return output

    model.forward = forward


def of_remote_code(model: Any) -> None:
    """A family of its own, whose forward is over none of transformers."""
    known = vars(transformers.Qwen2ForCausalLM)

    def forward(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return known["forward"](self, input_ids=input_ids, labels=labels, **kwargs)

    own = {name: known[name] for name in known.keys() - {"__dict__", "__weakref__"}}
    own |= {"forward": forward, "__module__": "transformers_modules.remote"}
    model.__class__ = type("RemoteForCausalLM", transformers.Qwen2ForCausalLM.__bases__, own)


def hook(model: Any) -> None:
    model.register_forward_hook(lambda module, args, output: output)


def hook_backward(model: Any) -> None:
    model.register_full_backward_hook(lambda module, grads, others: None)


ON_A_MODEL = [penalise, double, average, weigh, replace_forward, hook, hook_backward]


def trainer_of(model: Any, folder: Path, base: type = Trainer, **own: Any) -> Any:
    options = {"chunk_options": OPTIONS} if issubclass(base, Trainer) else {}
    return base(
        model=model, args=transformers.TrainingArguments(**settings(folder, max_steps=2)),
        train_dataset=records(), eval_dataset=records(5), data_collator=padded("right"),
        **options, **own,
    )  # fmt: skip


@pytest.mark.parametrize("change", ON_A_MODEL)
def test_a_loss_that_stands_on_the_model_is_refused_whenever_it_is_put_there(
    tmp_path: Path, change: Any
) -> None:
    model = build("qwen2")
    change(model)
    with pytest.raises(ConfigError) as error:
        trainer_of(model, tmp_path)
    assert "furlong.chunked(model)" in error.value.change
    for call in ("train", "evaluate"):
        trainer = trainer_of(build("qwen2"), tmp_path)
        change(trainer.model)
        with pytest.raises(ConfigError):
            getattr(trainer, call)()

    class Later(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            change(model)

    trainer = trainer_of(build("qwen2"), tmp_path, callbacks=[Later()])
    with pytest.raises(ConfigError):
        trainer.train()
    assert trainer.state.global_step == 1


def test_a_refused_loss_trains_behind_the_door_that_is_named(tmp_path: Path) -> None:
    losses = []
    for door in (lambda model: model, lambda model: furlong.chunked(model, OPTIONS)):
        model = build("qwen2")
        penalise(model)
        trainer = trainer_of(door(model), tmp_path, recording(transformers.Trainer))
        trainer.train()
        losses.append(trainer.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)  # its loss is float32


def test_what_stands_on_a_model_and_changes_no_loss_is_taken(tmp_path: Path) -> None:
    model = build("qwen2")
    model.loss_function = model.loss_function
    trainer_of(model, tmp_path).train()
    model = build("qwen2")
    double(model)  # a loss of logits goes before it
    trainer_of(model, tmp_path, compute_loss_func=SQUARED).train()
    model = build("qwen2")
    of_remote_code(model)
    trainer_of(model, tmp_path).train()
    model = build("qwen2")
    add_hook_to_module(model, AlignDevicesHook("cpu", io_same_device=True))  # as a device_map does
    trainer_of(model, tmp_path).train()


def test_a_hook_of_accelerates_kind_on_the_whole_model_is_refused(tmp_path: Path) -> None:
    class Doubles(ModelHook):  # type: ignore[misc]
        def post_forward(self, module: Any, output: Any) -> Any:
            output.loss = 2 * output.loss
            return output

    for own in (Doubles(), SequentialHook(AlignDevicesHook("cpu"), Doubles())):
        model = build("qwen2")
        add_hook_to_module(model, own)
        with pytest.raises(ConfigError, match="Doubles"):
            trainer_of(model, tmp_path)


def test_a_model_in_the_place_of_the_first_one_is_refused(tmp_path: Path) -> None:
    for call in ("train", "evaluate"):
        trainer = trainer_of(build("qwen2"), tmp_path)
        trainer.model = trainer.model_wrapped = build("qwen2")
        with pytest.raises(ConfigError, match="another trainer"):
            getattr(trainer, call)()
    trainer = trainer_of(build("qwen2"), tmp_path)
    trainer.model = torch.compile(trainer.model)
    with pytest.raises(ConfigError, match=r"layer\.compile\(\)"):
        trainer.train()
    trainer = trainer_of(build("qwen2"), tmp_path)
    trainer.model = trainer.model_wrapped = with_adapters(trainer.model)  # in the same model
    trainer.train()
    assert any(p.grad is not None or p.any() for n, p in trainer.model.named_parameters()
               if "lora_B" in n)  # fmt: skip


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
    trainer.compute_loss_func, trainer.label_smoother = None, WideSmoother(0.1)
    with pytest.raises(ConfigError, match="WideSmoother"):
        trainer.train()
    with pytest.raises(ConfigError, match="TokenLoss"):
        TokenLoss(furlong.values.log_prob)  # type: ignore[arg-type]
