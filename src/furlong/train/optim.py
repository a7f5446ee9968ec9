"""The optimizer, its state, and the learning rate schedule."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw

from furlong.config.schema import TrainConfig
from furlong.errors import ConfigError
from furlong.models.quantized import import_safely, library
from furlong.train.processes import ALONE, Processes

_HF_NAMES = {
    "constant": "constant_with_warmup",
    "cosine": "cosine_with_min_lr",
    "linear": "polynomial",  # "linear" has no minimum rate
}
"""Schedule -> its name in transformers."""


def build_optimizer(
    model: nn.Module, settings: TrainConfig, processes: Processes = ALONE
) -> torch.optim.Optimizer:
    """Return the optimizer of all parameters of `model` that require a gradient. The model of a
    pipeline stage may have no such parameter. Raises ConfigError if a group of `train.groups`
    matches no parameter of the whole model. All processes must call this together."""
    name = settings.optimizer
    groups, matrices = _groups(model, settings, processes)
    plain: dict[str, Any] = {"lr": settings.lr}
    adam: dict[str, Any] = plain | {"betas": settings.betas, "eps": settings.eps}
    if name == "adafactor":
        import_safely()
        from transformers import Adafactor

        return Adafactor(groups, scale_parameter=False, relative_step=False, **plain)
    if "torch_" in name:
        from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

        of_torchao = {"8bit": AdamW8bit, "4bit": AdamW4bit, "fp8": AdamWFp8}
        kind = of_torchao[name.removeprefix("adamw_torch_")]
        return kind(groups, block_size=256, **adam)  # type: ignore[no-any-return]
    if name.endswith("bit"):
        bits = int(name.rpartition("_")[2].removesuffix("bit"))
        make = library(f"train.optimizer: {name}").optim.AdamW
        return make(groups, optim_bits=bits, is_paged=name.startswith("paged"), **adam)  # type: ignore[no-any-return]
    # On a GPU, and for weights offloaded from it, the fused kernel needs no temporaries of the
    # weights' size. On a CPU it is three times as fast, but not used: it rounds the end of a tensor
    # differently, and so depends on the sharding.
    fused = any(_is_for_gpu(p) for own in (*groups, *matrices) for p in own["params"])
    is_narrow = settings.state_dtype == "bfloat16"
    others = (BF16AdamW if is_narrow else torch.optim.AdamW)(groups, fused=fused or None, **adam)
    if name != "muon":
        return others
    # updates as large as AdamW's, so one learning rate serves both
    return MuonAndAdamW(torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **plain), others)


def _is_for_gpu(x: Tensor) -> bool:
    """Whether a parameter is used on a GPU, even if it is offloaded between steps."""
    return x.is_cuda or (isinstance(x, DTensor) and x.device_mesh.device_type == "cuda")


def _groups(
    model: nn.Module, settings: TrainConfig, processes: Processes
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (parameter groups for AdamW, parameter groups for Muon). All parameters of a group
    have the same learning rate and weight decay. The groups with the run's defaults come first.
    Parameters with one axis (norms, biases) have no weight decay, unless `train.groups` sets it."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    everywhere = {name for names in processes.each(list(named)) for name in names}
    for group in settings.groups:
        if not any(re.search(group.match, name) for name in everywhere):
            some = ", ".join(sorted(everywhere)[:3])
            raise ConfigError(
                given=f"train.groups: match {group.match!r}, which finds no trained parameter",
                required=f"a regular expression that some name contains, such as {some}",
                source="train.groups",
                change="correct match, or remove the group",
            ).on_all()
    ends = _ends(model) if settings.optimizer == "muon" else set(map(id, named.values()))
    found: tuple[dict[Any, dict[str, nn.Parameter]], ...] = ({}, {})
    for own in found:
        own |= {(settings.lr, settings.weight_decay): {}, (settings.lr, 0.0): {}}
    for name, p in named.items():
        own_group = next((one for one in settings.groups if re.search(one.match, name)), None)
        lr, decay = settings.lr, settings.weight_decay if p.ndim > 1 else 0.0
        if own_group is not None:
            lr = lr if own_group.lr is None else own_group.lr
            decay = decay if own_group.weight_decay is None else own_group.weight_decay
        by_muon = p.ndim == 2 and id(p) not in ends
        found[by_muon].setdefault((lr, decay), {})[name] = p
    listed = [
        [
            {"params": [*own.values()], "param_names": [*own], "lr": lr, "weight_decay": decay}
            for (lr, decay), own in part.items()
        ]
        for part in found
    ]
    return listed[0], listed[1]


def _ends(model: Any) -> set[int]:
    """Return the `id` of each embedding and head weight, which Muon does not update."""
    modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if callable(getattr(model, "get_output_embeddings", None)):
        modules.append(model.get_output_embeddings())
    return {id(p) for module in modules if module is not None for p in module.parameters()}


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the layers' matrices and AdamW for other parameters, as one optimizer with the
    groups and state of both."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        lr = parts[0].defaults["lr"]  # schedules derive their minimum from it
        super().__init__([group for part in parts for group in part.param_groups], {"lr": lr})
        self.parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters of both optimizers."""
        for part in self.parts:
            part.step()


