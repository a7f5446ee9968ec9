"""Each optimizer: the steps of transformers' Trainer or of its own library, and its state."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from helpers.bare_trainers import BareTrainer
from helpers.launched import Launched
from helpers.tiny_runs import TinyRun, run_command, signal_after
from integrations.trainers import wide_loss
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from furlong.api import Engine
from furlong.cli.main import main
from furlong.config.schema import TrainConfig
from furlong.config.sources import build_run, parse_run
from furlong.data.loader import LoaderState, TrainBatch
from furlong.data.tokenize import IGNORE_INDEX, Sequence
from furlong.errors import ConfigError
from furlong.models.build import build_model
from furlong.models.describe import describe
from furlong.planners.options import ChunkOptions
from furlong.planners.setup import training_of, with_optimizer
from furlong.train import start
from furlong.train.memory import Fitting
from furlong.train.optim import (
    BF16AdamW,
    build_optimizer,
    build_schedule,
    local,
    make_state,
    state_tensors,
)

NUM_STEPS = 20
SETTINGS: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.1, "eps": 1e-7, "betas": (0.9, 0.97)}
QUANTISED = (
    "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adamw_torch_8bit", "adamw_torch_4bit",
    "adamw_torch_fp8",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
        yield


def tiny(dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attention_bias=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


def sequences() -> list[Sequence]:
    """Three of a step, equally long, so that nobody pads them; some prompts have no label."""
    draw, found = np.random.default_rng(5), []
    for step in range(NUM_STEPS):
        for _ in range(3):
            ids = draw.integers(0, 48, size=9 + step).astype(np.int32)
            labels = ids.copy()
            labels[: draw.integers(0, 6)] = IGNORE_INDEX
            found.append(Sequence(len(found), "", ids, labels))
    return found


def muon_and_adamw(model: Any) -> Any:
    """Written out: two optimizers of torch that step together."""
    layers = dict(model.model.layers.named_parameters())
    matrices = [p for p in layers.values() if p.ndim == 2]
    ends = [model.model.embed_tokens.weight, model.lm_head.weight]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    muon = torch.optim.Muon(matrices, 2e-3, 0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": ends}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, 2e-3, (0.9, 0.97), 1e-7, 0.1)

    class Both(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            for part in (muon, adamw):
                for group in part.param_groups:
                    group["lr"] = self.param_groups[0]["lr"]
                part.step()

    return Both(list(model.parameters()), {"lr": 2e-3})


@pytest.mark.parametrize(
    "name", ["adafactor", *(pytest.param(n, marks=pytest.mark.slow) for n in ("adamw", "muon"))]
)
def test_twenty_steps_are_those_of_transformers_trainer(tmp_path: Path, name: str) -> None:
    known = sequences()
    plain = tiny()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=NUM_STEPS, per_device_train_batch_size=3,
        optim="adafactor" if name == "adafactor" else "adamw_torch", learning_rate=2e-3,
        weight_decay=0.1, adam_beta2=0.97, adam_epsilon=1e-7, max_grad_norm=0.5,
        lr_scheduler_type="constant", use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    records = [
        {"input_ids": torch.tensor(one.input_ids).long(), "labels": torch.tensor(one.labels).long()}
        for one in known
    ]
    transformers.Trainer(
        plain, arguments, train_dataset=records, compute_loss_func=wide_loss,
        optimizers=(muon_and_adamw(plain) if name == "muon" else None, None),
    ).train()  # fmt: skip

    batches = [
        TrainBatch(tuple(known[3 * step : 3 * step + 3]), LoaderState(0, step + 1))
        for step in range(NUM_STEPS)
    ]
    model = tiny()
    own = SETTINGS | ({"betas": (0.9, 0.95), "eps": 1e-8} if name == "adafactor" else {})
    trainer = BareTrainer(
        tmp_path, Engine(model, max_seq_len=64), model, batches, Fitting(ChunkOptions(size=8)),
        num_steps=NUM_STEPS, max_grad_norm=0.5, optimizer=name, say=lambda line: None,
        eval_every_steps=0, **own,
    )  # fmt: skip
    trainer.train()
    start = dict(tiny().named_parameters())
    for (key, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours - start[key]).norm() > 0, key
        assert (ours - theirs).norm() <= 1e-9 * theirs.norm(), key


def by_its_library(name: str, groups: list[dict[str, Any]]) -> Any:
    if "torch" in name:
        import torchao.optim as torchao

        kinds = {"8bit": torchao.AdamW8bit, "4bit": torchao.AdamW4bit, "fp8": torchao.AdamWFp8}
        kind, more = kinds[name.rpartition("_")[2]], {"block_size": 256}
    else:
        from bitsandbytes import optim

        kinds = {
            "adamw_8bit": optim.AdamW8bit, "paged_adamw_8bit": optim.PagedAdamW8bit,
            "paged_adamw_32bit": optim.PagedAdamW32bit,
        }  # fmt: skip
        kind, more = kinds[name], {}
    return kind(groups, lr=2e-3, betas=(0.9, 0.97), eps=1e-7, **more)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * ("torch" in n)) for n in QUANTISED]
)
def test_twenty_steps_are_those_of_the_library_to_the_bit(name: str) -> None:
    settings = TrainConfig(optimizer=name, schedule="constant", warmup_steps=0, **SETTINGS)
    models = [nn.Sequential(nn.Embedding(96, 64), nn.Linear(64, 80)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours, (embedding, linear) = build_optimizer(models[0], settings), models[1]
    schedule = build_schedule(ours, settings, NUM_STEPS)
    make_state(ours)
    decayed = {"params": [embedding.weight, linear.weight], "weight_decay": 0.1}
    theirs = by_its_library(name, [decayed, {"params": [linear.bias], "weight_decay": 0.0}])
    for step in range(NUM_STEPS):
        for model in models:
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
        ours.step()
        schedule.step()
        theirs.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    kept = state_tensors(ours, models[0][0].weight)
    narrow = [x for x in kept.values() if x.itemsize == 1]
    assert len(narrow) == (0 if name == "paged_adamw_32bit" else 2)


def run_of(tiny_run: TinyRun, out: Path, *flags: str) -> list[str]:
    steps = ("--train.epochs=null", "--train.steps=5", "--train.weight_decay=0.1")
    return tiny_run.arguments(out, *steps, *flags)


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(next((run / "model").glob("*.safetensors")))


GROUPS = "--train.groups=[{match: norm, lr: 1e-4}, {match: q_proj, lr: 2e-2, weight_decay: 0}]"


@pytest.mark.parametrize(
    "flags",
    [
        ("--train.optimizer=adamw_8bit", "--train.async_save=true"),
        ("--train.state_dtype=bfloat16", GROUPS),
        *(
            pytest.param(
                (f"--train.optimizer={name}", *more),
                # its state is that of adamw_8bit, paged as that of paged_adamw_32bit
                marks=pytest.mark.nightly if name == "paged_adamw_8bit" else pytest.mark.slow,
            )
            for name, more in {
                "adafactor": (),
                "muon": ("--train.min_lr=1e-3",),
                "paged_adamw_8bit": (),
                "paged_adamw_32bit": (),
                "adamw_torch_8bit": (GROUPS,),
                "adamw_torch_4bit": (),
                "adamw_torch_fp8": (),
            }.items()
        ),
    ],
    ids=lambda flags: flags[0].partition("=")[2],
)
def test_a_run_that_ends_early_goes_on_to_the_same_bits(
    tiny_run: TinyRun, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    assert main(run_of(tiny_run, tmp_path / "whole", *flags)) == 0
    with signal_after(3):
        assert main(run_of(tiny_run, tmp_path / "run", *flags)) == 0
    assert main(["train", str(tmp_path / "run" / "config.json"), "--resume"]) == 0
    ours, theirs = weights(tmp_path / "run"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())


def test_a_group_has_its_own_rate_and_decay() -> None:
    model = tiny()
    groups = [{"match": "layers.0", "lr": 0.25}, {"match": "norm|lm_head", "weight_decay": 0.5}]
    settings = TrainConfig(lr=0.5, weight_decay=0.125, groups=groups)
    optimizer = build_optimizer(model, settings)
    schedule = build_schedule(optimizer, settings, 10)
    found = {
        id(p): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert schedule.base_lrs[0] == 0.5  # that of the run is told as the rate
    layers = model.model.layers
    assert found[id(layers[0].mlp.up_proj.weight)] == (0.25, 0.125)
    assert found[id(layers[0].input_layernorm.weight)] == (0.25, 0.0)  # of the first that fits
    assert found[id(layers[1].input_layernorm.weight)] == (0.5, 0.5)
    assert found[id(model.lm_head.weight)] == (0.5, 0.5)
    assert found[id(layers[1].mlp.up_proj.weight)] == (0.5, 0.125)
    assert found[id(layers[1].self_attn.q_proj.bias)] == (0.5, 0.0)
    assert len(found) == len(list(model.parameters()))


def test_a_group_of_nothing_is_refused() -> None:
    settings = TrainConfig(groups=[{"match": "q_prj"}])
    with pytest.raises(ConfigError, match="finds no trained parameter"):
        build_optimizer(tiny(), settings)


def test_moments_in_bfloat16_have_the_right_mean() -> None:
    """A second moment falls by a thousandth in each step, which is less than half a unit."""
    model = nn.Linear(64, 64, bias=False)
    settings = TrainConfig(state_dtype="bfloat16", betas=(0.9, 0.999))
    optimizer = build_optimizer(model, settings)
    make_state(optimizer)
    state = optimizer.state[model.weight]
    state["exp_avg_sq"].fill_(1.0)
    model.weight.grad = torch.zeros_like(model.weight)
    for _ in range(50):
        optimizer.step()
    assert state["exp_avg_sq"].dtype == torch.bfloat16
    assert state["exp_avg_sq"].float().mean() == pytest.approx(0.999**50, rel=1e-3)
    assert model.weight.dtype == torch.float32


def errors_of_a_step(names: list[str] | None, parts: list[Tensor]) -> list[Tensor]:
    """By which the moments of each part differ from their exact values, after equal gradients."""
    groups = [{"params": parts} | ({"param_names": names} if names else {})]
    optimizer = BF16AdamW(groups, lr=1e-3)
    make_state(optimizer)
    torch.manual_seed(3)
    exact = 0.1 * torch.randn(64, 64)
    for part in parts:
        whole = 10 * exact
        like = isinstance(part, DTensor)
        part.grad = DTensor.from_local(whole, part.device_mesh, part.placements) if like else whole
    optimizer.step()
    return [local(optimizer.state[part]["exp_avg"]).float() - exact for part in parts]


def correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


def test_each_weight_is_rounded_by_draws_of_its_own() -> None:
    """Bounds are four standard deviations of what 4,096 independent pairs show."""
    one, other = errors_of_a_step(None, [nn.Parameter(torch.zeros(64, 64)) for _ in range(2)])
    assert abs(correlation(one, other)) < 4 / 64
    first, second = errors_of_a_step(["a", "b"], [one.clone(), one.clone()])
    copy, _ = errors_of_a_step(["b", "c"], [one.clone(), one.clone()])  # as of another stage
    assert torch.equal(second, copy) and abs(correlation(first, second)) < 4 / 64


def test_shards_have_draws_of_their_own_and_copies_the_same() -> None:
    """A divided weight and one that both have, as each of two processes sees them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found = []
    for own in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=own, world_size=2)
        try:
            # equal meshes are one to torch, also of two processes: their names make them differ
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(f"seen by {own}",))
            parts: list[Tensor] = [
                nn.Parameter(DTensor.from_local(torch.zeros(64, 64), mesh, [how], run_check=False))
                for how in (Shard(0), Replicate())
            ]
            found += errors_of_a_step(["divided", "whole"], parts)
        finally:
            dist.destroy_process_group()
    first, whole, second, copy = found
    assert abs(correlation(first, second)) < 4 / 64
    assert torch.equal(whole, copy)


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--train.optimizer=adafactor", "--train.eps=1e-6"], "train.eps"),
        (["--train.optimizer=muon", "--train.state_dtype=bfloat16"], "train.state_dtype"),
        (["--train.optimizer=adamw_8bit", "--model.dtype=float64"], "model.dtype"),
        (["--train.groups=[{match: '*'}]"], "train.groups"),
        (["--train.groups=[{match: a, lr: 0}]"], "train.groups"),
    ],
)
def test_options_that_an_optimizer_has_not_are_refused(flags: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(["--model.name=m", "--data.train=t", *flags])
    assert key in str(caught.value)


@pytest.mark.parametrize("name", ["adafactor", "muon", "bfloat16"])
@pytest.mark.few(0, 2)
def test_two_processes_divide_the_state(tiny_run: TinyRun, tmp_path: Path, name: str) -> None:
    """Adafactor's means are of whole matrices; Muon's products round to bfloat16, in another order
    than one process; moments in bfloat16 are rounded by other draws."""
    flag = "--train.state_dtype=bfloat16" if name == "bfloat16" else f"--train.optimizer={name}"
    wide = "--model.dtype=float64"
    assert main(run_of(tiny_run, tmp_path / "alone", flag, wide)) == 0
    arguments = run_of(tiny_run, tmp_path / "two", flag, wide, "--parallel.dp=2")
    ended = Launched(tmp_path / "said", run_command, arguments).ended(300)
    assert [one.code for one in ended] == [0, 0], ended[0].said + ended[1].said
    bound = {"adafactor": 1e-10, "muon": 3e-2, "bfloat16": 3e-2}[name]
    ours, theirs = weights(tmp_path / "two"), weights(tmp_path / "alone")
    for key, weight in ours.items():
        assert (weight - theirs[key]).norm() <= bound * theirs[key].norm(), key


def test_quantised_states_of_divided_weights_are_refused() -> None:
    config = parse_run(["--model.name=m", "--data.train=t", "--train.optimizer=adamw_8bit"])
    with pytest.raises(ConfigError, match="2 processes that divide the weights"):
        start._check(config, 2)


@pytest.mark.parametrize("lora", [None, {"rank": 32}], ids=["whole", "lora"])
@pytest.mark.parametrize(
    "name", ["adamw", "bfloat16", "adafactor", "muon", "adamw_8bit", "adamw_torch_4bit"]
)
def test_a_plan_counts_the_bytes_of_the_state(
    tmp_path: Path, name: str, lora: dict[str, int] | None
) -> None:
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    choice = {"state_dtype": name} if name == "bfloat16" else {"optimizer": name}
    run = build_run(
        {
            "model": {"name": str(tmp_path), "dtype": "float32", "lora": lora},
            "data": {"train": "t"}, "train": choice,
        },
        "a test",
    )  # fmt: skip
    model = build_model(
        str(tmp_path), init="random", dtype=torch.float32,
        lora=None if run.model.lora is None else run.model.lora.model_dump(),
    )  # fmt: skip
    optimizer = build_optimizer(model, run.train)
    make_state(optimizer)
    states = [state_tensors(optimizer, p) for p in model.parameters()]
    # maps of codes, a kilobyte each, are left out
    measured = sum(x.nbytes for state in states for key, x in state.items() if "qmap" not in key)
    training = with_optimizer(training_of(run.model), run.train, describe(config))
    planned = training.weights(describe(config), (2,), frozenset({0})).state
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert planned.optimizer == pytest.approx(measured, rel=0.05, abs=0.02 * numbers)
