"""Chat models: their flags, a small one from scratch, a plain chat template, and the answers of a trained model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ...checkpoint.exported import write_model
from ...config import flag
from ...environment import has_gpu, print_once
from ...errors import UsageError, first_line
from ...seeds import CPU, restore_generators
from ...weights.on_disk import materialize
from ..models.causal_lm import checkpoint_activations, load_pretrained, load_trained
from ..models.lora import LoraFlags, base_of, naming_base
from ..models.pretrained import export_of, load, must_take, runnable, switch_off_dropout
from ..models.tokenization import END, adds_special_tokens, byte_tokenizer, tokenizer_of
from .conversations import Conversation, question, text_of
from .vision_batches import VisionEncoder

# <|user|> question, <|assistant|> answer, and a mark that ends each message.
TEMPLATE = (
    "{{ BEGIN }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + END }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SHORT_TEMPLATE = (  # for bytes: U question, A answer
    "{% for message in messages %}{{ message['role'][0].upper() + ' ' + message['content'] + '\x03' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A ' }}{% endif %}"
)
ANSWER = "So it is."  # no mark has these words
MORE_TOKENS = 16


@dataclass(kw_only=True)
class ChatFlags(LoraFlags):
    """The flags of recipes that train a chat model."""

    max_samples: int | None = flag(None, "stream a dataset, and use only its first N samples", minimum=1)
    max_length: int = flag(256, "longest conversation or packed block, in tokens; the rest is cut", minimum=2)
    merge: bool = flag(False, "with --lora_rank, write the model with merged adapters to <output_dir>/merged/, too")
    loss_chunk: int = flag(8192 if has_gpu() else 1024, "tokens whose logits are in memory at once; 0: all", minimum=0)
    attention: Literal["sdpa", "eager"] = flag("sdpa", "implementation of attention")
    activation_checkpointing: bool = flag(False, "recompute activations in the backward pass, to save memory")
    model_name_or_path: str | None = flag(None, "train this chat model with its tokenizer (folder or Hub id)")
    trust_remote_code: bool = flag(False, "run the Python code that comes with the model: read it first")
    num_answers: int | None = flag(
        None, "held-out questions to answer after training; default: 50, or 5 above 1e9 weights", minimum=0
    )


def load_chat_model(
    config: ChatFlags, small: Callable[[int, str], tuple[PreTrainedModel, Any]], kind: Any = AutoModelForCausalLM
) -> tuple[PreTrainedModel, Any]:
    """(the flags' pretrained model, of a kind as in `load_pretrained`, or one that `small` makes from `--max_length`
    and `--attention`; its tokenizer or processor, with a template). Raises UsageError."""
    limits = config.max_length, config.attention
    if (path := base_of(config, config.merge)) is None:
        model, tokenizer = small(*limits)
    else:
        others = config.trust_remote_code, config.model_name_or_path
        with naming_base(config, path):
            model, tokenizer = load_pretrained(path, *limits, "max_length", kind, *others)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    with_chat_template(tokenizer, model)
    if tokenizer_of(tokenizer) is not tokenizer:  # a processor
        shown = VisionEncoder(tokenizer, model.config.image_token_id, config.max_length).shown
        with must_take(model), runnable(model), torch.no_grad():
            model(**shown, use_cache=False)
    return model, tokenizer


def with_chat_template(tokenizer: Any, model: PreTrainedModel) -> Any:
    """Gives a tokenizer without a chat template a plain one, and says so. Tells the model which token ends an answer.
    Raises UsageError if the tokenizer does not know the positions of its tokens, or a processor has no template."""
    plain = tokenizer_of(tokenizer)
    if not getattr(plain, "is_fast", False):
        raise UsageError(f"{type(plain).__name__} does not give the positions of tokens: use a fast tokenizer")
    if tokenizer.chat_template is None and plain is not tokenizer:
        raise UsageError(f"{type(tokenizer).__name__} has no chat template: add a chat_template.jinja to its folder")
    if tokenizer.chat_template is None:
        begins = tokenizer.bos_token is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
        template = TEMPLATE.replace("END", "eos_token" if tokenizer.eos_token else repr(END))
        tokenizer.chat_template = template.replace("BEGIN", "bos_token" if begins else "''")
        print_once("the tokenizer has no chat template: the run uses, and exports, a plain one")
    _end_answers(tokenizer, model)
    return tokenizer


def _end_answers(tokenizer: Any, model: PreTrainedModel) -> None:
    """Lets the template's token after an answer end a generation: a special token, or one that is the whole mark."""
    plain = tokenizer_of(tokenizer)
    texts = ("a", ANSWER) if plain is tokenizer else ([{"type": "text", "text": text}] for text in ("a", ANSWER))
    chat = [{"role": role, "content": content} for role, content in zip(("user", "assistant"), texts)]
    try:
        after = tokenizer.apply_chat_template(chat, tokenize=False).rpartition(ANSWER)[2].strip()
    except Exception:  # a template is a program; loading the conversations says what is wrong with it
        return
    mark = plain(after, add_special_tokens=False)["input_ids"]
    ends = [token for token in mark if token in plain.added_tokens_decoder or len(mark) == 1][:1]
    known = model.generation_config.eos_token_id
    known = [] if known is None else known if isinstance(known, list) else [known]
    if wrong := [token for token in known if not isinstance(token, int)]:
        raise UsageError(f"eos_token_id in generation_config.json is {wrong[0]!r}: use the number of the token there")
    if ends or known:
        model.config.eos_token_id = model.generation_config.eos_token_id = list(dict.fromkeys(ends + known))
    model.ends_otherwise = not {*ends} <= {*known}
    if mark and not ends:
        print_once(f"the chat template ends answers with {after!r}, not one token: generation does not stop there")


