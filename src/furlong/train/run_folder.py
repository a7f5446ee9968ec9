"""The folder of a run: its lock, its checkpoints, and whether a run may resume in it.

    run/
      config.json, options.json, metrics.jsonl, report.json
      checkpoints/step-00000050/
        shard-*.safetensors   the tensors, under global names
        state.json            everything else
        manifest.json         size and checksum of every other file
      model/                  the exported model, once the run has finished

Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from furlong.config.schema import RunConfig, TrainConfig
from furlong.config.sources import build_run, read_run_file
from furlong.errors import CheckpointError, ConfigError, difference_words, differing
from furlong.files import TEMPORARY, checksum, os_errors_told
from furlong.plan.plan import Layout
from furlong.planners.decide import Decision
from furlong.planners.options import ChunkOptions
from furlong.units import count_words, format_bytes

CONFIG, OPTIONS, METRICS, REPORT = "config.json", "options.json", "metrics.jsonl", "report.json"
CHECKPOINTS, EXPORT, PROFILE = "checkpoints", "model", "profile"
STATE, MANIFEST = "state.json", "manifest.json"
_RESTORE = f"restore {CONFIG} (it is config in every checkpoint's {STATE})"
_LOCK, _DAMAGED = ".lock", ".damaged"
# 6: no chunks.sample.check_every_steps.
FORMAT_VERSION = 6
_STEP = re.compile(r"step-(\d{8,})")
# Keys that a resume may change: they affect time, memory, output and the length of a run, but not
# the updates so far or the order of data.
_FREE_KEYS = (
    "chunks", "offload", "memory", "parallel", "log", "hub", "out", "data.eval", "data.cache_dir",
    "train.save_every_steps", "train.saves_per_epoch", "train.num_checkpoints",
    "train.save_weights_only", "train.keep_best", "train.async_save", "train.eval_every_steps",
    "train.evals_per_epoch", "train.eval_train_share", "train.early_stopping", "train.max_loss",
    "train.steps", "train.epochs",
)  # fmt: skip
_BEFORE = {"model.kernels": "none"}
"""Keys whose default has changed -> the old default, which runs without the key have used."""
_ENDING_KEYS = {"train.steps", "train.epochs", "train.early_stopping", "hub.repo"}
_DECIDING_KEYS = ("chunks", "offload", "memory", "parallel")
Measured = dict[str, Any]
"""Size and checksum of a file, as in the manifest: `{"bytes": ..., "xxh3": ...}`."""


@dataclass(frozen=True, slots=True)
class TrainReport:
    """The final figures of a run, as in its `report.json`."""

    num_steps: int
    num_tokens: int
    train_loss: float | None
    """Mean loss of the global batch in the last step that has a loss (see `StepFigures.loss`); None
    if none has."""
    eval_loss_before: float | None
    eval_loss_after: float | None
    """Held-out loss of the exported weights."""
    tokens_per_s: float
    peak_memory_bytes: int
    num_skipped_batches: int
    run_folder: str
    export_folder: str
    exported_step: int
    """The step of the exported weights; with train.keep_best, that with the lowest loss."""
    export_files: dict[str, int]
    """Bytes of each file of the exported model, by name."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files match its manifest."""

    path: Path
    state: dict[str, Any]
    """The contents of state.json."""

    def refusal(self, given: str, required: str, change: str, *, also: str = "") -> CheckpointError:
        """Return the error that something does not match this checkpoint.

        Args:
            given: Text: the value that does not match.
            required: Text: the value that the checkpoint needs.
            change: Text: how to correct the mismatch.
            also: Text to put before the path of the checkpoint.
        """
        source = f"{also}{self.path}"
        return CheckpointError(given=given, required=required, source=source, change=change)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder that a run writes to, and what the run resumes from."""

    path: Path
    decided: Decision | None = None
    """An earlier decision that is still valid."""
    checkpoint: Checkpoint | None = None
    is_new: bool = True
    config: RunConfig | None = None
    """The config of a resumed run; keys of `_BEFORE` that are not given have the run's values."""
    report: TrainReport | None = None
    """The report of a finished run whose exported model is complete."""


