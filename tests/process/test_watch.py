"""Promise: a stop request saves the run before it ends; a run that cannot continue says why and ends."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from support.launching import ACCELERATE_LAUNCH, CONFIGS, environment, fork, launch, until
from support.recipes import COURSE, DISTURBED, LATEST
from support.runs import ROOT, Run, assert_equal_to_the_last_bit

END_S = 30  # from the fault to the end of all processes, on a busy machine


def assert_ended_soon(run: Run, seconds: float = END_S) -> None:
    """Checks, right after the run, that the fault was less than `seconds` ago."""
    assert time.time() - (run.output_dir / "fault_was_here").stat().st_mtime < seconds


def assert_stopped(run: Run, signal_name: str, steps: range) -> None:
    """Checks that the run has saved one of these steps, printed one line and exported no model."""
    assert run.exit_code != 0
    assert (run.card["status"], run.card["exit_code"]) == ("stopped", 75), run.stdout + run.stderr
    lines = [line for line in run.stderr.splitlines() if line.startswith("stopped: ")]
    expected = rf"stopped: by {signal_name}: .*/step_\d+ is saved, use --resume_from_checkpoint latest to continue"
    assert len(lines) == 1 and re.fullmatch(expected, lines[0]), run.stderr
    assert max(run.checkpoints) in steps
    assert not (run.output_dir / "model").exists()


@pytest.mark.parametrize(
    ("config", "signal_name", "process", "fault", "step"),
    [
        pytest.param("single", "SIGTERM", 0, "signal", 7, marks=pytest.mark.full),
        ("ddp", "SIGUSR1", 1, "signal", 4),
        pytest.param("fsdp2", "SIGINT", 1, "evaluation", 1, marks=pytest.mark.full),
        pytest.param("deepspeed_zero2", "SIGTERM", 0, "evaluation", 1, marks=pytest.mark.full),
    ],
)
def test_signal_to_a_process_stops_all_at_one_step(
    tmp_path: Path,
    undisturbed: Callable[[str, str], Run],
    config: str,
    signal_name: str,
    process: int,
    fault: str,
    step: int,
) -> None:
    """An evaluation has 5 passes: step 1, its second pass, is in the middle of the first evaluation."""
    flags = f"--fault {fault} --fault_step {step} --fault_process {process} --signal {signal_name}"
    run = launch(tmp_path / "run", config, DISTURBED, f"{COURSE} {flags}", succeeds=False)
    assert_ended_soon(run)
    assert_stopped(
        run, signal_name, range(4, 5) if fault == "evaluation" else range(step + 1, step + 7)
    )  # steps are short: a few may follow the signal
    if fault == "evaluation":
        assert run.column("eval/loss") == []
    again = fork(tmp_path / "run", config, DISTURBED, f"{COURSE} {LATEST}")
    assert_equal_to_the_last_bit(again, undisturbed(config, COURSE))


def test_signal_before_the_first_step_ends_the_run_at_once(tmp_path: Path) -> None:
    script = tmp_path / "slow_to_start.py"
    script.write_text(
        "import os, signal, time\n"
        "from accelerate_recipes import RunConfig, run, start\n"
        "def main(config):\n"
        "    if start(config).process_index == 1:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(1000)\n"
        "run(main, RunConfig)\n"
    )
    code = tmp_path / "code"
    env = {"ACCELERATE_RECIPES_EXIT_CODE": str(code)}
    run = launch(tmp_path / "run", "ddp", script, env=env, succeeds=False)
    lines = [line for line in run.stderr.splitlines() if line.startswith("stopped: ")]
    assert lines == ["stopped: by SIGTERM before the first step: the same command starts again"], run.stderr
    assert code.read_text() == "75" and not run.output_dir.exists()


@contextmanager
def started(config: str, output_dir: Path, arguments: str, **variables: str) -> Iterator[subprocess.Popen]:
    """Starts disturbed.py in a new session. Kills the session on an error."""
    command = [*ACCELERATE_LAUNCH, "--config_file", str(CONFIGS / f"{config}.yaml"), "--main_process_port", "0"]
    command += [str(ROOT / DISTURBED), *f"--output_dir {output_dir} --max_steps 1000000 {arguments}".split()]
    env = environment(OMP_NUM_THREADS="1", **variables)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=output_dir.parent, env=env, start_new_session=True, **pipes) as process:
        try:
            yield process
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


@pytest.mark.parametrize(
    ("config", "signal_name", "variables"),
    [
        pytest.param("single", "SIGTERM", {}, marks=pytest.mark.full),
        pytest.param("ddp", "SIGTERM", {}, marks=pytest.mark.full),
        pytest.param("ddp", "SIGINT", {}, marks=pytest.mark.full),
        ("ddp", "SIGUSR1", {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGUSR1"}),
    ],
)
def test_signal_to_the_launcher_stops_all_at_one_step(
    tmp_path: Path, config: str, signal_name: str, variables: dict[str, str]
) -> None:
    output_dir = tmp_path / "run"
    metrics = output_dir / "metrics.jsonl"
    with started(config, output_dir, "--log_every 1 --eval_every 1000000", **variables) as process:
        until(lambda: metrics.exists() and metrics.read_text() != "")
        process.send_signal(getattr(signal, signal_name))
        stdout, stderr = process.communicate(timeout=60)  # until all processes that write to the pipes have ended
    run = Run(process.returncode, stdout, stderr, output_dir)
    assert_stopped(run, signal_name, range(1, 1_000_000))
    assert run.records[-1]["step"] == max(run.checkpoints)


@pytest.mark.full
@pytest.mark.parametrize("config", [pytest.param("single", marks=pytest.mark.full), "ddp"])
def test_second_ctrl_c_ends_at_once_what_does_not_stop(tmp_path: Path, config: str) -> None:
    output_dir = tmp_path / "run"
    with started(config, output_dir, "--fault hang --fault_step 2") as process:
        until((output_dir / "fault_was_here").exists)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        with pytest.raises(subprocess.TimeoutExpired):  # processes still run
            process.communicate(timeout=3)
        with suppress(ProcessLookupError):  # with one process, the first Ctrl-C has ended the launcher
            os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=15)
    assert process.returncode != 0 and not (output_dir / "model").exists()


@pytest.mark.parametrize("config", ["single", "ddp", "fsdp2", "deepspeed_zero2"])
def test_number_that_is_not_finite_ends_the_run(tmp_path: Path, config: str) -> None:
    process = 0 if config == "single" else 1
    flags = f"{COURSE} --log_every 14 --fault nan --fault_step 7 --fault_process {process}"
    run = fork(tmp_path / "run", config, DISTURBED, flags, succeeds=False)
    assert_ended_soon(run)
    lines = [line for line in run.stderr.splitlines() if line.startswith("stopped: ")]
    named = re.fullmatch(
        r"stopped: train/loss is nan at step 8 in process (\d), samples ([\d, ]+): try a lower .*", lines[0]
    )
    assert len(lines) == 1 and named, run.stderr
    assert int(named[1]) == process and len(named[2].split(", ")) == (8 if config == "single" else 4)
    assert (run.card["status"], run.card["exit_code"]) == ("failed", 3)
    assert run.checkpoints == [3, 6] and run.records[-1]["step"] == 4
    assert not (run.output_dir / "model").exists()


def test_first_step_that_is_not_finite_writes_nothing(tmp_path: Path) -> None:
    flags = "--log_every 1 --save_every 1 --eval_every 1 --fault nan"
    run = fork(tmp_path / "run", "ddp", DISTURBED, flags, succeeds=False)
    assert run.card["exit_code"] == 3 and run.records == [] and run.checkpoints == []
    assert "check the model's weights: no step has changed them, or look at these samples" in run.stderr


def test_signal_saves_no_step_whose_gradient_nobody_looked_at(tmp_path: Path) -> None:
    """Without clipping only logged steps have a gradient norm. The loss is finite, but the next weights are not."""
    flags = f"{COURSE} --log_every 14 --eval_every 14 --save_every 14 --max_grad_norm 0 --fault spoil --fault_step 3"
    run = fork(tmp_path / "run", "single", DISTURBED, flags, succeeds=False)
    assert run.card["exit_code"] == 3 and "train/loss is nan at step 6" in run.stderr
    assert run.checkpoints == []


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("stuck_error", "error: RuntimeError: an error in one process (disturbed.py:"),
        pytest.param(
            "stuck_slow_error", "error: RuntimeError: an error in one process (disturbed.py:", marks=pytest.mark.full
        ),
        pytest.param("stuck_kill", "stopped: process 1 has ended; see the launcher's report", marks=pytest.mark.full),
    ],
)
def test_process_that_waits_for_a_lost_peer_ends(tmp_path: Path, fault: str, expected: str) -> None:
    """The other process blocks as in a wait for a GPU: without Python code, so that it handles no signal."""
    flags = f"{COURSE} --fault {fault} --fault_step 4 --fault_process 1"
    run = launch(tmp_path / "run", "ddp", DISTURBED, flags, env={"OMP_NUM_THREADS": "1"}, succeeds=False)
    assert_ended_soon(run, 20)  # torchrun would kill it after 30 s
    assert run.card["status"] == "failed" and run.card["error"].startswith(expected)


@pytest.mark.parametrize(
    ("config", "fault", "expected"),
    [
        ("ddp", "hang", r"process 1 did not arrive, it is at .*/disturbed\.py:\d+ \(strike\)"),
        pytest.param("fsdp2", "stop", r"process 1 does not answer", marks=pytest.mark.full),  # torchrun waits for 30 s
        pytest.param("single", "hang", r"process 0 did not arrive, it is at .*/disturbed\.py", marks=pytest.mark.full),
    ],
)
def test_process_that_hangs_is_named(tmp_path: Path, config: str, fault: str, expected: str) -> None:
    process = 0 if config == "single" else 1
    flags = f"{COURSE} --hang_timeout 6 --fault {fault} --fault_step 7 --fault_process {process}"
    env = {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
    run = launch(tmp_path / "run", config, DISTURBED, flags, env=env, succeeds=False)
    assert_ended_soon(run, 6 + 30 + END_S)  # torchrun kills a suspended process after 30 s
    lines = [line for line in run.stderr.splitlines() if line.startswith("stopped: no step for 6 s: ")]
    assert len(lines) == 1 and re.search(expected, lines[0]), run.stderr
    assert (run.card["status"], run.card["exit_code"], run.card["error"]) == ("failed", 1, lines[0])
    stacks = (run.output_dir / "stacks_00000.txt").read_text()
    assert "most recent call first" in stacks and "loop.py" in stacks
