"""HardwareSpec: a cluster as plain numbers, and how much of its peak a call reaches.

Efficiency saturates with the tokens of a call: best * t / (t + half_tokens). Equivalently a call
costs its FLOPs at the best rate plus a fixed time worth `half_tokens` tokens. Without it every
search picks the smallest chunk. InfiniPipe (Appendix B) and ChunkFlow (Table 6) publish the shape:
fewer tokens per call, less throughput. What a data sheet does not tell, and a large model hides
(kernels that pass bytes, slices, tiles), costs nothing until a calibration has measured it.

Seconds on a link: latency plus bytes over bandwidth, per collective (InfiniPipe, Eq. 2).

A bandwidth is what one device moves: `bytes_per_s` is a bus bandwidth in the sense of nccl-tests,
so that it does not depend on the size of the group. Between nodes it is one device's share of its
node's adapters.

Devices by name, each figure with its source. Peaks are dense from the vendor's data sheets: of
bfloat16, of float32 outside the tensor cores
(torch's default; no TF32), and the best of float64. Bandwidths are per device and direction;
memory is what the driver reports, a little less or more than a data sheet's round number.
What a data sheet does not say (efficiencies, launch times, reserved memory, how a node is cabled)
is an assumption and says so; `furlong calibrate` replaces it by measurements.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import psutil

from furlong.cost.inputs import look_up

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
    """Bytes of saved tensors and of logits that pass per second through the
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
    """A device by name: one of KNOWN, or `cpu` for this machine, measured now.

    Raises ConfigError that names the nearest.
    """
    known: dict[str, HardwareSpec | None] = {THIS_CPU: None, **KNOWN}
    return look_up(name, known, kind="hardware", source="the hardware's name") or this_cpu()


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


Collective = Literal["all_to_all", "all_gather", "reduce_scatter", "all_reduce", "p2p"]


