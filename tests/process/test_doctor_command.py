"""Promise: `accelerate-recipes doctor` knows the recipes, and what it finds is refused."""

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from accelerate_recipes.doctor import rules
from accelerate_recipes.doctor.config import read
from accelerate_recipes.doctor.finding import findings
from accelerate_recipes.doctor.machine import look as look_at_machine
from accelerate_recipes.doctor.recipe import look
from support.launching import CONFIGS, execute, fork
from support.recipes import DIVIDED, LINEAR, MNIST, TRANSFORMER
from support.runs import ROOT, Run, refused

FILES = ROOT / "tests" / "support" / "doctor" / "config"


def doctor(folder: Path, *words: str) -> Run:
    return execute([sys.executable, "-m", "accelerate_recipes", "doctor", *words], ROOT, folder)


@pytest.mark.parametrize(
    ("name", "script", "flags"),
    [
        pytest.param("mnist cnn", MNIST, [], marks=pytest.mark.full),
        pytest.param("mnist mlp", MNIST, ["--model", "mlp"], marks=pytest.mark.full),
        pytest.param("linear regression", LINEAR, [], marks=pytest.mark.full),
        ("transformer", TRANSFORMER, ["--pipeline_stages", "2"]),
    ],
)
def test_shipped_configs_and_recipes_are_clean(name: str, script: str, flags: list[str]) -> None:
    """Each pair that README.md names as supported; the others are found."""
    recipe, machine = look(ROOT / script, flags), replace(look_at_machine(), gpus=())
    assert recipe.pipeline_stages == (2 if flags[:1] == ["--pipeline_stages"] else 1)
    for path in sorted(CONFIGS.glob("*.yaml")):
        stages = 2 if path.stem == "pipeline_parallel" else 1
        found = findings(rules.PAIR, read(path, machine), replace(recipe, pipeline_stages=stages))
        is_supported = name in DIVIDED.get(path.stem, (name,))
        assert (not found) == is_supported, (path, found)


def test_command(tmp_path: Path) -> None:
    run = doctor(tmp_path, "accelerate_configs/tensor_parallel.yaml", MNIST, "--json", "--", "--batch_size", "63")
    assert run.exit_code == 1, run.stderr
    assert [finding["what"] for finding in json.loads(run.stdout)] == [
        "ConvNet has no tp_plan, which tensor parallelism needs"
    ]
    assert doctor(tmp_path, "no.yaml").exit_code == 2


@pytest.mark.full
def test_recipe_that_ends_before_fit(tmp_path: Path) -> None:
    run = doctor(tmp_path, "ddp", MNIST, "--", "--data", "no/such/folder")
    assert run.exit_code == 1 and "no/such/folder" in run.stdout and run.stdout.endswith("1 finding\n")


# {bad file: words of the line that refuses it when the processes have started}
REFUSED_LATER = {
    "values_of_fsdp1": "invalid truth value full_shard",
    "wrapping.unknown": "Invalid auto wrap policy: TRANSFORMER_WRAP",
    "activation_offload": "requires `activation_checkpointing=True`",
    "data_parallelism.nothing_to_shard": "no dimension for FSDP to shard across",
    "tensor_parallelism.replicas": "cannot be used with pure data parallelism",
    "beside_the_file": "the following accelerate config variables will be ignored",
    "file": "has a section optimizer",
    "file.missing": "Expected a string path to an existing deepspeed config",
}


@pytest.mark.full
@pytest.mark.parametrize("name", REFUSED_LATER)
def test_what_is_found_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    config = tmp_path / "config.yaml"
    text = (FILES / f"{name}.yaml").read_text()
    for file in FILES.parent.glob("*.json"):
        text = text.replace(f" {file.name}\n", f" {file}\n")
    config.write_text(text)
    monkeypatch.chdir(tmp_path)
    run = fork(tmp_path / "run", config, MNIST, "--model mlp --max_steps 1", succeeds=False)
    assert REFUSED_LATER[name] in refused(run)


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
