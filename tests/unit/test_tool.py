"""Promise: `accelerate-recipes` lists what there is, makes projects, and refuses bad input in one line."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError

from accelerate_recipes import distribution
from accelerate_recipes.at_fit import at_fit
from accelerate_recipes.bundle import COMMON, VERSION
from accelerate_recipes.catalog import GROUPS, runs_here
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.plan import ask
from accelerate_recipes.templates import FOLDER, render
from accelerate_recipes.verify.causes import likely_cause
from accelerate_recipes.verify.certificate import Row
from accelerate_recipes.verify.differences import Difference, relative
from support.launching import CONFIGS, environment
from support.recipes import RECIPES
from support.runs import ROOT
from support.tool import tool


def test_list_reads_every_header(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert tool(monkeypatch, "list", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {f"recipes/{recipe['name']}.py" for recipe in found["recipes"]} == {script for script, _ in RECIPES.values()}
    assert {config["name"] for config in found["configs"]} == {path.stem for path in CONFIGS.glob("*.yaml")}
    assert all(value for entry in (*found["recipes"], *found["configs"]) for value in entry.values())
    assert {config["name"]: config["here"] for config in found["configs"]}["ddp"] == "rehearsal on the CPU"
    assert tool(monkeypatch, "list") == 0
    printed = capsys.readouterr().out
    assert "recipes/transformer.py --pipeline_stages 2\n" in printed
    grouped = [name for names in GROUPS.values() for name in names]
    names = {recipe["name"] for recipe in found["recipes"]}
    assert names == {*grouped} and len(grouped) == len({*grouped})
    assert {*GROUPS} < {*printed.splitlines()} and printed.index("Get started") < printed.index("linear_regression\n")
    table = re.findall(r"^\|(.*?)\| \[(\w+)\]\(docs/recipes/", (ROOT / "README.md").read_text(), re.MULTILINE)
    titles = itertools.accumulate((title.strip() for title, _ in table), lambda before, title: title or before)
    assert [(title.capitalize(), name) for title, (_, name) in zip(titles, table)] == [
        (title, name) for title, names in GROUPS.items() for name in names
    ]


def test_shell_completes_commands_and_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_ACCELERATE_RECIPES_COMPLETE", "complete_bash")
    for words, position, expected in (("ver", "1", "verify\n"), ("verify --ag", "2", "--against\n")):
        monkeypatch.setenv("COMP_WORDS", f"accelerate-recipes {words}")
        monkeypatch.setenv("COMP_CWORD", position)
        assert tool(monkeypatch) == 0
        assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("num_gpus", "num_processes", "num_machines", "precision", "expected"),
    [
        (0, 1, 1, "no", "for real, on the CPU"),
        (0, 2, 1, "fp16", "rehearsal on the CPU, in float32"),
        (1, 1, 1, "no", "for real"),
        (1, 2, 1, "no", "needs 2 GPUs, or CUDA_VISIBLE_DEVICES= to rehearse on the CPU"),
        (8, 2, 1, "bf16", "for real"),
        (8, 2, 2, "bf16", "needs 2 machines"),
    ],
)
def test_how_a_config_runs_here(
    num_gpus: int, num_processes: int, num_machines: int, precision: str, expected: str
) -> None:
    config = {"num_processes": num_processes, "num_machines": num_machines, "mixed_precision": precision}
    assert runs_here(config | {"distributed_type": "MULTI_GPU"}, num_gpus) == expected


def test_a_project_is_what_its_owner_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in ROOT.glob("recipes/*.py"):
        project = tmp_path / path.stem
        assert tool(monkeypatch, "new", path.stem, str(project), "--config", "ddp") == 0
        files = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
        (wheel,) = (str(path.relative_to(project)) for path in project.glob("wheels/*.whl"))
        assert wheel.startswith(f"wheels/accelerate_recipes-{VERSION}")
        read = {
            "Makefile",
            "README.md",
            "accelerate_configs/ddp.yaml",
            "pyproject.toml",
            "tests/test_train.py",
            "train.py",
        }
        assert files == {*read, wheel}
        texts = {name: (project / name).read_text() for name in read}
        assert texts["train.py"] == path.read_text().replace(f"recipes/{path.name}", "train.py")
        lines = {name: text.count("\n") for name, text in texts.items() if name != "train.py"}
        assert sum(lines.values()) <= 120 and lines["tests/test_train.py"] <= 15
        text = "".join(texts.values())
        assert "<<" not in text and str(ROOT) not in text and f"recipes/{path.name} train.py" not in text
        assert '"accelerate-recipes ~= 0.1"' in text and wheel in text
    assert capsys.readouterr().out.splitlines()[-2:] == ["  make train", "  make test"]


def test_a_project_has_what_its_configs_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = ["--config", "fsdp2", "--config", "pipeline_parallel", "--config", "deepspeed_zero2"]
    project = tmp_path / "My project"
    assert tool(monkeypatch, "new", "transformer", str(project), *configs, "--own-loop") == 0
    texts = {path.name: path.read_text() for path in project.rglob("*") if path.suffix != ".whl" and path.is_file()}
    assert 'name = "my-project"' in texts["pyproject.toml"] and "[deepspeed] ~=" in texts["pyproject.toml"]
    assert "accelerate_configs/fsdp2.yaml train.py" in texts["train.py"] and "ddp.yaml" not in texts["train.py"]
    assert 'FLAGS = {"pipeline_parallel": "--pipeline_stages 2"}' in texts["test_train.py"]
    assert "from loop import fit\n" in texts["train.py"] and " fit," not in texts["train.py"]
    assert texts["loop.py"].replace("from accelerate_recipes.common.", "from .") == (COMMON / "loop.py").read_text()


def test_a_single_file_needs_nothing_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tool(monkeypatch, "new", "mnist", str(tmp_path / "mine"), "--single_file", "--config", "fsdp2") == 0
    texts = {path.name: path.read_text() for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    assert {*texts} == {"Makefile", "README.md", "fsdp2.yaml", "pyproject.toml", "test_train.py", "train.py"}
    assert "accelerate_recipes" not in "".join(texts.values()) and "<<" not in "".join(texts.values())
    assert "scikit-learn" in texts["pyproject.toml"] and "transformers" not in texts["pyproject.toml"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("lst", "No such command 'lst'. Did you mean 'list'?: run accelerate-recipes --help"),
        ("list --foo", "No such option: --foo: run accelerate-recipes list --help"),
        ("data full/train.py --data a.csv", "--data: put flags of the recipe after --, or run accelerate-recipes data"),
        ("new", "Missing argument 'recipe': run accelerate-recipes new --help"),
        ("new mnist", "Missing argument 'folder': run accelerate-recipes new --help"),
        ("new minst project", "minst: no such recipe; use one of "),
        ("new mnist full", "full is not empty: use the name of a new folder"),
        ("new mnist project --config dpp", "dpp: no such config; use one of ddp, "),
        ("new linear_regression project --config pipeline_parallel", "linear_regression.py does not support it; use"),
        ("new mnist project --single-file --config hsdp", "--config hsdp is not for single files: use one of single, "),
        (
            "new finetune project --single-file",
            "finetune: no such recipe as a single file; use one of linear_regression, ",
        ),
        ("new mnist project --config ddp --config full/ddp.yaml", "--config names two files with the same name"),
        ("new mnist project --single-file --vendor", "make different projects: use one of them"),
        ("verify nowhere.py", "nowhere.py: no such file; use the path of a recipe"),
        ("verify nowhere.py --output full", "nowhere.py: no such file; use the path of a recipe"),
        ("verify full/train.py --config dpp", "dpp: no such config"),
        ("verify full/train.py --steps 1", "Invalid value for '--steps'"),
        ("verify full/train.py --against then.json --config ddp", "with the flags of the record: remove all"),
        ("verify full/train.py --against then.json", "then.json: no such file; use the path of a record"),
        ("verify full/train.py --against full", "--against full is a folder; use the path of a record"),
        ("verify full/train.py --record no/record.json", "--record no/record.json: there is no folder no"),
        ("verify full/train.py --record full/train.py", "--record full/train.py exists, and this command"),
        ("data full/train.py --output full/train.py", "--output full/train.py exists, and this command"),
        ("verify full/train.py --output full/train.py", "--output full/train.py is a file: use another"),
        ("verify full/train.py --output full", "--output full/certificate.json exists, and this command did not"),
        ("verify full/train.py --config full/train.py", "full/train.py has no keys: compare it"),
        (f"new mnist {'x' * 300}", "cannot be written (File name too long): use another path"),
        ("new mnist full/train.py/x", "full/train.py is a file: use another"),
        ("new mnist a\u2028b", "cannot be typed after cd: use another name"),
        ("plan mnist --memory nan", "--memory nan: use a number above 2.5, the GB of a GPU that tensors cannot use"),
        ("plan mnist --memory -80", "--memory -80: use a number above 2.5"),
        ("plan mnist --hours inf", "--hours inf: use a number above 0"),
        ("plan mnist --hardware full/train.py", "--hardware full/train.py is not in the form of"),
        ("export full/train.py model", "full/train.py is not a folder: use the folder of a checkpoint or of a run"),
        ("export full full/train.py", "full/train.py is a file: use another"),
        ("doctor full/train.py", "full/train.py has no keys: compare it"),
    ],
)
def test_bad_input_gets_one_line_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "train.py").write_text("# a recipe")
    if "--output full" in arguments:
        (tmp_path / "full" / "certificate.json").write_text('{"script": "recipes/other.py", "sha256": "0"}')
    if "full/ddp.yaml" in arguments:
        (tmp_path / "full" / "ddp.yaml").write_text("num_processes: 2")
    assert tool(monkeypatch, *arguments.split(" ")) == 2
    output = capsys.readouterr()
    assert line in output.err and output.err.count("\n") == 1 and not output.out
    assert {path.name for path in tmp_path.rglob("*")} <= {"full", "train.py", "ddp.yaml", "certificate.json"}


def test_a_mistake_that_no_config_causes_ends_a_plan_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each config would repeat its line, with exit code 1. With a pipeline alone, it is the config's line."""
    works = set[int]()

    def dry_run(script: Path, flags: list[str], cases: list[ask.Case], gpu: Any) -> list[str]:
        if cases[0].stages not in works:
            raise UsageError("--nix: no such flag")
        return ["a plan"] * len(cases)

    monkeypatch.setattr(ask, "_plans", dry_run)
    cases = [ask.Case(Path(f"{stages}.yaml"), stages=stages) for stages in (1, 1, 2)]
    with pytest.raises(UsageError, match="--nix: no such flag"):
        ask.plans(Path("train.py"), [], cases, Any)
    works.add(1)
    *plans, failed = ask.plans(Path("train.py"), [], cases, Any)
    assert plans == ["a plan"] * 2 and failed.failed == "--nix: no such flag"


