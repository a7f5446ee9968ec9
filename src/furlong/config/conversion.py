"""A recipe of another trainer becomes a run's values, and each of its keys gets a verdict."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from furlong.config.foreign import Kind, answer_to, foreign_table
from furlong.config.messages import config_error, key_of
from furlong.config.recipes import Recipe
from furlong.config.schema import RunConfig, all_keys, words_of
from furlong.config.sources import check_sections, read_yaml
from furlong.errors import refusal

_Given = dict[str, Any]
"""Values of a recipe's keys, all of which go into one key of ours."""
_OFF = (None, False, 0, "", "false", "none", "no", "null", "off")


def _section(key: str) -> str:
    return key.partition(".")[0]


class Verdict(NamedTuple):
    """The end of a key: taken, or why not."""

    kind: Kind
    text: str
    """The key of ours, or the reason."""


class Conversion:
    """A recipe on its way to a run."""

    def __init__(self, recipe: Recipe, num_processes: int | None) -> None:
        self.recipe = recipe
        self.run: dict[str, Any] = {}
        """Values by whole keys of ours."""
        self.verdicts: dict[str, Verdict] = {}
        """By their keys, as the recipe writes them."""
        self.of_flags: set[str] = set()
        self.of_defaults: set[str] = set()
        """Keys of ours whose value is a default of the other trainer."""
        self.remarks: dict[str, str] = {}
        """Remarks for the reader, by a key of ours."""
        self.num_processes = num_processes or recipe.num_processes

    @property
    def values(self) -> dict[str, Any]:
        """The run in sections."""
        nested: dict[str, Any] = {}
        order = list(RunConfig.model_fields)
        for key, value in sorted(self.run.items(), key=lambda one: order.index(_section(one[0]))):
            *path, name = key.split(".")
            section = nested
            for part in path:
                section = section.setdefault(part, {})
            section[name] = value
        return nested

    @property
    def is_whole(self) -> bool:
        """Whether the run computes what the recipe does."""
        return all(verdict.kind != "refused" for verdict in self.verdicts.values())

    def value(self, *names: str) -> Any:
        """The recipe's value of the first of these keys that it has, else its trainer's default."""
        for values in (self.recipe.keys, self.recipe.defaults):
            for key, value in values.items():
                if key.rpartition(".")[2].replace("-", "_") in names and value is not None:
                    return value
        return None

    def take(self, target: str, value: Any, names: Iterable[str]) -> None:
        self.run[target] = value
        if not self.recipe.keys.keys() & set(names):
            self.of_defaults.add(target)
        self._say("ours", target, names)

    def need_not(self, reason: str, names: Iterable[str]) -> None:
        self._say("needless", reason, names)

    def cannot(self, reason: str, names: Iterable[str], kind: Kind = "refused") -> None:
        self._say(kind, reason, names)

    def _say(self, kind: Kind, text: str, names: Iterable[str]) -> None:
        for name in names:
            if name in self.recipe.keys:
                self.verdicts[name] = Verdict(kind, text)


def convert(
    recipe: Recipe, num_processes: int | None, flags: Mapping[str, Any] | None = None
) -> Conversion:
    """The run of a recipe, under `flags`: values of keys of ours. Raises ConfigError for a recipe
    that needs the number of processes and does not have it, and for a run that lacks a key."""
    made = Conversion(recipe, num_processes)
    if recipe.is_of_pairs:
        made.run["train.loss"] = "dpo"
    by_target: dict[str, _Given] = {}
    for name, value in (recipe.defaults | recipe.keys).items():
        answer = answer_to(name)
        own = [
            key
            for key in all_keys()
            if key.rpartition(".")[2] == name.rpartition(".")[2] and not key.startswith(_OF_PLANS)
        ]
        if _is_empty(value):
            made.need_not("it has no value", [name])
        elif isinstance(value, str) and _COMPUTED.search(value):
            of_place = answer is not None and answer.target in ("out", "log.name")
            reason = "its script computes it: set the key of ours"
            made.cannot(reason, [name], "lost" if of_place else "refused")
        elif answer is not None and answer.kind == "ours":
            by_target.setdefault(answer.target, {})[name] = value
        elif answer is None and len(own) == 1:
            by_target.setdefault(own[0], {})[name] = value
        elif answer is None:
            made.cannot("furlong does not know it", [name])
        elif name == "resume_from_checkpoint" and isinstance(value, str) and "/" in value:
            made.cannot("write model.name: the export of the run that it goes on from", [name])
        elif name == "plugins" and all(re.search(_PLAIN_PLUGINS, str(one)) for one in value):
            made.need_not("what they do stands under keys of its own", [name])
        elif name in ("deepspeed", "fsdp", "fsdp_config") and _offloads(value):
            made.cannot(_STAYS, [name], "lost")
        elif answer.kind == "needless" or _is_off(name, value):
            made.need_not(answer.text, [name])
        else:
            made.cannot(answer.text, [name], answer.kind)
    order = [text.partition(",")[0] for text in foreign_table()["ours"]]
    for target in sorted(
        by_target, key=lambda key: order.index(key) if key in order else len(order)
    ):
        try:
            _BY_TARGET.get(target, _same)(made, target, by_target[target])
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            made.cannot(f"its value is not understood ({error})", by_target[target])
    for key, value in (flags or {}).items():
        _put(made, key, value)
    _finish(made)
    return made


def _put(made: Conversion, key: str, value: Any) -> None:
    """Takes a value that somebody gives for a key of ours, in the place of the recipe's."""
    made.run = {own: one for own, one in made.run.items() if not own.startswith(f"{key}.")}
    made.run[key] = value
    made.of_flags.add(key)
    for name in made.recipe.keys:
        answer = answer_to(name)
        of_key = answer is not None and answer.target == key
        of_key |= (name, key) == ("resume_from_checkpoint", "model.name")
        if of_key and made.verdicts[name].kind == "refused":
            made.need_not(f"--{key} is given", [name])


_OF_PLANS = ("chunks.", "offload.", "memory.")
"""Sections whose names, such as size, mean something else to others."""
_ASIDE = ("log.", "hub", "out", "train.save", "train.num_", "data.streaming")
"""Keys without which the same is computed."""


