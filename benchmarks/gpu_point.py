"""One point of gpu.py: `gpu_point.py SETTING_AS_JSON` prints a Point as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from furlong.cost.devices.known_hardware import KNOWN
from furlong.cost.devices.names import EXACT_NAMES
from furlong.cost.shapes.known_models import MODELS as KNOWN_MODELS
from furlong.cost.shapes.shape import ModelShape

_QWEN_1_5B = KNOWN_MODELS["Qwen2.5-0.5B"] | {
    "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "intermediate_size": 8960,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], bool]] = {
    "Qwen2.5-0.5B": (KNOWN_MODELS["Qwen2.5-0.5B"], False),
    "Qwen2.5-1.5B": (_QWEN_1_5B, False),
    "Qwen2.5-7B, LoRA": (KNOWN_MODELS["Qwen2.5-7B"], True),
    "Llama-3.1-8B, LoRA": (KNOWN_MODELS["Llama-3-8B"], True),  # its shape is Llama 3's
}
"""(config, whether only adapters are trained) by name."""

PLANS: dict[str, dict[str, Any]] = {
    "on the device": {"keep": "attention"},
    "on the host": {
        "keep": "attention", "tier": {"kv": "host", "inputs": "host", "attention": "host"},
    },
}  # fmt: skip
"""ChunkOptions by name."""

_LORA_RANK = 16
_MAX_POSITIONS = 2**21
_WARMUP_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class Setting:
    """What one process measures."""

    model: str
    plan: str
    num_tokens: int
    size: int
    is_tiny: bool
    device: str
    profiles: bool = False
    """Whether to watch the copies instead: the seconds are not comparable then."""
    peak_flops_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """What it found."""

    step_s: float
    """With the optimizer's."""
    optimizer_s: float
    process_s: float
    """From the start of the process: what a point costs."""
    mfu: float | None
    device_peak_bytes: int
    pinned_peak_bytes: int
    below_peak_bytes: int
    """Held on the host and on disk by plans."""
    resident_bytes: int
    """Highest resident set of the process."""
    hidden_share: float | None
    """Of the time of copies, that in which the device computes."""
    loss: float
    device_name: str


def run(setting: Setting) -> Point:
    import torch
    from measuring import Timer, release

    import furlong
    from furlong.runtime.memory.measure import peak_memory_bytes, reset_peak_memory

    start_s = time.perf_counter()
    device = torch.device(setting.device)
    config, is_lora = model_config(setting)
    model = build(config, device, is_lora=is_lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    engine = furlong.Engine(model, compute_dtype=torch.bfloat16)
    options = furlong.ChunkOptions(size=setting.size, **PLANS[setting.plan])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config["vocab_size"], (setting.num_tokens,), generator=generator)
    ids = ids.to(device)

    def step(num_tokens: int) -> tuple[float, float, furlong.StepResult]:
        batch = [{"input_ids": ids[:num_tokens], "labels": ids[:num_tokens]}]
        whole = Timer(device)
        result = engine.forward_backward(batch, options)
        own = Timer(device)
        optimizer.step()
        optimizer_s = own.seconds()
        return whole.seconds(), optimizer_s, result

    step(min(setting.num_tokens, _WARMUP_CHUNKS * setting.size))
    release(model)
    reset_peak_memory(device)
    hidden_share = None
    if setting.profiles:
        activities = list(torch.profiler.supported_activities())
        with torch.profiler.profile(activities=activities) as profiler:
            step_s, optimizer_s, result = step(setting.num_tokens)
        hidden_share = hidden(*_device_spans(profiler.events()))
    else:
        step_s, optimizer_s, result = step(setting.num_tokens)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return Point(
        step_s, optimizer_s, time.perf_counter() - start_s,
        _mfu(config, setting, name, step_s, is_lora=is_lora),
        peak_memory_bytes(device), _pinned_bytes(device),
        result.host_bytes + result.disk_bytes,
        peak_memory_bytes(torch.device("cpu")), hidden_share, result.loss, name,
    )  # fmt: skip


def model_config(setting: Setting) -> tuple[dict[str, Any], bool]:
    """Values of config.json, and whether only adapters are trained."""
    config, is_lora = MODELS[setting.model]
    if not setting.is_tiny:
        return config, is_lora
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    tiny = {
        "num_hidden_layers": 2, "hidden_size": 8 * groups, "num_attention_heads": groups,
        "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 256,
    }  # fmt: skip
    return config | tiny, is_lora


def build(config: dict[str, Any], device: Any, *, is_lora: bool) -> Any:
    """Random weights on the device: float32, or frozen bfloat16 ones with float32 adapters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = torch.bfloat16 if is_lora else torch.float32
    values = {k: v for k, v in config.items() if k != "model_type"}
    made = AutoConfig.for_model(
        config["model_type"], **values, max_position_embeddings=_MAX_POSITIONS, use_cache=False
    )
    with device:
        model = AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation="sdpa")
    if is_lora:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=_LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    return model.to(device).train()


def hidden(
    copies: Iterable[tuple[float, float]], kernels: Iterable[tuple[float, float]]
) -> float | None:
    """Share of the time of `copies` in which any of `kernels` runs too; None without copies.

    Spans are (start, stop) in one unit.
    """
    copying, computing = merged(copies), merged(kernels)
    whole = sum(stop - start for start, stop in copying)
    both, at = 0.0, 0
    for start, stop in copying:
        while at < len(computing) and computing[at][1] <= start:
            at += 1
        index = at
        while index < len(computing) and computing[index][0] < stop:
            both += min(stop, computing[index][1]) - max(start, computing[index][0])
            index += 1
    return both / whole if whole else None


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times without overlaps, in order."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def _device_spans(
    events: Any,
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Copies between host and device, and kernels, of a profile."""
    copies, kernels = [], []
    for event in events:
        if "CUDA" not in str(event.device_type):
            continue
        span = event.time_range.start, event.time_range.end
        if "Memcpy" not in event.name:
            kernels.append(span)
        elif "HtoD" in event.name or "DtoH" in event.name:
            copies.append(span)
    return copies, kernels


def _mfu(
    config: dict[str, Any], setting: Setting, name: str, step_s: float, *, is_lora: bool
) -> float | None:
    from furlong.train.figures.mfu import MfuMeter

    peak = setting.peak_flops_per_s
    if peak is None and name in EXACT_NAMES:
        peak = KNOWN[EXACT_NAMES[name]].peak_flops_per_s
    if peak is None:
        return None
    meter = MfuMeter(ModelShape.from_config(config), peak, has_frozen_base=is_lora)
    return meter.mfu([setting.num_tokens], step_s)


def _pinned_bytes(device: Any) -> int:
    import torch

    if device.type != "cuda":
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))


if __name__ == "__main__":
    print(json.dumps(asdict(run(Setting(**json.loads(sys.argv[1]))))))
