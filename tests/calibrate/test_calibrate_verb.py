"""`furlong calibrate`, from the command line to the file; what the user can mend is told."""

import json

import pytest

from furlong.calibrate import run
from furlong.cli.calibrate import check_place
from furlong.cli.main import main
from furlong.cost.machine import this_cpu


@pytest.fixture
def model(tmp_path):
    """A folder with the config of a model of a few widths."""
    values = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 1024, "vocab_size": 50_000, "max_position_embeddings": 8192,
    }  # fmt: skip
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture
def quick(monkeypatch):
    from furlong.calibrate import measure

    monkeypatch.setattr(run, "_LARGEST_CHUNK", {"cpu": 512})
    monkeypatch.setattr(run, "_NUM_ROUNDS", 1)
    monkeypatch.setattr(measure, "_TOTAL_BYTES", 2**23)


def parts(printed):
    return [line.split(":")[0] for line in printed.splitlines()]


def test_more_processes_than_gpus_are_refused(model, capsys, monkeypatch):
    for name, value in {"is_available": True, "device_count": 1}.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda value=value: value)
    for name, value in {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["calibrate", str(model)]) == 2
    said = capsys.readouterr().err
    assert "2 processes" in said and said.rstrip().endswith("torchrun --nproc-per-node 1")


@pytest.mark.slow
def test_a_calibration_is_written_and_found_again(model, quick, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = this_cpu().calibration_file("float32")
    plan = [
        "plan", "--lengths=github", "--sequences=4", "--data.max_seq_len=2000",
        "--model.dtype=float32", f"--model.name={model}", "--hardware=cpu",
    ]  # fmt: skip
    assert main(plan) == 0
    assert "assumed; furlong calibrate measures them" in capsys.readouterr().out
    assert main(["calibrate", str(model), "--disk-dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "not fitted" in printed
    assert f"calibration written to {file}" in printed.replace("\n", "")
    found = this_cpu().calibrated("float32")
    assert "linear" in found.measurements
    assert found.peak_flops_per_s > 1e9 and found.links.disk.bytes_per_s > 1e6
    assert found.optimizer_parameters_per_s > 1e5
    # a machine under load stretches what is measured, but not without any bound
    assert 0 < found.time_error < 2 and 0 <= found.memory_error < 0.5
    assert main(plan) == 0
    words = " ".join(capsys.readouterr().out.split())  # lines are wrapped
    assert f"measured by furlong calibrate ({file})" in words
    assert main([*plan, "--no-calibration"]) == 0
    assert "assumed; furlong calibrate measures them" in capsys.readouterr().out


def test_a_place_is_left_as_it_was(tmp_path):
    check_place(tmp_path / "new" / "a.json")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "b.json").write_text("old")
    check_place(tmp_path / "b.json")
    assert (tmp_path / "b.json").read_text() == "old"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--out=file/out.json"], "file/out.json"),
        (["--device=cuda", "--out=out.json"], "no GPU that torch can use"),
        (["--out=out.json"], "model type rwkv"),
    ],
)
def test_what_cannot_be_measured_is_refused_before(
    flags, told, model, tmp_path, capsys, monkeypatch
):
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "file").write_text("")
    if "rwkv" in told:
        values = json.loads((model / "config.json").read_text()) | {"model_type": "rwkv"}
        (model / "config.json").write_text(json.dumps(values))
    assert main(["calibrate", str(model), *flags]) == 2
    printed = capsys.readouterr().err
    assert parts(printed) == ["given", "required", "from", "change"]
    assert told in printed and not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--out", "calibration.txt"], "a name that ends in .json"),
        (["--dtype", "int8"], "see furlong calibrate --help"),
        (["--fast"], "what furlong calibrate --help lists"),
        (["no/such/folder/config.json"], "no such folder"),
    ],
)
def test_flags_that_are_wrong(arguments, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *arguments]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["/dev/shm", "nowhere"])
def test_a_folder_that_cannot_be_measured_is_refused_at_once(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "calibrate", lambda *_, **__: pytest.fail("measured"))
    arguments = ["calibrate", f"--disk-dir={folder}", "--out=c.json", "--device=cpu"]
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert f"given:    {folder}" in message
    assert "memory.disk_dir" in message
