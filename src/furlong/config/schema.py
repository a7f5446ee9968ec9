"""The schema of a run, which serves the run file, the flags, `--help` and Python.

Values may be given as text, as in flags. `1000`, `1e3` and `1000.0` are the same integer; booleans
and infinity are not numbers. In paths `~` is the home folder, and nothing else is expanded. Keys of
`model.rope` are those of transformers.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, partial, reduce
from types import UnionType
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
    with_config,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError, to_json
from typing_extensions import TypedDict

from furlong.config.adapter import with_keys_of_adapter
from furlong.errors import NEAR, in_short, in_yaml
from furlong.units import parse_bytes

_WORDS = {
    "tuple_type": "a list",
    "too_long": "a list of no more than {max_length}",
    "dict_type": "a mapping",
    "model_type": "a text, or a mapping of keys",
    "missing": "a value",
    "string_too_short": "a text that is not empty",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "string_pattern_mismatch": "OWNER/NAME",
}


def words_of(error: ErrorDetails) -> str:
    """Return which values a key accepts, in pydantic's words, or in plain words where pydantic
    names types of Python."""
    told = re.sub("^Input should be |^Value error, ", "", error["msg"])
    words = _WORDS.get(error["type"], told)
    return words.replace("{max_length}", str(error.get("ctx", {}).get("max_length")))


_SECTION = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
MAX_WHOLE = 10**12
MAX_BYTES = 2**60


def _refuse_odd(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("truth_value", "Input should be a number, not true or false")
    return value


def _read_whole(value: object) -> object:
    _refuse_odd(value)
    if isinstance(value, str):
        for kind in (partial(int, base=0), float):  # 0x10 is a number of YAML too
            with suppress(ValueError):
                return kind(value)
    return value


def _read_amount(value: object) -> object:
    number = _read_whole(value)
    return parse_bytes(number) if isinstance(number, str) and number != "auto" else number


Number = Annotated[float, BeforeValidator(_refuse_odd), Field(allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_read_whole), Field(le=MAX_WHOLE)]
Natural = Annotated[Whole, Field(ge=0)]
Positive = Annotated[Whole, Field(gt=0)]


def _share_or_whole(number: float) -> float:
    if number > 1 and number % 1:
        raise PydanticCustomError("share", "a share below 1, or a whole number")
    return number


def _null(example: Any) -> Any:
    """Return a field whose default is null, with an example of another value."""
    return Field(default=None, examples=[example])


Share = Annotated[Number, Field(gt=0, le=1)]
AboveZero = Annotated[Number, Field(gt=0)]
ShareOrWhole = Annotated[Number, AfterValidator(_share_or_whole)]
Decay = Annotated[Number, Field(ge=0, lt=1)]
PerEpoch = Annotated[Number, Field(gt=0, le=1e6)]
Name = Annotated[str, Field(min_length=1)]
AmountBytes = Annotated[int, BeforeValidator(_read_amount), Field(ge=0, le=MAX_BYTES)]
"""Bytes, also written as `512MiB`, `24GiB` or `80GB`."""


OffloadKind = Literal["kv", "inputs", "attention", "graphs"]
OffloadTarget = Literal["none", "cpu", "disk"]


def told(**parts: str) -> PydanticCustomError:
    """Return an error for validators to raise. `parts`: `required` and `change` (advice);
    optionally `given` and `keys`, the keys whose values do not fit each other, as `a and b`."""
    return PydanticCustomError("told", "{required}", dict(parts))


def _known_places(value: object) -> object:
    kinds, places = (*get_args(OffloadKind), "weights"), get_args(OffloadTarget)
    if isinstance(value, Mapping) and not (
        set(kinds).issuperset(value) and all(place in places for place in value.values())
    ):
        near = partial(difflib.get_close_matches, n=1, cutoff=NEAR)
        meant = {
            (*near(str(kind), kinds), "kv")[0]: (*near(str(place), places), "none")[0]
            for kind, place in value.items()
        }
        raise told(
            required=f"kinds of tensors ({', '.join(kinds)}), and for each a place"
            f" ({', '.join(places)})",
            change=f"write {in_yaml(meant)}",
        )
    return value


OffloadChoice = Annotated[
    Literal["auto"] | OffloadTarget | dict[OffloadKind | Literal["weights"], OffloadTarget],
    BeforeValidator(_known_places),
]


def offloads_to(value: object, target: str) -> bool:
    """Return whether a value of `offload` moves anything to `target`."""
    return target in value.values() if isinstance(value, Mapping) else value == target


def kept_offload(value: OffloadChoice) -> OffloadChoice:
    """Return the part of an `offload` value that is about kept tensors, without the entry for
    weights. If no other entry is left, return "auto" for `{weights: cpu}`, and "none" otherwise."""
    if not isinstance(value, dict):
        return value
    kept: OffloadChoice = {kind: target for kind, target in value.items() if kind != "weights"}
    return kept or ("auto" if offloads_weights(value) else "none")


def offloads_weights(value: OffloadChoice) -> bool | None:
    """Return whether a value of `offload` moves weights, gradients and optimizer states to CPU
    memory; None for "auto", which leaves this to the search."""
    if value == "auto":
        return None
    return isinstance(value, Mapping) and value.get("weights") == "cpu"


_VARIABLE = re.compile(r"\$([A-Za-z_]\w*|\{\w+\}|\(.*\))")


def require_plain(path: str) -> str:
    """Return the path. Raises PydanticCustomError for a variable in it, since a folder with the
    variable's literal name would be created."""
    if found := _VARIABLE.search(path):
        raise told(
            required=f"a path as it is: variables such as {found[0]} are not expanded, ~ is",
            change="write the path itself, or give the key as a flag, where the shell expands it",
        )
    return path


PlainPath = Annotated[str, AfterValidator(require_plain)]


