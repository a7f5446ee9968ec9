"""Machines: data sheets by name, links and collectives, and calibrations read, applied, refused."""

import json
from dataclasses import replace
from math import inf, nan

import pytest

from furlong.cost import machine
from furlong.cost.machine import (
    CONTEXT_BYTES,
    THIS_CPU,
    ClusterLinks,
    Efficiency,
    Link,
    Machine,
    _free_in_control_group,
    free_ram_budget_bytes,
    known_card,
    known_machines,
    one_of,
    rounded_budget,
    this_cpu,
)
from furlong.cost.memory import stage_bytes
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.errors import ConfigError
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device


def test_every_card_is_whole():
    for name, spec in known_machines().items():
        assert Machine.named(name.lower()) == spec and spec.name == name
        assert 0 < spec.budget_bytes < spec.memory_bytes
        assert spec.links.host.bytes_per_s < spec.links.within_node.bytes_per_s * 2
        assert spec.links.between_nodes.bytes_per_s < spec.links.within_node.bytes_per_s
    # one of equal parts of three fifths of the node's, in four binary digits
    card = Machine.named("A100-40")
    assert card.host_bytes == 9 * 2**36 // 8 == one_of(card, 4).host_bytes // 2


@pytest.mark.parametrize(("given", "nearest"), [("A100", "A100-80"), ("rtx 4090", "RTX4090")])
def test_an_unknown_name_names_the_nearest(given, nearest):
    with pytest.raises(ConfigError) as error:
        Machine.named(given)
    assert error.value.given == f"hardware {given!r}"
    assert nearest[:4] in error.value.change
    assert nearest in error.value.required


def test_this_cpu_is_the_same_every_time():
    spec = Machine.named(THIS_CPU)
    assert spec == this_cpu()
    assert spec.peak_flops_per_s == spec.links.devices_per_node * 5e10


def test_a_budget_is_a_share_of_the_free_ram_in_coarse_steps():
    assert 0 < free_ram_budget_bytes() < this_cpu().memory_bytes
    assert [rounded_budget(n) for n in (0, 15, 16, 17, 31, 33)] == [0, 15, 16, 16, 30, 32]


def test_processes_share_what_is_free_where_none_is_given(monkeypatch):
    monkeypatch.setattr(machine, "free_ram_budget_bytes", lambda: 300)
    cpu, card = this_cpu(), Machine.named("H100")
    assert cpu.budget("auto", 3) == (100, "three fifths of the free RAM over 3 processes")
    assert card.budget("auto", 3, 320) == (288, "95% of what is free, as H100")
    # what is planned elsewhere is planned as a run on a free card decides
    for one in known_machines().values():
        assert one.budget("auto") == one.budget("auto", 8, one.memory_bytes - CONTEXT_BYTES)
    assert card.budget(7, 3, 320) == (7, "memory.device")


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
    assert Machine.named("A100-80").linear.half_tokens == pytest.approx(256, rel=0.01)
    assert Machine.named("RTX3090").linear.half_tokens == pytest.approx(128, rel=0.02)
    assert Machine.named("H200").linear.half_tokens < Machine.named("H100").linear.half_tokens


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


FIGURES = {
    "linear": Efficiency(0.66, 190.0), "attention_backward": Efficiency(0.4, 300.0, 0.9, 0.6),
    "pass_launch_s": 2e-3, "slice_launch_s": 1e-4, "activation_bytes_per_s": 8e9,
    "optimizer_parameters_per_s": 1e8, "activation_factor": 1.1, "heap_blocks": 2.5,
    "heap_share": 0.25, "time_error": 0.08, "memory_error": 0.05,
    "host": Link(1e-5, 21e9), "all_reduce": Link(1e-4, 3e9),
    "all_to_all between nodes": Link(2e-4, 1e9),
}  # fmt: skip
A100 = Machine.named("A100-80")
MEASURED = A100.measured(FIGURES)


def test_measured_figures_replace_assumed_ones():
    links = MEASURED.links
    assert MEASURED.linear == Efficiency(0.66, 190.0) and links.host == Link(1e-5, 21e9)
    unchanged = ("attention_forward", "peak_flops_per_s", "layer_launch_s", "memory_bytes")
    assert all(getattr(MEASURED, name) == getattr(A100, name) for name in unchanged)
    assert (MEASURED.pass_launch_s, MEASURED.slice_launch_s) == (2e-3, 1e-4)
    assert links.link("all_reduce", False) == Link(1e-4, 3e9)
    assert links.link("all_to_all", True) == Link(2e-4, 1e9)
    assert links.link("all_to_all", False) == links.within_node == A100.links.within_node
    assert MEASURED.measurements == FIGURES and A100.measurements == {}
    assert [m.margin(0.1) for m in (A100, MEASURED, replace(A100, memory_error=0.0))] == [
        0.1, 0.05, 0.02,
    ]  # fmt: skip


