"""The model card (README.md) of an export, and its upload to the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from furlong.config.schema import HubConfig, RunConfig
from furlong.data.dataset import SEQUENCES
from furlong.data.sources import is_hub_name
from furlong.errors import ConfigError, in_short
from furlong.planners.decide import division_in_words
from furlong.planners.options import option_values, value_in_words
from furlong.planners.spaco import Sampling, sampling_in_words
from furlong.train.metrics import Callback
from furlong.train.run_folder import EXPORT, TrainReport, decision_of


def model_card(config: RunConfig, state: Mapping[str, Any]) -> str:
    """Return the text of a model card. `state`: state.json of the exported checkpoint.

    Local files are named without their folders.
    """
    from huggingface_hub import ModelCardData
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    kind = state["architecture"].get("model_type")
    has_images = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    model, lora = config.model, config.model.lora
    sources = [source.path for source in config.data.train]
    base = Path(model.name).name if Path(model.name).expanduser().exists() else model.name
    data = ModelCardData(
        base_model=model.name if base == model.name and model.init == "pretrained" else None,
        datasets=[s.removeprefix("hf://datasets/") for s in sources if is_hub_name(s)] or None,
        library_name="transformers" if lora is None else "peft",
        pipeline_tag="image-text-to-text"
        if has_images and model.init == "pretrained"
        else "text-generation",
        tags=["furlong", "long-context", config.train.loss] + ["lora"] * (lora is not None),
    )
    names = [s if is_hub_name(s) else Path(s).name for s in sources]
    progress, is_streamed = state["progress"], config.data.streaming
    decision = decision_of(state["options"])
    values = {"order": decision.options.order} | option_values(decision.options)
    words = [f"{name} {value_in_words(value)}" for name, value in values.items()]
    figures = {
        "Base model": f"{base}{f' at {model.revision}' if model.revision else ''}"
        if model.init == "pretrained"
        else f"none: random weights in the shape of {base}",
        "Trained": _trained(config),
        "Steps": f"{state['step']}, {progress['num_tokens']:,} tokens; sequences of up to"
        f" {config.data.max_seq_len:,} tokens",
        "Loss": _losses(config, progress),
        "Optimizer": f"{config.train.optimizer}, learning rate {config.train.lr:g},"
        f" {config.train.schedule}",
        "Plan": f"{', '.join(words)}; {division_in_words(decision.layout, decision.stages)}",
        "Gradients": _gradients(config, decision.options.sampling),
        "Data": f"{', '.join(names)}; fingerprint{' of names and settings' * is_streamed}"
        f" `{state['data_fingerprint'][SEQUENCES]}`",
        "Versions": ", ".join(f"{name} {own}" for name, own in state["written_by"].items()),
    }  # fmt: skip
    title = config.log.name or f"{base}, trained by furlong"
    rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in figures.items())
    return f"---\n{data.to_yaml()}\n---\n\n# {title}\n\n| | |\n| --- | --- |\n{rows}\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _trained(config: RunConfig) -> str:
    lora, quantize = config.model.lora, config.model.quantize
    if lora is None:
        return "every weight"
    kind = quantize["type"] if isinstance(quantize, dict) else quantize
    over = "" if kind is None else f" over a base in {kind}"
    return f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}{over}"


def _losses(config: RunConfig, progress: Mapping[str, Any]) -> str:
    last, held_out = progress["last_loss"], progress["held_out"]
    words: list[str] = [config.train.loss]
    if last is not None:
        words.append(f"{last:.4f} in the last step")
    if held_out["best_loss"] is not None:
        words.append(f"lowest held-out {held_out['best_loss']:.4f} after step"
                     f" {held_out['best_step']}")  # fmt: skip
    return ", ".join(words)


def _gradients(config: RunConfig, sampling: Sampling | None) -> str:
    if sampling is not None:
        return f"an estimate: {sampling_in_words(sampling)}"
    lora = config.model.lora
    draws = lora is not None and lora.dropout > 0
    decided = "time, memory and what dropout leaves out" if draws else "time and memory alone"
    return (
        "exact: those of whole sequences, each token beside all that it attends to, but for the"
        f" rounding of {config.model.dtype}; the plan decides {decided}"
    )


# The hub.


def open_repository(settings: HubConfig) -> None:
    """Create the run's repository on the Hub unless it exists. Raises ConfigError if the repository
    is not writable, or if it is public although `hub.private` is set."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(settings.repo, private=settings.private, exist_ok=True)
        api.auth_check(settings.repo, write=True)
        is_public = api.model_info(settings.repo).private is False
    except Exception as error:  # token, network and Hub errors have various types
        raise _refused(settings, error, "hf auth login, check the owner, or remove hub") from error
    if settings.private and is_public:
        raise ConfigError(
            given=f"hub.private with {settings.repo}, which is there and public",
            required="a private repository, or hub.private: false",
            source="hub.repo",
            change="make it private, choose another, or set hub.private to false",
        )


def push(settings: HubConfig, folder: Path, message: str) -> None:
    """Upload an export. Raises ConfigError if that fails."""
    from huggingface_hub import HfApi

    try:
        HfApi().upload_folder(repo_id=settings.repo, folder_path=folder, commit_message=message)
    except Exception as error:
        change = f"the export is whole: hf upload {settings.repo} {folder}"
        raise _refused(settings, error, change) from error
    print(f"pushed to {settings.repo}: {message}")


def _refused(settings: HubConfig, error: Exception, change: str) -> ConfigError:
    return ConfigError(
        given=f"hub.repo = {settings.repo}: {in_short(error)}",
        required="a repository of the hub that can be reached, and that your token may write to",
        source="hub.repo",
        change=change,
    )


class Pushes(Callback):
    """Callback that pushes the exported model to the run's repository on the Hub; with
    `hub.every_save`, it also pushes the model of each checkpoint."""

    def __init__(self, settings: HubConfig) -> None:
        self._settings = settings

    def on_save(self, trainer: Any) -> None:
        if not self._settings.every_save:
            return
        with TemporaryDirectory() as folder:
            exported = Path(folder) / EXPORT
            trainer.write_model(exported)
            message = f"step {trainer.progress.step}"
            try:
                trainer.processes.from_first(lambda: push(self._settings, exported, message))
            except ConfigError as error:  # the next push may succeed
                trainer.say(f"warning: not pushed: {error.given}")

    def on_export(self, trainer: Any, report: TrainReport) -> None:
        folder, message = Path(report.export_folder), f"step {report.exported_step}"
        trainer.processes.from_first(lambda: push(self._settings, folder, message))