class BF16AdamW(torch.optim.AdamW):
    """AdamW with moments stored in bfloat16; updates are computed in the weights' dtype.

    Moments are rounded stochastically, so that they are right on average. Rounding to nearest would
    undo changes below 0.4 %, such as the decay of a second moment. The seed of the rounding depends
    on the step, the parameter's name (or its index) and its shard. So no generator state is saved,
    and copies of a weight, such as tied embeddings on two stages, stay equal. Call `make_state`
    first.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update one parameter at a time: only its moments are converted from bfloat16."""
        updated = [
            (group, name, parameter)
            for number, group in enumerate(self.param_groups)
            for name, parameter in zip(_names(group, number), group["params"], strict=True)
            if parameter.grad is not None
        ]
        if not updated:
            return
        # in one transfer, as the host waits for a GPU
        steps = torch.stack([self.state[parameter]["step"] for *_, parameter in updated]).tolist()
        for (group, name, parameter), step in zip(updated, steps, strict=True):
            state = self.state[parameter]
            kept = [local(state[name]) for name in ("exp_avg", "exp_avg_sq")]
            weight = local(parameter)
            wide = [moment.to(weight.dtype) for moment in kept]
            adamw(
                [weight], [local(parameter.grad)], [wide[0]], [wide[1]], [], [state["step"]],
                fused=bool(group["fused"]), amsgrad=False, maximize=False, lr=group["lr"],
                beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
                weight_decay=group["weight_decay"],
            )  # fmt: skip
            # hashed: torch's CPU generator uses only 32 bits of a seed
            drawn_for = f"{int(step)} {name} {_part_of(parameter)}"
            seed = xxhash.xxh3_64_intdigest(drawn_for.encode())
            draws = torch.Generator(weight.device).manual_seed(seed)
            for moment, exact in zip(kept, wide, strict=True):
                moment.copy_(_rounded(exact, draws))


def _names(group: dict[str, Any], number: int) -> list[str]:
    """Return the names of a group's parameters. A group without names gets names such as "2.0": the
    group's `number`, then the parameter's index."""
    return group.get("param_names") or [f"{number}.{i}" for i in range(len(group["params"]))]


def _part_of(parameter: Tensor) -> list[int]:
    """Return the coordinates of this process's shard along the mesh axes that shard the parameter;
    equal for replicas of a shard."""
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    axes = zip(mesh.get_coordinate() or (), mesh.shape, parameter.placements, strict=True)
    return [i for i, size, placement in axes if size > 1 and not placement.is_replicate()]


