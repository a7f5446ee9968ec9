"""A folder with a model: its config.json and neighbours, looked at before transformers obeys them.

What would run code, add weights in silence or end in an error of another library is refused here by
name. Which model a name stands for is told as far as files can tell: nothing here loads torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from furlong.errors import ConfigError, UnsupportedModelError
from furlong.families import for_all_layers

GENERATION = "generation_config.json"
MAX_EXPERTS = 16_384
MAX_LABELS = 1_000_000

MAX_LAYERS = 512
_SIZES = (
    "hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip
_FIXED = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
"""Keys that decide what a forward returns; another value could not be run or exported."""
_DTYPES = ("dtype", "torch_dtype")
# what transformers would obey although only a model's author wrote it
_COMMANDS = {
    "fusion_config": "rewrites the modules of the model's family",
    "transformers_weights": "names another file of weights",
}


def check_config_values(values: Mapping[str, Any], source: str) -> None:
    """Raise UserError for what a config.json, as parsed, must not ask for."""
    where = f"{source}, {CONFIG}"
    for key, value in _entries(values):
        if key == "quantization_config" and value is not None:
            raise _quantized(value, where)
        if key in _COMMANDS and value is not None:
            raise ConfigError(
                given=f"{key} in {CONFIG}, which {_COMMANDS[key]}",
                required="weights and modules as the model's family has them",
                source=where,
                change=f"remove {key} (files of weights are named model.safetensors)",
            )
        if key in _DTYPES and not _is_dtype(value):
            raise _wrong(key, value, "the name of a dtype, such as bfloat16", where)
        if key in _FIXED and value not in (None, _FIXED[key]):
            raise _wrong(
                key, value, f"{key}: {json.dumps(_FIXED[key])}, as every run has it", where
            )
        limit = MAX_LAYERS if key.endswith(("layer", "layers")) else None
        limit = MAX_EXPERTS if key.endswith("experts") else limit
        limit = MAX_LABELS if key == "num_labels" else limit
        if limit is not None and type(value) in (int, float) and value > limit:
            raise _wrong(key, value, f"at most {limit:,}", where)


def check_sizes(config: Any, source: str) -> None:
    """Raise ConfigError where a transformers config has sizes below 1."""
    text = config.get_text_config()
    where = f"{source}, {CONFIG}"
    for key in _SIZES:
        value = for_all_layers(text, key)
        if isinstance(value, int) and value < 1:
            raise _wrong(key, value, "a whole number of at least 1", where)
    heads = for_all_layers(text, "num_attention_heads")
    key_value_heads = for_all_layers(text, "num_key_value_heads")
    if isinstance(heads, int) and isinstance(key_value_heads, int) and heads % key_value_heads:
        required = f"a divisor of num_attention_heads = {heads}"
        raise _wrong("num_key_value_heads", key_value_heads, required, where)


def check_generation(source: str) -> None:
    """Raise ConfigError for a generation_config.json in a folder that cannot be read or written."""
    from transformers import GenerationConfig

    if not (Path(source) / GENERATION).exists():
        return
    try:
        with TemporaryDirectory() as folder:
            GenerationConfig.from_pretrained(source).save_pretrained(folder)
    except Exception as error:  # transformers' own checks, which grow with every release
        raise ConfigError(
            given=f"{source}, {GENERATION}: {reason(error)}",
            required="a file that transformers can read, for the export has it too",
            source="model.name",
            change=f"mend {GENERATION}, or remove it",
        ) from error


def reason(error: BaseException, values: Mapping[str, Any] | None = None) -> str:
    """One line that says what went wrong in another library, and with which of a config's values.

    `values`: the parsed config.json, if there is one.
    """
    text = " ".join(str(error).split())
    if isinstance(error, KeyError) and error.args:
        for key, value in _entries(values or {}):
            if value == error.args[0]:
                return f"{key} = {value!r}, which transformers does not know"
    if not text or isinstance(error, (LookupError, AttributeError, TypeError, AssertionError)):
        text = f"{type(error).__name__} {text}".strip()
    return text if len(text) <= 300 else text[:300] + " ..."


def _entries(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All keys with their values, those of objects inside included."""
    stack: list[Any] = [values]
    while stack:
        for key, value in stack.pop().items():
            yield str(key), value
            if isinstance(value, Mapping):
                stack.append(value)


def _is_dtype(value: Any) -> bool:
    if value in (None, "auto") or isinstance(value, Mapping):
        return True
    import torch

    name = str(value).removeprefix("torch.")
    return isinstance(getattr(torch, name, None), torch.dtype)


