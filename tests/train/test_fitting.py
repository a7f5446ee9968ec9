"""Steps that do not fit: chunks shrink, the weights are those of smaller chunks from the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.faults import fail_at
from helpers.tiny_runs import TinyRun
from safetensors.torch import load_file

from furlong.cli.main import main
from furlong.errors import ConfigError, LinkError
from furlong.ops.backends.select import is_out_of_memory
from furlong.planners.options import ChunkOptions
from furlong.train.memory import Fitting, OverBudgetError, UsedMemory
from furlong.train.objective import Objective

FLAGS = (
    *("--train.epochs=1", "--train.save_every_steps=2", "--train.eval_every_steps=0"),
    *("--chunks.num_retained=1", "--chunks.keep=attention"),
    *("--offload=none", "--chunks.order=chunk-first"),
)
LOWER = (
    *("--chunks.order=layer-first", "--chunks.stage_layers=1"),
    *("--offload=disk", "--memory.disk=50MiB"),
)
DROPOUT = ("--model.lora.rank=2", "--model.lora.dropout=0.3")


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next((run / "model").glob("*.safetensors")))


def state(run: Path, step: int) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(
        (run / "checkpoints" / f"step-{step:08d}" / "state.json").read_text()
    )
    return loaded


@pytest.mark.parametrize(
    ("actions", "flags"),
    [({3}, DROPOUT), ({0}, ("--chunks.keep=all",)), ({9}, LOWER)],
    ids=["dropout", "keep all", "disk"],
)
def test_a_step_that_does_not_fit_is_repeated_in_smaller_chunks(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: Any, capsys: Any, actions: Any, flags: Any
) -> None:
    smaller = ("--chunks.keep=attention",) if "--chunks.keep=all" in flags else ()
    expected, run = tmp_path / "expected", tmp_path / "run"
    arguments = (*FLAGS, *flags, *smaller, "--chunks.size=64")
    assert main(tiny_run.arguments(expected, *arguments)) == 0
    capsys.readouterr()
    with monkeypatch.context() as patched:
        fail_at(patched, actions, torch.OutOfMemoryError("CUDA out of memory. Tried"))
        assert main(tiny_run.arguments(run, *FLAGS, *flags, "--chunks.size=128")) == 0
    printed = capsys.readouterr().out
    assert printed.count("did not fit") == 1
    assert (
        "did not fit (CUDA out of memory. Tried): chunks of 64 tokens from now on, 128 before"
        in printed
    )
    given_weights, wanted_weights = weights(run), weights(expected)
    assert all(torch.equal(given_weights[name], wanted_weights[name]) for name in wanted_weights)
    given, wanted = state(run, 2), state(expected, 2)
    assert given["options"] == wanted["options"] and given["options"]["size"] == 64
    assert given["progress"]["data"] == wanted["progress"]["data"]
    assert json.loads((run / "options.json").read_text())["size"] == 64
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["chunk_size"] for record in steps if "loss" in record][-1] == 64


def test_chunks_that_an_evaluation_shrinks_are_its_alone(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    run, flags = tmp_path / "run", ("--train.eval_every_steps=1", "--chunks.size=128")
    held_out = f"--data.eval={tiny_run.folder / 'texts'}"
    original = Objective.compute

    def compute(own: Objective, engine: Any, batch: Any, options: Any, **named: Any) -> Any:
        if not named.get("backward", True) and options.size == 128:
            raise torch.OutOfMemoryError("none")
        return original(own, engine, batch, options, **named)

    monkeypatch.setattr(Objective, "compute", compute)
    assert main(tiny_run.arguments(run, *FLAGS, *flags, held_out)) == 0
    assert capsys.readouterr().out.count("an evaluation did not fit (none): ") == 1
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {record["chunk_size"] for record in steps if "loss" in record} == {128}
    assert json.loads((run / "options.json").read_text())["size"] == 128


def test_a_resumed_run_keeps_the_smaller_chunks(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        fail_at(patched, {0}, torch.OutOfMemoryError("none"))
        assert main(tiny_run.arguments(run, *FLAGS, "--chunks.size=128")) == 0
    for name in ("report.json", "options.json"):
        (run / name).unlink()
    capsys.readouterr()
    assert main(["train", str(run / "config.json"), "--resume"]) == 0
    assert "chunks: size 64, " in capsys.readouterr().out


def test_two_failures_with_the_smallest_chunks_end_the_run(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    fail_at(monkeypatch, set(range(100)), torch.OutOfMemoryError("none left"))
    arguments = tiny_run.arguments(tmp_path / "run", *FLAGS, "--chunks.size=512")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    message = "step 1, which did not fit with chunks of 512, 128, 64 tokens, the last tried twice"
    assert message in captured.err.replace("\n", " ")
    assert captured.out.count("tokens from now on") == 2  # 256 is all of the batch, as 512 is
    assert captured.out.count("once more with chunks of 64 tokens") == 1


def test_another_error_is_not_taken_for_a_lack_of_memory() -> None:
    def call(options: ChunkOptions) -> Any:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        Fitting(ChunkOptions()).compute(
            call, name="step 1", num_tokens=10, device=torch.device("cpu")
        )


def test_a_lack_of_memory_of_another_process_is_not_this_ones() -> None:
    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
    assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(LinkError(f"process 1 left it by RuntimeError: {text}"))


def test_what_failed_is_undone_before_the_next_try() -> None:
    """Gradients are gone, and random numbers are drawn as if it had not been."""
    parameter = torch.nn.Parameter(torch.zeros(()))
    drawn: list[float] = []

    def call(options: ChunkOptions) -> Any:
        assert parameter.grad is None
        parameter.grad = torch.ones(())
        drawn.append(float(torch.rand(())))
        if options.size > 256:
            raise OverBudgetError("2 GiB in use, memory.device is 1 GiB")
        return "done"

    def undo() -> None:
        parameter.grad = None

    fitting = Fitting(ChunkOptions(size=1024), say=lambda line: None)
    device = torch.device("cpu")
    done: Any = fitting.compute(call, name="step 1", num_tokens=10**6, device=device, undo=undo)
    assert (done, fitting.options.size, len(set(drawn)), len(drawn)) == ("done", 256, 1, 3)


def test_a_budget_of_ram_is_checked_against_what_training_has_taken() -> None:
    weight = torch.nn.Parameter(torch.zeros(2**22))  # 16 MiB
    optimizer = torch.optim.AdamW([weight])
    used = UsedMemory([weight], optimizer, weight.device, budget_bytes=100 * 2**20)
    used.restart()
    used.check()
    assert 15 <= used.peak_bytes() / 2**20 <= 25
    taken = torch.ones(80 * 2**20, dtype=torch.uint8)
    used.check()
    assert 95 <= used.peak_bytes() / 2**20 <= 110
    more = torch.ones(100 * 2**20, dtype=torch.uint8)
    del more
    with pytest.raises(OverBudgetError, match=r"19\d MiB in use, memory\.device is 100 MiB"):
        used.check()
    used.restart()
    used.check()
    assert taken[0] == 1


def test_the_smallest_chunk_may_be_smaller_than_the_rule() -> None:
    said: list[str] = []
    calls: list[int] = []

    def call(options: ChunkOptions) -> Any:
        calls.append(options.size)
        raise torch.OutOfMemoryError("none")

    fitting = Fitting(ChunkOptions(size=16), say=said.append)
    with pytest.raises(ConfigError, match="chunks of 16 tokens, the last tried twice: none"):
        fitting.compute(call, name="step 4", num_tokens=100, device=torch.device("cpu"))
    assert (calls, len(said)) == ([16, 16], 1)
