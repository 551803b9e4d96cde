"""Promise: the batch script trains on the nodes of a SLURM cluster, saves before the time limit and requeues itself."""

import os
import random
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.launching import environment, until
from support.recipes import COURSE, DISTURBED
from support.runs import ROOT, Run, assert_equal_to_the_last_bit

DAEMONS = ("munged", "slurmctld", "slurmd")
pytestmark = [
    pytest.mark.skipif(
        any(shutil.which(daemon) is None for daemon in DAEMONS) or os.getuid() != 0,
        reason="needs SLURM and root (Debian: apt-get install slurm-wlm munge)",
    ),
    pytest.mark.xdist_group("slurm"),
]
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=30
SchedulerParameters=batch_sched_delay=0,sched_interval=2
GresTypes=gpu
SelectType=select/cons_tres
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={num_cpus} Gres=gpu:1
NodeName={host}-2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={num_cpus} Gres=gpu:1
FirstJobId={first_job}
PartitionName=all Nodes={host},{host}-2 Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Cluster:
    """A controller and two nodes, all on this machine."""

    folder: Path

    def command(self, *arguments: str, **options: object) -> str:
        """Runs a SLURM command and returns its output."""
        env = environment(SLURM_CONF=str(self.folder / "slurm.conf"), OMP_NUM_THREADS="1")
        result = subprocess.run([*arguments], env=env, capture_output=True, text=True, **options)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def state(self, job: str) -> dict[str, str]:
        """Returns the controller's record of a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.command("scontrol", "show", "job", job)))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder, host = tmp_path_factory.mktemp("slurm"), socket.gethostname()  # the name of a node must resolve
    for name in ("state", f"spool-{host}", f"spool-{host}-2"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    ports = [free_port() for _ in range(3)]
    first_job = free_port(20000, 29000) - 20000  # the script's port depends on the job number
    text = CONFIG.format(folder=folder, host=host, ports=ports, num_cpus=os.cpu_count(), first_job=first_job)
    (folder / "slurm.conf").write_text(text)
    (folder / "gpu").touch()  # SLURM counts devices by their files
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu\n")
    conf = str(folder / "slurm.conf")
    munge = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "log", "pid", "seed")]
    commands = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge],
        ["slurmctld", "-D", "-c", "-f", conf],
        ["slurmd", "-D", "-N", host, "-f", conf],
        ["slurmd", "-D", "-N", f"{host}-2", "-f", conf],
    ]
    daemons = []
    made = Cluster(folder)
    try:
        for command in commands:
            with (folder / f"{'-'.join(command[:1])}.out").open("a") as log:
                daemons.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
            if command[0] == "munged":
                until((folder / "munge.socket").exists, 20)
        until(lambda: "idle" in made.command("sinfo", "--noheader", "--format=%T %D"), 60)
        yield made
    finally:
        for daemon in reversed(daemons):  # a node reports its end to the controller; both need munged
            daemon.terminate()
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:  # a node waits up to a minute for the end of a step
                daemon.kill()
                daemon.wait()


def free_port(lowest: int = 10000, highest: int = 20000) -> int:
    """Returns a free port below 32768, because the system gives higher ports to other programs meanwhile."""
    for port in random.sample(range(lowest, highest), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("100 ports are in use")


@dataclass(frozen=True)
class Job:
    """A job of launchers/slurm/train.sbatch."""

    cluster: Cluster
    number: str
    folder: Path

    @property
    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("recipe-*.out")))

    def is_over(self) -> bool:
        return self.cluster.state(self.number)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED")

    def run(self) -> Run:
        return Run(0, self.output, "", self.folder / "run")


def submit(cluster: Cluster, folder: Path, arguments: str, *options: str) -> Job:
    """Submits launchers/slurm/train.sbatch with one GPU per node."""
    for name in ("launchers", "accelerate_configs", "tests"):
        (folder / name).symlink_to(ROOT / name)
    command = ["sbatch", "--parsable", "--gpus-per-node=1", *options, "launchers/slurm/train.sbatch", DISTURBED]
    number = cluster.command(*command, *f"{arguments} --output_dir {folder}/run".split(), cwd=folder).strip()
    return Job(cluster, number, folder)


ARGUMENTS = "--max_steps 600 --log_every 50 --eval_every 600 --lr_schedule constant"


@pytest.mark.full
def test_job_is_stopped_and_goes_on_by_itself(tmp_path: Path, cluster: Cluster, made_once: Callable[..., Run]) -> None:
    job = submit(cluster, tmp_path, ARGUMENTS)
    metrics = tmp_path / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and '"step": 100,' in metrics.read_text())
    cluster.command("scancel", "--signal=USR1", job.number)
    until(job.is_over, 300)
    assert cluster.state(job.number)["ExitCode"] == "0:0", job.output
    assert "stopped: by SIGUSR1" in job.output and "resumed from" in job.output
    for node in (0, 1):
        assert (tmp_path / f"recipe-{job.number}-node{node}.out").exists()
    assert "2 processes on 2 machines" in job.output
    run = job.run()
    assert run.card["status"] == "done" and run.card["attempt"] == 2
    assert_equal_to_the_last_bit(run, made_once("ddp", DISTURBED, ARGUMENTS))


@pytest.mark.full
def test_srun_starts_a_launcher_on_each_node(
    tmp_path: Path, cluster: Cluster, undisturbed: Callable[[str, str], Run]
) -> None:
    """The command in docs/multi-node.md, without launchers/."""
    config = ROOT / "accelerate_configs" / "multi_node_ddp.yaml"
    launch = f"accelerate launch --config_file {config} --num_processes 2 --machine_rank $SLURM_NODEID"
    launch += f" --main_process_ip 127.0.0.1 --main_process_port {free_port()}"
    launch += f" {ROOT / DISTURBED} {COURSE} --output_dir {tmp_path}/run"
    output = cluster.command(
        "srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit", "bash", "-c", launch, cwd=tmp_path
    )
    assert "2 processes on 2 machines" in output
    assert_equal_to_the_last_bit(Run(0, "", "", tmp_path / "run"), undisturbed("ddp", COURSE))


@pytest.mark.full
def test_time_limit_leads_to_a_checkpoint(tmp_path: Path, cluster: Cluster) -> None:
    job = submit(
        cluster, tmp_path, f"{ARGUMENTS} --max_steps 10000000 --eval_every 10000000", "--time=2", "--signal=USR1@60"
    )
    until(lambda: "resumed from" in job.output, 400)
    assert "stopped: by SIGUSR1" in job.output
    cluster.command("scancel", job.number)
    until(job.is_over, 60)


def test_exit_code_of_the_job_is_that_of_the_recipe(tmp_path: Path, cluster: Cluster) -> None:
    job = submit(cluster, tmp_path, "--learning_rat 1")
    until(job.is_over, 120)
    assert cluster.state(job.number)["ExitCode"] == "2:0", job.output
    assert "error: --learning_rat: no such flag; did you mean --learning_rate?" in job.output
