"""A model's files of weights, looked at before transformers reads them: only their headers are."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from furlong.errors import ConfigError
from furlong.models.folders.files import reason
from furlong.models.folders.folder import check_readable

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FLOATS = ("F64", "F32", "F16", "BF16")
_INEXACT = ("F8", "F6", "F4", "C64", "C128")
_DISTRIBUTED = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")


def check_weights(source: str) -> None:
    """Raise ConfigError unless the safetensors files of a folder or hub id are all there, readable
    and whole. The files of a hub id are downloaded later; of them only the index is read."""
    folder = Path(source)
    if not folder.is_dir():
        _check_hub_index(source)
        return
    if any(_DISTRIBUTED.fullmatch(path.name) for path in folder.iterdir()):
        raise _no_weights(
            f"{folder} holds a distributed checkpoint (shard-*-model-*.safetensors)",
            "write the weights with save_pretrained into another folder",
        )
    if os.path.lexists(folder / WEIGHTS):  # also a link that leads nowhere
        names = [WEIGHTS]
    elif os.path.lexists(folder / INDEX):
        names = _shards(folder / INDEX)
    else:
        raise _without_safetensors(folder)
    missing = [name for name in names if not (folder / name).exists()]
    if missing and names != [WEIGHTS]:
        raise _no_weights(
            f"{folder} without {len(missing)} of the {len(names)} files that {INDEX} lists,"
            f" {missing[0]} among them",
            "download or copy the whole model once more",
        )
    for name in names:
        _check_header(folder / name)


def _check_header(file: Path) -> None:
    """Raise ConfigError for a safetensors file that is unreadable, cut off or something else."""
    from safetensors import SafetensorError, safe_open

    check_readable(file)
    try:
        with safe_open(str(file), framework="pt") as opened:
            dtypes = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise _no_weights(
            f"{file}, which is cut off or no safetensors file: {reason(error)}",
            "download or copy the file once more",
        ) from error
    for name, dtype in dtypes.items():
        # buffers, such as masks of old families, may be of any other kind
        if dtype not in _FLOATS and (name.endswith("weight") or dtype.startswith(_INEXACT)):
            raise _no_weights(
                f"{file}, whose {name} is of dtype {dtype}: quantized, or no float at all",
                "use the model's checkpoint in bfloat16 or float32",
            )


def _shards(index: Path) -> list[str]:
    """The names of the files that an index lists, sorted. Raises ConfigError."""
    check_readable(index)
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(listed.values()))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _no_weights(
            f"{index}, which is no index of weights: {reason(error)}",
            "download or copy the file once more",
        ) from error
    for name in names:
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
        ):
            raise _no_weights(
                f"{index}, which lists {name!r}",
                "keep the weights as .safetensors files beside the index",
            )
    if not names:
        raise _no_weights(f"{index}, which lists no file", "download or copy the file once more")
    return names


def _check_hub_index(hub_id: str) -> None:
    from transformers.utils import cached_file

    try:
        index = cached_file(
            hub_id, INDEX,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )  # fmt: skip
    except Exception:  # whatever is wrong with the hub, the download itself says better
        return
    if index is not None:
        _shards(Path(index))


def _without_safetensors(folder: Path) -> ConfigError:
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith(_PICKLES) and name != "training_args.bin"]
    others = [name for name in names if name.endswith((".safetensors", ".gguf", ".npz"))]
    if pickles:
        return _no_weights(
            f"{folder} without {WEIGHTS}; {pickles[0]} is a pickle, which is not read, for it can"
            " hold a program",
            "convert it, if you trust it, with transformers: AutoModelForCausalLM"
            f".from_pretrained({str(folder)!r}).save_pretrained(NEW_FOLDER)",
        )
    if others:
        return _no_weights(
            f"{folder} without {WEIGHTS} or {INDEX}; there is {', '.join(others[:3])}",
            "use the folder that save_pretrained of transformers writes",
        )
    return _no_weights(f"{folder} without {WEIGHTS}", "use a folder with weights")


def _no_weights(given: str, change: str) -> ConfigError:
    return ConfigError(
        given=given,
        required="weights (safetensors)",
        source="model.name",
        change=f"{change}; or set model.init: random",
    )