class RopeConfig(BaseModel):
    """Changes to the rotary position embedding."""

    model_config = _SECTION

    rope_type: Literal["default", "linear", "yarn", "llama3", "longrope"] = Field(examples=["yarn"])
    """default changes rope_theta only; transformers defines which keys the other types need."""
    rope_theta: AboveZero | None = _null(1e6)
    """Base of the frequencies; null keeps the model's."""
    factor: Annotated[Number, Field(ge=1)] | None = _null(4)
    """Number of positions, as a multiple of those before any scaling."""
    original_max_position_embeddings: Positive | None = None
    """Number of positions before any scaling; null takes the model's."""
    attention_factor: Number | None = None
    """yarn, longrope: scale of cosines and sines; null infers it from factor."""
    beta_fast: Number | None = None
    """yarn: frequencies with more rotations than this in the original positions stay."""
    beta_slow: Number | None = None
    """yarn: frequencies with fewer rotations than this are interpolated in full."""
    mscale: Number | None = None
    """yarn: coefficient in the numerator of the inferred attention_factor."""
    mscale_all_dim: Number | None = None
    """yarn: coefficient in the denominator of the inferred attention_factor."""
    truncate: bool | None = None
    """yarn: whether the bounds that follow from the betas are rounded to whole dimensions."""
    low_freq_factor: Number | None = None
    """llama3: frequencies with fewer rotations than this are interpolated in full."""
    high_freq_factor: Number | None = None
    """llama3: frequencies with more rotations than this in the original positions stay."""
    short_factor: tuple[Number, ...] | None = None
    """longrope: one factor per frequency, for runs with no record above the original length."""
    long_factor: tuple[Number, ...] | None = None
    """longrope: one factor per frequency, for the other runs: the longest record decides."""


class ParallelConfig(BaseModel):
    """Layout of the run on several devices."""

    model_config = _SECTION

    dp: Positive | Literal["auto"] = Field(default="auto", examples=[2])
    """Data parallel replicas; auto: the number of processes divided by sp and pp."""
    sp: Positive | Literal["auto"] = 1
    """Processes that share each sequence (sequence parallelism); auto: the fastest number."""
    pp: Positive | Literal["auto"] = 1
    """Pipeline stages; auto: the fastest number."""
    replicate: Positive = Field(default=1, examples=[2])
    """Groups of replicas that each hold all weights (HSDP, torchtitan's dp_replicate): weights are
    gathered within a group, gradients are also summed over the groups. It must divide dp."""
    reshard: bool | Literal["auto"] = Field(default="auto", examples=[True])
    """Whether gathered weights are freed after use: with layer-first the weights of two stages are
    whole at a time, gathered once in the forward and once in the backward; in a pipeline those of
    two layers, gathered for every pass. false: all stay whole for the step. auto: false, unless no
    such plan fits or the fastest one is far above the least possible time."""


RECORD_FIELDS = (
    "text", "messages", "tools", "system", "chat_template_kwargs", "instruction", "input", "output",
    "history", "prompt", "completion", "chosen", "rejected", "label", "input_ids", "labels",
)  # fmt: skip
"""Fields of a record that data.fields may rename."""
TURN_FIELDS = ("role", "content", "tool_calls", "reasoning_content", "weight")
"""Fields of a message that data.fields may rename."""
OTHER_FIELDS: dict[str, type] = {"roles": dict, "unused": list}
"""Keys of data.fields that name no field: roles renames roles, unused lists fields of records and
of messages to remove before they are read."""


def _known_fields(fields: dict[str, Any]) -> dict[str, Any]:
    for name, their in fields.items():
        known = (*RECORD_FIELDS, *TURN_FIELDS, *OTHER_FIELDS)
        if name not in known or not isinstance(their, OTHER_FIELDS.get(name, str)):
            raise told(
                given=f"data.fields with {name}: {their!r}",
                required=f"furlong's name first, one of {', '.join(known)}, then the data's; roles:"
                " {the data's: furlong's}; unused: [the data's]",
                change="write {text: chapter} for texts in the field chapter, or"
                " {roles: {human: user}}",
            )
    theirs = [name for name in fields.values() if isinstance(name, str)]
    if len(theirs) > len(set(theirs)):
        raise told(
            required="a different field of the data for each of furlong's",
            change="name each field of the data once",
        )
    return fields


Fields = Annotated[dict[str, str | list[str] | dict[str, str]], AfterValidator(_known_fields)]
Format = Literal[
    "text", "chat", "sharegpt", "alpaca", "completion", "tokens", "preference", "unpaired"
]
FORMAT_OF_LOSS: dict[str, Format] = {"dpo": "preference", "kto": "unpaired"}
"""The format of records that a preference loss requires."""


class Source(BaseModel):
    """A source of sequences; a string is taken as its path."""

    model_config = _SECTION

    path: PlainPath = Field(min_length=1)
    """File, folder, or dataset of the Hub: hf://datasets/OWNER/NAME, or OWNER/NAME if there is no
    local path of that name."""
    name: Name | None = None
    """Configuration (subset) of a dataset, as named by its card or its folders."""
    split: Name | None = None
    """Split to read from a folder that holds several, also train[:5%], train[100:200] or
    train+validation."""
    revision: Name | None = None
    """Branch, tag or commit of a dataset of the Hub."""
    weight: Number = Field(default=1.0, gt=0, le=1000)
    """Number of sequences that an epoch draws, as a multiple of those that the source has."""
    share: Share | None = None
    """Share of an epoch's tokens, instead of weight; the shares of all sources sum to 1."""
    limit: Positive | None = None
    """Number of records to read, from the first one on."""
    fields: Fields | None = None
    """Names of fields in this source, which override data.fields."""
    format: Literal["auto"] | Format | None = None
    """Format of the records, instead of data.format."""
    max_seq_len: Positive | None = None
    """Maximum number of tokens of a source of data.eval, above data.max_seq_len: it is evaluated
    for itself, and shows the loss beyond the length that the run trains on."""

    @model_validator(mode="before")
    @classmethod
    def _of_a_path(cls, value: object) -> object:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_measure(self) -> Source:
        if self.share is not None and self.weight != 1:
            raise PydanticCustomError("share", "share or weight, not both")
        return self

    @model_serializer(mode="wrap")
    def _as_a_path(self, values: SerializerFunctionWrapHandler) -> Any:
        own, fields = values(self), type(self).model_fields
        given = {key: value for key, value in own.items() if value != fields[key].default}
        return self.path if given.keys() == {"path"} else given


