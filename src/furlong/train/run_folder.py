"""The folder of a run: who may write into it, what it holds, and whether a run may go on in it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from furlong.config.schema import RunConfig
from furlong.config.sources import build_run, load_run
from furlong.errors import CheckpointError, ConfigError, differing
from furlong.files import TEMPORARY, os_errors_told
from furlong.planners.decide import Decision
from furlong.timeline import MEASURED
from furlong.train.checkpoint_folder import (
    NUM_KEPT,
    STATE,
    list_checkpoints,
    newest_checkpoint,
    read_state,
    set_aside,
)
from furlong.train.choose_plan import decision_of
from furlong.train.report import TrainReport, missing_of_export, read_report
from furlong.units import format_bytes

CONFIG, OPTIONS, METRICS, REPORT = "config.json", "options.json", "metrics.jsonl", "report.json"
CHECKPOINTS, EXPORT, PROFILE, WANDB = "checkpoints", "model", "profile", "wandb.json"
_LOCK = ".lock"
_FILES = (CONFIG, OPTIONS, METRICS, REPORT, MEASURED, WANDB, _LOCK)
_FOLDERS = (CHECKPOINTS, EXPORT, PROFILE)
# What these change is time, memory, what is shown and how long a run goes on: neither the weights
# of its steps up to now nor their order.
_FREE_KEYS = (
    "chunks.", "memory.", "parallel.", "log.", "out", "data.eval", "data.cache_dir",
    "train.save_every_steps", "train.eval_every_steps", "train.eval_train_share",
    "train.async_save", "train.steps", "train.epochs",
)  # fmt: skip
_FREE_OF_A_SAMPLE = ("chunks.sample.report_loss", "chunks.sample.check_every_steps")
_FREE_WORDS = (
    "free are the sections chunks (but for sample, and with it size), memory, parallel and log,"
    " data.eval, data.cache_dir, train.save_every_steps, train.async_save, train.eval_*,"
    " train.steps and train.epochs"
)
_DECIDING_KEYS = ("chunks.", "memory.", "parallel.")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where a run writes, and what it goes on from."""

    path: Path
    decided: Decision | None = None
    """Taken before, and still valid."""
    checkpoint: Path | None = None
    state: dict[str, Any] | None = None
    """Values that the checkpoint holds beside its tensors."""
    is_new: bool = True
    report: TrainReport | None = None
    """That of a finished run whose exported model is whole."""


def open_run_folder(
    stack: ExitStack, config: RunConfig, *, resume: bool, num_processes: int = 1
) -> RunFolder:
    """The run folder `config.out`; that of a run to resume is locked until `stack` ends.

    A new run needs an empty one. With `resume` the run in it goes on from its newest whole
    checkpoint, or from the start where there is none. Nothing is created. Raises ConfigError or
    CheckpointError.
    """
    path = Path(config.out).expanduser()
    check_creatable(path, "out")
    with folder_errors_reported(path):
        if not resume or not holds_run(path):
            _check_empty(path, config.out)
            if resume:
                print(f"nothing to resume in {path}: a new run")
            return RunFolder(path)
        _check_kinds(path)
        lock_folder(stack, path)
        differing = _changed(load_run(path / CONFIG), config)
        _check_same(differing, path, config, may_move=True)
        goes_on = any(key in differing for key in ("train.steps", "train.epochs"))
        if not goes_on and (report := _finished(path)) is not None:
            _check_same(differing, path, config, may_move=False)
            print(f"the run in {path} is finished: its model is {path / EXPORT}")
            return RunFolder(path, is_new=False, report=report)
        return _resumed(path, config, differing, num_processes)


def _finished(path: Path) -> TrainReport | None:
    """The report of a run with a whole exported model; None where there is something to do.

    Raises CheckpointError where the model is missing and nothing can be exported.
    """
    if not (path / REPORT).exists():
        return None
    report = read_report(path / REPORT)
    missing = missing_of_export(path / EXPORT, report.export_files)
    if missing is None:
        return report
    if not list_checkpoints(path / CHECKPOINTS):
        raise CheckpointError(
            given=f"a finished run without {missing}, and no checkpoint to export it from",
            required="the exported model, or a checkpoint",
            source=str(path),
            change=f"restore the model; or remove {path / REPORT} and --resume trains again from"
            " the first step",
        )
    print(f"the run in {path} is finished, but {missing} is missing or cut: it is exported again")
    return None


def _resumed(
    path: Path, config: RunConfig, differing: Mapping[str, Any], num_processes: int
) -> RunFolder:
    """The run folder with the checkpoint that the run goes on from. Raises CheckpointError."""
    checkpoint = newest_checkpoint(path / CHECKPOINTS)
    state = None
    if checkpoint is None:
        _check_same(differing, path, config, may_move=False)
        print(f"no checkpoint in {path}: the run begins again with its first step")
    else:
        state = read_state(checkpoint)
        _check_own(checkpoint, state, config)
    set_aside(path / CHECKPOINTS, checkpoint)
    for leftover in path.glob(f".*{TEMPORARY}"):  # of a process that was killed while it wrote
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
    return RunFolder(
        path,
        decided=_decided(path, state, differing, num_processes),
        checkpoint=checkpoint,
        state=state,
        is_new=False,
    )


