"""The state of a run as named tensors and plain values, and back.

Names are global: those of the Hugging Face model's (or, with adapters, peft's) parameters. Trained
parameters are saved, frozen ones are not: they are the base model's, which is identified by its
contents instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from furlong import __version__
from furlong.data.dataset import SEQUENCES
from furlong.errors import CheckpointError
from furlong.planners.decide import Decision
from furlong.train.checkpoints.checkpoint import load_tensors, save_checkpoint, stored_tensors
from furlong.train.checkpoints.fingerprints import check_base, check_reference
from furlong.train.choose_plan import values_of
from furlong.train.loop import Progress
from furlong.train.processes import ALONE, Processes
from furlong.train.whole import trained

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
    reference: str | None = None
    """Identifies the model to which a trained one is compared; None where there is none."""
    processes: Processes = ALONE
    names: Sequence[str] = ()
    """Trained parameters of all processes, see `all_names`; empty: those of the model."""

    def save(self, folder: Path, progress: Progress, *, metrics_bytes: int) -> Path:
        """Writes a checkpoint into `folder`; raises CheckpointError. `metrics_bytes`: length of
        the run's metrics so far. All processes call it."""
        state = {
            "step": progress.step,
            "progress": progress.to_dict(),
            "config": self.config,
            "options": values_of(self.decision),
            "groups": self._groups(),
            "schedule": self.scheduler.state_dict(),
            "data_fingerprint": self.data_fingerprint,
            "base_fingerprint": self.base_fingerprint,
            "reference": self.reference,
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
        check_reference(checkpoint, state, self.reference)
        restore_tensors(checkpoint, self.model, self.optimizer, self.processes, self.names)
        restore_groups(state["groups"], self.model, self.optimizer, self.names)
        restore_schedule(state["schedule"], self.scheduler)
        before = state["written_by"]
        changed = [
            f"{name} = {value}, before {before.get(name, 1)}"
            for name, value in self._written_by().items()
            if value != before.get(name, 1)
        ]
        if changed:
            print(f"{'; '.join(changed)}: the last bits may differ from those of a run without it")
        return Progress.from_dict(state["progress"])

    def _groups(self) -> list[dict[str, Any]]:
        """The groups of all processes, which call it together."""
        own = group_values(self.model, self.optimizer)
        told = self.processes.each(own)
        return [
            {**group, "params": _each_once(of[index]["params"] for of in told)}
            for index, group in enumerate(own)
        ]

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
    if before[SEQUENCES] == fingerprint[SEQUENCES]:  # files may lie elsewhere
        return
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


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's part of a checkpoint: `model.<name>`, the parameters themselves."""
    return {_MODEL + name: parameter.data for name, parameter in trained(model).items()}


def all_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, processes: Processes = ALONE
) -> dict[str, Tensor]:
    """Tensors of a checkpoint: trained weights, `optimizer.<key>.<name>`, and the states of the
    generators, of several processes one below the other. A collective."""
    tensors = trained_tensors(model)
    for name, parameter in trained(model).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{_OPTIMIZER}{key}.{name}"] = value
    tensors[_CPU_RNG] = torch.stack(processes.each(torch.get_rng_state()))
    device = next(model.parameters()).device
    if device.type == "cuda":
        tensors[_CUDA_RNG] = torch.stack(processes.each(torch.cuda.get_rng_state(device)))
    return tensors


def restore_tensors(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    processes: Processes = ALONE,
    names: Collection[str] = (),
) -> None:
    """The inverse of `all_tensors`, in place, also in another layout. `names`: those of the trained
    parameters of all processes (empty: of this one). Raises CheckpointError if they do not fit."""
    tensors = trained_tensors(model)
    parameters = trained(model)
    known = set(names or parameters)
    is_fused = bool(optimizer.defaults.get("fused"))
    optimizer.state.clear()
    rng = {}
    for stored, (shape, dtype) in stored_tensors(checkpoint).items():
        if stored.startswith(_OPTIMIZER):
            key, _, name = stored.removeprefix(_OPTIMIZER).partition(".")
            if name not in known:
                raise _misfit(checkpoint, f"the optimizer's {key} of {name}")
            parameter = parameters.get(name)
            if parameter is None:  # another stage's
                continue
            # AdamW counts its steps on the CPU, or in one kernel with the update.
            count = torch.empty(shape, device=parameter.device if is_fused else "cpu")
            like = parameter if shape == parameter.shape else count
            tensors[stored] = torch.empty_like(like, dtype=dtype)
            optimizer.state[parameter][key] = tensors[stored]
        elif stored in (_CPU_RNG, _CUDA_RNG):
            tensors[stored] = rng[stored] = torch.empty(shape, dtype=dtype)
        elif stored.removeprefix(_MODEL) not in known:
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
    names = {parameter: name for name, parameter in trained(model).items()}
    return [
        {**group, "params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def restore_groups(
    values: Sequence[Mapping[str, Any]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    names: Collection[str] = (),
) -> None:
    """The inverse of `group_values`, in place, where this process has a part of each group. `names`
    as for `restore_tensors`. Raises CheckpointError if they do not fit."""
    known = {name for saved in values for name in saved["params"]}
    own = [set(group["params"]) for group in group_values(model, optimizer)]
    fitting = [next((s for s in values if group <= set(s["params"])), None) for group in own]
    if known != set(names or set().union(*own)) or None in fitting:
        raise CheckpointError(
            given="parameter groups of other names",
            required="the names of this model's trained parameters",
            source="the optimizer's groups in the checkpoint",
            change="resume with the model that the checkpoint was written with",
        )
    for group, saved in zip(optimizer.param_groups, fitting, strict=True):
        for key, value in (saved or {}).items():
            if key not in ("params", "fused"):  # the device decides how it is computed
                # JSON knows no tuples, AdamW's betas are one.
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def restore_schedule(
    values: Mapping[str, Any], scheduler: torch.optim.lr_scheduler.LRScheduler
) -> None:
    """Put a schedule where it was, with one learning rate for however many groups there are."""
    count = len(scheduler.optimizer.param_groups)
    per_group = {key: values[key][:1] * count for key in ("base_lrs", "_last_lr")}
    scheduler.load_state_dict({**values, **per_group})


def _each_once(names: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for own in names for name in own))


def _misfit(checkpoint: Path, what: str) -> CheckpointError:
    return CheckpointError(
        given=f"{what}, which the model does not train",
        required="names of this model's trained parameters",
        source=str(checkpoint),
        change="resume with the model that the checkpoint was written with",
    )
