"""Chat models: a small one from scratch, a plain chat template, and the answers of an exported model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from common.environment import print_once
from common.models.causal_lm import byte_tokenizer

# <|user|> question, <|assistant|> answer, and a mark that ends each message.
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + END }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SHORT_TEMPLATE = (  # for bytes: U question, A answer
    "{% for message in messages %}{{ message['role'][0].upper() + ' ' + message['content'] + '\x03' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A ' }}{% endif %}"
)
END = "\x03"  # "end of text" in ASCII, for a tokenizer without an end mark


def with_chat_template(tokenizer: Any) -> Any:
    """Gives a tokenizer a plain chat template if it has none, and says so."""
    if tokenizer.chat_template is None:
        tokenizer.chat_template = TEMPLATE.replace("END", "eos_token" if tokenizer.eos_token else repr(END))
        print_once("the tokenizer has no chat template: it gets a plain one, which is exported with the model")
    return tokenizer


def small_chat_model(max_length: int, attention: str) -> tuple[PreTrainedModel, Any]:
    """Returns (a Llama of 0.8 M weights whose tokens are bytes, its tokenizer with a chat template)."""
    shape = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ord(END),
        pad_token_id=0,
        attn_implementation=attention,
    )
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = SHORT_TEMPLATE
    return LlamaForCausalLM(shape), tokenizer


@torch.no_grad()
def answer(folder: Path, tokenizer: Any, chats: Sequence[list[dict[str, str]]], max_length: int) -> list[str]:
    """The answers of an exported model, or of one with exported adapters, to the last turn of conversations.

    Args:
        folder: with the model, or with adapters whose base is found under its name.
        tokenizer: with a chat template.
        chats: messages up to a question.
        max_length: of a conversation with its answer, in tokens.
    """
    model, found = AutoModelForCausalLM.from_pretrained(folder).eval(), []
    for messages in chats:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        if tokens.shape[1] >= max_length:
            found.append("")
            continue
        new = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_length=max_length, do_sample=False)
        found.append(tokenizer.decode(new[0, tokens.shape[1] :], skip_special_tokens=True).split(END)[0])
    return found
