"""Refuse, by name, models that chunks cannot train exactly.

Chunks call a model's decoder directly. Anything that a wrapper does in its forward would be left
out silently, so each wrapper is removed if that changes nothing, or refused by name. For wrappers
that act when the root module is called (FSDP2, which gathers sharded weights) every pass is made
inside a call of the root (`call_root`), before layers are replaced by those of a stage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from types import MethodType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from furlong.errors import UnsupportedModelError
from furlong.families import ATTENTION_BLOCK, ATTENTION_DROPOUTS, CHUNKED, family_of
from furlong.models.asked import answers_of, rope_entries
from furlong.models.quantized import is_repacked, packed_linears
from furlong.models.shrink import own_key

FSDP_METHOD = "furlong_pass"

_T = TypeVar("_T", bound=Tensor)


def add_fsdp_method(base: nn.Module) -> str:
    """Add a method to the model, and return the method's name. The method calls the function that
    it is given. After the call below, FSDP2 gathers the model's weights each time the method runs.

    Use: `register_fsdp_forward_method(base, add_fsdp_method(base))`.
    """
    base.__dict__[FSDP_METHOD] = MethodType(_call, base)
    return FSDP_METHOD


def is_sharded(base: nn.Module) -> bool:
    """Whether furlong has sharded the model with FSDP2."""
    return FSDP_METHOD in base.__dict__


def call_root(base: nn.Module, run: Callable[[], _T]) -> _T:
    """Return `run()`, called inside the model's FSDP2 method if the model has one."""
    method = base.__dict__.get(FSDP_METHOD)
    return run() if method is None else method(run)


def _call(base: nn.Module, run: Callable[[], _T]) -> _T:
    return run()


VERIFIED_ADAPTERS = (
    "LORA", "IA3", "VERA", "OFT", "LN_TUNING", "TRAINABLE_TOKENS", "ADAPTION_PROMPT",
)  # fmt: skip
"""peft types whose gradients were compared with those of a whole forward; LORA includes DoRA and
adapters of bare parameters (`target_parameters`)."""

COMPILED_CALL = "_compiled_call_impl"
"""Attribute in which `nn.Module.compile` stores a module's compiled call."""


def bare_model(model: nn.Module) -> nn.Module:
    """Return the transformers model inside a compiled model or a peft model.

    Raises UnsupportedModelError for multi-device wrappers, for adapters that change more than the
    layers into which they are inserted, and for modules that shard, checkpoint or compile others.
    """
    bare = unwrapped(model)
    _refuse_foreign_module(bare)
    return bare


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model that `bare_model` returns, but do not check its modules."""
    bare: Any = getattr(model, "_orig_mod", model)  # torch.compile(model)
    if hasattr(bare, "get_base_model"):
        _refuse(bare, _WRAPPED)
        bare = bare.get_base_model()
        bare = getattr(bare, "_orig_mod", bare)
    _refuse(bare, _WRAPPED)
    return bare  # type: ignore[no-any-return]


def having(modules: Collection[nn.Module], name: str) -> list[Any]:
    """Return the modules that have the attribute `name`, on the instance or its class. `hasattr` is
    slower: it also searches submodules and parameters, and raises and catches an error."""
    kinds = {kind for kind in map(type, modules) if hasattr(kind, name)}
    return [module for module in modules if type(module) in kinds or name in vars(module)]


def compiled_in_place(model: nn.Module) -> list[nn.Module]:
    """Return the modules on which `nn.Module.compile` was called."""
    return [module for module in model.modules() if module.__dict__.get(COMPILED_CALL)]


def refuse_state(model: nn.Module) -> None:
    """Raise UnsupportedModelError for weights that are quantised, offloaded, on two devices, or
    sharded by other libraries, and for backward hooks on modules."""
    _refuse(model, _STATE)


def refuse_trained(
    model: nn.Module, modules: Collection[Any], parameters: Iterable[Any], *, hooks: bool
) -> None:
    """Raise UnsupportedModelError for parameters whose gradients cannot be summed over chunks.
    `modules` and `parameters`: the model's; `hooks`: whether to refuse hooks on parameters, too."""
    if any(map(_is_sparse, having(modules, "sparse"))) or (
        hooks and any(map(_has_hook, parameters))
    ):
        _refuse(model, _TRAINED if hooks else _TRAINED[:1])  # finds the name