@pytest.mark.parametrize(
    ("code", "error", "line"),
    [(0, "", "it ended without an error"), (2, "", "1"), (2, "error: no data", "error: no data")],
)
def test_why_a_script_does_not_reach_fit(monkeypatch: pytest.MonkeyPatch, code: int, error: str, line: str) -> None:
    """What it prints before it ends well is no reason."""
    ended = subprocess.CompletedProcess([], code, "1\n", error)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(UsageError, match=f"train.py stops before it calls fit: {line}$"):
        at_fit(Path("train.py"), [], "ask:ask", None)


def test_a_project_in_the_folder_where_the_user_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert tool(monkeypatch, "new", "mnist", ".", "--single-file") == 0
    assert {path.name for path in tmp_path.iterdir()} >= {"Makefile", "train.py", "accelerate_configs"}


def test_a_config_whose_name_a_makefile_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (config := tmp_path / "my conf.yaml").write_text("num_processes: 2")
    assert tool(monkeypatch, "new", "mnist", str(tmp_path / "p"), "--config", str(config)) == 2
    assert "rename it: use letters, digits, - and _, and the ending .yaml" in capsys.readouterr().err


def test_pipes_and_nested_brackets_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("deep.yaml").write_text("[" * 3000)
    Path("loop").symlink_to("loop")
    for arguments, line in (
        ("doctor pipe", "pipe is not a file; use"),
        ("doctor deep.yaml", "deep.yaml is not YAML"),
        ("plan mnist --hardware pipe", "--hardware pipe is not a file"),
        ("new mnist loop", "loop is a broken link"),
        ("export . loop", "loop is a broken link"),
        ("verify pipe", "pipe is not a file; use the path of a recipe"),
    ):
        assert tool(monkeypatch, *arguments.split()) == 2
        output = capsys.readouterr()
        assert line in output.err and output.err.count("\n") == 1 and not output.out


