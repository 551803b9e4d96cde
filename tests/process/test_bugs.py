"""Promise: an error of the recipe's own code begins with one line that says what, where, and for which samples."""

import re
from pathlib import Path

import pytest

from support.launching import fork, launch
from support.recipes import MISFIT
from support.runs import refused

SCRIPT = "tests/scripts/bugs.py"
SAMPLES = r"\d+(, \d+){3}"


@pytest.mark.parametrize(
    ("bug", "line"),
    [
        pytest.param(
            "shape",
            rf"RuntimeError: mat1 and mat2 shapes .* \(bugs.py:\d+, process [01], step 1, samples {SAMPLES}\)",
            marks=pytest.mark.full,
        ),
        ("label", rf"IndexError: Target 9 is out of bounds. \(bugs.py:\d+, process [01], step 7, samples {SAMPLES}\)"),
        ("item --num_workers 1", r"ValueError: bad image \(bugs.py:\d+, process [01], sample 37\)"),
        pytest.param(
            "file", r"FileNotFound.*/37.png' \(bugs.py:\d+, process [01], sample 37\)", marks=pytest.mark.full
        ),
        pytest.param("early", r"FileNotFoundError: .*data.csv' \(bugs.py:\d+, process [01]\)", marks=pytest.mark.full),
    ],
)
def test_error_of_the_recipe_begins_with_one_line(tmp_path: Path, bug: str, line: str) -> None:
    start = fork if bug == "label" else launch
    run = start(tmp_path / "run", "ddp", SCRIPT, f"--bug {bug}", succeeds=False)
    lines = (run.stdout + run.stderr).splitlines()
    errors = [number for number, text in enumerate(lines) if text.startswith("error: ")]
    assert len(errors) == 1 and re.fullmatch(f"error: {line}", lines[errors[0]]), run.stderr
    assert lines[errors[0] + 1] == "Traceback (most recent call last):" and "bugs.py" in lines[errors[0] + 2]
    assert f'File "{Path(__file__).parents[2] / "accelerate_recipes"}' not in run.stderr
    assert "Connection closed by peer" not in run.stderr  # the other process waits for this one
    # The launcher writes 35 lines, in which ours is the cause.
    assert len(lines) <= 60 and sum(lines[errors[0]] in text for text in lines) >= 1 + (start is launch)
    if bug == "early":
        assert not (run.output_dir / "run.json").exists()
    else:
        assert (run.card["status"], run.card["exit_code"]) == ("failed", 1)


def test_crash_of_one_process_alone_is_one_line_with_the_place(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", MISFIT, "--case crash --max_steps 3", succeeds=False)
    expected = "error: DDP cannot train this: ZeroDivisionError: a bug in a recipe (misfit.py:"
    assert refused(run).startswith(expected)
    assert "ZeroDivisionError: a bug in a recipe" in (run.output_dir / "traceback_00001.txt").read_text()


def test_failure_of_another_process_is_what_the_card_says(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", MISFIT, "--case late --max_steps 3", succeeds=False)
    assert refused(run) == "error: this process alone has a problem later"
    assert (run.card["exit_code"], run.card["error"]) == (2, refused(run))
