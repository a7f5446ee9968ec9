"""The known device that a driver's name stands for."""

from __future__ import annotations

from dataclasses import replace

from furlong.cost.devices.hardware import HardwareSpec, hardware
from furlong.cost.devices.known_hardware import KNOWN

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
