"""Promise: what `accelerate-recipes new` makes runs by itself, as the recipe does."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from accelerate_recipes.project import make
from support.launching import execute, fork
from support.recipes import MNIST
from support.runs import ROOT, assert_equal_to_the_last_bit, refused

TOOL = [sys.executable, "-m", "accelerate_recipes"]


def made(folder: Path, recipe: str, config: str = "ddp") -> Path:
    """Makes a project; returns its script."""
    make(recipe, folder / "project", [config], plain=False, as_json=True)
    return folder / "project" / "train.py"


def test_a_project_trains_bit_for_bit_like_the_recipe(tmp_path: Path) -> None:
    script, flags = made(tmp_path, "mnist"), "--max_steps 8 --log_every 1 --eval_every 4"
    copy = fork(tmp_path / "copy", script.parent / "accelerate_configs" / "ddp.yaml", script, flags)
    assert_equal_to_the_last_bit(copy, fork(tmp_path / "recipe", "ddp", MNIST, flags))


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        "mnist project --config ddp --config tensor_parallel --config ddp_bf16 --config multi_node_hsdp",
        "transformer project --config fsdp2 --config pipeline_parallel",
        "linear_regression project --config deepspeed_zero3",
        "--plain project --config ddp --config deepspeed_zero2",
    ],
)
def test_the_tests_of_a_project_pass(tmp_path: Path, arguments: str) -> None:
    assert execute([*TOOL, "new", *arguments.split()], tmp_path, tmp_path).exit_code == 0
    project = tmp_path / "project"
    run = execute([sys.executable, "-m", "pytest", "-q"], project, project)
    assert run.exit_code == 0, run.stdout + run.stderr
    assert f"{1 + arguments.count('--config')} passed" in run.stdout


@pytest.mark.parametrize(
    ("config", "kind"), [pytest.param("fsdp2", "FSDP2", marks=pytest.mark.full), ("deepspeed_zero2", "DeepSpeed")]
)
def test_a_project_says_which_kind_of_parallelism_it_was_made_without(tmp_path: Path, config: str, kind: str) -> None:
    run = fork(tmp_path / "run", config, made(tmp_path, "linear_regression"), succeeds=False)
    assert refused(run).startswith(f"error: this project was made without {kind}, which the config asks for")


def test_the_wheel_works_without_the_checkout(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    assert execute([*build, str(ROOT)], tmp_path, tmp_path).exit_code == 0
    wheel = next(tmp_path.glob("*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"accelerate_recipes"}
    assert not [name for name in names if "__pycache__" in name or name.startswith("accelerate_recipes/bundle/tests")]
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    assert execute([*install, str(wheel)], tmp_path, tmp_path).exit_code == 0
    # The packages of this environment, without the checkout: a .pth file inside the folder is not followed.
    site = next((environment / "lib").glob("python*/site-packages"))
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def inside(*command: str, cwd: Path = tmp_path) -> str:
        found = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr
        return found.stdout

    assert inside(str(python), "-c", "from importlib.util import find_spec; print(find_spec('common'))") == "None\n"
    tool = str(environment / "bin" / "accelerate-recipes")
    assert len(json.loads(inside(tool, "list", "--json"))["recipes"]) == len(list(ROOT.glob("recipes/*.py")))
    inside(tool, "new", "linear_regression", "project")
    inside(str(python), "train.py", "--max_steps", "2", cwd=tmp_path / "project")
    card = json.loads((tmp_path / "project" / "outputs" / "train" / "run.json").read_text())
    assert card["status"] == "done"
