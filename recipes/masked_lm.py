"""Train an encoder to fill in words that are masked, as BERT does: a small one from scratch, or a pretrained one.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/masked_lm.py

Data: the source code of Python's standard library, which every machine has; or your own text, or a Hub id.
Expect: a perplexity of 58, and a third of the masked words right. Tokens are words.
Time: a minute on two CPU cores.

To train on your own text, to continue from a pretrained encoder on texts from your field, and to fill in a word:

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/masked_lm.py --data path/to/file.txt
    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/masked_lm.py --data path/to/file.txt \\
        --model_name_or_path path/or/hub-id --learning_rate 5e-5 --max_length 256
    python recipes/masked_lm.py --predict "for name [MASK] names :"
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import AutoModelForMaskedLM, BertConfig, ModernBertConfig, ModernBertForMaskedLM

from accelerate_recipes import Schedule, UsageError, fit, flag, parameter_groups, print_once, run, start
from accelerate_recipes.common.data import Batch, pad_to_longest
from accelerate_recipes.common.tasks.models.causal_lm import IGNORED, with_perplexity
from accelerate_recipes.common.tasks.models.encoder import EncoderFlags, load_encoder, small_bert
from accelerate_recipes.common.tasks.models.pretrained import export_of, exported_pipeline
from accelerate_recipes.common.tasks.nlp.text import TokenDataset, load_tokens, texts_of
from accelerate_recipes.common.tasks.reading.mixture import Sources, weights_of


@dataclass(kw_only=True)
class Config(EncoderFlags):
    """The flags of this recipe, and its defaults for the shared flags."""

    data: str = "stdlib"
    epochs: int = 10
    batch_size: int = 16
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    lr_schedule: Schedule = "linear"
    weight_decay: float = 0.01
    log_every: int = 50
    vocabulary: int = 2048
    mask_probability: float = flag(0.15, "probability that the model has to fill in a word", above=0, below=1)
    max_samples: int | None = flag(None, "stream a dataset, and use only its first N rows", minimum=1)
    predict: str | None = flag(None, "instead of training, let the exported model fill in the [MASK] of this text")


class MaskedBlocks(Dataset):
    """Samples {"input_ids", "labels": int64 of shape (length,); "weight": float32, 0-dim}: a block of tokens between
    the special tokens of a text. Only tokens to fill in have labels; the weight is their number.

    Of the chosen words, 80 % are masked, 10 % get random tokens, and 10 % stay (Devlin et al. 2019). They are drawn in
    `__getitem__`, where they depend only on the seed, the epoch and the sample.

    Args:
        blocks: without special tokens.
        tokenizer: a transformers tokenizer with a mask token.
        probability: that a word is chosen. The word with the lowest draw always is.
    """

    def __init__(self, blocks: TokenDataset, tokenizer: Any, probability: float):
        self.blocks, self.mask, self.probability = blocks, tokenizer.mask_token_id, probability
        self.before, self.after = around(tokenizer)
        self.num_tokens, self.goes_on = len(tokenizer), tokens_within_words(tokenizer)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block = self.blocks[index]
        tokens = block["tokens"][: int(block.get("weight", len(block["tokens"])))]
        words = (~self.goes_on[tokens]).index_fill(0, torch.tensor(0), True).cumsum(0) - 1
        draw, kind = torch.rand(2, int(words[-1]) + 1)
        chosen = (draw <= max(self.probability, float(draw.min())))[words]
        given = tokens.where(~chosen | (kind[words] >= 0.8), torch.tensor(self.mask))
        given = given.where(~chosen | (kind[words] < 0.8) | (kind[words] >= 0.9), self._random(len(tokens)))
        labels = tokens.masked_fill(~chosen, IGNORED)
        ends = [torch.full_like(end, IGNORED) for end in (self.before, self.after)]
        return {
            "input_ids": torch.cat([self.before, given, self.after]),
            "labels": torch.cat([ends[0], labels, ends[1]]),
            "weight": chosen.sum().float(),
        }

    def _random(self, number: int) -> Tensor:
        return torch.randint(self.num_tokens, (number,))


def around(tokenizer: Any) -> tuple[Tensor, Tensor]:
    """The special tokens before and after each text."""
    whole, plain = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    start = next(at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    return torch.tensor(whole[:start]).long(), torch.tensor(whole[start + len(plain) :]).long()


def tokens_within_words(tokenizer: Any) -> Tensor:
    """For each token of the vocabulary, whether it continues a word: it begins with ##, or, in a vocabulary that
    marks spaces, with a letter or digit."""
    texts = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    marks_spaces = any(text.startswith(("Ġ", "\u2581")) for text in texts)
    of_words = [text not in tokenizer.all_special_tokens and marks_spaces and text[:1].isalnum() for text in texts]
    return torch.tensor([(text[:2] == "##" and len(text) > 2) or within for text, within in zip(texts, of_words)])


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The loss and accuracy of each example, means over the tokens that it fills in."""
    labels, number = batch["labels"], batch["weight"]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=IGNORED)
    return {"loss": losses.sum(1) / number, "accuracy": (logits.argmax(-1) == labels).sum(1) / number}


