"""Read the adapter_config.json of a saved PEFT LoRA adapter as keys of `model.lora`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from furlong.errors import ConfigError, refusal

ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEYS = {
    "rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora",
    "target_modules": "target_modules", "target_parameters": "target_parameters",
    "modules_to_save": "modules_to_save",
}  # fmt: skip
_PLAIN = {
    "bias": "none", "init_lora_weights": True, "fan_in_fan_out": False, "lora_bias": False,
    "use_qalora": False, "megatron_config": None, "layer_replication": None,
    "alora_invocation_tokens": None, "use_bdlora": None,
    "arrow_config": None, "kasa_config": None, "velora_config": None, "monteclora_config": None,
    "lora_ga_config": None, "corda_config": None, "eva_config": None,
}  # fmt: skip
"""Keys of PEFT with their values in plain LoRA or DoRA; other values change what is trained."""


def adapter_file(adapter: str, name: str) -> str:
    """Return the path of a file in an adapter's folder, or downloaded from its repository on the
    Hub. Raises ConfigError if there is none."""
    folder = os.path.expanduser(adapter)
    required = f"a folder, or a repository of the hub, with {ADAPTER} and {ADAPTER_WEIGHTS}"
    change = "name the folder that peft's save_pretrained wrote; of a run, OUT/model"
    if os.path.isdir(folder) or adapter.count("/") != 1 or adapter.startswith((".", "~", "/")):
        file = os.path.join(folder, name)
        if os.path.isfile(file):
            return file
        what = f"{adapter} without {name}" if os.path.isdir(folder) else f"{adapter}: no folder"
        raise refusal(what, required, change, "model.lora.adapter")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return str(hf_hub_download(adapter, name))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        what = f"{adapter}: {str(error).splitlines()[0]}"
        change = "check the name or the network, or give a local folder"
        raise refusal(what, required, change, "model.lora.adapter") from error


def with_keys_of_adapter(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `model.lora`, completed with the settings of the adapter that it names. Raises
    ConfigError for values that differ from the adapter's, and for an adapter that is not LoRA."""
    adapter = given["adapter"]
    file = adapter_file(adapter, ADAPTER)
    try:
        with open(file, encoding="utf-8") as opened:
            theirs = json.load(opened)
        kind = theirs["peft_type"]
        own = {key: theirs.get(name) for key, name in _KEYS.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _told(file, f"{file}: {error}", "the config of an adapter of peft") from error
    if theirs.get("init_lora_weights") == "gaussian":  # plain LoRA, whatever its initial weights
        theirs["init_lora_weights"] = True
    odd = [name for name, plain in _PLAIN.items() if (theirs.get(name) or plain) != plain]
    if kind != "LORA" or odd:
        what = f"{odd[0]} = {theirs[odd[0]]!r}" if odd else f"adapters of type {kind}"
        raise _told(file, f"{adapter} with {what}", "plain LoRA, or DoRA")
    for key in ("target_modules", "target_parameters", "modules_to_save"):
        if not isinstance(own[key], str):
            own[key] = sorted(own[key] or ())
    own["rslora"] = bool(own["rslora"])
    for key in own.keys() & given.keys():
        if not _equal(given[key], own[key]):
            raise refusal(
                f"model.lora.{key} = {given[key]!r} with an adapter whose {_KEYS[key]} is"
                f" {_last(own[key]) if isinstance(own[key], list) else own[key]!r}",
                "the adapter's own",
                f"remove model.lora.{key}, or model.lora.adapter to begin with new adapters",
                f"model.lora.{key}, and {file}",
            )
    return {"dropout": theirs.get("lora_dropout", 0.0)} | own | dict(given)


def _equal(given: Any, own: Any) -> bool:
    """Return whether a given value, which may be the text of a flag, equals the adapter's."""
    if isinstance(own, list):
        return _last([given] if isinstance(given, str) else given or ()) == _last(own)
    if isinstance(own, bool):
        return str(given).lower() == str(own).lower()
    try:
        return given == own or float(given) == float(own)
    except (TypeError, ValueError):
        return False


def _last(names: Iterable[str]) -> list[str]:
    """Return the last parts of dotted module names, sorted, each once: PEFT writes whole names."""
    return sorted({str(name).rpartition(".")[2] for name in names})


def _told(file: str, given: str, required: str) -> ConfigError:
    change = "begin with new adapters, or merge these into the model and name that"
    return refusal(given, required, change, f"model.lora.adapter, {file}")
