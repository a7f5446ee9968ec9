"""YAML of run files and flags. Scalars are those of YAML 1.2: 010 is ten, yes is a text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from furlong.config.schema import RunConfig
from furlong.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
# Type, how its texts look, and which characters they begin with.
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("merge", r"<<", "<"),
)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    found: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for kind, pattern, first in _SCALARS:
        for char in first:
            found.setdefault(char, []).append((_TAG + kind, re.compile(rf"(?:{pattern})\Z")))
    return found


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice: YAML itself takes the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value} is there twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        value: str = super().construct_scalar(node)
        if "\0" in value:  # only an escape can write it; no path and no name may hold it
            raise yaml.constructor.ConstructorError(
                problem="a text with a NUL character", problem_mark=node.start_mark
            )
        return value

    def _int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node))

    def _float(self, node: yaml.ScalarNode) -> float:
        return float(self.construct_scalar(node))

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = _resolvers()  # type: ignore[misc]
    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        **yaml.SafeLoader.yaml_constructors,
        f"{_TAG}int": _int,
        f"{_TAG}float": _float,
    }


def is_run_file(name: str) -> bool:
    """Whether a name is that of a run file: by its ending, or a .json file, such as the
    config.json of a run's folder, by its sections."""
    file = Path(name)
    if file.suffix.lower() != ".json":
        return file.suffix.lower() in (".yaml", ".yml")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and {"model", "data"} <= values.keys()


def read_run_file(file: str) -> dict[str, Any]:
    """The values of a run file. Raises ConfigError."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            given=f"bytes that are no UTF-8: {error.reason} at byte {error.start}",
            required="a run file: text in YAML",
            source=file,
            change="check that it is the run file that you mean",
        ) from error
    except (OSError, ValueError) as error:  # a NUL in the name is a ValueError
        raise ConfigError(
            given=f"{file}: {getattr(error, 'strerror', None) or error}",
            required="a run file that can be read",
            source="the command line",
            change="check the path; paths are relative to the folder you call furlong from",
        ) from error
    values = read_yaml(text, file, "mend the line that is named")
    if values is None:
        raise ConfigError(
            given="an empty file",
            required="a run: at least model.name and data.train",
            source=file,
            change="see examples/quickstart.yaml",
        )
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(
            given=f"a {type(values).__name__}" if not isinstance(values, dict) else "unnamed keys",
            required=f"sections: {', '.join(RunConfig.model_fields)}",
            source=file,
            change="see examples/quickstart.yaml",
        )
    return values


def read_yaml(text: str, source: str, change: str) -> Any:
    """The value that `text` from `source` stands for. Raises ConfigError, which says `change`."""
    try:
        return yaml.load(text, _Loader)
    # A number of thousands of digits is a ValueError.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            given=_reason(error, text),
            required="YAML",
            source=source,
            change=change,
        ) from error


def _reason(error: Exception, text: str) -> str:
    """The fault of a YAML text, and its line."""
    mark = getattr(error, "problem_mark", None)
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return " ".join(str(error).split())
    context, begun = error.context, error.context_mark
    during = f"{context} that begins in line {begun.line + 1}: " if context and begun else ""
    lines = text.splitlines()
    shown = lines[mark.line].strip()[:80] if mark.line < len(lines) else "the end"
    return f"{during}{error.problem} in line {mark.line + 1}, column {mark.column + 1}: {shown}"
