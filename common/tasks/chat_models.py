"""Chat models: a small one from scratch, a plain chat template, and the answers of a trained model."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ..environment import print_once
from ..errors import UsageError
from .tokenization import byte_tokenizer

# <|user|> question, <|assistant|> answer, and a mark that ends each message.
TEMPLATE = (
    "{{ BEGIN }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + END }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SHORT_TEMPLATE = (  # for bytes: U question, A answer
    "{% for message in messages %}{{ message['role'][0].upper() + ' ' + message['content'] + '\x03' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A ' }}{% endif %}"
)
ANSWER = "answer"
MORE_TOKENS = 16
END = "\x03"  # "end of text" in ASCII, for a tokenizer without an end mark


def with_chat_template(tokenizer: Any, model: PreTrainedModel) -> Any:
    """Gives a tokenizer a plain chat template if it has none, and says so. Tells the model which token ends an answer.

    Raises:
        UsageError: the tokenizer cannot tell the place of its tokens in a text.
    """
    if not tokenizer.is_fast:
        raise UsageError(
            f"{type(tokenizer).__name__} does not tell the place of its tokens: type the path of a model with a fast "
            "tokenizer (tokenizer.json)"
        )
    if tokenizer.chat_template is None:
        begins = tokenizer.bos_token is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
        template = TEMPLATE.replace("END", "eos_token" if tokenizer.eos_token else repr(END))
        tokenizer.chat_template = template.replace("BEGIN", "bos_token" if begins else "''")
        print_once("the tokenizer has no chat template: it gets a plain one, which is exported with the model")
    _end_answers(tokenizer, model)
    return tokenizer


def _end_answers(tokenizer: Any, model: PreTrainedModel) -> None:
    """Adds the token that the template puts after an answer to those that end a generation."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ANSWER}]
    try:
        after = tokenizer.apply_chat_template(chat, tokenize=False).rpartition(ANSWER)[2].strip()
    except Exception:  # a template is a program; loading the conversations says what is wrong with it
        return
    ends = tokenizer(after, add_special_tokens=False)["input_ids"][:1]
    known = model.generation_config.eos_token_id
    ends += [] if known is None else known if isinstance(known, list) else [known]
    if ends:
        model.config.eos_token_id = model.generation_config.eos_token_id = list(dict.fromkeys(ends))


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
def answer(model: Any, tokenizer: Any, chats: Sequence[list[dict[str, str]]], max_length: int) -> list[str]:
    """The answers of a model to the last turn of conversations.

    Args:
        model: from `load_trained`.
        tokenizer: with a chat template.
        chats: conversations that end with the expected answer. The model may write a few tokens more than that has.
        max_length: of a conversation with its answer, in tokens.
    """
    found = []
    for messages in chats:
        text = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"].to(model.device)
        if tokens.shape[1] >= max_length:
            found.append("")
            continue
        expected = tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"]
        longest = min(max_length, tokens.shape[1] + len(expected) + MORE_TOKENS)
        new = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_length=longest, do_sample=False)
        found.append(tokenizer.decode(new[0, tokens.shape[1] :], skip_special_tokens=True).split(END)[0].strip())
    return found
