"""Runs a recipe up to its call of `fit` in a separate process, and calls a function with the arguments."""

import importlib
import os
import pickle
import runpy
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import psutil

from accelerate_recipes.common.errors import UsageError

NEEDED = ("accelerator", "model", "optimizer", "forward_step", "train_set", "eval_set", "config")


def at_fit(
    script: Path,
    flags: Sequence[str],
    function: str,
    question: Any,
    variables: dict[str, str] | None = None,
    on_meta: bool = False,
) -> Any:
    """Calls a function with the arguments that a recipe passes to `fit`, and returns its answer.

    The recipe runs as one process on the CPU. It trains nothing and leaves no files.

    Args:
        function: "module:name" of a function that takes the question and the arguments of `fit`. Its answer is pickled.
        question: anything that can be pickled.
        on_meta: build models without memory: their weights have no values. If the recipe reads values, it runs again
            with real weights, if they fit into free memory.

    Raises:
        UsageError: the recipe ended before it called `fit`; the message is the last line that it printed.
    """
    with TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        result.with_name("question").write_bytes(pickle.dumps(question))
        # Without -m, which would look for the package in the current folder first.
        start = f"import sys; sys.path.append({str(Path(__file__).parents[1])!r}); from {__name__} import main; main()"
        command = [sys.executable, "-P", "-c", start, function, "meta" * on_meta, str(result)]
        command += [str(script), *flags, "--output_dir", str(Path(folder) / "run")]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"} | (variables or {})
        run = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", errors="replace")
        if not result.exists():
            said = run.stderr.strip() or run.stdout.strip() * (run.returncode != 0) or "it ended without an error"
            why = f"{script} stops before it calls fit: {said.splitlines()[-1]}"
            if (made := Path(f"{result}.bytes")).exists():
                size = int(made.read_text())
                if size < psutil.virtual_memory().available / 2:  # a recipe may load a copy
                    return at_fit(script, flags, function, question, variables)
                why += f" (plan builds weights without values; real ones, {size / 1e9:.3g} GB, do not fit here)"
            raise UsageError(why)
        return pickle.loads(result.read_bytes())


def main() -> None:
    """Runs a recipe up to `fit`, and calls the function there. This is all that the process does."""
    function, weights, result, script, *flags = sys.argv[1:]
    module, name = function.split(":")

    import accelerate_recipes.common.launch.start as launch
    import accelerate_recipes.common.step.refusals as refusals
    from accelerate_recipes.common.stopping import signals

    building = ExitStack()

    def answer(model: Any, optimizer: Any, given: dict[str, Any]) -> NoReturn:
        building.close()
        signals.release()  # `start` caught them for a run that stops at its next step
        vars(refusals)["check_given"] = check_given
        question = pickle.loads(Path(result).with_name("question").read_bytes())
        asked = getattr(importlib.import_module(module), name)
        Path(result).write_bytes(pickle.dumps(asked(question, *(given[name] for name in NEEDED), **given["options"])))
        os._exit(0)

    # `fit` calls this function first; so does a project's own copy of the loop.
    check_given, vars(refusals)["check_given"] = refusals.check_given, answer
    begin = launch.start  # called below for one process, which shares nothing
    vars(launch)["start"] = lambda config: begin(replace(config, pipeline_stages=1, expert_parallel=1))
    if weights:
        from accelerate_recipes.plan.fakes import weights_on_meta

        building.enter_context(weights_on_meta(Path(f"{result}.bytes")))
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).resolve().parent))  # as python does for a script
    runpy.run_path(script, run_name="__main__")
