"""Callbacks, and the records of a run: a printed line and a JSON line per step, and trackers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from furlong.config.schema import LogConfig
from furlong.cost.machine import known_card
from furlong.cost.seconds import step_flops
from furlong.cost.shape import ModelShape
from furlong.errors import ConfigError, differing, in_short
from furlong.files import write_json, write_text
from furlong.planners.candidates import CHUNKS
from furlong.report.beyond import Beyond, beyond_in_words, save_beyond_picture
from furlong.simulate.predict import Prediction, predict_step
from furlong.timeline import MEASURED, MeasuredStep, Timeline
from furlong.train.evaluation import HELD_OUT, Evaluation
from furlong.train.run_folder import TrainReport
from furlong.train.start import TRACKERS
from furlong.units import format_bytes, format_count, format_seconds

Say = Callable[[str], None]
Track = Callable[[int, Mapping[str, float]], None]
"""A tracker's function of a step and its figures by name."""
_TOLD_SHARE = 0.05
"""Smallest share at which a step's line shows recomputation or waiting for data."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of one optimizer step."""

    loss: float | None
    """Mean loss over the labels, or the pairs, of the global batch, before the update. With
    `chunks.sample` and without its `report_loss` it is estimated from the sampled chunks; None if
    they have no label."""
    grad_norm: float
    """Before clipping."""
    lr: float
    num_sequences: int
    num_tokens: int
    num_valid_tokens: int
    longest_tokens: int
    tokens_per_s: float
    peak_memory_bytes: int
    """Peak bytes during the step: of the CUDA allocator, or of the process's resident set on a
    CPU."""
    used_memory_bytes: int
    """Peak bytes of weights, gradients, optimizer and the plan's tensors, which predictions and
    budgets count; see `UsedMemory`."""
    gradients_s: float
    """Seconds of the plan's actions, without the update."""
    chunk_size: int
    """Most tokens in a chunk; fewer than in the step before if this one ran out of memory."""
    forward_s: float
    recompute_s: float
    backward_s: float
    data_s: float
    """Seconds of waiting for the batch."""
    step_s: float
    """Seconds of the whole step, data included."""
    mfu: float | None = None
    """Model FLOPs utilisation, 0 to 1; None if it is unknown (see `build_meter`), and for a sampled
    step, which skips work."""
    cpu_bytes: int | None = None
    """Peak bytes of offloaded tensors in CPU memory; None if there were none."""
    disk_bytes: int | None = None
    plan_s: float | None = None
    """Seconds that this process waited for the step's plan; None if it plans without ranks (see
    `BatchEngine`)."""
    plan_method: str | None = None
    """Names of all replicas' planners (see `planners.search`); None without ranks."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other metrics of the loss by name, such as means over the global batch's pairs."""
    drawn_share: float | None = None
    """Share of the step's chunks that were sampled, chunks of whole sequences included; None if the
    gradient is exact."""


@dataclass(frozen=True, slots=True)
class MfuMeter:
    """Computes model FLOPs utilisation (MFU) from the FLOPs of `cost.seconds.step_flops`, which
    counts attention only inside the causal mask."""

    shape: ModelShape
    peak_flops_per_s: float
    has_frozen_base: bool = False
    num_devices: int = 1

    def mfu(self, seq_lens: Iterable[int], seconds: float) -> float:
        """Return the MFU, 0 to 1, of a step that took `seconds` for sequences of these lengths."""
        flops = step_flops(self.shape, seq_lens, has_frozen_base=self.has_frozen_base)
        return flops / (seconds * self.peak_flops_per_s * self.num_devices)


