"""Where a run's values come from, strongest first: flags, the run file, the schema's defaults.

There are no environment variables. Whatever is wrong with a file, a key or a flag ends as one
ConfigError that names where it came from.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import CliSettingsSource, SettingsError

from furlong.config.schema import RunConfig
from furlong.errors import ConfigError

_SHOWN_CHARS = 120


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            flag = message.removeprefix(prefix).split()[0].split("=")[0]
            known = [text.lstrip("-") for text in self._option_string_actions]
            is_flag = flag.startswith("-")
            raise ConfigError(
                given=flag,
                required="a flag of furlong train, or one run file",
                source="the command line",
                change=_nearest(flag.lstrip("-"), known, "--") if is_flag else "remove it",
            )
        raise ConfigError(
            given=message,
            required="--section.key=value",
            source="the command line",
            change="see furlong train --help",
        )


def parse_run(
    arguments: Sequence[str],
    prog: str = "furlong train",
    switches: Mapping[str, str] | None = None,
) -> RunConfig:
    """The run that a command line asks for: `[RUN.yaml] [--section.key=value ...]`.

    `switches`: flags without a value that the verb reads itself, with their help. Raises
    ConfigError; `--help` prints and raises SystemExit(0).
    """
    parser = _Parser(prog=prog, allow_abbrev=False, description="Train a model.")
    parser.add_argument("file", nargs="?", help="run file (YAML or JSON)")
    for name, text in (switches or {}).items():
        parser.add_argument(name, action="store_true", help=text)
    chosen: dict[str, str | None] = {}

    def parse_args(_: Any, arguments: list[str]) -> argparse.Namespace:
        parsed = parser.parse_args(arguments)
        chosen["file"] = parsed.file
        return parsed

    try:
        flags: CliSettingsSource[Any] = CliSettingsSource(
            RunConfig,
            cli_parse_args=list(arguments),
            cli_parse_none_str="null",
            cli_enforce_required=False,
            cli_exit_on_error=False,
            cli_avoid_json=True,
            cli_hide_none_type=True,
            root_parser=parser,
            parse_args_method=parse_args,
        )
    except SettingsError as error:
        raise ConfigError(
            given=str(error),
            required="values that fit their keys",
            source="the command line",
            change="see furlong train --help",
        ) from error
    file = chosen.get("file")
    values = _read_run_file(file) if file is not None else {}
    given_flags = {text.split("=")[0] for text in arguments if text.startswith("--")}
    return _validated(
        lambda: RunConfig(**({"_cli_settings_source": flags} | values)),
        file or "no run file",
        given_flags,
    )


def load_run(file: str | Path) -> RunConfig:
    """The run of a YAML or JSON file. Raises ConfigError."""
    return build_run(_read_run_file(str(file)), str(file))


def build_run(values: Mapping[str, Any], source: str) -> RunConfig:
    """The run of values that were read from `source`. Raises ConfigError."""
    return _validated(lambda: RunConfig(**values), source, set())


class _RunFileLoader(yaml.SafeLoader):
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


def _read_run_file(file: str) -> dict[str, Any]:
    try:
        values = yaml.load(Path(file).read_text(encoding="utf-8"), _RunFileLoader)
    except OSError as error:
        raise ConfigError(
            given=f"{file}: {error.strerror}",
            required="a run file that can be read",
            source="the command line",
            change="check the path; paths are relative to the folder you call furlong from",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            given=f"bytes that are no UTF-8: {error.reason} at byte {error.start}",
            required="a run file: text in YAML",
            source=file,
            change="check that it is the run file that you mean",
        ) from error
    # Text that looks like a date and is none is a ValueError.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            given=" ".join(str(error).replace('in "<unicode string>", ', "in ").split()),
            required="YAML",
            source=file,
            change="mend the line that is named",
        ) from error
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


def _validated(build: Callable[[], RunConfig], file: str, flags: set[str]) -> RunConfig:
    try:
        return build()
    except ValidationError as error:
        raise _config_error(error.errors(), file, flags) from None


def _config_error(errors: Sequence[ErrorDetails], file: str, flags: set[str]) -> ConfigError:
    """One message of four parts for all that is wrong with the first faulty key."""
    # A misspelled key is told before the required one that it was meant to be.
    errors = sorted(errors, key=lambda error: error["type"] != "extra_forbidden")
    key = _key_of(errors[0]["loc"])
    own = [error for error in errors if _key_of(error["loc"]) == key]
    more = len({_key_of(error["loc"]) for error in errors}) - 1
    if own[0]["type"] == "run_length":
        key = "train.steps and train.epochs"
    elif own[0]["type"] == "lora_base":
        key = "model.lora and model.init"
    flag = next((flag for flag in flags if f"{flag[2:]}.".startswith(f"{key}.")), None)
    given, required, change = _explain(key, own)
    return ConfigError(
        given=given,
        required=required,
        source=f"the flag {flag}" if flag else f"{file}, key {key}",
        change=change + (f"; {more} more of its keys are wrong" if more else ""),
    )


def _explain(key: str, errors: Sequence[ErrorDetails]) -> tuple[str, str, str]:
    """What was given for a key, what was required, what to change."""
    noise = r"^Input should be |^Value error, |, unable to parse string as an? \w+"
    required = " or ".join(dict.fromkeys(re.sub(noise, "", error["msg"]) for error in errors))
    value = errors[0]["input"]
    shown = "null" if value is None else _shortened(repr(value))
    match errors[0]["type"]:
        case "extra_forbidden":
            known = _fields_at(tuple(key.split("."))[:-1])
            return (
                f"{key}, an unknown key",
                f"one of {', '.join(known)}",
                _nearest(key.rpartition(".")[2], known, ""),
            )
        case "missing":
            section = _fields_at(tuple(key.split(".")))
            return f"no {key}", "a value", f"add {f'{key}.{section[0]}' if section else key}"
        case "model_type" if section := _fields_at(tuple(key.split("."))):
            return (
                f"{key} = {shown}",
                f"a section with keys among {', '.join(section)}",
                f"write {key.rpartition('.')[2]}: {{{section[0]}: ...}}",
            )
        case "tuple_type":
            return f"{key} = {shown}", "a list", f"set {key} to what is required"
        case "run_length":
            return "both or none", required, "remove one of them"
        case "lora_base":
            return "model.lora and model.init: random", required, "set model.init or remove lora"
        case "not_in_release":
            return f"{key} = {shown}", required, f"remove {key}"
    return f"{key} = {shown}", required, f"set {key} to what is required"


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _key_of(location: tuple[int | str, ...]) -> str:
    """`chunks.size` of `(chunks, size, literal['auto'])`: pydantic adds the union's branches."""
    key: list[str] = []
    for part in location:
        known = _fields_at(tuple(key))
        if key and not known:
            break
        key.append(str(part))
    return ".".join(key)


def _fields_at(key: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the keys of a section; empty for a leaf."""
    section: type[BaseModel] = RunConfig
    for name in key:
        field = section.model_fields.get(name)
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner:
            return ()
        section = inner[0]
    return tuple(section.model_fields)


def _nearest(word: str, known: Sequence[str], prefix: str) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {prefix}{close[0]}?" if close else "remove it"
