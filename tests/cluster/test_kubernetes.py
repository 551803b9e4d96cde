"""Promise: a cluster accepts the manifests, and their commands train with the variables that the cluster sets."""

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

from support.hosts import ADDRESSES, REASON, Hosts, two_hosts
from support.launching import fork
from support.recipes import MNIST
from support.runs import ROOT, largest_difference

FOLDER = ROOT / "launchers" / "kubernetes"
NAME = "recipe-0.recipe"  # name of machine 0 in the headless service


def job_and_service() -> dict[str, dict]:
    """{kind: manifest}"""
    manifests = yaml.safe_load_all((FOLDER / "job" / "job.yaml").read_text())
    return {manifest["kind"]: manifest for manifest in manifests}


def test_manifests_are_valid() -> None:
    for manifest in job_and_service().values():
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    train_job = yaml.safe_load((FOLDER / "trainjob.yaml").read_text())
    model = TrainerV1alpha1TrainJob.from_dict(train_job)
    # The model silently drops fields that the API does not have.
    assert model.to_dict() == train_job


def test_pods_find_each_other() -> None:
    manifests = job_and_service()
    service, job = manifests["Service"], manifests["Job"]
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert f"{job['metadata']['name']}-0.{service['metadata']['name']}" == NAME == command[7]
    machines = int(command[command.index("--num_machines") + 1])
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == machines
    gpus = job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert int(command[command.index("--num_processes") + 1]) == machines * int(gpus)


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="no kubectl (from kubernetes.io/docs/tasks/tools: Debian's is too old)"
)
def test_overlay_for_hami_is_one_process_on_a_part_of_a_gpu() -> None:
    command = ["kubectl", "kustomize", str(FOLDER / "hami")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    job = next(manifest for manifest in yaml.safe_load_all(text) if manifest["kind"] == "Job")
    kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
    container = job["spec"]["template"]["spec"]["containers"][0]
    words = " ".join(container["command"])
    assert "--num_machines 1 " in words and "single.yaml --num_processes 1 recipes/mnist.py" in words
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "8000", "nvidia.com/gpucores": "30"}
    assert container["resources"]["limits"] == limits


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts(names={NAME: ADDRESSES[0]}) as made:
        yield made


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.xdist_group("kubernetes")
@pytest.mark.full
@pytest.mark.parametrize("kind", ["Job", "TrainJob"])
def test_what_a_pod_runs_trains(tmp_path: Path, hosts: Hosts, kind: str) -> None:
    """Runs one process per pod for 6 steps, instead of 8 GPUs and the whole training."""
    commands = []
    for machine in (0, 1):
        if kind == "Job":
            variables = {"JOB_COMPLETION_INDEX": str(machine)}
            command = job_and_service()["Job"]["spec"]["template"]["spec"]["containers"][0]["command"]
            command = [word.replace("$(JOB_COMPLETION_INDEX)", str(machine)) for word in command]
            command[command.index("16")] = "2"
        else:
            variables = {"NNODES": 2, "NPROC_PER_NODE": 1, "NODE_RANK": machine, "MASTER_ADDR": NAME}
            variables = {f"PET_{name}": str(value) for name, value in (variables | {"MASTER_PORT": 29500}).items()}
            command = yaml.safe_load((FOLDER / "trainjob.yaml").read_text())["spec"]["trainer"]["command"]
        replaced = {"/workspace": str(ROOT), "/outputs": str(tmp_path), "/mnist.py": "/mnist.py --max_steps 6"}
        words = []
        for word in command:
            for old, new in replaced.items():
                word = word.replace(old, new)
            words += word.split() if kind == "Job" else [word]
        commands.append(["env", *(f"{name}={value}" for name, value in variables.items()), *words])
    runs = hosts.run(commands, [tmp_path / "mnist"] * 2, ROOT, OMP_NUM_THREADS="1")
    assert [run.exit_code for run in runs] == [0, 0], [run.stderr for run in runs]
    assert "2 processes on 2 machines, DDP" in runs[0].stdout
    alone = fork(tmp_path / "alone", "single", MNIST, "--max_steps 6")
    assert largest_difference(runs[0].column("eval/loss"), alone.column("eval/loss")) <= 1e-5


def test_image_has_what_the_pods_run() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    extras = re.search(r"pip install .*'\.\[([\w,]+)\]'", text)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras and {*extras[1].split(",")} <= {*known}
    assert "WORKDIR /workspace\nCOPY . .\n" in text
    for manifest in ("job/job.yaml", "trainjob.yaml"):
        assert "/workspace" in (FOLDER / manifest).read_text()
    assert os.access(ROOT / "launchers" / "node.py", os.X_OK)
