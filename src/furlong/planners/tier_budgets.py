"""The budgets of host and disk that a run's keys give, and what a CPU refuses of them.

On a CPU the host's RAM is the device's: `memory.device` is the budget of everything in it, so
`memory.host` and the tier host are refused by name. The disk is a tier of its own everywhere.
"""

from __future__ import annotations

from typing import Any, Literal

from furlong.errors import ConfigError
from furlong.planners.options import ChunkOptions
from furlong.units import format_bytes


def tier_budgets(
    tier: Any,
    host: int | Literal["auto"],
    disk: int,
    *,
    on_cpu: bool,
    free_host_bytes: int | None = None,
) -> tuple[int | None, int]:
    """Bytes of host and disk that a plan may use; 0: none, None: no limit.

    `tier`: chunks.tier, or None or auto. `host`, `disk`: memory.host and memory.disk.
    `free_host_bytes`: what auto means on a GPU; None where that is not known. Raises ConfigError.
    """
    tiers = set() if tier in (None, "auto") else _named(tier)
    if on_cpu:
        if host not in ("auto", 0):
            raise ConfigError(
                given=f"memory.host = {format_bytes(int(host))} on a CPU",
                required="memory.device alone: on a CPU it is the budget of everything in RAM",
                source="memory.host",
                change="remove memory.host, and add what it gives to memory.device",
            )
        if "host" in tiers:
            raise ConfigError(
                given=f"chunks.tier = {tier!r} on a CPU",
                required="device or disk: on a CPU the host's RAM is the device's",
                source="chunks.tier",
                change="remove host from chunks.tier, or write disk and add memory.disk",
            )
        return 0, _disk(tiers, disk)
    host_bytes = free_host_bytes if host == "auto" else host
    if host_bytes == 0 and "host" in tiers:
        raise _no_room("host")
    return host_bytes, _disk(tiers, disk)


def _named(tier: Any) -> set[str]:
    tiers = ChunkOptions(tier=tier).tiers
    return {tiers.kv, tiers.inputs, tiers.attention, tiers.graphs}


def _disk(tiers: set[str], disk: int) -> int:
    if disk == 0 and "disk" in tiers:
        raise _no_room("disk")
    return disk


def _no_room(tier: str) -> ConfigError:
    return ConfigError(
        given=f"chunks.tier on the {tier} with memory.{tier} = 0",
        required=f"memory.{tier} above 0, for what is to live there",
        source=f"chunks.tier and memory.{tier}",
        change=f"add memory.{tier}, such as 64GiB, or change chunks.tier",
    )