def open_run_folder(
    stack: ExitStack, config: RunConfig, *, resume: bool, num_processes: int = 1
) -> RunFolder:
    """Open the run folder `config.out`. If it holds a run to resume, lock it until `stack` closes.

    With `resume` the run resumes from its newest intact checkpoint; without one it begins again.
    The folder of a new run must be empty, and is not created here. Raises ConfigError or
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
        lock_folder(stack, path)
        values = read_run_file(str(path / CONFIG), f"{_RESTORE}, or mend the line that is named")
        saved = _read_run(values, path / CONFIG)
        config = _with_own(config, saved)
        changed = differing(saved.model_dump(mode="json"), config.model_dump(mode="json"))
        _check_same(saved, config, path / CONFIG, may_move=True)
        if not changed.keys() & _ENDING_KEYS:
            report = _finished(path)
            if report is not None:
                _check_same(saved, config, path / CONFIG, may_move=False)
                print(f"the run in {path} is finished: its model is {path / EXPORT}")
                return RunFolder(path, is_new=False, config=config, report=report)
        checkpoint = newest_checkpoint(path / CHECKPOINTS)
        if checkpoint is None:
            _check_same(saved, config, path / CONFIG, may_move=False)
            print(f"no checkpoint in {path}: the run begins again with its first step")
        else:  # it may belong to another run, or config.json was edited
            if checkpoint.state["config"]["train"]["save_weights_only"]:
                raise checkpoint.refusal(
                    f"{checkpoint.path.name}, written with train.save_weights_only",
                    "a checkpoint with the optimizer, to go on from",
                    f"furlong export {checkpoint.path} makes a model of it, with which another run"
                    " may begin (model.name)",
                )
            source = checkpoint.path / STATE
            written = _read_run(checkpoint.state["config"], source)
            _check_same(written, config, source, may_move=True)
        clear_leftovers(path, checkpoint)
        decided = _decided(path, checkpoint, changed, num_processes)
        return RunFolder(path, decided, checkpoint, is_new=False, config=config)


def _read_run(values: Mapping[str, Any], source: Path) -> RunConfig:
    """Return the config of a saved run. If the saved values lack a key whose default has changed
    since (see `_BEFORE`), the key gets the old default."""
    values = {name: dict(of) if isinstance(of, Mapping) else of for name, of in values.items()}
    for key, before in _BEFORE.items():
        section, name = key.split(".")
        values[section].setdefault(name, before)
    return build_run(values, str(source))


def _with_own(config: RunConfig, saved: RunConfig) -> RunConfig:
    """Return `config`, but with the saved values for keys whose default has changed (`_BEFORE`).
    Keys that `config` sets itself keep their values."""
    for section, name in (key.split(".") for key in _BEFORE):
        asked = getattr(config, section)
        if name not in asked.model_fields_set:
            own = asked.model_copy(update={name: getattr(getattr(saved, section), name)})
            config = config.model_copy(update={section: own})
    return config


def _finished(path: Path) -> TrainReport | None:
    """Return the report of a run with a complete exported model; None if the run must still train
    or export.

    Raises CheckpointError if the model is missing and there is no checkpoint to export.
    """
    try:
        report = TrainReport(**json.loads((path / REPORT).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):  # unfinished or damaged
        return None
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


def list_export(folder: Path) -> dict[str, int]:
    """Return the size in bytes of each file of an exported model, by name."""
    return {
        file.relative_to(folder).as_posix(): file.stat().st_size
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def missing_of_export(folder: Path, files: dict[str, int]) -> str | None:
    """Return the path of the first of an exported model's `files` that is missing or, if it holds
    weights, has another size. Return None if the model is complete. Other files may have been
    edited."""
    found = list_export(folder)
    for name, num_bytes in files.items():
        is_weights = name.endswith(".safetensors")
        if name not in found or (is_weights and found[name] != num_bytes):
            return str(folder / name if folder.is_dir() else folder)
    return None


def _check_same(saved: RunConfig, config: RunConfig, source: Path, *, may_move: bool) -> None:
    """Raise ConfigError if the configs differ in a key that a resume must not change. `may_move`:
    whether the data paths may differ, since `check_data` compares the data by checksum."""
    found = differing(_comparable(saved, may_move), _comparable(config, may_move))
    if refused := {key: pair for key, pair in found.items() if not _is_free(key, config)}:
        shown = [f"{key} = {new!r}, the run has {old!r}" for key, (old, new) in refused.items()]
        raise ConfigError(
            given="; ".join(shown),
            required="the config of the run that is resumed; a resume may change"
            f" {', '.join(_FREE_KEYS)} (chunks not if chunks.sample is set)",
            source=str(source),
            change="take the run's values, or set out to another folder for a new run",
        )


def _comparable(config: RunConfig, may_move: bool) -> dict[str, Any]:
    """Return a config's values with resolved paths, without data paths if these may differ."""
    values = config.model_dump(mode="json")
    values["model"]["name"] = _place(config.model.name)
    values["data"]["train"] = [
        {"path": "" if may_move else _place(s.path), "weight": s.weight, "split": s.split}
        for s in config.data.train
    ]
    return values