@dataclass(frozen=True, slots=True)
class Link:
    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class ClusterLinks:
    """The links of a cluster of equal nodes."""

    devices_per_node: int
    within_node: Link
    between_nodes: Link
    host: Link
    """Link of a device to its host's memory, in one direction, with all devices at work."""
    disk: Link
    collectives: Mapping[tuple[Collective, bool], Link] | None = None
    """Calibrated values by (collective, between nodes?); the others use the two links above."""

    def link(self, collective: Collective, between: bool) -> Link:
        plain = self.between_nodes if between else self.within_node
        return (self.collectives or {}).get((collective, between), plain)

    def num_nodes(self, devices: Sequence[int]) -> int:
        """Nodes that a group of device numbers touches."""
        return len({device // self.devices_per_node for device in devices})

    def p2p_s(self, num_bytes: float, sender: int, receiver: int) -> float:
        """One message between two devices."""
        between = self.num_nodes((sender, receiver)) > 1
        return self.link("p2p", between).seconds(num_bytes)

    def effective(self, collective: Collective, group_size: int, num_nodes: int = 1) -> Link:
        """The link that a device of a group sees, for the bytes that it moves itself.

        The group is spread evenly over `num_nodes` nodes. Rings cross each node once: a node's
        adapters carry every byte once, so each of its g devices one g-th. In an all-to-all each
        device sends to all others, and waits for the slower of near and far.
        """
        if num_nodes <= 1 or group_size <= 1:
            return self.link(collective, False)
        local = max(1, group_size // num_nodes)
        within, between = self.link(collective, False), self.link(collective, True)
        if collective == "all_to_all":
            far = (group_size - local) / (group_size - 1)
            near = (local - 1) / (group_size - 1)
        else:
            far, near = 1 / local, 1.0
        slowest_s = max(far / between.bytes_per_s, near / within.bytes_per_s)
        return Link(between.latency_s, 1 / slowest_s)

    def collective_s(
        self, collective: Collective, num_bytes: float, group_size: int, num_nodes: int = 1
    ) -> float:
        """Seconds of a collective.

        `num_bytes`: what one device holds at the wide end: the gathered result, the gradient before
        it is scattered, the buffer of an all-to-all. All but the own share moves, in an all_reduce
        twice.
        """
        if group_size <= 1:
            return 0.0
        moved = num_bytes * (group_size - 1) / group_size * (2 if collective == "all_reduce" else 1)
        return self.effective(collective, group_size, num_nodes).seconds(moved)


TIB = 2**40
GIB = 2**30
MIB = 2**20

_ASSUMED = {
    "best of linear, attention_*": "assumed, from what FlashAttention-2 (50 to 73 % of an A100's "
    "peak) and Megatron-LM (52 %, everything included) report; calibrate",
    "half_tokens": "assumed: 5/3 of the roofline's balance (peak over memory bandwidth as tokens); "
    "gives an A100 the loss of small chunks in ChunkFlow's Table 6, and an RTX 3090 the 128 tokens "
    "beyond which SeCO (4.2) sees little gain; calibrate",
    "layer_launch_s": "assumed: some 25 kernels at 6 us, as eager modules launch them; calibrate",
    "optimizer_parameters_per_s": "the bytes that AdamW passes over the memory's bandwidth",
    "reserved_bytes": "assumed: context 0.5 GiB, and 3 % of gaps between allocated blocks",
    "*_latency_s": "assumed: some 20 us within a node, 30 us between nodes; calibrate",
    "host": "assumed: four fifths of the PCIe rate, one link per device",
    "host_bytes": "one of equal shares of the node's, less an assumed tenth for the system",
    "disk": "assumed: one NVMe drive shared by the node",
}


# bytes per second within a node of eight, between nodes, to the host; bytes of its host; source
_Node = tuple[float, float, float, int, str]
_DGX = "eight adapters of {} Gb/s for eight devices, 2 TB of memory"
_DGX_A100: _Node = (300e9, 25e9, 25e9, 2 * TIB, f"DGX A100: {_DGX.format(200)}")
_DGX_A100_40: _Node = (*_DGX_A100[:3], TIB, f"DGX A100: {_DGX.format(200)} (40 GB: 1 TB)")
_DGX_H100: _Node = (450e9, 50e9, 50e9, 2 * TIB, f"DGX H100: {_DGX.format(400)}")
_DGX_B200: _Node = (
    900e9, 50e9, 50e9, 2 * TIB, "DGX B200: 400 Gb/s per device, 2 TB of memory (up to 4 TB)",
)  # fmt: skip
_INFINIPIPE: _Node = (
    200e9, 6.25e9, 25e9, TIB,
    "InfiniPipe, 5.1: NVLink 400 GB/s in both directions, one InfiniBand network of 400 Gb/s for "
    "eight devices; assumed: 1 TB, as the smaller DGX A100 has",
)  # fmt: skip
_PC: _Node = (
    20e9, 1.25e9, 25e9, 512 * GIB,
    "assumed: a node of PCIe 4 cards without NVLink, one 100 Gb/s adapter and 512 GiB for eight",
)  # fmt: skip
_PC_5: _Node = (
    40e9, 6.25e9, 50e9, TIB,
    "assumed: a node of PCIe 5 cards, one 400 Gb/s adapter and 1 TiB for eight; bridges of NVLink, "
    "which join two, are left out",
)  # fmt: skip
# best of matrices, of attention, of its backward
_AMPERE, _HOPPER, _BLACKWELL = (0.62, 0.55, 0.48), (0.55, 0.50, 0.42), (0.50, 0.45, 0.38)
_NO_FLOAT64 = "float64, which it does not tell: a 64th of float32"
# TFLOP/s in 16 bits, float32, float64; bytes of memory, TB/s of it; node; efficiencies; sheet
_Row = tuple[float, float, float, int, float, _Node, tuple[float, float, float], str]
_SHEETS: dict[str, _Row] = {
    "A100-40": (312, 19.5, 19.5, 40 * GIB, 1.555, _DGX_A100_40, _AMPERE,
                "NVIDIA A100 SXM4 40GB data sheet"),
    "A100-80": (312, 19.5, 19.5, 80 * GIB, 2.039, _DGX_A100, _AMPERE,
                "NVIDIA A100 SXM4 80GB data sheet"),
    "A800": (312, 19.5, 19.5, 80 * GIB, 2.039, _INFINIPIPE, _AMPERE, "as the A100 80GB"),
    "H100": (989, 67, 67, 81559 * MIB, 3.35, _DGX_H100, _HOPPER, "NVIDIA H100 SXM5 data sheet"),
    "H100-PCIe": (756, 51, 51, 81559 * MIB, 2.0, _PC_5, _HOPPER,
                  "NVIDIA H100 data sheet, column PCIe, halved: no sparsity"),
    "H100-NVL": (835, 60, 60, 95830 * MIB, 3.9, _PC_5, _HOPPER,
                 "NVIDIA H100 data sheet, column NVL, halved: no sparsity"),
    "H200": (989, 67, 67, 143771 * MIB, 4.8, _DGX_H100, _HOPPER, "NVIDIA H200 SXM data sheet"),
    "B200": (2250, 75, 37, 183359 * MIB, 8.0, _DGX_B200, _BLACKWELL,
             "NVIDIA DGX B200 data sheet, per device (float32, float64: HGX B200)"),
    "RTX3090": (71, 35.6, 0.556, 24 * GIB, 0.936, _PC, _AMPERE,
                "NVIDIA GA102 white paper, bf16 with float32 sums"),
    "RTX4090": (165.2, 82.6, 1.29, 24 * GIB, 1.008, _PC, _AMPERE,
                "NVIDIA Ada white paper, bf16 with float32 sums"),
    "RTX5090": (209.5, 104.8, 1.64, 32607 * MIB, 1.792, _PC_5, _AMPERE,
                "NVIDIA RTX Blackwell white paper, bf16 with float32 sums"),
    "L40S": (362.05, 91.6, 1.43, 46068 * MIB, 0.864, _PC, _AMPERE,
             f"NVIDIA L40S data sheet; {_NO_FLOAT64}"),
    "L4": (121, 30.3, 0.473, 23034 * MIB, 0.3, _PC, _AMPERE,
           f"NVIDIA L4 data sheet, halved: no sparsity; {_NO_FLOAT64}"),
    "A10G": (70, 35, 0.547, 23028 * MIB, 0.6, _PC, _AMPERE,
             f"NVIDIA A10G data sheet for AWS; {_NO_FLOAT64}"),
}  # fmt: skip


def _device(name: str, row: _Row) -> HardwareSpec:
    tflops, wide, widest, memory_bytes, bandwidth, node, best, sheet = row
    within, between, host, node_host_bytes, node_source = node
    # a matrix in 16 bits is read in the time in which peak / bandwidth tokens go through it
    linear, forward, backward = (Efficiency(one, 5 / 3 * tflops / bandwidth) for one in best)
    return HardwareSpec(
        name=name,
        peak_flops_per_s=tflops * 1e12,
        wide_flops_per_s={"float32": wide * 1e12, "float64": widest * 1e12},
        memory_bytes=memory_bytes,
        reserved_bytes=GIB // 2 + int(0.03 * memory_bytes),
        linear=linear,
        attention_forward=forward,
        attention_backward=backward,
        layer_launch_s=1.5e-4,
        optimizer_parameters_per_s=bandwidth * 1e12 / OPTIMIZER_STEP_BYTES,
        links=ClusterLinks(
            devices_per_node=8,
            within_node=Link(2e-5, within),
            between_nodes=Link(3e-5, between),
            host=Link(1e-5, host),
            disk=Link(1e-4, 5e8),
        ),
        host_bytes=node_host_bytes * 9 // 10 // 8,
        sources={
            "peak_flops_per_s, wide_flops_per_s, bandwidth of memory": sheet,
            "memory_bytes": "nvidia-smi on such a device",
            "within_node, between_nodes, devices_per_node, memory of the host": node_source,
            **_ASSUMED,
        },
    )


KNOWN = {name: _device(name, row) for name, row in _SHEETS.items()}


# The driver's whole names: cards of one family and another form have other peaks.
EXACT_NAMES = {
    "NVIDIA A100-PCIE-40GB": "A100-40",
    "NVIDIA A100-SXM4-40GB": "A100-40",
    "NVIDIA A100 80GB PCIe": "A100-80",
    "NVIDIA A100-SXM4-80GB": "A100-80",
    "NVIDIA A10G": "A10G",
    "NVIDIA A800-SXM4-80GB": "A800",
    "NVIDIA B200": "B200",
    "NVIDIA GeForce RTX 3090": "RTX3090",
    "NVIDIA GeForce RTX 4090": "RTX4090",
    "NVIDIA GeForce RTX 5090": "RTX5090",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA H200": "H200",
    "NVIDIA L4": "L4",
    "NVIDIA L40S": "L40S",
}


def nearest_hardware(device_name: str, memory_bytes: int) -> str:
    """The known hardware of that name, else the one whose memory is nearest: good enough to rank
    plans by, not to tell a peak."""
    if device_name in EXACT_NAMES:
        return EXACT_NAMES[device_name]
    return min(KNOWN, key=lambda name: abs(KNOWN[name].memory_bytes - memory_bytes))


def spec_of_card(device_name: str, memory_bytes: int) -> HardwareSpec:
    """The figures of `nearest_hardware`, with the card's own name if they are another one's."""
    spec = hardware(nearest_hardware(device_name, memory_bytes))
    return spec if device_name in EXACT_NAMES else replace(spec, card=device_name)
