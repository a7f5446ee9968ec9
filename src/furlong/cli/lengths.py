"""`furlong lengths`: shares of sequences, tokens and attention FLOPs by length."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from furlong.cli.output import check_output, tell_loading, writing
from furlong.config.schema import Format, RunConfig
from furlong.config.sources import FlagParser, is_run_file, load_run
from furlong.errors import refusal
from furlong.units import count_words

if TYPE_CHECKING:
    from furlong.plan.lengths import Lengths

_MAX_NAMED = 3


def run(arguments: Sequence[str]) -> int:
    chosen = _parse(arguments)
    from furlong.report.patience import patience

    is_run = len(chosen.data) == 1 and is_run_file(chosen.data[0])
    for flag, key in (
        ("format", "data.format"),
        ("name", "{path: ..., name: ...}"),
        ("split", "{path: ..., split: ...}"),
    ):
        if is_run and getattr(chosen, flag) is not None:
            change = f"write {key} in {chosen.data[0]}, or name the data instead of the run"
            raise refusal(f"--{flag} with a run file", "the run's own data", change)
    with patience("counting the lengths"):
        if is_run:
            config = load_run(chosen.data[0])
            lengths, limit = count_run(config, chosen.tokenizer), config.data.max_seq_len
            _show(lengths, f"{chosen.data[0]}: data.train", limit, chosen)
        else:
            _show(*_of_data(chosen), None, chosen)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = FlagParser(
        "lengths",
        takes="RUN.yaml, or DATA... --tokenizer T",
        description="Count the tokens of every sequence; show the shares of tokens and of attention"
        " FLOPs (causal, without a window) by length.",
    )
    parser.add_argument(
        "data", nargs="+", metavar="RUN.yaml|DATA", help="a run file, or files and folders of data"
    )
    parser.add_argument("--tokenizer", metavar="T", help="hub id or folder; default: the run's")
    parser.add_argument(
        "--format", choices=("auto", *get_args(Format)),
        help="shape of the records of DATA (default: auto)",
    )  # fmt: skip
    parser.add_argument("--name", help="which configuration of a data set that has several")
    parser.add_argument("--split", help="which split of folders that hold several")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the lengths: .json")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="draw them: .png or .svg")
    chosen = parser.parse_args(arguments)
    if chosen.picture is not None:
        check_output(chosen.picture, "--picture", (".png", ".svg"))
    if chosen.out is not None:
        check_output(chosen.out, "--out", (".json",), "lengths")
    return chosen


def count_run(config: RunConfig, tokenizer: str | None = None) -> Lengths:
    """Return the sequence lengths of a run's first epoch; prints a description of the data.
    `tokenizer`: name of a tokenizer to use instead of the run's."""
    tell_loading()
    from furlong.data.tokenize import tokenizer_of
    from furlong.train.build import load_splits
    from furlong.train.objective import objective_of

    given, limit = config.data, config.data.max_seq_len
    # A run refuses sequences longer than max_seq_len; here they are counted, too.
    is_whole = given.too_long == "error" and not given.streaming and not given.join
    unlimited = {"max_seq_len": None} if is_whole else {}
    if tokenizer is not None:
        other = config.model.model_copy(update={"tokenizer": tokenizer})
        config = config.model_copy(update={"model": other})
    own = tokenizer_of(config)
    settings = given.model_copy(update={"eval": None, **unlimited})
    data = load_splits(settings, own, objective_of(config.train).format, config.train.seed)
    train = data["train"]
    if too_long := int((train.seq_lens > limit).sum()):
        longer = count_words(too_long, "sequence")
        print(f"longer than data.max_seq_len = {limit:,}: {longer}")
    calls = objective_of(config.train).calls(train, config.chunks.size)
    lengths = replace(_count(train.epoch_lens(config.train.seed)), calls=calls)
    if given.streaming:
        number = count_words(len(train.seq_lens), "sequence")
        print(f"data.streaming: counted are the first ones, {number}")
        train.close()
    return lengths


def _of_data(chosen: argparse.Namespace) -> tuple[Lengths, str]:
    tell_loading()
    from furlong.config.schema import DataConfig, Source
    from furlong.data.dataset import load_data
    from furlong.data.tokenize import NoTokenizer, load_tokenizer
    from furlong.models.folder import check_name

    sources = [Source(path=path, name=chosen.name, split=chosen.split) for path in chosen.data]
    tokenizer: Any = NoTokenizer("data without --tokenizer", "add --tokenizer T, an id or a folder")
    if chosen.tokenizer is not None:
        check_name(chosen.tokenizer, "--tokenizer")
        tokenizer = load_tokenizer(chosen.tokenizer, "--tokenizer")
    settings = DataConfig(train=tuple(sources), format=chosen.format or "auto")
    settings = settings.model_copy(update={"max_seq_len": None})
    data = load_data(sources, tokenizer, settings, key="data")
    print(*data.describe(), sep="\n")
    num_more = len(chosen.data) - _MAX_NAMED
    title = ", ".join(chosen.data[:_MAX_NAMED]) + (f" and {num_more} more" if num_more > 0 else "")
    return _count(data.seq_lens), title


def _count(seq_lens: Any) -> Lengths:
    from furlong.plan.lengths import count_lengths

    return count_lengths(seq_lens.tolist())


def _show(
    lengths: Lengths, title: str, max_seq_len: int | None, chosen: argparse.Namespace
) -> None:
    from furlong.plan.lengths import write_lengths
    from furlong.report.lengths import format_lengths, save_lengths_picture, summary_line

    print(format_lengths(lengths, title))
    print(summary_line(lengths))
    if chosen.out is not None:
        write_lengths(chosen.out, lengths)
        print(f"lengths written to {chosen.out}")
    if chosen.picture is not None:
        with writing(chosen.picture):
            save_lengths_picture(lengths, chosen.picture, title, max_seq_len=max_seq_len)
        print(f"picture written to {chosen.picture}")
