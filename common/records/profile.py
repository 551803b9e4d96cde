"""A trace of a few steps, by torch's profiler."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.utils import ProfileKwargs

from common.errors import UsageError
from common.plan import Plan

WAIT, WARMUP, ACTIVE = 2, 1, 3  # steps: the first ones allocate and compile, and the profiler itself needs one


@contextmanager
def profile(accelerator: Accelerator, plan: Plan, num_steps: int) -> Iterator[Callable[[], None]]:
    """Writes `<output_dir>/profile/rank_<number>.json` for each process where `--profile` was given:
    a trace of 3 steps in Chrome's format, for chrome://tracing or https://ui.perfetto.dev.

    Args:
        accelerator: from `start(config)`.
        plan: of the run.
        num_steps: optimizer steps that will be taken.

    Yields:
        What to call after each step.

    Raises:
        UsageError: too few steps for a trace.
    """
    if not plan.config.profile:
        yield lambda: None
        return
    if num_steps < WAIT + WARMUP + ACTIVE:
        raise UsageError(f"--profile needs {WAIT + WARMUP + ACTIVE} steps, there are {num_steps}: type --max_steps")
    folder = plan.config.output_dir / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{accelerator.process_index}.json"
    settings = ProfileKwargs(
        schedule_option={"wait": WAIT, "warmup": WARMUP, "active": ACTIVE, "repeat": 1},
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    )
    with accelerator.profile(settings) as profiler:
        yield profiler.step