def _finish(made: Conversion) -> None:
    """Adds what no key says, and proves that it is a run. Raises ConfigError where a key lacks.

    Values that no run may have are given up, each with its reason.
    """
    if made.run.get("data.join") is True:
        made.run["data.too_long"] = "split"
    elif "data.max_seq_len" not in made.run and "data.too_long" in made.of_defaults:
        del made.run["data.too_long"]  # there is no limit
    if made.recipe.dialect == "ms-swift" and "train.lr" not in made.run:
        made.run["train.lr"] = 1e-4 if "model.lora.rank" in made.run else 1e-5
    while True:
        try:
            RunConfig.model_validate(check_sections(made.values, str(made.recipe.file)))
            return
        except ValidationError as error:
            errors = error.errors()
        given_up = False
        for one in errors:
            keys = one.get("ctx", {}).get("keys", key_of(one["loc"])).split(" and ")
            target = next(
                (
                    key
                    for key in made.run
                    for own in keys
                    if key == own or key.startswith(f"{own}.") or own.startswith(f"{key}.")
                ),
                None,
            )
            if target is None or one["type"] == "missing":
                continue
            if target in ("model.name", "data.train") or target in made.of_flags:
                flags = {f"--{key}" for key in made.of_flags}
                raise config_error([one], str(made.recipe.file), flags)
            value, given_up = made.run.pop(target), True
            names = [name for name, verdict in made.verdicts.items() if verdict.text == target]
            is_none = one["type"] == "extra_forbidden"
            reason = f"{target} takes {words_of(one)}, not {value!r}"
            reason = f"{target}: {words_of(one)}" if one["type"] == "told" else reason
            is_aside = target.startswith(_ASIDE)
            reason = f"there is no {key_of(one['loc'])}" if is_none else reason
            made.cannot(reason, names, "lost" if is_aside else "refused")
        for name, verdict in made.verdicts.items():
            answer = answer_to(name)
            if verdict.kind == "refused" and answer and answer.target == "data.train":
                change = "mend it, or give the data: --data.train=..."
                given = f"{name}: {verdict.text}"
                if "data.train" not in made.run:
                    raise refusal(given, "sources of data", change, str(made.recipe.file))
        if not given_up:
            raise config_error(errors, str(made.recipe.file), set())


_PLAIN_PLUGINS = r"cut_cross_entropy|\.liger\.|\.kernels\."
_STAYS = "weights and optimizer states stay on the device, divided over all processes"


def _offloads(value: Any) -> bool:
    """Whether a setting of DeepSpeed or FSDP keeps weights or states on the CPU."""
    if isinstance(value, Mapping):
        found = (_offloads(one) or ("offload" in str(key) and one) for key, one in value.items())
        return any(found)
    return isinstance(value, str) and "offload" in value


_COMPUTED = re.compile(r"\$(\w|\{|\()|^<[^|<>]* [^<>]*>$")


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _is_off(name: str, value: Any) -> bool:
    text = value.lower() if isinstance(value, str) else value
    return text in _OFF or (text == 1 and name.endswith(("size", "degree", "tp")))


def _last(made: Conversion, given: _Given) -> Any:
    """The value of a recipe's own key, else the default."""
    own = [value for name, value in given.items() if name in made.recipe.keys]
    return own[-1] if own else next(iter(given.values()))


def _same(made: Conversion, target: str, given: _Given) -> None:
    own = [value for name, value in given.items() if name in made.recipe.keys]
    if len({repr(value) for value in own}) > 1:
        made.cannot("two values for one key of ours", given)
    else:
        made.take(target, _last(made, given), given)


def _model(made: Conversion, target: str, given: _Given) -> None:
    if "model_name" in given and len(given) > 1:  # a persona, in ms-swift
        made.cannot("a persona belongs into the records", ["model_name"])
        del given["model_name"]
    name = _last(made, given)
    made.take(target, name, given)
    if re.search(r"\bVL\b|VL-|Vision|Omni", str(name)):
        made.cannot("a model with vision: its text model alone is trained", given)


def _tokenizer(made: Conversion, target: str, given: _Given) -> None:
    name = _last(made, given)
    if name == made.run.get("model.name"):
        made.need_not("it is the model's own", given)
    else:
        made.take(target, name, given)


def _dtype(made: Conversion, target: str, given: _Given) -> None:
    names = {"float": "float32", "fp32": "float32", "bf16": "bfloat16", "auto": "bfloat16"}
    texts = [
        str(given[name]) for name in ("torch_dtype", "dtype", "mixed_precision") if name in given
    ]
    dtype = next((names.get(one, one).rpartition(".")[2] for one in texts), "bfloat16")
    if given.get("fp16") is True or dtype in ("float16", "fp16"):
        made.cannot("float16 needs a scaled loss: bfloat16 does not", given)
    elif not texts and given.get("bf16", given.get("pure_bf16")) is False and "fp16" not in given:
        made.take(target, "float32", given)
    elif dtype in ("bfloat16", "no"):
        made.need_not("bfloat16 is the default; trained weights stay float32", given)
    else:
        made.take(target, dtype, given)


def _adapters(made: Conversion, target: str, given: _Given) -> None:
    kind = _last(made, given)
    if str(kind).lower() in ("lora", "qlora", "true") or isinstance(kind, Mapping):
        made.take("model.lora.rank", 8, given)
        for name, value in kind.items() if isinstance(kind, Mapping) else ():
            ours = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout"}.get(name, name)
            if f"model.lora.{ours}" in all_keys():
                made.run[f"model.lora.{ours}"] = value
    elif str(kind).lower() in ("full", "none", "false", "no"):
        made.need_not("every weight is trained without model.lora", given)
    else:
        made.cannot("adapters are LoRA here, and no part of the weights is frozen", given)


def _of_adapters(made: Conversion, target: str, given: _Given) -> None:
    """Options of adapters, which some trainers write although every weight is trained."""
    if made.recipe.dialect == "torchtune" and given.keys() & made.recipe.keys.keys():
        made.run.setdefault("model.lora.rank", 8)
    if "model.lora.rank" not in made.run:
        made.need_not("every weight is trained", given)
        return
    if target.endswith("dropout") and made.run.get("train.loss", "sft") != "sft":
        made.need_not("preference losses are computed without dropout, there too", given)
        return
    value = _last(made, given)
    if target.endswith("target_modules"):
        if given.get("lora_target_linear") is True or value in (
            "all",
            "all-linear",
            ["all-linear"],
        ):
            value = "all-linear"
        elif made.recipe.dialect == "torchtune":
            value = [
                {"output_proj": "o_proj"}.get(name, name)
                for name in made.value("lora_attn_modules") or []
            ]
            value += ["gate_proj", "up_proj", "down_proj"] * bool(made.value("apply_lora_to_mlp"))
        elif isinstance(value, str) and "," in value:
            value = [name.strip() for name in value.split(",")]
    made.take(target, value, given)
    if target.endswith("rank") and made.recipe.dialect == "LLaMA-Factory":
        made.run.setdefault("model.lora.alpha", 2 * int(value))


