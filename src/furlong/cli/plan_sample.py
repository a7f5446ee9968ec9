"""The lines of `furlong plan` for a run that samples its backward."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from furlong.errors import ConfigError
from furlong.plan.values import ChunkPlan
from furlong.planners.sampling.rules import Sampling
from furlong.planners.sampling.use import check_sampling, num_drawn, sampling_in_words


def check_dials(
    chosen: argparse.Namespace, dials: Mapping[str, Any], num_devices: int, longest: int
) -> None:
    """Raises ConfigError for a sample where exact plans are searched, and for a meaningless one."""
    if "sample" not in dials:
        return
    for given, is_given in (
        (f"{num_devices} devices", num_devices != 1),
        ("--compare", chosen.compare),
        ("--method", chosen.method is not None),
    ):
        if is_given:
            raise ConfigError(
                given=f"{given}, and a run with chunks.sample",
                required="one device and the search of furlong train: others are among exact plans",
                source="the command line and the run file's key chunks.sample",
                change="plan the run as it is, or a copy of it without chunks.sample",
            )
    check_sampling(dials["sample"], size=dials["size"], longest=longest)


def sample_words(plan: ChunkPlan, sampling: Sampling) -> str:
    """The words for the draw of the plan that is shown."""
    return (
        f"{sampling_in_words(sampling)}: {num_drawn(plan):,} of {len(plan.chunks):,} chunks drawn"
        " in this step, another draw every step\n"
        "labels are not known here: all chunks are drawn as those without labels are\n"
        "step and memory are those of this draw; the dials fit with every chunk drawn"
    )


def sample_json(plan: ChunkPlan, sampling: Sampling) -> dict[str, Any]:
    """The same as plain values."""
    return asdict(sampling) | {"num_drawn": num_drawn(plan), "num_chunks": len(plan.chunks)}
