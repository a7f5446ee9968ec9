"""One printed line and one JSON line per step, and what else wants to see the figures."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from furlong.planners.candidates import CHUNKS
from furlong.simulate.predict import Prediction
from furlong.train.evaluation import HELD_OUT, Evaluation
from furlong.train.figures.trackers import Tracker
from furlong.train.sample_check import SampleCheck
from furlong.train.step import TrainedStep
from furlong.units import count_words, format_bytes, format_count, format_seconds

Say = Callable[[str], None]
_BUSY_LOAD = 1.5
"""Processes that want to compute, per core, from which a machine counts as busy."""
_TOLD_SHARE = 0.05
"""Share of a step's time from which recomputation and the wait for data are told."""


class MetricsLog:
    """Appends to `metrics.jsonl`, line by line, so that a killed run keeps what it wrote."""

    def __init__(
        self,
        file: Path,
        num_steps: int,
        say: Say = print,
        *,
        keep_bytes: int | None = None,
        trackers: Sequence[Tracker] = (),
        advance: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`keep_bytes`: how much of the file belongs to what is continued; None: all of it.
        `advance` is told every step that has been taken.
        """
        if keep_bytes is not None and (num_lost_bytes := _cut(file, keep_bytes)):
            say(f"{file}: {num_lost_bytes:,} of {keep_bytes:,} bytes of earlier records are gone")
        self._file = file.open("a", encoding="utf-8", buffering=1)
        self._num_steps = num_steps
        self._say = say
        self._trackers = trackers
        self._advance = advance

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def num_bytes(self) -> int:
        """Length of the file as far as it has been written."""
        return self._file.tell()

    def say(self, line: str) -> None:
        """Prints a line, above the progress bar where there is one."""
        self._say(line)

    def step(self, step: int, figures: TrainedStep) -> None:
        values = {name: value for name, value in asdict(figures).items() if value is not None}
        values |= values.pop("metrics")
        self._write({"step": step, "loss": figures.loss} | values)
        self._track(step, {name: x for name, x in values.items() if not isinstance(x, str)})
        self._say(self._line(step, figures))
        self._advance(step)

    def _line(self, step: int, figures: TrainedStep) -> str:
        """The figures that one looks at while a run goes on, in columns; records have them all."""
        loss = "-" if figures.loss is None else f"{figures.loss:.4f}"
        drawn = "" if figures.drawn_share is None else f"  drawn {figures.drawn_share:.0%}"
        computed_s = figures.forward_s + figures.recompute_s + figures.backward_s
        again = figures.recompute_s / computed_s if computed_s else 0.0
        waited = figures.data_s / figures.step_s if figures.step_s else 0.0
        ends = [
            f"  {word} {share:.0%}"
            for word, share in (("recompute", again), ("data", waited))
            if share >= _TOLD_SHARE
        ]
        if figures.plan_method not in (None, CHUNKS):
            ends.append(f"  plan {figures.plan_method}")
        return (
            f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}"
            f"  loss {loss:>6}{_of_pairs(figures.metrics)}{drawn}"
            f"  grad {figures.grad_norm:<7.3g}  lr {figures.lr:.2e}"
            f"  {format_seconds(figures.step_s):>7}"
            f"  {format_count(figures.tokens_per_s):>5} tokens/s"
            + ("" if figures.mfu is None else f"  MFU {figures.mfu:5.1%}")
            + f"  memory {format_bytes(figures.peak_memory_bytes):>8}{''.join(ends)}"
        ).rstrip()

    def predicted(self, step: int, figures: TrainedStep, prediction: Prediction) -> None:
        """Report the first step beside its prediction, in the same terms."""
        self._write({"step": step} | {f"predicted_{k}": v for k, v in prediction._asdict().items()})
        parts = [
            f"gradients in {format_seconds(figures.gradients_s)}"
            f" (predicted {format_seconds(prediction.step_s)})",
            f"peak {format_bytes(figures.used_memory_bytes)}"
            f" (predicted {format_bytes(prediction.device_bytes)})",
        ]
        for tier, used, expected in (
            ("host", figures.host_bytes, prediction.host_bytes),
            ("disk", figures.disk_bytes, prediction.disk_bytes),
        ):
            if used or expected:
                parts.append(
                    f"{tier} {format_bytes(used or 0)} (predicted {format_bytes(expected)})"
                )
        load, num_cores = os.getloadavg()[0], os.cpu_count() or 1
        if figures.gradients_s > 1.5 * prediction.step_s and load > _BUSY_LOAD * num_cores:
            parts.append(f"on a busy machine (load {load:.0f} on {count_words(num_cores, 'core')})")
        self._say(f"first step: {', '.join(parts)}")

    def sample_check(self, step: int, check: SampleCheck | None, seconds: float) -> None:
        """A sampled gradient beside the exact one; None: there was no memory for both."""
        if check is None:
            self._say(f"sample check before step {step}: left out, both gradients did not fit")
            return
        share = check.num_drawn / check.num_chunks
        figures = {"cosine": check.cosine, "error": check.relative_error}
        record: dict[str, object] = {"step": step}
        record |= {f"sample_check_{name}": value for name, value in figures.items()}
        record |= {"sample_check_tokens": check.num_tokens, "sample_check_drawn_share": share}
        self._write(record | {"sample_check_s": seconds})
        known = {name: value for name, value in figures.items() if value is not None}
        self._track(step, {f"sample_check_{name}": value for name, value in known.items()})
        cosine, error = (f"{known[name]:.3f}" if name in known else "-" for name in figures)
        self._say(
            f"sample check before step {step}: cosine {cosine}, relative error {error} of the"
            f" gradient of {check.num_tokens:,} tokens, {check.num_drawn} of {check.num_chunks}"
            f" chunks drawn ({format_seconds(seconds)})"
        )

    def evaluation(self, step: int, evaluations: Mapping[str, Evaluation], seconds: float) -> None:
        """`evaluations` by name; the records' keys are `eval_...`, `eval_training_...`."""
        record: dict[str, object] = {"step": step, "eval_s": seconds}
        for name, evaluation in evaluations.items():
            key = "eval" if name == HELD_OUT else f"eval_{name}"
            values = {f"{key}_loss": evaluation.loss}
            values |= {f"{key}_{metric}": x for metric, x in evaluation.metrics.items()}
            record |= values
            if evaluation.by_position:
                record[f"{key}_by_position"] = [asdict(each) for each in evaluation.by_position]
            self._track(
                step,
                values | {f"{key}_loss_at_{b.start}": b.loss for b in evaluation.by_position},
            )
            buckets = [
                f"<{format_position(bucket.stop)} {bucket.loss:.3f}"
                for bucket in evaluation.by_position
            ]
            self._say(
                f"{name} loss {evaluation.loss:.4f}{_of_pairs(evaluation.metrics)} after step"
                f" {step}{'; by position ' * bool(buckets)}{'  '.join(buckets)}"
            )
        self._write(record)

    def skipped(self, step: int) -> None:
        self._write({"step": step, "skipped": "no label in the batch"})
        self._say(f"a batch before step {step} has no label: skipped")

    def _track(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.track(step, values)

    def _write(self, record: dict[str, object]) -> None:
        self._file.write(json.dumps(record) + "\n")


def _of_pairs(metrics: Mapping[str, float]) -> str:
    """The figures of pairs in a line: how far apart, and how many the right way round."""
    if not metrics:
        return ""
    margin, accuracy = metrics["rewards/margins"], metrics["rewards/accuracies"]
    return f"  margin {margin:.4f}  accuracy {accuracy:.0%}"


def format_position(position: int) -> str:
    """`512`, `4K`, `128K`, `1M`: powers of two as people name context lengths."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if position >= size and position % size == 0:
            return f"{position // size}{unit}"
    return str(position)


def open_bar(stack: ExitStack, start: int, num_steps: int) -> tuple[Say, Callable[[int], None]]:
    """A progress bar below the printed lines, until `stack` ends: how to print, how to advance.

    Without a terminal there is no bar and lines are printed as they are.
    """
    if not sys.stdout.isatty():
        return (lambda line: print(line, flush=True)), (lambda step: None)
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    # rich's own colour of a finished bar is grey where a terminal has 16 colours
    whole = BarColumn(finished_style="green")
    bar = Progress(whole, MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    task = stack.enter_context(bar).add_task("", total=num_steps, completed=start)

    def say(line: str) -> None:
        bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    return say, lambda step: bar.update(task, completed=step)


def _cut(file: Path, keep_bytes: int) -> int:
    """Leave the whole lines within the first `keep_bytes`; returns how many of these are missing,
    as when somebody has moved the file away."""
    if not file.exists():
        return keep_bytes
    kept = file.read_bytes()[:keep_bytes]
    with file.open("r+b") as opened:
        opened.truncate(kept.rfind(b"\n") + 1)
    return keep_bytes - len(kept)
