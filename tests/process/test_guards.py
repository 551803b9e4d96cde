"""Promise: bad input gets one clear line from one process, exit code 2, and loses nothing."""

import dataclasses
import os
import re
import sys
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from accelerate_recipes.common.config import RunConfig
from support.launching import CONFIGS, execute, fork, launch
from support.recipes import DETECTION, LINEAR, MISFIT, MNIST
from support.runs import ROOT, refused


def test_report_of_the_launcher_ends_with_our_line(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "ddp", MNIST, "--batch_size 63", succeeds=False)
    line = "--batch_size 63 is not divisible by 2 data-parallel ranks: use --batch_size 62 or 64, or change the number "
    line += "of processes"
    assert refused(run) == f"error: {line}" and line in run.stderr.split("Root Cause")[1]
    assert not run.output_dir.exists()


def test_exit_code_of_a_mistake_is_2(tmp_path: Path) -> None:
    """Without a launcher, which would turn it into 1."""
    run = execute([sys.executable, str(ROOT / MNIST), "--model", "resnet"], tmp_path, tmp_path)
    assert run.exit_code == 2 and "--model: invalid choice: 'resnet'" in refused(run)
    assert not (tmp_path / "outputs").exists()


# The error line must say what was given and what to type instead.
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--batch_size 2000", "1438 training samples are fewer than --batch_size 2000: use --batch_size 1438 or less"),
        ("--data some-owner/some-set", "--data digits for the embedded set, or --data FOLDER for MNIST's IDX files"),
        ("--resume_from_checkpoint nowhere", "--resume_from_checkpoint nowhere: no checkpoint there; use latest"),
        ("--report_to aim", "--report_to aim needs aim: run pip install aim"),
        ("--report_to paper", "--report_to paper: no such tracker; use one of aim, "),
    ],
)
def test_one_process_alone(tmp_path: Path, arguments: str, expected: str) -> None:
    run = fork(tmp_path / "run", "single", MNIST, arguments, succeeds=False)
    assert expected in refused(run)
    assert not (run.output_dir / "run.json").exists(), "a run that was refused at the start wrote a run card"


def test_help_explains_each_flag_once(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", MNIST, "--help")
    assert run.stdout.count("usage: mnist.py") == 1
    for field in dataclasses.fields(RunConfig):
        assert re.search(rf"  --{field.name}\b[^\n]*\s+\w+", run.stdout), field.name
    assert (
        "(default: digits)" in " ".join(run.stdout.split()) and "{constant,linear,cosine,wsd,one_cycle}" in run.stdout
    )


def test_output_dir_that_only_the_main_process_finds_unwritable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = fork(tmp_path / "file" / "run", "ddp", MNIST, succeeds=False)
    assert f"--output_dir {run.output_dir} cannot be written (Not a directory)" in refused(run)


def test_world_size_without_a_launcher(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "single", MNIST, env={"WORLD_SIZE": "4"}, succeeds=False)
    assert "WORLD_SIZE is 4 but LOCAL_RANK is not set" in refused(run)


def changed(tmp_path: Path, config: str, **changes: object) -> Path:
    """A copy of a shipped config with changes in its FSDP or DeepSpeed section."""
    content = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())
    section = next((content[name] for name in ("fsdp_config", "deepspeed_config") if name in content), content)
    section |= changes
    path = tmp_path / f"{config}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("config", "changes", "expected"),
    [
        ("deepspeed_zero2", {"gradient_clipping": 0.5}, "deepspeed_config sets gradient_clipping: 0.5"),
        (
            "fsdp2",
            {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
            "names LlamaDecoderLayer, but the model",
        ),
    ],
)
def test_config_that_would_change_the_mathematics(
    tmp_path: Path, config: str, changes: dict[str, object], expected: str
) -> None:
    run = fork(tmp_path / "run", changed(tmp_path, config, **changes), MNIST, "--max_steps 2", succeeds=False)
    assert expected in refused(run)


