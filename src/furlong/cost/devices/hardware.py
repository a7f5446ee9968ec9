"""HardwareSpec: a cluster as plain numbers, and how much of its peak a call reaches.

Efficiency saturates with the tokens of a call: best * t / (t + half_tokens). Equivalently a call
costs its FLOPs at the best rate plus a fixed time worth `half_tokens` tokens. Without it every
search picks the smallest chunk. InfiniPipe (Appendix B) and ChunkFlow (Table 6) publish the shape:
fewer tokens per call, less throughput. What a data sheet does not tell, and a large model hides
(kernels that pass bytes, slices, tiles), costs nothing until a calibration has measured it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import get_args

import numpy as np
import psutil

from furlong.cost.devices.known_hardware import KNOWN, Figures
from furlong.cost.devices.links import ClusterLinks, Collective, Link
from furlong.cost.names import look_up

THIS_CPU = "cpu"
MEASURED = "measured: "
"""Start of the source of a figure that a calibration has measured."""
_CORE_FLOPS_PER_S = 5e10
OPTIMIZER_STEP_BYTES = 30
"""AdamW reads a gradient (4 bytes), a master weight (4) and two moments (8) of each parameter, and
writes all but the gradient, and the weight in 16 bits (2)."""
CPU_TILE_TOKENS = 512
"""Keys of a tile of torch's flash attention on a CPU (kvSplitSize in FlashAttentionKernel.cpp)."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Share of the peak that a call of some tokens reaches."""

    best: float
    half_tokens: float
    """Tokens at which half of `best` is reached."""


@dataclass(frozen=True)
class HardwareSpec:
    """One device of a cluster, and what joins it to the others."""

    name: str
    peak_flops_per_s: float
    """FLOPs per second of dense matrices in the dtype of the computation."""
    memory_bytes: int
    reserved_bytes: int
    """Bytes of `memory_bytes` that go to the driver, the context and the allocator's gaps."""
    linear: Efficiency
    attention_forward: Efficiency
    attention_backward: Efficiency
    layer_launch_s: float
    """Least time of one layer's forward, however few its tokens: the kernels are launched."""
    links: ClusterLinks
    wide_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """dtype wider than 16 bits -> FLOPs per second of dense matrices in it."""
    pass_launch_s: float = 0.0
    """Least time of one pass over a stage, beside its layers': what a family does around them."""
    slice_launch_s: float = 0.0
    """Least time of one slice of a chunk in the attention of one layer's forward."""
    hides_launches: bool = True
    """Whether a device computes while its host launches what comes next: then a pass takes the
    longer of the two, else both."""
    activation_bytes_per_s: float = inf
    """Bytes of saved tensors (`memory.activations`) and of logits that pass per second through the
    kernels beside products and attention; a layer's backward passes them twice."""
    tile_tokens: int = 0
    """Keys in a tile of attention: what the causal mask hides of one is computed all the same."""
    optimizer_parameters_per_s: float = inf
    """Trained parameters that a step of the optimizer updates per second."""
    host_bytes: float = inf
    """Bytes that one device may keep in the memory of its host: its share of the node's."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source of each figure."""
    device_type: str = "cuda"
    """Type, cuda or cpu: it decides the sizes of tiles and segments, and whether collectives run
    beside the computation (those of a CPU do not)."""
    card: str = ""
    """The driver's name of a card that is not this one, but has the memory that is nearest: what is
    measured on one holds for it alone."""

    @property
    def budget_bytes(self) -> int:
        return self.memory_bytes - self.reserved_bytes

    def computing_in(self, dtype: str) -> HardwareSpec:
        """The device at its peak in `dtype`; as it is where no other peak is known (16 bits, and a
        CPU). The bytes of a wider matrix take longer to read, so more tokens hide that."""
        peak = self.wide_flops_per_s.get(dtype)
        if peak is None:
            return self
        longer = peak / self.peak_flops_per_s * {"float32": 2, "float64": 4}[dtype]
        changed = {
            name: replace(of, half_tokens=of.half_tokens * longer)
            for name in ("linear", "attention_forward", "attention_backward")
            if (of := getattr(self, name))
        }
        return replace(self, peak_flops_per_s=peak, **changed)


def hardware(name: str) -> HardwareSpec:
    """A device by name: a key of `known_hardware.KNOWN`, or `cpu` for this machine, measured now.

    Raises ConfigError that names the nearest.
    """
    makers: dict[str, Callable[[], HardwareSpec]] = {THIS_CPU: this_cpu}
    for key, figures in KNOWN.items():
        makers[key] = lambda key=key, figures=figures: _build(key, figures)  # type: ignore[misc]
    return look_up(name, makers, kind="hardware", source="the hardware's name")()


