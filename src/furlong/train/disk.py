"""Refusals of the operating system in a run folder, as errors that name the true cause."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from furlong.errors import CheckpointError, ConfigError
from furlong.train.checkpoints.folder import NUM_KEPT, list_checkpoints
from furlong.units import format_bytes

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CHANGES = {
    errno.EISDIR: "move the folder of that name away",
    errno.ENOTDIR: "move the file of that name away",
    errno.EEXIST: "move the file of that name away",
    errno.ENOENT: "restore it, then go on with --resume, or set another out",
    errno.EROFS: "mount the disk for writing, or copy the run folder to another one",
}
_OTHER_CHANGE = "check who owns it and its permissions, or copy the run folder to another place"


@contextmanager
def folder_errors_reported(folder: Path) -> Iterator[None]:
    """Turns what the operating system refuses inside `folder`, to whomever, into CheckpointError.

    A write that finds the disk full names no file: enter this only where `folder` is written to.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors passes the operating system's errors on as text.
        full = next((os.strerror(n) for n in FULL_DISK if os.strerror(n) in str(error)), None)
        names = [getattr(error, key, None) for key in ("filename2", "filename")]
        paths = [Path(name) for name in names if isinstance(name, str)]
        inside = next((path for path in paths if _is_inside(path, folder)), None)
        if full is not None and (inside or not paths):
            raise CheckpointError(
                given=full,
                required="room for figures, checkpoints and the exported model",
                source=str(folder),
                change="make room, then go on with --resume",
            ) from error
        if not isinstance(error, OSError) or inside is None:
            raise
        raise CheckpointError(
            given=f"{inside}: {error.strerror}",
            required="a run folder whose files can be read and written",
            source=str(folder),
            change=_CHANGES.get(error.errno or 0, _OTHER_CHANGE),
        ) from error


def _is_inside(path: Path, folder: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


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
