"""One official config.json: what furlong makes of it, beside what transformers does.

Its numbers are made small, and every other key stays as published: the model is that of the
released file but for its size. Windows, and the length at which RoPE changes its factors, are
crossed by several chunks, and ids of padding lie amid the tokens.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from model_gradients import cut, worst_error
from small_models import shrink as shrink_other
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import furlong
from furlong.cli.main import main
from furlong.config.sources import load_run
from furlong.errors import UserError, reason_of
from furlong.families import family_of
from furlong.models.describe import describe
from furlong.models.shrink import VOCAB_SIZE, shrink_config
from furlong.testing import TokenSequences
from furlong.train.build import build_run_model
from furlong.train.run_model import read_model_config
from furlong.verify import EXACT_BOUND, RECURRENT, Float64, Subject, spread_weights

FACTS = Path(__file__).with_name("official_configs.json")
LENS = (61, 7, 6)
"""Tokens of one sequence of several chunks, and of a pair that one chunk holds."""
CHUNK_SIZE = 13
SWITCH = 26
"""The small length at which RoPE changes its factors: two chunks."""
COUNTED = 0.01
"""Relative difference of a model's parameters from the published number, which is often rounded."""
ORDERS = {
    "chunk-first": furlong.ChunkOptions(size=CHUNK_SIZE, keep="kv"),
    "layer-first": furlong.ChunkOptions(
        size=CHUNK_SIZE, keep="input", order="layer-first", stage_layers=1
    ),
}
GOOD = ("as published", "with one key")
_CONTROL_MOVES = 1e-3
_OFFERED = re.compile(r"model\.(config|rope): (\{(?:[^{}]|\{[^{}]*\})*\})")
_PACKED = "quantization_config"
_DROPPED = ("transformers_version", "dtype", "torch_dtype", "architectures", _PACKED)


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one config."""

    name: str
    outcome: str
    """One of `GOOD`, "refused" where the table says so, or "wrong"."""
    detail: str
    seconds: float = 0.0


class WrongError(Exception):
    """furlong does other than it should."""


@cache
def facts() -> dict[str, dict[str, Any]]:
    """The table: model -> its config, its source, its published parameters, and why furlong may
    refuse it."""
    table: dict[str, dict[str, Any]] = json.loads(FACTS.read_text("utf-8"))
    return table


def measure(name: str) -> Row:
    """The row of a config of the table."""
    return judge(name, facts()[name])


def not_run(name: str, reason: str) -> Row:
    return Row(name, "wrong", reason)


def judge(name: str, fact: Mapping[str, Any]) -> Row:
    """The row of a config: trained, refused, or wrong."""
    warnings.simplefilter("ignore")
    with TemporaryDirectory() as folder:
        home = Path(folder)
        try:
            outcome, detail = _outcome(home, fact)
        except WrongError as error:
            outcome, detail = "wrong", str(error)
    seconds = round(time.process_time(), 1)
    return Row(name, outcome, " ".join(detail.replace(folder, "").split()), seconds)


def _outcome(home: Path, fact: Mapping[str, Any]) -> tuple[str, str]:
    small, whole, why = home / "small", home / "whole", fact.get("refused")
    _write(whole, fact["config"])
    _write(small, _small(whole, fact))
    data, init, shown = home / "data.jsonl", _add_weights(small), []
    data.write_text(
        "\n".join(json.dumps({"input_ids": s["input_ids"].tolist()}) for s in _sequences() * 2)
    )
    keys: dict[str, Any] = {}
    if _PACKED in fact["config"]:
        code, told = furlong_ends("train", write_run(home, small, data, init))
        if code == 0:
            raise WrongError("trains weights whose scales it has not read")
        shown.append(f"packed weights: {_four_parts(told)}")
        for folder in (small, whole):  # in floats
            values = json.loads((folder / "config.json").read_text("utf-8"))
            _write(folder, {key: value for key, value in values.items() if key != _PACKED})
    code, told = _train(write_run(home, small, data, init))
    if why is not None and code == 0:
        raise WrongError(f"trains, though the table says: {why}")
    if code:
        keys = {name: yaml.safe_load(text) for name, text in _OFFERED.findall(told)[:1]}
        if why is not None and not keys:
            return "refused", "; ".join([_four_parts(told), *shown])
        if not keys:
            raise WrongError(f"refused, and no key is offered: {_four_parts(told)}")
        code, more = _train(write_run(home, small, data, init, keys))
        if code:
            raise WrongError(f"refused with {keys} as offered, too: {_four_parts(more)}")
    shown.append(_counted(write_run(home, whole, data, init, keys), fact.get("parameters")))
    shown.append(_gradients(write_run(home, small, data, init, {**keys, "dtype": "float64"})))
    shown += [f"model.{name}: {json.dumps(own)}" for name, own in keys.items()]
    outcome = "refused" if _PACKED in fact["config"] else GOOD[bool(keys)]
    return outcome, "; ".join(reversed(shown))


def _add_weights(folder: Path) -> str:
    """Draw weights as the family itself does, and save them; returns `model.init`, which is random
    for a model that cannot be built."""
    published = (folder / "config.json").read_text("utf-8")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if hasattr(config, _PACKED):
            delattr(config, _PACKED)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)
    except Exception:  # furlong has to say what that is
        return "random"
    finally:
        (folder / "config.json").write_text(published, encoding="utf-8")
    return "pretrained"


def _write(folder: Path, values: Mapping[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")


def _small(folder: Path, fact: Mapping[str, Any]) -> dict[str, Any]:
    """The small values, or the published ones of a config that transformers cannot read."""
    values: dict[str, Any] = fact["config"]
    try:
        values = shrunk(folder, values)
    except Exception:  # what is refused is whatever it is
        if "refused" not in fact:
            raise
    return values | fact.get("small", {})


def shrunk(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a config.json with small numbers, every other key as it is.

    What the config's class makes of its numbers, such as a list of the types of its layers, is
    written out where the small numbers would make another.
    """
    whole = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    text = whole.get_text_config()
    try:
        small = shrink_config(text, max_seq_len=LENS[0]).to_dict()
    except UserError:  # numbers that a family ties together in a way of its own
        small = shrink_other(text)
    except Exception as error:  # a traceback, whatever it is
        raise WrongError(f"furlong verify cannot make it small: {reason_of(error)}") from error
    positions = getattr(text, "max_position_embeddings", None) or math.inf
    if (getattr(text, "sliding_window", None) or 0) >= positions:
        small["sliding_window"] = text.sliding_window  # as long as the positions: no window
    name = next((n for n in values if n in whole.sub_configs and getattr(whole, n) is text), None)
    if name is None:
        return _overlaid(values, text, small)
    others = {
        part: _overlaid(values[part], getattr(whole, part), shrink_other(getattr(whole, part)))
        for part in whole.sub_configs
        if part != name and isinstance(values.get(part), dict)
    }
    return values | others | {name: _overlaid(values[name], text, small)}