def test_fp16_without_a_gpu_says_so_and_goes_on(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp_fp16", MNIST, "--max_steps 2")
    assert run.stdout.count("fp16 needs a GPU: this rehearsal runs in float32") == 1
    assert run.card["precision"] == "float32"


@pytest.mark.parametrize(
    ("package", "arguments", "expected"),
    [
        ("deepspeed", "", "run pip install deepspeed ninja"),
        ("datasets", "--data ylecun/mnist", "this data needs datasets: run pip install datasets"),
        pytest.param(
            *("pycocotools", "", "this data needs pycocotools: run pip install 'accelerate-recipes[detection]'"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_missing_package(tmp_path: Path, package: str, arguments: str, expected: str) -> None:
    """Links all installed packages except one into a folder. -S keeps the real site-packages out of the path."""
    site = Path(yaml.__file__).parents[1]
    links = tmp_path / "site"
    links.mkdir()
    for entry in site.iterdir():
        if package not in entry.name:
            (links / entry.name).symlink_to(entry)
    script = DETECTION if package == "pycocotools" else MNIST
    env = {"PYTHONPATH": f"{links}{os.pathsep}{ROOT}", "ACCELERATE_USE_DEEPSPEED": str(package == "deepspeed")}
    env |= {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} if package == "deepspeed" else {}
    run = execute([sys.executable, "-S", str(ROOT / script), *arguments.split()], tmp_path, tmp_path, env)
    assert run.exit_code == 2
    assert expected in refused(run)


def test_missing_compiler(tmp_path: Path) -> None:
    for config, arguments in (("deepspeed_zero2", ""), ("single", "--compile")):
        run = fork(tmp_path / "run", config, MNIST, arguments, env={"CXX": "no-such-compiler"}, succeeds=False)
        assert "needs a C++ compiler (Debian: apt-get install g++): no no-such-compiler found" in refused(run)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--case memory", "32 samples per forward pass, 4000000000000000 bytes more: use --micro_batch_size 16, or"),
        ("--case memory --micro_batch_size 1", "1 sample per forward pass, 4000000000000000 bytes more: shard the"),
        ("--case put --deterministic", "--deterministic: put_ has no deterministic kernel"),
    ],
)
def test_error_of_torch_that_a_flag_avoids(tmp_path: Path, arguments: str, expected: str) -> None:
    run = fork(tmp_path / "run", "ddp", MISFIT, arguments, succeeds=False)
    assert expected in refused(run)


def test_deterministic_kernels_give_the_same_result(tmp_path: Path) -> None:
    flags = "--max_steps 4 --log_every 1"
    plain, deterministic = (
        fork(tmp_path / name, "ddp", MNIST, flags + more)
        for name, more in (("plain", ""), ("deterministic", " --deterministic"))
    )
    assert deterministic.column("train/loss") == pytest.approx(plain.column("train/loss"), rel=1e-5)


def test_precision_that_is_not_tested(tmp_path: Path) -> None:
    env = {"ACCELERATE_MIXED_PRECISION": "fp8"}  # the launcher refuses it, unless a package for it is installed
    run = execute([sys.executable, MNIST, "--output_dir", str(tmp_path / "run")], ROOT, tmp_path / "run", env)
    assert refused(run) == "error: mixed_precision: fp8 is not supported: use mixed_precision: bf16 there"


def test_batch_norm_is_pointed_out(tmp_path: Path) -> None:
    """Later steps of a run on the CPU are compared, too, but not evaluations."""
    run = fork(tmp_path / "run", "ddp", MISFIT, "--case batch_norm --max_steps 12")
    assert run.stdout.count("changes 2.running_mean, as BatchNorm does, and sees 32 of 64 samples at a time") == 1


def test_compiled_dropout_draws_the_same_numbers(tmp_path: Path) -> None:
    """The parity check compares the run with one process that does not compile."""
    run = fork(tmp_path / "run", "ddp", MISFIT, "--case dropout --max_steps 2 --compile --log_every 1")
    plain = fork(tmp_path / "plain", "ddp", MISFIT, "--case dropout --max_steps 2 --log_every 1")
    assert run.card["checked_steps"] == 2
    assert run.column("train/loss") == pytest.approx(plain.column("train/loss"), rel=1e-5)


def test_layer_that_only_gpus_compute(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", MISFIT, "--case sync_batch_norm", succeeds=False)
    assert "DDP cannot train this: ValueError: SyncBatchNorm layers only work with GPU modules" in refused(run)


def test_iterable_dataset(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", MISFIT, "--case iterable", succeeds=False)
    assert "Stream is not a map-style dataset" in refused(run)


def test_fsdp_without_layers_to_gather_says_so(tmp_path: Path) -> None:
    config = changed(tmp_path, "fsdp2", fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=1000)
    run = fork(tmp_path / "run", config, MISFIT, "--max_steps 2")
    assert run.stdout.count("fsdp_min_num_params has no effect: FSDP gathers layers by class: the classes in") == 1
    assert run.stdout.count("Sequential names no layers in _no_split_modules") == 1


def test_address_of_a_cluster_does_not_stop_a_single_process(tmp_path: Path) -> None:
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    command = ["accelerate", "launch", "--config_file", str(CONFIGS / "single.yaml"), str(ROOT / LINEAR)]
    run = execute([*command, "--max_steps", "1"], tmp_path, tmp_path / "outputs" / "linear_regression", env)
    assert run.exit_code == 0 and run.card["num_processes"] == 1, run.stderr


def test_variables_that_mpi_has_left(tmp_path: Path) -> None:
    env = {"OMPI_COMM_WORLD_SIZE": "2"}
    run = execute([sys.executable, str(ROOT / LINEAR)], tmp_path, tmp_path / "outputs" / "linear_regression", env)
    assert "without MPI, unset its variables, such as PMI_SIZE" in refused(run)


def test_output_dir_in_use(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"):
        run = fork(tmp_path / "run", "ddp", MNIST, succeeds=False)
    assert "another run writes to" in refused(run)
