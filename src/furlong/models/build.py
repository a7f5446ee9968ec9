"""Models in and out: from a hub id or folder to a trainable model, and back to a folder.

Trained weights are float32 (float64 if that is asked for), frozen weights have the compute dtype. A
model's files are checked, by their headers alone, before weights are loaded or data are read.
Random weights are drawn by module name: a module has the same ones in any part of a model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from difflib import get_close_matches
from functools import partial, reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from unittest.mock import patch
from zlib import crc32

import psutil
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from furlong.config.adapter import ADAPTER, ADAPTER_WEIGHTS, adapter_file
from furlong.errors import ConfigError, UnsupportedModelError, UserError
from furlong.files import whole_folder, write_json
from furlong.models.decoder import HFDecoder
from furlong.models.folder import (
    CONFIG,
    GENERATION,
    check_config_values,
    check_export_folder,
    check_floats,
    check_folder,
    check_folder_files,
    check_generation,
    check_readable,
    check_sizes,
    check_type,
    hushed,
    is_in_4_bits,
    model_error,
    model_file,
    quantization_of,
    reason,
    with_adapters,
)
from furlong.models.new_tokens import end_names, grow_config, reading_rows, token_indices
from furlong.models.placeholders import (
    NO_OUT_PROJ,
    Carried,
    adapted_elsewhere,
    all_linear,
    carried,
    constructed,
    hold,
    is_tied,
    placeholders,
)
from furlong.models.published import read_as_floats
from furlong.models.quantized import (
    check_packed,
    import_safely,
    library,
    packed_linears,
    quantization,
    require_linear,
    settle,
)
from furlong.models.rope import apply_rope, check_length, check_rope
from furlong.models.routers import COEFFICIENT, Z_COEFFICIENT
from furlong.models.shrink import own_key
from furlong.models.support import refuse_config
from furlong.ops.backends.select import is_of_machine, is_out_of_memory
from furlong.units import count_words, format_bytes, format_count

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FLOATS = ("F64", "F32", "F16", "BF16")
_INEXACT = ("F8", "F6", "F4", "C64", "C128")
_CODES = ("U8", "F8_E4M3", "F8_E8M0")


def check_weight_files(source: str, *, are_packed: bool = False) -> None:
    """Raise ConfigError unless the safetensors files of a folder are all there, readable and whole.
    Files of a hub id are downloaded later. `are_packed`: whether config.json says that weights are
    quantized."""
    folder = Path(source)
    if not folder.is_dir():
        return
    if os.path.lexists(folder / WEIGHTS):  # also a link that leads nowhere
        names = [WEIGHTS]
    elif os.path.lexists(folder / INDEX):
        names = _shards(folder / INDEX)
    else:
        raise _without_safetensors(folder)
    missing = [name for name in names if not (folder / name).exists()]
    if missing and names != [WEIGHTS]:
        raise _no_weights(
            f"{folder} without {len(missing)} of the {count_words(len(names), 'file')} that {INDEX}"
            f" lists: {missing[0]}{', ...' * (len(missing) > 1)}"
        )
    for name in names:
        _check_header(folder / name, are_packed)


def weights_fingerprint(source: str, revision: str | None = None) -> dict[str, str]:
    """Return a dict that differs between models with different weights, without reading the weights
    whole.

    Returns:
        For a folder, file -> its size and a hash of 64 KiB at each of 32 evenly spaced offsets. Two
        checkpoints of the same model differ at all of these offsets. For a hub id, config.json ->
        the commit.
    """
    if not os.path.isdir(source):
        config = model_file(source, CONFIG, revision)
        return {} if config is None else {CONFIG: config.parent.name}
    found = {}
    for file in sorted(Path(source).glob("*.safetensors")):
        with open(file, "rb") as opened:
            size_bytes, digest = os.fstat(opened.fileno()).st_size, hashlib.sha256()
            for place in range(32):
                opened.seek(size_bytes * place // 32)
                digest.update(opened.read(2**16))
        found[file.name] = f"{size_bytes} bytes, {digest.hexdigest()[:16]}"
    return found


def _check_header(file: Path, are_packed: bool) -> None:
    """Raise ConfigError for a safetensors file that is unreadable or cut off, or whose weights are
    no floats (codes are allowed if `are_packed`)."""
    from safetensors import SafetensorError, safe_open

    check_readable(file)
    try:
        with safe_open(str(file), framework="pt") as opened:
            dtypes = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        with file.open("rb") as raw:
            is_pointer = raw.read(40).startswith(b"version https://git-lfs")
        if is_pointer:
            change = "run git lfs pull in its folder"
            raise _no_weights(f"{file}, which is a pointer of Git LFS", change) from error
        what = f"{file}, which is cut off or no safetensors file: {reason(error)}"
        raise _no_weights(what) from error
    for name, dtype in dtypes.items():
        # buffers, such as masks of old families, may be of any other kind
        is_code = are_packed and dtype in _CODES
        is_odd = name.endswith("weight") or dtype.startswith(_INEXACT)
        if dtype not in _FLOATS and is_odd and not is_code:
            raise _no_weights(
                f"{file}, whose {name} is of dtype {dtype}: quantized, or no float at all",
                "use the model's checkpoint in bfloat16 or float32",
            )


def _shards(index: Path) -> list[str]:
    """Return the sorted names of the files that an index lists. Raises ConfigError if damaged."""
    check_readable(index)
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(listed.values()))
        others = [n for n in names if Path(n).name != n or not n.endswith(".safetensors")]
        if others or not names:
            raise ValueError(f"it lists {others[0]!r}" if others else "it lists no file")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        what = f"{index}, which is no index of .safetensors files beside it: {reason(error)}"
        raise _no_weights(what) from error
    return names


def _without_safetensors(folder: Path) -> ConfigError:
    kinds = (*_PICKLES, ".safetensors", ".gguf", ".npz")
    names = sorted(path.name for path in folder.iterdir() if path.name != "training_args.bin")
    found = [name for name in names if name.endswith(kinds)]
    told = f"{folder} without {WEIGHTS}"
    change = "use the folder that save_pretrained of transformers writes"
    if found:
        told += f" or {INDEX}; there is {', '.join(found[:3])}"
    if pickles := [name for name in found if name.endswith(_PICKLES)]:
        told += f": {pickles[0]} is a pickle, which is not read, for it can hold a program"
        change = (
            "convert it, if you trust it, with transformers: AutoModelForCausalLM"
            f".from_pretrained({str(folder)!r}).save_pretrained(NEW_FOLDER)"
        )
    return _no_weights(told, change)


def _no_weights(given: str, change: str = "download or copy the model once more") -> ConfigError:
    return model_error(given, "weights (safetensors)", f"{change}; or set model.init: random")


def draw_weights(model: Any, seed: int, device: torch.device) -> None:
    """Draw the weights and buffers of a model on meta, as transformers draws them for each module.

    Each module's random state is made of `seed` and the module's name. Changes the CPU's global
    generator. Raises UnsupportedModelError for a family that leaves a weight undrawn.
    """
    model.to_empty(device=device)
    floats = [
        (name, tensor)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.is_floating_point()
    ]
    with torch.no_grad():
        for _, tensor in floats:
            tensor.fill_(torch.nan)
        _draw(model, "", model, seed)
        model.tie_weights(recompute_mapping=False)  # a stage may lack the head
    for name, tensor in floats:
        if bool(tensor.isnan().any()):
            raise UnsupportedModelError(
                given=f"{type(model).__name__}, whose family gives {name} no random start",
                required="a family that fills every weight of a model that is built without memory",
                source="model.init: random",
                change="start from weights (model.init: pretrained)",
            )


def draw_adapters(model: nn.Module, seed: int) -> None:
    """Draw the weights of peft's LoRA adapters again, each from `seed` and its module's name."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            _seed(name, seed)
            for adapter in module.active_adapters:
                module.reset_lora_parameters(adapter, True)


