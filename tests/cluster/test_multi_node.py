"""Promise: several machines train as one process does, also after a machine or the network was lost."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accelerate_recipes.common.records.run_card import read_card
from support.hosts import ADDRESSES, NEEDS_HOSTS, Hosts, accelerate_launch, error_lines, launch_of, node, wait
from support.launching import execute, until
from support.recipes import COURSE, DISTURBED, LATEST, RECIPES
from support.runs import ROOT, Run, assert_equal_to_the_last_bit, largest_difference, weight_distance

pytestmark = NEEDS_HOSTS


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "recipe"),
    [
        ("multi_node_ddp", "mnist mlp"),
        ("multi_node_ddp", "transformer"),
        ("multi_node_hsdp", "mnist mlp"),
        ("multi_node_hsdp", "transformer"),
        ("multi_node_deepspeed_zero3", "mnist mlp"),
    ],
)
def test_two_machines_give_the_result_of_one_process(
    tmp_path: Path, hosts: Hosts, reference: Callable[..., Run], config: str, recipe: str
) -> None:
    script, arguments = RECIPES[recipe]
    output_dir = tmp_path / "run"
    commands = [
        accelerate_launch(machine, config, script, f"{arguments} --output_dir {output_dir}") for machine in (0, 1)
    ]
    runs = hosts.run(commands, [output_dir] * 2, tmp_path, OMP_NUM_THREADS="1")
    assert [run.exit_code for run in runs] == [0, 0], [run.stderr for run in runs]
    expected = reference(script, arguments)
    assert "on 2 machines" in runs[0].stdout
    assert largest_difference(runs[0].column("train/loss"), expected.column("train/loss")) <= 1e-5
    assert weight_distance(runs[0], expected) <= 1e-5


@pytest.mark.full
def test_name_that_leads_to_the_machine_itself(
    tmp_path: Path, hosts: Hosts, undisturbed: Callable[[str, str], Run]
) -> None:
    """Debian's /etc/hosts maps a machine's own name to 127.0.1.1."""
    for host, address in zip(hosts.names, ("127.0.1.1", ADDRESSES[0])):
        with (Path("/etc/netns") / host / "hosts").open("a") as file:
            file.write(f"{address} node0\n")
    output_dir = tmp_path / "run"
    launch = launch_of("multi_node_ddp", f"{COURSE} --output_dir {output_dir}")
    commands = [node(machine, launch, main_process_ip="node0", timeout=60) for machine in (0, 1)]
    runs = hosts.run(commands, [output_dir] * 2, tmp_path, OMP_NUM_THREADS="1")
    assert [run.exit_code for run in runs] == [0, 0], [run.stderr for run in runs]
    assert_equal_to_the_last_bit(runs[0], undisturbed("ddp", COURSE))


@pytest.mark.full
def test_link_that_is_cut_ends_both_sides_and_a_restart_resumes(
    tmp_path: Path, hosts: Hosts, made_once: Callable[..., Run]
) -> None:
    arguments = "--max_steps 300 --save_every 20 --log_every 20 --eval_every 300"
    output_dir = tmp_path / "run"
    metrics = output_dir / "metrics.jsonl"
    launch = launch_of("multi_node_ddp", f"{arguments} --output_dir {output_dir} {LATEST} --hang_timeout 10")
    commands = [node(machine, launch, timeout=60) for machine in (0, 1)]
    with hosts.started(commands, tmp_path, OMP_NUM_THREADS="1") as processes:
        until(lambda: metrics.exists() and '"step": 100' in metrics.read_text())
        hosts.link("down")
        cut_at = time.monotonic()
        try:
            runs = [wait(process, output_dir) for process in processes]
        finally:
            hosts.link("up")
    assert time.monotonic() - cut_at < 60
    for machine, run in enumerate(runs):
        assert run.exit_code == 1 and len(error_lines(run)) == 1, run.stderr
        assert f"no step for 10 s: process {1 - machine} does not answer" in error_lines(run)[0]
    again = hosts.run(commands, [output_dir] * 2, tmp_path, OMP_NUM_THREADS="1")
    assert [run.exit_code for run in again] == [0, 0], [run.stderr for run in again]
    assert "resumed from" in again[0].stdout
    assert_equal_to_the_last_bit(again[0], made_once("ddp", DISTURBED, arguments))


@pytest.mark.full
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun (Debian: apt-get install openmpi-bin)")
def test_mpirun_starts_a_launcher_on_each_machine(tmp_path: Path, undisturbed: Callable[[str, str], Run]) -> None:
    """Starts both on this machine, because mpirun needs ssh to reach other machines."""
    output_dir = tmp_path / "run"
    command = (
        "python launchers/node.py --num_machines 2 --machine_rank $OMPI_COMM_WORLD_RANK --main_process_port 29471 --"
    )
    command += f" --config_file accelerate_configs/multi_node_ddp.yaml {DISTURBED} {COURSE} --output_dir {output_dir}"
    mpirun = ["mpirun", "--bind-to", "none", "-x", "PATH", "-np", "2", "--oversubscribe", "--allow-run-as-root"]
    mpirun += ["bash", "-c", command]
    run = execute(mpirun, ROOT, output_dir, {"OMP_NUM_THREADS": "1"})
    assert run.exit_code == 0, run.stdout + run.stderr
    assert "2 processes on 2 machines" in run.stdout
    assert_equal_to_the_last_bit(run, undisturbed("ddp", COURSE))


@pytest.fixture(scope="module")
def ssh(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The ssh command for the servers that run on both hosts and answer."""
    if shutil.which("sshd") is None:
        pytest.skip("no sshd (Debian: apt-get install openssh-server)")
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd will not start without it
    settings = f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/key.pub\nStrictModes no\nUsePAM no\n"
    (folder / "sshd_config").write_text(f"{settings}PermitRootLogin yes\nPidFile none\n")
    server = [shutil.which("sshd"), "-D", "-e", "-f", str(folder / "sshd_config")]
    with hosts.started([server, server], folder):
        options = "-o BatchMode=yes -o StrictHostKeyChecking=no -o LogLevel=ERROR -o UserKnownHostsFile=/dev/null"
        command = f"ssh -i {folder}/key {options}"

        def logs_in(address: str) -> bool:
            return subprocess.run(hosts.command(0, [*command.split(), address, "true"])).returncode == 0

        until(lambda: all(logs_in(address) for address in ADDRESSES))
        yield command


