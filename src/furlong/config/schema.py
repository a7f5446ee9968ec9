"""The one schema of a run: it serves the run file, the flags, `--help` and Python.

Numbers may be given as text, as flags are (see `numbers`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings.sources import PydanticBaseSettingsSource

from furlong.config.data import DataConfig
from furlong.config.numbers import AmountBytes, Natural, Number, Positive
from furlong.config.parallel import ParallelConfig
from furlong.config.paths import PlainPath, require_plain
from furlong.config.rope import RopeConfig
from furlong.config.tiers import TierDial, names_tier, told
from furlong.config.train import TrainConfig

_SECTION = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


Amount = AmountBytes | Literal["auto"]
Names = Annotated[tuple[str, ...], BeforeValidator(_listed), Field(min_length=1)]


class LoraConfig(BaseModel):
    """Low-rank adapters on frozen weights."""

    model_config = _SECTION

    rank: Positive = 8
    """Rank of the adapters."""
    alpha: Number = Field(default=16.0, gt=0)
    """The adapters' output is scaled by alpha / rank."""
    dropout: Number = Field(default=0.0, ge=0, lt=1)
    """Dropout before the adapters; above 0 the draw depends on how sequences are cut."""
    target_modules: Literal["all-linear"] | Names = "all-linear"
    """all-linear (every linear layer but the head) or the names of the modules."""

    @field_validator("target_modules")
    @classmethod
    def _all_linear_in_a_list(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        # a flag is read as a list, and no module has this name
        return "all-linear" if value == ("all-linear",) else value


class ModelConfig(BaseModel):
    """The model."""

    model_config = _SECTION

    name: PlainPath = Field(min_length=1, examples=["Qwen/Qwen2.5-0.5B"])
    """Hub id or local folder of a Hugging Face model with its tokenizer."""
    init: Literal["pretrained", "random"] = "pretrained"
    """pretrained loads the weights; random needs config.json and the tokenizer only."""
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Type of the compute and of frozen weights; trained weights are float32 or wider."""
    lora: LoraConfig | None = None
    """null trains every weight."""
    rope: RopeConfig | None = None
    """Change of the position embedding; null keeps the model's own."""
    compile: bool = False
    """torch.compile of each layer, with attention between its graphs; in one process."""
    kernels: Literal["none", "liger", "hub"] = "none"
    """Norms and activations of liger-kernel, or of the Hub: transformers' use_kernels, which loads
    compiled code from there."""


class SampleConfig(BaseModel):
    """Which chunks get a backward. The forward stays exact, the gradient becomes an estimate: for
    rule unbiased its mean over all draws is the exact one."""

    model_config = _SECTION

    rate: Annotated[Number, Field(gt=0, le=1)] | None = Field(default=None, examples=[0.25])
    """Share of a sequence's chunks that are drawn; give this or chunks."""
    chunks: Positive | None = Field(default=None, examples=[8])
    """Chunks of a sequence that are drawn, with rule unbiased on average; a sequence that has no
    more of them is computed exactly."""
    rule: Literal["unbiased", "fixed", "paper"] = "unbiased"
    """unbiased draws each chunk by itself; fixed draws exactly so many, exact on average but for
    gradients that pass through two or more earlier chunks; paper is SpaCO as printed."""
    label_rate: Annotated[Number, Field(gt=0, le=1)] | None = Field(default=None, examples=[0.5])
    """Probability of drawing a chunk that has labels, with rule unbiased only; null = 1."""
    cap: Annotated[Number, Field(ge=1)] | None = Field(default=None, examples=[2.0])
    """Most that gradients from later chunks are multiplied by, with rules fixed and paper only:
    less variance, more bias; null = no limit."""
    report_loss: bool = False
    """Whether chunks that are not drawn compute their loss too, which takes the rest of their
    forward; without it the loss of a step is that of the drawn chunks."""
    check_every_steps: Natural = 0
    """Steps between comparisons of a sampled gradient with the exact one, on the longest sequence
    of the batch: cosine and relative error; 0 = never."""


class ChunksConfig(BaseModel):
    """How sequences are cut and what is kept: time and memory, never a gradient but for sample."""

    model_config = _SECTION

    size: Positive | Literal["auto"] = Field(default="auto", examples=[1024])
    """Most tokens in a chunk."""
    num_retained: Natural | Literal["auto"] = Field(default="auto", examples=[1])
    """How many last chunks of a sequence keep their whole graph."""
    keep: Literal["auto", "input", "kv", "attention", "all"] = Field(
        default="auto", examples=["attention"]
    )
    """Tensors that the other chunks keep between forward and backward."""
    tier: TierDial = "auto"
    """Where kept tensors live: device, host (needs memory.host), disk (needs memory.disk), or a
    mapping of kinds (kv, inputs, attention, graphs) such as {attention: disk}, others on the
    device."""
    order: Literal["auto", "chunk-first", "layer-first"] = Field(
        default="auto", examples=["chunk-first"]
    )
    """chunk-first takes a chunk through all layers; layer-first takes all chunks of a sequence
    through a stage of some layers before the next: less memory, more work."""
    stage_layers: Positive | Literal["auto"] = Field(default="auto", examples=[4])
    """Most layers of a stage, with layer-first."""
    method: Literal[
        "auto", "chunkflow", "seco", "spaco", "infinipipe", "skrull", "fpdt", "places"
    ] = Field(default="auto", examples=["chunkflow"])
    """Published system whose plans are run, batch by batch; auto = the fastest that fits."""
    sample: SampleConfig | None = None
    """Backward for drawn chunks only, such as {rate: 0.25}; null = for all, exactly."""

    @model_validator(mode="after")
    def _stages_are_layer_first(self) -> ChunksConfig:
        if self.order == "chunk-first" and self.stage_layers != "auto":
            raise told(
                key="chunks.stage_layers and chunks.order",
                given=f"chunks.stage_layers = {self.stage_layers} with chunks.order: chunk-first",
                required="chunks.order: layer-first with chunks.stage_layers",
                change="set chunks.order to layer-first, or remove chunks.stage_layers",
            )
        return self

    @model_validator(mode="after")
    def _a_sample_has_a_size(self) -> ChunksConfig:
        if self.sample is not None and self.size == "auto":
            raise told(
                key="chunks.size and chunks.sample",
                given="chunks.size = 'auto' with chunks.sample",
                required="a number: which gradient is estimated does not depend on the size of"
                " chunks, but its error does, so no search may choose it",
                change="set chunks.size, such as 1024, or remove chunks.sample",
            )
        return self


class MemoryConfig(BaseModel):
    """Budgets."""

    model_config = _SECTION

    device: Amount = Field(default="auto", examples=["24GiB"])
    """Budget of the device, on a CPU of everything in RAM, such as 24GiB; auto = most of what is
    free at the start. Dials of chunks that are auto follow it."""
    host: Amount = Field(default="auto", examples=["24GiB"])
    """Budget of the host's RAM, pinned where the system allows it, for kept tensors of a GPU; auto
    = most of what is free, 0 = none. Refused on a CPU, whose RAM is the device."""
    disk: AmountBytes = Field(default=0, examples=["64GiB"])
    """Budget on disk for kept tensors; 0 = none."""
    disk_dir: Annotated[str | None, Field(min_length=1), AfterValidator(require_plain)] = None
    """Folder of what lives on disk, on a local drive; null = the run's folder."""


class LogConfig(BaseModel):
    """Where figures go besides the terminal and metrics.jsonl."""

    model_config = _SECTION

    tensorboard: bool = False
    """Write TensorBoard files into the run folder; needs furlong[tensorboard]."""
    wandb: Annotated[str, Field(min_length=1)] | None = Field(default=None, examples=["furlong"])
    """Project on Weights & Biases; needs furlong[wandb]."""


class RunConfig(BaseSettings):
    """A run, to be trained or planned."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, case_sensitive=True
    )

    model: ModelConfig
    data: DataConfig
    chunks: ChunksConfig = ChunksConfig()
    memory: MemoryConfig = MemoryConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    log: LogConfig = LogConfig()
    out: PlainPath = Field(default="runs/first", min_length=1)
    """Folder of the run: must not exist or be empty, unless --resume continues it."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *sources: Any, **named: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The file's values only; `sources.parse_run` puts the flags in front."""
        return (named["init_settings"],)

    @model_validator(mode="after")
    def _tiers_have_room(self) -> RunConfig:
        for tier, budget in (("disk", self.memory.disk), ("host", self.memory.host)):
            if budget == 0 and names_tier(self.chunks.tier, tier):
                name = f"memory.{tier}"
                raise told(
                    key=f"chunks.tier and {name}",
                    given=f"chunks.tier = {self.chunks.tier!r} with {name} = 0",
                    required=f"{name} above 0, for what is to live there",
                    change=f"add {name}, such as {name}: 64GiB, or change chunks.tier",
                )
        return self

    @model_validator(mode="after")
    def _pairs_have_a_loss(self) -> RunConfig:
        loss, shape = self.train.loss, self.data.format
        if shape != "auto" and (loss == "dpo") != (shape == "preference"):
            raise told(
                key="data.format and train.loss",
                given=f"data.format = {shape!r} with train.loss: {loss}",
                required="preference (chosen + rejected) with dpo, and another shape with sft",
                change="remove data.format, or change train.loss",
            )
        return self

    @model_validator(mode="after")
    def _adapters_have_a_base(self) -> RunConfig:
        if self.model.lora is not None and self.model.init == "random":
            raise PydanticCustomError(
                "lora_base",
                "model.init: pretrained with model.lora: an adapter is saved without its base, so"
                " random base weights would be lost",
            )
        return self
