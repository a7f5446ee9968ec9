"""The steps of a run that survives: restored, saved, evaluated, tracked and stopped on demand."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from furlong.config.schema import RunConfig
from furlong.data.loader import Batch
from furlong.files import write_json
from furlong.plan.plan import ChunkPlan
from furlong.planners.decide import Decision
from furlong.planners.options import ChunkOptions
from furlong.simulate.predict import Prediction
from furlong.timeline import MEASURED, MeasuredStep, Timeline
from furlong.train.batches.draws import step_options
from furlong.train.batches.engines import Engines
from furlong.train.batches.fitting import Fitting
from furlong.train.checkpoint_folder import list_checkpoints
from furlong.train.checkpoints import Checkpoints, RunState
from furlong.train.choose_plan import shrunk, values_of
from furlong.train.evaluator import evaluator
from furlong.train.figures.metrics import MetricsLog, open_bar
from furlong.train.figures.mfu import MfuMeter, build_meter
from furlong.train.figures.trackers import open_trackers
from furlong.train.figures.used_memory import UsedMemory
from furlong.train.loop import Cadence, LoopFigures, Progress, run_steps
from furlong.train.processes import Processes, command_like
from furlong.train.run_folder import CHECKPOINTS, CONFIG, METRICS, OPTIONS, RunFolder
from furlong.train.sample_check import check_sample
from furlong.train.setup.optimizer import build_optimizer, build_schedule
from furlong.train.setup.prepare import RunData
from furlong.train.stop import StopRequest

if TYPE_CHECKING:
    from furlong.runtime.step import StepResult


def run_resumable(
    config: RunConfig,
    run: RunFolder,
    engines: Engines,
    model: nn.Module,
    decision: Decision,
    data: RunData,
    stop: StopRequest,
    *,
    num_steps: int,
    architecture: dict[str, Any],
    base: str | None,
    reference: str | None = None,
    predict: Callable[[ChunkPlan], Prediction] | None = None,
) -> LoopFigures:
    """Begins, or goes on from the run's checkpoint, and takes the steps up to `num_steps`, or up
    to the one in which `stop` is asked of any process. `predict` tells what a plan is expected to
    take; `base` and `reference` are fingerprints, see `RunState`.

    The run folder must be locked. Raises CheckpointError, DivergenceError.
    """
    settings, processes, options = config.train, engines.processes, decision.options
    state = _build_state(config, model, decision, data.fingerprint, num_steps, architecture)
    state = replace(state, base_fingerprint=base, reference=reference, processes=processes)
    progress = Progress()
    if run.checkpoint is not None and run.state is not None:
        progress = state.restore(run.checkpoint, run.state)
        print(f"resumed from {run.checkpoint.name}: step {progress.step} of {num_steps}")
    # The config comes last: a folder that has one holds a run.
    if processes.is_first:
        _write_options(run.path, decision, options)
        write_json(run.path / CONFIG, state.config)
    with ExitStack() as stack:
        log = _open_log(stack, config, run, progress.step, num_steps, processes)
        write = partial(_write_options, run.path, decision)
        changed = write if processes.is_first else lambda _: None
        fitting = Fitting(options, say=log.say, changed=changed, alike=processes.alike)
        checkpoints = Checkpoints(
            run.path / CHECKPOINTS, processes, in_background=settings.async_save, say=log.say
        )
        stack.callback(checkpoints.close)
        save = _saver(state, fitting, checkpoints, log)
        cadence = _cadence(config, run.path, state, engines, fitting, data, stop, log, save)
        cadence = replace(cadence, predict=predict if processes.is_first else None)
        figures = run_steps(
            engines,
            model,
            data.batches(progress.data),
            fitting,
            num_steps=num_steps,
            optimizer=state.optimizer,
            scheduler=state.scheduler,
            max_grad_norm=settings.max_grad_norm,
            log=log,
            progress=progress,
            cadence=cadence,
            meter=_build_meter(config, model, base, processes.num_processes),
            budget_bytes=None if config.memory.device == "auto" else config.memory.device,
        )
        checkpoints.finish()
    if figures.stopped:
        command = command_like(processes.launch, f"train {run.path / CONFIG} --resume")
        _tell_how_to_go_on(run.path, stop.signal_name, figures.progress.step, num_steps, command)
    return figures


def _cadence(
    config: RunConfig,
    folder: Path,
    state: RunState,
    engines: Engines,
    fitting: Fitting,
    data: RunData,
    stop: StopRequest,
    log: MetricsLog,
    save: Callable[[Progress], None],
) -> Cadence:
    """All that happens between the steps, but for predictions."""
    settings, processes, model = config.train, engines.processes, state.model

    def is_stopped() -> bool:
        return processes.any(stop.asked)

    evaluate = evaluator(engines, model, fitting, settings, data.train, data.held_out, is_stopped)
    return Cadence(
        evaluate=evaluate,
        eval_every_steps=settings.eval_every_steps,
        save=save if settings.save_every_steps else None,
        save_every_steps=settings.save_every_steps,
        measured=partial(_write_measured, folder, engines) if settings.loss == "sft" else None,
        check=_checker(config, engines, model, fitting, state.optimizer, log),
        should_stop=is_stopped,
    )


def _build_state(
    config: RunConfig,
    model: nn.Module,
    decision: Decision,
    data_fingerprint: dict[str, str],
    num_steps: int,
    architecture: dict[str, Any],
) -> RunState:
    settings = config.train
    optimizer = build_optimizer(
        model.parameters(),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    scheduler = build_schedule(
        optimizer, settings.schedule, num_steps=num_steps, warmup_ratio=settings.warmup_ratio
    )
    return RunState(
        config=config.model_dump(mode="json"),
        decision=decision,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data_fingerprint=data_fingerprint,
        base_fingerprint=None,
        architecture=architecture,
    )


def _open_log(
    stack: ExitStack,
    config: RunConfig,
    run: RunFolder,
    start_step: int,
    num_steps: int,
    processes: Processes,
) -> MetricsLog:
    """The log of the run, cut back to what the checkpoint knows of; that of the first process is
    kept."""
    if not processes.is_first:
        return stack.enter_context(MetricsLog(Path(os.devnull), num_steps))
    trackers = open_trackers(
        stack,
        run.path,
        tensorboard=config.log.tensorboard,
        wandb=config.log.wandb,
        config=config.model_dump(mode="json"),
        start_step=start_step,
    )
    say, advance = open_bar(stack, start_step, num_steps)
    log = MetricsLog(
        run.path / METRICS,
        num_steps,
        say,
        keep_bytes=0 if run.state is None else run.state["metrics_bytes"],
        trackers=trackers,
        advance=advance,
    )
    return stack.enter_context(log)


def _write_options(folder: Path, decision: Decision, options: ChunkOptions) -> None:
    """`options`: those of now, which a step that did not fit has changed."""
    write_json(folder / OPTIONS, values_of(shrunk(decision, options)))


def _saver(
    state: RunState, fitting: Fitting, checkpoints: Checkpoints, log: MetricsLog
) -> Callable[[Progress], None]:
    def save(progress: Progress) -> None:
        state.processes.at("a checkpoint")
        now = replace(state, decision=shrunk(state.decision, fitting.options))
        now.save(checkpoints, progress, metrics_bytes=log.num_bytes)

    return save


def _write_measured(folder: Path, engines: Engines, step: int, result: StepResult) -> None:
    """Writes a step with the records of all lists of its plan, each from its own start; of the
    processes of a pool, which obey one list together, the first tells."""
    assert result.plan is not None  # the engine plans every step
    ranks, processes = engines.engine.ranks, engines.processes
    records = result.timeline.to_json() if ranks is None or ranks.process == 0 else []
    told = processes.each(records)
    if processes.is_first:
        records = [record for of_process in told for record in of_process]
        measured = MeasuredStep(step, result.plan, Timeline.from_json(records))
        write_json(folder / MEASURED, measured.to_json())


def _checker(
    config: RunConfig,
    engines: Engines,
    model: nn.Module,
    fitting: Fitting,
    optimizer: torch.optim.Optimizer,
    log: MetricsLog,
) -> Callable[[int, Batch, UsedMemory], None] | None:
    """Compares a sampled gradient with the exact one where that is due; None where it never is."""
    sample = config.chunks.sample
    if sample is None or not sample.check_every_steps:
        return None
    every_steps = sample.check_every_steps

    def check(step: int, batch: Batch, used: UsedMemory) -> None:
        if step % every_steps:
            return
        started_s = time.perf_counter()
        optimizer.zero_grad()  # the last step's gradients, which nobody needs any more
        used.restart()
        options = step_options(fitting.options, step)
        found = check_sample(engines, model, batch, options, watch=used.check)
        log.sample_check(step, found, time.perf_counter() - started_s)

    return check


def _build_meter(
    config: RunConfig, model: Any, fingerprint: str | None, num_devices: int
) -> MfuMeter | None:
    device = next(model.parameters()).device
    return build_meter(
        model.config.get_text_config(),
        torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        getattr(torch, config.model.dtype),
        has_frozen_base=fingerprint is not None,
        num_devices=num_devices,
    )


def _tell_how_to_go_on(
    folder: Path, signal_name: str | None, step: int, num_steps: int, command: str
) -> None:
    cause = signal_name or "a signal to another process"
    where = f"stopped by {cause} after step {step} of {num_steps}"
    if list_checkpoints(folder / CHECKPOINTS):
        print(f"{where}; go on with: {command}")
    else:
        print(f"{where}; there is no checkpoint: {command} begins again")