def _listed(value: object) -> object:
    """Return a list; a single value becomes a list of one."""
    return [value] if isinstance(value, str | Mapping | Source) else value


def _once(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    if any(source.weight != 1 or source.share is not None for source in sources):
        raise PydanticCustomError(
            "weight", "no weight and no share: held-out sequences are read once each"
        )
    return sources


def _shared(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    if any(source.max_seq_len for source in sources):
        raise told(
            required="no max_seq_len of a source of data.train",
            change="write data.max_seq_len, which is that of all sources",
        )
    shares = [source.share for source in sources]
    total = sum(filter(None, shares))
    if any(shares) and (None in shares or abs(total - 1) > 0.005):
        raise told(
            required="a share of every source or of none, together 1",
            change="give each source a share, or write weight instead of share"
            if None in shares
            else f"make the shares add up to 1 (they add up to {total:g}), or write weight",
        )
    return sources


Sources = Annotated[
    tuple[Source, ...], BeforeValidator(_listed), Field(min_length=1, examples=["books.jsonl"])
]


_OF_RENDERING = frozenset(
    ("messages", "conversations", "conversation", "tools", "chat_template", "add_generation_prompt",
     "continue_final_message", "return_assistant_tokens_mask", "documents", "tokenize")
)  # fmt: skip


def refused_kwargs(given: Mapping[str, Any]) -> list[str]:
    """Return the given names that rendering a chat template sets itself, so a user may not."""
    return sorted(_OF_RENDERING & given.keys())


def _free_kwargs(given: dict[str, Any]) -> dict[str, Any]:
    if refused := refused_kwargs(given):
        raise told(
            required=f"names that a chat template reads, not {', '.join(refused)}, which the"
            " rendering sets",
            change=f"remove {', '.join(refused)}",
        )
    return given


TooLong = Literal["error", "truncate", "drop", "split"]


class DataConfig(BaseModel):
    """Training data and held-out data."""

    model_config = _SECTION

    train: Annotated[Sources, AfterValidator(_shared)]
    """Sources of training data: files of texts or records, folders, OWNER/NAME of the Hub, or
    {path, name, split, revision, weight, share, limit} for each of them."""
    eval: Annotated[Sources, AfterValidator(_once)] | None = _null("held-out.jsonl")
    """Sources of held-out data, written as in data.train. A source with a max_seq_len above the
    run's is evaluated for itself, and shows the loss beyond the length that is trained on."""
    eval_share: Annotated[ShareOrWhole, Field(ge=0, le=MAX_WHOLE)] | None = _null(0.05)
    """Share of each source of data.train to hold out, instead of data.eval; from 1 on, the number
    of records to hold out in all."""
    limit: Positive | None = _null(1000)
    """Maximum number of records to read from each source, from the first one on."""
    format: Literal["auto"] | Format = "auto"
    """Format of records. auto goes by the fields of each source's first record: text, messages
    (also as in sharegpt), instruction + output (alpaca), prompt + completion or input_ids. With
    train.loss: dpo it is preference: chosen + rejected; with kto unpaired: prompt + completion +
    label."""
    fields: Fields = Field(default={}, examples=[{"text": "chapter"}])
    """Names of fields in the data, by furlong's names: {text: chapter}; also of fields of messages,
    {role: from, content: value}, and of roles, {roles: {human: user}}. {unused: [images]} removes
    fields of records and messages before they are read."""
    chat_template: Name | None = _null("qwen3")
    """Chat template: a file, its text, or a name (alpaca, chatml, deepseek-r1, gemma, gemma3,
    gpt-oss, llama3, llama3.1, mistral, qwen2.5, qwen3, qwen3.5); null = the tokenizer's."""
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_free_kwargs)] = Field(
        default={}, examples=[{"enable_thinking": False}]
    )
    """Variables for the chat template; the chat_template_kwargs of a record override them."""
    train_on: Literal["assistant", "all", "last", "conversations"] = "assistant"
    """Part of conversations and completions to train on. assistant: answers; all: the whole text;
    last: the answers after the user's last message; conversations: as in TRL, whole conversations,
    but only the completion of prompt + completion."""
    eos_token: Name | None = _null("<|im_end|>")
    """Token of the vocabulary that ends texts and completions; null = the tokenizer's."""
    pad_token: Name | None = _null("<|endoftext|>")
    """Token of the vocabulary that the exported tokenizer pads with; furlong itself never pads."""
    eot_tokens: Annotated[tuple[Name, ...], BeforeValidator(_listed)] = Field(
        default=(), examples=["<|eot_id|>"]
    )
    """Tokens to train on if they follow an answer and the tags of the template leave them out; a
    text that ends with an answer without its stop gets the one of the next message."""
    max_seq_len: Positive = 131072
    """Maximum number of tokens in a sequence."""
    too_long: TooLong = "error"
    """Handling of a sequence longer than max_seq_len; split continues it in the next sequence,
    for texts and tokens only."""
    min_len: Natural = 0
    """Minimum number of tokens in a sequence: shorter ones are dropped, and so are pairs with one.
    """
    join: bool = False
    """Join the texts of a source, with EOS between them, and cut them into sequences of
    max_seq_len, whose tokens attend to all texts in the sequence."""
    streaming: bool = False
    """Read and tokenize data.train while the run trains, without a cache: for sources larger than
    the disk. Needs train.steps; several sources need a share each."""
    cache_dir: PlainPath | None = None
    """Folder for tokenized data; null = furlong in the user's cache directory."""

    @property
    def eval_by_length(self) -> dict[int, tuple[Source, ...]]:
        """The sources of `eval` by their maximum number of tokens, ascending."""
        lengths = sorted({source.max_seq_len or self.max_seq_len for source in self.eval or ()})
        return {
            length: tuple(
                source for source in self.eval or ()
                if (source.max_seq_len or self.max_seq_len) == length
            )
            for length in lengths
        }  # fmt: skip

    @property
    def longest_tokens(self) -> int:
        """Maximum number of tokens in a sequence to train on or to evaluate."""
        return max((self.max_seq_len, *self.eval_by_length))