def test_output_that_a_terminal_cannot_show_is_replaced(tmp_path: Path) -> None:
    command = f"{sys.executable} -m accelerate_recipes list"
    env = environment(PYTHONIOENCODING="ascii", PYTHONPATH=str(ROOT))
    for end in ("| cat", "| head -1", ">&-"):
        run = subprocess.run(["bash", "-o", "pipefail", "-c", f"{command} {end}"], env=env, capture_output=True)
        assert (run.returncode, run.stderr) == (0, b"") and (b"? " in run.stdout or end != "| cat")


SAME = Difference(1e-7, 1e-7, 1e-7, 1e-7, 0.0, None, None, True)


def test_verdicts_of_a_row() -> None:
    assert Row("ddp", 2, SAME).verdict == "same"
    assert Row("ddp", 2, Difference(0, 0, 0, 0, 0, None, None, True)).verdict == "bit for bit"
    different = replace(SAME, loss=1e-3, first_step=3, tensor="weight", is_same=False)
    assert Row("ddp", 2, different).verdict == "DIFFERS from step 3, in weight" and Row("ddp", 2, different).is_bad
    assert not (row := Row("tensor_parallel", None, refusal="no tp_plan")).is_bad
    assert row.verdict == "not supported: no tp_plan"
    row = Row("ddp", 2, refusal="DDP does not give the result of one process: in step 1")
    assert row.verdict == f"DIFFERS: {row.refusal}" and row.is_bad
    assert Row("ddp", None, failure="RuntimeError").is_bad


