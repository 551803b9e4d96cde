"""Promise: each script in benchmarks/ runs, so that every table of the documentation can be made again."""

import subprocess
import sys

import pytest

from support.launching import environment
from support.runs import ROOT

SMALLEST = {
    "checkpoint.py": "--megabytes 1 --rounds 1",
    "control_plane.py": "--processes 2 --layers 2",
    "parity_check.py": "--size 10m --config ddp",
    "large_text.py": "--sizes 1 --tokenizers bytes",
    "loop_cost.py": "--steps 20 --rounds 1 --tasks 0",
    "loss_memory.py": "--rounds 1",
    "memory.py": "--config ddp",
    "norms.py": "",
    "preferences_trl.py": "",
    "scaling.py": "--quick",
    "startup.py": "--rounds 1",
}
NEEDS_A_GPU = {"gpt2.py", "gpt2_variants.py", "gpu_goals.py"}  # tests/gpu/ runs the first
PARTS = {"gpt2_loops.py", "llama.py", "scaling_plot.py"}


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(path.name for path in ROOT.glob("benchmarks/*.py")))
def test_benchmark_runs(name: str) -> None:
    if name in NEEDS_A_GPU | PARTS:
        pytest.skip("needs a GPU, or is a part of another script")
    if name == "preferences_trl.py":
        pytest.importorskip("trl")
    command = [sys.executable, str(ROOT / "benchmarks" / name), *SMALLEST[name].split()]
    run = subprocess.run(command, cwd=ROOT, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True)
    assert run.returncode == 0 and "|" in run.stdout, run.stdout + run.stderr
