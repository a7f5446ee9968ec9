"""The contenders of preference.py: `preference_trial.py TRIAL_AS_JSON` measures one of them.

All compute the same: DPO's loss of one pair, or a clipped policy gradient of a group of answers, of
random ids behind one prompt, and its gradients.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from contenders import SHAPES, build
from measuring import Measurement, measure
from torch import Tensor

import furlong

BETA, REFERENCES = 0.1, (-2000.0, -2010.0)
"""DPO's factor, and the summed log-probabilities of the reference, precomputed."""


@dataclass(frozen=True, slots=True)
class Trial:
    contender: str
    shape: str
    prompt_tokens: int
    answer_tokens: int
    num_answers: int = 2
    warmup_tokens: int = 512
    """Tokens of the prompt, and of the longest answer, in the step before the measured one."""
    dials: Mapping[str, Any] = field(default_factory=dict)
    share_prompts: bool = False
    begins: bool = False
    """The first step of a run, whose model is its own reference, and each answer's first token is
    not learnt: what StreamBP's trainer computes."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the process, such as the C library's allocator reads."""
    python: str = sys.executable
    """The interpreter whose packages the contender needs."""

    def command(self) -> list[str]:
        own = Path(__file__).resolve()
        path = f"PYTHONPATH={own.parents[1] / 'src'}"
        given = [f"{name}={value}" for name, value in self.environment.items()]
        trial = json.dumps(asdict(self))
        return ["env", path, "OMP_NUM_THREADS=1", *given, self.python, str(own), trial]

    def answers(self, most_tokens: int | None = None) -> list[Tensor]:
        """Prompt and answer, of each answer."""
        generator = torch.Generator().manual_seed(0)
        size = SHAPES[self.shape]["vocab_size"]
        prompt = torch.randint(size, (self.prompt_tokens,), generator=generator)
        answers = torch.randint(
            size, (self.num_answers, self.answer_tokens), generator=generator
        ).unbind()
        return [torch.cat([prompt[:most_tokens], own[:most_tokens]]) for own in answers]


def run(trial: Trial) -> Measurement:
    torch.set_num_threads(1)
    model = build(trial.shape)
    make = {"trl": _trl, "furlong": _furlong, "streambp": _streambp}[trial.contender]
    prepare = make(model, trial)
    return measure(
        model, prepare(trial.answers()),
        start=prepare(trial.answers(64)), warm_up=prepare(trial.answers(trial.warmup_tokens)),
        num_tokens=trial.num_answers * (trial.prompt_tokens + trial.answer_tokens),
    )  # fmt: skip


Prepare = Callable[[Sequence[Tensor]], Callable[[], float]]


def _furlong(model: Any, trial: Trial) -> Prepare:
    engine = furlong.Engine(model)
    options = furlong.ChunkOptions(**trial.dials)

    def prepare(answers: Sequence[Tensor]) -> Callable[[], float]:
        sequences = []
        for ids in answers:
            labels = ids.clone()
            labels[: _prompt_of(trial, ids) + trial.begins] = -100
            sequences.append({"input_ids": ids, "labels": labels})

        def step() -> float:
            values = engine.token_values(sequences, options, share_prompts=trial.share_prompts)
            references = (
                [float(own.sum().detach()) for own in values] if trial.begins else REFERENCES
            )
            loss = _dpo(values, references) if len(values) == 2 else _group(values)
            loss.backward()
            return float(loss.detach())

        return step

    return prepare


