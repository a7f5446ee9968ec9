"""The parts of gpu.py: `gpu_part.py NAME SETTINGS_AS_JSON` prints a line of JSON per result, as
soon as it is known: {"result": its name, ...}."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
from measuring import Timer, release
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import furlong
from furlong.config.schema import DataConfig, ModelConfig, RunConfig, Source
from furlong.config.schema import LoraConfig as LoraKeys
from furlong.cost.machine import Machine, known_card, this_cpu
from furlong.cost.shape import known_models
from furlong.models.attention import patched
from furlong.models.build import build_model
from furlong.models.describe import describe
from furlong.models.fused import fused
from furlong.ops.backends.base import Block, Tally
from furlong.ops.backends.reference import Reference
from furlong.ops.backends.select import CallKind, fitting_backends
from furlong.plan.lengths import StepSize, count_lengths
from furlong.planners.decide import decide
from furlong.planners.question import Question
from furlong.planners.setup import cost_model_of, limits_of
from furlong.runtime.profile import peak_memory_bytes, reset_peak_memory
from furlong.testing import Gradients, take_grads, total_relative_error
from furlong.train.metrics import MfuMeter
from furlong.train.run_folder import CHECKPOINTS, list_checkpoints
from furlong.values import log_prob

K = 1024
SMALL, LARGE = "Qwen2.5-0.5B", "Qwen2.5-7B"
ON_CPU = {"kv": "cpu", "inputs": "cpu", "attention": "cpu"}
PLANS: dict[str, dict[str, Any]] = {
    "device": {"keep": "attention"}, "cpu": {"keep": "attention", "offload": ON_CPU},
}  # fmt: skip
_LORA_RANK = 16
_MAX_POSITIONS = 2**21
_ERROR_LAYERS = 4
_BETA = 0.1
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
    """The second of two steps: the first one pins memory, builds plans and compiles, on a quarter
    of the tokens where nothing leaves the device."""

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
    calls: dict[str, int]
    """Of each attention kernel."""
    shares: dict[str, float]
    """Of attention's FLOPs, by kernel."""
    num_fused: int
    """Norms and adapters with fewer kernels: 0 with compiled layers."""


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

    def auto(self, num_tokens: int) -> furlong.ChunkOptions:
        """What `furlong train` chooses for a run over sequences of this length on this device."""
        lora = LoraKeys(rank=_LORA_RANK) if self._is_lora else None
        config = RunConfig(
            model=ModelConfig(name=LARGE if self._is_lora else SMALL, lora=lora),
            data=DataConfig(train=(Source(path="none"),), max_seq_len=num_tokens),
        )
        if self.device.type == "cuda":
            whole = torch.cuda.get_device_properties(0).total_memory
            machine = Machine.of_card(_device_name(self.device), whole)
            held = torch.cuda.memory_allocated()
            budget = int(0.95 * (torch.cuda.mem_get_info()[0] + held))
            limits = limits_of(machine, budget, int(0.6 * psutil.virtual_memory().available))
        else:
            machine = this_cpu()
            limits = limits_of(machine, int(0.6 * psutil.virtual_memory().available))
        shape = describe(AutoConfig.for_model(**self.config))
        question = Question((), cost_model_of(config, shape, machine), limits)
        return decide(question, count_lengths([num_tokens]), size=StepSize(1)).options

    def step(
        self, num_tokens: int, options: furlong.ChunkOptions
    ) -> tuple[float, float, furlong.StepResult]:
        whole = Timer(self.device)
        result = self.engine.forward_backward(self.batch(num_tokens), options)
        own = Timer(self.device)
        self._optimizer.step()
        optimizer_s = own.seconds()
        return whole.seconds(), optimizer_s, result

    def point(self, num_tokens: int, plan: str, *, repeats: bool = True) -> Point:
        """`plan`: one of PLANS, or `auto`."""
        given = {"size": self._settings.chunk} | PLANS.get(plan, {})
        options = self.auto(num_tokens) if plan == "auto" else furlong.ChunkOptions(**given)
        # pinned memory is that of a length; all else, kernels and compiled layers, is met sooner
        is_pinned = bool(options.offloading.targets)
        warm_tokens = num_tokens if is_pinned else max(1024, num_tokens // 4)
        first_s = self.step(min(num_tokens, warm_tokens), options)[0] if repeats else None
        release(self.model)
        reset_peak_memory(self.device)
        step_s, optimizer_s, result = self.step(num_tokens, options)
        computed = result.attention
        total = max(1, computed.flops.total())
        shares = {name: flops / total for name, flops in computed.flops.items()}
        return Point(
            num_tokens, step_s, optimizer_s, first_s, num_tokens / step_s,
            self._mfu(num_tokens, step_s), peak_memory_bytes(self.device),
            _pinned_bytes(self.device), result.cpu_bytes + result.disk_bytes,
            peak_memory_bytes(torch.device("cpu")), result.loss,
            dict(computed.calls), shares, len(self.engine.model.fused),
        )  # fmt: skip

    def _mfu(self, num_tokens: int, step_s: float) -> float | None:
        peak, card = self._settings.peak_flops_per_s, known_card(_device_name(self.device))
        if peak is None and card is not None:
            peak = card.peak_flops_per_s
        if peak is None:
            return None
        shape = describe(AutoConfig.for_model(**self.config))
        return MfuMeter(shape, peak, has_frozen_base=self._is_lora).mfu([num_tokens], step_s)


def kernels(settings: Settings) -> Results:
    """What there is; and of each attention kernel, at the shapes that train, the error of one group
    of heads against float32 and the rate of all."""
    found: dict[str, Any] = {"torch": torch.__version__, "device": _device_name(settings.device)}
    if settings.device == "cuda":
        found["cuda"], found["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
        found["capability"] = torch.cuda.get_device_capability()
        found["memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
        _ = torch.empty(2**26, device="cuda")
        segments = torch.cuda.memory_snapshot()
        found["expandable_segments"] = any(own.get("is_expandable") for own in segments)
    for package in ("transformers", "peft", "bitsandbytes", "flash-attn-4"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    yield "versions", found
    num_rows, tail = (128, 53) if settings.is_tiny else (8192, 848)
    odd = num_rows // 3
    shapes: dict[str, tuple[int, int, dict[str, Any]]] = {
        "full": (num_rows, num_rows, {"distance": num_rows}),
        "causal": (num_rows, num_rows, {}),
        "tail": (tail, num_rows, {"distance": num_rows}),
        "window": (num_rows, num_rows, {"window": num_rows // 2}),
        "packed": (num_rows, num_rows, {"squares": (slice(0, odd), slice(odd, num_rows))}),
    }
    for heads, groups, width in ((32, 8, 128), (14, 2, 64), (16, 8, 256)):
        for name, (rows, keys, rule) in shapes.items():
            block = Block(**{"distance": 0, "scale": width**-0.5, **rule})
            kind = CallKind(
                torch.device(settings.device), torch.bfloat16, width, block.window is not None
            )
            for backend in fitting_backends(kind):
                text = f"kernel, {name}, {heads}/{groups} x {width}, {type(backend).__name__}"
                try:
                    yield text, _kernel(backend, kind, (rows, keys), (heads, groups), block)
                except (RuntimeError, NotImplementedError) as error:  # the others are asked too
                    if isinstance(error, torch.AcceleratorError):
                        raise
                    yield text, {"refused": str(error).splitlines()[0]}
    yield from _norms(settings, num_rows)


def _norms(settings: Settings, num_tokens: int) -> Results:
    """Seconds of an RMS norm's forward and backward, of hidden states and of heads."""
    for name, sizes in (("hidden", (num_tokens, 4096)), ("heads", (32 * num_tokens, 128))):
        device = torch.device(settings.device)
        norm = LlamaRMSNorm(sizes[1]).to(device, torch.bfloat16)
        x = torch.randn(sizes, device=device, dtype=torch.bfloat16, requires_grad=True)
        for way, changes in (("as written", []), ("fused", fused(norm, device, {}))):
            with patched(changes):
                norm(x).backward(x.detach())
                timer = Timer(device)
                for _ in range(5):
                    norm(x).backward(x.detach())
                found = {"seconds": timer.seconds() / 5, "num_changed": len(changes)}
            yield f"norm, {name}, {way}", found


def _kernel(
    backend: Any, kind: CallKind, sizes: tuple[int, int], heads: tuple[int, int], block: Block
) -> dict[str, Any]:
    """Error and rate of a forward and a backward of q (N, T, H), k and v (K, S, H)."""
    generator = torch.Generator().manual_seed(0)
    (num_rows, num_keys), (num_heads, num_groups), width = sizes, heads, kind.head_dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, width, generator=generator).to(kind.device, kind.dtype)

    q, dout = (draw(num_rows, num_heads).transpose(0, 1) for _ in range(2))
    k, v = draw(num_keys, 2, num_groups).permute(1, 2, 0, 3)  # as a store keeps them

    def computed(own: Any, dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out, lse = own.forward(q, k, v, block)
        return out, *own.backward(dout, q, k, v, out, lse, block)

    backend.tally = Tally()
    found = computed(backend, dout, q, k, v)
    calls = dict(backend.tally.calls)
    group = num_heads // num_groups
    wide = (x.float() for x in (dout[:group], q[:group], k[:1], v[:1]))
    error = max(
        float((x[: len(truth)].float() - truth).norm() / truth.norm())
        for x, truth in zip(found, computed(Reference(), *wide), strict=True)
    )
    timer = Timer(kind.device)
    for _ in range(3):
        computed(backend, dout, q, k, v)
    flops = 3 * 14 * block.num_pairs(num_rows, num_keys) * num_heads * width
    return {"error": error, "tflops_per_s": flops / timer.seconds() / 1e12, "calls": calls}


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
        "1 chunk": (whole, whole, {}), "64 chunks": (whole, whole // 64, {}),
        "tails, cpu": (3 * odd + 1, odd, PLANS["cpu"]),
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


def verify(settings: Settings) -> Results:
    run = subprocess.run(
        [sys.executable, "-m", "furlong", "verify"], capture_output=True, text=True, check=False
    )
    lines = (run.stdout + run.stderr).splitlines()
    yield "verify", {"returncode": run.returncode, "last": "".join(lines[-1:])}


def auto(settings: Settings) -> Results:
    """7B with LoRA as a run's own search has it; then with compiled layers."""
    subject, num_tokens = Subject(settings, LARGE, is_lora=True), settings.tokens(128 * K)
    yield "7B, 128K, auto", asdict(subject.point(num_tokens, "auto"))
    for layer in subject.engine.model.layers:
        layer.compile(backend="eager" if settings.is_tiny else "inductor")
    yield "7B, 128K, compiled", asdict(subject.point(num_tokens, "auto"))


def host(settings: Settings) -> Results:
    """7B with LoRA at 64K, its keys and values on the device and on the host."""
    subject = Subject(settings, LARGE, is_lora=True)
    for plan in PLANS:
        yield f"7B, 64K, {plan}", asdict(subject.point(settings.tokens(64 * K), plan))


def flat(settings: Settings) -> Results:
    """All weights of 0.5B trained."""
    subject = Subject(settings, SMALL, is_lora=False)
    for thousands in (32, 128):
        point = subject.point(settings.tokens(thousands * K), "cpu", repeats=thousands == 32)
        yield f"0.5B, {thousands}K, cpu", asdict(point)


def fsdp(settings: Settings) -> Results:
    """A process group of one: weights divided by FSDP2, sums and agreements over NCCL."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from furlong.runtime.distributed.mesh import make_ranks

    def step(**given: Any) -> tuple[float, float, int]:
        config = _config(settings, SMALL) | {"num_hidden_layers": _ERROR_LAYERS}
        model = build(config, torch.device(settings.device), is_lora=False)
        engine = furlong.Engine(model, compute_dtype=torch.bfloat16, **given)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(config["vocab_size"], (settings.tokens(16 * K),), generator=generator)
        options = furlong.ChunkOptions(size=settings.chunk, keep="attention")
        loss = engine.forward_backward([{"input_ids": ids, "labels": ids}], options).loss
        norm = engine.clip_gradients(None)
        return loss, norm, sum(isinstance(p, DTensor) for p in model.parameters())

    loss, norm, _ = step()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo",
            init_method=f"file://{folder}/store", rank=0, world_size=1,
        )  # fmt: skip
        ranks = replace(make_ranks(1, 1, 1, settings.device), is_forced=True)
        divided = step(ranks=ranks)
        dist.destroy_process_group()
    yield "FSDP2", {
        "divided": divided[2], "loss_off": abs(divided[0] / loss - 1),
        "norm_off": abs(divided[1] / norm - 1),
    }  # fmt: skip


def losses(settings: Settings) -> Results:
    """Errors of gradients in bfloat16 by those of Hugging Face's own, as in `errors`."""
    config = _config(settings, SMALL) | {"num_hidden_layers": 2}
    size, device = settings.tokens(1 * K) // 4, torch.device(settings.device)
    generator = torch.Generator().manual_seed(1)
    pair = [
        torch.randint(config["vocab_size"], (4 * size + n,), generator=generator).to(device)
        for n in (0, size // 3)
    ]
    chunks = furlong.ChunkOptions(size=size, keep="kv", num_retained=0)

    def dpo(sums: list[Tensor]) -> Tensor:
        return -logsigmoid(_BETA * (sums[0] - sums[1]))

    def whole(model: Any) -> Gradients:
        sums = []
        for ids in pair:
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
            sums.append(logits.log_softmax(-1).gather(1, ids[1:, None]).sum())
        dpo(sums).backward()
        return take_grads(model)

    model = build(config, device, is_lora=False)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    truth = whole(model)
    engine = furlong.Engine(model, compute_dtype=torch.bfloat16)
    given = [{"input_ids": ids, "labels": ids} for ids in pair]
    values = engine.token_values(given, chunks, log_prob())
    dpo([own.sum() for own in values]).backward()
    ours = total_relative_error(take_grads(model), truth)
    narrow = build(config, device, is_lora=False)
    for own, wide in zip(narrow.parameters(), model.parameters(), strict=True):
        own.data = wide.data.bfloat16()
    theirs = total_relative_error(whole(narrow), truth)
    yield "DPO", {"ratio": ours / theirs, "own": ours, "transformers": theirs}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        keys = LoraKeys(rank=_LORA_RANK).model_dump()

        def quantized(**more: Any) -> Any:
            made = build_model(folder, quantize="nf4", lora=keys, **more).to(device)
            generator = torch.Generator().manual_seed(2)
            for parameter in made.parameters():
                if parameter.requires_grad:  # B of zeros would hide A's gradient
                    drawn = torch.randn(parameter.shape, generator=generator) / 50
                    parameter.data = drawn.bfloat16().to(parameter)
            return made

        batch = given[:1]
        truth = _unchunked_gradients(quantized(unpacked=True), pair[0])
        own = quantized()
        furlong.forward_backward(own, batch, chunks, compute_dtype=torch.bfloat16)
        ours = total_relative_error(take_grads(own), truth)
        with torch.autocast(device.type, torch.bfloat16):
            theirs = total_relative_error(_unchunked_gradients(quantized(), pair[0]), truth)
    yield "QLoRA", {"ratio": ours / theirs, "own": ours, "transformers": theirs}


def resume(settings: Settings) -> Results:
    """`furlong train` of a tiny model, killed, and the same resumed; against one that was not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_run(folder)
        with ThreadPoolExecutor() as pool:
            undisturbed = pool.submit(_trained, folder, folder / "whole")
            killed = _trained(folder, folder / "killed", kills=True)
            whole = undisturbed.result()
        resumed = _trained(folder, folder / "killed", "--resume")
        yield "train, kill, resume", {
            "steps when killed": len(killed), "whole": whole, "resumed": resumed,
            "off": max(
                (abs(resumed[i] / whole[i] - 1) for i in whole if i in resumed), default=math.nan
            ) if set(whole) == set(resumed) else math.nan,
        }  # fmt: skip


PARTS: dict[str, Callable[[Settings], Results]] = {
    "kernels": kernels, "tests": tests, "errors": errors, "verify": verify, "auto": auto,
    "host": host, "flat": flat, "fsdp": fsdp, "resume": resume, "losses": losses,
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
