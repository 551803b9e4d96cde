"""Runs a recipe up to its call of `fit`, in a process of its own, and asks a function about the arguments."""

import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from accelerate_recipes.bundle import ROOT
from accelerate_recipes.errors import UsageError

QUESTION = "ACCELERATE_RECIPES_QUESTION"  # variable for what a function is asked, as JSON


def at_fit(
    script: Path | None,
    flags: Sequence[str],
    function: str,
    variables: dict[str, str] | None = None,
    on_meta: bool = False,
) -> Any:
    """What a function says about the arguments of a recipe's call of `fit`.

    The recipe runs as one process on the CPU. It trains nothing and leaves no files.

    Args:
        script: the recipe; with None, the function is called without arguments.
        flags: its flags.
        function: "module:name" of a function that takes the arguments of `fit` and returns what JSON can hold.
        variables: of its environment.
        on_meta: build models without memory: their weights have no values.

    Raises:
        UsageError: the recipe ended before it called `fit`; the message is the last line that it printed.
    """
    with TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", __spec__.name, function, "meta" * on_meta, str(result)]
        command += [str(script or ""), *flags, "--output_dir", str(Path(folder) / "run")]
        run = subprocess.run(
            command,
            env=environment(script) | (variables or {}),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
        if not result.exists():
            lines = (run.stderr.strip() or run.stdout.strip() or "it printed nothing").splitlines()
            raise UsageError(f"{script or 'the loop'} does not get to its call of fit: {lines[-1]}")
        return json.loads(result.read_text(encoding="utf-8"))


def environment(script: Path | None) -> dict[str, str]:
    """The variables for a run of a recipe on the CPU. A recipe of the installed package finds `common` beside it."""
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    if script is None or script.resolve().is_relative_to(ROOT):
        variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return variables


def _main(function: str, weights: str, result: str, script: str, *flags: str) -> None:
    module, name = function.split(":")
    if not script:
        Path(result).write_text(json.dumps(getattr(importlib.import_module(module), name)()), encoding="utf-8")
        return
    sys.path[0] = str(Path(script).resolve().parent)  # as python sets it for a script
    common, loop = importlib.import_module("common"), importlib.import_module("common.loop")  # the recipe's own

    building = ExitStack()

    def answer(*arguments: Any, **keywords: Any) -> NoReturn:
        building.close()
        Path(result).write_text(
            json.dumps(getattr(importlib.import_module(module), name)(*arguments, **keywords)), encoding="utf-8"
        )
        os._exit(0)

    def start(config: Any) -> Any:
        sizes = [name for name in ("pipeline_stages", "expert_parallel") if hasattr(config, name)]
        return begin(replace(config, **dict.fromkeys(sizes, 1)))  # one process shares nothing

    begin = common.start
    vars(common)["fit"] = vars(loop)["fit"] = answer
    vars(common)["start"] = start
    sys.argv = [script, *flags]
    if weights:
        from accelerate_recipes.plan.fakes import weights_on_meta  # here, because it imports torch

        building.enter_context(weights_on_meta())
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _main(*sys.argv[1:])
