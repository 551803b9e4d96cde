"""Promise: the scripts in recipes/single_file, on Accelerate alone, give the losses and metrics of the recipes."""

import ast
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from accelerate_recipes.common.parallel.extensions import extensions_folder
from support.launching import accelerate, fork, launch
from support.plain import losses, threads_left
from support.runs import ROOT, Run, largest_difference

SINGLE_FILE = ROOT / "recipes" / "single_file"
MOST_LINES = {"linear_regression": 130, "mnist": 180, "transformer": 220}
# The learning rate rises and falls; gradients of mnist and transformer are clipped.
FLAGS = {
    "linear_regression": "--max_steps 20",
    "mnist": "--max_steps 20 --warmup_steps 3",
    "transformer": "--max_steps 20 --warmup_steps 3 --learning_rate 1e-3",
}
OF_RECIPE = {"linear_regression": "", "mnist": "", "transformer": " --sample_tokens 0"}


def path_of(script: str) -> Path:
    return SINGLE_FILE / f"{script}.py"


def evaluation(run: Run) -> dict[str, float]:
    """The metrics that a script prints at its end."""
    line = re.search(r"^evaluation  (.+)$", run.stdout, re.MULTILINE)
    assert line is not None, run.stdout
    words = line[1].split()
    return {f"eval/{name}": float(value) for name, value in zip(words[::2], words[1::2])}


@pytest.mark.quick
@pytest.mark.parametrize("script", MOST_LINES)
def test_script_stands_alone_and_is_short(script: str) -> None:
    text = path_of(script).read_text()
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "module", None) or alias.name for node in imports for alias in node.names]
    known = {"torch", "accelerate", "sklearn", "transformers"} | sys.stdlib_module_names
    assert {name.partition(".")[0] for name in names} <= known
    assert len(text.splitlines()) <= MOST_LINES[script]
    assert {int(number) for number in re.findall(r"# Rule (\d) of 6: ", text)} == {1, 2, 3, 4, 5, 6}
    assert f"    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/single_file/{script}.py" in text


@pytest.mark.parametrize(
    ("script", "config", "more"),
    [
        ("linear_regression", "ddp", "--micro_batch_size 16"),
        ("mnist", "fsdp2", "--micro_batch_size 8"),
        # It evaluates 100 kB of text.
        pytest.param("transformer", "fsdp2", "--micro_batch_size 3", marks=pytest.mark.full),
        *(  # DeepSpeed, whose extension torch compiles once more for a script without our package, among them
            pytest.param(script, config, "", marks=pytest.mark.full)
            for script in MOST_LINES
            for config in ("ddp", "fsdp2", "deepspeed_zero2")
        ),
    ],
)
def test_script_gives_the_result_of_the_recipe(
    tmp_path: Path, reference: Callable[..., Run], script: str, config: str, more: str
) -> None:
    # Else torch compiles DeepSpeed's extension once more, for a minute.
    env = {"TORCH_EXTENSIONS_DIR": str(extensions_folder())}
    run = fork(tmp_path / "run", config, path_of(script), f"{FLAGS[script]} {more}", env=env)
    flags = f"{FLAGS[script]} --log_every 1 --eval_every 20{OF_RECIPE[script]}"
    recipe = reference(f"recipes/{script}.py", flags)
    assert len(losses(run)) == 20
    assert largest_difference(losses(run), recipe.column("train/loss")) <= 1e-5
    for name, value in evaluation(run).items():
        assert recipe.column(name) == pytest.approx([value], rel=1e-5)
    if script != "linear_regression":
        assert max(recipe.column("grad_norm")) > 1
    if script != "mnist":  # its layers have other names here
        weights, expected = (
            load_file(folder / "model.safetensors") for folder in (run.output_dir, recipe.output_dir / "model")
        )
        assert expected.keys() - weights.keys() <= {"lm_head.weight"}  # it is that of the embedding
        for name, weight in weights.items():
            assert (weight - expected[name]).norm() <= 1e-5 * expected[name].norm()


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "num_processes"), [("ddp", 2), ("fsdp2", 2), ("ddp", 4), ("fsdp2", 4), ("deepspeed_zero2", 2)]
)
def test_transformer_resumes_exactly(tmp_path: Path, config: str, num_processes: int) -> None:
    """Also with other micro-batches."""
    flags = f"{FLAGS['transformer']} --micro_batch_size 3"
    more = [
        "--save_every 13",
        *(f"--resume_from_checkpoint {tmp_path}/0/step_13 --micro_batch_size {n}" for n in (3, 1)),
    ]
    runs = [
        fork(tmp_path / f"{number}", config, path_of("transformer"), f"{flags} {own}", num_processes)
        for number, own in enumerate(more)
    ]
    # With more than two processes the order of sums depends on DDP's buckets, which it divides anew in its second step.
    tolerance = 0.0 if num_processes == 2 else 1e-5
    assert largest_difference(losses(runs[1]), losses(runs[0])[13:]) <= tolerance
    assert largest_difference(losses(runs[2]), losses(runs[0])[13:]) <= 1e-5
    whole, again = (load_file(run.output_dir / "model.safetensors") for run in runs[:2])
    assert all((whole[name] - again[name]).abs().max() <= tolerance for name in whole)


@pytest.mark.full
def test_script_refuses_what_the_config_does_not_say(tmp_path: Path) -> None:
    """Without two lines of `start`, Accelerate runs DDP on a CPU where the config asks for FSDP."""
    text = path_of("linear_regression").read_text()
    without = re.sub(r"    if on_cpu and asked:\n.*\n +PartialState.*\n", "", text)
    assert without.count("\n") == text.count("\n") - 3
    (tmp_path / "train.py").write_text(without)
    run = launch(tmp_path / "run", "fsdp2", tmp_path / "train.py", "--max_steps 1", succeeds=False)
    assert run.exit_code != 0 and "not what the config says" in run.stderr and "step 1" not in run.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "metric", "value"), [("linear_regression", "r2", 0.518), ("mnist", "accuracy", 0.99)]
)
def test_command_gives_what_the_docstring_says(tmp_path: Path, script: str, metric: str, value: float) -> None:
    command = re.search(r"^    accelerate (launch .*)", path_of(script).read_text(), re.MULTILINE)
    assert command is not None
    run = accelerate(command[1].split(), ROOT, tmp_path)
    assert evaluation(run)[f"eval/{metric}"] == pytest.approx(value, abs=5e-3)


@pytest.mark.parametrize(
    "script", ["mnist", *(pytest.param(name, marks=pytest.mark.full) for name in ("linear_regression", "transformer"))]
)
def test_gloo_ends_with_the_script(tmp_path: Path, script: str) -> None:
    """As in test_plain.py."""
    names = threads_left(tmp_path, str(path_of(script)), "--max_steps 3")
    assert not [name for name in names if "gloo" in name]


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("linear_regression", "--batch_size 443", "--batch_size 443: use a multiple of 1 processes x "),
        ("mnist", "--micro_batch_size 17", "--batch_size 64: use a multiple of 1 processes x --micro_batch_size 17"),
        ("mnist", "--micro_batch_size -4", "--batch_size 64: use a multiple"),
        ("mnist", "--batch_size 0", "--batch_size 0: use a multiple"),
        ("transformer", "--save_every 5", "--save_every needs --output_dir"),
        (
            "transformer",
            "--resume_from_checkpoint missing",
            "missing: use the path of a checkpoint, OUTPUT_DIR/step_N",
        ),
    ],
)
def test_bad_combination_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str, arguments: str, message: str
) -> None:
    monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(path_of(script)), run_name="__main__")
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
