"""Promise: a checkpoint carries the source of its run."""

import base64
import bz2
import lzma
import sys
from pathlib import Path

import pytest

from accelerate_recipes import __version__
from accelerate_recipes.common.checkpoint import source
from accelerate_recipes.common.config import RunConfig
from accelerate_recipes.common.environment import Environment
from accelerate_recipes.common.launch.machines import _facts
from accelerate_recipes.verify.checkpoint import Origin
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
    assert texts[0] == texts[1] and len(texts[0]) < 340_000
    archive = source.open_source(texts[0])
    zipped = archive.fp.getvalue()  # as in checkpoints of earlier versions
    for earlier in (zipped, bz2.compress(zipped), lzma.compress(zipped)):
        assert source.open_source(base64.b64encode(earlier).decode()).namelist() == archive.namelist()
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


@pytest.mark.parametrize(
    ("command", "num_processes", "flags"),
    [
        ("accelerate launch --config_file ours.yaml train.py --data 'a b.py'", 2, ["--data", "a b.py"]),
        ("accelerate launch --config-file=ours.yaml --num_processes 4 train.py", 4, []),
        ("launch.py --config_file ours.yaml my/train.py", 2, []),
        ("python train.py --seed 3", 1, ["--seed", "3"]),
        ("torchrun --nproc_per_node 2 train.py", 1, []),
        ("python", 1, []),
    ],
)
def test_a_checkpoint_tells_how_its_run_was_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, num_processes: int, flags: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ours.yaml").write_text("num_processes: 2\n")
    monkeypatch.setattr(source, "launch_command", lambda: command)
    origin = Origin.of({"source": source.source.__wrapped__()}, Path("train.py"), tmp_path / "copies")
    assert (origin.script, origin.num_processes, origin.flags) == ("train.py", num_processes, flags)
    assert origin.config is None or origin.config.read_text() == "num_processes: 2\n"
