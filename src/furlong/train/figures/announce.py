"""The lines that a run prints about itself before its first step."""

from __future__ import annotations

from dataclasses import asdict

import torch

from furlong.config.schema import RunConfig
from furlong.kv.pools import Storage
from furlong.planners.decide import Decision, division_in_words
from furlong.planners.options import dials_of, value_in_words
from furlong.planners.spaco import sampling_in_words
from furlong.train.run_model import DIALS
from furlong.train.whole import ModelSize
from furlong.units import format_bytes, format_count


def announce(
    config: RunConfig,
    size: ModelSize,
    decision: Decision,
    device: torch.device,
    storage: Storage,
    num_steps: int,
) -> None:
    """Print what is going to be trained, and how."""
    trained, total = size.num_trained, size.num_parameters
    where = str(device)
    if (count := decision.layout.num_devices) > 1:
        where = f"{count} processes, each a {device.type}"
    print(
        f"model: {config.model.name}, {format_count(total)} parameters,"
        f" {format_count(trained)} trained, {config.model.dtype} on {where}; {num_steps} steps"
    )
    options = decision.options
    values = {"tier": "device", "order": options.order} | dials_of(options)
    dials = [
        f"{name} {value_in_words(values[name])}"
        + (" (auto)" if getattr(config.chunks, name) == "auto" else "")
        for name in DIALS
        if name in values
    ]
    print(f"chunks: {', '.join(dials)}")
    if count > 1:
        divided = division_in_words(decision.layout, decision.stages)
        print(f"parallel: {decision.layout_words or divided}")
    if "disk" in asdict(options.tiers).values():
        print(f"disk: at most {format_bytes(storage.disk_bytes or 0)} in {storage.disk_dir}")
    if options.sampling is not None:
        print(f"sample: {sampling_in_words(options.sampling)}; the gradient is an estimate")
    if decision.words:
        print(f"auto: {decision.words}")
    if decision.figures:
        print(f"figures: {decision.figures}")
