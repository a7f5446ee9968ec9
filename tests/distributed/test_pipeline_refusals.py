"""Mistakes and errors in a pipeline: all processes are told, and none waits for ever."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from itertools import count

import torch.distributed as dist
from distributed.layout_cases import BOUND, Case, whole_grads
from distributed.sharded_cases import message
from distributed.test_pipeline_engine import LENS, STAGES, planned
from helpers.batches import batch
from helpers.ranks import run_all, run_ranks

import furlong
from furlong.planners.orders import plan_on_device
from furlong.runtime.distributed.mesh import make_ranks
from furlong.testing import reference_loss, take_grads, worst_relative_error


def refusals(rank: int) -> tuple[dict[str, str], float]:
    """The answer to each mistake, and the gradients' error in the step after them."""
    plan, sequences = planned(), batch(LENS)
    case = Case(plan)
    model = case.model(case.layers_of(rank))
    engine = furlong.Engine(model, ranks=make_ranks(1, 1, 2, "cpu"))
    alone = plan_on_device(LENS, furlong.ChunkOptions(size=8), num_layers=sum(STAGES))
    given = {
        "one list": (alone, sequences),
        "pool": (replace(plan, sp_size=2), sequences),
        "other heights": (planned(stages=STAGES[::-1]), sequences),
        "frozen": (planned(frozen_stages=1), sequences),
        "other sequences on one": (plan, sequences[:2] if rank else sequences),
    }
    said = {name: message(lambda x=x: engine.run(*x)) for name, x in given.items()}
    if rank == 1:
        model.requires_grad_(False)  # gradients pass through a stage without a trained weight
    engine.run(plan, sequences)
    grads = whole_grads(model)
    model.requires_grad_(False)
    said["untrained"] = message(lambda: engine.run(plan, sequences))
    whole = case.model()
    reference_loss(whole, sequences)
    truth = {name: grad for name, grad in take_grads(whole).items() if name in grads}
    return said, worst_relative_error(grads, truth) if grads else 0.0


SAID = {
    "one list": "PlanError: the plan has 1 lists of actions for 1 processes each, this run has dp",
    "pool": "PlanError: the plan has 2 lists of actions for 2 processes each, this run has dp 1",
    "other heights": "(PlanError: the plan runs layer 1|Elsew.*: given: +an error on process 0)",
    "frozen": "PlanError: the plan has no backward in its first 1 stages, where process 0 trains",
    "other sequences on one": "(DataError: given: +sequences of 23, 4 tok|.*error on process 1)",
    "untrained": "ConfigError: given: +LlamaForCausalLM without a parameter that requires",
}


def test_mistakes_are_refused_and_a_closed_engine_gives_back_threads_and_groups():
    kept, ((first, error), (second, _)) = run_all(closed, refusals, num_ranks=2, limit_s=180)
    for before, *after in kept:
        assert after == [before] * 2
    for found in (first, second):
        assert {n: text for n, text in found.items() if not re.match(SAID[n], text)} == {}
        assert found.keys() == SAID.keys()
    assert first["other heights"] != second["other heights"]
    assert error <= BOUND


class Interrupted(BaseException):
    """What no process makes up for."""


def ends(rank: int) -> list[str]:
    """The answers of a step in which the last stage ends and closes its links, and of the next."""
    case, calls = Case(planned()), count()

    def watch() -> None:
        if rank and next(calls) == 4:
            raise Interrupted

    engine = furlong.Engine(case.model(case.layers_of(rank)), ranks=make_ranks(1, 1, 2, "cpu"))
    said = []
    for _ in range(2):
        try:
            said.append(message(lambda: engine.run(case.plan, batch(LENS), watch=watch)))
        except Interrupted:
            said.append("interrupted")
    return said


def test_the_end_of_one_process_ends_the_step_of_its_neighbours():
    (first, again), (second, after) = run_ranks(ends, num_ranks=2, limit_s=120)
    assert second == "interrupted"
    assert re.match("LinkError: given: .*: process 1 left it by Interrupted", first)
    assert again == after and re.match("LinkError: given: +an earlier call", again)


def closed(rank: int) -> list[tuple[int, int]]:
    """Threads of links and process groups, before the first step and after each close."""
    case = Case(planned(), settings={"tie_word_embeddings": True})
    ranks, found = make_ranks(1, 1, 2, "cpu"), []

    def count_kept() -> None:
        links = [t for t in threading.enumerate() if t.name == "furlong-lane-link"]
        for thread in links if found else ():
            thread.join(10)
        alive = sum(thread.is_alive() for thread in links)
        found.append((alive, len(dist.distributed_c10d._world.pg_names)))

    count_kept()
    engine = furlong.Engine(case.model(case.layers_of(rank)), ranks=ranks)
    losses = []
    for _ in range(2):
        losses.append(engine.run(case.plan, batch(LENS)).loss)
        engine.close()
        count_kept()
    assert losses[0] == losses[1]
    return found
