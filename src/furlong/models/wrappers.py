"""Wrappers and changes of a model: compilers, data parallelism, offloading, adapters, hooks.

Chunks enter a model at its decoder. Whatever a wrapper does in a forward of its own would be left
out silently, so each is taken off where that changes nothing, or refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from furlong.errors import UnsupportedModelError
from furlong.models.entrance import is_sharded

VERIFIED_ADAPTERS = (
    "LORA",
    "IA3",
    "VERA",
    "OFT",
    "LN_TUNING",
    "TRAINABLE_TOKENS",
    "ADAPTION_PROMPT",
)
"""peft's types whose gradients were compared with those of the whole forward; LORA is also DoRA
and adapters of bare parameters (`target_parameters`)."""

# by class name, so that distributed packages need not be imported to look for them
_WRAPPERS = {
    "FullyShardedDataParallel": "FSDP's wrapper",
    "FSDPModule": "FSDP2's fully_shard",
    "DeepSpeedEngine": "DeepSpeed's engine",
    "CheckpointWrapper": "torch's checkpoint_wrapper, whose second forward runs in the backward",
    "OptimizedModule": "a compiled layer (torch.compile)",
}
COMPILED_CALL = "_compiled_call_impl"
"""Where `nn.Module.compile` puts the compiled call of a module."""
_BACKWARD = ("backward_hooks", "backward_pre_hooks")
_MENDS = {
    "CheckpointWrapper": "leave it out: the plan decides what is recomputed (ChunkOptions.keep)",
    "OptimizedModule": "compile layers in place: layer.compile()",
}


def bare_model(model: nn.Module) -> nn.Module:
    """The transformers model inside a compiled model or a model with peft's adapters.

    Raises UnsupportedModelError for wrappers of several devices and for adapters that change more
    than the layers they are put into.
    """
    if not isinstance(model, nn.Module):
        raise _refusal(model, "is no model", "a causal decoder of transformers", "pass the model")
    bare: Any = getattr(model, "_orig_mod", model)  # torch.compile(model)
    if isinstance(bare, DataParallel | DistributedDataParallel):
        raise _refusal(
            bare,
            f"is wrapped in {type(bare).__name__}",
            "one process on one device",
            "pass model.module; gradients are then this process's own and are not reduced",
        )
    if hasattr(bare, "get_base_model"):
        refuse_adapters(bare)
        bare = bare.get_base_model()
        bare = getattr(bare, "_orig_mod", bare)
    if hasattr(bare, "peft_config"):  # put in by transformers' own add_adapter
        refuse_adapters(bare)
    refuse_wrappers(bare)
    return bare  # type: ignore[no-any-return]


def compiled_in_place(model: nn.Module) -> list[nn.Module]:
    """The modules on which `nn.Module.compile` was called."""
    return [module for module in model.modules() if module.__dict__.get(COMPILED_CALL)]


def around(model: nn.Module, bare: nn.Module) -> list[nn.Module]:
    """The modules whose forward chunks pass by: `model`, what it wraps, and the bare model."""
    names = [name for name, module in model.named_modules() if module is bare][:1]
    found = [model]
    for name in (part for path in names for part in path.split(".") if part):
        found.append(found[-1].get_submodule(name))
    return found if found[-1] is bare else [model, bare]


def refuse_wrappers(model: nn.Module) -> None:
    """Raise UnsupportedModelError for shards, compiled layers and checkpoint wrappers within."""
    for name, module in model.named_modules():
        known = [c.__name__ for c in type(module).__mro__ if c.__name__ in _WRAPPERS]
        if known and not (known == ["FSDPModule"] and is_sharded(model)):
            raise _refusal(
                model,
                f"has {_WRAPPERS[known[0]]} at {name or 'its root'}",
                "modules as transformers builds them, whole on one device",
                _MENDS.get(
                    known[0], "pass the model before it is sharded; Engine(ranks=...) does it"
                ),
            )


def refuse_adapters(model: Any) -> None:
    """Raise UnsupportedModelError for adapters of peft that were not verified to be exact."""
    configs = model.peft_config
    for config in configs.values() if isinstance(configs, dict) else [configs]:
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if getattr(config, "alora_invocation_tokens", None):
            what = "aLoRA (alora_invocation_tokens), which looks for its tokens in a whole sequence"
        elif config.is_prompt_learning:
            what = f"prompt learning ({kind}), whose virtual tokens precede every sequence"
        elif kind == "ADALORA":
            what = "AdaLoRA, which adds a term to the loss of a whole forward"
        elif kind not in VERIFIED_ADAPTERS:
            what = f"adapters of type {kind}, which were never compared with a whole forward"
        else:
            continue
        raise _refusal(
            model,
            f"has {what}",
            f"adapters of type {', '.join(VERIFIED_ADAPTERS)}",
            "use LoRA or another type of the list",
        )


def refuse_placement(model: nn.Module) -> None:
    """Raise UnsupportedModelError for weights that are quantised, offloaded, on two devices, or
    divided by others."""
    config: Any = getattr(model, "config", None)
    method = getattr(model, "quantization_method", None)
    packed = next((n for n, p in model.named_parameters() if not p.is_floating_point()), None)
    if getattr(config, "quantization_config", None) or method or packed:
        what = f"{packed} holds packed numbers" if packed else str(method or "quantization_config")
        raise _refusal(
            model,
            f"is quantised ({what})",
            "floating-point weights",
            "load the model without quantization, in bfloat16",
        )
    parted = next((n for n, p in model.named_parameters() if isinstance(p, DTensor)), None)
    if parted is not None and not is_sharded(model):
        raise _refusal(
            model,
            f"has parts of weights ({parted} is a DTensor)",
            "weights that are whole, or divided by furlong.Engine(ranks=...)",
            "pass the model before it is divided",
        )
    devices = sorted({str(p.device) for p in model.parameters()})
    hooks = [getattr(m, "_hf_hook", None) for m in model.modules()]
    if len(devices) > 1 or "meta" in devices or any(_offloads(hook) for hook in hooks):
        raise _refusal(
            model,
            f"is spread over {', '.join(devices)} or offloaded (accelerate's device_map)",
            "all weights on one device",
            "load it without device_map and move it with model.to(device)",
        )


def refuse_hooks(model: nn.Module) -> None:
    """Raise UnsupportedModelError for what would run on the gradient of each chunk alone."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise _refusal(
                model,
                f"has a hook on {name} that runs when a gradient is accumulated: it would run once "
                "per chunk, on a part of the gradient",
                "no register_post_accumulate_grad_hook, as optimizers inside the backward use",
                "update the weights after forward_backward; Tensor.register_hook is honoured",
            )
        if isinstance(parameter, DTensor) and parameter._backward_hooks:
            raise _refusal(
                model,
                f"has a hook on {name}, of which this process holds a part: it would see nothing",
                "no register_hook on weights that several processes share",
                "change .grad after forward_backward",
            )


def refuse_backward_hooks(model: nn.Module) -> None:
    """Raise UnsupportedModelError for hooks of modules that may change gradients. Those of the
    model itself do not run."""
    everywhere = vars(nn.modules.module)
    names = ["all modules"] * any(everywhere[f"_global_{kind}"] for kind in _BACKWARD)
    names += [
        name
        for name, module in model.named_modules()
        if name and any(getattr(module, f"_{kind}") for kind in _BACKWARD)
    ]
    if names:
        raise _refusal(
            model,
            f"has a backward hook on {names[0]}: it would see the gradients of one chunk, of which "
            "a norm or a bound is another one",
            "no full backward hooks of modules, of which nobody can tell whether they change "
            "gradients token by token",
            "Tensor.register_hook on parameters, or change .grad after the backward",
        )


def _offloads(hook: Any) -> bool:
    """Whether one of accelerate's hooks moves weights in and out during a forward."""
    inner: Iterator[Any] = iter(getattr(hook, "hooks", ()))
    return bool(getattr(hook, "offload", False)) or any(_offloads(h) for h in inner)


def _refusal(model: nn.Module, what: str, required: str, change: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        given=f"{type(model).__name__} {what}",
        required=required,
        source="the model that was passed",
        change=change,
    )
