"""Sample texts at evaluations, generated greedily by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from furlong.config.schema import RunConfig
from furlong.data.tokenize import NoTokenizer, with_begin
from furlong.errors import ConfigError, first_line
from furlong.runtime.distributed.fsdp import freed_behind_passes, sharded_modules
from furlong.runtime.distributed.fsdp import reshard as free_all
from furlong.runtime.rng import RNGState
from furlong.train.evaluation import evaluating
from furlong.units import count_words


def encode_prompts(config: RunConfig, tokenizer: Any) -> list[tuple[str, list[int]]]:
    """Return text and token ids of each of `log.samples`. Raises ConfigError if one is invalid."""
    most = config.data.max_seq_len - config.log.sample_tokens
    prompts = []
    if config.log.samples and isinstance(tokenizer, NoTokenizer):
        raise tokenizer.refusal("log.samples", "remove log.samples")
    for number, prompt in enumerate(config.log.samples):
        is_text = isinstance(prompt, str)
        text = prompt if is_text else _rendered(config, prompt, tokenizer, number)
        if is_text:
            ids = with_begin(str(text), tokenizer)
        else:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not 0 < len(ids) <= most:
            raise _refused(
                number,
                given=count_words(len(ids), "token")
                + f" with log.sample_tokens = {config.log.sample_tokens}" * (most < 1),
                required=f"1 to {most}: data.max_seq_len less log.sample_tokens"
                if most > 0
                else f"log.sample_tokens below data.max_seq_len = {config.data.max_seq_len}",
                change="lower log.sample_tokens, or raise data.max_seq_len"
                if ids
                else "give another text",
            )
        prompts.append((str(text), [int(each) for each in ids]))
    return prompts


def _rendered(config: RunConfig, messages: Any, tokenizer: Any, number: int) -> str:
    """Return the text of the messages by the chat template, with the generation prompt."""
    if not tokenizer.chat_template:
        raise _refused(
            number,
            given="messages, and a tokenizer without a chat template",
            required="a text, or a tokenizer with a chat template",
            change="write a text, or set data.chat_template",
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=True,
            **config.data.chat_template_kwargs,
        )
    except Exception as error:  # templates may raise anything
        raise _refused(
            number,
            given=f"messages that the chat template refuses: {first_line(error)}",
            required="messages such as {role: user, content: ...}",
            change="mend them, or write a text",
        ) from error
    return str(text)


def _refused(number: int, **parts: str) -> ConfigError:
    parts["given"] = f"log.samples[{number}]: {parts['given']}"
    return ConfigError(source="log.samples", **parts)


def sample(trainer: Any) -> None:
    """Generate a text after each prompt of a `Trainer`; print the texts and write them to its log.
    In a pipeline nothing is generated, since no process has the whole model."""
    progress, options = trainer.progress, trainer.fitting.options
    if trainer.decision.layout.pp > 1:
        if progress.step == 0:
            trainer.say("samples: left out, for no process of a pipeline has the whole model")
        return
    # between prefill chunks transformers passes on a cache of keys and values, and may lose
    # recurrent states
    is_recurrent = trainer.engine.engine.model.events is not None
    written = write_samples(
        trainer.model, trainer.tokenizer, trainer.prompts, trainer.config.log.sample_tokens,
        chunk_size=None if is_recurrent else options.size, device=trainer.engine.device,
        in_step=trainer.processes.num_processes > 1, reshard=options.reshard,
    )  # fmt: skip
    trainer.log.samples(progress.step, written)


def write_samples(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[tuple[str, list[int]]],
    num_tokens: int,
    *,
    chunk_size: int | None,
    device: torch.device,
    in_step: bool,
    reshard: bool = False,
) -> list[tuple[str, str]]:
    """Generate at most `num_tokens` after each prompt; return (prompt, generated text) pairs,
    special tokens included. Train modes and random generators are restored.

    Args:
        chunk_size: Tokens per prefill chunk; None: prompts are read at once.
        in_step: Whether all processes call this together, because weights are sharded. Then all
            processes get the same texts.
        reshard: Whether to free the gathered weights of a layer after the layer has run.
    """
    from transformers import GenerationConfig

    end = tokenizer.eos_token_id
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=num_tokens,
        prefill_chunk_size=chunk_size,
        use_cache=True,
        eos_token_id=end,
        pad_token_id=end,
    )
    drawn, written = RNGState.read(device), []
    layers = sharded_modules(model)[1:] if reshard else []
    with evaluating(model), torch.no_grad(), freed_behind_passes(layers):
        for prompt, ids in prompts:
            given = torch.tensor([ids], device=device)  # (1, T)
            found = model.generate(
                input_ids=given,
                attention_mask=torch.ones_like(given),
                generation_config=settings,
                synced_gpus=in_step,
            )
            written.append((prompt, str(tokenizer.decode(found[0, len(ids) :]))))
    free_all(model)
    drawn.write(device)
    return written