def _place(name: str) -> str:
    """Return the real path of an existing file or folder; else the name, such as a Hub name."""
    path = os.path.expanduser(name)
    return os.path.realpath(path) if os.path.exists(path) else name


def _is_free(key: str, config: RunConfig) -> bool:
    if key.startswith("chunks.sample"):  # changes the gradient estimate
        return key == "chunks.sample.report_loss"
    if key == "chunks.size" and config.chunks.sample is not None:
        return False
    return any(key == free or key.startswith(f"{free}.") for free in _FREE_KEYS)


def clear_leftovers(path: Path, newest: Checkpoint | None) -> None:
    """Remove unfinished files of a killed process. Checkpoints newer than `newest`, from which the
    run resumes, are damaged: rename them to `.damaged`."""
    checkpoints = path / CHECKPOINTS
    for leftover in (*path.glob(f".*{TEMPORARY}"), *checkpoints.glob(f"step-*{TEMPORARY}")):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink()
    for checkpoint in list_checkpoints(checkpoints):
        if newest is not None and step_of(checkpoint) > step_of(newest.path):
            damaged = checkpoint.with_name(checkpoint.name + _DAMAGED)
            shutil.rmtree(damaged, ignore_errors=True)
            os.rename(checkpoint, damaged)


def _decided(
    path: Path, checkpoint: Checkpoint | None, changed: Mapping[str, Any], num_processes: int
) -> Decision | None:
    found: list[Decision] = []
    # The file is no older than the checkpoint: chunks may have shrunk since. Where it cannot be
    # read and there is no checkpoint, no step depends on it, and options are decided again.
    with suppress(OSError, ValueError, KeyError, TypeError, ConfigError):
        found.append(decision_of(json.loads((path / OPTIONS).read_text(encoding="utf-8"))))
    if checkpoint is not None:
        found.append(decision_of(checkpoint.state["options"]))
    fitting = [one for one in found if one.layout.num_devices == num_processes]
    causes = [key for key in changed if key.startswith(_DECIDING_KEYS)]
    causes += ["the number of processes"] * (checkpoint is not None and not fitting)
    if causes:
        print(f"options are decided again, for these keys have changed: {', '.join(causes)}")
    return None if causes or not fitting else fitting[0]


def create_run_folder(stack: ExitStack, path: Path) -> None:
    """Create a run's folder, locked until `stack` closes. Raises ConfigError, CheckpointError."""
    with folder_errors_reported(path):
        lock_folder(stack, path)
        _check_empty(path, str(path))  # another process may have been faster


def clear_export(path: Path) -> None:
    """Rename an existing exported model, which may have been edited, to make room for a new one."""
    export = path / EXPORT
    if os.path.lexists(export):
        names = (f"{EXPORT}.before{f'-{number}' * (number > 1)}" for number in count(1))
        aside = next(path / name for name in names if not os.path.lexists(path / name))
        os.rename(export, aside)
        print(f"{export}, which was there already, is kept as {aside.name}")


