"""Files of weights that are missing, cut off, unreadable or of another kind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from furlong.errors import ConfigError
from furlong.models.build import INDEX, WEIGHTS, build_model, check_weights

NOBODY = 65534
UP = "model.layers.1.mlp.up_proj.weight"


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


def replaced(write: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """The file of weights is another one."""

    def damage(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        write(folder / WEIGHTS)

    return damage


def with_pickles(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "training_args.bin").write_bytes(b"")
    assert "is a pickle" not in str(refusal(folder)), "it holds no weights"
    (folder / "pytorch_model.bin").write_bytes(b"")


def cut_off(keep_bytes: int) -> Callable[[Path], Any]:
    return lambda folder: os.truncate(folder / WEIGHTS, keep_bytes)


def in_dtype(dtype: torch.dtype) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        weights[UP] = weights[UP].to(dtype)
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


CUT_OFF = f"{WEIGHTS}, which is cut off"
DAMAGED: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "pickles": (with_pickles, "pytorch_model.bin is a pickle", "save_pretrained"),
    "another name": (
        lambda folder: (folder / WEIGHTS).rename(folder / "consolidated.safetensors"),
        "consolidated.safetensors", "save_pretrained",
    ),
    **{f"{n} bytes": (cut_off(n), CUT_OFF, "once more") for n in (0, 100, 3000)},
    "a pickle of that name": (
        replaced(lambda file: torch.save({"a": torch.ones(2)}, file)), "no safetensors file", "",
    ),
    **{
        str(dtype): (in_dtype(dtype), f"{UP} is of dtype", "bfloat16")
        for dtype in (torch.int8, torch.float8_e4m3fn, torch.complex64)
    },
    "a link to nowhere": (replaced(lambda file: file.symlink_to("no")), "No such file", ""),
    "a link to itself": (replaced(lambda file: file.symlink_to(WEIGHTS)), WEIGHTS, ""),
    "a pipe": (replaced(os.mkfifo), "a pipe or a device", ""),
    "a folder": (replaced(Path.mkdir), "Is a directory", ""),
    "a distributed checkpoint": (
        lambda folder: (folder / WEIGHTS).rename(folder / "shard-00001-model-00001.safetensors"),
        "shard-00001-model", "save_pretrained",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_wrong_with_the_file_is_told(folder: Path, name: str) -> None:
    damage, told, change = DAMAGED[name]
    damage(folder)
    error = refusal(folder)
    assert told in error.given and change in error.change


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "pytorch_model.bin"}}', '{"weight_map": {"a": "../x.safetensors"}}',
    ],
)  # fmt: skip
def test_a_broken_index_is_named(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    assert INDEX in refusal(sharded).given


def test_shards_that_are_cut_off_or_missing_are_told(sharded: Path) -> None:
    shards = sorted(sharded.glob("model-*.safetensors"))
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    assert shards[1].name in refusal(sharded).given
    shards[1].unlink()
    shards[2].unlink()
    told = refusal(sharded).given
    assert f"without 2 of the {len(shards)} files" in told and shards[1].name in told


def test_tensors_that_are_left_out_are_told(folder: Path, capsys: Any) -> None:
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    more = weights | {"extra.weight": torch.zeros(3), "mask": torch.ones(2, dtype=torch.bool)}
    save_file(more, folder / WEIGHTS, metadata={"format": "pt"})
    build_model(str(folder))
    assert "2 tensors are no weights of the model and are left out" in capsys.readouterr().out


def test_weights_of_another_config_are_told(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match="lacks 9 weights"):
        build_model(str(folder))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_file_without_permission_is_told_as_such(folder: Path) -> None:
    """As another user: root may read everything."""
    other = Path(shutil.copytree(folder, folder.with_name("other")))
    for path in (folder, other, *folder.parents):
        path.chmod(path.stat().st_mode | 0o055)
    (folder / WEIGHTS).chmod(0)
    (other / "config.json").chmod(0)
    code = (
        "import os, sys; from furlong.models.build import check_model\n"
        "from furlong.errors import ConfigError\n"
        f"os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "for folder in sys.argv[1:]:\n"
        "    try: check_model(folder, init='pretrained', max_seq_len=32)\n"
        "    except ConfigError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(folder), str(other)]
    run = subprocess.run(command, capture_output=True, text=True)
    for name in (WEIGHTS, "config.json"):
        assert f"{name}: Permission denied" in run.stdout, run.stdout + run.stderr
    assert run.stdout.count("a file that you may read") == 2
