"""The trainer of a run: checks and builds its parts, trains, evaluates, saves and exports.

    with furlong.Trainer("run.yaml", callbacks=[Mine()]) as trainer:
        trainer.train()

All processes of a run create a trainer, and call the same methods.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from furlong.config.schema import RunConfig
from furlong.config.sources import build_run, load_run
from furlong.data.cache import cache_folder
from furlong.data.dataset import DataSet
from furlong.data.loader import TrainBatch, in_order, with_lookahead
from furlong.data.stream import StreamSet
from furlong.data.tokenize import tokenizer_of
from furlong.errors import DataError
from furlong.files import write_json
from furlong.models.build import export_model, exported_names, weights_fingerprint
from furlong.planners.options import ChunkOptions
from furlong.report.patience import patience
from furlong.runtime.batch import require_type
from furlong.runtime.profile import peak_memory_bytes
from furlong.runtime.rng import RNGState
from furlong.train import build, checkpoints
from furlong.train.batches import drawn_share, step_options
from furlong.train.card import Pushes, model_card, open_repository
from furlong.train.evaluation import HELD_OUT, TRAINING, Evaluation, draw_share, evaluate
from furlong.train.memory import Fitting, UsedMemory
from furlong.train.metrics import (
    Callback,
    MetricsLog,
    Records,
    StepFigures,
    build_meter,
    check_callbacks,
    open_bar,
    open_profiler,
    open_trackers,
)
from furlong.train.objective import diverged, objective_of
from furlong.train.optim import (
    build_optimizer,
    build_schedule,
    make_state,
    set_rate,
    warmup_steps_of,
)
from furlong.train.processes import ALONE, Processes, command_like, require_equal
from furlong.train.progress import Cadence, HeldOut, Progress, progress_of
from furlong.train.reference import reference_fingerprint, referenced
from furlong.train.run_folder import (
    CHECKPOINTS,
    CONFIG,
    EXPORT,
    METRICS,
    OPTIONS,
    PROFILE,
    REPORT,
    Checkpoint,
    DamagedCheckpointError,
    RunFolder,
    TrainReport,
    check_room,
    checkpoint_of,
    clear_export,
    create_run_folder,
    folder_errors_reported,
    holds_run,
    is_ours,
    list_checkpoints,
    list_export,
    read_checkpoint,
    shrunk,
    step_of,
    values_of,
)
from furlong.train.run_model import (
    RunModel,
    batch_plans_of,
    check_architecture,
    choose_run_plan,
    has_other_base,
    longest_of,
    new_rows_of,
    step_size,
    storage_of,
)
from furlong.train.samples import encode_prompts, sample
from furlong.train.start import check_alone, open_run
from furlong.train.stop import StopRequest

if TYPE_CHECKING:
    from furlong.kv.pools import Storage
    from furlong.planners.decide import Decision
    from furlong.runtime.step import StepResult


class Trainer:
    """A run: its model, data, optimizer and progress, ready for the next step."""

    def __init__(
        self,
        config: RunConfig | Mapping[str, Any] | str | Path,
        *,
        resume: bool = False,
        callbacks: Sequence[Callback] = (),
        processes: Processes = ALONE,
        run: RunFolder | None = None,
    ) -> None:
        """`config`: a RunConfig, a mapping of its keys, or the path of a run file. `resume`: resume
        the run in `config.out`, if there is one. `run`: the folder from `open_run`; None: open it.

        The run folder is created after all checks that are possible before the first step. Raises
        UserError for errors that the user can correct.
        """
        if isinstance(config, str | Path):
            config = load_run(Path(config))
        elif isinstance(config, Mapping):
            config = build_run(dict(config), "the config of Trainer")
        require_type(config, RunConfig, "pass a mapping of a run's keys, or a run file's path")
        self.config, self.processes, self.callbacks = config, processes, list(callbacks)
        check_callbacks(self.callbacks)
        if processes is ALONE:
            check_alone()
        self.objective = objective_of(config.train)
        self.progress = Progress()
        self.saved_step = 0
        self._stop: StopRequest | None = None
        self._num_loads = 0
        with ExitStack() as stack:
            self.run = run or open_run(stack, config, resume=resume, processes=processes)
            self.config = self.run.config or config
            hub = self.config.hub
            self._parts: list[Callback] = [] if hub is None else [Pushes(hub)]
            checkpoint = self.run.checkpoint
            kept = 0 if checkpoint is None else checkpoint.state["metrics_bytes"]
            # only the first process prints
            say = print if processes.is_first else lambda line: None
            self.log = MetricsLog(None, 0, say, keep_bytes=kept)
            if self.run.report is None:
                stack.enter_context(checkpoints.one_process())
                # first the checks that need neither weights nor data
                self._check()
                self._load_data()
                stack.callback(getattr(self.train_data, "close", lambda: None))
                self._choose_plan()
                self._build_model(stack)
                self._build_reference()
                self._build_optimizer()
                with folder_errors_reported(self.run.path):
                    self._open_folder(stack)
            self._stack = stack.pop_all()

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            # called for missing attributes, such as the parts of a finished run
            run, more = self.__dict__.get("run"), ""
            if run is not None and run.report is not None:
                more = f": the run in {run.path} is finished, train() returns its report"
                more += "; a larger train.steps or train.epochs goes on with it"
            raise AttributeError(f"{type(self).__name__} has no attribute {name}{more}")

    # The phases of building, in this order.

    def _check(self) -> None:
        """Check storage, model files, prompts and Hub repository; read the model's config and the
        tokenizer."""
        config, run, launch = self.config, self.run, self.processes.launch

        def check() -> tuple[torch.device, Storage, RunModel, Any]:
            device = build.device_of(launch)
            storage = storage_of(config, device, num_local=launch.num_local)
            build.check_run_model(config)
            model = RunModel.read(config, device, launch)
            if run.checkpoint is not None:
                check_architecture(run.checkpoint, model.architecture)
            tokenizer = tokenizer_of(config)
            if (rows := new_rows_of(config)) is not None:
                print(
                    f"new tokens: {len(rows)}, ids {rows.start} to {rows.stop - 1} of a vocabulary"
                    f" of {model.config.get_text_config().vocab_size}, whose rows begin as the mean"
                    " of the others"
                )
            self.prompts = encode_prompts(config, tokenizer) if config.log.samples else []
            if config.hub is not None and self.processes.is_first:
                open_repository(config.hub)
            return device, storage, model, tokenizer

        self.device, self.storage, self.run_model, self.tokenizer = self.processes.together(check)
        if launch.num_processes > 1 and config.model.init != "random":
            # processes read different rows of the weights, so checksums of these would not show
            # that machines have different files
            read = partial(weights_fingerprint, config.model.name, config.model.revision)
            require_equal(
                self.processes, self.processes.together(read), "model.name, its weights",
                "copy one folder of weights to all machines",
            )  # fmt: skip

    def _load_data(self) -> None:
        config, processes, checkpoint = self.config, self.processes, self.run.checkpoint
        state = {} if checkpoint is None else checkpoint.state
        self.day: str = state.get("day") or processes.from_first(lambda: str(date.today()))
        with patience("reading the data", speaks=processes.is_first):
            read = partial(
                build.load_splits, config.data, self.tokenizer, self.objective.format,
                config.train.seed, self.say, self.day,
                is_compared=processes.launch.local_number > 0,
                shared=build.shared_blocks(config, processes),
            )  # fmt: skip
            self.data = processes.first_of_each_machine(read)
        self._name_data()
        fingerprint = self.train_data.fingerprint
        require_equal(processes, fingerprint, "data.train, and the files of the model's tokenizer")

        def check() -> tuple[int, int]:
            if checkpoint is not None:
                checkpoints.check_data(checkpoint, fingerprint)
            print(f"data.train: {build.batches_in_words(config.train, self.train_data)}")
            num_steps = build.steps_of(config.train, self.train_data)
            if checkpoint is not None:
                build.check_steps(num_steps, checkpoint, config)
            return num_steps, longest_of(config, self.run_model, self.data, checkpoint)

        self.num_steps, self.longest_tokens = processes.together(check)
        per_epoch = 0
        if config.train.saves_per_epoch or config.train.evals_per_epoch:
            an_epoch = config.train.model_copy(update={"steps": None, "epochs": 1.0})
            per_epoch = build.steps_of(an_epoch, self.train_data)
        self.cadence = Cadence.of(config.train, self.num_steps, per_epoch)

    def _name_data(self) -> None:
        self.train_data: DataSet | StreamSet = self.data["train"]
        self.eval_data: DataSet | None = self.data.get("eval")
        lengths = self.config.data.eval_by_length
        self.beyond_data: dict[int, DataSet] = {
            length: self.data[name] for length in lengths if (name := f"eval {length}") in self.data
        }

    def _choose_plan(self) -> None:
        """Set `decision`, the options and the layout. A resumed run keeps its earlier decision if
        that is still valid; otherwise choose a new one."""

        def choose() -> Decision:
            decision = choose_run_plan(self.config, self.run_model, self.train_data, self.storage)
            return replace(decision, answer=None, model=None)  # not needed again

        self.decision = self.run.decided or self.processes.from_first(choose)
        self.run_model = self.run_model.decided(self.decision)
        if self.decision.offload_weights:
            self.storage = build.storage_beside(self.storage, self.run_model.cost, self.decision)

    def _build_model(self, stack: ExitStack) -> None:
        config, processes, decision = self.config, self.processes, self.decision
        torch.manual_seed(config.train.seed + processes.launch.number)
        self.model, ranks = build.read_model(
            stack, config, decision, self.longest_tokens, self.device, processes
        )
        before = {} if self.run.checkpoint is None else self.run.checkpoint.state
        frozen = checkpoints.base_fingerprint(  # checkpoints do not contain frozen weights
            self.model, processes, like=before.get("base_fingerprint")
        )
        self.fingerprints = {"base_fingerprint": frozen, "reference": None}
        alternatives = batch_plans_of(config, self.run_model, decision)
        if self.objective.needs_reference:
            self.fingerprints["reference"] = reference_fingerprint(
                self.model, self.run_model.architecture, dtype=config.model.dtype,
                max_seq_len=self.longest_tokens, processes=processes,
                like=before.get("reference"),
            )  # fmt: skip
            alternatives = None  # their plans know no weights of sequences
        # a tree that is no longer than a sequence needs no more memory than was planned for
        longest = self.train_data.longest if self.objective.unit_size > 1 else 0
        self.engine = build.batch_engine_of(
            config, self.model, self.run_model, decision, self.longest_tokens, self.storage, ranks,
            processes, alternatives, longest,
        )  # fmt: skip
        stack.callback(self.engine.close)
        engine, cost = self.engine.engine, self.run_model.cost
        self.objective.check_model(adds_router_loss=engine.adds_router_loss)
        for split in self.data.values():
            processes.together(partial(split.check_vocabulary, engine.model.num_input_ids))
        size = checkpoints.model_size(engine, processes)
        build.announce(config, size, decision, self.device, self.storage, self.num_steps, cost)
        state_bytes: float = 2 * size.trained_bytes
        if cost is not None:
            state_bytes = size.num_trained * cost.training.optimizer_bytes
        room = partial(
            check_room, self.run.path, config.train, weight_bytes=size.trained_bytes,
            state_bytes=round(state_bytes), num_saves=self.cadence.num_saves,
        )  # fmt: skip
        processes.together(room)

    def _build_reference(self) -> None:
        """If the loss needs a reference, attach log-probabilities by the initial model to the data.
        Also creates `fitting`, of the steps, and `eval_fitting`: chunks that an evaluation shrinks
        stay the evaluations'. Of several processes, which must start anew, they are the run's."""
        self.fitting = Fitting(
            self.decision.options, say=self.say, changed=self._record_options,
            processes=self.processes,
        )  # fmt: skip
        self.eval_fitting = self.fitting
        if self.processes.num_processes == 1:
            self.eval_fitting = Fitting(self.decision.options, say=self.say, whose="evaluations'")
        if (fingerprint := self.fingerprints["reference"]) is None:
            return
        folder = cache_folder(self.config.data.cache_dir)
        for name, split in self.data.items():
            self.data[name] = referenced(
                split, self.engine, self.fitting, folder=folder, fingerprint=fingerprint,
                key=f"data.{name}",
            )  # fmt: skip
        self._name_data()
        self.decision = replace(self.decision, options=self.fitting.options)

    def _build_optimizer(self) -> None:
        config, processes = self.config, self.processes
        self.optimizer = build_optimizer(self.model, config.train, processes)
        self.schedule = build_schedule(self.optimizer, config.train, self.num_steps)
        if (warmup := warmup_steps_of(config.train, self.num_steps)) > self.num_steps:
            self.say(f"warm-up: {warmup} steps, of which the run takes {self.num_steps}")
        cost = self.run_model.cost
        self.meter = build_meter(
            None if cost is None else cost.shape, self.device, config.model.dtype,
            has_frozen_base=self.fingerprints["base_fingerprint"] is not None,
            num_devices=processes.num_processes,
        )  # fmt: skip

    def _open_folder(self, stack: ExitStack) -> None:
        """Create a new run's folder, or restore the checkpoint of a resumed run; write options and
        config, and allocate the optimizer's state."""
        run, processes = self.run, self.processes
        if run.is_new:
            make_folder = partial(create_run_folder, stack, run.path)
            processes.together(make_folder if processes.is_first else lambda: None)
        if run.checkpoint is not None:
            self._restore(run.checkpoint)
        self.saved_step = self.progress.step
        self.checkpoints = checkpoints.Checkpoints(
            run.path / CHECKPOINTS, processes, num_kept=self.config.train.num_checkpoints,
            in_background=self.config.train.async_save, say=self.say,
        )  # fmt: skip
        stack.callback(self.checkpoints.close)
        # The config is written last: it marks the folder as a run's.
        if processes.is_first:
            self._record_options(self.fitting.options)
            write_json(run.path / CONFIG, self.config.model_dump(mode="json"))
        make_state(self.optimizer)
        self.used = self._used_memory()

    # The steps.

    def train(self) -> TrainReport | None:
        """Train, evaluate and export; return the report. If a signal stops the run, save a
        checkpoint (unless checkpoints are off) and return None.

        A step's checkpoint is saved before its evaluation, so a resumed run repeats the evaluation.
        """
        if self.run.report is not None:
            return self.run.report
        path = self.run.path
        with ExitStack() as stack, folder_errors_reported(path), StopRequest() as self._stop:
            self._open_log(stack)
            self.used = self._used_memory()  # does not count what trackers have loaded
            batches = self._from_here(lambda: with_lookahead(self.batches(), self._expect))
            loss, stopped = self._evaluate_if_due()
            while not (stopped or self.cadence.ends(self.progress)):
                try:
                    batch, data_s = self._next_batch(batches)
                except DataError:  # in a streamed source
                    self._finish_saves()
                    raise
                figures = self.step(batch, data_s)
                self._call("on_step_end", figures)
                if self.cadence.saves(self.progress.step):
                    self.save()
                loss, stopped = self._evaluate_if_due()
            self._finish_saves()
            if stopped:
                self._tell_how_to_go_on()
                return None
            if self.cadence.ends_early(self.progress):
                best = self.progress.held_out
                self.say(f"ended early: {best.num_since_best} evaluations without a lower held-out"
                         f" loss than after step {best.best_step}")  # fmt: skip
            report = self.export(loss)
            self._call("on_train_end", report)
            return report

    def batches(self) -> Iterator[TrainBatch]:
        """Return an endless iterator over global batches, starting at the run's position in the
        data. After `load_state_dict` it continues at the loaded position."""

        def make() -> Iterator[TrainBatch]:
            batches = build.batches_of(self.config.train, self.train_data, self.progress.data)
            if not self.config.data.streaming:
                return batches
            together = self.processes.together  # reading may fail on any process
            return iter(lambda: together(lambda: next(batches)), None)

        return self._from_here(make)

    def _from_here(self, make: Callable[[], Iterator[TrainBatch]]) -> Iterator[TrainBatch]:
        """Yield the batches of `make()`, which is called again after each `load_state_dict`."""
        moved = True
        while moved:
            loads, moved = self._num_loads, False
            for batch in make():
                yield batch
                if moved := loads != self._num_loads:
                    break

    def _expect(self, batch: TrainBatch) -> None:
        self.engine.expect(self.objective.learnt(batch), self.fitting.options)

    def step(self, batch: TrainBatch, data_s: float = 0.0) -> StepFigures:
        """Compute gradients of the global batch's mean loss, clip them, update the weights, and
        advance `progress`.

        If memory does not suffice, a run of one process computes the gradients again with smaller
        chunks. Raises DivergenceError, with unchanged weights, if the loss or the gradient norm is
        not finite or the loss is above `train.max_loss`, and ConfigError if no chunks fit.
        """
        step = self.progress.step + 1
        started_s = time.perf_counter()
        self.optimizer.zero_grad()
        drawn = RNGState.read(self.engine.device)
        self.result = result = self.gradients(batch, step)
        norm = self.engine.engine.clip_gradients(self.config.train.max_grad_norm)
        loss = self._loss_of(batch, result, norm, drawn)
        lr = float(self.schedule.get_last_lr()[0])
        self.optimizer.step()
        self.schedule.step()
        seconds, share = result.timeline.seconds_by_kind(), drawn_share(result.plan)
        step_s = time.perf_counter() - started_s + data_s
        meter = self.meter if share is None else None
        figures = StepFigures(
            loss=loss, grad_norm=norm, lr=lr,
            num_sequences=len(batch.sequences), num_tokens=batch.num_tokens,
            num_valid_tokens=batch.num_valid_tokens, longest_tokens=max(batch.seq_lens),
            tokens_per_s=batch.num_tokens / step_s,
            peak_memory_bytes=peak_memory_bytes(self.engine.device),
            used_memory_bytes=self.used.peak_bytes(),
            gradients_s=result.timeline.duration_s, chunk_size=self.fitting.options.size,
            forward_s=seconds.get("F", 0.0),
            recompute_s=seconds.get("R", 0.0) + seconds.get("K", 0.0),
            backward_s=seconds.get("B", 0.0), data_s=data_s, step_s=step_s,
            mfu=None if meter is None else meter.mfu(self.objective.learnt(batch).seq_lens, step_s),
            cpu_bytes=result.cpu_bytes or None, disk_bytes=result.disk_bytes or None,
            plan_s=self.engine.waited_s, plan_method=self.engine.method,
            metrics=result.metrics, drawn_share=share,
        )  # fmt: skip
        self.progress = self.progress.after(batch, figures)
        return figures

    def gradients(self, batch: TrainBatch, step: int) -> StepResult:
        """Compute gradients of the global batch's mean loss, in chunks that fit. If chunks are
        sampled, each attempt at a step uses the same seed."""

        def call(options: ChunkOptions) -> StepResult:
            self.used.restart()
            options = step_options(options, step)
            return self.objective.compute(self.engine, batch, options, watch=self.used.check)

        return self.fitting.compute(
            call, name=f"step {step}", num_tokens=batch.num_tokens, device=self.engine.device,
            undo=self.optimizer.zero_grad,
        )  # fmt: skip

    def evaluate(self) -> dict[str, Evaluation] | None:
        """Return evaluations of the held-out data, of that with a length of its own and of a share
        of the training sequences, by name; None if a signal has stopped them."""
        settings, trained_tokens = self.config.train, self.config.data.max_seq_len
        self.optimizer.zero_grad()  # predicted memory of an evaluation includes no gradients
        sets: dict[str, Any] = {}
        if self.eval_data is not None:
            sets[HELD_OUT] = self.eval_data, self.eval_data.units
        for length, data in self.beyond_data.items():
            sets[f"{HELD_OUT} {length}"] = data, data.units
        if settings.eval_train_share:
            assert isinstance(self.train_data, DataSet)  # the schema holds it
            sets[TRAINING] = draw_share(self.train_data, settings.eval_train_share, settings.seed)
        found = {}
        for name, (sequences, units) in sets.items():
            batches = in_order(sequences, units, step_size(settings))
            evaluation = evaluate(
                self.engine, batches, self.eval_fitting, objective=self.objective,
                used=self.used, should_stop=self.should_stop, trained_tokens=trained_tokens,
            )  # fmt: skip
            if evaluation is None:
                return None
            found[name] = evaluation
        return found

    def save(self) -> None:
        """Write a checkpoint of the current step; with `train.async_save`, start to write it."""
        if self.config.train.save_weights_only:
            tensors = checkpoints.trained_tensors(self.model)
        else:
            tensors = self.state_dict()["tensors"]
        best_step = self.progress.held_out.best_step if self.config.train.keep_best else 0
        self.checkpoints.save(self.progress.step, tensors, self._values(), best_step)
        self.saved_step = self.progress.step
        self._call("on_save")

    def _finish_saves(self) -> None:
        """Save the current step unless it is saved or checkpoints are off; wait for all writes."""
        if self.cadence.save_every and self.saved_step < self.progress.step:
            self.save()
        self.checkpoints.finish()

    def _values(self) -> dict[str, Any]:
        """Return the contents of a checkpoint's state.json."""
        return {
            "step": self.progress.step,
            "progress": asdict(self.progress),
            "config": self.config.model_dump(mode="json"),
            "options": values_of(shrunk(self.decision, self.fitting.options)),
            "data_fingerprint": self.train_data.fingerprint,
            "day": self.day,
            "longest_tokens": self.longest_tokens,
            **self.fingerprints,
            "architecture": self.run_model.architecture,
            "metrics_bytes": self.log.num_bytes,
            "written_by": checkpoints.written_by(self.device, self.processes.num_processes),
        }

    def export(self, eval_loss: float | None = None) -> TrainReport:
        """Write the model to a folder that transformers can load, and the report, which marks the
        run as finished; push the model if `hub` is set. Return the report."""
        folder, step = self.run.path, self.progress.step
        best = self.processes.from_first(self._best_checkpoint)
        if best is not None:
            step, eval_loss = self.progress.held_out.best_step, self.progress.held_out.best_loss
        self.processes.from_first(partial(clear_export, folder))
        self.write_model(folder / EXPORT, best)
        report = self.processes.from_first(partial(self._report, step, eval_loss))
        self._call("on_export", report)
        return report

    def write_model(self, folder: Path, best: Checkpoint | None = None) -> None:
        """Write the current model, or that of the checkpoint `best`, with its model card."""
        config, values, processes = self.config, self._values(), self.processes
        engine, dtype = self.engine.engine, getattr(torch, config.model.dtype)
        model, weights = engine.model.model, None

        def names() -> set[str]:
            nonlocal model
            if self.decision.layout.pp > 1:  # this process's model has one stage's layers
                model = build.build_run_model(config, is_empty=True)
            return {*exported_names(model).values()}

        if engine.ranks is not None or best is not None:
            weights = checkpoints.whole_weights(
                engine, processes, processes.from_first(names),
                None if config.model.lora is not None else dtype,
                None if best is None else best.path,
            )  # fmt: skip

        def write() -> None:
            with folder_errors_reported(folder.parent):
                export_model(
                    model, self.tokenizer, folder, dtype=dtype, weights=weights,
                    has_other_config=has_other_base(config),
                    card=model_card(config, values if best is None else best.state),
                )  # fmt: skip

        processes.from_first(write)

    def _best_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint to export with `train.keep_best`. Return None to export the current
        weights: without `keep_best`, if these weights are the best, or if the best checkpoint is
        damaged."""
        step = self.progress.held_out.best_step
        if not self.config.train.keep_best or step in (0, self.progress.step):
            return None
        found = self._read_best()
        if isinstance(found, Checkpoint):
            return found
        self.say(f"warning: the weights of step {self.progress.step} are exported in the place of"
                 f" those with the lowest held-out loss: {found}")  # fmt: skip
        return None

    def _read_best(self) -> Checkpoint | str:
        """Return the checkpoint with the lowest held-out loss or, if it is damaged, the reason."""
        best_step = self.progress.held_out.best_step
        try:
            return read_checkpoint(checkpoint_of(self.run.path / CHECKPOINTS, best_step))
        except DamagedCheckpointError as error:
            return error.given

    def state_dict(self) -> dict[str, Any]:
        """Return this process's part of the state that the next steps depend on: tensors under
        their checkpoint names (weights and optimizer state are not copied), and the progress. A
        collective."""
        return {
            "tensors": checkpoints.all_tensors(
                self.model, self.optimizer, self.processes, self.device
            ),
            "progress": asdict(self.progress),
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Load a `state_dict` of a trainer with the same layout. A collective. The next checkpoint
        replaces the checkpoints of later steps.

        Raises CheckpointError on all processes, before any change, if `values` does not fit.
        """
        state = self.state_dict()
        progress = self.processes.together(partial(progress_of, values, state, self._num_batches))
        known, own = dict(values["tensors"]), state["tensors"]
        rng = {name: known.pop(name) for name in [*known] if name.startswith("rng.")}
        for name, tensor in known.items():
            own[name].copy_(tensor)
        checkpoints.restore_generators(rng, self.processes.launch.number, self.engine.device)
        self.progress = progress
        set_rate(self.schedule, self.progress.step)
        self._num_loads += 1
        if progress.step <= self.saved_step:  # the run will take the later steps again
            self.checkpoints.finish()
            self.saved_step = self.processes.from_first(self._saved_before)

    def _num_batches(self, epoch: int) -> int:
        """Return the number of global batches in an epoch. Return 1 for a stream, whose position in
        the data is not a batch number."""
        if isinstance(self.train_data, StreamSet):
            return 1
        return len(build.epochs_of(self.config.train, self.train_data).batches(epoch))

    def _saved_before(self) -> int:
        """Return the newest step before the current one that has a checkpoint; 0 if none has."""
        found = map(step_of, list_checkpoints(self.run.path / CHECKPOINTS))
        return max((step for step in found if step < self.progress.step), default=0)

    def should_stop(self) -> bool:
        """Whether a signal has asked any process to stop."""
        return self.processes.any(self._stop is not None and self._stop.asked)

    def say(self, line: str) -> None:
        """Print a line, above the progress bar if there is one."""
        self.log.say(line)

    def close(self) -> None:
        """Close data, engine and checkpoints; unlock the run folder if this trainer locked it."""
        self._stack.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What happens around the steps.

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Restore weights, optimizer, generators, progress and learning rate."""
        state = checkpoint.state
        self.processes.together(partial(checkpoints.check_weights, checkpoint, self.fingerprints))
        checkpoints.restore_tensors(
            checkpoint.path, self.model, self.optimizer, self.processes, self.device
        )
        self.progress = Progress.from_dict(state["progress"])
        self._forget_best(state)
        set_rate(self.schedule, self.progress.step)
        written_by = checkpoints.written_by(self.device, self.processes.num_processes)
        checkpoints.tell_changes(written_by, state["written_by"])
        print(f"resumed from {checkpoint.path.name}: step {self.progress.step} of {self.num_steps}")

    def _forget_best(self, state: Mapping[str, Any]) -> None:
        """Reset the lowest held-out loss if `data.eval` has changed since the checkpoint or, with
        `train.keep_best`, if the checkpoint of that loss is missing or damaged."""
        config, held_out, cause = self.config, self.progress.held_out, ""
        if held_out.best_step and config.train.keep_best:
            found = self.processes.from_first(self._read_best)
            cause = "" if isinstance(found, Checkpoint) else found
        if build_run(state["config"], str(self.run.path)).data.eval != config.data.eval:
            cause = "data.eval has changed"
        if held_out.best_step and cause:
            self.progress = replace(self.progress, held_out=HeldOut(held_out.step))
            print(f"the lowest held-out loss, after step {held_out.best_step}, is looked for anew:"
                  f" {cause}")  # fmt: skip

    def _used_memory(self) -> UsedMemory:
        budget = self.config.memory.device
        most = None if budget == "auto" else budget
        return UsedMemory(self.model.parameters(), self.optimizer, self.device, budget_bytes=most)

    def _open_log(self, stack: ExitStack) -> None:
        """Open the profiler, trackers, progress bar and metrics.jsonl until `stack` closes. Records
        of steps after the resumed checkpoint are removed from metrics.jsonl."""
        done, path, settings = self.progress.step, self.run.path, self.config.log
        trace = path / PROFILE / f"process-{self.processes.launch.number}.json"
        records = Records(open_profiler(stack, settings.profile_steps, done, trace))
        self._parts.insert(0, records)
        stack.callback(self._parts.remove, records)
        if self.processes.is_first:
            config = self.config.model_dump(mode="json")
            trackers = open_trackers(stack, path, settings, config, done)
            say, advance = open_bar(stack, done, self.num_steps)
            log = MetricsLog(
                path / METRICS, self.num_steps, say, keep_bytes=self.log.num_bytes, done=done,
                trackers=trackers, advance=advance,
            )  # fmt: skip
            self.log = stack.enter_context(log)

    def _next_batch(self, batches: Iterator[TrainBatch]) -> tuple[TrainBatch, float]:
        """Return the next batch with a label, and the seconds spent waiting for it. Batches without
        labels are skipped and counted."""
        started_s = time.perf_counter()
        while (batch := next(batches)).num_valid_tokens == 0:
            self.progress = self.progress.skipping(batch)
            self.log.skipped(self.progress.step + 1)
        return batch, time.perf_counter() - started_s

    def _evaluate_if_due(self) -> tuple[float | None, bool]:
        """Evaluate and generate samples if due. Return the held-out loss (None without an
        evaluation or held-out data), and whether a signal stops the run."""
        step, settings = self.progress.step, self.config.train
        is_last = step == self.num_steps
        has_data = self.eval_data is not None or self.beyond_data or settings.eval_train_share
        if not (has_data or self.prompts) or not self.cadence.evaluates(step):
            return None, not is_last and self.should_stop()
        started_s = time.perf_counter()
        evaluations = self.evaluate()
        if evaluations is None:
            return None, True
        if evaluations:
            self.log.evaluation(step, evaluations, time.perf_counter() - started_s)
            self._call("on_evaluate", evaluations)
        if self.prompts:
            sample(self)
        loss = evaluations[HELD_OUT].loss if HELD_OUT in evaluations else None
        self.progress = self.progress.evaluated(loss)
        is_best = settings.keep_best and self.progress.held_out.best_step == step > self.saved_step
        if is_best:
            self.save()
        return loss, not is_last and self.should_stop()

    def _tell_how_to_go_on(self) -> None:
        step = self.progress.step
        assert self._stop is not None
        cause = self._stop.signal_name or "a signal to another process"
        path = self.run.path
        command = command_like(self.processes.launch, f"train {path / CONFIG} --resume")
        where = f"stopped by {cause} after step {step} of {self.num_steps}"
        if self.config.train.save_weights_only:
            print(f"{where}; its checkpoints have no optimizer to go on with: furlong export {path}"
                  " makes a model of the newest")  # fmt: skip
        elif list_checkpoints(path / CHECKPOINTS):
            print(f"{where}; go on with: {command}")
        else:
            print(f"{where}; there is no checkpoint: {command} begins again")

    def _report(self, step: int, eval_loss: float | None) -> TrainReport:
        folder, progress = self.run.path, self.progress
        exported = folder / EXPORT
        report = TrainReport(
            num_steps=progress.step, num_tokens=progress.num_tokens,
            train_loss=progress.last_loss, eval_loss_before=progress.eval_loss_before,
            eval_loss_after=eval_loss, tokens_per_s=progress.num_tokens / progress.steps_s,
            peak_memory_bytes=progress.peak_memory_bytes,
            num_skipped_batches=progress.num_skipped_batches, run_folder=str(folder),
            export_folder=str(exported), exported_step=step, export_files=list_export(exported),
        )  # fmt: skip
        write_json(folder / REPORT, asdict(report))
        of_step = f"step {step}, the lowest held-out loss, " if step != progress.step else ""
        print(f"exported {of_step}to {exported}")
        return report

    def _record_options(self, options: ChunkOptions) -> bool:
        """Write the current options to the run folder; return whether a resume would use them."""
        if is_ours(self.run.path):
            write_json(self.run.path / OPTIONS, values_of(shrunk(self.decision, options)))
        return holds_run(self.run.path)

    def _call(self, hook: str, *values: Any) -> None:
        for callback in (*self._parts, *self.callbacks):
            getattr(callback, hook)(self, *values)

    def _loss_of(
        self, batch: TrainBatch, result: StepResult, norm: float, drawn: RNGState
    ) -> float | None:
        """Return the loss. Return None if the loss is estimated from sampled chunks and no sampled
        chunk has a label; the gradients are then 0.

        Raises DivergenceError, on all processes and after freeing the gradients, if the loss or
        gradient norm is not finite, or if the loss is above `train.max_loss`. If the loss is finite
        but too high, the random generators are first set back to `drawn`, their state before the
        step, and the previous step is saved (see `_finish_saves`).
        """
        is_estimated = result.plan is not None and not result.plan.report_loss
        if is_estimated and norm == 0 and math.isnan(result.loss):
            return None
        most, step = self.config.train.max_loss, self.progress.step + 1
        is_finite = math.isfinite(result.loss) and math.isfinite(norm)
        if is_finite and (most is None or result.loss <= most):
            return result.loss
        self.optimizer.zero_grad()
        if is_finite:
            drawn.write(self.engine.device)  # as if the step had not been tried
            self._finish_saves()
        kept = "there is no checkpoint (train.save_every_steps says when one is written)"
        if self.saved_step:
            kept = f"the checkpoint of step {self.saved_step} is whole, furlong export makes a"
            kept += " model of it"
        figures = f"loss {result.loss}, gradient norm {norm}"
        raise diverged(batch, step, figures, most if is_finite else None, kept).on_all()
