"""Runs of every method by its name: the order of its paper, the gradients of one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.layout_cases import Grads, read_grads
from helpers.launched import Launched, free_port
from helpers.tiny_runs import TinyRun, build_tiny_run

from furlong.cli.main import main
from furlong.plan.plan import (
    COMPUTING,
    Backward,
    ChunkPlan,
    Computing,
    Forward,
    Place,
    Recompute,
)
from furlong.plan.text import format_action
from furlong.testing import worst_relative_error
from furlong.train.batches import BatchEngine

pytestmark = pytest.mark.slow
BOUND = 1e-12
FLAGS = (
    *("--model.dtype=float64", "--train.steps=1", "--train.epochs=null"),
    *("--train.sequences_per_step=6", "--train.eval_every_steps=0", "--chunks.size=auto"),
)
CUT = "--chunks.size=48"
DRAWN = 2
SPACO = (CUT, f"--chunks.sample={{chunks: {DRAWN}, rule: fixed, report_loss: true}}")
ONE = {
    "plain": ("--chunks.size=256",),
    "chunkflow": (CUT, "--chunks.num_retained=2"),
    "seco": (CUT,),
    "spaco": SPACO,
    "fpdt": (CUT,),
}
POOL, PIPELINE = "--parallel.sp=4", "--parallel.pp=4"
FOUR = {
    "chunkflow, a pool": (*ONE["chunkflow"], POOL),
    "chunkflow, a pipeline": (*ONE["chunkflow"], PIPELINE),
    "seco, a pool": (*ONE["seco"], POOL),
    "spaco, a pool": (*SPACO, POOL),
    "fpdt, a pool": (*ONE["fpdt"], POOL),
    # of these a budget asks for slices, all recomputed, for some recomputes, for micro-batches and
    # for larger places
    "infinipipe, a pipeline": (PIPELINE, "--memory.device=2020KiB"),
    "infinipipe, a pipeline with room": (PIPELINE, "--memory.device=3600KiB"),
    "skrull, a pool": (POOL, "--memory.device=2500KiB"),
    "skrull, a pool with room": (POOL,),
    "places, a pool": (POOL, "--memory.device=2500KiB"),
}


@dataclass(frozen=True)
class Step:
    """The step of a run on one of its processes."""

    loss: float
    plan: ChunkPlan
    actions: list[Computing]
    """Those of its timeline."""
    grads: Grads


def record(runs: Sequence[tuple[Path, list[str], int]]) -> None:
    """Run every command as this process of the launch, and save its step."""
    compute, steps = BatchEngine.compute, []

    def recorded(engines: BatchEngine, *args: Any, **values: Any) -> Any:
        result = compute(engines, *args, **values)
        done = [record.action for record in result.timeline.records if record.lane == "compute"]
        actions = [action for action in done if isinstance(action, COMPUTING)]
        assert result.plan is not None
        grads = read_grads(engines.engine.model.model)
        steps.append(Step(float(result.loss), result.plan, actions, grads))
        return result

    BatchEngine.compute = recorded  # type: ignore[method-assign]
    try:
        for folder, arguments, port in runs:
            os.environ["MASTER_PORT"] = str(port)
            assert main(arguments) == 0, arguments
            (step,) = steps
            steps.clear()
            torch.save(step, folder / f"{os.environ.get('RANK', 0)}.pt")
    finally:
        BatchEngine.compute = compute  # type: ignore[method-assign]


def trained(
    tiny: TinyRun, folder: Path, runs: dict[str, tuple[str, ...]], num_processes: int
) -> dict[str, list[Step]]:
    """The steps of each run, by process; all runs follow each other in the same processes."""
    given = []
    for name, flags in runs.items():
        (folder / name).mkdir()
        method = "auto" if name == "plain" else name.split(",")[0]
        flags = (*FLAGS, f"--chunks.method={method}", *flags)
        given.append((folder / name, tiny.arguments(folder / name / "run", *flags), free_port()))
    ended = Launched(folder / "out", record, given, num_processes=num_processes).ended(240)
    assert [process.code for process in ended] == [0] * num_processes, ended
    files = {name: [folder / name / f"{i}.pt" for i in range(num_processes)] for name in runs}
    return {
        name: [torch.load(file, weights_only=False) for file in own]
        for name, own in files.items()
    }  # fmt: skip


@pytest.fixture(scope="module")
def steps(
    tmp_path_factory: pytest.TempPathFactory, once: Callable[..., Any]
) -> dict[str, list[Step]]:
    def make() -> dict[str, list[Step]]:
        folder = tmp_path_factory.mktemp("runs")
        tiny = build_tiny_run(tmp_path_factory.mktemp("tiny"), num_layers=4, num_heads=4)
        return trained(tiny, folder, ONE, 1) | trained(tiny, folder, FOUR, 4)

    return dict(once("methods by name", make))


def joined(own: list[Step]) -> Grads:
    """The gradients of all processes; what several of them hold is the same on each."""
    found: Grads = {}
    for step in own:
        for name, grad in step.grads.items():
            assert torch.equal(found.setdefault(name, grad), grad), name
    return found


NAMES = [*ONE, *FOUR][1:]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_one_process(steps, name):
    truth, method = steps["plain"][0], name.split(",")[0]
    assert all(not any(p.start for p in c.slices) for c in truth.plan.chunks)
    for step in steps[name]:
        assert step.loss == pytest.approx(truth.loss, rel=BOUND)
    if method == "spaco":  # of the same draw, which leaves something out
        assert worst_relative_error(joined(steps[name]), truth.grads) > 0.01
        truth = steps["spaco"][0]
    assert worst_relative_error(joined(steps[name]), truth.grads) <= BOUND


@pytest.mark.parametrize("name", NAMES)
def test_timelines_show_the_order_of_the_paper(steps, name):
    num_processes = 4 if name in FOUR else 1
    method, is_pipeline = name.split(",")[0], "pipeline" in name
    for process, step in enumerate(steps[name]):
        plan, stage = step.plan, process if is_pipeline else 0
        assert len(plan.actions) * plan.sp_size == num_processes
        planned = [a for a in plan.actions[stage] if isinstance(a, COMPUTING)]
        assert step.actions == planned
        if method == "fpdt":
            assert list(map(format_action, planned)) == layer_first(plan)
        else:
            check_chunk_first(method, plan, stage, planned, cut="with room" not in name)
        if not is_pipeline and num_processes > 1:
            check_places(method, plan)


def test_cells_of_one_diagonal_recompute_alike(steps):
    layers: dict[int, int] = {}
    for stage, step in enumerate(steps["infinipipe, a pipeline with room"]):
        backwards = [action.chunk for action in step.actions if isinstance(action, Backward)]
        for action in step.actions:
            if isinstance(action, Forward):
                diagonal = backwards.index(action.chunk) - stage
                given = action.recompute_layers
                assert layers.setdefault(diagonal, given) == given
    assert set(layers.values()) == {0, 1}
    assert max(map(len, groups_of(steps["infinipipe, a pipeline"][0].plan))) == 3


def groups_of(plan: ChunkPlan) -> list[list[int]]:
    """Chunks that go on from the one before them are of its group."""
    groups: list[list[int]] = []
    for index, chunk in enumerate(plan.chunks):
        if any(piece.start for piece in chunk.slices):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def layer_first(plan: ChunkPlan) -> list[str]:
    """FPDT: a layer over all chunks of a group, then the next; the last one turns around on the
    spot, the others rebuild the K,V that later chunks read."""
    assert plan.stages == (1,) * 4
    found = []
    for group in groups_of(plan):
        for layer in range(4):
            found += [f"F{chunk}.{layer} {'kv' if layer == 3 else 'input'}" for chunk in group]
        for layer in reversed(range(4)):
            found += [f"K{chunk}.{layer}" for chunk in group[:-1] if layer < 3]
            for chunk in reversed(group):
                found += [f"R{chunk}.{layer}", f"B{chunk}.{layer}"]
    assert max(map(len, groups_of(plan))) == 3
    return found


def check_chunk_first(
    method: str, plan: ChunkPlan, stage: int, actions: Sequence[Computing], *, cut: bool
) -> None:
    """Forwards ascend. Behind how many of them comes what, and how many graphs there are."""
    groups, num_chunks = groups_of(plan), len(plan.chunks)
    ahead, longest = len(plan.actions) - 1 - stage, max(map(len, groups))
    forwards = [action for action in actions if isinstance(action, Forward)]
    assert [action.chunk for action in forwards] == list(range(num_chunks))
    retained = {"chunkflow": 2, "seco": 0, "spaco": 0}.get(method, longest)
    expected, keeps, is_drawn = [], [], {a.chunk for a in actions if isinstance(a, Backward)}
    for group in groups:
        keeps += [
            "all" if place >= len(group) - retained else "kv" for place in range(len(group))
        ]  # fmt: skip
        drawn = [chunk for chunk in reversed(group) if chunk in is_drawn]
        num_drawn = min(len(group), DRAWN) if method == "spaco" else len(group)
        assert len(drawn) == num_drawn
        factors = {}
        if num_drawn < len(group):
            factors = {
                "loss_factor": len(group) / num_drawn,
                "relay_factor": (len(group) - 1) / (num_drawn - 1),
            }
        for chunk in drawn:
            if method == "infinipipe":  # token-level 1F1B: one forward for each backward
                num_before = ahead + longest + len(expected)
            else:  # ChunkFlow's, state-aware: bound to the place of the group's last forward
                num_before = ahead + group[-1] + 1
            num_before = min(num_before, num_chunks)
            if keeps[chunk] != "all":
                expected.append((num_before, Recompute(chunk, stage)))
            expected.append((num_before, Backward(chunk, stage, **factors)))
    found, num_forwards, num_graphs, most_graphs = [], 0, 0, 0
    for action in actions:
        if isinstance(action, Forward):
            num_forwards += 1
        else:
            found.append((num_forwards, action))
        num_graphs += isinstance(action, Recompute)
        num_graphs += isinstance(action, Forward) and action.keep == "all"
        most_graphs = max(most_graphs, num_graphs)
        num_graphs -= isinstance(action, Backward)
    assert found == expected
    assert [action.keep for action in forwards] == keeps
    assert most_graphs <= ahead + max(1, retained)
    if method in ("chunkflow", "seco", "spaco", "infinipipe"):
        assert longest == (3 if cut else 1) and all(len(c.slices) <= 2 for c in plan.chunks)
    if method == "infinipipe":
        layers = [action.recompute_layers for action in forwards]
        assert sum(layers) == num_chunks if cut else 0 < sum(layers) < num_chunks
    if method in ("skrull", "places"):
        assert longest == 1


def check_places(method: str, plan: ChunkPlan) -> None:
    """Whole sequences that are local or shared by all: Skrull; of any place: ours; else Ulysses."""
    places = {piece.place for chunk in plan.chunks for piece in chunk.slices}
    sizes = {place.size for place in places}
    if method == "skrull":
        assert sizes <= {1, 4} and (4 in sizes) == (len(plan.chunks) > 1)
    elif method == "places":
        assert 2 in sizes and len(plan.chunks) > 1
    else:
        assert places == {Place(0, 4)}
