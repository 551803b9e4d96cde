"""Promise: docs/troubleshooting.md quotes messages that the code prints."""

import ast
import re

import pytest

from support.runs import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## No message")[0]
MESSAGES = re.findall(r"^\| `(.*?)` \|", PAGE, re.MULTILINE)
# The texts in the code; ast joins those that continue on the next line.
TEXTS = [
    node.value
    for path in (ROOT / "common").rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
]


def test_there_are_messages() -> None:
    assert len(MESSAGES) >= 20


@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_in_the_code(message: str) -> None:
    fragments = [fragment.strip() for fragment in message.split("...") if fragment.strip()]
    assert fragments and all(any(fragment in text for text in TEXTS) for fragment in fragments)
