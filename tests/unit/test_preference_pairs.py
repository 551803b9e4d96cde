"""Promise: the preference losses are those of the papers, over the tokens of the two answers alone."""

import json
import re
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from accelerate_recipes.common.data import pad_to_longest
from accelerate_recipes.common.data.mixed import Mixture
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.layout import Layout
from accelerate_recipes.common.plan import Plan, _generator
from accelerate_recipes.common.tasks.chat.chat_models import small_chat_model, without_dropout
from accelerate_recipes.common.tasks.chat.chats import Chats, encode
from accelerate_recipes.common.tasks.chat.preferences import (
    PairDataset,
    drawn_pairs,
    load_pairs,
    log_probabilities,
    pairs_by_rules,
    split_pair,
    weights_of_losses,
)
from accelerate_recipes.common.tasks.models.causal_lm import IGNORED, with_losses
from accelerate_recipes.common.tasks.models.tokenization import byte_tokenizer
from recipes import preferences as recipe

QUESTION = {"role": "user", "content": "Why?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Because it is so.", "No."))


def by_hand(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> tuple[Tensor, int]:
    """(log-probability of the last answer with its end mark, its tokens), without `with_losses`."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    begin = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    tokens = torch.tensor([list(text.encode())])
    logits = type(model).forward(model, input_ids=tokens).logits[:, :-1]
    found = F.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[0, len(begin.encode()) - 1 :, 0]
    return found.sum(), len(found)


@pytest.mark.parametrize("kind", ["dpo", "dpo_norm", "ipo"])
def test_loss_is_that_of_a_plain_computation(kind: str) -> None:
    torch.manual_seed(0)
    model, tokenizer = small_chat_model(128, "sdpa")
    model = with_losses(model, chunk=64, longest=128)
    pairs, _ = load_pairs("rules", tokenizer, 128)
    rows, beta = pairs_by_rules()[50:53], 0.3
    reference = torch.randn(len(pairs) // 2, 2) - 20
    dataset = PairDataset(pairs)
    dataset.reference = reference
    batch = pad_to_longest({"labels": IGNORED, "places": -1}, None)([dataset[index] for index in range(3)])
    config = recipe.Config(loss=kind, beta=beta, sft_weight=0.5)
    values = recipe.make_forward_step(config)(model, batch)
    for number, row in enumerate(rows):
        (chosen, long), (rejected, short) = (
            by_hand(model, tokenizer, row["prompt"] + row[side]) for side in ("chosen", "rejected")
        )
        ratios = [chosen - reference[number, 0], rejected - reference[number, 1]]
        sizes = (1, 1) if kind == "dpo" else (long, short)
        margin = ratios[0] / sizes[0] - ratios[1] / sizes[1]
        expected = (margin - 1 / (2 * beta)) ** 2 if kind == "ipo" else torch.log(1 + torch.exp(-beta * margin))
        expected = expected - 0.5 * chosen / long
        assert values["loss"][number].item() == pytest.approx(expected.item(), rel=1e-5)
        assert values["reward_margin"][number].item() == pytest.approx(beta * (ratios[0] - ratios[1]).item(), rel=1e-4)
        assert bool(values["reward_accuracy"][number]) == bool(ratios[0] > ratios[1])
        for side, log_probability, ratio in zip(("chosen", "rejected"), (chosen, rejected), ratios):
            assert values[f"reward_{side}"][number].item() == pytest.approx(beta * ratio.item(), rel=1e-4)
            assert values[f"logp_{side}"][number].item() == pytest.approx(log_probability.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "smoothing", "values"),
    [
        # Ratios of (1, -2) with (2, 4) tokens and of (-3, 1) with (5, 1) at beta 0.5: margins of 3 and -4, per token of
        # 1 and -1.6. Each line is a formula of its paper, by a pocket calculator.
        ("dpo", 0.0, [0.2014133, 2.1269280]),  # log(1 + exp(-1.5)), log(1 + exp(2))
        ("dpo", 0.1, [0.3514133, 1.9269280]),  # 0.9 × that + 0.1 × log(1 + exp(1.5)); and so on
        ("robust", 0.1, [0.0139133, 2.3769280]),  # (0.9 × that - 0.1 × log(1 + exp(1.5))) / 0.8
        ("dpo_norm", 0.0, [0.4740770, 1.1711007]),  # log(1 + exp(-0.5)), log(1 + exp(0.8))
        ("ipo", 0.0, [0.0, 6.76]),  # (1 - 1)², (-1.6 - 1)²
        ("hinge", 0.0, [0.0, 3.0]),  # max(0, 1 - 1.5), max(0, 1 + 2)
        ("apo_zero", 0.0, [0.6464821, 1.4400338]),  # σ(-0.5) + σ(-1); σ(1.5) + σ(0.5)
        ("apo_down", 0.0, [0.8048849, 1.0632226]),  # σ(0.5) + σ(-1.5); σ(-1.5) + σ(2)
        ("dpo:0.5,ipo:2", 0.0, [0.1007067, 14.5834640]),
        ("robust,hinge", 0.1, [0.0139133, 5.3769280]),
    ],
)
def test_losses_are_those_of_the_papers(kind: str, smoothing: float, values: list[float]) -> None:
    ratios, counts = torch.tensor([[1.0, -2.0], [-3.0, 1.0]]), torch.tensor([[2, 4], [5, 1]])
    found = recipe.preference_loss(
        ratios, counts, weights_of_losses(kind, recipe.LOSSES, recipe.SMOOTHED, smoothing), 0.5, smoothing
    )
    assert found.tolist() == pytest.approx(values, rel=1e-6, abs=1e-6)


def test_the_reference_is_that_of_the_pairs_that_the_steps_draw() -> None:
    def drawn(train_set: Any = range(103), **flags: Any) -> list[int]:
        return drawn_pairs(recipe.Config(batch_size=4, **flags), Layout(), train_set)

    plan = Plan.of(recipe.Config(batch_size=4), Layout(), 103)
    steps = torch.cat([ids for step in range(5) for _, ids in plan.global_micro_batches(step)]).tolist()
    for number in (3, 5):
        found = drawn(max_steps=number)
        assert found[: 4 * number] == steps[: 4 * number] and len({*found}) == len(found) < 4 * number + 17
        assert {*found} == {*steps[: 4 * number]} | {103 * part // 16 for part in range(16)}
    assert drawn(max_steps=25) == drawn(epochs=9, seed=3) == [*range(103)]  # 3 pairs are no batch
    assert drawn(epochs=9, evaluate_only=True) == drawn(max_steps=1)
    sources = Mixture({"a": range(50), "b": range(500)}, {"a": 1.0, "b": 1.0})  # an epoch has 50 of each
    found = drawn(sources, epochs=1)
    assert {*found} == {*sources.sampler(0, _generator(0, 0)).tolist()}


@pytest.mark.parametrize("smoothing", [0.1, 0.4])
def test_robust_loss_of_flipped_labels_is_on_average_that_of_the_right_ones(smoothing: float) -> None:
    """What its paper proves, and how it differs from cDPO."""
    ratios, counts = torch.randn(8, 2), torch.ones(8, 2)
    right, flipped = (
        recipe.preference_loss(each, counts, {"robust": 1}, 0.5, smoothing) for each in (ratios, ratios.flip(1))
    )
    mean = (1 - smoothing) * right + smoothing * flipped
    torch.testing.assert_close(mean, recipe.preference_loss(ratios, counts, {"dpo": 1}, 0.5))


@pytest.mark.parametrize(
    ("text", "smoothing", "line"),
    [
        (
            "ppo",
            0.0,
            "--loss ppo: expected one of dpo, dpo_norm, robust, ipo, hinge, apo_zero, apo_down, or a weighted sum",
        ),
        ("dpo,dpo:2", 0.0, "--loss dpo,dpo:2: expected one of"),
        ("dpo:-1", 0.0, "--loss dpo:-1: expected one of"),
        ("dpo:", 0.0, "--loss dpo:: expected one of"),
        ("dpo:nan", 0.0, "--loss dpo:nan: expected one of"),
        ("ipo,hinge", 0.1, "--label_smoothing is not for --loss ipo,hinge: use one of dpo, dpo_norm, robust"),
    ],
)
def test_losses_that_are_none(text: str, smoothing: float, line: str) -> None:
    with pytest.raises(UsageError, match=re.escape(line)):
        weights_of_losses(text, recipe.LOSSES, recipe.SMOOTHED, smoothing)


def test_only_what_differs_is_trained() -> None:
    tokenizer = small_chat_model(64, "sdpa")[1]
    pairs, held_out = load_pairs("rules", tokenizer, 96)
    assert (len(pairs), len(held_out)) == (1900, 100)
    for side in ("chosen", "rejected"):
        row = held_out.rows[side == "rejected"]
        trained = bytes(token for token, one in zip(row["tokens"], row["trained"]) if one).decode()
        assert trained == pairs_by_rules()[0][side][0]["content"] + "\x03"


def seen(row: dict) -> list[tuple[list[dict[str, str]], int, bool]]:
    return [(chat.messages, chat.first, chat.is_plain) for chat in split_pair(row)]


def test_messages_as_in_trl() -> None:
    expected = [([QUESTION, GOOD], 1, False), ([QUESTION, BAD], 1, False)]
    assert seen({"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]}) == expected
    assert seen({"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}) == expected
    assert seen({"prompt": "Why?", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}) == expected
    more = [QUESTION, GOOD, QUESTION, GOOD]
    assert seen({"chosen": more, "rejected": [QUESTION, GOOD]}) == [(more, 1, False), ([QUESTION, GOOD], 1, False)]


# TRL 1.16.0's extract_prompt gives the first one. In the others it splits a word, so that one answer may lose a token.
HELPFUL = "\n\nHuman: Why?\n\nAssistant: "


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        (HELPFUL + "It is.", HELPFUL + "No.", HELPFUL[:-1]),  # a space belongs to the word after it
        (HELPFUL + "Sure.", HELPFUL + "So.", HELPFUL[:-1]),
        (HELPFUL + "a cat", HELPFUL + "a cats", HELPFUL + "a"),
        ("Why?\nSure.", "Why?\nSo.", "Why?\n"),
        ("yes, it is", "yes", ""),
    ],
)
def test_texts_without_a_prompt(chosen: str, rejected: str, prompt: str) -> None:
    first, second = split_pair({"chosen": chosen, "rejected": rejected})
    for chat, text in ((first, chosen), (second, rejected)):
        assert chat.is_plain and [message["content"] for message in chat.messages] == [prompt, text[len(prompt) :]]


def test_texts_need_a_prompt_or_a_common_beginning() -> None:
    with pytest.raises(UsageError, match="its texts begin differently: name the column of their question prompt"):
        split_pair({"question": "Is it?", "chosen": "no", "rejected": "yes"})
    assert seen({"prompt": "", "chosen": "no", "rejected": "yes"})[0][0][1]["content"] == "no"


@pytest.mark.parametrize("prompt", ["Why?", [QUESTION]])
def test_a_prompt_that_the_answers_repeat_is_there_once(prompt: Any) -> None:
    expected = [([QUESTION, GOOD], 1, False), ([QUESTION, BAD], 1, False)]
    assert seen({"prompt": prompt, "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}) == expected
    assert seen({"prompt": prompt, "chosen": [GOOD], "rejected": [BAD]}) == expected
    first, _ = split_pair({"prompt": "Why?", "chosen": "Why? So.", "rejected": "Why? No."})
    assert [message["content"] for message in first.messages] == ["Why?", " So."]


def test_texts_are_taken_as_they_stand() -> None:
    """As TRL does: prompt and answer joined, with the tokenizer's own first token, and its end mark once."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    for answer in (" blue.", " blue.</s>"):
        row = encode(split_pair({"prompt": "The sky is", "chosen": answer, "rejected": " red."})[0], tokenizer, 99)
        assert tokenizer.decode(row["tokens"]) == "<s>The sky is blue.</s>"
        assert tokenizer.decode(list(compress(row["tokens"], row["trained"]))) == " blue.</s>"


def test_pairs_from_which_nothing_can_be_learnt_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    useful = {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]}
    equal = useful | {"rejected": [GOOD]}
    filled = useful | {"prompt": [{"role": "user", "content": "Why? " * 20}]}
    later = {"prompt": [QUESTION], **{side: [{"role": "assistant", "content": "a" * 90 + side}]
                                      for side in ("chosen", "rejected")}}  # fmt: skip
    (tmp_path / "train.jsonl").write_text(
        "\n".join(map(json.dumps, [useful] * 20 + [equal] * 4 + [filled] * 2 + [later]))
    )
    train, evaluation = load_pairs(str(tmp_path / "train.jsonl"), small_chat_model(64, "sdpa")[1], 64)
    kept = [part.chat(index).messages for part in (train, evaluation) for index in range(len(part))]
    assert kept == [[QUESTION, GOOD], [QUESTION, BAD]] * 20
    lines = re.findall(r"(\d+) of \d+ \w+ pairs (have .*): left out", capsys.readouterr().out)
    numbers = {reason: sum(int(number) for number, other in lines if other == reason) for _, reason in lines}
    assert numbers == {"have an answer without a token within --max_length 64": 2,
                       "have two equal answers within --max_length 64": 5}  # fmt: skip


