"""Which model a name stands for, as far as files can tell: nothing here loads torch."""

from __future__ import annotations

import json
from pathlib import Path

from furlong.errors import ConfigError


def check_folder(name: str) -> str:
    """The folder that `name` stands for, or `name` itself if it is a hub id. Raises ConfigError."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder)
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ConfigError(
            given=f"{name}: no such folder",
            required="a folder with config.json, or a hub id such as Qwen/Qwen2.5-0.5B",
            source="model.name",
            change="check the path; it is relative to the folder you call furlong from",
        )
    return name


def check_files(name: str) -> None:
    """Raises ConfigError for a name that is neither a hub id nor a folder with a config.json that
    can be read."""
    folder = Path(check_folder(name))
    # Of adapters there is more to say when the model is read.
    if not folder.is_dir() or (folder / "adapter_config.json").exists():
        return
    try:
        reason = None
        if not isinstance(json.loads((folder / "config.json").read_text(encoding="utf-8")), dict):
            reason = ", config.json: no JSON object"
    except FileNotFoundError:
        reason = " without config.json"
    except (OSError, ValueError, RecursionError) as error:
        reason = f", config.json: {error}"
    if reason is not None:
        raise ConfigError(
            given=f"{folder}{reason}",
            required="the folder of a Hugging Face model",
            source="model.name",
            change="point model.name at the folder that holds config.json",
        )
