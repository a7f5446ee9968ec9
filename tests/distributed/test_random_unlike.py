"""Random groups of two and four processes, one of which differs: all are refused in four parts that
name a process, within bounded time, or all go on with the right gradient."""

from __future__ import annotations

import os
import random
import re
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.layout_cases import read_grads
from helpers.batches import batch
from helpers.launched import Launched
from helpers.nightly import SEED
from helpers.tiny_families import build

import furlong
from furlong.runtime.distributed.mesh import make_ranks
from furlong.testing import reference_loss, take_grads, total_relative_error

NUM_GROUPS, LIMIT_S, BOUND = 60, 60, 1e-10
SIZES = (2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)
FOUR_PARTS = re.compile(r"^given: .*^required: .*^from: .*^change: ", re.DOTALL | re.MULTILINE)


def wrap(model: Any) -> None:
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda *args, **named: forward(*args, **named)


def freeze(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.requires_grad_(False)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda model: model.model.layers[1].register_forward_hook(lambda *_: None),
    "pre-hook": lambda model: model.model.layers[2].register_forward_pre_hook(lambda *_: None),
    "scale": lambda model: model.model.layers[1].mlp.register_forward_hook(lambda *x: 2 * x[2]),
    "hook of a weight": lambda model: model.lm_head.weight.register_hook(lambda grad: 2 * grad),
    "eval": lambda model: model.eval(),
    "eval of a part": lambda model: model.model.layers[0].eval(),
    "use_cache": lambda model: setattr(model.config, "use_cache", not model.config.use_cache),
    "eps": lambda model: setattr(model.config, "rms_norm_eps", 0.1),
    "dtype": lambda model: model.float(),
    "wrapped": wrap, "frozen": freeze,
}  # fmt: skip
"""What one process does with its model after a step."""
OPTIONS: dict[str, dict[str, Any]] = {
    "size": {"size": 9}, "keep": {"keep": "input"}, "sample": {"sample": {"rate": 0.5}},
    "order": {"order": "layer-first"}, "offload": {"offload": "cpu"},
}  # fmt: skip
ARGUMENTS: dict[str, dict[str, Any]] = {"divisor": {"divisor": 7}, "backward": {"backward": False}}
SEQUENCES: dict[str, Callable[[list[Any]], list[Any]]] = {
    "no data": lambda own: [],
    "fewer": lambda own: own[1:],
    "tokens": lambda own: [{**one, "input_ids": one["input_ids"].roll(1)} for one in own],
    "text": lambda own: [{"input_ids": "text"}],
}
ERRORS: dict[str, Callable[[], Any]] = {
    "value": lambda: 1 / 0,
    "memory": lambda: bytearray(2**62),
    "interrupt": lambda: signal.raise_signal(signal.SIGINT),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
"""What happens to one process while it computes."""
KINDS = [*CHANGES, *OPTIONS, *ARGUMENTS, *SEQUENCES, *ERRORS, "inference"]


@dataclass(frozen=True)
class Group:
    kind: str
    sizes: tuple[int, int, int]
    who: int
    lens: tuple[int, ...]
    at: int
    """Of the actions, that in which an error comes."""

    def model(self) -> Any:
        return build("llama", num_hidden_layers=4)

    def sequences(self, replica: int, *, is_changed: bool = False) -> list[Any]:
        own = batch(self.lens, seed=replica)
        return SEQUENCES[self.kind](own) if is_changed and self.kind in SEQUENCES else own

    def truth(self, *, is_changed: bool) -> dict[str, torch.Tensor]:
        """The gradients of one process, whose model or sequences are changed, too."""
        model, whole = self.model(), self.sizes[1:] == (1, 1)
        if is_changed and self.kind in CHANGES:
            CHANGES[self.kind](model)
        own = [
            one
            for replica in range(self.sizes[0])
            for one in self.sequences(
                replica, is_changed=is_changed and whole and replica == self.who
            )
        ]
        reference_loss(model, own)
        return take_grads(model)


def drawn(number: int) -> Group:
    draw = random.Random(SEED * 10_000 + number)
    sizes = draw.choice(SIZES)
    who = draw.randrange(sizes[0] * sizes[1] * sizes[2])
    lens = tuple(draw.randrange(3, 28) for _ in range(draw.randrange(1, 4)))
    return Group(KINDS[number % len(KINDS)], sizes, who, lens, draw.randrange(1, 8))


def work(folder: Path, group: Group) -> None:
    """A step, one that differs here or elsewhere, and that once more: leaves what they say."""
    rank, kind, seen = int(os.environ["RANK"]), group.kind, [0]
    dist.init_process_group("gloo", timeout=timedelta(seconds=45))
    model, ranks = group.model(), make_ranks(*group.sizes, "cpu")
    engine, is_other = furlong.Engine(model, ranks=ranks), False

    def watch() -> None:
        seen[0] += 1
        if is_other and kind in ERRORS and seen[0] >= group.at:
            ERRORS[kind]()

    def step() -> str:
        options = {"size": 8, "keep": "kv"} | (OPTIONS.get(kind, {}) if is_other else {})
        given = ARGUMENTS.get(kind, {}) if is_other else {}
        own = group.sequences(ranks.replica, is_changed=is_other)
        mode = torch.inference_mode() if is_other and kind == "inference" else nullcontext()
        seen[0] = 0
        try:
            with mode:
                engine.forward_backward(own, furlong.ChunkOptions(**options), watch=watch, **given)
        except BaseException as error:
            return str(error) or type(error).__name__
        return "ok"

    said = [step()]
    model.zero_grad()
    is_other = rank == group.who
    if is_other and kind in CHANGES:
        CHANGES[kind](model)
    said.append(step())
    grads = read_grads(model) if said[-1] == "ok" else {}
    model.zero_grad()
    said.append(step())
    torch.save((said, grads), folder / f"{rank}.pt")
    os._exit(0)  # destructors of a group that has lost a process may wait


def faults_of(group: Group, folder: Path) -> tuple[list[str], str]:
    """What is wrong in a group, and whether it was refused or went on."""
    num_processes = group.sizes[0] * group.sizes[1] * group.sizes[2]
    launched = Launched(folder / "said", work, folder, group, num_processes=num_processes)
    faults, said, grads = [], {}, dict[str, torch.Tensor]()
    for rank, ended in enumerate(launched.ended(LIMIT_S)):
        if group.kind == "killed" and rank == group.who:
            continue
        if ended.code != 0:
            return [f"process {rank} ends with {ended.code}: {ended.said[-500:]}"], ""
        said[rank], own = torch.load(folder / f"{rank}.pt")
        grads |= own
    if {texts[0] for texts in said.values()} != {"ok"}:
        faults.append(f"the first step says {said}")
    second = {rank: texts[1] for rank, texts in said.items()}
    if {*second.values()} == {"ok"} and group.kind != "killed":
        truths = [group.truth(is_changed=is_changed) for is_changed in (False, True)]
        errors = [total_relative_error(grads, truth) for truth in truths]
        return faults + ([f"gradients are off by {errors}"] if min(errors) > BOUND else []), "right"
    for rank, text in second.items():
        is_named = FOUR_PARTS.search(text) and re.search(r"process(es)? \d|replica \d", text)
        if text == "ok" or not (is_named or rank == group.who or len({*second.values()}) == 1):
            faults.append(f"process {rank} says {text}")
    return faults, "refused"


@pytest.mark.nightly
def test_one_that_differs_is_refused_by_all_or_changes_nothing(tmp_path: Path) -> None:
    counts, wrong = Counter[str](), {}
    for number in range(NUM_GROUPS):
        group = drawn(number)
        faults, how = faults_of(group, tmp_path / str(number))
        counts[how] += 1
        wrong |= {str(group): faults} if faults else {}
    print(f"{NUM_GROUPS} groups: {dict(counts)}")
    assert wrong == {}
    assert counts["refused"] > NUM_GROUPS / 2
