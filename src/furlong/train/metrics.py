"""One printed line and one JSON line per step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from furlong.train.step import StepFigures
from furlong.units import format_bytes, format_count, format_seconds


class MetricsLog:
    """Appends to `metrics.jsonl`, line by line, so that a killed run keeps what it wrote."""

    def __init__(self, file: Path, num_steps: int, say: Callable[[str], None] = print) -> None:
        self._file = file.open("a", encoding="utf-8", buffering=1)
        self._num_steps = num_steps
        self._say = say

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def step(self, step: int, figures: StepFigures) -> None:
        self._write({"step": step} | asdict(figures))
        self._say(
            f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}"
            f"  loss {figures.loss:.4f}  grad {figures.grad_norm:.3g}  lr {figures.lr:.2e}"
            f"  {format_count(figures.tokens_per_s)} tokens/s"
            f"  longest {format_count(figures.longest_tokens)}"
            f"  peak {format_bytes(figures.peak_memory_bytes)}"
            f"  forward {format_seconds(figures.forward_s)}"
            f"  recompute {format_seconds(figures.recompute_s)}"
            f"  backward {format_seconds(figures.backward_s)}"
            f"  data {format_seconds(figures.data_s)}"
        )

    def evaluation(self, step: int, eval_loss: float, seconds: float) -> None:
        self._write({"step": step, "eval_loss": eval_loss, "eval_s": seconds})
        self._say(f"held-out loss {eval_loss:.4f} after step {step} ({format_seconds(seconds)})")

    def skipped(self, step: int) -> None:
        self._write({"step": step, "skipped": "no label in the batch"})
        self._say(f"a batch before step {step} has no label: skipped")

    def _write(self, record: dict[str, object]) -> None:
        self._file.write(json.dumps(record) + "\n")
