"""The state of a run as named tensors and plain values, and back.

Names are global: those of the Hugging Face model's (or, with adapters, peft's) parameters. Trained
parameters are saved, frozen ones are not: they are the base model's, which is identified by its
contents instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from furlong import __version__
from furlong.data.dataset import SEQUENCES
from furlong.errors import CheckpointError
from furlong.planners.auto.decide import Decision
from furlong.train.checkpoint import load_tensors, save_checkpoint, stored_tensors
from furlong.train.decided import values_of
from furlong.train.loop import Progress
from furlong.train.processes.together import ALONE, Processes

_MODEL, _OPTIMIZER = "model.", "optimizer."
_CPU_RNG, _CUDA_RNG = "rng.cpu", "rng.cuda"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """All that a run needs to go on, as live objects."""

    config: dict[str, Any]
    """The resolved run config."""
    decision: Decision
    """A resumed run does not decide again."""
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    data_fingerprint: dict[str, str]
    """Identifies the training sequences and their order, see `DataSet.fingerprint`."""
    base_fingerprint: str | None
    """Identifies what is not saved, see `base_fingerprint`."""
    architecture: dict[str, Any]
    """The model's config, see `architecture_of`."""
    processes: Processes = ALONE

    def save(self, folder: Path, progress: Progress, *, metrics_bytes: int) -> Path:
        """Writes a checkpoint into `folder`; raises CheckpointError. `metrics_bytes`: length of
        the run's metrics so far. All processes call it."""
        state = {
            "step": progress.step,
            "progress": progress.to_dict(),
            "config": self.config,
            "options": values_of(self.decision),
            "groups": group_values(self.model, self.optimizer),
            "schedule": self.scheduler.state_dict(),
            "data_fingerprint": self.data_fingerprint,
            "base_fingerprint": self.base_fingerprint,
            "architecture": self.architecture,
            "metrics_bytes": metrics_bytes,
            "written_by": self._written_by(),
        }
        tensors = all_tensors(self.model, self.optimizer, self.processes)
        return save_checkpoint(folder, progress.step, tensors, state, processes=self.processes)

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> Progress:
        """Puts everything into place as it was when the checkpoint was taken.

        Raises CheckpointError when base model or parameters are others. See `check_data`.
        """
        check_base(checkpoint, state, self.base_fingerprint)
        restore_tensors(checkpoint, self.model, self.optimizer, self.processes)
        restore_groups(state["groups"], self.model, self.optimizer)
        self.scheduler.load_state_dict(dict(state["schedule"]))
        before = state["written_by"]
        changed = [
            f"{name} = {value}, before {before.get(name, 1)}"
            for name, value in self._written_by().items()
            if value != before.get(name, 1)
        ]
        if changed:
            print(f"{'; '.join(changed)}: the last bits may differ from those of a run without it")
        return Progress.from_dict(state["progress"])

    def _written_by(self) -> dict[str, Any]:
        return written_by(self.model) | {"processes": self.processes.num_processes}


def written_by(model: nn.Module) -> dict[str, Any]:
    """Versions, threads and device on which the last bits of a run depend; all may change."""
    device = next(model.parameters()).device
    return {
        "furlong": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def check_data(checkpoint: Path, state: Mapping[str, Any], fingerprint: dict[str, str]) -> None:
    """Raises CheckpointError unless the training sequences are those of the checkpoint."""
    before = state["data_fingerprint"]
    names = before.keys() | fingerprint.keys()
    differing = sorted(name for name in names if before.get(name) != fingerprint.get(name))
    if differing:
        # Sequences follow from files and tokenizer: these are named where they are known.
        causes = [name for name in differing if name != SEQUENCES] or differing
        raise CheckpointError(
            given=f"{', '.join(causes)}: changed since the checkpoint was written",
            required="the same files and tokenizer: the order of sequences follows from them",
            source=str(checkpoint),
            change="restore what has changed, or start anew with another out",
        )


def check_base(checkpoint: Path, state: Mapping[str, Any], fingerprint: str | None) -> None:
    """Raises CheckpointError unless the frozen weights are those that were trained upon."""
    if state["base_fingerprint"] != fingerprint:
        name = state["config"]["model"]["name"]
        raise CheckpointError(
            given=f"weights of {name} other than those that the adapters were trained upon",
            required="the same base model: a checkpoint of adapters does not hold it",
            source=str(checkpoint),
            change=f"restore the files of {name}",
        )


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's part of a checkpoint: `model.<name>`, the parameters themselves."""
    return {_MODEL + name: parameter.data for name, parameter in _trained(model).items()}


def all_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, processes: Processes = ALONE
) -> dict[str, Tensor]:
    """Tensors of a checkpoint: trained weights, `optimizer.<key>.<name>`, and the states of the
    generators, of several processes one below the other. A collective."""
    tensors = trained_tensors(model)
    for name, parameter in _trained(model).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{_OPTIMIZER}{key}.{name}"] = value
    tensors[_CPU_RNG] = processes.gathered(torch.get_rng_state())
    device = next(model.parameters()).device
    if device.type == "cuda":
        tensors[_CUDA_RNG] = processes.gathered(torch.cuda.get_rng_state(device))
    return tensors


