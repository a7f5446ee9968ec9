"""Files of 100 MB without sane data: refused in bounded time and memory, without a traceback."""

from __future__ import annotations

import gzip
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_tokenizers import byte_tokenizer

_MIB = 2**20
_MOST_S = 60.0
_MOST_BYTES = 1.5 * 2**30

# The kernel's own peak of the new program: what wait4 reports begins with that of the process that
# started it.
_TELLS_ITS_PEAK = """
import sys
from pathlib import Path
from furlong.cli.main import main
code = main(sys.argv[2:])
lines = Path("/proc/self/status").read_text().splitlines()
Path(sys.argv[1]).write_text(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))
sys.exit(code)
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
    "run.txt": (lambda: b"x" + b" " * 5 * _MIB, 0, "1 sequence"),
}  # fmt: skip


def seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTENTS)
def test_a_large_file_takes_bounded_time_and_memory(name: str, tmp_path: Path) -> None:
    content, expected, message = CONTENTS[name]
    (tmp_path / name).write_bytes(content())
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    arguments = ["lengths", str(tmp_path / name), f"--tokenizer={tmp_path / 'tokenizer'}"]
    command = [sys.executable, "-c", _TELLS_ITS_PEAK, str(tmp_path / "peak"), *arguments]
    before_s = seconds_of_children()
    ended = subprocess.run(command, capture_output=True, text=True)
    said = ended.stdout + ended.stderr
    assert ended.returncode == expected or "on which the tokenizer fails" in said, said
    assert message in said or "on which the tokenizer fails" in said
    assert "Traceback" not in said
    peak_bytes = float((tmp_path / "peak").read_text()) * 1024
    room = 2 if name == "run.txt" else 1
    assert seconds_of_children() - before_s < room * _MOST_S and peak_bytes < room * _MOST_BYTES
