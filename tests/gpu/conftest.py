"""The device of the GPU tests, and their report."""

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from accelerate_recipes.common.environment import versions
from accelerate_recipes.common.records.run_card import hardware

# Runs the tests on the CPU instead, to find mistakes in the tests on a machine without a GPU.
REHEARSES = os.environ.get("ACCELERATE_RECIPES_REHEARSE_GPU_TESTS") == "1"


class Report:
    """A file of JSON lines: the versions first, and then each outcome as it comes, so that a call that is killed leaves
    what it found."""

    def __init__(self, path: Path):
        self.path = path
        facts = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "rehearsal": REHEARSES,
            "platform": platform.platform(),
            "hardware": hardware(),
            "versions": versions("torch", "accelerate", "transformers", "datasets", "deepspeed", "triton"),
        }
        self.add(facts)

    def add(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            name, seconds = report.nodeid.split("::")[-1], round(report.duration, 1)
            outcome = {"test": name, "outcome": report.outcome, "seconds": seconds, **dict(report.user_properties)}
            self.add(outcome | ({"failure": report.longreprtext[-4000:]} if report.failed else {}))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--report", type=Path, help="file for versions, figures and failures, as JSON lines; it is added to"
    )
    parser.addoption(
        "--part", choices=("1", "2"), help="the tests that compare each recipe with the CPU, or the others"
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--report", None)
    if path is not None and not hasattr(config, "workerinput"):  # with pytest-xdist only the main process writes
        config.pluginmanager.register(Report(path))


@pytest.fixture(scope="session")
def on_gpu() -> dict[str, str]:
    """Environment variables of a run on the GPU."""
    if REHEARSES:
        return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    if part := config.getoption("--part", None):
        chosen = [item for item in items if (item.get_closest_marker("each_recipe") is None) == (part == "2")]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
    for item in items:
        if item.get_closest_marker("gpu") is None:
            continue  # pytest hands the tests of all folders to this function
        if not torch.cuda.is_available() and not (REHEARSES and item.get_closest_marker("needs_gpu") is None):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
