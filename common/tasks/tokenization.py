"""A tokenizer of bytes, and what tells one tokenizer from another."""

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "\x03"  # "end of text" in ASCII, for a tokenizer without an end mark


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte of UTF-8; the token id is the byte."""
    model = models.BPE(vocab={character: byte for byte, character in enumerate(_byte_characters())}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level tokenizers (GPT-2's encoder.py)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def is_bytewise(tokenizer: Any) -> bool:
    """Whether the tokens are the bytes of UTF-8."""
    return tokenizer.vocab_size == 256 and tokenizer.convert_tokens_to_ids("A") == ord("A")


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer of a processor, which also reads images. A tokenizer is its own."""
    return getattr(processor, "tokenizer", processor)


def adds_special_tokens(processor: Any, text: str) -> bool:
    """Whether tokens such as that of the beginning come before a rendered conversation, as in transformers'
    `apply_chat_template`: tokenizers add none, processors add them unless the text begins with one."""
    plain = tokenizer_of(processor)
    return plain is not processor and not (plain.bos_token is not None and text.startswith(plain.bos_token))


def digest_of(tokenizer: Any) -> str:
    """A digest of the tokenizer's files."""
    with TemporaryDirectory() as folder:
        paths = sorted(Path(path) for path in tokenizer.save_pretrained(folder))
        contents = [path.name.encode() + path.read_bytes() for path in paths if path.is_file()]
    return hashlib.sha256(b"".join(contents)).hexdigest()
