"""A run from its config to its report: the builder that hands plain arguments to the rest."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import torch

from furlong.config.schema import RunConfig
from furlong.report.patience import patience
from furlong.simulate.predict import predict_step
from furlong.train.batches.fitting import lack_of_memory_told
from furlong.train.checkpoints import base_fingerprint, one_process
from furlong.train.figures.announce import announce
from furlong.train.figures.report import TrainReport
from furlong.train.finish import finish
from furlong.train.preference.setup import engines_of, reference_of, with_references
from furlong.train.processes import ALONE, Processes, require_equal
from furlong.train.resumable import run_resumable
from furlong.train.run_folder import RunFolder, create_run_folder, folder_errors_reported
from furlong.train.run_model import batch_plans_of
from furlong.train.setup.prepare import (
    build_run_model,
    check_batches,
    check_run_room,
    checked,
    decided,
    device_of,
    engine_of,
    fused,
    layers_of,
    load_splits,
    ranks_of,
    run_data,
    steps_of,
    work_of,
)
from furlong.train.setup.start import open_run
from furlong.train.stop import StopRequest
from furlong.train.whole import model_size


def train(config: RunConfig, *, resume: bool = False) -> TrainReport | None:
    """Trains, evaluates, exports; None when a signal ended it before that, with a checkpoint.

    `resume` goes on with the run in `config.out`, if there is one. The run folder appears when
    everything that can be checked before the first step has been. Raises UserError for what the
    user can mend.
    """
    with ExitStack() as stack:
        return train_opened(stack, config, open_run(stack, config, resume=resume))


def train_opened(
    stack: ExitStack, config: RunConfig, run: RunFolder, processes: Processes = ALONE
) -> TrainReport | None:
    """The same for a run that `open_run` has opened, on each of its processes."""
    if run.report is not None:
        return run.report
    stack.enter_context(one_process())
    stack.enter_context(lack_of_memory_told())
    return _train(config, run, stack, processes)


def _train(
    config: RunConfig, run: RunFolder, stack: ExitStack, processes: Processes
) -> TrainReport | None:
    folder, launch = run.path, processes.launch
    device = device_of(launch)
    # What fails without weights and data fails first.
    storage, run_model, tokenizer = processes.together(lambda: checked(config, run, device, launch))
    with patience("reading the data", speaks=processes.is_first):
        data = processes.first_of_each_machine(
            partial(load_splits, config.data, tokenizer, config.train.loss)
        )
    train = data["train"]
    require_equal(
        processes, train.fingerprint, "data.train, and the files of the model's tokenizer"
    )
    processes.together(lambda: check_batches(config, run, train))
    decision = decided(config, run, train, run_model, storage, processes)
    rivals = batch_plans_of(config, run_model, decision)
    architecture, model_cost = run_model.architecture, run_model.whole_cost
    torch.manual_seed(config.train.seed + launch.number)
    ranks = ranks_of(decision.layout, device)
    build = partial(build_run_model, config, layers_of(decision.stages, ranks))
    model = processes.together(lambda: fused(config, build().to(device)))
    base = base_fingerprint(model, processes)
    reference = reference_of(config, model, architecture, processes)
    engine = engine_of(config, model, storage, ranks, processes)
    for split in data.values():
        processes.together(partial(split.check_vocabulary, engine.model.num_input_ids))
    engines = engines_of(config, engine, processes, work_of(model_cost), decision.stages, rivals)
    stack.callback(engines.close)
    num_steps, size = steps_of(config.train, train), model_size(engine, processes)
    announce(config, size, decision, device, storage, num_steps)
    processes.together(lambda: check_run_room(config, size.trained_bytes, folder, num_steps))
    data, decision = with_references(config, data, engines, decision, reference)
    with folder_errors_reported(folder), StopRequest() as stop:
        if run.is_new:
            make_folder = partial(create_run_folder, stack, folder)
            processes.together(make_folder if processes.is_first else lambda: None)
        figures = run_resumable(
            config, run, engines, model, decision, run_data(config, data), stop,
            num_steps=num_steps, architecture=architecture, base=base, reference=reference,
            predict=None if model_cost is None else partial(predict_step, model_cost),
        )  # fmt: skip
        report = None
        if not figures.stopped:
            report = finish(config, folder, engine, tokenizer, figures, processes)
        return report
