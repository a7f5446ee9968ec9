"""Whether a published plan fits, by the memory simulation of each of its ranks."""

from __future__ import annotations

from furlong.cost.model import CostModel
from furlong.errors import ConfigError
from furlong.plan.plan import ChunkPlan
from furlong.planners.question import DoesNotFitError
from furlong.units import format_bytes


def fit(
    plan: ChunkPlan, model: CostModel, budget_bytes: int | None = None, *, with_what: str = ""
) -> int:
    """The peak bytes of the rank that needs most. Raises DoesNotFitError at the first rank whose
    device has less, ConfigError at the first whose share of its host's memory is smaller.
    `with_what`: words for what the plan computes."""
    memory, cpu_bytes = model.memory(budget_bytes), model.hardware.host_bytes
    num_devices = len(plan.actions) * plan.sp_size * model.training.replicas
    peak = 0
    for rank in range(len(plan.actions)):
        curve = memory.curve(plan, rank)
        needed = sum(curve.peak.values())
        if needed > memory.device_budget_bytes:
            raise DoesNotFitError(
                rank, curve.peak, memory.device_budget_bytes, model.training,
                num_devices=num_devices, with_what=with_what,
            )  # fmt: skip
        if (on_host := int(curve.cpu.max(initial=0))) > cpu_bytes:
            raise ConfigError(
                given=f"rank {rank} needs {format_bytes(on_host)} of its host's memory",
                required=f"at most {format_bytes(cpu_bytes)}: memory.cpu, or a device's share"
                " of its node",
                source="the memory of the host",
                change="raise memory.cpu if the node has more, or use more devices",
            )
        peak = max(peak, needed)
    return peak
