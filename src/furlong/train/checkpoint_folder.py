"""Checkpoints as folders: which there are, whether they are whole, which a run goes on from.

    step-00000050/
      shard-*.safetensors   the tensors, under global names
      state.json            everything else
      manifest.json         size and checksum of every other file

Nothing here loads torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from furlong.errors import CheckpointError
from furlong.files import TEMPORARY, checksum

# 3: the optimizer's groups are those of the config, the generators a row for each process.
FORMAT_VERSION = 3
NUM_KEPT = 3
STATE, MANIFEST = "state.json", "manifest.json"
DAMAGED = ".damaged"
Measured = dict[str, Any]
"""Size and checksum of a file, as the manifest has them: `{"bytes": ..., "xxh3": ...}`."""
_NAME = re.compile(r"step-(\d{8,})")


class DamagedCheckpointError(CheckpointError):
    """The files of a checkpoint do not fit its manifest."""


class RemovedCheckpointError(CheckpointError):
    """A checkpoint was removed while it was read."""


@contextmanager
def removal_told(checkpoint: Path) -> Iterator[None]:
    """Raises RemovedCheckpointError for whatever fails because `checkpoint` is no longer there."""
    try:
        yield
    except Exception as error:  # what DCP raises is of many types
        if os.path.lexists(checkpoint):
            raise
        raise RemovedCheckpointError(
            given=f"checkpoint {checkpoint.name}, which was removed while it was read",
            required=f"a checkpoint that stays: a run keeps its newest {NUM_KEPT}",
            source=str(checkpoint.parent),
            change="export the run instead of one checkpoint, or copy the checkpoint first",
        ) from error


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoint folders, oldest first. Not verified; those still being written (`.tmp`)
    are left out."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was taken, by its name."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that is whole; None if there is none at all.

    Damaged ones are named in print and passed over. Nothing is changed: another process may be
    writing. Raises CheckpointError if all are damaged.
    """
    damaged: list[Path] = []
    # Listed again after each: a run that trains on removes its oldest and writes newer ones.
    while left := [path for path in list_checkpoints(folder) if path not in damaged]:
        newest = left[-1]
        try:
            with removal_told(newest):
                check_checkpoint(newest)
        except DamagedCheckpointError as error:
            print(f"not loaded: {error.given}")
            damaged.append(newest)
        except RemovedCheckpointError:
            continue
        else:
            return newest
    if not damaged:
        return None
    raise CheckpointError(
        given=f"{len(damaged)} damaged checkpoints and no other",
        required="a checkpoint whose files fit its manifest",
        source=str(folder),
        change="restore one from a copy, or start anew with another out",
    )


def set_aside(folder: Path, newest: Path | None) -> None:
    """Before a run goes on from `newest`: renames what is newer, and so damaged, to `.damaged`, and
    removes what a process that was killed had not yet written or removed."""
    for leftover in folder.glob(f"step-*{TEMPORARY}"):
        shutil.rmtree(leftover, ignore_errors=True)
    for checkpoint in list_checkpoints(folder):
        if newest is not None and step_of(checkpoint) > step_of(newest):
            damaged = checkpoint.with_name(checkpoint.name + DAMAGED)
            shutil.rmtree(damaged, ignore_errors=True)
            os.rename(checkpoint, damaged)


def remove_old(folder: Path) -> None:
    """Remove all checkpoints but the last `NUM_KEPT`: renamed first, so that a half removed one is
    never taken for a checkpoint."""
    for checkpoint in list_checkpoints(folder)[:-NUM_KEPT]:
        aside = checkpoint.with_name(f"{checkpoint.name}.old{TEMPORARY}")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(checkpoint, aside)
        shutil.rmtree(aside, ignore_errors=True)


def check_checkpoint(checkpoint: Path) -> None:
    """Raises DamagedCheckpointError unless every file has the manifest's size and checksum, and
    the state is of the step that the folder's name says."""
    try:
        for name in os.listdir(checkpoint):
            if not (checkpoint / name).is_file():  # a pipe would be read for ever
                raise _damaged(checkpoint, f"{name} is no file")
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["version"]
        files = {name: dict(measured) for name, measured in manifest["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(checkpoint, f"{MANIFEST} cannot be read ({error})") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            given=f"checkpoint {checkpoint.name} of format {version}",
            required=f"format {FORMAT_VERSION}, which this release reads",
            source=str(checkpoint),
            change="use the release of furlong that wrote it, or start anew with another out",
        )
    try:
        found = measure_files(checkpoint)
    except OSError as error:
        raise _damaged(checkpoint, error.strerror or str(error)) from error
    for name in sorted(files.keys() | found.keys()):
        if found.get(name) != files.get(name):
            differ = "is missing" if name not in found else "is unknown" if name not in files else (
                f"has {found[name]}, in the manifest {files[name]}"
            )  # fmt: skip
            raise _damaged(checkpoint, f"{name} {differ}")
    step = read_state(checkpoint).get("step")
    if _NAME.fullmatch(checkpoint.name) and step != step_of(checkpoint):
        raise _damaged(checkpoint, f"its state is of step {step}")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """State that was saved beside the tensors. The checkpoint must have been checked."""
    return dict(json.loads((checkpoint / STATE).read_text(encoding="utf-8")))


def measured(file: Path) -> Measured:
    """Size and checksum of a file. An OSError names it."""
    return {"bytes": file.stat().st_size, "xxh3": checksum(file)}


def measure_files(checkpoint: Path) -> dict[str, Measured]:
    """Size and checksum of every file but the manifest."""
    files = (file for file in sorted(checkpoint.iterdir()) if file.name != MANIFEST)
    return {file.name: measured(file) for file in files}


def _damaged(checkpoint: Path, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        given=f"checkpoint {checkpoint.name} is damaged: {what}",
        required="files that fit the checkpoint's manifest",
        source=str(checkpoint),
        change="name another checkpoint, or restore this one from a copy",
    )