def over_ssh(output_dir: Path, arguments: str) -> list[str]:
    """The command line of launchers/hosts.sh, for the first host."""
    launch = f"--config_file accelerate_configs/multi_node_ddp.yaml {DISTURBED} --output_dir {output_dir} {arguments}"
    return [str(ROOT / "launchers" / "hosts.sh"), *ADDRESSES, "--", *launch.split()]


def test_one_command_trains_on_all_hosts(
    tmp_path: Path, hosts: Hosts, ssh: str, undisturbed: Callable[[str, str], Run]
) -> None:
    output_dir = tmp_path / "run"
    (run,) = hosts.run([over_ssh(output_dir, COURSE)], [output_dir], ROOT, SSH=ssh, OMP_NUM_THREADS="1")
    assert run.exit_code == 0, run.stdout + run.stderr
    assert run.card["threads_per_process"] == 1  # hosts.sh has set OMP_NUM_THREADS on the hosts
    assert "[10.77.0.1] 2 processes on 2 machines, DDP" in run.stdout
    assert_equal_to_the_last_bit(run, undisturbed("ddp", COURSE))


@pytest.mark.full
@pytest.mark.parametrize(("fault", "exit_code"), [("none", 75), ("kill", 1), ("lost", 75)])
def test_all_hosts_end_where_one_does(tmp_path: Path, hosts: Hosts, ssh: str, fault: str, exit_code: int) -> None:
    output_dir = tmp_path / "run"
    arguments = "--max_steps 1000000 --log_every 20 --eval_every 1000000 --fault_process 1 --fault_step 300"
    arguments += " --fault kill" if fault == "kill" else ""
    metrics = output_dir / "metrics.jsonl"
    with hosts.started([over_ssh(output_dir, arguments)], ROOT, SSH=ssh) as (process,):
        if fault != "kill":
            until(lambda: metrics.exists() and metrics.read_text() != "")
        if fault == "none":
            os.killpg(process.pid, signal.SIGINT)  # Ctrl-C
        elif fault == "lost":  # the user's machine is gone, with all its processes
            os.killpg(process.pid, signal.SIGKILL)
            until(lambda: read_card(output_dir).get("exit_code") is not None)
        run = wait(process, output_dir)
    assert run.exit_code == (-signal.SIGKILL if fault == "lost" else exit_code), run.stdout + run.stderr
    assert (len(run.checkpoints), run.card["exit_code"]) == (0 if fault == "kill" else 1, exit_code)