def _rounded(x: Tensor, draws: torch.Generator) -> Tensor:
    """Return x, stochastically rounded to bfloat16 values, as float32: the mean result is x."""
    noise = torch.randint(
        2**16, x.shape, dtype=torch.int32, device=x.device, generator=draws
    )  # in the 16 bits that bfloat16 lacks
    return ((x.float().view(torch.int32) + noise) & -(2**16)).view(torch.float32)


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the optimizer's state, as its first step would, so that a lack of memory shows in
    the first step, not in the second. Also turns memory-mapped weights into allocated memory."""
    with torch.no_grad():
        for part in getattr(optimizer, "parts", (optimizer,)):
            for number, group in enumerate(part.param_groups):
                for index, parameter in enumerate(group["params"]):
                    parameter.mul_(1)  # loaded weights are mapped from a file until written to
                    if not part.state[parameter]:
                        _give_state(part, number, index)


def _give_state(optimizer: Any, number: int, index: int) -> None:
    """Initialize the optimizer state of parameter `index` of parameter group `number`. Step counts
    become tensors, as checkpoints require."""
    group = optimizer.param_groups[number]
    parameter, state = group["params"][index], optimizer.state[group["params"][index]]
    if isinstance(optimizer, torch.optim.Muon):
        state["momentum_buffer"] = torch.zeros_like(parameter)
    elif hasattr(optimizer, "init_state"):  # bitsandbytes
        optimizer.init_state(group, parameter, number, index)
        state["step"] = torch.zeros((), dtype=torch.int64)
        optimizer.initialized = True  # else its first step moves the counts to the GPU
    elif hasattr(optimizer, "bf16_stochastic_round"):  # torchao
        state["step"] = torch.zeros(())
        for name, is_signed in (("exp_avg", True), ("exp_avg_sq", False)):
            state[name] = optimizer._new_buffer(parameter, is_signed)
    elif "scale_parameter" in group:  # Adafactor
        state["step"] = torch.zeros(())
        if parameter.ndim < 2:
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        else:
            state["exp_avg_sq_row"] = _zero_means(parameter, -1)
            state["exp_avg_sq_col"] = _zero_means(parameter, -2)
    else:
        dtype = torch.bfloat16 if isinstance(optimizer, BF16AdamW) else None
        state["step"] = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=dtype)


def _zero_means(parameter: Tensor, axis: int) -> Tensor:
    """Return zeros with the shape of `parameter.mean(axis)`. For a DTensor, the zeros are sharded
    along the other axes as the parameter is."""
    means = parameter.detach().mean(axis)
    if isinstance(means, DTensor):
        whole = [Replicate() if one.is_partial() else one for one in means.placements]
        means = means.redistribute(placements=whole)
    return torch.zeros_like(means)


def state_tensors(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a parameter's state by name, without copies. A quantized tensor of
    torchao, which is never sharded, is split into its component tensors."""
    found: dict[str, Tensor] = {}
    for name, value in optimizer.state.get(parameter, {}).items():
        packed: Any = local(value)
        if hasattr(packed, "codes"):
            found |= {f"{name}.{part}": getattr(packed, part) for part in packed.tensor_attrs}
        elif name != "RMS":  # Adafactor recomputes it in each step
            found[name] = value
    return found


def local(x: Tensor) -> Tensor:
    """Return the local shard of a DTensor, other tensors unchanged."""
    return x.to_local() if isinstance(x, DTensor) else x


def warmup_steps_of(settings: TrainConfig, num_steps: int) -> int:
    """Return the number of warm-up steps, at least 1. A setting below 1 is a share of all steps."""
    given = settings.warmup_steps
    return max(1, int(given) if given >= 1 else math.ceil(num_steps * given))


def build_schedule(
    optimizer: torch.optim.Optimizer, settings: TrainConfig, num_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the learning rate schedule, made by transformers for `num_steps` + 1 steps with at
    least one warm-up step. The rate of step i is transformers' rate of step i + 1: so its first
    rate (0) and its last (0 or `min_lr`) are never used."""
    import_safely()  # it loads peft, which does not
    from transformers import get_scheduler

    floors: dict[str, Any] = {
        "cosine": {"min_lr": settings.min_lr},
        "linear": {"lr_end": settings.min_lr, "power": 1.0},
    }
    schedule: torch.optim.lr_scheduler.LambdaLR = get_scheduler(
        _HF_NAMES[settings.schedule],
        optimizer,
        warmup_steps_of(settings, num_steps),
        num_steps + 1,
        floors.get(settings.schedule),
    )
    schedule.lr_lambdas = [
        # not beyond the last step, where a schedule that only warms up has no rate
        lambda step, factor=factor: factor(min(step + 1, num_steps))  # type: ignore[misc]
        for factor in schedule.lr_lambdas
    ]
    set_rate(schedule)
    return schedule


def set_rate(schedule: torch.optim.lr_scheduler.LambdaLR, step: int = 0) -> None:
    """Set a schedule, and the rates of its optimizer, to those after `step` steps."""
    schedule.last_epoch = step
    rates = [
        base * factor(step)
        for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):  # torchao
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    schedule._last_lr = rates
