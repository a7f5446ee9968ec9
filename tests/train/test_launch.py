"""What a launcher has told a process, and the sizes that its number of processes allows."""

from __future__ import annotations

from functools import partial

import pytest

from furlong.config.schema import ParallelConfig
from furlong.errors import ConfigError
from furlong.plan.plan import Layout
from furlong.train import processes
from furlong.train.processes import Launch, command_like, layout_of, read_launch

TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1",
    "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip


def test_the_variables_of_torchrun():
    launch = read_launch(TORCHRUN)
    assert launch == Launch(number=3, num_processes=4, local_number=1, num_local=2, attempt=2)
    assert not launch.is_first
    assert read_launch({}) == Launch() and Launch().is_first
    assert read_launch({"WORLD_SIZE": "1"}) == Launch()
    assert read_launch({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) == Launch()  # a job's script
    assert read_launch({"SLURM_STEP_NUM_TASKS": "8", "WORLD_SIZE": "1"}) == Launch()


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ("2 processes of mpirun", "--nproc-per-node 2 -m furlong")),
        ({"SLURM_STEP_NUM_TASKS": "8"}, ("8 processes of srun", "--nproc-per-node 8 -m furlong")),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, ("2 processes of mpiexec", "WORLD_SIZE=1")),
        ({"WORLD_SIZE": "abc"}, ("WORLD_SIZE = abc", "torchrun --nproc-per-node 2")),
        ({"WORLD_SIZE": "0"}, ("WORLD_SIZE = 0",)),
        ({"WORLD_SIZE": "2"}, ("WORLD_SIZE = 2", "RANK, LOCAL_RANK, MASTER_PORT")),
        (TORCHRUN | {"RANK": "x"}, ("no use in RANK",)),
    ],
)
def test_variables_that_do_not_suffice(environment, parts):
    with pytest.raises(ConfigError) as raised:
        read_launch(environment)
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("sizes", "num_processes", "layout"),
    [
        ({}, 1, Layout()),
        ({}, 6, Layout(dp=6)),
        ({"dp": 4}, 4, Layout(dp=4)),
        ({"sp": 2, "pp": 3}, 12, Layout(dp=2, sp=2, pp=3)),
        ({"dp": 1, "pp": 2}, 2, Layout(pp=2)),
        ({"sp": "auto", "pp": "auto"}, 3, Layout(dp=3)),
    ],
)
def test_replicas_take_what_the_other_sizes_leave(sizes, num_processes, layout):
    assert layout_of(ParallelConfig(**sizes), num_processes) == layout


@pytest.mark.parametrize(
    ("sizes", "num_processes", "given", "change"),
    [
        ({"dp": 3}, 2, "dp 3 x sp 1 x pp 1 = 3, and 2 processes", "start 3"),
        ({"dp": 2}, 1, "dp 2 x sp 1 x pp 1 = 2, and 1 process\n", "or remove parallel"),
        ({"dp": 2, "sp": 2, "pp": 2}, 4, "dp 2 x sp 2 x pp 2 = 8, and 4 processes", "start 8"),
        (
            {"pp": 3},
            4,
            "dp auto x sp 1 x pp 3 = a multiple of 3, and 4 processes",
            "remove parallel",
        ),
        ({"sp": 2, "pp": 2}, 1, "a multiple of 4, and 1 process\n", "--nproc-per-node 4"),
    ],
)
def test_sizes_that_do_not_multiply_to_the_processes(sizes, num_processes, given, change):
    with pytest.raises(ConfigError) as raised:
        layout_of(ParallelConfig(**sizes), num_processes)
    assert given in str(raised.value)
    assert change in raised.value.change
    assert "torchrun --nproc-per-node" in raised.value.change


def test_the_command_for_as_many_processes():
    command = partial(command_like, arguments="train a.json --resume")
    several = "torchrun --nproc-per-node 2 -m furlong train a.json --resume"
    assert command(Launch()) == "furlong train a.json --resume"
    assert command(Launch(num_processes=2, num_local=2)) == several
    assert "torchrun --nnodes 2 --rdzv" in command(Launch(num_processes=16, num_local=8))


@pytest.mark.parametrize(
    ("machines", "local_numbers", "firsts"),
    [
        ("aabb", (0, 1, 0, 1), [0, 0, 2, 2]),
        ("abab", (0, 0, 1, 1), [0, 1, 0, 1]),
        ("xxxx", (0, 1, 0, 1), [0, 0, 2, 2]),  # two machines of one name
    ],
)
def test_the_first_process_of_a_machine_speaks_for_it(machines, local_numbers, firsts, monkeypatch):
    told = [
        (name, local, n)
        for n, (name, local) in enumerate(zip(machines, local_numbers, strict=True))
    ]
    found = []
    for number, (name, local) in enumerate(zip(machines, local_numbers, strict=True)):
        own = processes.Processes(Launch(number, 4, local, 2))
        monkeypatch.setattr(processes, "gethostname", lambda name=name: name)
        monkeypatch.setattr(own, "each", lambda value: told)
        found.append(own.from_first_of_machine(number))
    assert found == firsts