def _draw(module: nn.Module, name: str, owner: Any, seed: int) -> None:
    """Draw the weights of a module, after those of its children. `owner`: the innermost model that
    contains the module, whose `_init_weights` draws, as in transformers."""
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        owner = module
    for child_name, child in module.named_children():
        _draw(child, f"{name}.{child_name}", owner, seed)
    _seed(name, seed)
    owner._init_weights(module)


def _seed(name: str, seed: int) -> None:
    torch.default_generator.manual_seed(crc32(f"{seed}/{name}".encode()))


def add_adapters(model: Any, lora: dict[str, Any], whole: nn.Module | None = None) -> Any:
    """Return the model with adapters, and with its other weights frozen.

    `lora` holds keys of `model.lora`, at least `rank`, `alpha`, `dropout`, `target_modules`.
    `whole`, for a model that holds one stage: the whole model, on meta, which gets adapters, too. A
    stage without any of the modules gets no adapter. Raises ConfigError for settings that peft
    refuses, and for a name that fits no module of the whole model.
    """
    if whole is not None:
        add_adapters(whole, lora)
        try:
            return _adapted(model, lora)
        except ConfigError:  # not of the whole model: none of these modules is here
            return model.requires_grad_(False)
    names = [name for name, _ in model.named_modules()]
    adapted = _adapted(model, lora)
    found = adapted.base_model.targeted_module_names
    saved, modules = lora.get("modules_to_save") or (), lora["target_modules"]
    weights = [*adapted.base_model.targeted_parameter_names, *(f"{name}.weight" for name in found)]
    if modules == "all-linear" and model.config.model_type in NO_OUT_PROJ:
        print("model.lora: no adapters in out_proj, where peft takes none in models of this family")
    for key, wanted, known in (
        ("target_modules", () if isinstance(modules, str) else modules, found),
        ("modules_to_save", saved, names),
        ("target_parameters", lora.get("target_parameters") or (), weights),
    ):  # fmt: skip
        for name in wanted:
            if not any(_ends(own, name) for own in known):
                raise _no_such_modules(model, key, wanted, f": {name} fits none")
    return adapted


def load_adapter(model: Any, adapter: str, *, is_whole: bool) -> None:
    """Give a model's adapters the weights of the saved adapter in the folder `adapter`. A model
    that is one stage of a pipeline takes its part. Raises ConfigError for weights that are missing,
    or that do not belong to a whole model."""
    from peft import set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = adapter_file(adapter, ADAPTER_WEIGHTS)
    try:
        found = set_peft_model_state_dict(model, load_file(file))
        kinds = (".lora_", ".modules_to_save.", ".trainable_tokens_delta")
        named = dict(model.named_parameters(remove_duplicate=False))
        # of two names of one weight, as of rows in a tied head, a file has one
        given = {id(x) for name, x in named.items() if name not in found.missing_keys}
        lacking = [
            n for n in found.missing_keys
            if any(kind in n for kind in kinds) and id(named.get(n)) not in given
        ]  # fmt: skip
        odd = lacking or (found.unexpected_keys if is_whole else [])
        what = (
            f"{len(odd)} weights that the other does not know, {odd[0]} among them" if odd else ""
        )
    except (OSError, SafetensorError, RuntimeError) as error:
        what = reason(error)
    if what:
        raise model_error(
            f"{adapter} and the model have {what}",
            "adapters that were trained over this model",
            "name the model that they were trained over in model.name",
            f"model.lora.adapter, {file}",
        )


def merge_adapters(model: Any) -> Any:
    """Return the model with adapters added to its weights. Weights become float32, so that a later
    cast is the only rounding.

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
            if hasattr(config, "tie_word_embeddings"):
                config.tie_word_embeddings = False
        base.all_tied_weights_keys = {}
    return model.merge_and_unload()


def _rows_of(indices: Any) -> list[int]:
    """Return the rows in peft's `trainable_token_indices`, which are those of each weight in it."""
    listed = indices.values() if isinstance(indices, Mapping) else [indices or ()]
    return sorted({row for rows in listed for row in rows})


def _adapted(model: Any, lora: dict[str, Any]) -> Any:
    import_safely()
    import peft
    from peft.utils import transformers_weight_conversion as conversion

    modules = lora["target_modules"]
    saved = lora.get("modules_to_save") or ()
    settings = peft.LoraConfig(task_type="CAUSAL_LM")
    # a copy of one of two tied weights would be trained alone
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}
    of_ends = [own for own, module in model.named_modules() if module in ends]
    saves_tied = is_tied(model) and any(_ends(own, name) for own in of_ends for name in saved)
    if adapter := lora.get("adapter"):
        settings = peft.LoraConfig.from_pretrained(os.path.dirname(adapter_file(adapter, ADAPTER)))
        settings.inference_mode = False
        if saves_tied and not settings.ensure_weight_tying:
            raise model_error(
                f"{adapter}, with embeddings of its own (modules_to_save: {', '.join(saved)}) apart"
                " from a head that is tied to them in the model",
                "adapters with one weight for both (ensure_weight_tying)",
                "merge them into the model, untied, and name that; or begin with new adapters",
                "model.lora.adapter",
            )
    settings.r, settings.lora_alpha = lora["rank"], lora["alpha"]
    settings.lora_dropout, settings.use_rslora = lora["dropout"], lora.get("rslora", False)
    parameters, linears = lora.get("target_parameters") or (), all_linear(model)
    if isinstance(modules, str):
        targets = set(linears) if modules == "all-linear" else modules
    else:  # a weight of a linear layer, as `_write_as_peft_reads` names it, is that layer
        layers = {name: [own for own in linears if _ends(f"{own}.weight", name)]
                  for name in parameters}  # fmt: skip
        targets = set(modules).union(*layers.values())
        parameters = [name for name in parameters if not layers[name]]
    settings.target_modules, settings.target_parameters = targets, list(parameters) or None
    settings.modules_to_save = list(saved) or None
    rows = lora.get("new_rows")
    indices = {} if rows is None else token_indices(model, rows, saved)
    here, there = map(_rows_of, (indices, settings.trainable_token_indices))
    if adapter and here != there:
        raise model_error(
            f"{adapter}, which trains {len(there)} rows of tokens, for a run of"
            f" {len(here)} new tokens",
            "rows of the same tokens",
            "name the tokens of its run in model.new_tokens, in its order; or merge it into the"
            " model and name that",
            "model.lora.adapter and model.new_tokens",
        )
    settings.trainable_token_indices = indices or None
    towers = [name for name, module in model.named_modules() if isinstance(module, Carried)]
    if away := [*towers, *adapted_elsewhere(model)]:
        # a pattern, so that peft passes over their layers in the whole checkpoint, too
        own = rf"({'|'.join(map(re.escape, away))})(\..*)?"
        kept = settings.exclude_modules or ()  # of an adapter that goes on
        if not isinstance(kept, str):
            kept = "|".join(rf"(.*\.)?{re.escape(name)}" for name in sorted(kept))
        settings.exclude_modules = "|".join(dict.fromkeys(filter(None, (kept, own))))
    settings.ensure_weight_tying = saves_tied
    try:
        with warnings.catch_warnings(), patch.object(conversion, _RENAMES, lambda *_, **__: None):
            # peft asks transformers for it by an older name.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            # merge_adapters unties what is no longer equal
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
            # experts in one weight, whose patterns peft makes and does not look for there
            warnings.filterwarnings("ignore", "The following .*_pattern keys", RuntimeWarning)
            adapted = peft.get_peft_model(model, settings)
        _write_as_peft_reads(adapted)
        return adapted
    except Exception as error:  # modules may be of any kind, and names are regular expressions
        is_unknown = "not found in the base model" in str(error)
        why = "" if is_unknown else f", of rank {lora['rank']}: {reason(error)}"
        raise _no_such_modules(model, "target_modules", modules, why) from error


