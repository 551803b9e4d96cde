"""The script trains, and every config gives the losses of one process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


def losses(*command: str) -> list[float]:
    """Trains 20 steps; returns the printed losses."""
    script = [str(ROOT / "train.py"), "--steps", "20"]
    run = subprocess.run([sys.executable, *command, *script], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return [float(loss) for loss in re.findall(r"^step \d+  loss (\S+)", run.stdout, re.MULTILINE)]


def test_it_trains() -> None:
    found = losses()
    assert len(found) == 20 and found[-1] < found[0]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_config_gives_the_losses_of_one_process(config: Path) -> None:
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config), "--main_process_port", "0"]
    assert losses(*launcher) == pytest.approx(losses(), rel=1e-5)
