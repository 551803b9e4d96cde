"""Promise: the text recipes compute what transformers does.

test_similarity.py has sentence-transformers' losses and measures, test_chats.py and test_vision_chats.py transformers'
loss of answers, test_preference_pairs.py TRL's losses."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    RobertaConfig,
    RobertaModel,
)

from accelerate_recipes.common.data import pad_to_longest
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.models.encoder import always_mask
from accelerate_recipes.common.tasks.models.tokenization import byte_tokenizer
from accelerate_recipes.common.tasks.nlp.pairs import EncodedPairs, Pair
from recipes import text_classification
from recipes.embeddings import PADDING, Embedder

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}
PAD = 2  # also the mark that ends a sentence, within texts
TEXTS = [[5, 6, PAD, 7, 8, PAD], [9, PAD, PAD, 10], [11, 12], [PAD, 13, 14, 15, 16]]


def padded(texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens filled up with PAD, transformers' mask): by the places of padding."""
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [PAD] * (longest - len(text)) for text in texts])
    return tokens, torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_vectors_are_those_of_transformers_with_a_mask(kind: str) -> None:
    """A text may hold the token that pads. RoBERTa counts positions by it, as it does anywhere."""
    torch.manual_seed(0)
    encoder: Any = (
        BertModel(BertConfig(**SIZES, pad_token_id=PAD), add_pooling_layer=False)
        if kind == "bert"
        else RobertaModel(RobertaConfig(**SIZES, pad_token_id=PAD), add_pooling_layer=False)
    ).eval()
    tokens, mask = padded(TEXTS)
    hidden = encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
    expected = F.normalize((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=1)
    always_mask(encoder)
    samples = [{"query": torch.tensor(text), "document": torch.tensor(text[::-1])} for text in TEXTS]
    batch = pad_to_longest({"query": PADDING, "document": PADDING}, mask=None)(samples)
    query, document, _ = Embedder(encoder, PAD, 0.05)(*batch.values())
    torch.testing.assert_close(query, expected, rtol=1e-5, atol=1e-6)
    alone = Embedder(encoder, PAD, 0.05).vectors(torch.tensor([TEXTS[1][::-1]]))
    torch.testing.assert_close(document[1:2], alone, rtol=1e-5, atol=1e-6)
    for pooling, place in (("cls", lambda text: 0), ("lasttoken", lambda text: len(text) - 1)):
        places = torch.tensor([place(text) for text in TEXTS])
        expected = F.normalize(hidden[torch.arange(len(TEXTS)), places], dim=1)
        found = Embedder(encoder, PAD, 0.05, pooling).vectors(batch["query"])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_texts_without_tokens_are_left_out(capsys: pytest.CaptureFixture) -> None:
    """Their attention has nothing to attend to, which is 0/0."""
    prompts = {"query": "", "document": ""}
    pairs = [Pair((text, text[:1])) for text in ("a", "", "bc")]
    kept = EncodedPairs(pairs, byte_tokenizer(), 8, prompts)
    assert [kept[index]["query"].tolist() for index in range(len(kept))] == [[97], [98, 99]]
    assert kept[1]["text_ids"].equal(EncodedPairs(pairs[2:], byte_tokenizer(), 8, prompts)[0]["text_ids"])
    assert "1 of 3 samples have a text without tokens: left out" in capsys.readouterr().out
    with pytest.raises(UsageError, match="no sample has tokens in each of its texts"):
        EncodedPairs(pairs[1:2], byte_tokenizer(), 8, prompts)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_classification_loss_is_that_of_transformers(kind: str) -> None:
    torch.manual_seed(0)
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 40, "bos_token_id": PAD, "eos_token_id": PAD}
    model: Any = (
        BertForSequenceClassification(BertConfig(**SIZES, pad_token_id=PAD, num_labels=3))
        if kind == "bert"
        else GPT2ForSequenceClassification(GPT2Config(**gpt2, pad_token_id=PAD, num_labels=3))
    ).eval()
    tokens, mask = padded(TEXTS)
    labels = torch.tensor([2, 0, 1, 1])
    expected = model(input_ids=tokens, attention_mask=mask, labels=labels)
    samples = [
        {"input_ids": torch.tensor(text), "label": label, "class_weight": 1.0}
        for text, label in zip(TEXTS, labels.tolist())
    ]
    found = text_classification.make_forward_step("class")(model, pad_to_longest({"input_ids": PAD})(samples))
    torch.testing.assert_close(found["loss"].mean(), expected.loss, rtol=1e-6, atol=1e-6, check_dtype=False)
    assert found["predicted"].tolist() == expected.logits.argmax(1).tolist()
