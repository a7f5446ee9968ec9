"""The cost model and the memory limits of a run, shared by `furlong plan`, `furlong train` and
`furlong calibrate`, so that all three decide alike.

    model = cost_model_of(config, shape, machine, num_devices)
    limits = limits_of(model.hardware, budget_bytes, *offload_budgets(...))

The device's budget is `Machine.budget`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from furlong.config.schema import OF_BITSANDBYTES, kept_offload, offloads_weights
from furlong.cost.machine import AS_WRITTEN, Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import ModelShape
from furlong.cost.training import PACKED_BYTES, Lora, Training
from furlong.errors import ConfigError, in_yaml
from furlong.planners.options import ChunkOptions
from furlong.planners.question import MARGIN, Limits
from furlong.planners.spaco import Sampling
from furlong.units import format_bytes

if TYPE_CHECKING:
    from furlong.config.schema import ModelConfig, RunConfig, TrainConfig

SEARCHED_OPTIONS = ("size", "num_retained", "keep", "offload", "order")


def cost_model_of(
    config: RunConfig,
    shape: ModelShape,
    machine: Machine,
    num_devices: int = 1,
    packed: Mapping[str, Any] | None = None,
    *,
    calibrate: bool = True,
) -> CostModel:
    """Return the cost model of one of a run's devices.

    `packed`: the quantization_config of a model that is saved in 4 bits; None for other models.
    `calibrate`: use the machine's calibration, if there is one. Raises ConfigError for a damaged
    calibration, and for 4-bit weights that are to be offloaded to CPU memory.
    """
    training = with_optimizer(training_of(config.model, packed), config.train, shape)
    if num_devices > 1 or not config.train.is_of_pairs:  # runs on pairs are planned for one device
        training = replace(training, replicate=config.parallel.replicate)
    if num_devices > 1:
        training = replace(training, zero_stage=1, gathers=True)
    training = replace(training, host_is_device=machine.device_type == "cpu")
    is_away = offloads_weights(config.offload)
    if is_away:
        if training.packed_bytes is not None:
            raise ConfigError(
                given=f"offload = {in_yaml(config.offload)} for a model in 4 bits",
                required="weights in floats: codes stay on the device as they are",
                source="offload, model.quantize and the model's config.json",
                change="remove offload"
                + ", or remove model.quantize" * (config.model.quantize is not None),
            )
        training = training.offloading()
    elif is_away is None and not (
        config.train.optimizer in OF_BITSANDBYTES or config.model.compile
    ):
        training = replace(training, offload_weights=None)
    dtype = config.model.dtype
    found = machine.calibrated(dtype) if calibrate else machine.computing_in(dtype)
    if config.model.kernels == "none" and found.device_type == "cuda":
        found = replace(found, activation_bytes_per_s=found.activation_bytes_per_s / AS_WRITTEN)
    return CostModel(shape, found, training)


def limits_of(
    machine: Machine, budget_bytes: int, cpu_bytes: int | None = 0, disk_bytes: int | None = 0
) -> Limits:
    """Return the bytes that a plan may use of each memory, with the calibrated margin."""
    return Limits(budget_bytes, cpu_bytes, disk_bytes, machine.margin(MARGIN))


def offload_budgets(
    offload: Any,
    cpu: int | Literal["auto"],
    disk: int,
    *,
    on_cpu: bool,
    free_cpu_bytes: int | None = None,
) -> tuple[int | None, int]:
    """Return the bytes of CPU memory and disk that a plan may use; 0: none, None: no limit.

    `offload`: its value in a run file. `cpu`, `disk`: memory.cpu and memory.disk. `on_cpu`: whether
    the device is a CPU. `free_cpu_bytes`: the value of auto on a GPU; None: unknown. Raises
    ConfigError for contradictory values.
    """
    kept: Any = kept_offload(offload)
    named = [] if kept in (None, "auto") else [*ChunkOptions(offload=kept).offloading.targets]
    if offloads_weights(offload) and not on_cpu:  # on a CPU weights are in RAM anyway
        named.append("cpu")
    cpu_bytes = 0 if on_cpu else free_cpu_bytes if cpu == "auto" else cpu
    if on_cpu and (cpu not in ("auto", 0) or "cpu" in named):
        key, value = "offload", in_yaml(offload)
        if cpu != "auto" and cpu:
            key, value = "memory.cpu", format_bytes(cpu)
        raise ConfigError(
            given=f"{key} = {value} on a CPU",
            required="memory.device alone: on a CPU it is the budget of everything in RAM",
            source=key,
            change=f"remove {key} (memory.device says how much RAM a run may take)",
        )
    for name, num_bytes in (("cpu", cpu_bytes), ("disk", disk)):
        if name in named and num_bytes == 0:
            raise ConfigError(
                given=f"offload to {name} with memory.{name} = 0",
                required=f"memory.{name} above 0, for what is to live there",
                source=f"offload and memory.{name}",
                change=f"add memory.{name}, such as 64GiB, or remove offload",
            )
    return cpu_bytes, disk


def training_of(model: ModelConfig, packed: Mapping[str, Any] | None = None) -> Training:
    """Return the training setup of a run on one device, without its optimizer. `packed`: the
    quantization_config of a model that is saved in 4 bits."""
    training, lora = Training.in_dtype(model.dtype), model.lora
    if lora is None:
        return training
    ends = {name.rpartition(".")[2] for name in lora.modules_to_save}
    found = Lora(
        lora.rank, lora.target_modules, lora.target_parameters,
        embedding="embed_tokens" in ends, head="lm_head" in ends,
        new_tokens=len(model.new_tokens),
    )  # fmt: skip
    per_weight = None
    if (asked := model.quantize) is not None or packed is not None:
        is_double = asked is None or isinstance(asked, str)  # a mapping turns it off
        if packed is not None:
            is_double = bool(packed.get("bnb_4bit_use_double_quant"))
        per_weight = PACKED_BYTES[is_double]
    return replace(training, lora=found, packed_bytes=per_weight)


def with_optimizer(training: Training, settings: TrainConfig, shape: ModelShape) -> Training:
    """Return the training setup with the bytes of the optimizer that a run uses."""
    name, wide = settings.optimizer, training.gradient_bytes
    if name == "muon":
        return replace(training, optimizer_bytes=2 * wide, matrix_bytes=wide)
    if name == "adafactor":  # a number for each row and for each column of a matrix
        narrow = shape.hidden_size if training.lora is None else training.lora.rank
        return replace(training, optimizer_bytes=wide / narrow + wide / shape.hidden_size)
    if name == "adamw":
        each = 2 * wide if settings.state_dtype == "float32" else 4
        return replace(training, optimizer_bytes=each)
    bits = {"32bit": 32, "4bit": 4}.get(name.rpartition("_")[2], 8)
    scales = 4 / 256 if bits < 32 else 0.0  # a float32 for each block
    return replace(training, optimizer_bytes=2 * (bits / 8 + scales))


def given_options(config: RunConfig) -> dict[str, Any]:
    """Return the options that a run file gives, with the options that follow from them. Weights in
    CPU memory imply reshard. Layer-first follows from stage_layers, from weights in CPU memory, and
    from reshard without a pipeline. Raises ConfigError if keys of `chunks.sample` contradict each
    other."""
    chunks = config.chunks
    values = chunks.model_dump(include={*SEARCHED_OPTIONS, "stage_layers"})
    values |= {"offload": kept_offload(config.offload)}
    given = {name: value for name, value in values.items() if value != "auto"}
    if offloads_weights(config.offload):
        given["reshard"] = True
    elif config.parallel.reshard != "auto":
        given["reshard"] = config.parallel.reshard
    is_cut = config.parallel.pp == 1 or offloads_weights(config.offload)
    if "stage_layers" in given or (given.get("reshard") and is_cut):
        given = {"order": "layer-first", **given}
    if chunks.sample is not None:
        given["sample"] = Sampling(**chunks.sample.model_dump())
    return given