def _overlaid(values: Mapping[str, Any], whole: Any, small: dict[str, Any]) -> dict[str, Any]:
    before, mixed = whole.to_dict(), dict(values)
    rope = small.get("rope_parameters") or {}
    for key, value in small.items():
        is_size = isinstance(value, int | list) and not isinstance(value, bool)
        if is_size and value != before.get(key):
            mixed[key] = value
    if "long_factor" in rope and isinstance(mixed.get("rope_scaling"), dict):
        mixed["rope_scaling"] = mixed["rope_scaling"] | {
            key: rope[key] for key in ("long_factor", "short_factor")
        }
        original = rope["original_max_position_embeddings"]
        mixed["max_position_embeddings"] = mixed["max_position_embeddings"] * SWITCH // original
        for own in (mixed, mixed["rope_scaling"]):
            if "original_max_position_embeddings" in own:
                own["original_max_position_embeddings"] = SWITCH
    given = {key: value for key, value in mixed.items() if key not in _DROPPED}
    made = type(whole).from_dict(given).to_dict()
    return mixed | {
        key: small[key] for key in ("layer_types", "mlp_layer_types")
        if small.get(key) is not None and made.get(key) != small[key]
    }  # fmt: skip


def write_run(
    home: Path, model: Path, data: Path, init: str, keys: Mapping[str, Any] | None = None, *,
    max_seq_len: int = LENS[0],
) -> Path:  # fmt: skip
    """A run file of two steps over a model with other `keys` of its section."""
    values = {
        "model": {"name": str(model), "init": init, "dtype": "float32", **(keys or {})},
        "data": {
            "train": [str(data)], "max_seq_len": max_seq_len, "cache_dir": str(home / "cache"),
        },
        "chunks": {"size": CHUNK_SIZE, "keep": "kv"},
        "train": {
            "steps": 2, "sequences_per_step": 3, "lr": 1e-3, "warmup_steps": 0,
            "schedule": "constant",
        },
        "out": str(home / "out"),
    }  # fmt: skip
    file = home / f"{model.name}.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    shutil.rmtree(home / "out", ignore_errors=True)
    return file


