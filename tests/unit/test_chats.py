"""Promise: the model learns to write the assistant's answers, each conversation for itself."""

import copy
import json
import math
import random
import re
from datetime import date
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
)

from accelerate_recipes.common.accidents import advice
from accelerate_recipes.common.data import pad_to_longest
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.chat import chat_models
from accelerate_recipes.common.tasks.chat.chat_models import small_chat_model, with_chat_template, write_answers
from accelerate_recipes.common.tasks.chat.chats import ChatDataset, Chats, by_rules, encode, load_chats, pack
from accelerate_recipes.common.tasks.chat.conversations import Conversation, reach_into
from accelerate_recipes.common.tasks.models.causal_lm import _of_labels, with_losses
from accelerate_recipes.common.tasks.models.tokenization import byte_tokenizer
from accelerate_recipes.common.tasks.nlp.text import IGNORED

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
SYSTEM = {"role": "system", "content": "Be short."}
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


def test_messages_of_weight_0_are_context() -> None:
    plain = chats([QUESTION, ANSWER, QUESTION, ANSWER]).rows[0]
    some = chats([QUESTION, ANSWER | {"weight": 0}, QUESTION | {"weight": 1}, ANSWER | {"weight": 1}]).rows[0]
    half = len(plain["tokens"]) // 2
    assert some["tokens"] == plain["tokens"] and not any(some["trained"][:half])
    assert some["trained"][half:] == plain["trained"][half:] and some["num_trained"] == plain["num_trained"] / 2
    with pytest.raises(UsageError, match=r"message 2 .assistant. has the weight 0\.5: expected 1 .trained. or 0 .not"):
        chats([QUESTION, ANSWER | {"weight": 0.5}])


def test_umlauts_have_several_tokens() -> None:
    row = chats([{"role": "user", "content": "Größe?"}, {"role": "assistant", "content": "Übergröße €"}]).rows[0]
    assert trained_text(row) == "Übergröße €\x03"


def test_a_token_that_reaches_into_an_answer_is_trained() -> None:
    """With " Because" as one token, the template's space and the answer's first word are one."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([" Because"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }} {{ m.content }}|{% endfor %}" + (
        "{% if add_generation_prompt %}a {% endif %}"
    )
    row = encode([QUESTION, ANSWER], tokenizer, 99)
    assert tokenizer.decode(list(compress(row["tokens"], row["trained"]))) == " Because.|"
    plain = Conversation([QUESTION, {"role": "assistant", "content": "So."}], 1)
    assert trained_text(encode(plain, tokenizer, 99)) == "So.|"


@pytest.mark.parametrize(
    ("spans", "places", "expected"),
    [
        ([range(2, 5)], [(0, 1), (1, 3), (3, 5), (5, 6)], [False, True, True, False]),
        ([range(3, 6)], [(0, 1), (2, 2), (3, 3), (3, 6)], [False, False, False, True]),  # 1 to 2 and 2 to 3, trimmed
        ([range(2, 6)], [(0, 1), (2, 2), (3, 3), (3, 6)], [False, False, True, True]),
        ([range(0, 3)], [(0, 0), (0, 3)], [True, True]),  # a special token, and the first word
    ],
)
def test_tokens_that_reach_into_spans(spans: list[range], places: list[tuple[int, int]], expected: list[bool]) -> None:
    assert reach_into(spans, places) == expected


def test_a_word_without_a_token_is_named() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"Why?": 0})), eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(Exception, match="UNK") as caught:
        encode([QUESTION, ANSWER], tokenizer, 99)
    assert "the tokenizer has no token for unknown words" in (advice(caught.value) or "")


def test_facts_and_cuts() -> None:
    some = chats([QUESTION, ANSWER], [QUESTION, {"role": "assistant", "content": "x" * 100}], max_length=27)
    assert [len(row["tokens"]) for row in some.rows] == [18, 27]
    assert some.facts(27) == "60 % of tokens trained; longest 110; 1 of 2 too long (cut)"


def test_packing_keeps_each_conversation_whole() -> None:
    blocks = pack([5, 9, 3, 7, 1, 10], 10)
    assert sorted(item for block in blocks for item in block) == list(range(6))
    assert blocks == [[5], [1, 4], [2, 3], [0]]
    some = chats([QUESTION, ANSWER], [QUESTION], [QUESTION, ANSWER])
    dataset = ChatDataset(some, 48)
    assert len(dataset) == 1
    sample = dataset[0]
    assert sample["positions"].tolist() == [*range(17), *range(6), *range(17), *range(8)]
    assert sample["weight"] == 9 + 0 + 9 and sample["tokens"].shape == sample["labels"].shape == (48,)


def test_blocks_are_filled_as_by_best_fit_decreasing() -> None:
    """The longest first, each where it leaves least room, by a search of all blocks; so does TRL's `bfd`."""
    lengths = random.Random(0).choices(range(1, 65), k=300)
    fills: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [fill for fill in fills if fill + length <= 64]
        if fits:
            fills.remove(max(fits))
        fills.append(max(fits, default=0) + length)
    assert sorted(sum(lengths[item] for item in block) for block in pack(lengths, 64)) == sorted(fills)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_packed_conversation_has_the_loss_it_has_alone(attention: str) -> None:
    torch.manual_seed(0)
    some = chats(*by_rules()[:9])
    model = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=64, attn_implementation=attention)).eval()
    alone, together = with_losses(copy.deepcopy(model)), with_losses(model, packs=True)
    dataset = ChatDataset(some, 128)
    assert 1 < len(dataset) < 9
    seen = 0
    for block, rows in zip(dataset, dataset.samples):
        starts = [place for place, position in enumerate(block["positions"]) if position == 0] + [128]
        for row, first, last in zip(rows, starts, starts[1:]):
            labels = block["labels"].clone()
            labels[:first] = labels[last:] = IGNORED
            sample, given = ChatDataset(some)[row], (block["tokens"], labels, block["positions"])
            expected = alone(sample["tokens"][None], sample["labels"][None])
            torch.testing.assert_close(together(*(each[None] for each in given)), expected, rtol=1e-6, atol=0)
            seen += 1
    assert seen == 9


