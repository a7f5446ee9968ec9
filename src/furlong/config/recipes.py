"""Read recipes of other trainers, from YAML, JSON and shell scripts, as mappings of their keys."""

from __future__ import annotations

import json
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from furlong.config.foreign import answer_to, foreign_table
from furlong.config.schema import RunConfig
from furlong.config.sources import file_text, read_yaml
from furlong.errors import ConfigError, refusal

Dialect = Literal[
    "TRL", "transformers", "axolotl", "LLaMA-Factory", "ms-swift", "torchtune", "Arctic Training",
    "open-instruct",
]  # fmt: skip


class Recipe(NamedTuple):
    """A recipe of another trainer."""

    dialect: Dialect
    keys: dict[str, Any]
    """Keys and values; sections of torchtune and Arctic Training are flattened to `section.key`."""
    num_processes: int | None
    """Number of processes that the launcher starts; None if unknown."""
    environment: dict[str, str]
    """Variables that its script sets."""
    file: Path
    doubt: str = ""
    """Why the recipe may be another trainer's; empty if it is certain."""

    @property
    def loss_by_keys(self) -> str | None:
        """The loss that keys imply although no key names it, such as dpo by `dpo_beta`. None if a
        key names the loss, or if no key implies one."""
        if self.dialect == "open-instruct" and self.keys.keys() & {"dpo_beta", "dpo_loss_type"}:
            return "dpo"
        if self.dialect != "TRL" or "stage" in self.keys:
            return None
        if not _OF_ROLLOUTS.isdisjoint(self.keys):
            return "grpo"
        is_plain = self.keys.get("loss_type", "nll") in ("nll", "chunked_nll", "dft")
        return None if is_plain and not self.keys.keys() & {"beta", "rpo_alpha"} else "dpo"

    @property
    def defaults(self) -> dict[str, Any]:
        """The trainer's defaults, by key."""
        own: dict[str, dict[str, Any]] = foreign_table()["defaults"]
        is_v1 = "model" in self.keys and self.dialect == "LLaMA-Factory"
        kind = "v1" if is_v1 else self.keys.get("stage", self.loss_by_keys)
        return own.get(f"{self.dialect} {kind}") or own[self.dialect]


def read_recipe(file: Path, command: int | None = None) -> Recipe:
    """Return the recipe in a YAML or JSON file, or in a shell script.

    `command`: the number, from 1, of one of several commands in a script. Raises ConfigError.
    """
    text = file_text(file, "a recipe")
    if file.suffix.lower() in (".sh", ".bash", ".slurm", ".sbatch"):
        return _of_script(file, text, command)
    if file.suffix.lower() not in (".yaml", ".yml", ".json"):
        raise _no_recipe(file, f"a file that ends in {file.suffix or 'nothing'}")
    values = _mapping_of(file, text)
    dialect = _dialect_of(values)
    if dialect is None:
        is_run = {"model", "data"} <= values.keys() <= RunConfig.model_fields.keys()
        raise _no_recipe(file, f"keys {', '.join(list(values)[:5])}", is_run=is_run)
    environment = values.pop("ENV", None) if dialect == "ms-swift" else None
    environment = {name: str(one) for name, one in (environment or {}).items()}
    keys = _keys_of(values, dialect, {})
    _read_deepspeed(keys, file)
    doubt = "" if _dialect_of(values, is_call=True) or dialect != "TRL" else _DOUBT
    return Recipe(dialect, keys, _processes({}, environment), environment, file, doubt)


