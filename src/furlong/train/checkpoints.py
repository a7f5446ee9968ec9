"""Checkpoints: the state of a run on disk, complete or absent.

Tensors have the names of the Hugging Face model's (or peft's) parameters. Trained parameters are
saved; frozen ones belong to the base model, of which only a checksum is saved. See `run_folder` for
the files.

Nothing is ever unpickled. The default storage of torch.distributed.checkpoint (DCP) pickles its
index. DCP's safetensors storage has no index: each file's header has names, dtypes, shapes and the
offsets of its shards in the whole tensors. So any number of processes can read a checkpoint, and so
can any safetensors tool. Each process writes its shards to separate files.

A checkpoint is written under a temporary name (`.tmp`), synced to disk, listed in its manifest, and
renamed. After a power failure or on a full disk the manifest is missing or does not match the
files, and the checkpoint is never loaded.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from furlong.data.dataset import SEQUENCES
from furlong.errors import CheckpointError, differing
from furlong.families import versions
from furlong.files import TEMPORARY, SummedFile, os_errors_told, publish, sync, write_json
from furlong.models.quantized import scales_of
from furlong.runtime.distributed.consensus import whole_checksums
from furlong.train.optim import local, make_state, state_tensors
from furlong.train.processes import ALONE, Processes
from furlong.train.run_folder import (
    FORMAT_VERSION,
    MANIFEST,
    STATE,
    Checkpoint,
    Measured,
    checkpoint_of,
    measured,
    remove_from,
    remove_old,
)
from furlong.units import format_seconds

if TYPE_CHECKING:
    from furlong.api import Engine

CPU = torch.device("cpu")
_MODEL, _OPTIMIZER = "model.", "optimizer."
_CPU_RNG, _CUDA_RNG = "rng.cpu", "rng.cuda"
# DCP copies a file's tensors before it writes them: this size bounds the copies.
_MAX_FILE_BYTES = 2**28


def written_by(device: torch.device, num_processes: int) -> dict[str, Any]:
    """Return package versions, number of threads, device and number of processes. These values
    affect the last bits of a run's results. A resume may change the values."""
    return versions() | {
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": num_processes,
    }


