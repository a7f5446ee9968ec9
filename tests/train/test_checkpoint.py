"""What is written comes back to the bit, what is damaged is never loaded, nothing is unpickled."""

from __future__ import annotations

import json
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from furlong.config.schema import TrainConfig
from furlong.errors import CheckpointError
from furlong.models.build import build_model
from furlong.train import checkpoints as module
from furlong.train.checkpoints import (
    Checkpoints,
    all_tensors,
    base_fingerprint,
    load_tensors,
    restore_tensors,
    stored_tensors,
)
from furlong.train.optim import build_optimizer, build_schedule, set_rate
from furlong.train.processes import Launch, Processes
from furlong.train.run_folder import (
    DamagedCheckpointError,
    checkpoint_of,
    clear_leftovers,
    list_checkpoints,
    newest_checkpoint,
    read_checkpoint,
)

STATE = {"step": 3, "lr": 0.1 + 0.2, "names": ["a", "b"], "nothing": None}


def make_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.layers.0.weight": torch.randn(40, 30, generator=generator),
        "model.layers.0.bias": torch.randn(30, generator=generator, dtype=torch.float64),
        "optimizer.exp_avg.layers.0.weight": torch.randn(40, 30, generator=generator).bfloat16(),
        "optimizer.step.layers.0.weight": torch.tensor(7.0),
        "rng.cpu": generator.get_state(),
        "transposed": torch.randn(5, 6, generator=generator).t(),
    }


def save(folder: Path, *steps: int) -> list[Path]:
    for step in steps:
        Checkpoints(folder).save(step, make_tensors(step), {"step": step})
    return [checkpoint_of(folder, step) for step in steps]


def test_tensors_and_values_come_back_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_FILE_BYTES", 5000)
    tensors = make_tensors()
    Checkpoints(tmp_path).save(3, tensors, STATE)
    checkpoint = checkpoint_of(tmp_path, 3)
    assert checkpoint.name == "step-00000003"
    assert len(list(checkpoint.glob("*.safetensors"))) == 4
    assert read_checkpoint(checkpoint).state == STATE
    assert stored_tensors(checkpoint) == {n: (t.shape, t.dtype) for n, t in tensors.items()}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_tensors(checkpoint, loaded)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name


def test_tensors_of_one_memory_and_of_its_parts_come_back(tmp_path: Path) -> None:
    """As bitsandbytes shares the tables of its 8-bit states among parameters."""
    table = torch.arange(256.0)
    tensors = {
        "optimizer.qmap1.a": table, "optimizer.qmap1.b": table, "optimizer.qmap1.c": table[:100],
        "optimizer.qmap1.d": table[100:], "optimizer.qmap1.e": table.view(16, 16).t(),
        "optimizer.qmap1.f": table.expand(2, 256),
    }  # fmt: skip
    Checkpoints(tmp_path).save(1, tensors, STATE)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_tensors(checkpoint_of(tmp_path, 1), loaded)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_checkpoint_of_before_is_compared_in_its_own_way() -> None:
    """By bytes, as it was written; what is written now knows no layout."""
    model = torch.nn.Linear(4, 3)
    model.weight.data = torch.arange(12.0).view(3, 4)
    model.bias.requires_grad_(False).fill_(0.5)
    model.weight.requires_grad_(False)
    before, now = "4b766f4cb72529133ae45cc907f1a087", "sums-aa609aeb4fb4c7d52bab8356c0186940"
    assert [base_fingerprint(model, like=like) for like in (before, now, None)] == [
        before,
        now,
        now,
    ]


class Run:
    """A model with its optimizer and schedule."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        settings = TrainConfig(
            lr=0.1, betas=(0.8, 0.9), weight_decay=0.1, schedule="linear", warmup_steps=0.0
        )
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
        self.optimizer = build_optimizer(self.model, settings)
        self.schedule = build_schedule(self.optimizer, settings, 9)

    def trained_further(self, num_steps: int) -> dict[str, torch.Tensor]:
        """Weights, and the optimizer's state of each, after random updates."""
        for _ in range(num_steps):
            for parameter in self.model.parameters():
                parameter.grad = torch.randn_like(parameter)
            self.optimizer.step()
            self.schedule.step()
        found = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            own = self.optimizer.state[parameter].items()
            found |= {f"{key} of {name}": value.clone() for key, value in own}
        return found


def test_a_run_goes_on_with_its_moments_schedule_and_generator(tmp_path: Path) -> None:
    first, other = Run(0), Run(1)
    taken = first.trained_further(3)
    tensors = all_tensors(first.model, first.optimizer)
    Checkpoints(tmp_path).save(3, tensors, {"step": 3})
    gone_on = first.trained_further(2)
    other.trained_further(1)
    restore_tensors(tmp_path / "step-00000003", other.model, other.optimizer)
    set_rate(other.schedule, 3)
    for wanted, num_steps in ((taken, 0), (gone_on, 2)):
        given = other.trained_further(num_steps)
        assert given.keys() == wanted.keys() and len(wanted) == 4 * 4
        assert all(torch.equal(given[name], wanted[name]) for name in wanted)
    assert other.schedule.get_last_lr() == first.schedule.get_last_lr()


def test_a_checkpoint_in_the_background_is_of_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, said = threading.Event(), list[str]()
    write = module._write_tensors

    def late(*args: Any) -> dict[str, Any]:
        assert may_write.wait(60)
        return write(*args)

    monkeypatch.setattr(module, "_write_tensors", late)
    checkpoints = Checkpoints(tmp_path, in_background=True, say=said.append)
    tensors = make_tensors()
    checkpoints.save(3, tensors, STATE)
    for tensor in tensors.values():
        tensor.zero_()
    assert list_checkpoints(tmp_path) == [] == said
    may_write.set()
    checkpoints.finish()
    assert len(said) == 1 and "step-00000003" in said[0]
    load_tensors(tmp_path / "step-00000003", tensors)
    for name, tensor in make_tensors().items():
        assert torch.equal(tensors[name], tensor), name


