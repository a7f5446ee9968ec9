"""Steps of `train.loss: kto` against plain torch, on several processes, and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.launched import Launched
from helpers.tiny_runs import TEXTS, TinyRun, run_command, signal_after
from safetensors.torch import load_file
from test_pair_parity import log_prob
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from furlong.cli.main import main
from furlong.config.schema import DataConfig, TrainConfig
from furlong.config.sources import parse_run
from furlong.data.dataset import load_data
from furlong.data.loader import Epochs, iterate_batches
from furlong.data.tokenize import IGNORE_INDEX
from furlong.errors import ConfigError, DataError
from furlong.plan.lengths import StepSize
from furlong.train.optim import build_optimizer, build_schedule

BETA, WEIGHTS = 0.3, {True: 1.5, False: 0.75}


def write_answers(file: Path) -> Path:
    """Eight answers of different lengths, five of them wanted."""
    records = []
    for number, text in enumerate(TEXTS):
        words = text.split()
        answer = " " + " ".join(words[:2:-1])
        records.append(
            {"prompt": " ".join(words[:3]), "completion": answer, "label": number % 3 != 0}
        )
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def flags_of(folder: Path) -> tuple[str, ...]:
    return (
        "--train.loss=kto", f"--data.train={write_answers(folder / 'answers.jsonl')}",
        f"--data.cache_dir={folder / 'cache'}", "--data.max_seq_len=512", f"--train.beta={BETA}",
        f"--train.desirable_weight={WEIGHTS[True]}", "--train.epochs=null", "--train.steps=2",
        f"--train.undesirable_weight={WEIGHTS[False]}",
    )  # fmt: skip


def answers(tiny: TinyRun, folder: Path, **changes: Any) -> Any:
    settings = DataConfig(
        train=str(folder / "answers.jsonl"), format="unpaired", max_seq_len=512,
        cache_dir=str(folder / "plain-cache"), **changes,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder / "model")
    return load_data(settings.train, tokenizer, settings)


def trained_weights(run: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in (run / "checkpoints" / "step-00000002").glob("*.safetensors"):
        tensors |= load_file(file)
    return {n.removeprefix("model."): x for n, x in tensors.items() if n.startswith("model.")}


def figures(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "eval_loss", "grad_norm", "kl", "rewards", "logps", "eval_rewards")
    kept = [{k: v for k, v in line.items() if k.split("/")[0] in names} for line in lines]
    return [line for line in kept if line]


def test_a_prompt_is_joined_with_the_next_answer(tiny_run: TinyRun, tmp_path: Path) -> None:
    write_answers(tmp_path / "answers.jsonl")
    data = answers(tiny_run, tmp_path)
    assert data.noun == "answer" and len(data.units) == 8 and len(data) == 16
    starts = [int((data[i].labels != IGNORE_INDEX).argmax()) for i in range(16)]
    for number in range(8):
        own, beside, said = data[2 * number], data[2 * number + 1], data[2 * number + 2 & 15]
        start, theirs = starts[2 * number], starts[2 * number + 2 & 15]
        assert own.desirable is beside.desirable is (number % 3 != 0)
        ids = np.concatenate([own.input_ids[:start], said.input_ids[theirs:]])
        np.testing.assert_array_equal(beside.input_ids, ids)
        np.testing.assert_array_equal(beside.labels[start:], said.labels[theirs:])
        assert (beside.labels[:start] == IGNORE_INDEX).all()


@pytest.mark.parametrize(("keep", "size"), [("kv", 32), ("attention", 400)])
def test_two_steps(tiny_run: TinyRun, tmp_path: Path, keep: str, size: int) -> None:
    options = (
        "--model.dtype=float64", f"--chunks.keep={keep}", f"--chunks.size={size}",
        "--train.eval_every_steps=0",
    )  # fmt: skip
    run = tmp_path / "run"
    assert main(tiny_run.arguments(run, *flags_of(tmp_path), *options)) == 0
    name = str(tiny_run.folder / "model")
    model, reference = (AutoModelForCausalLM.from_pretrained(name, dtype="float64") for _ in "ab")
    data, settings = answers(tiny_run, tmp_path), TrainConfig(lr=1e-2)
    optimizer = build_optimizer(model, settings)
    schedule = build_schedule(optimizer, settings, 2)
    epochs = Epochs(data.mixture, StepSize(3), 0, data.unit_lens)
    batches = iterate_batches(data, data.units, epochs)
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        sequences = next(batches).sequences
        with torch.no_grad():
            before = [log_prob(reference, one) for one in sequences]
            beside = [log_prob(model, one) - b for one, b in zip(sequences, before, strict=True)]
        kl = torch.stack(beside[1::2]).mean().clamp(min=0)
        losses = []
        for own, then in zip(sequences[::2], before[::2], strict=True):
            ratio = log_prob(model, own) - then
            distance = ratio - kl if own.desirable else kl - ratio
            losses.append(WEIGHTS[own.desirable] * (1 - torch.sigmoid(BETA * distance)))
        loss = torch.stack(losses).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        expected.append((float(loss), float(kl)))
    steps = [line for line in figures(run) if "grad_norm" in line]
    assert [line["loss"] for line in steps] == pytest.approx([x for x, _ in expected], rel=1e-12)
    assert [line["kl"] for line in steps] == pytest.approx([x for _, x in expected], abs=1e-11)
    assert steps[1]["kl"] > 0
    ours = trained_weights(run)
    for key, weight in model.named_parameters():
        assert (ours[key] - weight).norm() <= 1e-12 * weight.norm(), key


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--parallel.dp=2", "--parallel.pp=2"])
def test_two_processes(tiny_run: TinyRun, tmp_path: Path, layout: str) -> None:
    flags = (*flags_of(tmp_path), "--model.dtype=float64", "--chunks.size=32", "--chunks.keep=kv")
    flags += (f"--data.eval={tmp_path / 'answers.jsonl'}", "--chunks.num_retained=0")
    assert main(tiny_run.arguments(tmp_path / "alone", *flags)) == 0
    arguments = tiny_run.arguments(tmp_path / "two", *flags, layout)
    ended = Launched(tmp_path / "said", run_command, arguments).ended(300)
    assert [one.code for one in ended] == [0, 0], ended[0].said + ended[1].said
    for ours, truth in zip(figures(tmp_path / "two"), figures(tmp_path / "alone"), strict=True):
        assert ours == pytest.approx(truth, rel=1e-9, abs=1e-11)
    expected, found = (
        load_file(tmp_path / run / "model" / "model.safetensors") for run in ("alone", "two")
    )
    for key, weight in found.items():
        assert (weight - expected[key]).norm() <= 1e-12 * expected[key].norm(), key


@pytest.mark.slow
def test_a_run_that_ends_early_goes_on_to_the_same_bits(tiny_run: TinyRun, tmp_path: Path) -> None:
    held_out = f"--data.eval={tmp_path / 'answers.jsonl'}"
    flags = (*flags_of(tmp_path), held_out, "--train.steps=5", "--model.lora.rank=2")
    assert main(tiny_run.arguments(tmp_path / "whole", *flags)) == 0
    with signal_after(3):
        assert main(tiny_run.arguments(tmp_path / "run", *flags)) == 0
    assert main(["train", str(tmp_path / "run" / "config.json"), "--resume"]) == 0
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    evaluated = [line for line in figures(tmp_path / "run") if "eval_loss" in line]
    assert all("eval_rewards/chosen" in line for line in evaluated) and evaluated


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--train.loss=kto", "--train.loss_type=ipo"], "train.loss_type"),
        (["--train.loss=dpo", "--train.desirable_weight=2"], "train.desirable_weight"),
        (["--train.loss=kto", "--data.format=preference"], "data.format"),
        (["--train.loss=dpo", "--data.format=unpaired"], "data.format"),
        (["--data.format=unpaired"], "data.format"),
        (["--train.loss=kto", "--data.too_long=split"], "data.too_long"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(flags: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(["--model.name=m", "--data.train=t", *flags])
    assert key in str(caught.value)


@pytest.mark.parametrize(("num_records", "said"), [(2, "a prompt and no answer"), (1, "only")])
def test_a_cut_that_leaves_no_answer_and_a_lonely_one_are_refused(
    tiny_run: TinyRun, tmp_path: Path, num_records: int, said: str
) -> None:
    record = {"prompt": "word " * 600, "completion": " yes", "label": True}
    (tmp_path / "answers.jsonl").write_text((json.dumps(record) + "\n") * num_records)
    with pytest.raises(DataError, match=said):
        answers(tiny_run, tmp_path, too_long="truncate")