def _is_sparse(module: Any) -> bool:
    """Whether a module has trained parameters with sparse gradients."""
    is_sparse = bool(getattr(module, "sparse", False))
    return is_sparse and any(p.requires_grad for p in module.parameters())


def _has_hook(parameter: Any) -> bool:
    hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    return bool(parameter.requires_grad and hooks)


def refuse_unsupported(
    model: nn.Module, max_seq_len: int | None, *, needs_head: bool = True
) -> None:
    """Raise UnsupportedModelError for a model that is known to be inexact in chunks.

    `max_seq_len`: tokens of the run's longest sequence; required for longrope.
    """
    _refuse(model, _KINDS)
    base: Any = model
    # here, so that its dropout, which is no matter, is not refused first
    is_other = base.config.is_encoder_decoder or type(base).__name__.endswith("ForMaskedLM")
    if is_other or (needs_head and base.get_output_embeddings() is None):
        change = OTHER_FAMILY if is_other else _LOAD
        raise unsupported(
            model, "has no causal language-model head", "a ...ForCausalLM model", change
        )
    name = type(model).__name__
    refuse_config(base.config, name, f"the model ({name}) and its config")
    _refuse(model, _CONFIGS)
    if "longrope" in rope_types(base.config.get_text_config()) and max_seq_len is None:
        raise unsupported(
            model,
            "has RoPE of type longrope, with one set of factors for short and one for long runs",
            "the length of the run's longest sequence, to choose the set once",
            "pass max_seq_len to forward_backward, chunked, Engine or the trainer",
        )
    if model.training:
        refuse_attention_dropout(model)


RefusalRule = tuple[Callable[[Any], object], str, str, str]
"""(predicate on a model, fault in words, requirement, change). The predicate's result is truthy if
the model has the fault, and fills `{}` in its words."""
OTHER_FAMILY = "train a model of another family"
_LOAD = "load it with AutoModelForCausalLM.from_pretrained"
_WHOLE = "pass the model before it is sharded; Engine and chunked do it, given ranks=..."


def _refuse(model: Any, rows: Sequence[RefusalRule]) -> None:
    """Raise UnsupportedModelError for the first rule in `rows` whose fault the model has."""
    for tells, what, required, change in rows:
        if found := tells(model):
            raise unsupported(model, what.format(found), required, change)


def unsupported(
    model: nn.Module, what: str, required: str, change: str = OTHER_FAMILY, source: str = ""
) -> UnsupportedModelError:
    """`source`: by default the folder or id that the model's config was loaded from."""
    path = str(getattr(getattr(model, "config", None), "name_or_path", ""))
    return UnsupportedModelError(
        given=f"{type(model).__name__} {what}",
        required=required,
        source=source or f"the model {path or 'that was passed'}, and its config",
        change=change,
    )


def _unverified_adapters(model: Any) -> str:
    """Describe the first adapter, of peft or of transformers, of an unverified type; else ""."""
    configs = getattr(model, "peft_config", None) or {}
    for config in configs.values() if isinstance(configs, dict) else [configs]:
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if getattr(config, "alora_invocation_tokens", None):
            return "aLoRA (alora_invocation_tokens), which looks for its tokens in a whole sequence"
        if config.is_prompt_learning:
            return f"prompt learning ({kind}), whose virtual tokens precede every sequence"
        if kind == "ADALORA":
            return "AdaLoRA, which adds a term to the loss of a whole forward"
        if kind not in VERIFIED_ADAPTERS:
            return f"adapters of type {kind}, which were never compared with a whole forward"
    return ""


