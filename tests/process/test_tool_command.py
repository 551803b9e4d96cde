"""Promise: what `accelerate-recipes` makes runs by itself, and what it verifies is true."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from accelerate_recipes.at_fit import at_fit
from accelerate_recipes.errors import UsageError
from accelerate_recipes.project import make
from accelerate_recipes.verify.causes import likely_cause
from accelerate_recipes.verify.compare import Difference
from support.launching import execute, fork
from support.recipes import MNIST
from support.runs import ROOT, Run, assert_equal_to_the_last_bit

TOOL = [sys.executable, "-m", "accelerate_recipes"]
MUTANT = ROOT / "tests" / "scripts" / "mutant.py"
UNET = ROOT / "tests" / "scripts" / "unet.py"
PLAIN_MISTAKES = ROOT / "tests" / "scripts" / "plain_mistakes.py"
CAUSES = {
    "batch_norm": "BatchNorm (1) sees",
    "learning_rate": "the learning rate depends on the number of processes",
    "own_noise": "forward_step returns other values for the same batch and seed",
    "mean_of_means": "such as a mean inside forward_step",
}
PLAIN_CAUSES = {
    "scheduler": "a prepared scheduler advances 2 times per step",
    "tokens": "micro-batches have different numbers of tokens",
    "set_epoch": "each epoch has the same order: call set_epoch",
    "batch_size": "a step takes 32 samples under DDP and 16 in one process",
    "no_seed": "one process has other losses when it runs again on the same samples",
    "dropout": "the forward pass draws random numbers (dropout, noise)",
    "short_batch": "step 4 takes 16 samples under DDP and 12 in one process: prepare fills up the last batch",
    "divided_twice": "the loader has a DistributedSampler, and prepare divides its samples again",
    "local_steps": "the processes have different weights after step 1",
    "hook": "a hook changes gradients in each process",
    "gather": "the evaluation gathers 48 rows under DDP and 27 in one process",
}


def verified(folder: Path, script: Path, *arguments: str) -> tuple[Run, dict[str, Any]]:
    """Runs `accelerate-recipes verify`; returns the run and the certificate."""
    run = execute([*TOOL, "verify", str(script), "--output", str(folder), *arguments], folder.parent, folder)
    return run, json.loads((folder / "certificate.json").read_text())


def test_a_project_trains_bit_for_bit_like_the_recipe(tmp_path: Path) -> None:
    make("mnist", tmp_path / "project", ["ddp"], plain=False, as_json=True)
    flags = "--max_steps 8 --log_every 1 --eval_every 4"
    config = tmp_path / "project" / "accelerate_configs" / "ddp.yaml"
    copy = fork(tmp_path / "copy", config, tmp_path / "project" / "train.py", flags)
    assert_equal_to_the_last_bit(copy, fork(tmp_path / "recipe", "ddp", MNIST, flags))


@pytest.mark.parametrize(
    "recipe",
    [
        "mnist",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("finetune", "transformer", "text_classification")),
    ],
)
def test_a_minimal_project_trains_like_the_recipe(tmp_path: Path, recipe: str) -> None:
    make(recipe, tmp_path / "project", ["ddp"], plain=False, as_json=True, minimal=True)
    lines = sum(len(path.read_text().splitlines()) for path in (tmp_path / "project").rglob("*.py"))
    assert lines <= {"mnist": 3000}.get(recipe, 4300)
    folders = {path.name for path in (tmp_path / "project" / "common").iterdir() if path.is_dir()}
    assert not {"check", "checkpoint", "records", "stopping"} & folders
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file"]
    flags = "--max_steps 6 --micro_batch_size 4 --eval_every 3 --output_dir"
    for place, script in (("small", tmp_path / "project" / "train.py"), ("whole", ROOT / "recipes" / f"{recipe}.py")):
        config = str(ROOT / "accelerate_configs" / "ddp.yaml")
        run = execute([*launch, config, str(script), *flags.split(), str(tmp_path / place)], tmp_path, tmp_path)
        assert run.exit_code == 0, run.stderr
    small, whole = (load_file(tmp_path / place / "model" / "model.safetensors") for place in ("small", "whole"))
    assert small.keys() == whole.keys()
    for name, weight in whole.items():
        assert float((small[name] - weight).norm()) <= 1e-5 * float(weight.norm()), name


@pytest.mark.parametrize(
    ("config", "flags", "line"),
    [
        ("fsdp2", "", "for one process or DDP in float32 or bf16"),
        ("single", "--save_every 2", "--save_every: no such flag"),
        ("single", "--batch_size 0", "--batch_size 0: expected 1 or more"),
    ],
)
def test_a_minimal_project_refuses_in_one_line(tmp_path: Path, config: str, flags: str, line: str) -> None:
    make("linear_regression", tmp_path / "project", ["single"], plain=False, as_json=True, minimal=True)
    file = str(ROOT / "accelerate_configs" / f"{config}.yaml")
    command = ["accelerate", "launch", "--config_file", file, "--main_process_port", "0", "train.py", *flags.split()]
    run = execute(command, tmp_path / "project", tmp_path / "project")
    assert run.exit_code != 0
    assert run.stderr.count("error: ") >= 1 and line in run.stderr
    assert run.stderr.index("error: ") < run.stderr.find("Traceback") or "Traceback" not in run.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        "mnist project --config ddp --config tensor_parallel --config ddp_bf16 --config multi_node_hsdp",
        "transformer project --config fsdp2 --config pipeline_parallel",
        "linear_regression project --config deepspeed_zero3",
        "--plain project --config ddp --config deepspeed_zero2",
        "transformer project --minimal --config ddp --config ddp_bf16",
    ],
)
def test_the_tests_of_a_project_pass(tmp_path: Path, arguments: str) -> None:
    assert execute([*TOOL, "new", *arguments.split()], tmp_path, tmp_path).exit_code == 0
    project = tmp_path / "project"
    run = execute([sys.executable, "-m", "pytest", "-q"], project, project)
    assert run.exit_code == 0, run.stdout + run.stderr
    is_minimal = "--minimal" in arguments  # one test a config: that it trains is part of it
    assert f"{1 - is_minimal + arguments.count('--config')} passed" in run.stdout


@pytest.mark.parametrize(
    ("config", "kind"), [pytest.param("fsdp2", "FSDP2", marks=pytest.mark.full), ("deepspeed_zero2", "DeepSpeed")]
)
def test_a_project_says_which_kind_of_parallelism_it_was_made_without(tmp_path: Path, config: str, kind: str) -> None:
    assert execute([*TOOL, "new", "linear_regression", "project", "--config", "ddp"], tmp_path, tmp_path).exit_code == 0
    file = str(ROOT / "accelerate_configs" / f"{config}.yaml")
    command = ["accelerate", "launch", "--config_file", file, "--main_process_port", "0", "train.py"]
    run = execute(command, tmp_path / "project", tmp_path / "project")
    assert (
        run.exit_code == 1 and f"error: this project was made without {kind}, which the config asks for" in run.stderr
    )


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


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        *(pytest.param(*pair, marks=[] if pair[0] == "mean_of_means" else pytest.mark.full) for pair in CAUSES.items()),
        pytest.param("noise", "let the dataset draw them in __getitem__", marks=pytest.mark.full),
    ],
)
def test_the_cause_of_a_mistake_is_found(mistake: str, expected: str) -> None:
    found = at_fit(MUTANT, ["--mistake", mistake], "accelerate_recipes.verify.causes:evidence")
    rate = 1.0 if mistake == "learning_rate" else 0.0
    cause = likely_cause(found, Difference(1e-3, 1e-3, 1e-3, 1e-3, rate, 1, "0.weight", False))
    assert expected in cause


def test_no_cause_is_found_where_there_is_none() -> None:
    found = at_fit(MUTANT, [], "accelerate_recipes.verify.causes:evidence")
    assert not any(found.values())
    with pytest.raises(UsageError, match="--mistke: no such flag; did you mean --mistake"):
        at_fit(MUTANT, ["--mistke", "none"], "accelerate_recipes.verify.causes:evidence")


@pytest.mark.full
@pytest.mark.parametrize("mistake", CAUSES)
def test_a_wrong_recipe_fails_with_the_cause(tmp_path: Path, mistake: str) -> None:
    run, certificate = verified(tmp_path / "c", MUTANT, "--config", "ddp", "--", "--mistake", mistake)
    assert run.exit_code == 1 and not certificate["is_same"]
    assert CAUSES[mistake] in certificate["cause"] and CAUSES[mistake] in run.stdout
    rows = {row["name"]: row["verdict"] for row in certificate["rows"]}
    if mistake == "own_noise":  # the run finds it by itself
        assert "does not give the result of one process: in step 1" in rows["ddp"]
    else:
        assert rows["ddp"].startswith("DIFFERS from step 1")


@pytest.mark.full
@pytest.mark.parametrize("mistake", ["dropout", "noise"])
def test_random_numbers_are_compared_at_one_micro_batch_size(tmp_path: Path, mistake: str) -> None:
    run, certificate = verified(tmp_path / "c", MUTANT, "--config", "ddp", "--", "--mistake", mistake)
    assert run.exit_code == 0 and certificate["is_same"] and "One result." not in run.stdout
    assert "random numbers depend on --micro_batch_size: all runs had" in certificate["gap"]


@pytest.mark.full
def test_a_network_that_amplifies_rounding_errors_is_the_same(tmp_path: Path) -> None:
    run, certificate = verified(tmp_path / "c", UNET, "--config", "ddp", "--config", "fsdp2")
    assert run.exit_code == 0, run.stdout
    verdicts = {row["name"]: row["verdict"] for row in certificate["rows"]}
    assert verdicts["single, 2 accumulated"] == verdicts["ddp"] == "same, to rounding errors"
    assert all(row["checked_steps"] == 2 for row in certificate["rows"] if row["name"].startswith(("ddp", "fsdp2")))


@pytest.mark.full
def test_flags_of_half_the_batch_leave_other_micro_batches_to_compare(tmp_path: Path) -> None:
    flags = ["--model", "mlp", "--batch_size", "12", "--micro_batch_size", "6"]
    run, certificate = verified(tmp_path / "c", ROOT / MNIST, "--config", "ddp", "--steps", "6", "--", *flags)
    assert run.exit_code == 0, run.stdout
    names = [row["name"] for row in certificate["rows"]]
    assert names[:3] == ["single", "single, 3 accumulated", "single, 6 accumulated"]
    assert "--config ddp" in (tmp_path / "c" / "certificate.md").read_text()


@pytest.mark.full
def test_a_right_recipe_is_the_same_and_refusals_are_shown(tmp_path: Path) -> None:
    configs = ["--config", "ddp", "--config", "tensor_parallel", "--config", "ddp_bf16"]
    run, certificate = verified(tmp_path / "c", ROOT / MNIST, *configs)
    assert run.exit_code == 0 and certificate["is_same"]
    verdicts = [row["verdict"] for row in certificate["rows"]]
    assert verdicts[:5] == ["the reference", "same", "same", "same", "same"]
    assert "ConvNet has no tp_plan" in verdicts[5] and verdicts[6:] == ["same", "bit for bit"]
    assert "| ddp | 2 |" in (tmp_path / "c" / "certificate.md").read_text()
    # Against this certificate with one loss changed, all other values are equal.
    next(record for record in certificate["reference"]["records"] if record["step"] == 5)["train/loss"] *= 1.001
    (tmp_path / "then.json").write_text(json.dumps(certificate))
    run = execute([*TOOL, "verify", str(ROOT / MNIST), "--against", "then.json", "--json"], tmp_path, tmp_path)
    found = json.loads(run.stdout)
    assert run.exit_code == 1 and found["verdict"] == "DIFFERS from step 5, in train/loss" and found["weights_equal"]
    assert sum(row["difference"] > 0 for row in found["rows"]) == 1 and len(found["rows"]) == 3 * 20 + 2 * 2


@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=[] if name == "scheduler" else pytest.mark.full) for name in PLAIN_CAUSES]
)
def test_a_mistake_on_plain_accelerate_is_found(tmp_path: Path, mistake: str) -> None:
    run, certificate = verified(tmp_path / "c", PLAIN_MISTAKES, "--accelerate", "--", "--mistake", mistake)
    assert run.exit_code == 1 and PLAIN_CAUSES[mistake] in certificate["cause"]


@pytest.mark.full
@pytest.mark.parametrize("script", [PLAIN_MISTAKES, ROOT / "recipes" / "plain" / "plain_accelerate.py"])
def test_a_right_script_on_plain_accelerate_is_the_same(tmp_path: Path, script: Path) -> None:
    run, certificate = verified(tmp_path / "c", script, "--accelerate")
    assert run.exit_code == 0 and certificate["is_same"], run.stdout
    assert "MULTI_CPU" in certificate["rows"][1]["name"]


def record(folder: Path, script: Path, *arguments: str) -> dict[str, Any]:
    """Records the first steps of a script; returns the record."""
    command = [*TOOL, "verify", str(script), "--record", "then.json", "--steps", "4", *arguments]
    run = execute(command, folder, folder)
    assert run.exit_code == 0, run.stderr
    return json.loads((folder / "then.json").read_text())


def against(folder: Path, script: Path) -> tuple[int, dict[str, Any]]:
    run = execute([*TOOL, "verify", str(script), "--against", "then.json", "--json"], folder, folder)
    return run.exit_code, json.loads(run.stdout)


def test_a_record_names_the_step_the_weight_and_the_versions_that_differ(tmp_path: Path) -> None:
    content = record(tmp_path, ROOT / MNIST, "--", "--model", "mlp")
    reference = content["reference"]
    assert 0 < reference["floor"]["weights"] < 1e-5 and reference["weights"].keys() == {
        f"{layer}.{name}" for layer in "135" for name in ("weight", "bias")
    }
    code, found = against(tmp_path, ROOT / MNIST)
    assert (code, found["verdict"]) == (0, "bit for bit")
    changed = [one for one in reference["records"] if "train/loss" in one][2]
    changed["train/loss"] *= 1.001
    reference["weights"]["3.weight"][0] += 0.1
    content["versions"]["torch"] = "1.0"
    (tmp_path / "then.json").write_text(json.dumps(content))
    code, found = against(tmp_path, ROOT / MNIST)
    assert code == 1 and found["versions"]["torch"][0] == "1.0"
    assert found["verdict"].startswith(
        f"DIFFERS from step {changed['step']}, in train/loss; after the last step in 3.weight, by "
    )
    reference["floor"]["train/loss"], reference["floor"]["weights"] = 1e-3, 1.0  # rounding goes as far
    (tmp_path / "then.json").write_text(json.dumps(content))
    assert against(tmp_path, ROOT / MNIST)[1]["verdict"] == "same, to rounding errors"


@pytest.mark.full
def test_a_record_of_a_script_on_accelerate(tmp_path: Path) -> None:
    script = ROOT / "recipes" / "plain" / "plain_accelerate.py"
    assert len(record(tmp_path, script, "--accelerate")["reference"]["records"]) == 4
    assert against(tmp_path, script)[1]["verdict"] == "bit for bit"


def test_a_trainer_of_transformers_gives_one_result_or_the_cause(tmp_path: Path) -> None:
    script = ROOT / "tests" / "scripts" / "trainer.py"
    run, certificate = verified(tmp_path / "c", script, "--accelerate", "--steps", "4")
    assert run.exit_code == 0, run.stdout
    rows = {row["name"]: row["verdict"] for row in certificate["rows"]}
    assert rows["single, 2 accumulated"] == rows["ddp (MULTI_CPU)"] == "same"


@pytest.mark.full
def test_a_batch_that_two_processes_of_a_trainer_cannot_share_is_refused(tmp_path: Path) -> None:
    script = ROOT / "tests" / "scripts" / "trainer.py"
    run = execute([*TOOL, "verify", str(script), "--accelerate", "--", "--batch", "3"], tmp_path, tmp_path)
    assert run.exit_code == 2 and "per_device_train_batch_size 3 does not divide into 2" in run.stderr


@pytest.mark.full
def test_dropout_in_a_trainer_is_named(tmp_path: Path) -> None:
    script = ROOT / "tests" / "scripts" / "trainer.py"
    run, certificate = verified(tmp_path / "c", script, "--accelerate", "--steps", "4", "--", "--dropout", "0.5")
    assert run.exit_code == 1 and "draws random numbers (dropout, noise)" in certificate["cause"], run.stdout