def _prompt_of(trial: Trial, ids: Tensor) -> int:
    """Tokens of the prompt among `ids`, where both were cut to equally many."""
    whole = trial.prompt_tokens + trial.answer_tokens
    if len(ids) == whole:
        return trial.prompt_tokens
    return max(len(ids) - trial.answer_tokens, len(ids) // 2)


def _dpo(values: Sequence[Tensor], references: Sequence[float]) -> Tensor:
    chosen, rejected = (own.sum() - ref for own, ref in zip(values, references, strict=True))
    return -torch.nn.functional.logsigmoid(BETA * (chosen - rejected))


def _group(values: Sequence[Tensor]) -> Tensor:
    """The clipped loss of GRPO, on policy, with made-up rewards."""
    rewards = torch.linspace(-1, 1, len(values))
    terms = []
    for own, advantage in zip(values, rewards, strict=True):
        ratio = (own - own.detach()).exp()[own != 0]
        bounded = ratio.clamp(0.8, 1.2)
        terms.append(torch.minimum(ratio * advantage, bounded * advantage).mean())
    return -torch.stack(terms).mean()


def _trl(model: Any, trial: Trial) -> Prepare:
    """DPOTrainer's own loss, with precomputed references and gradient checkpointing."""
    from trl import DPOConfig, DPOTrainer

    pairs, tokenizer = _placeholders()
    args = DPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], beta=BETA,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
        max_length=None, precompute_ref_log_probs=True, disable_tqdm=True,
    )  # fmt: skip
    trainer: Any = DPOTrainer(
        model=model, args=args, train_dataset=pairs, processing_class=tokenizer
    )  # fmt: skip
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()

    def prepare(answers: Sequence[Tensor]) -> Callable[[], float]:
        ids = torch.stack(list(answers))
        mask = torch.zeros_like(ids)
        mask[:, _prompt_of(trial, ids[0]) :] = 1
        inputs = {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask,
            "ref_chosen_logps": torch.tensor(REFERENCES[:1]),
            "ref_rejected_logps": torch.tensor(REFERENCES[1:]),
        }  # fmt: skip

        def step() -> float:
            loss = trainer.compute_loss(model, dict(inputs))
            loss.backward()
            return float(loss.detach())

        return step

    return prepare


def _streambp(model: Any, trial: Trial) -> Prepare:
    """StreamDPOTrainer of StreamBP (arXiv 2506.03077), by its package, as its README says.

    It has no precomputed references: it applies the reference's head to the hidden states of the
    model that is trained, which is right as long as both are the same model, and its loss lacks
    beta, which does not matter at a margin of 0. So it is measured at the first step.
    """
    from streambp import StreamDPOTrainer, StreamModel
    from trl import DPOConfig

    assert trial.begins
    wrapped = StreamModel(model, gradient_accumulation_steps=1, **trial.dials)
    pairs, tokenizer = _placeholders()
    args = DPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], beta=BETA,
        max_length=None, max_prompt_length=None, max_completion_length=None, disable_tqdm=True,
    )  # fmt: skip
    trainer: Any = StreamDPOTrainer(
        model=wrapped, ref_model=build(trial.shape), args=args, train_dataset=pairs,
        processing_class=tokenizer,
    )  # fmt: skip
    wrapped.train()
    wrapped.gradient_checkpointing_enable()

    def prepare(answers: Sequence[Tensor]) -> Callable[[], float]:
        stop = _prompt_of(trial, answers[0])
        given = {"prompt": answers[0][:stop]}
        given |= {n: x[stop:] for n, x in zip(("chosen", "rejected"), answers, strict=True)}
        inputs = {f"{name}_input_ids": ids[None] for name, ids in given.items()}
        inputs |= {
            f"{name}_attention_mask": torch.ones_like(ids)[None] for name, ids in given.items()
        }
        return lambda: float(trainer.compute_loss(wrapped, dict(inputs)))

    return prepare


def _placeholders() -> tuple[Any, Any]:
    """Pairs and a tokenizer, without which no trainer is made, and which nothing is computed of."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1, "a": 2}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>"
    )
    pair = {"prompt": "a a", "chosen": "a", "rejected": "a a"}
    return Dataset.from_list([pair, pair]), tokenizer


if __name__ == "__main__":
    print(json.dumps(asdict(run(Trial(**json.loads(sys.argv[1]))))))
