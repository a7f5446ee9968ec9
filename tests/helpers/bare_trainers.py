"""A `Trainer` that a test builds from an engine, batches and settings, without a run file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from furlong.config.sources import build_run
from furlong.data.loader import TrainBatch
from furlong.train.batches import BatchEngine
from furlong.train.checkpoints import Checkpoints
from furlong.train.evaluation import Evaluation
from furlong.train.memory import Fitting
from furlong.train.metrics import Callback, MetricsLog
from furlong.train.objective import objective_of
from furlong.train.optim import build_optimizer, build_schedule, make_state
from furlong.train.processes import ALONE
from furlong.train.progress import Cadence, Progress
from furlong.train.run_folder import RunFolder
from furlong.train.trainer import Trainer


class Losses(Callback):
    """Logs each step, and keeps its loss."""

    def on_step_end(self, trainer: Any, figures: Any) -> None:
        trainer.losses.append(figures.loss)
        trainer.log.step(trainer.progress.step, figures)


class BareTrainer(Trainer):
    """A trainer with only what its steps need."""

    def __init__(
        self,
        folder: Path,
        engine: Any,
        model: Any,
        batches: Sequence[TrainBatch],
        fitting: Fitting,
        *,
        num_steps: int,
        callbacks: Sequence[Any] = (),
        meter: Any = None,
        lr_schedule: str = "constant",
        say: Any = print,
        **settings: Any,
    ) -> None:
        train = {"lr": 0.1, "warmup_steps": 0.0, "max_grad_norm": None, "save_every_steps": 0}
        train |= {"steps": num_steps, "schedule": lr_schedule} | settings
        self.config = build_run(
            {"model": {"name": "none"}, "data": {"train": "none"}, "train": train}, "a test"
        )
        self.processes, self.callbacks = ALONE, list(callbacks)
        self.objective = objective_of(self.config.train)
        self.run = RunFolder(folder)
        self.model, self.engine, self.fitting = model, BatchEngine(engine), fitting
        self.device = self.engine.device
        self.run_model: Any = SimpleNamespace(whole_cost=None)
        self.cadence = Cadence.of(self.config.train, num_steps, num_steps)
        self.num_steps, self.meter = num_steps, meter
        self.optimizer = build_optimizer(model, self.config.train)
        self.schedule = build_schedule(self.optimizer, self.config.train, num_steps)
        self.progress, self.saved_step, self._stop = Progress(), 0, None
        self._num_loads = 0
        self.eval_data, self.beyond_data, self.prompts = None, {}, []
        self.checkpoints = Checkpoints(folder)
        self._given, self._say = batches, say
        self.losses: list[float | None] = []
        self.log: Any = None
        make_state(self.optimizer)
        self.used = self._used_memory()

    def batches(self) -> Iterator[TrainBatch]:
        return iter(self._given)

    def save(self) -> None:
        self.saved_step = self.progress.step

    def _open_log(self, stack: ExitStack) -> None:
        file = self.run.path / "metrics.jsonl"
        self.log = stack.enter_context(MetricsLog(file, self.num_steps, self._say))
        self._parts = [Losses()]

    def export(self, eval_loss: float | None = None) -> Any:
        return SimpleNamespace(eval_loss_after=eval_loss)


class Evaluating(BareTrainer):
    """A bare trainer that evaluates by calling a function."""

    def __init__(self, evaluation: Any, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.eval_data = self  # type: ignore[assignment]
        self._evaluation = evaluation

    def evaluate(self) -> dict[str, Evaluation]:
        return {"held-out": self._evaluation(self)}
