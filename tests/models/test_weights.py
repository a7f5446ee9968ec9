"""Files of weights that are missing, cut off, unreadable or of another kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from furlong.errors import ConfigError
from furlong.models.folders.build import build_model
from furlong.models.folders.weights import INDEX, WEIGHTS, check_weights

NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model in one file."""
    folder = tmp_path / "model"
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(folder)
    return folder


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same model in several files."""
    model = LlamaForCausalLM.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="4KB")
    assert (folder / INDEX).exists()
    return folder


def refusal(folder: Path) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        check_weights(str(folder))
    with pytest.raises(ConfigError):
        build_model(str(folder))
    return raised.value


def test_whole_weights_pass(sharded: Path) -> None:
    check_weights(str(sharded))
    build_model(str(sharded))


def test_pickles_are_not_read_and_how_to_convert_them_is_told(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "training_args.bin").write_bytes(b"")
    assert "is a pickle" not in str(refusal(folder))
    (folder / "pytorch_model.bin").write_bytes(b"")
    error = refusal(folder)
    assert "pytorch_model.bin is a pickle" in error.given
    assert "save_pretrained" in error.change


def test_other_files_of_weights_are_named(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "consolidated.safetensors")
    assert "consolidated.safetensors" in refusal(folder).given


@pytest.mark.parametrize("keep_bytes", [0, 5, 100, 3000])
def test_a_file_that_is_cut_off_is_named(folder: Path, keep_bytes: int) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:keep_bytes])
    error = refusal(folder)
    assert f"{WEIGHTS}, which is cut off" in error.given
    assert "once more" in error.change


def test_a_pickle_named_safetensors_is_not_read(folder: Path) -> None:
    torch.save({"a": torch.ones(2)}, folder / WEIGHTS)
    assert "no safetensors file" in refusal(folder).given


def test_missing_shards_are_counted(sharded: Path) -> None:
    shards = sorted(sharded.glob("model-*.safetensors"))
    shards[1].unlink()
    shards[2].unlink()
    error = refusal(sharded)
    assert f"without 2 of the {len(shards)} files" in error.given
    assert shards[1].name in error.given


def test_a_shard_that_is_cut_off_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert shard.name in refusal(sharded).given


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "pytorch_model.bin"}}',
        '{"weight_map": {"a": "../model.safetensors"}}',
        '{"weight_map": {"a": ["x"]}}',
    ],
)  # fmt: skip
def test_a_broken_index_is_named(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    assert INDEX in refusal(sharded).given


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.complex64])
def test_weights_that_are_no_floats_are_refused(folder: Path, dtype: torch.dtype) -> None:
    weights = load_file(folder / WEIGHTS)
    name = "model.layers.1.mlp.up_proj.weight"
    (folder / WEIGHTS).unlink()
    weights[name] = weights[name].to(dtype)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    error = refusal(folder)
    assert f"{name} is of dtype" in error.given
    assert "bfloat16" in error.change


def test_tensors_that_are_left_out_are_told(folder: Path, capsys: Any) -> None:
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    more = weights | {"extra.weight": torch.zeros(3), "mask": torch.ones(2, dtype=torch.bool)}
    save_file(more, folder / WEIGHTS, metadata={"format": "pt"})
    build_model(str(folder))
    assert "2 tensors are no weights of the model and are left out" in capsys.readouterr().out


def test_links_that_lead_nowhere_and_pipes_are_told(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("nowhere")
    assert "No such file" in refusal(folder).given
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(WEIGHTS)
    assert WEIGHTS in refusal(folder).given
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)
    assert "a pipe or a device" in refusal(folder).given


def test_distributed_checkpoints_are_refused(folder: Path) -> None:
    (folder / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"")
    assert "distributed checkpoint" in refusal(folder).given


def test_a_folder_in_the_place_of_weights_is_told(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    assert "Is a directory" in refusal(folder).given


def test_weights_of_another_config_are_told(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match="lacks 9 weights"):
        build_model(str(folder))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_file_without_permission_is_told_as_such(folder: Path, name: str) -> None:
    """As another user: root may read everything."""
    (folder / name).chmod(0)
    for path in (folder, *folder.parents):
        path.chmod(path.stat().st_mode | 0o055)
    code = (
        "import os, sys; from furlong.models.folders.check import check_model\n"
        "from furlong.errors import ConfigError\n"
        f"os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "try: check_model(sys.argv[1], init='pretrained', max_seq_len=32)\n"
        "except ConfigError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    assert f"{name}: Permission denied" in run.stdout, run.stdout + run.stderr
    assert "a file that you may read" in run.stdout
