"""Joining the processes that torchrun has started, and the layouts that they cannot take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from furlong.errors import ConfigError

DeviceType = Literal["cpu", "cuda"]
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def joined(device_type: DeviceType, *, timeout_s: float = 600) -> Iterator[int]:
    """Within it this process is one of those that torchrun has started; yields their number.

    `timeout_s`: seconds after which a collective that not all have reached is an error. On leaving
    all wait for each other, so that nobody's sockets close while another still reads; an error
    leaves at once, for torchrun ends the others. Raises ConfigError outside of torchrun.
    """
    missing = [name for name in _ENVIRONMENT if name not in os.environ]
    if missing:
        raise ConfigError(
            given=f"a process without {', '.join(missing)}",
            required="the environment that torchrun gives each process",
            source="the environment variables of this process",
            change="start it with torchrun --nproc-per-node N",
        )
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    base, rank, num_processes = next(rendezvous("env://"))
    # torchrun keeps one store over its restarts: addresses of dead processes would be found in it
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=PrefixStore(f"attempt{attempt}", base),
        rank=rank,
        world_size=num_processes,
        timeout=timedelta(seconds=timeout_s),
    )
    yield num_processes
    dist.barrier()
    dist.destroy_process_group()


def require_sizes(dp: int, sp: int, pp: int, num_processes: int) -> None:
    """Raise ConfigError unless dp x sp x pp is the number of processes."""
    product = dp * sp * pp
    if min(dp, sp, pp) < 1 or product != num_processes:
        raise ConfigError(
            given=f"dp {dp} x sp {sp} x pp {pp} = {product} on {num_processes} processes",
            required="sizes of at least 1 that multiply to the number of processes",
            source="the sizes of parallel and the world size of torchrun",
            change=f"start {product} processes (torchrun --nproc-per-node), or change the sizes"
            if min(dp, sp, pp) > 0
            else "set each size to 1 or more",
        )


def require_stages(pp: int, num_layers: int) -> None:
    """Raise ConfigError for fewer layers than stages. Heads are no bound: a pool larger than they
    can be divided gathers K,V."""
    if pp > num_layers:
        raise ConfigError(
            given=f"pp {pp} for a model of {num_layers} layers",
            required="at most as many stages as layers",
            source="the sizes of parallel and the model's config",
            change=f"set pp to {num_layers} or less",
        )
