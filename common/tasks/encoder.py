"""Encoders of transformers that classify texts or give their vectors, and a tokenizer whose tokens are words."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Subset
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..data.facts import say
from ..environment import print_once
from ..errors import UsageError
from .pooling import POOLINGS
from .pretrained import load

PADDING = -1  # in a batch of texts: no id of a token, because a text may have any of those
PAD, UNKNOWN, FIRST = "[PAD]", "[UNK]", "[CLS]"


def load_encoder(kind: Any, name_or_path: str, max_length: int, **options: Any) -> tuple[PreTrainedModel, Any]:
    """Loads an encoder in float32 and its tokenizer.

    Args:
        kind: a class with `from_pretrained`, such as `AutoModel`. If it has a head that the model lacks, or that is for
            another number of classes, the head is new.
        name_or_path: folder or Hub id.
        max_length: tokens of the longest text.
        options: for `from_pretrained`, such as `id2label` and `label2id` of the classes, and `trust_remote_code`.

    Raises:
        UsageError: no encoder or tokenizer there, weights that do not fit, no token for padding, or too few positions.
    """
    model, tokenizer, new = load(kind, name_or_path, "encoder", **options)
    if new:
        print_once(f"new weights: {', '.join(new[:4])}{' ...' * (len(new) > 4)}")
    if tokenizer.pad_token_id is None:
        raise UsageError(
            f"--model_name_or_path {name_or_path}: its tokenizer has no token for padding: use the path of an encoder"
        )
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    # RoBERTa has two positions more than it takes tokens; its tokenizer knows. XLNet has -1.
    limits = (getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length)
    longest = min((limit for limit in limits if limit and limit > 0), default=max_length)
    if max_length > longest:
        raise UsageError(
            f"--max_length {max_length} exceeds the model's {longest} positions: use --max_length {longest}"
        )
    freeze_key_biases(model)
    always_mask(model)
    return model, tokenizer


def always_mask(model: PreTrainedModel) -> None:
    """Gives PyTorch's attention a mask for each batch. transformers leaves it out where no text is padded, and reads
    from the device for that in each forward pass. config.json does not get the name."""

    def mask(*args: Any, allow_is_bidirectional_skip: bool = True, **kwargs: Any) -> Tensor | None:
        return sdpa_mask(*args, allow_is_bidirectional_skip=False, **kwargs)

    if model.config._attn_implementation == "sdpa" and model._supports_attention_backend:
        AttentionInterface.register("masked_sdpa", sdpa_attention_forward)
        AttentionMaskInterface.register("masked_sdpa", mask)
        model.config._attn_implementation = "masked_sdpa"


def freeze_key_biases(model: nn.Module, names: tuple[str, ...] = ("attention.self.key.bias",)) -> None:
    """Freezes the key biases of an encoder, the weights whose names end so. They add one number to all scores of a
    query, so their gradient is zero but for rounding. Adam would turn the rounding into steps, which differ between
    layouts. Not for an encoder that turns its keys by their positions: there the gradient is real."""
    for name, weight in model.named_parameters():
        if name.endswith(names):
            weight.requires_grad_(False)


def with_tokens(pairs: Any) -> Any:
    """The samples of a dataset all of whose texts have tokens; a line tells how many have not. Raises UsageError if
    all have not."""
    kept = [number for number in range(len(pairs)) if all(part.numel() for part in pairs[number].values())]
    if not kept:
        raise UsageError("no pair has tokens in each of its texts: look at the columns that --query_column and "
                         "--document_column name")  # fmt: skip
    if len(kept) == len(pairs):
        return pairs
    say(f"{len(pairs) - len(kept):,} of {len(pairs):,} pairs have a text without tokens: left out")
    return Subset(pairs, kept)


class Embedder(nn.Module):
    """Vectors of length 1, which an encoder's last hidden states make.

    The encoder has the name that it has in transformers' models with heads, so that `AutoModel` loads the export. One
    with adapters has PEFT's name.

    Args:
        encoder: a model of transformers, perhaps from `add_lora`.
        pad: token that the encoder gets in the place of padding.
        temperature: at the start.
        pooling: a key of `POOLINGS`.
    """

    def __init__(self, encoder: Any, pad: int, temperature: float, pooling: str = "mean"):
        super().__init__()
        self.config, self._no_split_modules = encoder.config, encoder._no_split_modules
        self.name, self.pad, self.pooling = encoder.base_model_prefix, pad, POOLINGS[pooling]
        if (adapter := getattr(encoder, "peft_adapter", None)) is not None:
            self.name, encoder, self.peft_adapter = "base_model", encoder.base_model, adapter
            adapter.settings.task_type = "FEATURE_EXTRACTION"
        self.add_module(self.name, encoder)
        self.log_scale = nn.Parameter(torch.tensor([-math.log(temperature)]))

    def forward(self, *texts: Tensor) -> tuple[Tensor, ...]:
        """(vectors of the queries, of the documents, and of each column of negatives; 1 / temperature for each pair)"""
        return *map(self.vectors, texts), self.log_scale.exp().expand(len(texts[0]))

    def vectors(self, tokens: Tensor) -> Tensor:
        """(batch, length), filled up with `PADDING` -> (batch, hidden)"""
        mask = (tokens != PADDING).long()
        given = {"input_ids": tokens.masked_fill(tokens == PADDING, self.pad), "attention_mask": mask}
        hidden = self.get_submodule(self.name)(**given).last_hidden_state.float()
        return F.normalize((hidden * self.pooling(mask)[..., None]).sum(1), dim=-1)  # the mean's length does not matter


def word_tokenizer(texts: Sequence[str], num_tokens: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the most frequent words of `texts`, in lower case; a digit or a punctuation mark is
    a word. The first token of a text is [CLS].

    Args:
        texts: the training texts.
        num_tokens: size of the vocabulary, with three special tokens.
    """
    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.train_from_iterator(
        texts,
        trainers.WordLevelTrainer(
            vocab_size=num_tokens, special_tokens=[PAD, UNKNOWN, FIRST], min_frequency=2, show_progress=False
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{FIRST} $A", special_tokens=[(FIRST, 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNKNOWN, cls_token=FIRST, model_max_length=10**6
    )


def load_exported_tokenizer(folder: Path, classes: list[str] | None = None) -> Any:
    """The tokenizer beside an exported encoder. Raises UsageError if there is none, or if its classes differ."""
    try:
        found = AutoConfig.from_pretrained(folder, trust_remote_code=False).id2label
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError):
        raise UsageError(f"no exported encoder in {folder}: train first, or use the --output_dir of a run") from None
    there = [found[number] for number in sorted(found)]
    if classes is not None and there != classes:
        raise UsageError(f"the classes are {', '.join(there)} in {folder}, and {', '.join(classes)} in the data")
    return tokenizer
