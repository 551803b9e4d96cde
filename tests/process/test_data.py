"""Promise: embedded data and files from the Hub load and train; a run fits its terminal and its cores."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import numpy
import pytest

from accelerate_recipes.common.tasks.vision.images import load_images
from support.launching import ACCELERATE_LAUNCH, CONFIGS, environment, execute, fork
from support.recipes import MNIST
from support.runs import ROOT

REAL_DATA = os.environ.get("ACCELERATE_RECIPES_DATA")
needs_real_data = pytest.mark.skipif(not REAL_DATA, reason="needs ACCELERATE_RECIPES_DATA, a folder of real data")


def write_parquet(folder: Path, shape: tuple[int, ...], splits: dict[str, int]) -> None:
    """Writes files like ylecun/mnist on the Hub: mnist/train-00000-of-00001.parquet, with columns image and label."""
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as ImageFeature
    from PIL import Image

    (folder / "mnist").mkdir(parents=True)
    features = Features({"image": ImageFeature(), "label": ClassLabel(num_classes=4)})
    for split, size in splits.items():
        images = [Image.fromarray(numpy.full(shape, 60 * (i % 4), numpy.uint8)) for i in range(size)]
        rows = {"image": images, "label": [i % 4 for i in range(size)]}
        path = folder / "mnist" / f"{split}-00000-of-00001.parquet"
        Dataset.from_dict(rows, features=features).to_parquet(str(path))


@pytest.mark.parametrize(("shape", "channels"), [((12, 12, 3), 3), pytest.param((12, 12), 1, marks=pytest.mark.full)])
def test_parquet_files_train_on_two_processes(tmp_path: Path, shape: tuple[int, ...], channels: int) -> None:
    write_parquet(tmp_path / "data", shape, {"train": 256, "test": 50})
    env = {"HF_HOME": str(tmp_path / "cache")}
    arguments = f"--data {tmp_path / 'data'} --epochs 20 --batch_size 32"
    run = fork(tmp_path / "run", "ddp", MNIST, arguments, env=env)
    assert run.column("eval/accuracy")[-1] == 1.0  # the brightness gives the class
    assert run.weights["stem.weight"].shape[1] == channels


def test_set_of_one_split_holds_a_fifth_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    write_parquet(tmp_path / "data", (12, 12), {"train": 50})
    train_set, eval_set = load_images(str(tmp_path / "data"))
    assert (len(train_set), len(eval_set), train_set.num_classes) == (40, 10, 4)


def test_digits_reach_98_percent(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", MNIST)
    assert run.column("eval/accuracy")[-1] >= 0.98
    assert run.stdout.startswith("2 processes on 1 machine, DDP, float32, batch 64 = 2 × 32")


def test_terminal_shows_a_progress_bar(tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 160))
    command = [sys.executable, str(ROOT / MNIST), "--max_steps", "10"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=end, stderr=end) as process:
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # raised when the terminal is closed
            while piece := os.read(terminal, 4096):
                shown += piece
    os.close(terminal)
    assert process.returncode == 0
    assert re.search(r"10/10 \[\d\d:\d\d<\d\d:\d\d, .*step.*, loss \S+, [\d,.]+ samples/s\]", shown.decode())
    assert "eval/accuracy" in shown.decode()


def test_cores_are_divided_among_processes_unless_the_user_chose(tmp_path: Path) -> None:
    """Launchers set OMP_NUM_THREADS=1 for each process, which leaves cores idle."""
    cores = len(os.sched_getaffinity(0))
    script = tmp_path / "threads.py"
    script.write_text(
        "import torch\n"
        "from accelerate_recipes import RunConfig, run, start\n"
        "def main(config):\n"
        "    start(config).print('threads', torch.get_num_threads())\n"
        "run(main, RunConfig)\n"
    )
    chosen = {"OMP_NUM_THREADS": "1"}
    cases = [("single", {}, cores), ("single", chosen, 1)] + [("ddp", {}, cores // 2)] * (cores >= 4)
    for config, env, expected in cases:
        command = [*ACCELERATE_LAUNCH, "--config_file", str(CONFIGS / f"{config}.yaml"), str(script)]
        run = execute(command, tmp_path, tmp_path / "run", env)
        assert f"threads {expected}\n" in run.stdout, run.stderr


@needs_real_data
@pytest.mark.full
def test_real_mnist_reaches_99_2_percent(tmp_path: Path) -> None:
    command = re.search(r"recipes/mnist.py (--data path/to/mnist .*)", (ROOT / "docs" / "recipes.md").read_text())[1]
    arguments = command.replace("path/to/mnist", f"{REAL_DATA}/mnist")
    run = fork(tmp_path / "run", "ddp", MNIST, arguments)
    assert run.column("eval/accuracy")[-1] >= 0.992
