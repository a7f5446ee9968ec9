"""The parts of gpu.py: `gpu_part.py NAME SETTINGS_AS_JSON` prints a line of JSON per result, as
soon as it is known: {"result": its name, ...}."""

from __future__ import annotations

import json
import logging
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import Timer, release
from torch import Tensor
from transformers import AutoConfig

import furlong
from furlong.cost.machine import known_card
from furlong.cost.shape import known_models
from furlong.models.describe import describe
from furlong.runtime.profile import peak_memory_bytes, reset_peak_memory
from furlong.testing import Gradients, take_grads, total_relative_error
from furlong.train.metrics import MfuMeter
from furlong.train.run_folder import CHECKPOINTS, list_checkpoints

K = 1024
SMALL, LARGE = "Qwen2.5-0.5B", "Qwen2.5-7B"
ON_CPU = {"kv": "cpu", "inputs": "cpu", "attention": "cpu"}
PLANS: dict[str, dict[str, Any]] = {
    "device": {"keep": "attention"}, "cpu": {"keep": "attention", "offload": ON_CPU},
}  # fmt: skip
_LORA_RANK = 16
_MAX_POSITIONS = 2**21
_ERROR_LAYERS = 4
_LONG_LAYERS = 4
_REPOSITORY = Path(__file__).resolve().parents[1]

