"""Promise: machines that cannot train as one each say why in one line, within the stated time."""

import signal
import time
from pathlib import Path

import pytest

from support.hosts import ADDRESSES, NEEDS_HOSTS, Hosts, error_lines, launch_of, node, wait
from support.recipes import DISTURBED
from support.runs import ROOT

pytestmark = NEEDS_HOSTS
LAUNCH = f"--num_processes 6 {launch_of('multi_node_ddp', '--max_steps 2')}"  # 6 divides by 2 and 3 machines


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {1: {"main_process_ip": "10.77.0.9"}},
            {
                0: (
                    1,
                    "machine 1 of 2 did not arrive at machine 0 at 10.77.0.1:29500 within 3 s (0 is node0)",
                ),
                1: (
                    1,
                    "machine 0 at 10.77.0.9:29500 cannot be reached from node1 within 3 s (No route to host",
                ),
            },
        ),
        (
            {1: {"main_process_port": 29600}},
            {
                0: (1, "machine 1 of 2 did not arrive"),
                1: (1, "cannot be reached from node1 within 3 s (nothing listens there: it is not started, or uses an"),
            },
        ),
        (
            {0: {"main_process_ip": "10.77.0.2"}},
            {
                0: (1, "10.77.0.2 is not an address of node0, which has"),
                1: (1, "cannot be reached from node1"),
            },
        ),
        (
            {1: {"machine_rank": 0}},
            {
                0: (1, "machine 1 of 2 did not arrive"),
                1: (1, "10.77.0.1 is not an address of node1, which has"),
            },
        ),
        (
            {0: {"num_machines": 3}, 1: {"num_machines": 2}},
            {0: (2, "node1 has --num_machines 2, node0 has 3"), 1: (2, "node1 has --num_machines 2, node0 has 3")},
        ),
        (
            {0: {"num_machines": 3}, 1: {"num_machines": 3}},
            {0: (1, "machine 2 of 3 did not arrive"), 1: (1, "within 3 s (0 is node0, 1 is node1): start the same")},
        ),
        (
            {1: {"main_process_ip": "<address of machine 0>"}},
            {0: (1, "machine 1 of 2 did not"), 1: (2, "--main_process_ip <address of machine 0> is a placeholder")},
        ),
        (
            {1: {"main_process_ip": "nobody.invalid"}},
            {0: (1, "machine 1 of 2 did not"), 1: (1, "nobody.invalid does not resolve on node1")},
        ),
        (
            {1: {"machine_rank": 2}},
            {0: (1, "machine 1 of 2"), 1: (2, "--machine_rank 2 with --num_machines 2: expect")},
        ),
    ],
    ids=["address", "port", "not mine", "rank twice", "number", "missing", "placeholder", "name", "rank"],
)
def test_machines_that_do_not_meet_say_why(
    tmp_path: Path, hosts: Hosts, changes: dict[int, dict], expected: dict[int, tuple[int, str]]
) -> None:
    started = time.monotonic()
    commands = [node(machine, LAUNCH, **changes.get(machine, {})) for machine in (0, 1)]
    runs = hosts.run(commands, [tmp_path / "run"] * 2, tmp_path)
    assert time.monotonic() - started < 20
    for machine, run in enumerate(runs):
        exit_code, line = expected[machine]
        assert run.exit_code == exit_code and len(run.stderr.splitlines()) == 1 and line in run.stderr, run.stderr
    assert not (tmp_path / "run").exists()


def test_two_machines_of_one_rank_are_named(tmp_path: Path, hosts: Hosts) -> None:
    """Two of three machines have --machine_rank 1."""
    with (
        hosts.started([node(0, LAUNCH, num_machines=3), node(1, LAUNCH, num_machines=3)], tmp_path) as processes,
        hosts.started([[], node(1, LAUNCH, num_machines=3)], tmp_path) as more,
    ):
        runs = [wait(process, tmp_path / "run") for process in [*processes, *more]]
    for run in runs:
        assert run.exit_code == 2 and "node1 and node1 both have --machine_rank 1" in run.stderr


