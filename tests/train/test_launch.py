"""What a launcher has told a process, and the sizes that its number of processes allows."""

from __future__ import annotations

import pytest

from furlong.config.parallel import ParallelConfig
from furlong.errors import ConfigError
from furlong.train.processes.launch import Launch, read_launch, replicas

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


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ("2 processes of mpirun", "--nproc-per-node 2 -m furlong")),
        ({"WORLD_SIZE": "2"}, ("WORLD_SIZE = 2", "RANK, LOCAL_RANK, MASTER_PORT, MASTER_ADDR")),
        (TORCHRUN | {"RANK": "x"}, ("without a number in RANK",)),
    ],
)
def test_variables_that_do_not_suffice(environment, parts):
    with pytest.raises(ConfigError) as raised:
        read_launch(environment)
    for part in parts:
        assert part in str(raised.value)


def test_replicas_take_all_processes():
    assert replicas(ParallelConfig(), 1) == 1
    assert replicas(ParallelConfig(), 6) == 6
    assert replicas(ParallelConfig(dp=4), 4) == 4


@pytest.mark.parametrize(
    ("sizes", "num_processes", "given"),
    [
        ({"dp": 3}, 2, "dp 3 x sp 1 x pp 1 = 3, and 2 processes"),
        ({"dp": 2}, 1, "dp 2 x sp 1 x pp 1 = 2, and 1 process\n"),
        ({"dp": 2, "sp": 2, "pp": 2}, 4, "dp 2 x sp 2 x pp 2 = 8, and 4 processes"),
    ],
)
def test_sizes_that_do_not_multiply_to_the_processes(sizes, num_processes, given):
    with pytest.raises(ConfigError) as raised:
        replicas(ParallelConfig(**sizes), num_processes)
    assert given in str(raised.value)
    assert "torchrun --nproc-per-node" in raised.value.change
