"""Promise: a model and an optimizer have the result of one process under a config, or one line refuses them.

`COMPATIBILITY=write pytest -m '' tests/process/test_compatibility.py` runs all cells and writes the tables of
docs/compatibility.md.
"""

import os
import re
import runpy
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from accelerate_recipes.matrix import PIPELINES
from support.launching import fork
from support.recipes import FLAGS, FLOAT32_CONFIGS, USERS
from support.runs import ROOT, Run, assert_same_result, refused

PAGE = ROOT / "docs" / "compatibility.md"
NAMES = runpy.run_path(str(ROOT / USERS))
MODELS, OPTIMIZERS = NAMES["ZOO_MODELS"], NAMES["ZOO_OPTIMIZERS"]
# Those of three axes, and stages that are sharded, divide as the others do: test_products.py. No model has experts.
OTHERS = ("single", "ddp_fp16", "hsdp_tensor_parallel", "fsdp2_expert_parallel", *PIPELINES[1:])
CONFIGS = [name for name in FLOAT32_CONFIGS if name not in OTHERS]
# In `make test`: each model, optimizer and config at least once.
DRAWN = {
    ("tied", "adamw", "pipeline_parallel"),
    ("called_twice", "sgd", "fsdp2"),
    ("frozen", "rmsprop", "deepspeed_zero2"),
    ("buffers", "sgd", "deepspeed_zero1"),
    ("weight_norm", "sgd", "tensor_parallel"),
    ("conv_lstm", "adamw", "deepspeed_zero3"),
    ("encoder", "adafactor", "ddp"),
    ("encoder_decoder", "adafactor", "fsdp2_tensor_parallel"),
    ("encoder_decoder", "adamw", "fsdp2"),
    ("experts", "amsgrad", "deepspeed_zero3_offload"),
    ("experts", "rmsprop", "sequence_parallel"),
    ("tied", "amsgrad", "fsdp2_sequence_parallel"),
    ("dropout", "sgd", "hsdp"),
}
WRITES = os.environ.get("COMPATIBILITY") == "write"
Cell = tuple[str, str, str]


def cells() -> list[Any]:
    every = product(MODELS, OPTIMIZERS, CONFIGS)
    return [cell if cell in DRAWN else pytest.param(*cell, marks=pytest.mark.full) for cell in every]


def pattern_of(title: str) -> re.Pattern[str]:
    return re.compile(rf"^\| {title} \|.*?(?=\n\n)", re.MULTILINE | re.DOTALL)


def table(title: str) -> dict[str, list[str]]:
    """{row: [what it is, the configs that do not support it]} of the table whose first column has this title."""
    text = pattern_of(title).search(PAGE.read_text())
    assert text is not None
    rows = [[cell.strip() for cell in line.split(" | ")] for line in text[0].splitlines()[2:]]
    return {row[0].strip("| `"): row[1:] for row in rows}


def unsupported(title: str, row: str) -> list[str]:
    return re.findall(r"`(\w+)`", table(title)[row][1])


def write(title: str, outcomes: dict[tuple[str, str], set[str]]) -> None:
    """Writes a table. A row excludes a config if none of its combinations has the same result there."""
    text = pattern_of(title).search(PAGE.read_text())
    assert text is not None
    lines, known = text[0].splitlines()[:2], table(title)
    for row in dict.fromkeys(row for row, _ in outcomes):
        found = ", ".join(f"`{config}`" for config in CONFIGS if "same" not in outcomes[row, config])
        lines.append(f"| `{row}` | {known.get(row, [''])[0]} | {found or 'none'} |")
    PAGE.write_text(PAGE.read_text().replace(text[0], "\n".join(lines)))


def check(cell: Cell, outcome: str) -> None:
    """Compares with the page: a combination has the same result if neither its model nor its optimizer excludes it."""
    model, optimizer, config = cell
    excluded = {*unsupported("model", model), *unsupported("optimizer", optimizer)}
    assert outcome == ("not supported" if config in excluded else "same"), cell


@pytest.fixture(scope="module")
def report() -> Iterator[Callable[[Cell, str], None]]:
    """report(cell, outcome) compares an outcome with the page; at the end of all tests, if they write the page."""
    found: dict[Cell, str] = {}
    yield found.__setitem__ if WRITES else check
    if not WRITES:
        return
    for position, title in enumerate(("model", "optimizer")):
        outcomes: dict[tuple[str, str], set[str]] = {}
        for cell, outcome in found.items():
            outcomes.setdefault((cell[position], cell[2]), set()).add(outcome)
        write(title, outcomes)
    for cell, outcome in found.items():
        check(cell, outcome)


def test_draw_has_each_model_optimizer_and_config() -> None:
    assert [{cell[position] for cell in DRAWN} for position in range(3)] == [set(MODELS), set(OPTIMIZERS), set(CONFIGS)]


@pytest.mark.parametrize(("model", "optimizer", "config"), cells())
def test_cell(
    tmp_path: Path,
    reference: Callable[..., Run],
    report: Callable[[Cell, str], None],
    model: str,
    optimizer: str,
    config: str,
) -> None:
    arguments = f"--model {model} --optimizer {optimizer} --hang_timeout 60"
    run = fork(tmp_path / "run", config, USERS, arguments + FLAGS.get(config, ""), succeeds=False)
    if run.exit_code == 0:
        assert_same_result(run, reference(USERS, arguments))
    else:
        assert refused(run) and run.exit_code == 2 and not (run.output_dir / "model").exists(), run.stderr
    report((model, optimizer, config), "same" if run.exit_code == 0 else "not supported")


@pytest.mark.skipif(WRITES, reason="the page is written after this test")
def test_page_names_each_model_optimizer_and_config() -> None:
    tested = PAGE.read_text().partition("The tables come from tests")[2].partition(". ")[0]
    assert re.findall(r"`(\w+)`", tested) == CONFIGS
    for title, names in (("model", MODELS), ("optimizer", OPTIMIZERS)):
        assert list(table(title)) == names
        assert all(
            what and {*re.findall(r"`(\w+)`", excluded)} <= {*CONFIGS} for what, excluded in table(title).values()
        )
