"""Runs that several tests compare with: made once per session."""

from collections.abc import Callable
from pathlib import Path

import pytest

from launching import Run, launch


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """reference(script, arguments, options) -> that recipe on one process, run once."""
    runs: dict[tuple, Run] = {}

    def get(script: str, arguments: str, options: str = "") -> Run:
        key = (script, arguments, options)
        if key not in runs:
            output_dir: Path = tmp_path_factory.mktemp("reference") / "run"
            runs[key] = launch(output_dir, "single", script, arguments, options=options)
        return runs[key]

    return get
