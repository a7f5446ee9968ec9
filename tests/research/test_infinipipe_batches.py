"""InfiniPipe's own batches: the pipelines of one, and the table of its balance."""

from dataclasses import replace

import pytest
from helpers.pipeline_plans import num_pipelines
from papers.infinipipe import packings
from papers.timing import fused_card

from furlong.cost.lengths import sample_lengths
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.plan.plan import Forward
from furlong.planners.infinipipe import plan_infinipipe
from furlong.planners.layouts import cut_layers, mean_attended_keys
from furlong.simulate.clock import measure, simulate

pytestmark = pytest.mark.nightly

K = 1024
GPT = CostModel(model_shape("GPT-13B"), fused_card("A800"))


@pytest.mark.slow
def test_a_batch_of_the_paper():
    lens = [min(n, 192 * K) for n in sample_lengths("github", 512, 0)]
    model = replace(GPT, training=Training(zero_stage=3))
    stages = cut_layers(model, 4, mean_attended_keys(lens))
    plan = plan_infinipipe(lens, model, stages=stages, sp_size=8)
    # "usually at most two pipelines", and bubbles below 20 % (5.3)
    assert (
        any(a.recompute_layers for a in plan.actions[0] if isinstance(a, Forward))
        and num_pipelines(plan) == 2
    )
    assert measure(simulate(plan, model.costs(plan))).idle_ratio < 0.2


@pytest.mark.parametrize("preset", ["github", "commoncrawl"])
@pytest.mark.parametrize(("context", "num_slices"), [(32 * K, 2), (48 * K, 4), (64 * K, 4)])
def test_table_2_balances_tokens(preset, context, num_slices):
    # the paper: relative deviations of time and tokens 5.9 %, 35.2 % by time alone, 6.2 %, 5.5 %
    # by both, in a setting that it does not state. Here that of tokens falls as it says, that of
    # time does not stay (25 to 33 % as printed): chunks of short sequences are full of tokens
    # before their time is up. A threshold that may not grow freely takes some of that back.
    by_time, printed, ours = packings(preset, context, num_slices, with_split=False)
    assert by_time[0] < 0.11 and by_time[1] > 0.23
    assert printed[1] < 0.6 * by_time[1] and ours[1] < 0.6 * by_time[1]
    assert by_time[0] < ours[0] < printed[0] < 0.35