def write_merged(config: ChatFlags, tokenizer: Any, kind: Any) -> None:
    """Adds the exported adapters to the weights of their base, a model of this kind, and writes <output_dir>/merged as
    a run that trains all weights writes its model. If the base comes with code, this run has run it."""
    from peft import PeftConfig, PeftModel

    adapters = str(config.output_dir / "model")
    path = PeftConfig.from_pretrained(adapters).base_model_name_or_path
    base = load(kind, str(path), "model", None, trust_remote_code=True)[0]
    materialize(base)
    _end_answers(tokenizer, base)
    merged = PeftModel.from_pretrained(base, adapters).merge_and_unload()
    write_model(merged, config.output_dir / "merged", config.export_dtype, export_of(merged, tokenizer))


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Switches off dropout in training; config.json keeps the probabilities. Does not use `eval`, because then
    activations are not recomputed. Raises UsageError if the model draws random numbers in another way, too."""
    switch_off_dropout(model)
    tokens = torch.arange(8).remainder(model.get_input_embeddings().num_embeddings).unsqueeze(0)
    with runnable(model), torch.no_grad(), restore_generators(CPU):
        expected = model(input_ids=tokens, use_cache=False).logits
        model.train()
        found = model(input_ids=tokens, use_cache=False).logits
    if not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
        what = f"{type(model).__name__} draws random numbers in training, so policy and reference differ"
        raise UsageError(f"{what}: use the path of a model that does not, or switch them off in its config.json")
    return model


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
def answer(model: Any, tokenizer: Any, chats: Sequence[Conversation], max_length: int) -> list[str]:
    """The answers of a model to the last turn of conversations.

    Args:
        model: from `load_trained`.
        tokenizer: with a chat template; or a processor, if there are images.
        chats: conversations that end with the expected answer. The model may write a few more tokens than that.
        max_length: of a conversation with its answer, in tokens.
    """
    found, plain = [], tokenizer_of(tokenizer)
    for chat in chats:
        text = question(chat, tokenizer)
        shown = {"images": [chat.images]} if chat.images else {}
        adds = chat.is_plain or adds_special_tokens(tokenizer, text)
        given = tokenizer(text=[text], **shown, add_special_tokens=adds, return_tensors="pt").to(model.device)
        if not 0 < (num_tokens := given["input_ids"].shape[1]) < max_length:
            found.append("")
            continue
        expected = plain(chat.answer, add_special_tokens=False)["input_ids"]
        longest = min(max_length, num_tokens + len(expected) + MORE_TOKENS)
        new = model.generate(**given, max_length=longest, do_sample=False, return_dict_in_generate=False)
        found.append(plain.decode(new[0, num_tokens:], skip_special_tokens=True).split(END)[0].strip())
    return found


def write_answers(config: ChatFlags, tokenizer: Any, chats: Any, kind: Any = AutoModelForCausalLM) -> None:
    """Prints how many held-out questions the exported model answers correctly, and one answer. The questions come from
    the chats' `select_answered`; `kind` is as in `load_trained`. With `--merge`, writes the merged model first."""
    if config.merge:
        write_merged(config, tokenizer, kind)
    if config.num_answers == 0:
        return
    model = load_trained(config.output_dir / "model", kind)
    if asked := chats.select_answered(config.num_answers or (5 if model.num_parameters() > 1e9 else 50)):
        try:
            answers = answer(model, tokenizer, asked, config.max_length)
        except (ValueError, TypeError, LookupError, ArithmeticError, ImportError) as error:  # of settings that it reads
            print(f"no answers, because of its generation_config.json: {first_line(error)}")
            return
        num_right = sum(found.endswith(chat.answer.strip()) for found, chat in zip(answers, asked))
        print(f"{text_of(asked[0].messages[-2])} {answers[0]}\n{num_right} of {len(asked)} held-out answers are right")
