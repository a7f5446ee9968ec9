"""LoRA adapters on a transformers model, by peft."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from furlong.errors import ConfigError
from furlong.models.folders.files import reason
from furlong.models.held import adapted_elsewhere


def add_adapters(model: nn.Module, lora: dict[str, Any]) -> Any:
    """The model with adapters, its own weights frozen.

    `lora` holds `rank`, `alpha`, `dropout`, `target_modules`. Raises ConfigError, also for a name
    among others that fits no module.
    """
    adapted = _adapted(model, lora)
    modules = lora["target_modules"]
    found = adapted.base_model.targeted_module_names
    for name in () if isinstance(modules, str) else modules:
        if not any(own == name or own.endswith(f".{name}") for own in found):
            raise _no_such_modules(model, modules, f"{name} fits none")
    return adapted


def merge_adapters(model: Any) -> Any:
    """The model whose weights have their adapters added, in float32, so that they are rounded once.

    Where adapters change one of two tied weights, the two are untied: they are no longer equal.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    base = model.get_base_model()
    modules = base.get_input_embeddings(), base.get_output_embeddings()
    embeddings, head = (getattr(module, "base_layer", module) for module in modules)
    if embeddings.weight is head.weight and (embeddings, head) != modules:
        head.weight = nn.Parameter(head.weight.detach().clone())
        for config in (base.config, base.config.get_text_config()):
            config.tie_word_embeddings = False
        base.all_tied_weights_keys = {}
    return model.merge_and_unload()


def _adapted(model: nn.Module, lora: dict[str, Any]) -> Any:
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
            # merge_adapters unties what is no longer equal
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
            return peft.get_peft_model(model, settings)
    except Exception as error:  # modules may be of any kind, and names are regular expressions
        unknown = "not found in the base model" in str(error)
        raise _no_such_modules(model, modules, None if unknown else reason(error)) from error


def add_adapters_to_stage(model: nn.Module, lora: dict[str, Any], whole: nn.Module) -> Any:
    """The model of a process that holds one stage, with the adapters of that stage.

    Where all of them are on other stages it has none, and is frozen. `whole`: the whole model, on
    meta, which is changed. Raises ConfigError for modules that no stage has.
    """
    add_adapters(whole, lora)
    try:
        return _adapted(model, lora)
    except ConfigError:  # not of the whole model: none of these modules is here
        return model.requires_grad_(False)


def _no_such_modules(model: nn.Module, modules: Any, why: str | None) -> ConfigError:
    linear = {name.removesuffix(".base_layer").rpartition(".")[2]
              for name, module in model.named_modules()
              if isinstance(module, nn.Linear) and ".lora_" not in name}  # fmt: skip
    told = modules if isinstance(modules, str) else ", ".join(modules)
    is_rank = why is not None and not why.endswith("fits none")
    return ConfigError(
        given=f"model.lora.target_modules = {told}" + (f": {why}" if why else ""),
        required=f"all-linear, or names among {', '.join(sorted(linear))}",
        source="model.lora",
        change="name modules that the model has" + (", or lower model.lora.rank" * is_rank),
    )