def _keys_of(
    values: Mapping[str, Any], dialect: Dialect | None, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of a recipe's file, with `overrides` from the command that names it."""
    is_nested = dialect in ("torchtune", "Arctic Training")
    keys = {**(dict(_flat(values)) if is_nested else values), **overrides}
    for _ in range(3 * (dialect == "torchtune")):  # the value of ${output_dir} may refer to others
        keys = {name: _resolved(one, keys) for name, one in keys.items()}
    # Numbers may be quoted, and mappings may be strings of JSON.
    return {
        name: _value(one) if isinstance(one, str) and not _OF_WORDS.search(name) else one
        for name, one in keys.items()
    }


def file_near(file: Path, path: str) -> Path | None:
    """Return the file that a recipe names, relative to the working directory, to the recipe's
    folder or to a folder above that; None if there is none."""
    places: list[str | Path] = ["", *file.resolve().parents]
    return next((one for place in places if (one := Path(place, path)).is_file()), None)


def _read_deepspeed(keys: dict[str, Any], file: Path) -> None:
    name = keys.get("deepspeed")
    if isinstance(name, str) and (found := file_near(file, name)):
        keys["deepspeed"] = _mapping_of(found, file_text(found, "a file of DeepSpeed"))


def _resolved(value: Any, keys: Mapping[str, Any]) -> Any:
    """Return the value with references such as ${output_dir} replaced by the values of keys."""
    if isinstance(value, Mapping):
        return {name: _resolved(one, keys) for name, one in value.items()}
    if not isinstance(value, str):
        return value
    if (whole := _KEY.fullmatch(value)) and whole[1] in keys:
        return keys[whole[1]]
    return _KEY.sub(lambda found: str(keys.get(found[1], found[0])), value)


def _mapping_of(file: Path, text: str) -> dict[str, Any]:
    values = read_yaml(text, str(file), "mend the line that is named")
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise _no_recipe(file, "no mapping of keys")
    return dict(values)


def _no_recipe(
    file: Path, given: str, *, is_code: bool = False, is_run: bool = False
) -> ConfigError:
    change = (
        "name the YAML file that is called, with keys that its call changes as --section.key=value;"
        " for another trainer's recipe write a run file (docs/start.md)"
    )
    if is_code or file.suffix == ".py":
        change = (
            "keep the script and give its trainer chunks: from furlong.integrations import Trainer;"
            " class ChunkedSFTTrainer(Trainer, SFTTrainer): pass; and ChunkedSFTTrainer in the"
            " place of SFTTrainer. furlong.integrations.Trainer takes the place of transformers'"
            " Trainer alike; any other keeps its loop over furlong.chunked(model) (docs/python.md)"
        )
    if is_run:
        change = f"this is a run file already: furlong train {file}"
    return refusal(
        given,
        "a recipe of axolotl, LLaMA-Factory, TRL, ms-swift, torchtune or Arctic Training (YAML), or"
        " a shell script with the flags of one of the first four or of open-instruct",
        change,
        str(file),
    )


def _dialect_of(keys: Mapping[str, Any], *, is_call: bool = False) -> Dialect | None:
    """Return the trainer, by keys that only its recipes have, or None; `is_call`: the keys are the
    flags of a command."""
    if any(isinstance(value, Mapping) and "_component_" in value for value in keys.values()):
        return "torchtune"
    if isinstance(data := keys.get("data"), Mapping) and "sources" in data:
        return "Arctic Training"
    table: dict[Any, list[str]] = foreign_table()["dialects"]
    found = (name for name, own in table.items() if not keys.keys().isdisjoint(own))
    found = (name for name in found if not is_call or name != "open-instruct")  # accelerate's, too
    return next(found, "TRL" if "model_name_or_path" in keys and not is_call else None)


_DOUBT = "no key is TRL's alone: a script of transformers trains on answers alone"
_OF_ROLLOUTS = frozenset(("reward_funcs", "num_generations", "steps_per_generation"))
_WHOLE = frozenset(("dataset", "dataset_val", "peft_config", "role_mapping", "deepspeed"))
_KEY = re.compile(r"\$\{([\w.]+)\}")
_OF_DEEPSPEED = ("bf16_master_weights_and_grads", "bf16_optimizer_states")


def _flat(keys: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in keys.items():
        path = f"{outer}{name}"
        if isinstance(value, Mapping) and name not in _WHOLE:
            yield from _flat(value, f"{path}.")
        else:
            yield path, value
            if name == "deepspeed" and isinstance(value, Mapping):  # else a file
                bf16 = value.get("bf16", {})
                yield from ((one, bf16[one]) for one in _OF_DEEPSPEED if one in bf16)


_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_OF_ARRAY = re.compile(r"\s*\w+\+?=\(")
_OF_WORDS = re.compile(
    "(name|project|entity|path|dir|id|revision|token|template|model|dataset_config)$"
)
_ARRAY = re.compile(r"\$\{\w+\[[@*]\]\}")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
_PER_NODE = ("nproc_per_node", "gpus", "num_gpus", "launch.num_gpus")
_NUM_NODES = ("nnodes", "num_nodes", "num_machines")
_NAMED_TRL = re.compile(r"(?<![a-z])(trl|open_r1|run_sft|run_dpo)")
_OVERRIDE = re.compile(r"\+*\w+(\.\w+)+=")
_COMPUTED = re.compile(r"\$\(\(([^()]*)\)\)")
_SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
_LOSS = re.compile("dpo|kto|grpo|rloo|gkd|reward|(?<![a-z])(or|c|p)po")
"""The loss in the name of a training script."""
_RUNNERS: dict[str, tuple[Dialect, tuple[str, ...]]] = {
    "swift": ("ms-swift", ("sft", "pt", "rlhf")),
    "megatron": ("ms-swift", ("sft", "pt", "rlhf")),
    "llamafactory-cli": ("LLaMA-Factory", ("train",)),
    "axolotl": ("axolotl", ("train",)),
    "-m": ("axolotl", ("axolotl.cli.train",)),
    "tune": ("torchtune", ("run",)),
}
"""Programs of trainers, with their subcommands that train."""
_OVERRIDE_OF_FILE = re.compile(r"\+*[A-Za-z_][\w.]*=")
_OF_YAML = (".yaml", ".yml")


def _of_script(file: Path, text: str, command: int | None) -> Recipe:
    """Return the recipe in a command of a shell script. Variables that the script certainly sets
    are replaced by their values."""
    environment: dict[str, str] = {}
    found: list[tuple[list[str], dict[str, str]]] = []
    blocks: list[str] = []
    is_sure = is_test = False
    for words in _commands(file, text):
        sign = words[0] if words[:1] in (["&&"], ["||"]) else ""
        words = words[bool(sign) :]
        # whether a command runs after || or after a test is unknown
        is_sure = not sign or (sign == "&&" and is_sure and not is_test)
        is_test = words[:1] in (["["], ["[["], ["test"])
        while words and words[0] in ("then", "else", "do"):
            words = words[1:]
        is_call = _is_call(
            [*chain.from_iterable(_expanded_words(one, environment) for one in words)]
        )
        _follow(blocks, words)
        if not is_call and (blocks or not is_sure or words[:1] in _UNSURE):
            for name in _names_in(words):  # now unknown: references to them stay
                environment |= {name: f"${{{name}}}", f"{name}[@]": f"${{{name}[@]}}"}
            continue
        while words and _ASSIGNMENT.match(words[0]):
            ends = (n for n, word in enumerate(words, 1) if word.endswith(")"))
            size = next(ends, len(words)) if _OF_ARRAY.match(words[0]) else 1
            _assign(words[:size], environment)
            words = words[size:]
        if words[:1] in (["export"], ["declare"], ["readonly"], ["typeset"]):
            for word in filter(_ASSIGNMENT.match, words[1:]):
                _assign([word], environment)
        elif words[:1] and words[0].startswith("--"):
            raise refusal(
                f"{' '.join(words[:2])}, without a command",
                "flags on the line of their command, or after a backslash that ends a line",
                "remove blanks after backslashes; write the flags of an array into the command",
                str(file),
            )
        elif is_call:
            expanded = (_expanded_words(word, environment) for word in words)
            found.append((list(chain.from_iterable(expanded)), dict(environment)))
    if not found:
        raise _no_recipe(file, "no command with flags")
    chosen = command or int(len(found) == 1)
    if not 1 <= chosen <= len(found):
        names = "; ".join(" ".join(words[:3]) for words, _ in found)
        given = f"{len(found)} commands: {names}" + (f"; --command={command}" if command else "")
        change = f"choose one: --command=1 to {len(found)}"
        raise refusal(given, "one command", change, str(file))
    words, environment = found[chosen - 1]
    program, dialect, launch, keys, own = _split_call(words)
    for name, flags in (("config", keys), ("config_file", launch)):
        if isinstance(named := flags.pop(name, None), str):  # a recipe, or accelerate's settings
            inner = file_near(file, named) or Path(named)
            values = _mapping_of(inner, file_text(inner, f"the file of --{name}"))
            if name == "config":
                dialect = dialect or _dialect_of(values)
                values = _keys_of(values, dialect, flags)
            flags |= values | flags
    dialect, doubt = dialect or _dialect_of(keys, is_call=True), ""
    if dialect is None and any(_NAMED_TRL.search(word) for word in words):
        dialect = "TRL"
    answers = (answer_to(key) for key in keys)
    if not any(one is not None and one.target == "model.name" for one in answers):
        given = f"a command of an unknown trainer: {program or ' '.join(words[:3])}"
        raise _no_recipe(file, given, is_code=True)
    if dialect is None:
        dialect = "transformers"
        doubt = f"{program} is read as transformers' Trainer; what else its code does is unknown"
    _read_deepspeed(keys, file)
    if dialect == "ms-swift" and {"NPROC_PER_NODE", "NNODES"}.isdisjoint(environment):
        environment.pop("CUDA_VISIBLE_DEVICES", None)  # one process; its GPUs share the layers
    num_processes = _processes(launch | keys, environment)
    return Recipe(dialect, own | keys, num_processes, environment, file, doubt)


_UNSURE = (["read"], ["unset"], ["mapfile"], ["readarray"], ["printf"], ["getopts"], ["local"])
_BLOCKS = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done"}
_BLOCKS |= {"case": "esac", "function": "}"}


def _is_call(words: Sequence[str]) -> bool:
    flags = sum(word.startswith("--") or bool(_OVERRIDE.match(word)) for word in words)
    is_of_file = "--config" in words or any(word.endswith(_OF_YAML) for word in words)
    is_run = is_of_file and any(map(_dialect_by, words, words[1:]))
    is_run |= any(map(_is_script_of, words, words[1:]))
    is_call = flags > 1 or is_run
    return is_call and words[0] != "echo" and not _OF_ARRAY.match(words[0])


def _is_script_of(program: str, file: str) -> bool:
    """Return whether two successive words of a command are a training script and its recipe."""
    name = program.rpartition("/")[2]
    return "train" in name and name.endswith(".py") and file.endswith(_OF_YAML)


def _dialect_by(program: str, verb: str) -> Dialect | None:
    """Return the trainer whose program (in any folder) and subcommand `verb` these are, or None."""
    dialect, verbs = _RUNNERS.get(program.rpartition("/")[2], (None, ()))
    return dialect if verb in verbs else None


def _follow(blocks: list[str], words: Sequence[str]) -> None:
    """Update `blocks`, a stack of the words that close the open blocks of a script (`fi`, `done`),
    after a command that begins or ends a block. It is unknown whether the commands in a block
    run."""
    first = next(iter(words), "")
    if end := _BLOCKS.get(first, "}" * ("()" in "".join(words[:2]))):
        blocks.append(end)
    elif blocks and first == blocks[-1]:
        blocks.pop()


def _names_in(words: Sequence[str]) -> list[str]:
    """Return the names of the variables that a command may set."""
    is_named = bool(words) and (words[:1] in _UNSURE or words[0] in ("for", "while", "select"))
    found = (_ASSIGNMENT.match(word) for word in words)
    names = [one[0].rstrip("+=") for one in found if one]
    return names + [word for word in words[1:] if is_named and word.isidentifier()]


def _assign(words: Sequence[str], environment: dict[str, str]) -> None:
    """Store the value that an assignment gives to a variable of a script in `environment`. The
    words of an array are stored under the name `name[@]`. `words`: the words of the assignment."""
    name, _, value = words[0].partition("=")
    given = _expanded(value, environment)
    is_more, name = name.endswith("+"), name.rstrip("+")
    if _OF_ARRAY.match(words[0]):
        items = [value[1:], *words[1:]]
        items[-1] = items[-1][:-1]
        name = f"{name}[@]"
        given = shlex.join(_expanded(one, environment) for one in items if one)
        given = f"${{{name}}}" if "$(" in given or "`" in given else f" {given}"
    environment[name] = environment.get(name, "") * is_more + given


def _commands(file: Path, text: str) -> Iterator[list[str]]:
    """Yield the commands of a script, as lists of words. As in a shell, a comment line ends a
    command that continues on the next line; flags after it would be lost, so they are refused."""
    pending, ended_by_comment = "", False
    for number, line in enumerate([*text.splitlines(), "#"], 1):
        is_comment = line.lstrip().startswith("#")
        if is_comment:
            ended_by_comment |= bool(pending) and not _OF_ARRAY.match(pending)
        elif ended_by_comment and line.lstrip().startswith("--"):
            raise refusal(
                f"line {number}: flags after a comment, which ends the command",
                "a command whose lines follow each other",
                "remove the comment between its lines, or the flags after it",
                str(file),
            )
        else:
            ended_by_comment &= not line.strip()
            pending += line.removesuffix("\\") if line.endswith("\\") else f"{line}\n"
            if line.endswith("\\"):
                continue
        try:
            words = _words(pending)
        except ValueError:  # a quotation that continues on the next line, but not past a comment
            words = []
            if not is_comment:
                continue
        if words and _OF_ARRAY.match(words[0]) and not any(one.endswith(")") for one in words):
            continue  # an array continues on the next line
        pending = ""
        yield from _single(words)


def _single(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield the commands of one line, without the separators between them. Only `&&` and `||` are
    kept, as the first word of the command that follows: it is unknown whether this command runs."""
    own: list[str] = []
    for word in words:
        if word.endswith(";") or word in ("&&", "||", "|", "&"):
            yield [*own, word[:-1]] if word[:-1].strip("&|") else own
            own = [word] if word in ("&&", "||") else []
        else:
            own.append(word)
    yield own


def _words(command: str) -> list[str]:
    """Return the words of a command. A # inside a word does not begin a comment, and arithmetic is
    one word: `$(expr A + B)` and `$((A + B))` become `$((A+B))`."""
    marked = re.sub(r"(?<=\S)#", "\0", command)
    for each in re.finditer(r"\$\(expr ([^()]*)\)|\$\(\(([^()]*)\)\)", marked):
        sum_ = re.sub(r"[\s\\]", "", each[1] or each[2] or "")
        marked = marked.replace(each[0], f"$(({sum_}))")
    return [word.replace("\0", "#") for word in shlex.split(marked, comments=True)]


def _expanded(word: str, environment: Mapping[str, str]) -> str:
    """Return the word with the script's variables replaced by their values; expansions that need a
    shell stay as they are."""

    def value(found: re.Match[str]) -> str:
        given = environment.get(found[1] or found[3], found[2])
        return found[0] if given is None else given

    def number(found: re.Match[str]) -> str:
        """Return the result of a shell's integer arithmetic, if it has a single operator."""
        first, *rest = (environment.get(one, one) for one in re.findall(r"\w+|\W", found[1]))
        try:
            (sign,) = {*rest[::2]}
            return str(reduce(_SIGNS[sign], map(int, [first, *rest[1::2]])))
        except (ValueError, LookupError, ZeroDivisionError):
            return found[0]

    return _COMPUTED.sub(number, _VARIABLE.sub(value, word))


def _expanded_words(word: str, environment: Mapping[str, str]) -> list[str]:
    """Return the expanded word of a command; several words if it is a variable that holds flags."""
    if _ARRAY.fullmatch(word):
        value = environment.get(word[2:-1].replace("[*]", "[@]"), word)
        return [word] if "$" in value else shlex.split(value)
    value = _expanded(word, environment)
    is_of_flags = _VARIABLE.fullmatch(word) and value.lstrip().startswith("--")
    return shlex.split(value) if is_of_flags else [value]


def _split_call(
    words: Sequence[str],
) -> tuple[str, Dialect | None, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the program that is called, its trainer if the name identifies it, the flags of the
    launcher, the flags of the training, and the keys that the program's name implies."""
    for place, word in enumerate(words):
        name, verb = word.rpartition("/")[2], [*words, ""][place + 1]
        dialect = _dialect_by(name, verb)
        own: dict[str, Any] = {}
        end, start = place, place + 2
        if dialect is not None:
            if name == "tune" and "--config" in words:  # its launcher's flags, then the program
                start = words.index("--config")
                end = start - 1
            if name == "megatron" or verb == "pt":
                own["stage"] = "megatron" if name == "megatron" else verb
            own |= {"rlhf_type": "dpo"} if verb == "rlhf" else {}  # unless a flag says otherwise
        elif name == "trl" and verb.isalpha():
            dialect, own = "TRL", {"stage": verb}
        elif (name.endswith(".py") and name != "mason.py") or (name == "-m" and verb):
            start, name = (place + 2, verb) if name == "-m" else (place + 1, name)
            if "open_instruct" in word or name == "OLMo2-7B-sft.py":
                dialect = "open-instruct"
            if found := _LOSS.search(name):
                own = {"stage": found[0]}
            elif "run_clm" in name:  # an example of transformers, which joins texts into blocks
                own = {"stage": "pt", "block_size": 1024}
        else:
            continue
        return name, dialect, _flags(words[:end]), _flags(words[start:]), own
    return "", None, {}, {}, {}


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of `--name value`, `--name=value`, `--name value value` and `--name`. After
    a recipe's file, which is the value of `config`, also return the values of `name=value`."""
    keys: dict[str, Any] = {}
    name = ""
    for word in words:
        if word == "--":  # ends the launcher's flags
            name = ""
        elif word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            name = name.replace("-", "_")
            keys[name] = [value] if has_value else []
        elif not name and word.endswith(_OF_YAML):
            keys["config"] = [word]
        elif name in ("", "config") and "config" in keys and _OVERRIDE_OF_FILE.match(word):
            name, _, value = word.lstrip("+").partition("=")
            keys[name], name = [value], ""
        elif _ARRAY.search(word) or (not name and _VARIABLE.fullmatch(word)):
            keys[word] = []  # flags in a variable of unknown value
        elif name and word not in ("2>&1", ">"):
            keys[name].append(word)
        else:
            name = ""
    return {name: _of_words(name, given) for name, given in keys.items()}


def _of_words(name: str, words: Sequence[str]) -> Any:
    values = [_value(word) for word in words]
    if _OF_WORDS.search(name):  # a revision such as 0012345 is no number
        values = [w if type(v) in (int, float) else v for w, v in zip(words, values, strict=True)]
    return True if not values else values[0] if len(values) == 1 else values


def _value(word: str) -> Any:
    """Parse a flag's value: a number, a boolean, JSON, or else the text itself."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    numbers: tuple[Callable[[str], Any], ...] = (int, float)
    for read in (json.loads,) if word[:1] in ("{", "[") else numbers:
        with suppress(ValueError):
            return read(word)
    return word


def _processes(flags: Mapping[str, Any], environment: Mapping[str, str]) -> int | None:
    """Return how many processes a launcher starts, by its flags or else the script's variables;
    None if unknown."""
    nodes = next((flags[name] for name in _NUM_NODES if name in flags), None)
    nodes = nodes or _value(environment.get("NNODES", "1"))
    each = next((flags[name] for name in _PER_NODE if name in flags), None)
    if each is None and isinstance(flags.get("num_processes"), int):
        each, nodes = flags["num_processes"], 1  # accelerate's number is that of all nodes
    if each is None and isinstance(place := flags.get("include"), str):
        each = place.count(",") + 1
    if each is None and "NPROC_PER_NODE" in environment:
        each = _value(environment["NPROC_PER_NODE"])
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    if each is None and visible and "$" not in visible:
        each = visible.count(",") + 1
    return each * nodes if isinstance(each, int) and isinstance(nodes, int) else None
