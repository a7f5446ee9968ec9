"""Random generators and module modes, saved at a forward and restored for its recompute."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class RNGState:
    """States of the CPU's generator and, on CUDA, the device's."""

    cpu: Tensor
    cuda: Tensor | None

    @staticmethod
    def read(device: torch.device) -> RNGState:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return RNGState(torch.get_rng_state(), cuda)

    def write(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)

    def equals(self, other: RNGState) -> bool:
        same_cuda = self.cuda is None or (
            other.cuda is not None and torch.equal(self.cuda, other.cuda)
        )
        return same_cuda and torch.equal(self.cpu, other.cpu)


@contextmanager
def replayed(state: RNGState | None, device: torch.device) -> Iterator[None]:
    """Context manager: set the generators to `state` (None: leave them), and restore them on exit,
    also after an error."""
    if state is None:
        yield
        return
    resume = RNGState.read(device)
    state.write(device)
    try:
        yield
    finally:
        resume.write(device)


@contextmanager
def independent_draws(process: int, device: torch.device) -> Iterator[None]:
    """Context manager: seed the generators differently on each process, reproducibly from the
    current CPU generator. On exit the CPU generator has advanced by a single draw."""
    seed = int(torch.randint(2**62, (), device="cpu"))
    resume = RNGState.read(device)
    own = random.Random(f"{seed} {process}").getrandbits(63)
    torch.default_generator.manual_seed(own)
    if device.type == "cuda":  # torch.manual_seed would seed all devices: only one is restored
        with torch.cuda.device(device):
            torch.cuda.manual_seed(own)
    try:
        yield
    finally:
        resume.write(device)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Context manager: restore the train or eval mode of every module on exit."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
