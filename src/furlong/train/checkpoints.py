"""Checkpoints: the state of a run on disk, there whole or not at all.

Tensors have global names: those of the Hugging Face model's (or, with adapters, peft's) parameters.
Trained parameters are saved, frozen ones are not: they are the base model's, which is identified by
its contents instead. See `run_folder` for the files.

Nothing is ever unpickled. The default storage of torch.distributed.checkpoint (DCP) keeps its index
as a pickle of torch's private classes. DCP's safetensors storage has no index: the header of each
file tells names, types, shapes and the offset of its part in the whole tensor, so that another
number of processes can read it as well, and every safetensors tool can look inside. Of several
processes each writes the parts of the sharded tensors that it holds, into files of its own.

A checkpoint is written under another name (`.tmp`), synchronised with the disk, listed in its
manifest, and renamed. What a power failure or a full disk cut short has no manifest, or one that
its files do not fit, and is never loaded.
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
# DCP copies a file's tensors before it writes them: files of this size bound what that takes.
_MAX_FILE_BYTES = 2**28


def written_by(device: torch.device, num_processes: int) -> dict[str, Any]:
    """Versions, threads and device on which the last bits of a run depend; all may change."""
    return versions() | {
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": num_processes,
    }


def tell_changes(now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Print in what `written_by` differs from that of a checkpoint."""
    if changed := differing(now, before):
        words = "; ".join(f"{key} = {own}, before {then}" for key, (own, then) in changed.items())
        print(f"{words}: the last bits may differ from those of a run without it")


def check_data(checkpoint: Checkpoint, fingerprint: dict[str, str]) -> None:
    """Raises CheckpointError unless the training sequences are those of the checkpoint."""
    found = differing(checkpoint.state["data_fingerprint"], fingerprint)
    if SEQUENCES in found:  # files may lie elsewhere
        # Sequences follow from files and tokenizer: these are named where they are known.
        causes = [name for name in found if name != SEQUENCES] or [SEQUENCES]
        raise checkpoint.refusal(
            f"{', '.join(causes)}: changed since the checkpoint was written",
            "the same files, weights, shares and limits, and the same tokenizer",
            "restore what has changed, or start anew with another out",
        )


def base_fingerprint(
    model: nn.Module, processes: Processes = ALONE, *, like: str | None = None
) -> str | None:
    """A checksum of the frozen parameters of all processes, by name and content; None if all are
    trained. `like`: that of a checkpoint, see `checksums`. A collective."""
    # the last stage's copy of tied embeddings has no adapter, where the first one's has
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
"""How fingerprints begin that are made of checksums which no layout changes."""


def fingerprint_of(text: str, like: str | None) -> str:
    """The fingerprint of checksums and other facts, of the kind of `like` (None: today's)."""
    return _SUMS * (not _is_older(like)) + xxhash.xxh3_128_hexdigest(text.encode())


def _is_older(like: str | None) -> bool:
    return like is not None and not like.startswith(_SUMS)


def checksums(
    weights: Mapping[str, Tensor], processes: Processes, like: str | None = None
) -> dict[str, str]:
    """The checksums of all processes' weights, by name; in 4 bits also of their scales. A
    collective.

    `like`: a fingerprint to be compared with. Those of older checkpoints are made of the bytes of
    whole weights: a run that such a checkpoint begins keeps to it.
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
    """A checksum of a whole tensor's dtype, shape and bytes, and of its scales. A collective."""
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
"""Weights that a checkpoint does not hold and depends on, by the key of their checksum."""


def check_weights(checkpoint: Checkpoint, now: Mapping[str, str | None]) -> None:
    """Raises CheckpointError unless the weights beside a checkpoint are those of its run. `now`:
    their checksums, by key."""
    if key := next((key for key in now if checkpoint.state[key] != now[key]), None):
        name = checkpoint.state["config"]["model"]["name"]
        raise checkpoint.refusal(
            f"weights of {name} other than the checkpoint's {_WEIGHTS[key]}",
            "the same model: a checkpoint does not hold them",
            f"restore the files of {name}, or start anew with another out",
        )


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's part of a checkpoint: `model.<name>`, the parameters themselves."""
    return {_MODEL + name: parameter.data for name, parameter in trained(model).items()}