def _check_same(
    differing: Mapping[str, tuple[Any, Any]], path: Path, config: RunConfig, *, may_move: bool
) -> None:
    """Raises ConfigError if a key that must be the run's own differs. `may_move`: whether data may
    lie elsewhere, since a checkpoint knows their contents (`check_data`)."""
    refused = _not_free(differing, config, may_move=may_move)
    if refused:
        raise ConfigError(
            given="; ".join(f"{key} = {new!r}, the run has {old!r}"
                            for key, (old, new) in refused.items()),
            required=f"the config of the run that is resumed; {_FREE_WORDS}",
            source=str(path / CONFIG),
            change=f"furlong train {path / CONFIG} --resume, or another out for another run",
        )  # fmt: skip


def _check_own(checkpoint: Path, state: Mapping[str, Any], config: RunConfig) -> None:
    """Raises CheckpointError if a checkpoint was written with another config than the run's."""
    written = build_run(state["config"], str(checkpoint / STATE))
    refused = _not_free(_changed(written, config), config, may_move=True)
    if refused:
        raise CheckpointError(
            given="; ".join(f"{key} = {old!r} in checkpoint {checkpoint.name}, the run has {new!r}"
                            for key, (old, new) in refused.items()),
            required=f"a checkpoint that this run has written; {_FREE_WORDS}",
            source=str(checkpoint / STATE),
            change=f"move {checkpoint} away if it is of another run, or restore the run's config",
        )  # fmt: skip


def _not_free(
    differing: Mapping[str, tuple[Any, Any]], config: RunConfig, *, may_move: bool
) -> dict[str, tuple[Any, Any]]:
    return {
        key: pair
        for key, pair in differing.items()
        if not (_is_free(key, config) or _means_the_same(key, *pair, may_move=may_move))
    }


def _means_the_same(key: str, old: Any, new: Any, *, may_move: bool) -> bool:
    """Whether two values differ in how they spell what they name, or in where it lies."""
    match key:
        case "model.name":
            return _place(old) == _place(new)
        case "data.train":
            return _sources(old, may_move) == _sources(new, may_move)
    return False


def _sources(named: list[Any], may_move: bool) -> list[tuple[Any, ...]]:
    """Where each entry of `data.train` is, unless it may move; its weight and its split."""
    whole = [{"path": one} if isinstance(one, str) else one for one in named]
    return [
        ("" if may_move else _place(one["path"]), one.get("weight", 1.0), one.get("split"))
        for one in whole
    ]


def _place(name: str) -> str:
    """A path in one spelling; a name of the hub as it is."""
    path = os.path.expanduser(name)
    return os.path.realpath(path) if os.path.exists(path) else name


def _is_free(key: str, config: RunConfig) -> bool:
    if key.startswith("chunks.sample"):  # another estimate of the gradient
        return key in _FREE_OF_A_SAMPLE
    if key == "chunks.size" and config.chunks.sample is not None:
        return False
    return key.startswith(_FREE_KEYS)


def create_run_folder(stack: ExitStack, path: Path) -> None:
    """The folder of a new run, locked until `stack` ends. Raises ConfigError, CheckpointError."""
    with folder_errors_reported(path):
        lock_folder(stack, path)
        _check_empty(path, str(path))  # another process may have been faster


def clear_export(path: Path) -> None:
    """Makes room for the exported model: what is there is renamed, for anybody may have written
    into it."""
    export = path / EXPORT
    if os.path.lexists(export):
        names = (f"{EXPORT}.before{f'-{number}' * (number > 1)}" for number in count(1))
        aside = next(path / name for name in names if not os.path.lexists(path / name))
        os.rename(export, aside)
        print(f"{export}, which was there already, is kept as {aside.name}")


