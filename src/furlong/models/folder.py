"""Check a model's folder, its config.json and other files before transformers reads them.

Settings that would run code, add weights silently or end in another library's error are refused by
name. Nothing here imports torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from furlong.config.adapter import ADAPTER
from furlong.errors import ConfigError, UnsupportedModelError
from furlong.families import for_all_layers
from furlong.files import read_object

CONFIG, GENERATION = "config.json", "generation_config.json"
_LIMITS = ((("layer", "layers"), 512), (("experts",), 16_384), (("num_labels",), 1_000_000))
"""(ends of keys, largest value): larger models could not even be listed."""
_SIZES = (
    "hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip
# keys that transformers would obey, though only the model's author asked for them
_COMMANDS = {
    "fusion_config": "rewrites the modules of the model's family",
    "transformers_weights": "names another file of weights",
}
_MEND = f"mend {CONFIG}, or use the model's own"
_READ = ("fp8", "mxfp4")
"""Values of quant_method whose weights are dequantized as they are read (models.published)."""


def model_error(
    given: str, required: str, change: str = _MEND, source: str = "model.name"
) -> ConfigError:
    """Return an error about a model's folder, file or value. It says what was `given` and what is
    `required`, where the value comes from (`source`), and how to `change` it."""
    return ConfigError(given=given, required=required, source=source, change=change)


def check_config_values(values: Mapping[str, Any], source: str) -> None:
    """Raise UserError for keys and values that a parsed config.json must not have."""
    where = f"{source}, {CONFIG}"
    for key, value in _entries(values):
        if key in _COMMANDS and value is not None:
            required = "weights and modules as the model's family has them"
            given = f"{key} in {CONFIG}, which {_COMMANDS[key]}"
            raise model_error(given, required, f"remove {key}", where)
        for ends, limit in _LIMITS:
            if key.endswith(ends) and type(value) in (int, float) and value > limit:
                raise model_error(f"{key} = {value!r}", f"at most {limit:,}", source=where)


def check_type(values: Mapping[str, Any], known: Container[str], source: str) -> None:
    """Raise UnsupportedModelError for a model type that is not in `known`."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind in known:
        return
    has_code = "auto_map" in values
    raise UnsupportedModelError(
        given=f"model type {kind}, " + (
            "whose code lies beside the model (auto_map) and is not run" if has_code
            else "which the installed transformers does not know"),
        required="a model type of transformers, whose own code computes it",
        source=f"{source}, {CONFIG}",
        change="use a conversion of the model to a type of transformers, whose name often ends in"
        " -hf, or train a model of another family",
    )  # fmt: skip


def check_floats(values: Mapping[str, Any], source: str) -> None:
    """Raise UnsupportedModelError if a parsed config.json names quantized weights that are neither
    4-bit weights of bitsandbytes nor read as floats."""
    for key, value in _entries(values):
        is_known = value is None or is_in_4_bits(value) or is_read_as_floats(value)
        if key == "quantization_config" and not is_known:
            method = value.get("quant_method") if isinstance(value, Mapping) else None
            raise UnsupportedModelError(
                given=f"quantized weights: {key} with quant_method {method or 'unnamed'}",
                required="weights in float, in fp8 or mxfp4, or in the 4 bits of bitsandbytes"
                " (load_in_4bit) under adapters",
                source=f"{source}, {CONFIG}",
                change="use the model's checkpoint in bfloat16 or float32, usually the one that the"
                " quantized one was made of; model.quantize: nf4 makes 4 bits of it",
            )


def is_in_4_bits(quantization: object) -> bool:
    """Whether the quantization_config of a config.json is 4-bit bitsandbytes."""
    return (
        isinstance(quantization, Mapping)
        and quantization.get("quant_method", "bitsandbytes") == "bitsandbytes"
        and quantization.get("load_in_4bit") is True
    )


def is_read_as_floats(quantization: object) -> bool:
    """Whether the quantization_config of a config.json is one whose weights are dequantized as they
    are read."""
    return isinstance(quantization, Mapping) and quantization.get("quant_method") in _READ


