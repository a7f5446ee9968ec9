"""The start of processes that share weights: each reads its rows, nothing is whole anywhere."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from distributed.sharded_cases import Step
from helpers import hybrids, tiny_families
from helpers.launched import Launched
from helpers.ranks import run_ranks
from helpers.tiny_runs import TinyRun, run_command
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

import furlong
from furlong.errors import ElsewhereError, UnsupportedModelError
from furlong.models.build import build_model
from furlong.models.decoder import HFDecoder
from furlong.models.support import is_sharded
from furlong.runtime.distributed.fsdp import sharded_modules
from furlong.runtime.distributed.mesh import Ranks, make_ranks
from furlong.runtime.session import divide

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def read_shares(source: Path, ranks: Ranks, dtype: torch.dtype) -> Any:
    """The model of a folder as the processes of a full run read it."""
    own = partial(divide, ranks=ranks, compute_dtype=dtype)
    return build_model(
        str(source), dtype=dtype, divide=lambda model: own(HFDecoder(model)), device=CPU
    )


def fuse_rows(folder: Path) -> None:
    """Let the files of a model hold the gate and the up projection of each layer as one weight."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("gate_proj.weight")]:
        parts = [weights.pop(name), weights.pop(name.replace("gate", "up"))]
        weights[name.replace("gate_proj", "both")] = torch.cat(parts)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def register_fused_rows() -> None:
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter

    targets = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    own = WeightConverter("mlp.both.weight", targets, operations=[Chunk(dim=0)])
    register_checkpoint_conversion_mapping("qwen3", [own])


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": partial(tiny_families.build, "llama", torch.float32, tie_word_embeddings=True),
    "mixtral": partial(tiny_families.build, "mixtral", torch.bfloat16),  # a file per expert
    "one expert": partial(tiny_families.build, "mixtral", torch.bfloat16, num_local_experts=1,
                          num_experts_per_tok=1),  # one process has none
    "gpt_oss": partial(tiny_families.build, "gpt_oss", torch.float32),
    "gpt_neox": partial(tiny_families.build, "gpt_neox", torch.float32),  # names in its files
    "falcon_h1": lambda: hybrids.build("falcon_h1").float(),  # buffers that are computed
    "fused": partial(tiny_families.build, "qwen3", torch.float32),
}  # fmt: skip


def other_weights(rank: int, folder: Path) -> dict[str, Any]:
    """By family, whether the model was read in shares, and the weights and buffers that are not
    those of the model that is read whole."""
    ranks, found = make_ranks(2, 1, 1, "cpu"), {}
    register_fused_rows()
    for family in FAMILIES:
        source = folder / family
        whole = build_model(str(source), dtype=torch.bfloat16)
        model = read_shares(source, ranks, torch.bfloat16)
        is_read_in_shares = is_sharded(model)
        if not is_read_in_shares:
            divide(HFDecoder(model), ranks, torch.bfloat16)
        own = {name: p.full_tensor() for name, p in model.named_parameters()}
        own |= dict(model.named_buffers())
        true = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
        assert own.keys() == true.keys()
        others = [name for name in true if not torch.equal(own[name], true[name])]
        found[family] = is_read_in_shares, others
    return found


def test_each_process_has_its_rows_of_all_weights(tmp_path):
    for family, make in FAMILIES.items():
        make().save_pretrained(tmp_path / family)
    fuse_rows(tmp_path / "fused")
    first, second = run_ranks(other_weights, tmp_path, num_ranks=2, limit_s=120)
    expected = dict.fromkeys(FAMILIES, (True, []))
    assert first == expected | {"fused": (False, [])}
    assert second == expected | {"fused": (False, [])}


STEP = Step(((21, 4, 40), (17, 9)))


def gradients(rank: int, source: Path) -> list[str]:
    """The weights whose gradients are not those of a model that was divided when it was whole."""
    ranks, found = make_ranks(2, 1, 1, "cpu"), []
    for model in (build_model(str(source)), read_shares(source, ranks, torch.float32)):
        engine = furlong.Engine(model, ranks=ranks, compute_dtype=torch.float32)
        engine.run(STEP.plan(model), STEP.sequences())
        found.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    return [name for name, own in found[0].items() if not torch.equal(own, found[1][name])]


def test_weights_that_were_read_in_shares_train_as_those_that_were_whole(tmp_path):
    FAMILIES["llama"]().save_pretrained(tmp_path)
    assert run_ranks(gradients, tmp_path, num_ranks=2) == [[], []]


def groups_of_check(rank: int, source: Path) -> tuple[int, int]:
    """The largest number of groups that the start-up check has whole, and that of all groups."""
    ranks, most = make_ranks(2, 1, 1, "cpu"), 0
    model = read_shares(source, ranks, torch.bfloat16)
    modules = sharded_modules(model)
    groups = [module._get_fsdp_state()._fsdp_param_group for module in modules]  # type: ignore[attr-defined]
    wait = FSDPParamGroup.wait_for_unshard

    def watched(self: Any) -> None:
        nonlocal most
        wait(self)
        most = max(most, sum(group.is_unsharded for group in groups))

    FSDPParamGroup.wait_for_unshard = watched  # type: ignore[method-assign]
    furlong.Engine(model, ranks=ranks, compute_dtype=torch.bfloat16)
    return most, len(groups)