def _quantize(made: Conversion, target: str, given: _Given) -> None:
    bits = next((given[name] for name in ("quantization_bit", "quant_bits") if name in given), None)
    method = str(made.value("quant_method", "quantization_method") or "bnb").lower()
    is_four = given.get("load_in_4bit") is True or given.get("use_qlora") is True or bits == 4
    if not is_four and bits is None:
        made.need_not("nothing is quantized", given)
    elif bits not in (None, 4) or method not in ("bnb", "bitsandbytes"):
        made.cannot("model.quantize has nf4 and fp4 of bitsandbytes", given)
    else:
        kind = made.value("bnb_4bit_quant_type", "quantization_type") or "nf4"
        double = made.value(
            "bnb_4bit_use_double_quant", "use_bnb_nested_quant", "double_quantization"
        )
        made.take(target, {"type": kind, "double": bool(double)}, given)


def _rope(made: Conversion, target: str, given: _Given) -> None:
    names = [name for name in given if name != "max_model_len"]
    if "max_model_len" in given:
        made.need_not("data.max_seq_len is the length; RoPE's factor goes by it", ["max_model_len"])
    rope: dict[str, Any] = {}
    for name in names:
        value = given[name]
        if name == "model_init_kwargs" and isinstance(value, Mapping):
            value = value.get("rope_parameters") or value.get("rope_scaling") or {}
        if isinstance(value, str) and "=" in value:
            pairs = (pair.partition("=") for pair in value.split(","))
            value = {key.strip(): json.loads(text) for key, _, text in pairs}
        if name == "rope_scaling_factor":
            value = {"rope_type": "yarn", "factor": value}
        elif name == "rope_theta":
            value = {"rope_type": "default", "rope_theta": value}
        elif isinstance(value, str):
            value = _scaled(made, value)
        if isinstance(value, Mapping):
            rope |= {"rope_type" if key == "type" else key: one for key, one in value.items()}
    if not rope and names:
        made.cannot("its factor goes by the model's config: write model.rope with factor", names)
    elif names:
        made.take(target, {"rope_type": "default"} | rope, names)


def _scaled(made: Conversion, kind: str) -> dict[str, Any] | None:
    """RoPE of a kind with the factor that the length asks for, by the model's config; None without
    one."""
    name = str(made.run.get("model.name"))
    length = made.value("max_model_len", "cutoff_len", "max_length")
    config = _model_config(name, made.run.get("model.revision"))
    if config is None or not isinstance(length, int):
        return None
    own = config.get("max_position_embeddings", length)
    return {"rope_type": kind, "factor": float(max(1, math.ceil(length / own)))}


