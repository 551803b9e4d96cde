"""Runs that several tests compare with: made once, whichever of the parallel test processes needs them first."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from launching import Run, launch


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[..., Run]:
    """reference(script, arguments, options) -> that recipe on one process, run once."""
    base = tmp_path_factory.getbasetemp()
    shared: Path = base if worker_id == "master" else base.parent  # pytest-xdist gives each process its own

    def get(script: str, arguments: str, options: str = "") -> Run:
        key = hashlib.sha256(repr((script, arguments, options)).encode()).hexdigest()[:16]
        folder = shared / f"reference_{key}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                launch(folder.with_suffix(".unfinished") / "run", "single", script, arguments, options=options)
                folder.with_suffix(".unfinished").rename(folder)
        return Run(0, "", "", folder / "run")

    return get