def restore_tensors(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    processes: Processes = ALONE,
) -> None:
    """The inverse of `all_tensors`, in place, also for another number of processes. Raises
    CheckpointError if the names do not fit."""
    tensors = trained_tensors(model)
    parameters = _trained(model)
    optimizer.state.clear()
    rng = {}
    for stored, (shape, dtype) in stored_tensors(checkpoint).items():
        if stored.startswith(_OPTIMIZER):
            key, _, name = stored.removeprefix(_OPTIMIZER).partition(".")
            parameter = parameters.get(name)
            if parameter is None:
                raise _misfit(checkpoint, f"the optimizer's {key} of {name}")
            # AdamW counts its steps on the CPU.
            like = parameter if shape == parameter.shape else torch.empty(shape)
            tensors[stored] = torch.empty_like(like, dtype=dtype)
            optimizer.state[parameter][key] = tensors[stored]
        elif stored in (_CPU_RNG, _CUDA_RNG):
            tensors[stored] = rng[stored] = torch.empty(shape, dtype=dtype)
        elif stored not in tensors:
            raise _misfit(checkpoint, stored.removeprefix(_MODEL))
    load_tensors(checkpoint, tensors)
    _restore_generators(rng, processes.launch.number, next(model.parameters()).device)


def _restore_generators(rng: Mapping[str, Tensor], number: int, device: torch.device) -> None:
    """The generators of process `number`; one more than there were gets a state of its own."""
    states = torch.atleast_2d(rng[_CPU_RNG])
    if number >= len(states):
        seed = xxhash.xxh3_64_intdigest(states[0].numpy().tobytes(), seed=number)
        torch.manual_seed(seed >> 1)
        return
    # clones: torch reads a state from where its storage begins
    torch.set_rng_state(states[number].clone())
    if device.type == "cuda" and _CUDA_RNG in rng:
        torch.cuda.set_rng_state(torch.atleast_2d(rng[_CUDA_RNG])[number].clone(), device)


def group_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer's groups: names instead of parameters, and the numbers of each."""
    names = {parameter: name for name, parameter in _trained(model).items()}
    return [
        {**group, "params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def restore_groups(
    values: list[dict[str, Any]], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """The inverse of `group_values`, in place. Raises CheckpointError if the names do not fit."""
    own = [group["params"] for group in group_values(model, optimizer)]
    if own != [group["params"] for group in values]:
        raise CheckpointError(
            given="parameter groups of other names",
            required="the names of this model's trained parameters",
            source="the optimizer's groups in the checkpoint",
            change="resume with the model that the checkpoint was written with",
        )
    for group, saved in zip(optimizer.param_groups, values, strict=True):
        for key, value in saved.items():
            if key != "params":
                # JSON knows no tuples, AdamW's betas are one.
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def base_fingerprint(model: nn.Module) -> str | None:
    """A checksum of the frozen parameters, by name and content; None if all are trained."""
    frozen = {n: p.data for n, p in model.named_parameters() if not p.requires_grad}
    if not frozen:
        return None
    checksum = xxhash.xxh3_128()
    for name, weight in frozen.items():
        checksum.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        checksum.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return checksum.hexdigest()


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Tied parameters appear once, under their first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _misfit(checkpoint: Path, what: str) -> CheckpointError:
    return CheckpointError(
        given=f"{what}, which the model does not train",
        required="names of this model's trained parameters",
        source=str(checkpoint),
        change="resume with the model that the checkpoint was written with",
    )
