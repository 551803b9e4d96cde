"""Promise: a checkpoint carries the source of its run."""

import base64
import io
import sys
import zipfile
from pathlib import Path

import pytest

from accelerate_recipes import __version__
from accelerate_recipes.common.checkpoint import source
from accelerate_recipes.common.config import RunConfig
from accelerate_recipes.common.environment import Environment
from accelerate_recipes.common.launch.machines import _facts
from support.runs import ROOT

COMMON = ROOT / "common"


def test_the_archive_has_recipe_loop_config_and_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, helper, config = tmp_path / "train.py", tmp_path / "my_layers.py", tmp_path / "ours.yaml"
    for path in (recipe, helper, config):
        path.write_text(f"# {path.name}\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_layers  # noqa: F401

    monkeypatch.setattr(sys, "argv", [str(recipe), "--max_steps", "2"])
    command = f"accelerate launch --config_file {config} train.py --max_steps 2"
    monkeypatch.setattr(source, "launch_command", lambda: command)
    texts = [source.source.__wrapped__() for _ in range(2)]
    assert texts[0] == texts[1] and len(texts[0]) < 440_000
    archive = zipfile.ZipFile(io.BytesIO(base64.b64decode(texts[0])))
    assert archive.testzip() is None and archive.read("command.txt").decode() == command + "\n"
    for name, path in (("train.py", recipe), ("my_layers.py", helper), ("accelerate_configs/ours.yaml", config)):
        assert archive.read(name) == path.read_bytes()
    ours = {f"accelerate_recipes/common/{path.relative_to(COMMON)}" for path in COMMON.rglob("*.py")}
    assert {*archive.namelist()} == {
        *("command.txt", "version.txt", "train.py", "my_layers.py", "accelerate_configs/ours.yaml"),
        *("accelerate_recipes/__init__.py", *ours),
    }
    assert archive.read("version.txt").decode() == f"accelerate-recipes {__version__}+local\n"
    environment = Environment(main_address="127.0.0.1", main_port="29500")
    facts = _facts(environment, RunConfig())  # which machines compare: the same files
    assert facts["files"].keys() == {name for name in archive.namelist() if name.endswith(".py")}
    assert facts["versions"]["accelerate-recipes"] == f"{__version__}+local"
