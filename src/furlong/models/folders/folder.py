"""Which model a name stands for, as far as files can tell: nothing here loads torch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from furlong.errors import ConfigError

CONFIG, ADAPTER = "config.json", "adapter_config.json"


def check_folder(name: str) -> str:
    """The folder that `name` stands for, or `name` itself if it is a hub id. Raises ConfigError."""
    check_python()
    folder = Path(name).expanduser()
    if os.path.isdir(folder):
        return str(folder)
    check_name(name)
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ConfigError(
            given=f"{name}: no such folder",
            required="a folder with config.json, or a hub id such as Qwen/Qwen2.5-0.5B",
            source="model.name",
            change="check the path; it is relative to the folder you call furlong from",
        )
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
    raise ConfigError(
        given=given,
        required="a folder with config.json, or a hub id such as Qwen/Qwen2.5-0.5B",
        source=source,
        change=change,
    )


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


def check_python() -> None:
    """Raise ConfigError under `python -OO`, where transformers cannot be used."""
    if sys.flags.optimize >= 2:
        raise ConfigError(
            given="python -OO (or PYTHONOPTIMIZE=2), which removes docstrings",
            required="docstrings: transformers builds its models with their help",
            source="the command that started Python",
            change="leave -OO out; -O is fine",
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
