"""Promise: the table of recipes and configs is what `accelerate-recipes verify` finds."""

import json
import sys
from pathlib import Path

import pytest

from accelerate_recipes.matrix import CONFIGS, MATRIX, RECIPES
from support.launching import execute
from support.recipes import result_of
from support.runs import ROOT


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_verify_finds_what_the_table_says(tmp_path: Path, recipe: str) -> None:
    name, *flags = recipe.split()
    command = [sys.executable, "-m", "accelerate_recipes", "verify", str(ROOT / "recipes" / f"{name}.py")]
    words = [*command, "--output", str(tmp_path), "--", *flags]
    run = execute(words, tmp_path, tmp_path, timeout_s=3600)  # some 20 launches, one after another
    rows = json.loads((tmp_path / "certificate.json").read_text())["rows"]
    verdicts = {row["name"]: row["verdict"] for row in rows}
    found = {config: result_of(verdicts[config]) for config in CONFIGS}
    assert found == {config: MATRIX[recipe, config].result for config in CONFIGS}, run.stdout
    assert all(MATRIX[recipe, config].line in verdicts[config] for config in CONFIGS), run.stdout
    killed = next(verdict for row, verdict in verdicts.items() if "killed" in row)
    assert run.exit_code == int("differs" in found.values()) and killed == "bit for bit"