# by class name, so that packages need not be imported for the check
_FOREIGN = {
    "FullyShardedDataParallel": ("FSDP's wrapper", _WHOLE),
    "FSDPModule": ("FSDP2's fully_shard", _WHOLE),
    "DeepSpeedEngine": ("DeepSpeed's engine", _WHOLE),
    "CheckpointWrapper": (
        "torch's checkpoint_wrapper, whose second forward runs in the backward",
        "leave it out: the plan decides what is recomputed (ChunkOptions.keep)",
    ),
    "OptimizedModule": ("a compiled layer (torch.compile)",
                        "compile layers in place: layer.compile()"),
}  # fmt: skip


def _refuse_foreign_module(model: nn.Module) -> None:
    """Raise UnsupportedModelError for a module that shards, checkpoints or compiles others."""
    for name, module in model.named_modules():
        known = [c.__name__ for c in type(module).__mro__ if c.__name__ in _FOREIGN]
        if known and not (known == ["FSDPModule"] and is_sharded(model)):
            what, change = _FOREIGN[known[0]]
            required = "modules as transformers builds them, whole on one device"
            raise unsupported(model, f"has {what} at {name or 'its root'}", required, change)


_WRAPPED: tuple[RefusalRule, ...] = (
    (lambda m: not isinstance(m, nn.Module), "is no model", "a causal decoder of transformers",
     _LOAD),
    (lambda m: isinstance(m, DataParallel | DistributedDataParallel),
     "is a wrapper of several devices", "one process on one device",
     "pass model.module; gradients are then this process's own and are not reduced"),
    (_unverified_adapters, "has {}", f"adapters of type {', '.join(VERIFIED_ADAPTERS)}",
     "use LoRA or another type of the list"),
)  # fmt: skip


def _first(parameters: Iterable[tuple[str, Any]], tells: Callable[[Any], object]) -> str:
    """Return the name of the first pair (name, parameter or module) for whose second item `tells`
    returns something truthy; "" if there is none."""
    return next((name for name, x in parameters if tells(x)), "")


def _quantisation(model: Any) -> object:
    linears = packed_linears(model)
    known = {id(linear.weight) for linear in linears.values()}
    if repacked := _first(linears.items(), is_repacked):
        return f"{repacked} was repacked by an evaluation: no gradient passes it any more"
    parameters = model.named_parameters()
    if odd := _first(parameters, lambda p: not p.is_floating_point() and id(p) not in known):
        return f"{odd} holds packed numbers"
    if known:
        return ""
    config = getattr(model, "config", None)
    return getattr(model, "quantization_method", None) or (
        "quantization_config" if getattr(config, "quantization_config", None) else ""
    )


def _placement(model: nn.Module) -> str:
    devices = sorted({str(p.device) for p in model.parameters()})
    is_offloaded = any(map(_is_offloaded, model.modules()))
    return ", ".join(devices) if len(devices) > 1 or "meta" in devices or is_offloaded else ""


def _is_offloaded(module: nn.Module) -> bool:
    return _offloads(getattr(module, "_hf_hook", None))


def _offloads(hook: Any) -> bool:
    """Whether one of accelerate's hooks moves weights in and out during a forward."""
    inner: Iterable[Any] = getattr(hook, "hooks", ())
    return bool(getattr(hook, "offload", False)) or any(_offloads(h) for h in inner)


def _backward_hooks(model: nn.Module) -> str:
    """Name the first submodule with a backward hook; hooks of the model itself never run."""
    kinds = ("backward_hooks", "backward_pre_hooks")
    if any(vars(nn.modules.module)[f"_global_{kind}"] for kind in kinds):
        return "all modules"
    modules = ((name, module) for name, module in model.named_modules() if name)
    return _first(modules, lambda m: any(getattr(m, f"_{kind}") for kind in kinds))


