"""Training on a sequence whose K,V exceed the memory budget, from the run file to the export.

Promises: `furlong train` with every dial of the chunks on `auto`, a sequence of 65,536 random
tokens, and a `memory.device` of three eighths of the bytes of its K,V (with their gradients, which
take as much again, less than a fifth) ends with exit code 0, puts K,V on disk by itself, and its
loss falls. Exits 1 on a miss. The model is the small one of flat.py.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from contenders import SHAPES
from harness import console, machine
from tokenizers import Tokenizer, models

from furlong.units import format_bytes

_SHAPE = SHAPES["flat"]
_STEPS = 3


def main() -> int:
    arguments = _parse()
    head_dim = _SHAPE["hidden_size"] // _SHAPE["num_attention_heads"]
    token_bytes = 2 * 4 * _SHAPE["num_hidden_layers"] * _SHAPE["num_key_value_heads"] * head_dim
    kv_bytes = token_bytes * arguments.tokens
    budget_bytes = kv_bytes * 3 // 8
    with tempfile.TemporaryDirectory(dir=arguments.disk_dir) as folder:
        run_file = _write_run(Path(folder), arguments.tokens, budget_bytes)
        call = "import sys; from furlong.cli.main import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", call, "train", str(run_file)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    printed = ended.stdout + ended.stderr
    console.print(printed, markup=False, style="dim")
    losses = [float(text) for text in re.findall(r"^step \d+/\d+ +loss ([\d.]+)", printed, re.M)]
    kept = {
        "it ends well": ended.returncode == 0,
        "K,V are on disk": bool(re.search(r"^auto: .*offload \{[^}]*kv: disk", printed, re.M)),
        "the loss falls": len(losses) == _STEPS and losses == sorted(losses, reverse=True),
    }
    console.print(
        f"K,V of {arguments.tokens:,} tokens: {format_bytes(kv_bytes)}, and their gradients as "
        f"much; memory.device: {format_bytes(budget_bytes)}"
    )
    for what, is_so in kept.items():
        console.print(f"{'met' if is_so else 'MISSED'}: {what}", style=None if is_so else "red")
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    return int(not all(kept.values()))


def _write_run(folder: Path, num_tokens: int, budget_bytes: int) -> Path:
    """A model without weights, one sequence, and the run file of both."""
    model = folder / "model"
    model.mkdir()
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False,
        "max_position_embeddings": num_tokens, "tie_word_embeddings": False, **_SHAPE,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    vocabulary = {f"t{index}": index for index in range(_SHAPE["vocab_size"])}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t1"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    draw = random.Random(0)
    ids = [draw.randrange(_SHAPE["vocab_size"]) for _ in range(num_tokens)]
    (folder / "data.jsonl").write_text(json.dumps({"input_ids": ids}) + "\n")
    run = {
        "model": {"name": str(model), "init": "random", "dtype": "float32"},
        "data": {
            "train": [str(folder / "data.jsonl")], "format": "tokens", "max_seq_len": num_tokens
        },
        "memory": {"device": budget_bytes, "disk": "8GiB", "disk_dir": str(folder)},
        "train": {"steps": _STEPS, "sequences_per_step": 1, "lr": 1e-3},
        "out": str(folder / "out"),
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(run))
    return folder / "run.yaml"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--disk-dir", default=None, help="folder for everything that is written")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