def test_a_failure_in_the_background_shows_at_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, in_background=True)
    checkpoints.save(1, make_tensors(), {"step": 1})
    checkpoints.finish()

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(module, "_write_tensors", refuse)
        checkpoints.save(2, make_tensors(), {"step": 2})
        with pytest.raises(CheckpointError, match="No space left on device while checkpoint step"):
            checkpoints.save(3, make_tensors(), {"step": 3})
    checkpoints.save(4, make_tensors(), {"step": 4})
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001", "step-00000004"]


def test_the_last_three_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 9, 10, 100, 101)
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step-00000010", "step-00000100", "step-00000101",
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000010", "step-00000100", "step-00000101",
    ]  # fmt: skip


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut tensors": lambda folder: cut(next(folder.glob("*.safetensors"))),
    "flipped bit": lambda folder: flip(next(folder.glob("*.safetensors"))),
    "empty tensors": lambda folder: next(folder.glob("*.safetensors")).write_bytes(b""),
    "no tensors": lambda folder: next(folder.glob("*.safetensors")).unlink(),
    "one file more": lambda folder: (folder / "more").write_bytes(b"x"),
    "cut state": lambda folder: cut(folder / "state.json"),
    "cut manifest": lambda folder: (folder / "manifest.json").write_text('{"version": 1, "fi'),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "other manifest": lambda folder: (folder / "manifest.json").write_text("[1]"),
    "other step": lambda folder: [
        shutil.copy(file, folder) for file in folder.with_name("step-00000002").iterdir()
    ],
    "empty folder": lambda folder: [file.unlink() for file in folder.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object]
) -> None:
    folder = tmp_path / "checkpoints"
    before, damaged = save(folder, 2, 4)
    damage(damaged)
    with pytest.raises(DamagedCheckpointError, match=r"step-00000004 is damaged"):
        read_checkpoint(damaged)
    newest = newest_checkpoint(folder)
    assert newest == read_checkpoint(before)
    assert "not loaded: checkpoint step-00000004 is damaged" in capsys.readouterr().out
    assert list_checkpoints(folder) == [before, damaged]
    clear_leftovers(tmp_path, newest)
    assert list_checkpoints(folder) == [before]
    assert damaged.with_name("step-00000004.damaged").is_dir()


def test_without_a_whole_checkpoint_nothing_is_loaded(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none") is None
    for checkpoint in save(tmp_path, 1, 2):
        cut(checkpoint / "state.json")
    with pytest.raises(CheckpointError, match="2 damaged checkpoints and no other"):
        newest_checkpoint(tmp_path)


def test_a_later_format_is_no_damage(tmp_path: Path) -> None:
    later = save(tmp_path, 1, 2)[1]
    manifest = json.loads((later / "manifest.json").read_text()) | {"version": 99}
    (later / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="format 99"):
        newest_checkpoint(tmp_path)


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    whole = save(folder, 1)[0]
    for name in ("step-00000002.tmp", "step-00000000.old.tmp"):
        (folder / name).mkdir()
        (folder / name / "state.json").write_text("{")
    (tmp_path / ".config.json.tmp").touch()
    newest = newest_checkpoint(folder)
    assert newest == read_checkpoint(whole)
    clear_leftovers(tmp_path, newest)
    assert list(tmp_path.rglob("*")) == [folder, whole, *whole.iterdir()]


def test_a_checkpoint_of_another_model_is_told(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1)[0]
    with pytest.raises(CheckpointError, match=r"given: +Missing key .*: model\.other"):
        load_tensors(checkpoint, {"model.other": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="Size mismatch"):
        load_tensors(checkpoint, {"rng.cpu": torch.zeros(3, dtype=torch.uint8)})


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """The operating system cuts every write beyond it short, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [100, 4000])
def test_a_write_cut_short_leaves_the_checkpoint_before(tmp_path: Path, num_bytes: int) -> None:
    """The first limit stops state.json as well, the second one the tensors."""
    before = save(tmp_path, 1)[0]
    with (
        file_size_limit(num_bytes),
        pytest.raises(CheckpointError, match=r"File too large while checkpoint step-00000002"),
    ):
        save(tmp_path, 2)
    assert list(tmp_path.iterdir()) == [before]
    assert newest_checkpoint(tmp_path) == read_checkpoint(before)
    again = save(tmp_path, 2)[0]
    assert newest_checkpoint(tmp_path) == read_checkpoint(again)


def test_tied_embeddings_with_an_adapter_are_the_same_frozen_weights_in_stages(
    tmp_path: Path,
) -> None:
    """The last stage has the embeddings as its head, without the adapter of the first."""
    config = LlamaConfig(
        vocab_size=9, hidden_size=4, intermediate_size=4, num_hidden_layers=2,
        num_attention_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    lora = {"rank": 1, "alpha": 1, "dropout": 0, "target_modules": ["q_proj", "embed_tokens"]}
    whole, *stages = (
        build_model(str(tmp_path), lora=lora, layers=layers)
        for layers in (None, range(1), range(1, 2))
    )
    told: list[dict[str, str]] = []

    class Stage(Processes):
        def each(self, value: Any) -> list[Any]:
            told.append(value)
            return told

    found = [base_fingerprint(stage, Stage(Launch())) for stage in stages]
    assert found[-1] == base_fingerprint(whole) != found[0]
