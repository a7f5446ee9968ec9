"""Convert a recipe of another trainer to the values of a run, with a verdict on each of its keys.

Keys and values that only have other names here are in the tables of foreign.yaml.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from furlong.config.foreign import Kind, Verdict, answer_to, foreign_table
from furlong.config.messages import config_error, key_at, meet
from furlong.config.recipes import Recipe, file_near
from furlong.config.schema import RunConfig, all_keys, words_of
from furlong.config.sources import check_sections, put, read_yaml
from furlong.errors import FLOAT16, refusal

_Given = dict[str, Any]
"""Values by a recipe's keys, all of which determine one key of furlong."""
_needless = partial(Verdict, "needless")
_lost = partial(Verdict, "lost")
_refused = partial(Verdict, "refused")


class Conversion:
    """The state of a conversion: a recipe, the run made of it so far, and a verdict on each key of
    the recipe.

    In this module "ours" is furlong's, and a `target` is a key of furlong.
    """

    def __init__(
        self, recipe: Recipe, num_processes: int | None, of_flags: Iterable[str] = ()
    ) -> None:
        self.recipe = recipe
        self.num_processes = num_processes or recipe.num_processes
        self.run: dict[str, Any] = {}
        """Values by key, such as `train.lr`."""
        self.given: dict[str, _Given] = {}
        """By target, the recipe's keys for it with their values, and the trainer's defaults."""
        self.verdicts: dict[str, Verdict] = {}
        """Verdicts by key, as the recipe writes it."""
        self.known_config: Mapping[str, Any] = {}
        """The config of a model that is known by its name; empty for others."""
        self.of_flags = set(of_flags)
        """Our keys that the command line gives."""
        self.loss_given: Any = None
        """The loss that the command line gives, which overrides the recipe's."""
        self.of_defaults: set[str] = set()
        """Our keys whose value is a default of the other trainer."""
        self.remarks: dict[str, str] = {}
        """Remarks for the reader, by our key."""

    @property
    def values(self) -> dict[str, Any]:
        """The values of the run, in nested sections."""
        nested: dict[str, Any] = {}
        order = list(RunConfig.model_fields)
        for key in sorted(self.run, key=lambda key: order.index(key.partition(".")[0])):
            put(nested, key, self.run[key])
        return nested

    @property
    def is_whole(self) -> bool:
        """Whether the run computes the same as the recipe: no key of the recipe is refused."""
        return all(verdict.kind != "refused" for verdict in self.verdicts.values())

    @property
    def is_sft(self) -> bool:
        """Whether the loss is the cross-entropy of labels."""
        return (self.loss_given or self.run.get("train.loss")) in (None, "sft")

    def value(self, *names: str) -> Any:
        """Return the value of the recipe's first key with one of these names, or else the trainer's
        default, or None."""
        for values in (self.recipe.keys, self.recipe.defaults):
            for key, value in values.items():
                if key.rpartition(".")[2].replace("-", "_") in names and value is not None:
                    return value
        return None

    def own(self, given: _Given) -> _Given:
        """Return those items of `given` whose keys the recipe itself has, without the trainer's
        defaults. `given`: the recipe's keys and the defaults for one key of furlong."""
        return {name: value for name, value in given.items() if name in self.recipe.keys}

    def last(self, given: _Given) -> Any:
        """Return the value of the last key in `given` that the recipe itself has, or else the
        trainer's default."""
        own = self.own(given)
        return [*own.values()][-1] if own else next(iter(given.values()))

    def theirs(self, target: str) -> Any:
        """Return the recipe's value, or the trainer's default, for furlong's key `target`; None if
        there is neither."""
        return self.last(given) if (given := self.given.get(target)) else None

    def say(self, verdict: Verdict, names: Iterable[str]) -> None:
        """Set the verdict on those of the keys `names` that the recipe itself has."""
        self.verdicts |= {name: verdict for name in names if name in self.recipe.keys}

    def take(self, target: str, value: Any) -> Verdict:
        """Set furlong's key `target` to a value, and return the verdict that names the key."""
        self.run[target] = value
        return Verdict("ours", target)


def convert(
    recipe: Recipe,
    num_processes: int | None,
    flags: Mapping[str, Any] | None = None,
    *,
    config_of: Callable[[str], Mapping[str, Any]] = lambda name: {},
) -> Conversion:
    """Return the conversion of a recipe. `flags` (values by furlong's keys) override the recipe.
    `config_of` returns the config of a known model by its name, or an empty one. Raises ConfigError
    for a recipe of an unsupported loss, and for a run that lacks a required key."""
    made = Conversion(recipe, num_processes, flags or ())
    made.loss_given = (flags or {}).get("train.loss")
    for name, value in (recipe.defaults | recipe.keys).items():
        verdict = _verdict(name, value)
        if verdict.kind == "ours":
            made.given.setdefault(verdict.text, {})[name] = value
        else:
            made.say(verdict, [name])
    if recipe.loss_by_keys and "train.loss" not in made.of_flags:
        made.run["train.loss"] = _loss(made, "train.loss", {"": recipe.loss_by_keys})
        if "beta" in recipe.keys and "loss_type" not in recipe.keys:
            made.remarks["train.loss"] = "inferred from beta, which KTO and ORPO have, too"
    order = [text.partition(",")[0] for text in foreign_table()["ours"]]
    for target in sorted(made.given, key=lambda key: [*order, key].index(key)):
        _read(made, target, made.given[target])
    for key, value in (flags or {}).items():
        _put(made, key, value)
    made.known_config = config_of(str(made.run.get("model.name")))
    _finish(made)
    return made


_OF_PLANS = ("chunks.", "offload.", "memory.")
"""Sections whose keys, such as size, mean something else in other trainers."""
_PLAIN_PLUGINS = r"cut_cross_entropy|\.liger\.|\.kernels\."
_COMPUTED = re.compile(r"\$(\w|\{|\()|^<[^|<>]* [^<>]*>$")
_OFF = (None, False, 0, "", "false", "none", "no", "null", "off")


def _verdict(name: str, value: Any) -> Verdict:
    """Return the verdict of foreign.yaml on another trainer's key with a value. If furlong has such
    a key, the verdict's text is the name of that key."""
    answer = answer_to(name)
    if value is None or value in ("", [], {}):
        return _needless("it has no value")
    if isinstance(value, str) and _COMPUTED.search(value):
        is_place = answer is not None and answer.target in ("out", "log.name")
        kind: Kind = "lost" if is_place else "refused"
        key = answer.target if answer is not None and answer.kind == "ours" else "furlong's key"
        return Verdict(kind, f"its script computes it: set {key}")
    if answer is None:
        last = f".{name}".rpartition(".")[2]
        own = [
            key for key in all_keys() if key.endswith(f".{last}") and not key.startswith(_OF_PLANS)
        ]
        return Verdict("ours", own[0]) if len(own) == 1 else _refused("furlong does not know it")
    if answer.kind == "ours":
        return Verdict("ours", answer.target)
    if name == "resume_from_checkpoint" and isinstance(value, str) and "/" in value:
        return _refused("write model.name: the export of the run that it goes on from")
    plugins = value if name == "plugins" and isinstance(value, list) else []
    if plugins and all(re.search(_PLAIN_PLUGINS, str(one)) for one in plugins):
        return _needless("other keys say what they do")
    if name == "deepspeed" and isinstance(value, Mapping) and value.get("scheduler"):
        return _refused("its scheduler takes the place of the recipe's: write train.schedule")
    words: list[str] = foreign_table()["harmless"].get(name, [""])
    if not any(word in str(value).lower() for word in words):
        return _refused(f"the same is computed only with {' or '.join(words)}")
    if name in ("deepspeed", "fsdp", "fsdp_config") and _offloads(value):
        return _lost("offload: {weights: cpu} keeps weights and optimizer states in CPU memory")
    if name == "deepspeed" and str(value).endswith(".json"):  # the file was not found
        return _needless(f"{answer.text}; {value} was not found: a scheduler in it would be missed")
    text = value.lower() if isinstance(value, str) else value
    is_off = text in _OFF or (text == 1 and name.endswith(("size", "degree", "tp")))
    return _needless(answer.text) if is_off else answer


