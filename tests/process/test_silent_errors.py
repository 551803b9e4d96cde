"""Promise: benchmarks/silent_errors/ plants errors that a run shows, and says what shows them."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from support.launching import fork
from support.recipes import RECIPES
from support.runs import ROOT

RUN = runpy.run_path(str(ROOT / "benchmarks/silent_errors/run.py"))
SHOWN = {  # {error: (found, place, cause)}
    "wrapper_left_out": ("in step 1", "–", "true"),
    "mask_of_the_embedding": ("in step 1", "named", ...),
    "late_element": ("after step 6", "named", "true"),
    "autocast_not_applied": ("a line at the start", "–", "true"),
    "dropout_in_evaluation": ("a line at the start", "–", "true"),
    "stale_compiled_step": ("a line during the run", "–", "true"),
    "gradients_never_zeroed": ("harmless", "–", "–"),
}


DRAWN = {"wrapper_left_out", "mask_of_the_embedding", "late_element", "stale_compiled_step"}


@pytest.mark.parametrize(
    "name", [name if name in DRAWN else pytest.param(name, marks=pytest.mark.full) for name in SHOWN]
)
def test_error_is_found_or_harmless(name: str) -> None:
    outcome = RUN["outcome_of"](RUN["FAULTS"][name])
    found: tuple[Any, ...] = (outcome.found, outcome.place, outcome.cause)
    assert all(expected in (value, ...) for value, expected in zip(found, SHOWN[name])), outcome


def test_model_that_is_one_layer_rounds_to_16_bits_too(tmp_path: Path) -> None:
    recipe, flags = RECIPES["linear regression"]
    fork(tmp_path / "run", "deepspeed_zero2_bf16", recipe, f"{flags} --max_steps 5")  # its second step was refused