def test_tools_are_given_to_the_template() -> None:
    tool = {"type": "function", "function": {"name": "lamp"}}
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{{ tools | tojson }}|{% for one in messages %}{{ one.role[0] + one.content }}|{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    row = {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD], "tools": json.dumps([tool])}
    assert bytes(encode(split_pair(row)[1], tokenizer, 999)["tokens"]).decode() == f"{json.dumps([tool])}|uWhy?|aNo.|"


def test_dropout_is_off_in_the_policy() -> None:
    """In modules, in attributes such as Llama's, and with layers that are left out; config.json keeps the numbers."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropped = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    opt = {"ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.3, "layerdrop": 0.5}
    for model in (
        GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, **dropped)),
        LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=32, attention_dropout=0.5)),
        OPTForCausalLM(OPTConfig(**sizes, **opt)),
    ):
        config, tokens = model.config.to_json_string(), torch.arange(40).unsqueeze(0)
        without_dropout(model)
        assert torch.equal(model.train()(tokens).logits, model.eval()(tokens).logits)
        assert model.config.to_json_string() == config


def test_other_random_numbers_are_refused() -> None:
    class Noisy(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + self.training * torch.rand_like(output.logits)
            return output

    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(UsageError, match="Noisy draws random numbers in training"):
        without_dropout(Noisy(LlamaConfig(**sizes, intermediate_size=32)))


@pytest.mark.parametrize("kind", ["dpo", "dpo_norm", "ipo"])
def test_losses_are_those_of_trl_with_dropout_in_the_model(kind: str) -> None:
    """TRL's formulas (dpo_trainer.py: sigmoid, sigmoid_norm, ipo), of transformers' logits of a padded batch with its
    mask. The padding token also stands in the texts."""
    torch.manual_seed(0)
    tokenizer = small_chat_model(128, "sdpa")[1]
    tokenizer.pad_token = tokenizer.eos_token = "."
    shape = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=256, n_positions=128, eos_token_id=46)
    policy, reference = (without_dropout(GPT2LMHeadModel(shape)).train() for _ in range(2))
    rows = [
        {"prompt": "Why. ", "chosen": "So. It is.", "rejected": "."},
        {"prompt": "a", "chosen": "b", "rejected": "cd."},
    ]
    pairs = [encode(chat, tokenizer, 99) for row in rows for chat in split_pair(row)]
    batch = tokenizer.pad({"input_ids": [row["tokens"] for row in pairs]}, padding_side="right", return_tensors="pt")
    trained = torch.zeros(batch["input_ids"].shape)
    for line, row in zip(trained, pairs):
        line[: len(row["tokens"])] = torch.tensor(row["trained"]).float()

    def sums(model: Any) -> Tensor:
        logits = model(**batch).logits[:, :-1].log_softmax(-1)
        return (logits.gather(-1, batch["input_ids"][:, 1:, None])[..., 0] * trained[:, 1:]).sum(1)

    beta, sizes = 0.3, trained.sum(1)
    ratios = sums(policy) - sums(reference)
    delta = (ratios if kind == "dpo" else ratios / sizes)[0::2] - (ratios if kind == "dpo" else ratios / sizes)[1::2]
    expected = (delta - 1 / (2 * beta)) ** 2 if kind == "ipo" else -F.logsigmoid(beta * delta)

    dataset = PairDataset(Chats(pairs, None))  # type: ignore[arg-type]  # not asked for messages
    collate = pad_to_longest({"labels": IGNORED, "places": -1}, None)
    given, losses = (
        collate([dataset[0], dataset[1]]),
        [with_losses(one, chunk=16, longest=99) for one in (policy, reference)],
    )
    values = log_probabilities(losses[1], given)[0].detach()
    given |= {"reference_chosen": values[:, 0], "reference_rejected": values[:, 1]}
    config = recipe.Config(loss=kind, beta=beta, sft_weight=0.0)
    found = recipe.make_forward_step(config)(losses[0], given)
    torch.testing.assert_close(found["loss"], expected, rtol=1e-5, atol=1e-6)
    same = recipe.make_forward_step(config)(losses[1], given)  # the policy is the reference
    first = {"ipo": 1 / (2 * beta) ** 2}.get(kind, 0.6931472)
    assert same["loss"].tolist() == pytest.approx([first] * 2, rel=1e-5) and same["reward_accuracy"].sum() == 0


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"better": "a", "worse": "b"}, "lacks the columns chosen and rejected, and perhaps prompt; it has better"),
        ({"chosen": "a", "rejected": [BAD]}, "pair 1: expected lists of messages"),
        ({"prompt": "Why?", "chosen": "a", "rejected": None}, "pair 1: expected lists of messages"),
        (
            {"prompt": [QUESTION], "chosen": [{"role": "assistant"}], "rejected": [BAD]},
            "pair 1: message 2 .* no content",
        ),
        ({"chosen": [GOOD], "rejected": [BAD]}, "pair 1: it begins with an answer"),
        ({"chosen": [QUESTION, GOOD], "rejected": [BAD, GOOD]}, "pair 1: its conversations differ before an answer"),
        ({"prompt": [QUESTION], "chosen": [QUESTION], "rejected": [QUESTION]}, "no token is trained"),
    ],
)
def test_bad_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict, line: str) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "pairs.jsonl").write_text("\n".join([json.dumps(row)] * 3))
    with pytest.raises(UsageError, match=line):
        load_pairs(str(tmp_path / "pairs.jsonl"), small_chat_model(64, "sdpa")[1], 64)
