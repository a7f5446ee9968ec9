"""Whether a plan fits into the memory of its devices, and what would make it fit."""

from __future__ import annotations

from collections.abc import Mapping

from furlong.cost.memory.levels import Part
from furlong.cost.memory.training import Training
from furlong.cost.model import CostModel
from furlong.errors import ConfigError
from furlong.plan.values import ChunkPlan
from furlong.report.words import PART_WORDS
from furlong.units import format_bytes

MARGIN = 0.05
"""Share of a device's budget that plans leave free unless a calibration says what its own
predictions lacked: of twelve steps that no fit had seen, measured on a CPU, predicted peaks lacked
5.2 % at most (docs/benchmarks.md). Gaps between allocated blocks are the hardware's
`reserved_bytes`."""
_STATE: tuple[Part, ...] = ("weights", "gradients", "optimizer")
_ADVICE: dict[str, str] = {
    "activations": "use smaller chunks, keep less of them, or use a larger sp or pp",
    "kv": "keep K,V on the host, use a larger sp or pp, or shorter sequences",
    "kv_gradients": "keep K,V on the host, use a larger sp or pp, or shorter sequences",
    "logits": "use smaller chunks",
    "buffers": "use smaller chunks",
}
_ALONE: dict[str, str] = {
    "activations": "give it a larger memory.device, use smaller chunks (chunks.size), or keep less"
    " of them (chunks.keep, chunks.num_retained)",
    "kv": "give it a larger memory.device, or use shorter sequences (data.max_seq_len)",
    "kv_gradients": "give it a larger memory.device, or use shorter sequences (data.max_seq_len)",
    "logits": "give it a larger memory.device, or use smaller chunks (chunks.size)",
    "buffers": "give it a larger memory.device, or use smaller chunks (chunks.size)",
}
"""Advice for one device, which is all that there is."""


def advice(part: str, training: Training, *, num_devices: int = 1, alone: bool = False) -> str:
    """Advice for a plan of `num_devices` whose memory goes into `part`; `alone`: on one device that
    is given."""
    if part != "state":
        return (_ALONE if alone else _ADVICE)[part]
    ways = ["give it a larger memory.device"] if alone else ["use more devices"]
    if not alone and num_devices == 1:
        ways = ["use several devices, which share the state (ZeRO)"]
    elif num_devices > 1 and training.zero_stage < 3:
        ways.insert(0, "shard all of the state (ZeRO-3)")
    ways += ["train LoRA adapters (model.lora)"] * (training.lora is None)
    return ", ".join(ways) + ", or use a smaller model"


class DoesNotFitError(ConfigError):
    """A plan needs more memory than a rank has."""

    def __init__(
        self,
        rank: int,
        peak: Mapping[Part, int],
        budget_bytes: int,
        training: Training,
        *,
        num_devices: int = 1,
        with_what: str = "",
    ) -> None:
        needed = sum(peak.values())
        self.lacking_bytes = needed - budget_bytes
        state = sum(peak[part] for part in _STATE)
        rest = {part: n for part, n in peak.items() if part not in _STATE and n > 0}
        largest = max(rest, key=rest.__getitem__, default="state")
        # with the state alone above the budget nothing else helps
        self.part: str = "state" if state > budget_bytes else largest
        """Part of memory that takes the most: `state`, or a part besides it."""
        parts = ", ".join(
            f"{PART_WORDS.get(part, part)} {format_bytes(n)}"
            for part, n in sorted(peak.items(), key=lambda pair: -pair[1])
            if n > 0
        )
        super().__init__(
            given=f"rank {rank} needs {format_bytes(needed)}"
            + (f" with {with_what}" if with_what else "")
            + f": {parts}",
            required=f"at most {format_bytes(budget_bytes)}, which lacks "
            f"{format_bytes(self.lacking_bytes)}",
            source="the memory of a device",
            change=advice(self.part, training, num_devices=num_devices),
        )


def fit(plan: ChunkPlan, model: CostModel, budget_bytes: int | None = None) -> int:
    """The peak bytes of the rank that needs most. Raises DoesNotFitError at the first rank whose
    device has less, ConfigError at the first whose share of its host's memory is smaller."""
    memory, host_bytes = model.memory(budget_bytes), model.hardware.host_bytes
    num_devices = len(plan.actions) * plan.sp_size * model.training.replicas
    peak = 0
    for rank in range(len(plan.actions)):
        curve = memory.curve(plan, rank)
        needed = sum(curve.peak.values())
        if needed > memory.budget_bytes(rank):
            raise DoesNotFitError(
                rank, curve.peak, memory.budget_bytes(rank), model.training, num_devices=num_devices
            )
        if (on_host := int(curve.host.max(initial=0))) > host_bytes:
            raise ConfigError(
                given=f"rank {rank} needs {format_bytes(on_host)} of its host's memory",
                required=f"at most {format_bytes(host_bytes)}: memory.host, or a device's share"
                " of its node",
                source="the memory of the host",
                change="raise memory.host if the node has more, keep less (chunks.keep), or use"
                " more devices",
            )
        peak = max(peak, needed)
    return peak