def _model_config(name: str, revision: str | None) -> dict[str, Any] | None:
    """The config of a model in a folder or on the hub; None where it is not to be had."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    file = Path(name).expanduser() / "config.json"
    try:
        if not file.is_file():
            file = Path(hf_hub_download(name, "config.json", revision=revision))
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, HfHubHTTPError, HFValidationError):
        return None
    return values


def _share(made: Conversion, target: str, given: _Given) -> None:
    value = _last(made, given)
    if not value:
        made.need_not("nothing is held out", given)
    else:
        made.take(target, value, given)


def _length(made: Conversion, target: str, given: _Given) -> None:
    made.take(target, _last(made, given), given)
    if "data.too_long" not in made.run and made.value("truncation_strategy") is None:
        made.run["data.too_long"] = "truncate"


def _join(made: Conversion, target: str, given: _Given) -> None:
    word = _last(made, given)
    is_packed = made.value("packing") is True
    if word is True or (word == "wrapped" and is_packed):
        made.take(target, True, given)
    elif word == "bfd_split" and is_packed:
        made.take("data.too_long", "split", given)
    else:
        made.need_not("sequences are always packed, isolated from each other", given)


def _too_long(made: Conversion, target: str, given: _Given) -> None:
    word = str(_last(made, given))
    ours = {"delete": "drop", "raise": "error", "right": "truncate", "keep_start": "truncate"}
    if word in ("left", "keep_end"):
        made.cannot("sequences are cut off at their end", given)
    else:
        made.take(target, ours.get(word, word), given)


def _rate(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


def _batch(made: Conversion, target: str, given: _Given) -> None:
    own = made.recipe.keys
    total = next((own[name] for name in ("global_batch_size",) if name in own), None)
    if total is None and made.recipe.dialect == "ms-swift" and "global_batch_size" in given:
        total = given["global_batch_size"]
    if isinstance(total, int) and total > 10_000:  # in tokens
        made.take("train.tokens_per_step", total, given)
        return
    names = ("per_device_train_batch_size", "micro_batch_size", "batch_size", "train_batch_size")
    if total is None:
        micro = next((own[name] for name in names if name in own), None)
        micro = micro or next((given[name] for name in names if name in given), 1)
        accumulated = made.value("gradient_accumulation_steps")
        replicas = _replicas(made)
        if accumulated is None and made.recipe.dialect != "ms-swift":
            accumulated = 1
        elif accumulated is None:  # it fills up to 16 sequences
            accumulated = max(1, math.ceil(16 / micro / (made.num_processes or 1)))
        total = micro * accumulated * replicas
    packs = ("sample_packing", "packing", "neat_packing", "pack_samples", "packed")
    dataset = made.recipe.keys.get("dataset")
    is_packed = any(made.value(name) is True for name in packs)
    is_packed |= made.value("batch_method") == "pack" or "tokenized_mds_train" in own
    is_packed |= isinstance(dataset, Mapping) and dataset.get("packed") is True
    length = made.run.get("data.max_seq_len")
    if is_packed and isinstance(length, int) and made.run.get("train.loss", "sft") == "sft":
        made.take("train.tokens_per_step", total * length, given)
    else:
        made.take(target, total, given)


def _replicas(made: Conversion) -> int:
    """Processes of which each has sequences of its own. Raises ConfigError where nobody says."""
    if made.num_processes is None:
        raise refusal(
            f"{made.recipe.file}: a batch for each of its processes, not how many they are",
            "the number of processes that the recipe is started with",
            "add --devices=N",
        )
    shared = 1
    for word in (
        "sequence_parallel",
        "context_parallel",
        "seq_parallel",
        "cp_",
        "tensor_",
        "pipeline_",
    ):
        for key, value in made.recipe.keys.items():
            name = key.rpartition(".")[2]
            if (
                name.startswith(word)
                and name.endswith(("size", "degree"))
                and isinstance(value, int)
            ):
                shared *= max(1, value)
    if isinstance(inner := made.recipe.keys.get("parallelism_config"), Mapping):
        for value in (inner.get(f"parallelism_config_{one}_size", 1) for one in ("cp", "sp", "tp")):
            shared *= value
    if made.num_processes % shared:
        raise refusal(
            f"{made.num_processes} processes, of which {shared} share a sequence or a layer",
            f"a multiple of {shared}",
            "add --devices=N, the number of processes that the recipe is started with",
        )
    return made.num_processes // shared


def _max_tokens(made: Conversion, target: str, given: _Given) -> None:
    made.need_not("the batch is measured as a whole", given)


def _steps(made: Conversion, target: str, given: _Given) -> None:
    number = _last(made, given)
    if isinstance(number, int) and number > 0:
        made.take(target, number, given)
        if made.run.pop("train.epochs", None) is not None:
            made.need_not("the steps are given", ["num_train_epochs", "num_epochs", "epochs"])
    else:
        made.need_not("epochs decide", given)


def _min_lr(made: Conversion, target: str, given: _Given) -> None:
    rate = _rate(made.run.get("train.lr"))
    for name, value in given.items():
        floor: float | None = None
        if isinstance(value, Mapping):
            known = {"min_lr_rate": rate, "min_lr_ratio": rate, "min_lr": 1.0, "eta_min": 1.0}
            floor = sum(known[key] * float(one) for key, one in value.items() if key in known)
            if value.keys() - known.keys():
                made.cannot("of a schedule's options furlong has the floor alone", [name])
                continue
        else:
            floor = float(value) * (rate if "ratio" in name else 1.0)
        made.take(target, float(f"{floor:.12g}"), [name])


def _warmup(made: Conversion, target: str, given: _Given) -> None:
    if made.value("lr_scheduler_type", "lr_scheduler") == "constant":
        made.run[target] = 0.0
        made.need_not("constant has no warm-up", given)
        return
    own = {name: value for name, value in given.items() if name in made.recipe.keys}
    set_ones = {name: value for name, value in own.items() if value} or own or given
    in_steps = [value for name, value in set_ones.items() if name.endswith("steps")]
    made.take(target, (in_steps or list(set_ones.values()))[-1], given)


def _schedule(made: Conversion, target: str, given: _Given) -> None:
    word = str(_last(made, given)).lower().rpartition(".")[2]
    ours = {
        "cosine_with_min_lr": "cosine",
        "cosinelr": "cosine",
        "get_cosine_schedule_with_warmup": "cosine",
        "constant_with_warmup": "constant",
        "linear_with_warmup": "linear",
    }
    schedule = ours.get(word, word)
    if schedule in ("cosine", "linear", "constant"):
        made.take(target, schedule, given)
    else:
        made.cannot("learning rates fall by cosine or linearly, or stay", given)


_OPTIMIZERS = {
    "adamw": (
        "adam adamw adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused cpu_adam fused_adam"
        " cpuadam fusedadam"
    ),
    "adamw_8bit": "adamw_8bit adamw_bnb_8bit adamw8bit",
    "paged_adamw_8bit": "paged_adamw_8bit pagedadamw8bit",
    "paged_adamw_32bit": "paged_adamw paged_adamw_32bit pagedadamw",
    "adamw_torch_8bit": "adamw_torch_8bit ao_adamw_8bit",
    "adamw_torch_4bit": "adamw_torch_4bit ao_adamw_4bit",
    "adamw_torch_fp8": "ao_adamw_fp8",
    "adafactor": "adafactor",
    "muon": "muon",
}
"""Their names for an optimizer, by ours."""


def _optimizer(made: Conversion, target: str, given: _Given) -> None:
    if given.pop("use_muon", False) is True:
        made.take(target, "muon", ["use_muon"])
        return
    word = str(_last(made, given)).lower().rpartition(".")[2]
    ours = next((own for own, theirs in _OPTIMIZERS.items() if word in theirs.split()), None)
    if ours is None:
        made.cannot(
            "furlong.integrations.Trainer, or any trainer over furlong.chunked, takes it", given
        )
    else:
        made.take(target, ours, given)
        if ours == "adafactor":
            made.run.pop("train.betas", None)


def _betas(made: Conversion, target: str, given: _Given) -> None:
    if isinstance(value := _last(made, given), list | tuple):
        made.take(target, list(value), given)
    else:
        pair = [made.value(f"adam_beta{place}") for place in (1, 2)]
        made.take(target, pair, given)


def _grad_norm(made: Conversion, target: str, given: _Given) -> None:
    given = {name: value for name, value in given.items() if value != "auto"} or given
    norm = _last(made, given)
    made.take(target, norm if float(norm) > 0 else None, given)


def _groups(made: Conversion, target: str, given: _Given) -> None:
    groups = []
    for name, value in given.items():
        match = "lora_B" if name == "loraplus_lr_ratio" else "embed_tokens|lm_head"
        rate = _rate(made.run.get("train.lr")) * value if "ratio" in name else value
        groups.append({"match": match, "lr": rate})
    made.take(target, groups, given)


def _state_dtype(made: Conversion, target: str, given: _Given) -> None:
    value = _last(made, given)
    dtype = (
        "bfloat16"
        if value is True
        else str(value).replace("bf16", "bfloat16").replace("fp32", "float32")
    )
    made.take(target, dtype, given)


def _saves(made: Conversion, target: str, given: _Given) -> None:
    what = "save" if "save" in target else "eval"
    strategy = made.value(f"{what}_strategy", "evaluation_strategy" if what == "eval" else "") or ""
    number = next(
        (
            given[name]
            for name in given
            if name.endswith(("steps", "interval")) and name in made.recipe.keys
        ),
        None,
    )
    number = (
        number
        if number is not None
        else next((given[n] for n in given if n.endswith(("steps", "interval"))), None)
    )
    if what == "eval" and not {"data.eval", "data.eval_share"} & made.run.keys():
        made.need_not("nothing is held out", given)
    elif (
        strategy in ("no", False)
        or number == 0
        or (what == "eval" and made.value("do_eval") is False)
    ):
        made.take(target, 0, given)
    elif strategy == "epoch":
        made.take(f"train.{what}s_per_epoch", 1, given)
    elif (
        number is None
        or f"train.{what}s_per_epoch" in made.run
        or f"{what}s_per_epoch" in made.recipe.keys
    ):
        made.need_not(f"{what}s_per_epoch decides", given)
    elif isinstance(number, float) and number < 1:  # a share of all steps
        if isinstance(steps := made.run.get("train.steps"), int):
            made.take(target, max(1, round(number * steps)), given)
        else:
            epochs = _rate(made.run.get("train.epochs", 1))
            made.take(f"train.{what}s_per_epoch", float(f"{1 / (number * epochs):.6g}"), given)
    elif isinstance(number, str):
        made.take(f"train.{what}s_per_epoch", 1, given)
    else:
        made.take(target, number, given)


def _per_epoch(made: Conversion, target: str, given: _Given) -> None:
    what = "save" if "save" in target else "eval"
    is_set = any(name in made.recipe.keys for name in (f"{what}_steps", f"{what}_strategy"))
    if what == "eval" and not {"data.eval", "data.eval_share"} & made.run.keys():
        made.need_not("nothing is held out", given)
    elif not _last(made, given):
        made.take(f"train.{what}_every_steps", 0, given)
    elif not is_set or target.rpartition(".")[2] in made.recipe.keys:
        made.take(target, _last(made, given), given)


def _num_checkpoints(made: Conversion, target: str, given: _Given) -> None:
    number = _last(made, given)
    if isinstance(number, int) and number > 0:
        made.take(target, number, given)
    else:
        made.take(target, 1000, given)


def _flag(made: Conversion, target: str, given: _Given) -> None:
    own = [value for name, value in given.items() if name in made.recipe.keys]
    if any(value is True for value in own):
        made.take(target, True, given)
    elif all(value is False for value in own):
        made.need_not("false is the default", given)
    else:
        made.need_not("the held-out loss is the measure", given)


def _loss(made: Conversion, target: str, given: _Given) -> None:
    word = str(_last(made, given)).lower()
    if word in ("sft", "pt", "megatron", "none"):
        made.need_not("sft is the default", given)
        if word == "pt":
            made.run["data.format"] = "text"
            if made.recipe.dialect == "LLaMA-Factory" and made.value("packing") is not False:
                made.run["data.join"] = True  # it joins documents to fill the length
    elif word in ("dpo", "ipo", "kto"):
        made.take(target, "kto" if word == "kto" else "dpo", given)
        if word == "ipo":
            made.run["train.loss_type"] = "ipo"
    else:
        made.cannot(
            "furlong train has sft, dpo and kto; furlong.chunked runs others behind TRL", given
        )


def _loss_type(made: Conversion, target: str, given: _Given) -> None:
    value = _last(made, given)
    word = value[0] if isinstance(value, list) and len(value) == 1 else value
    ours = {"dpo": "sigmoid", "dpo_norm": "sigmoid_norm"}.get(str(word), word)
    if made.run.get("train.loss") is None:
        if ours == "dft":
            made.cannot("the loss is plain cross-entropy, or of pairs", given)
            return
        if ours in ("nll", "chunked_nll"):
            made.need_not("the loss is plain cross-entropy", given)
            return
        made.run["train.loss"] = "dpo"  # TRL's own recipes do not say it elsewhere
    made.take(target, ours, given)


def _of_pairs(made: Conversion, target: str, given: _Given) -> None:
    value = _last(made, given)
    if made.run.get("train.loss") in (None, "sft") and not any(
        n in made.recipe.keys for n in given
    ):
        return
    if not value and target != "train.beta":
        made.need_not("0 is the default", given)
        return
    made.run.setdefault("train.loss", "dpo")
    made.take(target, value, given)


def _parallel(made: Conversion, target: str, given: _Given) -> None:
    value = _last(made, given)
    if isinstance(value, Mapping):
        value = next((n for key, n in value.items() if "cp_size" in key or "sp_size" in key), 1)
    if value == 1:
        made.need_not("1 is the default", given)
    else:
        made.take(target, value, given)


_PROJECTS = {"open-instruct": "open_instruct_internal", "axolotl": "axolotl"}
"""Projects of wandb where none is named; transformers says huggingface."""


def _trackers(made: Conversion, target: str, given: _Given) -> None:
    reported = given.get("report_to", given.get("log_with"))
    names = reported if isinstance(reported, list) else [reported] if reported else []
    if isinstance(made.value("use_wandb", "with_tracking"), bool) and made.value(
        "use_wandb", "with_tracking"
    ):
        names = [*names, "wandb"]
    project = made.value("wandb_project") or made.recipe.environment.get("WANDB_PROJECT")
    if project and not reported:
        names = [*names, "wandb"]
    values = {
        "wandb": ("log.wandb", project or _PROJECTS.get(made.recipe.dialect, "huggingface")),
        "tensorboard": ("log.tensorboard", True),
        "mlflow": ("log.mlflow", made.value("mlflow_experiment_name") or "furlong"),
        "trackio": ("log.trackio", made.value("trackio_project_name") or "huggingface"),
    }
    made.need_not("no tracker", given)
    for name in names:
        if name in values:
            made.take(*values[name], given)
        elif name != "none":
            made.cannot("trackers are wandb, TensorBoard, MLflow and trackio", given, "lost")


def _hub(made: Conversion, target: str, given: _Given) -> None:
    if made.value("push_to_hub") is not True:
        made.need_not("nothing is pushed", given)
        return
    repo = str(made.value("hub_model_id") or made.value("output_dir") or "")
    if repo.count("/") != 1 or repo.startswith((".", "data/", "output")):
        made.cannot("write hub.repo: OWNER/NAME, for the recipe names no owner", given, "lost")
        return
    made.take("hub.repo", repo, given)
    if made.value("hub_strategy") == "every_save":
        made.run["hub.every_save"] = True
    if (private := made.value("hub_private_repo")) is not None:
        made.run["hub.private"] = private


def _special_tokens(made: Conversion, target: str, given: _Given) -> None:
    for name, value in given.items():
        tokens = value if isinstance(value, Mapping) else {"eos_token": value}
        known = {"eos_token": "data.eos_token", "pad_token": "data.pad_token"}
        for token, text in tokens.items():
            if token in known and text:
                made.take(known[token], text, [name])
            elif token == "bos_token" or not text:
                made.need_not("the tokenizer's own", [name])
            else:
                made.cannot("new tokens are written into the model's folder first", [name])


_OF_NO_MODEL = ("default", "empty", "fewshot", "alpaca", "vicuna")
"""Templates of LLaMA-Factory that are its own."""


def _template(made: Conversion, target: str, given: _Given) -> None:
    value = str(_last(made, given))
    names = {_plain(name): name for name in _templates()}
    aliases = {"qwen": "qwen25", "qwen2": "qwen25", "gemma2": "gemma"}
    plain = _plain(value)
    if made.run.get(target) == "alpaca":
        made.need_not("the words of Alpaca take its place", given)
    elif made.recipe.dialect == "LLaMA-Factory" and value in _OF_NO_MODEL:
        made.cannot("write data.chat_template: a file with that template", given)
    elif value.startswith(("tokenizer_default", "default")):
        made.need_not("the model's own chat template is the default", given)
    elif "{%" in value or "{{" in value or Path(value).suffix in (".jinja", ".j2"):
        made.take(target, value, given)
    elif found := names.get(plain) or names.get(aliases.get(plain, "")):
        made.take(target, found, given)
    elif "/" in value:
        made.cannot("write data.chat_template: the file chat_template.jinja of that model", given)
    elif made.recipe.dialect in ("LLaMA-Factory", "ms-swift"):
        made.need_not("the model's own chat template is taken: compare it with theirs", given)
    else:
        made.cannot("write data.chat_template: a file with that template", given)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _templates() -> list[str]:
    """Names of the chat templates that furlong has."""
    from importlib.resources import files

    folder = files("furlong").joinpath("data/templates")
    return [one.name.removesuffix(".jinja") for one in folder.iterdir()] if folder.is_dir() else []


def _thinking(made: Conversion, target: str, given: _Given) -> None:
    made.take(target, {"enable_thinking": _last(made, given)}, given)


def _train_on(made: Conversion, target: str, given: _Given) -> None:
    if made.run.get("train.loss", "sft") != "sft":
        made.need_not("answers are compared, questions never learnt", given)
        return
    own = {name: value for name, value in given.items() if name in made.recipe.keys} or given
    is_all = False
    for name, value in own.items():
        word = ",".join(map(str, value)) if isinstance(value, list) else str(value).lower()
        is_on = word == "true"
        if (name == "mask_history" and is_on) or word == "last_round":
            made.take(target, "last", [name])
        elif (
            (name == "mask_inputs" and not is_on)
            or (name == "loss_scale" and word == "all")
            or (name in ("train_on_inputs", "train_on_prompt", "train_on_input") and is_on)
            or (name in ("assistant_only_loss", "completion_only_loss") and not is_on)
        ):
            is_all = True
        elif name == "roles_to_train" and word != "assistant":
            made.cannot("assistant, all, or last: no other choice of roles", [name])
            continue
        elif name == "loss_scale" and word not in ("default", "all", "last_round"):
            made.cannot("tokens weigh the same: a record's turns may have a weight", [name])
            continue
        if name not in made.verdicts:
            made.need_not("answers alone are learnt by default", [name])
    if is_all:
        made.take(target, "all", own)


def _out(made: Conversion, target: str, given: _Given) -> None:
    made.take(target, str(_last(made, given)), given)


def _cache_dir(made: Conversion, target: str, given: _Given) -> None:
    made.need_not("tokens lie in data.cache_dir, by default in the user's cache", given)


def _fields(made: Conversion, target: str, given: _Given) -> None:
    """Fields and roles of all sources; LLaMA-Factory's column names of its dataset_info.json, which
    some write into the recipe."""
    if "dataset_text_field" in given:
        value = given["dataset_text_field"]
        if value == "text":
            made.need_not("text is the field's name", ["dataset_text_field"])
        else:
            made.take(target, {"text": value}, ["dataset_text_field"])
    rest = {name: value for name, value in given.items() if name != "dataset_text_field"}
    if "columns" in rest:
        columns = rest["columns"]
        ours = {"query": "instruction", "response": "output", "images": ""}
        if isinstance(columns, Mapping):
            made.take(target, {ours.get(o, o): t for t, o in columns.items()}, ["columns"])
    if rest.keys() - {"columns", "role_mapping"}:
        fields, format = _info_fields(
            {"columns": rest, "tags": rest, "formatting": rest.get("formatting")}
        )
        if fields:
            made.take(target, fields, rest)
        if format:
            made.take("data.format", format, ["formatting"])


_COLUMNS = (
    "history",
    "system",
    "tools",
    "chosen",
    "rejected",
    "messages",
    ("prompt", "instruction"),
    ("query", "input"),
    ("response", "output"),
    ("kto_tag", "label"),
)
"""Columns of dataset_info.json, with furlong's field where that has another name."""
_KNOWN_ROLES = ("human", "gpt", "observation", "function_call", "user", "assistant", "system")


