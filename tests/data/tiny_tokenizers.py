"""Small fast tokenizers: one token per word, or one per byte."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from furlong.data.training_templates import marks_of

WORDS = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4}

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_WITH_TAGS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def word_tokenizer(post_processor: str | None = None) -> Any:
    """Ids of WORDS, unknown words are `c`; `post_processor` is a template such as `<s> $A`."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="c"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if post_processor is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=post_processor, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>")


def byte_tokenizer(chat_template: str | None = CHATML) -> Any:
    """One token per byte, and one for each mark of ChatML and of the template, begin and end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ["<|im_start|>", "<|im_end|>", "<begin>", "<end>"]
    marks += sorted(marks_of(chat_template or "") - {*marks})
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<begin>", eos_token="<end>"
    )
    wrapped.chat_template = chat_template
    return wrapped
