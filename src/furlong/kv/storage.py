"""Where kinds of memory wait during a step: one pool per tier, shared by the kinds that name it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from furlong.errors import ConfigError
from furlong.kv.arena import Arena
from furlong.kv.pools import Budget, DevicePool, DiskPool, HostPool, Pool
from furlong.plan.plan import Tier, Tiers


@dataclass(frozen=True, slots=True)
class Storage:
    """Bounds of the memory that calls may use beside weights, gradients and optimizer."""

    host_bytes: int | None = None
    """Budget of the host tier, for all calls on a model that live; None: no bound."""
    disk_bytes: int | None = None
    """Budget of the disk tier, as that of the host; None: no bound."""
    disk_dir: str | Path | None = None
    """Folder of the disk tier; None: the system's folder for temporary files."""
    poison: bool = False
    """Whether memory that is given back turns to NaN, so that tests see a use after that."""
    device_bytes: int | None = None
    """Budget of the device, by which a keep of auto is decided; None: what is free at the first
    call. It bounds nothing else."""

    def __post_init__(self) -> None:
        for name in ("device_bytes", "host_bytes", "disk_bytes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise _refusal(name, value, "bytes as a whole number of at least 0, or None")
        if self.disk_dir is not None and not isinstance(self.disk_dir, str | Path):
            raise _refusal("disk_dir", self.disk_dir, "a folder as a str or Path, or None")


def _refusal(name: str, value: object, required: str) -> ConfigError:
    return ConfigError(
        given=f"{name} = {value!r:.60}", required=required, source="furlong.Storage",
        change=f"pass such a {name}, or leave it out",
    )  # fmt: skip


class Pools:
    """The pools of one model, or of one call on it, opened when a plan first names their tier."""

    def __init__(
        self, arena: Arena, storage: Storage, budgets: Mapping[Tier, Budget] | None = None
    ) -> None:
        self.arena, self.storage = arena, storage
        self.reserved: dict[tuple[bool, Tiers], tuple[int, int]] = {}
        """Kinds of plans (whether they train, their tiers) for which memory was taken beforehand:
        the most tokens of one sequence, and of all."""
        self._budgets = budgets or {
            "host": Budget(storage.host_bytes), "disk": Budget(storage.disk_bytes)
        }  # fmt: skip

    def beside(self) -> Pools:
        """Others in the same arena, within the same budgets."""
        return Pools(self.arena, self.storage, self._budgets)

    @cached_property
    def device(self) -> Pool:
        return DevicePool(self.arena, poison=self.storage.poison)

    @cached_property
    def host(self) -> HostPool:
        poison = self.storage.poison
        return HostPool(self.arena.device, budget=self._budgets["host"], poison=poison)

    @cached_property
    def disk(self) -> Pool:
        folder, poison = self.storage.disk_dir or tempfile.gettempdir(), self.storage.poison
        budget = self._budgets["disk"]
        return DiskPool(Path(folder), self.arena.device, budget=budget, poison=poison)

    def of(self, tier: Tier) -> Pool:
        """The pool of a tier."""
        pool: Pool = getattr(self, tier)
        return pool

    @property
    def lower_bytes(self) -> int:
        """Bytes that wait on the host and on disk."""
        return sum(pool.held_bytes for pool in self._opened() if pool is not self.device)

    def reset_peaks(self) -> None:
        """Let the pools' peaks start again from what they hold."""
        for pool in self._opened():
            pool.peak_bytes = pool.held_bytes

    def peak_bytes(self, tier: Tier) -> int:
        """Most bytes that a tier's pool has held since `reset_peaks`; 0 if it was never opened."""
        return self.of(tier).peak_bytes if tier in self.__dict__ else 0

    @property
    def waited_s(self) -> float:
        """Seconds for which the calling thread has waited for the tiers."""
        return sum(pool.waited_s for pool in self._opened())

    def clear(self) -> None:
        """Forget everything, after an error."""
        for pool in self._opened():
            pool.clear()

    def close(self) -> None:
        """End the pools; an AssertionError if anything is left in them."""
        for pool in self._opened():
            pool.close()

    def _opened(self) -> list[Pool]:
        return [self.__dict__[tier] for tier in ("device", "host", "disk") if tier in self.__dict__]