def _offloads(value: Any) -> bool:
    """Return whether a setting of DeepSpeed or FSDP keeps weights or states on the CPU."""
    if isinstance(value, Mapping):
        found = (_offloads(one) or ("offload" in str(key) and one) for key, one in value.items())
        return any(found)
    return isinstance(value, str) and "offload" in value


def _read(made: Conversion, target: str, given: _Given) -> None:
    """Convert the recipe's keys `given` to furlong's key `target`, or record why not."""
    try:
        if target.startswith("model.lora.") and (why := _lora_needless(made, target, given)):
            found: Any = _needless(why)
        else:
            found = _BY_TARGET.get(target, _same)(made, target, given)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        found = _refused(f"its value is not understood ({error})")
    if found is None:
        return
    verdict = found if isinstance(found, Verdict) else made.take(target, found)
    if verdict.kind == "ours" and not made.own(given):
        made.of_defaults.add(verdict.text)
    made.say(verdict, [name for name in given if name not in made.verdicts])


def _put(made: Conversion, key: str, value: Any) -> None:
    """Set furlong's `key` to a value of the command line, which replaces the recipe's."""
    made.run = {own: one for own, one in made.run.items() if not own.startswith(f"{key}.")}
    made.run[key] = value
    made.remarks.pop(key, None)
    for name, verdict in made.verdicts.items():
        answer = answer_to(name)
        is_of_key = (answer is not None and answer.target == key) or f"write {key}" in verdict.text
        if is_of_key and verdict.kind == "refused":
            made.say(_needless(f"--{key} is given"), [name])


_ASIDE = ("log.", "hub", "out", "train.save", "train.num_", "data.streaming")
"""Keys that do not change what is computed."""


def _finish(made: Conversion) -> None:
    """Add values that no single key determines, and validate the run. Raises ConfigError if a
    required key is missing.

    Values that the schema refuses are removed, each with a verdict that says why.
    """
    if made.recipe.doubt:
        made.remarks["data.train"] = made.recipe.doubt
    if made.run.get("data.join") is True:
        made.run["data.too_long"] = "split"
    elif "data.max_seq_len" not in made.run and "data.too_long" in made.of_defaults:
        del made.run["data.too_long"]  # there is no limit
    if made.recipe.dialect == "ms-swift" and "train.lr" not in made.run:
        made.run["train.lr"] = 1e-4 if "model.lora.rank" in made.run else 1e-5
    _add_router_loss(made)
    _finish_new_tokens(made)
    is_axolotl = made.recipe.dialect == "axolotl"
    if is_axolotl and "pretraining_dataset" in made.given.get("data.train", ()):
        # it streams texts, and cuts them into windows if it packs
        is_windows = made.value("sample_packing") is True
        made.run["data.too_long"] = "split" if is_windows else "truncate"
        made.of_defaults.discard("data.too_long")
        if is_windows:
            remark = "axolotl's windows share 256 tokens, here they share none"
            made.remarks["data.too_long"] = remark
        if isinstance(made.run.get("train.steps"), int):
            made.run["data.streaming"] = True
    source = str(made.recipe.file)
    while True:
        try:
            RunConfig.model_validate(check_sections(made.values, source))
            return _check_positions(made)
        except ValidationError as error:
            errors = error.errors()
        given_up = [_give_up(made, one) for one in errors]
        for name, verdict in made.verdicts.items():
            answer = answer_to(name)
            is_data = answer is not None and answer.target == "data.train"
            if is_data and verdict.kind == "refused" and "data.train" not in made.run:
                change = "mend it, or give the data: --data.train=..."
                raise refusal(f"{name}: {verdict.text}", "sources of data", change, source)
        if not any(given_up):
            raise config_error(errors, source, set())


def _give_up(made: Conversion, error: ErrorDetails) -> bool:
    """Remove the first value of the run that a schema error is about, and give the recipe's keys
    for it a verdict that says why. Return whether a value was removed, which is false for a missing
    key. Raises ConfigError for a value that only the user can fix: the model, the data or a
    flag."""
    keys = error.get("ctx", {}).get("keys", key_at(error["loc"])).split(" and ")
    found = [key for own in keys for key in made.run if meet(key, own)]
    if not found or error["type"] == "missing":
        return False
    target = found[0]
    if target in ("model.name", "data.train") or target in made.of_flags:
        raise config_error([error], str(made.recipe.file), {f"--{key}" for key in made.of_flags})
    value, words = made.run.pop(target), words_of(error)
    made.remarks.pop(target, None)
    reason = foreign_table()["otherwise"].get(target, f"{target} takes {words}, not {value!r}")
    if error["type"] == "extra_forbidden":
        reason = f"there is no {key_at(error['loc'])}"
    elif error["type"] == "told":
        reason = f"{target}: {words}"
    kind: Kind = "lost" if target.startswith(_ASIDE) else "refused"
    made.say(Verdict(kind, reason), [n for n, one in made.verdicts.items() if one.text == target])
    return True


def _word(target: str, value: Any) -> str:
    """Return furlong's word for another trainer's value of the key `target`: "truncate" for
    "keep_start" of `data.too_long`. A value that foreign.yaml does not list is returned in lower
    case, without the part before its last dot."""
    word = str(value).lower().rpartition(".")[2]
    words: dict[str, list[str]] = foreign_table()["values"][target]
    return next((ours for ours, theirs in words.items() if word in theirs), word)


def _same(made: Conversion, target: str, given: _Given) -> Any:
    if len({repr(value) for value in made.own(given).values()}) > 1:
        return _refused("two values for one key of furlong")
    value = made.last(given)
    if target == "model.tokenizer" and value == made.run.get("model.name"):
        return _needless("it is the model's own")
    return _word(target, value) if target in foreign_table()["values"] else value


_VISION = (
    r"(?<!Qwen3-)VL-|(?i:(?<![a-z])((?<!qwen3-)vl2?|vision|omni|audio|tts|asr|ocr|speech|multimodal|[45](\.\d)?v)(?![a-z])|"
    r"ovis|emu3|janus|molmo|florence|cogvlm|cogagent|whisper|gemma-?3n|llava|pixtral|internvl|paligemma|idefics|"
    r"smolvlm|minicpm-[vo]|voxtral)"
)
_TRAINED_TEXT = ("gemma3", "gemma4", "llama4", "mistral3", "qwen3_5", "qwen3_5_moe", "qwen3_vl")
"""Model types with vision of which the text decoder trains; names of others match `_VISION`."""


def _model(made: Conversion, target: str, given: _Given) -> Any:
    if "model_name" in given and len(given) > 1:  # a persona, in ms-swift
        made.say(_refused("a persona belongs in the records"), ["model_name"])
        del given["model_name"]
    name = made.last(given)
    refs = {one: made.recipe.keys.get(one) for one in ("ref_model", "ref_model_name_or_path")}
    others = [one for one, value in refs.items() if value not in (None, "", name)]
    made.say(_refused("the reference model is the one that a run starts from"), others)
    config = _config_at_hand(name)
    is_trained = config.get("model_type") in _TRAINED_TEXT
    if re.search(_VISION, str(name)) or ("vision_config" in config and not is_trained):
        made.say(_refused("a model with vision of a type whose text does not train"), given)
    return name


