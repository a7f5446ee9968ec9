"""Checkpoints: a training state on disk, there whole or not at all.

    step-00000050/
      shard-*.safetensors   the tensors, under global names, by torch.distributed.checkpoint (DCP)
      state.json            everything else
      manifest.json         size and checksum of every other file

Nothing is ever unpickled. DCP's default storage keeps its index (`.metadata`) as a pickle of
torch's private classes, and an unpickler that admits just those would break with each of their
changes. DCP's safetensors storage has no index: the header of each file tells names, types, shapes
and the offset of its part in the whole tensor, so that another number of processes can read it as
well, and every safetensors tool can look inside.

A checkpoint is written under another name (`.tmp`), synchronised with the disk, listed in its
manifest, and renamed. What a power failure or a full disk cut short has no manifest, or one that
its files do not fit, and is never loaded. The checksums (xxh3, 128 bits) are against damage, not
against malice.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from furlong.errors import CheckpointError

FORMAT_VERSION = 1
NUM_KEPT = 3
STATE, MANIFEST = "state.json", "manifest.json"
_TEMPORARY, _DAMAGED = ".tmp", ".damaged"
_NAME = re.compile(r"step-(\d{8,})")
# DCP copies a file's tensors before it writes them: files of this size bound what that takes.
_MAX_FILE_BYTES = 2**28


class DamagedCheckpointError(CheckpointError):
    """The files of a checkpoint do not fit its manifest."""


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    num_kept: int = NUM_KEPT,
) -> Path:
    """Writes `folder/step-XXXXXXXX` and removes all but the last `num_kept`; returns it.

    `state` is what JSON can hold. Raises CheckpointError when the disk is full or cannot be
    written; the checkpoints before are then as they were.
    """
    checkpoint = folder / f"step-{step:08d}"
    aside = checkpoint.with_name(checkpoint.name + _TEMPORARY)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        _write_tensors(aside, tensors)
        write_json(aside / STATE, state)
        write_json(aside / MANIFEST, {"version": FORMAT_VERSION, "files": _measure(aside)})
        os.rename(aside, checkpoint)
        for parent in (folder, folder.parent):
            sync_folder(parent)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            given=f"{error.strerror} while checkpoint {checkpoint.name} was written",
            required="a folder that can be written to, with room for a checkpoint of"
            f" {sum(t.nbytes for t in tensors.values()):,} bytes beside the last {num_kept}",
            source=str(folder),
            change="make room and continue the run with --resume; the checkpoints before are whole",
        ) from error
    for old in list_checkpoints(folder)[:-num_kept]:
        _remove(old)
    return checkpoint


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, unchecked; what is being written is none."""
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
    checkpoints = list_checkpoints(folder)
    for checkpoint in reversed(checkpoints):
        try:
            check_checkpoint(checkpoint)
        except DamagedCheckpointError as error:
            print(f"not loaded: {error.given}")
        else:
            return checkpoint
    if not checkpoints:
        return None
    raise CheckpointError(
        given=f"{len(checkpoints)} damaged checkpoints and no other",
        required="a checkpoint whose files fit its manifest",
        source=str(folder),
        change="restore one from a copy, or start anew with another out",
    )


def set_aside(folder: Path, newest: Path | None) -> None:
    """Before a run goes on from `newest`: renames what is newer, and so damaged, to `.damaged`, and
    removes what a process that was killed had not yet written or removed."""
    for leftover in folder.glob(f"step-*{_TEMPORARY}"):
        shutil.rmtree(leftover, ignore_errors=True)
    for checkpoint in list_checkpoints(folder):
        if newest is not None and step_of(checkpoint) > step_of(newest):
            damaged = checkpoint.with_name(checkpoint.name + _DAMAGED)
            shutil.rmtree(damaged, ignore_errors=True)
            os.rename(checkpoint, damaged)


def check_checkpoint(checkpoint: Path) -> None:
    """Raises DamagedCheckpointError unless every file has the manifest's size and checksum."""
    try:
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
            change="use the release of furlong that wrote it",
        )
    try:
        found = _measure(checkpoint)
    except OSError as error:
        raise _damaged(checkpoint, error.strerror or str(error)) from error
    for name in sorted(files.keys() | found.keys()):
        given, noted = found.get(name), files.get(name)
        if given == noted:
            continue
        if given is None or noted is None:
            raise _damaged(checkpoint, f"{name} is {'missing' if given is None else 'unknown'}")
        raise _damaged(checkpoint, f"{name}: {_told(given)}, in the manifest {_told(noted)}")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What was saved beside the tensors. The checkpoint must have been checked."""
    return dict(json.loads((checkpoint / STATE).read_text(encoding="utf-8")))


def stored_tensors(checkpoint: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor of a checkpoint, by name."""
    stored = HuggingFaceStorageReader(str(checkpoint)).read_metadata().state_dict_metadata
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def load_tensors(checkpoint: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copies the checkpoint's tensors of these names into `tensors`.

    Raises CheckpointError for a name that it lacks or a shape that differs.
    """
    reader = HuggingFaceStorageReader(str(checkpoint))
    try:
        load(dict(tensors), storage_reader=reader, no_dist=True)
    except CheckpointException as failure:
        error = _cause(failure)
        if not isinstance(error, RuntimeError | ValueError):
            raise error from None
        raise CheckpointError(
            given=str(error),
            required=f"the {len(tensors)} tensors of this model and its optimizer",
            source=str(checkpoint),
            change="resume with the model that the checkpoint was written with",
        ) from error


@contextmanager
def one_process() -> Iterator[None]:
    """Without DCP's warning, at every save and load, that there is one process only.

    For the length of a run: each change of the filters makes Python forget which warnings it has
    shown.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def write_json(file: Path, value: object) -> None:
    """Writes JSON under another name, synchronises it with the disk and renames it."""
    aside = file.with_name(f".{file.name}{_TEMPORARY}")
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


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    file_of: dict[str, int] = {}
    number, num_bytes = 1, 0
    for name, tensor in tensors.items():
        if num_bytes and num_bytes + tensor.nbytes > _MAX_FILE_BYTES:
            number, num_bytes = number + 1, 0
        file_of[name] = number
        num_bytes += tensor.nbytes
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=file_of, save_distributed=True
    )
    try:
        # safetensors writes contiguous tensors only.
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save(whole, storage_writer=writer, no_dist=True)
    except CheckpointException as failure:
        raise _cause(failure) from None


def _cause(failure: CheckpointException) -> BaseException:
    """What went wrong in this process."""
    return next(iter(failure.failures.values()))[0]


def _measure(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Size and checksum of every file but the manifest."""
    measured = {}
    for file in sorted(checkpoint.iterdir()):
        if file.name != MANIFEST:
            checksum = xxhash.xxh3_128()
            with file.open("rb") as opened:
                while block := opened.read(2**20):
                    checksum.update(block)
            measured[file.name] = {"bytes": file.stat().st_size, "xxh3": checksum.hexdigest()}
    return measured


def _told(measured: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in measured.items())


def _remove(checkpoint: Path) -> None:
    """Renamed first, so that a half removed one is never taken for a checkpoint."""
    aside = checkpoint.with_name(f"{checkpoint.name}.old{_TEMPORARY}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(checkpoint, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _damaged(checkpoint: Path, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        given=f"checkpoint {checkpoint.name} is damaged: {what}",
        required="files that fit the checkpoint's manifest",
        source=str(checkpoint),
        change="name another checkpoint, or restore this one from a copy",
    )
