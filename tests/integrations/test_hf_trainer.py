"""`furlong.integrations.Trainer` against plain `transformers.Trainer`, step by step in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.byte_tokenizer import byte_tokenizer
from helpers.tiny_families import build
from trainers import (
    falls,
    largest_difference,
    padded,
    recording,
    records,
    settings,
    wide_loss,
    with_adapters,
)

import furlong
from furlong.errors import ConfigError, DataError, UnsupportedModelError, UserError
from furlong.integrations import Trainer, unpad
from furlong.kv.disk import NamelessFile
from furlong.kv.pools import Storage
from furlong.testing import take_grads, worst_relative_error

OPTIONS = furlong.ChunkOptions(size=16)
OPTIONS_KV = furlong.ChunkOptions(size=16, keep="kv")
BOUND = 1e-9


def train(
    trainer_class: type, folder: Path, *, lora: bool = False, side: str = "right",
    family: str = "qwen2", resume: bool = False, **arguments: Any,
) -> Any:  # fmt: skip
    """A trainer after its run, its model's weights and data the same for every class."""
    names = ("callbacks", "eval_dataset", "chunk_options", "storage")
    own = {name: arguments.pop(name) for name in names if name in arguments}
    if issubclass(trainer_class, Trainer):
        own.setdefault("chunk_options", OPTIONS)
    else:
        own["compute_loss_func"] = wide_loss
    model = build(family)
    trainer = recording(trainer_class)(
        model=with_adapters(model) if lora else model,
        args=transformers.TrainingArguments(**settings(folder, **arguments)),
        train_dataset=records(),
        data_collator=padded(side),
        **own,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_equal_runs(mine: Any, plain: Any) -> None:
    assert len(mine.losses) == len(plain.losses)
    assert mine.losses == pytest.approx(plain.losses, rel=BOUND)
    assert falls(plain)
    assert largest_difference(mine.model, plain.model) < BOUND


@pytest.mark.parametrize(
    ("accumulation", "lora", "side", "steps"),
    [
        (4, True, "left", 4),
        (1, False, "right", 10),
        pytest.param(4, False, "left", 20, marks=pytest.mark.slow),
    ],
)
@pytest.mark.few(1)
def test_losses_and_weights_equal_the_plain_trainers(
    tmp_path: Path, accumulation: int, lora: bool, side: str, steps: int
) -> None:
    given: dict[str, Any] = {
        "gradient_accumulation_steps": accumulation, "lora": lora, "side": side, "max_steps": steps,
    }  # fmt: skip
    mine, plain = (train(c, tmp_path, **given) for c in (Trainer, transformers.Trainer))
    assert len(mine.losses) == steps * accumulation
    assert_equal_runs(mine, plain)


def test_positions_that_nobody_gives_count_the_padding_in_front(tmp_path: Path) -> None:
    given: dict[str, Any] = {"family": "gpt2", "side": "left, unsaid", "max_steps": 4}
    assert_equal_runs(*(train(c, tmp_path, **given) for c in (Trainer, transformers.Trainer)))


def test_evaluation_callbacks_and_checkpoints_are_the_trainers_own(tmp_path: Path) -> None:
    class Count(transformers.TrainerCallback):  # type: ignore[misc]
        steps = 0

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.steps += 1

    count = Count()
    arguments = {
        "max_steps": 6, "eval_dataset": records(7), "eval_strategy": "steps", "eval_steps": 3,
        "per_device_eval_batch_size": 2, "save_strategy": "steps", "save_steps": 3,
    }  # fmt: skip
    mine = train(Trainer, tmp_path / "mine", callbacks=[count], **arguments)
    plain = train(transformers.Trainer, tmp_path / "plain", **arguments)
    assert count.steps == 6
    losses = [
        [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
        for trainer in (mine, plain)
    ]
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=BOUND)
    norms = [
        [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
        for trainer in (mine, plain)
    ]
    assert norms[0] and norms[0] == pytest.approx(norms[1], rel=1e-6)

    folder = tmp_path / "mine" / "checkpoint-3"
    again = train(Trainer, tmp_path / "mine", resume=str(folder), **arguments)  # type: ignore[arg-type]
    assert again.losses == mine.losses[3:]
    assert largest_difference(again.model, mine.model) == 0


def test_a_batch_without_labels_is_left_out(tmp_path: Path) -> None:
    masked = [
        {"input_ids": r["input_ids"], "labels": [-100] * len(r["labels"])} for r in records(3)
    ]
    trainer = Trainer(
        model=build("qwen2"),
        args=transformers.TrainingArguments(**settings(tmp_path, max_steps=2)),
        train_dataset=masked,
        eval_dataset=records(3) + masked,
        data_collator=padded("right"),
        chunk_options=OPTIONS,
    )
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    evaluated = trainer.evaluate()["eval_loss"]
    assert evaluated == pytest.approx(trainer.evaluate(records(3))["eval_loss"], rel=1e-12)
    assert trainer.train().training_loss == 0
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


def test_data_without_labels_evaluates_without_a_loss(tmp_path: Path) -> None:
    data = [{"input_ids": record["input_ids"]} for record in records(5)]
    found = []
    for base in (Trainer, transformers.Trainer):
        trainer = base(
            model=build("qwen2"), args=transformers.TrainingArguments(**settings(tmp_path)),
            eval_dataset=data, data_collator=padded("right"),
        )  # fmt: skip
        found.append(trainer.evaluate().keys())
    assert found[0] == found[1] and "eval_loss" not in found[0]


def test_padding_in_front_by_transformers_own_collator(tmp_path: Path) -> None:
    """Its labels leave the first token of a row one that padding predicts."""
    tokenizer = byte_tokenizer(padding_side="left")
    trainer = Trainer(
        model=build("qwen2", vocab_size=260),
        args=transformers.TrainingArguments(**settings(tmp_path)),
        eval_dataset=[{"input_ids": record["input_ids"]} for record in records(5)],
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    with pytest.raises(DataError, match=r'tokenizer\.padding_side = "right"'):
        trainer.evaluate()
    tokenizer.padding_side = "right"
    assert trainer.evaluate()["eval_loss"] > 0


def test_changes_that_refusals_offer_are_followed(tmp_path: Path) -> None:
    """A gradient that a hook scales, in the place of which a callback does; a `model_init`."""

    class Halve(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            model.lm_head.weight.grad.mul_(0.5)

    def hooked(model: Any) -> Any:
        model.lm_head.weight.register_hook(lambda grad: 0.5 * grad)
        return model

    def trainer_of(base: type, model: Any = None, **own: Any) -> Any:
        arguments = settings(tmp_path, max_steps=2, optim="sgd", max_grad_norm=0, data_seed=5)
        trainer = base(
            model=model, args=transformers.TrainingArguments(**arguments),
            train_dataset=records(), data_collator=padded("right"), **own,
        )  # fmt: skip
        trainer.train()
        return trainer.model

    plain = trainer_of(transformers.Trainer, hooked(build("qwen2")))
    with pytest.raises(UnsupportedModelError, match="on_pre_optimizer_step"):
        trainer_of(Trainer, hooked(build("qwen2")))
    called = trainer_of(Trainer, build("qwen2"), callbacks=[Halve()])
    chunked = trainer_of(transformers.Trainer, furlong.chunked(hooked(build("qwen2")), OPTIONS_KV))
    made = trainer_of(
        transformers.Trainer,
        model_init=lambda: furlong.chunked(hooked(build("qwen2")), OPTIONS_KV),
    )
    for model in (called, chunked, made):
        assert largest_difference(model, plain) < 1e-6  # the plain loss is float32


def test_bfloat16_computes_on_float32_weights(tmp_path: Path) -> None:
    trainer = Trainer(
        model=build("qwen2", torch.float32),
        args=transformers.TrainingArguments(**settings(tmp_path, max_steps=2, bf16=True)),
        train_dataset=records(),
        data_collator=padded("right"),
        chunk_options=OPTIONS,
    )
    assert trainer.engine.compute_dtype == torch.bfloat16
    trainer.train()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


REFUSED = {
    "neftune_noise_alpha": {"neftune_noise_alpha": 5.0},
    "torch_compile": {"torch_compile": True, "torch_compile_backend": "eager"},
    "optim=lomo": {"optim": "lomo"},
    "optim=galore_adamw_layerwise": {
        "optim": "galore_adamw_layerwise", "optim_target_modules": "all-linear",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_chunks_cannot_honour_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Trainer(
            model=build("llama"),
            args=transformers.TrainingArguments(**settings(tmp_path, **REFUSED[name])),
        )


def test_models_that_cannot_be_trained_are_refused_by_name(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(**settings(tmp_path))
    with pytest.raises(ConfigError, match=r"(?s)of type dict.*ChunkOptions"):
        Trainer(model=build("llama"), args=arguments, chunk_options={"size": 16})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="model_init"):
        Trainer(model_init=lambda: build("llama"), args=arguments)
    with pytest.raises(UnsupportedModelError, match="attention dropout"):
        Trainer(model=build("llama", attention_dropout=0.1), args=arguments)
    with pytest.raises(UnsupportedModelError, match="attention dropout"):
        # from_pretrained returns it so
        Trainer(model=build("llama", attention_dropout=0.1).eval(), args=arguments)
    frozen = furlong.ChunkOptions(size=16, sample=furlong.Sampling(rate=0.5, seed=1))
    with pytest.raises(ConfigError, match=r"sample\.seed = 1"):
        Trainer(model=build("llama"), args=arguments, chunk_options=frozen)


def read(**batch: Any) -> dict[str, torch.Tensor]:
    """Two rows of ten tokens, all with a label but the first; a change replaces what it names."""
    ids = torch.randint(3, 96, (2, 10), generator=torch.Generator().manual_seed(5))
    given = {"input_ids": ids, "labels": ids.clone()}
    return given | {name: torch.tensor(value) for name, value in batch.items()}


RIGHT, LEFT = [[1] * 6 + [0] * 4, [1] * 10], [[0] * 4 + [1] * 6, [1] * 10]
PACKED = [*range(4), *range(6)]
READ: dict[str, tuple[dict[str, Any], set[int], list[int]]] = {
    "neither": ({}, set(), [0, 0]),
    "padded behind, where a token predicts the end": (
        {"attention_mask": RIGHT}, set(range(7, 10)), [0, 0],
    ),
    "padded in front, columns for positions": ({"attention_mask": LEFT}, set(range(5)), [4, 0]),
    "packed, first tokens have labels": ({"position_ids": [PACKED, PACKED]}, set(), [0, 0, 0, 0]),
    "one row of positions for all": ({"position_ids": [list(range(5, 15))]}, set(), [5, 5]),
    "packed and named for kernels": (
        {"position_ids": [PACKED], "cu_seq_lens_q": [0, 4, 10]}, set(), [0, 0, 0, 0],
    ),
}  # fmt: skip


def test_batches_are_read_as_transformers_reads_them() -> None:
    model: Any = build("gpt2")
    for name, (change, unlabelled, first_positions) in READ.items():
        batch = read(**change)
        batch["labels"][0, sorted(unlabelled)] = -100
        found = unpad(batch)
        assert [s.first_position for s in found] == first_positions, name
        result = furlong.forward_backward(model, found, furlong.ChunkOptions(size=4))
        grads = take_grads(model)
        given = {key: x for key, x in batch.items() if key not in ("labels", "cu_seq_lens_q")}
        loss = wide_loss(model(**given, use_cache=False), batch["labels"])
        loss.backward()
        assert result.loss == pytest.approx(loss.item(), rel=1e-12), name
        assert worst_relative_error(grads, take_grads(model)) < BOUND, name


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"attention_mask": RIGHT}, "3 labels of what tokens of padding predict"),
        ({"attention_mask": LEFT}, "4 labels of what tokens of padding predict"),
        ({"labels": [[1] * 9] * 2}, "input_ids and labels of shape"),
        ({"cu_seq_lens_q": [0, 4, 10]}, "cu_seq_lens_q"),
        ({"token_type_ids": [[0] * 10] * 2}, r"remove_columns\(\['token_type_ids'\]\)"),
        ({"shift_labels": [[1.0] * 10]}, "shift_labels"),
    ],
)
def test_unpad_refuses_what_it_cannot_read(change: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told) as error:
        unpad(read(**change))
    assert isinstance(error.value, UserError)


def test_offload_and_order_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights with every kind of memory on disk, in the folder that was named."""
    plain = train(transformers.Trainer, tmp_path / "plain", max_steps=3)
    opened: list[Path] = []
    make = NamelessFile.__init__
    monkeypatch.setattr(
        NamelessFile, "__init__", lambda file, folder: opened.append(folder) or make(file, folder)
    )
    options = furlong.ChunkOptions(size=16, order="layer-first", offload="disk", keep="kv")
    mine = train(
        Trainer, tmp_path / "mine", max_steps=3,
        chunk_options=options, storage=Storage(disk_dir=tmp_path),
    )  # fmt: skip
    assert mine.losses == pytest.approx(plain.losses, rel=BOUND)
    assert largest_difference(mine.model, plain.model) < BOUND
    assert opened == [tmp_path]