def _config_at_hand(name: Any) -> Mapping[str, Any]:
    """Return the config in a model's folder; empty if it is not a local folder."""
    try:
        file = Path(str(name), "config.json").expanduser()
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, Mapping) else {}


def _check_positions(made: Conversion) -> None:
    """Refuse a sequence length above the max_position_embeddings of a local or known model, unless
    the run sets `model.rope`: the recipe's key for the length gets a verdict with advice."""
    config = _config_at_hand(made.run.get("model.name"))
    config = config.get("text_config") or config or made.known_config
    positions, length = config.get("max_position_embeddings"), made.run.get("data.max_seq_len")
    # all known models have RoPE, and their configs leave out defaults
    has_rope = config is made.known_config or any(key.startswith("rope") for key in config)
    has_rope &= "model.rope" not in made.run
    if has_rope and isinstance(positions, int) and isinstance(length, int) and length > positions:
        reason = f"the model has {positions:,} positions: add --data.max_seq_len={positions}"
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if rope.get("rope_type", rope.get("type", "default")) == "default":
            factor = math.ceil(length / positions)
            reason += f", or --model.rope={{rope_type: yarn, factor: {factor}}}"
        of_length = made.own(made.given.get("data.max_seq_len", {}))
        made.say(_refused(reason), of_length or made.given["model.name"])


def _dtype(made: Conversion, target: str, given: _Given) -> Any:
    named = [given[name] for name in ("torch_dtype", "dtype", "mixed_precision") if name in given]
    dtype = _word(target, named[0]) if named else "bfloat16"
    if given.get("fp16") is True or dtype in ("float16", "fp16"):
        return _refused(f"{FLOAT16}: write bfloat16")
    if not named and given.get("bf16", given.get("pure_bf16")) is False and "fp16" not in given:
        return "float32"
    default = _needless("bfloat16 is the default; trained weights stay float32")
    return default if dtype == "bfloat16" else dtype


def _adapters(made: Conversion, target: str, given: _Given) -> Any:
    kind = made.last(given)
    options = dict(kind) if isinstance(kind, Mapping) else {}
    word = str(options.pop("name", "lora") if options else kind).lower()
    if word in ("full", "none", "false", "no"):
        return _needless("every weight is trained without model.lora")
    if word not in ("lora", "qlora", "true"):
        return _refused("adapters are LoRA only, and weights cannot be frozen in part")
    taken = made.take("model.lora.rank", 8)
    for name, value in options.items():
        ours = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout"}.get(name, name)
        if f"model.lora.{ours}" in all_keys():
            made.run[f"model.lora.{ours}"] = "all-linear" if value == "all" else value
        elif value not in _OFF:
            return _refused(f"model.lora has no {name}")
    return taken


def _lora_needless(made: Conversion, target: str, given: _Given) -> str:
    """Return why an option of LoRA has no effect, or an empty text. Some trainers write such
    options although every weight is trained."""
    if made.recipe.dialect == "torchtune" and made.own(given):
        made.run.setdefault("model.lora.rank", 8)
    if "model.lora.rank" not in made.run:
        return "every weight is trained"
    is_of_pairs = target.endswith("dropout") and not made.is_sft
    return "preference losses are computed without dropout, there too" * is_of_pairs


def _rank(made: Conversion, target: str, given: _Given) -> Any:
    rank = made.last(given)
    if made.recipe.dialect == "LLaMA-Factory":
        made.run.setdefault("model.lora.alpha", 2 * int(rank))
    return rank


_NO_MODULES = frozenset(("none", "all-router", "all-embedding", "all-norm"))


def _target_modules(made: Conversion, target: str, given: _Given) -> Any:
    if given.get("lora_target_linear") is False:
        del given["lora_target_linear"]
        made.say(_needless("the modules are named"), ["lora_target_linear"])
    value = made.last(given) if given else "none"
    all_of_them = ("all", "all-linear", ["all-linear"])
    if given.get("lora_target_linear") is True or value in all_of_them:
        return "all-linear"
    if not _NO_MODULES.isdisjoint(value if isinstance(value, list) else [value]):
        reason = "write model.lora.target_modules: the names of the layers"
        made.say(_refused(reason), [*given, "lora_target_linear"])
        return None
    if made.recipe.dialect == "torchtune":
        names = made.value("lora_attn_modules") or []
        of_mlp = ["gate_proj", "up_proj", "down_proj"] * bool(made.value("apply_lora_to_mlp"))
        return ["o_proj" if name == "output_proj" else name for name in names] + of_mlp
    return re.split(r"\s*,\s*", value) if isinstance(value, str) and "," in value else value


def _quantize(made: Conversion, target: str, given: _Given) -> Any:
    bits = given.get("quantization_bit", given.get("quant_bits"))
    method = str(made.value("quant_method", "quantization_method") or "bnb").lower()
    builder = str(given.get("model._component_", "")).rpartition(".")[2]  # torchtune's
    if re.search("dora|classifier|reward|vision|clip|flamingo", builder):
        return _refused(f"{builder}: only text models are trained, with LoRA or all weights")
    flags = ("load_in_4bit", "use_qlora", "quantize_base", "model.quantize_base")
    is_four = bits == 4 or builder.startswith("qlora") or any(given.get(n) is True for n in flags)
    if not is_four and bits is None:
        return _needless("nothing is quantized")
    if bits not in (None, 4) or method not in ("bnb", "bitsandbytes"):
        return _refused("model.quantize has nf4 and fp4 of bitsandbytes")
    kind = made.value("bnb_4bit_quant_type", "quantization_type") or "nf4"
    double = made.value("bnb_4bit_use_double_quant", "use_bnb_nested_quant", "double_quantization")
    return {"type": kind, "double": bool(double) or made.recipe.dialect == "torchtune"}


def _rope(made: Conversion, target: str, given: _Given) -> Any:
    if given.pop("max_model_len", None) is not None:
        reason = "data.max_seq_len is the length; RoPE's factor goes by it"
        made.say(_needless(reason), ["max_model_len"])
    rope: dict[str, Any] = {}
    for name, value in given.items():
        if name in ("model_init_kwargs", "overrides_of_model_config") and isinstance(
            value, Mapping
        ):
            own = value.get("rope_parameters") or value.get("rope_scaling") or {}
            rest = {key: one for key, one in value.items() if key not in _OF_ROPE}
            if (beside := _of_config(made, rest, is_init=name == "model_init_kwargs")) or not own:
                made.say(beside or _needless("the same is computed without"), [name])
            value = own
        elif name == "rope_scaling_factor":
            value = {"rope_type": "yarn", "factor": value}
        elif name == "rope_theta":
            value = {"rope_theta": value}
        elif isinstance(value, str) and "=" in value:
            pairs = (pair.partition("=") for pair in value.split(","))
            value = {key.strip(): json.loads(text) for key, _, text in pairs}
        elif isinstance(value, str):
            value = _scaled(made, value)
        if isinstance(value, Mapping):
            rope |= {"rope_type" if key == "type" else key: one for key, one in value.items()}
    if not given:
        return None
    if not rope and all(name in made.verdicts for name in given):
        return None
    if not rope:
        return _refused("its factor goes by the model's config: write model.rope with factor")
    return made.take("model.rope", {"rope_type": "default"} | rope)


_OF_ROPE = ("rope_parameters", "rope_scaling")


def _of_config(made: Conversion, keys: Mapping[str, Any], *, is_init: bool) -> Verdict | None:
    """Set keys of the model's config in the run, and return the verdict on the recipe's key; None
    if no key of the config is taken or refused.

    `keys`: the config's keys and values, without those of RoPE. `is_init`: whether the keys are
    arguments of from_pretrained, of which only the dtype and dropouts are taken.
    """
    verdict, unread = None, []
    for key, value in keys.items():
        answer = _verdict(key, value)
        if answer.text == "model.dtype":
            verdict = made.take("model.dtype", _word("model.dtype", value))
        elif not is_init or "dropout" in key or "pdrop" in key:
            made.run.setdefault("model.config", {})[key] = value
            verdict = Verdict("ours", "model.config")
        elif answer.kind in ("ours", "refused"):
            unread.append(key)
    return _refused(f"in it: {', '.join(unread)}") if unread else verdict