_EITHER_OR = (
    ("steps", "epochs"),
    ("sequences_per_step", "tokens_per_step"),
    ("save_every_steps", "saves_per_epoch"),
    ("eval_every_steps", "evals_per_epoch"),
)
"""Pairs of keys of `train` of which exactly one has a value; the first has a default."""


Optimizer = Literal[
    "adamw", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adamw_torch_8bit",
    "adamw_torch_4bit", "adamw_torch_fp8", "adafactor", "muon",
]  # fmt: skip

OF_BITSANDBYTES = ("adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit")
"""The optimizers of bitsandbytes, which do not support sharded weights."""


def _compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise told(
            required=f"a regular expression ({error})",
            change="escape its signs: write \\. for a dot",
        ) from None
    return pattern


class ParameterGroup(BaseModel):
    """Parameters with a different learning rate or weight decay."""

    model_config = _SECTION

    match: Annotated[str, AfterValidator(_compiled)] = Field(
        min_length=1, examples=["embed_tokens|lm_head"]
    )
    """Regular expression to search for in their names; the first group that matches applies."""
    lr: AboveZero | None = _null(1e-5)
    """Peak learning rate; null is that of the run."""
    weight_decay: Annotated[Number, Field(ge=0)] | None = None
    """Weight decay, of norms and biases too; null is that of the run."""


