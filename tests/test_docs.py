"""Promise: what the README and the headers of the configs say to type works, and the layout is what they say."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from launching import CONFIGS, ROOT, execute
from small_mnist import write_mnist
from small_model import write_model

# Set-up and test commands: they install, and run these tests.
NOT_RUN = ("make ", "pip install", "git clone", "cd ", "python -m venv", "source ")

pytestmark = pytest.mark.xdist_group("test_docs")


def commands_of(text: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith(("#", *NOT_RUN))]


COMMANDS = commands_of((ROOT / "README.md").read_text())
# The configs that these name run in test_one_result.py, too.
COMMANDS += [
    pytest.param(command, marks=pytest.mark.full)
    for path in ROOT.glob("docs/*.md")
    for command in commands_of(path.read_text())
]


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 20


@pytest.mark.parametrize("command", COMMANDS)
def test_command_works(tmp_path: Path, command: str) -> None:
    for folder in ("recipes", "accelerate_configs", "benchmarks", "launchers"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    write_mnist(tmp_path / "path" / "to" / "mnist")
    rows = [f"{x},{x * x % 7},{x + 1}" for x in range(100)]
    (tmp_path / "path" / "to" / "table.csv").write_text("\n".join(["rooms,age,price", *rows]))
    for name in ("file.txt", "tinyshakespeare.txt"):
        (tmp_path / "path" / "to" / name).write_text("one two three four " * 500)
    if "--model_name_or_path" in command:
        write_model(tmp_path / "path" / "to" / "model", num_positions=64)
    if "recipes/transformer.py" in command:  # as it is, but for the minutes that its 2,000 steps take
        command += " --max_steps 10"
    words = shlex.split(command)
    env = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    run = execute([word for word in words if not re.match(r"[A-Z_]+=", word)], tmp_path, tmp_path / "outputs", env)
    if "ylecun/mnist" in command:  # no test needs the network
        assert "--data digits for the embedded set" in run.stderr
    else:
        assert run.exit_code == 0, run.stdout + run.stderr


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_config_has_a_header_and_no_unknown_key(path: Path) -> None:
    text = path.read_text()
    header = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    command = f"accelerate launch --config_file accelerate_configs/{path.name} "
    assert header[-1].startswith(command) and "recipes/" in header[-1]
    assert any(line.startswith("Needs: ") for line in header) and any(line.startswith("Pick it ") for line in header)
    config = load_config_from_file(str(path))  # raises on unknown keys
    known = set(yaml.safe_load(text))
    assert {"compute_environment", "distributed_type", "mixed_precision", "num_machines", "num_processes"} <= known
    assert "accumulation" not in text and "clipping:" not in text  # the command line decides these
    assert config.num_processes == {"single": 1, "hsdp": 4, "multi_node_hsdp": 4, "fsdp2_tensor_parallel": 4}.get(
        path.stem, 2
    )


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_config_sections_hold_only_what_the_launcher_takes(path: Path) -> None:
    """Accelerate ignores a misspelt key inside fsdp_config or deepspeed_config without a word."""
    from accelerate.commands.launch import launch_command_parser

    options = {option for action in launch_command_parser()._actions for option in action.option_strings}
    content = yaml.safe_load(path.read_text())
    for section in ("fsdp_config", "deepspeed_config", "parallelism_config"):
        for key in content.get(section, {}):
            assert f"--{key}" in options, f"{section}: {key}"


def test_loop_names_no_parallelism() -> None:
    text = (ROOT / "common" / "loop.py").read_text().lower()
    assert not re.search(r"\b(ddp|fsdp|deepspeed|zero_?[123]|tensor.parallel|pipeline)", text)


def test_imports_of_common_point_one_way() -> None:
    order = """
        loop checkpoint watch record shards step parallel pipeline language_models images tables text data profile
        start run output_dir signals storage machines group plan state random_state config average optimizer schedule
        launch hardware errors"""
    layers = order.split()
    modules = {path.stem: path for path in (ROOT / "common").glob("*.py") if path.stem != "__init__"}
    assert modules.keys() == set(layers)
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("common."):
                imported = node.module.removeprefix("common.")
                assert layers.index(imported) > layers.index(name), f"{name} imports {imported}"


def test_recipes_stay_short_and_never_ask_where_they_run() -> None:
    for path in (ROOT / "recipes").glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 140, path
        assert not re.search(r"num_processes|process_index|is_main_process|distributed_type", text), path
