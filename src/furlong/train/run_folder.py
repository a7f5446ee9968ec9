"""The folder of a run: who may write into it, what it holds, and whether a run may go on in it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from furlong.config.schema import RunConfig
from furlong.config.sources import load_run
from furlong.errors import CheckpointError, ConfigError
from furlong.planners.options import ChunkOptions
from furlong.train.checkpoint import (
    NUM_KEPT,
    list_checkpoints,
    newest_checkpoint,
    read_state,
    set_aside,
)
from furlong.units import format_bytes

CONFIG, OPTIONS, METRICS, REPORT = "config.json", "options.json", "metrics.jsonl", "report.json"
CHECKPOINTS, EXPORT = "checkpoints", "model"
_LOCK = ".lock"
# How it is computed and what is told of it: these change neither weights nor their order.
_FREE_KEYS = (
    "chunks.", "memory.", "parallel.", "log.", "out", "data.eval", "data.cache_dir",
    "train.save_every_steps", "train.eval_every_steps", "train.eval_train_share",
)  # fmt: skip
_DECIDING_KEYS = ("chunks.", "memory.", "parallel.")
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where a run writes, and what it goes on from."""

    path: Path
    options: ChunkOptions | None = None
    """Decided before and still valid."""
    checkpoint: Path | None = None
    state: dict[str, Any] | None = None
    """What the checkpoint holds beside its tensors."""
    is_new: bool = True
    is_finished: bool = False


def open_run_folder(stack: ExitStack, config: RunConfig, *, resume: bool) -> RunFolder:
    """The run folder `config.out`; that of a run to resume is locked until `stack` ends.

    A new run needs an empty one. With `resume` the run in it goes on from its newest whole
    checkpoint, or from the start where there is none. Nothing is created. Raises ConfigError or
    CheckpointError.
    """
    path = Path(config.out).expanduser()
    check_creatable(path, "out")
    if not resume or not _holds_run(path):
        _check_empty(path, config.out)
        if resume:
            print(f"nothing to resume in {path}: a new run")
        return RunFolder(path)
    lock_folder(stack, path)
    saved = load_run(path / CONFIG)
    differing = differing_keys(saved, config)
    refused = {key: pair for key, pair in differing.items() if not key.startswith(_FREE_KEYS)}
    if refused:
        raise ConfigError(
            given="; ".join(f"{key} = {new!r}, the run has {old!r}"
                            for key, (old, new) in refused.items()),
            required="the config of the run that is resumed; free are the sections chunks, memory,"
            " parallel and log, data.eval, data.cache_dir, train.save_every_steps, train.eval_*",
            source=str(path / CONFIG),
            change=f"furlong train {path / CONFIG} --resume, or another out for another run",
        )  # fmt: skip
    checkpoint = newest_checkpoint(path / CHECKPOINTS)
    set_aside(path / CHECKPOINTS, checkpoint)
    state = None if checkpoint is None else read_state(checkpoint)
    return RunFolder(
        path,
        options=_decided_options(path, state, differing),
        checkpoint=checkpoint,
        state=state,
        is_new=False,
        is_finished=(path / REPORT).exists(),
    )


def create_run_folder(stack: ExitStack, path: Path) -> None:
    """The folder of a new run, locked until `stack` ends. Raises ConfigError, CheckpointError."""
    lock_folder(stack, path)
    _check_empty(path, str(path))  # another process may have been faster


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


def differing_keys(saved: RunConfig, given: RunConfig) -> dict[str, tuple[Any, Any]]:
    """`{"train.lr": (saved, given)}` for every key in which two configs differ."""
    old, new = _flat(saved.model_dump(mode="json")), _flat(given.model_dump(mode="json"))
    return {
        key: (old.get(key), new.get(key))
        for key in old | new
        if old.get(key) != new.get(key) or (key in old) != (key in new)
    }


def check_room(path: Path, *, weight_bytes: int, num_saves: int) -> None:
    """Raises CheckpointError if the disk has no room for what the run is going to write.

    `weight_bytes`: of the trained weights. A checkpoint holds them and AdamW's two moments; one
    more than are kept is there while it is written, and the exported model in the end.
    """
    checkpoint_bytes = 3 * weight_bytes
    num_kept = len(list_checkpoints(path / CHECKPOINTS))
    num_checkpoints = max(min(num_saves, 1), min(num_saves + num_kept, NUM_KEPT + 1) - num_kept)
    needed = checkpoint_bytes * num_checkpoints + weight_bytes
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise CheckpointError(
            given=f"{format_bytes(free)} free on the disk of {path}",
            required=f"{format_bytes(needed)}: {num_checkpoints} checkpoints of"
            f" {format_bytes(checkpoint_bytes)}, and the exported model",
            source="out and train.save_every_steps",
            change="make room, set out to another disk, or train.save_every_steps: 0 for none",
        )


@contextmanager
def full_disk_told(path: Path) -> Iterator[None]:
    """Turns a full disk, whoever meets it, into an error that says so."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors tells the operating system's errors in words.
        told = next((os.strerror(n) for n in _FULL_DISK if os.strerror(n) in str(error)), None)
        if told is None:
            raise
        raise CheckpointError(
            given=told,
            required="room for figures, checkpoints and the exported model",
            source=str(path),
            change="make room, then go on with --resume",
        ) from error


def check_creatable(path: Path, key: str) -> None:
    """Raises ConfigError if no folder can be at `path`, which `key` named: before work is done that
    would then be lost."""
    try:
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if there == path:
            return
        reason = None if there.is_dir() else f"{there} is no folder"
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


def _holds_run(path: Path) -> bool:
    """A Hugging Face model's folder has a config.json as well."""
    return (path / CONFIG).exists() and any(
        (path / name).exists() for name in (OPTIONS, METRICS, CHECKPOINTS)
    )


def _check_empty(path: Path, out: str) -> None:
    if not path.exists():
        return
    if path.is_dir() and all(_is_leftover(entry) for entry in path.iterdir()):
        return
    has_run = _holds_run(path)
    raise ConfigError(
        given=f"out = {out}, which {'holds a run' if has_run else 'is not empty'}",
        required="a folder that does not exist or is empty",
        source="out",
        change=("add --resume to go on with that run, " if has_run else "")
        + "set another out, or move the old folder away",
    )


def _is_leftover(entry: Path) -> bool:
    """What a process that was killed before its run began may leave."""
    is_unfinished = entry.name.startswith(".") and entry.name.endswith(".tmp")
    return is_unfinished or entry.name in (_LOCK, OPTIONS)


def _decided_options(
    path: Path, state: Mapping[str, Any] | None, differing: Mapping[str, Any]
) -> ChunkOptions | None:
    changed = [key for key in differing if key.startswith(_DECIDING_KEYS)]
    if changed:
        print(f"options are decided again, for these keys have changed: {', '.join(changed)}")
        return None
    if state is not None:
        return ChunkOptions(**state["options"])
    # Without a checkpoint nothing has been computed by them: what cannot be read is decided again.
    with suppress(OSError, ValueError, TypeError):
        return ChunkOptions(**json.loads((path / OPTIONS).read_text(encoding="utf-8")))
    return None


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
