"""Loading a model, a data set or a checkpoint executes no code from it.

Each payload would leave a file named after it if anything of it ran. All commands run in one
process, which also has a stand-in for the package `kernels`, with which transformers fetches
compiled code from a hub. A control shows that the payloads work.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.byte_tokenizer import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from furlong.cli.main import main
from furlong.train.run_folder import FORMAT_VERSION, MANIFEST, measured

SCRIPT = """
import contextlib, io, json, sys
from furlong.cli.main import main
told = {}
for name, arguments in json.load(open(sys.argv[1])).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except BaseException as error:
            code = repr(error)
    told[name] = [code, out.getvalue()[-2000:] + err.getvalue()[-2000:]]
print(json.dumps(told))
"""
CONTROL = """
import pickle, sys
from transformers import AutoModelForCausalLM, LlamaConfig
for file in sys.argv[1:]:
    pickle.load(open(file, "rb"))
config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                     num_attention_heads=2, vocab_size=8, attn_implementation="evil/kernel")
try:
    AutoModelForCausalLM.from_config(config)
except Exception:
    pass
"""
KERNELS = """
from pathlib import Path
from types import SimpleNamespace
class Any:
    def __init__(self, *args, **kwargs): pass
CUDAProperties = Device = LayerRepository = LocalLayerRepository = ROCMProperties = Any
Mode = SimpleNamespace(INFERENCE=1, TRAINING=2, TORCH_COMPILE=4)
KernelizeFallback = SimpleNamespace(ALL=1)
def get_kernel(name, *args, **kwargs):
    Path({marks!r}, "kernel " + name.replace("/", " ")).touch()
    raise FileNotFoundError(name)
def kernelize(model, *args, **kwargs): return model
def register_kernel_mapping(*args, **kwargs): pass
def replace_kernel_forward_from_hub(*args, **kwargs): pass
def use_kernel_mapping(*args, **kwargs): pass
def use_kernel_forward_from_hub(name): return lambda cls: cls
def use_kernelized_func(*functions): return lambda cls: cls
"""


class Touch:
    """Pickled, it is a program that makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


