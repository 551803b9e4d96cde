"""`run(main, Config)`: parses the command line, calls the recipe, and turns errors into exit codes."""

import gc
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from .accidents import advice
from .command_line import ConfigT, parse
from .environment import Environment, rank
from .errors import StoppedError, UsageError, first_line, is_out_of_memory, needs_no_traceback, trace_of
from .failure import Failure, ReportedErrors, end, first_failure, line_of
from .output_streams import Output
from .records.output_dir import checkpoints, fail_after_run
from .records.run_card import read_card
from .stopping import signals

# {package that may be missing: what to install}
PACKAGES = {name: name for name in ("datasets", "pandas")} | {"pycocotools": "'accelerate-recipes[detection]'"}


def run(main: Callable[[ConfigT], Any], config_class: type[ConfigT]) -> NoReturn:
    """Parses the command line, calls `main(config)` and ends the process.

    If `main` returns a function, the main process calls it after all processes have left the run, so that none waits
    for it. By then the memory of training is free.

    Exit codes: 0 done, 2 the user's mistake, 3 a loss or gradient that is not finite, 75 stopped by a
    signal, 130 interrupted, 1 anything else. If several processes of a machine fail, only the first
    prints: it usually causes the other failures.
    """
    sys.stdout, sys.stderr = Output(sys.stdout), Output(sys.stderr)
    if (code_file := Environment.read().code_file) and code_file.parent.is_dir():  # else its launcher is gone
        code_file.touch()  # the file exists: the recipe has started
    # Before the first step there is nothing to save.
    signals.catch(lambda name: end(StoppedError(f"by {name} before the first step: the same command starts again")))
    try:
        record(lambda: _train(main, config_class), error_handler=ReportedErrors())()
    except (Exception, KeyboardInterrupt) as error:
        fail_after_run(first_failure(error))
        end(error)
    except SystemExit as error:
        if error.code not in (None, 0):
            code = error.code if isinstance(error.code, int) else 1
            fail_after_run(Failure(os.getpid(), code, f"error: the recipe called sys.exit({error.code!r})"))
        raise
    sys.exit(0)


def _train(main: Callable[[ConfigT], Any], config_class: type[ConfigT]) -> None:
    try:
        afterwards = main(_after_restart(parse(config_class)))
    except Exception as error:
        line = advice(error)
        if isinstance(error, ModuleNotFoundError) and error.name in PACKAGES:
            line = f"this data needs {error.name}: run pip install {PACKAGES[error.name]}"
        if line is None and is_out_of_memory(error):  # outside `fit`, such as for a model of these sizes
            line = f"out of memory ({first_line(error)}): use smaller sizes, or fewer samples"
        if line is None:
            raise
        raise UsageError(line) from None
    if torch.distributed.is_initialized():
        gc.collect()  # a DDP model that outlives its process group may abort the process
        torch.distributed.destroy_process_group()
    if callable(afterwards) and rank() == 0:
        _call(afterwards)


def _call(afterwards: Callable[[], Any]) -> None:
    """Calls a recipe's function after the run. The run is done, whatever happens here: the exit code stays 0."""
    try:
        afterwards()
    except torch.OutOfMemoryError:
        print("the exported model does not fit into the memory of one GPU: no samples are generated", flush=True)
    except (Exception, KeyboardInterrupt) as error:
        trace = "" if needs_no_traceback(error) else trace_of(error)
        reason = advice(error) or ("interrupted" if isinstance(error, KeyboardInterrupt) else line_of(error))
        sys.stderr.write(f"the run is done, but the recipe failed afterwards: {reason}\n{trace}")


def _after_restart(config: ConfigT) -> ConfigT:
    """The config; after a restart by the launcher (`--max_restarts`), one that resumes from the newest checkpoint."""
    environment = Environment.read()
    if environment.num_restarts == 0 or environment.local_rank is None:  # torchrun sets both
        return config
    # If this launcher's run has not written its run card yet, the folder's content is from another run.
    if environment.num_machines == 1 and read_card(config.output_dir).get("launcher") != os.getppid():
        return config
    resumes = checkpoints(config.output_dir) or config.resume_from_checkpoint is None
    resumed = "latest" if resumes else config.resume_from_checkpoint
    return replace(config, overwrite_output_dir=False, resume_from_checkpoint=resumed)