def all_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, processes: Processes = ALONE,
    device: torch.device = CPU,
) -> dict[str, Tensor]:  # fmt: skip
    """Tensors of a checkpoint: trained weights, `optimizer.<key>.<name>`, and the states of the
    generators, one row (bytes,) for each process, that of the `device` it computes on too. A
    collective."""
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
    """The inverse of `all_tensors`, in place, also in another layout. A collective; raises
    CheckpointError, on all, where the checkpoint lacks a tensor of any process."""
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
    """The generators of process `number`; one more than there were gets a state of its own."""
    states = rows[_CPU_RNG]
    if number >= len(states):
        seed = xxhash.xxh3_64_intdigest(states[0].numpy().tobytes(), seed=number)
        torch.manual_seed(seed >> 1)
        return
    # clones: torch reads a state from where its storage begins
    torch.set_rng_state(states[number].clone())
    if device.type == "cuda" and _CUDA_RNG in rows:
        torch.cuda.set_rng_state(rows[_CUDA_RNG][number].clone(), device)


class Checkpoints:
    """The checkpoints of a run in a folder, written within its steps or in a thread beside them.

    In the background the tensors are first copied into memory; one checkpoint is written at a time.
    All processes call the same methods; `say` is told of a checkpoint that is complete.
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
        """Write `folder/step-XXXXXXXX`, or begin to, in the place of those of this step and later
        ones, from which the run went back, and remove the old ones as `remove_old` does.

        `state` is what JSON can hold; the first process's is written. Every process has the parts
        of sharded tensors that it holds, and whole ones that are equal wherever they are; those of
        its stage alone. Raises CheckpointError when the disk is full or cannot be written, also for
        the one before; the checkpoints before are then as they were.
        """
        self.finish()
        if self._thread is None:
            self._write(step, tensors, state, best_step)
        else:
            staged = BlockingAsyncStager().stage(dict(tensors))
            self._coming = self._thread.submit(self._write, step, staged, state, best_step)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written. Raises CheckpointError if it failed."""
        if self._coming is not None:
            coming, self._coming = self._coming, None
            self._processes.together(coming.result)

    def close(self) -> None:
        """Wait for the last one, without an error."""
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
    """Raises CheckpointError unless the files of all processes are in the folder: on machines
    without a common disk each would write into a folder of its own."""
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
    """The file system that DCP writes to, with size and checksum of each file."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, Measured] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file for writing; without a buffer, which DCP would not bring to the disk."""
        with Path(path).open(mode, buffering=0) as opened:
            summed = SummedFile(opened)
            yield summed
        self.files[Path(path).name] = {"bytes": summed.num_bytes, "xxh3": summed.checksum()}


def _write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], num_bytes: Mapping[str, int], processes: Processes
) -> dict[str, Measured]:
    """The files that this process has written. `num_bytes`: of all processes' tensors."""
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
    """The tensors as safetensors writes them: contiguous, and no two in one memory, as the tables
    of 8-bit states are that bitsandbytes shares among all parameters."""
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
    """The error of this process."""
    return next(iter(failure.failures.values()))[0]


@contextmanager
def one_process() -> Iterator[None]:
    """Without DCP's warning, at every save and load, that there is one process only.

    For the length of a run: each change of the filters makes Python forget which warnings it has
    shown.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


# The whole model of a run whose processes each hold a part of it.


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Parameters of a whole model."""

    num_parameters: int
    num_trained: int
    trained_bytes: int


def model_size(engine: Engine, processes: Processes) -> ModelSize:
    """The size of the model that all processes hold together. A collective."""
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
    """The trained parameters that this process holds; tied ones appear once, under their first
    name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def whole_weights(
    engine: Engine, processes: Processes, names: Collection[str],
    dtype: torch.dtype | None = None, stored: Path | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """The weights and buffers of these names, from all processes, on the CPU of the first one in
    `dtype` (None: their own); nothing on the others. A collective.

    `stored`: a checkpoint, from which trained weights are read. The processes of a stage gather the
    others one by one; then the first one of each stage sends them on.
    """
    ranks, own_state = engine.ranks, engine.model.model.state_dict(keep_vars=True)
    live = {
        # the largest first: copies that a gather makes of it are not beside all others
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
    """The weights of these names that a checkpoint holds, in `dtype` (None: their own)."""
    kinds = {name.removeprefix(_MODEL): of for name, of in stored_tensors(checkpoint).items()}
    read = {name: torch.empty(kinds[name][0], dtype=dtype or kinds[name][1])
            for name in names if name in kinds}  # fmt: skip
    load_tensors(checkpoint, {_MODEL + name: tensor for name, tensor in read.items()})
    return read


def _dtype_in(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is written where floats are in `dtype`."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
