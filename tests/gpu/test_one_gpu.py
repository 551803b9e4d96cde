"""Promise: what the tests on CPU processes show is true on a GPU. Needs one GPU; docs/gpu.md says what has run.

Run them with `make test-gpu`. On a machine without a GPU, ACCELERATE_RECIPES_REHEARSE_GPU_TESTS=1 runs those that a CPU
can run, to find mistakes in the tests.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock

from support.launching import ACCELERATE_LAUNCH, CONFIGS, environment, execute
from support.recipes import COURSE, DISTURBED, LATEST, MNIST, RECIPES, TRANSFORMER
from support.runs import (
    ROOT,
    Run,
    assert_equal_to_the_last_bit,
    largest_difference,
    refused,
    weight_distance,
)

pytestmark = pytest.mark.gpu
CPU = {"CUDA_VISIBLE_DEVICES": ""}
CLOSE = 1e-4  # two devices, or two configs on a GPU, in float32 without TF32
BF16_TOLERANCE = 0.01  # against float32
OVERFLOW = "tests/gpu/overflow.py"
Env = dict[str, str]


def start(
    output_dir: Path, env: Env, config: str, script: str, arguments: str, options: str = "", succeeds: bool = True
) -> Run:
    """Runs `accelerate launch` with one process."""
    command = [*ACCELERATE_LAUNCH, "--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", "1"]
    command += ["--main_process_port", "0", *options.split(), str(ROOT / script), "--output_dir", str(output_dir)]
    run = execute([*command, *arguments.split()], output_dir.parent, output_dir, env)
    assert run.exit_code == 0 or not succeeds, run.stdout + run.stderr
    return run


def assert_close(run: Run, expected: Run, tolerance: float = CLOSE) -> None:
    """Compares losses, learning rates, evaluations and weights."""
    assert run.column("learning_rate") == expected.column("learning_rate")
    for name in ("train/loss", "eval/loss"):
        assert largest_difference(run.column(name), expected.column(name)) <= tolerance
    assert weight_distance(run, expected) <= 10 * tolerance


def together(*calls: Callable[[], Run]) -> list[Run]:
    """Runs that do not depend on each other, at the same time: most of the time of a run is its start."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, worker_id: str, on_gpu: Env) -> Callable[..., Run]:
    """reference(recipe, way) -> that recipe in one process, made by the first test process that needs it."""
    ways = {"gpu": (on_gpu, ""), "cpu": (CPU, ""), "bf16": (on_gpu, "--mixed_precision bf16")}
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent  # pytest-xdist: one folder per process

    def get(recipe: str, way: str = "gpu") -> Run:
        folder = shared / f"reference_{recipe}_{way}".replace(" ", "_")
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                env, options = ways[way]
                unfinished = folder.with_suffix(".unfinished")
                unfinished.mkdir(exist_ok=True)
                start(unfinished / "run", env, "single", *RECIPES[recipe], options=options)
                unfinished.rename(folder)
        return Run(0, "", "", folder / "run")

    return get


@pytest.mark.each_recipe
@pytest.mark.parametrize("recipe", RECIPES)
def test_float32_is_the_result_of_the_cpu(reference: Callable, recipe: str) -> None:
    assert_close(reference(recipe), reference(recipe, "cpu"))


@pytest.mark.each_recipe
@pytest.mark.parametrize("recipe", RECIPES)
def test_bf16(reference: Callable, recipe: str) -> None:
    run, expected = reference(recipe, "bf16"), reference(recipe)
    assert run.card["precision"] == "bf16"
    difference = largest_difference(run.column("train/loss"), expected.column("train/loss"))
    assert 0 < difference <= BF16_TOLERANCE


@pytest.mark.parametrize(
    "config", ["fsdp2", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "deepspeed_zero3_offload"]
)
def test_sharded_config_with_one_process(tmp_path: Path, reference: Callable, on_gpu: Env, config: str) -> None:
    if config.startswith("deepspeed") and find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    run = start(tmp_path / "run", on_gpu, config, *RECIPES["transformer"])
    assert run.card["parallelism"] != "no parallelism"
    assert_close(run, reference("transformer"))


