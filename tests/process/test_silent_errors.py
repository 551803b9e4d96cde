"""Promise: benchmarks/silent_errors/ plants errors that a run shows, and says what shows them."""

import re
import runpy
from pathlib import Path

import pytest

from support.launching import fork
from support.recipes import RECIPES
from support.runs import ROOT

RUN = runpy.run_path(str(ROOT / "benchmarks/silent_errors/run.py"))
PAGE = (ROOT / "docs/planted-errors.md").read_text()
ROW = r"\| [^|]+ `(\w+)` \|[^|]+\|[^|]+\| ([^|]+) \|.*\| ([^|]+) \| ([^|]+) \| [\d.]* \|"
SHOWN = {name: (found.strip("*"), place, cause) for name, found, place, cause in re.findall(ROW, PAGE)}


@pytest.mark.parametrize("name", RUN["FAULTS"])
def test_error_is_found_as_the_page_says(name: str) -> None:
    """Errors are planted by names inside the product and found by its messages, and both change."""
    outcome = RUN["outcome_of"](RUN["FAULTS"][name])
    assert (outcome.found.strip("*"), outcome.place, outcome.cause) == SHOWN[name], outcome


def test_model_that_is_one_layer_rounds_to_16_bits_too(tmp_path: Path) -> None:
    recipe, flags = RECIPES["linear regression"]
    fork(tmp_path / "run", "deepspeed_zero2_bf16", recipe, f"{flags} --max_steps 5")  # its second step was refused
