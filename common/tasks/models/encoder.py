"""Encoders of transformers that classify texts or give their vectors, and a tokenizer whose tokens are words."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoTokenizer, BertConfig, PreTrainedTokenizerFast
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from ...config import RunConfig, flag
from ...data.collate import Padding, pad_to_longest
from ...environment import print_once
from ...errors import UsageError
from ..reading.labelled import config_of_classes, names_of
from .pretrained import exported_folder, freeze_unused, load, runnable

PAD, UNKNOWN, FIRST, MASK = "[PAD]", "[UNK]", "[CLS]", "[MASK]"


@dataclass(kw_only=True)
class EncoderFlags(RunConfig):
    """The flags of recipes that train an encoder."""

    max_length: int = flag(64, "texts are cut off after this number of tokens", minimum=1)
    vocabulary: int = flag(4096, "number of words that the model from scratch knows", minimum=4)
    num_layers: int = flag(2, "encoder layers", minimum=1)
    num_heads: int = flag(4, "attention heads", minimum=1)
    hidden_size: int = flag(64, "width of the model", minimum=1)
    dropout: float = flag(0.0, "probability of dropout; its masks depend on --micro_batch_size", minimum=0, below=1)
    model_name_or_path: str | None = flag(None, "continue from this encoder and its tokenizer (folder or Hub id)")
    trust_remote_code: bool = flag(False, "run the Python code that comes with the model: read it first")


def small_bert(
    config: EncoderFlags,
    make: Callable[[BertConfig], PreTrainedModel],
    texts: Iterable[str],
    classes: list[str] | None = None,
) -> tuple[PreTrainedModel, Any]:
    """(a BERT from scratch, a tokenizer of words of these texts, or of an evaluated run). Raises UsageError."""
    if config.hidden_size % config.num_heads:
        advice = f"use --hidden_size {max(1, config.hidden_size // config.num_heads) * config.num_heads}"
        raise UsageError(f"--hidden_size {config.hidden_size} does not divide into {config.num_heads} heads: {advice}")
    shape = BertConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden_size,
        intermediate_size=4 * config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        max_position_embeddings=config.max_length,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout,
        **({} if classes is None else config_of_classes(classes)),
    )
    model = make(shape)
    freeze_key_biases(model)
    always_mask(model)
    if config.evaluate_only:
        folder = exported_folder(config.output_dir, "--evaluate_only")
        there = names_of(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        if classes is not None and there != classes:
            raise UsageError(f"the classes are {', '.join(there)} in {folder}, and {', '.join(classes)} in the data")
        return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer = word_tokenizer(texts, config.vocabulary, masks="MaskedLM" in type(model).__name__)
    tokenizer.model_max_length = config.max_length  # from_pretrained's pipelines cut texts there
    return model, tokenizer


def load_encoder(kind: Any, name_or_path: str, max_length: int, **options: Any) -> tuple[PreTrainedModel, Any]:
    """Loads an encoder in float32 and its tokenizer. Raises UsageError if there is no encoder or tokenizer, weights do
    not fit, or it has no padding token or too few positions.

    Args:
        kind: a class such as `AutoModel`. A head that the files lack, or have for other classes, is new.
        name_or_path: folder or Hub id.
        max_length: tokens of the longest text.
        options: for `from_pretrained`, such as `id2label` and `label2id` of the classes, and `trust_remote_code`.
    """
    if "QuestionAnswering" in kind.__name__:  # the start and the end, whatever an earlier head had
        options["num_labels"] = 2
    model, tokenizer, _ = load(kind, name_or_path, "encoder" + "-decoder" * ("Seq2Seq" in kind.__name__), **options)
    if tokenizer.pad_token_id is None:
        raise UsageError(f"--model_name_or_path {name_or_path} has no padding token: use an encoder")
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    # RoBERTa has two more positions than it takes tokens; its tokenizer has the right number. XLNet has -1.
    limits = (getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length)
    most = min((limit for limit in limits if limit and limit > 0), default=max_length)
    if max_length > most:
        raise UsageError(f"--max_length {max_length} exceeds the model's {most} positions: use --max_length {most}")
    tokens = torch.tensor([tokenizer("a a")["input_ids"]])
    target = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder and model.can_generate() else {}
    freeze_unused(model, input_ids=tokens, **target)
    freeze_key_biases(model)
    always_mask(model)
    return model, tokenizer


def always_mask(model: PreTrainedModel) -> None:
    """Gives PyTorch's attention a mask for each batch. transformers leaves it out if no text is padded, and reads
    from the device in each forward pass to find out. config.json does not get the name."""

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        return sdpa_mask(*args, **kwargs | {"allow_is_bidirectional_skip": False, "allow_is_causal_skip": False})

    if model.config._attn_implementation == "sdpa" and model._supports_attention_backend:
        AttentionInterface.register("masked_sdpa", sdpa_attention_forward)
        AttentionMaskInterface.register("masked_sdpa", mask)
        model.config._attn_implementation = "masked_sdpa"


def freeze_key_biases(model: nn.Module) -> None:
    """Freezes the key biases of an encoder. A key bias adds one number to all scores of a query: its gradient is zero
    except for rounding errors. Adam would turn these into steps, which differ between layouts. With rotary positions,
    or without a softmax, the gradient is real."""
    if any(
        "rot" in name or "rope" in name or type(module).__name__.startswith(("RoFormer", "Yoso"))
        for name, module in model.named_modules()
    ):
        return
    for name, weight in model.named_parameters():
        if name.endswith(("key.bias", "k_proj.bias", "k_lin.bias", "attn.k.bias")):  # k_lin: DistilBERT, attn.k: MPNet
            weight.requires_grad_(False)


@torch.no_grad()
def pad_texts(model: PreTrainedModel, tokenizer: Any) -> Padding:
    """A `collate_fn` for texts, with padding that changes no value: on the right, with the token that the head looks
    for; or on the left, as for XLNet, whose head reads the last position. Warns if it changes values anyway."""
    tokens = torch.tensor([tokenizer("a a")["input_ids"]])
    usual = tokenizer.pad_token_id

    def values(pad: int, left: int, right: int) -> Tensor:
        padded = partial(F.pad, pad=(left, right))
        return model(input_ids=padded(tokens, value=pad), attention_mask=padded(torch.ones_like(tokens)))[0]

    ways = [way for way in ((usual, 0, 2), (model.config.pad_token_id, 0, 2), (usual, 2, 0)) if way[0] >= 0]
    fitting = ways[:1]
    with suppress(Exception), runnable(model):  # if it cannot take the text, the run says so
        alone = values(usual, 0, 0)
        fitting = [way for way in ways if torch.allclose(values(*way), alone, 1e-3, 1e-5)]
    if not fitting:
        print_once(f"padding changes the output of {type(model).__name__}: the result depends on --micro_batch_size")
    pad, left, _ = (fitting or ways)[0]
    if left:
        tokenizer.padding_side = "left"  # becomes part of the export
    return pad_to_longest({"input_ids": pad}, side="left" if left else "right")


def word_tokenizer(texts: Iterable[str], num_tokens: int, masks: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the most frequent words of the training texts, in lower case; a digit or a
    punctuation mark is a word. The first token of each text is [CLS], also in a pair. The vocabulary has
    `num_tokens`, with three special ones, and [MASK] if it `masks`."""
    special = [PAD, UNKNOWN, FIRST] + [MASK] * masks
    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.train_from_iterator(
        texts,
        trainers.WordLevelTrainer(vocab_size=num_tokens, special_tokens=special, min_frequency=2, show_progress=False),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{FIRST} $A", pair=f"{FIRST} $A {FIRST}:1 $B:1", special_tokens=[(FIRST, 2)]
    )
    named = {"pad_token": PAD, "unk_token": UNKNOWN, "cls_token": FIRST} | ({"mask_token": MASK} if masks else {})
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=10**6, **named)
