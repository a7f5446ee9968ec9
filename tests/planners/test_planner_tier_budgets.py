"""Limits of host and disk: what a run's keys give, and what is refused by name."""

import pytest

from furlong.errors import ConfigError
from furlong.plan.plan import Tiers
from furlong.planners.question import tier_budgets

GIB = 2**30


@pytest.mark.parametrize(
    ("tier", "host", "disk", "on_cpu", "expected"),
    [
        (None, "auto", 0, True, (0, 0)),
        ("auto", 0, 5, True, (0, 5)),
        ("disk", "auto", 5, True, (0, 5)),
        (None, "auto", 0, False, (7, 0)),
        ("host", "auto", 0, False, (7, 0)),
        ({"kv": "host", "inputs": "disk"}, 3, 5, False, (3, 5)),
        (Tiers(graphs="disk"), 0, 5, False, (0, 5)),
    ],
)
def test_what_the_keys_give(tier, host, disk, on_cpu, expected):
    assert tier_budgets(tier, host, disk, on_cpu=on_cpu, free_host_bytes=7) == expected


def test_a_host_that_is_not_known_has_no_limit():
    assert tier_budgets(None, "auto", 0, on_cpu=False) == (None, 0)


@pytest.mark.parametrize(
    ("tier", "host", "disk", "on_cpu", "given", "change"),
    [
        (None, 24 * GIB, 0, True, "memory.host = 24 GiB on a CPU", "add what it gives to memory.d"),
        ("host", "auto", 0, True, "chunks.tier = 'host' on a CPU", "remove host from chunks.tier"),
        ({"kv": "host"}, 0, 0, True, "{'kv': 'host'} on a CPU", "remove host from chunks.tier"),
        ("disk", "auto", 0, True, "disk with memory.disk = 0", "add memory.disk"),
        ({"inputs": "disk"}, "auto", 0, False, "disk with memory.disk = 0", "add memory.disk"),
        ("host", 0, 0, False, "host with memory.host = 0", "add memory.host"),
    ],
)
def test_what_cannot_be_is_told_in_four_parts(tier, host, disk, on_cpu, given, change):
    with pytest.raises(ConfigError) as caught:
        tier_budgets(tier, host, disk, on_cpu=on_cpu, free_host_bytes=7)
    assert given in caught.value.given
    assert change in caught.value.change
    assert caught.value.required and caught.value.source
