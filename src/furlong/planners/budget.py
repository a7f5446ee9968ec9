"""Whether a plan fits into the memory of its devices, and what would make it fit."""

from __future__ import annotations

from collections.abc import Mapping

from furlong.cost.memory import Part
from furlong.cost.model import CostModel
from furlong.cost.training import Training
from furlong.errors import ConfigError
from furlong.plan.plan import ChunkPlan
from furlong.report.scene import PART_WORDS
from furlong.units import format_bytes

MARGIN = 0.10
"""Share of a device's budget that plans leave free, on one device and on several, unless a
calibration says what its own predictions lacked: of twelve steps that no fit had seen, measured on
a CPU, predicted peaks lacked 5.2 % at most (docs/benchmarks.md), and a run has more that no plan
counts. Gaps between allocated blocks are the hardware's `reserved_bytes`."""
_STATE: tuple[Part, ...] = ("weights", "gradients", "optimizer")
_SMALLER = ("use smaller chunks (chunks.size)",)
_SHORTER = ("use shorter sequences (data.max_seq_len)",)
_WAYS: dict[str, tuple[str, ...]] = {
    "activations": (*_SMALLER, "keep less of them (chunks.keep, chunks.num_retained)"),
    "kv": _SHORTER,
    "kv_gradients": _SHORTER,
    "states": ("use larger chunks (chunks.size): a state is kept at the end of each", *_SHORTER),
    "logits": _SMALLER,
    "buffers": _SMALLER,
}
"""Ways to need less of a part of memory."""
_LARGER, _SEVERAL = "use a larger sp or pp", "use several devices"
_WAYS_WITH_MORE = {
    "activations": (_LARGER,),
    "kv": ("keep K,V on the host (chunks.tier) if the method can", _LARGER),
}


def advice(
    part: str,
    training: Training,
    *,
    num_devices: int = 1,
    alone: bool = False,
    all_sizes: bool = False,
) -> str:
    """Advice for a plan of `num_devices` whose memory goes into `part`; `alone`: on one device that
    is given; `all_sizes`: chunks of every size were tried."""
    ways = ["give it a larger memory.device"] if alone else []
    if part == "state" or (all_sizes and _SMALLER[0] in _WAYS[part]):
        if num_devices > 1 and training.zero_stage < 3:
            ways += ["shard all of the state (ZeRO-3)"]
        if not alone:
            shared = "use several devices, which share the state (ZeRO)"
            ways += [shared if num_devices == 1 else "use more devices"]
        ways += ["train LoRA adapters (model.lora)"] * (training.lora is None)
        ways += _SHORTER * (part == "activations")
        ways += ["use a smaller model"]
    else:
        more = () if alone else _WAYS_WITH_MORE.get(part.removesuffix("_gradients"), ())
        ways += [_SEVERAL if way == _LARGER and num_devices == 1 else way for way in more]
        ways += _WAYS[part]
    *first, last = ways
    return f"{', '.join(first)}, or {last}" if first else last


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


def fit(
    plan: ChunkPlan, model: CostModel, budget_bytes: int | None = None, *, with_what: str = ""
) -> int:
    """The peak bytes of the rank that needs most. Raises DoesNotFitError at the first rank whose
    device has less, ConfigError at the first whose share of its host's memory is smaller.
    `with_what`: words for what the plan computes."""
    memory, host_bytes = model.memory(budget_bytes), model.hardware.host_bytes
    num_devices = len(plan.actions) * plan.sp_size * model.training.replicas
    peak = 0
    for rank in range(len(plan.actions)):
        curve = memory.curve(plan, rank)
        needed = sum(curve.peak.values())
        if needed > memory.budget_bytes(rank):
            raise DoesNotFitError(
                rank, curve.peak, memory.budget_bytes(rank), model.training,
                num_devices=num_devices, with_what=with_what,
            )  # fmt: skip
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