def quantization_of(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the quantization_config of a parsed config.json whose weights are dequantized as they
    are read, as transformers looks for it; None for other weights."""
    for own in (values, values.get("text_config") or {}):
        found = own.get("quantization_config")
        if found is not None and is_read_as_floats(found):
            return dict(found)
    return None


def check_sizes(config: Any, source: str) -> None:
    """Raise ConfigError for sizes below 1, and for key-value heads that do not divide the query
    heads."""
    values = {key: for_all_layers(config.get_text_config(), key) for key in _SIZES}
    where = f"{source}, {CONFIG}"
    for key, value in values.items():
        if isinstance(value, int) and value < 1:
            raise model_error(f"{key} = {value}", "a whole number of at least 1", source=where)
    heads, groups = values["num_attention_heads"], values["num_key_value_heads"]
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        required = f"a divisor of num_attention_heads = {heads}"
        raise model_error(f"num_key_value_heads = {groups}", required, source=where)


def check_generation(source: str, revision: str | None = None) -> None:
    """Raise ConfigError if transformers cannot read and write the generation_config.json of a
    folder or hub id."""
    from transformers import GenerationConfig

    if model_file(source, GENERATION, revision) is None:
        return
    try:
        with TemporaryDirectory() as folder:
            kept = GenerationConfig.from_pretrained(source, revision=revision or "main")
            kept.save_pretrained(folder)
    except Exception as error:  # transformers' own checks, which grow with every release
        raise model_error(
            f"{source}, {GENERATION}: {reason(error)}",
            "a file that transformers can read, for the export has it too",
            f"mend {GENERATION}, or remove it",
        ) from error


def model_file(source: str, name: str, revision: str | None = None) -> Path | None:
    """Return the path of a file of a folder or hub id (downloaded), or None if it is missing."""
    from transformers.utils import cached_file

    if os.path.isdir(source):
        file = Path(source) / name
        return file if file.exists() else None
    with suppress(OSError):  # neither in the cache nor at the hub
        found = cached_file(source, name, revision=revision or "main")
        return None if found is None else Path(found)
    return None


@contextmanager
def hushed(*, is_reading: bool = True) -> Iterator[None]:
    """Context manager: silence transformers' warnings, whose causes are errors here, and hide its
    progress bars unless it is reading and stderr is a terminal."""
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


def reason(error: BaseException, values: Mapping[str, Any] | None = None) -> str:
    """Return one line about an error of another library, with the config value that caused it.

    `values`: the parsed config.json, if there is one.
    """
    text = " ".join(str(error).split())
    if isinstance(error, KeyError) and error.args:
        for key, value in _entries(values or {}):
            if value == error.args[0]:
                return f"{key} = {value!r}, which transformers does not know"
    if not text or isinstance(error, (LookupError, AttributeError, TypeError, AssertionError)):
        text = f"{type(error).__name__} {text}".strip()
    if len(text) > 300:  # keep whole sentences
        text = (text[:300].rpartition(". ")[0] or text[:1000].partition(". ")[0]).rstrip(".") + "."
    return text


def _entries(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all keys with their values, including those of nested objects."""
    stack: list[Any] = [values]
    while stack:
        for key, value in stack.pop().items():
            yield str(key), value
            if isinstance(value, Mapping):
                stack.append(value)


_REQUIRED = "a folder with config.json, or a hub id such as Qwen/Qwen2.5-0.5B"


def check_folder(name: str, revision: str | None = None) -> str:
    """Return the folder that `name` denotes, or `name` itself if it is a hub id.

    Raises ConfigError for any other name, and for a `revision` of a folder.
    """
    folder = Path(name).expanduser()
    if os.path.isdir(folder):
        if revision is not None:
            raise model_error(
                f"model.revision = {revision} with {name}, a folder",
                "model.revision beside a hub id alone",
                "remove model.revision, or name the hub id",
                "model.revision",
            )
        return str(folder)
    check_name(name)
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        change = "check the path; it is relative to the folder you call furlong from"
        raise model_error(f"{name}: no such folder", _REQUIRED, change)
    return name


def check_name(name: str, source: str = "model.name") -> None:
    """Raise ConfigError for a name that is a file, a URL, or a hub id with a revision."""
    path = Path(name).expanduser()
    if "://" in name:
        parts = [*name.partition("://")[2].split("/"), "owner", "name"]
        given, change = f"{name}, an address", f"write {'/'.join(parts[1:3])}, as the hub shows it"
    elif os.path.isfile(path):
        given, change = f"{name}, a file", f"name its folder: {path.parent}"
    elif "@" in name and not os.path.exists(path) and name.count("/") == 1:
        owned, _, revision = name.partition("@")
        given = f"{name}, an id with a revision"
        change = f"write name: {owned} and revision: {revision}"
    else:
        return
    raise model_error(given, _REQUIRED, change, source)


def check_files(name: str, revision: str | None = None) -> None:
    """Raise ConfigError for a name that is neither a hub id nor a folder with a readable
    config.json."""
    folder = Path(check_folder(name, revision))
    if not os.path.isdir(folder):
        return
    check_folder_files(folder)
    read_object(folder / CONFIG, source="model.name", change=_MEND)


def check_folder_files(folder: Path, source: str = "model.name") -> None:
    """Raise ConfigError for a folder that is not one whole model with a config.json."""
    if (folder / ADAPTER).exists():
        raise with_adapters(str(folder))
    if not (folder / CONFIG).is_file():
        change = f"point {source} at the folder that holds {CONFIG}"
        required = "the folder of a Hugging Face model"
        raise model_error(f"{folder} without {CONFIG}", required, change, source)
    check_readable(folder / CONFIG)


def check_export_folder(folder: Path) -> None:
    """Raise ConfigError if the folder for an export exists already."""
    if folder.exists():
        change = "move it away or choose another one"
        raise model_error(f"{folder} exists", "a new folder", change, "the export")


def with_adapters(source: str) -> ConfigError:
    """Return the error for a folder or hub id that holds adapters in place of a model."""
    return model_error(
        f"{source}: adapters ({ADAPTER})",
        "the folder of a whole model, whose adapters model.lora.adapter names",
        f"name their base, and set model.lora.adapter to {source} to go on from them",
    )


def check_readable(file: Path) -> None:
    """Raise ConfigError for a file that cannot be read."""
    try:
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise OSError(0, "no file but a pipe or a device")  # a read might never end
        with file.open("rb") as opened:
            opened.read(1)
    except OSError as error:
        change = "make it a file that you may read, or copy the model to a place of your own"
        raise model_error(f"{file}: {error.strerror}", "a file that can be read", change) from error
