"""The tiers below the device in a run: their budgets, their folder, and whether that can serve."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from furlong.config.schema import RunConfig, names_tier
from furlong.cost.machine import free_ram_budget_bytes
from furlong.errors import ConfigError
from furlong.kv.disk import NamelessFile
from furlong.kv.storage import Storage
from furlong.planners.decide import Decision
from furlong.planners.question import tier_budgets
from furlong.units import format_bytes


def storage_of(config: RunConfig, device: torch.device, *, num_local: int = 1) -> Storage:
    """Budgets and folder of a run's tiers, for one of the `num_local` processes that share the
    machine's RAM; null as the folder is the run's own. Raises ConfigError
    for budgets and tiers that a CPU does not have, and for a folder that cannot take a file."""
    tier = config.chunks.tier
    host_bytes, disk_bytes = tier_budgets(
        tier, config.memory.host, config.memory.disk,
        on_cpu=device.type != "cuda", free_host_bytes=free_ram_budget_bytes() // num_local,
    )  # fmt: skip
    named = config.memory.disk_dir
    folder = Path(config.out if named is None else named).expanduser()
    if disk_bytes and (tier == "auto" or names_tier(tier, "disk")):
        _try_folder(folder, is_named=named is not None)
    return Storage(host_bytes, disk_bytes, folder)


def check_free(storage: Storage, decision: Decision) -> None:
    """Raises ConfigError if the disk has less room than what was decided is predicted to need."""
    if decision.answer is None:
        return
    disk_bytes = decision.answer.best.needs.disk_bytes
    if not disk_bytes:
        return
    folder = _existing(Path(storage.disk_dir or "."))
    free = shutil.disk_usage(folder).free
    if free < disk_bytes:
        raise ConfigError(
            given=f"{format_bytes(free)} free on the disk of {storage.disk_dir}",
            required=f"{format_bytes(disk_bytes)}, which the plan is predicted to keep there",
            source="memory.disk_dir",
            change="make room there, name a folder on a larger disk with memory.disk_dir, or lower"
            f" memory.disk to what is free, such as {free * 9 // 10 // 2**20}MiB",
        )


def _try_folder(folder: Path, *, is_named: bool) -> None:
    """Open the file that the disk tier will need. The run's own folder appears later: until then
    the one it will be in stands for it."""
    NamelessFile(folder if is_named else _existing(folder)).close()


def _existing(folder: Path) -> Path:
    """The folder, or the one above it that is there."""
    return next(f for f in (folder, *folder.absolute().parents) if os.path.isdir(f))
