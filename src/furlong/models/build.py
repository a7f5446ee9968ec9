"""Models in and out: from a hub id or folder to a trainable model, and back to a folder.

Trained weights are float32 (float64 if that is asked for), frozen weights have the compute's dtype.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from furlong.errors import ConfigError, UnsupportedModelError


def build_model(
    name: str,
    *,
    init: Literal["pretrained", "random"] = "pretrained",
    dtype: torch.dtype = torch.float32,
    lora: dict[str, Any] | None = None,
    seed: int = 0,
) -> Any:
    """A transformers decoder in train mode.

    `name` is a hub id or a local folder; `init="random"` needs config.json only and draws from
    `seed`. `lora` holds `rank`, `alpha`, `dropout`, `target_modules` and freezes everything else.
    Raises ConfigError or UnsupportedModelError.
    """
    from transformers import AutoModelForCausalLM

    source = check_folder(name)
    trained_dtype = torch.promote_types(dtype, torch.float32)
    loaded_dtype = trained_dtype if lora is None else dtype
    config = _read_config(source)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if init == "random":
                model = AutoModelForCausalLM.from_config(config, dtype=loaded_dtype)
            else:
                model = _load_weights(source, loaded_dtype)
            if lora is not None:
                model = _add_adapters(model, lora)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise UnsupportedModelError(
            given=f"model type {config.model_type}",
            required="a decoder that AutoModelForCausalLM knows",
            source=f"{source}, config.json",
            change="choose a causal language model",
        ) from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(trained_dtype)
    return model.train()


def check_folder(name: str) -> str:
    """The folder that `name` stands for, or `name` itself if it is a hub id. Raises ConfigError."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder)
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ConfigError(
            given=f"{name}: no such folder",
            required="a folder with config.json, or a hub id such as Qwen/Qwen2.5-0.5B",
            source="model.name",
            change="check the path; it is relative to the folder you call furlong from",
        )
    return name


def export_model(model: Any, tokenizer: Any, folder: str | Path, *, dtype: torch.dtype) -> Path:
    """Writes a folder that transformers (or, for adapters, peft) loads; returns it.

    Weights are written in `dtype`. The folder appears whole or not at all. Raises ConfigError if it
    is there already.
    """
    folder = Path(folder)
    if folder.exists():
        raise ConfigError(
            given=f"{folder} exists",
            required="a new folder",
            source="the export",
            change="move it away or choose another one",
        )
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    if hasattr(model, "peft_config"):
        model.save_pretrained(aside)
    else:
        model.save_pretrained(aside, state_dict=_cast(model, dtype))
        # transformers notes the dtype of the weights in memory, not of those it was handed.
        text = (aside / "config.json").read_text(encoding="utf-8")
        config = json.loads(text) | {"dtype": str(dtype).removeprefix("torch.")}
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(aside)
    os.rename(aside, folder)
    return folder


def _read_config(source: str) -> Any:
    from transformers import AutoConfig

    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise ConfigError(
            given=f"{source} without config.json",
            required="the folder of a Hugging Face model",
            source="model.name",
            change="point model.name at the folder that holds config.json",
        )
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            given=f"{source}: {_first_line(error)}",
            required="a model whose config.json transformers can read without remote code",
            source="model.name",
            change="check the name, the connection to the hub, or use a local folder",
        ) from error


def _load_weights(source: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
    except OSError as error:
        raise ConfigError(
            given=f"{source}: {_first_line(error)}",
            required="weights (safetensors)",
            source="model.name",
            change="use a folder with weights, or model.init: random",
        ) from error
    # transformers fills what the files lack with random numbers and only warns.
    if loaded["missing_keys"]:
        missing = sorted(loaded["missing_keys"])
        raise ConfigError(
            given=f"{source} lacks {len(missing)} weights, {missing[0]} among them",
            required="every weight of the model",
            source="model.name",
            change="use the whole model's folder, or model.init: random",
        )
    return model


def _add_adapters(model: nn.Module, lora: dict[str, Any]) -> Any:
    import peft

    modules = lora["target_modules"]
    settings = peft.LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        lora_dropout=lora["dropout"],
        target_modules=modules if isinstance(modules, str) else list(modules),
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, settings)
    except ValueError as error:
        if "not found in the base model" not in str(error):
            raise
        linear = {name.rpartition(".")[2] for name, module in model.named_modules()
                  if isinstance(module, nn.Linear)}  # fmt: skip
        raise ConfigError(
            given=f"model.lora.target_modules = {', '.join(modules)}",
            required=f"all-linear, or names among {', '.join(sorted(linear))}",
            source="model.lora",
            change="name modules that the model has",
        ) from error


def _cast(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights in `dtype`; tied weights stay one tensor, so that they are written once."""
    casts: dict[int, torch.Tensor] = {}
    weights = {}
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            weights[name] = casts.setdefault(tensor.data_ptr(), tensor.to(dtype))
        else:
            weights[name] = tensor
    return weights


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