def test_torchrun_with_one_process(tmp_path: Path, reference: Callable, on_gpu: Env) -> None:
    """It joins over NCCL. Accelerate builds no DDP for one process."""
    script, arguments = RECIPES["mnist cnn"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1", "--standalone"]
    command += [str(ROOT / script), "--output_dir", str(tmp_path / "run"), *arguments.split()]
    run = execute(command, tmp_path, tmp_path / "run", on_gpu)
    assert run.exit_code == 0, run.stderr
    assert run.card["parallelism"] == "no parallelism"
    assert_close(run, reference("mnist cnn"))


def test_tensor_parallelism_on_a_mesh_of_one(on_gpu: Env) -> None:
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "one_rank_mesh.py")]
    run = execute(command, ROOT, ROOT, on_gpu)
    assert run.exit_code == 0, run.stderr


@pytest.mark.needs_gpu
def test_fp16_skips_an_overflow(tmp_path: Path, on_gpu: Env) -> None:
    """The overflow is in step 3 of 8: the step is counted, but the schedule, weights and moving average stay."""
    flags = "--log_every 1 --save_every 2 --keep_checkpoints 9 --ema_decay 0.9"
    run = start(tmp_path / "run", on_gpu, "single", OVERFLOW, f"{flags} --max_steps 8", "--mixed_precision fp16")
    assert run.column("skipped_steps") == [0, 0, 1, 1, 1, 1, 1, 1]
    rates = run.column("learning_rate")
    assert rates[2] == rates[3] and rates[1] != rates[2]
    state = json.loads((run.output_dir / "checkpoints" / "step_00000004" / "manifest.json").read_text())["trainer"]
    assert state["num_averaged"] == 3 and state["loss_scale"]["scale"] == 2**15
    path = run.output_dir / "checkpoints" / "step_00000004"
    flags += f" --resume_from_checkpoint {path} --max_steps 8"
    again = start(tmp_path / "again", on_gpu, "single", OVERFLOW, flags, "--mixed_precision fp16")
    assert again.column("skipped_steps") == [1, 1, 1, 1]
    assert largest_difference(again.column("train/loss"), run.column("train/loss")[4:]) <= CLOSE


@pytest.mark.parametrize("flags", ["", "--optimizer sgd", "--async_save"])
def test_resume_with_dropout_is_exact_with_deterministic_kernels(tmp_path: Path, on_gpu: Env, flags: str) -> None:
    flags = f"{COURSE} --deterministic {flags}"
    stop = f"{flags} --fault signal --fault_step 7"
    whole, parts = together(
        lambda: start(tmp_path / "whole", on_gpu, "single", DISTURBED, flags),
        lambda: start(tmp_path / "parts", on_gpu, "single", DISTURBED, stop, succeeds=False),
    )
    assert parts.card["exit_code"] == 75, parts.stderr
    parts = start(tmp_path / "parts", on_gpu, "single", DISTURBED, f"{flags} {LATEST}")
    assert_equal_to_the_last_bit(parts, whole)


def test_resume_on_the_other_kind_of_device(tmp_path: Path, reference: Callable, on_gpu: Env) -> None:
    script, arguments = RECIPES["mnist cnn"]

    def moved(name: str, first: Env, second: Env) -> Run:
        start(tmp_path / name, first, "single", script, f"{arguments} --save_every 10")
        path = tmp_path / name / "checkpoints" / "step_00000010"
        flags = f"{arguments} --resume_from_checkpoint {path}"
        return start(tmp_path / f"{name}_resumed", second, "single", script, flags)

    runs = together(lambda: moved("gpu", CPU, on_gpu), lambda: moved("cpu", on_gpu, CPU))
    for way, run in zip(("gpu", "cpu"), runs):
        expected = reference("mnist cnn", way)
        assert largest_difference(run.column("train/loss"), expected.column("train/loss")[10:]) <= CLOSE