def test_a_missing_value_is_a_difference() -> None:
    assert relative(1.0, None) == relative(None, 1.0) == float("inf")
    assert relative(float("nan"), 1.0) == relative(float("nan"), float("nan")) == float("inf")
    assert relative(0.0, 0.0) == 0 and relative(2.0, 1.0) == 1


def test_weights_alone_may_differ_by_rounding_noise() -> None:
    assert "key bias" in likely_cause(replace(SAME, weights=1e-4, tensor="k.bias", is_same=False), None, [])


def test_every_template_ships_and_is_filled_in() -> None:
    """What a template asks for and nobody gives is an error, not an empty place."""
    shipped = {name for name in distribution.files() if name.startswith("accelerate_recipes/templates/")}
    assert {Path(name).name for name in shipped} == {path.name for path in FOLDER.iterdir() if path.is_file()}
    with pytest.raises(UndefinedError, match="'title' is undefined"):
        render("data.html", facts=[])
    assert "<li>&lt;b&gt;</li>" in render(
        "data.html", title="", facts=["<b>"], has_marks=False, found={"lengths": {}, "samples": []}
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--checkpoint", __file__], f"--checkpoint {__file__}: no such folder; use the folder of one"),
        (["--steps", "99999999999999999999"], "'--steps'"),
    ],
)
def test_what_verify_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert tool(monkeypatch, "verify", str(ROOT / "recipes" / "mnist.py"), *arguments) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1


def test_the_tool_starts_without_large_packages() -> None:
    script = "import sys; import accelerate_recipes.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True).stdout
    assert "typer" in loaded.split()
    assert not {"accelerate", "huggingface_hub", "numpy", "PIL", "plotly", "torch"} & {*loaded.split()}


def test_an_interrupt_during_imports_prints_nothing() -> None:
    script = "import accelerate_recipes; print('begins', flush=True); from accelerate_recipes import fit"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], text=True, env=environment(), **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == "begins\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.communicate() == ("", "") and process.returncode == -signal.SIGINT