def _scaled(made: Conversion, kind: str) -> dict[str, Any] | None:
    """Return RoPE settings: the type `kind`, and the factor that the sequence length needs. None if
    the model's config or the length is unknown."""
    length = made.value("max_model_len", "cutoff_len", "max_length")
    config = _config_at_hand(made.run.get("model.name"))
    if not config or not isinstance(length, int):
        return None
    own = config.get("max_position_embeddings", length)
    return {"rope_type": kind, "factor": float(max(1, math.ceil(length / own)))}


def _length(made: Conversion, target: str, given: _Given) -> Any:
    if "data.too_long" not in made.run and made.theirs("data.too_long") is None:
        made.run["data.too_long"] = "truncate"
    is_of_answers = made.run.get("data.format") != "text" and "model" not in made.recipe.keys
    if made.recipe.dialect == "LLaMA-Factory" and is_of_answers:
        made.run["data.too_long"] = "error"
        made.of_defaults.discard("data.too_long")
        made.remarks["data.too_long"] = (
            "LLaMA-Factory shortens a long record's prompts and keeps its answers; here such a"
            " record is refused: raise data.max_seq_len to its length"
        )
    return made.last(given)


def _join(made: Conversion, target: str, given: _Given) -> Any:
    word, is_packed = made.last(given), made.value("packing") is True
    if word is True or (word == "wrapped" and is_packed):
        return True
    if word == "bfd_split" and is_packed:
        return made.take("data.too_long", "split")
    return _needless("sequences are always packed, isolated from each other")


