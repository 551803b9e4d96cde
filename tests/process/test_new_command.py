"""Promise: what `accelerate-recipes new` makes runs by itself, as the recipe does, after the checkout is gone."""

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from accelerate_recipes import distribution
from accelerate_recipes.project import make
from accelerate_recipes.testing import one_result
from support.launching import environment, execute, fork
from support.recipes import MNIST
from support.runs import ROOT, assert_equal_to_the_last_bit
from support.tool import fork_processes

TOOL = [sys.executable, "-m", "accelerate_recipes"]
# No index: the wheel in the project must be enough. pip's variable for its flag --no-build-isolation is 0.
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

WITHOUT_TORCH = """
import ctypes, signal, sys
from pathlib import Path
from accelerate_recipes.project import make
make("mnist", Path("project"), ["fsdp2"])
assert not {"accelerate", "numpy", "torch"} & {*sys.modules}
handlers = [signal.getsignal(number) for number in signal.valid_signals()]
import accelerate_recipes
from accelerate_recipes import fit, load_exported, run, start
assert handlers == [signal.getsignal(number) for number in signal.valid_signals()]
if sys.platform == "linux":
    at_end_of_parent = ctypes.c_int()
    assert ctypes.CDLL(None).prctl(2, ctypes.byref(at_end_of_parent)) == at_end_of_parent.value == 0
assert "fit" in dir(accelerate_recipes) and not hasattr(accelerate_recipes, "fits")
"""


def made(folder: Path, recipe: str, config: str = "ddp", **how: bool) -> Path:
    """Makes a project; returns its script."""
    make(recipe, folder / "project", [config], as_json=True, **how)
    return folder / "project" / "train.py"


def new_environment(folder: Path) -> Path:
    """Makes an environment with all packages of this one but ours. Returns the path of its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    packages, site = folder / "packages", next((folder / "lib").glob("python*/site-packages"))
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "accelerate_recipes" not in path.name and path.suffix != ".pth" and not path.name.startswith("pip"):
            (packages / path.name).symlink_to(path)
    for path in [*site.glob("setuptools*"), *site.glob("pkg_resources")]:  # that of Python 3.11 is too old
        shutil.rmtree(path)
    (site / "packages.pth").write_text(str(packages))
    return folder / "bin" / "python"


def contents(wheel: Path) -> dict[str, bytes]:
    """{name: content} of its files, without its version, and without the README in the metadata: an editable install
    keeps that as it was."""
    with zipfile.ZipFile(wheel) as opened:
        found = {name: opened.read(name) for name in opened.namelist() if not name.endswith(("WHEEL", "RECORD"))}
    version = wheel.name.split("-")[1].encode()
    texts = {name.replace(version.decode(), ""): text for name, text in found.items()}
    return {
        name: text.partition(b"\n\n")[0].replace(b"Version: " + version, b"") if name.endswith("METADATA") else text
        for name, text in texts.items()
    }


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Runs a command without the packages of these tests; returns its output."""
    inherited = {name: value for name, value in environment(**variables).items() if name != "PYTHONPATH"}
    found = subprocess.run([*map(str, command)], cwd=cwd, env=inherited | variables, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_a_project_works_after_the_checkout_is_gone(tmp_path: Path) -> None:
    checkout, project = tmp_path / "checkout", tmp_path / "my project"
    for name in ("accelerate_configs", "accelerate_recipes", "common", "launchers", "recipes"):
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    run(*TOOL, "new", "mnist", project, "--config", "ddp", cwd=checkout, PYTHONPATH=str(checkout))
    shutil.rmtree(checkout)
    new_environment(project / ".venv")
    run("make", "train", "FLAGS=--max_steps 4", cwd=project, **OFFLINE)
    assert json.loads((project / "outputs" / "train" / "run.json").read_text())["status"] == "done"
    assert "1 passed" in run("make", "test", cwd=project, **OFFLINE)
    where = run(
        project / ".venv" / "bin" / "python", "-c", "import accelerate_recipes as a; print(a.__file__)", cwd=tmp_path
    )
    assert Path(where).is_relative_to(project)


@pytest.mark.full
def test_a_copied_recipe_runs_anywhere_with_the_wheel(tmp_path: Path) -> None:
    """With the wheel that the build makes, which is the one that `new` writes. Beside it is a foreign `common`."""
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path / "built",
    ]
    run(*build, ROOT, cwd=tmp_path)
    built, written = next((tmp_path / "built").glob("*.whl")), distribution.write_wheel(tmp_path)
    assert contents(built) == contents(written)
    python = new_environment(tmp_path / "environment")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", built, cwd=tmp_path)
    place = tmp_path / "anywhere"
    (place / "common").mkdir(parents=True)
    (place / "common" / "__init__.py").write_text("raise ImportError('not ours')\n")
    shutil.copy(ROOT / MNIST, place / "train.py")
    assert "1 process on 1 machine" in run(python, "train.py", "--max_steps", "4", cwd=place)
    assert json.loads((place / "outputs" / "train" / "run.json").read_text())["status"] == "done"
    tool = python.parent / "accelerate-recipes"
    assert len(json.loads(run(tool, "list", "--json", cwd=place))["recipes"]) == len(list(ROOT.glob("recipes/*.py")))
    assert "training: 1,438 samples" in run(tool, "data", "train.py", cwd=place)
    run(tool, "new", "mnist", "project", "--own-loop", cwd=place)
    (again,) = (place / "project" / "wheels").iterdir()
    assert again.name == built.name and contents(again) == contents(built)
    # That of the checkout names its own code: another checkout of this version has another wheel.
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", written, cwd=tmp_path)
    version = run(python, "-c", "from accelerate_recipes.common.package import version; print(version())", cwd=place)
    assert version.strip() == written.name.split("-")[1] != "0.1.0+local" and version.startswith("0.1.0+")


