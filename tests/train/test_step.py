"""What stops a step, and what a batch without labels does to the loop."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bare_trainers import BareTrainer

from furlong.cost.shape import model_shape
from furlong.data.loader import LoaderState, TrainBatch
from furlong.data.tokenize import IGNORE_INDEX, Sequence
from furlong.errors import DivergenceError
from furlong.plan.plan import ChunkPlan
from furlong.plan.text import parse_action
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device
from furlong.planners.spaco import EXACT, sample_backwards
from furlong.runtime.distributed.fsdp import clip_gradients
from furlong.runtime.step import StepResult
from furlong.timeline import Record, Timeline
from furlong.train.batches import BatchEngine
from furlong.train.memory import Fitting
from furlong.train.metrics import MfuMeter
from furlong.train.progress import Progress

OPTIONS = ChunkOptions(size=8)


class FixedEngine:
    """Stands in for the engine: the gradient that it is told to leave, and a fixed timeline."""

    plan: ChunkPlan | None = None
    ranks = None

    def __init__(self, model: torch.nn.Linear, losses: list[float], grads: list[float]) -> None:
        model.device, model.model = torch.device("cpu"), None  # as the decoder's
        self.model, self.results = model, iter(zip(losses, grads, strict=True))
        self.divisors: list[int | None] = []
        self.weights: list[torch.Tensor] = []

    def clip_gradients(self, max_norm: float | None) -> float:
        return clip_gradients(self.model.parameters(), max_norm)

    def forward_backward(
        self,
        sequences: Any,
        options: ChunkOptions,
        num_valid_tokens: int | None = None,
        backward: bool = True,
        watch: Any = None,
    ) -> StepResult:
        loss, grad = next(self.results)
        self.divisors.append(num_valid_tokens)
        self.weights.append(self.model.weight.detach().clone())
        self.model.weight.grad = torch.full_like(self.model.weight, grad)
        kinds = zip(("F0.0 kv", "R0.0", "K0.0", "B0.0"), (1.0, 2.0, 4.0, 8.0), strict=True)
        records = tuple(
            Record(0, "compute", parse_action(kind), 0.0, stop, 0, 0) for kind, stop in kinds
        )
        return StepResult(loss, loss, 1, Timeline(records), plan=self.plan)


def make_batch(num_labels: int) -> TrainBatch:
    ids = np.arange(5, dtype=np.int32)
    labels = np.where(np.arange(5) >= 5 - num_labels, ids, IGNORE_INDEX).astype(np.int32)
    return TrainBatch((Sequence(7, "book.txt", ids, labels),), LoaderState(0, 1))


def run(tmp_path: Path, engine: Any, batches: list[TrainBatch], num_steps: int, **more: Any) -> Any:
    """The trainer after its steps."""
    trainer = BareTrainer(
        tmp_path, engine, engine.model, batches, Fitting(OPTIONS), num_steps=num_steps, **more
    )
    trainer.train()
    return trainer


def test_a_step_that_diverges_tells_of_the_checkpoint_that_there_is(tmp_path: Path) -> None:
    for every, said in ((0, "there is no checkpoint"), (1, "checkpoint of step 1 is whole")):
        engine = FixedEngine(torch.nn.Linear(2, 2, bias=False), [1.0, math.nan], [1.0, 1.0])
        with pytest.raises(DivergenceError, match=said):
            run(tmp_path, engine, [make_batch(3)] * 2, 2, save_every_steps=every)


@pytest.mark.parametrize(
    ("loss", "grad"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)]
)
def test_a_figure_that_is_not_finite_stops_before_the_weights_change(
    tmp_path: Path, loss: float, grad: float
) -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    engine = FixedEngine(model, [1.0, loss], [1.0, grad])
    with pytest.raises(DivergenceError, match=r"step 2; [\s\S]*step 1\n[\s\S]*7 \(book\.txt\)"):
        run(tmp_path, engine, [make_batch(3)] * 2, 2)
    assert torch.equal(model.weight, engine.weights[1])
    assert not torch.equal(model.weight, engine.weights[0])


WHOLE = plan_on_device([5], ChunkOptions(size=2), num_layers=1)
ONE_OF_THREE = sample_backwards(WHOLE, {1: EXACT})


def test_a_draw_without_a_label_has_no_loss_and_is_no_divergence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FixedEngine(torch.nn.Linear(2, 2, bias=False), [3.0, math.nan], [1.0, 0.0])
    engine.plan = ONE_OF_THREE
    figures = run(tmp_path, engine, [make_batch(3)] * 2, 2)
    assert (figures.losses, figures.progress.last_loss) == ([3.0, None], 3.0)
    assert Progress.from_dict(json.loads(json.dumps(asdict(figures.progress)))).last_loss == 3.0
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["loss"] for record in records] == [3.0, None]
    assert [record["drawn_share"] for record in records] == [1 / 3, 1 / 3]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1/2  loss 3.0000  drawn 33%  grad 2        lr")
    assert second.startswith("step 2/2  loss      -  drawn 33%  grad 0        lr")


@pytest.mark.parametrize(
    ("plan", "loss", "grad"),
    [
        (ONE_OF_THREE, math.nan, 1.0),
        (ONE_OF_THREE, math.nan, math.nan),
        (ONE_OF_THREE, math.inf, 0.0),
        (sample_backwards(WHOLE, {1: EXACT}, report_loss=True), math.nan, 0.0),
        (WHOLE, math.nan, 0.0),
    ],
)
def test_a_sampled_step_diverges_as_others_do(
    tmp_path: Path, plan: ChunkPlan, loss: float, grad: float
) -> None:
    engine = FixedEngine(torch.nn.Linear(2, 2, bias=False), [loss], [grad])
    engine.plan = plan
    with pytest.raises(DivergenceError, match="step 1"):
        run(tmp_path, engine, [make_batch(3)], 1)
    assert torch.equal(engine.model.weight, engine.weights[0])


def test_no_utilisation_is_told_of_a_sampled_step(tmp_path: Path) -> None:
    """The work that is counted is that of a whole backward."""
    meter = MfuMeter(model_shape("Qwen2.5-0.5B"), 1e12)
    for plan in (WHOLE, ONE_OF_THREE):
        engine = FixedEngine(torch.nn.Linear(2, 2, bias=False), [3.0], [1.0])
        engine.plan = plan
        run(tmp_path, engine, [make_batch(3)], 1, meter=meter)
    exact, sampled = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert "mfu" in exact and "drawn_share" not in exact
    assert "mfu" not in sampled and sampled["drawn_share"] == 1 / 3


def test_a_batch_without_labels_is_skipped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FixedEngine(torch.nn.Linear(2, 2, bias=False), [3.0, 2.0], [1.0, 1.0])
    figures = run(tmp_path, engine, [make_batch(n) for n in (2, 0, 0, 4)], 2)
    assert (figures.progress.num_skipped_batches, figures.losses) == (2, [3.0, 2.0])
    assert (figures.progress.step, figures.progress.num_tokens) == (2, 10)
    assert engine.divisors == [2, 4]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [("skipped" in record, record["step"]) for record in records] == [
        (False, 1), (True, 2), (True, 2), (False, 2),
    ]  # fmt: skip
    assert (records[0]["forward_s"], records[0]["recompute_s"], records[0]["backward_s"]) == (
        1.0, 6.0, 8.0,
    )  # fmt: skip
    assert records[0]["grad_norm"] == pytest.approx(2.0)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    assert printed[0].startswith("step 1/2  loss 3.0000  grad 2        lr 1.00e-01")


def test_progress_goes_on_behind_the_batch_that_was_taken(tmp_path: Path) -> None:
    engine = FixedEngine(torch.nn.Linear(2, 2, bias=False), [3.0, 2.0], [1.0, 1.0])
    batches = [replace(make_batch(3), next_state=LoaderState(1, n)) for n in (4, 5, 6)]
    assert run(tmp_path, engine, batches, 2).progress.data == LoaderState(1, 5)


@pytest.mark.parametrize(("max_grad_norm", "moved_by"), [(0.5, 0.5), (8.0, 2.0), (None, 2.0)])
def test_the_update_is_of_clipped_gradients(
    tmp_path: Path, max_grad_norm: float | None, moved_by: float
) -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    trainer = BareTrainer(
        tmp_path, FixedEngine(model, [3.0], [1.0]), model, [], Fitting(OPTIONS), num_steps=1,
        max_grad_norm=max_grad_norm,
    )  # fmt: skip
    trainer.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    figures = trainer.step(make_batch(3))
    assert float((model.weight.detach() - before).norm()) == pytest.approx(moved_by)
    assert figures.grad_norm == pytest.approx(2.0)


def test_the_engine_gets_sequences_on_the_cpu() -> None:
    """On a GPU each would come back for its labels, and for the ranges of its ids."""
    seen: list[Any] = []
    model = SimpleNamespace(device=torch.device("meta"))
    engine: Any = SimpleNamespace(
        ranks=None, model=model, forward_backward=lambda sequences, *_, **__: seen.extend(sequences)
    )
    ids = np.arange(5, dtype=np.int32)
    BatchEngine(engine).compute(TrainBatch((Sequence(0, "", ids, ids),), LoaderState()), OPTIONS)
    assert [x.device.type for x in seen[0].values()] == ["cpu", "cpu"]
