"""Trains models of real size under each config, compares each with one process, and writes docs/large.md.

    make test-large
    PYTHONPATH=tests python tests/large/matrix.py --case llama --config fsdp2 --config tensor_parallel

Each run takes three steps, of which the parity check takes the first two. It must end with the loss, the norm of the
gradient and the weights of one process, or with a line that says at its start why not. Exit code 1 if one does neither:
if the parity check refuses a run, too. Results stay in docs/large.json, so that a part can be run again.
"""

import argparse
import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import yaml
from models import CASES, Case, write_data

from support.runs import Run

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from accelerate_recipes.matrix import CONFIGS, SIZES  # noqa: E402
from accelerate_recipes.verify.certificate import COLUMNS, Row  # noqa: E402
from accelerate_recipes.verify.differences import Floor, Trace, compare, noise_floor, of_all_steps  # noqa: E402
from accelerate_recipes.verify.runs import Finished, Launch  # noqa: E402

RESULTS, PAGE = ROOT / "docs" / "large.json", ROOT / "docs" / "large.md"
STEPS = 3
RATE = COLUMNS.index("learning rate")
# {case, config or both, whose runs may differ: why}
KNOWN: dict[Any, str] = {
    (
        "bert_pairs",
        "tensor_parallel",
    ): "rounding of gradients that nearly cancel, which Adam turns into steps: equal in float64",
    ("translation", "tensor_parallel"): "rounding, which a T5 with random weights amplifies: equal to 1e-13 in float64",
    "resnet": "BatchNorm sees the samples of a micro-batch",
    "deepspeed_zero2_bf16": "DeepSpeed rounds to bf16 at different points than one process",
}
INTRODUCTION = """<!-- Written by tests/large/matrix.py: make test-large -->
# Models of real size

{agree} of {count} runs under a config, with models of 24 million to a billion weights, give the result of one process.
The rows that differ say why. To repeat them:

```text
make test-large
```

Models with random weights train for three steps under each config, with the parity check of two.

| column | meaning |
| --- | --- |
| loss, gradient, weights, eval | the largest relative difference from one process, as in [verify.md](verify.md) |
| result | also compares learning rates. "same, to rounding errors": one process with other micro-batches, or on one \
thread, differs from itself as much, for example in a bias whose gradient is only rounding ([check.md](check.md)) |
| step | the fastest of a run |
| memory | the most that one process held, without mapped files |"""


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        columns: what a certificate says of it.
        is_bad: whether it speaks against one result.
        seconds: of the whole command.
        step_seconds: of the fastest step.
        check_seconds: that the parity check took.
        peak_gb: the most memory of its own that one process held.
        where: date, machine and versions.
    """

    columns: list[str]
    is_bad: bool
    seconds: float
    step_seconds: float | None
    check_seconds: float | None
    peak_gb: float
    where: str


class Peak(threading.Thread):
    """Watches the memory of the processes that this one starts."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.gigabytes, self._ended = 0.0, threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.1):
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    memory = child.memory_info()
                    self.gigabytes = max(self.gigabytes, (memory.rss - memory.shared) / 1e9)

    def __enter__(self) -> "Peak":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self.join()


def measured(launch: Launch, folder: Path) -> tuple[Finished, float, float]:
    """(the run, its seconds, the peak memory of a process in GB)"""
    started = time.monotonic()
    with Peak() as peak:
        run = launch.run(folder)
    return run, time.monotonic() - started, peak.gigabytes


def where() -> str:
    """Date, machine and versions."""
    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
    versions = [f"{name} {version(name)}" for name in ("torch", "accelerate", "transformers", "deepspeed")]
    return ", ".join([str(datetime.date.today()), f"{os.cpu_count()} cores", memory, "no GPU", *versions])


def cells(name: str, case: Case, configs: list[str], scratch: Path) -> Iterator[tuple[str, Cell]]:
    """Runs a case in one process and under the configs. Yields (config, cell) as each run ends, and prints a line."""
    model = scratch / "model"
    if case.write is not None:
        case.write(model)
    write_data(scratch / "data")
    shared = f"--max_steps {STEPS} --log_every 1 --warmup_steps 0 --learning_rate 1e-4"
    flags = f"{case.flags.format(data=scratch / 'data', model=model)} {shared}".split()
    references: dict[bool, tuple[Trace, Floor]] = {}  # {in bf16: (one process, how far rounding goes)}
    for config in ["single", *configs]:
        path = ROOT / "accelerate_configs" / f"{config}.yaml"
        in_bf16 = yaml.safe_load(path.read_text())["mixed_precision"] == "bf16"
        launch = Launch(ROOT / case.recipe, path, [*flags, *SIZES.get(config, [])])
        run, seconds, peak = measured(launch, scratch / config)
        row, step = Row(config, None, refusal=run.refusal, failure=run.failure), None
        if run.is_done:
            if in_bf16 not in references:
                references[in_bf16] = _references(launch, run, config, in_bf16, scratch)
            row = Row(config, run.card["num_processes"], compare(run.trace, *references[in_bf16]))
            rates = Run(0, "", "", run.folder).column("samples_per_second")
            step = run.card["config"]["batch_size"] / max(rates)
        columns, reasons = row.cells, [KNOWN.get(key) for key in ((name, config), name, config)]
        known = next(filter(None, reasons), None) if row.difference is not None else None
        if known is not None and row.is_bad:
            columns[-1] += f" (known: {known})"
        # A case that one process refuses has compared nothing.
        is_bad = (row.is_bad and known is None) or (config == "single" and not run.is_done)
        check = run.card.get("check_seconds")
        print(name, *columns, f"{seconds:.0f} s", f"{peak:.2f} GB", flush=True)
        yield config, Cell(columns, is_bad, seconds, step, check, peak, where())
        if is_bad and config == "single":
            break


