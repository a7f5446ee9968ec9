"""Other RoPE tried on held-out sequences, without training: which factor holds to which length."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import date
from functools import partial
from itertools import chain
from typing import Any

import torch

from furlong.config.schema import RopeConfig, RunConfig
from furlong.data.dataset import DataSet, load_data
from furlong.data.loader import in_order
from furlong.data.tokenize import tokenizer_of
from furlong.errors import ConfigError
from furlong.kv.pools import Storage
from furlong.models.build import read_config
from furlong.models.folder import check_folder
from furlong.models.rope import goes_beyond, num_positions, ropes_to_try, takes_rope
from furlong.planners.setup import given_options
from furlong.report.beyond import Beyond, TriedRope, beyond_in_words
from furlong.report.patience import patience
from furlong.runtime.profile import give_back_memory
from furlong.train import build
from furlong.train.evaluation import evaluate
from furlong.train.memory import Fitting, UsedMemory
from furlong.train.objective import objective_of
from furlong.train.processes import Processes
from furlong.train.run_model import RunModel, fixed_decision, rope_of, step_size, storage_of
from furlong.train.start import check_start


def try_ropes(
    config: RunConfig, factors: Sequence[float], processes: Processes
) -> tuple[list[TriedRope], int]:
    """Return the loss by position of `data.eval` with the model's own RoPE and with other factors,
    and the tokens of the longest sequence. Nothing is trained. A collective.

    The positions that the model was trained on are those of its config, or
    `model.rope.original_max_position_embeddings`. Longer sequences are read, the others left out.
    `data.max_seq_len` is the maximum length of the sources that name none.

    Args:
        factors: Values of `model.rope.factor`; if empty, doubled until they reach the longest
            sequence.

    Raises UserError for a run whose model or data do not show it.
    """
    known = {key: x for key, x in (rope_of(config) or {}).items() if x is not None}
    settings = config.model
    source = processes.together(partial(check_folder, settings.name, settings.revision))
    read = partial(read_config, source, revision=settings.revision, changes=settings.config)
    whole = processes.together(read)
    trained = processes.together(partial(_check, config, whole, known, factors))
    plain = _run_with(config, None, trained)
    check_start(plain, processes)
    processes.together(partial(build.check_run_model, plain))
    day = processes.from_first(lambda: str(date.today()))
    data = processes.first_of_each_machine(partial(_load, plain, day))
    longest = max(split.longest for split in data)
    print(*chain.from_iterable(split.describe() for split in data), sep="\n")
    found = processes.together(partial(ropes_to_try, whole, known, factors, longest))
    tried = []
    for rope, factor, reached in found:
        run = _run_with(config, rope, trained)
        with patience(f"factor {factor:g}", speaks=processes.is_first):
            beyond = _beyond_of(run, data, longest, processes)
        if beyond is None:
            raise _too_little(trained)
        tried.append(TriedRope(rope, factor, reached, beyond))
        print(f"factor {tried[-1].name}: loss {beyond_in_words(beyond)}")
    return tried, longest


def _check(config: RunConfig, whole: Any, known: dict[str, Any], factors: Sequence[float]) -> int:
    """Return the number of positions that a model was trained on. Raises ConfigError for a model,
    settings or factors that cannot be tried."""
    change = ""
    if config.train.is_of_pairs:
        given, required = f"train.loss = {config.train.loss}", "a loss of tokens, by position"
        change = "add --train.loss=sft, or name another run"
    elif known.get("rope_type") in ("default", "longrope"):
        given, required = f"model.rope of type {known['rope_type']}", "a type with one factor"
        change = "set model.rope: {rope_type: yarn}, or remove model.rope"
    elif not goes_beyond(whole) or not num_positions(whole) or not takes_rope(whole):
        given = f"{config.model.name}, a model of type {whole.get_text_config().model_type}"
        required = "RoPE of type default, linear, yarn or llama3"
        change = "choose a model with such RoPE"
    if change:
        raise ConfigError(given=given, required=required, source="furlong rope", change=change)
    own, *others = ropes_to_try(whole, known, factors, 0)
    trained = int(min(own[2], known.get("original_max_position_embeddings", own[2])))
    if short := [(factor, reached) for _, factor, reached in others if reached < trained]:
        raise ConfigError(
            given="factors that reach fewer positions than the model was trained on: "
            + ", ".join(f"{factor:g} ({reached:,})" for factor, reached in short),
            required=f"at least its {trained:,} positions",
            source="--factors",
            change=f"choose factors of {own[1]:g} or more",
        )
    return trained


def _too_little(trained: int) -> ConfigError:
    return ConfigError(
        given="data.eval without enough tokens to compare, of those that the loss counts",
        required="sequences with labels both within and beyond the trained positions:"
        f" {trained // 2:,} to {trained - 1:,}, and from {trained:,} on",
        source="data.eval",
        change="choose texts, or records whose answers begin earlier and end later",
    )


def _run_with(config: RunConfig, rope: dict[str, Any] | None, trained: int) -> RunConfig:
    """Return the run with another RoPE, whose evaluations go beyond `trained` tokens. Raises
    ConfigError if no source is longer."""
    limit = config.data.max_seq_len
    longer = tuple(
        one.model_copy(update={"max_seq_len": length})
        for one in config.data.eval or ()
        if (length := one.max_seq_len or limit) > trained
    )
    if not longer:
        most = max(config.data.eval_by_length, default=0)
        path = (config.data.eval or config.data.train)[0].path
        has_share = config.data.eval_share is not None
        raise ConfigError(
            given=f"data.eval with sequences of at most {most:,} tokens"
            if most
            else "no data.eval",
            required=f"a source of more than the {trained:,} that the model was trained on",
            source="data.eval",
            change=f"set data.eval: [{{path: {path}, max_seq_len: {4 * trained}}}]"
            + (", and remove data.eval_share" if has_share else ", or longer"),
        )
    model = {"rope": None if rope is None else RopeConfig(**rope)}
    data = {"max_seq_len": trained, "eval": longer, "train": longer}  # data.train is not read
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "data": config.data.model_copy(update=data),
            "out": ".",  # its folder is not made; tensors on disk are in files without a name
        }
    )


def _load(config: RunConfig, day: str) -> list[DataSet]:
    """Return the data sets of `data.eval`. Raises ConfigError if no sequence is longer than those
    that the model was trained on. `day`: see `build.load_splits`."""
    tokenizer, format = tokenizer_of(config), objective_of(config.train).format
    load = partial(load_data, tokenizer=tokenizer, format=format)
    settings = build.dated(config.data, tokenizer, day)
    data = [*build.load_held_out(settings, load).values()]
    longest, trained = max(split.longest for split in data), config.data.max_seq_len
    if longest <= trained + trained // 4:
        raise ConfigError(
            given=f"data.eval, whose longest sequence has {longest:,} tokens",
            required=f"sequences much longer than the {trained:,} that the model was trained on",
            source="data.eval",
            change="add a source of longer texts",
        )
    return data


def _beyond_of(
    config: RunConfig, data: Sequence[DataSet], longest: int, processes: Processes
) -> Beyond | None:
    """Return the loss by position of the sequences that are longer than the trained ones; None if
    too few have labels both within and beyond the trained positions. The model is read anew: a
    family may use its RoPE's parameters in other modules, too."""
    launch, trained = processes.launch, config.data.max_seq_len

    def read() -> tuple[Storage, RunModel]:
        device = build.device_of(launch)
        storage = storage_of(config, device, num_local=launch.num_local)
        return storage, RunModel.read(config, device, launch)

    storage, run_model = processes.together(read)
    given = {key: value for key, value in given_options(config).items() if key != "sample"}
    decide = partial(fixed_decision, config, given, run_model, longest)
    decision = processes.together(decide)
    run_model, budget = run_model.decided(decision), config.memory.device
    batches = chain.from_iterable(
        in_order(split, split.units[split.unit_lens > trained], step_size(config.train))
        for split in data
    )
    with ExitStack() as stack:
        torch.manual_seed(config.train.seed + launch.number)
        model, ranks = build.read_model(
            stack, config, decision, longest, run_model.device, processes
        )
        engine = build.batch_engine_of(
            config, model, run_model, decision, longest, storage, ranks, processes
        )
        stack.callback(engine.engine.close)
        stack.callback(engine.close)
        for split in data:
            processes.together(partial(split.check_vocabulary, engine.engine.model.num_input_ids))
        used = UsedMemory(
            model.parameters(), None, run_model.device,
            budget_bytes=None if budget == "auto" else budget,
        )  # fmt: skip
        evaluation = evaluate(
            engine, batches, Fitting(decision.options, processes=processes),
            objective=objective_of(config.train), used=used, trained_tokens=trained,
        )  # fmt: skip
    del model, engine, used
    gc.collect()
    give_back_memory(run_model.device)
    assert evaluation is not None  # nothing stops it
    return evaluation.beyond