def _rate(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


_MICRO = ("per_device_train_batch_size", "micro_batch_size", "batch_size", "train_batch_size")


def _batch(made: Conversion, target: str, given: _Given) -> Any:
    own = made.recipe.keys
    total = given.get("global_batch_size")
    if isinstance(total, int) and total > 10_000:  # in tokens
        return made.take("train.tokens_per_step", total)
    if total is None:
        said = (values.get(name) for values in (own, given) for name in _MICRO)
        micro = next(filter(None, said), 1)
        accumulated = made.value("gradient_accumulation_steps", "accumulate_grad_batches")
        is_said = made.recipe.dialect != "axolotl" or "gradient_accumulation_steps" in own
        if not is_said and own.get("batch_size"):  # per device, over all accumulated steps
            micro, accumulated = own["batch_size"], 1
        if accumulated is None and made.recipe.dialect == "ms-swift":  # up to 16 sequences
            accumulated = max(1, math.ceil(16 / micro / (made.num_processes or 1)))
        total = micro * (1 if accumulated is None else accumulated) * _replicas(made)
        if made.num_processes is None:
            made.remarks[target] = (
                "for one GPU, or as many as share a sequence; a recipe of more: --devices=N"
            )
    packs = ("sample_packing", "packing", "neat_packing", "pack_samples", "packed")
    dataset, length = own.get("dataset"), made.run.get("data.max_seq_len")
    is_packed = (
        any(made.value(name) is True for name in packs)
        or made.value("batch_method") == "pack"
        or "tokenized_mds_train" in own
        or (isinstance(dataset, Mapping) and dataset.get("packed") is True)
    )
    if is_packed and isinstance(length, int) and made.is_sft:
        is_apart = made.value("neat_packing") is True or "2" in str(made.value("flash_attn"))
        if made.recipe.dialect == "LLaMA-Factory" and not (is_apart or made.run.get("data.join")):
            reason = "packed sequences see each other there, without neat_packing; here they do not"
            made.say(_refused(reason), ["packing"])
        if remark := made.remarks.pop(target, ""):
            made.remarks["train.tokens_per_step"] = remark
        return made.take("train.tokens_per_step", total * length)
    return total


_SHARING = re.compile(
    r"((sequence_parallel|context_parallel|seq_parallel|cp_|tensor_|pipeline_).*(size|degree)"
    r"|parallelism_config_(cp|sp|tp)_size)$"
)
"""Keys with the number of processes that share a sequence or a layer."""


def _replicas(made: Conversion) -> int:
    """Return the number of data-parallel replicas, which have different sequences; 1 if unknown."""
    keys = made.recipe.keys
    inner = keys.get("parallelism_config")
    shared = 1
    for key, value in chain(keys.items(), inner.items() if isinstance(inner, Mapping) else ()):
        if _SHARING.match(key.rpartition(".")[2]) and isinstance(value, int):
            shared *= max(1, value)
    if (made.num_processes or shared) % shared:
        raise refusal(
            f"{made.num_processes} processes, of which {shared} share a sequence or a layer",
            f"a multiple of {shared}",
            "add --devices=N, the number of processes that the recipe is started with",
        )
    return (made.num_processes or shared) // shared


def _steps(made: Conversion, target: str, given: _Given) -> Any:
    number = made.last(given)
    if not isinstance(number, int) or number <= 0:
        return _needless("epochs decide")
    if made.run.pop("train.epochs", None) is not None:
        of_epochs = [n for n, one in made.verdicts.items() if one.text == "train.epochs"]
        made.say(_needless("the steps are given"), of_epochs)
    return number


def _min_lr(made: Conversion, target: str, given: _Given) -> Any:
    rate = _rate(made.run.get("train.lr"))
    known = {"min_lr_rate": rate, "min_lr_ratio": rate, "min_lr": 1.0, "eta_min": 1.0}
    floor = 0.0
    for name, value in given.items():
        if not isinstance(value, Mapping):
            floor = float(value) * (rate if "ratio" in name else 1.0)
        elif value.keys() <= known.keys():
            floor = sum(known[key] * float(one) for key, one in value.items())
        else:
            return _refused("the only option of schedules is min_lr")
    return float(f"{floor:.12g}")


def _warmup(made: Conversion, target: str, given: _Given) -> Any:
    is_megatron = "lr_decay_style" in made.given.get("train.schedule", {})  # its constant warms up
    if made.theirs("train.schedule") == "constant" and not is_megatron:
        made.run[target] = 0.0
        return _needless("constant has no warm-up")
    own = made.own(given)
    if made.recipe.dialect == "axolotl" and not own:  # 3 % of the steps, but no more than 100
        if isinstance(steps := made.run.get("train.steps"), int):
            return min(int(0.03 * steps), 100)
        made.remarks[target] = "axolotl's is at most 100 steps: write 100 for a run above 3,333"
    set_ones = {name: value for name, value in own.items() if value} or own or given
    in_steps = [value for name, value in set_ones.items() if name.endswith("steps")]
    return (in_steps or list(set_ones.values()))[-1]


def _optimizer(made: Conversion, target: str, given: _Given) -> Any:
    if given.get("use_muon") is True:
        return "muon"
    named = {name: value for name, value in given.items() if name != "use_muon"}
    if made.recipe.dialect == "torchtune" and str(made.last(named)).endswith(".Adam"):
        decay = made.given["train.weight_decay"]
        decay["weight_decay"] = 0.0
        if any(made.own(decay).values()):
            reason = "Adam adds it to the gradient, adamw decays the weights directly"
            made.say(_refused(reason), decay)
    return _word(target, made.last(named)) if named else _needless("adamw is the default")


def _betas(made: Conversion, target: str, given: _Given) -> Any:
    value = made.last(given)
    is_pair = isinstance(value, list | tuple)
    return list(value) if is_pair else [made.value("adam_beta1"), made.value("adam_beta2")]


def _grad_norm(made: Conversion, target: str, given: _Given) -> Any:
    norm = made.last({name: one for name, one in given.items() if one != "auto"} or given)
    return made.take(target, norm if float(norm) > 0 else None)


def _groups(made: Conversion, target: str, given: _Given) -> Any:
    rate = _rate(made.run.get("train.lr"))
    return [
        {
            "match": "lora_B" if name == "loraplus_lr_ratio" else "embed_tokens|lm_head",
            "lr": rate * value if "ratio" in name else value,
        }
        for name, value in given.items()
    ]


def _saves(made: Conversion, target: str, given: _Given) -> Any:
    """Return the value of `target`: the number of steps between checkpoints or evaluations, or
    their number per epoch. Return None if there is nothing to set, or a verdict if another key is
    set or decides instead."""
    what = "save" if "save" in target else "eval"
    per_epoch = f"train.{what}s_per_epoch"
    if what == "eval" and not {"data.eval", "data.eval_share"} & made.run.keys():
        return _needless("nothing is held out")
    if target == per_epoch:
        is_set = any(name in made.recipe.keys for name in (f"{what}_steps", f"{what}_strategy"))
        number = made.last(given)
        if not number:
            return made.take(f"train.{what}_every_steps", 0)
        return number if made.own(given) or not is_set else None
    strategy = made.value(f"{what}_strategy") or given.get("evaluation_strategy")
    numbers = {n: one for n, one in given.items() if n.endswith(("steps", "interval"))}
    number = made.last(numbers) if numbers else None
    if strategy in ("no", False) or number == 0 or given.get("do_eval") is False:
        return 0
    if strategy == "epoch":
        return made.take(per_epoch, 1)
    if number is None or per_epoch in made.run or f"{what}s_per_epoch" in made.recipe.keys:
        return _needless(f"{what}s_per_epoch decides")
    if isinstance(number, float) and number < 1:  # a share of all steps
        if isinstance(steps := made.run.get("train.steps"), int):
            return max(1, round(number * steps))
        epochs = _rate(made.run.get("train.epochs", 1))
        return made.take(per_epoch, float(f"{1 / (number * epochs):.6g}"))
    return made.take(per_epoch, 1) if isinstance(number, str) else number


def _flag(made: Conversion, target: str, given: _Given) -> Any:
    own = made.own(given).values()
    if any(value is True for value in own):
        return True
    is_off = all(value is False for value in own)
    return _needless("false is the default" if is_off else "the held-out loss is the measure")


def _loss(made: Conversion, target: str, given: _Given) -> Any:
    word = str(made.last(given)).lower()
    ours = _word(target, word)
    if word == "pt":
        made.run["data.format"] = "text"
        is_joined = made.recipe.dialect == "transformers" or (
            made.recipe.dialect == "LLaMA-Factory" and made.value("packing") is not False
        )
        if is_joined:
            made.run["data.join"] = True  # it joins documents to fill the length
    elif word == "ipo":
        made.run["train.loss_type"] = "ipo"
    if ours == "sft":
        return _needless("sft is the default")
    if ours in ("dpo", "kto"):
        return ours
    if target in made.of_flags:
        return _refused("furlong train has sft, dpo and kto")
    raise refusal(
        f"a recipe of {word}",
        "supervised fine-tuning, pretraining, DPO or KTO: furlong train samples no answers and has"
        " no other losses",
        "keep its trainer and wrap the model in furlong.chunked, which runs long sequences there",
        str(made.recipe.file),
    )


def _loss_type(made: Conversion, target: str, given: _Given) -> Any:
    value = made.last(given)
    ours = _word(target, value[0] if isinstance(value, list) and len(value) == 1 else value)
    if not made.is_sft:
        return ours
    is_plain = ours in ("nll", "chunked_nll")
    reason = "the loss is plain cross-entropy" + ", or of pairs" * (not is_plain)
    return Verdict("needless" if is_plain else "refused", reason)


def _of_pairs(made: Conversion, target: str, given: _Given) -> Any:
    value = made.last(given)
    if not value and target != "train.beta":
        return _needless("0 is the default")
    if made.is_sft:
        return _refused("an option of preference losses") if made.own(given) else None
    return value


def _parallel(made: Conversion, target: str, given: _Given) -> Any:
    value = made.last(given)
    if isinstance(value, Mapping):
        value = next((n for key, n in value.items() if "cp_size" in key or "sp_size" in key), 1)
    return _needless("1 is the default") if value == 1 else value


_PROJECTS = {"open-instruct": "open_instruct_internal", "axolotl": "axolotl"}
"""Default projects of wandb by trainer; for others it is transformers' "huggingface"."""


def _trackers(made: Conversion, target: str, given: _Given) -> Any:
    reported = given.get("report_to", given.get("log_with"))
    names = reported if isinstance(reported, list) else [reported] if reported else []
    project = made.value("wandb_project") or made.recipe.environment.get("WANDB_PROJECT")
    if made.value("use_wandb", "with_tracking") is True or (project and not reported):
        names = [*names, "wandb"]
    values = {
        "wandb": ("log.wandb", project or _PROJECTS.get(made.recipe.dialect, "huggingface")),
        "tensorboard": ("log.tensorboard", True),
        "mlflow": ("log.mlflow", made.value("mlflow_experiment_name") or "furlong"),
        "trackio": ("log.trackio", made.value("trackio_project_name") or "huggingface"),
    }
    verdict = _needless("no tracker")
    for name in names:
        if name in values:
            verdict = made.take(*values[name])
        elif name != "none":
            verdict = _lost("trackers are wandb, TensorBoard, MLflow and trackio")
    return verdict


def _hub(made: Conversion, target: str, given: _Given) -> Any:
    if made.value("push_to_hub") is not True:
        return _needless("nothing is pushed")
    repo = str(made.value("hub_model_id") or made.value("output_dir") or "")
    if repo.count("/") != 1 or repo.startswith((".", "data/", "output")):
        return _lost("write hub.repo: OWNER/NAME; the recipe names no owner")
    if made.value("hub_strategy") == "every_save":
        made.run["hub.every_save"] = True
    if (private := made.value("hub_private_repo")) is not None:
        made.run["hub.private"] = private
    return made.take("hub.repo", repo)


def _special_tokens(made: Conversion, target: str, given: _Given) -> Any:
    tokens: dict[str, Any] = {}
    for value in given.values():
        tokens |= value if isinstance(value, Mapping) else {"eos_token": value}
    tokens = {token: text for token, text in tokens.items() if text and token != "bos_token"}
    verdict = _needless("the tokenizer has these tokens")
    for token in ("eos_token", "pad_token"):
        if token in tokens:
            verdict = made.take(f"data.{token}", tokens.pop(token))
    return _refused("name new tokens in model.new_tokens") if tokens else verdict


def _new_tokens(made: Conversion, target: str, given: _Given) -> Any:
    found: list[str] = []
    for value in given.values():
        listed = value.split(",") if isinstance(value, str) else value
        found += [token.strip() for token in listed]
    if files := [token for token in found if token.endswith(".txt")]:
        return _refused(f"name the tokens of {files[0]} in model.new_tokens")
    return made.take(target, found)


def _finish_new_tokens(made: Conversion) -> None:
    """Say how rows of new tokens begin, and let those weights train that LLaMA-Factory trains whole
    beside adapters once it resizes the vocabulary."""
    key, is_adapted = "model.lora.modules_to_save", "model.lora.rank" in made.run
    adds = "model.new_tokens" in made.run
    resizes = made.recipe.dialect == "LLaMA-Factory" and (adds or made.value("resize_vocab"))
    if is_adapted and resizes and key not in made.run:
        made.run[key] = ["embed_tokens", "lm_head"]
        made.remarks[key] = "LLaMA-Factory trains both where it resizes the vocabulary"
    if adds:
        remark = "each row begins as the mean of the others"
        if is_adapted and key not in made.run:
            remark += ", and trains beside adapters; others leave it as they draw it"
        made.remarks["model.new_tokens"] = remark


def _router_loss(made: Conversion, target: str, given: _Given) -> Any:
    if not (coefficient := float(made.last(given))):
        return _needless("no router loss is added")
    if not made.is_sft:
        return _refused("only sft has a router loss")
    own = {"output_router_logits": True, "router_aux_loss_coef": coefficient}
    made.run[target] = made.run.get(target, {}) | own
    made.remarks[target] = "the loss takes all sequences of a step as one batch"
    return Verdict("ours", target)


_ROUTED = r"(?i)qwen[\w.-]*-a\d+b|mixtral|gpt-oss|olmoe"


def _add_router_loss(made: Conversion) -> None:
    """Add the router loss that TRL adds to a mixture of experts unless its recipe says 0."""
    name, setting = str(made.run.get("model.name")), "output_router_logits"
    is_said = "router_aux_loss_coef" in made.recipe.keys
    if made.recipe.dialect != "TRL" or is_said or setting in made.run.get("model.config", {}):
        return
    config = _config_at_hand(name)
    config = config.get("text_config") or config
    if not config and re.search(_ROUTED, name):
        flag = f"--model.config={{{setting}: true}}"
        made.remarks["model.name"] = f"TRL adds its router loss: add {flag}"
    if not config.get("router_aux_loss_coef"):
        return
    if made.is_sft:
        made.run["model.config"] = {setting: True} | made.run.get("model.config", {})
        made.remarks["model.config"] = "TRL adds the model's router loss, of each device's batch"
    else:
        found = [made.remarks.get("train.loss"), "TRL adds a router loss, which only sft has here"]
        made.remarks["train.loss"] = "; ".join(filter(None, found))


def _template(made: Conversion, target: str, given: _Given) -> Any:
    from importlib.resources import files

    value, dialect = str(made.last(given)), made.recipe.dialect
    plain = re.sub(r"[^a-z0-9]", "", value.lower())
    plain = {"qwen": "qwen25", "qwen2": "qwen25", "gemma2": "gemma"}.get(plain, plain)
    folder = files("furlong").joinpath("data/templates")
    names = [file.name.removesuffix(".jinja") for file in folder.iterdir()]
    known = {re.sub(r"[^a-z0-9]", "", name): name for name in names}
    if target in made.run:
        return _needless("the type of the data has its own template")
    if value.startswith("tokenizer_default") or (value == "default" and dialect == "axolotl"):
        return _needless("the model's own chat template is the default")
    if "{%" in value or "{{" in value or Path(value).suffix in (".jinja", ".j2"):
        return value
    if plain in known:
        is_thinking = "<think>" in folder.joinpath(f"{known[plain]}.jinja").read_text("utf-8")
        if (
            is_thinking
            and dialect == "LLaMA-Factory"
            and made.value("enable_thinking") is not False
        ):
            made.remarks[target] = "LLaMA-Factory trains on the empty thought that it adds, too"
        return known[plain]
    if "/" in value:
        return _refused("write data.chat_template: the file chat_template.jinja of that model")
    reason = "a file with that template; or remove the key, which takes the model's"
    return _refused(f"write data.chat_template: {reason}")


def _train_on(made: Conversion, target: str, given: _Given) -> Any:
    if not made.is_sft:
        return _needless("answers are compared; prompts are never trained on")
    said: dict[str, str | None] = {}
    for name, value in (made.own(given) or given).items():
        if name not in made.verdicts:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value).lower()
            said[name] = foreign_table()["train_on"].get(name, {}).get(text)
    reason = "there is only assistant, all and last, and no other weight of tokens"
    made.say(_refused(reason), [name for name, word in said.items() if word is None])
    is_chat = '"chat"' in json.dumps(made.run.get("data.train"))
    if said.get("train_on_inputs") == "all" and is_chat and made.recipe.dialect == "axolotl":
        made.say(_refused("axolotl ignores it with chat_template"), ["train_on_inputs"])
        return None
    first = next((one for one in ("all", "conversations", "last") if one in said.values()), None)
    return first or _needless("only answers are trained on by default")


