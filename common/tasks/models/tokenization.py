"""A byte tokenizer, and a digest that identifies a tokenizer."""

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ...data.facts import say
from ...errors import UsageError

END = "\x03"  # "end of text" in ASCII, for a tokenizer without an end mark


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte of UTF-8; the token id is the byte."""
    model = models.BPE(vocab={character: byte for byte, character in bytes_to_unicode().items()}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def is_bytewise(tokenizer: Any) -> bool:
    """Whether the tokens are the bytes of UTF-8."""
    return tokenizer.vocab_size == 256 and tokenizer.convert_tokens_to_ids("A") == ord("A")


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer of a processor, which also reads images; the argument itself if it is a tokenizer."""
    return getattr(processor, "tokenizer", processor)


def adds_special_tokens(processor: Any, text: str) -> bool:
    """Whether special tokens, such as one for the beginning, come before a conversation, as in transformers'
    `apply_chat_template`: tokenizers add none, processors add them unless the text begins with one."""
    plain = tokenizer_of(processor)
    return plain is not processor and not (plain.bos_token is not None and text.startswith(plain.bos_token))


def rows_with_tokens(*encoded: Any) -> list[int]:
    """The numbers of the samples with tokens in each of these columns. Attention in a text without tokens gives 0/0.
    Prints how many samples have none, and how many are cut. Raises UsageError if all have none."""
    columns = [column["input_ids"] for column in encoded]
    if not (kept := [row for row, sample in enumerate(zip(*columns)) if all(sample)]):
        raise UsageError("no sample has tokens in each of its texts: look at the columns that the flags name")
    if missing := len(columns[0]) - len(kept):
        say(f"{missing:,} of {len(columns[0]):,} samples have a text without tokens: left out")
    if cut := {row for each in encoded for row, one in enumerate(each.encodings or ()) if one.overflowing}:
        say(f"{len(cut):,} of {len(columns[0]):,} samples have a text that is longer than the flags allow: cut")
    return kept


def digest_of(tokenizer: Any) -> str:
    """A digest of the tokenizer's files."""
    with TemporaryDirectory() as folder:
        paths = sorted(Path(path) for path in tokenizer.save_pretrained(folder))
        contents = [path.name.encode() + path.read_bytes() for path in paths if path.is_file()]
    return hashlib.sha256(b"".join(contents)).hexdigest()
