"""Checkpoints as folders: which there are, whether they are whole, which a run goes on from.

    step-00000050/
      shard-*.safetensors   the tensors, under global names
      state.json            everything else
      manifest.json         size and checksum of every other file

Nothing here loads torch. The checksums (xxh3, 128 bits) are against damage, not against malice.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from furlong.errors import CheckpointError

# 2: the model's architecture is stored, the data's parts are, and warm-up begins above zero.
FORMAT_VERSION = 2
NUM_KEPT = 3
STATE, MANIFEST = "state.json", "manifest.json"
TEMPORARY, DAMAGED = ".tmp", ".damaged"
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
        given, noted = found.get(name), files.get(name)
        if given == noted:
            continue
        if given is None or noted is None:
            raise _damaged(checkpoint, f"{name} is {'missing' if given is None else 'unknown'}")
        raise _damaged(checkpoint, f"{name}: {_told(given)}, in the manifest {_told(noted)}")
    step = read_state(checkpoint).get("step")
    if _NAME.fullmatch(checkpoint.name) and step != step_of(checkpoint):
        raise _damaged(checkpoint, f"its state is of step {step}")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """State that was saved beside the tensors. The checkpoint must have been checked."""
    return dict(json.loads((checkpoint / STATE).read_text(encoding="utf-8")))


def write_json(file: Path, value: object) -> None:
    """Writes JSON under another name, synchronises it with the disk and renames it."""
    aside = file.with_name(f".{file.name}{TEMPORARY}")
    with aside.open("w", encoding="utf-8") as opened:
        json.dump(value, opened, indent=2)
        opened.write("\n")
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(aside, file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Makes names that were created or renamed in a folder survive a power failure."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def measure_files(
    checkpoint: Path, prefix: str = "", known: Collection[str] = ()
) -> dict[str, dict[str, Any]]:
    """Size and checksum of every file whose name begins so, but for the manifest and the `known`
    ones."""
    measured = {}
    for file in sorted(checkpoint.glob(f"{prefix}*")):
        if file.name != MANIFEST and file.name not in known:
            checksum = xxhash.xxh3_128()
            with file.open("rb") as opened:
                while block := opened.read(2**20):
                    checksum.update(block)
            measured[file.name] = {"bytes": file.stat().st_size, "xxh3": checksum.hexdigest()}
    return measured


def _told(measured: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in measured.items())


def _damaged(checkpoint: Path, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        given=f"checkpoint {checkpoint.name} is damaged: {what}",
        required="files that fit the checkpoint's manifest",
        source=str(checkpoint),
        change="name another checkpoint, or restore this one from a copy",
    )
