"""Promise: docs/your-model.md works to the letter."""

import json
import re
import shlex
from pathlib import Path

import pytest

from support.launching import environment, execute
from support.runs import ROOT

PAGE = (ROOT / "docs" / "your-model.md").read_text().partition("## A loss that compares samples")[0]


def blocks(language: str) -> list[str]:
    """The code blocks of the page."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.full
def test_the_page_leads_to_a_model_with_one_result(tmp_path: Path) -> None:
    folder, outputs = tmp_path, []
    for block in blocks("bash"):
        for line in block.splitlines():
            words = shlex.split(line)
            if words[0] == "cd":
                folder = folder / words[1]
                (folder / "train.py").write_text("\n\n".join(blocks("python")))
                continue
            run = execute(words, folder, folder, environment())
            assert run.exit_code == 0, run.stdout + run.stderr
            outputs.append(run.stdout)
    evaluations = [json.loads(line) for line in (folder / "outputs/train/metrics.jsonl").read_text().splitlines()]
    assert evaluations[-1]["eval/accuracy"] > 0.9
    verified = outputs[-2].splitlines()
    assert verified[-2] == "One result." and "bit for bit" in verified[-4]
    assert "no findings" in outputs[-1]
