"""benchmarks/parallel.py: its promises, and that the sleep backend takes a cost model's time."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import parallel
import pytest
from parallel_plans import Contender, cost_model, slow_device
from parallel_steps import Ran, joined
from sleeping import Pace

from furlong.cost.machine import Link
from furlong.cost.model import CostModel
from furlong.plan.plan import Backward, Chunk, ChunkPlan, Forward, Place, Recv, Send, Slice
from furlong.plan.rows import rows_of
from furlong.planners.chunks import group_chunks
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_1f1b, plan_on_device
from furlong.timeline import Record, Timeline

ROOT = Path(__file__).resolve().parents[2]
LENS = (70, 30, 12)


def model(**changes: object) -> CostModel:
    return cost_model(replace(slow_device(), **changes))  # type: ignore[arg-type]


def row(name: str, simulated_s: float, *measured_s: float, part: str = "four") -> parallel.Row:
    """A plan of one process that takes so long."""
    plan = plan_on_device(LENS, ChunkOptions(size=32), num_layers=8)
    contender = Contender("pipelines", name, (1, 1, 1), plan, model(), "")

    def timeline(seconds: float) -> Timeline:
        return Timeline((Record(0, "compute", Forward(0, 0, "all"), 0.0, seconds, 0, 0),))

    return parallel.Row(part, contender, timeline(simulated_s), tuple(map(timeline, measured_s)))


def verdicts(*rows: parallel.Row) -> dict[str, str]:
    return {promise.name: promise.verdict for promise in parallel.promised(rows)}


def test_errors_are_bounded_by_what_the_processes_do():
    assert set(verdicts(row("a", 1.0, 1.1), row("b", 1.0, 0.92)).values()) == {"met"}
    assert verdicts(row("a", 1.0, 1.12))["four: a: error"] == "MISSED"
    assert verdicts(row("a", 1.0, 1.12, part="two"))["two: a: error"] == "met"
    assert verdicts(row("a", 1.0, 1.26, part="two"))["two: a: error"] == "MISSED"


def test_plans_far_apart_are_ranked_the_same():
    ranked = "four: pairs ranked otherwise"
    assert verdicts(row("a", 1.0, 1.0), row("b", 1.2, 1.1))[ranked] == "met"
    assert verdicts(row("a", 1.0, 1.15), row("b", 1.2, 1.1))[ranked] == "MISSED"
    assert verdicts(row("a", 1.0, 1.05), row("b", 1.08, 1.0))[ranked] == "met"


@pytest.mark.parametrize("place", [1, 2])
def test_the_shares_of_a_pass_are_its_seconds(monkeypatch: pytest.MonkeyPatch, place: int):
    """Layers, pairs and the head of each process sleep for what the model says of it."""
    chunk = Chunk((Slice(0, 0, 40, Place(0, place)), Slice(1, 0, 12, Place(1, 1))))
    actions = Forward(0, 0, "all", recompute_layers=3), Backward(0, 0)
    plan = ChunkPlan((40, 12), (chunk,), (8,), (actions,), sp_size=2)
    costs = model().costs(plan, free=("all-to-all",))
    pairs = [40 * 41 / 2, 12 * 13 / 2] if place == 1 else [410.0, 410.0 + 78]
    for action in actions:
        seconds = []
        for process in range(2):
            slept: list[float] = []
            pace = Pace(model(), plan, 0, process)
            monkeypatch.setattr(pace, "sleep", slept.append)
            pace.begin(action)
            backward = isinstance(action, Backward)
            passes = [(8, backward)] + [(3, False)] * backward
            for num_layers, back in passes:
                for _ in range(num_layers):
                    pace.layer(backward=back)
                    pace.attend(8, pairs[process], backward=back)
            seconds.append(sum(slept))
        assert max(seconds) == pytest.approx(costs.compute_s(action, 0))


def test_an_exchange_takes_what_the_model_adds():
    """Without own work to hide behind, all-to-alls are what a pass takes longer with them."""
    chunk = Chunk((Slice(0, 0, 40, Place(0, 2)),))
    plan = ChunkPlan((40,), (chunk,), (8,), ((Forward(0, 0, "all"), Backward(0, 0)),), sp_size=2)
    assert rows_of(chunk, 0, sp_size=2, q_heads=8, kv_heads=4).exchanged
    slow = replace(slow_device().links, within_node=Link(1e-3, 1e6))
    one = model(links=slow)
    pace = Pace(one, plan, 0, 0)
    for action in plan.actions[0]:
        pace.begin(action)
        added = one.costs(plan).compute_s(action, 0)
        added -= one.costs(plan, free=("all-to-all",)).compute_s(action, 0)
        assert 2 * 8 * pace.exchange_s(2) == pytest.approx(added)


def test_a_measured_receive_begins_when_its_message_was_sent():
    groups = group_chunks(LENS, ChunkOptions(size=64))
    plan = plan_1f1b(LENS, groups, stages=(4, 4))
    send, recv = Send("activation", 0, 0, 1), Recv("activation", 0, 0, 0)
    assert send in plan.actions[0] and recv in plan.actions[1]
    first = Ran(0, 10.0, (Record(0, "compute", send, 2.0, 2.5, 0, 0),))
    second = Ran(1, 10.5, (Record(1, "compute", recv, 0.0, 3.0, 0, 0),))
    received = next(r for r in joined([first, second]).records if r.rank == 1)
    assert (received.lane, received.start_s, received.stop_s) == ("link", 2.0, 3.5)


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["four", "eight"])
def test_processes_sleep_as_long_as_is_simulated(tmp_path: Path, part: str):
    values, pictures = tmp_path / "parallel.json", tmp_path / "pictures"
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "parallel.py"), "--tiny", "--only", part,
         "--rounds", "1", "--json", str(values), "--plot", str(pictures)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert values.exists(), ended.stdout + ended.stderr
    found = json.loads(values.read_text())
    missed = [promise for promise in found["promises"] if promise["verdict"] == "MISSED"]
    assert ended.returncode == int(bool(missed))
    assert [one["name"] for one in found["rows"]] == [
        "1F1B padded", "state-aware 1F1B (ChunkFlow)", "InfiniPipe",
        *(["Ulysses", "FlexSP", "places"] if part == "eight" else []),
    ]  # fmt: skip
    for one in found["rows"]:  # a machine that does other things takes longer, never less
        assert min(one["measured_s"]) >= 0.9 * one["simulated_s"]
    if part == "four":
        picture = pictures / "four-processes.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
