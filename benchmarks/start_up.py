"""What the start-up check of a model costs, beside the same check at an earlier commit.

    python benchmarks/start_up.py [--against COMMIT] [--rounds N]

Contenders run in their own processes, interleaved over rounds, on Qwen2.5-0.5B's shape with random
weights in float32. The figure is the median over rounds of the ratio of their CPU seconds on one
thread, which other jobs of the machine hardly move, and of the peak memory that the check adds.
Exits 1 if it takes more than 1.10 times the seconds or more than the memory. The earlier source is
checked out into a temporary work tree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_SECONDS, MAX_BYTES = 1.10, 1.0
FIRST_RELEASE = "891e427"

# Runs against either source tree, so it uses what both of them have.
_MEASURE = """
import json, time, torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from furlong.api import Engine
from furlong.runtime.profile import memory_bytes, peak_memory_bytes, reset_peak_memory

config = Qwen2Config(
    vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
    num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=32768,
    tie_word_embeddings=True, use_sliding_window=False,
)
torch.manual_seed(0)
torch.set_num_threads(1)
model = Qwen2ForCausalLM(config).float().train()
cpu = torch.device("cpu")
with torch.no_grad():  # weights and kernels are warm
    model(input_ids=torch.arange(64)[None], use_cache=False, logits_to_keep=1)
before = memory_bytes(cpu)
reset_peak_memory(cpu)
start = time.process_time()
Engine(model)
seconds = time.process_time() - start
print(json.dumps({"seconds": seconds, "bytes": peak_memory_bytes(cpu) - before}))
"""


def measure(source: Path) -> dict[str, float]:
    """Seconds and extra peak bytes of one check by the package in a source folder."""
    environment = {**os.environ, "PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", _MEASURE], env=environment, capture_output=True, text=True
    )
    if run.returncode:
        sys.exit(run.stderr)
    return dict(json.loads(run.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", default=FIRST_RELEASE, metavar="COMMIT")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), given.against], check=True)
        try:
            rounds = [(measure(ROOT / "src"), measure(tree / "src")) for _ in range(given.rounds)]
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    missed = False
    print(f"| start-up check, now / {given.against} | median | range | bound |\n|---|---|---|---|")
    for name, bound in (("seconds", MAX_SECONDS), ("bytes", MAX_BYTES)):
        ratios = sorted(now[name] / then[name] for now, then in rounds)
        median = statistics.median(ratios)
        print(f"| {name} | {median:.2f} | {ratios[0]:.2f}..{ratios[-1]:.2f} | {bound:.2f} |")
        missed |= ratios[0] > bound  # by more than the range
    for name, unit in (("seconds", 1.0), ("bytes", 2**20)):
        now, then = (statistics.median(r[i][name] for r in rounds) / unit for i in (0, 1))
        print(f"{'s' if name == 'seconds' else 'MiB'}: {now:.2f} now, {then:.2f} then")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