def build(config: Config) -> tuple[Any, Any]:
    """Returns (model, tokenizer). Raises UsageError for wrong sizes or a wrong path."""
    if path := config.model_name_or_path:
        options = {"trust_remote_code": config.trust_remote_code}
        model, tokenizer = load_encoder(AutoModelForMaskedLM, path, config.max_length, **options)
        if tokenizer.mask_token_id is None:
            raise UsageError(f"--model_name_or_path {path}: its tokenizer has no mask token: use an encoder")
        return model, tokenizer
    sources = weights_of(config.data) or [config.data]
    pieces = (piece for source in sources for text in texts_of(source, config.max_samples) for piece in text.pieces())
    return small_bert(config, small_modern_bert, pieces)


def small_modern_bert(shape: BertConfig) -> ModernBertForMaskedLM:
    """A ModernBERT of these sizes. Its norms stand before the layers, so it learns in fewer steps than a BERT."""
    names = "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "pad_token_id"
    options = {name: getattr(shape, name) for name in names} | {"intermediate_size": 2 * shape.hidden_size}
    options |= dict.fromkeys(("embedding_dropout", "mlp_dropout", "attention_dropout"), shape.hidden_dropout_prob)
    options |= dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"))
    longest = max(512, shape.max_position_embeddings)  # its positions are rotary and have no weights
    own = ModernBertConfig(**options, max_position_embeddings=longest, global_attn_every_n_layers=1)
    return ModernBertForMaskedLM(own)


def predict(config: Config, text: str) -> None:
    """Prints what the exported model fills in."""
    fill = exported_pipeline("fill-mask", config.output_dir)
    if text.count(fill.tokenizer.mask_token) != 1:
        raise UsageError(f"--predict {text}: expected a text with one {fill.tokenizer.mask_token}, the word to fill in")
    print_once("\n".join(f"{one['token_str']}: {one['score']:.4f}" for one in fill(text)))


def main(config: Config) -> None:
    """Trains the encoder, and exports its tokenizer with it; or fills in a word."""
    if config.predict is not None:
        return predict(config, config.predict)
    accelerator = start(config)
    model, tokenizer = build(config)
    num_around = sum(map(len, around(tokenizer)))
    if config.max_length <= num_around:
        raise UsageError(f"--max_length {config.max_length} leaves no room for text: use 64 or more")
    context = config.max_length - num_around
    sources = Sources(config, lambda data: load_tokens(data, tokenizer, context, config.max_samples, "max_length"))
    optimizer = torch.optim.AdamW(parameter_groups(model, config.weight_decay), config.learning_rate)
    train_set, eval_set = sources.sets(lambda part: MaskedBlocks(part, tokenizer, config.mask_probability))
    fit(
        accelerator,
        model,
        optimizer,
        forward_step,
        train_set,
        eval_set,
        config,
        summarize=with_perplexity,
        collate_fn=pad_to_longest({"input_ids": tokenizer.pad_token_id, "labels": IGNORED}),
        export=export_of(model, tokenizer),
    )


if __name__ == "__main__":
    run(main, Config)