def lock_folder(stack: ExitStack, path: Path) -> None:
    """Create the folder if needed, and lock it for this process until `stack` closes.

    The operating system releases the lock when the process ends in any way.
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


def is_ours(path: Path) -> bool:
    """Whether the folder holds a run, or the lock of a run that is starting."""
    return holds_run(path) or (path / _LOCK).exists()


def holds_run(path: Path) -> bool:
    """Whether a run has begun in `path`. A config.json is not enough: HF models have one, too."""
    return (path / CONFIG).exists() and any(
        (path / name).exists() for name in (OPTIONS, METRICS, CHECKPOINTS)
    )


def _check_empty(path: Path, out: str) -> None:
    if not path.exists() or (path.is_dir() and all(map(_is_leftover, path.iterdir()))):
        return
    given, go_on = "is not empty", ""
    if holds_run(path):
        given, go_on = "holds a run", "go on with it (--resume; in Python resume=True), "
    elif (path / CHECKPOINTS).is_dir():
        given = f"holds checkpoints but no {CONFIG}"
        go_on = f"{_RESTORE} and go on with --resume, "
    raise ConfigError(
        given=f"out = {out}, which {given}",
        required="a folder that does not exist or is empty",
        source="out",
        change=f"{go_on}set another out, or move the old folder away",
    )


def _is_leftover(entry: Path) -> bool:
    """Whether the entry may be left by a process that was killed before its run began."""
    is_unfinished = entry.name.startswith(".") and entry.name.endswith(TEMPORARY)
    of_a_run = (_LOCK, OPTIONS) if (entry.parent / _LOCK).exists() else (_LOCK,)
    return is_unfinished or entry.name in of_a_run


def folder_errors_reported(folder: Path) -> AbstractContextManager[None]:
    """Context manager: raise OSErrors about files in `folder` as CheckpointError.

    Errors of a full disk name no file, so enter this only around writes to `folder`.
    """
    return os_errors_told(
        CheckpointError,
        required="a run folder whose files can be read and written",
        source=str(folder),
        or_else=", then go on with --resume, or set another out",
        inside=folder,
    )


def check_creatable(path: Path, key: str) -> None:
    """Raise ConfigError if no folder can be created at `path` (the value of `key`). Call this
    before work whose results would be lost."""
    try:
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        reason = None if there.is_dir() else f"{'it' if there == path else there} is no folder"
        if there != path and not reason and not os.access(there, os.W_OK | os.X_OK):
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


def check_room(
    path: Path, settings: TrainConfig, *, weight_bytes: int, state_bytes: int, num_saves: int
) -> None:
    """Raise CheckpointError if the disk has no room for the checkpoints and export of a run.

    While a checkpoint is written, the disk has one checkpoint more than the run keeps. At the end,
    the disk has the exported model, too.

    Args:
        weight_bytes: Bytes of the trained weights in a checkpoint.
        state_bytes: Bytes of the optimizer's state in a checkpoint.
        num_saves: Number of checkpoints that the whole run writes.
    """
    num_there = len(list_checkpoints(path / CHECKPOINTS))
    most = settings.num_checkpoints + 1 + settings.keep_best
    num_saves += settings.keep_best
    num_checkpoints = max(min(num_saves, 1), min(num_saves + num_there, most) - num_there)
    each_bytes = weight_bytes + (0 if settings.save_weights_only else state_bytes)
    needed = each_bytes * num_checkpoints + weight_bytes
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        saved = f"{count_words(num_checkpoints, 'checkpoint')} of {format_bytes(each_bytes)} and "
        keys, none = ", train.save_every_steps", ", or train.save_every_steps: 0 for no checkpoint"
        raise CheckpointError(
            given=f"{format_bytes(free)} free on the disk of {path}",
            required=f"{format_bytes(needed)}: {saved * bool(num_checkpoints)}the model of"
            f" {format_bytes(weight_bytes)}",
            source="out" + f"{keys} and train.num_checkpoints" * bool(num_checkpoints),
            change=f"make room, or set out to another disk{none * bool(num_checkpoints)}",
        )


# The decision of a run, as in options.json and checkpoints.


def values_of(decision: Decision) -> dict[str, Any]:
    """Return a run's options, layout, stages and, if set, budget and offloading, as JSON values."""
    values = asdict(decision.options) | {
        "layout": asdict(decision.layout), "stages": list(decision.stages),
    }  # fmt: skip
    if decision.offload_weights:
        values |= {"offload_weights": True}
    if decision.budget_bytes is not None:
        values |= {"budget_bytes": decision.budget_bytes, "has_shrunk": decision.has_shrunk}
    return values