def _info_fields(info: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """`fields` and `format` of an entry of LLaMA-Factory's dataset_info.json."""
    columns, tags = info.get("columns") or {}, info.get("tags") or {}
    kind, is_ranking = info.get("formatting") or "alpaca", bool(info.get("ranking"))
    if kind == "sharegpt":
        columns = {"messages": "conversations"} | columns
        tags = {"role_tag": "from", "content_tag": "value"} | tags
    pairs = [(one, one) if isinstance(one, str) else one for one in _COLUMNS]
    fields = {ours: columns[theirs] for theirs, ours in pairs if theirs in columns}
    for theirs, ours in (("messages", "prompt"), ("instruction", "prompt")):
        if is_ranking and theirs in fields:  # what is asked, before two answers
            fields[ours] = fields.pop(theirs)
    if kind != "alpaca":
        fields |= {
            name: tags[f"{name}_tag"] for name in ("role", "content") if f"{name}_tag" in tags
        }
        roles = {
            "user": "user",
            "assistant": "assistant",
            "system": "system",
            "observation": "tool",
        }
        named = {tags[f"{tag}_tag"]: role for tag, role in roles.items() if f"{tag}_tag" in tags}
        fields["roles"] = {name: role for name, role in named.items() if name not in _KNOWN_ROLES}
    fields = {ours: theirs for ours, theirs in fields.items() if theirs and ours != theirs}
    plain = "alpaca" if kind == "alpaca" and columns else "chat" if kind != "alpaca" else None
    return fields, "preference" if is_ranking else plain


def _sources(made: Conversion, target: str, given: _Given) -> None:
    readers: dict[str, Callable[[Conversion, _Given], list[dict[str, Any]]]] = {
        "axolotl": _axolotl_sources,
        "LLaMA-Factory": _named_sources,
        "ms-swift": _swift_sources,
        "open-instruct": _mixed_sources,
        "Arctic Training": _arctic_sources,
        "torchtune": _torchtune_sources,
    }
    found = readers.get(made.recipe.dialect, _trl_sources)(made, given)
    plain = [one["path"] if one.keys() == {"path"} else one for one in found]
    unread = {name: verdict for name, verdict in made.verdicts.items() if name in given}
    made.take(target, plain[0] if len(plain) == 1 else plain, given)
    made.verdicts |= unread
    if made.recipe.dialect == "open-instruct" or "batch_method" in made.recipe.keys:
        numpy = {"dataset_path", "train_file"} & given.keys()
        made.cannot("npy files are not read: write input_ids into .parquet files", numpy)
    if "tokenized_mds_train" in given:
        if made.value("apply_instruct_masks"):
            made.take("data.fields", {"labels": "mask"}, ["apply_instruct_masks"])
        if isinstance(length := made.value("per_device_max_tokens"), int):
            made.run["data.max_seq_len"] = length


_USUAL_OF_AXOLOTL = {
    "roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]),
    "train_on_eos": ("turn",),
    "chat_template": ("tokenizer_default",),
}
"""Values of a source's keys that mean what furlong does."""
_DATA_FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst")
_OF_AXOLOTL_SOURCES = (
    "path name split revision data_files type field text_column ds_type field_messages"
    " message_property_mappings message_field_role message_field_content roles field_chosen"
    " field_rejected trust_remote_code preprocess_shards"
)
"""Keys of a source that are read, or that other trainers set by themselves."""


def _axolotl_sources(made: Conversion, given: _Given) -> list[dict[str, Any]]:
    found = []
    named = given.get("datasets") or given["pretraining_dataset"]
    if named == given.get("pretraining_dataset") and isinstance(named, str):
        named = [{"path": named, "type": "pretrain"}]
    for one in named:
        source: dict[str, Any] = {"path": one["path"]}
        files = one.get("data_files") or []
        files = [files] if isinstance(files, str) else files
        if one["path"] in ("json", "csv", "parquet", "text") or one["path"].endswith(_DATA_FILES):
            paths = files or [one["path"]]
        else:
            paths = [f"hf://datasets/{one['path']}/{file}" for file in files] or [one["path"]]
        for name in ("name", "split", "revision"):
            if one.get(name) and not (files and name == "split"):
                source[name] = one[name]
        kind, _, style = str(one.get("type") or "").partition(".")
        fields: dict[str, Any] = {}
        if kind in ("completion", "pretrain", "pretraining_dataset"):
            source["format"] = "text"
            text = one.get("field") or one.get("text_column") or "text"
            fields = {} if text == "text" else {"text": text}
        elif kind in ("alpaca", "sharegpt"):
            source["format"] = kind
        elif kind == "chat_template" or (made.value("rl") in ("dpo", "kto") and kind):
            source["format"] = (
                "chat" if kind == "chat_template" and not made.value("rl") else "auto"
            )
            if one.get("field_messages", "messages") != "messages":
                fields["messages"] = one["field_messages"]
            inner = dict(one.get("message_property_mappings") or {})
            inner |= {
                k: one[f"message_field_{k}"]
                for k in ("role", "content")
                if one.get(f"message_field_{k}")
            }
            fields |= {ours: theirs for ours, theirs in inner.items() if ours != theirs}
            for role, theirs in (one.get("roles") or {}).items():
                fields.setdefault("roles", {}).update(
                    {name: role for name in theirs if name != role}
                )
            for name in ("chosen", "rejected"):
                if one.get(f"field_{name}", name) != name:
                    fields[name] = one[f"field_{name}"]
        elif kind:
            made.cannot(f"datasets.type {kind}.{style}".rstrip(".") + " is not known", ["datasets"])
        usual = {*_OF_AXOLOTL_SOURCES.split()} | {
            name
            for name, values in _USUAL_OF_AXOLOTL.items()
            if one.get(name) in (None, *values, made.recipe.keys.get(name))
        }
        _cannot_in_sources(made, "datasets", {n: v for n, v in one.items() if n not in usual})
        source |= {"fields": fields} if fields else {}
        found += [source | {"path": path} for path in paths]
    formats = {source.get("format") for source in found}
    if formats == {"alpaca"} or formats == {"alpaca", "text"}:
        made.run["data.chat_template"] = "alpaca"
    elif "alpaca" in formats:
        made.cannot("Alpaca's words and a chat template: two runs, or one of both", ["datasets"])
    return found


def _cannot_in_sources(made: Conversion, name: str, unread: Mapping[str, Any]) -> None:
    """The verdict on keys within sources."""
    if unread := {key: value for key, value in unread.items() if value is not None}:
        others = made.recipe.keys.setdefault(f"{name}[]", {})
        others |= unread
        made.cannot(f"in a source: {', '.join(sorted(others))}", [f"{name}[]"])


_OF_INFO = (("subset", "name"), ("split", "split"), ("num_samples", "limit"), ("size", "limit"))


def _named_sources(made: Conversion, given: _Given) -> list[dict[str, Any]]:
    """Names of LLaMA-Factory, as dataset_info.json beside the recipe explains them, or as a YAML
    file does in its version 1."""
    names = given.get("dataset") or given["train_dataset"]
    names = names if isinstance(names, list) else [name.strip() for name in str(names).split(",")]
    folder = str(given.get("dataset_dir", "data"))
    above: list[str | Path] = ["", *made.recipe.file.resolve().parents]
    entries: dict[str, Any] = {}
    base = Path()
    is_list = str(names[0]).endswith((".yaml", ".yml"))
    for file in (
        Path(one, names[0] if is_list else f"{folder}/dataset_info.json") for one in above
    ):
        if file.is_file():
            entries = read_yaml(file.read_text(encoding="utf-8"), str(file), "mend the line")
            base = file.parent
            break
    found = []
    for name in entries if is_list else names:
        entry = entries.get(name)
        if entry is None:
            if "/" not in name and not Path(name).exists():
                made.cannot(
                    "no dataset_info.json is near that explains it: write data.train", given
                )
            found.append({"path": name})
            continue
        of_hub = entry.get("hf_hub_url") or entry.get("ms_hub_url") or entry.get("path")
        source = {"path": of_hub or str(base / entry["file_name"])}
        source |= {"format": entry["converter"]} if entry.get("converter") == "alpaca" else {}
        for theirs, ours in _OF_INFO:
            if entry.get(theirs) and of_hub:
                source[ours] = entry[theirs]
        fields, format = _info_fields(entry)
        if made.run.get("data.format") == "text":
            text = (entry.get("columns") or {}).get("prompt", "instruction")
            fields, format = {} if text == "text" else {"text": text}, None
        elif made.run.get("train.loss") == "kto":
            format = None
        source |= ({"fields": fields} if fields else {}) | ({"format": format} if format else {})
        found.append(source)
    if not found:
        made.cannot(f"there is no {names[0]}: write data.train", given)
    return found or [{"path": name} for name in names]


def _swift_sources(made: Conversion, given: _Given) -> list[dict[str, Any]]:
    """`id`, `id:subset#1000`, files and folders."""
    names = given.get("dataset")
    found = []
    for name in names if isinstance(names, list) else [names]:
        path, _, limit = str(name).partition("#")
        path = re.sub(r"^(HF|MS)::", "", path)
        path, _, subset = path.partition(":")
        source: dict[str, Any] = {"path": path}
        source |= {"name": subset} if subset and subset != "default" else {}
        found.append(source | ({"limit": int(limit)} if limit else {}))
    return found


def _mixed_sources(made: Conversion, given: _Given) -> list[dict[str, Any]]:
    """open-instruct's list of ids, each with its weight, or with its number of records."""
    words = next((given[n] for n in ("mixer_list", "dataset_mixer_list") if n in given), None)
    if words is None:
        return [{"path": str(next(iter(given.values())))}]
    found = []
    for path, amount in zip(words[::2], words[1::2], strict=True):
        is_share = isinstance(amount, float)
        measure = {"weight": amount} if is_share else {"limit": amount}
        found.append({"path": path} | ({} if amount == 1.0 and is_share else measure))
    return found


def _arctic_sources(made: Conversion, given: _Given) -> list[dict[str, Any]]:
    found = []
    for one in next(value for name, value in given.items() if name.endswith("sources")):
        source = {"path": one["name_or_path"]}
        source |= {"split": one["split"]} if one.get("split") else {}
        source |= {"weight": one["sample_ratio"]} if one.get("sample_ratio") else {}
        source |= {"limit": one["sample_count"]} if one.get("sample_count") else {}
        mapping = one.get("role_mapping") or {}
        if any(not str(where).startswith("messages.role.") for where in mapping.values()):
            made.cannot("a role that is no message's", given)
        found.append(source | ({"format": "chat"} if "instruct" in str(one.get("type")) else {}))
    return found


def _torchtune_sources(made: Conversion, given: _Given) -> list[dict[str, Any]]:
    values = next(iter(given.values()))
    if not isinstance(values, Mapping):
        raise ValueError("no mapping")
    kind = str(values.get("_component_", "")).rpartition(".")[2]
    usual = {
        "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca"),
        "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca"),
        "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", "sharegpt"),
        "text_completion_dataset": ("", "text"),
        "chat_dataset": (
            "",
            "sharegpt" if values.get("conversation_style") == "sharegpt" else "chat",
        ),
    }
    path, format = usual.get(kind, ("", ""))
    source: dict[str, Any] = {"path": values.get("data_files") or values.get("source") or path}
    if not source["path"] or source["path"] in ("json", "csv"):
        raise ValueError(kind)
    source |= {"format": format} if format else {}
    source |= {"split": values["split"]} if values.get("split") else {}
    source |= {"name": values["name"]} if values.get("name") else {}
    if values.get("train_on_input", "alpaca" in kind):
        made.run["data.train_on"] = "all"
    if values.get("conversation_column"):
        source["fields"] = {"messages": values["conversation_column"]}
    known = (
        "_component_ source data_files split name column conversation_style conversation_column"
        " packed split_across_pack train_on_input"
    )
    unread = {n: v for n, v in values.items() if n not in known.split()}
    _cannot_in_sources(made, "dataset", unread)
    if kind == "text_completion_dataset" and values.get("column", "text") != "text":
        source["fields"] = {"text": values["column"]}
    return [source]


