"""Records of runs for `accelerate-recipes report`, and the page that it makes of them."""

import json
from pathlib import Path
from typing import Any

import plotly.offline

from accelerate_recipes.report import write
from accelerate_recipes.report.run_history import Run, read_runs

COMMAND = "accelerate launch --config_file accelerate_configs/ddp.yaml recipes/mnist.py --max_steps 40 --output_dir x"


def training(step: int, loss: float | None, **others: Any) -> dict[str, Any]:
    return {"step": step, "epoch": step / 10, "train/loss": loss, "samples_per_second": 64.0} | others


def evaluation(step: int, **values: float | None) -> dict[str, Any]:
    return {"step": step} | {f"eval/{name}": value for name, value in values.items()}


def card(**changes: Any) -> dict[str, Any]:
    config = {"batch_size": 64, "log_every": 10, "learning_rate": 0.1, "resume_from_checkpoint": None}
    config |= {"output_dir": "x"} | changes.pop("config", {})
    facts = {"status": "done", "exit_code": 0, "error": None, "attempt": 1, "wall_seconds": 12.5}
    facts |= {"launch_command": COMMAND, "versions": {"torch": "2.13.0"}}
    facts |= {"parallelism": "DDP", "precision": "float32", "num_processes": 2, "num_steps": 40}
    return facts | {"config": config} | changes


RECORDS = [
    training(10, 4.0),
    training(20, 1.0),
    evaluation(20, loss=2.0, accuracy=0.25),
    training(30, 3.0),
    training(40, 2.0),
    evaluation(40, loss=3.0, accuracy=0.75),
]
STOPPED = (
    "stopped: by SIGTERM: step_1/checkpoints/step_00000036 is saved, use --resume_from_checkpoint latest to continue"
)
EARLIER = [
    {"first_step": 0, "status": "running", "exit_code": None, "error": None},
    {"first_step": 0, "status": "stopped", "exit_code": 75, "error": STOPPED},
]


def saved(folder: Path, name: str = "run", records: Any = RECORDS, run_card: Any = None) -> Path:
    """Writes the output folder of a run."""
    run = folder / name
    run.mkdir()
    text = records if isinstance(records, str) else "".join(json.dumps(record) + "\n" for record in records)
    (run / "metrics.jsonl").write_text(text)
    (run / "run.json").write_text(json.dumps(card() if run_card is None else run_card))
    return run


def page_of(*folders: Path) -> str:
    output = folders[0].parent / "report.html"
    write(list(folders), output, False)
    page = output.read_text()
    assert page.count(plotly.offline.get_plotlyjs()) == 1
    return page.replace(plotly.offline.get_plotlyjs(), "")  # for plotly.js itself names many addresses


def only(folder: Path) -> Run:
    (run,) = read_runs([folder])
    return run
