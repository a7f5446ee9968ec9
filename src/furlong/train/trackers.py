"""Where figures go besides the terminal and metrics.jsonl: TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from furlong.config.schema import LogConfig
from furlong.errors import ConfigError
from furlong.files import write_json


class Tracker(Protocol):
    """Takes the figures of a step or an evaluation."""

    def track(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_packages(settings: LogConfig) -> None:
    """Raises ConfigError for a package that is asked for and not installed."""
    for package in TRACKERS:
        key = f"log.{package}"
        if getattr(settings, package) and find_spec(package) is None:
            raise ConfigError(
                given=f"{key} without the package {package}",
                required=f"the package {package}",
                source=key,
                change=f"pip install 'furlong[{package}]', or remove {key}",
            )


def open_trackers(
    stack: ExitStack, folder: Path, settings: LogConfig, config: dict[str, Any], start_step: int
) -> list[Tracker]:
    """The trackers that are asked for, until `stack` ends. `start_step`: the step that is continued
    from; what a tracker holds of later ones is replaced."""
    return [
        stack.enter_context(closing(kind(folder, asked, config, start_step)))
        for name, kind in TRACKERS.items()
        if (asked := getattr(settings, name))
    ]


class _TensorBoard:
    def __init__(self, folder: Path, asked: bool, config: dict[str, Any], start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1)

    def track(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """One run on the server per run folder: its id is kept in `wandb.json`."""

    def __init__(self, folder: Path, project: str, config: dict[str, Any], start_step: int) -> None:
        import wandb

        file = folder / "wandb.json"
        known = read_run_id(file) if file.exists() else None
        try:
            self._run = wandb.init(
                project=project, id=known, resume="allow", dir=str(folder), config=config
            )
        except Exception as error:  # settings, log-in, the connection: each has types of its own
            raise ConfigError(
                given=f"log.wandb = {project}: {' '.join(str(error).split())}",
                required="a run that Weights & Biases lets begin",
                source="log.wandb",
                change="wandb login, WANDB_MODE=offline, or no log.wandb; then go on with --resume",
            ) from error
        write_json(file, {"id": self._run.id})

    def track(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def read_run_id(file: Path) -> str:
    """The id of a run on the server. Raises ConfigError."""
    try:
        run_id = json.loads(file.read_text(encoding="utf-8"))["id"]
        if isinstance(run_id, str):
            return run_id
        reason = "its id is no text"
    except (ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise ConfigError(
        given=f"{file}: {reason}",
        required="the id of the run on Weights & Biases, as furlong wrote it",
        source=str(file),
        change="restore it, or remove it: the figures then go into a new run there",
    )


TRACKERS: Mapping[str, Callable[[Path, Any, dict[str, Any], int], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
}
"""By the name of the key below `log` that asks for one, which is that of its package too."""
