"""Models in and out: from a hub id or folder to a trainable model, and back to a folder.

Trained weights are float32 (float64 if that is asked for), frozen weights have the compute's dtype.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import nn

from furlong.errors import ConfigError, UnsupportedModelError, UserError
from furlong.families import family_of
from furlong.models.adapters import add_adapters, add_adapters_to_stage
from furlong.models.folders.files import (
    check_config_values,
    check_generation,
    check_sizes,
    reason,
)
from furlong.models.folders.folder import (
    check_export_folder,
    check_folder,
    check_folder_files,
    with_adapters,
)
from furlong.models.folders.random_weights import draw_adapters, draw_weights
from furlong.models.folders.weights import check_weights
from furlong.models.held import hold, holding_class, stand_ins
from furlong.models.rope import apply_rope, check_length, check_rope
from furlong.models.support import refuse_config

BASE = "base"
"""The folder of an export of adapters that holds the changed config of their base."""
_BASE_TOLD = (
    "the adapters belong to their base with another RoPE (model.rope), which peft, transformers"
    " and others that read adapter_config.json do not set: load them with"
    " AutoModelForCausalLM.from_pretrained('{folder}',"
    " config=AutoConfig.from_pretrained('{folder}/{base}')), or merge them: furlong export RUN"
    " --merge"
)
# Attention and experts are transformers' default (SDPA, or eager where a family has none) whatever
# config.json asks for: a name there could be that of a kernel on a hub, or a missing package.
_OWN_KERNELS: dict[str, Any] = {"attn_implementation": None, "experts_implementation": None}


def build_model(
    name: str,
    *,
    init: Literal["pretrained", "random"] = "pretrained",
    dtype: torch.dtype = torch.float32,
    lora: dict[str, Any] | None = None,
    rope: dict[str, Any] | None = None,
    max_seq_len: int | None = None,
    seed: int = 0,
    layers: range | None = None,
) -> Any:
    """A transformers decoder in train mode.

    `name` is a hub id or a local folder; `init="random"` needs config.json only and draws from
    `seed`, each module by its name. `lora` holds `rank`, `alpha`, `dropout`, `target_modules` and
    freezes everything else. `rope` holds `rope_type` and its keys (models.rope); `max_seq_len` is
    the run's longest sequence, for which the model must have positions. `layers`: those that this
    process holds (None: all); nothing of other stages is built or read (models.held).
    Raises ConfigError or UnsupportedModelError.
    """
    source = check_folder(name)
    trained_dtype = torch.promote_types(dtype, torch.float32)
    loaded_dtype = trained_dtype if lora is None else dtype
    config = read_config(source, rope=rope, max_seq_len=max_seq_len)
    with torch.random.fork_rng(devices=[]):
        if init == "random":
            model = model_of_config(config, source, dtype=loaded_dtype)
            if layers is not None:
                hold(model, stand_ins(model, layers))
            draw_weights(model, seed, torch.device("cpu"))
        else:
            model = _load_weights(source, config, loaded_dtype, layers)
        if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the others know no float64
        if lora is not None and layers is None:
            model = add_adapters(model, lora)
        elif lora is not None:
            whole = model_of_config(config, source, dtype=loaded_dtype)
            model = add_adapters_to_stage(model, lora, whole)
        draw_adapters(model, seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(trained_dtype)
    return model.train()


def export_model(
    model: Any,
    tokenizer: Any,
    folder: str | Path,
    *,
    dtype: torch.dtype,
    rope: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a folder that transformers (or, for adapters, peft) loads; returns it.

    Weights are written in `dtype`. `rope` is what has changed the model's own: of adapters, which
    have no place for it, the folder `BASE` holds the config of their base, and this is told. The
    folder appears whole or not at all. Raises ConfigError if it is there already.
    """
    folder = Path(folder)
    check_export_folder(folder)
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        _write_model(model, aside, dtype)
        if has_other_base := rope is not None and hasattr(model, "peft_config"):
            model.get_base_model().config.save_pretrained(aside / BASE)
            with (aside / "README.md").open("a", encoding="utf-8") as card:
                card.write(f"\n{_BASE_TOLD.format(folder=folder.name, base=BASE)}\n")
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    if has_other_base:
        print(f"warning: {_BASE_TOLD.format(folder=folder, base=BASE)}")
    return folder