def _trl_sources(made: Conversion, given: _Given) -> list[dict[str, Any]]:
    mixture = given.get("dataset_mixture") or {"datasets": given.get("datasets")}
    found = []
    for one in mixture["datasets"] or []:
        source = {"path": one.get("id") or one["path"]}
        weight, config = one.get("weight"), one.get("config") or one.get("name")
        source |= {"name": config} if config else {}
        source |= {"split": one["split"]} if one.get("split") else {}
        known = ("id", "path", "config", "name", "split", "columns", "weight")
        _cannot_in_sources(made, "datasets", {n: v for n, v in one.items() if n not in known})
        found.append(source | ({"weight": weight} if weight not in (None, 1, 1.0) else {}))
    if mixture.get("test_split_size"):
        made.run["data.eval_share"] = mixture["test_split_size"]
    if found:
        return found
    names = ("dataset_name", "train_file", "train_files", "train_file_path", "dataset", "data_path")
    values = next((given[name] for name in (*names, "tokenized_mds_train") if name in given), None)
    if values is None:
        raise ValueError("no name of a data set")
    for value in values if isinstance(values, list) else [values]:
        path, _, share = str(value).partition("@")  # ProLong: folder@share of the tokens
        source = {"path": path}
        if share and float(share) < 1:
            source["share"] = float(share)
        config = given.get("dataset_config") or given.get("dataset_config_name")
        source |= {"name": config} if config else {}
        split = given.get("dataset_train_split")
        found.append(source | ({"split": split} if split and split != "train" else {}))
    return found