_RENAMES = "convert_peft_config_for_transformers"
"""peft's function that takes some names of linear layers (gate_proj, w1) for those of experts, in
families whose checkpoints hold each expert apart, and all-linear for experts and router, too."""


def _write_as_peft_reads(adapted: Any) -> None:
    """Change the config for export, so that peft loads the same adapters. When peft loads a config,
    it takes some names of linear layers for names of experts (`_RENAMES`). These layers are moved
    from `target_modules` to `target_parameters`, which names their weights. The dropout in the
    config is then 0, since peft allows none beside `target_parameters`."""
    from peft import LoraConfig
    from peft.utils import transformers_weight_conversion as conversion

    def is_renamed(leaf: str) -> bool:
        alone = LoraConfig(target_modules=[leaf])
        with suppress(ValueError):  # gate_proj without up_proj
            getattr(conversion, _RENAMES)(alone, adapted.get_base_model(), None)
            return alone.target_modules != {leaf}
        return True

    settings, names = adapted.peft_config["default"], adapted.base_model.targeted_module_names
    renamed = {leaf for leaf in {name.rpartition(".")[2] for name in names} if is_renamed(leaf)}
    if weights := [f"{name}.weight" for name in names if name.rpartition(".")[2] in renamed]:
        settings.target_modules = {n for n in names if f"{n}.weight" not in weights}
        settings.target_parameters = [*(settings.target_parameters or ()), *weights]
        settings.lora_dropout = 0.0  # peft takes none beside target_parameters; layers have theirs


def _ends(own: str, name: str) -> bool:
    """Whether a qualified name `own` is `name` or ends with it, as peft compares them."""
    return own == name or own.endswith(f".{name}")


def _no_such_modules(model: nn.Module, key: str, modules: Any, why: str) -> ConfigError:
    told = modules if isinstance(modules, str) else ", ".join(modules)
    known = {name.replace(".base_layer", "").rpartition(".")[2]
             for name, module in model.named_modules()
             if isinstance(module, nn.Linear) and ".lora_" not in name}  # fmt: skip
    required = f"all-linear, or names among {', '.join(sorted(known))}"
    bare = {".".join(name.split(".")[-2:]) for name, weight in model.named_parameters()
            if weight.ndim == 3 and ".experts." in name}  # fmt: skip
    if bare:
        required += f"; experts: model.lora.target_parameters = [{', '.join(sorted(bare))}]"
    if key == "modules_to_save":
        required = "names of modules of the model, such as embed_tokens, lm_head"
    elif key == "target_parameters":
        required = "ends of the names of parameters of the model, such as experts.down_proj"
    return model_error(
        f"model.lora.{key} = {told}{why}", required, "name what the model has", "model.lora"
    )


BASE = "base"
"""The folder of an export of adapters that holds the changed config of their base."""
_BASE_TOLD = (
    "the adapters belong to their base with another config (model.config, model.rope), which peft"
    " does not set: load them with {opener}.from_pretrained('{folder}',"
    " config=AutoConfig.from_pretrained('{folder}/{base}')), or merge them: furlong export RUN"
    " --merge"
)
_NEW_ROWS = "furlong_new_rows"
"""Attribute of a model with adapters: the ids of new tokens, or None."""
_RESIZE_TOLD = (
    "the adapters have rows of new tokens: resize their base before peft loads them,"
    " base.resize_token_embeddings({size})"
)
# Attention and experts are transformers' default (SDPA, or eager where a family has none) whatever
# config.json asks for: a name there could be that of a kernel on a hub, or a missing package.
_OWN_KERNELS: dict[str, Any] = {"attn_implementation": None, "experts_implementation": None}


