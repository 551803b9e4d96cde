"""Promise: the table of docs/verified.md of recipes and configs is what `accelerate-recipes verify` finds."""

import json
import re
import sys
from pathlib import Path

import pytest

from support.launching import CONFIGS, execute
from support.runs import ROOT

PAGE = ROOT / "docs" / "verified.md"
HEADER, *ROWS = re.findall(
    r"^\| (config|\w+) \|((?:[^|\n]+\|){6,})$", PAGE.read_text().partition("## Certificates")[0], re.MULTILINE
)
RECIPES = [cell.strip(" `") for cell in HEADER[1].split("|")[:-1]]
TABLE = {name: [cell.strip() for cell in cells.split("|")[:-1]] for name, cells in ROWS}


def test_table_has_all_configs_of_one_machine() -> None:
    names = {path.stem for path in CONFIGS.glob("*.yaml")}
    assert TABLE.keys() == {name for name in names if name != "single" and not name.startswith("multi_node")}
    assert {Path(recipe.split()[0]).stem for recipe in RECIPES} == {path.stem for path in ROOT.glob("recipes/*.py")}


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_verify_finds_what_the_table_says(tmp_path: Path, recipe: str) -> None:
    name, *flags = recipe.split()
    command = [sys.executable, "-m", "accelerate_recipes", "verify", str(ROOT / "recipes" / f"{name}.py")]
    words = [*command, "--output", str(tmp_path), "--", *flags]
    run = execute(words, tmp_path, tmp_path, timeout_s=3600)  # some 20 launches, one after another
    rows = {row["name"]: row for row in json.loads((tmp_path / "certificate.json").read_text())["rows"]}
    found = {
        config: "refused" if rows[config]["refusal"] else "same" if rows[config]["difference"]["is_same"] else "differs"
        for config in TABLE
    }
    assert found == {config: cells[RECIPES.index(recipe)] for config, cells in TABLE.items()}, run.stdout
    killed = next(row for name, row in rows.items() if "killed" in name)
    by_check = any("does not give the result of one process" in (row["refusal"] or "") for row in rows.values())
    assert run.exit_code == int("differs" in found.values() or by_check) and killed["verdict"] == "bit for bit"
