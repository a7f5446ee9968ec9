"""Public recipes of other trainers, written as files from tests/recipes/others.yaml."""

from __future__ import annotations

import json
import shlex
from functools import cache
from pathlib import Path
from typing import Any

from furlong.config.conversion import Conversion, convert
from furlong.config.recipes import read_recipe
from furlong.config.sources import read_yaml
from furlong.cost.shape import known_config

_TABLE = Path(__file__).parents[1] / "recipes/others.yaml"


@cache
def recipes_of_others() -> dict[str, dict[str, Any]]:
    """Return the settings by the recipe's short name."""
    table: dict[str, dict[str, Any]] = read_yaml(_TABLE.read_text(encoding="utf-8"), "others", "")
    return table


def write_recipe(name: str, folder: Path) -> Path:
    """Write the recipe as its trainer reads it: YAML, or a script with flags."""
    recipe = recipes_of_others()[name]
    for beside, values in recipe.get("beside", {}).items():
        (folder / beside).parent.mkdir(exist_ok=True)
        (folder / beside).write_text(json.dumps(values))
    if "model_config" in recipe:
        keys = recipe["keys"]
        model = folder / keys["model"]
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(recipe["model_config"]))
        recipe = recipe | {"keys": keys | {"model": str(model)}}
    if "command" not in recipe:
        file = folder / f"{name}.yaml"
        file.write_text(json.dumps(recipe["keys"]))
        return file
    lines = [f"{key}={value} \\" for key, value in recipe.get("environment", {}).items()]
    lines.append(f"{recipe['command']} \\")
    for key, value in recipe["keys"].items():
        words = value if isinstance(value, list) else [] if value is True else [value]
        texts = (json.dumps(word) if isinstance(word, bool | dict) else str(word) for word in words)
        lines.append(" ".join([f"    --{key}", *map(shlex.quote, texts), "\\"]))
    file = folder / f"{name}.sh"
    file.write_text("\n".join(lines) + "\n")
    return file


def converted(name: str, folder: Path, *, answered: bool = False) -> Conversion:
    """Return the converted recipe; `answered`: with the keys that the conversion asks for."""
    recipe = recipes_of_others()[name]
    answers = recipe.get("answers", {}) if answered else {}
    file = read_recipe(write_recipe(name, folder))
    return convert(file, recipe.get("devices"), answers, config_of=known_config)
