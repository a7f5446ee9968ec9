"""Figures of devices by name, each with its source.

Peaks are dense from the vendor's data sheets: of bfloat16, of float32 outside the tensor cores
(torch's default; no TF32), and the best of float64. Bandwidths are per device and direction;
memory is what the driver reports, a little less or more than a data sheet's round number.
What a data sheet does not say (efficiencies, launch times, reserved memory, how a node is cabled)
is an assumption and says so; `furlong calibrate` replaces it by measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from furlong.cost.devices.links import Collective, Link

TIB = 2**40
GIB = 2**30
MIB = 2**20

_ASSUMED = {
    "linear_best, attention_*_best": "assumed, from what FlashAttention-2 (50 to 73 % of an A100's "
    "peak) and Megatron-LM (52 %, everything included) report; calibrate",
    "half_tokens": "assumed: 5/3 of the roofline's balance (peak over memory bandwidth as tokens); "
    "gives an A100 the loss of small chunks in ChunkFlow's Table 6, and an RTX 3090 the 128 tokens "
    "beyond which SeCO (4.2) sees little gain; calibrate",
    "layer_launch_s": "assumed: some 25 kernels at 6 us, as eager modules launch them; calibrate",
    "optimizer_parameters_per_s": "the bytes that AdamW passes over the memory's bandwidth",
    "reserved_bytes": "assumed: context 0.5 GiB, and 3 % of gaps between allocated blocks",
    "*_latency_s": "assumed: some 20 us within a node, 30 us between nodes; calibrate",
    "host_bytes_per_s": "assumed: four fifths of the PCIe rate, one link per device",
    "host_bytes": "one of equal shares of the node's, less an assumed tenth for the system",
    "disk_bytes_per_s": "assumed: one NVMe drive shared by the node",
}


@dataclass(frozen=True, kw_only=True)
class Figures:
    peak_flops_per_s: float
    float32_flops_per_s: float
    float64_flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    within_bytes_per_s: float
    between_bytes_per_s: float
    host_bytes_per_s: float
    node_host_bytes: int
    """Memory of a node's host."""
    devices_per_node: int = 8
    linear_best: float = 0.62
    attention_forward_best: float = 0.55
    attention_backward_best: float = 0.48
    layer_launch_s: float = 1.5e-4
    within_latency_s: float = 2e-5
    between_latency_s: float = 3e-5
    host_latency_s: float = 1e-5
    disk_bytes_per_s: float = 5e8
    collectives: Mapping[tuple[Collective, bool], Link] | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def half_tokens(self) -> float:
        """A matrix in bf16 is read in the time in which peak / bandwidth tokens go through it."""
        return 5 / 3 * self.peak_flops_per_s / self.memory_bytes_per_s

    @property
    def reserved_bytes(self) -> int:
        return GIB // 2 + int(0.03 * self.memory_bytes)

    @property
    def host_bytes(self) -> int:
        """A device's share of the host's memory, a tenth of which is the system's."""
        return self.node_host_bytes * 9 // 10 // self.devices_per_node


def _sources(sheet: str, node: str, host: str = "") -> dict[str, str]:
    return {
        "peak_flops_per_s, float*_flops_per_s, memory_bytes_per_s, within_bytes_per_s": sheet,
        "memory_bytes": "nvidia-smi on such a device",
        "between_bytes_per_s, devices_per_node": node,
        "node_host_bytes": host or node,
        **_ASSUMED,
    }


_SKRULL_GROUP = 8
_SKRULL_US = {
    "all_gather": (6.35, 92.0, 1), "all_to_all": (6.68, 60.0, 1),
    "reduce_scatter": (6.11, 77.0, 1), "all_reduce": (11.80, 117.0, 2),
}  # fmt: skip
"""Table 3 of Skrull from 16 MB on: (us per MB, us, times a byte moves), relative least squares."""


def _skrull_links() -> dict[tuple[Collective, bool], Link]:
    """Skrull's profile as bus bandwidths: of a group of n, each device moves (n - 1) / n."""
    share = (_SKRULL_GROUP - 1) / _SKRULL_GROUP
    links: dict[tuple[Collective, bool], Link] = {}
    for name, (us_per_mb, us, moves) in _SKRULL_US.items():
        links[name, False] = Link(us * 1e-6, share * moves * 1e12 / us_per_mb)  # type: ignore[index]
    return links


def _in_pcie_5(card: Figures) -> Figures:
    """`card` in the node of `_PC_5`."""
    return replace(
        card, within_bytes_per_s=40e9, between_bytes_per_s=6.25e9, host_bytes_per_s=50e9,
        node_host_bytes=TIB,
    )  # fmt: skip


_A100 = Figures(
    peak_flops_per_s=312e12, float32_flops_per_s=19.5e12, float64_flops_per_s=19.5e12,
    memory_bytes=80 * GIB, memory_bytes_per_s=2.039e12,
    within_bytes_per_s=300e9, between_bytes_per_s=25e9, host_bytes_per_s=25e9,
    node_host_bytes=2 * TIB,
)  # fmt: skip
_H100 = Figures(
    peak_flops_per_s=989e12, float32_flops_per_s=67e12, float64_flops_per_s=67e12,
    memory_bytes=81559 * MIB, memory_bytes_per_s=3.35e12,
    within_bytes_per_s=450e9, between_bytes_per_s=50e9, host_bytes_per_s=50e9,
    linear_best=0.55, attention_forward_best=0.50, attention_backward_best=0.42,
    node_host_bytes=2 * TIB,
)  # fmt: skip
_CARD = Figures(
    peak_flops_per_s=165.2e12, float32_flops_per_s=82.6e12, float64_flops_per_s=1.29e12,
    memory_bytes=24 * GIB, memory_bytes_per_s=1008e9,
    within_bytes_per_s=20e9, between_bytes_per_s=1.25e9, host_bytes_per_s=25e9,
    node_host_bytes=512 * GIB,
)  # fmt: skip
_DGX_A100 = "DGX A100: eight adapters of 200 Gb/s for eight devices, 2 TB of memory (40 GB: 1 TB)"
_DGX_H100 = "DGX H100: eight adapters of 400 Gb/s for eight devices, 2 TB of memory"
_PC = "assumed: a node of PCIe 4 cards without NVLink, one 100 Gb/s adapter and 512 GiB for eight"
_PC_5 = (
    "assumed: a node of PCIe 5 cards, one 400 Gb/s adapter and 1 TiB for eight; bridges of NVLink, "
    "which join two, are left out"
)
_NO_FLOAT64 = "float64, which it does not tell: a 64th of float32"