def lock_folder(stack: ExitStack, path: Path) -> None:
    """Creates the folder if need be; no other process can lock it until `stack` ends.

    The lock is the operating system's: it ends with the process, however that ends.
    """
    path.mkdir(parents=True, exist_ok=True)
    lock = stack.enter_context((path / _LOCK).open("a"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            given=f"{path}, in which another process is training",
            required="one process per run folder",
            source="out",
            change="wait for the other process or end it, or set another out",
        ) from None
    except OSError:
        print(f"warning: the file system of {path} has no locks: start no second process in it")


def _changed(saved: RunConfig, given: RunConfig) -> dict[str, tuple[Any, Any]]:
    """`{"train.lr": (saved, given)}` for every key in which two configs differ."""
    return differing(saved.model_dump(mode="json"), given.model_dump(mode="json"))


def holds_run(path: Path) -> bool:
    """Whether a run has begun in `path`. A Hugging Face model's folder has a config.json too."""
    return (path / CONFIG).exists() and any(
        (path / name).exists() for name in (OPTIONS, METRICS, CHECKPOINTS)
    )


def _check_kinds(path: Path) -> None:
    """Raises CheckpointError if a folder stands where a run has a file, or the reverse, or a pipe
    or a device, of which reading and writing may have no end."""
    for name in (*_FILES, *_FOLDERS):
        entry, is_folder = path / name, name in _FOLDERS
        if entry.exists() and not (entry.is_dir() if is_folder else entry.is_file()):
            found = "folder" if entry.is_dir() else "file" if entry.is_file() else "pipe or device"
            raise CheckpointError(
                given=f"{entry}, which is a {found}",
                required=f"a {'folder' if is_folder else 'file'}, as a run has written it",
                source=str(path),
                change=f"move {entry} away or restore it",
            )


def _check_empty(path: Path, out: str) -> None:
    if not path.exists():
        return
    if path.is_dir() and all(_is_leftover(entry) for entry in path.iterdir()):
        return
    if (path / CHECKPOINTS).is_dir() and not (path / CONFIG).exists():
        raise ConfigError(
            given=f"out = {out}, which holds checkpoints but no {CONFIG}",
            required="a run's folder with all its files, or a new folder",
            source="out",
            change=f"restore {CONFIG} (every checkpoint's {STATE} has it, under the key config)"
            " and add --resume, or set another out",
        )
    has_run = holds_run(path)
    go_on = "add --resume to go on with that run, " if has_run else ""
    raise ConfigError(
        given=f"out = {out}, which {'holds a run' if has_run else 'is not empty'}",
        required="a folder that does not exist or is empty",
        source="out",
        change=f"{go_on}set another out, or move the old folder away",
    )


def _is_leftover(entry: Path) -> bool:
    """Whether a process that was killed before its run began may have left the entry."""
    is_unfinished = entry.name.startswith(".") and entry.name.endswith(TEMPORARY)
    of_a_run = (_LOCK, OPTIONS) if (entry.parent / _LOCK).exists() else (_LOCK,)
    return is_unfinished or entry.name in of_a_run


def _decided(
    path: Path,
    state: Mapping[str, Any] | None,
    differing: Mapping[str, Any],
    num_processes: int = 1,
) -> Decision | None:
    changed = [key for key in differing if key.startswith(_DECIDING_KEYS)]
    if state and state.get("written_by", {}).get("processes", 1) != num_processes:
        changed.append("the number of processes")
    if changed:
        print(f"options are decided again, for these keys have changed: {', '.join(changed)}")
        return None
    found = None
    # Without a checkpoint nothing has been computed by them: what cannot be read is decided again.
    with nullcontext() if state else suppress(OSError, ValueError, TypeError):
        found = decision_of(state["options"] if state else json.loads((path / OPTIONS).read_text()))
    return found if found and found.layout.num_devices == num_processes else None


def folder_errors_reported(folder: Path) -> AbstractContextManager[None]:
    """Within it what the operating system refuses inside `folder`, to whomever, is CheckpointError.

    A write that finds the disk full names no file: enter this only where `folder` is written to.
    """
    return os_errors_told(
        CheckpointError,
        required="a run folder whose files can be read and written",
        source=str(folder),
        or_else=", then go on with --resume, or set another out",
        inside=folder,
    )


def check_creatable(path: Path, key: str) -> None:
    """Raises ConfigError if no folder can be at `path`, which `key` named: before work is done that
    would then be lost."""
    try:
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        reason = None if there.is_dir() else f"{there} is no folder"
        if there == path and reason is None:
            return
        if reason is None and not os.access(there, os.W_OK | os.X_OK):
            reason = f"{there} cannot be written to"
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise ConfigError(
            given=f"{path}: {reason}",
            required="a place where a folder can be made",
            source=key,
            change="check the path, or choose another place",
        )


def check_room(folder: Path, checkpoints: Path, *, weight_bytes: int, num_saves: int) -> None:
    """Raises CheckpointError if the disk has no room for what the run is going to write.

    `weight_bytes`: those of the trained weights. A checkpoint holds them and AdamW's two moments;
    one more than are kept exists while it is written, and the exported model in the end.
    """
    checkpoint_bytes = 3 * weight_bytes
    num_kept = len(list_checkpoints(checkpoints))
    num_checkpoints = max(min(num_saves, 1), min(num_saves + num_kept, NUM_KEPT + 1) - num_kept)
    needed = checkpoint_bytes * num_checkpoints + weight_bytes
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise CheckpointError(
            given=f"{format_bytes(free)} free on the disk of {folder}",
            required=f"{format_bytes(needed)}: {num_checkpoints} checkpoints of"
            f" {format_bytes(checkpoint_bytes)} and the model of {format_bytes(weight_bytes)}",
            source="out and train.save_every_steps",
            change="make room, set out to another disk, or train.save_every_steps: 0 for none",
        )