_STATE: tuple[RefusalRule, ...] = (
    (_quantisation, "is quantised ({})", "floating-point weights, or the 4 bits of bitsandbytes",
     "load the model again, in bfloat16 or with load_in_4bit"),
    (lambda m: not is_sharded(m) and _first(
        m.named_parameters(), lambda p: isinstance(p, DTensor)),
     "has parts of weights ({} is a DTensor)", "weights that are whole", _WHOLE),
    (lambda m: _placement(m) == "meta" and not any(map(_is_offloaded, m.modules())),
     "is on meta, without values", "weights that hold values",
     f"{_LOAD}, or make it outside torch.device('meta')"),
    (_placement, "is spread over {} or offloaded (accelerate's device_map)",
     "all weights on one device", "load it without device_map and move it with model.to(device)"),
    (_backward_hooks, "has a backward hook on {}: it would see the gradients of one chunk, of "
     "which a norm or a bound is another one",
     "no full backward hooks of modules, of which nobody can tell whether they change gradients "
     "token by token", "change .grad after the backward"),
)  # fmt: skip
_TRAINED: tuple[RefusalRule, ...] = (
    (lambda m: _first(m.named_modules(), _is_sparse),
     "has sparse gradients at {}",
     "dense gradients, to which those of other chunks can be added in place",
     "set its sparse = False, or freeze it"),
    (lambda m: _first(m.named_parameters(), _has_hook),
     "has a hook on {}: it would run once per chunk, on a part of the gradient",
     "no hooks on parameters, as optimizers inside the backward use",
     "change .grad, or update the weights, after forward_backward (a trainer's callback: in "
     "on_pre_optimizer_step); furlong.chunked(model) takes hooks on parameters"),
)  # fmt: skip


_KNOWN_LAYER_TYPES = {
    "linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding",  # states, and some attention
    "full_attention", "sliding_attention", "attention", CHUNKED,  # tokens mix in attention only
    "mlp", "moe",  # token-wise
}  # fmt: skip
"""Values of `layer_types` that chunks can train."""
_INDEXERS = ("index_", "indexer_")
"""Prefixes of config keys of a learned indexer, which selects the keys that a token sees."""


def _ends(model: Any) -> list[tuple[str, Any]]:
    """Return (name, module) of the input embeddings and of the head, if the model has them."""
    ends = (("input embeddings", model.get_input_embeddings()),
            ("head", model.get_output_embeddings()))  # fmt: skip
    return [(name, module) for name, module in ends if module is not None]


def _of_text(tells: Callable[[Any], object], effect: str = "") -> Callable[[Any], object]:
    """Return a predicate on a model: whether `tells` is truthy for the model's text config.

    `effect`: a field of `Answers`. The predicate then holds only if a tiny model also shows this
    effect.
    """
    return lambda model: (
        (found := tells(model.config.get_text_config()))
        and (getattr(answers_of(model), effect) if effect else found)
    )


def set_in_config(values: dict[str, Any]) -> str:
    """Return words that say how to set keys of a model's config, in a run file and in Python."""
    in_file = ", ".join(f"{key}: {json.dumps(value)}" for key, value in values.items())
    in_python = ", ".join(f"{key}={value!r}" for key, value in values.items())
    return f"set model.config: {{{in_file}}} (in Python: from_pretrained(..., {in_python}))"