def decision_of(values: Mapping[str, Any]) -> Decision:
    """Return the decision from `values`, a result of `values_of`. Raises KeyError, TypeError or
    ConfigError for other values."""
    options = dict(values)
    layout, stages = Layout(**options.pop("layout")), tuple(options.pop("stages"))
    names = "budget_bytes", "has_shrunk", "offload_weights"
    others = {name: options.pop(name) for name in names if name in options}
    return Decision(ChunkOptions(**options), "", layout=layout, stages=stages, **others)


def shrunk(decision: Decision, options: ChunkOptions) -> Decision:
    """Return the decision with `options`; set `has_shrunk` if they differ from the decided options.
    Chunks shrink after an out-of-memory error."""
    has_shrunk = decision.has_shrunk or options != decision.options
    return replace(decision, options=options, has_shrunk=has_shrunk)


# Checkpoints as folders.


class DamagedCheckpointError(CheckpointError):
    """The files of a checkpoint do not match its manifest."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the folders of complete checkpoints, oldest first. Their files are not verified.
    Unfinished checkpoints (`.tmp`) are left out."""
    found = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name)]
    return sorted(found, key=step_of)


def checkpoint_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step, existing or not."""
    return folder / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint, from its name."""
    match = _STEP.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest intact checkpoint; None if there are no checkpoints.

    Damaged checkpoints are printed and skipped. Nothing is changed, as another process may be
    writing. Raises CheckpointError if all checkpoints are damaged.
    """
    found = list_checkpoints(folder)
    for path in reversed(found):
        try:
            return read_checkpoint(path)
        except DamagedCheckpointError as error:
            if path.exists():
                print(f"not loaded: {error.given}")
    if found != list_checkpoints(folder):  # another process removes old ones meanwhile
        return newest_checkpoint(folder)
    if not found:
        return None
    raise CheckpointError(
        given=f"{len(found)} damaged checkpoints and no other",
        required="a checkpoint whose files fit its manifest",
        source=str(folder),
        change="restore one from a copy, or start anew with another out",
    )


def remove_old(folder: Path, num_kept: int, best_step: int = 0) -> None:
    """Remove all checkpoints except the newest `num_kept` and the one of `best_step`."""
    old = list_checkpoints(folder)[:-num_kept]
    _remove(one for one in old if step_of(one) != best_step)


def remove_from(folder: Path, step: int) -> None:
    """Remove the checkpoints of `step` and later steps: they exist if a run has returned to an
    earlier step."""
    _remove(one for one in list_checkpoints(folder) if step_of(one) >= step)


def _remove(checkpoints: Iterable[Path]) -> None:
    """Rename each checkpoint, then remove it. The new name ensures that a partly removed checkpoint
    is never loaded."""
    for checkpoint in checkpoints:
        aside = checkpoint.with_name(f"{checkpoint.name}.old{TEMPORARY}")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(checkpoint, aside)
        shutil.rmtree(aside, ignore_errors=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint. Raises DamagedCheckpointError unless all files match the manifest, and the
    state's step matches the folder's name."""
    if not (path / MANIFEST).exists():
        raise _damaged(path, f"{MANIFEST} is missing: it was not written to its end")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["version"]
        files = {name: dict(own) for name, own in manifest["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, f"{MANIFEST} cannot be read ({error})") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            given=f"checkpoint {path.name} of format {version}",
            required=f"format {FORMAT_VERSION}, which this release reads",
            source=str(path),
            change="use the release of furlong that wrote it, or start anew with another out",
        )
    try:
        found = {file.name: measured(file) for file in path.iterdir() if file.name != MANIFEST}
        if missing := sorted(files.keys() - found.keys()):
            raise _damaged(path, f"{missing[0]} is missing")
        if wrong := differing(found, files):
            raise _damaged(path, difference_words(wrong, "in the manifest"))
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from error
    if _STEP.fullmatch(path.name) and state.get("step") != step_of(path):
        raise _damaged(path, f"its state is of step {state.get('step')}")
    return Checkpoint(path, state)


def measured(file: Path) -> Measured:
    """Return size and checksum of a file."""
    return {"bytes": file.stat().st_size, "xxh3": checksum(file)}


def _damaged(checkpoint: Path, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        given=f"checkpoint {checkpoint.name} is damaged: {what}",
        required="files that fit the checkpoint's manifest",
        source=str(checkpoint),
        change="name another checkpoint, or restore this one from a copy",
    )
