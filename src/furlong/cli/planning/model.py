"""The run, the model and the devices that `furlong plan` predicts for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.cli.flag_types import refusal
from furlong.cost.calibration import Calibrated, calibrated, uncalibrated
from furlong.cost.machine import THIS_CPU, HardwareSpec, hardware, one_of, this_cpu
from furlong.cost.model import CostModel
from furlong.cost.shape import MODELS, ModelShape, model_shape
from furlong.cost.training import ZeroStage
from furlong.errors import UserError
from furlong.planners.decide import training_of

if TYPE_CHECKING:
    from furlong.config.schema import RunConfig
    from furlong.config.sources import RunFlags


def run_of(flags: RunFlags, made_for: Mapping[str, Any] | None = None) -> RunConfig:
    """The run that is planned: a run file's, or one of flags alone. `made_for`: values of a run
    that were saved with a plan. Raises ConfigError."""
    from furlong.config.run_file import read_run_file
    from furlong.config.sources import merge

    file = flags.own.subject
    if made_for is None and file is not None:
        return merge(flags, read_run_file(file), file)
    values: dict[str, Any] = dict(made_for or {})
    if "--data.train" not in flags.names:
        # The schema asks for data; a plan needs no more of it than its lengths.
        if file is None and flags.own.lengths is None:
            raise missing("--lengths")
        values["data"] = {"train": file or flags.own.lengths}
    if "model" not in values and not any(name.startswith("--model") for name in flags.names):
        raise missing("--model.name")
    return merge(flags, values, file or "no run file")


def _model_shape_of(name: str) -> ModelShape:
    """The shape of a config.json, a folder that holds one, a known name, or a model of the hub.

    Raises ConfigError.
    """
    path = Path(name).expanduser()
    if os.path.exists(path) or path.suffix == ".json":
        return ModelShape.from_file(path)
    last = name.rpartition("/")[2]
    if "/" not in name or last.lower() in {known.lower() for known in MODELS}:
        return model_shape(last)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return ModelShape.from_file(hf_hub_download(name, "config.json"))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise refusal(
            f"{name}: {str(error).splitlines()[0]}",
            f"a config.json, a model on the hub, or one of {', '.join(sorted(MODELS))}",
            "check the name or the network, or give the path of a config.json",
            "the model's name",
        ) from error


def spec_of(name: str, num_devices: int = 1) -> HardwareSpec:
    """Hardware by name. This machine's rates are the assumed ones of `furlong train`, so that both
    decide alike; several devices are so many processes on it."""
    if name != THIS_CPU:
        return hardware(name)
    return one_of(this_cpu(measured=False), num_devices)


def figures_of(
    config: RunConfig,
    spec: HardwareSpec,
    num_devices: int,
    zero: ZeroStage | None,
    *,
    calibrate: bool,
) -> Calibrated:
    """The cost model of a run on a device, as it was calibrated if it was. Raises ConfigError."""
    stage: ZeroStage = zero if zero is not None else 1 if num_devices > 1 else 0
    training = replace(training_of(config.model), zero_stage=stage, gathers=num_devices > 1)
    model = CostModel(_model_shape_of(config.model.name), spec, training)
    return (calibrated if calibrate else uncalibrated)(model, config.model.dtype)


def check_zero(zero: int | None, num_devices: int) -> None:
    """Raises ConfigError for a stage of ZeRO where there is nobody to share the state with."""
    if zero and num_devices == 1:
        given, required = f"--zero {zero} on one device", "several devices, which share the state"
        source = "--zero, and the number of devices"
        raise refusal(given, required, "leave --zero out, or give several --devices", source)


def missing(flag: str) -> UserError:
    """The error for a flag without which there is nothing to plan."""
    required = "RUN.yaml, PLAN.json or RUN_FOLDER; or --lengths, --model.name and --hardware"
    return refusal(f"no {flag}", required, f"add {flag}, or see furlong plan --help")