def build_meter(
    shape: ModelShape | None,
    device: torch.device,
    dtype: str,
    *,
    has_frozen_base: bool,
    num_devices: int = 1,
) -> MfuMeter | None:
    """Return an MFU meter; None if the model's shape or the device's peak FLOPs are unknown.

    Peaks are known for bfloat16 on the GPUs of `cost.machine`.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    card = known_card(name)
    if card is None or shape is None or dtype != "bfloat16":
        return None
    return MfuMeter(shape, card.peak_flops_per_s, has_frozen_base, num_devices)


class MetricsLog:
    """Writes figures to `metrics.jsonl` line by line, so that a killed run keeps them. Also prints
    them and passes them to trackers."""

    def __init__(
        self,
        file: Path | None,
        num_steps: int,
        say: Say = print,
        *,
        keep_bytes: int | None = None,
        done: int = 0,
        trackers: Sequence[Track] = (),
        advance: Callable[[int], None] = lambda step: None,
    ) -> None:
        """
        Args:
            file: The file metrics.jsonl; None: write no records.
            keep_bytes: Length of the file at the checkpoint from which the run resumes. Later
                records are removed. None: all records are kept.
            done: Step of that checkpoint.
            advance: Called with the number of each finished step.
        """
        self._file = None
        self._keep_bytes = keep_bytes or 0
        if file is not None:
            if keep_bytes is not None and (told := _continue(file, keep_bytes, done)):
                say(told)
            self._file = file.open("a", encoding="utf-8", buffering=1)
        self._num_steps = num_steps
        self._say = say
        self._trackers = [*trackers]
        self._advance = advance

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._keep_bytes = self.num_bytes
            self._file.close()
            self._file = None

    @property
    def num_bytes(self) -> int:
        """Bytes written to the file so far, earlier records included."""
        return self._keep_bytes if self._file is None else self._file.tell()

    def say(self, line: str) -> None:
        """Print a line, above the progress bar if there is one."""
        self._say(line)

    def step(self, step: int, figures: StepFigures) -> None:
        values = {name: value for name, value in asdict(figures).items() if value is not None}
        values |= values.pop("metrics")
        self._write({"step": step, "loss": figures.loss} | values)
        self._track(step, {name: x for name, x in values.items() if not isinstance(x, str)})
        self._say(self._line(step, figures))
        self._advance(step)

    def _line(self, step: int, figures: StepFigures) -> str:
        """Format a step's main figures as a console line; records hold all figures."""
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
            f"  loss {loss:>6}{_metrics_words(figures.metrics)}{drawn}"
            f"  grad {figures.grad_norm:<7.3g}  lr {figures.lr:.2e}"
            f"  {format_seconds(figures.step_s):>7}"
            f"  {format_count(figures.tokens_per_s):>5} tokens/s"
            + ("" if figures.mfu is None else f"  MFU {figures.mfu:5.1%}")
            + f"  memory {format_bytes(figures.peak_memory_bytes):>8}{''.join(ends)}"
        ).rstrip()

    def predicted(self, step: int, figures: StepFigures, prediction: Prediction) -> None:
        """Report measured and predicted times and memory of the first step."""
        self._write({"step": step} | {f"predicted_{k}": v for k, v in prediction._asdict().items()})
        told, expected = format_seconds(figures.gradients_s), format_seconds(prediction.step_s)
        parts = [f"gradients in {told} (predicted {expected})"]
        for target, used_bytes, expected_bytes in (
            ("peak", figures.used_memory_bytes, prediction.device_bytes),
            ("cpu", figures.cpu_bytes or 0, prediction.cpu_bytes),
            ("disk", figures.disk_bytes or 0, prediction.disk_bytes),
        ):
            if used_bytes or expected_bytes:
                told, expected = format_bytes(used_bytes), format_bytes(expected_bytes)
                parts.append(f"{target} {told} (predicted {expected})")
        self._say(f"first step: {', '.join(parts)}")

    def evaluation(self, step: int, evaluations: Mapping[str, Evaluation], seconds: float) -> None:
        """Report evaluations by name. In records, keys start with `eval_` for held-out data, with
        `eval_N_` for that with a maximum of N tokens, and with `eval_training_` for training
        sequences."""
        record: dict[str, object] = {"step": step, "eval_s": seconds}
        for name, evaluation in evaluations.items():
            key = "_".join(("eval", *name.removeprefix(HELD_OUT).split()))
            by_position, beyond = evaluation.by_position, evaluation.beyond
            values = {f"{key}_loss": evaluation.loss}
            values |= {f"{key}_{metric}": x for metric, x in evaluation.metrics.items()}
            record |= values
            if by_position:
                record[f"{key}_by_position"] = [asdict(each) for each in by_position]
            if beyond is not None:
                record[f"{key}_beyond"] = asdict(beyond) | {"rises_from": beyond.rises_from}
            self._track(step, values | {f"{key}_loss_at_{b.start}": b.loss for b in by_position})
            buckets = [f"<{format_position(b.stop)} {b.loss:.3f}" for b in by_position]
            self._say(
                f"{name} loss {evaluation.loss:.4f}{_metrics_words(evaluation.metrics)} after step"
                f" {step}{'; by position ' * bool(buckets)}{'  '.join(buckets)}"
            )
            if beyond is not None:
                self._say(f"{name} loss {beyond_in_words(beyond)}")
        self._write(record)

    def samples(self, step: int, texts: Sequence[tuple[str, str]]) -> None:
        """Print generated texts and write them to the log file. `texts`: (prompt, text generated
        after it)."""
        self._write({"step": step, "samples": [list(pair) for pair in texts]})
        for prompt, text in texts:
            self._say(f"sample after step {step}: {prompt!r:.80} -> {text!r:.400}")

    def skipped(self, step: int) -> None:
        self._write({"step": step, "skipped": "no label in the batch"})
        self._say(f"a batch before step {step} has no label: skipped")

    def _track(self, step: int, values: Mapping[str, float]) -> None:
        for track in [*self._trackers]:
            try:
                track(step, values)
            except Exception as error:  # such as a lost connection: no reason to end a run
                self._trackers.remove(track)
                self._say(f"warning: a tracker takes no more figures, metrics.jsonl does: {error}")

    def _write(self, record: dict[str, object]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")


class Callback:
    """Base class of callbacks. The trainer calls the method of each event, on every process.
    `trainer`: the `furlong.Trainer`, typed as Any since `train.trainer` imports this module."""

    def on_step_end(self, trainer: Any, figures: StepFigures) -> None:
        """Called after the weights are updated. Each parameter's `.grad` still has the step's
        clipped gradient."""

    def on_evaluate(self, trainer: Any, evaluations: Mapping[str, Evaluation]) -> None: ...

    def on_save(self, trainer: Any) -> None: ...

    def on_export(self, trainer: Any, report: TrainReport) -> None: ...

    def on_train_end(self, trainer: Any, report: TrainReport) -> None:
        """Called after the model is exported; not called if a signal stopped the run."""


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise ConfigError if one of the objects is not a `Callback`."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(
                given=f"the callback {callback!r}",
                required="objects of subclasses of furlong.Callback",
                source="callbacks of Trainer",
                change="derive its class from furlong.Callback, and give an object of it",
            )


