"""Promise: docs/verified.md is what docs/tools/catalogue.py makes of the certificates, which agree with its table."""

from itertools import product
from pathlib import Path

from accelerate_recipes.matrix import CONFIGS, MATRIX, RECIPES
from docs.tools.catalogue import PAGE, catalogue, read
from support.recipes import NAMES, result_of
from support.recipes import RECIPES as TESTED
from support.runs import ROOT


def test_page_is_that_of_the_certificates() -> None:
    old, new = (text.replace("changed since", "that of today") for text in (PAGE.read_text(), catalogue(read())))
    assert old == new, "run make verified"


def test_table_has_each_recipe_and_config() -> None:
    assert MATRIX.keys() == {*product(RECIPES, CONFIGS)}
    assert {recipe.split()[0] for recipe in RECIPES} == {path.stem for path in ROOT.glob("recipes/*.py")}
    assert {NAMES.get(name, name.replace(" ", "_")) for name in TESTED} == {*RECIPES}


def test_table_is_what_the_certificates_say() -> None:
    for one in read().values():
        command = " ".join([Path(one["script"]).stem, *one["flags"]])
        recipe = max((each for each in RECIPES if command.startswith(each)), key=len)
        verdicts = {row["name"]: row["verdict"] for row in one["rows"] if row["name"] in CONFIGS}
        if one["made"] < "2026-11-30":  # ZeRO began bf16 training with rounded weights, and seven recipes differed
            del verdicts["deepspeed_zero2_bf16"]
        for config, verdict in verdicts.items():
            cell = MATRIX[recipe, config]
            assert cell.result == result_of(verdict) and cell.line in verdict, (recipe, config)