def _build(name: str, figures: Figures) -> HardwareSpec:
    return HardwareSpec(
        name=name,
        peak_flops_per_s=figures.peak_flops_per_s,
        wide_flops_per_s={
            "float32": figures.float32_flops_per_s,
            "float64": figures.float64_flops_per_s,
        },
        memory_bytes=figures.memory_bytes,
        reserved_bytes=figures.reserved_bytes,
        linear=Efficiency(figures.linear_best, figures.half_tokens),
        attention_forward=Efficiency(figures.attention_forward_best, figures.half_tokens),
        attention_backward=Efficiency(figures.attention_backward_best, figures.half_tokens),
        layer_launch_s=figures.layer_launch_s,
        optimizer_parameters_per_s=figures.memory_bytes_per_s / OPTIMIZER_STEP_BYTES,
        links=ClusterLinks(
            devices_per_node=figures.devices_per_node,
            within_node=Link(figures.within_latency_s, figures.within_bytes_per_s),
            between_nodes=Link(figures.between_latency_s, figures.between_bytes_per_s),
            host=Link(figures.host_latency_s, figures.host_bytes_per_s),
            disk=Link(1e-4, figures.disk_bytes_per_s),
            collectives=figures.collectives,
        ),
        host_bytes=figures.host_bytes,
        sources=figures.sources,
    )


def this_cpu(*, measured: bool = True) -> HardwareSpec:
    """This machine: memory from the system, the rate from one short float32 matrix product.

    Takes about a tenth of a second. `furlong calibrate` replaces the efficiencies by measured ones.
    With `measured` False the rate is a fixed one per core, for decisions that no noise may turn.
    """
    memory = psutil.virtual_memory().total
    cores = os.cpu_count() or 1
    peak = _measured_flops_per_s() if measured else cores * _CORE_FLOPS_PER_S
    copy = 1e10
    return HardwareSpec(
        name=THIS_CPU,
        device_type="cpu",
        peak_flops_per_s=peak,
        memory_bytes=memory,
        reserved_bytes=memory // 8,
        linear=Efficiency(0.7, 32),
        attention_forward=Efficiency(0.5, 32),
        attention_backward=Efficiency(0.5, 32),
        layer_launch_s=5e-4,
        pass_launch_s=8e-4,
        slice_launch_s=6e-4,
        activation_bytes_per_s=2e9,
        hides_launches=False,
        tile_tokens=CPU_TILE_TOKENS,
        host_bytes=memory - memory // 8,
        links=ClusterLinks(
            devices_per_node=cores,
            within_node=Link(5e-5, copy / 2),
            between_nodes=Link(1e-4, 1e9),
            host=Link(0.0, copy),
            disk=Link(1e-4, 5e8),
        ),
        sources={
            "peak_flops_per_s": "measured now: numpy's float32 matrix product, best of five"
            if measured
            else "assumed: 50 GFLOP/s per core",
            "memory_bytes": "the system",
            "reserved_bytes": "assumed: an eighth for everything else that runs",
            "linear, attention_forward, attention_backward": "assumed; calibrate",
            "launches, activation_bytes_per_s": "assumed: about what furlong calibrate measured in"
            " float32 on one core of an AMD EPYC",
            "links": "assumed: memory copies of 10 GB/s, a disk of 500 MB/s",
        },
    )


def one_of(spec: HardwareSpec, num_local: int) -> HardwareSpec:
    """The device of one of `num_local` processes of a machine: these are a node, and have equal
    parts of a CPU's cores."""
    links = replace(spec.links, devices_per_node=num_local)
    share = num_local if spec.device_type == "cpu" else 1
    return replace(spec, links=links, peak_flops_per_s=spec.peak_flops_per_s / share)


def are_links_measured(spec: HardwareSpec) -> bool:
    """Whether a calibration has measured a link between devices."""
    names = ("within_node", *get_args(Collective))
    return any(spec.sources.get(name, "").startswith(MEASURED) for name in names)


def free_ram_budget_bytes() -> int:
    """Three fifths of the RAM that is free now, rounded down to four binary digits so that a little
    more or less of it changes nothing. A control group's limit counts as RAM.

    A process takes a fourth to a third more than is counted (benchmarks/step.py: predicted peaks
    are 0.76 to 0.80 of the measured ones): the C library's heap keeps what was freed.
    """
    free = min(psutil.virtual_memory().available, _free_in_control_group())
    return rounded_budget(free * 3 // 5)


def rounded_budget(num_bytes: int) -> int:
    """`num_bytes` rounded down to four binary digits."""
    step = 1 << max(0, num_bytes.bit_length() - 4)
    return num_bytes // step * step


def _free_in_control_group(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes below the limit that a container sets (cgroup v2), files in the cache not counted as
    used; without a limit more than any machine has."""
    try:
        limit = int((root / "memory.max").read_text())
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat["inactive_file"]) + int(stat["active_file"]))
    except (OSError, ValueError, KeyError):
        return 2**62


def _measured_flops_per_s() -> float:
    """FLOPs per second of the best of five products of two float32 matrices, over all cores that
    numpy uses."""
    size = 768
    a = np.ones((size, size), dtype=np.float32)
    out = a @ a
    best_s = float("inf")
    for _ in range(5):
        start_s = time.perf_counter()
        np.matmul(a, a, out=out)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * size**3 / best_s
