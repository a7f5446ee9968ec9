"""Messages that need both ends: Megatron-LM's fused pairs on the clock."""

from dataclasses import replace

import pytest
from papers.fused_pairs import FusedPairs
from papers.unit_costs import UnitCosts

from furlong.errors import PlanError
from furlong.plan.plan import Chunk, Slice
from furlong.planners.orders import plan_1f1b
from furlong.simulate.clock import Clock

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize(
    ("lens", "plain", "paired"), [((1, 4, 1, 2), 55, 57), ((4, 2, 1, 1), 56, 56)]
)
def test_they_change_the_makespan(lens, plain, paired):
    groups = [[Chunk((Slice(seq_id, 0, n),))] for seq_id, n in enumerate(lens)]
    plan = plan_1f1b(lens, groups, stages=(1,) * 4)
    steps = [clock(plan, UnitCosts(plan)).run().duration_s for clock in (Clock, FusedPairs)]
    assert steps == [plain, paired]
    # a message that nobody takes is never sent
    apart = [[a for a in own if type(a).__name__ != "Recv"] for own in plan.actions]
    with pytest.raises(PlanError, match="wait for each other"):
        stuck = replace(plan, actions=tuple(map(tuple, apart)))
        FusedPairs(stuck, UnitCosts(stuck)).run()