class Records(Callback):
    """Callback that reports each step, and the prediction for the first step.

    It also writes the measured timeline of the first step, the last step and each step with a
    checkpoint. All timelines go to one file, and each one replaces the previous one. After each
    evaluation beyond the trained length it draws the losses by position, those of earlier
    evaluations since the start of the process too. `profiled`: called after each step, to advance a
    profiler.
    """

    def __init__(self, profiled: Callable[[], None]) -> None:
        self._profiled = profiled
        self._beyond: dict[str, dict[str, Beyond]] = {}

    def on_evaluate(self, trainer: Any, evaluations: Mapping[str, Evaluation]) -> None:
        for name, evaluation in evaluations.items():
            if evaluation.beyond is not None and trainer.processes.is_first:
                curves = self._beyond.setdefault(name, {})
                curves[f"after step {trainer.progress.step}"] = evaluation.beyond
                file = trainer.run.path / f"beyond-{name.split()[-1]}.png"
                save_beyond_picture(curves, file)

    def on_step_end(self, trainer: Any, figures: StepFigures) -> None:
        step, log, result = trainer.progress.step, trainer.log, trainer.result
        plan, cost, processes = result.plan, trainer.run_model.cost, trainer.processes
        log.step(step, figures)
        if step == 1 and processes.is_first:
            if cost is not None and plan is not None:
                log.predicted(step, figures, predict_step(cost, plan))
            if result.attention.calls:
                log.say(f"first step: attention {result.attention}")
        is_shown = step in (1, trainer.num_steps) or trainer.cadence.saves(step)
        if plan is not None and is_shown:
            # processes of a pool run one list of the plan together: the first one's times are taken
            ranks = trainer.engine.engine.ranks
            own = result.timeline.to_json() if ranks is None or ranks.process == 0 else []
            records = [record for each in processes.each(own) for record in each]
            if processes.is_first:  # each list from its own start
                measured = MeasuredStep(step, plan, Timeline.from_json(records))
                write_json(trainer.run.path / MEASURED, measured.to_json())
        self._profiled()