def _eval_sources(made: Conversion, target: str, given: _Given) -> None:
    if "dataset_test_split" in given:
        path = made.value("dataset_name")
        if path and made.value("eval_strategy") not in (None, "no"):
            config = made.value("dataset_config", "dataset_config_name")
            source = {"path": path, "split": given["dataset_test_split"]}
            made.take(target, source | ({"name": config} if config else {}), given)
        else:
            made.need_not("nothing is evaluated", given)
        return
    sources = Conversion(made.recipe, made.num_processes)
    sources.run |= {key: made.run[key] for key in ("train.loss", "data.format") if key in made.run}
    value = _last(made, given)
    named = {"datasets": value, "dataset": value, "data.sources": value}
    if (folder := made.value("dataset_dir")) is not None:
        named["dataset_dir"] = folder
    _sources(sources, "data.eval", named)
    unread = [one.text for one in sources.verdicts.values() if one.kind == "refused"]
    if "data.eval" in sources.run:
        made.take(target, sources.run["data.eval"], given)
    if unread or "data.eval" not in sources.run:
        made.cannot("; ".join(unread) or "its sources are not understood", given)


_BY_TARGET: dict[str, Callable[[Conversion, str, _Given], None]] = {
    "model.name": _model,
    "model.tokenizer": _tokenizer,
    "model.dtype": _dtype,
    "model.quantize": _quantize,
    "model.lora": _adapters,
    **{
        f"model.lora.{name}": _of_adapters
        for name in (
            "rank",
            "alpha",
            "dropout",
            "target_modules",
            "rslora",
            "modules_to_save",
            "target_parameters",
            "adapter",
        )
    },
    "model.rope": _rope,
    "model.rope.rope_theta": lambda made, _, given: _rope(made, "model.rope", given),
    "memory.device": lambda made, _, given: made.need_not("devices are found", given),
    "data.train": _sources,
    "data.eval": _eval_sources,
    "data.eval_share": _share,
    "data.fields": _fields,
    "data.chat_template": _template,
    "data.chat_template_kwargs": _thinking,
    "data.train_on": _train_on,
    "data.eos_token": _special_tokens,
    "data.max_seq_len": _length,
    "data.too_long": _too_long,
    "data.join": _join,
    "data.cache_dir": _cache_dir,
    "data.streaming": _flag,
    "train.sequences_per_step": _batch,
    "train.tokens_per_step": _max_tokens,
    "train.steps": _steps,
    "train.min_lr": _min_lr,
    "train.warmup_steps": _warmup,
    "train.schedule": _schedule,
    "train.optimizer": _optimizer,
    "train.betas": _betas,
    "train.groups": _groups,
    "train.max_grad_norm": _grad_norm,
    "train.state_dtype": _state_dtype,
    "train.save_every_steps": _saves,
    "train.eval_every_steps": _saves,
    "train.saves_per_epoch": _per_epoch,
    "train.evals_per_epoch": _per_epoch,
    "train.num_checkpoints": _num_checkpoints,
    "train.save_weights_only": _flag,
    "train.keep_best": _flag,
    "train.loss": _loss,
    "train.beta": _of_pairs,
    "train.loss_type": _loss_type,
    "train.sft_weight": _of_pairs,
    "train.label_smoothing": _of_pairs,
    "parallel.sp": _parallel,
    "parallel.pp": _parallel,
    "log.wandb": _trackers,
    "hub": _hub,
    "out": _out,
}
"""By a key of ours, what reads the keys of theirs that go into it; else their value is ours."""
