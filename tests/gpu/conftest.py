"""The device of the GPU tests, and their report."""

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from accelerate_recipes.common.environment import versions
from accelerate_recipes.common.records.hardware import hardware

# Runs the tests on the CPU instead, to find mistakes in the tests on a machine without a GPU.
REHEARSES = os.environ.get("ACCELERATE_RECIPES_REHEARSE_GPU_TESTS") == "1"
OUTCOMES: list[dict[str, Any]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report", type=Path, help="file for versions, figures and failures, as JSON")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome == "skipped":
        outcome = {
            "test": report.nodeid.split("::")[-1],
            "outcome": report.outcome,
            "seconds": round(report.duration, 1),
        }
        failure = {"failure": report.longreprtext[-4000:]} if report.failed else {}
        OUTCOMES.append(outcome | dict(report.user_properties) | failure)


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--report")
    if path is not None and not hasattr(
        session.config, "workerinput"
    ):  # with pytest-xdist only the main process writes
        facts = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "rehearsal": REHEARSES,
            "platform": platform.platform(),
            "hardware": hardware(),
            "versions": versions("torch", "accelerate", "transformers", "datasets", "deepspeed", "triton"),
        }
        path.write_text(json.dumps(facts | {"tests": OUTCOMES}, indent=2) + "\n")


@pytest.fixture(scope="session")
def on_gpu() -> dict[str, str]:
    """Environment variables of a run on the GPU."""
    if REHEARSES:
        return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        if item.get_closest_marker("gpu") is None:
            continue  # pytest hands the tests of all folders to this function
        if not torch.cuda.is_available() and not (REHEARSES and item.get_closest_marker("needs_gpu") is None):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
