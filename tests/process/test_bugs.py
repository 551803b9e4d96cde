"""Promise: an error of the recipe's own code begins with one line that says what, where, and for which samples."""

import re
from pathlib import Path

import pytest

from support.launching import launch

SCRIPT = "tests/scripts/bugs.py"
SAMPLES = r"\d+(, \d+){3}"


@pytest.mark.parametrize(
    ("bug", "line"),
    [
        ("shape", rf"RuntimeError: mat1 and mat2 shapes .* \(bugs.py:\d+, process [01], step 1, samples {SAMPLES}\)"),
        ("label", rf"IndexError: Target 9 is out of bounds. \(bugs.py:\d+, process [01], step 7, samples {SAMPLES}\)"),
        ("item --num_workers 1", r"ValueError: bad picture \(bugs.py:\d+, process [01], sample 37\)"),
        pytest.param(
            "file", r"FileNotFound.*/37.png' \(bugs.py:\d+, process [01], sample 37\)", marks=pytest.mark.full
        ),
        pytest.param("early", r"FileNotFoundError: .*data.csv' \(bugs.py:\d+, process [01]\)", marks=pytest.mark.full),
    ],
)
def test_error_of_the_recipe_begins_with_one_line(tmp_path: Path, bug: str, line: str) -> None:
    run = launch(tmp_path / "run", "ddp", SCRIPT, f"--bug {bug}", succeeds=False)
    lines = (run.stdout + run.stderr).splitlines()
    errors = [number for number, text in enumerate(lines) if text.startswith("error: ")]
    assert len(errors) == 1 and re.fullmatch(f"error: {line}", lines[errors[0]]), run.stderr
    assert lines[errors[0] + 1] == "Traceback (most recent call last):" and "bugs.py" in lines[errors[0] + 2]
    assert f'File "{Path(__file__).parents[2] / "common"}' not in run.stderr
    # The launcher writes 35 lines, in which ours is the cause.
    assert len(lines) <= 60 and sum(lines[errors[0]] in text for text in lines) >= 2
    assert run.card["exit_code"] == 1 if bug != "early" else not (run.output_dir / "run.json").exists()
