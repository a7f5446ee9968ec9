"""Devices by name, efficiencies, links and collectives."""

import pytest

from furlong.cost.machine import (
    KNOWN,
    THIS_CPU,
    ClusterLinks,
    Link,
    _free_in_control_group,
    free_ram_budget_bytes,
    hardware,
    rounded_budget,
    this_cpu,
)
from furlong.errors import ConfigError


@pytest.mark.parametrize("name", KNOWN)
def test_every_device_is_whole_and_sourced(name):
    spec = hardware(name)
    assert spec.name == name
    assert 0 < spec.budget_bytes < spec.memory_bytes
    assert spec.links.host.bytes_per_s < spec.links.within_node.bytes_per_s * 2
    assert spec.links.between_nodes.bytes_per_s < spec.links.within_node.bytes_per_s
    sourced = ", ".join(spec.sources)
    for figure in (
        "peak_flops_per_s", "memory_bytes", "between_nodes", "half_tokens", "memory of the host",
    ):  # fmt: skip
        assert figure in sourced, figure
    assert all(spec.sources.values())


def test_figures_of_the_data_sheets():
    tera = {name: hardware(name).peak_flops_per_s / 1e12 for name in KNOWN}
    assert tera["A100-80"] == tera["A800"] == 312
    assert tera["H100"] == tera["H200"] == 989
    # with sparsity, as the sheets tell them, all are 2 times that
    assert [tera[n] for n in ("H100-PCIe", "H100-NVL", "L40S", "L4", "A10G", "RTX5090")] == [
        1513 // 2, 1671 // 2, 362.05, 242 / 2, 140 / 2, 419 / 2,
    ]  # fmt: skip
    assert hardware("A800").links.within_node.bytes_per_s == 400e9 / 2
    assert hardware("A800").links.between_nodes.bytes_per_s == 400e9 / 8 / 8
    assert hardware("RTX3090").memory_bytes == 24 * 2**30
    # an eighth of nine tenths of the node's
    assert [hardware(n).host_bytes for n in ("H100", "A100-40")] == [
        2**41 * 9 // 80,
        2**40 * 9 // 80,
    ]


@pytest.mark.parametrize(
    ("given", "nearest"), [("A100", "A100-80"), ("h10", "H100"), ("rtx 4090", "RTX4090")]
)
def test_an_unknown_name_names_the_nearest(given, nearest):
    with pytest.raises(ConfigError) as error:
        hardware(given)
    assert error.value.given == f"hardware {given!r}"
    assert nearest[:4] in error.value.change
    assert nearest in error.value.required


def test_case_does_not_matter():
    assert hardware("h200").name == "H200"


def test_this_cpu_is_measured():
    spec = hardware(THIS_CPU)
    assert spec.peak_flops_per_s > 1e9
    assert "measured now" in spec.sources["peak_flops_per_s"]


def test_without_a_measurement_the_rate_is_the_same_every_time():
    assert this_cpu(measured=False) == this_cpu(measured=False)
    cores = this_cpu(measured=False).links.devices_per_node
    assert this_cpu(measured=False).peak_flops_per_s == cores * 5e10


def test_a_budget_is_a_share_of_the_free_ram_in_coarse_steps():
    assert 0 < free_ram_budget_bytes() < this_cpu(measured=False).memory_bytes
    assert [rounded_budget(n) for n in (0, 15, 16, 17, 31, 33)] == [0, 15, 16, 16, 30, 32]


def test_a_containers_limit_counts_as_ram(tmp_path):
    assert _free_in_control_group(tmp_path / "none") >= 2**60
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\nactive_file 50\ninactive_file 120\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert _free_in_control_group(tmp_path) >= 2**60
    (tmp_path / "memory.max").write_text("1000\n")
    assert _free_in_control_group(tmp_path) == 470


def test_half_tokens_follow_the_roofline():
    """256 on an A100 (ChunkFlow, Table 6), 128 on an RTX 3090 (SeCO, 4.2)."""
    assert hardware("A100-80").linear.half_tokens == pytest.approx(256, rel=0.01)
    assert hardware("RTX3090").linear.half_tokens == pytest.approx(128, rel=0.02)
    assert hardware("H200").linear.half_tokens < hardware("H100").linear.half_tokens


LINKS = ClusterLinks(
    devices_per_node=8, within_node=Link(1e-5, 200e9), between_nodes=Link(3e-5, 6.25e9),
    host=Link(0, 25e9), disk=Link(0, 1e9),
)  # fmt: skip


def test_collectives_within_a_node():
    gathered = LINKS.collective_s("all_gather", 8e9, 8)
    assert gathered == pytest.approx(1e-5 + 7e9 / 200e9)
    assert LINKS.collective_s("all_reduce", 8e9, 8) == pytest.approx(1e-5 + 14e9 / 200e9)
    assert LINKS.collective_s("all_to_all", 8e9, 1) == 0


def test_collectives_between_nodes():
    # 16 devices on two nodes: of an all-to-all 8/16 of each buffer crosses; in a ring each byte
    # crosses once per node, over the shares of its eight devices
    assert LINKS.collective_s("all_to_all", 16e9, 16, 2) == pytest.approx(3e-5 + 8e9 / 6.25e9)
    gathered = LINKS.collective_s("all_gather", 16e9, 16, 2)
    assert gathered == pytest.approx(3e-5 + 15e9 / 8 / 6.25e9)
    # with one device per node everything crosses
    assert LINKS.collective_s("all_gather", 4e9, 4, 4) == pytest.approx(3e-5 + 3e9 / 6.25e9)


def test_messages_know_their_nodes():
    assert LINKS.p2p_s(1e9, 0, 7) == pytest.approx(1e-5 + 1 / 200)
    assert LINKS.p2p_s(1e9, 7, 8) == pytest.approx(3e-5 + 1 / 6.25)
