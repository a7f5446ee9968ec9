"""A run and `furlong plan` decide alike; what is decided is written down."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.tiny_runs import TinyRun

from furlong.cli.main import main
from furlong.config.sources import load_run
from furlong.cost.machine import Machine, known_card, known_machines, one_of, this_cpu
from furlong.cost.model import CostModel
from furlong.cost.shape import known_models, model_shape
from furlong.cost.training import Training
from furlong.kv.pools import Storage
from furlong.plan.lengths import count_lengths, write_lengths
from furlong.planners.decide import Decision
from furlong.planners.options import ChunkOptions
from furlong.train.build import storage_beside
from furlong.train.processes import Launch
from furlong.train.run_model import RunModel, choose_run_plan

ENDLESS = ("--train.epochs=1", "--train.save_every_steps=0", "--train.eval_every_steps=0")


def line_of(printed: str, head: str) -> str:
    return next(line for line in printed.splitlines() if line.startswith(head))


@pytest.mark.parametrize(
    "flags",
    [
        ("--memory.device=2MiB",),
        ("--memory.device=4TiB", "--chunks.size=auto", "--train.sequences_per_step=1"),
        ("--memory.device=2GiB", "--chunks.sample={rate: 0.5, label_rate: 0.25}"),
    ],
)
def test_plan_says_what_the_run_does(tiny_run: TinyRun, tmp_path, capsys, flags):
    out, file = tmp_path / "out", tmp_path / "run.yaml"
    arguments = tiny_run.arguments(out, *ENDLESS, *flags)
    assert main(arguments) == 0
    told = line_of(capsys.readouterr().out, "auto: ").removeprefix("auto: ")
    file.write_text((out / "config.json").read_text())
    options = json.loads((out / "options.json").read_text())
    dials = ", ".join(f"{name} {options[name]}" for name in ("size", "num_retained", "keep"))
    assert told.startswith(dials)
    assert ("(memory.device, more than the " in told) == ("--memory.device=4TiB" in flags)
    assert main(["plan", str(file), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["auto"] == told
    assert values["options"].items() <= options.items()


def test_a_model_that_cannot_be_counted_takes_the_fixed_rule(
    tiny_run, tmp_path, capsys, monkeypatch
):
    from furlong.errors import ConfigError

    def refuse(*_):
        raise ConfigError(given="no hidden_size", required="one", source="here", change="that")

    monkeypatch.setattr("furlong.train.run_model.describe", refuse)
    out = tmp_path / "out"
    assert main(tiny_run.arguments(out, *ENDLESS, "--chunks.size=auto")) == 0
    printed = capsys.readouterr().out
    assert (
        "auto: by the fixed rule, for the model's work cannot be counted: no hidden_size" in printed
    )
    options = json.loads((out / "options.json").read_text())
    assert (options["size"], options["num_retained"], options["keep"]) == (256, 1, "attention")
    named = (*ENDLESS, "--chunks.method=seco")
    assert main(tiny_run.arguments(tmp_path / "named", *named)) == 2
    assert "chunks.method = seco and no hidden_size" in capsys.readouterr().err


def test_nothing_is_searched_where_every_dial_is_given(tiny_run, tmp_path, capsys):
    dials = (
        *("--chunks.size=32", "--chunks.num_retained=0", "--chunks.keep=input"),
        *("--offload=none", "--chunks.order=chunk-first"),
    )
    assert main(tiny_run.arguments(tmp_path / "out", *ENDLESS, *dials)) == 0
    assert "\nauto: " not in capsys.readouterr().out


def test_device_names():
    gib = 2**30
    for card, memory, name in (
        ("NVIDIA H100 80GB HBM3", 80, "H100"), ("NVIDIA H100 PCIe", 80, "H100-PCIe"),
        ("NVIDIA GeForce RTX 4090 D", 24, "RTX3090"), ("NVIDIA A40", 45, "L40S"),
        ("AMD Instinct MI300X", 192, "B200"),
    ):  # fmt: skip
        found = Machine.of_card(card, memory * gib)
        assert (found.name, found.card) == (name, "" if known_card(card) else card)


def test_both_predict_with_what_was_calibrated(tiny_run, tmp_path, capsys, monkeypatch):
    """A calibration of this machine is found; one of another machine is left alone, in words."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = this_cpu().calibration_file("float32")
    figures = {"peak_flops_per_s": 1e6, "time_error": 0.07, "memory_error": 0.03}
    slow = this_cpu().measured(figures)
    out = tmp_path / "run"
    flags = (*ENDLESS, "--train.steps=1", "--train.epochs=null", "--model.dtype=float32")
    arguments = tiny_run.arguments(out, *flags)

    def told(*more):
        assert main([*arguments, *more]) == 0
        lines = capsys.readouterr().out
        shutil.rmtree(out)
        return line_of(lines, "figures: "), line_of(lines, "auto: ")

    assert "assumed; furlong calibrate measures them" in told()[0]
    place.parent.mkdir(exist_ok=True)
    slow.save(place, "float32")
    figures, auto = told()
    assert f"measured by furlong calibrate ({place}), times within 7%, peaks within 3%" in figures
    assert "less 3% for what no prediction sees" in auto
    replace(slow, card="another").save(place, "float32")
    figures, auto = told()
    assert "was measured on another machine (another; this is" in figures
    assert "less 10% for what no prediction sees" in auto
    place.write_text("{")
    assert main(arguments) == 2
    assert f"from:     the calibration file {place}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("card", "num", "sizes"), [("RTX4090", 1, {}), ("A100-40", 2, {"sp": 2}), ("H100", 4, {})]
)
def test_a_plan_is_what_a_run_on_such_a_card_decides(
    tmp_path, capsys, monkeypatch, card, num, sizes
):
    lens, known = [9000, 3000, 700, 20] * 4, known_machines()[card]
    (tmp_path / "model").mkdir()
    values = known_models()["Qwen2.5-0.5B"]["config"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(values))
    (tmp_path / "texts.jsonl").write_text("{}")
    file = tmp_path / "run.yaml"
    run = {"model": {"name": str(tmp_path / "model")}, "out": str(tmp_path / "out")}
    run |= {"data": {"train": [str(tmp_path / "texts.jsonl")], "max_seq_len": 16384}}
    run |= {
        "parallel": {"dp": "auto", "sp": "auto", "pp": "auto"} | sizes,
        "chunks": {"keep": "attention"},
    }
    file.write_text(json.dumps(run | {"train": {"sequences_per_step": 8, "steps": 1}}))
    write_lengths(tmp_path / "run.lengths.json", count_lengths(lens))
    free = known.memory_bytes - 3 * 2**28  # no run finds exactly what is assumed
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, known.memory_bytes))
    name = {"RTX4090": "NVIDIA GeForce RTX 4090", "H100": "NVIDIA H100 80GB HBM3"}
    name = name.get(card, "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    capability = {"RTX4090": (8, 9), "H100": (9, 0)}.get(card, (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    trusted = "furlong.ops.backends.select.is_trusted"
    monkeypatch.setattr(trusted, lambda device: capability == (9, 0))  # a newer cuDNN is there
    config = load_run(str(file))
    model = RunModel.read(config, torch.device("cuda"), Launch(0, num, 0, num))
    data = SimpleNamespace(seq_lens=np.array(lens), longest=max(lens), epoch_lens=lambda seed: lens)
    storage = Storage(one_of(known, num).host_bytes, 0, tmp_path)
    decided = choose_run_plan(config, model, data, storage)
    assert main(["plan", str(file), f"--hardware={card}", f"--devices={num}", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["auto"], told["parallel"]) == (decided.words, decided.layout_words)


def test_processes_of_a_cpu_share_its_ram_in_plans(capsys, monkeypatch):
    monkeypatch.setattr("furlong.cost.machine.free_ram_budget_bytes", lambda: 2**36)
    asked = ["plan", "--lengths=512", "--model.name=Qwen2.5-0.5B", "--hardware=cpu", "--json"]
    budgets = []
    for num in (1, 4):
        assert main([*asked, "--chunks.size=512", f"--devices={num}"]) == 0
        budgets.append(json.loads(capsys.readouterr().out)["budget_bytes"])
    assert budgets == [2**36, 2**34]


def test_kept_tensors_have_what_weights_leave_of_cpu_memory():
    shape, training = model_shape("Qwen2.5-0.5B"), Training().offloading()
    decision = Decision(ChunkOptions(order="layer-first", reshard=True), "", offload_weights=True)

    def left(decision=decision, **changes):
        cost = CostModel(shape, Machine.named("H100"), replace(training, **changes))
        return storage_beside(Storage(2**34), cost, decision).cpu_bytes

    assert left() == 2**34 - 16 * shape.num_parameters
    kept = replace(decision, options=ChunkOptions(), offload_weights=False)
    assert left(host_is_device=True) == left(kept, offload_weights=False) == 2**34
