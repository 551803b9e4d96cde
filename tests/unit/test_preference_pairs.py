"""Promise: the preference losses are those of the papers, over the tokens of the two answers alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from common.data import pad_to_longest
from common.errors import UsageError
from common.tasks.causal_lm import IGNORED, with_losses
from common.tasks.chat_models import small_chat_model
from common.tasks.preferences import PairDataset, divided, load_pairs, pairs_by_rules
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
    dataset = PairDataset(pairs, places=True)
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


def test_only_what_differs_is_trained() -> None:
    tokenizer = small_chat_model(64, "sdpa")[1]
    pairs, held_out = load_pairs("rules", tokenizer, 96)
    assert (len(pairs), len(held_out)) == (1900, 100)
    for side in ("chosen", "rejected"):
        row = held_out.rows[side == "rejected"]
        trained = bytes(token for token, one in zip(row["tokens"], row["trained"]) if one).decode()
        assert trained == pairs_by_rules()[0][side][0]["content"] + "\x03"


def test_columns_as_in_trl() -> None:
    expected = [([QUESTION, GOOD], 1), ([QUESTION, BAD], 1)]
    assert divided({"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]}) == expected
    assert divided({"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}) == expected
    assert divided({"prompt": "Why?", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}) == expected
    assert divided({"prompt": "Why?", "chosen": GOOD["content"], "rejected": "No."}) == expected
    more = [QUESTION, GOOD, QUESTION, GOOD]
    assert divided({"chosen": more, "rejected": [QUESTION, GOOD]}) == [(more, 1), ([QUESTION, GOOD], 1)]


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"better": "a", "worse": "b"}, "expected the columns chosen and rejected, and perhaps prompt, found better"),
        ({"chosen": "a", "rejected": "b"}, "pair 1: expected lists of messages"),
        ({"prompt": "Why?", "chosen": "a", "rejected": None}, "pair 1: expected lists of messages"),
        ({"prompt": [QUESTION], "chosen": [{"role": "assistant"}], "rejected": [BAD]}, "pair 1: the chat template"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "pair 1: it begins with an answer"),
        ({"prompt": [QUESTION], "chosen": [QUESTION], "rejected": [QUESTION]}, "no token is trained"),
    ],
)
def test_bad_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict, line: str) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "pairs.jsonl").write_text("\n".join([json.dumps(row)] * 3))
    with pytest.raises(UsageError, match=line):
        load_pairs(str(tmp_path / "pairs.jsonl"), small_chat_model(64, "sdpa")[1], 64)