class TrainConfig(BaseModel):
    """Batches, loss, optimizer, evaluations and checkpoints."""

    model_config = _SECTION

    steps: Positive | None = 100
    """Number of optimizer steps; null leaves it to epochs."""
    epochs: PerEpoch | None = _null(3)
    """Passes over the training data, instead of steps."""
    sequences_per_step: Positive | None = 32
    """Sequences in a global batch; pairs for dpo, answers for kto. null leaves it to
    tokens_per_step."""
    tokens_per_step: Positive | None = _null(524288)
    """Maximum number of tokens in a global batch, instead of sequences_per_step: a batch ends
    before the sequence that would exceed it; a longer sequence is a batch by itself."""
    lr: Number = Field(default=2.0e-5, gt=0)
    """Peak learning rate."""
    optimizer: Optimizer = "adamw"
    """adamw and muon are PyTorch's; muon trains the matrices of layers, with adamw for the rest.
    adamw_8bit and the paged ones are from bitsandbytes, those with torch_ from torchao, adafactor
    from transformers."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of adamw's moments between steps; the weights stay float32."""
    groups: tuple[ParameterGroup, ...] = Field(
        default=(), examples=[[{"match": "norm", "lr": 1e-6}]]
    )
    """Parameters with a different learning rate or weight decay: {match, lr, weight_decay}, where
    match is a regular expression to search for in their names. The first group that matches
    applies."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: Number = Field(default=1.0e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: Number = Field(default=0.0, ge=0)
    """Weight decay of trained weights with two or more dimensions; norms and biases have none."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Schedule of the learning rate after warm-up."""
    min_lr: Number = Field(default=0.0, ge=0)
    """Learning rate towards which cosine and linear decay."""
    warmup_steps: Annotated[ShareOrWhole, Field(ge=0)] = 0.03
    """Steps in which the learning rate rises to lr; below 1 a share of all steps."""
    max_grad_norm: AboveZero | None = 1.0
    """Gradients are clipped to this norm; null = no clipping."""
    seed: Whole = Field(default=0, ge=0, lt=2**32)
    """Seed for the order of the data, random weights and dropout."""
    save_every_steps: Natural | None = 50
    """Steps between checkpoints, with one after the last step too; 0 = no checkpoints."""
    saves_per_epoch: PerEpoch | None = _null(1)
    """Checkpoints per epoch, such as 0.5 or 4, instead of save_every_steps."""
    num_checkpoints: Positive = 3
    """Number of newest checkpoints to keep."""
    save_weights_only: bool = False
    """Save checkpoints without the optimizer: a third of the size, for export; no run can resume
    from one."""
    keep_best: bool = False
    """Keep the checkpoint with the lowest held-out loss and export it at the end. It is saved at
    its evaluation even if no checkpoint is due."""
    async_save: bool = False
    """Write checkpoints during the next steps, from a copy of their tensors in memory. An error is
    raised at the next checkpoint or at the end."""
    eval_every_steps: Natural | None = 50
    """Steps between evaluations; 0 = before the first and after the last step only."""
    evals_per_epoch: PerEpoch | None = _null(2)
    """Evaluations per epoch, instead of eval_every_steps."""
    early_stopping: Positive | None = _null(3)
    """End the run after so many evaluations in a row without a lower held-out loss; null = never.
    """
    max_loss: AboveZero | None = _null(20)
    """A step with a higher loss is not taken: the run stops with a checkpoint of the one before."""
    loss: Literal["sft", "dpo", "kto"] = "sft"
    """sft: cross-entropy of labels. dpo: prefer the chosen to the rejected answer of each pair.
    kto: prefer answers with the label true to the others. The reference model of dpo and kto is the
    model that the run starts from."""
    beta: Number = Field(default=0.1, gt=0)
    """With dpo and kto: how strongly the model is kept close to the reference model."""
    desirable_weight: Number = Field(default=1.0, ge=0)
    """With kto: weight of desirable answers."""
    undesirable_weight: Number = Field(default=1.0, ge=0)
    """With kto: weight of undesirable answers."""
    loss_type: Literal["sigmoid", "sigmoid_norm", "robust", "ipo", "apo_zero", "apo_down"] = (
        "sigmoid"
    )
    """With dpo: the loss of a pair. sigmoid_norm and ipo use the mean log-probability of an
    answer's tokens, the others the sum."""
    label_smoothing: Number = Field(default=0.0, ge=0, lt=0.5)
    """With dpo: probability that the answers of a pair are swapped; not with ipo, apo_zero and
    apo_down."""
    sft_weight: Number = Field(default=0.0, ge=0)
    """With dpo: weight of the cross-entropy of the chosen answers, added to the loss (TRL's
    rpo_alpha)."""
    eval_train_share: Number = Field(default=0.0, ge=0, le=1)
    """Share of the training sequences to evaluate, too, besides the held-out data; 0 = none."""

    @property
    def is_of_pairs(self) -> bool:
        """Whether each term of the loss needs two sequences: two answers to a prompt, or an answer
        and one to compare it with."""
        return self.loss in FORMAT_OF_LOSS

    @model_validator(mode="before")
    @classmethod
    def _others_replace_the_defaults(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            for default, other in _EITHER_OR:
                if values.get(other) is not None:
                    values = {default: None, **values}
        return values


Amount = AmountBytes | Literal["auto"]
OfNames = Annotated[tuple[str, ...], BeforeValidator(_listed)]


def _name_or_pattern(value: object) -> object:
    """Return plain text as a list of one name; other text must be a regular expression."""
    if not isinstance(value, str) or value == "all-linear":
        return value
    return (value,) if re.fullmatch(r"[\w.]+", value) else _compiled(value)


class LoraConfig(BaseModel):
    """LoRA adapters on frozen weights."""

    model_config = _SECTION

    rank: Positive = 8
    """Rank of the adapters."""
    alpha: Number = Field(default=16.0, gt=0)
    """The adapters' output is scaled by alpha / rank."""
    rslora: bool = False
    """Scale the adapters' output by alpha / sqrt(rank) instead, which suits high ranks."""
    dropout: Number = Field(default=0.0, ge=0, lt=1)
    """Dropout before the adapters; its random draws depend on how sequences are cut."""
    target_modules: Annotated[
        Literal["all-linear"] | str | tuple[str, ...], BeforeValidator(_name_or_pattern)
    ] = "all-linear"
    """Modules with adapters: all-linear (every linear layer except the head, routers and experts),
    names of modules, or one regular expression that matches their whole names."""
    target_parameters: OfNames = Field(default=(), examples=[["experts.down_proj"]])
    """Parameters outside of linear layers, such as those of experts, that also get adapters, by the
    ends of their names."""
    modules_to_save: OfNames = Field(default=(), examples=[["embed_tokens", "lm_head"]])
    """Names of modules that are trained in full and saved with the adapters."""
    adapter: PlainPath | None = _null("runs/first/model")
    """Folder or Hub id of LoRA adapters to continue from; other keys of the section must agree with
    them."""

    @model_validator(mode="before")
    @classmethod
    def _keys_of_the_adapter(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and isinstance(values.get("adapter"), str):
            return with_keys_of_adapter(values)
        return values


FourBits = Literal["nf4", "fp4"]


@with_config(ConfigDict(extra="forbid"))
class FourBitsConfig(TypedDict):
    """A 4-bit type, and whether its scales are quantized too (double quantization)."""

    type: FourBits
    double: NotRequired[bool]


def _plain(value: FourBits | FourBitsConfig | None) -> FourBits | FourBitsConfig | None:
    """Return the 4-bit type alone if the scales are quantized too, since this is the default.
    Otherwise return the value unchanged."""
    return value["type"] if isinstance(value, dict) and value.get("double", True) else value


class ModelConfig(BaseModel):
    """The model."""

    model_config = _SECTION

    name: PlainPath = Field(min_length=1, examples=["Qwen/Qwen2.5-0.5B"])
    """Hub id or local folder of a Hugging Face model with its tokenizer."""
    revision: Name | None = _null("main")
    """Branch, tag or commit of a Hub id; null is its main branch."""
    init: Literal["pretrained", "random"] = "pretrained"
    """pretrained loads the weights; random needs config.json and the tokenizer only."""
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """dtype of the computation and of frozen weights; trained weights are float32 or wider."""
    tokenizer: PlainPath | None = Field(default=None, min_length=1, examples=["Qwen/Qwen2.5-0.5B"])
    """Hub id or local folder of another tokenizer with the model's vocabulary; null = the model's.
    """
    new_tokens: Annotated[tuple[Name, ...], BeforeValidator(_listed)] = Field(
        default=(), examples=["<tool>"]
    )
    """Tokens to add to the tokenizer, and their rows to embedding and head: each begins as the mean
    of the others, and is trained beside adapters, too."""
    quantize: Annotated[FourBits | FourBitsConfig | None, AfterValidator(_plain)] = _null("nf4")
    """Quantize the linear layers under the adapters to 4 bits (QLoRA); {type: nf4, double: false}
    is without double quantization. Needs furlong[bitsandbytes]."""
    lora: LoraConfig | None = None
    """LoRA adapters; null trains every weight."""
    config: dict[str, Any] = Field(default={}, examples=[{"attention_dropout": 0}])
    """Keys of the model's config.json to change, nested by dots or as mappings, except those that
    determine shapes of weights; exported with the model."""
    rope: RopeConfig | None = None
    """Changes to RoPE; null keeps the model's. Keys that are not given stay as in the model if it
    has the same type."""
    compile: bool = False
    """Apply torch.compile to each layer, with attention outside of its graphs; one process only."""
    kernels: Literal["auto", "none", "liger", "hub"] = "auto"
    """auto: PyTorch's RMSNorm on a GPU, if it agrees with the model's. liger: norms and activations
    of liger-kernel. hub: transformers' use_kernels, which loads compiled code from the Hub."""


class SampleConfig(BaseModel):
    """Backward of randomly drawn chunks only. The forward stays exact, the gradient becomes an
    estimate; with rule unbiased its expectation is the exact gradient."""

    model_config = _SECTION

    rate: Share | None = _null(0.25)
    """Share of a sequence's chunks to draw; give this or chunks."""
    chunks: Positive | None = _null(8)
    """Number of chunks to draw from a sequence, on average with rule unbiased; a sequence with no
    more chunks than that is computed exactly."""
    rule: Literal["unbiased", "fixed", "paper"] = "unbiased"
    """unbiased draws each chunk independently; fixed draws a fixed number, unbiased except for
    gradients that pass through two or more earlier chunks; paper is SpaCO as published."""
    label_rate: Share | None = _null(0.5)
    """Probability of drawing a chunk that has labels, with rule unbiased only; null = 1."""
    cap: Annotated[Number, Field(ge=1)] | None = _null(2.0)
    """Maximum factor on gradients from later chunks, with rules fixed and paper only: less
    variance, more bias; null = no limit."""
    report_loss: bool = False
    """Whether to compute the loss of chunks that are not drawn, too, which takes the rest of their
    forward; otherwise the loss of a step is that of the drawn chunks."""


class ChunksConfig(BaseModel):
    """How sequences are cut into chunks and what is kept; only sample changes gradients."""

    model_config = _SECTION

    size: Positive | Literal["auto"] = Field(default="auto", examples=[1024])
    """Maximum number of tokens in a chunk."""
    num_retained: Natural | Literal["auto"] = Field(default="auto", examples=[1])
    """Number of last chunks of a sequence that keep their whole graph."""
    keep: Literal["auto", "input", "kv", "attention", "all"] = Field(
        default="auto", examples=["attention"]
    )
    """Tensors that the other chunks keep between forward and backward."""
    order: Literal["auto", "chunk-first", "layer-first"] = Field(
        default="auto", examples=["chunk-first"]
    )
    """chunk-first runs a chunk through all layers before the next chunk; layer-first runs all
    chunks of a sequence through a stage of some layers before the next stage: less memory, more
    work."""
    stage_layers: Positive | Literal["auto"] = Field(default="auto", examples=[4])
    """Maximum number of layers in a stage, with layer-first."""
    method: Literal[
        "auto", "chunkflow", "seco", "spaco", "infinipipe", "skrull", "fpdt", "places"
    ] = Field(default="auto", examples=["chunkflow"])
    """Published system that plans each batch; auto = the fastest plan that fits."""
    sample: SampleConfig | None = None
    """Backward for drawn chunks only, such as {rate: 0.25}; null = for all, exactly."""


class MemoryConfig(BaseModel):
    """Memory budgets of each process."""

    model_config = _SECTION

    device: Amount = Field(default="auto", examples=["24GiB"])
    """Budget of device memory, on a CPU of everything in RAM, such as 24GiB; auto = most of what is
    free at the start. Keys of chunks that are auto are chosen to fit it."""
    cpu: Amount = Field(default="auto", examples=["24GiB"])
    """Budget of CPU memory for tensors offloaded from a GPU, pinned if the system allows it; auto =
    most of what is free, 0 = none. Refused on a CPU, whose RAM is the device."""
    disk: AmountBytes = Field(default=0, examples=["64GiB"])
    """Budget on disk for kept tensors; 0 = none."""
    disk_dir: Annotated[PlainPath, Field(min_length=1)] | None = None
    """Folder for tensors on disk, on a local drive; null = the run's folder."""


def _ascending(steps: tuple[int, int]) -> tuple[int, int]:
    if steps[0] > steps[1]:
        raise PydanticCustomError("steps", "two numbers of steps, the smaller one first")
    return steps


Prompt = Name | tuple[dict[str, Any], ...]
"""A text, or messages."""


def _listed_prompts(value: object) -> object:
    """Return a list of prompts; a single text, or the messages of one prompt, become a list."""
    is_one = isinstance(value, list | tuple) and all(isinstance(x, Mapping) for x in value)
    return [value] if isinstance(value, str) or (is_one and value) else value


class LogConfig(BaseModel):
    """Logging besides the terminal and metrics.jsonl."""

    model_config = _SECTION

    tensorboard: bool = False
    """Write TensorBoard files into the run folder; needs furlong[tensorboard]."""
    name: Name | None = _null("qwen-128k")
    """Name of the run, for trackers and the model card; null leaves it to them."""
    wandb: Name | None = _null("furlong")
    """Project on Weights & Biases; needs furlong[wandb]."""
    wandb_entity: Name | None = _null("my-team")
    """User or team that owns the project; null = the user's default."""
    trackio: Name | None = _null("furlong")
    """Project of Trackio; needs furlong[trackio]."""
    mlflow: Name | None = _null("furlong")
    """Experiment of MLflow, on the server that its environment names; needs furlong[mlflow]."""
    samples: Annotated[tuple[Prompt, ...], BeforeValidator(_listed_prompts)] = Field(
        default=(), examples=[["Once upon a time"]]
    )
    """Prompts, texts or messages, that the model completes at each evaluation; not in a pipeline.
    """
    sample_tokens: Positive = 64
    """Maximum number of tokens of a completion."""
    profile_steps: Annotated[tuple[Positive, Positive], AfterValidator(_ascending)] | None = _null(
        [3, 5]
    )
    """First and last step to trace with torch.profiler, into the folder profile of the run."""


class HubConfig(BaseModel):
    """Upload of the exported model to the Hugging Face Hub."""

    model_config = _SECTION

    repo: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")] = Field(examples=["my-team/my-model"])
    """Repository on the Hub, OWNER/NAME; created if it does not exist."""
    private: bool = True
    """Create it as private, and refuse an existing one that is public; none is changed."""
    every_save: bool = False
    """Push at every checkpoint too, not only at the end."""


class RunConfig(BaseModel):
    """A run, to be trained or planned."""

    model_config = _SECTION

    model: ModelConfig
    data: DataConfig
    chunks: ChunksConfig = ChunksConfig()
    offload: OffloadChoice = Field(default="auto", examples=["none"])
    """Where kept tensors are stored: none (on the device), cpu, disk (needs memory.disk), or a
    mapping of kinds (kv, inputs, attention, graphs) such as {attention: disk}, others on the
    device. {weights: cpu} stores weights, gradients and optimizer states in CPU memory, and alone
    leaves the kinds to auto; auto does so if nothing else fits, none, cpu and disk never do."""
    memory: MemoryConfig = MemoryConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    log: LogConfig = LogConfig()
    hub: HubConfig | None = None
    """Upload to the Hugging Face Hub; null = none."""
    out: PlainPath = Field(default="runs/first", min_length=1)
    """Folder of the run; it must be new or empty, unless --resume continues the run in it."""

    @model_validator(mode="after")
    def _keys_fit(self) -> RunConfig:
        _check_options(self)
        for is_so, keys, required, change in _misfits(self):
            if is_so:
                raise told(keys=keys, given=_given(self, keys), required=required, change=change)
        return self


_WITH_BETAS = tuple(name for name in get_args(Optimizer) if name != "adafactor")
_LOSSES = get_args(TrainConfig.model_fields["loss"].annotation)
_OF_TOKENS = tuple(name for name in _LOSSES if name not in FORMAT_OF_LOSS)
_KNOWN_LENGTH = "the number of sequences in a stream is unknown"
_OPTIONS: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    ("train.betas", "train.optimizer", _WITH_BETAS, ""),
    ("train.eps", "train.optimizer", _WITH_BETAS, ""),
    ("train.state_dtype", "train.optimizer", ("adamw",), ""),
    ("train.beta", "train.loss", ("dpo", "kto"), ""),
    ("train.loss_type", "train.loss", ("dpo",), ""),
    ("train.label_smoothing", "train.loss", ("dpo",), ""),
    ("train.sft_weight", "train.loss", ("dpo",), ""),
    ("train.desirable_weight", "train.loss", ("kto",), ""),
    ("train.undesirable_weight", "train.loss", ("kto",), ""),
    ("train.label_smoothing", "train.loss_type", ("sigmoid", "sigmoid_norm", "robust"), ""),
    ("train.min_lr", "train.schedule", ("cosine", "linear"), ""),
    ("log.wandb_entity", "log.wandb", (), ""),
    ("log.sample_tokens", "log.samples", (), ""),
    ("memory.disk_dir", "memory.disk", (), ""),
    ("chunks.stage_layers", "chunks.order", ("layer-first", "auto"), ""),
    ("model.quantize", "model.lora", (), "weights in 4 bits are frozen, only adapters are trained"),
    ("model.quantize", "model.dtype", ("bfloat16", "float32"), "bitsandbytes computes in these"),
    ("model.lora", "model.init", ("pretrained",), "random weights would not be saved"),
    ("data.train_on", "train.loss", _OF_TOKENS, "other losses compare whole answers to a prompt"),
    ("data.eval_share", "data.eval", (None,), ""),
    ("data.join", "data.too_long", ("split", "error"), "a longer text continues in the next"),
    ("data.streaming", "train.loss", _OF_TOKENS, "the reference model reads all data first"),
    ("train.epochs", "data.streaming", (False,), _KNOWN_LENGTH),
    ("train.saves_per_epoch", "data.streaming", (False,), _KNOWN_LENGTH),
    ("train.evals_per_epoch", "data.streaming", (False,), _KNOWN_LENGTH),
    ("train.eval_train_share", "data.streaming", (False,), _KNOWN_LENGTH),
    ("data.eval_share", "data.streaming", (False,), _KNOWN_LENGTH),
)
"""Keys that may be set only with some values of another key (with none named, with any); and why.
"""


def _check_options(run: RunConfig) -> None:
    """Raise PydanticCustomError if a key is set without the value of another key that it needs."""
    for key, of, values, why in _OPTIONS:
        value, default, other = _value_of(run, key), all_keys()[key].default, _value_of(run, of)
        is_set = value != default and (default is not None or bool(value))
        if is_set and not (other in values if values else other):
            needed = of if not values else f"{of}: {' or '.join(map(_shown, values))}"
            to = f" to {_shown(values[0])}" if values else ""
            raise told(
                keys=f"{key} and {of}",
                given=_given(run, f"{key} and {of}"),
                required=f"{needed}, with {key}" + (f": {why}" if why else ""),
                change=f"remove {key}, or set {of}{to}",
            )


def _misfits(run: RunConfig) -> Iterator[tuple[bool, str, str, str]]:
    """Yield a row for each rule about values that must fit each other: whether the run breaks the
    rule, the keys that it is about, what is required, and what to change."""
    data, train, loss = run.data, run.train, run.train.loss
    for first, second in _EITHER_OR:
        has_none = getattr(train, first) is None
        yield (
            has_none == (getattr(train, second) is None),
            f"train.{first} and train.{second}",
            "exactly one of the two",
            f"add train.{first} or train.{second}"
            if has_none
            else f"remove train.{second}, or train.{first} (as a flag --train.{first}=null)",
        )
    yield (
        bool(train.min_lr) and train.min_lr >= train.lr,
        "train.min_lr and train.lr",
        "a rate below train.lr",
        "lower train.min_lr, or remove it",
    )
    yield (
        data.min_len > data.max_seq_len,
        "data.min_len and data.max_seq_len",
        "data.min_len of at most data.max_seq_len",
        f"lower data.min_len, or set data.max_seq_len to {data.min_len}",
    )
    yield (
        run.chunks.sample is not None and run.chunks.size == "auto",
        "chunks.size and chunks.sample",
        "a number: the error of the estimated gradient depends on the size of chunks, so the search"
        " may not choose it",
        "set chunks.size, such as 1024, or remove chunks.sample",
    )
    yield (
        bool(run.log.profile_steps and train.steps and run.log.profile_steps[0] > train.steps),
        "log.profile_steps and train.steps",
        "steps that the run takes",
        f"set log.profile_steps to [1, {train.steps}], or remove it",
    )
    parallel, is_away = run.parallel, offloads_weights(run.offload) is True
    for is_so, key, instead in (
        (parallel.reshard is True, "parallel.reshard", "set parallel.reshard to false"),
        (is_away, "offload", "remove offload"),
    ):
        yield (
            is_so and run.chunks.order == "chunk-first" and (is_away or parallel.pp == 1),
            f"{key} and chunks.order",
            "layer-first: chunk-first takes each chunk through all layers, and none could be freed",
            f"remove chunks.order, or {instead}",
        )
    yield (
        is_away and parallel.pp not in ("auto", 1),
        "offload and parallel.pp",
        "parallel.pp of 1: weights that are freed between stages need no pipeline",
        "set parallel.pp to 1, or remove offload",
    )
    yield (
        is_away and parallel.reshard is False,
        "offload and parallel.reshard",
        "weights of two stages at a time on the device, where they come from the CPU",
        "remove parallel.reshard, or remove offload",
    )
    yield (
        isinstance(run.offload, dict) and run.offload.get("weights") == "disk",
        "offload",
        "weights: cpu, or none: they come to the device from RAM",
        "set offload to {weights: cpu}, or remove offload",
    )
    yield (
        is_away and train.optimizer in OF_BITSANDBYTES,
        "offload and train.optimizer",
        "an optimizer that supports sharded weights on the CPU, as none of bitsandbytes does",
        "set train.optimizer to adamw, or remove offload",
    )
    yield (
        is_away and run.model.compile,
        "offload and model.compile",
        "layers that are not compiled: compiled ones cannot follow weights that come and go",
        "remove model.compile, or remove offload",
    )
    lora = run.model.lora
    yield (
        lora is not None and not (lora.target_modules or lora.target_parameters),
        "model.lora.target_modules and model.lora.target_parameters",
        "modules or parameters that get adapters",
        "remove model.lora.target_modules, or name modules or parameters",
    )
    yield (  # memory.cpu: 0 is refused where it is known that there is a GPU
        run.memory.disk == 0 and offloads_to(run.offload, "disk"),
        "offload and memory.disk",
        "memory.disk above 0, for the tensors on disk",
        "add memory.disk, such as 64GiB, or remove offload",
    )
    for name in ("keep_best", "early_stopping"):
        is_held_out = data.max_seq_len in data.eval_by_length or bool(data.eval_share)
        yield (
            bool(getattr(train, name)) and not (is_held_out and train.eval_every_steps != 0),
            f"train.{name} and {'train.eval_every_steps' if is_held_out else 'data.eval'}",
            "held-out data without a max_seq_len of its own, and evaluations of them while the run"
            " goes on",
            f"add {'train.eval_every_steps' if is_held_out else 'data.eval or data.eval_share'},"
            f" or remove train.{name}",
        )
    own = FORMAT_OF_LOSS.get(loss)
    for keys, shapes in (
        ("data.format and train.loss", {data.format}),
        ("train.loss and data.train", {source.format for source in data.train}),
        ("train.loss and data.eval", {source.format for source in data.eval or ()}),
    ):
        odd = shapes & {*FORMAT_OF_LOSS.values()} if own is None else shapes - {own, None, "auto"}
        fitting = next((one for one, of in FORMAT_OF_LOSS.items() if of in odd), "sft")
        is_set = keys.startswith("data.format")
        yield (
            bool(odd),
            keys,
            "preference (chosen + rejected) with dpo, unpaired (an answer and its label) with kto,"
            " and another shape with sft",
            f"remove {'data.format' if is_set else 'the format of the source'}, or set train.loss"
            f" to {fitting}",
        )
    yield (
        run.model.dtype == "float64" and train.optimizer.endswith(("bit", "fp8")),
        "train.optimizer and model.dtype",
        "float32 or bfloat16: its updates are computed in float32",
        "set train.optimizer to adamw, or model.dtype to float32",
    )
    yield (
        data.too_long == "split" and train.is_of_pairs,
        "data.too_long and train.loss",
        "answers that stay whole",
        "set data.too_long to error, truncate or drop",
    )
    yield (
        min(data.eval_by_length, default=data.max_seq_len) < data.max_seq_len,
        "data.eval and data.max_seq_len",
        f"a max_seq_len of a source above data.max_seq_len = {data.max_seq_len:,}",
        "raise the max_seq_len of the source, or remove it",
    )
    yield (
        data.longest_tokens > data.max_seq_len and train.is_of_pairs,
        "data.eval and train.loss",
        "no max_seq_len of a source: losses of pairs have no positions",
        "remove max_seq_len of the source",
    )
    yield (
        data.streaming and any({"[", "+"} & {*(source.split or "")} for source in data.train),
        "data.train and data.streaming",
        "one whole split of each source, or the first records of it",
        "name one split, with limit for the first records of it",
    )
    are_shared = len(data.train) == 1 or data.train[0].share is not None
    yield (
        data.streaming and (not are_shared or any(source.weight != 1 for source in data.train)),
        "data.train and data.streaming",
        f"the share of each of several sources, no weight: {_KNOWN_LENGTH}",
        "write {path: ..., share: 0.5} for each of them",
    )


def _value_of(run: RunConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), run)


