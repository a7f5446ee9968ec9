"""`furlong convert`: a run file from a recipe of another trainer."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from furlong.cli.output import writing
from furlong.config.conversion import Conversion, convert
from furlong.config.recipes import read_recipe
from furlong.config.sources import FlagParser, read_flags
from furlong.cost.shape import known_config
from furlong.errors import in_short, refusal

_DESCRIPTION = (
    "Write a run file from a recipe of axolotl, LLaMA-Factory, TRL, ms-swift, torchtune or Arctic"
    " Training (YAML), or from a shell script with the flags of one of the first four or of"
    " open-instruct. Each key of the recipe has a line in it: taken, not needed, or not taken, with"
    " the reason. Keys of a run, --section.key=value, come before the recipe's. The file is written"
    " in any case; the exit code is 1 where a key that changes what is computed could not be taken."
)
_HEADS = {
    "refused": "Could not be taken; the run computes something else without them:",
    "lost": "Could not be taken; the run computes the same without them:",
    "needless": "Not needed:",
}


def run(arguments: Sequence[str]) -> int:
    parser = FlagParser(
        "convert",
        takes="furlong convert FILE [--out RUN.yaml]",
        description=_DESCRIPTION,
        usage="furlong convert FILE [--out RUN.yaml] [--devices N] [--command N] [--key=value ...]",
    )
    parser.add_argument("file", metavar="FILE", help="recipe: YAML, JSON or a shell script")
    parser.add_argument(
        "--out", metavar="RUN.yaml", help="new file; default: NAME.furlong.yaml here"
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="processes of the recipe, where it does not say; else one",
    )
    parser.add_argument(
        "--command", type=int, metavar="N", help="which of several commands of a script, from 1"
    )
    flags = read_flags(parser, arguments)
    given = flags.own
    file = Path(given.file).expanduser()
    out = Path(given.out or f"{file.stem}.furlong.yaml").expanduser()
    if given.devices is not None and given.devices < 1:
        raise refusal(f"--devices={given.devices}", "a number above 0", "name the processes")
    recipe = read_recipe(file, given.command)
    made = convert(recipe, given.devices, flags.values, config_of=known_config)
    if out.exists():
        raise refusal(f"{out}: a file that is there", "a new file", "remove it, or give --out")
    with writing(out):
        out.write_text(run_file(made), encoding="utf-8")
    print(_summary(made, out))
    return 0 if made.is_whole else 1


def run_file(made: Conversion) -> str:
    """Return the text of the run file. Comments name all keys of the recipe: those that set values
    of the run file, above these values; all other keys, at the end."""
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap

    theirs: dict[str, list[str]] = {}
    for name, verdict in made.verdicts.items():
        if verdict.kind == "ours":
            theirs.setdefault(verdict.text, []).append(_written(name, made.recipe.keys[name]))

    def commented(values: Mapping[str, Any], outer: str = "") -> CommentedMap:
        section = CommentedMap()
        for name, value in values.items():
            key = f"{outer}{name}"
            inner = any(one.startswith(f"{key}.") for one in made.run)
            section[name] = commented(value, f"{key}.") if inner else _plain(value)
            if not inner:
                of_default = [f"default of {made.recipe.dialect}"] * (key in made.of_defaults)
                before = ", ".join(theirs.get(key, of_default)) or None
                if key in made.remarks:
                    before = "; ".join(filter(None, (before, made.remarks[key])))
                section.yaml_set_comment_before_after_key(name, before, indent=2 * key.count("."))
        return section

    writer = YAML()
    writer.width = 10_000
    stream = io.StringIO()
    writer.dump(commented(made.values), stream)
    lines = [f"# {made.recipe.file.name}, a recipe of {made.recipe.dialect}, by furlong convert."]
    tail: list[str] = []
    for kind, head in _HEADS.items():
        rows = [(n, v.text) for n, v in made.verdicts.items() if v.kind == kind]
        if rows:
            tail += ["", f"# {head}"]
            tail += [f"#   {_written(n, made.recipe.keys[n])}: {text}" for n, text in rows]
    return "\n".join([*lines, stream.getvalue().rstrip(), *tail]) + "\n"


def _plain(value: Any) -> Any:
    """Return a value to pass to the YAML writer. A string with several lines becomes a literal
    block; other values are unchanged."""
    from ruamel.yaml.scalarstring import LiteralScalarString

    return LiteralScalarString(value) if isinstance(value, str) and "\n" in value else value


def _written(name: str, value: Any) -> str:
    """Return a key of the recipe with its value as one short line."""
    text = " ".join(str(value).split())
    text = in_short(text, 60)
    return f"{name}: {text}"


def _summary(made: Conversion, out: Path) -> str:
    count = dict.fromkeys(("ours", *_HEADS), 0)
    for verdict in made.verdicts.values():
        count[verdict.kind] += 1
    lost = count["refused"] + count["lost"]
    lines = [
        f"{out}: of {len(made.verdicts)} keys of {made.recipe.dialect} {count['ours']} taken,"
        f" {count['needless']} not needed, {lost} not taken"
    ]
    lines += [f"  {key}: {made.run[key]}: {text}" for key, text in made.remarks.items()]
    for kind in ("refused", "lost"):
        rows = [(n, v.text) for n, v in made.verdicts.items() if v.kind == kind]
        lines += [_HEADS[kind]] if rows else []
        lines += [f"  {_written(n, made.recipe.keys[n])}: {text}" for n, text in rows]
    return "\n".join(lines)
