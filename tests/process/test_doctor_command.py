"""Promise: `accelerate-recipes doctor` knows the recipes, and what it finds is refused."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from accelerate_recipes.at_fit import at_fit
from accelerate_recipes.matrix import MATRIX, RECIPES, Cell
from support.launching import execute, fork
from support.recipes import MNIST
from support.runs import ROOT, Run, refused
from support.tool import fork_processes

FILES = ROOT / "tests" / "support" / "doctor"


def doctor(folder: Path, *words: str) -> Run:
    return execute([sys.executable, "-m", "accelerate_recipes", "doctor", *words], ROOT, folder)


OFTEN = ("mnist", "transformer")


@pytest.mark.parametrize(
    "recipe", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in RECIPES]
)
def test_shipped_configs_and_recipes_are_clean(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """Each pair that the table names as supported; the others get its line."""
    fork_processes(monkeypatch)
    name, *flags = recipe.split()
    for config, lines in at_fit(ROOT / "recipes" / f"{name}.py", flags, "ask_all:answers", None).items():
        cell = MATRIX.get((recipe, config), Cell())
        assert bool(lines) == (cell.result == "not supported"), (config, lines)
        assert cell.line in " ".join(lines), (config, lines)


def test_command(tmp_path: Path) -> None:
    run = doctor(tmp_path, "accelerate_configs/tensor_parallel.yaml", MNIST, "--json", "--", "--batch_size", "63")
    assert run.exit_code == 1, run.stderr
    (finding,) = json.loads(run.stdout)
    assert finding["what"].startswith(
        "ConvNet has no tp_plan, and none can be derived: that needs two linear layers in a row"
    )
    assert doctor(tmp_path, "no.yaml").exit_code == 2


@pytest.mark.full
def test_recipe_that_ends_before_fit(tmp_path: Path) -> None:
    run = doctor(tmp_path, "ddp", MNIST, "--", "--data", "no/such/folder")
    assert run.exit_code == 1 and "no/such/folder" in run.stdout and run.stdout.endswith("1 finding\n")


# {bad file: words of the line that refuses it when the processes have started}
REFUSED_LATER = {
    "config/values_of_fsdp1": "invalid truth value full_shard",
    "config/wrapping.unknown": "Invalid auto wrap policy: TRANSFORMER_WRAP",
    "config/activation_offload": "requires `activation_checkpointing=True`",
    "config/beside_the_file": "the following accelerate config variables will be ignored",
}


# What the loop itself refuses: the doctor's lines are those of the run.
REFUSED = {
    str(path.relative_to(FILES).with_suffix("")): re.search("^# finding: (.*)$", path.read_text(), re.MULTILINE)[1]
    for path in FILES.glob("refused/*.yaml")
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full) for name in (REFUSED_LATER | REFUSED) if name != "refused/sizes"]
    + ["refused/sizes"],
)
def test_what_is_found_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    config = tmp_path / "config.yaml"
    text = (FILES / f"{name}.yaml").read_text()
    for file in FILES.glob("*.json"):
        text = text.replace(f" {file.name}\n", f" {file}\n")
    config.write_text(text)
    monkeypatch.chdir(tmp_path)
    run = fork(tmp_path / "run", config, MNIST, "--model mlp --max_steps 1", succeeds=False)
    assert (REFUSED_LATER | REFUSED)[name] in refused(run)


@pytest.mark.full
def test_page(tmp_path: Path) -> None:
    """docs/doctor.md shows real output."""
    text = (ROOT / "docs" / "doctor.md").read_text()
    config, command, output = (
        re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL)[1] for kind in ("yaml", "sh", "text")
    )
    (tmp_path / "my_config.yaml").write_text(config)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    run = execute(shlex.split(command), tmp_path, tmp_path)
    _, _, findings_printed = run.stdout.partition("\n\n")
    assert findings_printed == output and run.exit_code == 1, run.stdout
