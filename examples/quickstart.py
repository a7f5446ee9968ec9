"""The quickstart's corpus, and its closing table.

python examples/quickstart.py prepare      data, tokenizer and config.json in runs/quickstart
furlong train recipes/quickstart.yaml     the run itself
python examples/quickstart.py report RUN   the table; exit code 1 unless the loss fell by a nat
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOME = Path("runs/quickstart")
NUM_TRAIN_FILES = 72
NUM_EVAL_FILES = 16
MAX_SEQ_LEN = 20480
LONG_TOKENS = 16000
REQUIRED_NATS = 1.0
VOCAB_SIZE = 4096
EOS = "<|endoftext|>"


def prepare() -> None:
    """Writes train.jsonl and eval.jsonl (split by file), the tokenizer and config.json."""
    print("reading Python's standard library and training a tokenizer on it ...", flush=True)
    files = list(standard_library())
    # A hash of its path puts a file into its place: the same split wherever Python is installed.
    files.sort(key=lambda file: hashlib.sha256(file[0].encode()).hexdigest())
    held_out, rest = files[:NUM_EVAL_FILES], files[NUM_EVAL_FILES:]
    train = rest[:NUM_TRAIN_FILES]
    tokenizer = train_tokenizer([text for _, text in train])
    lengths = sorted(len(tokenizer.encode(text).ids) for _, text in train)
    if not any(LONG_TOKENS < length < MAX_SEQ_LEN for length in lengths):
        train.append(first_long_file(rest[NUM_TRAIN_FILES:], tokenizer))
    held_out = [file for file in held_out if len(tokenizer.encode(file[1]).ids) < MAX_SEQ_LEN]
    write_lines(HOME / "data" / "train.jsonl", train)
    write_lines(HOME / "data" / "eval.jsonl", held_out)
    write_model_folder(HOME / "model", tokenizer)
    median = lengths[len(lengths) // 2]
    print(
        f"corpus: {len(train)} of the {len(files):,} source files of Python"
        f" {sys.version.split()[0]}, {len(held_out)} held out; median {median:,}"
        f" tokens, {sum(length > LONG_TOKENS for length in lengths)} above {LONG_TOKENS:,}"
    )


def standard_library() -> Iterator[tuple[str, str]]:
    """Path and text of every module that is UTF-8 and not empty, without what pip installed."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if "site-packages" in path.parts or "dist-packages" in path.parts:
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield path.as_posix(), text


def first_long_file(files: list[tuple[str, str]], tokenizer: Any) -> tuple[str, str]:
    for file in files:
        if LONG_TOKENS < len(tokenizer.encode(file[1]).ids) < MAX_SEQ_LEN:
            return file
    raise SystemExit(f"no source file has between {LONG_TOKENS:,} and {MAX_SEQ_LEN:,} tokens")


