"""The script trains, and every config gives the result of one process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
# Flags that a config needs for this script.
FLAGS = <<flags_of_configs>>
STEPS = "--max_steps 20 --log_every 1 --eval_every 10"
# bf16 keeps 8 bits, and configs round at different places.
TOLERANCE = {"no": 1e-5, "bf16": 5e-3}
LAUNCH = ["-m", "accelerate.commands.launch", "--num_machines", "1", "--machine_rank", "0"]
LAUNCH += ["--rdzv_backend", "static", "--main_process_port", "0", "--config_file"]


def train(output_dir: Path, flags: str, *launcher: str, precision: str = "no") -> list[dict]:
    """Trains in a new folder, without a launcher in one process; returns the records."""
    command = [sys.executable, *launcher, str(ROOT / "train.py"), *flags.split(), "--output_dir", str(output_dir)]
    variables = os.environ if launcher else os.environ | {"ACCELERATE_MIXED_PRECISION": precision}
    run = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads((output_dir / "run.json").read_text())["status"] == "done"
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def test_it_trains(tmp_path: Path) -> None:
    config = CONFIGS[0]
    train(tmp_path / "run", f"--max_steps 2 {FLAGS.get(config.stem, '')}", *LAUNCH, str(config))
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_config_gives_the_result_of_one_process(tmp_path: Path, config: Path) -> None:
    precision = re.search(r"^mixed_precision: '?(\w+)", config.read_text(), re.MULTILINE)[1].replace("fp16", "no")
    flags = FLAGS.get(config.stem, "")
    alone = flags.replace("--pipeline_stages 2", "")
    expected = train(tmp_path / "one", f"{STEPS} {alone}", precision=precision)
    records = train(tmp_path / "run", f"{STEPS} {flags}", *LAUNCH, str(config))
    assert len(records) == len(expected)
    for record, other in zip(records, expected):
        assert record.get("learning_rate") == other.get("learning_rate")
        for name in {"train/loss", "eval/loss"} & other.keys():
            assert record[name] == pytest.approx(other[name], rel=TOLERANCE[precision])