def tell_changes(now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Print which values of `written_by` differ between `now` and a checkpoint (`before`)."""
    if changed := differing(now, before):
        words = "; ".join(f"{key} = {own}, before {then}" for key, (own, then) in changed.items())
        print(f"{words}: the last bits may differ from those of a run without it")


def check_data(checkpoint: Checkpoint, fingerprint: dict[str, str]) -> None:
    """Raise CheckpointError if the training sequences have changed since the checkpoint."""
    found = differing(checkpoint.state["data_fingerprint"], fingerprint)
    if SEQUENCES in found:  # else only the files' paths may have changed
        # Name the cause (files, tokenizer) if it is known.
        causes = [name for name in found if name != SEQUENCES] or [SEQUENCES]
        raise checkpoint.refusal(
            f"{', '.join(causes)}: changed since the checkpoint was written",
            "the same files, weights, shares and limits, and the same tokenizer",
            "restore what has changed, or start anew with another out",
        )


def base_fingerprint(
    model: nn.Module, processes: Processes = ALONE, *, like: str | None = None
) -> str | None:
    """Return a checksum of the names and values of all processes' frozen parameters; None if all
    parameters are trained. `like`: a checkpoint's fingerprint, see `checksums`. A collective."""
    # tied embeddings may have an adapter on the first stage, but not on the last
    wrapped = "" if _is_older(like) else ".base_layer"
    frozen = {
        name.replace(wrapped, ""): p for name, p in model.named_parameters() if not p.requires_grad
    }
    found = checksums(frozen, processes, like)
    if not found:
        return None
    lines = "".join(f"{name} {found[name]}\n" for name in sorted(found))
    return fingerprint_of(lines, like)


_SUMS = "sums-"
"""Prefix of fingerprints made of checksums that do not depend on the layout."""


def fingerprint_of(text: str, like: str | None) -> str:
    """Return a hash of the text. `like`: a hash with which the result will be compared; the result
    has the version of `like`, or the newest version if `like` is None."""
    return _SUMS * (not _is_older(like)) + xxhash.xxh3_128_hexdigest(text.encode())


def _is_older(like: str | None) -> bool:
    return like is not None and not like.startswith(_SUMS)


def checksums(
    weights: Mapping[str, Tensor], processes: Processes, like: str | None = None
) -> dict[str, str]:
    """Return {name: checksum} of the weights of all processes. The checksum of a 4-bit weight
    covers its scales. All processes must call this together.

    `like`: a checksum to compare with later, such as one in a checkpoint. It decides the algorithm:
    an old checksum selects the old algorithm, which hashes the bytes of whole weights. So a run
    that is resumed from an old checkpoint continues with the old algorithm. None: the newest
    algorithm.
    """
    own = dict.fromkeys(weights, "")
    if _is_older(like):
        own = {name: _digest(weight) for name, weight in weights.items()}
    else:
        parts = [(name, x) for name, weight in weights.items() for x in _parts_of(weight)]
        sums = whole_checksums([x for _, x in parts])
        for (name, x), total in zip(parts, sums, strict=True):
            own[name] += f"{x.dtype} {tuple(x.shape)} {total:x} "
    found: dict[str, str] = {}
    for of_process in processes.each(own):
        found |= of_process
    return found


def _parts_of(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.detach(), *scales_of(weight)


def _digest(weight: Tensor) -> str:
    """Return a hash of a whole weight and its scales: dtypes, shapes and bytes. A collective."""
    found = xxhash.xxh3_128()
    for x in _parts_of(weight):
        whole = x.full_tensor() if isinstance(x, DTensor) else x
        found.update(f"{whole.dtype} {tuple(whole.shape)}".encode())
        found.update(whole.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


_WEIGHTS = {
    "base_fingerprint": "frozen weights, which its adapters were trained upon",
    "reference": "reference model, with which train.loss compares in every step",
}
"""Key of a checksum -> the weights that a checkpoint depends on without containing them."""


def check_weights(checkpoint: Checkpoint, now: Mapping[str, str | None]) -> None:
    """Raise CheckpointError if the frozen weights or the reference model differ from those at the
    checkpoint, which stores only their checksums.

    `now`: {key: current checksum}. The checkpoint's state.json has checksums under the same keys.
    """
    if key := next((key for key in now if checkpoint.state[key] != now[key]), None):
        name = checkpoint.state["config"]["model"]["name"]
        raise checkpoint.refusal(
            f"weights of {name} other than the checkpoint's {_WEIGHTS[key]}",
            "the same model: a checkpoint does not hold them",
            f"restore the files of {name}, or start anew with another out",
        )


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters (not copied) under their checkpoint names, `model.<name>`."""
    return {_MODEL + name: parameter.data for name, parameter in trained(model).items()}


def all_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, processes: Processes = ALONE,
    device: torch.device = CPU,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the tensors to save: trained weights, optimizer states as `optimizer.<key>.<name>`,
    and the states of the CPU and CUDA generators, one row of bytes per process. A collective."""
    tensors = _live_tensors(model, optimizer)
    tensors[_CPU_RNG] = torch.stack(processes.each(torch.get_rng_state()))
    if device.type == "cuda":
        tensors[_CUDA_RNG] = torch.stack(processes.each(torch.cuda.get_rng_state(device)))
    return tensors


def _live_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return trained_tensors(model) | {
        f"{_OPTIMIZER}{key}.{name}": value
        for name, parameter in trained(model).items()
        for key, value in state_tensors(optimizer, parameter).items()
    }


def restore_tensors(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    processes: Processes = ALONE,
    device: torch.device = CPU,
) -> None:
    """Load a checkpoint (see `all_tensors`) into the model, the optimizer and the random
    generators. All processes must call this together.

    The run that wrote the checkpoint may have had another layout. Raises CheckpointError, on all
    processes, if the checkpoint lacks a tensor that a process needs.
    """
    make_state(optimizer)
    tensors = _live_tensors(model, optimizer)

    def read() -> None:
        stored = stored_tensors(checkpoint).items()
        rng = {name: of for name, of in stored if name in (_CPU_RNG, _CUDA_RNG)}
        rows = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in rng.items()}
        load_tensors(checkpoint, tensors | rows)
        restore_generators(rows, processes.launch.number, device)

    processes.together(read)


def restore_generators(rows: Mapping[str, Tensor], number: int, device: torch.device) -> None:
    """Restore this process's random generators from row `number` of the saved states. A process
    without a row gets a seed derived from row 0."""
    states = rows[_CPU_RNG]
    if number >= len(states):
        seed = xxhash.xxh3_64_intdigest(states[0].numpy().tobytes(), seed=number)
        torch.manual_seed(seed >> 1)
        return
    # cloned: torch reads a state from the start of its storage
    torch.set_rng_state(states[number].clone())
    if device.type == "cuda" and _CUDA_RNG in rows:
        torch.cuda.set_rng_state(rows[_CUDA_RNG][number].clone(), device)


class Checkpoints:
    """The checkpoints in a run's folder, written synchronously or in a background thread.

    All processes call the same methods. In the background, tensors are first copied to CPU memory,
    and one checkpoint is written at a time. When a checkpoint is complete, `say` is called with a
    message.
    """

    def __init__(
        self, folder: Path, processes: Processes = ALONE, *, num_kept: int = 3,
        in_background: bool = False, say: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.folder, self._processes, self._say = folder, processes, say
        self._num_kept = num_kept
        self._thread = ThreadPoolExecutor(1, "checkpoints") if in_background else None
        self._writers = processes.apart() if in_background else processes
        self._coming: Future[None] | None = None

    def save(
        self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], best_step: int = 0
    ) -> None:
        """Write the checkpoint `folder/step-XXXXXXXX`, or start to write it in the background.

        If the run has returned to an earlier step, there may be checkpoints of this step or later
        steps. These checkpoints are removed.

        Args:
            step: The number of finished steps.
            tensors: This process's shards, and unsharded tensors, which are equal on all processes
                that have them.
            state: JSON values, written by the first process.
            best_step: See `remove_old`, which removes older checkpoints.

        Raises:
            CheckpointError: If this checkpoint, or the previous one in the background, could not be
                written, such as on a full disk. Earlier checkpoints are unchanged.
        """
        self.finish()
        if self._thread is None:
            self._write(step, tensors, state, best_step)
        else:
            staged = BlockingAsyncStager().stage(dict(tensors))
            self._coming = self._thread.submit(self._write, step, staged, state, best_step)

    def finish(self) -> None:
        """Wait until the current checkpoint is written. Raises CheckpointError if writing fails."""
        if self._coming is not None:
            coming, self._coming = self._coming, None
            self._processes.together(coming.result)

    def close(self) -> None:
        """Wait until the last checkpoint is written, without raising its error."""
        if self._thread is not None:
            self._thread.shutdown()

    def _write(
        self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], best_step: int
    ) -> None:
        started_s, processes = time.perf_counter(), self._writers
        checkpoint = checkpoint_of(self.folder, step)
        aside = checkpoint.with_name(checkpoint.name + TEMPORARY)
        files: dict[str, Measured] = {}
        told = os_errors_told(
            CheckpointError,
            required="a folder with room for a checkpoint, that can be written to",
            source=str(self.folder),
            or_else=" and continue the run with --resume; the checkpoints before are whole",
            during=f"checkpoint {checkpoint.name} was written",
        )

        @told
        def make_room() -> None:
            shutil.rmtree(aside, ignore_errors=True)
            self.folder.mkdir(exist_ok=True)
            aside.mkdir()

        @told
        def complete() -> None:
            _require_files(aside, files)
            write_json(aside / STATE, state)
            files[STATE] = measured(aside / STATE)
            write_json(aside / MANIFEST, {"version": FORMAT_VERSION, "files": files})
            remove_from(self.folder, step)
            publish(aside, checkpoint)
            sync(self.folder.parent)

        num_bytes: dict[str, int] = {}
        for of_process in processes.each({name: x.nbytes for name, x in tensors.items()}):
            num_bytes |= of_process
        write = told(partial(_write_tensors, aside, tensors, num_bytes, processes))
        try:
            processes.from_first(make_room)
            for written in processes.each(processes.together(write)):
                files |= written
            processes.from_first(complete)
        except CheckpointError:
            if processes.is_first:
                shutil.rmtree(aside, ignore_errors=True)
            raise
        if processes.is_first:
            remove_old(self.folder, self._num_kept, best_step)
        self._say(f"checkpoint {checkpoint} ({format_seconds(time.perf_counter() - started_s)})")


def _require_files(folder: Path, files: Mapping[str, Measured]) -> None:
    """Raise CheckpointError unless the folder has all `files`, each with the size given there.
    Files are missing if machines without a shared disk write to different folders."""
    for name, of_file in files.items():
        file = folder / name
        if not file.exists() or file.stat().st_size != of_file["bytes"]:
            raise CheckpointError(
                given=f"{name}, which is not where the first process writes",
                required="one run folder for the processes of all machines",
                source=str(folder.parent),
                change="set out to a folder on a disk that all machines share",
            )


class _SummedFiles(FileSystem):
    """File system for DCP that records size and checksum of each file."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, Measured] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file for unbuffered writing, since DCP would sync without flushing a buffer."""
        with Path(path).open(mode, buffering=0) as opened:
            summed = SummedFile(opened)
            yield summed
        self.files[Path(path).name] = {"bytes": summed.num_bytes, "xxh3": summed.checksum()}


def _write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], num_bytes: Mapping[str, int], processes: Processes
) -> dict[str, Measured]:
    """Write this process's tensors; return size and checksum of the files that it has written.
    `num_bytes`: sizes of the tensors of all processes, by name."""
    file_of: dict[str, int] = {}
    number, so_far = 1, 0
    for name, size in num_bytes.items():
        if so_far and so_far + size > _MAX_FILE_BYTES:
            number, so_far = number + 1, 0
        file_of[name] = number
        so_far += size
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=file_of, save_distributed=True
    )
    writer.fs = found = _SummedFiles()
    try:
        whole = _apart(tensors)
        is_alone = processes.num_processes == 1
        save(whole, storage_writer=writer, no_dist=is_alone, process_group=processes.group)
    except CheckpointException as failure:
        raise _cause(failure) from None
    return found.files


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as safetensors requires: contiguous, and no two in the same memory. (All 8-bit
    states of bitsandbytes use the same quantization tables.)"""
    found, seen = {}, set[int]()
    for name, tensor in tensors.items():
        own = tensor.contiguous()
        if own.device.type == "cpu" and not isinstance(own, DTensor):  # others are copied by DCP
            place = own.untyped_storage().data_ptr()
            own = own.clone() if place in seen else own
            seen.add(place)
        found[name] = own
    return found


def stored_tensors(checkpoint: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of each tensor of a checkpoint, by name."""
    stored = HuggingFaceStorageReader(str(checkpoint)).read_metadata().state_dict_metadata
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def load_tensors(checkpoint: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors of a checkpoint into the `tensors` of the same names.

    Raises CheckpointError if a name is missing or a shape differs.
    """
    reader = HuggingFaceStorageReader(str(checkpoint))
    reader.read_metadata()  # fails here without the traceback that DCP would print
    try:
        load(dict(tensors), storage_reader=reader, no_dist=True)
    except CheckpointException as failure:
        error = _cause(failure)
        if isinstance(error, AssertionError):  # DCP's, where it cannot read them a second time
            reader.read_metadata()
        if not isinstance(error, RuntimeError | ValueError):
            raise error from None
        raise CheckpointError(
            given=str(error),
            required=f"the {len(tensors)} tensors of this model and its optimizer",
            source=str(checkpoint),
            change="resume with the model that the checkpoint was written with",
        ) from error


def _cause(failure: CheckpointException) -> BaseException:
    """Return the error of the lowest rank for which DCP has recorded an error."""
    return next(iter(failure.failures.values()))[0]


@contextmanager
def one_process() -> Iterator[None]:
    """Context manager: suppress the warning about a single process that DCP gives at each save and
    load.

    Enter it once, around the whole run: each change of the warning filters makes Python repeat
    warnings that it shows only once.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


# The whole model, gathered from all processes.


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Number of parameters of a whole model, and bytes of the trained ones."""

    num_parameters: int
    num_trained: int
    trained_bytes: int


def model_size(engine: Engine, processes: Processes) -> ModelSize:
    """Return the size of the whole model. Weights on several processes count once. A collective."""
    elsewhere = {id(parameter) for parameter in engine.counted_elsewhere}
    own = [p for p in engine.model.model.parameters() if id(p) not in elsewhere]
    if (ranks := engine.ranks) is not None and (ranks.replica, ranks.process) != (0, 0):
        is_counted = (
            ranks.replica < ranks.dp // ranks.replicate
        )  # of groups that hold all, the first
        own = [p for p in own if is_counted and isinstance(p, DTensor)]  # whole ones: process 0
    trained = [p for p in own if p.requires_grad]
    ours = [sum(local(p).numel() * (1 if p.is_floating_point() else 2) for p in own),
            sum(local(p).numel() for p in trained),
            sum(local(p).nbytes for p in trained)]  # fmt: skip
    return ModelSize(*(int(total) for total in processes.sums(ours)))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return this process's trained parameters by name. A tied parameter has one entry, under its
    first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def whole_weights(
    engine: Engine, processes: Processes, names: Collection[str],
    dtype: torch.dtype | None = None, stored: Path | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Collect weights and buffers by name on the first process. A collective.

    The processes of each pipeline stage gather its weights one by one. The stage's first process
    sends each weight to the first process of the run.

    Args:
        dtype: Dtype of the returned floating-point tensors; None: unchanged.
        stored: A checkpoint to read trained weights from; None: the weights in memory.

    Returns:
        CPU tensors by name on the first process, {} on others.
    """
    ranks, own_state = engine.ranks, engine.model.model.state_dict(keep_vars=True)
    live = {
        # the largest first, so that its gather's copies do not add to all the others
        name: own_state[name].detach()
        for name in sorted(own_state, key=lambda name: -own_state[name].numel())
        if name in names and not (stored is not None and own_state[name].requires_grad)
    }
    is_sender = ranks is None or (ranks.replica, ranks.process) == (0, 0)
    forms = {name: (list(x.shape), _dtype_in(x, dtype)) for name, x in live.items() if is_sender}
    told, found = processes.each(forms), dict[str, Tensor]()
    for name, tensor in live.items():
        own = tensor.to(_dtype_in(tensor, dtype))
        whole = own.full_tensor() if isinstance(own, DTensor) else own
        if is_sender and processes.is_first:
            found[name] = whole.cpu()
        elif is_sender and name not in told[0]:
            dist.send(whole.cpu().contiguous(), 0)
    if not processes.is_first:
        return {}
    for number, forms in enumerate(told[1:], start=1):
        for name, (shape, own_dtype) in forms.items():
            if name not in told[0]:
                found[name] = torch.empty(shape, dtype=own_dtype)
                dist.recv(found[name], number)
    return found if stored is None else found | stored_weights(stored, names, dtype)


def stored_weights(
    checkpoint: Path, names: Collection[str], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Read those weights of a checkpoint that `names` contains; return {name: tensor}. Other names
    are ignored. `dtype`: dtype of the tensors; None: as stored."""
    kinds = {name.removeprefix(_MODEL): of for name, of in stored_tensors(checkpoint).items()}
    read = {name: torch.empty(kinds[name][0], dtype=dtype or kinds[name][1])
            for name in names if name in kinds}  # fmt: skip
    load_tensors(checkpoint, {_MODEL + name: tensor for name, tensor in read.items()})
    return read


def _dtype_in(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return `dtype` for a floating-point tensor if it is given, else the tensor's dtype."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