_KINDS: tuple[RefusalRule, ...] = (
    (lambda m: not (hasattr(m, "config") and hasattr(m, "get_decoder")), "is no transformers model",
     "a causal decoder of transformers", f"{_LOAD}, if it is one of transformers"),
    (lambda m: _first(_ends(m), lambda x: getattr(getattr(x, "weight", None), "ndim", 0) != 2),
     "has a {} without a weight of shape (V, D)",
     "one matrix that tells the size of the vocabulary",
     "use torch.nn.Linear and torch.nn.Embedding"),
    (lambda m: _first(_ends(m), lambda x: getattr(x, "scale_grad_by_freq", False)),
     "has {} with scale_grad_by_freq=True, which counts the tokens of one call",
     "gradients that are sums over tokens: a chunk is one call of many",
     "set scale_grad_by_freq = False"),
)  # fmt: skip
_CONFIGS: tuple[RefusalRule, ...] = (
    (_of_text(lambda text: not isinstance(getattr(text, "num_hidden_layers", None), int)),
     "names no num_hidden_layers", "one stack of decoder layers", OTHER_FAMILY),
    (_of_text(lambda text: ", ".join(sorted(_layer_types(text) - _KNOWN_LAYER_TYPES))),
     "has layers of type {}", "layers in which tokens meet in causal attention, whole or with a "
     "sliding window, or in a state", OTHER_FAMILY),
    (_of_text(
        lambda text: CHUNKED in _layer_types(text) and not getattr(text, ATTENTION_BLOCK, None)),
     f"has layers of type {CHUNKED}, and its config names no {ATTENTION_BLOCK}",
     "the tokens of an attention block",
     f"{set_in_config({ATTENTION_BLOCK: 8192})}, with the model's number, or the layers' types"),
    (_of_text(lambda text: getattr(text, "use_bidirectional_attention", None), "sees_later"),
     "attends in both directions", "causal attention", OTHER_FAMILY),
    (_of_text(lambda text: "dynamic" in rope_types(text), "depends_on_length"),
     "has RoPE of type dynamic, whose frequencies depend on the length of each call",
     "position embeddings that depend on the position alone",
     "choose another type, such as yarn or linear, in config.rope_parameters"),
    (_of_text(lambda text: getattr(text, "output_router_logits", False), "adds_loss"),
     "adds a router loss (output_router_logits=True) that is not transformers' load balancing",
     "E * sum(f * p) over all experts, or no router loss",
     set_in_config({"output_router_logits": False})),
)  # fmt: skip


def refuse_config(config: Any, given: str, source: str) -> None:
    """Raise UnsupportedModelError for the config of a model type that cannot be exact in chunks.

    `given` and `source`: the model's name in the error, and where the config comes from.
    """
    text = config.get_text_config()
    keys = [key for key, x in text.to_dict().items() if key.startswith(_INDEXERS) and x is not None]
    what = family_of(text.model_type).not_in_chunks
    if keys:
        what = f"picks the keys of each token with a learned indexer ({', '.join(sorted(keys))})"
    if not what:
        return
    raise UnsupportedModelError(
        given=f"{given}, which {what}",
        required="layers in which each token sees all tokens before it, those of a window or a "
        "block, or a state in transformers' cache",
        source=source,
        change=OTHER_FAMILY,
    )


def refuse_attention_dropout(model: nn.Module) -> None:
    """Raise UnsupportedModelError if the config names an attention dropout above 0."""
    text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    keys = [name for name in ATTENTION_DROPOUTS if float(getattr(text, name, None) or 0) > 0]
    if keys:
        raise unsupported(
            model,
            f"has attention dropout {max(float(getattr(text, key)) for key in keys)}",
            "no attention dropout: a chunk cannot draw what the whole sequence would have drawn",
            set_in_config({own_key(text, key): 0 for key in keys}),
        )


def other_dropouts(model: nn.Module) -> dict[str, float]:
    """Return the active dropouts, name -> probability; their random numbers depend on the plan."""
    return {
        name: module.p
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout) and module.p > 0 and module.training
    }


def shortest_window(model: nn.Module) -> int | None:
    """Return the shortest sliding window of any layer in tokens, or None if no layer has one."""
    text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    window = getattr(text, "sliding_window", None)
    layer_types = getattr(text, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    if getattr(text, "use_sliding_window", True) is False:
        return None
    return int(window) if window else None


def rope_types(text_config: Any) -> set[str]:
    """Return the RoPE types of a text config: one for all layers, or one per layer type."""
    return {str(entry.get("rope_type", "default")) for entry in rope_entries(text_config)}


def _layer_types(text: Any) -> set[str]:
    return set(getattr(text, "layer_types", None) or ())