def test_importing_and_making_a_project_load_no_torch(tmp_path: Path) -> None:
    run(sys.executable, "-c", WITHOUT_TORCH, cwd=tmp_path, PYTHONPATH=str(ROOT), LOCAL_RANK="0")


@pytest.mark.parametrize("how", ["project", "own_loop"])
def test_a_project_trains_bit_for_bit_like_the_recipe(tmp_path: Path, how: str) -> None:
    script, flags = made(tmp_path, "mnist", own_loop=how == "own_loop"), "--max_steps 8 --log_every 1 --eval_every 4"
    copy = fork(tmp_path / "copy", script.parent / "accelerate_configs" / "ddp.yaml", script, flags)
    assert_equal_to_the_last_bit(copy, fork(tmp_path / "recipe", "ddp", MNIST, flags))


def test_a_loop_of_its_own_is_what_a_project_runs_and_what_the_tool_sees(tmp_path: Path) -> None:
    script = made(tmp_path, "mnist", own_loop=True)
    loop, line = script.parent / "loop.py", "                state.step += 1\n"
    text = loop.read_text()
    assert text.count(line) == 1
    loop.write_text(text.replace(line, f'{line}                print("a step of mine", flush=True)\n'))
    found = fork(tmp_path / "run", "single", script, "--max_steps 3")
    assert found.stdout.count("a step of mine") == 3
    assert "training: 1,438 samples" in run(*TOOL, "data", script, cwd=tmp_path, PYTHONPATH=str(ROOT))


@pytest.mark.full
def test_a_vendored_project_runs_its_own_copy(tmp_path: Path) -> None:
    script = made(tmp_path, "linear_regression", vendor=True)
    loop = script.parent / "accelerate_recipes" / "common" / "loop.py"
    assert not loop.parent.is_symlink() and not list(script.parent.rglob("__pycache__"))
    loop.write_text(loop.read_text() + '\nprint("a loop of mine")\n')
    python = new_environment(tmp_path / "environment")
    assert "a loop of mine" in run(python, "train.py", "--max_steps", "2", cwd=script.parent)
    assert "no findings" in run(
        python, "-m", "accelerate_recipes", "doctor", "accelerate_configs/ddp.yaml", "train.py", cwd=script.parent
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        "mnist project --config ddp --config tensor_parallel --config ddp_bf16 --config multi_node_hsdp",
        "transformer project --config fsdp2 --config pipeline_parallel --own-loop",
        "linear_regression project --config deepspeed_zero3 --vendor",
        "mnist project --single-file --config ddp --config deepspeed_zero2",
    ],
)
def test_the_tests_of_a_project_pass(tmp_path: Path, arguments: str) -> None:
    assert execute([*TOOL, "new", *arguments.split()], tmp_path, tmp_path).exit_code == 0
    project = tmp_path / "project"
    ended = execute([sys.executable, "-m", "pytest", "-q"], project, project)
    assert ended.exit_code == 0, ended.stdout + ended.stderr
    assert f"{arguments.count('--config') + ('--single' in arguments)} passed" in ended.stdout


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param('"loss": ', '"loss": 2 / (1 + SIZE) * ', id="loss", marks=pytest.mark.full),
        pytest.param("rate,", "rate * SIZE,", id="learning_rate", marks=pytest.mark.full),
    ],
)
def test_one_result_finds_what_depends_on_the_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str
) -> None:
    fork_processes(monkeypatch)
    script = made(tmp_path, "linear_regression")
    text = script.read_text().replace("def main(", "SIZE = int(os.environ.get('WORLD_SIZE', 1))\n\n\ndef main(")
    assert text.count(right) == 1
    script.write_text(text.replace(right, wrong).replace("import torch\n", "import os\n\nimport torch\n", 1))
    with pytest.raises(AssertionError, match=r"ddp\.yaml: "):
        one_result(script, script.parent / "accelerate_configs" / "ddp.yaml", steps=6)