class World:
    """A folder with a small model, data, and the marks that payloads would leave."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.marks = home / "marks"
        self.marks.mkdir()
        self.whole = home / "whole"
        byte_tokenizer(["<end>"]).save_pretrained(self.whole)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        config = LlamaConfig(vocab_size=300, num_attention_heads=2, **sizes)
        LlamaForCausalLM(config).save_pretrained(self.whole)
        (home / "data.jsonl").write_text('{"text": "a few words"}\n' * 2)
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        (home / "chat.jsonl").write_text(json.dumps({"messages": chat}) + "\n")

    def mark(self, name: str) -> Path:
        return self.marks / name

    def pickle(self, name: str, *files: Path) -> None:
        for file in files:
            file.write_bytes(pickle.dumps(Touch(self.mark(name))))

    def model(self, name: str) -> Path:
        return Path(shutil.copytree(self.whole, self.home / "models" / name))

    def train(self, name: str, model: Path, *flags: str, data: str = "data.jsonl") -> list[str]:
        return [
            "train", f"--model.name={model}", "--model.dtype=float32", "--data.max_seq_len=64",
            f"--data.train={self.home / data}", f"--data.cache_dir={self.home / 'cache'}",
            "--train.steps=2", "--train.sequences_per_step=1", "--chunks.size=32",
            f"--out={self.home / 'runs' / name}", *flags,
        ]  # fmt: skip


def edit(file: Path, **values: Any) -> None:
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(before | values))


def module_beside(world: World, name: str, folder: Path, *files: str) -> None:
    for file in files:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(
            f"from pathlib import Path\nPath({str(world.mark(name))!r}).touch()\n"
            "class X: pass\ndef generate(*a, **k): pass\n"
        )


Payload = Callable[[World, str], tuple[list[str], int | None]]
"""Writes its files; returns a command line and the exit code that is expected, None for either of
0 and 2."""


def pickled(*names: str, without: tuple[str, ...] = (), code: int = 2) -> Payload:
    def write(world: World, name: str) -> tuple[list[str], int | None]:
        folder = world.model(name)
        for other in without:
            (folder / other).unlink()
        world.pickle(name, *(folder / file for file in names))
        return world.train(name, folder), code

    return write


def configured(code: int | None = 0, **values: Any) -> Payload:
    def write(world: World, name: str) -> tuple[list[str], int | None]:
        folder = world.model(name)
        edit(folder / "config.json", **values)
        module_beside(world, name, folder, "modeling_x.py", "configuration_x.py")
        return world.train(name, folder), code

    return write


def templated(template: str) -> Payload:
    def write(world: World, name: str) -> tuple[list[str], int | None]:
        folder = world.model(name)
        touch = f"touch '{world.mark(name)}'"
        (folder / "chat_template.jinja").write_text(template.replace("TOUCH", touch))
        return world.train(name, folder, data="chat.jsonl"), None

    return write


def pickled_adapter(world: World, name: str) -> tuple[list[str], int | None]:
    folder = world.model(name)
    edit(folder / "adapter_config.json", peft_type="LORA", r=2, target_modules=["q_proj"])
    world.pickle(name, folder / "adapter_model.bin")
    return world.train(name, folder), 2


def pickle_in_index(world: World, name: str) -> tuple[list[str], int | None]:
    folder = world.model(name)
    (folder / "model.safetensors").unlink()
    listed = {"lm_head.weight": "pytorch_model.bin"}
    edit(folder / "model.safetensors.index.json", metadata={}, weight_map=listed)
    world.pickle(name, folder / "pytorch_model.bin")
    return world.train(name, folder), 2


def tokenizer_with_code(world: World, name: str) -> tuple[list[str], int | None]:
    folder = world.model(name)
    own = {"AutoTokenizer": ["tokenization_x.X", "tokenization_x.X"]}
    edit(folder / "tokenizer_config.json", auto_map=own, tokenizer_class="X")
    module_beside(world, name, folder, "tokenization_x.py")
    return world.train(name, folder), None


def generation_with_code(world: World, name: str) -> tuple[list[str], int | None]:
    folder = world.model(name)
    module_beside(world, name, folder, "custom_generate/generate.py")
    edit(folder / "generation_config.json", custom_generate=str(folder), trust_remote_code=True)
    return world.train(name, folder), 0


def data_with_code(world: World, name: str) -> tuple[list[str], int | None]:
    folder = world.home / "dataset"
    folder.mkdir()
    shutil.copy(world.home / "data.jsonl", folder)
    module_beside(world, name, folder, "dataset.py", "__init__.py", "conftest.py")
    return world.train(name, world.whole, data="dataset"), None


def yaml_with_code(world: World, name: str) -> tuple[list[str], int | None]:
    file = world.home / "run.yaml"
    file.write_text(f"out: !!python/object/apply:os.system ['touch {world.mark(name)}']\n")
    return ["train", str(file)], 2


def plan_of_code(world: World, name: str) -> tuple[list[str], int | None]:
    file = world.home / "plan.json"
    world.pickle(name, file)
    return ["plan", str(file)], 2


def pages(world: World, name: str) -> tuple[list[str], int | None]:
    lengths = world.home / "<script>.json"
    lengths.write_text('{"version": 1, "lengths": [64, 30]}')
    flags = ["--model.name", "Qwen2.5-0.5B", "--hardware", "H100", "--chunks.method=chunkflow"]
    page = world.home / "page.svg"
    return ["plan", "--lengths", str(lengths), *flags, "--picture", str(page)], 0


def four_bits(world: World, name: str) -> tuple[list[str], int]:
    """bitsandbytes asks for a compiled kernel as it is imported."""
    return world.train(name, world.whole, "--model.quantize=nf4", "--model.lora.rank=2"), 0


AUTO_MAP = {
    "AutoConfig": "configuration_x.X",
    "AutoModelForCausalLM": "modeling_x.X",
    "AutoModel": "evil/repository--modeling_x.X",
}
WEIGHTS = "model.safetensors"
PAYLOADS: dict[str, Payload] = {
    "pytorch_model.bin": pickled("pytorch_model.bin", without=(WEIGHTS,)),
    "pytorch_model.bin beside": pickled("pytorch_model.bin", code=0),
    "pickle named safetensors": pickled(WEIGHTS),
    "training_args.bin": pickled("training_args.bin", "optimizer.pt", "rng_state.pth", code=0),
    "tokenizer.model": pickled("tokenizer.model", "spiece.model", code=0),
    "tokenizer.model alone": pickled("tokenizer.model", without=("tokenizer.json",)),
    "tokenizer.json": pickled("tokenizer.json"),
    "config.json": pickled("config.json"),
    "adapter": pickled_adapter,
    "index of pickles": pickle_in_index,
    "transformers_weights": configured(2, transformers_weights="adapter_model.bin"),
    "auto_map": configured(auto_map=AUTO_MAP),
    "auto_map of unknown type": configured(2, auto_map=AUTO_MAP, model_type="x"),
    "tokenizer with auto_map": tokenizer_with_code,
    "custom_generate": generation_with_code,
    "attention of a hub": configured(attn_implementation="evil/kernel"),
    "attention inside": configured(_attn_implementation="evil/kernel@main:run"),
    "attention of the community": configured(attn_implementation="kernels-community/flash-attn2"),
    "attention of flash": configured(attn_implementation="flash_attention_2"),
    "attention by part": configured(attn_implementation={"": "evil/kernel", "text_config": "e/k"}),
    "paged attention": configured(attn_implementation="paged|evil/kernel"),
    "experts of a hub": configured(experts_implementation="sonicmoe"),
    "kernels": configured(use_kernels=True, kernel_config={"RMSNorm": "evil/kernel:RMSNorm"}),
    "quantized": configured(2, quantization_config={"quant_method": "gptq"}),
    "quantized in fp8": configured(quantization_config={"quant_method": "fp8"}),
    "quantized in mxfp4": configured(quantization_config={"quant_method": "mxfp4"}),
    "a base in 4 bits": four_bits,
    "a family with kernels": configured(2, model_type="rwkv"),
    "a template's class": templated("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "a template's cycler": templated('{{ cycler.__init__.__globals__.os.system("TOUCH") }}'),
    "a template's globals": templated("{{ raise_exception.__globals__['os'].system(\"TOUCH\") }}"),
    "a template's attr": templated(
        "{{ (messages|attr('__class__'))|attr('__init__')|attr('__globals__') }}"
    ),
    "a template's include": templated("{% include '/etc/passwd' %}"),
    "a template's import": templated("{% import 'os' as os %}{{ os.system(\"TOUCH\") }}"),
    "a template's format": templated("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}"),
    "data with a module": data_with_code,
    "yaml": yaml_with_code,
    "plan": plan_of_code,
    "page": pages,
}


def run_python(world: World, code: str, *arguments: str) -> str:
    fake = world.home / "fake"
    (fake / "kernels").mkdir(parents=True, exist_ok=True)
    (fake / "kernels" / "__init__.py").write_text(
        KERNELS.replace("{marks!r}", repr(str(world.marks)))
    )
    (fake / "kernels-0.18.2.dist-info").mkdir(exist_ok=True)
    (fake / "kernels-0.18.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n"
    )
    path = os.pathsep.join([str(fake), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, env=environment, cwd=world.home, timeout=600,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


def run_commands(world: World, commands: dict[str, list[str]]) -> dict[str, tuple[Any, str]]:
    file = world.home / "commands.json"
    file.write_text(json.dumps(commands))
    told = json.loads(run_python(world, SCRIPT, str(file)).splitlines()[-1])
    return {name: (code, text) for name, (code, text) in told.items()}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.slow
def test_payloads_do_work_where_something_reads_them(world: World) -> None:
    file = world.home / "control.bin"
    world.pickle("control", file)
    run_python(world, CONTROL, str(file))
    assert {path.name for path in world.marks.iterdir()} == {"control", "kernel evil kernel"}
    for path in world.marks.iterdir():
        path.unlink()


@pytest.mark.slow
def test_nothing_of_a_model_data_or_a_plan_is_executed(world: World) -> None:
    commands, codes = {}, {}
    for name, write in PAYLOADS.items():
        commands[name], codes[name] = write(world, name)
    told = run_commands(world, commands)
    assert [path.name for path in world.marks.iterdir()] == []
    for name, (code, text) in told.items():
        assert code in ((0, 2) if codes[name] is None else (codes[name],)), (name, code, text)
        if code == 2:
            assert "given: " in text and "change: " in text, (name, text)
    assert "<script" not in (world.home / "page.svg").read_text()


@pytest.mark.slow
def test_nothing_of_a_checkpoint_is_executed(world: World) -> None:
    """Pickles among its files, whether its manifest knows them or not."""
    first = world.train("checkpoint", world.whole, "--train.save_every_steps=1")
    first[first.index("--train.steps=2")] = "--train.steps=4"
    run = world.home / "runs" / "checkpoint"
    assert main(first) == 0
    for path in (run / "report.json", run / "model"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    older, newest = sorted((run / "checkpoints").glob("step-*"))[-2:]
    pickles = (".metadata", "rng_state.pth", "optimizer.pt", "training_args.bin")
    world.pickle("unlisted", *(newest / name for name in pickles))
    world.pickle("listed", *(older / name for name in pickles))
    files = {file.name: measured(file) for file in older.iterdir() if file.name != MANIFEST}
    manifest = {"version": FORMAT_VERSION, "files": files}
    (older / MANIFEST).write_text(json.dumps(manifest))
    commands = {"resume": [*first, "--resume"], "export": ["export", str(older), "--out", "e"]}
    told = run_commands(world, commands)
    assert [path.name for path in world.marks.iterdir()] == []
    assert told["resume"][0] == 0, told["resume"]
    assert f"resumed from {older.name}" in told["resume"][1]
    assert told["export"][0] in (0, 2), told["export"]