def _train(run: Path) -> tuple[int, str]:
    """The exit code and the output of `furlong train`, which `furlong plan` must foretell."""
    planned, promise = furlong_ends("plan", run)
    code, told = furlong_ends("train", run)
    if planned != code:
        told = _four_parts(promise if planned else told)
        raise WrongError(f"plan ends with {planned}, train with {code}: {told}")
    return code, told


def furlong_ends(verb: str, *arguments: Any) -> tuple[int, str]:
    """The exit code and the output of a command, which may not end in a traceback."""
    out = StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(out):
            code = main([verb, *map(str, arguments)])
    except SystemExit as error:
        code = int(error.code or 0)
    except Exception as error:  # a traceback, whatever it is
        raise WrongError(f"{verb} ends in a traceback: {reason_of(error)}") from error
    if code not in (0, 2) or "Traceback" in out.getvalue():
        raise WrongError(f"{verb} ends with {code}: {out.getvalue()[-500:]}")
    return code, out.getvalue()


def _four_parts(told: str) -> str:
    """The message of a refusal."""
    return told[max(told.find("given: "), 0) :] or "no word"


def _counted(run: Path, published: float | None) -> str:
    try:
        shape = describe(read_model_config(load_run(str(run))))
    except UserError as error:
        raise WrongError(f"its parameters cannot be counted: {error}") from error
    if published is None:
        return f"{shape.num_parameters:,} parameters"
    off = shape.num_parameters / published - 1
    told = f"{shape.num_parameters:,} parameters, {off:+.2%} of the published"
    if abs(off) > COUNTED:
        raise WrongError(told)
    return told


def _sequences() -> TokenSequences:
    generator = torch.Generator().manual_seed(0)
    batch = []
    for num_tokens in LENS:
        ids = torch.randint(4, VOCAB_SIZE, (num_tokens,), generator=generator)
        ids[num_tokens // 2] = 0  # padding, by the small config
        batch.append({"input_ids": ids, "labels": ids.clone()})
    return batch


def _gradients(run: Path) -> str:
    """The worst relative error of a gradient, or of the loss, against the model's own forward."""
    subject = _subject(run)
    found, refused = [], []
    one, pair = _sequences()[:1], _sequences()[1:]
    for batch in (one, pair):
        loss, truth = subject.whole(batch)
        for order, options in ORDERS.items():
            try:
                error, where = _error(subject, batch, options, loss, truth)
            except UserError as refusal:
                if order == "chunk-first":
                    raise WrongError(f"gradients are refused: {refusal}") from refusal
                refused.append(order)
                continue
            except Exception as failure:  # a traceback, whatever it is
                raise WrongError(f"{order} ends in {reason_of(failure)}") from failure
            found.append((error, f"{where}, {len(batch)} sequences, {order}"))
    control, _ = worst_error(subject.whole(cut(one))[1], subject.whole(one)[1])
    if not control > _CONTROL_MOVES:
        raise WrongError(f"cut without a relay its gradients move by {control:.1e} only")
    worst, where = max(found)
    if not worst <= subject.bound:
        raise WrongError(f"relative error {worst:.1e} ({where})")
    return f"error {worst:.1e}" + (", refused layer-first" if refused else "")


def _subject(run: Path) -> Subject:
    """The model of a run in float64, all of whose attention matters."""
    with Float64():  # tables made once are float64, too
        model = build_run_model(load_run(str(run)))
    for module in model.modules():  # dropout and router noise have no truth to compare
        for name, value in vars(module).items():
            is_noise = isinstance(module, nn.Dropout) or "dropout" in name or "jitter" in name
            if is_noise and isinstance(value, float):
                setattr(module, name, 0.0)
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # SDPA has no softcap
    spread_weights(model, seed=0)
    is_recurrent = family_of(model.config.model_type).recurrent != "none"
    return Subject(model, ORDERS["chunk-first"], RECURRENT if is_recurrent else EXACT_BOUND)


def _error(
    subject: Subject, batch: TokenSequences, options: furlong.ChunkOptions, loss: float,
    truth: dict[str, torch.Tensor],
) -> tuple[float, str]:  # fmt: skip
    longest = max(len(one["labels"]) for one in batch)
    with Float64():
        result = furlong.forward_backward(subject.model, batch, options, max_seq_len=longest)
    given = furlong.testing.take_grads(subject.model)
    errors = [worst_error(given, truth), (abs(result.loss - loss) / abs(loss), "the loss")]
    return max(errors)