def _given(run: RunConfig, keys: str) -> str:
    return " with ".join(f"{key} = {_shown(_value_of(run, key))}" for key in keys.split(" and "))


def _shown(value: Any) -> str:
    """Return a value as written in a run file, shortened."""
    text = value if isinstance(value, str) else to_json(value).decode()
    return in_short(text, 60)


@cache
def all_keys() -> dict[str, FieldInfo]:
    """Return the pydantic field of every key of a run, such as `train.lr`, and of every section."""
    return _keys_of(RunConfig, "")


def keys_below(key: str) -> list[str]:
    """Return the names of the keys in section `key`; of the whole run if `key` is empty. [] if
    `key` is no section."""
    names = [one.rpartition(".") for one in all_keys()]
    return [name for outer, _, name in names if outer == key]


def types_of(annotation: Any) -> list[Any]:
    """Return the types in a union, or a list of the one type."""
    if get_origin(annotation) is Annotated:
        return types_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for one in get_args(annotation) for kind in types_of(one)]
    return [annotation]


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the class of a section, also of one that may be null; None for any other field."""
    kinds = types_of(field.annotation)
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def _keys_of(section: type[BaseModel], prefix: str) -> dict[str, FieldInfo]:
    keys: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        keys[prefix + name] = field
        if inner := section_of(field):
            keys |= _keys_of(inner, f"{prefix}{name}.")
    return keys