def _fields(made: Conversion, target: str, given: _Given) -> Any:
    """Return `data.fields` for all sources: names of fields and roles. Some recipes give these
    names under keys of LLaMA-Factory's dataset_info.json."""
    text, columns = given.get("dataset_text_field", "text"), given.get("columns") or {}
    fields: dict[str, Any] = {} if text == "text" else {"text": text}
    ours = {"query": "instruction", "response": "output", "images": ""}
    fields |= {ours.get(name, name): theirs for theirs, name in columns.items()}
    if given.keys() - {"dataset_text_field", "columns", "role_mapping"}:
        info = {"columns": given, "tags": given, "formatting": given.get("formatting")}
        of_info, format = _info_fields(info)
        fields |= of_info
        if format:
            made.say(made.take("data.format", format), ["formatting"])
    return fields or _needless("fields have the names that furlong reads")


_KNOWN_ROLES = ("human", "gpt", "observation", "function_call", "user", "assistant", "system")


def _info_fields(info: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return `fields` and `format` of an entry in LLaMA-Factory's dataset_info.json."""
    columns, tags = info.get("columns") or {}, info.get("tags") or {}
    kind, is_ranking = info.get("formatting") or "alpaca", bool(info.get("ranking"))
    if kind == "sharegpt":
        columns = {"messages": "conversations"} | columns
        tags = {"role_tag": "from", "content_tag": "value"} | tags
    table = foreign_table()["columns"]
    fields = {ours: columns[theirs] for theirs, ours in table.items() if theirs in columns}
    if is_ranking:  # the prompt of two answers
        asked = [fields.pop(name) for name in ("messages", "instruction") if name in fields]
        fields |= {"prompt": asked[0]} if asked else {}
    if kind != "alpaca":
        fields |= {one: tags[f"{one}_tag"] for one in ("role", "content") if f"{one}_tag" in tags}
        roles = {one: one for one in ("user", "assistant", "system")} | {"observation": "tool"}
        named = {tags[f"{tag}_tag"]: role for tag, role in roles.items() if f"{tag}_tag" in tags}
        fields["roles"] = {name: role for name, role in named.items() if name not in _KNOWN_ROLES}
    fields = {ours: theirs for ours, theirs in fields.items() if theirs and ours != theirs}
    if is_ranking:
        return fields, "preference"
    return fields, "chat" if kind != "alpaca" else "alpaca" if columns else None


def _sources(made: Conversion, target: str, given: _Given) -> Any:
    found = _SOURCES.get(made.recipe.dialect, _trl_sources)(made, given)
    if made.recipe.dialect == "open-instruct" or "batch_method" in made.recipe.keys:
        reason = "npy files are not read: write input_ids into .parquet files"
        made.say(_refused(reason), {"dataset_path", "train_file"} & given.keys())
    if "tokenized_mds_train" in given:
        reason = "MDS is not read: write input_ids, and labels by the mask, into .parquet files"
        made.say(_refused(reason), ["tokenized_mds_train"])
        if made.value("apply_instruct_masks"):
            made.say(_refused(reason), ["apply_instruct_masks"])
        if isinstance(length := made.value("per_device_max_tokens"), int):
            made.run["data.max_seq_len"] = length
    plain = [one["path"] if one.keys() == {"path"} else one for one in found]
    return plain[0] if len(plain) == 1 else plain


def _source(
    made: Conversion, key: str, keys: Mapping[str, Any], dialect: str = ""
) -> dict[str, Any]:
    """Convert an entry (`keys`) of the recipe's list `key` to a source; record unknown keys."""
    table: dict[str, list[str]] = foreign_table()["sources"][dialect or made.recipe.dialect]
    source = {}
    for ours, theirs in table.items():
        value = next((keys[name] for name in theirs if keys.get(name)), None)
        if value is not None and ours != "read" and (ours, value) != ("weight", 1):
            source[ours] = value
    known = {*chain.from_iterable(table.values())}
    if unread := {n: one for n, one in keys.items() if n not in known and one is not None}:
        others = made.recipe.keys.setdefault(f"{key}[]", {})
        others |= unread
        made.say(_refused(f"in a source: {', '.join(sorted(others))}"), [f"{key}[]"])
    return source


_DATA_FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst")


def _axolotl_sources(made: Conversion, given: _Given) -> list[dict[str, Any]]:
    named = given.get("datasets") or given["pretraining_dataset"]
    if named == given.get("pretraining_dataset"):  # axolotl reads only the first one
        named = [{"path": named}] if isinstance(named, str) else named[:1]
        named = [{"type": "pretrain"} | one for one in named]
    found = [source for one in named for source in _axolotl_source(made, one)]
    templates = {source.pop("template", None) for source in found if source.get("format") != "text"}
    if len(templates) > 1:
        made.say(_refused("one run has one chat template: use several runs"), ["datasets"])
    elif template := next(iter(templates), None):
        made.run["data.chat_template"] = template
    return found


def _axolotl_source(made: Conversion, one: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the sources of one entry of axolotl's `datasets`: one source for each of its files."""
    usual: dict[str, list[Any]] = foreign_table()["usual of axolotl"]
    unusual = {
        name: value
        for name, value in one.items()
        if name not in usual or value not in (*usual[name], made.recipe.keys.get(name))
    }
    source = _source(made, "datasets", unusual)
    path, files = one["path"], one.get("data_files") or []
    files = [files] if isinstance(files, str) else files
    is_local = path in ("json", "csv", "parquet", "text") or path.endswith(_DATA_FILES)
    paths = files if is_local else [f"hf://datasets/{path}/{file}" for file in files]
    if files and "[" not in str(source.get("split")):
        source.pop("split", None)
    elif len(files) > 1:
        made.say(_refused("a slice of several files: write one source for each file"), ["datasets"])
    kind, _, part = str(one.get("type") or "").partition(".")
    prompts: dict[str, str] = foreign_table()["prompts of axolotl"]
    names: dict[str, Any] = {}
    if kind in ("completion", "pretrain", "pretraining_dataset"):
        source["format"] = "text"
        names = {"text": one.get("field") or one.get("text_column")}
    elif kind in ("alpaca", "sharegpt"):
        source |= {"format": kind} | ({"template": "alpaca"} if kind == "alpaca" else {})
    elif made.value("rl") and kind in ("chatml", "llama3") and part in prompts:
        source |= {"format": "auto", "template": kind}
        names = {"instruction": prompts[part]}
        if made.value("rl") == "kto":
            names |= {"output" if prompts[part] else "messages": "completion"}
        elif part == "ultra":  # its answers are whole conversations
            names = {}
    elif kind == "chat_template" or (made.value("rl") and kind == "passthrough"):
        is_chat = kind == "chat_template" and not made.value("rl")
        source["format"] = "chat" if is_chat else "auto"
        names = {name: one.get(f"field_{name}") for name in ("messages", "chosen", "rejected")}
        names |= one.get("message_property_mappings") or {}
        of_turns = {name: one.get(f"message_field_{name}") for name in ("role", "content")}
        names |= {name: theirs for name, theirs in of_turns.items() if theirs}
        roles = (one.get("roles") or {}).items()
        names["roles"] = {name: ours for ours, theirs in roles for name in theirs if name != ours}
    elif kind:
        reason = f"datasets.type {one['type']} is not known"
        made.say(_refused(reason), {"datasets", "pretraining_dataset"} & made.recipe.keys.keys())
    if fields := {ours: name for ours, name in names.items() if name and name != ours}:
        source["fields"] = fields
    return [source | {"path": file} for file in paths or [path]]


_MEDIA = frozenset(("images", "videos", "audios"))


def _named_sources(made: Conversion, given: _Given) -> list[dict[str, Any]]:
    """Return the sources that LLaMA-Factory's names of data sets stand for.

    The names are looked up in a dataset_info.json near the recipe. A recipe of LLaMA-Factory 1
    names a YAML file instead, which lists the data sets. A name that is not listed is taken as a
    path.
    """
    names = given.get("dataset") or given["train_dataset"]
    names = names if isinstance(names, list) else [name.strip() for name in str(names).split(",")]
    is_list = str(names[0]).endswith((".yaml", ".yml"))
    place = names[0] if is_list else f"{given.get('dataset_dir', 'data')}/dataset_info.json"
    file = file_near(made.recipe.file, place) or Path()
    entries: dict[str, Any] = {}
    if file.is_file():
        entries = read_yaml(file.read_text(encoding="utf-8"), str(file), "mend the line")
    elif is_list:
        made.say(_refused(f"there is no {place}: write data.train"), given)
        return [{"path": place}]
    found = []
    for name in entries if is_list else names:
        if (entry := entries.get(name)) is None:
            if "/" not in name and not Path(name).exists():
                reason = "no dataset_info.json near the recipe explains it: write data.train"
                made.say(_refused(reason), given)
            found.append({"path": name})
            continue
        source = _source(made, "dataset", entry)
        if media := _MEDIA & (entry.get("columns") or {}).keys():
            reason = f"{name} has {', '.join(sorted(media))}: only text is trained on"
            made.say(_refused(reason), given)
        if "path" not in source:  # a file beside the list
            limit = {"limit": source["limit"]} if "limit" in source else {}
            source = {"path": str(file.parent / entry["file_name"])} | limit
        if "num_samples" in entry:
            made.remarks["data.train"] = _DRAWN
        fields, format = _info_fields(entry)
        if made.run.get("data.format") == "text":
            text = (entry.get("columns") or {}).get("prompt", "instruction")
            fields, format = {} if text == "text" else {"text": text}, None
        elif made.run.get("train.loss") == "kto":
            format = None
        elif entry.get("converter") == "alpaca":
            format = "alpaca"
        source |= {"fields": fields} if fields else {}
        found.append(source | ({"format": format} if format else {}))
    return found


_DRAWN = "there the records of a limit are drawn at random, here they are the first ones"


def _swift_sources(made: Conversion, given: _Given) -> list[dict[str, Any]]:
    """Return the sources in ms-swift's `dataset`: `id`, `id:subset#1000`, files and folders."""
    names = given["dataset"]
    found = []
    for name in names if isinstance(names, list) else [names]:
        path, _, limit = re.sub(r"^(HF|MS)::", "", str(name)).partition("#")
        path, _, subset = path.partition(":")
        source: dict[str, Any] = {"path": path}
        source |= {"name": subset} if subset and subset != "default" else {}
        source |= {"limit": int(limit)} if limit else {}
        if limit and made.value("dataset_shuffle") is not False:
            made.remarks["data.train"] = _DRAWN
        found.append(source)
    return found


def _mixed_sources(made: Conversion, given: _Given) -> list[dict[str, Any]]:
    """Return the sources of a mixture: data sets, each with its weight or number of records."""
    words = given.get("mixer_list") or given.get("dataset_mixer_list")
    if isinstance(mixer := given.get("dataset_mixer"), Mapping):
        words = [*chain.from_iterable(mixer.items())]
    if words is None:
        return [{"path": str(next(iter(given.values())))}]
    found = []
    for path, amount in zip(words[::2], words[1::2], strict=True):
        measure = {"weight" if isinstance(amount, float) else "limit": amount}
        found.append({"path": path} | (measure if measure != {"weight": 1.0} else {}))
    splits = given.get("dataset_splits") or ["train"]
    tests = [{"path": path, "split": one} for path in words[::2] for one in splits if "test" in one]
    if tests and _evaluates(made):
        made.run["data.eval"] = tests
    parts = [{"split": one} if one != "train" else {} for one in splits if "train" in one]
    return [one | part for one in found for part in parts]


def _arctic_sources(made: Conversion, given: _Given) -> list[dict[str, Any]]:
    found = []
    for one in given["data.sources"]:
        mapping = one.get("role_mapping") or {}
        if any(not str(where).startswith("messages.role.") for where in mapping.values()):
            made.say(_refused("a role outside of messages"), given)
        format = {"format": "chat"} if "instruct" in str(one.get("type")) else {}
        found.append(_source(made, "data.sources", one) | format)
    return found


def _torchtune_sources(made: Conversion, given: _Given) -> list[dict[str, Any]]:
    values = next(iter(given.values()))
    if isinstance(values, list):
        return [*chain.from_iterable(_torchtune_sources(made, {"": one}) for one in values)]
    if not isinstance(values, Mapping):
        raise ValueError("no mapping")
    kind = str(values.get("_component_", "")).rpartition(".")[2]
    path, format = foreign_table()["datasets of torchtune"].get(kind, ("", ""))
    source = {"path": path} | _source(made, "dataset", values)
    if not source["path"] or source["path"] in ("json", "csv"):
        raise ValueError(kind)
    if format:
        is_sharegpt = values.get("conversation_style") == "sharegpt"
        source["format"] = "sharegpt" if format == "chat" and is_sharegpt else format
    if format == "alpaca":
        reason = "Alpaca's words around the instruction are missing: write them into the records"
        made.say(_refused(reason), ["dataset"])
    if values.get("train_on_input", "alpaca" in kind):
        made.run["data.train_on"] = "all"
    if values.get("conversation_column"):
        source["fields"] = {"messages": values["conversation_column"]}
    elif format == "text" and values.get("column", "text") != "text":
        source["fields"] = {"text": values["column"]}
    return [source]


_FORMATS = {
    ("text",): "text", ("messages",): "chat", ("prompt", "completion"): "completion",
    ("prompt", "chosen", "rejected"): "preference", ("chosen", "rejected"): "preference",
    ("prompt", "completion", "label"): "unpaired",
}  # fmt: skip
"""Formats by the columns that a mixture selects."""


def _selected(made: Conversion, one: Mapping[str, Any]) -> dict[str, Any]:
    """Return the source of an entry of TRL's mixture, which may keep only some columns."""
    source = _source(made, "datasets", one, "TRL")
    if columns := one.get("columns"):
        shape = {*columns} - {"tools", "chat_template_kwargs"}
        found = (each for names, each in _FORMATS.items() if {*names} == shape)
        if (format := next(found, None)) is None:
            reason = f"columns {columns}: write data.train with fields: {{unused: [the others]}}"
            named = {"datasets", "dataset_mixture"} & made.recipe.keys.keys()
            made.say(_refused(reason), named)
        else:
            source["format"] = format
    return source


def _trl_sources(made: Conversion, given: _Given) -> list[dict[str, Any]]:
    if "dataset_mixer" in given:
        return _mixed_sources(made, given)
    mixture = given.get("dataset_mixture") or {"datasets": given.get("datasets")}
    if mixture.get("test_split_size"):
        made.run["data.eval_share"] = mixture["test_split_size"]
    if mixture["datasets"]:
        if any(one.get("weight", 1) != 1 for one in mixture["datasets"]):
            reason = "there a weight is a part drawn once, here it is drawn in each epoch"
            made.remarks["data.train"] = reason
        return [_selected(made, one) for one in mixture["datasets"]]
    names = (
        "dataset_name", "train_file", "train_files", "train_file_path", "dataset", "data_path",
        "tokenized_mds_train",
    )  # fmt: skip
    (values, *_) = [given[name] for name in names if name in given]
    config = given.get("dataset_config") or given.get("dataset_config_name")
    split = given.get("dataset_train_split", "train")
    beside = ({"name": config} if config else {}) | ({"split": split} if split != "train" else {})
    found = []
    for value in values if isinstance(values, list) else [values]:
        path, _, share = str(value).partition("@")  # ProLong: folder@share of the tokens
        is_part = bool(share) and float(share) < 1
        found.append({"path": path} | ({"share": float(share)} if is_part else {}) | beside)
    return found


def _evaluates(made: Conversion) -> bool:
    return made.value("eval_strategy", "evaluation_strategy") not in (None, "no")


def _eval_sources(made: Conversion, target: str, given: _Given) -> Any:
    if "dataset_test_split" in given:
        path = made.value("dataset_name")
        config = made.value("dataset_config", "dataset_config_name")
        if path and _evaluates(made):
            source = {"path": path, "split": given["dataset_test_split"]}
            return source | ({"name": config} if config else {})
        return _needless("nothing is evaluated")
    if "dataset_val" in given and made.value("run_val_every_n_steps") is None:
        return _needless("nothing is evaluated")
    aside = Conversion(made.recipe, made.num_processes)
    aside.run = {key: made.run[key] for key in ("train.loss", "data.format") if key in made.run}
    named = dict.fromkeys(("datasets", "dataset", "data.sources"), made.last(given))
    if isinstance(named["datasets"], str):
        named.pop("datasets")
    if (folder := made.value("dataset_dir")) is not None:
        named["dataset_dir"] = folder
    value = _sources(aside, target, named)
    if unread := [one.text for one in aside.verdicts.values() if one.kind == "refused"]:
        made.say(_refused("; ".join(unread)), given)
    return value


_SOURCES: dict[str, Callable[[Conversion, _Given], list[dict[str, Any]]]] = {
    "axolotl": _axolotl_sources,
    "LLaMA-Factory": _named_sources,
    "ms-swift": _swift_sources,
    "open-instruct": _mixed_sources,
    "Arctic Training": _arctic_sources,
    "torchtune": _torchtune_sources,
}
_BY_TARGET: dict[str, Callable[[Conversion, str, _Given], Any]] = {
    "model.name": _model,
    "model.new_tokens": _new_tokens,
    "model.config": _router_loss,
    "model.dtype": _dtype,
    "model.quantize": _quantize,
    "model.lora": _adapters,
    "model.lora.rank": _rank,
    "model.lora.target_modules": _target_modules,
    "model.rope": _rope,
    "model.rope.rope_theta": _rope,
    "data.train": _sources,
    "data.eval": _eval_sources,
    "data.eval_share": lambda made, _, given: made.last(given) or _needless("nothing is held out"),
    "data.fields": _fields,
    "data.chat_template": _template,
    "data.chat_template_kwargs": lambda made, _, given: {"enable_thinking": made.last(given)},
    "data.train_on": _train_on,
    "data.eos_token": _special_tokens,
    "data.max_seq_len": _length,
    "data.join": _join,
    "data.streaming": _flag,
    "train.sequences_per_step": _batch,
    "train.steps": _steps,
    "train.min_lr": _min_lr,
    "train.warmup_steps": _warmup,
    "train.optimizer": _optimizer,
    "train.betas": _betas,
    "train.groups": _groups,
    "train.max_grad_norm": _grad_norm,
    **dict.fromkeys(("train.save_every_steps", "train.eval_every_steps"), _saves),
    **dict.fromkeys(("train.saves_per_epoch", "train.evals_per_epoch"), _saves),
    "train.num_checkpoints": lambda made, _, given: max(0, made.last(given)) or 1000,
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
    "out": lambda made, _, given: str(made.last(given)),
}
"""By our key, the function that reads the recipe's keys for it. It returns our value, or a verdict,
or None if it has set all verdicts itself. Keys without a function take the value as it is."""