def train_tokenizer(texts: list[str], vocab_size: int = VOCAB_SIZE) -> Any:
    """A byte-level BPE tokenizer that splits words as Qwen2 does, as transformers loads it so."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    qwen2 = Qwen2Tokenizer().backend_tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = qwen2.normalizer
    tokenizer.pre_tokenizer = qwen2.pre_tokenizer
    tokenizer.decoder = qwen2.decoder
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def write_lines(file: Path, documents: list[tuple[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"path": path, "text": text}) + "\n" for path, text in documents)
    file.write_text("".join(lines), encoding="utf-8")


def write_model_folder(folder: Path, tokenizer: Any) -> None:
    from transformers import PreTrainedTokenizerFast, Qwen2Config

    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS).save_pretrained(folder)
    Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.token_to_id(EOS),
        bos_token_id=None,
    ).save_pretrained(folder)


def report(run: Path) -> int:
    """Prints the table of a finished run; 1 unless held-out loss fell by `REQUIRED_NATS`."""
    from rich.console import Console
    from rich.table import Table

    from furlong.units import format_bytes, format_count

    figures = json.loads((run / "report.json").read_text(encoding="utf-8"))
    # Memory is measured, not time: the two may share the machine.
    measured = {engine: start_measuring(engine, run) for engine in ("furlong", "unchunked")}
    extra = {engine: json.loads(process.communicate()[0]) for engine, process in measured.items()}
    before, after = figures["eval_loss_before"], figures["eval_loss_after"]
    batch = f"{extra['furlong']['num_tokens']:,} tokens, longest {extra['furlong']['longest']:,}"
    table = Table(title="quickstart", show_header=False)
    table.add_row("held-out loss before, after", f"{before:.3f}, {after:.3f} nats")
    table.add_row("throughput", f"{format_count(figures['tokens_per_s'])} tokens/s")
    table.add_row("peak memory of the run", format_bytes(figures["peak_memory_bytes"]))
    table.add_row("batch with the longest sequence", batch)
    for engine, title in (("furlong", "chunk by chunk"), ("unchunked", "unchunked, transformers")):
        table.add_row(f"  extra memory {title}", format_bytes(extra[engine]["extra_bytes"]))
    ratio = extra["unchunked"]["extra_bytes"] / extra["furlong"]["extra_bytes"]
    table.add_row("  unchunked needs", f"{ratio:.1f} times as much")
    Console().print(table)
    print(f"exported Hugging Face model: {figures['export_folder']}")
    if before - after < REQUIRED_NATS:
        print(f"held-out loss fell by less than {REQUIRED_NATS} nat", file=sys.stderr)
        return 1
    return 0


def start_measuring(engine: str, run: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "measure", engine, str(run)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def measure(engine: str, run: Path) -> None:
    """Extra peak memory of forward and backward over the batch with the longest sequence.

    That is the highest resident set during the second pass minus the one just before it; the first
    pass, over short sequences, loads kernels and makes gradients.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from furlong.config.sources import load_run
    from furlong.runtime.profile import memory_bytes, peak_memory_bytes, reset_peak_memory

    disable_progress_bar()
    torch.set_num_threads(1)
    config = load_run(run / "config.json")
    sequences = longest_batch(config)
    model = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32).train()
    cpu = torch.device("cpu")
    if engine == "furlong":
        from furlong.api import Engine
        from furlong.train.run_folder import decision_of

        chunkwise = Engine(model, max_seq_len=config.data.max_seq_len)
        decided = json.loads((run / "options.json").read_text(encoding="utf-8"))
        options = decision_of(decided).options

        def run_pass(batch: list[dict[str, Any]]) -> None:
            chunkwise.forward_backward(batch, options)
    else:

        def run_pass(batch: list[dict[str, Any]]) -> None:
            for sequence in batch:
                ids, labels = sequence["input_ids"][None], sequence["labels"][None]
                model(input_ids=ids, labels=labels, use_cache=False).loss.backward()

    run_pass([{name: ids[:256] for name, ids in sequences[0].items()}])
    before_bytes = memory_bytes(cpu)
    reset_peak_memory(cpu)
    started_s = time.perf_counter()
    run_pass(sequences)
    lengths = [len(sequence["input_ids"]) for sequence in sequences]
    figures = {
        "extra_bytes": peak_memory_bytes(cpu) - before_bytes,
        "seconds": time.perf_counter() - started_s,
        "num_tokens": sum(lengths),
        "longest": max(lengths),
    }
    print(json.dumps(figures))


def longest_batch(config: Any) -> list[dict[str, Any]]:
    """The global batch of the run that holds its longest sequence."""

    from furlong.data.dataset import load_data
    from furlong.data.loader import sequence_tensors
    from furlong.data.tokenize import load_tokenizer
    from furlong.train.build import epochs_of

    tokenizer = load_tokenizer(config.model.name)
    sequences = load_data(config.data.train, tokenizer, config.data)
    batches = epochs_of(config.train, sequences).batches(0)
    longest = max(batches, key=lambda batch: int(sequences.seq_lens[batch].max()))
    return [sequence_tensors(sequences[n]) for n in longest.tolist()]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["prepare"]:
            prepare()
        case ["report", run_folder]:
            sys.exit(report(Path(run_folder)))
        case ["measure", engine_name, run_folder]:
            measure(engine_name, Path(run_folder))
        case _:
            sys.exit(__doc__)
