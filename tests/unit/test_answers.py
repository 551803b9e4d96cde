"""Promise: each answer in docs/answers.md names a test that exists."""

import re

import pytest

from support.runs import ROOT

ANSWERS = re.split(r"^### ", (ROOT / "docs" / "answers.md").read_text(), flags=re.MULTILINE)[1:]


def test_there_are_answers() -> None:
    assert len(ANSWERS) >= 20


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.partition("\n")[0])
def test_answer_names_a_test(answer: str) -> None:
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", answer)
    assert named and len(named) == answer.count("::")
    for path, function in named:
        assert f"\ndef {function}(" in (ROOT / path).read_text()