def test_process_that_waits_on_the_gpu_for_a_lost_peer_ends(tmp_path: Path, on_gpu: Env) -> None:
    """Two processes with gloo, because NCCL takes no two processes on one GPU."""
    script = str(ROOT / "tests" / "gpu" / "lost_peer.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    run = execute([*command, script, str(tmp_path)], tmp_path, tmp_path, on_gpu)
    ended = float((tmp_path / "ended").read_text())
    assert time.time() - ended < 15 and "process 1 has ended" in run.stdout + run.stderr


@pytest.mark.needs_gpu
def test_attention_runs_flash_kernels_and_no_others(tmp_path: Path, on_gpu: Env) -> None:
    script, file = tmp_path / "traced.py", tmp_path / "trace.json"
    script.write_text(
        "import runpy, torch\n"
        "with torch.profiler.profile() as profiler:\n"
        "    try:\n"
        f"        runpy.run_path({str(ROOT / TRANSFORMER)!r}, run_name='__main__')\n"
        "    except SystemExit as end:\n"
        "        assert not end.code\n"
        f"profiler.export_chrome_trace({str(file)!r})\n"
    )
    flags = RECIPES["transformer"][1] + " --max_steps 3 --sample_tokens 0 --hidden_size 128 --num_heads 2"
    start(tmp_path / "run", on_gpu, "single", script, flags, "--mixed_precision bf16")
    trace = json.loads(file.read_text())
    names = {event["name"] for event in trace["traceEvents"] if "attention" in event.get("name", "")}
    assert any("flash_attention" in name or "cudnn_attention" in name for name in names), names
    assert not any("efficient_attention" in name or "attention_math" in name for name in names), names


@pytest.mark.needs_gpu
def test_activation_checkpointing_saves_memory_under_fsdp2(
    tmp_path: Path, on_gpu: Env, record_property: Callable[[str, object], None]
) -> None:
    flags = f"--data {ROOT / 'LICENSE'} --context 512 --batch_size 8 --num_layers 12 --hidden_size 512 --max_steps 3"
    flags += " --sample_tokens 0"
    plain, checkpointed = together(
        lambda: start(tmp_path / "plain", on_gpu, "fsdp2", TRANSFORMER, flags),
        lambda: start(tmp_path / "checkpointed", on_gpu, "fsdp2", TRANSFORMER, f"{flags} --activation_checkpointing"),
    )
    peaks = {"plain": plain.card["peak_memory_gib"], "checkpointed": checkpointed.card["peak_memory_gib"]}
    record_property("peak_gib", peaks)
    assert peaks["checkpointed"] < 0.7 * peaks["plain"]


@pytest.mark.parametrize("recipe", ["mnist cnn", "linear regression", "transformer"])
def test_compiled_recipe(tmp_path: Path, reference: Callable, on_gpu: Env, recipe: str) -> None:
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("needs a C compiler")
    script, arguments = RECIPES[recipe]
    run = start(tmp_path / "run", on_gpu, "single", script, f"{arguments} --compile")
    assert_close(run, reference(recipe))


@pytest.mark.needs_gpu
def test_out_of_memory_names_the_next_size(tmp_path: Path, on_gpu: Env) -> None:
    flags = "--context 512 --batch_size 1024 --hidden_size 4096 --num_heads 32 --num_layers 4 --max_steps 2"
    run = start(tmp_path / "run", on_gpu, "single", TRANSFORMER, flags, succeeds=False)
    assert re.search("out of memory with 1024 samples .*: use --micro_batch_size 512", refused(run))


@pytest.mark.needs_gpu
@pytest.mark.parametrize("recipe", ["mnist cnn", "transformer"])
def test_no_step_waits_for_the_gpu_between_records(on_gpu: Env, tmp_path: Path, recipe: str) -> None:
    script, arguments = RECIPES[recipe]
    flags = f"{arguments} --log_every 20 --eval_every 20"
    env = on_gpu | {"RECIPE": str(ROOT / script)}
    start(tmp_path / "run", env, "single", "tests/gpu/no_sync.py", flags)


@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_rehearsal_with_the_gpu_hidden(tmp_path: Path, config: str) -> None:
    command = [*ACCELERATE_LAUNCH, "--config_file", str(CONFIGS / f"{config}.yaml"), "--main_process_port", "0"]
    command += [str(ROOT / MNIST), "--max_steps", "2", "--output_dir", str(tmp_path / "run")]
    run = execute(command, tmp_path, tmp_path / "run", CPU)
    assert run.exit_code == 0 and "no GPU found" in run.stdout, run.stderr


@pytest.mark.needs_gpu
def test_benchmark_of_gpt2(tmp_path: Path, on_gpu: Env, record_property: Callable[[str, object], None]) -> None:
    """A short run; `make benchmark-gpu` takes longer ones."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpt2.py"), "--steps", "20", "--rounds", "1"]
    command += ["--json", str(tmp_path / "figures.json")]
    run = subprocess.run(command, env=environment(**on_gpu), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    record_property("gpt2", json.loads((tmp_path / "figures.json").read_text()))
