"""A trace of a few steps from torch's profiler."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.utils import ProfileKwargs

from ..errors import UsageError
from ..plan import Plan

WAIT, WARMUP, ACTIVE = 2, 1, 3  # steps; the first ones allocate and compile, the profiler's warm-up takes one


@contextmanager
def profile(accelerator: Accelerator, plan: Plan, num_steps: int) -> Iterator[Callable[[], None]]:
    """With `--profile`, writes a trace of 3 steps for each process.

    The file is `<output_dir>/profile/rank_<number>.json`, for chrome://tracing or https://ui.perfetto.dev.

    Args:
        accelerator: from `start(config)`.
        plan: the run's plan.
        num_steps: optimizer steps that the run will take.

    Yields:
        A function to call after each step.

    Raises:
        UsageError: too few steps for a trace.
    """
    if not plan.config.profile:
        yield lambda: None
        return
    if num_steps < WAIT + WARMUP + ACTIVE:
        raise UsageError(
            f"--profile needs {WAIT + WARMUP + ACTIVE} steps, this run has {num_steps}: type a larger --max_steps"
        )
    folder = plan.config.output_dir / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{accelerator.process_index}.json"
    settings = ProfileKwargs(
        schedule_option={"wait": WAIT, "warmup": WARMUP, "active": ACTIVE, "repeat": 1},
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    )
    with accelerator.profile(settings) as profiler:
        yield profiler.step