def _continue(file: Path, keep_bytes: int, done: int) -> str:
    """Remove from the file unreadable records, records after the first `keep_bytes` bytes, and
    records of steps after `done`. Return a warning if steps are missing, else ""."""
    found = file.read_bytes() if file.exists() else b""
    kept, steps = [], set[int]()
    for line in found[:keep_bytes].split(b"\n")[:-1]:
        try:
            record = json.loads(line.decode())
            if record.get("step", 0) > done:  # of a run that went on after the file was cut
                continue
        except (ValueError, TypeError, AttributeError):
            continue
        kept.append(line + b"\n")
        steps |= {record["step"]} if "grad_norm" in record else set()
    left = b"".join(kept)
    if found.startswith(left):
        with file.open("ab") as opened:
            opened.truncate(len(left))
    else:
        write_text(file, left.decode())
    missing = sorted({*range(1, done + 1)} - steps) if keep_bytes else []
    if not missing:
        return ""
    return (
        f"warning: {file} lacks {len(missing)} of {done} steps, the first of them step {missing[0]}"
        ": it was cut, lost or damaged; checkpoints and weights do not depend on it"
    )


def _metrics_words(metrics: Mapping[str, float]) -> str:
    """Return a loss's metrics as text to append to a step's printed line. For preference pairs the
    text has only the reward margin and accuracy."""
    if "rewards/margins" in metrics:
        margin, accuracy = metrics["rewards/margins"], metrics["rewards/accuracies"]
        return f"  margin {margin:.4f}  accuracy {accuracy:.0%}"
    return "".join(f"  {name} {value:.4g}" for name, value in metrics.items())