def test_what_is_saved_is_read(tmp_path):
    file = tmp_path / "calibration.json"
    MEASURED.save(file, "bfloat16")
    found = A100.calibrated("bfloat16", file)
    assert replace(found, origin=A100.origin) == MEASURED
    assert found.origin.endswith(f"({file}), times within 8%, peaks within 5%")
    # as written before kinds of calls were told apart: one rate for all
    values = json.loads(file.read_text())
    for share in ("square", "packed"):
        assert values["attention_backward"].pop(share) < 1
    file.write_text(json.dumps(values))
    older = A100.calibrated("bfloat16", file).attention_backward
    assert older == Efficiency(0.4, 300.0, square=1.0, packed=1.0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dtype": "float32"}, "was measured on another machine"),
        ({"hardware": "H100"}, "was measured on another machine (H100; this is A100-80)"),
        ({"machine": "an A40"}, "was measured on another machine (an A40; this is A100-80)"),
        ({"version": 2}, "version 2"),
        ({"linear": {"best": 0.5}}, "half_tokens"),
        ({"linear": {"best": 0.5, "half_tokens": 1, "packed": 0}}, "'packed': 0"),
        ({"links": []}, "no attribute"),
        ({"speed": 3}, "speed = 3"),
        ({"memory_bytes": 3}, "memory_bytes = 3"),
        ({"heap_blocks": -1}, "heap_blocks = -1"),
        ({"heap_share": None}, "heap_share = None"),
        ({"linear": {"best": 0.5, "half_tokens": 1, "square": nan}}, "'square': nan"),
        ({"linear": {"best": True, "half_tokens": 1}}, "'best': True"),
        ({"peak_flops_per_s": 0}, "peak_flops_per_s = 0"),
        ({"time_error": inf}, "time_error = inf"),
        ({"linear": {"best": 5, "half_tokens": 1}}, "'best': 5"),
        ({"attention_forward": {"best": 0.5, "half_tokens": 1, "square": 2}}, "'square': 2"),
        ({"memory_error": 1.5}, "memory_error = 1.5"),
    ],
)
def test_edited_files_are_refused_and_those_of_other_machines_left_alone(tmp_path, change, told):
    file = tmp_path / "calibration.json"
    MEASURED.save(file, "bfloat16")
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    if "another machine" in told:
        found = A100.calibrated("bfloat16", file)
        assert replace(found, origin=A100.origin) == A100 and told in found.origin
        return
    with pytest.raises(ConfigError) as error:
        A100.calibrated("bfloat16", file)
    assert told in error.value.given
    assert "furlong calibrate" in error.value.change


def test_a_calibration_is_named_by_its_card(tmp_path, monkeypatch):
    """An unknown card has the figures of the one with the nearest memory, and its own files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PG509-200"
    known, other = (Machine.of_card(name, 40 * 2**30) for name in names)
    assert known == replace(other, card="", memory_bytes=known.memory_bytes)
    assert known == Machine.named("A100-40") and other.memory_bytes == 40 * 2**30
    files = [machine.calibration_file("bfloat16") for machine in (known, other)]
    assert [file.name for file in files] == [
        "calibration-A100-40-bfloat16.json", "calibration-NVIDIA-A100-PG509-200-bfloat16.json",
    ]  # fmt: skip
    files[0].parent.mkdir()
    other.measured(FIGURES).save(files[1], "bfloat16")
    assert known.calibrated("bfloat16") == known
    assert other.calibrated("bfloat16").linear == FIGURES["linear"]
    assert [known_card(name) for name in names] == [known, None]


@pytest.mark.parametrize(
    ("name", "dtype", "slower"),
    [
        ("H100", "float32", 989 / 67),
        ("H100", "bfloat16", 1),
        ("A100-80", "float64", 312 / 19.5),
        ("RTX3090", "float64", 71 / 0.556),
    ],
)
def test_assumed_rates_are_those_of_the_dtype(name, dtype, slower, tmp_path, monkeypatch):
    """A calibration's are shares of the peak in 16 bits, whatever its dtype."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape = model_shape("Qwen2.5-0.5B")
    card = replace(Machine.named(name), activation_bytes_per_s=inf)
    model = CostModel(shape, card, Training.in_dtype(dtype))
    plan = plan_on_device([2**17], ChunkOptions(size=2**17), num_layers=24)
    sixteen, wide = (
        sum(costs.compute_s(action, 0) for action in plan.actions[0])
        for costs in (model.costs(plan), model.calibrated(dtype).costs(plan))
    )
    assert wide / sixteen == pytest.approx(slower, rel=0.05)
    place = model.hardware.calibration_file(dtype)
    place.parent.mkdir()
    model.hardware.measured(FIGURES).save(place, dtype)
    assert model.calibrated(dtype).hardware.peak_flops_per_s == model.hardware.peak_flops_per_s


def test_a_cost_model_counts_what_was_measured():
    plan = plan_on_device([600], ChunkOptions(size=256), num_layers=24)
    shape = model_shape("Qwen2.5-0.5B")

    def counted(machine, **changed):
        model = CostModel(shape, replace(machine, **changed))
        return sum(model.memory().curve(plan, 0).peak.values())

    whole = counted(MEASURED)
    # a block of the heap: the gradient of the embedding, as far as the heap keeps it
    assert whole - counted(MEASURED, heap_blocks=0.0) == round(2.5 * 2**21)
    cell = stage_bytes(shape, (24,), 0, Training())
    assert whole - counted(MEASURED, heap_share=0.0) == round(0.25 * 256 * cell.graph() / 24)
    assert counted(A100) < counted(A100, activation_factor=1.1) < whole
    # up to 2 MiB: larger ones go back to the system
    large = CostModel(model_shape("Qwen2.5-7B"), replace(A100, heap_blocks=1.0))
    plan = plan_on_device([600], ChunkOptions(size=256), num_layers=28)
    assert large.memory().heap_bytes(plan, 0) == 2**21
