"""Checkpoints: a training state on disk, there whole or not at all.

    step-00000050/
      shard-*.safetensors   the tensors, under global names, by torch.distributed.checkpoint (DCP)
      state.json            everything else
      manifest.json         size and checksum of every other file

Nothing is ever unpickled. DCP's default storage keeps its index (`.metadata`) as a pickle of
torch's private classes, and an unpickler that admits just those would break with each of their
changes. DCP's safetensors storage has no index: the header of each file tells names, types, shapes
and the offset of its part in the whole tensor, so that another number of processes can read it as
well, and every safetensors tool can look inside. Of several processes each writes the parts of the
sharded tensors that it holds, into files of its own.

A checkpoint is written under another name (`.tmp`), synchronised with the disk, listed in its
manifest, and renamed. What a power failure or a full disk cut short has no manifest, or one that
its files do not fit, and is never loaded.
"""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
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
from furlong.train.checkpoints.folder import (
    FORMAT_VERSION,
    MANIFEST,
    NUM_KEPT,
    STATE,
    TEMPORARY,
    list_checkpoints,
    measure_files,
    sync_folder,
    write_json,
)
from furlong.train.disk import FULL_DISK
from furlong.train.processes import ALONE, Processes

# DCP copies a file's tensors before it writes them: files of this size bound what that takes.
_MAX_FILE_BYTES = 2**28


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    processes: Processes = ALONE,
) -> Path:
    """Writes `folder/step-XXXXXXXX` and removes all but the last `NUM_KEPT`; returns it.

    `state` is what JSON can hold; the first process's is written. Every process calls it, with the
    parts of sharded tensors that it holds, and with whole ones that are equal wherever they are;
    those of its stage alone. Raises CheckpointError when the disk is full or cannot be written; the
    checkpoints before are then as they were.
    """
    checkpoint = folder / f"step-{step:08d}"
    aside = checkpoint.with_name(checkpoint.name + TEMPORARY)
    sizes = _sizes_of_all(tensors, processes)
    num_bytes = sum(size["bytes"] for size in sizes.values())

    def make_room() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        aside.mkdir()

    own: dict[str, dict[str, Any]] = {}
    """Size and checksum of each file that this process has written."""

    def write() -> None:
        _write_tensors(aside, tensors, sizes, is_alone=processes.num_processes == 1)
        own.update(measure_files(aside, f"shard-{processes.launch.number + 1:05d}-"))

    def complete() -> None:
        _check_whole(aside, sizes)
        write_json(aside / STATE, state)
        files = own | measure_files(aside, known=own)
        write_json(aside / MANIFEST, {"version": FORMAT_VERSION, "files": files})
        os.rename(aside, checkpoint)
        for parent in (folder, folder.parent):
            sync_folder(parent)

    try:
        for part, is_of_first in ((make_room, True), (write, False), (complete, True)):
            if processes.is_first or not is_of_first:
                processes.together(partial(_writing, part, checkpoint, num_bytes))
            else:
                processes.together(lambda: None)
            if part is write:
                for files in processes.each(dict(own)):
                    own |= files
    except CheckpointError:
        if processes.is_first:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    for old in list_checkpoints(folder)[:-NUM_KEPT] if processes.is_first else ():
        _remove(old)
    return checkpoint


def _writing(work: Callable[[], None], checkpoint: Path, num_bytes: int) -> None:
    """Does the work; what the operating system refuses is a CheckpointError."""
    try:
        work()
    except OSError as error:
        room = f", with room for {num_bytes:,} bytes"
        is_full = error.errno in FULL_DISK
        raise CheckpointError(
            given=f"{error.strerror} while checkpoint {checkpoint.name} was written",
            required=f"a folder that can be written to{room if is_full else ''}",
            source=str(checkpoint.parent),
            change=f"{'make room' if is_full else 'mend the folder'} and continue the run with"
            " --resume; the checkpoints before are whole",
        ) from error


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
    reader.read_metadata()  # where this fails, DCP would print a traceback
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


def _sizes_of_all(tensors: Mapping[str, Tensor], processes: Processes) -> dict[str, dict[str, int]]:
    """Elements and bytes of the whole tensors of all processes, by name, on the first process; on
    the others of their own."""
    own = {name: {"numel": x.numel(), "bytes": x.nbytes} for name, x in tensors.items()}
    found = dict(own)
    for sizes in processes.each(own):
        found |= sizes
    return found


def _check_whole(folder: Path, sizes: Mapping[str, Mapping[str, int]]) -> None:
    """Raises CheckpointError unless the parts of each tensor are in the folder: on machines without
    a common disk each would write into a folder of its own."""
    stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    for name, size in sizes.items():
        entry = stored.get(name)
        chunks = entry.chunks if isinstance(entry, TensorStorageMetadata) else []
        if sum(math.prod(chunk.sizes) for chunk in chunks) != size["numel"]:
            raise CheckpointError(
                given=f"a part of {name} that is not where the first process writes",
                required="one run folder for the processes of all machines",
                source=str(folder.parent),
                change="set out to a folder on a disk that all machines share",
            )


def _write_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    sizes: Mapping[str, Mapping[str, int]],
    *,
    is_alone: bool,
) -> None:
    """`sizes`: those of all processes' tensors on the first one, which numbers the files."""
    file_of: dict[str, int] = {}
    number, num_bytes = 1, 0
    for name, size in sizes.items():
        if num_bytes and num_bytes + size["bytes"] > _MAX_FILE_BYTES:
            number, num_bytes = number + 1, 0
        file_of[name] = number
        num_bytes += size["bytes"]
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=file_of, save_distributed=True
    )
    try:
        # safetensors writes contiguous tensors only.
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save(whole, storage_writer=writer, no_dist=is_alone)
    except CheckpointException as failure:
        raise _cause(failure) from None


def _cause(failure: CheckpointException) -> BaseException:
    """The error of this process."""
    return next(iter(failure.failures.values()))[0]


def _remove(checkpoint: Path) -> None:
    """Renamed first, so that a half removed one is never taken for a checkpoint."""
    aside = checkpoint.with_name(f"{checkpoint.name}.old{TEMPORARY}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(checkpoint, aside)
    shutil.rmtree(aside, ignore_errors=True)
