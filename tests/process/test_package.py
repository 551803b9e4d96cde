"""Promise: the version that a run records names its code, or says that it does not."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate_recipes import __version__
from accelerate_recipes.common.checkpoint.source import open_source
from support.launching import execute, fork
from support.recipes import LATEST, LINEAR
from support.runs import ROOT

SHOWN = """
from accelerate_recipes.common.package import is_own, version
from accelerate_recipes import bundle
import accelerate_recipes
print(version(), is_own(accelerate_recipes.__file__), is_own(str(bundle.RECIPES / "mnist.py")), is_own("/home/me/a.py"))
"""


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed in it."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--wheel-dir", folder, ROOT)
    pip("install", "--target", folder / "site", *folder.glob("*.whl"))
    return folder / "site"


def shown(*path: Path) -> str:
    """What a process says that finds packages in these folders first."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-P", "-c", SHOWN], env=env, check=True, capture_output=True, text=True
    ).stdout


def test_version_of_a_wheel_names_its_code_and_others_do_not(tmp_path: Path, site: Path) -> None:
    """Beside the wheel the environment of the tests has an editable install."""
    recorded, local = (f"{version} False True True\n" for version in (__version__, f"{__version__}+local"))
    assert shown(site) == recorded
    shutil.copytree(site / "accelerate_recipes", tmp_path / "vendored" / "accelerate_recipes")
    assert shown(tmp_path / "vendored") == shown(tmp_path / "vendored", site) == local
    assert shown(ROOT) == shown(ROOT, site) == local
    for number, line in enumerate(["install", "install --editable"]):
        pip(*line.split(), ROOT, "--target", tmp_path / str(number))
    assert shown(tmp_path / "0") == local
    code = f"import site; site.addsitedir({str(tmp_path / '1')!r}); from accelerate_recipes.common import package as p"
    command = [sys.executable, "-I", "-S", "-c", f"{code}; print(p.version())"]  # -S: without the environment's own
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == f"{__version__}+local\n"
    shutil.copytree(site, tmp_path / "edited")
    with (tmp_path / "edited" / "accelerate_recipes" / "common" / "loop.py").open("a") as loop:
        loop.write("# a change\n")
    assert shown(tmp_path / "edited") == local


def test_run_of_a_wheel_keeps_its_version_and_the_source_that_is_the_users(tmp_path: Path, site: Path) -> None:
    """A resume with a checkout names both versions."""
    flags = "--max_steps 2 --save_every 2 --check_steps 0"
    recipe = Path(shutil.copy(ROOT / LINEAR, tmp_path / "train.py"))
    command = [sys.executable, str(recipe), "--output_dir", "run", *flags.split()]
    run = execute(command, tmp_path, tmp_path / "run", {"PYTHONPATH": str(site)})
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step_00000002" / "manifest.json").read_text())
    for versions in (manifest["versions"], run.card["versions"]):
        assert versions["accelerate-recipes"] == __version__
    assert len(manifest["source"]) < 5_000
    resumed = fork(tmp_path / "run", "single", LINEAR, f"{flags} {LATEST}".replace("steps 2", "steps 4", 1))
    line = f"the checkpoint was written by accelerate-recipes {__version__}, this is {__version__}+local"
    assert line in resumed.stdout.splitlines()


def test_unpacked_source_trains(tmp_path: Path) -> None:
    """With the loop of the archive, and not with one that is installed, too."""
    flags = "--max_steps 4 --save_every 2 --check_steps 0 --log_every 1"
    run = fork(tmp_path / "run", "single", LINEAR, flags)
    manifest = json.loads((run.output_dir / "checkpoints" / "step_00000002" / "manifest.json").read_text())
    assert manifest["versions"]["accelerate-recipes"] == run.card["versions"]["accelerate-recipes"]
    open_source(manifest["source"]).extractall(tmp_path / "source")
    with (tmp_path / "source" / "accelerate_recipes" / "common" / "loop.py").open("a") as loop:
        loop.write("\nprint('unpacked')\n")
    command = [sys.executable, "source/linear_regression.py", "--output_dir", "again", *flags.split()]
    again = execute(command, tmp_path, tmp_path / "again", {"OMP_NUM_THREADS": "1"})
    assert again.exit_code == 0 and "unpacked" in again.stdout
    assert again.column("train/loss") == run.column("train/loss")