def format_position(position: int) -> str:
    """Return a position as context lengths are written: `512`, `4K`, `128K`, `1M`."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if position >= size and position % size == 0:
            return f"{position // size}{unit}"
    return str(position)


def open_bar(stack: ExitStack, start: int, num_steps: int) -> tuple[Say, Callable[[int], None]]:
    """Open a progress bar below the printed lines until `stack` closes. Return functions that print
    a line, and that advance the bar to a step. Without a terminal there is no bar."""
    if not sys.stdout.isatty():
        return (lambda line: print(line, flush=True)), (lambda step: None)
    from tqdm import tqdm  # type: ignore[import-untyped]

    bar = stack.enter_context(tqdm(total=num_steps, initial=start, file=sys.stdout, unit="step"))
    return bar.write, lambda step: bar.update(step - bar.n)


def open_profiler(
    stack: ExitStack, steps: tuple[int, int] | None, done: int, file: Path
) -> Callable[[], None]:
    """Profile a run, if `steps` is set, from the first to the last of the two `steps` (both
    included). The run has already taken `done` steps. The trace is written to `file`. Return a
    function to call after each step."""
    if steps is None or done >= steps[1]:
        return lambda: None
    from torch.profiler import profile, schedule

    def write(profiler: Any) -> None:
        file.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(file))

    first = max(steps[0], done + 1)
    before = first - 1 - done
    warmup = min(before, 1)  # so that the profiler starts before the first step that it shows
    active = steps[1] + 1 - first
    plan = schedule(wait=before - warmup, warmup=warmup, active=active, repeat=1)
    profiler = stack.enter_context(profile(schedule=plan, on_trace_ready=write))
    return profiler.step


def open_trackers(
    stack: ExitStack, folder: Path, settings: LogConfig, config: dict[str, Any], start_step: int
) -> list[Track]:
    """Open the trackers (such as wandb) that `settings` names; `stack` closes them. Return a
    function per tracker that logs the figures of a step.

    If the run folder has been tracked before, each tracker continues its earlier run. `start_step`:
    steps taken so far. Raises ConfigError if a tracker fails to start.
    """
    file = folder / "trackers.json"
    runs = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    tracks = []
    for name in TRACKERS:
        if not (asked := getattr(settings, name)):
            continue
        try:
            track, close, runs[name] = _open_tracker(
                name, settings, folder, config, start_step, known=runs.get(name)
            )
        except Exception as error:  # settings, log-in, the connection: each has types of its own
            raise ConfigError(
                given=f"log.{name} = {asked}: {in_short(error)}",
                required=f"a run that {name} lets begin",
                source=f"log.{name}",
                change=f"log in to {name}, set it to be offline, or no log.{name}; then go on with"
                " --resume",
            ) from error
        stack.callback(_close, name, close)
        tracks.append(track)
    if tracks:
        write_json(file, runs)
    return tracks


def _close(name: str, close: Callable[[], None]) -> None:
    try:
        close()
    except Exception as error:  # must not make a finished run fail
        print(f"warning: {name} may lack the last figures, metrics.jsonl has them: {error}")


def _open_tracker(
    name: str, settings: LogConfig, folder: Path, config: dict[str, Any], start_step: int,
    *, known: str | None,
) -> tuple[Track, Callable[[], None], str | None]:  # fmt: skip
    """Open one tracker. `known`: the tracker's id of a run to continue, if any.

    Returns:
        A function that logs figures, a function that closes the tracker, and the tracker's id of
        the run (None if it has no ids), in this order.
    """
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / name), purge_step=start_step + 1)

        def track(step: int, values: Mapping[str, float]) -> None:
            for figure, value in values.items():
                writer.add_scalar(figure, value, step)

        return track, writer.close, None
    if name == "mlflow":
        import mlflow

        mlflow.set_experiment(settings.mlflow)
        known_id = mlflow.start_run(run_id=known, run_name=settings.name).info.run_id
        keys = [] if known else [*differing(config, {}).items()]
        for start in range(0, len(keys), 100):  # mlflow's limit per call
            mlflow.log_params({key: own for key, (own, _) in keys[start : start + 100]})
        return (lambda step, x: mlflow.log_metrics(dict(x), step=step)), mlflow.end_run, known_id
    common: dict[str, Any] = {
        "project": getattr(settings, name), "resume": "allow", "config": config,
    }  # fmt: skip
    if name == "trackio":
        import trackio

        run = trackio.init(name=known or settings.name, **common)
    else:
        import wandb

        own = {"entity": settings.wandb_entity, "name": settings.name, "dir": str(folder)}
        run = wandb.init(id=known, **own, **common)
    known_id = run.name if name == "trackio" else run.id
    return (lambda step, x: run.log(dict(x), step=step)), run.finish, known_id