@pytest.mark.full
def test_machine_that_ends_and_comes_again_is_not_counted_twice(tmp_path: Path, hosts: Hosts) -> None:
    """The others wait for a third machine. A stop by a signal is not a failure."""
    waiting = node(0, LAUNCH, num_machines=3, timeout=12)
    with hosts.started([waiting, node(1, LAUNCH, num_machines=3, timeout=12)], tmp_path) as (first, second):
        time.sleep(4)
        second.send_signal(signal.SIGTERM)
        stopped = wait(second, tmp_path / "run")
        with hosts.started([[], node(1, LAUNCH, num_machines=3, timeout=12)], tmp_path) as (again,):
            runs = [wait(process, tmp_path / "run") for process in (first, again)]
    assert stopped.exit_code == 75 and "stopped: by SIGTERM before the first step" in stopped.stderr
    for run in runs:
        assert run.exit_code == 1 and "machine 2 of 3 did not arrive" in run.stderr, run.stderr


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        ("--config_file none.yaml recipes/mnist.py", "none.yaml: no such file on node0 in"),
        (f"--num_processes 3 {ROOT}/{DISTURBED}", "--num_processes 3 is the total over all 2 machines: use a mul"),
        (f"--num_processes=3 {ROOT}/{DISTURBED}", "--num_processes 3 is the total over all 2 machines: use a mul"),
        (f"{ROOT}/{DISTURBED}", "--num_processes is missing: it is the total over all 2 machines: use a multiple of"),
        (f"--max_restarts 1 {LAUNCH}", "--max_restarts does not work on several machines: remove it"),
    ],
)
def test_command_that_cannot_be_right_is_refused_at_once(
    tmp_path: Path, hosts: Hosts, launch: str, expected: str
) -> None:
    (run,) = hosts.run([node(0, launch)], [tmp_path / "run"], tmp_path)
    assert run.exit_code == 2 and expected in run.stderr and len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        (
            [("ddp", ""), ("hsdp", "")],
            "machine 1 (node1) has ACCELERATE_USE_FSDP true, machine 0 (node0) has none: they must be the same",
        ),
        pytest.param(
            [("ddp", "--learning_rate 0.1"), ("ddp", "")],
            "machine 1 (node1) has --learning_rate 0.01, machine 0 (node0) has 0.1",
            marks=pytest.mark.full,
        ),
        pytest.param(
            [("ddp", "--output_dir run")] * 2,
            "machine 1 (node1) does not see the --output_dir run of machine 0",
            marks=pytest.mark.full,
        ),
        pytest.param(
            [("ddp", "--report_to nobody")] * 2, "--report_to nobody: no such tracker", marks=pytest.mark.full
        ),
    ],
    ids=["config", "flags", "output_dir", "usage"],
)
def test_machines_that_differ_end_with_the_same_line(
    tmp_path: Path, hosts: Hosts, differences: list[tuple[str, str]], expected: str
) -> None:
    commands = []
    for machine, (config, flags) in enumerate(differences):
        (tmp_path / str(machine)).mkdir()
        arguments = f"--max_steps 2 --output_dir {tmp_path}/shared {flags}"
        command = node(machine, launch_of(f"multi_node_{config}", arguments), timeout=60)
        commands.append(["sh", "-c", 'cd "$0" && exec "$@"', str(tmp_path / str(machine)), *command])
    runs = hosts.run(commands, [tmp_path / "shared"] * 2, tmp_path)
    for run in runs:
        assert run.exit_code == 2, run.stderr
        assert len(error_lines(run)) == 1 and expected in error_lines(run)[0], run.stderr
    assert not (tmp_path / "shared" / "metrics.jsonl").exists()


@pytest.mark.full
def test_machine_whose_processes_come_late(tmp_path: Path, hosts: Hosts) -> None:
    """Machine 1 has a launcher in time, but late processes. Machine 0 reports them; they report that it has gone."""
    late = tmp_path / "late.py"
    late.write_text(
        "import os, runpy, time\n"
        "from accelerate_recipes.common.launch import machines\n"
        "machines.ARRIVAL_S = 4\n"
        "time.sleep(15 * int(os.environ['GROUP_RANK']))\n"
        f"runpy.run_path({str(ROOT / DISTURBED)!r}, run_name='__main__')\n"
    )
    launch = launch_of("multi_node_ddp", f"--output_dir {tmp_path}/run", late)
    runs = hosts.run([node(machine, launch, timeout=60) for machine in (0, 1)], [tmp_path / "run"] * 2, tmp_path)
    assert [run.exit_code for run in runs] == [1, 1]
    lines = [error_lines(run) for run in runs]
    assert lines[0] == ["stopped: the processes of machine 1 of 2 did not start within 4 s: its output says why"]
    assert lines[1] == [f"stopped: machine 0 at {ADDRESSES[0]}:29500 has gone: its output says why"]