def _references(launch: Launch, run: Finished, config: str, in_bf16: bool, scratch: Path) -> tuple[Trace, Floor]:
    """One process in this precision, and with other micro-batches or one thread: what differs there is rounding."""
    single = Launch(launch.script, ROOT / "accelerate_configs" / "single.yaml", launch.flags)
    if in_bf16:
        single = Launch(single.script, single.config, single.flags, ["--mixed_precision", "bf16"])
    reference = run if config == "single" else single.run(scratch / "single_bf16")
    floors = [single.run(scratch / f"floor_{in_bf16}", "--micro_batch_size", "2")]
    os.environ["OMP_NUM_THREADS"] = "1"  # as each of two processes on two cores has: sums have another order
    try:
        floors.append(single.run(scratch / f"one_thread_{in_bf16}", "--micro_batch_size", "4"))
    finally:
        del os.environ["OMP_NUM_THREADS"]
    found = [noise_floor(floor.trace, reference.trace) for floor in floors if floor.is_done]
    return reference.trace, of_all_steps(*found)


def page(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """docs/large.md."""
    rows = [cell["columns"] for found in results.values() for cell in found.values()]
    verdicts = [row[-1] for row in rows if row[0] != "single" and not row[-1].startswith("not supported")]
    agree = sum(not verdict.startswith("DIFFERS") for verdict in verdicts)
    lines = [INTRODUCTION.format(agree=agree, count=len(verdicts))]
    machines = {machine for found in results.values() for machine in _dates(found)}
    lines += ["", f"All ran on {machines.copy().pop()}."] if len(machines) == 1 else []
    for name, found in results.items():
        case = CASES[name]
        places = [", ".join(days) + f": {machine}" * (len(machines) > 1) for machine, days in _dates(found).items()]
        lines += ["", f"## {case.title}: {Path(case.recipe).name}", "", "; ".join(places), ""]
        lines.append(f"| {' | '.join((*COLUMNS[:RATE], 'result', 'command', 'step', 'check', 'memory'))} |")
        lines.append(f"| --- |{' ---: |' * (RATE - 1)} --- |{' ---: |' * 4}")
        for cell in found.values():
            *numbers, rate, result = cell["columns"]
            result += "; learning rates differ" * (rate not in ("equal", "–"))
            times = [_seconds(cell[key]) for key in ("seconds", "step_seconds", "check_seconds")]
            columns = [*numbers, result, *times, f"{cell['peak_gb']:.2f} GB"]
            lines.append(f"| {' | '.join(column.replace('|', '/') for column in columns)} |")
    return "\n".join(lines) + "\n"


def _dates(found: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """{machine and versions: the days of the runs of a case there}"""
    dates: dict[str, set[str]] = {}
    for cell in found.values():
        date, _, machine = cell["where"].partition(", ")
        dates.setdefault(machine, set()).add(date)
    return {machine: sorted(days) for machine, days in dates.items()}


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def _kept() -> dict[str, dict[str, dict[str, Any]]]:
    """The results of earlier runs, without cells that another version of this script wrote."""
    content = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    names = {field.name for field in fields(Cell)}
    cells = {
        case: {name: cell for name, cell in found.items() if cell.keys() == names} for case, found in content.items()
    }
    return {case: found for case, found in cells.items() if found}


def main() -> int:
    """Runs the chosen cells and writes the page. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="only these")
    parser.add_argument("--config", action="append", choices=CONFIGS, help="only these")
    arguments = parser.parse_args()
    results = _kept()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    is_bad = False
    for name in arguments.case or CASES:
        configs = arguments.config or CASES[name].configs or CONFIGS
        with TemporaryDirectory(prefix="large_") as scratch:
            for config, cell in cells(name, CASES[name], configs, Path(scratch)):
                is_bad |= cell.is_bad
                results.setdefault(name, {})[config] = asdict(cell)
                # After each run: the runs of a case of a billion weights take half an hour.
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
                PAGE.write_text(page({name: results[name] for name in CASES if name in results}))
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
