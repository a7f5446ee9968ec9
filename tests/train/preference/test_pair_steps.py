"""Steps on pairs that do not fit, and the gradient of sequences that count differently often."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copy

import pytest
import torch
from helpers.faults import fail_at
from helpers.pair_runs import pair_flags
from helpers.tiny_families import build, config_of
from helpers.tiny_runs import TinyRun
from safetensors.torch import load_file

import furlong
from furlong.cli.main import main
from furlong.errors import DataError
from furlong.report.patience import patience
from furlong.testing import take_grads, worst_relative_error

STEPS = ("--train.steps=2", "--train.epochs=null", "--model.dtype=float64", "--chunks.keep=kv")


def final(run: Path) -> tuple[dict[str, torch.Tensor], int]:
    """The weights, and the size of chunks at the end."""
    options = json.loads((run / "options.json").read_text())
    return load_file(next((run / "model").glob("*.safetensors"))), options["size"]


@pytest.mark.parametrize("failing", [1, 6], ids=["first phase", "second phase"])
@pytest.mark.few(1)
def test_a_step_that_does_not_fit(
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failing: int,
) -> None:
    monkeypatch.setattr(patience.__wrapped__, "__kwdefaults__", {"every_s": 5e-3, "speaks": True})
    flags = (*pair_flags(tiny_run, tmp_path), *STEPS, f"--data.cache_dir={tmp_path / 'cache'}")
    small = tiny_run.arguments(tmp_path / "small", *flags, "--chunks.size=64")
    assert main(small) == 0
    assert "data.train: the reference: " in capsys.readouterr().err
    fail_at(monkeypatch, {failing}, torch.OutOfMemoryError("no memory for this action"))
    large = tiny_run.arguments(tmp_path / "large", *flags, "--chunks.size=128")
    assert main(large) == 0
    (found, size), (expected, _) = final(tmp_path / "large"), final(tmp_path / "small")
    assert size == 64
    assert worst_relative_error(found, expected) <= 1e-12


def test_a_router_loss_is_refused_before_the_reference_is_computed(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(
        "mixtral", output_router_logits=True, vocab_size=320, max_position_embeddings=512
    )
    model = tmp_path / "model"
    config.save_pretrained(model)
    for file in (tiny_run.folder / "model").glob("*token*"):
        copy(file, model)
    flags = (*pair_flags(tiny_run, tmp_path), *STEPS, f"--model.name={model}")
    assert main(tiny_run.arguments(tmp_path / "run", *flags, "--model.init=random")) == 2
    said = capsys.readouterr().err
    assert "model.config: {output_router_logits: false}" in said
    assert "the reference: " not in said


def test_weights_of_sequences() -> None:
    """As often as weights of all their tokens say; losses are told as they are."""
    model = build("llama", torch.float64)
    engine = furlong.Engine(model)
    draw = torch.Generator().manual_seed(3)
    lens, counts = (21, 4, 40), [0.5, -2.0, 0.0]
    sequences = [{"input_ids": torch.randint(3, 60, (n,), generator=draw)} for n in lens]
    sequences = [{**one, "labels": one["input_ids"]} for one in sequences]
    options = furlong.ChunkOptions(size=16, num_retained=1, keep="kv")
    plan = engine.plan(lens, options)
    result = engine.run(plan, sequences, 10, weights=counts)
    found = take_grads(model)
    weighted = [
        {**one, "token_weights": torch.full((n,), count)}
        for one, n, count in zip(sequences, lens, counts, strict=True)
    ]
    engine.forward_backward(weighted, options, 10)
    assert worst_relative_error(found, take_grads(model)) <= 1e-12
    assert result.loss == pytest.approx(engine.run(plan, sequences, 10).loss, rel=1e-12)
    with pytest.raises(DataError, match="2 weights of a plan with 3 sequences"):
        engine.run(plan, sequences, 10, weights=counts[:2])
