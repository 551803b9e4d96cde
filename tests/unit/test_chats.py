"""Promise: the model learns to write the assistant's answers, each conversation for itself."""

import copy
import json
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from common.errors import UsageError
from common.tasks.causal_lm import with_losses
from common.tasks.chat_models import small_chat_model, with_chat_template
from common.tasks.chats import ChatDataset, Chats, PackedDataset, by_rules, encode, load_chats, packed
from common.tasks.text import IGNORED
from common.tasks.tokenization import byte_tokenizer

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
QUESTION, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}


def chats(*conversations: list[dict[str, str]], max_length: int = 1000) -> Chats:
    tokenizer = small_chat_model(64, "sdpa")[1]
    return Chats([encode(one, tokenizer, max_length) for one in conversations], list(conversations).__getitem__)


def trained_text(row: dict) -> str:
    return bytes(token for token, trained in zip(row["tokens"], row["trained"]) if trained).decode()


def test_answers_alone_are_trained() -> None:
    row = chats([{"role": "system", "content": "Be short."}, QUESTION, ANSWER, QUESTION, ANSWER]).rows[0]
    assert trained_text(row) == "Because.\x03Because.\x03"
    assert bytes(row["tokens"]).decode() == "S Be short.\x03" + 2 * "U Why?\x03A Because.\x03"
    sample = ChatDataset(chats([QUESTION, ANSWER]))[0]
    assert sample["weight"] == 9 == (sample["labels"] != IGNORED).sum()
    assert bytes(sample["labels"][sample["labels"] != IGNORED].tolist()).decode() == "Because.\x03"


def test_umlauts_have_several_tokens() -> None:
    row = chats([{"role": "user", "content": "Größe?"}, {"role": "assistant", "content": "Übergröße €"}]).rows[0]
    assert trained_text(row) == "Übergröße €\x03"


def test_facts_and_cuts() -> None:
    some = chats([QUESTION, ANSWER], [QUESTION, {"role": "assistant", "content": "x" * 100}], max_length=27)
    assert [len(row["tokens"]) for row in some.rows] == [18, 27]
    assert some.facts(27) == "60 % of tokens trained; longest 110; 1 of 2 too long (cut)"


def test_packing_keeps_each_conversation_whole() -> None:
    blocks = packed([5, 9, 3, 7, 1, 10], 10)
    assert sorted(item for block in blocks for item in block) == list(range(6))
    assert blocks == [[5], [1, 4], [2, 3], [0]]
    some = chats([QUESTION, ANSWER], [QUESTION], [QUESTION, ANSWER])
    dataset = PackedDataset(some, 48)
    assert len(dataset) == 1
    sample = dataset[0]
    assert sample["positions"].tolist() == [*range(17), *range(6), *range(17), *range(8)]
    assert sample["weight"] == 9 + 0 + 9 and sample["tokens"].shape == sample["labels"].shape == (48,)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_loss_is_the_unpacked_one(attention: str) -> None:
    torch.manual_seed(0)
    some = chats(*by_rules()[:9])
    model = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=64, attn_implementation=attention)).eval()
    alone = with_losses(copy.deepcopy(model))
    samples = [ChatDataset(some)[index] for index in range(9)]
    losses = [alone(sample["tokens"][None], sample["labels"][None])[0] * sample["weight"] for sample in samples]
    expected = sum(losses) / sum(sample["weight"] for sample in samples)
    together = with_losses(model, packs=True)
    blocks = [PackedDataset(some, 128)[index] for index in range(len(PackedDataset(some, 128)))]
    assert 1 < len(blocks) < 9
    batch = {name: torch.stack([block[name] for block in blocks]) for name in ("tokens", "labels", "positions")}
    weights = torch.tensor([block["weight"] for block in blocks])
    found = (together(**batch) * weights).sum() / weights.sum()
    assert abs(found - expected) <= 1e-6 * expected


def test_models_that_see_other_conversations_are_refused() -> None:
    with_losses(LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=32)), packs=True)
    for model in (
        OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=32, word_embed_proj_dim=32)),
        BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=256)),
    ):
        with pytest.raises(UsageError, match=f"--packing: {type(model).__name__} .*: leave out --packing"):
            with_losses(model, packs=True)


def test_chunks_give_the_same_losses_and_gradients() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=32, tie_word_embeddings=True))
    tokens, labels = torch.randint(0, 256, (2, 3, 20)).unbind()
    labels[0, :15] = IGNORED
    found = []
    for chunk in (0, 7):
        chunked = with_losses(copy.deepcopy(model), chunk=chunk, longest=30)
        losses = chunked(tokens, labels)
        losses.sum().backward()
        found.append((losses.detach(), [weight.grad for weight in chunked.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


def write(path: Path, *rows: dict) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"chat": [QUESTION, ANSWER]}, "has neither messages nor prompt and completion: type --messages_column with"),
        ({"messages": [{"role": "user"}]}, "conversation 1: the chat template refuses it"),
        ({"messages": None}, "conversation 1: expected a list of messages"),
        ({"messages": [{"from": "user", "value": "Why?"}]}, "conversation 1: expected a list of messages"),
        ({"messages": [ANSWER, QUESTION]}, "conversation 1: it begins with an answer"),
        ({"messages": [QUESTION, {"role": "bot", "content": "Yes."}]}, "no token is trained: expected messages of the"),
    ],
)
def test_bad_files(tmp_path: Path, row: dict, line: str) -> None:
    tokenizer = small_chat_model(64, "sdpa")[1]
    with pytest.raises(UsageError, match=line):
        load_chats(write(tmp_path / "chats.jsonl", row, row), tokenizer, 64, "messages")


def test_files(tmp_path: Path) -> None:
    tokenizer = with_chat_template(byte_tokenizer(), small_chat_model(64, "sdpa")[0])
    prompts = write(tmp_path / "prompts.jsonl", *[{"prompt": "Why?", "completion": "Because."}] * 3)
    messages = write(tmp_path / "messages.jsonl", *[{"messages": [QUESTION, ANSWER]}] * 3)
    for path in (prompts, messages):
        train, evaluation = load_chats(path, tokenizer, 64, "messages")
        assert len(train) == 2 and len(evaluation) == 1 and train.messages(0) == [QUESTION, ANSWER]
        assert trained_text(train.rows[0]) == "Because.\x03"


def test_template_that_changes_earlier_turns_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for one in messages %}{{ one['content'] }}{% endfor %}"
    with pytest.raises(UsageError, match="the chat template changes earlier turns"):
        encode([QUESTION, ANSWER, QUESTION, ANSWER], tokenizer, 100)


def test_plain_template_begins_and_ends_as_the_tokenizer_does() -> None:
    tokenizer, model = byte_tokenizer(), small_chat_model(64, "sdpa")[0]
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    row = encode([QUESTION, ANSWER], with_chat_template(tokenizer, model), 100)
    assert tokenizer.decode(row["tokens"]) == "<s><|user|>Why?</s><|assistant|>Because.</s>"
    assert model.config.eos_token_id == model.generation_config.eos_token_id == [257, 3]
