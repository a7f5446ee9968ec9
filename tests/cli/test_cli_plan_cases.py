"""`furlong plan` on cases that people have: what must fit, what must not, what runs here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from furlong.cli.main import main
from furlong.cli.plan import parse_flags
from furlong.cli.plan_question import question_of
from furlong.planners.question import SIZES

GIB = 2**30


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Plans lengths; the values of its JSON, or None and the message where nothing fits."""

    def run(lengths: list[int] | str, *flags: str) -> dict[str, Any]:
        name = lengths
        if not isinstance(lengths, str):
            name = str(tmp_path / "lens.json")
            Path(name).write_text(json.dumps({"version": 1, "lengths": lengths}))
        code = main(["plan", "--lengths", str(name), *flags, "--json"])
        captured = capsys.readouterr()
        return json.loads(captured.out) if code == 0 else {"message": captured.err, "code": code}

    return run


SECO = (
    "--model.name=Llama-3-8B", "--model.lora.rank=8", "--hardware=RTX3090",
)  # fmt: skip


@pytest.mark.slow
def test_secos_own_plan_of_16k_tokens_fits_a_24_gb_card_but_for_the_margin(plan: Any) -> None:
    """In chunks of fewer than 1,024 tokens, with K,V on the device."""
    own = ("--chunks.method=seco", "--offload=none")
    found = plan([16_384], *SECO)
    assert found["peak_bytes"] <= 0.9 * found["budget_bytes"] < 24 * GIB
    assert not found["runs_here"]  # the model has 8,192 positions
    refused = plan([16_384], *SECO, *own)
    assert "less a margin of 10%" in refused["message"]
    found = plan([16_384], *SECO, *own, "--memory.device=24.5GiB")
    assert found["options"]["size"] < 1024
    assert 20 * GIB < found["peak_bytes"] < 22.8 * GIB


@pytest.mark.slow
def test_a_million_tokens_beside_a_24_gb_card_take_no_more_host_memory_than_there_is(
    plan: Any,
) -> None:
    small = plan([2**20], "--model.name=Qwen2.5-0.5B", "--hardware=RTX4090")
    (rank,) = small["memory"]
    assert 0 < rank["cpu_bytes"] <= 64 * GIB
    large = ("--model.name=Llama-3-8B", "--model.lora.rank=8", "--hardware=RTX4090")
    assert plan([2**20], *large)["code"] == 2
    found = plan([2**20], *large, "--memory.cpu=400GiB")
    assert 64 * GIB < found["memory"][0]["cpu_bytes"] <= 400 * GIB


def test_the_memory_of_the_host_bounds_the_plans_of_several_devices(plan: Any) -> None:
    flags = (
        "--model.name=Llama-2-7B", "--model.lora.rank=8", "--hardware=RTX4090", "--devices=8",
        "--parallel.sp=8", "--chunks.method=fpdt", "--chunks.size=16384",
        "--offload=cpu",
    )  # fmt: skip
    found = plan([2**15], *flags)
    most = max(rank["cpu_bytes"] for rank in found["memory"])
    assert 0 < most <= found["cpu_budget_bytes"] == 288 * GIB // 8  # of 512, three fifths
    assert plan([2**15], *flags, f"--memory.cpu={most}")["step_s"] == found["step_s"]
    message = plan([2**15], *flags, f"--memory.cpu={most - 1}")["message"]
    assert "of memory.cpu" in message


@pytest.mark.slow
def test_64_devices_are_no_slower_than_32(plan: Any) -> None:
    flags = (
        "--sequences=64", "--data.max_seq_len=212992", "--model.name=Qwen2.5-0.5B",
        "--hardware=H100",
    )  # fmt: skip
    many, few = (plan("lmsys-skrull", *flags, f"--devices={n}")["step_s"] for n in (64, 32))
    assert many <= few


def test_the_plan_is_that_of_a_run(plan: Any) -> None:
    flags = (
        "--model.name=Qwen2.5-0.5B", "--hardware=RTX4090", "--devices=2",
        "--chunks.method=chunkflow",
    )  # fmt: skip
    found = plan([9000, 3000], *flags)
    assert found["runs_here"] and found["num_devices"] == 2
    sizes = found["layout"]
    assert sizes["dp"] * sizes["sp"] * sizes["pp"] == 2
    assert found["parallel"].startswith("dp {dp} x sp {sp} x pp {pp}".format(**sizes))
    assert {"size", "num_retained", "keep"} <= found["options"].keys()
    staged = plan([9000, 3000], *flags, "--parallel.pp=2")
    assert {"dp": 1, "sp": 1, "pp": 2}.items() <= staged["layout"].items()
    assert len(staged["memory"]) == 2


@pytest.mark.parametrize(
    ("sizes", "flags", "searched"),
    [
        ("{sp: 2}", [], (None, 2, 1, 2)),
        ("{dp: 2, sp: 1}", [], (2, 1, 1, 2)),
        ("{sp: 2}", ["--devices=4"], (None, 2, 1, 4)),
        ("{sp: 1, pp: auto}", ["--devices=2"], (None, 1, None, 2)),
        ("{sp: 1, pp: 1}", ["--parallel.sp=4"], (None, 4, 1, 4)),
        ("{sp: 4}", ["--parallel.sp=auto", "--devices=8"], (None, None, 1, 8)),
    ],
)
def test_sizes_and_dials_of_a_run_file_hold_as_they_do_when_it_trains(
    tmp_path: Path, sizes: str, flags: list[str], searched: tuple[int | None, ...]
) -> None:
    lengths, run = tmp_path / "lens.json", tmp_path / "run.yaml"
    lengths.write_text('{"version": 1, "lengths": [3000, 2000]}')
    run.write_text(
        f"model: {{name: Qwen2.5-0.5B}}\ndata: {{train: a}}\nparallel: {sizes}\n"
        "memory: {disk: 1TB}\n"
        "chunks: {size: 4096, stage_layers: 6}\noffload: {attention: cpu, kv: disk}\n"
    )
    command = [str(run), f"--lengths={lengths}", "--hardware=H100", "--chunks.size=512", *flags]
    question = question_of(parse_flags(command)).asked
    assert (*map(question.given.get, SIZES), question.num_devices) == searched
    dials = {name: value for name, value in question.given.items() if name not in SIZES}
    offload = {"attention": "cpu", "kv": "disk"}
    assert dials == {"order": "layer-first", "stage_layers": 6, "offload": offload, "size": 512}
    assert question.limits.disk_bytes == 10**12
