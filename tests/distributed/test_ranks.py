"""The helper of the distributed tests: answers by rank, and every way in which a rank may fail."""

import importlib.util
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from helpers.load import slowed
from helpers.ranks import PRELOADED, RankError, run_ranks


def summed(rank: int, factor: int) -> tuple[int, float]:
    x = torch.tensor([float(rank * factor)])
    dist.all_reduce(x)
    return rank, x.item()


def one_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("no such layer")
    dist.barrier()


def one_is_killed(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def test_what_the_server_imports_is_there():
    """It passes over a name that is not, and every process then imports the rest for itself."""
    assert [name for name in PRELOADED if importlib.util.find_spec(name) is None] == []


def test_answers_come_by_rank():
    assert run_ranks(summed, 10, num_ranks=3) == [(0, 30.0), (1, 30.0), (2, 30.0)]


def test_a_rank_that_raises_ends_all_with_its_traceback():
    with pytest.raises(RankError, match=r"(?s)rank 1 raised.*no such layer"):
        run_ranks(one_raises, num_ranks=3)


def test_a_rank_that_is_killed_is_named():
    started_s = time.monotonic()
    with pytest.raises(RankError, match="rank 1 died, exit code -9"):
        run_ranks(one_is_killed, num_ranks=2)
    assert time.monotonic() - started_s < slowed(25)
