"""Calibrations: saved and read back, applied, refused when anything is off."""

import json
from dataclasses import replace

import pytest

from furlong.cost.calibration import (
    Calibration,
    calibrated,
    calibration_file,
    load_calibration,
    machine_of,
    relative_fit,
    relative_line,
)
from furlong.cost.machine import Efficiency, Link, hardware, spec_of_card
from furlong.cost.memory import Heap, stage_bytes
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.errors import ConfigError
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device

MEASURED = Calibration(
    hardware="A100-80", dtype="bfloat16", measured_on="qwen2 in bfloat16, torch 2.13",
    linear=Efficiency(0.66, 190.0), attention_backward=Efficiency(0.4, 300.0),
    pass_launch_s=2e-3, slice_launch_s=1e-4, activation_bytes_per_s=8e9,
    optimizer_parameters_per_s=1e8, activation_factor=1.1, heap_blocks=2.5, heap_share=0.25,
    time_error=0.08, memory_error=0.05,
    links={
        "host": Link(1e-5, 21e9), "all_reduce": Link(1e-4, 3e9),
        "all_to_all between nodes": Link(2e-4, 1e9),
    },
)  # fmt: skip


def test_a_calibration_holds_for_the_card_that_was_measured(tmp_path, monkeypatch):
    """An unknown card has the figures of the one with the nearest memory, and a calibration of its
    own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known, other = (
        CostModel(model_shape("Qwen2.5-0.5B"), spec_of_card(name, 40 * 2**30))
        for name in ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PG509-200")
    )
    assert known.hardware == replace(other.hardware, card="") == hardware("A100-40")
    place = calibration_file("A100-40", "bfloat16")
    place.parent.mkdir()
    for own, wrong in ((known, other), (other, known)):
        machine = machine_of(own.hardware.name, own.hardware.card)
        replace(MEASURED, hardware="A100-40", machine=machine).save(place)
        assert calibrated(own, "bfloat16").calibration is not None
        found = calibrated(wrong, "bfloat16")
        assert found.calibration is None and "on another machine" in found.words


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
    model = CostModel(shape, hardware(name), Training.in_dtype(dtype))
    plan = plan_on_device([2**17], ChunkOptions(size=2**17), num_layers=24)
    sixteen, wide = (
        sum(costs.compute_s(action, 0) for action in plan.actions[0])
        for costs in (model.costs(plan), calibrated(model, dtype).model.costs(plan))
    )
    assert wide / sixteen == pytest.approx(slower, rel=0.05)
    place = calibration_file(name, dtype)
    place.parent.mkdir()
    replace(MEASURED, hardware=name, dtype=dtype, machine=machine_of(name, "")).save(place)
    measured = calibrated(model, dtype).model.hardware
    assert measured.peak_flops_per_s == model.hardware.peak_flops_per_s


def test_what_is_saved_is_read(tmp_path):
    MEASURED.save(tmp_path / "calibration.json")
    assert load_calibration(tmp_path / "calibration.json") == MEASURED


def test_measured_values_replace_assumed_ones():
    before = hardware("A100-80")
    after = MEASURED.apply(before)
    assert after.linear == Efficiency(0.66, 190.0) and after.links.host == Link(1e-5, 21e9)
    assert after.attention_forward == before.attention_forward
    assert after.links.within_node == before.links.within_node
    assert after.peak_flops_per_s == before.peak_flops_per_s
    assert (after.pass_launch_s, after.slice_launch_s, after.layer_launch_s) == (
        2e-3, 1e-4, before.layer_launch_s,
    )  # fmt: skip
    assert after.links.link("all_reduce", False) == Link(1e-4, 3e9)
    assert after.links.link("all_to_all", True) == Link(2e-4, 1e9)
    assert after.links.link("all_to_all", False) == before.links.within_node
    assert after.sources["linear"] == "measured: qwen2 in bfloat16, torch 2.13"


def test_a_cost_model_counts_what_was_measured():
    model = CostModel(model_shape("Qwen2.5-0.5B"), hardware("A100-80"))
    after = MEASURED.apply_to(model)
    assert after.hardware == MEASURED.apply(model.hardware)
    assert after.activation_factor == 1.1
    assert after.hardware.optimizer_parameters_per_s == 1e8
    plan = plan_on_device([600], ChunkOptions(size=256), num_layers=24)
    counted = {name: sum(m.memory().curve(plan, 0).peak.values()) for name, m in {
        "before": model, "after": after, "without blocks": replace(after, heap=Heap(share=0.25)),
        "without share": replace(after, heap=Heap(blocks=2.5)),
        "graphs alone": replace(model, activation_factor=1.1),
    }.items()}  # fmt: skip
    # a block of the heap: the gradient of a matrix of 896 by 4,864, in float32
    assert counted["after"] - counted["without blocks"] == round(2.5 * 896 * 4864 * 4)
    cell = stage_bytes(model.shape, (24,), 0, model.training)
    assert counted["after"] - counted["without share"] == round(0.25 * 256 * cell.graph() / 24)
    assert counted["before"] < counted["graphs alone"] < counted["after"]


def test_the_heap_keeps_blocks_of_up_to_32_mib():
    plan = plan_on_device([600], ChunkOptions(size=256), num_layers=28)
    model = CostModel(model_shape("Qwen2.5-7B"), hardware("A100-80"))
    one, none = (replace(model, heap=Heap(n)).memory().curve(plan, 0) for n in (1.0, 0.0))
    assert sum(one.peak.values()) - sum(none.peak.values()) == 2**25


def test_the_holes_of_a_graph_need_a_second_one():
    plan = plan_on_device([256], ChunkOptions(size=256), num_layers=24)
    model = CostModel(model_shape("Qwen2.5-0.5B"), hardware("A100-80"))
    assert Heap(share=0.5).held_bytes(model.shape, model.training, plan, 0) == 0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": 2}, "version 2"),
        ({"linear": {"best": -1, "half_tokens": 3}}, "linear.best = -1"),
        ({"linear": {"best": 0.5}}, "half_tokens"),
        ({"speed": 3}, "unknown: speed"),
        ({"links": {"bus": {"latency_s": 0, "bytes_per_s": 1}}}, "unknown: bus"),
        ({"heap_blocks": "much"}, "heap_blocks = 'much'"),
    ],
)
def test_edited_files_are_refused(tmp_path, change, complaint):
    file = tmp_path / "calibration.json"
    MEASURED.save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError) as error:
        load_calibration(file)
    assert complaint in error.value.given
    assert "furlong calibrate" in error.value.change


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"version": 1}'])
def test_other_files_are_refused(tmp_path, text):
    file = tmp_path / "calibration.json"
    file.write_text(text)
    with pytest.raises(ConfigError):
        load_calibration(file)
    with pytest.raises(ConfigError, match="No such file"):
        load_calibration(tmp_path / "nothing.json")


def test_fits_are_of_the_relative_error_and_never_negative():
    slope, constant = relative_line([1, 2, 1000], [3, 5, 2001])
    assert slope == pytest.approx(2) and constant == pytest.approx(1)
    assert relative_fit([[1, 2, 3], [1, 1, 1]], [3, 2, 1])[0] == 0