def _quantized(value: Any, where: str) -> UnsupportedModelError:
    method = value.get("quant_method") if isinstance(value, Mapping) else None
    return UnsupportedModelError(
        given=f"quantized weights: quantization_config with quant_method {method or 'unnamed'}",
        required="weights in float: neither quantized weights nor adapters over them (QLoRA) are"
        " trained",
        source=where,
        change="use the model's checkpoint in bfloat16 or float32, usually the one that the"
        " quantized one was made of; model.lora trains adapters over it",
    )


def _wrong(key: str, value: Any, required: str, where: str) -> ConfigError:
    return ConfigError(
        given=f"{key} = {value!r}"[:200],
        required=required,
        source=where,
        change=f"mend {CONFIG}, or use the model's own",
    )


CONFIG, ADAPTER = "config.json", "adapter_config.json"


def check_folder(name: str) -> str:
    """The folder that `name` stands for, or `name` itself if it is a hub id. Raises ConfigError."""
    folder = Path(name).expanduser()
    if os.path.isdir(folder):
        return str(folder)
    check_name(name)
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        change = "check the path; it is relative to the folder you call furlong from"
        raise _no_model(f"{name}: no such folder", change)
    return name


def check_name(name: str, source: str = "model.name") -> None:
    """Raises ConfigError for a name that is neither a folder's nor a hub id: a file, an address, an
    id with a revision."""
    path = Path(name).expanduser()
    if "://" in name:
        given, change = f"{name}, an address", "write the id as the hub shows it: owner/name"
        parts = name.partition("://")[2].split("/")
        if parts[0] in ("huggingface.co", "hf.co") and len(parts) >= 3:
            change = f"write {'/'.join(parts[1:3])}"
    elif os.path.isfile(path):
        given, change = f"{name}, a file", f"name its folder: {path.parent}"
    elif "@" in name and not os.path.exists(path) and name.count("/") == 1:
        owned, _, revision = name.partition("@")
        given = f"{name}, an id with a revision"
        change = f"hf download {owned} --revision {revision} --local-dir DIR, and name DIR"
    else:
        return
    raise _no_model(given, change, source)


def _no_model(given: str, change: str, source: str = "model.name") -> ConfigError:
    required = "a folder with config.json, or a hub id such as Qwen/Qwen2.5-0.5B"
    return ConfigError(given=given, required=required, source=source, change=change)


def check_files(name: str) -> None:
    """Raises ConfigError for a name that is neither a hub id nor a folder with a config.json that
    can be read."""
    folder = Path(check_folder(name))
    if not os.path.isdir(folder):
        return
    check_folder_files(folder)
    try:
        if isinstance(json.loads((folder / CONFIG).read_text(encoding="utf-8")), dict):
            return
        what = "no JSON object"
    except (OSError, ValueError, RecursionError) as error:
        what = str(error)
    raise ConfigError(
        given=f"{folder}, {CONFIG}: {what}",
        required="the config of a Hugging Face model",
        source="model.name",
        change=f"mend {CONFIG}, or use the model's own",
    )


def check_folder_files(folder: Path) -> None:
    """Raise ConfigError for a folder that is not one whole model with a config.json."""
    config = folder / CONFIG
    if (folder / ADAPTER).exists():
        raise with_adapters(str(folder), beside_config=config.exists())
    if not config.is_file():
        raise ConfigError(
            given=f"{folder} without {CONFIG}",
            required="the folder of a Hugging Face model",
            source="model.name",
            change=f"point model.name at the folder that holds {CONFIG}",
        )
    check_readable(config)


def check_export_folder(folder: Path) -> None:
    """Raises ConfigError if there is something already."""
    if folder.exists():
        raise ConfigError(
            given=f"{folder} exists",
            required="a new folder",
            source="the export",
            change="move it away or choose another one",
        )


def with_adapters(source: str, *, beside_config: bool = True) -> ConfigError:
    """The error for a folder or hub id that holds adapters."""
    return ConfigError(
        given=f"{source}: adapters ({ADAPTER})"
        + (f" beside {CONFIG}" if beside_config else f", without {CONFIG}"),
        required="the folder of a whole model: adapters are not trained further",
        source="model.name",
        change="merge them first: furlong export RUN --merge, and name the folder that it writes"
        " (another library's adapters: peft's merge_and_unload)",
    )


def check_readable(file: Path) -> None:
    """Raise ConfigError for a file that cannot be read."""
    try:
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise OSError(0, "no file but a pipe or a device")  # it might never end
        with file.open("rb") as opened:
            opened.read(1)
    except OSError as error:
        raise ConfigError(
            given=f"{file}: {error.strerror}",
            required="a file that can be read",
            source="model.name",
            change="make it a file that you may read, or copy the model to a place of your own",
        ) from error