def test_the_start_up_check_gathers_a_layer_at_a_time(tmp_path):
    tiny_families.build("qwen3", torch.float32).save_pretrained(tmp_path)
    assert run_ranks(groups_of_check, tmp_path, num_ranks=2) == [(2, 6), (2, 6)]  # with the root


def refused_alone(rank: int, source: Path, name: str) -> list[str]:
    """The errors of a check in which one process fails, and of the next one."""
    ranks, said = make_ranks(2, 1, 1, "cpu"), []
    model = read_shares(source, ranks, torch.float32)
    plain = getattr(HFDecoder, name)

    def fails(*given: Any) -> Any:
        raise RuntimeError("a fault of one process")

    if rank:
        setattr(HFDecoder, name, fails)
    for _ in range(2):
        try:
            furlong.Engine(model, ranks=ranks, compute_dtype=torch.float32)
            said.append("")
        except (UnsupportedModelError, ElsewhereError) as error:
            said.append(type(error).__name__)
        setattr(HFDecoder, name, plain)
    return said


@pytest.mark.parametrize("name", ["whole_logits", "logits"])
def test_a_check_that_fails_on_one_process_ends_on_all(tmp_path, name):
    FAMILIES["llama"]().save_pretrained(tmp_path)
    first, second = run_ranks(refused_alone, tmp_path, name, num_ranks=2)
    assert first == ["ElsewhereError", ""]
    assert second == ["UnsupportedModelError", ""]


def trains_where_one_reads_badly(arguments: list[str]) -> None:
    import os

    from transformers import core_model_loading as loading

    read = loading.DtensorShardOperation.shard_tensor

    def fails(*given: Any, **named: Any) -> Any:
        if os.environ["RANK"] == "1":
            raise MemoryError("a share too large")
        return read(*given, **named)

    loading.DtensorShardOperation.shard_tensor = fails
    run_command(arguments)


def test_weights_that_one_process_cannot_read_end_all(tiny_run: TinyRun, tmp_path: Path) -> None:
    arguments = tiny_run.arguments(tmp_path / "run")
    ended = Launched(tmp_path / "said", trains_where_one_reads_badly, arguments).ended(60)
    assert [process.code for process in ended] == [2, 2]
    assert "a share too large" in ended[0].said and "reads it whole" not in ended[0].said
    for part in ("given:", "required:", "from:", "change:"):
        assert part in ended[0].said


def trains_in_a_folder_of_its_own(folder: Path, arguments: list[str]) -> None:
    import os

    os.chdir(folder / os.environ["RANK"])
    run_command(arguments)


def test_machines_with_other_weights_of_one_name_end_all(tiny_run: TinyRun, tmp_path: Path) -> None:
    for rank in ("0", "1"):
        shutil.copytree(tiny_run.folder / "model", tmp_path / rank / "model")
    file = tmp_path / "1" / "model" / "model.safetensors"
    save_file({name: x + 1 for name, x in load_file(file).items()}, file, {"format": "pt"})
    arguments = tiny_run.arguments(tmp_path / "run", "--model.name=model")
    start = partial(trains_in_a_folder_of_its_own, tmp_path)
    ended = Launched(tmp_path / "said", start, arguments).ended(60)
    assert [process.code for process in ended] == [2, 2]
    assert "model.safetensors" in ended[0].said and "given:    process 1" in ended[0].said


def peak_of(function: Callable[[], object]) -> int:
    """The most bytes of anonymous memory that are taken while a function runs."""
    process, is_over, most = psutil.Process(), threading.Event(), 0
    before = anonymous(process)

    def watch() -> None:
        nonlocal most
        while not is_over.wait(0.0005):
            most = max(most, anonymous(process) - before)

    thread = threading.Thread(target=watch)
    thread.start()
    function()
    is_over.set()
    thread.join()
    return most


def anonymous(process: psutil.Process) -> int:
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def start_bytes(rank: int, source: Path, num_ranks: int) -> int:
    ranks = make_ranks(num_ranks, 1, 1, "cpu")
    read_shares(source / "small", ranks, torch.float32)  # loads what is loaded once
    return peak_of(lambda: read_shares(source / "large", ranks, torch.float32))


def test_no_process_holds_more_than_its_share_and_a_group(tmp_path):
    sizes = {"vocab_size": 512, "hidden_size": 512, "num_attention_heads": 8}
    tiny_families.build("llama", torch.bfloat16, num_hidden_layers=1).save_pretrained(
        tmp_path / "small"
    )
    model = tiny_families.build(
        "llama", torch.bfloat16, **sizes, intermediate_size=1536, num_hidden_layers=8
    )
    model.save_pretrained(tmp_path / "large")
    share = 4 * sum(p.numel() for p in model.parameters()) // 4
    group = 4 * sum(p.numel() for p in model.model.layers[0].parameters())
    for most in run_ranks(start_bytes, tmp_path, 4, num_ranks=4):
        assert share <= most <= 1.1 * (share + group)
