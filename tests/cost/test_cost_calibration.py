"""Calibrations: saved and read back, applied, refused when anything is off."""

import json

import pytest

from furlong.cost.calibration import Calibration, load_calibration
from furlong.cost.fitting import relative_fit, relative_line
from furlong.cost.hardware import Efficiency, hardware
from furlong.cost.links import Link
from furlong.errors import ConfigError

MEASURED = Calibration(
    hardware="A100-80", measured_on="qwen2 in bfloat16, torch 2.13", linear=Efficiency(0.66, 190.0),
    attention_backward=Efficiency(0.4, 300.0), activation_factor=1.1, overhead_bytes=3 * 2**20,
    links={"host": Link(1e-5, 21e9)},
)  # fmt: skip


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
    assert after.sources["linear"] == "measured: qwen2 in bfloat16, torch 2.13"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": 2}, "version 2"),
        ({"linear": {"best": -1, "half_tokens": 3}}, "linear.best = -1"),
        ({"linear": {"best": 0.5}}, "half_tokens"),
        ({"speed": 3}, "unknown: speed"),
        ({"links": {"bus": {"latency_s": 0, "bytes_per_s": 1}}}, "unknown: bus"),
        ({"overhead_bytes": "much"}, "overhead_bytes = 'much'"),
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
