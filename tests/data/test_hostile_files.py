"""Files of 100 MB without sane data: refused in bounded time and memory, without a traceback."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_tokenizers import byte_tokenizer

_MIB = 2**20
_MOST_S = 60.0
_MOST_BYTES = 1.5 * 2**30

# Of one process for all, each in a child that has what is imported already. The child's peak is
# the kernel's own: what wait4 reports begins with that of the process that started it.
_TELLS_PEAKS = """
import json, os, sys, torch, transformers, furlong.cli.lengths, furlong.data.dataset
from pathlib import Path
from furlong.cli.main import main
tokenizer, *files = sys.argv[1:]
for file in files:
    if not (child := os.fork()):
        os.dup2(os.open(file + ".said", os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(1, 2)
        code = 1
        try:
            code = main(["lengths", file, f"--tokenizer={tokenizer}"])
        finally:
            sys.stdout.flush()
            lines = Path("/proc/self/status").read_text().splitlines()
            peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
            used = os.times()
            Path(file + ".ended").write_text(json.dumps([code, peak, used.user + used.system]))
            os._exit(0)
    os.waitpid(child, 0)
"""

CONTENTS = {
    "no-utf8.txt": (lambda: b"\xff" * 100 * _MIB, 2, "a text of more than 16 MiB"),
    "one-line.jsonl": (lambda: b"[" * 100 * _MIB, 2, "a line of more than 64 MiB"),
    "bomb.json.gz": (
        lambda: gzip.compress(b'[{"text": "' + b"x" * 200 * _MIB), 2, "a record of more than",
    ),
    "quote.csv": (
        lambda: b'text\n"' + (b"x" * 1023 + b"\n") * 70 * 2**10, 2, "a cell of more than 64 MiB",
    ),
    "junk.parquet": (lambda: b"PAR1" * 25 * _MIB, 2, "junk.parquet"),
    # below the limit of a text; the tokenizer's regular expression may give up
    "run.txt": (lambda: b"x" + b" " * (5 * _MIB // 2), 0, "1 sequence"),
}  # fmt: skip


@pytest.mark.slow
def test_a_large_file_takes_bounded_time_and_memory(tmp_path: Path) -> None:
    for name, (content, *_) in CONTENTS.items():
        (tmp_path / name).write_bytes(content())
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    given = map(str, (tmp_path / "tokenizer", *(tmp_path / name for name in CONTENTS)))
    subprocess.run([sys.executable, "-c", _TELLS_PEAKS, *given], check=True)
    for name, (_, expected, message) in CONTENTS.items():
        said = (tmp_path / f"{name}.said").read_text()
        code, peak_kib, used_s = json.loads((tmp_path / f"{name}.ended").read_text())
        assert code == expected or "on which the tokenizer fails" in said, said
        assert message in said or "on which the tokenizer fails" in said
        assert "Traceback" not in said
        assert used_s < _MOST_S and peak_kib * 1024 < _MOST_BYTES, name