KNOWN: dict[str, Figures] = {
    "A100-40": replace(
        _A100, memory_bytes=40 * GIB, memory_bytes_per_s=1.555e12, node_host_bytes=TIB,
        sources=_sources("NVIDIA A100 SXM4 40GB data sheet", _DGX_A100),
    ),
    "A100-80": replace(_A100, sources=_sources("NVIDIA A100 SXM4 80GB data sheet", _DGX_A100)),
    "A800": replace(
        _A100, within_bytes_per_s=200e9, between_bytes_per_s=6.25e9, node_host_bytes=TIB,
        sources=_sources(
            "as the A100 80GB, NVLink 400 GB/s in both directions (InfiniPipe, 5.1)",
            "InfiniPipe, 5.1: one InfiniBand network of 400 Gb/s for eight devices",
            "assumed: 1 TB, as the smaller DGX A100 has",
        ),
    ),
    "H100": replace(_H100, sources=_sources("NVIDIA H100 SXM5 data sheet", _DGX_H100)),
    "H100-PCIe": replace(
        _in_pcie_5(_H100), peak_flops_per_s=756e12, float32_flops_per_s=51e12,
        float64_flops_per_s=51e12, memory_bytes_per_s=2e12,
        sources=_sources("NVIDIA H100 data sheet, column PCIe, halved: no sparsity", _PC_5),
    ),
    "H100-NVL": replace(
        _in_pcie_5(_H100), peak_flops_per_s=835e12, float32_flops_per_s=60e12,
        float64_flops_per_s=60e12, memory_bytes=95830 * MIB, memory_bytes_per_s=3.9e12,
        sources=_sources("NVIDIA H100 data sheet, column NVL, halved: no sparsity", _PC_5),
    ),
    "H100-Skrull": replace(
        _H100, collectives=_skrull_links(),
        sources=_sources("NVIDIA H100 SXM5 data sheet", _DGX_H100) | {
            "collectives": "Skrull, Table 3, from 16 MB on; the size of the group is not stated, "
            "taken as 8",
        },
    ),
    "H200": replace(
        _H100, memory_bytes=143771 * MIB, memory_bytes_per_s=4.8e12,
        sources=_sources("NVIDIA H200 SXM data sheet", _DGX_H100),
    ),
    "B200": replace(
        _H100, peak_flops_per_s=2.25e15, float32_flops_per_s=75e12, float64_flops_per_s=37e12,
        memory_bytes=183359 * MIB, memory_bytes_per_s=8e12,
        within_bytes_per_s=900e9, linear_best=0.50, attention_forward_best=0.45,
        attention_backward_best=0.38,
        sources=_sources(
            "NVIDIA DGX B200 data sheet, per device (float32, float64: HGX B200)",
            "DGX B200: 400 Gb/s per device, 2 TB of memory (up to 4 TB)",
        ),
    ),
    "RTX3090": replace(
        _CARD, peak_flops_per_s=71e12, float32_flops_per_s=35.6e12, float64_flops_per_s=0.556e12,
        memory_bytes_per_s=936e9,
        sources=_sources("NVIDIA GA102 white paper, bf16 with float32 sums", _PC),
    ),
    "RTX4090": replace(
        _CARD, sources=_sources("NVIDIA Ada white paper, bf16 with float32 sums", _PC)
    ),
    "RTX5090": replace(
        _in_pcie_5(_CARD), peak_flops_per_s=209.5e12, float32_flops_per_s=104.8e12,
        float64_flops_per_s=1.64e12, memory_bytes=32607 * MIB, memory_bytes_per_s=1792e9,
        sources=_sources("NVIDIA RTX Blackwell white paper, bf16 with float32 sums", _PC_5),
    ),
    "L40S": replace(
        _CARD, peak_flops_per_s=362.05e12, float32_flops_per_s=91.6e12,
        float64_flops_per_s=1.43e12, memory_bytes=46068 * MIB, memory_bytes_per_s=864e9,
        sources=_sources(f"NVIDIA L40S data sheet; {_NO_FLOAT64}", _PC),
    ),
    "L4": replace(
        _CARD, peak_flops_per_s=121e12, float32_flops_per_s=30.3e12, float64_flops_per_s=0.473e12,
        memory_bytes=23034 * MIB, memory_bytes_per_s=300e9,
        sources=_sources(f"NVIDIA L4 data sheet, halved: no sparsity; {_NO_FLOAT64}", _PC),
    ),
    "A10G": replace(
        _CARD, peak_flops_per_s=70e12, float32_flops_per_s=35e12, float64_flops_per_s=0.547e12,
        memory_bytes=23028 * MIB, memory_bytes_per_s=600e9,
        sources=_sources(f"NVIDIA A10G data sheet for AWS; {_NO_FLOAT64}", _PC),
    ),
}  # fmt: skip