def test_models_that_see_other_conversations_are_refused() -> None:
    with_losses(LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=32)), packs=True)
    for model in (
        OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=32, word_embed_proj_dim=32)),
        BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=256)),
    ):
        with pytest.raises(UsageError, match=f"--packing: {type(model).__name__} .*: remove --packing"):
            with_losses(model, packs=True)


@pytest.mark.parametrize("chunk", [0, 7])
def test_chunks_give_the_losses_gradients_accuracies_and_entropies_of_all_logits(chunk: int) -> None:
    """Against transformers' logits; the entropy is that of torch's distribution of them."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=32, tie_word_embeddings=True))
    tokens, labels = torch.randint(0, 256, (3, 20)), torch.randint(0, 256, (3, 20))
    logits = model(tokens).logits
    labels[:, ::3] = logits.argmax(-1)[:, ::3]  # a third is right
    labels[0, :15] = IGNORED
    counted, each = labels != IGNORED, torch.distributions.Categorical(logits=logits)
    expected = {
        "loss": -each.log_prob(labels.clamp(min=0)),
        "token_accuracy": (logits.argmax(-1) == labels).float(),
        "entropy": each.entropy(),
    }
    expected = {name: (value * counted).sum(1) / counted.sum(1) for name, value in expected.items()}
    assert expected["token_accuracy"].tolist() == pytest.approx([0.4, 0.35, 0.35])
    expected["loss"].sum().backward()
    gradients = [weight.grad for weight in model.parameters()]
    for measures in (False, True):
        chunked = with_losses(copy.deepcopy(model), chunk=chunk, longest=30, measures=measures)
        chunked.zero_grad()
        found = chunked(tokens, labels) if measures else {"loss": chunked(tokens, labels)}
        found["loss"].sum().backward()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close([weight.grad for weight in chunked.parameters()], gradients, rtol=1e-4, atol=1e-6)


def test_a_token_that_cannot_come_has_no_entropy_and_a_close_one_is_right_in_part() -> None:
    logits = torch.log(torch.tensor([[0.0, 0.5, 0.5], [0.2, 0.4, 0.4 * math.exp(5e-4)]]))
    found = _of_labels(logits, torch.tensor([1, 1]), True)
    half = torch.tensor([0.5, 0.5])
    assert found[1].tolist() == pytest.approx([1, 0.5], abs=1e-3)
    assert found[2, 0].item() == pytest.approx(-(half * half.log()).sum().item())


def write(path: Path, *rows: dict) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (
            {"chat": [QUESTION, ANSWER]},
            "has neither messages nor prompt and completion: rename two columns, or use --m",
        ),
        ({"messages": "Why?"}, "its messages are not valid JSON"),
        ({"messages": [{"role": "user"}]}, r"conversation 1: message 1 \(user\) has no content"),
        ({"messages": None}, "no token is trained: expected messages of the role assistant, found no message"),
        ({"messages": 5}, "conversation 1: its messages are of the type int: expected a list"),
        ({"messages": [{"from": "robot", "value": "Why?"}]}, "conversation 1: a message is from robot: expected human"),
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
    texts = write(tmp_path / "texts.jsonl", *[{"messages": json.dumps([QUESTION, ANSWER])}] * 3)
    for path in (prompts, messages, texts):
        train, evaluation = load_chats(path, tokenizer, 64, "messages")
        assert len(train) == 2 and len(evaluation) == 1 and train.chat(0).messages == [QUESTION, ANSWER]
        assert trained_text(train.rows[0]) == "Because.\x03"


# As those of Qwen, which knows parts, tools and calls; R1, which begins to think; and DeepSeek: a call has no content.
TOOLS = (
    "{% if tools %}S {{ tools | tojson }}|{% endif %}{% for one in messages %}{{ one.role[0].upper() }} "
    "{% if one.content is string %}{{ one.content }}{% else %}"
    "{% for part in one.content %}{{ part.text | upper if loop.first else part.text }}{% endfor %}{% endif %}"
    "{% for call in one.tool_calls %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %}|"
    "{% endfor %}{% if add_generation_prompt %}A {% endif %}"
)
THINKS = (
    "{% for one in messages %}{{ '<' + one.role + '>' }}"
    "{% if one.role == 'assistant' and one.reasoning_content %}{{ '<think>' + one.reasoning_content + '</think>' }}"
    "{% elif one.role == 'assistant' and no_think %}<think></think>{% endif %}{{ one.content + '|' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% if no_think %}</think>{% endif %}{% endif %}"
)
CALLS = (
    "{% for one in messages %}{{ one.role[0].upper() + ' ' }}{% if one.content is none or one.content is undefined %}"
    "{% for call in one.tool_calls %}{{ '<' + call.function.name + ' ' + call.function.arguments + '>' }}{% endfor %}"
    "{% else %}{{ one.content }}{% endif %}|{% endfor %}{% if add_generation_prompt %}A {% endif %}"
)


def with_template(template: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def decoded(row: dict) -> str:
    return bytes(row["tokens"]).decode()


LAMP = {"type": "function", "function": {"name": "lamp", "arguments": {"on": "é"}}}
LAMP_IN_JSON = {"type": "function", "function": {"name": "lamp", "arguments": '{"on": "é"}'}, "id": None}
SWITCHED = [{"role": "tool", "name": "lamp", "content": "Done."}, ANSWER]


@pytest.mark.parametrize("call", [LAMP, LAMP_IN_JSON])
@pytest.mark.parametrize("missing", [{}, {"content": None}, {"content": ""}])
@pytest.mark.parametrize("template", [TOOLS, CALLS])
def test_calls_are_written_as_the_template_does(call: dict, missing: dict, template: str) -> None:
    """Arguments as a dict or as JSON, whatever the data have; one template knows a call by the content None."""
    messages = [QUESTION, {"role": "assistant", **missing, "tool_calls": [call]}, *SWITCHED]
    if missing.get("content") == "" and template is CALLS:
        with pytest.raises(UsageError, match="the chat template does not write tool_calls"):
            encode(messages, with_template(template), 1000)
        return
    row = encode(messages, with_template(template), 1000)
    argument = '{"on": "é"}' if template is TOOLS or call is LAMP_IN_JSON else r'{"on": "\u00e9"}'
    assert decoded(row) == f"U Why?|A <lamp {argument}>|T Done.|A Because.|"
    assert trained_text(row) == f"<lamp {argument}>|Because.|"


def test_calls_that_the_template_ignores_are_refused() -> None:
    messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [LAMP]}, *SWITCHED]
    with pytest.raises(UsageError, match="the chat template does not write tool_calls"):
        encode(messages, small_chat_model(64, "sdpa")[1], 1000)


@pytest.mark.parametrize("printed", ["{{ one.content }}", "{{ one.content | trim }}", "{{ one.tool_calls }}"])
def test_the_representation_of_a_python_object_is_never_trained(printed: str) -> None:
    tokenizer = with_template("{% for one in messages %}{{ one.role[0] }} " + printed + "|{% endfor %}")
    parts = [{"type": "text", "text": "It's "}, {"type": "text", "text": "so."}]
    messages = [QUESTION, {"role": "assistant", "content": parts}]
    if "content" in printed:
        assert decoded(encode(messages, tokenizer, 1000)) == "u Why?|a It's so.|"
        return
    messages[1] |= {"content": "", "tool_calls": [LAMP]}
    with pytest.raises(UsageError, match="the chat template writes a Python object of its messages"):
        encode(messages, tokenizer, 1000)


def test_parts_are_for_templates_that_know_them() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a", "image": None}, {"text": "b"}]}, ANSWER]
    loop = TOOLS.replace(" | upper if loop.first else part.text", "+ '/'")
    assert decoded(encode(messages, with_template(loop), 99)) == "U a/b/|A Because.|"
    assert decoded(encode(messages, with_template(CALLS), 99)) == "U ab|A Because.|"
    lost = with_template(
        CALLS.replace("{% else %}{{ one.content }}", "{% elif one.content is string %}{{ one.content }}")
    )
    assert decoded(encode(messages, lost, 99)) == "U ab|A Because.|"


def test_what_was_thought_is_given_to_the_template() -> None:
    tokenizer, thought = with_template(THINKS), {**ANSWER, "reasoning_content": "Hm."}
    for key in ("reasoning_content", "thinking"):
        row = encode([QUESTION, {**ANSWER, key: "Hm."}], tokenizer, 1000)
        assert trained_text(row) == "Hm.</think>Because.|"
    with pytest.raises(UsageError, match="begins an answer with '<think>', an answer in the data does not"):
        encode([QUESTION, ANSWER], tokenizer, 1000)
    with pytest.raises(UsageError, match="begins an answer with '<think>', an answer in the data does not"):
        encode([QUESTION, thought, QUESTION, ANSWER], tokenizer, 1000)
    chat = Conversation([QUESTION, ANSWER], options={"no_think": True})
    assert trained_text(encode(chat, tokenizer, 1000)) == "Because.|"


def test_tools_and_options_of_the_template(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tool = {"type": "function", "function": {"name": "lamp", "parameters": {"type": "object"}}}
    rows = [
        {"messages": [QUESTION, ANSWER], "tools": given} for given in ([tool], json.dumps([tool]), [json.dumps(tool)])
    ]
    for number, row in enumerate(rows):
        chat = Conversation.of_row(row, "messages")
        assert decoded(encode(chat, with_template(TOOLS), 1000)).startswith(f"S {json.dumps([tool])}|U Why?"), number
    path = write(tmp_path / "chats.jsonl", *[rows[1] | {"chat_template_kwargs": {"no_think": True}}] * 3)
    train, _ = load_chats(path, with_template(TOOLS), 1000, "messages")
    assert decoded(train.rows[0]).startswith("S [") and train.chat(0).options == {"tools": [tool], "no_think": True}
    assert "the chat template does not use no_think\n" in capsys.readouterr().out
    load_chats(path, with_template(THINKS), 1000, "messages")
    assert "the chat template does not use tools\n" in capsys.readouterr().out
    path = write(tmp_path / "train.jsonl", *[{"messages": [QUESTION, ANSWER | {"train": False}]}] * 3)
    load_chats(path, with_template(TOOLS), 1000, "messages")
    assert 'does not use train ("weight": 0 keeps a message out of training)\n' in capsys.readouterr().out
    users_only = with_template(TOOLS.replace("messages", "messages[1:]"))
    load_chats(
        write(tmp_path / "s.jsonl", *[{"messages": [SYSTEM, QUESTION, ANSWER], "id": 1}] * 3),
        users_only,
        99,
        "messages",
    )
    out = capsys.readouterr().out
    assert "the chat template does not use messages of the role system\n" in out
    assert "s.jsonl: columns not read: id\n" in out
    with pytest.raises(UsageError, match="its tools are not valid JSON"):
        Conversation.of_row({"messages": [QUESTION, ANSWER], "tools": "lamp("}, "messages")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [QUESTION], "completion": [ANSWER]},
        {"prompt": "Why?", "completion": "Because."},
        {"prompt": [QUESTION], "completion": "Because."},
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because.", "weight": None}]},
        {"conversations": [{"from": "Human", "value": "Why?"}, {"from": "GPT", "value": "Because."}]},
        {"conversations": [QUESTION, ANSWER]},
        {"messages": [{**QUESTION, "tool_calls": None}, {**ANSWER, "tool_calls": []}]},
    ],
)
def test_forms_of_conversations(tmp_path: Path, row: dict) -> None:
    train, _ = load_chats(write(tmp_path / "chats.jsonl", row, row), small_chat_model(64, "sdpa")[1], 99, "messages")
    assert train.chat(0).messages == [QUESTION, ANSWER]
    assert decoded(train.rows[0]) == "U Why?\x03A Because.\x03" and trained_text(train.rows[0]) == "Because.\x03"


def test_the_prompt_is_not_trained_and_a_conversation_may_end_with_a_question() -> None:
    tokenizer = small_chat_model(64, "sdpa")[1]
    whole = [{"role": "system", "content": "Short."}, QUESTION, ANSWER, QUESTION]
    assert trained_text(encode(whole, tokenizer, 99)) == "Because.\x03"
    chat = Conversation.of_row({"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]}, "messages")
    row = encode(chat, tokenizer, 99)
    assert trained_text(row) == "Because.\x03" and decoded(row).count("Because.") == 2


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (5, r"the content of message 2 \(assistant\) is of the type int: expected a text"),
        ({"a": 1}, r"the content of message 2 \(assistant\) is of the type dict: expected a text"),
        (["Because."], r"message 2 \(assistant\) has a part of the type str: expected"),
        ([{"type": "image"}], r"message 2 \(assistant\) has a part of the type image: expected"),
        (None, r"message 2 \(assistant\) has no content"),
    ],
)
def test_contents_that_are_no_text(content: Any, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        encode([QUESTION, {"role": "assistant", "content": content}], small_chat_model(64, "sdpa")[1], 99)


def test_values_that_a_text_cannot_have() -> None:
    tokenizer = with_template(TOOLS)
    dated = {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": {"day": date(2024, 1, 1)}}}]}
    for messages, line in (
        ([QUESTION, dated], r"message 2 \(assistant\) has a value that a text cannot have .*date"),
        ([{"role": "user", "content": "half \ud83d"}, ANSWER], r"message 1 \(user\) has a value .*surrogates"),
        ([QUESTION, {"role": "assistant", "tool_calls": "[]"}], "the tool_calls of message 2 .* are not a list"),
    ):
        with pytest.raises(UsageError, match=line):
            encode(messages, tokenizer, 99)


def test_conversations_without_a_trained_token_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    long, cut = {"role": "user", "content": "very long question " * 8}, 40
    rows = [{"messages": [long if number % 2 else QUESTION, ANSWER], "n": number} for number in range(60)]
    rows[0]["messages"] = [QUESTION, ANSWER, QUESTION, {"role": "Assistant", "content": "No."}]
    train, evaluation = load_chats(
        write(tmp_path / "chats.jsonl", *rows), small_chat_model(cut, "sdpa")[1], cut, "messages"
    )
    assert (
        len(train) + len(evaluation) == 30 and min(train.column("num_trained") + evaluation.column("num_trained")) > 0
    )
    assert all(train.chat(index).messages[0] == QUESTION for index in range(len(train)))
    output = capsys.readouterr().out
    assert "messages of the role Assistant are not trained, only those of assistant" in output
    line = f"{57 - len(train)} of 57 training conversations have no trained token within --max_length 40: left out"
    assert line in output
    assert all(sample["weight"] > 0 for sample in (ChatDataset(train)[index] for index in range(len(train))))


def test_empty_answers_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """As in TRL, the model learns to end there at once. A call has no text, and weight 0 no answer to learn."""
    empty, called = ANSWER | {"content": ""}, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    path = write(tmp_path / "a.jsonl", *[{"messages": [QUESTION, empty if row % 3 else ANSWER]} for row in range(9)])
    for _ in range(2):  # the second time from the cache
        load_chats(path, small_chat_model(64, "sdpa")[1], 64, "messages")
        said = re.findall(r"(\d) (?:training|evaluation) conversations have an empty answer", capsys.readouterr().out)
        assert sum(map(int, said)) == 6
    for messages in ([QUESTION, called], [QUESTION, empty | {"weight": 0}, QUESTION, ANSWER]):
        assert not Conversation.of(messages).has_empty_answer


@pytest.mark.parametrize("nothing", [None, [], ""])
def test_rows_without_messages_are_left_out(tmp_path: Path, nothing: Any, capsys: pytest.CaptureFixture) -> None:
    rows = [{"messages": [QUESTION, ANSWER] if number % 3 else nothing} for number in range(9)]
    path = write(tmp_path / "train.jsonl", *rows)
    write(tmp_path / "test.jsonl", *rows)
    assert [*map(len, load_chats(str(tmp_path), small_chat_model(64, "sdpa")[1], 64, "messages"))] == [6, 6], path
    assert (
        "3 of 9 training conversations have no trained token within --max_length 64: left out"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("template", ["", "hello", "{% for one in messages %}{{ one.role }}{% endfor %}"])
def test_a_template_that_writes_no_answer(tmp_path: Path, template: str) -> None:
    path = write(tmp_path / "chats.jsonl", *[{"messages": [QUESTION, ANSWER]}] * 3)
    tokenizer = with_template(template + "{% if add_generation_prompt %}assistant{% endif %}" * ("one" in template))
    line = "no token is trained: use a chat_template that writes the answers, a larger --max_length, or weights above 0"
    with pytest.raises(UsageError, match=line):
        load_chats(path, tokenizer, 64, "messages")


@pytest.mark.parametrize("packs", [False, True])
def test_loss_is_that_of_transformers(packs: bool) -> None:
    """With the id of padding within a conversation, and -100 for what is not trained."""
    torch.manual_seed(0)
    tokenizer = small_chat_model(64, "sdpa")[1]
    tokenizer.pad_token = tokenizer.eos_token = "."
    conversations = [
        [QUESTION, {"role": "assistant", "content": text}] for text in ("A. b. c", "No", "...", "Yes. Yes.")
    ]
    rows = [encode(messages, tokenizer, 64) for messages in conversations]
    sizes = {"intermediate_size": 64, "pad_token_id": tokenizer.pad_token_id}
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **sizes)).eval()
    batch = tokenizer.pad({"input_ids": [row["tokens"] for row in rows]}, padding_side="right", return_tensors="pt")
    labels = torch.full_like(batch["input_ids"], IGNORED)
    for label, row in zip(labels, rows):
        for place, (token, trained) in enumerate(zip(row["tokens"], row["trained"])):
            label[place] = token if trained else IGNORED
    expected = model(**batch, labels=labels).loss
    some = Chats(rows, conversations.__getitem__)
    dataset = ChatDataset(some, 64 if packs else None)
    given = pad_to_longest({"labels": IGNORED, "places": -1}, None)([dataset[index] for index in range(len(dataset))])
    weight = given.pop("weight")
    assert weight.sum() == sum(row["num_trained"] for row in rows)
    found = with_losses(model, packs=packs, chunk=16, longest=64)(**given).detach()
    assert abs(float((found * weight).sum() / weight.sum() / expected.detach()) - 1) <= 1e-6


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


def test_an_end_that_is_no_number_of_a_token() -> None:
    tokenizer, (model, _) = byte_tokenizer(), small_chat_model(64, "sdpa")
    for wrong in ("<|im_end|>", [3, 256.0]):
        model.generation_config.eos_token_id = wrong
        with pytest.raises(UsageError, match=r"eos_token_id in generation_config.json is .*: use the number of the to"):
            with_chat_template(tokenizer, model)


@pytest.mark.parametrize(
    ("settings", "is_used"),
    [
        ({"return_dict_in_generate": True}, True),
        *(
            ({name: value}, False)
            for name, value in (
                ("num_beams", 0),
                ("forced_eos_token_id", 999),
                ("min_new_tokens", "a"),
                ("bos_token_id", "s"),
                ("repetition_penalty", 0),
            )
        ),
    ],
)
def test_settings_that_prevent_answers_are_named(
    settings: dict[str, Any], is_used: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The model is there by then: it is no mistake of the run."""
    model, tokenizer = small_chat_model(64, "sdpa")
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    monkeypatch.setattr(chat_models, "load_trained", lambda folder, kind: model.eval())
    write_answers(chat_models.ChatFlags(), tokenizer, chats([QUESTION, ANSWER]))
    line = "0 of 1 held-out answers are right" if is_used else "no answers, because of its generation_config.json: "
    assert line in capsys.readouterr().out


def test_mark_of_several_tokens_ends_no_answer_at_its_first(capsys: pytest.CaptureFixture) -> None:
    tokenizer, (model, _) = byte_tokenizer(), small_chat_model(64, "sdpa")
    known = model.generation_config.eos_token_id
    for mark, ends in (("</answer>", known), ("</a><|end|>", [256, known])):
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
        tokenizer.chat_template = "{% for one in messages %}{{ one['content'] + '" + mark + "' }}{% endfor %}"
        with_chat_template(tokenizer, model)
        found = model.generation_config.eos_token_id
        assert (found if isinstance(ends, list) else found[0]) == ends
    line = "ends answers with '</answer>', not one token: generation does not stop there"
    assert capsys.readouterr().out.count(line) == 1