def _write_model(model: Any, folder: Path, dtype: torch.dtype) -> None:
    is_adapter = hasattr(model, "peft_config")
    with _hushed(is_reading=False):
        if is_adapter:
            for adapters in model.peft_config.values():
                base = adapters.base_model_name_or_path or ""
                if os.path.isdir(base):  # a relative one would be another folder elsewhere
                    adapters.base_model_name_or_path = os.path.abspath(base)
            model.save_pretrained(folder)
        else:
            model.save_pretrained(folder, state_dict=_cast(model, dtype))
    if not is_adapter:
        # transformers notes the dtype of the weights in memory, not of those it was handed.
        text = (folder / "config.json").read_text(encoding="utf-8")
        config = json.loads(text) | {"dtype": str(dtype).removeprefix("torch.")}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_config(
    source: str, *, rope: dict[str, Any] | None = None, max_seq_len: int | None = None
) -> Any:
    """The transformers config of a hub id or folder, with `rope` written into it.

    Raises ConfigError, also if the model has fewer positions than `max_seq_len`.
    """
    from transformers import AutoConfig, PreTrainedConfig

    if Path(source).is_dir():
        check_folder_files(Path(source))
    values: dict[str, Any] = {}
    try:
        values, _ = PreTrainedConfig.get_config_dict(source)
        check_config_values(values, source)
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **_OWN_KERNELS)
        refuse_config(config, f"model type {config.model_type}", f"{source}, config.json")
        check_sizes(config, source)
        check_rope(config, source)
        if rope is not None:
            apply_rope(config, rope, max_seq_len=max_seq_len)
        if max_seq_len is not None:
            check_length(config, max_seq_len, has_rope=rope is not None)
    except UserError:
        raise
    except Exception as error:  # a family's own code may make anything of a broken file
        raise ConfigError(
            given=f"{source}, config.json: {reason(error, values)}",
            required="a model whose config.json transformers can read without remote code",
            source="model.name",
            change="mend config.json, or use the model's own"
            if Path(source).exists()
            else "check the name, the connection to the hub, or use a local folder",
        ) from error
    return config


def model_of_config(config: Any, source: str, *, dtype: torch.dtype) -> Any:
    """The whole model of a config, on meta: without memory for its weights.

    Raises UnsupportedModelError if transformers knows none, and ConfigError if it cannot build or
    write one of this config.
    """
    from transformers import AutoModelForCausalLM

    _check_kind(config, source)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **_OWN_KERNELS)
        # What cannot be written would be found out when the run exports its model.
        with TemporaryDirectory() as folder:
            model.config.save_pretrained(folder)
        return model
    except Exception as error:  # a family's own code may make anything of wrong sizes
        raise ConfigError(
            given=f"{source}, config.json: {reason(error, vars(config))}",
            required="sizes and names of which transformers can build the model",
            source="model.name",
            change="mend config.json, or use the model's own",
        ) from error


def _check_kind(config: Any, source: str) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    refused = family_of(config.model_type).refused
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or refused:
        raise UnsupportedModelError(
            given=f"model type {config.model_type}" + (f", which {refused}" if refused else ""),
            required="a decoder with causal attention that AutoModelForCausalLM knows",
            source=f"{source}, config.json",
            change="choose a causal language model",
        )


def _load_weights(source: str, config: Any, dtype: torch.dtype, layers: range | None) -> Any:
    from transformers import AutoModelForCausalLM

    _check_kind(config, source)
    check_weights(source)
    check_generation(source)
    opened: Any = AutoModelForCausalLM
    others: dict[str, nn.Module] = {}
    if layers is not None:
        whole = model_of_config(config, source, dtype=dtype)
        others, config = stand_ins(whole, layers), whole.config
        opened = holding_class(type(whole), others)
    try:
        with _hushed():
            model, loaded = opened.from_pretrained(
                source,
                config=config,
                dtype=dtype,
                trust_remote_code=False,
                use_safetensors=True,  # the other kind is a pickle
                ignore_mismatched_sizes=True,  # told below
                output_loading_info=True,
                **_OWN_KERNELS,
            )
    except Exception as error:  # of the family's code, of safetensors, of the hub
        raise ConfigError(
            given=f"{source}: {reason(error, vars(config))}",
            required="weights (safetensors) of the model that config.json describes",
            source="model.name",
            change="use a folder with whole weights and its own config.json, or set"
            " model.init: random",
        ) from error
    if getattr(model, "_hf_peft_config_loaded", False):
        raise with_adapters(source)
    # transformers fills what the files lack, or have in another shape, with random numbers.
    for what, names in (
        ("lacks", sorted(loaded["missing_keys"])),
        ("has in another shape", sorted(name for name, *_ in loaded["mismatched_keys"])),
    ):
        if names:
            raise ConfigError(
                given=f"{source} {what} {len(names)} weights, {names[0]} among them",
                required="every weight of the model, as its config.json says",
                source="model.name",
                change="use the whole model's folder, or model.init: random",
            )
    if layers is not None:
        model.__class__ = type(whole)
        _require_tied(model, source)
    elsewhere = tuple(f"{name}." for name in others)
    if unused := sorted(key for key in loaded["unexpected_keys"] if not key.startswith(elsewhere)):
        print(f"{source}: {len(unused)} tensors are no weights of the model and are left out,"
              f" {unused[0]} among them")  # fmt: skip
    return model


def _require_tied(model: Any, source: str) -> None:
    """Raise ConfigError for a stage with a head of its own where config.json has it tied: the first
    stage, which has no head, could not know."""
    tied: Any = model.config.get_text_config().tie_word_embeddings
    weights = [m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings())]
    if tied and all(isinstance(w, nn.Parameter) for w in weights) and weights[0] is not weights[1]:
        raise ConfigError(
            given=f"{source}, with tie_word_embeddings in config.json and two different weights",
            required="a config that says whether head and input embeddings are one weight, for a"
            " pipeline of several stages",
            source="model.name",
            change="set tie_word_embeddings to false in config.json",
        )


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


@contextmanager
def _hushed(*, is_reading: bool = True) -> Iterator[None]:
    """Without transformers' reports, which are told as errors here, and without bars but for a
    reading on a terminal."""
    from transformers.utils import logging

    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not (is_reading and sys.stderr.isatty()):
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()
