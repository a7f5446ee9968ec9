"""The whole model of a run whose processes each hold a part of it: its size, names and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from furlong.train.processes import Processes

if TYPE_CHECKING:
    from furlong.api import Engine


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
    trained = [p for p in own if p.requires_grad]
    ours = [sum(map(_numel, own)), sum(map(_numel, trained)),
            sum(_numel(p) * p.element_size() for p in trained)]  # fmt: skip
    return ModelSize(*(int(total) for total in processes.sums(ours)))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters that this process holds; tied ones appear once, under their first
    name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def whole_weights(engine: Engine, processes: Processes) -> dict[str, Tensor]:
    """The trained weights of all processes, on the CPU of the first one, and nothing on the
    others. A collective.

    The processes of a stage gather its weights; then the first one of each stage sends them on.
    """
    ranks = engine.ranks
    is_sender = ranks is None or (ranks.replica, ranks.process) == (0, 0)
    found: dict[str, Tensor] = {}
    for name, parameter in trained(engine.model.model).items():
        weight = parameter.data
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if is_sender:
            found[name] = whole.cpu()
    if ranks is None or ranks.pp == 1:
        return found if processes.is_first else {}
    forms = {name: (list(w.shape), w.dtype) for name, w in found.items()}
    told = processes.each(forms)
    if not processes.is_first:
        for weight in found.values():
            dist.send(weight.contiguous(), 0)
        return {}
    for number, forms in enumerate(told[1:], start=1):
        found |= _received(number, forms)
    return found


def put_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into the parameters of their names."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name].copy_(weight)


def _received(number: int, forms: Mapping[str, tuple[list[int], torch.dtype]]) -> dict[str, Tensor]:
    """The weights that a process sends, by name."""
    found = {}
    for name, (shape, dtype) in forms.items():
        weight = torch.empty(shape, dtype=dtype)
        dist.recv(weight, number)
        found[name] = weight
    return found


def _numel(parameter: Tensor) -> int:
    """Elements on this process."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()