def build_model(
    name: str,
    *,
    revision: str | None = None,
    init: Literal["pretrained", "random"] = "pretrained",
    dtype: torch.dtype = torch.float32,
    quantize: str | Mapping[Any, Any] | None = None,
    lora: dict[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    rope: dict[str, Any] | None = None,
    max_seq_len: int | None = None,
    new_rows: range | None = None,
    seed: int = 0,
    layers: range | None = None,
    divide: Callable[[Any], None] | None = None,
    device: torch.device | None = None,
    unpacked: bool = False,
    is_empty: bool = False,
) -> Any:
    """Return a transformers decoder in train mode.

    Args:
        name: hub id or local folder. With `init="random"` it needs only a config.json; each module
            is then initialized from `seed` and the module's name.
        dtype: dtype of computation and of frozen weights. Trained weights are float32 or wider.
        quantize, lora, changes: the values of `model.quantize`, `model.lora` (which freezes all
            other weights) and `model.config`.
        rope: `rope_type` and its keys (models.rope).
        max_seq_len: tokens of the run's longest sequence, for which the model must have positions.
        new_rows: ids of new tokens. Their rows in embedding and head, added where they are beyond
            the model's, begin as the mean of the rows before, and are trained beside adapters.
        layers: the layers of this process; None: all. Other stages are neither built nor read
            (models.placeholders).
        divide: shards a model on meta. This process then reads only its shards, onto `device`. A
            model that cannot be read in shards is returned whole, on the CPU
            (`support.is_sharded`).
        unpacked: dequantize 4-bit weights.
        is_empty: leave the model on meta, for an export of weights that are held elsewhere.

    Raises ConfigError or UnsupportedModelError for a model that cannot be built so.
    """
    source = check_folder(name, revision)
    trained_dtype = torch.promote_types(dtype, torch.float32)
    loaded_dtype = trained_dtype if lora is None else dtype
    config = read_config(
        source, revision=revision, changes=changes, rope=rope, max_seq_len=max_seq_len,
        new_rows=new_rows,
    )  # fmt: skip
    if lora is not None and new_rows is not None:
        lora = {**lora, "new_rows": new_rows}
    with torch.random.fork_rng(devices=[]):
        if init == "random" or (is_empty and lora is not None):
            if getattr(config, "quantization_config", None) is not None:
                del config.quantization_config
            model = model_of_config(config, source, dtype=loaded_dtype)
            if layers is not None:
                hold(model, placeholders(model, layers))
            if not is_empty:
                draw_weights(model, seed, torch.device("cpu"))
        else:
            check_packed(config, source, quantize, has_adapters=lora is not None)
            divide = divide if lora is None else None  # adapters are put into whole layers
            model = _load_weights(
                source,
                config,
                loaded_dtype,
                layers,
                revision,
                quantize,
                divide,
                device,
                new_rows,
                is_empty=is_empty,
            )
        if unpacked and packed_linears(model):
            with hushed():
                model = model.dequantize(loaded_dtype)
            # what packed the weights of a file as they were read cannot be undone as they are saved
            conversions = getattr(model, "_weight_conversions", None) or ()
            model._weight_conversions = [one for one in conversions if not _packs(one)]
        if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the others know no float64
        if lora is not None:
            whole = None if layers is None else model_of_config(config, source, dtype=loaded_dtype)
            model = add_adapters(model, lora, whole)
            for settings in getattr(model, "peft_config", {}).values():
                settings.revision = revision
            model.__dict__[_NEW_ROWS] = new_rows
            if not is_empty:
                draw_adapters(model, seed)
            if not is_empty and lora.get("adapter") and hasattr(model, "peft_config"):
                load_adapter(model, lora["adapter"], is_whole=layers is None)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != trained_dtype:
            parameter.data = parameter.data.to(trained_dtype)
    return model.train()


def export_model(
    model: Any,
    tokenizer: Any,
    folder: str | Path,
    *,
    dtype: torch.dtype,
    has_other_config: bool = False,
    card: str | None = None,
    weights: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Write a folder that transformers (or, for adapters, peft) loads, and return its path. The
    folder appears whole or not at all.

    Args:
        dtype: dtype of the weights in the folder.
        has_other_config: whether the base of adapters has another config than its own files say.
            The subfolder `BASE` then holds that config, and a warning is printed.
        card: text of README.md.
        weights: weights to write in place of the model's, which may be sharded, by the names of
            `exported_names`. The dict is emptied, so that weights can be freed layer by layer as
            they are converted.

    Raises ConfigError if the folder exists already.
    """
    folder = Path(folder)
    check_export_folder(folder)
    with whole_folder(folder) as aside:
        _write_model(model, aside, dtype, weights)
        _end_by(aside / GENERATION, tokenizer)
        if card is not None:
            (aside / "README.md").write_text(card, encoding="utf-8")
        if has_other_base := has_other_config and hasattr(model, "peft_config"):
            config = copy(model.get_base_model().config)
            if getattr(model, "hf_quantizer", None) and not model.hf_quantizer.pre_quantized:
                del config.quantization_config  # of the run, not of the base's own weights
            if (published := getattr(model.get_base_model(), _PUBLISHED, None)) is not None:
                config.quantization_config = published
            config.save_pretrained(aside / BASE)
            _add_older_rope(aside / BASE)
            opener = "ImageTextToText" if with_images(config) else "CausalLM"
            told = partial(_BASE_TOLD.format, base=BASE, opener=f"AutoModelFor{opener}")
            with (aside / "README.md").open("a", encoding="utf-8") as opened:
                opened.write(f"\n{told(folder=folder.name)}\n")
        rows, notes = model.__dict__.get(_NEW_ROWS), list[str]()
        if rows is not None:
            size = model.get_base_model().config.get_text_config().vocab_size
            notes = [_RESIZE_TOLD.format(size=size)] if rows.stop == size else []
            with (aside / "README.md").open("a", encoding="utf-8") as opened:
                opened.writelines(f"\n{note}\n" for note in notes)
        if (files := getattr(tokenizer, "source_files", None)) is not None:
            for name, content in files.items():
                (aside / name).parent.mkdir(exist_ok=True)
                (aside / name).write_bytes(content)
        elif tokenizer is not None:
            tokenizer.save_pretrained(aside)
    if has_other_base:
        print(f"warning: {told(folder=folder)}")
    for note in notes:
        print(f"{folder}: {note}")
    return folder


def _end_by(file: Path, tokenizer: Any) -> None:
    """Add the tokenizer's EOS, which a run may have set, to a generation_config.json.

    The file is changed after transformers has written it: transformers refuses to save a changed
    config that has a flaw from its publisher (a temperature without do_sample).
    """
    eos = getattr(tokenizer, "eos_token_id", None)
    if eos is None or not file.exists():
        return
    values = json.loads(file.read_text(encoding="utf-8"))
    known = values.get("eos_token_id")
    ends = known if isinstance(known, list) else [known]
    if eos not in ends:
        values["eos_token_id"] = eos if known is None else [*ends, eos]
        write_json(file, values)


def exported_names(model: Any) -> dict[str, str]:
    """Return the names of all tensors in an export of the model, as a dict: name -> the first name
    of the same weight. Only tied weights have several names."""
    tensors = model.state_dict(keep_vars=True)
    if hasattr(model, "peft_config"):
        from peft import get_peft_model_state_dict

        with hushed(), warnings.catch_warnings(action="ignore"):
            own = get_peft_model_state_dict(
                model, dict(tensors), save_embedding_layers=_saves_ends(model)
            ).values()
        ids = {id(tensor) for tensor in own}
        tensors = {name: tensor for name, tensor in tensors.items() if id(tensor) in ids}
    firsts: dict[int, str] = {}
    return {name: firsts.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def _saves_ends(model: Any) -> Any:
    """peft's `save_embedding_layers`: not where rows of new tokens are saved by themselves."""
    return "auto" if model.__dict__.get(_NEW_ROWS) is None else False


def _write_model(
    model: Any, folder: Path, dtype: torch.dtype, weights: dict[str, torch.Tensor] | None
) -> None:
    from safetensors import safe_open

    is_adapter = hasattr(model, "peft_config")
    whole: dict[str, torch.Tensor] | None = None
    if weights is not None:
        whole = {name: weights[first] for name, first in exported_names(model).items()}
        weights.clear()
    with hushed(is_reading=False):
        if is_adapter:
            for adapters in model.peft_config.values():
                base = adapters.base_model_name_or_path or ""
                if os.path.isdir(base):  # a relative one would be another folder elsewhere
                    adapters.base_model_name_or_path = os.path.abspath(base)
            model.save_pretrained(
                folder, state_dict=whole, save_embedding_layers=_saves_ends(model)
            )
        else:
            written = _as_in_files(model, whole or _cast(model, dtype))
            for name, file in getattr(model, _CARRIED, {}).items():
                with safe_open(str(file), framework="pt") as opened:
                    written[name] = opened.get_tensor(name)
            model.save_pretrained(folder, state_dict=written, save_original_format=False)
    if not is_adapter:
        # transformers notes the dtype of the weights in memory, not of those it was handed.
        text = (folder / "config.json").read_text(encoding="utf-8")
        config = json.loads(text) | {"dtype": str(dtype).removeprefix("torch.")}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _add_older_rope(folder)
        if hasattr(model, _CARRIED):
            _carry(model, folder, dtype)


def _as_in_files(
    model: Any, weights: dict[str, torch.Tensor], *, are_tied: bool = True
) -> dict[str, torch.Tensor]:
    """Return the weights as files of the model's family hold them: each expert in tensors of its
    own and, unless `are_tied` is false, tied weights once. Weights are converted layer by layer,
    and each layer's originals are dropped from `weights`, so that both forms are never in memory as
    a whole."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    left = remove_tied_weights_from_state_dict(weights, model) if are_tied else {**weights}
    of_layers: dict[str, list[str]] = {}
    for name in left:
        found = re.match(r".*?\.\d+\.", name)
        of_layers.setdefault(found[0] if found else "", []).append(name)
    written: dict[str, torch.Tensor] = {}
    for names in of_layers.values():
        written |= revert_weight_conversion(model, {name: left.pop(name) for name in names})
    return written


def _add_older_rope(folder: Path) -> None:
    """Write the RoPE of a config.json also under the keys of transformers 4, which ignores
    `rope_parameters` and would take the family's defaults. Leave the file unchanged if
    transformers 5 would then read another RoPE."""
    from transformers import AutoConfig

    file = folder / "config.json"
    text = file.read_text(encoding="utf-8")
    values = json.loads(text)
    own = values.get("text_config") or values
    rope = own.get("rope_parameters") or {}
    scaled = dict(rope.get("full_attention", rope))
    older = {
        key: scaled.pop(key) for key in ("rope_theta", "partial_rotary_factor") & scaled.keys()
    }
    if "sliding_attention" in rope:
        older["rope_local_base_freq"] = rope["sliding_attention"].get("rope_theta")
    if scaled.get("rope_type") == "longrope":  # Phi-3's config takes these three alone
        extra = {} if "short_mscale" in scaled else {"original_max_position_embeddings", "factor"}
        scaled = {"type": "longrope"} | {k: v for k, v in scaled.items() if k not in extra}
        del scaled["rope_type"]
    is_default = scaled.get("rope_type", "default") == "default" and "type" not in scaled
    if not is_default or "mrope_section" in scaled:
        older["rope_scaling"] = scaled
    own.update(older)
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    with suppress(Exception), hushed():  # a family's own checks of keys that it does not know
        text_config = AutoConfig.from_pretrained(folder).get_text_config()
        again = text_config.to_dict().get("rope_parameters")
        if {key: one for key, one in again.items() if key != "type"} == rope:
            return
    file.write_text(text, encoding="utf-8")


def read_config(
    source: str, *, revision: str | None = None, changes: Mapping[str, Any] | None = None,
    rope: dict[str, Any] | None = None, max_seq_len: int | None = None, as_floats: bool = False,
    new_rows: range | None = None,
) -> Any:  # fmt: skip
    """Return the transformers config of a hub id or folder, with `changes` (model.config), `rope`
    (model.rope) and a vocabulary that has `new_rows` written into it. Weights that are dequantized
    as they are read count as not quantized; with `as_floats` all do, other than 4-bit ones of
    bitsandbytes.

    Raises UserError for an unusable config, or one of fewer positions than `max_seq_len`.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    if Path(source).is_dir():
        check_folder_files(Path(source))
    values: dict[str, Any] = {}
    try:
        named: dict[str, Any] = {} if revision is None else {"revision": revision}
        values, _ = PreTrainedConfig.get_config_dict(source, **named)
        check_config_values(values, source)
        check_type(values, CONFIG_MAPPING, source)
        named |= _OWN_KERNELS
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **named)
        refuse_config(config, f"model type {config.model_type}", f"{source}, config.json")
        if (
            "tie_word_embeddings" not in values
            and getattr(config, "tie_word_embeddings", False)
            and _has_other_head(config, source, revision)
        ):  # a family's default, which the files contradict
            apply_changes(config, {"tie_word_embeddings": False})
        apply_changes(config, changes or {})
        if new_rows is not None:
            grow_config(config, new_rows, source)
        is_packed = is_in_4_bits(getattr(config, "quantization_config", None))
        if (as_floats and not is_packed) or quantization_of(values) is not None:
            for own in (config, config.get_text_config()):
                vars(own).pop("quantization_config", None)
        check_sizes(config, source)
        check_rope(config, source)
        if rope is not None:
            apply_rope(config, rope, max_seq_len=max_seq_len)
        if max_seq_len is not None:
            check_length(config, max_seq_len, has_rope=rope is not None, source=source)
        if not as_floats:  # last, for the bfloat16 checkpoint mends nothing else
            check_floats(values, source)
    except UserError:
        raise
    except Exception as error:  # a family's own code may make anything of a broken file
        check_floats(values, source)
        raise model_error(
            f"{source}, config.json: {reason(error, values)}",
            "a model whose config.json transformers can read without remote code",
            "mend config.json, or use the model's own"
            if Path(source).exists()
            else "check the name, the connection to the hub, or use a local folder",
        ) from error
    return config


def _tied_leaves(config: Any, source: str) -> tuple[str, str]:
    """Return the ends of the names of the weights of head and input embeddings that the class of a
    config's model ties; two empty ones if it ties none."""
    kind = _auto_class(config, source)._model_mapping[type(config)]
    for pair in (getattr(kind, "_tied_weights_keys", None) or {}).items():
        head, embeddings = (".".join(name.split(".")[-2:]) for name in pair)
        if head.endswith(".weight"):
            return head, embeddings
    return "", ""


def _has_other_head(config: Any, source: str, revision: str | None) -> bool:
    """Whether the files of a checkpoint hold a head that differs from the input embeddings in the
    rows of the first tokens. Of a hub id the index alone is downloaded, unless it lists a head."""
    with suppress(Exception):  # files that cannot be read are refused where weights are needed
        leaves = _tied_leaves(config, source)
        if os.path.isdir(source):
            check_weight_files(source, are_packed=True)
            files = {name: file.name for name, file in _tensor_files(source, revision).items()}
        else:
            index = model_file(source, INDEX, revision)
            text = "{}" if index is None else index.read_text(encoding="utf-8")
            files = json.loads(text).get("weight_map", {})
        heads, embeddings = ([n for n in files if _ends(n, leaf)] for leaf in leaves)
        if heads and embeddings:
            first = _first_rows(source, files[heads[0]], heads[0], revision)
            others = [_first_rows(source, files[n], n, revision) for n in embeddings]
            return not any(torch.equal(first, other) for other in others)
    return False


def _first_rows(source: str, name: str, tensor: str, revision: str | None) -> Tensor:
    from safetensors import safe_open

    with safe_open(str(model_file(source, name, revision)), framework="pt") as opened:
        rows: Tensor = opened.get_slice(tensor)[:1024]
        return rows.float()


_NOT_CHANGED = ("model_type", "architectures", "auto_map", "dtype", "quantization_config")


def apply_changes(config: Any, changes: Mapping[str, Any]) -> list[str]:
    """Change keys of a transformers config (model.config) in place; return the changes in words.

    Keys are those of the decoder or else of the whole model, nested by dots or as mappings. Raises
    ConfigError for a key that the config does not have, and for a value of another type.
    """
    said, text = [], config.get_text_config()
    if Z_COEFFICIENT in changes and hasattr(text, COEFFICIENT) and not hasattr(text, Z_COEFFICIENT):
        setattr(text, Z_COEFFICIENT, 0.0)  # furlong computes it
    for key, value in _leaves(changes):
        *outer, name = key.split(".")
        roots = config.get_text_config(), config
        holders = [reduce(lambda x, part: getattr(x, part, None), outer, root) for root in roots]
        known = [list(x.to_dict()) if hasattr(x, "to_dict") else [] for x in holders]
        found = [x for x, keys in zip(holders, known, strict=True) if own_key(x, name) in keys]
        required, change = "a key of the model's config.json", f"remove {key}"
        if rope := next((part for part in key.split(".") if part.startswith("rope_")), None):
            found, whole = [], changes.get(rope)
            whole = {"rope_type": "default"} | (whole if isinstance(whole, dict) else {name: value})
            shown = ", ".join(f"{key}: {value}" for key, value in whole.items())
            change = f"remove model.config.{rope}, and set model.rope: {{{shown}}}"
        elif near := get_close_matches(name, [x for keys in known for x in keys], n=1):
            change = f"did you mean {near[0]}?"
        old = getattr(found[0], name) if found else None
        try:
            if not found or name.startswith("_") or name in _NOT_CHANGED:
                raise TypeError
            required, change = f"a value as {key} has it, such as {old!r}", f"mend {key}"
            if type(old) is float and isinstance(value, int | str) and not isinstance(value, bool):
                value = float(value)
            if None not in (old, value) and not isinstance(value, type(old) | float):
                raise TypeError
            # a model that holds the decoder ties by its own key
            for one in found if name == "tie_word_embeddings" else found[:1]:
                setattr(one, name, value)
        except (TypeError, ValueError, StrictDataclassError) as error:
            given = f"model.config with {key}: {value!r}"
            raise model_error(given, required, change, "model.config") from error
        said.append(f"{key} {old!r} -> {value!r}")
    return said


def _leaves(values: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{outer}{key}.")
        else:
            yield f"{outer}{key}", value


def model_of_config(config: Any, source: str, *, dtype: torch.dtype) -> Any:
    """Return the whole model of a config, on meta: without memory for its weights.

    Raises UnsupportedModelError if transformers has no causal language model for the config, and
    ConfigError if it cannot build the model or write its config.
    """
    opened = _auto_class(config, source)
    try:
        with torch.device("meta"):
            model = opened.from_config(config, dtype=dtype, **_OWN_KERNELS)
        if with_images(config):
            hold(model, carried(model))
        # What cannot be written would be found out when the run exports its model.
        with TemporaryDirectory() as folder:
            model.config.save_pretrained(folder)
        return model
    except UserError:
        raise
    except Exception as error:  # a family's own code may make anything of wrong sizes
        what = f"{source}, config.json: {reason(error, vars(config))}"
        required = "sizes and names of which transformers can build the model"
        raise model_error(what, required) from error


def with_images(config: Any) -> bool:
    """Whether a config is of a model that holds a text decoder beside what reads images."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    is_text = config.get_text_config() is config
    return not is_text and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def _auto_class(config: Any, source: str) -> Any:
    """The class of transformers that opens a model: text and images by the class that wrote them,
    whose names of weights their files have."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    if with_images(config):
        return AutoModelForImageTextToText
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            given=f"model type {config.model_type}",
            required="a decoder with causal attention that AutoModelForCausalLM knows",
            source=f"{source}, config.json",
            change="choose a causal language model",
        )
    return AutoModelForCausalLM


_WHOLE_WEIGHTS = "every weight (safetensors) of the model that config.json describes"
_OLD_BUFFERS = (".inv_freq", ".masked_bias", ".attn.bias", ".attention.bias")
"""Ends of the names of buffers that old checkpoints hold."""
_USE_WHOLE = "use the whole model's folder with its own config.json, or model.init: random"
_FREE_MEMORY = "end what else holds memory, or start more processes: each holds a smaller share"


def _load_weights(
    source: str, config: Any, dtype: torch.dtype, layers: range | None, revision: str | None,
    quantize: str | Mapping[Any, Any] | None, divide: Callable[[Any], None] | None,
    device: torch.device | None, new_rows: range | None, *, is_empty: bool = False,
) -> Any:  # fmt: skip
    """Return the model with the weights of its files. With `divide` it is sharded, if transformers
    can read this process's rows of each weight alone; otherwise it is whole."""
    from transformers import PreTrainedModel, modeling_utils

    opened = _auto_class(config, source)
    named = _OWN_KERNELS | ({} if revision is None else {"revision": revision})
    if is_packed := getattr(config, "quantization_config", None) is not None:
        library("model.name, whose weights are in 4 bits,")
    elif quantize is not None:
        named["quantization_config"] = quantization(quantize, dtype)
    if is_packed or quantize is not None:
        named["device_map"] = {"": "cpu"}  # there, so that the codes are the same everywhere
    elif is_empty:
        named["device_map"] = {"": "meta"}
    published = _published(source, revision)
    check_weight_files(source, are_packed=is_packed or published is not None)
    check_generation(source, revision)
    kind, others, whole = opened._model_mapping[type(config)], dict[str, nn.Module](), None
    if layers is not None or with_images(config) or new_rows is not None:
        whole = model_of_config(config, source, dtype=dtype)
        others = carried(whole) if with_images(config) else {}
        others |= {} if layers is None else placeholders(whole, layers)
        config, opened = whole.config, type(whole)
    ends = nullcontext if new_rows is None else partial(reading_rows, new_rows, end_names(whole))
    as_floats = nullcontext if published is None else partial(
        read_as_floats, published, is_empty=is_empty
    )  # fmt: skip

    def read(change: Callable[[Any], None] | None, **named: Any) -> tuple[Any, dict[str, Any]]:
        # what a family leaves out in silence
        tells_all = patch.object(kind, "_keys_to_ignore_on_load_unexpected", None)
        changed = nullcontext() if change is None else constructed(kind, change)
        # the latter's floats are what the former gives rows to
        with hushed(), tells_all, changed, ends(), as_floats():
            found: tuple[Any, dict[str, Any]] = opened.from_pretrained(
                source,
                config=config,
                dtype=dtype,
                trust_remote_code=False,
                use_safetensors=True,  # the other kind is a pickle
                ignore_mismatched_sizes=True,  # told below
                output_loading_info=True,
                **named,
            )
        return found

    def unread(error: Exception) -> ConfigError:
        what = f"{source}: {reason(error, vars(config))}"
        if is_out_of_memory(error):
            return model_error(what, "memory for the weights of each process", _FREE_MEMORY)
        return model_error(what, _WHOLE_WEIGHTS, _USE_WHOLE)

    stage = partial(hold, others=others) if others else None
    model, why = None, ""
    if divide is not None:
        try:
            share = partial(_take_share, others, divide, PreTrainedModel.tie_weights)
            # whether two are equal each tells by its own rows: a collective might wait for others
            own = patch.object(modeling_utils, "_tied_params_are_equal", _are_equal_here)
            with own, _without_rows(device):
                model, loaded = read(share, device_map={"": device}, **named)
            model = model if not loaded["mismatched_keys"] and _are_shares(model) else None
            why = "transformers cannot read the rows of each weight apart"
        except Exception as error:
            if is_of_machine(error) or isinstance(error, SafetensorError):
                raise unread(error) from error
            why = reason(error, vars(config))
    if model is None:
        try:
            model, loaded = read(stage, **named)
        except Exception as error:  # of the family's code, of safetensors, of the hub
            raise unread(error) from error
        if why:
            print(f"{source}: each process reads it whole, and keeps its share: {why}")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise with_adapters(source)
    # transformers fills what the files lack, or have in another shape, with random numbers.
    lacking = sorted(loaded["missing_keys"])
    others_ = sorted(name for name, *_ in loaded["mismatched_keys"])
    for what, names in (("lacks", lacking), ("has in another shape", others_)):
        if names:
            given = f"{source} {what} {count_words(len(names), 'weight')}, {names[0]}"
            given += " among them" * (len(names) > 1)
            raise model_error(given, _WHOLE_WEIGHTS, _USE_WHOLE)
    _require_tied(model, source)
    settle(model, dtype)
    if published is not None:
        model.__dict__[_PUBLISHED] = published
        if not is_empty:
            print(
                f"{source}: its weights in {published['quant_method']} are read as bfloat16 ones;"
                " exports of the whole model are not quantized, adapters belong to this checkpoint"
            )
    if with_images(config):
        _find_carried(model, whole, source, revision)
        if not is_empty:  # an export's, which a run has read before
            _tell_carried(model, whole, source)
        return model
    elsewhere = tuple(f"{name}." for name in others)
    unused = sorted(
        key for key in loaded["unexpected_keys"]
        if not (key.startswith(elsewhere) or key.endswith(_OLD_BUFFERS))
    )  # fmt: skip
    if unused:
        print(f"{source}: {len(unused)} tensors are no weights of the model and are left out,"
              f" {unused[0]} among them")  # fmt: skip
    return model


_CARRIED = "furlong_carried"
"""Attribute of a model that holds, by their names in its checkpoint's files, the files of the
tensors that are no weights of its text decoder, and that exports copy."""
_BESIDE = "furlong_beside"
"""Attribute of such a model that holds the files of its processors, `_PROCESSORS`."""
_PROCESSORS = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


def _find_carried(model: Any, whole: Any, source: str, revision: str | None) -> None:
    """Note which tensors and files of a checkpoint an export copies (`_CARRIED`, `_BESIDE`).
    `whole`: the model on meta. Raises ConfigError where files name weights as no export would."""
    files = _tensor_files(source, revision)
    conversions = getattr(model, "_weight_conversions", None) or ()
    whole._weight_conversions = [one for one in conversions if not _packs(one)]
    weights, tied = whole.state_dict(), whole.all_tied_weights_keys
    untied = {name: weight for name, weight in weights.items() if name not in tied}
    if lacking := _as_in_files(whole, untied, are_tied=False).keys() - files.keys():
        given = f"{source} without {min(lacking)}, as an export of its weights would name it"
        raise model_error(given, _WHOLE_WEIGHTS, _USE_WHOLE)
    own = _as_in_files(whole, weights, are_tied=False)
    carried = {name: file for name, file in files.items() if name not in own}
    if _PUBLISHED in model.__dict__:  # beside a weight of the text: its scales
        modules = {name.rpartition(".")[0] for name in own}
        carried = {n: file for n, file in carried.items() if n.rpartition(".")[0] not in modules}
        if scales := [name for name in carried if name.endswith("_scale_inv")]:
            raise model_error(
                f"{source}, whose {scales[0]} belongs to quantized weights beside the text decoder",
                "modules beside the text decoder in floats, as an export without"
                " quantization_config would copy them",
                "use the model's checkpoint in bfloat16",
            )
    model.__dict__[_CARRIED] = carried
    # now, while there is a hub to ask
    beside = [model_file(source, name, revision) for name in _PROCESSORS]
    model.__dict__[_BESIDE] = [file.absolute() for file in beside if file is not None]


def _tell_carried(model: Any, whole: Any, source: str) -> None:
    beside = [name for name, module in whole.named_modules() if isinstance(module, Carried)]
    print(
        f"{source}: its text decoder is trained; {len(model.__dict__[_CARRIED])} tensors beside it"
        f" ({', '.join(beside)}) are carried along, unread, into exports of the whole model"
    )
    if not {file.name for file in model.__dict__[_BESIDE]} & {*_PROCESSORS[:2]}:
        print(f"{source}: neither {' nor '.join(_PROCESSORS[:2])} is there: exports lack them")


_PUBLISHED = "furlong_published"
"""Attribute of a model that holds the quantization_config of the weights that it was read from."""


def _published(source: str, revision: str | None) -> dict[str, Any] | None:
    """Return the quantization_config of a model's files if they are read as floats."""
    from transformers import PreTrainedConfig

    named = {} if revision is None else {"revision": revision}
    values, _ = PreTrainedConfig.get_config_dict(source, **named)
    return quantization_of(values)


def _packs(conversion: Any) -> bool:
    """Whether a conversion of weights as they are read has packed them in 4 bits."""
    return any("Bnb4bit" in type(op).__name__ for op in getattr(conversion, "operations", ()))


def _tensor_files(source: str, revision: str | None) -> dict[str, Path]:
    """The safetensors file of each tensor of a checkpoint."""
    from safetensors import safe_open

    index = None if model_file(source, WEIGHTS, revision) else model_file(source, INDEX, revision)
    found: dict[str, Path] = {}
    for name in [WEIGHTS] if index is None else _shards(index):
        file = model_file(source, name, revision)
        if file is None:
            raise _no_weights(f"{source} without {name}")
        with safe_open(str(file), framework="pt") as opened:
            found |= dict.fromkeys(opened.keys(), file.absolute())
    return found


def _carry(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Put beside the export of a model what its checkpoint has beside its weights: files of its
    processors and, where nothing has changed it, the config."""
    source, revision = model.name_or_path, getattr(model.config, "_commit_hash", None)
    for file in model.__dict__[_BESIDE]:
        (folder / file.name).write_bytes(file.read_bytes())
    config = model_file(source, CONFIG, revision)
    assert config is not None, f"{source} had a {CONFIG} a moment ago"
    values = json.loads(config.read_text(encoding="utf-8"))
    written = str(dtype).removeprefix("torch.")
    places = (values, values.get("text_config") or {})
    kept = [one[key] for one in places for key in ("dtype", "torch_dtype") if one.get(key)]
    with hushed():
        before = read_config(source, revision=revision)
    is_quantized = _PUBLISHED in model.__dict__
    if (
        not is_quantized
        and kept[:1] == [written]
        and (_computing(before.to_dict()) == _computing(model.config.to_dict()))
    ):
        (folder / CONFIG).write_bytes(config.read_bytes())


def _computing(values: Any) -> Any:
    """The values of a config without those that say where it is from and what it is kept in."""
    if not isinstance(values, dict):
        return values
    origin = ("dtype", "transformers_version", "_name_or_path", "architectures")
    return {key: _computing(value) for key, value in values.items() if key not in origin}


def _take_share(
    others: Mapping[str, nn.Module], divide: Callable[[Any], None], tie: Callable[..., None],
    model: Any,
) -> None:  # fmt: skip
    """Shard a model on meta, so that transformers reads only this process's rows of each weight.

    Weights that the model's files lack stay undrawn: they are refused after loading, and to draw
    them a process might have to wait for others. `others`: placeholders for other stages, by name.
    `divide`: function that shards the model. `tie`: `PreTrainedModel.tie_weights`, which
    transformers disables while it loads.
    """
    from transformers import PreTrainedModel

    hold(model, others)
    with patch.object(PreTrainedModel, "tie_weights", tie):
        model.tie_weights(recompute_mapping=False)  # divided apart, one of two would not be trained
    divide(model)
    name = "_move_missing_keys_from_meta_to_device"
    move = getattr(model, name)

    def moved(*given: Any) -> None:
        del vars(model)[name]
        move(*given)
        for parameter in model.parameters():
            parameter._is_hf_initialized = True

    vars(model)[name] = moved


@contextmanager
def _without_rows(device: torch.device | None) -> Iterator[None]:
    """Context manager: let transformers read weights that it stacks from several tensors, also if
    this process has no rows of the result. Without this change such a weight would get no
    tensor."""
    from transformers import core_model_loading as loading

    stack, put = loading.MergeModulelist.convert, loading.set_param_for_module

    def stacked(self: Any, given: dict[str, Any], *patterns: Any, **named: Any) -> Any:
        for name, parts in given.items():
            if isinstance(parts, list) and not parts:
                given[name] = torch.empty(0, 0, 0)  # of as many axes as those that are joined next
        return stack(self, given, *patterns, **named)

    def put_share(model: Any, name: str, value: Tensor, *given: Any) -> None:
        weight = reduce(getattr, name.split("."), model)
        if isinstance(weight, DTensor) and not value.numel() and not weight.to_local().numel():
            value = torch.empty_like(weight.to_local(), device=device)
        put(model, name, value, *given)

    with (
        patch.object(loading.MergeModulelist, "convert", stacked),
        patch.object(loading, "set_param_for_module", put_share),
    ):
        yield


def _are_equal_here(*weights: Tensor) -> bool:
    return torch.equal(*(x.to_local() if isinstance(x, DTensor) else x for x in weights))


def _are_shares(model: Any) -> bool:
    """Whether each weight of the model is sharded, and was read as this process's rows (indices on
    the first axis). Transformers may convert weights as it reads them. Rows stay apart if it stacks
    rows of several weights, or works along other axes; other conversions mix rows."""
    used = getattr(model, "_weight_conversions", None) or ()
    operations = [op for one in used for op in getattr(one, "operations", None) or ()]
    merged = [op for op in operations if type(op).__name__ == "MergeModulelist"]
    axes = [
        [axis for key, axis in vars(op).items() if key in ("dim", "dim0", "dim1")]
        for op in operations
        if op not in merged
    ]
    is_by_rows = not any(op.dim for op in merged) and all(own and min(own) > 0 for own in axes)
    return is_by_rows and all(isinstance(weight, DTensor) for weight in model.parameters())


def _require_tied(model: Any, source: str) -> None:
    """Raise ConfigError if config.json ties the head to the input embeddings, but the model has two
    weights for them. transformers 4 would tie these, transformers 5 does not, and a stage without
    the head could not check."""
    weights = [m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings())]
    if (
        is_tied(model)
        and all(isinstance(w, nn.Parameter) for w in weights)
        and weights[0] is not weights[1]
    ):
        raise model_error(
            f"{source}, with tie_word_embeddings in config.json and two different weights",
            "a config that says whether head and input embeddings are one weight",
            "set model.config: {tie_word_embeddings: false}, or remove the head from the weights",
        )


def _cast(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the weights in `dtype`; tied ones stay one tensor, so that they are written once."""
    casts: dict[int, torch.Tensor] = {}
    return {
        name: casts.setdefault(x.data_ptr(), x.to(dtype)) if x.is_floating_point() else x
        for name, x in model.state_dict().items()
    }


def check_model(
    name: str,
    *,
    revision: str | None = None,
    init: Literal["pretrained", "random"] = "random",
    quantize: str | Mapping[Any, Any] | None = None,
    has_adapters: bool = False,
    changes: Mapping[str, Any] | None = None,
    rope: dict[str, Any] | None = None,
    max_seq_len: int,
) -> None:
    """Raise UserError for a hub id or folder whose model cannot be trained on `max_seq_len` tokens,
    or whose config does not allow `changes`; print the changes.

    The model is built without memory for weights. Only names and headers of weight files are read,
    and only with `init="pretrained"`. The engine's self-check later tests what the forward does.
    """
    source = check_folder(name, revision)
    config = read_config(
        source, revision=revision, changes=changes, rope=rope, max_seq_len=max_seq_len,
        as_floats=True,
    )  # fmt: skip
    model = check_decoder(config, source, quantize, max_seq_len=max_seq_len).base
    plain = read_config(source, revision=revision)  # quantized weights are refused after all else
    is_packed = getattr(config, "quantization_config", None) is not None
    if init == "pretrained":
        check_packed(config, source, quantize, has_adapters=has_adapters)
        published = _published(source, revision)
        check_weight_files(source, are_packed=is_packed or published is not None)
        check_generation(source, revision)
    elif with_images(config):
        print(f"{source}: random weights of its text decoder: exports have nothing beside it")
    if changes:
        whole = model_of_config(plain, source, dtype=torch.float32)
        print(f"model.config: {', '.join(apply_changes(plain, changes))}")
        before, after = ({n: p.shape for n, p in m.named_parameters()} for m in (whole, model))
        others = sorted(dict(before.items() ^ after.items())) if init == "pretrained" else []
        head, _ = _tied_leaves(config, source)
        if others and all(_ends(name, head) and name not in before for name in others):
            # untied: no change of weights if the files hold a head
            held = any(_ends(name, head) for name in _tensor_files(source, revision))
            others = [] if held else others
        if others:
            raise model_error(
                f"model.config with {', '.join(changes)}, which changes the shape of {others[0]}",
                "keys that leave the weights of the model's files as they are",
                "remove what shapes them, or set model.init: random",
                "model.config",
            )
    _check_memory(model, source, is_packed or quantize is not None)


def check_decoder(config: Any, source: str, quantize: object, *, max_seq_len: int) -> HFDecoder:
    """Build a config's decoder on the meta device. Raises UserError if chunks cannot train it."""
    model = model_of_config(config, source, dtype=torch.float32)
    if quantize is not None or getattr(config, "quantization_config", None) is not None:
        require_linear(model, source)
    return HFDecoder(model.train(), max_seq_len=max_seq_len)


def _check_memory(model: torch.nn.Module, source: str, is_packed: bool) -> None:
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    machine_bytes = psutil.virtual_memory().total + psutil.swap_memory().total
    least_bytes = num_weights * (0.5 if is_packed else 2)  # in the smallest dtype
    if least_bytes > machine_bytes:
        dtype = "4 bits" if is_packed else "bfloat16"
        raise model_error(
            f"{format_count(num_weights)} parameters, of which even {dtype} takes"
            f" {format_bytes(int(least_bytes))}",
            f"at most {format_bytes(machine_bytes)}, the memory of this machine, in which a model"
            " is loaded before it goes to a device",
            "use a smaller model or a larger machine; or mend the sizes in config.json",
            f"{source}, config.json",
        )