Results = Iterator[tuple[str, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Settings:
    device: str = "cuda"
    is_tiny: bool = False
    """Tiny shapes, and a hundredth of the tokens."""
    peak_flops_per_s: float | None = None
    """Of a device that is not known."""
    num_layers: int | None = None
    """Instead of the models' own."""

    def tokens(self, number: int) -> int:
        return max(256, number // 256) if self.is_tiny else number

    @property
    def chunk(self) -> int:
        """At 7B the graph of 8,192 tokens through all layers takes two thirds of 80 GB."""
        return 64 if self.is_tiny else 4096


@dataclass(frozen=True, slots=True)
class Point:
    """The second of two steps of one length: the first one pins memory and builds plans."""

    tokens: int
    step_s: float
    """With the optimizer's."""
    optimizer_s: float
    first_step_s: float | None
    tokens_per_s: float
    mfu: float | None
    device_peak_bytes: int
    pinned_peak_bytes: int
    below_peak_bytes: int
    """Held on the host and on disk by plans."""
    resident_bytes: int
    loss: float


class Subject:
    """A model, its engine and its optimizer."""

    def __init__(self, settings: Settings, name: str, *, is_lora: bool, **changes: Any) -> None:
        self._settings, self._is_lora = settings, is_lora
        self.device = torch.device(settings.device)
        self.config = _config(settings, name) | changes
        self.model = build(self.config, self.device, is_lora=is_lora)
        self.engine = furlong.Engine(self.model, compute_dtype=torch.bfloat16)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(self.config["vocab_size"], (2**20,), generator=generator)

    def batch(self, num_tokens: int) -> list[dict[str, Tensor]]:
        ids = self._ids[:num_tokens]
        return [{"input_ids": ids, "labels": ids}]

    def step(self, num_tokens: int, plan: str) -> tuple[float, float, furlong.StepResult]:
        options = furlong.ChunkOptions(size=self._settings.chunk, **PLANS[plan])
        whole = Timer(self.device)
        result = self.engine.forward_backward(self.batch(num_tokens), options)
        own = Timer(self.device)
        self._optimizer.step()
        optimizer_s = own.seconds()
        return whole.seconds(), optimizer_s, result

    def point(self, num_tokens: int, plan: str, *, repeats: bool = True) -> Point:
        first_s = self.step(num_tokens, plan)[0] if repeats else None
        release(self.model)
        reset_peak_memory(self.device)
        step_s, optimizer_s, result = self.step(num_tokens, plan)
        return Point(
            num_tokens, step_s, optimizer_s, first_s, num_tokens / step_s,
            self._mfu(num_tokens, step_s), peak_memory_bytes(self.device),
            _pinned_bytes(self.device), result.cpu_bytes + result.disk_bytes,
            peak_memory_bytes(torch.device("cpu")), result.loss,
        )  # fmt: skip

    def unchunked(self, num_tokens: int, *, offloads: bool) -> float:
        """Seconds of the second step of transformers with checkpoints, the head's loss in tiles;
        with `offloads` the inputs of layers wait in pinned host memory."""
        from contextlib import nullcontext

        ids = self._ids[:num_tokens].to(self.device)
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.enable_input_require_grads()
        base = getattr(self.model, "base_model", self.model)
        causal = base.model if self._is_lora else self.model
        step_s = math.nan
        for _ in range(2):
            saved = torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")
            whole = Timer(self.device)
            with saved if offloads else nullcontext():
                hidden = causal.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
                loss = _loss_in_tiles(causal.lm_head, hidden[:-1], ids[1:])
                loss.backward()
            self._optimizer.step()
            step_s = whole.seconds()
            release(self.model)
        self.model.gradient_checkpointing_disable()
        return step_s

    def _mfu(self, num_tokens: int, step_s: float) -> float | None:
        peak, card = self._settings.peak_flops_per_s, known_card(_device_name(self.device))
        if peak is None and card is not None:
            peak = card.peak_flops_per_s
        if peak is None:
            return None
        shape = describe(AutoConfig.for_model(**self.config))
        return MfuMeter(shape, peak, has_frozen_base=self._is_lora).mfu([num_tokens], step_s)


def versions(settings: Settings) -> Results:
    """What there is, and which kernels were chosen for which attention."""
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    from furlong.ops.backends.select import Kind, choose_backend

    found: dict[str, Any] = {"torch": torch.__version__, "device": _device_name(settings.device)}
    if settings.device == "cuda":
        found["cuda"], found["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
        found["capability"] = torch.cuda.get_device_capability()
        found["memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
    for package in ("transformers", "peft"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["flash_attn_interface"] = find_spec("flash_attn_interface") is not None
    yield "versions", found
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("furlong.ops.backends.select").addHandler(handler)
    chosen = {}
    for head_dim, width in ((64, None), (128, None), (192, 128), (256, None)):
        for is_windowed in (False, True):
            device = torch.device(settings.device)
            kind = Kind(device, torch.bfloat16, head_dim, is_windowed, value_width=width)
            chosen[str(kind)] = type(choose_backend(kind)).__name__
    yield "backends", {"chosen": chosen, "left out": told}


def tests(settings: Settings) -> Results:
    """The tests that need a GPU, of kernels and pools."""
    where = "tests/ops", "tests/kv"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *where]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=_REPOSITORY)
    lines = run.stdout.splitlines()
    yield "tests", {
        "returncode": run.returncode, "last": "".join(lines[-1:]),
        "failed": [line for line in lines if line.startswith(("FAILED", "ERROR"))],
    }  # fmt: skip


def errors(settings: Settings) -> Results:
    """Errors of bfloat16 gradients by those of Hugging Face's own unchunked bfloat16 backward. The
    truth is the float32 gradient of the same weights, which both dtypes can hold."""
    whole = settings.tokens(4096)
    odd = whole // 4 + whole // 64  # 64 mod 128 keys
    cases: dict[str, tuple[int, int, dict[str, Any]]] = {
        "1 chunk": (whole, whole, {}), "16 chunks": (whole, whole // 16, {}),
        "64 chunks": (whole, whole // 64, {}), "tails, cpu": (3 * odd + 1, odd, PLANS["cpu"]),
    }  # fmt: skip
    for window in (None, whole // 4):
        changes: dict[str, Any] = {"num_hidden_layers": _ERROR_LAYERS}
        if window is not None:
            changes |= {"model_type": "mistral", "sliding_window": window}
        config = _config(settings, SMALL) | changes
        model = build(config, torch.device(settings.device), is_lora=False)
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
        for name, (num_tokens, size, options) in cases.items():
            generator = torch.Generator().manual_seed(1)
            ids = torch.randint(config["vocab_size"], (num_tokens,), generator=generator)
            ids = ids.to(settings.device)
            truth = _unchunked_gradients(model, ids)
            chunks = furlong.ChunkOptions(size=size, **options)
            batch = [{"input_ids": ids, "labels": ids}]
            furlong.forward_backward(model, batch, chunks, compute_dtype=torch.bfloat16)
            ours = total_relative_error(take_grads(model), truth)
            narrow = build(config, torch.device(settings.device), is_lora=False)
            for own, wide in zip(narrow.parameters(), model.parameters(), strict=True):
                own.data = wide.data.bfloat16()  # the rotary frequencies stay float32
            theirs = total_relative_error(_unchunked_gradients(narrow, ids), truth)
            text = name if window is None else f"{name}, window {window}"
            yield f"error, {text}", {"ratio": ours / theirs, "own": ours, "transformers": theirs}


def seven(settings: Settings) -> Results:
    """7B with LoRA in one process."""
    subject = Subject(settings, LARGE, is_lora=True)
    yield "7B, 128K, cpu", asdict(subject.point(settings.tokens(128 * K), "cpu"))
    for plan in PLANS:
        yield f"7B, 64K, {plan}", asdict(subject.point(settings.tokens(64 * K), plan))
    short = settings.tokens(32 * K)
    yield "7B, 32K, cpu", asdict(subject.point(short, "cpu"))
    yield "7B, 4 chunks, profile", _profile(subject, 4 * settings.chunk)
    for offloads in (True, False):
        text = "offload" if offloads else "checkpoints"
        try:
            step_s = subject.unchunked(short, offloads=offloads)
        except torch.OutOfMemoryError as error:
            yield f"transformers, 32K, {text}", {"error": str(error).splitlines()[0]}
            continue
        yield f"transformers, 32K, {text}", {"step_s": step_s, "tokens_per_s": short / step_s}


def long(settings: Settings) -> Results:
    """All weights of 0.5B trained; and four of its layers at a million tokens."""
    subject = Subject(settings, SMALL, is_lora=False)
    for thousands in (64, 256):
        point = subject.point(settings.tokens(thousands * K), "cpu", repeats=thousands == 64)
        yield f"0.5B, {thousands}K, cpu", asdict(point)
    del subject
    subject = Subject(settings, SMALL, is_lora=False, num_hidden_layers=_LONG_LAYERS)
    for thousands in (64, 1024):
        point = subject.point(settings.tokens(thousands * K), "cpu", repeats=thousands == 64)
        yield f"0.5B's first {_LONG_LAYERS} layers, {thousands}K, cpu", asdict(point)


def processes(settings: Settings) -> Results:
    """A world of one: weights divided by FSDP2, sums and agreements over NCCL."""
    alone = Subject(settings, SMALL, is_lora=False, num_hidden_layers=_ERROR_LAYERS)
    num_tokens = settings.tokens(16 * K)
    own = alone.step(num_tokens, "cpu")[2].loss
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
        __file__, "rank", json.dumps(asdict(settings)),
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith('{"result"')]
    if run.returncode or not lines:
        raise RuntimeError(run.stderr[-2000:])
    theirs = json.loads(lines[-1])
    loss = theirs["loss"]
    yield "one process of FSDP2", {"loss": loss, "alone": own, "off": abs(loss / own - 1)}


def rank(settings: Settings) -> Results:
    import torch.distributed as dist

    from furlong.runtime.distributed.mesh import make_ranks

    on_gpu = settings.device == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    config = _config(settings, SMALL) | {"num_hidden_layers": _ERROR_LAYERS}
    model = build(config, torch.device(settings.device), is_lora=False)
    ranks = make_ranks(1, 1, 1, settings.device)
    engine = furlong.Engine(model, compute_dtype=torch.bfloat16, ranks=ranks)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config["vocab_size"], (2**20,), generator=generator)
    ids = ids[: settings.tokens(16 * K)]
    options = furlong.ChunkOptions(size=settings.chunk, **PLANS["cpu"])
    result = engine.forward_backward([{"input_ids": ids, "labels": ids}], options)
    yield "rank", {"loss": result.loss}
    dist.destroy_process_group()


def train(settings: Settings) -> Results:
    """`furlong train` of a tiny model, killed, and the same resumed; against one that was not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_run(folder)
        whole = _trained(folder, folder / "whole")
        killed = _trained(folder, folder / "killed", kills=True)
        resumed = _trained(folder, folder / "killed", "--resume")
        yield "train, kill, resume", {
            "steps when killed": len(killed), "whole": whole, "resumed": resumed,
            "off": max(
                (abs(resumed[i] / whole[i] - 1) for i in whole if i in resumed), default=math.nan
            ) if set(whole) == set(resumed) else math.nan,
        }  # fmt: skip


PARTS: dict[str, Callable[[Settings], Results]] = {
    "versions": versions, "tests": tests, "errors": errors, "seven": seven, "long": long,
    "processes": processes, "train": train, "rank": rank,
}  # fmt: skip


def build(config: dict[str, Any], device: Any, *, is_lora: bool) -> Any:
    """Random weights on the device: float32, or frozen bfloat16 ones with float32 adapters."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = torch.bfloat16 if is_lora else torch.float32
    longest = {"max_position_embeddings": _MAX_POSITIONS, "use_cache": False}
    made = AutoConfig.for_model(**{**config, **longest})
    with device:
        model = AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation="sdpa")
    if is_lora:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=_LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    return model.to(device).train()


def _config(settings: Settings, name: str) -> dict[str, Any]:
    """Values of config.json."""
    config: dict[str, Any] = dict(known_models()[name]["config"])
    if settings.is_tiny:
        groups = config["num_attention_heads"] // config["num_key_value_heads"]
        config |= {
            "num_hidden_layers": 2, "hidden_size": 8 * groups, "num_attention_heads": groups,
            "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 256,
        }  # fmt: skip
    if settings.num_layers is not None:
        config["num_hidden_layers"] = settings.num_layers
    return config


def _loss_in_tiles(head: Any, hidden: Tensor, labels: Tensor, tile: int = 2048) -> Tensor:
    """The mean cross-entropy of hidden states (T, D), the logits of a tile at a time."""
    from torch.nn.functional import cross_entropy
    from torch.utils.checkpoint import checkpoint

    def of_tile(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(head(x).float(), y, reduction="sum")

    parts = [
        checkpoint(of_tile, x, y, use_reentrant=False)
        for x, y in zip(hidden.split(tile), labels.split(tile), strict=True)
    ]
    return torch.stack(parts).sum() / len(labels)


def _profile(subject: Subject, num_tokens: int) -> dict[str, Any]:
    """Of the device's work alone: copies that computing hides, kernels, gaps between them."""
    if torch.profiler.ProfilerActivity.CUDA not in torch.profiler.supported_activities():
        return {"hidden_share": None}
    subject.step(num_tokens, "cpu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        subject.step(num_tokens, "cpu")
    copies, kernels = _device_spans(profiler.events())
    busy = merged([*copies, *kernels])
    whole = busy[-1][1] - busy[0][0] if busy else 0.0
    computing = sum(stop - start for start, stop in merged(kernels))
    return {
        "hidden_share": hidden(copies, kernels), "num_kernels": len(kernels),
        "computing_share": computing / whole if whole else None,
    }  # fmt: skip


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


def _unchunked_gradients(model: Any, ids: Tensor) -> Gradients:
    model(input_ids=ids[None], labels=ids[None], use_cache=False).loss.backward()
    return take_grads(model)


def _write_run(folder: Path) -> None:
    """A tiny model with a tokenizer, and texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    texts = [" ".join(f"word{i * j % 17}" for j in range(1, 5 * i)) for i in range(1, 41)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(special_tokens=["<end>"], vocab_size=300, show_progress=False)
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    wrapped.save_pretrained(folder / "model")
    config = LlamaConfig(
        vocab_size=300, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "texts").mkdir()
    for number, text in enumerate(texts):
        (folder / "texts" / f"{number}.txt").write_text(text)


def _trained(folder: Path, out: Path, *flags: str, kills: bool = False) -> dict[int, float]:
    """Loss by step of a run, killed once it has a checkpoint and taken another step. Raises
    RuntimeError for one that ends otherwise."""
    values = {
        "model.name": folder / "model", "data.train": folder / "texts", "data.max_seq_len": 1024,
        "chunks.size": 256, "train.epochs": 3, "train.sequences_per_step": 4, "train.lr": "1e-3",
        "train.save_every_steps": 5, "out": out,
    }  # fmt: skip
    command = [sys.executable, "-m", "furlong", "train", *flags]
    command += [f"--{key}={value}" for key, value in values.items()]
    metrics = out / "metrics.jsonl"
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as run:
        if kills:
            while run.poll() is None and len(_losses(metrics)) < 7:
                time.sleep(0.05)
            run.send_signal(signal.SIGKILL)
        _, text = run.communicate()
    if run.returncode != (-signal.SIGKILL if kills else 0):
        raise RuntimeError(f"ended with {run.returncode}: {text[-2000:]}")
    if not list_checkpoints(out / CHECKPOINTS):
        raise RuntimeError("there is no checkpoint to resume from")
    return _losses(metrics)


def _losses(metrics: Path) -> dict[int, float]:
    if not metrics.exists():
        return {}
    found = {}
    for line in metrics.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # the last one, cut off
            continue
        if "loss" in record and "step" in record:
            found[record["step"]] = record["loss"]
    return found


def _device_name(device: torch.device | str) -> str:
    is_gpu = torch.device(device).type == "cuda"
    return torch.cuda.get_device_name(device) if is_gpu else "CPU"


def _pinned_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))


def main() -> None:
    name, given = sys.argv[1:]
    for result, values in PARTS[name](Settings(**json.loads(given))):
        print(json.dumps({"result": result, **values}), flush=True)


if __name__ == "__main__":
    main()
