"""Promise: a checkpoint carries the source of its run."""

import base64
import io
import sys
import zipfile
from pathlib import Path

import pytest

from common.checkpoint import source
from support.runs import ROOT


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
    assert texts[0] == texts[1] and len(texts[0]) < 420_000
    archive = zipfile.ZipFile(io.BytesIO(base64.b64decode(texts[0])))
    assert archive.testzip() is None and archive.read("command.txt").decode() == command + "\n"
    for name, path in (("train.py", recipe), ("my_layers.py", helper), ("accelerate_configs/ours.yaml", config)):
        assert archive.read(name) == path.read_bytes()
    names = {path.relative_to(ROOT / "common") for path in (ROOT / "common").rglob("*.py")}
    loop = {f"common/{name}" for name in names if name.parent.name != "tasks"}  # tasks only if they are imported
    assert loop <= {*archive.namelist()} and archive.read("common/loop.py") == (ROOT / "common/loop.py").read_bytes()
