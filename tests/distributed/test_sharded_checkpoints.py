"""A checkpoint of sharded weights is one of the whole model: any number of processes goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_all, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from furlong.config.schema import TrainConfig
from furlong.errors import CheckpointError
from furlong.files import checksum
from furlong.train import checkpoints as module
from furlong.train import run_folder
from furlong.train.checkpoints import (
    Checkpoints,
    all_tensors,
    load_tensors,
    restore_tensors,
    stored_tensors,
)
from furlong.train.optim import build_optimizer, make_state
from furlong.train.processes import Launch, Processes
from furlong.train.run_folder import list_checkpoints, read_checkpoint


class Tiny(nn.Module):
    """Weights that two processes divide evenly, unevenly, and so that one of them has none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.odd = nn.Linear(6, 5)
        self.one = nn.Linear(5, 1, bias=False)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embed.weight  # tied: named once


def build() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = build_optimizer(model, TrainConfig(lr=0.1, weight_decay=0.1))
    make_state(optimizer)
    return optimizer


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps with gradients that are the same in every layout."""
    for step in steps:
        torch.manual_seed(100 + step)
        for parameter in model.parameters():
            whole = torch.randn(parameter.shape)
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.grad = whole
        optimizer.step()


def of_process(rank: int, num_ranks: int) -> Processes:
    return Processes(Launch(rank, num_ranks, rank), dist.group.WORLD if num_ranks > 1 else None)


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).clone()
        for name, t in tensors.items()
        if not name.startswith("rng.")
    }


def go_on(rank: int, num_ranks: int, folder: Path, first: int, steps: range) -> dict[str, Any]:
    """Restore the newest checkpoint if there is one, take steps, save, and tell all."""
    processes = of_process(rank, num_ranks)
    model = build()
    if num_ranks > 1:
        sizes = (2, num_ranks // 2) if num_ranks == 4 else (num_ranks,)  # two that have all of it
        fully_shard(
            model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[-len(sizes) :])
        )
    optimizer = optimizer_of(model)
    if first:
        restore_tensors(folder / f"step-{first:08d}", model, optimizer, processes)
    drawn = torch.rand(1).item()
    take_steps(model, optimizer, steps)
    tensors = all_tensors(model, optimizer, processes)
    Checkpoints(folder, processes).save(steps.stop, tensors, {"step": steps.stop})
    torch.manual_seed(rank)
    return {"tensors": whole(tensors), "drawn": drawn}


def undisturbed(steps: range) -> dict[str, Tensor]:
    model = build()
    optimizer = optimizer_of(model)
    take_steps(model, optimizer, steps)
    return whole(all_tensors(model, optimizer))


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), *(pytest.param(*counts, marks=pytest.mark.slow) for counts in ((3, 2), (4, 3)))],
)
def test_another_number_of_processes_goes_on(tmp_path: Path, before: int, after: int) -> None:
    for number, first, steps in ((before, 0, range(2)), (after, 2, range(2, 4))):
        if number == 1:
            told = [go_on(0, 1, tmp_path, first, steps)]
        else:
            told = run_ranks(go_on, number, tmp_path, first, steps, num_ranks=number)
        expected = undisturbed(range(steps.stop))
        for answer in told:
            assert answer["tensors"].keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(answer["tensors"][name], tensor), name
        read_checkpoint(tmp_path / f"step-{steps.stop:08d}")
    stored = stored_tensors(tmp_path / "step-00000004")
    assert {name: shape for name, (shape, _) in stored.items() if name[:3] != "rng"} == {
        name: tensor.shape for name, tensor in undisturbed(range(1)).items()
    }
    loaded = {"model.embed.weight": torch.zeros(8, 6)}
    load_tensors(tmp_path / "step-00000004", loaded)  # as an export does, without any group
    assert torch.equal(loaded["model.embed.weight"], undisturbed(range(4))["model.embed.weight"])


def read_none(file: Path) -> str:
    """Tensors are summed as they are written, not by reading."""
    assert file.suffix == ".json", file
    return checksum(file)


def draws(rank: int, num_ranks: int, folder: Path) -> tuple[float, float]:
    """A number as drawn after the checkpoint, and after it was restored."""
    processes = of_process(rank, num_ranks)
    model = build()
    fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,)))
    optimizer = optimizer_of(model)
    torch.manual_seed(7 + rank)
    tensors = all_tensors(model, optimizer, processes)
    with patch.object(run_folder, "checksum", read_none):
        checkpoints = module.Checkpoints(folder, processes, in_background=True)
        checkpoints.save(1, tensors, {"step": 1})
        drawn = torch.rand(1).item()
        checkpoints.finish()
    torch.manual_seed(0)
    restore_tensors(folder / "step-00000001", model, optimizer, processes)
    return drawn, torch.rand(1).item()


def save_where_one_cannot(rank: int, folder: Path) -> tuple[str, list[str]]:
    processes = of_process(rank, 2)
    model = build()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    tensors = all_tensors(model, optimizer_of(model), processes)
    Checkpoints(folder, processes).save(1, tensors, {})
    write = module.HuggingFaceStorageWriter.write_data

    def refuse(self: Any, *arguments: Any) -> Any:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return write(self, *arguments)

    try:
        with patch.object(module.HuggingFaceStorageWriter, "write_data", refuse):
            Checkpoints(folder, processes).save(2, tensors, {})
    except CheckpointError as error:
        return str(error), [path.name for path in list_checkpoints(folder)]
    return "", []


def save_into_folders_of_their_own(rank: int, folder: Path) -> str:
    processes = of_process(rank, 2)
    model = build()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    tensors = all_tensors(model, optimizer_of(model), processes)
    own = folder / str(rank)
    (own / "step-00000001.tmp").mkdir(parents=True)
    try:
        Checkpoints(own, processes).save(1, tensors, {})
    except CheckpointError as error:
        return str(error)
    return ""


def test_generators_come_back_and_disks_that_cannot_are_told_by_all(tmp_path: Path) -> None:
    """Each process has its own generator again. One has a full disk; one has another disk."""
    drawn, full, apart = (tmp_path / name for name in ("drawn", "full", "apart"))
    (first, second), told, without = run_all(
        (draws, 2, drawn), (save_where_one_cannot, full), (save_into_folders_of_their_own, apart),
        num_ranks=2,
    )  # fmt: skip
    read_checkpoint(drawn / "step-00000001")
    assert first[0] == first[1] and second[0] == second[1] and first[0] != second[0]
    for said, left in told:
        assert "No space left on device while checkpoint step-00000002" in said
        assert left == ["step-00000001"]
    assert [path.name for path in full.iterdir()] == ["step-00000001"]
    for said in without:
        assert "not where the first process writes" in said
