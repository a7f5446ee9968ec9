"""Plans from other processes: the same plans, the same errors, no torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from furlong.cost.devices.hardware import hardware
from furlong.cost.model import CostModel
from furlong.cost.shapes.shape import ModelShape
from furlong.errors import ConfigError
from furlong.planners.infinipipe.plan import plan_infinipipe
from furlong.planners.infinipipe.workers import PlanWorkers

MODEL = CostModel(
    ModelShape.from_config(
        {
            "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160,
            "vocab_size": 512,
        }
    ),
    hardware("A100-80"),
)  # fmt: skip
LENS = (4000, 1000, 900, 50)


@pytest.fixture(scope="module", params=[0, 1])
def workers(request):
    with PlanWorkers(request.param) as found:
        yield found


def test_plans_are_the_same(workers):
    ahead = workers.submit(plan_infinipipe, LENS, MODEL, num_stages=2)
    there = ahead.result(timeout=60)
    here = plan_infinipipe(LENS, MODEL, num_stages=2, solve_map=workers.map)
    assert there == here == plan_infinipipe(LENS, MODEL, num_stages=2)


def test_errors_come_back_whole(workers):
    ahead = workers.submit(plan_infinipipe, LENS, MODEL, num_stages=2, budget_bytes=1000)
    with pytest.raises(ConfigError, match="rank") as caught:
        ahead.result(timeout=60)
    assert caught.value.change


# The fork server is one per process, and another test may have had it load torch.
OWN_PROCESS = """
from test_planner_presolve import LENS, MODEL, PlanWorkers, plan_infinipipe
with PlanWorkers(1) as workers:
    workers.submit(plan_infinipipe, LENS, MODEL, num_stages=2).result(timeout=60)
    loaded = "{'torch', 'transformers', 'furlong'} & set(__import__('sys').modules)"
    print(workers.submit(eval, loaded).result(timeout=60))
"""


def test_a_worker_has_no_torch():
    ran = subprocess.run(
        [sys.executable, "-c", OWN_PROCESS],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.stdout.strip(), ran.returncode) == ("{'furlong'}", 0), ran.stderr


def test_closing_ends_the_processes():
    with PlanWorkers(1) as workers:
        workers.submit(abs, -1).result(timeout=60)
        (process,) = workers._pool._processes.values()
    assert not process.is_alive()
    with pytest.raises(RuntimeError):
        workers.submit(abs, -1)
