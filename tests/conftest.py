"""Reference runs that several tests share. The first of the parallel test processes that needs a run makes it."""

import gc
import hashlib
import os
import random
import signal
import zlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from support.launching import fork
from support.recipes import DISTURBED
from support.runs import Run

# Before torch is imported: several tests share the cores, so threads that wait for others must not keep them busy.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # else a unit test that looks for a model on the Hub waits a minute

MANY_CASES = 3

# A shell lets a command in the background ignore Ctrl-C, and all processes that the command starts would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A session in which every test is skipped has shown nothing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and reporter.stats.get("skipped") and not reporter.stats.get("passed"):
        session.exitstatus = session.exitstatus or 1


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Marks the unit tests as quick, because they start no processes. Of another test with many cases, `make test` runs
    one in 16, and at least one, drawn by a checksum of their names; `make test-full` runs all, for hours."""

    def has(item: pytest.Function, *names: str) -> bool:
        return any(item.get_closest_marker(name) for name in names)

    cases = defaultdict[tuple[Path, str], list[pytest.Function]](list)
    for item in items:
        if "unit" in item.path.parts:
            item.add_marker(pytest.mark.quick)
        if not has(item, "full", "large", "gpu", "quick", "every_case"):
            cases[item.path, item.originalname].append(item)
    for of_test in cases.values():
        number = len(of_test) if len(of_test) <= MANY_CASES else max(1, len(of_test) // 16)
        for item in sorted(of_test, key=lambda item: zlib.crc32(item.name.encode()))[number:]:
            item.add_marker(pytest.mark.full)
    for item in items:
        if has(item, "full", "large"):
            item.add_marker(pytest.mark.timeout(0))


def pytest_collection_finish() -> None:
    """Takes the imported objects, a million, out of each garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test draws the same random numbers, whichever tests ran before it in its process."""
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[..., Run]:
    """made_once(config, script, arguments, options) -> the finished run, made at the first call."""
    base = tmp_path_factory.getbasetemp()
    shared: Path = base if worker_id == "master" else base.parent  # pytest-xdist: one folder per process

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
    """reference(script, arguments, options) -> the run of that recipe on one process."""
    return lambda script, arguments, options="": made_once("single", script, arguments, options)


@pytest.fixture(scope="session")
def undisturbed(made_once: Callable[..., Run]) -> Callable[[str, str], Run]:
    """undisturbed(config, arguments) -> the run of disturbed.py without a fault."""
    return lambda config, arguments: made_once(config, DISTURBED, arguments)