@pytest.mark.full
def test_network_is_measured_between_all_and_between_pairs(tmp_path: Path, hosts: Hosts) -> None:
    arguments = "--max_megabytes 1 --repetitions 3"
    commands = [accelerate_launch(machine, "multi_node_ddp", "launchers/network.py", arguments) for machine in (0, 1)]
    first, second = hosts.run(commands, [tmp_path] * 2, tmp_path)
    assert first.exit_code == 0, first.stderr
    number = r"[\d,.]+"
    table = rf"\| ([\d,]+) \| {number} \({number} to {number}\) \| {number} \| {number} \|"
    assert re.findall(rf"\| all 2 processes {table}", first.stdout) == ["4", "64", "1,024", "16,384", "262,144"]
    pairs = re.findall(rf"\| machine 0 \(node0\) and machine 1 \(node1\) {table}", first.stdout)
    assert pairs == ["4", "16,777,216"] and "|" not in second.stdout


@pytest.mark.full
def test_run_goes_on_with_fewer_machines_and_grows_again(
    tmp_path: Path, hosts: Hosts, made_once: Callable[..., Run]
) -> None:
    """Under an elastic rendezvous, a machine dies and comes back."""
    recipe, arguments = "recipes/linear_regression.py", "--max_steps 20000 --log_every 100 --eval_every 20000"
    output_dir, first = tmp_path / "run", ADDRESSES[0]
    commands = []
    for machine, address in enumerate(ADDRESSES):  # --local_addr: the names of the hosts do not resolve
        settings = "--nnodes 1:2 --nproc_per_node 1 --max_restarts 3 --rdzv_backend c10d --rdzv_id run"
        settings += f" --rdzv_endpoint {first}:29500 --local_addr {address}"
        settings += f" --rdzv_conf last_call_timeout=3,is_host={1 - machine}"
        flags = f"{arguments} --save_every 100 --output_dir {output_dir} {LATEST}"
        command = [sys.executable, "-m", "torch.distributed.run", *settings.split(), str(ROOT / recipe)]
        commands.append([*command, *flags.split()])
    env = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def steps() -> int:
        path = output_dir / "metrics.jsonl"
        return json.loads(path.read_text().splitlines()[-1])["step"] if path.exists() and path.read_text() else 0

    def num_processes() -> int:
        return read_card(output_dir).get("num_processes", 0)

    with hosts.started(commands, tmp_path, **env) as (survivor, _):
        until(lambda: steps() >= 200)
        assert num_processes() == 2
        hosts.kill(1)
        until(lambda: num_processes() == 1 and steps() >= 400)
        with hosts.started([[], commands[1]], tmp_path, **env):
            until(lambda: num_processes() == 2)
            run = wait(survivor, output_dir)
    assert run.exit_code == 0 and run.card["status"] == "done", run.stderr
    expected = made_once("single", recipe, arguments)
    assert largest_difference(run.column("train/loss"), expected.column("train/loss")) <= 1e-5
    assert run.column("learning_rate") == expected.column("learning_rate")
    assert weight_distance(run, expected) <= 1e-5
