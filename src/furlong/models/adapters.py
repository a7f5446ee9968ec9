"""LoRA adapters on a transformers model, by peft."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from furlong.errors import ConfigError
from furlong.models.folders.files import reason
from furlong.models.held import adapted_elsewhere


def add_adapters(model: nn.Module, lora: dict[str, Any]) -> Any:
    """The model with adapters, its own weights frozen.

    `lora` holds `rank`, `alpha`, `dropout`, `target_modules`. Raises ConfigError.
    """
    import peft

    modules = lora["target_modules"]
    settings = peft.LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        lora_dropout=lora["dropout"],
        target_modules=modules if isinstance(modules, str) else list(modules),
        exclude_modules=adapted_elsewhere(model) or None,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            # peft asks transformers for it by an older name.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            return peft.get_peft_model(model, settings)
    except Exception as error:  # modules may be of any kind, and names are regular expressions
        linear = {name.rpartition(".")[2] for name, module in model.named_modules()
                  if isinstance(module, nn.Linear)}  # fmt: skip
        told = modules if isinstance(modules, str) else ", ".join(modules)
        unknown = "not found in the base model" in str(error)
        raise ConfigError(
            given=f"model.lora.target_modules = {told}" + ("" if unknown else f": {reason(error)}"),
            required=f"all-linear, or names among {', '.join(sorted(linear))}",
            source="model.lora",
            change="name modules that the model has"
            + ("" if unknown else ", or lower model.lora.rank"),
        ) from error


def add_adapters_to_stage(model: nn.Module, lora: dict[str, Any], whole: nn.Module) -> Any:
    """The model of a process that holds one stage, with the adapters of that stage.

    Where all of them are on other stages it has none, and is frozen. `whole`: the whole model, on
    meta, which is changed. Raises ConfigError for modules that no stage has.
    """
    add_adapters(whole, lora)
    try:
        return add_adapters(model, lora)
    except ConfigError:  # not of the whole model: none of these modules is here
        return model.requires_grad_(False)
