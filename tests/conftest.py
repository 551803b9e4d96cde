"""Runs that several tests compare with: made once, whichever of the parallel test processes needs them first."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from support.launching import fork
from support.recipes import DISTURBED
from support.runs import Run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts no process is quick."""
    for item in items:
        if "unit" in item.path.parts:
            item.add_marker(pytest.mark.quick)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[..., Run]:
    """made_once(config, script, arguments, options) -> that run."""
    base = tmp_path_factory.getbasetemp()
    shared: Path = base if worker_id == "master" else base.parent  # pytest-xdist gives each process its own

    def get(config: str, script: str, arguments: str, options: str = "") -> Run:
        key = hashlib.sha256(repr((config, script, arguments, options)).encode()).hexdigest()[:16]
        folder = shared / f"made_once_{key}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                fork(folder.with_suffix(".unfinished") / "run", config, script, arguments, options=options)
                folder.with_suffix(".unfinished").rename(folder)
        return Run(0, "", "", folder / "run")

    return get


@pytest.fixture(scope="session")
def reference(made_once: Callable[..., Run]) -> Callable[..., Run]:
    """reference(script, arguments, options) -> that recipe on one process."""
    return lambda script, arguments, options="": made_once("single", script, arguments, options)


@pytest.fixture(scope="session")
def undisturbed(made_once: Callable[..., Run]) -> Callable[[str, str], Run]:
    """undisturbed(config, arguments) -> the script of faults, without one."""
    return lambda config, arguments: made_once(config, DISTURBED, arguments)
